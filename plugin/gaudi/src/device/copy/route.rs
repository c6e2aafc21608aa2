//! Decides how the bytes of a copy travel. Only this file decides that.
//!
//! | ends | length | route |
//! |---|---|---|
//! | host and device, the caller waits | up to 64 KiB | *short*: through the slot of the permit, by one packet |
//! | host and device, host side can be pinned ([`pin`](crate::pin)) | any | *direct*: packets between the pin and the device |
//! | host and device otherwise | any | *bounce*: pieces of 64 KiB (a guest's: 1 MiB) through bounce slots |
//! | both on one device, or one of them imported by it | any | *direct* |
//! | two devices | any | *staged*: pieces of 1 MiB, to a staging slot by one device and on by the other |
//! | both host memory | | refused: the caller uses `memcpy` |
//! | what the engines do not accept | the first and last bytes, or all | [`unaligned`](super::unaligned); blocks |

use std::sync::Arc;

use hl_thunk::packet::{self, DmaRule, LinDma};
use smallvec::SmallVec;

use super::located::{COPYING, End, Located, Place, invalid};
use super::unaligned;
use crate::pin::{self, HostAccess, PinRef, Pinned};
use crate::stats::Path;
use crate::submit::host_copy::HostPtr;
use crate::submit::slab::Slot;
use crate::{Device, DeviceAddr, Direction, Error, HostRegion};

/// A step of a copy, small enough for one packet, and the device that runs it.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub(crate) on: Arc<Device>,
    pub(crate) step: Step,
}

/// The pieces of a copy. Most copies have one, which needs no allocation.
pub(crate) type Pieces = SmallVec<[Piece; 1]>;

#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// One packet, nothing else to do.
    Direct { dma: LinDma, direction: Direction, pin: Option<PinRef> },
    /// The CPU copies into a bounce slot, then the device copies from there.
    BounceIn { from: HostPtr, dst: DeviceAddr, len: usize, guarded: bool },
    /// The device copies to a bounce slot, then the CPU copies out of it.
    BounceOut { to: HostPtr, src: DeviceAddr, len: usize, guarded: bool },
    /// The device copies to a staging slot; then another device copies from there ([`Step::Forward`]).
    Stage { target: Arc<Device>, src: DeviceAddr, dst: DeviceAddr, len: usize },
    /// The second half of `Stage`: from the slot to the device.
    Forward { slot: Arc<Slot>, dst: DeviceAddr, len: usize },
}

impl Step {
    /// The direction as seen by the device that runs it.
    pub(crate) fn direction(&self) -> Direction {
        match self {
            Step::Direct { direction, .. } => *direction,
            Step::BounceIn { .. } | Step::Forward { .. } => Direction::HostToDevice,
            Step::BounceOut { .. } | Step::Stage { .. } => Direction::DeviceToHost,
        }
    }

    /// The path under which the statistics count it.
    pub(crate) fn path(&self) -> Path {
        match self {
            Step::Direct { pin: Some(_), .. } => Path::Pinned,
            Step::Direct { direction: Direction::DeviceToDevice, .. } => Path::Within,
            Step::Direct { .. } => Path::Imported,
            Step::BounceIn { .. } | Step::BounceOut { .. } => Path::Bounced,
            Step::Stage { .. } => Path::Staging,
            Step::Forward { .. } => Path::Staged,
        }
    }

    /// Checks that its device memory is still allocated or imported: for steps that had to wait since the copy was
    /// routed for `device`.
    pub(crate) fn check_live(&self, device: &Arc<Device>) -> Result<(), Error> {
        let (dst, src) = match *self {
            Step::Direct { dma: LinDma::Copy { src, dst, .. }, direction, ref pin } => {
                // The other side is pinned host memory.
                let pinned = |side| pin.is_some() && direction == side;
                let dst = (!pinned(Direction::DeviceToHost)).then_some(dst);
                (dst, (!pinned(Direction::HostToDevice)).then_some(src))
            }
            Step::Direct { dma: LinDma::Fill { dst, .. }, .. }
            | Step::BounceIn { dst, .. }
            | Step::Forward { dst, .. } => (Some(dst), None),
            Step::BounceOut { src, .. } => (None, Some(src)),
            Step::Stage { src, dst, .. } => (Some(dst), Some(src)),
        };
        let len = self.len() as usize;
        let find = |addr| Place::on_device(device, addr, len).map(drop);
        dst.into_iter().chain(src).try_for_each(find)
    }

    /// Length in bytes.
    pub(crate) fn len(&self) -> u64 {
        match *self {
            Step::Direct { dma: LinDma::Copy { len, .. } | LinDma::Fill { len, .. }, .. } => {
                len.into()
            }
            Step::BounceIn { len, .. }
            | Step::BounceOut { len, .. }
            | Step::Stage { len, .. }
            | Step::Forward { len, .. } => len as u64,
        }
    }
}

/// The rule of engines that accept every length and address.
pub(super) const ANYTHING: DmaRule = DmaRule { len: 1, addr: 1 };

/// Decides how `len` bytes travel between `ends` (destination, source), and adds the pieces to `pieces`. The copy was
/// called on `device`, and `rule` is the rule of its engines.
///
/// # Safety
/// As for [`Device::copy`].
pub(super) unsafe fn route(
    device: &Arc<Device>,
    ends: &(End, End),
    len: usize,
    region: Option<&HostRegion>,
    rule: DmaRule,
    pieces: &mut Pieces,
) -> Result<(), Error> {
    let (on, host, addr, direction) = match ends {
        (End::Host(_), End::Host(_)) => {
            return Err(Error::unsupported(
                COPYING,
                "both sides are host memory",
                "a Gaudi copies to or from device memory; use memcpy",
            ));
        }
        _ if rule != ANYTHING => {
            // SAFETY: the caller's promise.
            return unsafe { route_by_rule(device, ends, len, region, (rule, pieces)) };
        }
        (End::Device(dst), End::Device(src)) => return between(device, dst, src, len, pieces),
        (End::Device(dst), End::Host(host)) => {
            (&dst.device, *host, dst.addr, Direction::HostToDevice)
        }
        (End::Host(host), End::Device(src)) => {
            (&src.device, *host, src.addr, Direction::DeviceToHost)
        }
    };
    if on.id() != device.id() {
        on.can_copy()?;
    }
    let start = host.0 as usize;
    // SAFETY: the caller keeps the memory while the copy uses it.
    match unsafe { pin::pin(on, start..start + len, region)? } {
        HostAccess::Pinned(Pinned { addr: seen, guard }) => {
            let (dst, src) =
                if direction == Direction::DeviceToHost { (seen, addr) } else { (addr, seen) };
            direct(on, (dst, src), len, direction, Some(guard), pieces);
        }
        HostAccess::Bounce { guarded } => {
            pieces.extend(parts(on, len, on.bounce()?.slot_len(), |at, len| {
                let (host, addr) = (host.add(at), DeviceAddr(addr.0 + at as u64));
                if direction == Direction::DeviceToHost {
                    Step::BounceOut { to: host, src: addr, len, guarded }
                } else {
                    Step::BounceIn { from: host, dst: addr, len, guarded }
                }
            }))
        }
    }
    Ok(())
}

/// Routes the part of a copy that follows the rule of the engines, and copies the rest right here.
///
/// # Safety
/// As for [`Device::copy`].
#[cold]
unsafe fn route_by_rule(
    device: &Arc<Device>,
    ends: &(End, End),
    len: usize,
    region: Option<&HostRegion>,
    (rule, pieces): (DmaRule, &mut Pieces),
) -> Result<(), Error> {
    if let (End::Device(dst), End::Device(src)) = ends {
        // Only to return its errors: nothing is copied yet.
        between(device, dst, src, 0, &mut Pieces::new())?;
    }
    for end in [&ends.0, &ends.1] {
        if let End::Device(located) = end {
            located.device.can_copy()?;
        }
    }
    let middle = unaligned::cut(rule, ends, len);
    // SAFETY: the caller's promise.
    unsafe {
        unaligned::copy(rule, ends, 0..middle.start)?;
        unaligned::copy(rule, ends, middle.end..len)?;
    }
    let moved = |end: &End| match end {
        End::Host(host) => End::Host(host.add(middle.start)),
        End::Device(located) => End::Device(Located {
            addr: DeviceAddr(located.addr.0 + middle.start as u64),
            ..located.clone()
        }),
    };
    let ends = (moved(&ends.0), moved(&ends.1));
    let before = pieces.len();
    if !middle.is_empty() {
        // SAFETY: a part of the caller's copy.
        unsafe { route(device, &ends, middle.len(), region, ANYTHING, pieces)? };
    }
    // The pinned host memory may be aligned differently from the device memory: then the CPU copies it through slots.
    let broken =
        |piece: &Piece| matches!(piece.step, Step::Direct { dma, .. } if !rule.permits(dma));
    if pieces[before..].iter().any(broken) {
        pieces.truncate(before);
        // SAFETY: as above.
        unsafe { unaligned::copy(rule, &ends, 0..middle.len())? };
    }
    Ok(())
}

/// Both ends are device memory.
fn between(
    device: &Arc<Device>,
    dst: &Located,
    src: &Located,
    len: usize,
    pieces: &mut Pieces,
) -> Result<(), Error> {
    let direction = match (dst.imported, src.imported) {
        (false, false) if dst.device.id() != src.device.id() => {
            src.device.can_copy()?;
            dst.device.can_copy()?;
            let size = device.staging()?.slot_len();
            pieces.extend(parts(&src.device, len, size, |at, len| Step::Stage {
                target: Arc::clone(&dst.device),
                src: DeviceAddr(src.addr.0 + at as u64),
                dst: DeviceAddr(dst.addr.0 + at as u64),
                len,
            }));
            return Ok(());
        }
        // Imports are looked up only for `device`, so an imported side belongs to it.
        _ if dst.device.id() != src.device.id() => {
            let owner = if dst.imported { &src.device } else { &dst.device };
            return Err(invalid(
                format!("one side is memory of {owner}, the other is imported by {device}"),
                "import it for the card whose memory it is copied to or from",
            ));
        }
        (false, false) => Direction::DeviceToDevice,
        (true, false) => Direction::DeviceToHost,
        (_, true) => Direction::HostToDevice,
    };
    src.device.can_copy()?;
    direct(&src.device, (dst.addr, src.addr), len, direction, None, pieces);
    Ok(())
}

/// Adds one packet, or several if `len` is too long for one.
pub(super) fn direct(
    on: &Arc<Device>,
    (dst, src): (DeviceAddr, DeviceAddr),
    len: usize,
    direction: Direction,
    mut pin: Option<PinRef>,
    pieces: &mut Pieces,
) {
    let mut packets = packet::split(len as u64).peekable();
    while let Some((offset, len)) = packets.next() {
        let (src, dst) = (DeviceAddr(src.0 + offset), DeviceAddr(dst.0 + offset));
        // Moved, not cloned, into the last packet: cloning a reference to a cached pin takes a lock.
        let pin = if packets.peek().is_some() { pin.clone() } else { pin.take() };
        let step = Step::Direct { dma: LinDma::Copy { src, dst, len }, direction, pin };
        pieces.push(Piece { on: Arc::clone(on), step });
    }
}

/// Splits `len` bytes into pieces of at most `size` bytes.
fn parts(
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
