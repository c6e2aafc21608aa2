//! The command processor of one queue. It fetches and executes packets. It can stop between two packets (or inside a
//! long copy) and continue later in another thread.
//!
//! The DMA engine behind it holds several packets at a time and may execute them in any order. Here it executes the
//! last one first, so that a program that relies on their order finds wrong bytes. A packet with an engine barrier
//! waits for earlier DMAs; here every packet other than a DMA does, too.
//!
//! Packets access everything outside through [`Bus`], so this file knows neither memory nor locks.

use std::sync::Arc;

use crate::asic::Generation;
use crate::packet::{self, Command, LinDma, LoadAndExe, Message, Packet};

/// Largest piece of a copy done in one go; between pieces a reset is noticed.
pub const SLICE: u64 = 256 << 10;
/// What a packet costs of a budget in addition to the bytes it moves.
const PACKET_COST: u64 = 64;
/// Packets are fetched in blocks of this size.
const FETCH: usize = 4096;
/// Most DMAs that the engine holds at a time.
const ENGINE_DEPTH: usize = 64;
/// Deepest nesting of command buffers that run command buffers.
const MAX_DEPTH: usize = 8;

/// What ends a queue's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub enum Fault {
    /// No translation for an address.
    Page { addr: u64 },
    /// An access that no one answers, or that is not allowed.
    Razwi { addr: u64, write: bool },
    /// A length or an address that the DMA engines do not take.
    Rule { addr: u64 },
    /// Bytes that are not a packet, or a packet that a user may not use.
    Opcode,
    /// A fetch that the engine cannot do: the queue hangs until the watchdog resets the card.
    Fetch { addr: u64 },
}

/// The rest of the device, as a queue sees it.
pub trait Bus {
    /// Fetches packets, or data that packets refer to.
    fn read(&self, addr: u64, into: &mut [u8]) -> Result<(), Fault>;
    /// Moves `len` bytes of a DMA, starting at byte `done`.
    fn dma(&self, dma: &LinDma, done: u64, len: u64) -> Result<(), Fault>;
    /// Writes a word anywhere: memory or registers.
    fn write(&self, addr: u64, value: u32) -> Result<(), Fault>;
    /// Writes a register of the queue's own engine block.
    fn write_own(&self, offset: u16, value: u32) -> Result<(), Fault>;
    /// Address behind one of the four bases of a short message.
    fn message_base(&self, base: u8) -> u64;
    /// Passes a fence if its counter has reached the target.
    fn pass_fence(&self, lower: bool, id: u8, target: u8, decrement: u8) -> bool;
    /// Called when the engine has drained for a barrier in front of a DMA.
    fn drained(&self) {}
    /// Adds to a fence counter of this queue.
    fn raise_fence(&self, lower: bool, id: u8, increment: u8);
    /// The device's clock.
    fn time(&self) -> u32;
    /// Whether the queue must stop because the device is going away.
    fn stopped(&self) -> bool;
}

/// Where packets come from.
#[derive(Clone, Debug)]
#[allow(missing_docs, reason = "the fields bear the names of the specification")]
pub enum Program {
    /// Copied by the driver when they were submitted.
    Copied(Arc<[u8]>),
    /// In device memory.
    At { addr: u64, size: u32 },
}

impl Program {
    fn len(&self) -> u64 {
        match self {
            Self::Copied(bytes) => bytes.len() as u64,
            Self::At { size, .. } => u64::from(*size),
        }
    }
}

/// How far [`Processor::run`] got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pause {
    /// The program is finished.
    Done,
    /// A fence counter has not reached its target.
    Blocked,
    /// The budget is spent.
    Spent,
    /// The device is going away.
    Stopped,
    /// It waits for the arbiter, with this priority, and continues when it is run again.
    Arbitrate(u32),
}

enum Progress {
    Arbitrate(u32),
    Next,
    Blocked,
    Spent,
    Enter(Frame),
}

#[derive(Debug)]
struct Frame {
    program: Program,
    pc: u64,
    /// Runs on the lower command processor, which has its own fence counters.
    lower: bool,
    fetched: Vec<u8>,
    fetched_at: u64,
}

impl Frame {
    fn new(program: Program, lower: bool) -> Self {
        Self { program, pc: 0, lower, fetched: Vec::new(), fetched_at: 0 }
    }

    /// Reuses the fetch buffer of an earlier frame.
    fn reusing(mut self, mut buffer: Vec<u8>) -> Self {
        buffer.clear();
        self.fetched = buffer;
        self
    }

    /// The packet at the program counter.
    fn packet(&mut self, generation: Generation, bus: &impl Bus) -> Result<Packet, Fault> {
        let left = self.program.len() - self.pc;
        let bytes = match &self.program {
            Program::Copied(bytes) => &bytes[self.pc as usize..],
            Program::At { addr, .. } => {
                let at = self.pc.wrapping_sub(self.fetched_at) as usize;
                let have = self.fetched.len().saturating_sub(at);
                if (have as u64) < left.min(packet::MAX_FIXED as u64) {
                    self.fetched.resize(left.min(FETCH as u64) as usize, 0);
                    self.fetched_at = self.pc;
                    let from = addr.checked_add(self.pc).ok_or(Fault::Page { addr: *addr })?;
                    bus.read(from, &mut self.fetched)?;
                }
                &self.fetched[(self.pc - self.fetched_at) as usize..]
            }
        };
        packet::decode(generation, bytes).map_err(|_| Fault::Opcode)
    }
}

/// State of one queue's command processor.
#[derive(Debug)]
pub struct Processor {
    generation: Generation,
    frames: Vec<Frame>,
    /// A fetch buffer for the next frame.
    spare: Vec<u8>,
    /// DMAs in the engine; the last one is executed next.
    in_engine: Vec<LinDma>,
    /// Bytes done of that DMA.
    moved: u64,
    predicates: u32,
    scalars: [u8; 16],
    /// The arbiter has granted access.
    granted: bool,
}

impl Processor {
    /// With nothing to run.
    pub fn new(generation: Generation) -> Self {
        Self {
            generation,
            frames: Vec::new(),
            spare: Vec::new(),
            in_engine: Vec::new(),
            moved: 0,
            predicates: u32::MAX,
            scalars: [0; 16],
            granted: false,
        }
    }

    /// Begins a program; the one before must be done.
    pub fn start(&mut self, program: Program) {
        self.frames.clear();
        self.in_engine.clear();
        self.moved = 0;
        self.granted = false;
        let buffer = core::mem::take(&mut self.spare);
        self.frames.push(Frame::new(program, false).reusing(buffer));
    }

    /// Executes packets until something stops it.
    pub fn run(&mut self, bus: &impl Bus, budget: &mut u64) -> Result<Pause, Fault> {
        loop {
            let depth = self.frames.len();
            let Some(frame) = self.frames.last_mut() else {
                return Ok(self.drain(bus, budget)?.unwrap_or(Pause::Done));
            };
            if frame.pc >= frame.program.len() {
                self.spare = self.frames.pop().map(|frame| frame.fetched).unwrap_or_default();
                continue;
            }
            if bus.stopped() {
                return Ok(Pause::Stopped);
            }
            let lower = frame.lower;
            let packet = frame.packet(self.generation, bus)?;
            if self.predicates >> packet.predicate & 1 == 0 {
                frame.pc += u64::from(packet.len);
                continue;
            }
            let is_dma = matches!(packet.command, Command::LinDma(_));
            let waits = packet.engine_barrier || !is_dma || self.in_engine.len() == ENGINE_DEPTH;
            if waits && let Some(pause) = self.drain(bus, budget)? {
                return Ok(pause);
            }
            if is_dma && packet.engine_barrier {
                bus.drained();
            }
            match self.execute(&packet.command, lower, bus, budget)? {
                Progress::Next => self.frames[depth - 1].pc += u64::from(packet.len),
                Progress::Enter(frame) => {
                    let caller = &mut self.frames[depth - 1];
                    caller.pc += u64::from(packet.len);
                    // A jump at the end of a buffer does not return: such chains may be endless.
                    if caller.pc >= caller.program.len() {
                        self.frames.pop();
                    } else if depth >= MAX_DEPTH {
                        return Err(Fault::Opcode);
                    }
                    self.frames.push(frame);
                }
                Progress::Arbitrate(priority) => {
                    self.granted = true;
                    return Ok(Pause::Arbitrate(priority));
                }
                Progress::Blocked => return Ok(Pause::Blocked),
                Progress::Spent => return Ok(Pause::Spent),
            }
        }
    }

    fn execute(
        &mut self,
        command: &Command,
        lower: bool,
        bus: &impl Bus,
        budget: &mut u64,
    ) -> Result<Progress, Fault> {
        if let Command::LinDma(dma) = command {
            self.in_engine.push(*dma);
            return Ok(Progress::Next);
        }
        if *budget == 0 {
            return Ok(Progress::Spent);
        }
        *budget = budget.saturating_sub(PACKET_COST);
        let message = |value: Message| match value {
            Message::Value(value) => value,
            Message::Timestamp => bus.time(),
        };
        match *command {
            Command::Nop | Command::Other(_) | Command::ArbPoint { release: true, .. } => {}
            Command::ArbPoint { priority, release: false } => {
                if !core::mem::take(&mut self.granted) {
                    return Ok(Progress::Arbitrate(priority));
                }
            }
            Command::MsgLong { addr, value } => bus.write(addr, message(value))?,
            Command::MsgShort { base, offset, value } => {
                let addr = bus.message_base(base).wrapping_add(u64::from(offset));
                bus.write(addr, message(value))?;
            }
            Command::Wreg32 { offset, value } => bus.write_own(offset, value)?,
            Command::Fence { id, target, decrement } => {
                if !bus.pass_fence(lower, id, target, decrement) {
                    return Ok(Progress::Blocked);
                }
            }
            Command::Wait { id, increment, .. } => bus.raise_fence(lower, id, increment),
            Command::CpDma { addr, size, upper } => return enter(addr, size, upper, lower),
            Command::LoadAndExe(load) => return self.load(load, lower, bus, budget),
            Command::CbList { index, table, long_entries } => {
                let mut word = [0; 4];
                bus.read(index, &mut word)?;
                let stride = if long_entries { 32 } else { 16 };
                let entry = u64::from(u32::from_le_bytes(word)) * stride;
                let addr = table.checked_add(entry).ok_or(Fault::Page { addr: table })?;
                let mut bytes = [0; 16];
                bus.read(addr, &mut bytes)?;
                match packet::decode(self.generation, &bytes) {
                    Ok(Packet { command: Command::CpDma { addr, size, upper }, .. }) => {
                        return enter(addr, size, upper, lower);
                    }
                    _ => return Err(Fault::Opcode),
                }
            }
            // A stopped queue waits for a reset of the device.
            Command::Stop => return Ok(Progress::Blocked),
            Command::LinDma(_)
            | Command::MsgProt { .. }
            | Command::WregBulk { .. }
            | Command::Repeat { .. } => return Err(Fault::Opcode),
        }
        Ok(Progress::Next)
    }

    /// Waits until the engine has finished its DMAs; returns what stopped that, if anything.
    fn drain(&mut self, bus: &impl Bus, budget: &mut u64) -> Result<Option<Pause>, Fault> {
        while let Some(dma) = self.in_engine.last() {
            let left = u64::from(dma.size) - self.moved;
            if left == 0 {
                *budget = budget.saturating_sub(PACKET_COST);
                self.moved = 0;
                self.in_engine.pop();
                continue;
            }
            if bus.stopped() {
                return Ok(Some(Pause::Stopped));
            }
            // Start a DMA only if the budget covers all of it, or at least a whole slice.
            if left > *budget && *budget < SLICE {
                return Ok(Some(Pause::Spent));
            }
            let len = left.min(SLICE);
            bus.dma(dma, self.moved, len)?;
            self.moved += len;
            *budget = budget.saturating_sub(len);
        }
        Ok(None)
    }

    fn load(
        &mut self,
        load: LoadAndExe,
        lower: bool,
        bus: &impl Bus,
        budget: &mut u64,
    ) -> Result<Progress, Fault> {
        if load.load && load.scalars {
            let half = if load.upper { 8 } else { 0 };
            // Wraps around like a 64-bit adder.
            bus.read(load.addr.wrapping_add(half as u64), &mut self.scalars[half..])?;
        } else if load.load && load.packed {
            let mut mask = [0; 4];
            bus.read(load.addr, &mut mask)?;
            self.predicates = u32::from_le_bytes(mask) | 1;
        } else if load.load {
            let mut words = [0; 128];
            bus.read(load.addr, &mut words)?;
            let bits = words.chunks_exact(4).enumerate().map(|(n, w)| u32::from(w[0] & 1) << n);
            self.predicates = bits.fold(1, |mask, bit| mask | bit);
        }
        if !load.execute {
            return Ok(Progress::Next);
        }
        let bytes = if load.upper { &self.scalars[8..] } else { &self.scalars[..] };
        let packet = packet::decode(self.generation, bytes).map_err(|_| Fault::Opcode)?;
        match packet.command {
            Command::LoadAndExe(_) => Err(Fault::Opcode),
            _ if self.predicates >> packet.predicate & 1 == 0 => Ok(Progress::Next),
            command => self.execute(&command, lower, bus, budget),
        }
    }
}

/// Runs another buffer; only the upper command processor may do that.
fn enter(addr: u64, size: u32, upper: bool, lower: bool) -> Result<Progress, Fault> {
    if lower {
        return Err(Fault::Opcode);
    }
    Ok(Progress::Enter(Frame::new(Program::At { addr, size }, !upper)))
}
