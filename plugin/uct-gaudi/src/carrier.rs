//! What executes a copy: a card of this process, or a relay to the process that owns the other memory.

use std::sync::Arc;

use gaudi::share::{Relay, RelayPiece, Relayed};
use gaudi::{Device, Error, Notifier, Segment, Transfer};
use smallvec::SmallVec;

/// The segments of a copy. Most copies have one, which needs no heap allocation.
pub(crate) type Segments = SmallVec<[Segment; 1]>;

/// What to copy, and what executes it.
pub(crate) enum Carried {
    /// A card.
    Card(Arc<Device>, Segments),
    /// A relay. The thread that polls has to advance it.
    Relay(Arc<Relay>, SmallVec<[RelayPiece; 1]>),
}

/// A copy in progress.
#[allow(
    clippy::large_enum_variant,
    reason = "most are the large one, and a box costs an allocation"
)]
pub(crate) enum Running {
    Card(Transfer),
    Relay(Relayed),
}

impl Carried {
    /// How many pieces.
    pub(crate) fn pieces(&self) -> usize {
        match self {
            Carried::Card(_, segments) => segments.len(),
            Carried::Relay(_, pieces) => pieces.len(),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Carried::Card(_, segments) => segments.iter().map(|segment| segment.len).sum(),
            Carried::Relay(_, pieces) => pieces.iter().map(|piece| piece.len).sum(),
        }
    }

    /// Copies some of the pieces again, and waits. `None` for a relay: it has tried its pieces again itself, so
    /// its failure is final.
    ///
    /// # Safety
    /// As for [`Device::copy`].
    pub(crate) unsafe fn again(&self, pieces: std::ops::Range<usize>) -> Option<Result<(), Error>> {
        let Carried::Card(device, segments) = self else { return None };
        Some(segments.get(pieces).unwrap_or_default().iter().try_for_each(|segment| {
            // SAFETY: the caller's promise.
            unsafe {
                device.copy_blocking(segment.dst.outdated(), segment.src.outdated(), segment.len)
            }
        }))
    }

    /// Forgets the look-ups of addresses. Memory may be freed before the copy starts, which looks it up again.
    pub(crate) fn outdate(&mut self) {
        if let Carried::Card(_, segments) = self {
            for segment in segments {
                (segment.dst, segment.src) = (segment.dst.outdated(), segment.src.outdated());
            }
        }
    }

    /// Whether the card is lost, so that no copy can succeed.
    pub(crate) fn is_lost(&self) -> bool {
        matches!(self, Carried::Card(device, _) if device.is_surely_lost())
    }

    pub(crate) fn can_start(&self) -> bool {
        match self {
            Carried::Card(device, _) => device.can_submit(),
            Carried::Relay(relay, _) => relay.can_start(),
        }
    }

    pub(crate) fn count_busy(&self) {
        if let Carried::Card(device, _) = self {
            device.count_busy();
        }
    }

    /// Whether the two can be joined: the same card executes both.
    pub(crate) fn goes_with(&self, other: &Carried) -> bool {
        match (self, other) {
            (Carried::Card(one, _), Carried::Card(other, _)) => one.id() == other.id(),
            // A relay joins small pieces itself, and reports which of them failed.
            _ => false,
        }
    }

    /// Appends the pieces of another that [`goes_with`](Self::goes_with) this.
    pub(crate) fn join(&mut self, other: Carried) {
        match (self, other) {
            (Carried::Card(_, all), Carried::Card(_, more)) => all.extend(more),
            _ => debug_assert!(false, "they do not go together"),
        }
    }

    /// Arranges a notification for when this may start. `false`: none will come, try to start it now.
    pub(crate) fn notify_when_free(&self, notifier: &Arc<Notifier>) -> bool {
        let notifies = match self {
            Carried::Card(device, _) => device.notify_on_completion(notifier),
            // The copies that run on the relay notify.
            Carried::Relay(..) => true,
        };
        notifies && !self.can_start()
    }
}

impl Running {
    pub(crate) fn poll(&mut self) -> Option<Result<(), Error>> {
        match self {
            Running::Card(transfer) => transfer.poll(),
            Running::Relay(job) => job.poll(),
        }
    }

    /// Arranges a notification for when a poll may find something. `false`: none will come, poll now.
    pub(crate) fn notify_when_done(&self, notifier: &Arc<Notifier>) -> bool {
        match self {
            Running::Card(transfer) => transfer.notify_when_done(notifier),
            Running::Relay(job) => job.relay().notify_when_ready(notifier),
        }
    }

    pub(crate) fn has_news(&self) -> bool {
        match self {
            Running::Card(transfer) => transfer.has_news(),
            Running::Relay(job) => job.has_ended(),
        }
    }

    /// Waits until no memory of this process is read or written any more.
    pub(crate) fn end(self) {
        match self {
            // Nobody is left to report a failure to.
            Running::Card(mut transfer) => drop(transfer.wait()),
            Running::Relay(job) => drop(job),
        }
    }
}
