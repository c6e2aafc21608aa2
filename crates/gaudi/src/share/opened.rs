//! The importer's side: a key becomes addresses that this process's card can copy from and to.

use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::cache::{Cache, Limits};
use super::export::Exporter;
use super::handover::{self, Failure, OPENING, Way};
use super::keeper::{self, Peer};
use super::key::{Bus, Fields};
use super::message::Offered;
use super::{Identity, KeyError};
use crate::backend::HostPin;
use crate::process::ProcessBound;
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{BusId, Device, DeviceAddr, Error, ErrorKind, runtime};

/// Most handles a device keeps open, and their bytes: eight cards' whole memory.
pub const DEFAULT_LIMITS: Limits = Limits { handles: 1024, bytes: 1 << 40 };

/// A key that was received: well-formed, of this machine and boot, and of this user as far as it can
/// be told. Whether it opens anything, its exporter decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteKey(Fields);

/// What a key's memory is to this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// Shared by this very process: copy locally.
    SameProcess,
    /// Of another process, on a card that this process has open. A card has one owner, so this only
    /// happens while one is handed from process to process; it cannot be opened.
    SameDeviceOtherProcess,
    /// Of another process, on a card that is not ours.
    OtherDevice,
}

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

    /// First address of the allocation, as its exporter sees it.
    pub fn base(&self) -> u64 {
        self.0.base
    }

    /// Length of the allocation in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.0.len
    }

    /// The card the memory lies on.
    pub fn source_device(&self) -> BusId {
        self.0.source.id()
    }

    /// What the memory is to this process.
    pub fn relation(&self) -> Relation {
        if self.0.peer.is_own() {
            return Relation::SameProcess;
        }
        let is_source =
            |device: &Arc<Device>| Bus::new(&device.info().bus_id) == Some(self.0.source);
        match runtime().devices().iter().any(is_source) {
            true => Relation::SameDeviceOtherProcess,
            false => Relation::OtherDevice,
        }
    }

    /// Makes the memory visible to `device`, for as long as the answer lives and a while longer: it
    /// is kept for the next who opens the same, within bounds ([`Device::set_handle_limits`]).
    ///
    /// Fails where the driver cannot import, where the exporter has ended, does not share the memory
    /// (any more) or cannot be asked. What is not open yet may have to wait for the exporter's broker: up
    /// to a second, and not again within the next five if that does not answer.
    pub fn open(&self, device: &Arc<Device>) -> Result<Arc<Opened>, Error> {
        self.try_open(device).map(Arc::new).map_err(|error| device.failed(error))
    }

    fn try_open(&self, device: &Arc<Device>) -> Result<Opened, Error> {
        let key = &self.0;
        let name = HandleKey { peer: key.peer, offered: key.offered() };
        let handles = device.handles();
        // Every operation of a transport comes through here: what is open costs a lock and a look.
        let place = match handles.find(&name, device.counts()) {
            Some((handle, serial)) => Place::Imported { handle, name, serial },
            None => self.open_anew(device, name)?,
        };
        Ok(Opened { place, device: Arc::clone(device), base: key.base, len: key.len })
    }

    fn open_anew(&self, device: &Arc<Device>, name: HandleKey) -> Result<Place, Error> {
        let key = &self.0;
        let refused = |failure: Failure| failed(device.counts(), &failure, key);
        let own = key.peer.is_own();
        if Bus::new(&device.info().bus_id) == Some(key.source) {
            if !own {
                let detail = format!("{} has the card this process uses itself", key.peer);
                return Err(Error::unsupported(OPENING, detail, "use another card"));
            }
            // Who knows the token may use it, here as elsewhere.
            handover::fetch(key, None).map_err(refused)?;
            return Ok(Place::Local);
        }
        device.can_import()?;
        let peer = match own {
            true => None,
            false => Some(keeper::keep(&key.peer).map_err(refused)?),
        };
        let import = || Handle::import(key, device, peer);
        let (handle, serial) = device.handles().open(name, device.counts(), import)?;
        Ok(Place::Imported { handle, name, serial })
    }
}

fn failed(counts: Counts, failure: &Failure, key: &Fields) -> Error {
    let counter = match failure {
        Failure::Ended => Counter::IpcRefusedEnded,
        Failure::Withdrawn => Counter::IpcRefusedWithdrawn,
        Failure::NoWay(_) => Counter::IpcRefusedUnreachable,
        Failure::Mismatch(_) => Counter::IpcRefusedMismatch,
    };
    counts.add(counter, 1);
    failure.error(&key.peer)
}

/// Another process's allocation, visible to one device of this process.
///
/// Keeps the device open. What it reaches stays there while it lives, even if the exporter frees it
/// or ends.
pub struct Opened {
    place: Place,
    // After the place, which is given back to it.
    device: Arc<Device>,
    base: u64,
    len: u64,
}

enum Place {
    /// On this very device: the addresses are what they are.
    Local,
    Imported {
        handle: Arc<Handle>,
        name: HandleKey,
        serial: u64,
    },
}

impl fmt::Debug for Opened {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (base, len) = (DeviceAddr(self.base), self.len);
        f.debug_struct("Opened").field("base", &base).field("len", &len).finish_non_exhaustive()
    }
}

impl Opened {
    /// Where the device sees `[remote_addr, remote_addr + len)` of the exporter; `None` if that is
    /// not within the allocation. Use it as [`Side::Device`](crate::Side::Device) in copies of
    /// [`Opened::device`] only, and while this lives.
    pub fn translate(&self, remote_addr: u64, len: usize) -> Option<DeviceAddr> {
        let offset = remote_addr.checked_sub(self.base)?;
        let end = offset.checked_add(len as u64)?;
        let start = match &self.place {
            Place::Local => self.base,
            Place::Imported { handle, .. } => handle.addr.0,
        };
        (end <= self.len).then(|| DeviceAddr(start + offset))
    }

    /// The device that sees it.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Whether the exporter has ended. Known within moments, without asking the system: an atomic
    /// flag. What was opened can still be copied, but nobody is there to make use of it.
    pub fn is_peer_gone(&self) -> bool {
        match &self.place {
            Place::Local => false,
            Place::Imported { handle, .. } => {
                handle.hold.peer.as_ref().is_some_and(|peer| peer.has_ended())
            }
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Place::Imported { name, serial, .. } = &self.place {
            self.device.handles().release(name, *serial, self.device.counts());
        }
    }
}

/// What tells handles apart: a reused process id has another identity, reused memory another token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HandleKey {
    pub(crate) peer: Identity,
    pub(crate) offered: Offered,
}

/// What the exporter was told: that we hold its memory.
#[derive(Debug)]
struct Hold {
    /// `None`: this process itself.
    peer: Option<Arc<Peer>>,
    offered: Offered,
    /// Whether it was opened.
    opened: bool,
}

impl Hold {
    fn new(peer: Option<Arc<Peer>>, offered: Offered) -> Self {
        match &peer {
            Some(peer) => peer.hold(offered),
            None => Exporter::if_any().into_iter().for_each(|own| own.hold_own(offered)),
        }
        Self { peer, offered, opened: false }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        match &self.peer {
            Some(peer) => peer.let_go(self.offered, self.opened),
            None => Exporter::if_any().into_iter().for_each(|own| own.let_go_own(&self.offered)),
        }
    }
}

/// An import that is unmapped exactly once: when the cache and all users have let go.
#[derive(Debug)]
pub(crate) struct Handle {
    addr: DeviceAddr,
    len: u64,
    /// The device owns the cache that owns this, and must be able to go.
    device: Weak<Device>,
    // Unmapped, then counted, then the exporter is told; by the process that opened it, not by a
    // forked child, which has the same card and the same sheet.
    _pin: ProcessBound<HostPin>,
    _gauge: ProcessBound<GaugeGuard>,
    hold: ProcessBound<Hold>,
}

impl Handle {
    fn import(
        key: &Fields,
        device: &Arc<Device>,
        peer: Option<Arc<Peer>>,
    ) -> Result<(Self, u64), Error> {
        let counts = device.counts();
        let mut hold = Hold::new(peer, key.offered());
        let fetched = handover::fetch(key, hold.peer.as_deref());
        let (dmabuf, way) = fetched.map_err(|failure| failed(counts, &failure, key))?;
        match way {
            Way::Own => {}
            Way::Pidfd => counts.add(Counter::IpcHandoversPidfd, 1),
            Way::Broker => counts.add(Counter::IpcHandoversBroker, 1),
        }
        if hold.peer.as_ref().is_some_and(|peer| !peer.is_guarded()) {
            counts.add(Counter::IpcHandlesUnguarded, 1);
        }
        let len = key.dmabuf_len();
        let pin = device.map_dmabuf(dmabuf.as_fd(), len)?;
        hold.opened = true;
        let (addr, gauge) = (pin.addr, ProcessBound::new(counts.track(Gauge::Handle, len)));
        let (device, pin, hold) =
            (Arc::downgrade(device), ProcessBound::new(pin), ProcessBound::new(hold));
        Ok((Self { addr, len, device, _pin: pin, _gauge: gauge, hold }, len))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // While the device itself is being dropped, nothing is in flight any more.
        if self.hold.is_ours()
            && let Some(device) = self.device.upgrade()
        {
            device.forget_import(self.addr, self.len);
        }
    }
}

/// The handles one device keeps.
#[derive(Debug)]
pub(crate) struct Handles(Cache<HandleKey, Handle>);

impl Default for Handles {
    fn default() -> Self {
        Self(Cache::new(*default_limits()))
    }
}

/// What a device begins with.
fn default_limits() -> MutexGuard<'static, Limits> {
    static LIMITS: Mutex<Limits> = Mutex::new(DEFAULT_LIMITS);
    LIMITS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bounds the handles of all devices of this process, of those there are and of those that come.
pub fn set_handle_limits(limits: Limits) {
    *default_limits() = limits;
    for device in runtime().devices() {
        device.set_handle_limits(limits);
    }
}

impl Handles {
    fn open(
        &self,
        name: HandleKey,
        counts: Counts,
        import: impl FnOnce() -> Result<(Handle, u64), Error>,
    ) -> Result<(Arc<Handle>, u64), Error> {
        let lease = self.0.open(name, import)?;
        let counter = if lease.hit { Counter::IpcCacheHits } else { Counter::IpcCacheMisses };
        counts.add(counter, 1);
        evicted(lease.evicted, counts);
        Ok((lease.value, lease.serial))
    }

    /// One that is open already.
    fn find(&self, name: &HandleKey, counts: Counts) -> Option<(Arc<Handle>, u64)> {
        let found = self.0.find(name)?;
        counts.add(Counter::IpcCacheHits, 1);
        Some(found)
    }

    fn release(&self, name: &HandleKey, serial: u64, counts: Counts) {
        evicted(self.0.release(name, serial), counts);
    }

    pub(super) fn evict(&self, which: impl Fn(&HandleKey) -> bool) {
        drop(self.0.evict(which));
    }
}

fn evicted(handles: Vec<Arc<Handle>>, counts: Counts) {
    counts.add(Counter::IpcCacheEvictions, handles.len() as u64);
    drop(handles);
}

impl Device {
    /// Bounds the peers' memory this device keeps open though nobody uses it at the moment. What is
    /// in use counts, but is never closed.
    pub fn set_handle_limits(&self, limits: Limits) {
        evicted(self.handles().0.set_limits(limits), self.counts());
    }

    /// The bounds.
    pub fn handle_limits(&self) -> Limits {
        self.handles().0.limits()
    }
}

impl KeyError {
    /// As an error of the engine.
    pub fn into_error(self) -> Error {
        let kind = match self {
            KeyError::OtherUser { .. } => ErrorKind::PermissionDenied,
            KeyError::OtherHost | KeyError::OwnIdentity(_) => ErrorKind::ChannelFailed,
            _ => ErrorKind::InvalidParams,
        };
        Error::new(kind, OPENING, self.to_string(), "")
    }
}
