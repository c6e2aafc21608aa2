//! Who carries a copy out: a card of this process, or a relay to the process that has the other memory.

use std::sync::Arc;

use gaudi::share::{Relay, RelayPiece, Relayed};
use gaudi::{Device, Error, Notifier, Segment, Transfer};
use smallvec::SmallVec;

/// The segments of a copy. Most have one, which needs no memory beside.
pub(crate) type Segments = SmallVec<[Segment; 1]>;

/// What to copy, and who does it.
pub(crate) enum Carried {
    /// A card.
    Card(Arc<Device>, Segments),
    /// A relay, which has to be advanced by whoever polls.
    Relay(Arc<Relay>, SmallVec<[RelayPiece; 1]>),
}

/// A copy under way.
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

    /// Copies some of the pieces by themselves, and waits. `None` where a failure is final: a relay's is the peer's.
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

    /// Memory that was found may be freed before it starts: it is looked up again then.
    pub(crate) fn outdate(&mut self) {
        if let Carried::Card(_, segments) = self {
            for segment in segments {
                (segment.dst, segment.src) = (segment.dst.outdated(), segment.src.outdated());
            }
        }
    }

    /// Whether nothing works any more.
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

    /// Whether the same card or relay carries both.
    pub(crate) fn goes_with(&self, other: &Carried) -> bool {
        match (self, other) {
            (Carried::Card(one, _), Carried::Card(other, _)) => one.id() == other.id(),
            // A relay puts small pieces together itself, and tells whose failed.
            _ => false,
        }
    }

    /// Takes the pieces of another, which goes with it.
    pub(crate) fn join(&mut self, other: Carried) {
        match (self, other) {
            (Carried::Card(_, all), Carried::Card(_, more)) => all.extend(more),
            _ => debug_assert!(false, "they do not go together"),
        }
    }

    /// Whether there will be a notification when it may start. `false`: try it.
    pub(crate) fn notify_when_free(&self, notifier: &Arc<Notifier>) -> bool {
        let notifies = match self {
            Carried::Card(device, _) => device.notify_on_completion(notifier),
            // Those that run on it notify.
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

    /// Whether there will be a notification when there is something to poll for. `false`: poll.
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

    /// Waits until nothing of this process's memory is read or written any more.
    pub(crate) fn end(self) {
        match self {
            // Nobody is left to report a failure to.
            Running::Card(mut transfer) => drop(transfer.wait()),
            Running::Relay(job) => drop(job),
        }
    }
}
