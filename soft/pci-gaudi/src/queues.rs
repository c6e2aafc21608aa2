//! Queue managers and DMA: what runs on engine threads.
//!
//! A stream with work is put on a list, from which any engine thread takes it. A stream that waits for a fence gives up
//! its thread; it is listed again when the fence is raised. Packets are executed by the software card's code:
//! `soft_gaudi::processor`.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Instant;

use soft_gaudi::asic::Generation;
use soft_gaudi::packet::LinDma;
use soft_gaudi::processor::{Bus, Fault, Pause, Processor, Program};

use crate::card::{Card, Place, View};
use crate::events::stream_fault;
use crate::registers::{self as reg, Engine, core, qman};

const STREAMS: usize = 4;
/// The lower command processor, which the streams of a queue manager share.
const LOWER: usize = 4;
const FENCES: usize = 4;
/// Budget of a stream before other streams get their turn.
const BUDGET: u64 = 4 << 20;
/// Largest piece of a copy between two checks for a reset.
const PIECE: usize = 256 << 10;

/// Something for an engine thread to do.
#[derive(Debug)]
enum Work {
    Stream(usize, usize),
    Kdma(Dma, u64),
    End,
}

/// A DMA by a core, as its registers or a packet give it.
#[derive(Clone, Copy, Debug)]
struct Dma {
    core: u32,
    transfer: LinDma,
}

#[derive(Debug)]
struct Running {
    processor: Processor,
    consumed: u32,
    /// Control word of the descriptor that is being executed.
    descriptor: Option<u32>,
    /// A fault has stopped the stream until the next reset.
    dead: bool,
}

#[derive(Debug)]
struct Stream {
    produced: AtomicU32,
    listed: AtomicBool,
    running: Mutex<Running>,
}

impl Stream {
    fn new() -> Self {
        Self {
            produced: AtomicU32::new(0),
            listed: AtomicBool::new(false),
            running: Mutex::new(Running::new()),
        }
    }
}

impl Running {
    fn new() -> Self {
        let processor = Processor::new(Generation::Gaudi2);
        Self { processor, consumed: 0, descriptor: None, dead: false }
    }
}

#[derive(Debug)]
struct Qman {
    page: u32,
    engine: Engine,
    event: u16,
    streams: [Stream; STREAMS],
    /// Fence counters of each command processor.
    fences: Mutex<[[u32; FENCES]; STREAMS + 1]>,
}

/// All queue managers, and the list of work.
#[derive(Debug)]
pub struct Queues {
    qmans: Vec<Qman>,
    list: Mutex<VecDeque<Work>>,
    more: Condvar,
    /// Counts resets: work that began in an earlier epoch ends.
    epoch: AtomicU64,
    began: Instant,
}

impl Queues {
    /// Nothing to do.
    pub fn new() -> Self {
        let qmans = reg::qmans().into_iter().map(|(page, engine, event)| Qman {
            page,
            engine,
            event,
            streams: std::array::from_fn(|_| Stream::new()),
            fences: Mutex::default(),
        });
        Self {
            qmans: qmans.collect(),
            list: Mutex::default(),
            more: Condvar::new(),
            epoch: AtomicU64::new(0),
            began: Instant::now(),
        }
    }

    fn push(&self, work: Work) {
        self.list.lock().unwrap().push_back(work);
        self.more.notify_one();
    }

    fn wake(&self, number: usize, stream: usize) {
        if !self.qmans[number].streams[stream].listed.swap(true, Ordering::AcqRel) {
            self.push(Work::Stream(number, stream));
        }
    }

    /// Ends one engine thread.
    pub fn end(&self) {
        self.push(Work::End);
    }

    /// An engine thread: works until [`Queues::end`].
    pub fn work(&self, card: &Card) {
        loop {
            let mut list = self.list.lock().unwrap();
            let work = loop {
                match list.pop_front() {
                    Some(work) => break work,
                    None => list = self.more.wait(list).unwrap(),
                }
            };
            drop(list);
            match work {
                Work::Stream(number, stream) => self.run(card, number, stream),
                Work::Kdma(dma, epoch) => self.kdma(card, dma, epoch),
                Work::End => return,
            }
        }
    }

    /// Stops and resets everything. Waits until engine threads have left their streams.
    pub fn reset(&self, card: &Card) {
        self.epoch.fetch_add(1, Ordering::AcqRel);
        for qman in &self.qmans {
            for stream in &qman.streams {
                let mut running = stream.running.lock().unwrap();
                stream.produced.store(0, Ordering::Release);
                *running = Running::new();
            }
            *qman.fences.lock().unwrap() = Default::default();
            for at in (0..reg::PAGE as u32).step_by(4) {
                card.set(qman.page + at, 0);
            }
            for idle in qman::IDLE {
                card.set(qman.page + idle, u32::MAX);
            }
        }
    }

    /// Whether a fault has stopped a stream of the queue manager at a page. Waits while the stream runs.
    pub fn has_stopped(&self, page: u32, stream: usize) -> bool {
        let qman = self.qmans.iter().find(|qman| qman.page == page);
        qman.is_some_and(|qman| qman.streams[stream].running.lock().unwrap().dead)
    }

    /// A write to a register of a queue manager; the value is stored already.
    pub fn write(&self, card: &Card, number: usize, offset: u32, value: u32) {
        let qman = &self.qmans[number];
        let index = |base: u32, count: u32| {
            offset.checked_sub(base).map(|at| (at / 4) as usize).filter(|n| *n < count as usize)
        };
        if let Some(stream) = index(qman::PQ_PI, 4) {
            qman.streams[stream].produced.store(value, Ordering::Release);
            self.wake(number, stream);
        } else if let Some(stream) = index(qman::PQ_CI, 4) {
            let mut running = qman.streams[stream].running.lock().unwrap();
            *running = Running { consumed: value, ..Running::new() };
        } else if matches!(offset, qman::ENABLE | qman::STOP) {
            (0..STREAMS).for_each(|stream| self.wake(number, stream));
        } else if let Some(at) = index(qman::FENCE_RAISE, 20) {
            self.raise(card, number, at % 5, at / 5, value & 0xf);
        }
    }

    fn raise(&self, card: &Card, number: usize, processor: usize, fence: usize, increment: u32) {
        let qman = &self.qmans[number];
        let mut fences = qman.fences.lock().unwrap();
        let fence = fence % FENCES;
        let count = &mut fences[processor][fence];
        *count = count.saturating_add(increment);
        card.set(qman.page + fence_count(processor, fence), *count);
        drop(fences);
        if processor == LOWER {
            (0..STREAMS).for_each(|stream| self.wake(number, stream));
        } else {
            self.wake(number, processor);
        }
    }

    /// Runs a stream until it has nothing to do, waits, or has used its budget.
    fn run(&self, card: &Card, number: usize, stream: usize) {
        let qman = &self.qmans[number];
        let state = &qman.streams[stream];
        // From here on, a wake lists the stream again.
        state.listed.store(false, Ordering::Release);
        let mut running = state.running.lock().unwrap();
        let bus =
            StreamBus { card, qman, number, stream, epoch: self.epoch.load(Ordering::Acquire) };
        let mut budget = BUDGET;
        while !running.dead {
            if running.descriptor.is_none() {
                let produced = state.produced.load(Ordering::Acquire);
                if running.consumed == produced || !bus.enabled() {
                    return;
                }
                match bus.descriptor(running.consumed) {
                    Ok((program, control)) => {
                        running.processor.start(program);
                        running.descriptor = Some(control);
                    }
                    Err(fault) => {
                        bus.die(&mut running, fault);
                        return;
                    }
                }
            }
            match running.processor.run(&bus, &mut budget) {
                Ok(Pause::Done) => {
                    let control = running.descriptor.take().unwrap_or(0);
                    running.consumed = running.consumed.wrapping_add(1) % (2 * bus.entries());
                    card.set(qman.page + qman::PQ_CI + 4 * stream as u32, running.consumed);
                    bus.complete(control);
                }
                // The arbiter has one stream at a time: it may go on.
                Ok(Pause::Arbitrate(_)) => {}
                Ok(Pause::Blocked | Pause::Stopped) => return,
                Ok(Pause::Spent) => {
                    self.wake(number, stream);
                    return;
                }
                Err(fault) => bus.die(&mut running, fault),
            }
        }
    }

    /// COMMIT of the driver's own DMA core.
    pub fn commit(&self, card: &Card, page: u32, value: u32) {
        let transfer = LinDma {
            size: card.get(page + core::SIZE),
            src: card.get_long(page + core::SRC),
            dst: card.get_long(page + core::DST),
            memset: value >> 4 & 1 != 0,
            swap: (value >> 1 & 3) as u8,
            completion: value & 1 != 0,
        };
        self.push(Work::Kdma(Dma { core: page, transfer }, self.epoch.load(Ordering::Acquire)));
    }

    fn kdma(&self, card: &Card, dma: Dma, epoch: u64) {
        let size = u64::from(dma.transfer.size);
        let mut done = 0;
        while done < size && self.epoch.load(Ordering::Acquire) == epoch {
            let len = (size - done).min(PIECE as u64);
            if let Err(fault) = dma.piece(card, done, len) {
                card.log.say(format_args!("KDMA {:x?}: {fault:x?}", dma.transfer));
                return;
            }
            done += len;
        }
        if done == size {
            dma.complete(card);
        }
    }
}

impl Default for Queues {
    fn default() -> Self {
        Self::new()
    }
}

fn fence_count(processor: usize, fence: usize) -> u32 {
    qman::FENCE_COUNT + 20 * fence as u32 + 4 * processor as u32
}

impl Dma {
    fn views(&self, card: &Card) -> (View, View) {
        let (asid, bypass) = (card.get(self.core + core::ASID), card.get(self.core + core::BYPASS));
        let view = |bypassed, asid| if bypassed { View::Physical } else { View::of(asid) };
        (view(bypass >> 4 & 1 != 0, asid >> 16 & 0x3ff), view(bypass & 1 != 0, asid & 0x3ff))
    }

    /// Moves `len` bytes from `done` on.
    fn piece(&self, card: &Card, done: u64, len: u64) -> Result<(), Fault> {
        let (from, to) = self.views(card);
        let LinDma { src, dst, memset, swap, .. } = self.transfer;
        let mut bytes = vec![0; len as usize];
        if memset {
            // 32 bits, as `soft-gaudi` has it; public sources do not say.
            let pattern = (src as u32).to_le_bytes();
            for (at, byte) in bytes.iter_mut().enumerate() {
                *byte = pattern[(done as usize + at) % pattern.len()];
            }
        } else {
            card.read(from, src.wrapping_add(done), &mut bytes)?;
        }
        if swap != 0 && !memset {
            for unit in bytes.chunks_exact_mut(1 << swap) {
                unit.reverse();
            }
        }
        card.write(to, dst.wrapping_add(done), &bytes)
    }

    /// The write that reports the end, if it is enabled.
    fn complete(&self, card: &Card) {
        if !self.transfer.completion {
            return;
        }
        let low = card.get(self.core + core::COMPLETION_LO);
        let high = card.get(self.core + core::COMPLETION_HI);
        let addr = u64::from(low) | u64::from(high) << 32;
        let value = card.get(self.core + core::COMPLETION_DATA);
        if let Err(fault) = card.write_word(View::Physical, addr, value) {
            card.log.say(format_args!("write completion to {addr:#x}: {fault:x?}"));
        }
    }
}

/// The card, as one stream's command processor sees it.
struct StreamBus<'a> {
    card: &'a Card,
    qman: &'a Qman,
    number: usize,
    stream: usize,
    epoch: u64,
}

impl StreamBus<'_> {
    fn get(&self, register: u32) -> u32 {
        self.card.get(self.qman.page + register + 4 * self.stream as u32)
    }

    fn enabled(&self) -> bool {
        let bit = |register| self.card.get(self.qman.page + register) >> self.stream & 1;
        bit(qman::ENABLE) == 1 && bit(qman::STOP) == 0
    }

    fn entries(&self) -> u32 {
        1 << self.get(qman::PQ_SIZE).min(16)
    }

    /// Trusted accesses are physical; bit `first + stream` of the protection register says which are.
    fn view(&self, first: u32) -> View {
        let trusted =
            self.card.get(self.qman.page + qman::PROT) >> (first + self.stream as u32) & 1;
        let asid = self.card.get(self.qman.page + qman::ASID) & 0x3ff;
        if trusted != 0 { View::Physical } else { View::of(asid) }
    }

    fn fetch_view(&self) -> View {
        self.view(4)
    }

    fn message_view(&self) -> View {
        self.view(9)
    }

    /// The packets that descriptor `index` names, and its control word.
    fn descriptor(&self, index: u32) -> Result<(Program, u32), Fault> {
        let base =
            u64::from(self.get(qman::PQ_BASE_LO)) | u64::from(self.get(qman::PQ_BASE_HI)) << 32;
        let mut bytes = [0; 16];
        // No memory is at the last address: a ring that wraps there gives a fault.
        let at = base.saturating_add(16 * u64::from(index % self.entries()));
        self.card.read(View::Physical, at, &mut bytes)?;
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let addr = u64::from(word(0)) | u64::from(word(4)) << 32;
        Ok((Program::At { addr, size: word(8) }, word(12)))
    }

    /// The write by which the driver learns that a descriptor is done.
    fn complete(&self, control: u32) {
        if self.card.get(self.qman.page + qman::COMPLETION_ENABLE) & 1 == 0 {
            return;
        }
        let low = u64::from(self.get(qman::COMPLETION_LO));
        let high = u64::from(self.get(qman::COMPLETION_HI));
        let addr = (low | high << 32).saturating_add(4 * u64::from(control >> 16 & 0xfff));
        let data = self.get(qman::COMPLETION_DATA);
        if let Err(fault) = self.card.write_word(View::Physical, addr, data) {
            self.card.log.say(format_args!("completion to {addr:#x}: {fault:x?}"));
        }
    }

    fn die(&self, running: &mut Running, fault: Fault) {
        running.dead = true;
        let (engine, page, stream) = (self.qman.engine, self.qman.page, self.stream);
        self.card.log.say(format_args!("{engine:?} {page:#x} stream {stream} stops: {fault:x?}"));
        stream_fault(self.card, (page, engine, self.qman.event), stream, fault);
    }
}

impl Bus for StreamBus<'_> {
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault> {
        let view = self.fetch_view();
        let from = self.card.place(view, addr, false)?.0;
        let cannot = self.qman.engine == Engine::Edma && !self.card.options.edma_fetch;
        if cannot && matches!(from, Place::Host(_)) {
            return Err(Fault::Fetch { addr });
        }
        self.card.read(view, addr, into)
    }

    fn dma(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault> {
        if self.qman.engine == Engine::Compute {
            return Err(Fault::Opcode);
        }
        let job = Dma { core: self.qman.page + reg::PAGE as u32, transfer: *dma };
        job.piece(self.card, done, len)?;
        if done + len == u64::from(dma.size) {
            job.complete(self.card);
        }
        Ok(())
    }

    fn write(&self, addr: u64, value: u32) -> Result<(), Fault> {
        self.card.write_word(self.message_view(), addr, value)
    }

    fn write_own(&self, offset: u16, _: u32) -> Result<(), Fault> {
        self.card.log.unexpected(format!("WREG_32 to {offset:#x} of {:#x}", self.qman.page));
        Err(Fault::Razwi { addr: offset.into(), write: true })
    }

    fn message_base(&self, base: u8) -> u64 {
        let register = qman::MESSAGE_BASE + 0x28 * u32::from(base);
        u64::from(self.get(register)) | u64::from(self.get(register + 0x14)) << 32
    }

    fn pass_fence(&self, lower: bool, id: u8, target: u8, decrement: u8) -> bool {
        let processor = if lower { LOWER } else { self.stream };
        let mut fences = self.qman.fences.lock().unwrap();
        let count = &mut fences[processor][usize::from(id) % FENCES];
        if *count < target.into() {
            return false;
        }
        *count = count.saturating_sub(decrement.into());
        self.card.set(self.qman.page + fence_count(processor, id.into()), *count);
        true
    }

    fn raise_fence(&self, lower: bool, id: u8, increment: u8) {
        let processor = if lower { LOWER } else { self.stream };
        let queues = &self.card.queues;
        queues.raise(self.card, self.number, processor, id.into(), increment.into());
    }

    fn time(&self) -> u32 {
        self.card.queues.began.elapsed().as_micros() as u32
    }

    fn stopped(&self) -> bool {
        self.card.queues.epoch.load(Ordering::Acquire) != self.epoch
    }
}
