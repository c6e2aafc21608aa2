//! Counting: what the engine calls when something happened.
//!
//! Additions are relaxed: a counter is a number of its own, and orders nothing. Things that exist for a while (a pin,
//! an export, an import) are counted by a guard that lives exactly as long, so that no path can forget to count the
//! end.

use std::sync::atomic::{AtomicU64, Ordering};

use super::layout::{Counter, NAMES};
use crate::{DeviceInfo, Direction, Error, ErrorKind};

/// Failures, in the order of [`ErrorKind::ALL`].
const FAILURES: [Counter; ErrorKind::ALL.len()] = [
    Counter::FailuresDeviceNotFound,
    Counter::FailuresOutOfMemory,
    Counter::FailuresInvalidParams,
    Counter::FailuresDeviceBusy,
    Counter::FailuresDmaFailed,
    Counter::FailuresTimeout,
    Counter::FailuresPermissionDenied,
    Counter::FailuresChannelFailed,
];

/// Counters of operations and bytes, in the order of a [`Tally`]: first by kind of copy, then by path.
const WAYS: [(Counter, Counter); 9] = [
    (Counter::HostToDeviceOperations, Counter::HostToDeviceBytes),
    (Counter::DeviceToHostOperations, Counter::DeviceToHostBytes),
    (Counter::DeviceToDeviceOperations, Counter::DeviceToDeviceBytes),
    (Counter::CrossCardOperations, Counter::CrossCardBytes),
    (Counter::FillOperations, Counter::FillBytes),
    (Counter::PinnedOperations, Counter::PinnedCopyBytes),
    (Counter::BouncedOperations, Counter::BouncedCopyBytes),
    (Counter::StagedOperations, Counter::StagedCopyBytes),
    (Counter::ImportedOperations, Counter::ImportedCopyBytes),
];
/// Index in [`WAYS`] of copies through bounce buffers.
const BOUNCED: usize = 6;

/// The counters of one card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counts(&'static [AtomicU64; NAMES.len()]);

impl Counts {
    pub(super) fn new(words: &'static [AtomicU64; NAMES.len()]) -> Self {
        Self(words)
    }

    /// The counters of a card; the first call makes this process's page.
    pub(crate) fn of(info: &DeviceInfo) -> Self {
        super::page::of_card(info)
    }

    /// Makes this process's page even if it has opened no card.
    pub(crate) fn begin() {
        super::page::begin();
    }

    /// The counters of what belongs to no card; `None` before a card was opened or a peer relays.
    pub(crate) fn process() -> Option<Self> {
        super::page::of_process()
    }

    pub(crate) fn add(self, counter: Counter, amount: u64) {
        self.0[counter as usize].fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) fn subtract(self, counter: Counter, amount: u64) {
        self.0[counter as usize].fetch_sub(amount, Ordering::Relaxed);
    }

    pub(crate) fn get(self, counter: Counter) -> u64 {
        self.0[counter as usize].load(Ordering::Relaxed)
    }

    /// The card was opened.
    pub(crate) fn opened(self) {
        self.add(Counter::Opens, 1);
        self.add(Counter::Open, 1);
    }

    /// The card was closed.
    pub(crate) fn closed(self) {
        self.subtract(Counter::Open, 1);
    }

    /// Memory of `len` bytes was handed out.
    pub(crate) fn allocated(self, len: u64) {
        self.add(Counter::Allocations, 1);
        self.add(Counter::AllocationsLive, 1);
        self.add(Counter::AllocatedBytes, len);
    }

    /// Memory of `len` bytes was freed.
    pub(crate) fn freed(self, len: u64) {
        self.add(Counter::Frees, 1);
        self.subtract(Counter::AllocationsLive, 1);
        self.subtract(Counter::AllocatedBytes, len);
    }

    /// A submission was accepted.
    pub(crate) fn submitted(self) {
        self.add(Counter::Submissions, 1);
        let now = self.0[Counter::InFlight as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let most = &self.0[Counter::InFlightMost as usize];
        if most.load(Ordering::Relaxed) < now {
            most.fetch_max(now, Ordering::Relaxed);
        }
    }

    /// A submission ended: with its moves done, or in an error.
    pub(crate) fn ended(self, outcome: &Result<(), Error>, tally: &Tally) {
        self.subtract(Counter::InFlight, 1);
        match outcome {
            Ok(()) => tally.count(self),
            Err(_) => self.add(Counter::DmaErrors, 1),
        }
    }

    /// A submission of one move through a bounce buffer ended.
    pub(crate) fn bounced(self, outcome: &Result<(), Error>, direction: Direction, bytes: u64) {
        self.subtract(Counter::InFlight, 1);
        if outcome.is_err() {
            return self.add(Counter::DmaErrors, 1);
        }
        self.moved(way(direction), 1, bytes);
        self.moved(BOUNCED, 1, bytes);
    }

    /// Counts moves of one entry of [`WAYS`].
    fn moved(self, way: usize, operations: u32, bytes: u64) {
        let (number, length) = WAYS[way];
        self.add(number, operations.into());
        self.add(length, bytes);
    }

    /// A failure was returned to a caller.
    pub(crate) fn failed(self, kind: ErrorKind) {
        self.add(FAILURES[(-1 - kind.code()) as usize], 1);
    }

    /// An export or an import failed, and why.
    pub(crate) fn dmabuf_failed(self, cause: &Error) {
        let counter = match cause.kind() {
            _ if cause.is_unsupported() => Counter::DmabufFailuresUnsupported,
            _ if cause.is_device_lost() => Counter::DmabufFailuresDeviceLost,
            ErrorKind::DeviceNotFound => Counter::DmabufFailuresDeviceLost,
            ErrorKind::OutOfMemory => Counter::DmabufFailuresResources,
            ErrorKind::PermissionDenied => Counter::DmabufFailuresPermission,
            ErrorKind::InvalidParams => Counter::DmabufFailuresRange,
            _ => Counter::DmabufFailuresRefused,
        };
        self.add(counter, 1);
    }

    /// Counts something that exists until the guard is dropped.
    pub(crate) fn track(self, gauge: Gauge, len: u64) -> GaugeGuard {
        let (made, live, bytes, ended) = match gauge {
            Gauge::Pin => (Counter::Pins, None, Counter::PinnedBytes, Some(Counter::Unpins)),
            Gauge::Export => {
                (Counter::DmabufExports, Some(Counter::DmabufLive), Counter::DmabufBytes, None)
            }
            Gauge::Import => (
                Counter::DmabufImports,
                Some(Counter::DmabufImportsLive),
                Counter::DmabufImportsBytes,
                None,
            ),
            Gauge::Share => {
                (Counter::IpcShares, Some(Counter::IpcSharesLive), Counter::IpcSharesBytes, None)
            }
            Gauge::Handle => (
                Counter::IpcHandlesOpened,
                Some(Counter::IpcHandlesLive),
                Counter::IpcHandlesBytes,
                Some(Counter::IpcHandlesClosed),
            ),
        };
        self.add(made, 1);
        self.add(bytes, len);
        if let Some(live) = live {
            self.add(live, 1);
        }
        GaugeGuard { counts: self, live, bytes, ended, len }
    }
}

/// Things that are counted as long as they exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gauge {
    /// Host memory pinned for the card.
    Pin,
    /// A dma-buf of the card's memory that the engine keeps.
    Export,
    /// Another card's dma-buf, mapped for this one.
    Import,
    /// An allocation that other processes may open.
    Share,
    /// Another process's allocation, opened.
    Handle,
}

/// Something counted as existing. Put it after what it counts: fields drop in order.
#[derive(Debug)]
pub(crate) struct GaugeGuard {
    counts: Counts,
    live: Option<Counter>,
    bytes: Counter,
    /// Counts the ends.
    ended: Option<Counter>,
    len: u64,
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        self.counts.subtract(self.bytes, self.len);
        if let Some(live) = self.live {
            self.counts.subtract(live, 1);
        }
        if let Some(ended) = self.ended {
            self.counts.add(ended, 1);
        }
    }
}

/// How a move of a submission travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Path {
    /// From or to pinned host memory.
    Pinned,
    /// Through a bounce slot.
    Bounced,
    /// The first half of a move between cards: it has not arrived anywhere yet.
    Staging,
    /// The second half.
    Staged,
    /// Within the card.
    Within,
    /// To or from another card's imported memory.
    Imported,
    /// Not a copy: memory set to a value.
    Fill,
}

/// Index of a direction in [`WAYS`].
fn way(direction: Direction) -> usize {
    match direction {
        Direction::HostToDevice => 0,
        Direction::DeviceToHost => 1,
        Direction::DeviceToDevice => 2,
    }
}

/// What a submission moves, to be counted when it is done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Operations and bytes.
    ways: [(u32, u64); WAYS.len()],
}

impl Tally {
    /// A single move.
    pub(crate) fn one(direction: Direction, path: Path, len: u64) -> Self {
        let mut tally = Self::default();
        tally.add(direction, path, len);
        tally
    }

    /// Another move.
    pub(crate) fn add(&mut self, direction: Direction, path: Path, len: u64) {
        let (way, path) = match path {
            Path::Staging => return,
            Path::Pinned => (way(direction), Some(5)),
            Path::Bounced => (way(direction), Some(BOUNCED)),
            Path::Within => (way(direction), None),
            Path::Staged => (3, Some(7)),
            Path::Imported => (3, Some(8)),
            Path::Fill => (4, None),
        };
        for way in std::iter::once(way).chain(path) {
            self.ways[way].0 += 1;
            self.ways[way].1 += len;
        }
    }

    fn count(&self, counts: Counts) {
        for (way, &(operations, bytes)) in self.ways.iter().enumerate() {
            if operations > 0 {
                counts.moved(way, operations, bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_of_failure_has_its_counter() {
        for (kind, counter) in ErrorKind::ALL.into_iter().zip(FAILURES) {
            let name = format!("failures_{}", kind.name().to_ascii_lowercase());
            assert_eq!(NAMES[counter as usize], name);
        }
    }

    #[test]
    fn a_tally_counts_each_move_where_its_name_says() {
        let counts = Counts::new(Box::leak(Box::new(std::array::from_fn(|_| AtomicU64::new(0)))));
        let get = |name: &str| {
            let at = NAMES.iter().position(|known| *known == name).expect("a counter");
            counts.0[at].load(Ordering::Relaxed)
        };
        let (down, up) = (Direction::HostToDevice, Direction::DeviceToHost);
        let within = Direction::DeviceToDevice;
        for (direction, path, len, way, by) in [
            (down, Path::Pinned, 1, "h2d", "pinned"),
            (down, Path::Bounced, 2, "h2d", "bounced"),
            (up, Path::Pinned, 4, "d2h", "pinned"),
            (up, Path::Bounced, 8, "d2h", "bounced"),
            (within, Path::Within, 16, "d2d", ""),
            (down, Path::Staged, 32, "cross_card", "staged"),
            (up, Path::Imported, 64, "cross_card", "imported"),
            (within, Path::Fill, 128, "fill", ""),
        ] {
            let mut names = vec![format!("{way}_operations"), format!("{way}_bytes")];
            if !by.is_empty() {
                names.extend([format!("{by}_operations"), format!("{by}_copy_bytes")]);
            }
            let before: Vec<u64> = names.iter().map(|name| get(name)).collect();
            Tally::one(direction, path, len).count(counts);
            for (at, (name, before)) in names.iter().zip(before).enumerate() {
                assert_eq!(get(name), before + [1, len][at % 2], "{path:?} {name}");
            }
        }
        // The first half of a move between cards counts for nothing.
        Tally::one(up, Path::Staging, 1 << 40).count(counts);
        let all: u64 = (0..NAMES.len()).map(|at| counts.0[at].load(Ordering::Relaxed)).sum();
        let by_path = 1 + 2 + 4 + 8 + 32 + 64;
        assert_eq!(all, 255 + 8 + by_path + 6, "bytes, operations, and by path; nothing else");
    }
}
