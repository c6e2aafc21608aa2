//! Expectations, counted; those that fail are told at once.

use std::fmt::{Debug, Display};

/// Failures told in full; more of the same would only hide them.
const TOLD: u64 = 20;

/// What one check found.
#[derive(Debug)]
pub(super) struct Tally {
    check: String,
    passed: u64,
    failed: u64,
}

impl Tally {
    pub(super) fn new(check: &str) -> Tally {
        Tally { check: check.to_owned(), passed: 0, failed: 0 }
    }

    /// Another one for a part of the same check.
    pub(super) fn part(&self, name: impl Display) -> Tally {
        Tally::new(&format!("{} {name}", self.check))
    }

    pub(super) fn merge(&mut self, part: &Tally) {
        self.passed += part.passed;
        self.failed += part.failed;
    }

    /// Counts whether something is as it should be; `what` says what should be.
    pub(super) fn expect(&mut self, right: bool, what: impl FnOnce() -> String) -> bool {
        if right {
            self.passed += 1;
        } else {
            self.failed += 1;
            if self.failed <= TOLD {
                println!("FAIL  {}: {}", self.check, what());
            }
        }
        right
    }

    pub(super) fn equal<T: PartialEq + Debug>(
        &mut self,
        found: &T,
        wanted: &T,
        what: impl Display,
    ) -> bool {
        self.expect(found == wanted, || format!("{what}: found {found:?}, not {wanted:?}"))
    }

    pub(super) fn passed(&self) -> u64 {
        self.passed
    }

    pub(super) fn failed(&self) -> u64 {
        self.failed
    }

    pub(super) fn print(&self) {
        let word = if self.failed == 0 { "ok  " } else { "FAIL" };
        println!("{word}  {:<12} {} passed, {} failed", self.check, self.passed, self.failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expectations_are_counted_on_their_side() {
        let mut tally = Tally::new("x");
        assert!(tally.equal(&1, &1, "one"));
        assert!(!tally.equal(&1, &2, "one"));
        let mut part = tally.part("y");
        part.expect(false, || "no".into());
        tally.merge(&part);
        assert_eq!((tally.passed(), tally.failed()), (1, 2));
    }
}
