//! When the end of a submission is reported.
//!
//! The driver learns of an end by an interrupt and reports it from an unbound work queue: some time after the last byte
//! has arrived, and not always in the order of submission. So an end is reported after a random delay here
//! (`SOFT_GAUDI_JITTER`). With `SOFT_GAUDI_MODEL` it is reported when a real card would report it. Each link between
//! host and device is a clock that runs ahead of the copies; the copies run as fast as this machine can.
//!
//! A card's links are shared by everything that moves bytes over them, including cards of other processes that imported
//! its memory. So their clocks are in a file next to the card's memory.
//!
//! Nothing here waits; [`crate::engine`] keeps the list of ends to report.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::config::Config;
use crate::state::clock_ns;

/// What a card's work costs, in nanoseconds and bytes per microsecond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Name of the card in `SOFT_GAUDI_MODEL`.
    pub name: &'static str,
    /// From host memory to the card.
    pub to_device: u64,
    /// From the card to host memory.
    pub to_host: u64,
    /// Inside the card.
    pub inside: u64,
    /// From a submission on an idle queue to the first byte.
    pub start: u64,
    /// From the last byte of a busy queue to the first of a packet with an engine barrier.
    pub barrier: u64,
    /// From the last byte to the end that a program sees.
    pub completion: u64,
    /// Mapping memory, and unmapping it.
    pub map: u64,
    /// Extra time for each 4 KiB page of host memory.
    pub page: u64,
    /// The last close of a card, which resets it.
    pub close: u64,
    /// The same after a fault or a timeout: a hard reset.
    pub reset: u64,
    /// Factor for all other times except `close` and `reset`.
    pub slow: u64,
}

/// docs/software-gaudi.md has the source of each figure.
const GAUDI2: Model = Model {
    name: "gaudi2",
    to_device: 26_000,
    to_host: 26_000,
    inside: 200_000,
    start: 5_000,
    barrier: 1_000,
    completion: 20_000,
    map: 250_000,
    page: 250,
    close: 5_000_000_000,
    reset: 10_000_000_000,
    slow: 1,
};

impl Model {
    /// Parses `gaudi2` or `gaudi2,slow=N`.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let (name, slow) = text.split_once(',').unwrap_or((text, "slow=1"));
        let slow = slow.strip_prefix("slow=")?.parse().ok().filter(|n| (1..=10_000).contains(n))?;
        (name == GAUDI2.name).then_some(Model { slow, ..GAUDI2 })
    }

    /// How long the last close takes, and the last close after a reset. Not stretched: programs give up on a card after a while.
    pub(crate) fn close_times(&self) -> [Duration; 2] {
        [self.close, self.reset].map(Duration::from_nanos)
    }

    /// How long the driver takes to map or unmap memory with `host_len` bytes of host memory.
    pub(crate) fn map_time(&self, host_len: u64) -> Duration {
        Duration::from_nanos((self.map + host_len / 4096 * self.page) * self.slow)
    }
}

/// Which wires a copy uses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    ToDevice,
    ToHost,
    Inside,
}

/// When the links to the device and to the host have moved all that they were given: nanoseconds of CLOCK_MONOTONIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Links(&'static [AtomicU64; 2]);

impl Default for Links {
    /// Links of a card whose times are not modelled.
    fn default() -> Self {
        static IDLE: [AtomicU64; 2] = [AtomicU64::new(0), AtomicU64::new(0)];
        Self(&IDLE)
    }
}

impl Links {
    /// Links of the card with this memory.
    pub(crate) fn of(memory: &Path, device: u32) -> Result<Self, Errno> {
        let path = memory.with_file_name(format!("links{device}"));
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
        rustix::fs::ftruncate(&file, 16)?;
        let stat = rustix::fs::fstat(&file)?;
        let at = crate::dmabuf::map_once(file.as_fd(), (stat.st_dev, stat.st_ino), 16)?;
        // SAFETY: mapped for good, aligned to a page, and never truncated to less.
        Ok(Self(unsafe { &*(at as *const [AtomicU64; 2]) }))
    }

    /// Occupies a link for `time`, not before `from`; returns when that begins.
    fn take(self, link: Link, from: u64, time: u64) -> u64 {
        let Some(clock) = self.0.get(link as usize) else { return from };
        let advance = |free: u64| Some(free.max(from) + time);
        let free = clock.fetch_update(Ordering::Relaxed, Ordering::Relaxed, advance).unwrap_or(0);
        free.max(from)
    }
}

/// The clocks of one context; times are nanoseconds since it was opened.
#[derive(Debug)]
pub(crate) struct Timing {
    epoch: Instant,
    model: Option<Model>,
    jitter: u64,
    random: AtomicU64,
    /// `epoch` by CLOCK_MONOTONIC.
    epoch_ns: u64,
    links: Links,
    /// When the copies inside the card are done.
    inside: AtomicU64,
    /// When each queue has done all that it was given.
    queues: Vec<AtomicU64>,
}

impl Timing {
    pub(crate) fn new(config: &Config, queues: u32, links: Links) -> Self {
        Self {
            epoch: Instant::now(),
            epoch_ns: clock_ns(libc::CLOCK_MONOTONIC),
            model: config.model,
            jitter: config.jitter.0.as_nanos() as u64,
            random: AtomicU64::new(config.jitter.1 | 1),
            links,
            inside: AtomicU64::new(0),
            queues: (0..queues).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(crate) fn now(&self) -> u64 {
        self.epoch.elapsed().as_nanos() as u64
    }

    /// Ends are reported at once.
    pub(crate) fn is_instant(&self) -> bool {
        self.model.is_none() && self.jitter == 0
    }

    /// A queue has moved bytes. `peer`: the links of the other card whose memory was involved, if any.
    pub(crate) fn moved(&self, queue: u32, link: Link, bytes: u64, peer: Option<Links>) {
        let Some(model) = self.model else { return };
        let now = self.now();
        let before = self.queues[queue as usize].load(Ordering::Relaxed);
        let from = if before > now { before } else { now + model.start * model.slow };
        let rate = [model.to_device, model.to_host, model.inside][link as usize];
        let time = bytes * 1000 * model.slow / rate;
        let done = match link {
            Link::Inside => {
                let advance = |free: u64| Some(free.max(from) + time);
                let inside = &self.inside;
                let free = inside.fetch_update(Ordering::Relaxed, Ordering::Relaxed, advance);
                free.unwrap_or(0).max(from) + time
            }
            Link::ToDevice | Link::ToHost => {
                let mut from = self.epoch_ns + from;
                if let Some(peer) = peer {
                    // What comes into this card leaves the other.
                    let theirs =
                        if matches!(link, Link::ToDevice) { Link::ToHost } else { Link::ToDevice };
                    from = peer.take(theirs, from, time);
                }
                (self.links.take(link, from, time) + time).saturating_sub(self.epoch_ns)
            }
        };
        self.queues[queue as usize].fetch_max(done, Ordering::Relaxed);
    }

    /// A queue's next packet waits until its engine has drained. No effect if the engine is idle.
    pub(crate) fn drained(&self, queue: u32) {
        let Some(model) = self.model else { return };
        let now = self.now();
        let wait = |done: u64| (done > now).then_some(done + model.barrier * model.slow);
        let _ =
            self.queues[queue as usize].fetch_update(Ordering::Relaxed, Ordering::Relaxed, wait);
    }

    /// When a queue has done all that it was given; 0 for long ago.
    pub(crate) fn queue_done(&self, queue: u32) -> u64 {
        self.queues[queue as usize].load(Ordering::Relaxed)
    }

    /// When to report the end of a submission whose queues finished at `done`.
    pub(crate) fn report_at(&self, done: u64) -> u64 {
        let completion = self.model.map_or(0, |model| model.completion * model.slow);
        done.max(self.now()) + completion + self.random_delay()
    }

    fn random_delay(&self) -> u64 {
        if self.jitter == 0 {
            return 0;
        }
        // xorshift64.
        let step = |mut x: u64| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^ x << 17
        };
        let next =
            self.random.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |x| Some(step(x)));
        step(next.unwrap_or(1)) % self.jitter
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timing(model: Option<Model>, jitter: u64) -> Timing {
        Timing {
            epoch: Instant::now(),
            epoch_ns: clock_ns(libc::CLOCK_MONOTONIC),
            model,
            jitter,
            random: AtomicU64::new(1),
            links: Links(Box::leak(Box::default())),
            inside: AtomicU64::new(0),
            queues: vec![AtomicU64::new(0), AtomicU64::new(0)],
        }
    }

    #[test]
    fn two_queues_share_a_link_and_directions_do_not() {
        // So slow that the running time of this test does not matter.
        let model = Model::parse("gaudi2,slow=10000").unwrap();
        let timing = timing(Some(model), 0);
        let one = (1 << 20) * 1000 * 10_000 / model.to_device;
        timing.moved(0, Link::ToDevice, 1 << 20, None);
        let first = timing.queue_done(0);
        assert!(first >= one + model.start * 10_000);
        timing.moved(1, Link::ToDevice, 1 << 20, None);
        assert_eq!(timing.queue_done(1), first + one);
        timing.moved(0, Link::ToHost, 1 << 20, None);
        assert_eq!(timing.queue_done(0), first + one, "behind its first copy, beside the other");
        timing.drained(0);
        timing.moved(0, Link::ToDevice, 1 << 20, None);
        let third = first + 2 * one + model.barrier * 10_000;
        assert_eq!(timing.queue_done(0), third, "behind its first copies and a barrier");
        timing.drained(1);
        assert_eq!(timing.queue_done(1), first + one + model.barrier * 10_000);
        assert_eq!(timing.report_at(first + one), first + one + model.completion * 10_000);
    }

    #[test]
    fn two_cards_that_copy_from_a_third_share_its_link() {
        let model = Model::parse("gaudi2,slow=10000").unwrap();
        let cards = [(); 3].map(|()| timing(Some(model), 0));
        let exporter = cards[2].links;
        let one = (1 << 20) * 1000 * 10_000 / model.to_device;
        for card in &cards[..2] {
            card.moved(0, Link::ToDevice, 1 << 20, Some(exporter));
        }
        let ends = [&cards[0], &cards[1]].map(|card| card.epoch_ns + card.queue_done(0));
        assert_eq!(ends[1] - ends[0], one, "one after the other");
        // The exporter's own copies to the host wait behind them; its copies from the host do not.
        cards[2].moved(0, Link::ToHost, 1 << 20, None);
        assert_eq!(cards[2].epoch_ns + cards[2].queue_done(0), ends[1] + one);
        cards[2].moved(1, Link::ToDevice, 1 << 20, None);
        assert!(cards[2].epoch_ns + cards[2].queue_done(1) < ends[1]);
    }

    #[test]
    fn random_delays_are_below_the_limit_and_differ() {
        let timing = timing(None, 1000);
        let delays: Vec<u64> = (0..100).map(|_| timing.random_delay()).collect();
        assert!(delays.iter().all(|delay| *delay < 1000));
        assert!(delays.windows(2).filter(|two| two[0] > two[1]).count() > 20);
    }

    #[test]
    fn models_are_named_and_stretched() {
        assert_eq!(Model::parse("gaudi2"), Some(GAUDI2));
        assert_eq!(Model::parse("gaudi2,slow=20").unwrap().slow, 20);
        for bad in ["", "gaudi9", "gaudi2,slow=0", "gaudi2,fast=2", "gaudi2,slow=1,slow=2"] {
            assert_eq!(Model::parse(bad), None, "{bad}");
        }
    }
}
