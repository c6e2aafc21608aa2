//! The card memory that this process shares: which allocations, under which keys, and what keeps them from reuse when they
//! are freed.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::rand::{GetRandomFlags, getrandom};

use super::key::{self, Bus, Fields, Token};
use super::listener::{Lease, Listeners};
use super::relay::HostShares;
use super::watcher::Watcher;
use super::wire::{Refusal, pack_answer};
use super::{Identity, KEY_LEN, descriptors, socket};
use crate::device::PEERS_PAUSES_MS;
use crate::process::{CloseOnFork, PerProcess};
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{Device, DeviceAddr, DeviceId, Error, ErrorKind, Location};

const SHARING: &str = "sharing device memory";
/// After a wait for peers has timed out, further waits are short for this long: a caller that invalidates much memory would
/// otherwise wait a second for each range.
const IMPATIENT: Duration = Duration::from_secs(5);
/// The longest pause during that time.
const IMPATIENT_PAUSE_MS: u64 = 8;

/// One allocation that other processes may open, with the key to send to them.
///
/// It covers the whole allocation; all shares of one allocation have the same key. The key becomes invalid when the last
/// share is dropped, the allocation is freed, or its card is lost: from then on it is refused, and peers that have a lease
/// are asked to release it. Freed memory returns to the pool when all leases on it have ended.
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
    /// The key to send to peers. A process that has it can read and write the allocation: send it only to processes that may.
    pub fn key(&self) -> [u8; KEY_LEN] {
        self.inner.fields.pack()
    }

    /// First address of the allocation.
    pub fn base(&self) -> DeviceAddr {
        DeviceAddr(self.inner.fields.base)
    }

    /// Drops the share, and waits until no peer reaches the memory through it any more, for a second at most. `false` if a
    /// peer still does: it is using the memory, or does not answer. For five seconds after such a timeout, waits are short.
    /// If another share of the same allocation remains, the key stays valid, and this does not wait. Nor does it wait in a
    /// forked child, whose parent shares the memory.
    pub fn revoke(self) -> bool {
        let (owner, Fields { base, token, .. }) = (self.inner.owner, self.inner.fields);
        drop(self);
        !owner.is_current() || owner.wait_for_peers(base, token)
    }

    /// Length of the allocation in bytes.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.inner.fields.len
    }
}

/// What all shares of an allocation have in common. Dropping the last share ends the offer.
#[derive(Debug)]
struct ShareInner {
    owner: &'static Owner,
    fields: Fields,
}

impl Drop for ShareInner {
    fn drop(&mut self) {
        // A forked child must not withdraw the offer of its parent.
        if self.owner.is_current() {
            let Fields { base, token, .. } = self.fields;
            self.owner.withdraw(base, Some(token));
        }
    }
}

/// An allocation that is shared.
#[derive(Debug)]
struct Offer {
    fields: Fields,
    share: Weak<ShareInner>,
    device: Weak<Device>,
    device_id: DeviceId,
    /// Whether peers may be given dma-bufs of it.
    is_exported: bool,
    leases: Vec<Weak<Lease>>,
    _gauge: GaugeGuard,
}

/// Keeps memory out of the pool until this is dropped: a peer has it mapped, or a copy of our own uses it.
#[derive(Debug)]
pub(super) struct Kept {
    owner: &'static Owner,
    base: u64,
}

impl Drop for Kept {
    fn drop(&mut self) {
        let reuse = self.owner.state().release(self.base);
        if let Some(Reuse(reuse)) = reuse {
            reuse();
        }
    }
}

/// Memory that a copy of our relay service uses.
#[derive(Debug)]
pub(super) struct InUse {
    _kept: Kept,
    /// The card that it is on.
    pub(super) device: Arc<Device>,
}

/// Returns memory to the pool. Must be called without a lock.
struct Reuse(Box<dyn FnOnce() + Send>);

impl fmt::Debug for Reuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Reuse")
    }
}

#[derive(Debug, Default)]
struct State {
    /// By first address.
    offers: BTreeMap<u64, Offer>,
    /// Number of live `Kept` guards, by first address.
    kept: HashMap<u64, usize>,
    /// Memory that was freed, and is still kept.
    freed: HashMap<u64, Reuse>,
    /// When a wait for peers last timed out.
    waited_in_vain: Option<Instant>,
}

impl State {
    /// Drops one reference. If it was the last one and the memory was freed, returns what puts the memory into the pool.
    fn release(&mut self, base: u64) -> Option<Reuse> {
        let kept = self.kept.get_mut(&base)?;
        *kept -= 1;
        if *kept > 0 {
            return None;
        }
        self.kept.remove(&base);
        self.freed.remove(&base)
    }

    /// The offer of exactly this key.
    fn offer_of(&mut self, key: &[u8; KEY_LEN]) -> Option<&mut Offer> {
        let base = Fields::parse(key).ok()?.base;
        self.offers.get_mut(&base).filter(|offer| is_same(&offer.fields.pack(), key))
    }

    /// Ends the offer at `base`, if there is one (with this token): no more leases are granted on it. Returns the leases,
    /// which the caller revokes without the lock.
    fn withdraw(&mut self, base: u64, token: Option<Token>) -> Vec<Arc<Lease>> {
        let is_it = |offer: &Offer| token.is_none_or(|token| token == offer.fields.token);
        if !self.offers.get(&base).is_some_and(is_it) {
            return Vec::new();
        }
        let offer = self.offers.remove(&base);
        offer.iter().flat_map(|offer| &offer.leases).filter_map(Weak::upgrade).collect()
    }
}

/// Compares in a time that does not reveal where the first difference is.
fn is_same(one: &[u8; KEY_LEN], other: &[u8; KEY_LEN]) -> bool {
    let differs = one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b));
    std::hint::black_box(differs) == 0
}

/// This process as an owner of memory. One lock makes each of these steps atomic: recording and granting a lease, withdrawing
/// and freeing memory. No thread waits for a card while it holds the lock.
#[derive(Debug)]
pub(super) struct Owner {
    identity: &'static Identity,
    state: Mutex<State>,
    pub(super) listeners: Listeners,
    /// The host memory that is shared.
    pub(super) host_shares: HostShares,
}

static OWNER: PerProcess<Owner> = PerProcess::new();

impl Owner {
    /// The owner of this process, which listens for peers. Made when memory is first shared; a forked child makes its own.
    pub(super) fn started() -> Result<&'static Owner, Error> {
        let owner = OWNER.get_or_make(|| {
            let identity = Identity::own().map_err(|error| {
                let remedy = "mount /proc in this container";
                Error::new(ErrorKind::ChannelFailed, SHARING, error.to_string(), remedy)
            })?;
            let (state, listeners) = (Mutex::default(), Listeners::default());
            Ok::<_, Error>(Self { identity, state, listeners, host_shares: HostShares::default() })
        })?;
        owner.listeners.listen(owner, owner.identity).map_err(|reason| {
            let remedy = "peers reach this process's memory through its sockets alone: let it open some (ulimit -n)";
            Error::new(ErrorKind::ChannelFailed, "listening for peers", reason, remedy)
        })?;
        Ok(owner)
    }

    /// Whether it belongs to this process, and not to the parent that this process was forked from.
    fn is_current(&self) -> bool {
        OWNER.get().is_some_and(|current| std::ptr::eq(current, self))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn keep(&'static self, state: &mut State, base: u64) -> Kept {
        *state.kept.entry(base).or_default() += 1;
        Kept { owner: self, base }
    }

    /// Whether memory is shared under this key now, of a card or of the host.
    pub(super) fn shares(&self, key: &[u8; KEY_LEN]) -> bool {
        self.state().offer_of(key).is_some()
            || Fields::parse(key).is_ok_and(|fields| self.host_shares.has(&fields))
    }

    /// Keeps memory of a card for a copy, if `[addr, addr + len)` is shared under this token.
    pub(super) fn begin_use(&'static self, token: Token, addr: u64, len: u64) -> Option<InUse> {
        let mut state = self.state();
        let (_, offer) = state.offers.range(..=addr).next_back()?;
        let Fields { base, token: offered, .. } = offer.fields;
        if offered != token || !offer.fields.contains(addr, len) {
            return None;
        }
        // After this line nothing may fail: dropping `device` may close the card, which must not happen under the lock.
        let device = offer.device.upgrade()?;
        Some(InUse { _kept: self.keep(&mut state, base), device })
    }

    fn share(
        &'static self,
        device: &Arc<Device>,
        addr: DeviceAddr,
    ) -> Result<Arc<ShareInner>, Error> {
        loop {
            let mut state = self.state();
            let location = device.registry().locate_known(addr.0, 1);
            let location = location.ok_or_else(|| freed_meanwhile(addr))?;
            let base = location.base.0;
            if let Some(offer) = state.offers.get(&base) {
                let (share, token) = (offer.share.upgrade(), offer.fields.token);
                drop(state);
                if let Some(share) = share {
                    return Ok(share);
                }
                // Another thread is just dropping its last share.
                self.withdraw(base, Some(token));
                continue;
            }
            // Clearing the last page may take the card long: memory that is freed meanwhile must not be reused before that.
            let _kept = self.keep(&mut state, base);
            drop(state);
            let (share, offer) = self.offer(device, location)?;
            let mut state = self.state();
            if state.freed.contains_key(&base) {
                return Err(freed_meanwhile(addr));
            }
            if state.offers.contains_key(&base) {
                continue; // another thread was faster
            }
            state.offers.insert(base, offer);
            drop(state);
            // `card_lost` may have been called before the offer was inserted.
            if device.is_surely_lost() {
                self.card_lost(device.id());
            }
            return Ok(share);
        }
    }

    fn offer(
        &'static self,
        device: &Arc<Device>,
        location: Location,
    ) -> Result<(Arc<ShareInner>, Offer), Error> {
        let (base, len) = (location.base.0, location.length);
        let source = Bus::new(&device.info().bus_id).filter(|_| key::fits(base, len));
        let source = source.ok_or_else(|| {
            failed(format!("{len} bytes at {} do not fit into a key", location.base))
        })?;
        let is_exported = match device.can_import() {
            // If this driver cannot import, the drivers of peers cannot either.
            Err(error) if error.is_unsupported() && !device.is_guest() => false,
            // A dma-buf covers whole 4 KiB pages. Behind the end of this allocation, peers must not see what an earlier one
            // left there.
            _ => base.is_multiple_of(key::PAGE) && device.clear_tail(location.base, len).is_ok(),
        };
        if device.is_surely_lost() {
            return Err(failed("its card was reset or removed".to_owned()));
        }
        if !is_exported {
            device.can_copy()?;
        }
        let fields = self.new_fields(source, base, len)?;
        let share = Arc::new(ShareInner { owner: self, fields });
        let offer = Offer {
            fields,
            share: Arc::downgrade(&share),
            device: Arc::downgrade(device),
            device_id: device.id(),
            is_exported,
            leases: Vec::new(),
            _gauge: device.counts().track(Gauge::Share, len),
        };
        Ok((share, offer))
    }

    /// The fields of a new key, with a new random token.
    pub(super) fn new_fields(&self, source: Bus, base: u64, len: u64) -> Result<Fields, Error> {
        let mut token = Token([0; 8]);
        getrandom(&mut token.0[..], GetRandomFlags::empty())
            .map_err(|error| failed(format!("getrandom: {error}")))?;
        Ok(Fields { peer: *self.identity, token, source, base, len })
    }

    /// Grants a lease to a peer that has the key, and sends it a dma-buf. The lease is recorded first: if that fails, no
    /// dma-buf is sent.
    pub(super) fn grant(
        &'static self,
        watcher: &Watcher,
        peer: Arc<CloseOnFork>,
        key: &[u8; KEY_LEN],
    ) -> Result<(), Refusal> {
        let (device, kept, fields) = {
            let mut state = self.state();
            let offer = state.offer_of(key).ok_or(Refusal::Unknown)?;
            if !offer.is_exported {
                return Err(Refusal::NoDmabuf);
            }
            let (device, fields) = (offer.device.upgrade(), offer.fields);
            (device.ok_or(Refusal::Unknown)?, self.keep(&mut state, fields.base), fields)
        };
        let lease = Arc::new(Lease { socket: peer, _kept: kept });
        let watched = Arc::clone(&lease) as _;
        let number = watcher.add(watched, EventFlags::empty()).map_err(|_| Refusal::Short)?;
        let dmabuf = export(&device, &fields);
        let mut state = self.state();
        let granted = state.offer_of(key).ok_or(Refusal::Unknown).and_then(|offer| {
            let dmabuf = dmabuf.as_ref().map_err(|why| *why)?;
            // This fails if too many descriptors of this user are in flight.
            let grant = pack_answer(Ok(()));
            socket::send(lease.socket.as_fd(), &grant, Some(dmabuf.as_fd()))
                .map_err(|_| Refusal::Short)?;
            offer.leases.retain(|lease| lease.strong_count() > 0);
            offer.leases.push(Arc::downgrade(&lease));
            Ok(())
        });
        drop(state);
        // Close our dma-buf before the lease ends: the driver refuses to unmap memory while a dma-buf of it is open.
        drop(dmabuf);
        if granted.is_err() {
            watcher.remove(number);
        }
        granted
    }

    /// Ends the offer at `base`, and revokes all leases on it.
    fn withdraw(&self, base: u64, token: Option<Token>) {
        let revoked = self.state().withdraw(base, token);
        revoke(&revoked);
    }

    /// Withdraws all that is shared of a card.
    fn card_lost(&self, device: DeviceId) {
        let state = self.state();
        let lost = state.offers.iter().filter(|(_, offer)| offer.device_id == device);
        let lost: Vec<_> = lost.map(|(base, offer)| (*base, offer.fields.token)).collect();
        drop(state);
        lost.into_iter().for_each(|(base, token)| self.withdraw(base, Some(token)));
    }

    /// Waits until no peer reaches the memory of this offer any more; `false` if one still does. If the offer has not ended,
    /// it belongs to another share, and there is nothing to wait for.
    fn wait_for_peers(&self, base: u64, token: Token) -> bool {
        for pause in PEERS_PAUSES_MS {
            std::thread::sleep(Duration::from_millis(pause));
            let state = self.state();
            let is_offered = state.offers.get(&base).is_some_and(|new| new.fields.token == token);
            if is_offered || !state.kept.contains_key(&base) {
                return true;
            }
            let is_impatient = state.waited_in_vain.is_some_and(|then| then.elapsed() < IMPATIENT);
            if is_impatient && pause >= IMPATIENT_PAUSE_MS {
                return false;
            }
        }
        self.state().waited_in_vain = Some(Instant::now());
        false
    }

    /// Ends the offer at `base`, if there is one, and notes that the memory was freed, both under one lock: a thread that is
    /// sharing the memory either inserts its offer before this, which then ends, or sees that it was freed. `reuse` is
    /// called without the lock, when nothing keeps the memory any more.
    fn free(&self, base: u64, reuse: Reuse) {
        let mut state = self.state();
        let revoked = state.withdraw(base, None);
        let now = if state.kept.contains_key(&base) {
            state.freed.insert(base, reuse);
            None
        } else {
            Some(reuse)
        };
        drop(state);
        revoke(&revoked);
        if let Some(Reuse(reuse)) = now {
            reuse();
        }
    }
}

fn revoke(leases: &[Arc<Lease>]) {
    leases.iter().for_each(|lease| lease.revoke());
}

/// A dma-buf of this memory and nothing else.
fn export(device: &Device, fields: &Fields) -> Result<OwnedFd, Refusal> {
    let exported = device.export_alone(DeviceAddr(fields.base), fields.len);
    let (dmabuf, offset) = exported.map_err(|error| match error.kind() {
        ErrorKind::OutOfMemory => Refusal::Short,
        _ => Refusal::NoDmabuf,
    })?;
    let is_it = offset == 0 && descriptors::file_len(dmabuf.as_fd()) == Ok(fields.dmabuf_len());
    if is_it { Ok(dmabuf) } else { Err(Refusal::NoDmabuf) }
}

fn failed(detail: String) -> Error {
    Error::new(ErrorKind::ChannelFailed, SHARING, detail, "")
}

fn freed_meanwhile(addr: DeviceAddr) -> Error {
    let detail = format!("{addr} was freed meanwhile");
    Error::new(ErrorKind::InvalidParams, SHARING, detail, "")
}

impl Device {
    /// Offers the allocation that contains `[addr, addr + len)` to other processes of this user that are given the key. They
    /// get a dma-buf of this allocation alone.
    ///
    /// The first call starts a thread that sleeps until a peer comes.
    pub fn share(self: &Arc<Self>, addr: DeviceAddr, len: u64) -> Result<Share, Error> {
        self.check_process(SHARING)?;
        let checked = self.check_own(addr, len, SHARING);
        let shared = checked.and_then(|_| Owner::started()?.share(self, addr));
        let inner = shared.map_err(|error| self.failed(error))?;
        Ok(Share { inner, _device: Arc::clone(self) })
    }
}

/// Starts to listen for peers before the first [`Device::share`]. The error says why that is not possible; every share then
/// fails with it.
pub fn listen() -> Result<(), Error> {
    Owner::started().map(drop)
}

/// The allocation at `base` is being freed: no peer can open it from now on. `reuse` returns the memory to the pool: it is
/// called at once, or when the last lease on the memory has ended.
pub(crate) fn freed(base: DeviceAddr, len: u64, counts: Counts, reuse: Box<dyn FnOnce() + Send>) {
    let Some(owner) = OWNER.get() else { return reuse() };
    let quarantined = Quarantined::new(counts, len);
    let reuse = Reuse(Box::new(move || {
        drop(quarantined);
        reuse();
    }));
    owner.free(base.0, reuse);
}

/// A card was reset or removed: memory that is shared on it is lost, and no peer can open it from now on.
pub(crate) fn card_lost(device: DeviceId) {
    if let Some(owner) = OWNER.get() {
        owner.card_lost(device);
    }
}

/// Counts memory that waits for leases to end. A guard, because a `Reuse` that waits may be replaced without being called:
/// when memory that the application could not unmap is withdrawn again for its next attempt.
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
