//! The exporter's side: which allocations are shared, under which token, through which dma-buf.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::rand::{GetRandomFlags, getrandom};

use super::key::{self, Bus, Fields, Line, Token};
use super::ledger::{Entry, File, Ledger};
use super::message::Offered;
use super::sessions::{Holder, Offers, Released, Sessions};
use super::{Identity, KEY_LEN, broker, keeper};
use crate::process::{Instance, Notifier, PerProcess};
use crate::stats::{Counter, Counts, Gauge, GaugeGuard};
use crate::{Device, DeviceAddr, Error, ErrorKind, Location};

const SHARING: &str = "sharing device memory";

/// One allocation that other processes may open, with the key to hand them.
///
/// It stands for the whole allocation; all shares of one allocation have the same key and the same
/// dma-buf. When the last is dropped, or the allocation freed, the key is worth nothing any more:
/// the broker forgets it, the ledger's line is struck out, the descriptor closed. Who has opened it
/// before keeps what he has until he lets go; only then does freed memory go to somebody else.
///
/// It keeps its device open.
#[derive(Clone)]
pub struct Share {
    export: Arc<Export>,
    device: Arc<Device>,
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
        self.export.fields.pack()
    }

    /// First address of the allocation.
    pub fn base(&self) -> DeviceAddr {
        DeviceAddr(self.export.fields.base)
    }

    /// Length of the allocation in bytes.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.export.fields.len
    }

    /// The device it lies on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

/// What all shares of an allocation have in common. The offer ends with the last of them.
#[derive(Debug)]
struct Export {
    exporter: &'static Exporter,
    fields: Fields,
}

impl Drop for Export {
    fn drop(&mut self) {
        // A forked child has inherited the offer, but not the say in it.
        if self.exporter.is_here() {
            let Fields { base, token, .. } = self.fields;
            self.exporter.take_back(base, Some(token));
        }
    }
}

/// An allocation on offer.
#[derive(Debug)]
struct Offer {
    token: Token,
    dmabuf: OwnedFd,
    line: Option<u32>,
    export: Weak<Export>,
    _gauge: GaugeGuard,
}

/// This process as an exporter. Locks are taken in this order: sessions, offers.
#[derive(Debug)]
pub(super) struct Exporter {
    identity: &'static Identity,
    ledger: Option<Ledger>,
    sessions: Mutex<Sessions>,
    offers: Mutex<BTreeMap<u64, Offer>>,
    broker: OnceLock<Result<(), String>>,
    /// Tells the broker that a peer could not be told something yet.
    behind: Notifier,
    made_by: Instance,
}

static HERE: PerProcess<Exporter> = PerProcess::new();

impl Exporter {
    /// Made when the first memory is shared; a forked child makes its own.
    pub(super) fn here() -> Result<&'static Exporter, Error> {
        HERE.get_or_make(Self::new)
    }

    /// The one there is, if this process has shared anything.
    pub(super) fn if_any() -> Option<&'static Exporter> {
        HERE.get()
    }

    fn new() -> Result<Self, Error> {
        let identity = Identity::own().map_err(|error| {
            let remedy = "mount /proc in this container";
            Error::new(ErrorKind::ChannelFailed, SHARING, error.to_string(), remedy)
        })?;
        let behind = Notifier::new().map_err(|error| {
            Error::new(ErrorKind::ChannelFailed, SHARING, format!("eventfd: {error}"), "")
        })?;
        Ok(Self {
            behind,
            made_by: Instance::current(),
            identity,
            ledger: Ledger::new(identity).ok(),
            sessions: Mutex::default(),
            offers: Mutex::default(),
            broker: OnceLock::new(),
        })
    }

    pub(super) fn identity(&self) -> &'static Identity {
        self.identity
    }

    /// Whether this is the process it was made for, and not a forked child of it.
    fn is_here(&self) -> bool {
        self.made_by == Instance::current()
    }

    pub(super) fn sessions(&self) -> MutexGuard<'_, Sessions> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn offers(&self) -> MutexGuard<'_, BTreeMap<u64, Offer>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the broker, once; the reason if there can be none.
    pub(super) fn start_broker(&'static self) -> Result<(), Error> {
        let started = self.broker.get_or_init(|| broker::start(self));
        started.clone().map_err(|reason| {
            let remedy = "peers that may not use pidfd_getfd cannot open this process's memory";
            Error::new(ErrorKind::ChannelFailed, "starting the broker", reason, remedy)
        })
    }

    /// Readable when the broker must look whom it has something to say.
    pub(super) fn behind(&self) -> BorrowedFd<'_> {
        self.behind.as_fd()
    }

    /// Deals with what peers have said, and tells them what they could not be told before.
    pub(super) fn listen(&self, spoke: &[bool]) {
        self.behind.clear();
        let released = self.sessions().listen(spoke, self, Counts::process());
        released.run();
    }

    fn share(
        &'static self,
        device: &Arc<Device>,
        location: Location,
    ) -> Result<Arc<Export>, Error> {
        let base = location.base.0;
        loop {
            let mut offers = self.offers();
            let Some(offer) = offers.get(&base) else {
                // With the lock: who frees the memory meanwhile must find the offer, or come first.
                let (export, offer) = self.export(device, location)?;
                offers.insert(base, offer);
                return Ok(export);
            };
            if let Some(export) = offer.export.upgrade() {
                return Ok(export);
            }
            // Its last share is just being dropped by another thread.
            let token = offer.token;
            drop(offers);
            self.take_back(base, Some(token));
        }
    }

    fn export(
        &'static self,
        device: &Arc<Device>,
        location: Location,
    ) -> Result<(Arc<Export>, Offer), Error> {
        let (base, len) = (location.base.0, location.length);
        let failed = |detail: String| Error::new(ErrorKind::ChannelFailed, SHARING, detail, "");
        let source = Bus::new(&device.info().bus_id).filter(|_| key::fits(base, len));
        let source = source.ok_or_else(|| {
            failed(format!("{len} bytes at {} do not fit into a key", location.base))
        })?;
        let (dmabuf, offset) = device.export_alone(location.base, len)?;
        let file = File::of(dmabuf.as_fd()).map_err(|error| failed(format!("fstat: {error}")))?;
        if offset != 0 || file.size() != len.next_multiple_of(key::PAGE) {
            return Err(failed(format!(
                "the dma-buf of {len} bytes is {} long and starts {offset} before them",
                file.size()
            )));
        }
        let mut token = Token([0; 8]);
        // All zeroes is no token: it means an empty line.
        while token.0 == [0; 8] {
            getrandom(&mut token.0[..], GetRandomFlags::empty())
                .map_err(|error| failed(format!("getrandom: {error}")))?;
        }
        let entry = Entry { base, token, file, fd: dmabuf.as_raw_fd() };
        let line = self.ledger.as_ref().and_then(|ledger| {
            let number = ledger.add(entry)?;
            Some(Line { ledger: ledger.number(), number })
        });
        let fields = Fields { peer: *self.identity, token, source, base, len, line };
        let export = Arc::new(Export { exporter: self, fields });
        let offer = Offer {
            token,
            dmabuf,
            line: line.map(|line| line.number),
            export: Arc::downgrade(&export),
            _gauge: device.counts().track(Gauge::Share, len),
        };
        Ok((export, offer))
    }

    /// Ends the offer at `base`, if there is one (with this token): nobody can open it from now on,
    /// who has it open is known and told.
    fn take_back(&self, base: u64, token: Option<Token>) {
        // Held throughout: who frees the memory meanwhile must learn who has it open.
        let mut sessions = self.sessions();
        let mut offers = self.offers();
        let listed = offers.get(&base);
        if !listed.is_some_and(|offer| token.is_none_or(|token| offer.token == token)) {
            return;
        }
        let Some(Offer { token, dmabuf, line, .. }) = offers.remove(&base) else { return };
        drop(offers);
        if let (Some(ledger), Some(line)) = (&self.ledger, line) {
            ledger.strike(line);
        }
        // Under the lock too: the driver may not let go of memory that is still exported, and who
        // frees it need not be who ends the offer.
        drop(dmabuf);
        // Who got hold of it before has written it down before.
        let offered = Offered { base, token };
        let by_us = sessions.withdrawn(&offered);
        let is_behind = sessions.is_behind();
        drop(sessions);
        if is_behind {
            // It cannot be full: the broker takes everything at once.
            self.behind.notify();
        }
        if by_us {
            keeper::forget(|peer, held| peer == self.identity && *held == offered);
        }
    }

    /// Another card of this very process has the memory open.
    pub(super) fn hold_own(&self, offered: Offered) {
        self.sessions().hold(Holder::OWN, offered);
    }

    pub(super) fn let_go_own(&self, offered: &Offered) {
        let mut released = Released::default();
        self.sessions().let_go(Holder::OWN, offered, &mut released);
        released.run();
    }
}

impl Offers for Exporter {
    fn fetch(&self, offered: &Offered) -> Option<OwnedFd> {
        let offers = self.offers();
        let offer = offers.get(&offered.base)?;
        if !offer.token.matches(&offered.token) {
            return None;
        }
        offer.dmabuf.try_clone().ok()
    }
}

/// Shares the allocation at `location` of `device`.
pub(super) fn share(device: &Arc<Device>, location: Location) -> Result<Share, Error> {
    let exporter = Exporter::here()?;
    let broker = exporter.start_broker();
    if exporter.ledger.is_none() {
        // One of the two ways must be there.
        broker?;
    }
    let export = exporter.share(device, location)?;
    Ok(Share { export, device: Arc::clone(device) })
}

/// The allocation at `base` is being freed: nobody can open it from now on. `release` gives the
/// memory to others: it is called at once, or when the last peer that has it open has let it go.
pub(crate) fn freed(
    base: DeviceAddr,
    len: u64,
    counts: Counts,
    release: impl FnOnce() + Send + 'static,
) {
    let Some(exporter) = Exporter::if_any() else { return release() };
    exporter.take_back(base.0, None);
    let quarantined = Quarantined::new(counts, len);
    let release = move || {
        drop(quarantined);
        release();
    };
    let now = exporter.sessions().freed(base.0, Box::new(release));
    if let Some(release) = now {
        release();
    }
}

/// Counts memory that waits for peers; also where its wait is replaced by another, for memory of the
/// application that could not be unmapped and is to be unmapped again.
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

/// Takes in which memory peers have let go by now, without waiting for the broker's thread.
pub(crate) fn settle() {
    if let Some(exporter) = Exporter::if_any() {
        let released = exporter.sessions().catch_up(exporter, Counts::process());
        released.run();
    }
}
