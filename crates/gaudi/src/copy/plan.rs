//! How each segment of a copy travels: straight, through a bounce slot, or by way of the host
//! between two cards.

use std::sync::Arc;

use hl_thunk::packet::{self, LinDma};
use smallvec::SmallVec;

use super::{Segment, Side};
use crate::copy::ring::Slot;
use crate::pin::{self, HostAccess, PinRef, Pinned};
use crate::stats::Path;
use crate::{Device, DeviceAddr, Direction, Error, ErrorKind, HostRegion};

/// A host side up to this size is copied through a bounce slot unless it is pinned already: pinning
/// and unpinning costs the driver more than the CPU needs to copy it.
pub(crate) const BOUNCE_LEN: usize = 64 * 1024;

/// An address in host memory, which the caller of the copy answers for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostPtr(pub(crate) *mut u8);

// SAFETY: an address; using it is unsafe and answered for where it is used.
unsafe impl Send for HostPtr {}
// SAFETY: as above.
unsafe impl Sync for HostPtr {}

impl HostPtr {
    fn add(self, bytes: usize) -> Self {
        HostPtr(self.0.wrapping_add(bytes))
    }
}

/// A step of a copy, small enough for one packet, and the card that does it.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) on: Arc<Device>,
    pub(crate) step: Step,
}

/// The pieces of a copy. Most have one, which needs no memory beside.
pub(crate) type Pieces = SmallVec<[Piece; 1]>;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// One packet, nothing else to do.
    Direct { dma: LinDma, direction: Direction, pin: Option<PinRef> },
    /// Into a bounce slot by the CPU, then to the device.
    In { from: HostPtr, dst: DeviceAddr, len: usize, guarded: bool },
    /// From the device to a bounce slot, then out by the CPU.
    Out { to: HostPtr, src: DeviceAddr, len: usize, guarded: bool },
    /// From the device to a staging slot, then on to another card.
    Cross { target: Arc<Device>, src: DeviceAddr, dst: DeviceAddr, len: usize },
    /// The second half of `Cross`: what is in the slot goes to the device.
    Forward { slot: Arc<Slot>, dst: DeviceAddr, len: usize },
}

impl Step {
    /// Which way it goes on the card that does it.
    pub(crate) fn direction(&self) -> Direction {
        match self {
            Step::Direct { direction, .. } => *direction,
            Step::In { .. } | Step::Forward { .. } => Direction::HostToDevice,
            Step::Out { .. } | Step::Cross { .. } => Direction::DeviceToHost,
        }
    }

    /// By what way the bytes travel.
    pub(crate) fn path(&self) -> Path {
        match self {
            Step::Direct { pin: Some(_), .. } => Path::Pinned,
            Step::Direct { direction: Direction::DeviceToDevice, .. } => Path::Within,
            Step::Direct { .. } => Path::Imported,
            Step::In { .. } | Step::Out { .. } => Path::Bounced,
            Step::Cross { .. } => Path::Staging,
            Step::Forward { .. } => Path::Staged,
        }
    }

    /// Whether the device memory it names is live: it may have been freed since the copy was planned
    /// for `device`.
    pub(crate) fn check_live(&self, device: &Arc<Device>) -> Result<(), Error> {
        let (dst, src) = match *self {
            Step::Direct { dma: LinDma::Copy { src, dst, .. }, direction, ref pin } => {
                // The other side is pinned host memory.
                let pinned = |way| pin.is_some() && direction == way;
                let dst = (!pinned(Direction::DeviceToHost)).then_some(dst);
                (dst, (!pinned(Direction::HostToDevice)).then_some(src))
            }
            Step::Direct { dma: LinDma::Fill { dst, .. }, .. }
            | Step::In { dst, .. }
            | Step::Forward { dst, .. } => (Some(dst), None),
            Step::Out { src, .. } => (None, Some(src)),
            Step::Cross { src, dst, .. } => (Some(dst), Some(src)),
        };
        let len = self.len() as usize;
        dst.into_iter().chain(src).try_for_each(|addr| place(device, addr, len).map(drop))
    }

    /// How many bytes.
    pub(crate) fn len(&self) -> u64 {
        match *self {
            Step::Direct { dma: LinDma::Copy { len, .. } | LinDma::Fill { len, .. }, .. } => {
                len.into()
            }
            Step::In { len, .. }
            | Step::Out { len, .. }
            | Step::Cross { len, .. }
            | Step::Forward { len, .. } => len as u64,
        }
    }
}

const COPYING: &str = "copying";

fn invalid(detail: String, remedy: &'static str) -> Error {
    Error::new(ErrorKind::InvalidParams, COPYING, detail, remedy)
}

/// Where a device side lies.
enum Place {
    /// Memory of this open card.
    On(Arc<Device>),
    /// Another card's, imported by the one that was asked to copy: its engines reach it as they
    /// reach host memory.
    Imported,
}

fn place(device: &Arc<Device>, addr: DeviceAddr, len: usize) -> Result<Place, Error> {
    if device.has_imported(addr, len) {
        return Ok(Place::Imported);
    }
    let location = crate::runtime().locate(addr.0, len);
    let owner = location.and_then(|location| {
        if location.device_id == device.id() {
            return Some(Arc::clone(device));
        }
        location.device()
    });
    owner.map(Place::On).ok_or_else(|| {
        invalid(
            format!("{len} bytes at {addr} are not in one live allocation"),
            "copy within memory that is still allocated",
        )
    })
}

/// The card that reaches a device side whose other side is host memory.
pub(crate) fn card_for(
    device: &Arc<Device>,
    addr: DeviceAddr,
    len: usize,
) -> Result<Arc<Device>, Error> {
    let card = match place(device, addr, len)? {
        Place::On(card) => card,
        Place::Imported => Arc::clone(device),
    };
    card.can_copy()?;
    Ok(card)
}

/// Plans all segments.
///
/// # Safety
/// As for [`Device::copy`].
pub(crate) unsafe fn plan(device: &Arc<Device>, segments: &[Segment]) -> Result<Pieces, Error> {
    let mut pieces = Pieces::new();
    for segment in segments.iter().filter(|segment| segment.len > 0) {
        let len = segment.len;
        let region = segment.host_region.as_ref();
        match (segment.dst, segment.src) {
            (Side::Device(dst), Side::Device(src)) => between(device, dst, src, len, &mut pieces)?,
            (Side::Device(dst), Side::Host(src)) => {
                let on = card_for(device, dst, len)?;
                // SAFETY: the caller's promise.
                match unsafe { host_access(&on, src, len, region)? } {
                    HostAccess::Pinned(Pinned { addr: src, guard }) => {
                        let direction = Direction::HostToDevice;
                        pieces.extend(straight(&on, dst, src, len, direction, Some(guard)));
                    }
                    HostAccess::Bounce { guarded } => {
                        pieces.extend(steps(&on, len, BOUNCE_LEN, |at, len| Step::In {
                            from: HostPtr(src).add(at),
                            dst: DeviceAddr(dst.0 + at as u64),
                            len,
                            guarded,
                        }));
                    }
                }
            }
            (Side::Host(dst), Side::Device(src)) => {
                let on = card_for(device, src, len)?;
                // SAFETY: the caller's promise.
                match unsafe { host_access(&on, dst, len, region)? } {
                    HostAccess::Pinned(Pinned { addr: dst, guard }) => {
                        let direction = Direction::DeviceToHost;
                        pieces.extend(straight(&on, dst, src, len, direction, Some(guard)));
                    }
                    HostAccess::Bounce { guarded } => {
                        pieces.extend(steps(&on, len, BOUNCE_LEN, |at, len| Step::Out {
                            to: HostPtr(dst).add(at),
                            src: DeviceAddr(src.0 + at as u64),
                            len,
                            guarded,
                        }));
                    }
                }
            }
            (Side::Host(_), Side::Host(_)) => {
                return Err(Error::unsupported(
                    COPYING,
                    "both sides are host memory",
                    "a Gaudi copies to or from device memory; use memcpy",
                ));
            }
        }
    }
    Ok(pieces)
}

/// Both sides are device memory.
fn between(
    device: &Arc<Device>,
    dst: DeviceAddr,
    src: DeviceAddr,
    len: usize,
    pieces: &mut Pieces,
) -> Result<(), Error> {
    let (on, direction) = match (place(device, dst, len)?, place(device, src, len)?) {
        (Place::On(target), Place::On(source)) if target.id() == source.id() => {
            (source, Direction::DeviceToDevice)
        }
        (Place::On(target), Place::On(source)) => {
            source.can_copy()?;
            target.can_copy()?;
            let step = device.staging()?.slot_len();
            pieces.extend(steps(&source, len, step, |at, len| Step::Cross {
                target: Arc::clone(&target),
                src: DeviceAddr(src.0 + at as u64),
                dst: DeviceAddr(dst.0 + at as u64),
                len,
            }));
            return Ok(());
        }
        (Place::On(card), Place::Imported) if card.id() == device.id() => {
            (card, Direction::HostToDevice)
        }
        (Place::Imported, Place::On(card)) if card.id() == device.id() => {
            (card, Direction::DeviceToHost)
        }
        (Place::Imported, Place::Imported) => (Arc::clone(device), Direction::HostToDevice),
        (Place::On(card), Place::Imported) | (Place::Imported, Place::On(card)) => {
            return Err(invalid(
                format!("one side is memory of {card}, the other is imported by {device}"),
                "import it for the card whose memory it is copied to or from",
            ));
        }
    };
    on.can_copy()?;
    pieces.extend(straight(&on, dst, src, len, direction, None));
    Ok(())
}

/// One packet, or several where one cannot hold the length.
pub(super) fn straight(
    on: &Arc<Device>,
    dst: DeviceAddr,
    src: DeviceAddr,
    len: usize,
    direction: Direction,
    pin: Option<PinRef>,
) -> impl Iterator<Item = Piece> {
    packet::split(len as u64).map(move |(offset, len)| {
        let (src, dst) = (DeviceAddr(src.0 + offset), DeviceAddr(dst.0 + offset));
        let dma = LinDma::Copy { src, dst, len };
        Piece { on: Arc::clone(on), step: Step::Direct { dma, direction, pin: pin.clone() } }
    })
}

/// Pieces of at most `size` bytes.
fn steps(
    on: &Arc<Device>,
    len: usize,
    size: usize,
    step: impl Fn(usize, usize) -> Step,
) -> impl Iterator<Item = Piece> {
    (0..len).step_by(size).map(move |at| {
        let step = step(at, size.min(len - at));
        Piece { on: Arc::clone(on), step }
    })
}

/// Linux gives programs at most this many bits of address (with five-level page tables).
const USER_ADDRESS_BITS: u32 = 56;

/// Refuses what cannot be host memory.
pub(crate) fn check_host(ptr: *mut u8, len: usize) -> Result<(), Error> {
    let addr = ptr as usize;
    if ptr.is_null() || addr.checked_add(len).is_none() {
        return Err(invalid(format!("{len} bytes at {addr:#x} are no host memory"), ""));
    }
    if crate::runtime().locate(addr as u64, 0).is_some() {
        return Err(invalid(
            format!("{addr:#x} is device memory but was given as host memory"),
            "pass the memory type UCX detected, or leave detection to UCX",
        ));
    }
    // No process has memory up there; the cards with an MMU have theirs.
    if addr >> USER_ADDRESS_BITS != 0 {
        return Err(invalid(
            format!("{addr:#x} is no host memory, nor in a live device allocation"),
            "this may be device memory that was freed",
        ));
    }
    Ok(())
}

/// # Safety
/// As for [`Device::copy`].
unsafe fn host_access(
    device: &Arc<Device>,
    ptr: *mut u8,
    len: usize,
    region: Option<&Arc<HostRegion>>,
) -> Result<HostAccess, Error> {
    check_host(ptr, len)?;
    let addr = ptr as usize;
    // SAFETY: the caller keeps the memory while copies use it.
    unsafe { pin::pin(device, addr..addr + len, region.map(|region| &**region)) }
}
