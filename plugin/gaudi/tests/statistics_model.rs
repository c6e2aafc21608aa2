//! Random sequences of everything that is counted, on two software cards: after each step every
//! counter is what a model says, and the dma-bufs and bytes it claims to hold are those this process
//! really has open.

mod machine;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use gaudi::{Allocation, Device, DeviceAddr, ExportCall, HostRegion, Segment, Side, runtime};
use proptest::prelude::*;

const BOUNCE: usize = 64 << 10;
/// Up to this a registered region is not pinned.
const SMALL: usize = 8 << 10;
const BOUNCE_RING: i64 = 64 * BOUNCE as i64;
const STAGING_RING: i64 = 8 << 20;
const HOST_LEN: usize = 300_000;

#[derive(Clone, Debug)]
enum Step {
    Alloc { card: usize, len: u64 },
    Free(usize),
    Export { pick: usize, call: Option<bool>, keep: bool },
    ExportAlone { pick: usize, keep: bool },
    ExportNothing { card: usize },
    Close(usize),
    Copy { pick: usize, len: usize, down: bool },
    CopyRegion { pick: usize, region: usize, len: usize },
    Forget(usize),
    Within { pick: usize },
    Across { from: usize, to: usize },
    Fill(usize),
    TooLong { card: usize },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    use Step::*;
    let any = any::<usize>;
    let small = prop_oneof![3 => 1..BOUNCE + 2, 1 => Just(BOUNCE), 2 => BOUNCE..HOST_LEN];
    let len = prop_oneof![4 => 1..400_000_u64, 1 => 1..900_000_000_u64];
    let step = prop_oneof![
        6 => (0..2_usize, len).prop_map(|(card, len)| Alloc { card, len }),
        3 => any().prop_map(Free),
        3 => (any(), prop::option::of(prop::bool::ANY), prop::bool::ANY)
            .prop_map(|(pick, call, keep)| Export { pick, call, keep }),
        2 => (any(), prop::bool::ANY).prop_map(|(pick, keep)| ExportAlone { pick, keep }),
        1 => (0..2_usize).prop_map(|card| ExportNothing { card }),
        3 => any().prop_map(Close),
        4 => (any(), small.clone(), prop::bool::ANY)
            .prop_map(|(pick, len, down)| Copy { pick, len, down }),
        3 => (any(), 0..2_usize, small)
            .prop_map(|(pick, region, len)| CopyRegion { pick, region, len }),
        1 => (0..2_usize).prop_map(Forget),
        1 => any().prop_map(|pick| Within { pick }),
        2 => (any(), any()).prop_map(|(from, to)| Across { from, to }),
        1 => any().prop_map(Fill),
        1 => (0..2_usize).prop_map(|card| TooLong { card }),
    ];
    prop::collection::vec(step, 1..50)
}

/// Counters of one card, as they ought to be.
type Expected = BTreeMap<String, i64>;

fn counters(bus_id: &str) -> Expected {
    let snapshot = stats_reader::read(std::process::id()).expect("our own page");
    let card = snapshot.card(bus_id).expect("a card that was opened");
    card.iter().map(|(about, value)| (about.name.clone(), value as i64)).collect()
}

fn inode(descriptor: &OwnedFd) -> u64 {
    rustix::fs::fstat(descriptor).unwrap().st_ino
}

struct Bench {
    cards: [Arc<Device>; 2],
    expected: [Expected; 2],
    /// Of each card: the ring of copies that are not waited for, and of those that are.
    bounce_pinned: [[bool; 2]; 2],
    staging_pinned: bool,
    tenants: Vec<(usize, Allocation)>,
    /// Those of which a dma-buf was handed out.
    exported: BTreeSet<u64>,
    descriptors: Vec<OwnedFd>,
    host: [Vec<u8>; 2],
    regions: [Option<Arc<HostRegion>>; 2],
}

impl Bench {
    fn new() -> Self {
        let cards = [machine::open(0), machine::open(1)];
        let expected = [0, 1].map(|card| counters(cards[card].info().bus_id.as_str()));
        Self {
            cards,
            expected,
            bounce_pinned: [[false; 2]; 2],
            staging_pinned: false,
            tenants: Vec::new(),
            exported: BTreeSet::new(),
            descriptors: Vec::new(),
            host: [vec![1; HOST_LEN], vec![2; HOST_LEN]],
            regions: [None, None],
        }
    }

    fn expect(&mut self, card: usize, changes: &[(&str, i64)]) {
        for &(name, change) in changes {
            *self.expected[card].get_mut(name).unwrap_or_else(|| panic!("{name}")) += change;
        }
    }

    /// Dma-bufs that the engine has open, by inode, with their lengths: those of the process less
    /// those that only this test holds.
    fn engines_dmabufs(&self) -> BTreeMap<u64, u64> {
        let mut open: BTreeMap<u64, (i32, u64)> = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            let Ok(target) = std::fs::read_link(entry.path()) else { continue };
            if target.to_string_lossy().contains("/dmabuf/") {
                let about = std::fs::metadata(entry.path()).unwrap();
                open.entry(about.ino()).or_insert((0, about.len())).0 += 1;
            }
        }
        for inode in self.descriptors.iter().map(inode) {
            open.get_mut(&inode).expect("a dma-buf of the test").0 -= 1;
        }
        open.into_iter()
            .filter(|(_, (count, _))| *count > 0)
            .map(|(ino, (_, len))| (ino, len))
            .collect()
    }

    fn check(&mut self, step: &Step) {
        let live = self.engines_dmabufs();
        let mut found = (0, 0);
        for card in 0..2 {
            let device = &self.cards[card];
            let is = counters(device.info().bus_id.as_str());
            self.expected[card].insert("reserved_bytes".into(), device.memory().reserved as i64);
            // Exact by the check below.
            for name in ["dmabuf_live", "dmabuf_bytes"] {
                self.expected[card].insert(name.into(), is[name]);
            }
            assert!(is["in_flight_max"] <= is["submissions"]);
            self.expected[card].insert("in_flight_max".into(), is["in_flight_max"]);
            found = (found.0 + is["dmabuf_live"], found.1 + is["dmabuf_bytes"]);
            for (name, expected) in &self.expected[card] {
                assert_eq!(is[name], *expected, "{name} of card {card} after {step:?}");
            }
        }
        let bytes = live.values().sum::<u64>() as i64;
        assert_eq!(found, (live.len() as i64, bytes), "dma-bufs after {step:?}");
    }

    fn bounced(&mut self, card: usize, len: usize, waited_for: bool) {
        let ring = &mut self.bounce_pinned[card][usize::from(waited_for)];
        if !std::mem::replace(ring, true) {
            self.expect(card, &[("pins", 1), ("pinned_bytes", BOUNCE_RING)]);
        }
        self.expect(card, &[("bounced_operations", 1), ("bounced_copy_bytes", len as i64)]);
    }

    fn pinned(&mut self, card: usize, len: usize) {
        self.expect(card, &[("pinned_operations", 1), ("pinned_copy_bytes", len as i64)]);
    }

    /// A submission uses an allocation: if it was exported, what others wrote is flushed first.
    fn touched(&mut self, card: usize, allocation: DeviceAddr) {
        let flushed = i64::from(self.exported.contains(&allocation.0));
        self.expect(card, &[("peer_write_flushes", flushed)]);
    }

    fn run(&mut self, step: &Step) {
        let picked = |pick: usize, len: usize| (len > 0).then(|| pick % len);
        match *step {
            Step::Alloc { card, len } => {
                let allocation = self.cards[card].alloc(len, 1).unwrap();
                self.tenants.push((card, allocation));
                let len = len as i64;
                let changes =
                    [("allocations", 1), ("allocations_live", 1), ("allocated_bytes", len)];
                self.expect(card, &changes);
            }
            Step::Free(pick) => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (card, allocation) = self.tenants.swap_remove(at);
                let (addr, len) = (allocation.addr(), allocation.len() as i64);
                drop(allocation);
                self.touched(card, addr);
                self.exported.remove(&addr.0);
                let changes = [("frees", 1), ("allocations_live", -1), ("allocated_bytes", -len)];
                self.expect(card, &changes);
            }
            Step::Export { pick, call, keep } => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let before = self.engines_dmabufs().len();
                let (card, allocation) = &self.tenants[at];
                let (card, addr, len) = (*card, allocation.addr(), allocation.len());
                let call =
                    call.map(|call| if call { ExportCall::Mapped } else { ExportCall::Whole });
                let exported = self.cards[card].export_with(addr, len, call);
                let (fd, _) = exported.unwrap();
                self.exported.insert(addr.0);
                self.descriptors.push(fd);
                let made = self.engines_dmabufs().len() as i64 - before as i64;
                if !keep {
                    self.descriptors.pop();
                }
                self.expect(card, &[("dmabuf_descriptors", 1), ("dmabuf_exports", made)]);
            }
            Step::ExportAlone { pick, keep } => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (card, allocation) = &self.tenants[at];
                let (card, addr) = (*card, allocation.addr());
                let (fd, _) = self.cards[card].export_alone(addr, allocation.len()).unwrap();
                self.exported.insert(addr.0);
                self.descriptors.extend(keep.then_some(fd));
                self.expect(card, &[("dmabuf_descriptors", 1), ("dmabuf_exports", 1)]);
            }
            Step::ExportNothing { card } => {
                let host = DeviceAddr(self.host[0].as_ptr() as u64);
                self.cards[card].export(host, 1).unwrap_err();
                self.expect(card, &[("dmabuf_failures_range", 1), ("failures_invalid_params", 1)]);
            }
            Step::Close(pick) => {
                let Some(at) = picked(pick, self.descriptors.len()) else { return };
                drop(self.descriptors.swap_remove(at));
            }
            Step::Copy { pick, len, down } => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (card, allocation) = &self.tenants[at];
                let (card, len) = (*card, len.min(allocation.len() as usize));
                let addr = allocation.addr();
                let there = Side::Device(addr);
                let here = Side::Host(self.host[0].as_mut_ptr());
                let (dst, src) = if down { (there, here) } else { (here, there) };
                // SAFETY: the buffer lives across the call and nothing else uses it.
                unsafe { self.cards[card].copy_blocking(dst, src, len) }.unwrap();
                self.touched(card, addr);
                self.copied(card, len, down);
                if len <= BOUNCE {
                    self.bounced(card, len, true);
                } else {
                    self.expect(card, &[("pins", 1), ("unpins", 1)]);
                    self.pinned(card, len);
                }
            }
            Step::CopyRegion { pick, region, len } => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (start, whole) = (self.host[region].as_mut_ptr(), self.host[region].len());
                let host_region = self.regions[region]
                    .get_or_insert_with(|| HostRegion::record(start, whole))
                    .clone();
                let (card, allocation) = &self.tenants[at];
                let (card, len) = (*card, len.min(allocation.len() as usize));
                let was_pinned = host_region.is_pinned_for(&self.cards[card]);
                let addr = allocation.addr();
                let dst = Side::Device(addr);
                let src = Side::Host(start);
                let segment = Segment { dst, src, len, host_region: Some(host_region) };
                // SAFETY: as above.
                unsafe { self.cards[card].copy(&[segment]) }.unwrap().wait().unwrap();
                self.touched(card, addr);
                self.copied(card, len, true);
                // A copy above 8 KiB may have earned the region its pin; a smaller one never does.
                let now = self.regions[region].as_ref().expect("just used");
                let is_pinned = now.is_pinned_for(&self.cards[card]);
                assert!(is_pinned == was_pinned || len > SMALL);
                assert!(is_pinned || len <= BOUNCE);
                if !is_pinned {
                    self.bounced(card, len, false);
                } else {
                    self.pinned(card, len);
                }
                if is_pinned && !was_pinned {
                    self.expect(card, &[("pins", 1), ("pinned_bytes", whole as i64)]);
                }
            }
            Step::Forget(region) => {
                let Some(gone) = self.regions[region].take() else { return };
                let pinned = [0, 1].map(|card| gone.is_pinned_for(&self.cards[card]));
                let len = gone.len() as i64;
                drop(gone);
                for card in (0..2).filter(|&card| pinned[card]) {
                    self.expect(card, &[("unpins", 1), ("pinned_bytes", -len)]);
                }
            }
            Step::Within { pick } => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (card, allocation) = &self.tenants[at];
                let (card, addr) = (*card, allocation.addr());
                let half = (allocation.len() / 2).min(1 << 20);
                if half == 0 {
                    return;
                }
                let dst = Side::Device(DeviceAddr(addr.0 + half));
                let src = Side::Device(addr);
                // SAFETY: only device memory.
                unsafe { self.cards[card].copy_blocking(dst, src, half as usize) }.unwrap();
                self.touched(card, addr);
                let bytes = ("d2d_bytes", half as i64);
                self.expect(card, &[("submissions", 1), ("d2d_operations", 1), bytes]);
            }
            Step::Across { from, to } => {
                let of = |card| self.tenants.iter().filter(move |(on, _)| *on == card);
                let (sources, targets) = (of(0).count(), of(1).count());
                if sources == 0 || targets == 0 {
                    return;
                }
                let source = &of(0).nth(from % sources).unwrap().1;
                let target = &of(1).nth(to % targets).unwrap().1;
                let len = source.len().min(target.len()).min(1 << 20) as usize;
                let (to, from) = (target.addr(), source.addr());
                let (dst, src) = (Side::Device(to), Side::Device(from));
                // SAFETY: only device memory.
                unsafe { self.cards[0].copy_blocking(dst, src, len) }.unwrap();
                self.touched(0, from);
                self.touched(1, to);
                let bytes = ("cross_card_bytes", len as i64);
                self.expect(0, &[("submissions", 1)]);
                let arrived = [("submissions", 1), ("cross_card_operations", 1), bytes];
                self.expect(1, &arrived);
                self.expect(1, &[("staged_operations", 1), ("staged_copy_bytes", len as i64)]);
                if !std::mem::replace(&mut self.staging_pinned, true) {
                    for card in 0..2 {
                        self.expect(card, &[("pins", 1), ("pinned_bytes", STAGING_RING)]);
                    }
                }
            }
            Step::Fill(pick) => {
                let Some(at) = picked(pick, self.tenants.len()) else { return };
                let (card, allocation) = &self.tenants[at];
                let (card, addr, len) = (*card, allocation.addr(), allocation.len().min(1 << 20));
                self.cards[card].fill(addr, len, 7).unwrap();
                self.touched(card, addr);
                let bytes = ("fill_bytes", len as i64);
                self.expect(card, &[("submissions", 1), ("fill_operations", 1), bytes]);
            }
            Step::TooLong { card } => {
                self.cards[card].alloc(u64::MAX, 1).unwrap_err();
                self.expect(card, &[("failures_out_of_memory", 1)]);
            }
        }
    }

    fn copied(&mut self, card: usize, len: usize, down: bool) {
        let len = len as i64;
        let (operations, bytes) =
            if down { ("h2d_operations", "h2d_bytes") } else { ("d2h_operations", "d2h_bytes") };
        self.expect(card, &[("submissions", 1), (operations, 1), (bytes, len)]);
    }
}

#[test]
fn dmabuf_and_all_other_counters_agree_with_a_model_over_any_sequence() {
    machine::set_up("gaudi2");
    proptest!(ProptestConfig::with_cases(40), |(steps in steps())| {
        let mut bench = Bench::new();
        for step in &steps {
            bench.run(step);
            bench.check(step);
        }
        let cards = [0, 1].map(|card: usize| bench.cards[card].info().bus_id.clone());
        drop(bench);
        prop_assert!(runtime().devices().is_empty());
        for card in cards {
            let left = counters(card.as_str());
            for name in [
                "open", "allocations_live", "allocated_bytes", "reserved_bytes", "dmabuf_live",
                "dmabuf_bytes", "dmabuf_imports_live", "dmabuf_imports_bytes", "pinned_bytes",
                "in_flight",
            ] {
                prop_assert_eq!(left[name], 0, "{} after the card was closed", name);
            }
            prop_assert_eq!(left["allocations"], left["frees"]);
            prop_assert_eq!(left["pins"], left["unpins"]);
            let host = left["h2d_operations"] + left["d2h_operations"];
            prop_assert_eq!(host, left["pinned_operations"] + left["bounced_operations"]);
        }
    });
}
