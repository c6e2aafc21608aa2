//! Host memory of this process that peers may reach through a relay: only while it is shared, and only by copies of our own
//! service. Unsharing it waits for the end of those copies.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use super::super::KEY_LEN;
use super::super::key::{self, Bus, Fields, Token};
use super::super::owner::Owner;
use super::wire::Access;
use crate::process::Instance;
use crate::submit::host_copy::{HostPtr, copy_in, copy_out};
use crate::{Error, ErrorKind};

const SHARING: &str = "sharing host memory";

/// Host memory that other processes of this user may read and write, given the key. Dropping it waits for a copy that is in
/// progress; after that, peers have no access.
#[derive(Debug)]
pub struct HostShare {
    owner: &'static Owner,
    memory: Arc<HostMemory>,
    made_by: Instance,
}

/// The memory of a share.
#[derive(Debug)]
pub(super) struct HostMemory {
    pub(super) fields: Fields,
    /// Whether it is still shared. Copies hold the lock for reading.
    is_shared: RwLock<bool>,
}

/// The host memory that this process shares, by token.
#[derive(Debug, Default)]
pub(in super::super) struct HostShares(Mutex<HashMap<Token, Arc<HostMemory>>>);

impl HostShares {
    fn table(&self) -> MutexGuard<'_, HashMap<Token, Arc<HostMemory>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn find(&self, token: Token) -> Option<Arc<HostMemory>> {
        self.table().get(&token).cloned()
    }

    /// Whether memory is shared under exactly this key.
    pub(in super::super) fn has(&self, key: &Fields) -> bool {
        self.find(key.token).is_some_and(|memory| memory.fields == *key)
    }
}

impl HostShare {
    /// Shares `len` bytes from `start`. The first share of a process starts to listen for peers.
    ///
    /// # Safety
    /// The memory must not be used for anything that peers may not read and overwrite, until this is dropped.
    pub unsafe fn new(start: *mut u8, len: usize) -> Result<Self, Error> {
        let owner = Owner::started()?;
        let (base, len) = (start as u64, len as u64);
        if !key::fits(base, len) {
            let detail = format!("{len} bytes at {base:#x} do not fit into a key");
            return Err(Error::new(ErrorKind::InvalidParams, SHARING, detail, ""));
        }
        let fields = owner.new_fields(Bus::HOST, base, len)?;
        let memory = Arc::new(HostMemory { fields, is_shared: RwLock::new(true) });
        owner.host_shares.table().insert(fields.token, Arc::clone(&memory));
        Ok(Self { owner, memory, made_by: Instance::current() })
    }

    /// The key to send to peers. A process that has it can read and write the memory: send it only to processes that may.
    pub fn key(&self) -> [u8; KEY_LEN] {
        self.memory.fields.pack()
    }
}

impl Drop for HostShare {
    fn drop(&mut self) {
        // In a forked child the locks may be held for ever, by a thread of the parent.
        if self.made_by == Instance::current() {
            self.owner.host_shares.table().remove(&self.memory.fields.token);
            *self.memory.is_shared.write().unwrap_or_else(PoisonError::into_inner) = false;
        }
    }
}

impl HostMemory {
    /// Copies between this memory and a range of the ring. The kernel does it, since the application may have unmapped memory
    /// that it still shares. `None` if it is not shared any more.
    ///
    /// # Safety
    /// `ring` must be valid for reads and writes of `len` bytes. What its initiator does there meanwhile changes bytes, and
    /// nothing else.
    pub(super) unsafe fn copy(
        &self,
        access: Access,
        addr: u64,
        ring: *mut u8,
        len: usize,
    ) -> Option<Result<(), Error>> {
        let is_shared = self.is_shared.read().unwrap_or_else(PoisonError::into_inner);
        if !*is_shared || !self.fields.contains(addr, len as u64) {
            return None;
        }
        let memory = HostPtr(core::ptr::with_exposed_provenance_mut(addr as usize));
        // SAFETY: the caller's promise for the ring; the memory is shared, and the kernel checks that it is there.
        Some(unsafe {
            match access {
                Access::Write => copy_out(ring, memory, len, true),
                Access::Read => copy_in(memory, ring, len, true),
            }
        })
    }
}
