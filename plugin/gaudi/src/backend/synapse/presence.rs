//! Whether the framework still has the card, and which calls of the framework are under way.
//!
//! The framework refuses to release a card while a thread is in one of its calls, so an announced release waits for
//! the calls under way. An unannounced release must not wait: it runs inside the framework's own release, which holds
//! a lock that those calls wait for. It only sets the state, and a thread that makes several calls checks the state
//! before each ([`Presence::check`]).

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use synapse::{CallError, Status};

/// The framework has the card, and we use it.
const IN_USE: u8 = 0;
/// We left the card, but the framework refused to release it: memory that we still have can be given back.
const LEFT: u8 = 1;
/// The framework has released the card, or is about to.
const GONE: u8 = 2;

#[derive(Debug)]
pub(super) struct Presence {
    state: AtomicU8,
    /// Every call of the framework holds the read lock while it runs.
    calls: RwLock<()>,
}

/// While this lives, an announced release waits.
pub(super) type CallGuard<'a> = RwLockReadGuard<'a, ()>;

impl Presence {
    pub(super) const fn new() -> Self {
        Self { state: AtomicU8::new(IN_USE), calls: RwLock::new(()) }
    }

    fn enter_if(&self, permitted: impl FnOnce(u8) -> bool) -> Option<CallGuard<'_>> {
        let calling = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        // Loaded with the lock held. Pairs with the store in `end`, after which `wait` takes the write lock: a thread
        // that gets the lock after `wait` sees the store. Otherwise it could call the framework during the release.
        permitted(self.state.load(Ordering::Acquire)).then_some(calling)
    }

    /// Enters for calls that use the card.
    pub(super) fn enter(&self) -> Option<CallGuard<'_>> {
        self.enter_if(|state| state == IN_USE)
    }

    /// Enters for a call that gives device memory back.
    pub(super) fn enter_to_free(&self) -> Option<CallGuard<'_>> {
        self.enter_if(|state| state != GONE)
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.state.load(Ordering::Acquire) == IN_USE
    }

    /// For a thread that has entered, before each further call: fails as the framework does without a card.
    pub(super) fn check(&self) -> Result<(), CallError> {
        let gone = CallError::Refused { call: "none", status: Status::NO_DEVICE_FOUND };
        if self.is_in_use() { Ok(()) } else { Err(gone) }
    }

    /// Makes all later calls fail. Does not wait.
    pub(super) fn end(&self) {
        self.state.store(GONE, Ordering::Release);
    }

    /// Waits for the calls under way.
    pub(super) fn wait(&self) {
        drop(self.calls.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// The framework still has the card that we had left: allows giving memory back.
    pub(super) fn stays(&self) {
        self.state.store(LEFT, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_release_without_a_word_does_not_wait_for_calls_under_way() {
        let presence = Presence::new();
        let calling = presence.enter();
        assert!(calling.is_some() && presence.check().is_ok());
        // This thread is in a call: waiting for calls would be a deadlock.
        presence.end();
        let error = presence.check().unwrap_err();
        assert_eq!(error.status(), Some(Status::NO_DEVICE_FOUND));
        drop(calling);
        assert!(presence.enter().is_none() && presence.enter_to_free().is_none());
    }

    #[test]
    fn a_card_that_was_not_released_takes_memory_back_and_nothing_else() {
        let presence = Presence::new();
        presence.end();
        presence.wait();
        presence.stays();
        assert!(presence.enter().is_none() && presence.check().is_err());
        assert!(presence.enter_to_free().is_some());
        presence.end();
        assert!(presence.enter_to_free().is_none(), "released after all");
    }
}
