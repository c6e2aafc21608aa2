//! The memory domain: keys for memory of this process, and attached memory of others.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gaudi::share::{HostShare, Share};
use gaudi::{DeviceAddr, DeviceId, Error, HostRegion, KeptOpen, Location};
use uct::abi::md_flag;
use uct::{
    DomainAttributes, Level, LinearFunc, MemoryDomain, MemoryType, MemoryTypes, Region, Status,
    SysDevice, Ucx, log,
};

use super::NAME;
use super::component::{card_near, unreachable};
use super::remote_memory::{NoKey, RemoteMemory};
use crate::addresses::{Registered, register};
use crate::domain;
use crate::status::explain;

/// An open memory domain. It opens no card.
pub(crate) struct IpcDomain {
    pub(super) ucx: &'static Ucx,
    /// Cards stay open between two uses.
    _kept_open: KeptOpen,
}

/// The object behind a memory handle.
pub(crate) enum Memory {
    /// Gaudi memory of this process.
    Device(Shareable),
    /// Host memory of this process.
    Host(ShareableHost),
    /// A peer's memory.
    Attached(RemoteMemory),
}

/// Gaudi memory that was registered, and shared when the first key was packed.
pub(crate) struct Shareable {
    device: DeviceId,
    base: DeviceAddr,
    length: u64,
    /// Dropped when the memory is deregistered.
    share: OnceLock<Result<Share, NoKey>>,
}

/// Host memory that was registered, and shared when the first key was packed: UCX registers many ranges, and packs few keys.
pub(crate) struct ShareableHost {
    region: Arc<HostRegion>,
    /// UCX registered it for one rendezvous, as it does with every lane that might be used.
    is_passing: bool,
    /// Dropped when the memory is deregistered, after copies in progress.
    share: OnceLock<Result<HostShare, NoKey>>,
}

impl ShareableHost {
    fn share(&self, ucx: &Ucx) -> Result<HostShare, NoKey> {
        // Sharing starts a thread: none in programs that do not use Gaudis.
        if self.is_passing && gaudi::runtime().devices().is_empty() {
            return Err(NoKey);
        }
        // SAFETY: a program that packs a key lets peers read and write the memory until it is deregistered.
        let share = unsafe { HostShare::new(self.region.start(), self.region.len()) };
        share.map_err(|error| not_shared(ucx, "host", &error))
    }
}

impl Shareable {
    fn new(place: &Location) -> Self {
        Shareable {
            device: place.device_id,
            base: place.base,
            length: place.length,
            share: OnceLock::new(),
        }
    }

    /// The allocation is shared as a whole, so that all keys of it open the same mapping.
    fn share(&self, ucx: &Ucx) -> Result<Share, NoKey> {
        let device = gaudi::runtime().device(self.device).ok_or(NoKey)?;
        device.share(self.base, self.length).map_err(|error| not_shared(ucx, "Gaudi", &error))
    }
}

/// Logs why memory is not shared. UCX asks for every buffer, so each reason is a warning only once.
fn not_shared(ucx: &Ucx, what: &str, error: &Error) -> NoKey {
    let level = if is_new(error.detail()) { Level::Warn } else { Level::Debug };
    let text = format_args!("{NAME}: {what} memory is not shared: {}", explain(error));
    ucx.log(level, file!(), line!(), text);
    NoKey
}

/// Whether sharing has not failed for this reason before.
fn is_new(reason: &str) -> bool {
    const MOST: usize = 16;
    static KNOWN: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let is_new = known.len() < MOST && !known.iter().any(|known| known == reason);
    if is_new {
        known.push(reason.to_owned());
    }
    is_new
}

impl IpcDomain {
    pub(super) fn new(ucx: &'static Ucx) -> Self {
        IpcDomain { ucx, _kept_open: gaudi::runtime().keep_open() }
    }
}

impl Memory {
    /// The registration of a host buffer.
    pub(super) fn host_region(&self) -> Option<&Arc<HostRegion>> {
        match self {
            Memory::Host(memory) => Some(&memory.region),
            Memory::Device(_) | Memory::Attached(_) => None,
        }
    }

    /// A peer's memory that serves as the local buffer.
    pub(super) fn attached(&self) -> Option<&RemoteMemory> {
        match self {
            Memory::Attached(key) => Some(key),
            Memory::Device(_) | Memory::Host(_) => None,
        }
    }
}

impl MemoryDomain for IpcDomain {
    type Memory = Memory;

    fn attributes(&self) -> DomainAttributes {
        let gaudi = MemoryTypes::only(MemoryType::GAUDI);
        let all = gaudi.with(MemoryType::HOST);
        DomainAttributes {
            // When UCP has to handle errors, it takes no lane for large messages that cannot invalidate. An
            // invalidated key opens nothing any more, unless another registration of the same allocation is
            // shared: to revoke that one's key would fail healthy peers.
            // RKEY_PTR tells UCP that this domain is for memory of other processes. Without it, and if no
            // copy transport is allowed, UCP would build its copies inside the process on this domain, and
            // fail. No pointer is ever given out: the component does not offer it.
            flags: md_flag::REG
                | md_flag::NEED_RKEY
                | md_flag::RKEY_PTR
                | md_flag::INVALIDATE
                | md_flag::INVALIDATE_RMA
                | md_flag::INVALIDATE_AMO,
            register: all,
            // UCX is told when Gaudi memory is freed, and deregisters it then. Host memory costs
            // nothing to register, and its key must not outlive the operation that it was packed for.
            cache: gaudi,
            detect: MemoryTypes::NONE,
            allocate: MemoryTypes::NONE,
            access: all,
            dmabuf: MemoryTypes::NONE,
            max_alloc: 0,
            register_cost: LinearFunc::default(),
        }
    }

    fn register(&self, asked: &Region<'_>) -> Result<Memory, Status> {
        Ok(match register(self.ucx, NAME, asked)? {
            Registered::Device(found) => Memory::Device(Shareable::new(&found)),
            // A domain for memory of peers: gaudi_copy registers dma-bufs.
            Registered::Dmabuf(..) => return Err(Status::UNSUPPORTED),
            Registered::Host(region) => {
                // UCP hides errors for a rendezvous, but not when the application maps memory.
                let is_passing = asked.hide_errors;
                Memory::Host(ShareableHost { region, is_passing, share: OnceLock::new() })
            }
        })
    }

    /// When this returns, UCX assumes that all access has ended.
    fn invalidate(&self, memory: Memory) {
        if let Memory::Device(Shareable { share, base, length, .. }) = memory
            && let Some(Ok(share)) = share.into_inner()
            && !share.revoke()
        {
            log!(
                self.ucx,
                Warn,
                "{NAME}: a peer still has {length} bytes at {base} open, which were invalidated, and does not give \
                 them back in time: it may write them until its operation ends"
            );
        }
    }

    fn pack_key(
        &self,
        memory: &Memory,
        _address: u64,
        _length: usize,
        key: &mut [u8],
    ) -> Result<(), Status> {
        let packed = match memory {
            Memory::Device(memory) => match memory.share.get_or_init(|| memory.share(self.ucx)) {
                Ok(share) => share.key(),
                Err(reason) => reason.pack(),
            },
            Memory::Host(memory) => match memory.share.get_or_init(|| memory.share(self.ucx)) {
                Ok(share) => share.key(),
                Err(reason) => reason.pack(),
            },
            // Only the owner process packs its keys.
            Memory::Attached(_) => return Err(Status::UNSUPPORTED),
        };
        key.copy_from_slice(&packed);
        Ok(())
    }

    fn attach(&self, key: &[u8], hide_errors: bool) -> Result<Memory, Status> {
        // Mapping needs a card: the one of this process, which is opened now if none is.
        let card = || {
            let open = card_near(self.ucx, SysDevice::UNKNOWN);
            open.or_else(|| domain::configured_device().ok())
        };
        match RemoteMemory::attach(key, card) {
            Ok(key) => Ok(Memory::Attached(key)),
            Err(why) if hide_errors => Err(unreachable(self.ucx, &why)),
            Err(why) => {
                log!(self.ucx, Error, "{NAME}: cannot attach a peer's memory: {why}");
                Err(Status::UNREACHABLE)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::is_new;

    #[test]
    fn a_reason_is_a_warning_once() {
        assert!(is_new("no socket"));
        assert!(!is_new("no socket"));
        assert!(is_new("no thread"));
    }
}
