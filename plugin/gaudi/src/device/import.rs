//! Imports dma-bufs of any exporter that this process received, and maps them for a card.
//!
//! A driver that can import (few can: [`Device::can_import`]) maps a dma-buf into the card's address range for host memory.
//! The engines access it the way they access host memory. The exporter may be another Gaudi, a GPU or `/dev/udmabuf`. The
//! driver decides which exporters the card can access; if it refuses, the caller gets the error with its reason.
//!
//! The memory of peers comes as a key: [`share`](crate::share) opens it, and also imports.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend::{HostPin, IMPORTING};
use crate::error::Phase;
use crate::process::{CloseOnFork, ProcessBound};
use crate::{Device, DeviceAddr, Error, ErrorKind, PAGE_SIZE};

/// A part of a dma-buf that a card can copy from and to. Dropping it waits for submitted copies and then unmaps it.
/// It keeps its card open, and does not need the descriptor.
#[derive(Debug)]
pub struct Import {
    addr: DeviceAddr,
    len: u64,
    /// The driver maps from the beginning of the dma-buf, in whole pages.
    mapped: (DeviceAddr, u64),
    // Unmapped by the process that mapped it, not by a forked child.
    _pin: ProcessBound<HostPin>,
    // Declared after `_pin`: the device must be open when the pin is released.
    device: Arc<Device>,
}

impl Import {
    /// Device address of the first byte. Use it as [`Side::Device`](crate::Side::Device) only in copies of this card, and
    /// only while this lives. Another card may have handed out the same address.
    pub fn addr(&self) -> DeviceAddr {
        self.addr
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The card that it is mapped for.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let (start, len) = self.mapped;
        self.device.forget_import(start, len);
    }
}

impl Device {
    /// Maps `len` bytes from `offset` of a dma-buf for this card. The caller keeps the descriptor, and may close it.
    pub fn import(
        self: &Arc<Self>,
        dmabuf: BorrowedFd<'_>,
        offset: u64,
        len: u64,
    ) -> Result<Import, Error> {
        self.check_process(IMPORTING)?;
        let extent = extent(dmabuf, offset, len)
            .inspect_err(|error| self.counts().dmabuf_failed(error))
            .map_err(|error| self.failed(error))?;
        let pin = self.map_dmabuf(dmabuf, extent).map_err(|error| {
            self.failed(if error.errno() == Some(libc::EINVAL) && !is_dmabuf(dmabuf) {
                not_a_dmabuf(error.detail())
            } else {
                error
            })
        })?;
        Ok(Import {
            addr: DeviceAddr(pin.addr.0 + offset),
            len,
            mapped: (pin.addr, extent),
            _pin: ProcessBound::new(pin),
            device: Arc::clone(self),
        })
    }
}

/// How many bytes from the start of the dma-buf must be mapped: whole pages.
fn extent(dmabuf: BorrowedFd<'_>, offset: u64, len: u64) -> Result<u64, Error> {
    let file = rustix::fs::fstat(dmabuf).map_err(|error| {
        let mut failed = not_a_dmabuf(&error.to_string());
        failed.set_errno(error.raw_os_error());
        failed
    })?;
    let size = file.st_size as u64;
    let end = offset.checked_add(len).filter(|end| *end <= size && len > 0);
    match end {
        Some(end) => Ok(end.next_multiple_of(PAGE_SIZE).min(size)),
        None if size == 0 => Err(not_a_dmabuf("it has no size")),
        None => Err(Error::new(
            ErrorKind::InvalidParams,
            IMPORTING,
            format!("{len} bytes from offset {offset} are not inside the {size} bytes it has"),
            "give a range of at least one byte inside the dma-buf",
        )),
    }
}

fn not_a_dmabuf(detail: &str) -> Error {
    let detail = format!("the descriptor is not of a dma-buf: {detail}");
    let remedy = "give an open descriptor of a dma-buf whose exporter still has the memory";
    Error::new(ErrorKind::InvalidParams, IMPORTING, detail, remedy)
}

/// Whether it is a dma-buf of the kernel. The software Gaudi uses files of another kind.
fn is_dmabuf(fd: BorrowedFd<'_>) -> bool {
    // DMA_BUF_MAGIC. The type of `f_type` depends on the platform.
    rustix::fs::fstatfs(fd).is_ok_and(|system| system.f_type == 0x444d_4142)
}

/// A range of addresses that are not Gaudi memory, and the dma-buf behind them. It is mapped for a card when a copy of
/// that card first uses it.
#[derive(Debug)]
pub struct ImportedRegion {
    start: u64,
    len: u64,
    offset: u64,
    /// For imports by further cards. Closed in forked children, so that they do not keep the exporter's memory.
    dmabuf: CloseOnFork,
    imports: Mutex<Vec<Import>>,
}

impl ImportedRegion {
    /// Maps for `device` the memory behind `[start, start + len)`, which starts at `offset` of the dma-buf. The
    /// caller keeps the descriptor: this keeps a duplicate.
    pub fn new(
        device: &Arc<Device>,
        (start, len): (u64, u64),
        dmabuf: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Self, Error> {
        let first = device.import(dmabuf, offset, len)?;
        let kept = dmabuf.try_clone_to_owned().ok().and_then(CloseOnFork::new);
        let no_descriptor = || {
            let call = "keeping a dma-buf";
            device.failed(Error::os(Phase::Share, IMPORTING, call, libc::EMFILE))
        };
        let dmabuf = kept.ok_or_else(no_descriptor)?;
        Ok(Self { start, len, offset, dmabuf, imports: Mutex::new(vec![first]) })
    }

    /// The device address of `[addr, addr + len)`, and its card: `device`, or if `None`, the first that it was mapped for.
    pub fn find(
        &self,
        device: Option<&Arc<Device>>,
        addr: u64,
        len: usize,
    ) -> Result<(DeviceAddr, Arc<Device>), Error> {
        let into = addr
            .checked_sub(self.start)
            .filter(|into| self.len.checked_sub(*into).is_some_and(|rest| len as u64 <= rest));
        let into = into.ok_or_else(|| {
            let detail = format!("{len} bytes at {addr:#x} are not inside what was registered");
            Error::new(ErrorKind::InvalidParams, IMPORTING, detail, "register all that is copied")
        })?;
        let mut imports = self.imports.lock().unwrap_or_else(PoisonError::into_inner);
        // Drop imports of cards that were reset: such a card is closed, and can be reopened, when its last user is gone.
        imports.retain(|import| !import.device.is_surely_lost());
        let wanted =
            |import: &&Import| device.is_none_or(|device| device.id() == import.device.id());
        let found =
            imports.iter().find(wanted).map(|import| (import.addr, Arc::clone(&import.device)));
        let (first, on) = match (found, device) {
            (Some(found), _) => found,
            (None, Some(device)) => {
                let import = device.import(self.dmabuf.as_fd(), self.offset, self.len)?;
                let found = (import.addr, Arc::clone(device));
                imports.push(import);
                found
            }
            (None, None) => {
                let (detail, remedy) =
                    ("its card was reset", "deregister it, and register it again");
                return Err(Error::new(ErrorKind::DeviceNotFound, IMPORTING, detail, remedy));
            }
        };
        Ok((DeviceAddr(first.0 + into), on))
    }
}
