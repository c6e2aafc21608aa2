//! How long an importer waits for exporters that do not answer.
//!
//! Whoever opens memory is blocked meanwhile: mostly UCX's worker. Forged keys can name any number of exporters that
//! never answer. So every wait in vain, for any exporter, halves the next ones for a while, down to what a broker that
//! works needs to answer.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Identity;
use super::no_lease::NoLease;

/// The longest wait: longer than a broker's thread waits for its turn on a busy machine, and than it keeps
/// connections that ask for nothing.
const LONGEST: Duration = Duration::from_secs(1);
/// The shortest, 31 ms.
const MAX_HALVINGS: usize = 5;
/// How long an exporter that was waited for in vain is not asked again.
const REMEMBERED: Duration = Duration::from_secs(5);
/// Most exporters that are remembered.
const MAX_REMEMBERED: usize = 64;

/// Who was waited for in vain of late, and why.
#[derive(Debug, Default)]
pub(super) struct Patience(VecDeque<(Identity, Instant, NoLease)>);

impl Patience {
    /// How long to wait for an answer of this exporter. The error: this one was waited for in vain, and is not asked again
    /// yet.
    pub(super) fn with(&mut self, exporter: &Identity, now: Instant) -> Result<Duration, NoLease> {
        self.0.retain(|(_, since, _)| now < *since + REMEMBERED);
        match self.0.iter().find(|(silent, ..)| silent == exporter) {
            Some((.., why)) => Err(why.clone()),
            None => Ok(LONGEST / (1 << self.0.len().min(MAX_HALVINGS))),
        }
    }

    /// This exporter was waited for in vain.
    pub(super) fn was_in_vain(&mut self, exporter: Identity, now: Instant, why: &NoLease) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((exporter, now, why.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exporters() -> impl Iterator<Item = Identity> {
        let own = *Identity::own().unwrap();
        (0_u32..).map(move |number| Identity { start: own.start.wrapping_add(number), ..own })
    }

    #[test]
    fn an_exporter_that_did_not_answer_is_not_asked_again_for_five_seconds() {
        let (mut patience, start) = (Patience::default(), Instant::now());
        let [silent, crowded, other] = exporters().take(3).collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(patience.with(&silent, start), Ok(LONGEST));
        patience.was_in_vain(silent, start, &NoLease::Silent);
        patience.was_in_vain(crowded, start + LONGEST, &NoLease::Crowded);
        let before = start + REMEMBERED - Duration::from_millis(1);
        assert_eq!(patience.with(&silent, before), Err(NoLease::Silent));
        assert_eq!(patience.with(&crowded, before), Err(NoLease::Crowded));
        assert_eq!(patience.with(&other, before), Ok(LONGEST / 4));
        assert_eq!(patience.with(&silent, start + REMEMBERED), Ok(LONGEST / 2));
        let after = start + LONGEST + REMEMBERED;
        assert_eq!(patience.with(&crowded, after), Ok(LONGEST));
    }

    #[test]
    fn many_silent_exporters_cost_two_seconds_and_then_little_each() {
        let mut patience = Patience::default();
        let mut now = Instant::now();
        let mut total = Duration::ZERO;
        for (number, exporter) in exporters().take(200).enumerate() {
            let wait = patience.with(&exporter, now).expect("a new one each time");
            if number < MAX_HALVINGS {
                total += wait;
            } else {
                assert!(wait <= LONGEST / 32, "{number}: {wait:?}");
                // A broker that works answers in this time.
                assert!(wait >= Duration::from_millis(20), "{number}: {wait:?}");
            }
            now += wait;
            patience.was_in_vain(exporter, now, &NoLease::Silent);
        }
        assert!(total < 2 * LONGEST, "{total:?}");
    }
}
