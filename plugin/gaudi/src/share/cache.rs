//! A bounded cache of things that are expensive to open and may be open only once.
//!
//! Pure bookkeeping, generic in what it keeps: the model checker runs this very file on its own
//! locks (`tests/share_cache_model.rs`). Values are handed back to be dropped by the caller, never
//! dropped under the lock.

use std::collections::HashMap;
use std::hash::Hash;

use super::Limits;
use super::sync::{Arc, Condvar, Mutex, MutexGuard};

/// What [`Cache::open`] gives: the value, to be given back with [`Cache::release`].
#[derive(Debug)]
pub(crate) struct Reference<V> {
    pub(crate) value: Arc<V>,
    /// Tells this opening from a later one under the same key.
    pub(crate) serial: u64,
    /// Whether it was open already.
    pub(crate) hit: bool,
    /// Evicted to keep the limits; drop them.
    pub(crate) evicted: Vec<Arc<V>>,
}

#[derive(Debug)]
pub(crate) struct Cache<K, V> {
    state: Mutex<State<K, V>>,
    /// An opening has ended, one way or another.
    opened: Condvar,
}

#[derive(Debug)]
struct State<K, V> {
    entries: HashMap<K, Cached<V>>,
    limits: Limits,
    bytes: u64,
    /// Grows with every use.
    clock: u64,
}

#[derive(Debug)]
enum Cached<V> {
    /// Somebody is opening it; `dead` if it must not be kept when it is done.
    Opening {
        serial: u64,
        dead: bool,
    },
    Open(Open<V>),
}

#[derive(Debug)]
struct Open<V> {
    value: Arc<V>,
    serial: u64,
    bytes: u64,
    users: usize,
    last_used: u64,
}

impl<K: Copy + Eq + Hash, V> Cache<K, V> {
    pub(crate) fn new(limits: Limits) -> Self {
        let state = State { entries: HashMap::new(), limits, bytes: 0, clock: 0 };
        Self { state: Mutex::new(state), opened: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State<K, V>> {
        // Nothing below panics with the lock held.
        self.state.lock().expect("never poisoned")
    }

    /// The value under `key`, if it is open, and its serial number; to be given back.
    pub(crate) fn find(&self, key: &K) -> Option<(Arc<V>, u64)> {
        self.state().use_open(key)
    }

    /// The value under `key`, which `open` makes if nobody has; while it does, others wait for it.
    /// `open` runs without the lock, and says how many bytes the value stands for.
    pub(crate) fn open<E>(
        &self,
        key: K,
        open: impl FnOnce() -> Result<(V, u64), E>,
    ) -> Result<Reference<V>, E> {
        let mut state = self.state();
        loop {
            if let Some((value, serial)) = state.use_open(&key) {
                return Ok(Reference { value, serial, hit: true, evicted: Vec::new() });
            }
            if !state.entries.contains_key(&key) {
                break;
            }
            state = self.opened.wait(state).expect("never poisoned");
        }
        let serial = state.tick();
        state.entries.insert(key, Cached::Opening { serial, dead: false });
        drop(state);
        let opening = Opening { cache: self, key, serial };
        let (value, bytes) = open()?;
        let value = Arc::new(value);
        let evicted = opening.done(Arc::clone(&value), bytes);
        Ok(Reference { value, serial, hit: false, evicted })
    }

    /// Gives a reference back; what has to go for the bounds' sake is returned, to be dropped.
    pub(crate) fn release(&self, key: &K, serial: u64) -> Vec<Arc<V>> {
        let mut state = self.state();
        if let Some(Cached::Open(entry)) = state.entries.get_mut(key)
            && entry.serial == serial
        {
            entry.users -= 1;
        }
        state.trim()
    }

    /// Takes everything out that `which` names. What nobody uses is returned, to be dropped; what is
    /// in use goes with its last user.
    pub(crate) fn evict(&self, which: impl Fn(&K) -> bool) -> Vec<Arc<V>> {
        let mut state = self.state();
        let mut evicted = Vec::new();
        let mut bytes = 0;
        state.entries.retain(|key, entry| {
            match entry {
                _ if !which(key) => return true,
                Cached::Opening { dead, .. } => {
                    *dead = true;
                    return true;
                }
                Cached::Open(open) => {
                    bytes += open.bytes;
                    evicted.push(Arc::clone(&open.value));
                }
            }
            false
        });
        state.bytes -= bytes;
        evicted
    }

    /// Sets the bounds; what has to go is returned, to be dropped.
    pub(crate) fn set_limits(&self, limits: Limits) -> Vec<Arc<V>> {
        let mut state = self.state();
        state.limits = limits;
        state.trim()
    }

    /// How many are open, and their bytes.
    #[allow(dead_code, reason = "for tests and models")]
    pub(crate) fn size(&self) -> (usize, u64) {
        let state = self.state();
        (state.entries.len(), state.bytes)
    }
}

/// Guard: wakes waiters when dropped, and removes the entry if opening failed.
struct Opening<'a, K: Copy + Eq + Hash, V> {
    cache: &'a Cache<K, V>,
    key: K,
    serial: u64,
}

impl<K: Copy + Eq + Hash, V> Opening<'_, K, V> {
    /// The value is there, with its first user.
    fn done(self, value: Arc<V>, bytes: u64) -> Vec<Arc<V>> {
        let mut state = self.cache.state();
        let last_used = state.tick();
        let dead = matches!(state.entries.get(&self.key), Some(Cached::Opening { dead: true, .. }));
        if !dead {
            let open = Open { value, serial: self.serial, bytes, users: 1, last_used };
            state.entries.insert(self.key, Cached::Open(open));
            state.bytes += bytes;
        }
        // Where it is dead, dropping `self` removes the entry.
        state.trim()
    }
}

impl<K: Copy + Eq + Hash, V> Drop for Opening<'_, K, V> {
    fn drop(&mut self) {
        let mut state = self.cache.state();
        if matches!(state.entries.get(&self.key), Some(Cached::Opening { serial, .. }) if *serial == self.serial)
        {
            state.entries.remove(&self.key);
        }
        drop(state);
        self.cache.opened.notify_all();
    }
}

impl<K: Copy + Eq + Hash, V> State<K, V> {
    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// One more user for what is open.
    fn use_open(&mut self, key: &K) -> Option<(Arc<V>, u64)> {
        let now = self.tick();
        match self.entries.get_mut(key) {
            Some(Cached::Open(open)) => {
                open.users += 1;
                open.last_used = now;
                Some((Arc::clone(&open.value), open.serial))
            }
            _ => None,
        }
    }

    /// Takes out what nobody uses, longest unused first, until the bounds are kept.
    fn trim(&mut self) -> Vec<Arc<V>> {
        let mut evicted = Vec::new();
        while self.entries.len() > self.limits.handles || self.bytes > self.limits.bytes {
            let idle = self.entries.iter().filter_map(|(key, entry)| match entry {
                Cached::Open(open) if open.users == 0 => Some((open.last_used, *key)),
                _ => None,
            });
            let Some((_, oldest)) = idle.min_by_key(|(used, _)| *used) else { break };
            if let Some(Cached::Open(open)) = self.entries.remove(&oldest) {
                self.bytes -= open.bytes;
                evicted.push(open.value);
            }
        }
        evicted
    }
}
