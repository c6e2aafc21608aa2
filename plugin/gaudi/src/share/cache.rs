//! A bounded cache of things that are expensive to open and may be open only once.
//!
//! Pure bookkeeping, generic in its values: the model checker runs this very file with its own locks
//! (`tests/share_cache_model.rs`). Evicted values are returned for the caller to drop, never dropped under the lock. A value
//! is in use while a caller has it; one that only the cache has is idle, and can be evicted.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::PoisonError;

use super::Limits;
use super::sync::{Arc, Mutex, MutexGuard};

/// The value that is open under a key. Locked while a thread opens it.
type Slot<V> = Mutex<Option<Arc<V>>>;

#[derive(Debug)]
pub(crate) struct Cache<K, V>(Mutex<State<K, V>>);

#[derive(Debug)]
struct State<K, V> {
    entries: HashMap<K, Entry<V>>,
    limits: Limits,
    bytes: u64,
    /// Incremented by every use.
    clock: u64,
}

#[derive(Debug)]
struct Entry<V> {
    slot: Arc<Slot<V>>,
    /// 0 while it is being opened.
    bytes: u64,
    last_used: u64,
}

/// What [`Cache::open`] returns.
#[derive(Debug)]
pub(crate) struct Found<V> {
    pub(crate) value: Arc<V>,
    /// Whether it was open already.
    pub(crate) hit: bool,
}

impl<K: Copy + Eq + Hash, V> Cache<K, V> {
    pub(crate) fn new(limits: Limits) -> Self {
        Self(Mutex::new(State { entries: HashMap::new(), limits, bytes: 0, clock: 0 }))
    }

    fn state(&self) -> MutexGuard<'_, State<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value under `key`, if it is open.
    pub(crate) fn find(&self, key: &K) -> Option<Arc<V>> {
        let mut state = self.state();
        let now = state.tick();
        let entry = state.entries.get_mut(key)?;
        entry.last_used = now;
        entry.slot.try_lock().ok()?.clone()
    }

    /// The value under `key`. If there is none, this thread makes it with `open`, and other threads wait for it meanwhile.
    /// `open` runs without the cache's lock, and also returns how many bytes the value counts for.
    pub(crate) fn open<E>(
        &self,
        key: K,
        open: impl FnOnce() -> Result<(V, u64), E>,
    ) -> Result<Found<V>, E> {
        let slot = {
            let mut state = self.state();
            let now = state.tick();
            let entry = state.entries.entry(key).or_insert_with(|| {
                let empty: Slot<V> = Mutex::new(None);
                Entry { slot: Arc::new(empty), bytes: 0, last_used: now }
            });
            entry.last_used = now;
            Arc::clone(&entry.slot)
        };
        let mut here = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = &*here {
            return Ok(Found { value: Arc::clone(value), hit: true });
        }
        let opened = open().map(|(value, bytes)| (Arc::new(value), bytes));
        *here = opened.as_ref().ok().map(|(value, _)| Arc::clone(value));
        drop(here);
        let mut state = self.state();
        // `None` if it was evicted meanwhile: then the value lives as long as its users.
        let entry = state.entries.get_mut(&key).filter(|entry| Arc::ptr_eq(&entry.slot, &slot));
        let found = match (opened, entry) {
            (Ok((value, bytes)), entry) => {
                if let Some(entry) = entry {
                    entry.bytes = bytes;
                    state.bytes += bytes;
                }
                Ok(Found { value, hit: false })
            }
            (Err(error), entry) => {
                // Remove the entry, unless other threads wait for its slot: those try to open it now.
                let is_empty = slot.try_lock().is_ok_and(|here| here.is_none());
                if entry.is_some() && is_empty && Arc::strong_count(&slot) == 2 {
                    state.entries.remove(&key);
                }
                Err(error)
            }
        };
        // Before unlocking: the next thread whose `open` fails reads the slot's reference count.
        drop(slot);
        drop(state);
        found
    }

    /// Removes the entries that `which` selects. Returns their values to be dropped; each is closed with its last user.
    pub(crate) fn evict(&self, which: impl Fn(&K) -> bool) -> Vec<Arc<V>> {
        let mut state = self.state();
        let keys: Vec<K> = state.entries.keys().filter(|key| which(key)).copied().collect();
        keys.into_iter().filter_map(|key| state.remove(&key)).collect()
    }

    /// Removes the idle entries that `which` selects; returns their values to be dropped.
    pub(crate) fn evict_idle(&self, which: impl Fn(&K) -> bool) -> Vec<Arc<V>> {
        let mut state = self.state();
        let idle = state.entries.iter().filter(|(key, entry)| which(key) && entry.is_idle());
        let keys: Vec<K> = idle.map(|(key, _)| *key).collect();
        keys.into_iter().filter_map(|key| state.remove(&key)).collect()
    }

    /// Sets the bounds.
    pub(crate) fn set_limits(&self, limits: Limits) {
        self.state().limits = limits;
    }

    /// Removes idle entries, least recently used first, until the bounds are kept; returns their values to be dropped.
    pub(crate) fn trim(&self) -> Vec<Arc<V>> {
        let mut state = self.state();
        let mut evicted = Vec::new();
        while state.entries.len() > state.limits.handles || state.bytes > state.limits.bytes {
            let idle = state.entries.iter().filter(|(_, entry)| entry.is_idle());
            let oldest = idle.min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { break };
            evicted.extend(state.remove(&oldest));
        }
        evicted
    }

    /// How many are open, and their bytes.
    #[allow(dead_code, reason = "for tests and models")]
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = self.state();
        (state.entries.len(), state.bytes)
    }
}

impl<V> Entry<V> {
    /// Whether only the cache has the value.
    fn is_idle(&self) -> bool {
        let here = self.slot.try_lock();
        here.is_ok_and(|here| here.as_ref().is_some_and(|value| Arc::strong_count(value) == 1))
    }
}

impl<K: Copy + Eq + Hash, V> State<K, V> {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A value that is being opened goes to the threads that open it, and is not cached.
    fn remove(&mut self, key: &K) -> Option<Arc<V>> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        entry.slot.try_lock().ok()?.take()
    }
}
