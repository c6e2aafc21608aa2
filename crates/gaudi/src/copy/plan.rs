//! How each segment of a copy travels: straight, through a bounce slot, or by way of the host
//! between two cards.

use std::collections::VecDeque;
use std::sync::Arc;

use hl_thunk::packet::{self, LinDma};

use super::{Segment, Side};
use crate::backend::HostPin;
use crate::copy::ring::Slot;
use crate::host::cannot_be_pinned;
use crate::{Device, DeviceAddr, Direction, Error, ErrorKind, HostRegion};

/// A host side up to this size is copied through a bounce slot unless its region is pinned already:
/// pinning and unpinning costs the driver more than the CPU needs to copy it.
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

/// A step of a copy, small enough for one packet.
#[derive(Clone, Debug)]
pub(crate) enum Piece {
    /// One packet, nothing else to do.
    Direct { dma: LinDma, direction: Direction, pin: Option<Arc<HostPin>> },
    /// Into a bounce slot by the CPU, then to the device.
    In { from: HostPtr, dst: DeviceAddr, len: usize, guarded: bool },
    /// From the device to a bounce slot, then out by the CPU.
    Out { to: HostPtr, src: DeviceAddr, len: usize, guarded: bool },
    /// From another card to a staging slot, then on to this one.
    Cross { peer: Arc<Device>, src: DeviceAddr, dst: DeviceAddr, len: usize },
    /// The second half of `Cross`: what is in the slot goes to this card.
    Forward { slot: Arc<Slot>, dst: DeviceAddr, len: usize },
}

impl Piece {
    /// Which way it goes on the copying card; `None` if it starts on another.
    pub(crate) fn direction(&self) -> Option<Direction> {
        match self {
            Piece::Direct { direction, .. } => Some(*direction),
            Piece::In { .. } | Piece::Forward { .. } => Some(Direction::HostToDevice),
            Piece::Out { .. } => Some(Direction::DeviceToHost),
            Piece::Cross { .. } => None,
        }
    }
}

const COPYING: &str = "copying";

fn invalid(detail: String, remedy: &'static str) -> Error {
    Error::new(ErrorKind::InvalidParams, COPYING, detail, remedy)
}

/// Where a device side lies.
enum Place {
    Here,
    Peer(Arc<Device>),
}

fn place(device: &Device, addr: DeviceAddr, len: usize) -> Result<Place, Error> {
    let gone = || {
        invalid(
            format!("{len} bytes at {addr} are not in one live allocation"),
            "copy within memory that is still allocated",
        )
    };
    let location = crate::runtime().locate(addr.0, len).ok_or_else(gone)?;
    if location.device_id == device.id() {
        return Ok(Place::Here);
    }
    location.device().map(Place::Peer).ok_or_else(gone)
}

/// Plans all segments.
///
/// # Safety
/// As for [`Device::copy`].
pub(crate) unsafe fn plan(
    device: &Arc<Device>,
    segments: &[Segment],
) -> Result<VecDeque<Piece>, Error> {
    let mut pieces = VecDeque::with_capacity(segments.len());
    for segment in segments.iter().filter(|segment| segment.len > 0) {
        let len = segment.len;
        let region = segment.host_region.as_ref();
        match (segment.dst, segment.src) {
            (Side::Device(dst), Side::Device(src)) => between(device, dst, src, len, &mut pieces)?,
            (Side::Device(dst), Side::Host(src)) => {
                local(device, dst, len)?;
                // SAFETY: the caller's promise.
                match unsafe { host_path(device, src, len, region)? } {
                    HostPath::Pinned(src, pin) => {
                        straight(dst, src, len, Direction::HostToDevice, Some(pin), &mut pieces);
                    }
                    HostPath::Bounce { guarded } => pieces.extend(chunks(len).map(|(at, len)| {
                        let dst = DeviceAddr(dst.0 + at as u64);
                        Piece::In { from: HostPtr(src).add(at), dst, len, guarded }
                    })),
                }
            }
            (Side::Host(dst), Side::Device(src)) => {
                local(device, src, len)?;
                // SAFETY: the caller's promise.
                match unsafe { host_path(device, dst, len, region)? } {
                    HostPath::Pinned(dst, pin) => {
                        straight(dst, src, len, Direction::DeviceToHost, Some(pin), &mut pieces);
                    }
                    HostPath::Bounce { guarded } => pieces.extend(chunks(len).map(|(at, len)| {
                        let src = DeviceAddr(src.0 + at as u64);
                        Piece::Out { to: HostPtr(dst).add(at), src, len, guarded }
                    })),
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

/// The device side must be on the card that copies: only that card's engines reach it.
fn local(device: &Device, addr: DeviceAddr, len: usize) -> Result<(), Error> {
    match place(device, addr, len)? {
        Place::Here => Ok(()),
        Place::Peer(peer) => Err(invalid(
            format!("{addr} is memory of {}", peer.info()),
            "let that device do the copy",
        )),
    }
}

fn between(
    device: &Arc<Device>,
    dst: DeviceAddr,
    src: DeviceAddr,
    len: usize,
    pieces: &mut VecDeque<Piece>,
) -> Result<(), Error> {
    match (place(device, dst, len)?, place(device, src, len)?) {
        (Place::Here, Place::Here) => {
            straight(dst, src, len, Direction::DeviceToDevice, None, pieces);
            Ok(())
        }
        (Place::Here, Place::Peer(peer)) => {
            peer.can_copy()?;
            let step = device.staging()?.slot_len();
            pieces.extend((0..len).step_by(step).map(|at| Piece::Cross {
                peer: Arc::clone(&peer),
                src: DeviceAddr(src.0 + at as u64),
                dst: DeviceAddr(dst.0 + at as u64),
                len: step.min(len - at),
            }));
            Ok(())
        }
        (Place::Peer(peer), _) => Err(invalid(
            format!("{dst} is memory of {}", peer.info()),
            "let the destination's device do the copy",
        )),
    }
}

/// One packet, or several where one cannot hold the length.
fn straight(
    dst: DeviceAddr,
    src: DeviceAddr,
    len: usize,
    direction: Direction,
    pin: Option<Arc<HostPin>>,
    pieces: &mut VecDeque<Piece>,
) {
    pieces.extend(packet::split(len as u64).map(|(offset, len)| {
        let (src, dst) = (DeviceAddr(src.0 + offset), DeviceAddr(dst.0 + offset));
        Piece::Direct { dma: LinDma::Copy { src, dst, len }, direction, pin: pin.clone() }
    }));
}

/// Pieces of a bounce slot's size.
fn chunks(len: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..len).step_by(BOUNCE_LEN).map(move |at| (at, BOUNCE_LEN.min(len - at)))
}

enum HostPath {
    Pinned(DeviceAddr, Arc<HostPin>),
    /// `guarded`: pinning was refused, so the memory may not be what the caller thinks; touch it
    /// only in ways that cannot fault.
    Bounce {
        guarded: bool,
    },
}

/// # Safety
/// As for [`Device::copy`].
unsafe fn host_path(
    device: &Arc<Device>,
    ptr: *mut u8,
    len: usize,
    region: Option<&Arc<HostRegion>>,
) -> Result<HostPath, Error> {
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
    let region = region.filter(|region| region.contains(addr, len));
    let pinned = region.is_some_and(|region| region.is_pinned_for(device));
    if len <= BOUNCE_LEN && !pinned {
        return Ok(HostPath::Bounce { guarded: false });
    }
    let made = match region {
        // SAFETY: the caller keeps the memory while copies use it.
        Some(region) => unsafe { region.pin(device, addr)? },
        // SAFETY: as above.
        None => match unsafe { device.pin(ptr, len) } {
            Ok(pin) => Some((pin.addr, Arc::new(pin))),
            Err(error) if cannot_be_pinned(&error) => None,
            Err(error) => return Err(error),
        },
    };
    Ok(match made {
        Some((addr, pin)) => HostPath::Pinned(addr, pin),
        None => HostPath::Bounce { guarded: true },
    })
}
