//! How long an initiator waits for owners that do not answer.
//!
//! A thread that opens memory, mostly UCX's worker, is blocked while it waits. Forged keys can name any number of owners that
//! never answer. So each timeout, of any owner, halves further waits for a while, down to the time that a working owner needs
//! to answer.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use super::Identity;
use super::unreached::Unreached;

/// The longest wait: longer than a thread of the owner waits to be scheduled on a busy machine.
const LONGEST: Duration = Duration::from_secs(1);
/// The shortest wait is 31 ms.
const MAX_HALVINGS: usize = 5;
/// How long an owner that timed out is not asked again.
const REMEMBERED: Duration = Duration::from_secs(5);
/// How many of these owners are remembered at most.
const MAX_REMEMBERED: usize = 64;

/// The owners that timed out recently.
#[derive(Debug, Default)]
pub(super) struct Backoff(VecDeque<(Identity, Instant)>);

impl Backoff {
    /// How long to wait for an answer of this owner. An error if it timed out recently, and is not asked again yet.
    pub(super) fn wait_for(
        &mut self,
        owner: &Identity,
        now: Instant,
    ) -> Result<Duration, Unreached> {
        self.0.retain(|(_, since)| now < *since + REMEMBERED);
        if self.0.iter().any(|(silent, _)| silent == owner) {
            return Err(Unreached::Silent);
        }
        Ok(LONGEST / (1 << self.0.len().min(MAX_HALVINGS)))
    }

    /// Remembers that this owner timed out.
    pub(super) fn was_in_vain(&mut self, owner: Identity, now: Instant) {
        if self.0.len() >= MAX_REMEMBERED {
            self.0.pop_front();
        }
        self.0.push_back((owner, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners() -> impl Iterator<Item = Identity> {
        let own = *Identity::own().unwrap();
        (0_u32..).map(move |number| Identity { start: own.start.wrapping_add(number), ..own })
    }

    #[test]
    fn an_owner_that_did_not_answer_is_not_asked_again_for_five_seconds() {
        let (mut backoff, start) = (Backoff::default(), Instant::now());
        let [one, two, other] = owners().take(3).collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(backoff.wait_for(&one, start), Ok(LONGEST));
        backoff.was_in_vain(one, start);
        backoff.was_in_vain(two, start + LONGEST);
        let before = start + REMEMBERED - Duration::from_millis(1);
        assert_eq!(backoff.wait_for(&one, before), Err(Unreached::Silent));
        assert_eq!(backoff.wait_for(&two, before), Err(Unreached::Silent));
        assert_eq!(backoff.wait_for(&other, before), Ok(LONGEST / 4));
        assert_eq!(backoff.wait_for(&one, start + REMEMBERED), Ok(LONGEST / 2));
        let after = start + LONGEST + REMEMBERED;
        assert_eq!(backoff.wait_for(&two, after), Ok(LONGEST));
    }

    #[test]
    fn many_silent_owners_cost_two_seconds_and_then_little_each() {
        let mut backoff = Backoff::default();
        let mut now = Instant::now();
        let mut total = Duration::ZERO;
        for (number, owner) in owners().take(200).enumerate() {
            let wait = backoff.wait_for(&owner, now).expect("a new one each time");
            if number < MAX_HALVINGS {
                total += wait;
            } else {
                assert!(wait <= LONGEST / 32, "{number}: {wait:?}");
                // An owner that works answers in this time.
                assert!(wait >= Duration::from_millis(20), "{number}: {wait:?}");
            }
            now += wait;
            backoff.was_in_vain(owner, now);
        }
        assert!(total < 2 * LONGEST, "{total:?}");
    }
}
