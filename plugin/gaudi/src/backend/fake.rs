//! A back end without a driver, for the engine's own tests: memory in a map, and hardware that
//! does its work only when the test says so, in the order the test says.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use hl_thunk::packet::{DmaRule, LinDma};
use hl_thunk::{DeviceAddr, Direction, ExportCall};

use super::{
    Backend, CopyLimits, FLUSHING, Geometry, HostPin, IMPORTING, MapOutcome, Page, Placement,
    Registers, SLOTS, Ticket,
};
use crate::error::Phase;
use crate::rcache::invalidate;
use crate::stats::Counts;
use crate::{Device, DeviceInfo, Error, runtime};

const PAGE: u64 = 16 << 20;
/// Offset at which the fake device sees host memory.
const HOST: u64 = 0xfff0_0000_0000_0000;

/// Most moves of one submission on the fake device.
pub(crate) const MOVES: usize = 8;
/// The fake device's only register block.
pub(crate) const BLOCK: DeviceAddr = DeviceAddr(0x1000_007f_f800_0000);
/// Budget of the fake device.
pub(crate) const BUDGET: u64 = 4;
/// As many lanes as submissions in flight, so that the hardware may finish them in any order.
const LANES: u64 = BUDGET;

#[derive(Debug, Default)]
pub(crate) struct Fake {
    state: Mutex<State>,
    changed: Condvar,
    live_pins: Arc<()>,
}

#[derive(Debug, Default)]
struct State {
    pages: BTreeMap<u64, Vec<u8>>,
    last: u64,
    queued: BTreeMap<u64, (Direction, Vec<LinDma>)>,
    finished: BTreeMap<u64, Result<(), i32>>,
    /// The finished submissions that a wait has reported.
    noticed: BTreeSet<u64>,
    /// The submission that each slot was last used for.
    slots: BTreeMap<u32, u64>,
    one_lane: bool,
    polls: u64,
    /// The longest time that a wait may have slept.
    longest_wait_us: u32,
    refuse_pins: Option<i32>,
    /// Pins that contain this address are refused.
    unpinnable: Option<u64>,
    /// Memory that is unmapped while a pin is refused: start and length.
    unmapped_meanwhile: Option<(usize, usize)>,
    /// Most pins at a time.
    most_pins: Option<usize>,
    /// Most bytes of one pin.
    longest_pin: Option<usize>,
    /// Every pin that was made: address and length.
    pins: Vec<(u64, usize)>,
    /// How often a pin was asked for, refused ones included.
    pin_calls: usize,
    /// Address ranges whose pages can also be reached at another address, which outlives them.
    pages_elsewhere: Vec<(Range<u64>, u64)>,
    refuse_submissions: Option<i32>,
    refuse_flushes: Option<i32>,
    /// For each flush the last submission before it.
    flushes: Vec<u64>,
    /// Device addresses of foreign mappings.
    taken_by_others: Vec<Range<u64>>,
    /// How often a page was asked for.
    page_calls: usize,
}

impl Fake {
    /// A device on a fake card of its own.
    pub(crate) fn device() -> (Arc<Fake>, Arc<Device>) {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let index = NEXT.fetch_add(1, Ordering::Relaxed);
        let info = DeviceInfo {
            bus_id: format!("fa4e:{index:02x}:00.0").parse().unwrap(),
            card_name: "FAKE".into(),
            driver_version: "fake".into(),
            is_software: true,
            ..DeviceInfo::example(index)
        };
        let fake = Arc::new(Fake::default());
        let device = runtime().adopt(&info, Arc::clone(&fake) as Arc<dyn Backend>).unwrap();
        (fake, device)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Sequence numbers of submissions the hardware has not done.
    pub(crate) fn queued(&self) -> Vec<u64> {
        self.state().queued.keys().copied().collect()
    }

    /// Number of moves and direction of a queued submission.
    pub(crate) fn shape(&self, sequence: u64) -> (Direction, usize) {
        let state = self.state();
        let (direction, moves) = &state.queued[&sequence];
        (*direction, moves.len())
    }

    /// The hardware does one submission.
    pub(crate) fn finish(&self, sequence: u64) {
        let mut state = self.state();
        let (_, moves) = state.queued.remove(&sequence).expect("queued");
        for dma in moves {
            state.execute(dma);
        }
        state.finished.insert(sequence, Ok(()));
        self.changed.notify_all();
    }

    /// The hardware fails one submission.
    pub(crate) fn fail(&self, sequence: u64, errno: i32) {
        let mut state = self.state();
        state.queued.remove(&sequence).expect("queued");
        state.finished.insert(sequence, Err(errno));
        self.changed.notify_all();
    }

    /// The hardware does everything it has.
    pub(crate) fn finish_all(&self) {
        for sequence in self.queued() {
            self.finish(sequence);
        }
    }

    pub(crate) fn refuse_pins(&self, errno: Option<i32>) {
        self.state().refuse_pins = errno;
    }

    /// Adds a foreign mapping.
    pub(crate) fn occupy(&self, addresses: Range<u64>) {
        self.state().taken_by_others.push(addresses);
    }

    /// How often a page was asked for.
    pub(crate) fn page_calls(&self) -> usize {
        self.state().page_calls
    }

    pub(crate) fn refuse_flushes(&self, errno: i32) {
        self.state().refuse_flushes = Some(errno);
    }

    /// For each flush of peers' writes the number of submissions before it.
    pub(crate) fn flushes(&self) -> Vec<u64> {
        self.state().flushes.clone()
    }

    pub(crate) fn refuse_submissions(&self, errno: Option<i32>) {
        self.state().refuse_submissions = errno;
    }

    /// All submissions go to one queue from now on.
    pub(crate) fn use_one_lane(&self) {
        self.state().one_lane = true;
    }

    /// The longest time that a wait for a submission may have slept.
    pub(crate) fn longest_wait_us(&self) -> u32 {
        self.state().longest_wait_us
    }

    /// How often submissions were polled.
    pub(crate) fn polls(&self) -> u64 {
        self.state().polls
    }

    /// Refuses pins that contain this address.
    pub(crate) fn refuse_pins_of(&self, addr: *const u8) {
        self.state().unpinnable = Some(addr as u64);
    }

    /// Unmaps this memory, as if by another thread, while a pin is refused.
    pub(crate) fn unmap_while_refusing(&self, memory: Option<(*const u8, usize)>) {
        self.state().unmapped_meanwhile = memory.map(|(start, len)| (start as usize, len));
    }

    /// Refuses pins as out of memory while this many are alive.
    pub(crate) fn allow_pins(&self, count: usize) {
        self.state().most_pins = Some(count);
    }

    /// Refuses pins longer than this as out of memory.
    pub(crate) fn allow_pins_up_to(&self, len: usize) {
        self.state().longest_pin = Some(len);
    }

    /// How often a pin was asked for, refused ones included.
    pub(crate) fn pin_calls(&self) -> usize {
        self.state().pin_calls
    }

    /// Every pin made so far: address and length.
    pub(crate) fn pins(&self) -> Vec<(u64, usize)> {
        self.state().pins.clone()
    }

    /// Makes the pages at `addr` reachable at `elsewhere` too, as long as a pin of them lives. A pin is of pages, not
    /// of addresses: with this the fake device keeps using the pages it pinned after the program mapped others in
    /// their place, as hardware does.
    pub(crate) fn pages_are_at(&self, addr: *const u8, len: usize, elsewhere: *const u8) {
        let addr = addr as u64;
        let mut state = self.state();
        state.pages_elsewhere.retain(|(range, _)| range.start != addr);
        state.pages_elsewhere.push((addr..addr + len as u64, elsewhere as u64));
    }

    /// Pins that are still alive.
    pub(crate) fn live_pins(&self) -> usize {
        Arc::strong_count(&self.live_pins) - 1
    }

    /// How many submissions a wait has reported as ended.
    pub(crate) fn noticed(&self) -> u64 {
        self.state().noticed.len() as u64
    }

    /// How many submissions were made.
    pub(crate) fn submitted(&self) -> u64 {
        self.state().last
    }

    /// Device memory, read behind the engine's back.
    pub(crate) fn peek(&self, addr: DeviceAddr, len: usize) -> Vec<u8> {
        self.state().device_bytes(addr.0, len).to_vec()
    }

    /// Device memory, written behind the engine's back.
    pub(crate) fn poke(&self, addr: DeviceAddr, bytes: &[u8]) {
        self.state().device_bytes(addr.0, bytes.len()).copy_from_slice(bytes);
    }
}

impl State {
    fn device_bytes(&mut self, addr: u64, len: usize) -> &mut [u8] {
        let (base, page) = self.pages.range_mut(..=addr).next_back().expect("a mapped address");
        let offset = (addr - base) as usize;
        &mut page[offset..offset + len]
    }

    fn execute(&mut self, dma: LinDma) {
        match dma {
            LinDma::Fill { dst, len, byte } => self.device_bytes(dst.0, len as usize).fill(byte),
            LinDma::Copy { src, dst, len } => {
                let len = len as usize;
                let bytes = if src.0 >= HOST {
                    // SAFETY: the engine pinned it, and must keep it until this is done.
                    unsafe { std::slice::from_raw_parts((src.0 - HOST) as *const u8, len) }.to_vec()
                } else {
                    self.device_bytes(src.0, len).to_vec()
                };
                if dst.0 >= HOST {
                    // SAFETY: as above.
                    unsafe {
                        ((dst.0 - HOST) as *mut u8).copy_from_nonoverlapping(bytes.as_ptr(), len);
                    }
                } else {
                    self.device_bytes(dst.0, len).copy_from_slice(&bytes);
                }
            }
        }
    }
}

#[derive(Debug)]
struct FakePage;

impl Page for FakePage {
    fn export_whole(&self, _: Option<ExportCall>, _: Counts) -> Result<OwnedFd, Error> {
        Ok(std::fs::File::open("/dev/null").unwrap().into())
    }

    fn export_part(&self, _offset: u64, _len: u64, counts: Counts) -> Result<OwnedFd, Error> {
        self.export_whole(None, counts)
    }

    fn give_back(self: Box<Self>, _needed: bool) -> Result<(), Box<dyn Page>> {
        Ok(())
    }
}

/// Two registers.
#[derive(Debug, Default)]
struct FakeBlock([AtomicU32; 2]);

impl Registers for FakeBlock {
    fn len(&self) -> usize {
        8
    }

    fn read(&self, offset: usize) -> Option<u32> {
        Some(self.0.get(offset / 4)?.load(Ordering::Relaxed))
    }

    unsafe fn write(&self, offset: usize, value: u32) -> Option<()> {
        self.0.get(offset / 4)?.store(value, Ordering::Relaxed);
        Some(())
    }
}

impl Backend for Fake {
    fn geometry(&self) -> Geometry {
        Geometry { total: 4 * PAGE, page: PAGE, placement: Placement::Window }
    }

    fn take_page(&self, at: DeviceAddr, len: u64) -> Result<MapOutcome, Error> {
        let mut state = self.state();
        state.page_calls += 1;
        let taken = |other: &Range<u64>| other.start < at.0 + len && at.0 < other.end;
        if state.taken_by_others.iter().any(taken) {
            return Ok(MapOutcome::Elsewhere(DeviceAddr(0x1001_1000_0000_0000)));
        }
        state.pages.insert(at.0, vec![0; len as usize]);
        Ok(MapOutcome::Page(Box::new(FakePage)))
    }

    unsafe fn pin(&self, ptr: *mut u8, len: usize) -> Result<HostPin, Error> {
        let mut state = self.state();
        state.pin_calls += 1;
        let addr = ptr as u64;
        let holds = |other: u64| (addr..addr + len as u64).contains(&other);
        let full = state.most_pins.is_some_and(|most| self.live_pins() >= most)
            || state.longest_pin.is_some_and(|longest| len > longest);
        let refused = state
            .refuse_pins
            .or(state.unpinnable.is_some_and(holds).then_some(libc::EFAULT))
            .or(full.then_some(libc::ENOMEM));
        if let Some(errno) = refused {
            if let Some((start, len)) = state.unmapped_meanwhile {
                invalidate(start, len);
            }
            return Err(Error::os(Phase::Use, "pinning host memory", "fake", errno));
        }
        state.pins.push((addr, len));
        let mut places = state.pages_elsewhere.iter();
        let place = places.find(|(range, _)| range.contains(&addr));
        let pages = place.map_or(addr, |(range, elsewhere)| elsewhere + (addr - range.start));
        Ok(HostPin::new(DeviceAddr(HOST + pages), Arc::clone(&self.live_pins)))
    }

    fn can_import(&self) -> Result<(), Error> {
        Err(Error::unsupported(IMPORTING, "the fake device cannot", ""))
    }

    fn import(&self, _dmabuf: BorrowedFd<'_>, _len: u64) -> Result<HostPin, Error> {
        Err(self.can_import().unwrap_err())
    }

    fn map_block(&self, address: DeviceAddr) -> Result<Box<dyn Registers>, Error> {
        if address != BLOCK {
            return Err(Error::os(Phase::Use, "mapping a register block", "fake", libc::EINVAL));
        }
        Ok(Box::new(FakeBlock::default()))
    }

    fn copy_limits(&self) -> Result<CopyLimits, Error> {
        let rule = DmaRule { len: 1, addr: 1 };
        Ok(CopyLimits { moves: MOVES, in_flight: BUDGET, lanes: LANES as usize, rule })
    }

    unsafe fn submit(
        &self,
        direction: Direction,
        slot: u32,
        moves: &[LinDma],
    ) -> Result<Ticket, Error> {
        assert!(slot < SLOTS);
        assert!(!moves.is_empty() && moves.len() <= MOVES);
        let mut state = self.state();
        if let Some(errno) = state.refuse_submissions {
            return Err(Error::os(Phase::Copy, "submitting a copy", "fake", errno));
        }
        state.last += 1;
        let sequence = state.last;
        let oldest = state.queued.keys().next().copied().unwrap_or(sequence);
        assert!(sequence - oldest < BUDGET, "over budget");
        if let Some(other) = state.slots.insert(slot, sequence) {
            assert!(state.noticed.contains(&other), "{other} has slot {slot}");
        }
        state.queued.insert(sequence, (direction, moves.to_vec()));
        let lane = if state.one_lane { 0 } else { sequence % LANES };
        Ok(Ticket { sequence, lane: lane as u32, slot })
    }

    fn flush_peer_writes(&self) -> Result<(), Error> {
        let mut state = self.state();
        let last = state.last;
        state.flushes.push(last);
        match state.refuse_flushes {
            None => Ok(()),
            Some(libc::EOPNOTSUPP) => Err(Error::unsupported(FLUSHING, "the fake cannot", "")),
            Some(errno) => Err(Error::os(Phase::Copy, FLUSHING, "fake", errno)),
        }
    }

    fn wait(&self, ticket: Ticket, timeout_us: u32) -> Result<bool, Error> {
        let timeout = Duration::from_micros(timeout_us.into());
        {
            let mut state = self.state();
            state.polls += 1;
            state.longest_wait_us = state.longest_wait_us.max(timeout_us);
        }
        let pending = |state: &mut State| !state.finished.contains_key(&ticket.sequence);
        let waited = self.changed.wait_timeout_while(self.state(), timeout, pending);
        let (mut state, _) = waited.unwrap();
        if state.finished.contains_key(&ticket.sequence) {
            state.noticed.insert(ticket.sequence);
        }
        match state.finished.get(&ticket.sequence) {
            None => Ok(false),
            Some(Ok(())) => Ok(true),
            Some(Err(errno)) => Err(Error::os(Phase::Copy, "waiting for a copy", "fake", *errno)),
        }
    }
}
