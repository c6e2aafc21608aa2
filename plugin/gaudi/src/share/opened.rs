//! What an importer makes of a key: addresses that this process's card can copy from and to, and the
//! cache of what is mapped.

use std::any::Any;
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};

use super::Limits;
use super::cache::Cache;
use super::descriptors::file_len;
use super::importer::{self, Lease};
use super::key::{Bus, Fields, KEY_LEN, PAGE, Token};
use super::no_lease::NoLease;
use super::{Identity, KeyError};
use crate::backend::HostPin;
use crate::device::Registry;
use crate::process::ProcessBound;
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{Device, DeviceAddr, Error, ErrorKind, Options};

const OPENING: &str = "opening a peer's memory";

/// Most handles a device keeps open, and their bytes: eight cards' whole memory.
const DEFAULT_LIMITS: Limits = Limits { handles: 1024, bytes: 1 << 40 };

/// A key that was received: well-formed, of this machine and boot, and of this user as far as is
/// known. Whether it opens anything, its exporter decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteKey(Fields);

impl RemoteKey {
    /// Takes a received key apart. Any bytes will do: what is no key, or of another version, boot,
    /// host or user, is refused with the reason.
    pub fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        let parsed = Fields::parse(bytes).and_then(|fields| {
            fields.peer.check_reachable()?;
            Ok(Self(fields))
        });
        if parsed.is_err()
            && let Some(counts) = Counts::process()
        {
            counts.add(Counter::IpcKeysRefused, 1);
        }
        parsed
    }

    /// Who shares the memory.
    pub fn peer(&self) -> &Identity {
        &self.0.peer
    }

    pub(super) fn token(&self) -> Token {
        self.0.token
    }

    pub(super) fn pack(&self) -> [u8; KEY_LEN] {
        self.0.pack()
    }

    /// Whether it is host memory, which only a relay reaches.
    pub fn is_host(&self) -> bool {
        self.0.source == Bus::HOST
    }

    /// Whether `[addr, addr + len)`, as the exporter sees it, lies inside.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        self.0.contains(addr, len)
    }

    /// First address of the allocation, as its exporter sees it.
    pub fn base(&self) -> u64 {
        self.0.base
    }

    /// Length of the allocation in bytes, as the key says: what was imported decides, see
    /// [`Opened::translate`].
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Makes the memory visible to `device`, for as long as the answer lives and a while longer: it
    /// is kept for the next who opens the same, within bounds ([`Device::set_handle_limits`]).
    ///
    /// Fails where the driver cannot import, where the exporter has ended, does not share memory under
    /// exactly this key (any more) or cannot be asked. What is not open yet has to wait for the
    /// exporter's broker: up to a second, and not again within the next five if that does not answer.
    pub fn open(&self, device: &Arc<Device>) -> Result<Arc<Opened>, Error> {
        // First: a forked child may have inherited the lock of the cache locked.
        device.check_process(OPENING)?;
        self.try_open(device).map(Arc::new).map_err(|error| device.failed(error))
    }

    fn try_open(&self, device: &Arc<Device>) -> Result<Opened, Error> {
        let key = &self.0;
        // Every operation of a transport comes through here: what is open costs a lock and a lookup.
        // A key that differs in anything from that of the import does not find it.
        let (handle, serial) = match device.handles().find(key, device.counts()) {
            Some(found) => found,
            None => self.open_anew(device)?,
        };
        Ok(Opened { handle, serial, device: Arc::clone(device), key: *key })
    }

    fn open_anew(&self, device: &Arc<Device>) -> Result<(Arc<Handle>, u64), Error> {
        let key = &self.0;
        if key.peer.is_own() {
            let remedy = "copy it as memory of this process";
            return Err(Error::unsupported(OPENING, "this process shares it itself", remedy));
        }
        if Bus::new(&device.info().bus_id) == Some(key.source) {
            let detail = format!("{} has the card this process uses itself", key.peer);
            return Err(Error::unsupported(OPENING, detail, "use another card"));
        }
        if self.is_host() || !key.base.is_multiple_of(PAGE) {
            let detail = "it is host memory, which no card can import";
            return Err(Error::unsupported(OPENING, detail, "reach it through a relay"));
        }
        device.can_import()?;
        let import = || Handle::import(key, device);
        device.handles().open(*key, device.counts(), import)
    }
}

/// What to do where memory is not shared any more.
pub(super) const WITHDRAWN: &str = "it was freed or deregistered, or its card was reset or removed: use a key of memory that is registered there now";

/// Why memory of this process cannot be reached.
pub(super) fn no_way_to(peer: &Identity, why: NoLease) -> Error {
    match why {
        NoLease::Unknown => Failure::Withdrawn,
        _ if peer.has_surely_ended() => Failure::Ended,
        why => Failure::NoLease(why),
    }
    .error(peer)
}

/// Why memory cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Failure {
    /// The exporter has ended.
    Ended,
    /// The exporter replied that no memory is shared under this key: it is wrong, or was withdrawn.
    Withdrawn,
    /// The broker cannot be reached, or does not serve us.
    NoLease(NoLease),
    /// What came is not what the key says.
    Mismatch(&'static str),
}

impl Failure {
    fn error(&self, peer: &Identity) -> Error {
        let (kind, detail, remedy) = match self {
            Failure::Ended => (ErrorKind::ChannelFailed, format!("{peer} has ended"), ""),
            Failure::Withdrawn => (
                ErrorKind::ChannelFailed,
                format!("{peer} does not share this memory (any more)"),
                WITHDRAWN,
            ),
            Failure::NoLease(why) => {
                let (kind, remedy) = why.remedy();
                (kind, format!("{peer} cannot hand over its dma-buf: broker: {why}"), remedy)
            }
            Failure::Mismatch(what) => {
                (ErrorKind::ChannelFailed, format!("{peer} sent something else: {what}"), "")
            }
        };
        let mut error = Error::new(kind, OPENING, detail, remedy);
        match self {
            Failure::Ended => error.set_errno(libc::ESRCH),
            Failure::NoLease(NoLease::NoDmabuf) => error.set_errno(libc::EOPNOTSUPP),
            _ => {}
        }
        error
    }
}

fn failed(device: &Device, failure: &Failure, key: &Fields) -> Error {
    let counter = match failure {
        Failure::Ended => Counter::IpcRefusedEnded,
        Failure::Withdrawn => Counter::IpcRefusedWithdrawn,
        Failure::NoLease(_) => Counter::IpcRefusedUnreachable,
        Failure::Mismatch(_) => Counter::IpcRefusedMismatch,
    };
    device.counts().add(counter, 1);
    failure.error(&key.peer)
}

/// Asks whoever shares the memory for a lease on it, and for the dma-buf.
fn lease(key: &Fields, device: &Device) -> Result<(Lease, OwnedFd), Failure> {
    importer::lease(key, device.registry()).map_err(|why| match why {
        NoLease::Unknown => Failure::Withdrawn,
        _ if key.peer.has_surely_ended() => Failure::Ended,
        why => Failure::NoLease(why),
    })
}

/// Another process's allocation, visible to one device of this process.
///
/// Keeps the device open. What it reaches is nobody else's while it lives, even if the exporter frees
/// it or ends.
pub struct Opened {
    handle: Arc<Handle>,
    serial: u64,
    // After the handle, which is given back to it.
    device: Arc<Device>,
    key: Fields,
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (base, len) = (DeviceAddr(self.key.base), self.key.len);
        f.debug_struct("Opened").field("base", &base).field("len", &len).finish_non_exhaustive()
    }
}

impl Opened {
    /// Where the device sees `[remote_addr, remote_addr + len)` of the exporter; `None` if that is
    /// not within the memory that was imported. Use it as [`Side::Device`](crate::Side::Device) in
    /// copies of the device it was opened for only, and while this lives.
    pub fn translate(&self, remote_addr: u64, len: usize) -> Option<DeviceAddr> {
        let offset = remote_addr.checked_sub(self.key.base)?;
        let end = offset.checked_add(len as u64)?;
        (end <= self.handle.len).then(|| DeviceAddr(self.handle.addr.0 + offset))
    }

    /// Whether the exporter has ended. Known within moments, without asking the system: an atomic
    /// flag. What was opened can still be copied, but nobody is there to make use of it.
    pub fn has_peer_ended(&self) -> bool {
        self.handle.lease.has_exporter_ended()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // A forked child may have inherited the lock of the cache locked.
        if self.device.is_ours() {
            self.device.handles().release(&self.key, self.serial, self.device.counts());
        }
    }
}

/// An import that is unmapped exactly once: when the cache and all users have dropped it.
#[derive(Debug)]
pub(crate) struct Handle {
    addr: DeviceAddr,
    /// What was leased; the import is longer by what it takes to make whole pages.
    len: u64,
    mapped_len: u64,
    /// The device owns the cache that owns this, and must be able to go.
    device: Weak<Device>,
    // Unmapped, then counted, then the lease is released; by the process that opened it, not by a
    // forked child, which has the same card.
    _pin: ProcessBound<HostPin>,
    _gauge: ProcessBound<GaugeGuard>,
    lease: ProcessBound<Lease>,
}

impl Handle {
    fn import(key: &Fields, device: &Arc<Device>) -> Result<(Self, u64), Error> {
        let counts = device.counts();
        let (lease, dmabuf) =
            lease(key, device).map_err(|failure| failed(device, &failure, key))?;
        counts.add(Counter::IpcHandoversBroker, 1);
        let len = key.dmabuf_len();
        if file_len(dmabuf.as_fd()) != Ok(len) {
            let failure = Failure::Mismatch("a file of another length");
            return Err(failed(device, &failure, key));
        }
        let pin = device.map_dmabuf(dmabuf.as_fd(), len)?;
        let handle = Self {
            addr: pin.addr,
            len: key.len,
            mapped_len: len,
            device: Arc::downgrade(device),
            _pin: ProcessBound::new(pin),
            _gauge: ProcessBound::new(counts.track(Gauge::Handle, len)),
            lease: ProcessBound::new(lease),
        };
        Ok((handle, len))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // While the device itself is being dropped, nothing is in flight any more.
        if self.lease.is_ours()
            && let Some(device) = self.device.upgrade()
        {
            device.forget_import(self.addr, self.mapped_len);
        }
    }
}

/// The handles one device keeps, by the whole key.
#[derive(Debug)]
struct Handles(Cache<Fields, Handle>);

/// An empty cache, for a device to keep.
pub(crate) fn peer_handles(options: &Options) -> Box<dyn Any + Send + Sync> {
    Box::new(Handles(Cache::new(options.handle_limits.unwrap_or(DEFAULT_LIMITS))))
}

/// Unmaps what is kept of some memory: at once, or when its last user is done.
pub(super) fn evict(registry: &Registry, which: impl Fn(&Fields) -> bool) {
    for device in registry.devices() {
        drop(device.handles().0.evict(&which));
    }
}

impl Handles {
    fn open(
        &self,
        key: Fields,
        counts: Counts,
        import: impl FnOnce() -> Result<(Handle, u64), Error>,
    ) -> Result<(Arc<Handle>, u64), Error> {
        let reference = self.0.open(key, import)?;
        let is_hit = reference.hit;
        counts.add(if is_hit { Counter::IpcCacheHits } else { Counter::IpcCacheMisses }, 1);
        evicted(reference.evicted, counts);
        Ok((reference.value, reference.serial))
    }

    /// One that is open already.
    fn find(&self, key: &Fields, counts: Counts) -> Option<(Arc<Handle>, u64)> {
        let (handle, serial) = self.0.find(key)?;
        if handle.lease.has_exporter_ended() {
            // The receiver thread has not evicted it yet.
            self.release(key, serial, counts);
            drop(handle);
            drop(self.0.evict(|other| other == key));
            return None;
        }
        counts.add(Counter::IpcCacheHits, 1);
        Some((handle, serial))
    }

    fn release(&self, key: &Fields, serial: u64, counts: Counts) {
        evicted(self.0.release(key, serial), counts);
    }
}

fn evicted(handles: Vec<Arc<Handle>>, counts: Counts) {
    counts.add(Counter::IpcCacheEvictions, handles.len() as u64);
    drop(handles);
}

impl Device {
    fn handles(&self) -> &Handles {
        self.peer_handles().downcast_ref().expect("made by `peer_handles`")
    }

    /// Bounds the peers' memory this device keeps open though nobody uses it at the moment. What is
    /// in use counts, but is never closed.
    pub fn set_handle_limits(&self, limits: Limits) {
        evicted(self.handles().0.set_limits(limits), self.counts());
    }
}
