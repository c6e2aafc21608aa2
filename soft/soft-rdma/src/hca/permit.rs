//! Permission to touch memory, which its owner can revoke at any time.
//!
//! Every region has one, and every queue pair has one for its work. Code of this process that moves bytes holds a [`Use`] of each
//! permit involved. [`Permit::revoke`] waits for these; each lasts for one system call that does not block.
//!
//! A peer that copies out of our memory may be stopped for any time, so no thread waits for it. It never writes into our memory.
//! It knows the address and the value of each permit's [`Token`], and reads the tokens *after* the bytes, in the same
//! `process_vm_readv`. If a token has changed, it does not report success for these bytes.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::events::lock;
use super::memory::{Located, Region};
use crate::node::random;
use crate::wire::{Reference, Segment, Token};

/// Words of dropped permits, for reuse. Peers may read them at any time, so they are never freed.
static UNUSED: Mutex<Vec<&'static AtomicU64>> = Mutex::new(Vec::new());

/// A value that no token of this process had before.
fn unique() -> u64 {
    static NEXT: OnceLock<AtomicU64> = OnceLock::new();
    // A random start: a value means nothing in another process that got our process id.
    let next = NEXT.get_or_init(|| AtomicU64::new(u64::from_ne_bytes(random()) >> 1 | 1));
    next.fetch_add(1, Ordering::Relaxed)
}

#[derive(Default)]
struct State {
    uses: usize,
    revoked: bool,
}

/// A permission.
pub(crate) struct Permit {
    state: Mutex<State>,
    unused: Condvar,
    word: &'static AtomicU64,
    value: u64,
}

/// Keeps a permit from being revoked.
pub(crate) struct Use<'a>(&'a Permit);

impl Default for Permit {
    fn default() -> Self {
        let word = lock(&UNUSED).pop();
        let (word, value) = (word.unwrap_or_else(|| Box::leak(Box::default())), unique());
        word.store(value, Ordering::Release);
        Self { state: Mutex::default(), unused: Condvar::new(), word, value }
    }
}

impl Permit {
    /// `None` if it was revoked. Never waits.
    pub(crate) fn acquire(&self) -> Option<Use<'_>> {
        let mut state = lock(&self.state);
        (!state.revoked).then(|| {
            state.uses += 1;
            Use(self)
        })
    }

    /// Revokes the permission. When it returns, this process no longer uses the memory, and a peer does not report
    /// success for bytes that it has not copied by now. The caller must not hold a [`Use`] of it.
    pub(crate) fn revoke(&self) {
        let mut state = lock(&self.state);
        state.revoked = true;
        self.word.store(0, Ordering::Release);
        // Pairs with the peer, which reads bytes, then tokens: if it sees bytes written after this, it must see the new token.
        fence(Ordering::SeqCst);
        while state.uses > 0 {
            state = self.unused.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Whether it was revoked.
    pub(crate) fn is_revoked(&self) -> bool {
        lock(&self.state).revoked
    }

    fn token(&self) -> Token {
        Token { addr: self.word as *const AtomicU64 as u64, value: self.value }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.word.store(0, Ordering::Release);
        lock(&UNUSED).push(self.word);
    }
}

impl Drop for Use<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.0.state);
        state.uses -= 1;
        if state.uses == 0 && state.revoked {
            self.0.unused.notify_all();
        }
    }
}

/// Why memory may not be touched any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Revoked {
    /// The work was flushed.
    Work,
    /// A region was deregistered.
    Region,
}

/// Memory of this process that a piece of work may use.
#[derive(Clone)]
pub(crate) struct Access {
    /// The permit of the queue pair.
    pub(crate) permit: Arc<Permit>,
    pub(crate) list: Vec<Located>,
}

impl Access {
    /// Where the bytes are, and the uses that keep them valid during a copy.
    pub(crate) fn lock(&self) -> Result<(Vec<Segment>, Vec<Use<'_>>), Revoked> {
        let mut uses = Vec::with_capacity(1 + self.list.len());
        uses.push(self.permit.acquire().ok_or(Revoked::Work)?);
        let mut segments = Vec::with_capacity(self.list.len());
        for located in &self.list {
            uses.push(located.region.permit.acquire().ok_or(Revoked::Region)?);
            segments.extend_from_slice(&located.segments);
        }
        Ok((segments, uses))
    }

    /// Bytes in all.
    pub(crate) fn length(&self) -> u64 {
        self.list.iter().flat_map(|located| &located.segments).map(|segment| segment.len).sum()
    }

    /// What a peer needs to copy these segments, which [`Self::lock`] returned.
    pub(crate) fn reference(&self, segments: Vec<Segment>) -> Reference {
        let mut regions: Vec<&Arc<Region>> = Vec::with_capacity(self.list.len());
        for Located { region, .. } in &self.list {
            if !regions.iter().any(|other| Arc::ptr_eq(other, region)) {
                regions.push(region);
            }
        }
        let tokens = regions.iter().map(|region| region.permit.token());
        // The token of the work comes first.
        Reference { segments, tokens: [self.permit.token()].into_iter().chain(tokens).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revoking_waits_for_every_use_and_refuses_new_ones() {
        let permit = Permit::default();
        let uses = [permit.acquire(), permit.acquire()];
        assert!(uses.iter().all(Option::is_some));
        std::thread::scope(|scope| {
            let revoked = scope.spawn(|| permit.revoke());
            // Once the owner waits, new uses fail at once instead of blocking.
            while permit.acquire().is_some() {
                std::thread::yield_now();
            }
            assert!(!revoked.is_finished());
            drop(uses);
            revoked.join().unwrap();
        });
        assert!(permit.is_revoked());
    }

    #[test]
    fn a_token_changes_when_its_permit_is_revoked_or_dropped() {
        // SAFETY: words of tokens are never freed.
        let read = |token: Token| unsafe { (token.addr as *const u64).read_volatile() };
        let permit = Permit::default();
        let token = permit.token();
        assert_eq!(read(token), token.value);
        permit.revoke();
        assert_ne!(read(token), token.value);
        drop(permit);
        let others: Vec<_> = (0..9).map(|_| Permit::default()).collect();
        assert!(others.iter().all(|other| other.token().value != token.value));
        assert_ne!(read(token), token.value);
    }
}
