//! Cards that stay open while they are unused.
//!
//! A Gaudi2 is reset when it is closed, inside `close`, which takes seconds; opening it again has to wait
//! for that. So a card that was opened while there is a [`KeptOpen`] (in the plugin, a memory domain)
//! stays open until the last of these is dropped, and for [`Options::keep_open`](crate::Options::keep_open)
//! after its last use.
//!
//! By default not longer, because a card has one owner: another process could not open it, nor could a child that is
//! forked meanwhile.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::process::{Instance, thread};
use crate::{Device, Runtime, runtime};

/// Longest pause between checks of unused cards.
const LOOK: Duration = Duration::from_millis(100);

/// Keeps open the cards that are opened while it exists.
#[derive(Debug)]
#[must_use = "cards are kept as long as this lives"]
pub struct KeptOpen {
    made_by: Instance,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// How many [`KeptOpen`] there are.
    holders: usize,
    cards: Vec<KeptCard>,
    /// Whether a thread looks after unused cards.
    watched: bool,
}

impl State {
    /// For how long a card may be unused. `None`: as long as there are holders.
    fn limit(&self, keep_open: Duration) -> Option<Duration> {
        (self.holders == 0).then_some(keep_open)
    }
}

#[derive(Debug)]
struct KeptCard {
    device: Arc<Device>,
    unused_since: Option<Instant>,
}

fn state() -> MutexGuard<'static, State> {
    super::own().kept.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A card was opened, or has one more user. The thread below may have just dropped its own reference.
pub(crate) fn opened(device: &Arc<Device>, keep_open: Duration) {
    let mut state = state();
    let limit = state.limit(keep_open);
    let is_kept = state.cards.iter().any(|kept| Arc::ptr_eq(&kept.device, device));
    if is_kept || limit == Some(Duration::ZERO) {
        return;
    }
    state.cards.push(KeptCard { device: Arc::clone(device), unused_since: None });
    if limit.is_some() {
        watch(&mut state);
    }
}

/// Drops cards that were reset: nothing works on them until they were closed. Keeps a card that failed a copy but
/// works: it could not be opened again while a peer imports its memory.
pub(crate) fn drop_lost() {
    let is_lost = |kept: &mut KeptCard| kept.device.is_surely_lost();
    let lost: Vec<KeptCard> = state().cards.extract_if(.., is_lost).collect();
    // Closed here, without the lock.
    drop(lost);
}

/// Starts the thread that closes cards once they were unused for long enough.
fn watch(state: &mut State) {
    if !state.watched && !state.cards.is_empty() {
        // Without a thread they stay open until the process ends.
        state.watched = thread::spawn("gaudi-keep", close_unused).is_ok();
    }
}

fn close_unused() {
    loop {
        let keep_open = runtime().options().keep_open.unwrap_or_default();
        let now = Instant::now();
        let mut guard = state();
        let state = &mut *guard;
        let Some(limit) = state.limit(keep_open).filter(|_| !state.cards.is_empty()) else {
            state.watched = false;
            return;
        };
        let over = state.cards.extract_if(.., |kept| {
            // One reference is ours.
            if Arc::strong_count(&kept.device) > 1 {
                kept.unused_since = None;
                return false;
            }
            now.duration_since(*kept.unused_since.get_or_insert(now)) >= limit
        });
        let over: Vec<KeptCard> = over.collect();
        drop(guard);
        drop(over);
        // The limit may be set to zero meanwhile.
        std::thread::sleep(LOOK.min(limit.max(Duration::from_millis(1))));
    }
}

impl Runtime {
    /// Keeps the cards open that are opened from now on, until the result is dropped.
    pub fn keep_open(&self) -> KeptOpen {
        state().holders += 1;
        KeptOpen { made_by: Instance::current() }
    }
}

impl Drop for KeptOpen {
    fn drop(&mut self) {
        // Made by the process that this one was forked from.
        if self.made_by != Instance::current() {
            return;
        }
        let mut state = state();
        state.holders -= 1;
        if state.holders > 0 {
            return;
        }
        if !runtime().options().keep_open.unwrap_or_default().is_zero() {
            watch(&mut state);
            return;
        }
        let cards = std::mem::take(&mut state.cards);
        drop(state);
        drop(cards);
    }
}
