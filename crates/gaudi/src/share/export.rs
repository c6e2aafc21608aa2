//! The exporter's side: which allocations are shared, under which token, through which dma-buf.

use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use rustix::rand::{GetRandomFlags, getrandom};

use super::fork::PerProcess;
use super::key::{self, Bus, Fields, Line, Token};
use super::ledger::{Entry, File, Ledger};
use super::{Identity, KEY_LEN, broker};
use crate::stats::{Counts, Held, Holding};
use crate::{Device, DeviceAddr, Error, ErrorKind, Location};

const SHARING: &str = "sharing device memory";

/// One allocation that other processes may open, with the key to hand them.
///
/// It stands for the whole allocation; all shares of one allocation have the same key and the same
/// dma-buf. When the last is dropped, or the allocation freed, the key is worth nothing any more:
/// the broker forgets it, the ledger's line is struck out, the descriptor closed. Who has opened it
/// before keeps what he has until he lets go.
///
/// It keeps its device open.
#[derive(Clone)]
pub struct Share {
    export: Arc<Export>,
    device: Arc<Device>,
}

impl fmt::Debug for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Share").field("export", &self.export).finish_non_exhaustive()
    }
}

impl Share {
    /// What to give to peers. Who has it can read and write the allocation: send it only to those
    /// who may.
    pub fn key(&self) -> [u8; KEY_LEN] {
        self.export.fields().pack()
    }

    /// First address of the allocation.
    pub fn base(&self) -> DeviceAddr {
        DeviceAddr(self.export.base)
    }

    /// Length of the allocation in bytes.
    #[allow(clippy::len_without_is_empty, reason = "there are no empty allocations")]
    pub fn len(&self) -> u64 {
        self.export.len
    }

    /// The device it lies on.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

/// The dma-buf of one allocation alone, on offer.
#[derive(Debug)]
struct Export {
    exporter: &'static Exporter,
    base: u64,
    len: u64,
    token: Token,
    source: Bus,
    line: Option<u32>,
    /// Gone when the offer is withdrawn.
    dmabuf: Mutex<Option<(OwnedFd, Held)>>,
}

impl Export {
    fn fields(&self) -> Fields {
        let ledger = self.exporter.ledger.as_ref();
        let line = ledger.zip(self.line);
        Fields {
            peer: *self.exporter.identity,
            token: self.token,
            source: self.source,
            base: self.base,
            len: self.len,
            line: line.map(|(ledger, number)| Line { ledger: ledger.number(), number }),
        }
    }

    fn dmabuf(&self) -> MutexGuard<'_, Option<(OwnedFd, Held)>> {
        self.dmabuf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the offer back; the dma-buf, if it was not taken back before.
    fn withdraw(&self) -> Option<(OwnedFd, Held)> {
        let taken = self.dmabuf().take()?;
        // A forked child has inherited the ledger, but not the say in it.
        if self.exporter.is_here()
            && let (Some(ledger), Some(line)) = (&self.exporter.ledger, self.line)
        {
            ledger.strike(line);
        }
        Some(taken)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        if self.exporter.is_here() {
            self.exporter.forget(self);
        }
        drop(self.withdraw());
    }
}

/// This process as an exporter.
#[derive(Debug)]
pub(super) struct Exporter {
    identity: &'static Identity,
    ledger: Option<Ledger>,
    exports: Mutex<BTreeMap<u64, Weak<Export>>>,
    broker: OnceLock<Result<(), String>>,
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
            Error::new(
                ErrorKind::ChannelFailed,
                SHARING,
                error.to_string(),
                "mount /proc in this container",
            )
        })?;
        Ok(Self {
            identity,
            ledger: Ledger::new(identity).ok(),
            exports: Mutex::default(),
            broker: OnceLock::new(),
        })
    }

    pub(super) fn identity(&self) -> &'static Identity {
        self.identity
    }

    /// Whether this is the process it was made for, and not a forked child of it.
    pub(super) fn is_here(&self) -> bool {
        self.identity.pid == process::id()
    }

    fn exports(&self) -> MutexGuard<'_, BTreeMap<u64, Weak<Export>>> {
        self.exports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the broker, once; the reason if there can be none.
    pub(super) fn start_broker(&'static self) -> Result<(), Error> {
        let started = self.broker.get_or_init(|| broker::start(self));
        started.clone().map_err(|reason| {
            let remedy = "peers that may not use pidfd_getfd cannot open this process's memory";
            Error::new(ErrorKind::ChannelFailed, "starting the broker", reason, remedy)
        })
    }

    fn share(
        &'static self,
        device: &Arc<Device>,
        location: Location,
        counts: Counts,
    ) -> Result<Arc<Export>, Error> {
        let mut exports = self.exports();
        let base = location.base.0;
        if let Some(export) = exports.get(&base).and_then(Weak::upgrade) {
            return Ok(export);
        }
        let made = self.export(device, location, counts)?;
        exports.insert(base, Arc::downgrade(&made));
        Ok(made)
    }

    fn export(
        &'static self,
        device: &Arc<Device>,
        location: Location,
        counts: Counts,
    ) -> Result<Arc<Export>, Error> {
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
        getrandom(&mut token.0[..], GetRandomFlags::empty())
            .map_err(|error| failed(format!("getrandom: {error}")))?;
        let entry = Entry { base, token, file, fd: dmabuf.as_raw_fd() };
        let line = self.ledger.as_ref().and_then(|ledger| ledger.add(entry));
        let held = counts.hold(Holding::Share, len);
        let dmabuf = Mutex::new(Some((dmabuf, held)));
        Ok(Arc::new(Export { exporter: self, base, len, token, source, line, dmabuf }))
    }

    /// Takes an export that goes out of the list, unless a newer one has its place.
    fn forget(&self, export: &Export) {
        let mut exports = self.exports();
        let listed = exports.get(&export.base);
        if listed.is_some_and(|listed| ptr::eq(listed.as_ptr(), export)) {
            exports.remove(&export.base);
        }
    }

    /// A descriptor for who knows the token; `None` for all others, and after the offer was taken
    /// back.
    pub(super) fn fetch(&self, base: u64, token: &Token) -> Option<OwnedFd> {
        // Not under the lock: dropping the last handle takes it again.
        let export = self.exports().get(&base).and_then(Weak::upgrade)?;
        if !export.token.matches(token) {
            return None;
        }
        let dmabuf = export.dmabuf();
        dmabuf.as_ref().and_then(|(fd, _)| fd.try_clone().ok())
    }
}

/// Shares the allocation at `location` of `device`.
pub(super) fn share(
    device: &Arc<Device>,
    location: Location,
    counts: Counts,
) -> Result<Share, Error> {
    let exporter = Exporter::here()?;
    let broker = exporter.start_broker();
    if exporter.ledger.is_none() {
        // One of the two ways must be there.
        broker?;
    }
    let export = exporter.share(device, location, counts)?;
    Ok(Share { export, device: Arc::clone(device) })
}

/// The allocation at `base` is being freed: nobody gets it from now on.
pub(crate) fn withdraw(base: DeviceAddr) {
    let Some(exporter) = Exporter::if_any() else { return };
    let export = exporter.exports().remove(&base.0).and_then(|export| export.upgrade());
    if let Some(export) = export {
        drop(export.withdraw());
    }
}
