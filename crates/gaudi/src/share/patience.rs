//! How long an importer waits for exporters that do not answer.
//!
//! Whoever opens memory is blocked meanwhile: mostly UCX's worker. Forged keys can name any number of exporters that
//! never answer. So every wait in vain, for any exporter, halves the next ones for a while.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Identity;
use super::no_lease::NoLease;

/// The longest wait: longer than a broker's thread waits for its turn on a busy machine, and than it keeps
/// connections that ask for nothing.
const LONGEST: Duration = Duration::from_secs(1);
/// How long an exporter that was waited for in vain is not asked again.
const REMEMBERED: Duration = Duration::from_secs(5);
/// Most exporters that are remembered.
const MAX_REMEMBERED: usize = 64;

/// Who was waited for in vain of late, and why.
#[derive(Debug, Default)]
pub(super) struct Patience(VecDeque<(Identity, Instant, NoLease)>);

impl Patience {
    /// How long to wait for an answer of this exporter. All waits in vain that a thread begins within five seconds last
    /// less than two seconds together. The error: this one was waited for in vain, and is not asked again yet.
    pub(super) fn with(&mut self, exporter: &Identity, now: Instant) -> Result<Duration, NoLease> {
        self.0.retain(|(_, since, _)| now < *since + REMEMBERED);
        match self.0.iter().find(|(silent, ..)| silent == exporter) {
            Some((.., why)) => Err(why.clone()),
            None => Ok(LONGEST / (1 << self.0.len().min(31))),
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
    fn any_number_of_silent_exporters_takes_two_seconds_in_five_at_most() {
        let mut patience = Patience::default();
        let start = Instant::now();
        let mut now = start;
        let mut waits = Vec::new();
        for exporter in exporters().take(2000) {
            let wait = patience.with(&exporter, now).expect("a new one each time");
            waits.push((now, wait));
            // Each takes some time of its own.
            now += wait + Duration::from_millis(5);
            patience.was_in_vain(exporter, now, &NoLease::Silent);
        }
        assert!(now > start + 2 * REMEMBERED, "too few for a test");
        for (at, (from, _)) in waits.iter().enumerate() {
            let within = waits[at..].iter().take_while(|(begin, _)| *begin < *from + REMEMBERED);
            let total: Duration = within.map(|(_, wait)| *wait).sum();
            assert!(total < 2 * LONGEST, "{total:?} in five seconds");
        }
    }
}
