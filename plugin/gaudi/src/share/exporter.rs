//! The exporter's side: which allocations are shared, under which token, through which dma-buf, and
//! what becomes of them when they are freed.

use std::collections::HashMap;
use std::fmt;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};

use super::broker::{Broker, Connections};
use super::key::{self, Bus, Fields, Token};
use super::leases::{ConnectionId, ExporterLeases};
use super::relay::{HostShares, Service};
use super::wire::LeaseId;
use super::{Identity, KEY_LEN, descriptors};
use crate::device::PEERS_PAUSES_MS;
use crate::process::{CloseOnFork, PerProcess, thread};
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{Device, DeviceAddr, DeviceId, Error, ErrorKind, Location};

const SHARING: &str = "sharing device memory";

/// One allocation that other processes may open, with the key to hand them.
///
/// It stands for the whole allocation; all shares of one allocation have the same key and the same
/// dma-buf. When the last is dropped, the allocation freed, or its card lost, the key is invalid: the
/// broker refuses it, and those who have a lease are asked to release it. Freed memory is returned to the pool when all
/// leases on it have ended.
///
/// It keeps its device open.
#[derive(Clone)]
pub struct Share {
    inner: Arc<ShareInner>,
    _device: Arc<Device>,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (base, len) = (self.base(), self.len());
        f.debug_struct("Share").field("base", &base).field("len", &len).finish_non_exhaustive()
    }
}

impl Share {
    /// What to give to peers. Who has it can read and write the allocation: send it only to those
    /// who may.
    pub fn key(&self) -> [u8; KEY_LEN] {
        self.inner.fields.pack()
    }

    /// First address of the allocation.
    pub fn base(&self) -> DeviceAddr {
        DeviceAddr(self.inner.fields.base)
    }

    /// Drops it, and waits until no peer reaches the memory through it any more, for a second at most. `false` if one
    /// still does: it is using the memory, or does not answer. A peer that was waited for in vain is not waited for
    /// again for five seconds. Where another share of the same allocation remains, the key stays good and nothing is
    /// waited for; nor is it in a forked child, whose parent shares the memory.
    pub fn revoke(self) -> bool {
        let (exporter, Fields { base, token, .. }) = (self.inner.exporter, self.inner.fields);
        drop(self);
        !exporter.is_current() || exporter.wait_for_leases(base, token)
    }

    /// Length of the allocation in bytes.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.inner.fields.len
    }
}

/// What all shares of an allocation have in common. The offer ends with the last of them.
#[derive(Debug)]
struct ShareInner {
    exporter: &'static Exporter,
    fields: Fields,
}

impl Drop for ShareInner {
    fn drop(&mut self) {
        // A child must not withdraw it: the offer is its parent's.
        if self.exporter.is_current() {
            let Fields { base, token, .. } = self.fields;
            self.exporter.withdraw(base, token);
        }
    }
}

/// Memory that is offered, for as long as it is.
#[derive(Debug)]
pub(super) struct Offered {
    /// What a lease hands over; `None` where the driver has no import. A forked child does not keep it: it would keep
    /// the card busy.
    pub(super) dmabuf: Option<Arc<CloseOnFork>>,
    share: Weak<ShareInner>,
    device: Weak<Device>,
    device_id: DeviceId,
    len: u64,
    _gauge: GaugeGuard,
}

/// Memory that a copy of our own service uses. It does not go back to the pool before this is dropped.
#[derive(Debug)]
pub(super) struct InUse {
    exporter: &'static Exporter,
    base: u64,
    /// The card that it is on.
    pub(super) device: Arc<Device>,
}

impl Drop for InUse {
    fn drop(&mut self) {
        let reuse = self.exporter.state().leases.end_use(self.base);
        if let Some(Reuse(reuse)) = reuse {
            reuse();
        }
    }
}

/// Returns memory to the pool: to be called without a lock.
pub(super) struct Reuse(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Reuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reuse")
    }
}

#[derive(Debug, Default)]
struct State {
    leases: ExporterLeases<Offered, Reuse>,
    connections: Connections,
    late: Late,
}

/// Peers that did not release a revoked lease in time, and until when they are not waited for: whoever invalidates
/// much memory would wait for each of it.
#[derive(Debug, Default)]
struct Late(HashMap<ConnectionId, Instant>);

impl Late {
    const FOR: Duration = Duration::from_secs(5);

    fn add(&mut self, ids: &[ConnectionId], now: Instant) {
        self.0.retain(|_, until| now < *until);
        for id in ids {
            self.0.entry(*id).or_insert(now + Self::FOR);
        }
    }

    fn contains(&self, id: ConnectionId, now: Instant) -> bool {
        self.0.get(&id).is_some_and(|until| now < *until)
    }
}

/// This process as an exporter. One lock for everything: a lease is granted and recorded, and memory
/// withdrawn and its leases revoked, in one step. Nothing waits for a card under it.
#[derive(Debug)]
pub(super) struct Exporter {
    identity: &'static Identity,
    state: Mutex<State>,
    /// A [`Preparation`] has ended.
    prepared: Condvar,
    broker: OnceLock<Broker>,
    /// Whether the broker's thread runs. Taken to start it.
    is_running: Mutex<bool>,
    host_shares: HostShares,
    service: OnceLock<Service>,
    /// Whether the service's thread runs. Taken to start it.
    is_relaying: Mutex<bool>,
}

static EXPORTER: PerProcess<Exporter> = PerProcess::new();

impl Exporter {
    /// Made when the first memory is shared; a forked child makes its own.
    fn current() -> Result<&'static Exporter, Error> {
        EXPORTER.get_or_make(|| {
            let identity = Identity::own().map_err(|error| {
                let remedy = "mount /proc in this container";
                Error::new(ErrorKind::ChannelFailed, SHARING, error.to_string(), remedy)
            })?;
            let (state, is_running) = (Mutex::default(), Mutex::default());
            let prepared = Condvar::new();
            Ok(Self {
                identity,
                state,
                prepared,
                broker: OnceLock::new(),
                is_running,
                host_shares: HostShares::default(),
                service: OnceLock::new(),
                is_relaying: Mutex::default(),
            })
        })
    }

    /// The one there is, if this process has shared anything.
    pub(super) fn if_any() -> Option<&'static Exporter> {
        EXPORTER.get()
    }

    /// Whether this is the process it was made for, and not a forked child of it.
    fn is_current(&self) -> bool {
        Self::if_any().is_some_and(|current| std::ptr::eq(current, self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the broker if it does not run. Without one nothing can be shared; it is tried again
    /// with the next share.
    fn start_broker(&'static self) -> Result<&'static Broker, Error> {
        let mut is_running = self.is_running.lock().unwrap_or_else(PoisonError::into_inner);
        let failed = |reason: String| {
            let remedy = "peers get this process's memory from its broker alone: let it open sockets (ulimit -n)";
            Error::new(ErrorKind::ChannelFailed, "starting the broker", reason, remedy)
        };
        let broker = match self.broker.get() {
            Some(broker) => broker,
            None => {
                let broker = Broker::new(self.identity).map_err(failed)?;
                self.broker.get_or_init(|| broker)
            }
        };
        if !*is_running {
            thread::spawn("gaudi-broker", move || broker.run(self))
                .map_err(|error| failed(format!("no thread: {error}")))?;
            *is_running = true;
        }
        Ok(broker)
    }

    /// The host memory that is shared.
    pub(super) fn host_shares(&self) -> &HostShares {
        &self.host_shares
    }

    /// The service of relays, which is made for the first.
    pub(super) fn service(&self) -> &OnceLock<Service> {
        &self.service
    }

    /// Whether the service's thread runs.
    pub(super) fn is_relaying(&self) -> MutexGuard<'_, bool> {
        self.is_relaying.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps memory of a card for a copy, if `[addr, addr + len)` is shared under this token.
    pub(super) fn begin_use(&'static self, token: Token, addr: u64, len: u64) -> Option<InUse> {
        let mut state = self.state();
        let (base, offered) = state.leases.begin_use(addr, token)?;
        let is_inside = (addr - base).checked_add(len).is_some_and(|end| end <= offered.len);
        let device = offered.device.upgrade().filter(|_| is_inside);
        if device.is_none() {
            // It is offered, so nothing waits for it.
            let _none = state.leases.end_use(base);
        }
        drop(state);
        device.map(|device| InUse { exporter: self, base, device })
    }

    fn share(
        &'static self,
        device: &Arc<Device>,
        addr: DeviceAddr,
    ) -> Result<Arc<ShareInner>, Error> {
        loop {
            let mut state = self.state();
            let location = device.registry().locate_known(addr.0, 1);
            let location = location.ok_or_else(|| device.freed_meanwhile(addr))?;
            let base = location.base.0;
            if let Some((offered, token)) = state.leases.offered(base) {
                if let Some(share) = offered.share.upgrade() {
                    return Ok(share);
                }
                // Its last share is just being dropped by another thread.
                drop(state);
                self.withdraw(base, token);
            } else if state.leases.prepare(base) {
                drop(state);
                return self.share_prepared(device, location);
            } else {
                drop(self.prepared.wait(state).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// Exports memory and offers it. The card may be busy, so this does not hold the lock: whoever frees
    /// the memory meanwhile leaves it to the [`Preparation`].
    fn share_prepared(
        &'static self,
        device: &Arc<Device>,
        location: Location,
    ) -> Result<Arc<ShareInner>, Error> {
        let base = location.base;
        let _preparation = Preparation { exporter: self, base: base.0 };
        let (share, dmabuf) = self.export(device, location)?;
        let mut state = self.state();
        if state.leases.is_freed(base.0) {
            return Err(device.freed_meanwhile(base));
        }
        state.leases.offer(base.0, share.fields.pack(), share.fields.token, dmabuf);
        drop(state);
        // Perhaps after `card_lost` was called.
        if device.is_surely_lost() {
            self.card_lost(device.id());
        }
        Ok(share)
    }

    fn export(
        &'static self,
        device: &Arc<Device>,
        location: Location,
    ) -> Result<(Arc<ShareInner>, Offered), Error> {
        let (base, len) = (location.base.0, location.length);
        let fits = base.is_multiple_of(key::PAGE) && key::fits(base, len);
        let source = Bus::new(&device.info().bus_id).filter(|_| fits);
        let source = source.ok_or_else(|| {
            failed(format!("{len} bytes at {} do not fit into a key", location.base))
        })?;
        let dmabuf = match device.can_import() {
            // Where this driver cannot import, neither can those of peers.
            Err(error) if error.errno() == Some(libc::EOPNOTSUPP) && !device.is_guest() => None,
            _ => Some(Self::export_dmabuf(device, &location)?),
        };
        let fields = self.new_fields(source, base, len)?;
        let gauge = device.counts().track(Gauge::Share, len);
        let share = Arc::new(ShareInner { exporter: self, fields });
        let offered = Offered {
            dmabuf,
            share: Arc::downgrade(&share),
            device: Arc::downgrade(device),
            device_id: device.id(),
            len,
            _gauge: gauge,
        };
        Ok((share, offered))
    }

    /// What a new key says. The token is drawn anew.
    pub(super) fn new_fields(&self, source: Bus, base: u64, len: u64) -> Result<Fields, Error> {
        let mut token = Token([0; 8]);
        getrandom(&mut token.0[..], GetRandomFlags::empty())
            .map_err(|error| failed(format!("getrandom: {error}")))?;
        Ok(Fields { peer: *self.identity, token, source, base, len })
    }

    fn export_dmabuf(device: &Arc<Device>, location: &Location) -> Result<Arc<CloseOnFork>, Error> {
        let len = location.length;
        // A dma-buf covers whole 4 KiB pages. What an earlier allocation left behind the end of this
        // one is not for peers.
        device.clear_tail(location.base, len)?;
        let (dmabuf, offset) = device.export_alone(location.base, len)?;
        let found = descriptors::file_len(dmabuf.as_fd())
            .map_err(|error| failed(format!("fstat: {error}")))?;
        if offset != 0 || found != len.next_multiple_of(key::PAGE) {
            return Err(failed(format!(
                "the dma-buf of {len} bytes is {found} long and starts {offset} before them"
            )));
        }
        let kept = descriptors::keep(dmabuf).map_err(|reason| {
            Error::new(ErrorKind::OutOfMemory, SHARING, reason, descriptors::REMEDY)
        })?;
        Ok(Arc::new(kept))
    }

    /// Ends the offer at `base` with this token, if there is one: nobody can open it from now on, and all
    /// leases on it are revoked.
    fn withdraw(&self, base: u64, token: Token) {
        let mut state = self.state();
        // The dma-buf is closed here, under the lock: the driver refuses to unmap exported memory, and
        // another thread may free it than the one that ends the offer.
        let revoked = state.leases.withdraw(base, Some(token));
        self.revoke(&mut state, revoked);
    }

    /// Withdraws all that is shared of a card.
    fn card_lost(&self, device: DeviceId) {
        let mut state = self.state();
        let revoked = state.leases.withdraw_all(|offered| offered.device_id == device);
        self.revoke(&mut state, revoked);
    }

    /// Waits until there are no leases from this offer any more; whether there are none. An offer that has not ended
    /// is another share's.
    fn wait_for_leases(&'static self, base: u64, token: Token) -> bool {
        let mut holders = Vec::new();
        for pause in PEERS_PAUSES_MS {
            std::thread::sleep(Duration::from_millis(pause));
            self.serve_all();
            let state = self.state();
            let is_offered =
                state.leases.offered(base).is_some_and(|(_, offered)| offered == token);
            holders = state.leases.holders(base, token);
            let is_in_use = state.leases.is_in_use(base);
            if is_offered || holders.is_empty() && !is_in_use {
                return true;
            }
            let now = Instant::now();
            if !is_in_use && holders.iter().all(|holder| state.late.contains(*holder, now)) {
                return false;
            }
        }
        self.state().late.add(&holders, Instant::now());
        false
    }

    /// Ends the offer at `base`, if there is one, and keeps the memory until its leases have ended. One
    /// lock for both: a thread that has just exported the memory offers it before this, and the offer
    /// ends, or sees that it was freed.
    fn free(&self, base: u64, reuse: Reuse) {
        let mut state = self.state();
        let (revoked, now) = state.leases.free(base, reuse);
        self.revoke(&mut state, revoked);
        drop(state);
        if let Some(Reuse(reuse)) = now {
            reuse();
        }
    }

    fn revoke(&self, state: &mut State, revoked: Vec<(ConnectionId, LeaseId)>) {
        let Some(broker) = self.broker.get() else { return };
        for (connection, lease) in revoked {
            // Where this fails the peer has hung up, as the broker is about to see.
            let _ = state.connections.revoke(connection, lease, broker);
        }
    }

    /// The connections, for the broker.
    pub(super) fn connections(&self) -> impl std::ops::DerefMut<Target = Connections> + '_ {
        ConnectionsGuard(self.state())
    }

    /// Serves one connection.
    pub(super) fn serve(&'static self, id: ConnectionId) {
        self.serve_some(|_| vec![id]);
    }

    /// Takes in what all peers have sent so far, without waiting for the broker's thread.
    fn serve_all(&'static self) {
        self.serve_some(Connections::all);
    }

    fn serve_some(&'static self, which: impl FnOnce(&Connections) -> Vec<ConnectionId>) {
        let Some(broker) = self.broker.get() else { return };
        let mut reuse = Vec::new();
        let mut state = self.state();
        let State { leases, connections, .. } = &mut *state;
        let mut relays = Vec::new();
        for id in which(connections) {
            connections.serve(id, broker, self, leases, (&mut reuse, &mut relays));
        }
        drop(state);
        for (socket, ring) in relays {
            Service::adopt(self, socket, ring);
        }
        reuse.into_iter().for_each(|Reuse(reuse)| reuse());
    }

    /// Hangs up on those who were not granted anything in time.
    pub(super) fn expire(&self) {
        let Some(broker) = self.broker.get() else { return };
        let mut state = self.state();
        let State { leases, connections, .. } = &mut *state;
        for id in connections.overdue() {
            // They have no lease.
            connections.hang_up(id, broker, leases, &mut Vec::new());
        }
    }
}

struct ConnectionsGuard<'a>(MutexGuard<'a, State>);

impl std::ops::Deref for ConnectionsGuard<'_> {
    type Target = Connections;

    fn deref(&self) -> &Connections {
        &self.0.connections
    }
}

impl std::ops::DerefMut for ConnectionsGuard<'_> {
    fn deref_mut(&mut self) -> &mut Connections {
        &mut self.0.connections
    }
}

/// Memory that a thread is about to share. Others that want to share it wait for this to end, and freed
/// memory does not go back to the pool before.
struct Preparation {
    exporter: &'static Exporter,
    base: u64,
}

impl Drop for Preparation {
    fn drop(&mut self) {
        let reuse = self.exporter.state().leases.prepared(self.base);
        self.exporter.prepared.notify_all();
        if let Some(Reuse(reuse)) = reuse {
            reuse();
        }
    }
}

fn failed(detail: String) -> Error {
    Error::new(ErrorKind::ChannelFailed, SHARING, detail, "")
}

/// This process's exporter, with a broker that runs.
pub(super) fn started() -> Result<&'static Exporter, Error> {
    let exporter = Exporter::current()?;
    exporter.start_broker()?;
    Ok(exporter)
}

/// Shares the allocation of `device` in which `addr` lies.
pub(super) fn share(device: &Arc<Device>, addr: DeviceAddr) -> Result<Share, Error> {
    let inner = started()?.share(device, addr)?;
    Ok(Share { inner, _device: Arc::clone(device) })
}

/// Starts this process's broker ahead of the first [`Device::share`]. The error says why there can be
/// none; every share fails with it.
pub fn start_broker() -> Result<(), Error> {
    started().map(drop)
}

/// The allocation at `base` is being freed: nobody can open it from now on. `reuse` returns
/// the memory to the pool: it is called at once, or when the last lease on the memory has ended.
pub(crate) fn freed(base: DeviceAddr, len: u64, counts: Counts, reuse: Box<dyn FnOnce() + Send>) {
    let Some(exporter) = Exporter::if_any() else { return reuse() };
    let quarantined = Quarantined::new(counts, len);
    let reuse = Reuse(Box::new(move || {
        drop(quarantined);
        reuse();
    }));
    exporter.free(base.0, reuse);
}

/// A card was reset or removed: what is shared of it is lost, and nobody can open it from now on.
pub(crate) fn card_lost(device: DeviceId) {
    if let Some(exporter) = Exporter::if_any() {
        exporter.card_lost(device);
    }
}

/// Counts memory that waits for leases to end; also where its wait is replaced by another, for memory
/// of the application that could not be unmapped and is to be unmapped again.
struct Quarantined(Counts, u64);

impl Quarantined {
    fn new(counts: Counts, len: u64) -> Self {
        counts.add(Counter::IpcQuarantinedBytes, len);
        Self(counts, len)
    }
}

impl Drop for Quarantined {
    fn drop(&mut self) {
        self.0.subtract(Counter::IpcQuarantinedBytes, self.1);
    }
}

/// Takes in which leases have ended by now, without waiting for the broker's thread.
pub(crate) fn reclaim() {
    if let Some(exporter) = Exporter::if_any() {
        exporter.serve_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_peer_is_waited_for_again_after_five_seconds() {
        let (late, other) = (ConnectionId(1), ConnectionId(2));
        let (mut known, start) = (Late::default(), Instant::now());
        known.add(&[late], start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(known.contains(late, at(4)) && !known.contains(other, at(4)));
        known.add(&[late, other], at(4));
        assert!(!known.contains(late, at(5)), "counted from the first time");
        assert!(known.contains(other, at(8)));
        known.add(&[late], at(6));
        assert!(known.contains(late, at(10)));
    }
}
