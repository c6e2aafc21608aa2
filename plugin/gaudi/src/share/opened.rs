//! Opens received keys: gives addresses that this process's card can copy from and to, and caches what is mapped.

use std::any::Any;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use super::Limits;
use super::cache::Cache;
use super::descriptors::file_len;
use super::initiator::{self, Lease};
use super::key::{Bus, Fields, PAGE, Token};
use super::unreached::Unreached;
use super::{Identity, KeyError};
use crate::backend::HostPin;
use crate::device::Registry;
use crate::process::ProcessBound;
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{Device, DeviceAddr, Error, Options};

const OPENING: &str = "opening a peer's memory";

/// How many handles a device keeps open at most, and their bytes: the whole memory of eight cards.
const DEFAULT_LIMITS: Limits = Limits { handles: 1024, bytes: 1 << 40 };

/// A key that was received: well-formed, of this machine and boot, and of this user as far as is known. Its owner decides
/// whether it opens anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteKey(Fields);

impl RemoteKey {
    /// Parses a received key. Any bytes may be given: if they are not a key, or of another version, boot, host or user, they
    /// are refused with the reason.
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

    /// The process that shares the memory.
    pub fn peer(&self) -> &Identity {
        &self.0.peer
    }

    pub(super) fn token(&self) -> Token {
        self.0.token
    }

    pub(super) fn fields(&self) -> &Fields {
        &self.0
    }

    /// Whether it is host memory, which only a relay reaches.
    pub fn is_host(&self) -> bool {
        self.0.source == Bus::HOST
    }

    /// Whether `[addr, addr + len)`, as the owner sees it, lies inside.
    pub fn contains(&self, addr: u64, len: u64) -> bool {
        self.0.contains(addr, len)
    }

    /// First address of the allocation, as its owner sees it.
    pub fn base(&self) -> u64 {
        self.0.base
    }

    /// Length of the allocation in bytes, as the key says. Copies are bounded by what was imported: see
    /// [`Opened::translate`].
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// Makes the memory visible to `device` while the returned value lives. After that the import stays cached for the next
    /// caller with the same key, within bounds ([`Device::set_handle_limits`]).
    ///
    /// Fails if the driver cannot import, or if the owner has ended, does not share memory under exactly this key (any more)
    /// or cannot be reached. If the import is not cached, this waits for the owner, up to a second. An owner that does not
    /// answer is not asked again for five seconds.
    pub fn open(&self, device: &Arc<Device>) -> Result<Arc<Opened>, Error> {
        // First: in a forked child the cache's lock may be held for ever, by a thread of the parent.
        device.check_process(OPENING)?;
        self.try_open(device).map(Arc::new).map_err(|error| device.failed(error))
    }

    fn try_open(&self, device: &Arc<Device>) -> Result<Opened, Error> {
        let key = &self.0;
        // Every operation of a transport comes through here: if the import is cached, this costs a lock and a lookup. The
        // whole key must be equal to that of the import.
        let handle = match device.handles().find(key, device.counts()) {
            Some(found) => found,
            None => self.open_anew(device)?,
        };
        Ok(Opened { handle, _user: User(Arc::clone(device)), key: *key })
    }

    fn open_anew(&self, device: &Arc<Device>) -> Result<Arc<Handle>, Error> {
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

/// Another process's allocation, visible to one device of this process.
///
/// Keeps the device open. The memory is not reused while this lives, even if the owner frees it or ends.
pub struct Opened {
    handle: Arc<Handle>,
    // Dropped after the handle, which may be idle then.
    _user: User,
    key: Fields,
}

/// Trims the cache of its device to its bounds when dropped.
struct User(Arc<Device>);

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (base, len) = (DeviceAddr(self.key.base), self.key.len);
        f.debug_struct("Opened").field("base", &base).field("len", &len).finish_non_exhaustive()
    }
}

impl Opened {
    /// The device's address of `[remote_addr, remote_addr + len)` of the owner; `None` if that is not within the memory that
    /// was imported. Use it as [`Side::Device`](crate::Side::Device) only in copies of the device it was opened for, and only
    /// while this lives.
    pub fn translate(&self, remote_addr: u64, len: usize) -> Option<DeviceAddr> {
        let offset = remote_addr.checked_sub(self.key.base)?;
        let end = offset.checked_add(len as u64)?;
        (end <= self.handle.len).then(|| DeviceAddr(self.handle.addr.0 + offset))
    }

    /// Whether the owner has ended. An atomic flag, set moments after the end; reading it makes no system call. Copies still
    /// work, but the owner does not use the memory any more.
    pub fn has_peer_ended(&self) -> bool {
        self.handle.lease.has_owner_ended()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        // In a forked child the cache's lock may be held for ever, by a thread of the parent.
        if self.0.is_ours() {
            self.0.handles().trim(self.0.counts());
        }
    }
}

/// An import that is unmapped exactly once: when the cache and all users have dropped it.
#[derive(Debug)]
pub(crate) struct Handle {
    addr: DeviceAddr,
    /// Length of the leased memory. The mapping is longer: whole pages.
    len: u64,
    mapped_len: u64,
    /// Weak, because the device owns the cache that owns this.
    device: Weak<Device>,
    // Dropped in this order: unmapped, then counted, then the lease is released. Only by the process that opened it, not by a
    // forked child, which has the same card.
    _pin: ProcessBound<HostPin>,
    _gauge: ProcessBound<GaugeGuard>,
    lease: ProcessBound<Lease>,
}

impl Handle {
    fn import(key: &Fields, device: &Arc<Device>) -> Result<(Self, u64), Error> {
        let counts = device.counts();
        let len = key.dmabuf_len();
        let leased = initiator::lease(key, device.registry()).and_then(|(lease, dmabuf)| {
            counts.add(Counter::IpcDescriptorsReceived, 1);
            match file_len(dmabuf.as_fd()) {
                Ok(found) if found == len => Ok((lease, dmabuf)),
                _ => Err(Unreached::Mismatch("a file of another length")),
            }
        });
        let (lease, dmabuf) = leased.map_err(|why| {
            counts.add(why.counter(), 1);
            why.error(&key.peer)
        })?;
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

/// The cached handles of one device, by the whole key.
#[derive(Debug)]
struct Handles(Cache<Fields, Handle>);

/// An empty cache, for a device to keep.
pub(crate) fn peer_handles(options: &Options) -> Box<dyn Any + Send + Sync> {
    Box::new(Handles(Cache::new(options.handle_limits.unwrap_or(DEFAULT_LIMITS))))
}

/// Unmaps the cached imports of some memory: at once, or when their last users are done.
pub(super) fn evict(registry: &Registry, which: impl Fn(&Fields) -> bool) {
    for device in registry.devices() {
        drop(device.handles().0.evict(&which));
    }
}

/// Unmaps the cached imports of some memory that are not in use; returns how many.
pub(super) fn evict_idle(registry: &Registry, which: impl Fn(&Fields) -> bool) -> usize {
    let devices = registry.devices();
    devices.iter().map(|device| device.handles().0.evict_idle(&which).len()).sum()
}

impl Handles {
    fn open(
        &self,
        key: Fields,
        counts: Counts,
        import: impl FnOnce() -> Result<(Handle, u64), Error>,
    ) -> Result<Arc<Handle>, Error> {
        let found = self.0.open(key, import)?;
        counts.add(if found.hit { Counter::IpcCacheHits } else { Counter::IpcCacheMisses }, 1);
        self.trim(counts);
        Ok(found.value)
    }

    /// The handle of this key, if it is open.
    fn find(&self, key: &Fields, counts: Counts) -> Option<Arc<Handle>> {
        let handle = self.0.find(key)?;
        if handle.lease.has_owner_ended() {
            // The watcher's thread has not evicted it yet.
            drop(handle);
            drop(self.0.evict(|other| other == key));
            return None;
        }
        counts.add(Counter::IpcCacheHits, 1);
        Some(handle)
    }

    /// Unmaps idle handles until the bounds are kept.
    fn trim(&self, counts: Counts) {
        let evicted = self.0.trim();
        counts.add(Counter::IpcCacheEvictions, evicted.len() as u64);
    }
}

impl Device {
    fn handles(&self) -> &Handles {
        self.peer_handles().downcast_ref().expect("made by `peer_handles`")
    }

    /// Bounds the peers' memory that this device keeps open. Memory in use counts, but only idle memory is closed.
    pub fn set_handle_limits(&self, limits: Limits) {
        self.handles().0.set_limits(limits);
        self.handles().trim(self.counts());
    }
}
