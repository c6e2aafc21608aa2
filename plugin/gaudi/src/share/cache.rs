//! A bounded cache of things that are expensive to open and may be open only once.
//!
//! Pure bookkeeping, generic in what it keeps: the model checker runs this very file on its own
//! locks (`tests/share_cache_model.rs`). Values are handed back to be dropped by the caller, never
//! dropped under the lock. Whoever has a value uses it: those that only the cache has can go.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::PoisonError;

use super::Limits;
use super::sync::{Arc, Mutex, MutexGuard};

/// What is open under a key. Locked while somebody opens it.
type Slot<V> = Mutex<Option<Arc<V>>>;

#[derive(Debug)]
pub(crate) struct Cache<K, V>(Mutex<State<K, V>>);

#[derive(Debug)]
struct State<K, V> {
    entries: HashMap<K, Entry<V>>,
    limits: Limits,
    bytes: u64,
    /// Grows with every use.
    clock: u64,
}

#[derive(Debug)]
struct Entry<V> {
    slot: Arc<Slot<V>>,
    /// None while it is being opened.
    bytes: u64,
    last_used: u64,
}

/// What [`Cache::open`] gives.
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

    /// The value under `key`, which `open` makes if nobody has; while it does, others wait for it.
    /// `open` runs without the cache's lock, and says how many bytes the value stands for.
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
        // Else it was evicted meanwhile, and goes with its users.
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
                // Unless others waited for it, who try it now.
                let is_empty = slot.try_lock().is_ok_and(|here| here.is_none());
                if entry.is_some() && is_empty && Arc::strong_count(&slot) == 2 {
                    state.entries.remove(&key);
                }
                Err(error)
            }
        };
        // Before the lock: the next who fails counts who has the slot.
        drop(slot);
        drop(state);
        found
    }

    /// Takes everything out that `which` names. It is returned, to be dropped, and goes with its last user.
    pub(crate) fn evict(&self, which: impl Fn(&K) -> bool) -> Vec<Arc<V>> {
        let mut state = self.state();
        let keys: Vec<K> = state.entries.keys().filter(|key| which(key)).copied().collect();
        keys.into_iter().filter_map(|key| state.remove(&key)).collect()
    }

    /// Takes everything out that `which` names and nobody uses; to be dropped.
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

    /// Takes out what nobody uses, longest unused first, until the bounds are kept; to be dropped.
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

    /// What is being opened stays with those who do, and is not kept.
    fn remove(&mut self, key: &K) -> Option<Arc<V>> {
        let entry = self.entries.remove(key)?;
        self.bytes -= entry.bytes;
        entry.slot.try_lock().ok()?.take()
    }
}
