//! `measure copies`: copies through stock UCX's own libuct: bandwidth with many in flight, the time of a single copy,
//! and short copies. Floors: memcpy over as much memory, and a bare submission to the driver.

use super::driver::Driver;
use super::record::{Record, size_name};
use super::timing::{median, seconds};
use super::working_set::{Rotation, last_level_cache, usable_memory};
use crate::ucp::Ucx;
use crate::uct::{Completion, Copier, Domain, Memory, MemoryType, Piece, Registration, Rma};
use crate::ucx::sys::Raw;
use crate::watchdog::Watchdog;
use anyhow::{Result, ensure};
use hl_thunk::{Direction, HostPages};
use std::hint::black_box;
use std::path::Path;

const SIZES: [usize; 5] = [64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20];
const ROUNDS: usize = 9;
/// Copies in a sample of single copies.
const ALONE: usize = 8;
/// Short copies: their length, and how many are in a sample.
const SHORT: u32 = 8;
const SHORTS: usize = 2000;

/// Directions, ordered so that bytes go to the card, across it, and back.
const DIRECTIONS: [&str; 3] = ["host to device", "device to device", "device to host"];

/// The target share of memcpy's bandwidth, for 1 MiB and more. There is no target for smaller copies on the software card.
const TARGET: f64 = 0.80;
/// A short copy may take this many times as long as the bare driver call.
const SHORT_TARGET: f64 = 1.15;

/// Two buffers on the host and two on the device.
struct Buffers<'d> {
    copier: Copier<'d>,
    from: HostPages,
    to: HostPages,
    from_handle: Registration<'d>,
    to_handle: Registration<'d>,
    first: Memory<'d>,
    second: Memory<'d>,
    completions: Vec<Completion>,
}

impl<'d> Buffers<'d> {
    fn new(domain: &'d Domain, bytes: usize, outstanding: usize) -> Result<Buffers<'d>> {
        let (from, to) = (HostPages::new(bytes)?, HostPages::new(bytes)?);
        // SAFETY: fresh memory of this length, ours alone.
        let words = unsafe { std::slice::from_raw_parts_mut(from.as_ptr().cast(), bytes / 8) };
        for (at, word) in words.iter_mut().enumerate() {
            *word = (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        let buffers = Buffers {
            copier: Copier::open(domain, "gaudi_cpy")?,
            from_handle: domain.register(from.as_ptr() as u64, bytes, Some(MemoryType::HOST))?,
            to_handle: domain.register(to.as_ptr() as u64, bytes, Some(MemoryType::HOST))?,
            first: domain.allocate(bytes)?,
            second: domain.allocate(bytes)?,
            completions: Completion::several(outstanding),
            from,
            to,
        };
        Ok(buffers)
    }

    /// The path of copies in one direction: way, local side, its handle, remote side.
    fn path(&self, direction: usize) -> (Rma, u64, Raw, u64) {
        let (first, second) = (self.first.address(), self.second.address());
        match DIRECTIONS[direction] {
            "host to device" => {
                (Rma::Put, self.from.as_ptr() as u64, self.from_handle.handle(), first)
            }
            "device to device" => (Rma::Put, first, self.first.handle(), second),
            _ => (Rma::Get, self.to.as_ptr() as u64, self.to_handle.handle(), second),
        }
    }

    /// Copies the given slots, with a fixed number in flight.
    fn copy(
        &self,
        direction: usize,
        size: usize,
        slots: impl Iterator<Item = usize>,
        outstanding: usize,
    ) -> Result<()> {
        let (way, local, handle, remote) = self.path(direction);
        for (n, slot) in slots.enumerate() {
            let completion = &self.completions[n % outstanding];
            self.copier.wait(completion)?;
            let at = (slot * size) as u64;
            let local = [Piece::plain(local + at, size)];
            // SAFETY: inside the sets; slots in flight at the same time differ, and nothing else touches them.
            unsafe { self.copier.start(way, &local, handle, remote + at, completion)? };
        }
        Ok(self.completions.iter().try_for_each(|completion| self.copier.wait(completion))?)
    }

    fn memcpy(&self, rotation: Rotation) {
        for slot in 0..rotation.slots {
            let at = slot * rotation.size;
            // SAFETY: inside two different mappings of this length.
            unsafe {
                let (from, to) = (self.from.as_ptr().add(at), self.to.as_ptr().add(at));
                to.copy_from_nonoverlapping(black_box(from), rotation.size);
            }
        }
    }

    /// Whether the bytes that were sent have come back.
    fn verify(&self, rotation: Rotation) -> Result<()> {
        let bytes = rotation.bytes();
        // SAFETY: ours, of this length; no copy is in flight.
        unsafe { self.to.as_ptr().write_bytes(0xa5, bytes) };
        let all = |direction| self.copy(direction, rotation.size, 0..rotation.slots, 1);
        (0..DIRECTIONS.len()).try_for_each(all)?;
        // SAFETY: as above.
        let (sent, back) = unsafe {
            (
                std::slice::from_raw_parts(self.from.as_ptr(), bytes),
                std::slice::from_raw_parts(self.to.as_ptr(), bytes),
            )
        };
        ensure!(sent == back, "copies of {} bytes brought back other bytes", rotation.size);
        Ok(())
    }
}

/// Measures copies of one size in all directions: with many in flight, then one at a time.
fn measure(buffers: &Buffers<'_>, rotation: Rotation, rounds: usize) -> Result<Vec<Record>> {
    let Rotation { size, slots, outstanding } = rotation;
    buffers.verify(rotation)?;
    let mut floor = Vec::new();
    let mut many = [const { Vec::new() }; DIRECTIONS.len()];
    let mut alone = [const { Vec::new() }; DIRECTIONS.len()];
    for round in 0..rounds {
        floor.push(seconds(|| {
            buffers.memcpy(rotation);
            Ok(())
        })?);
        for direction in 0..DIRECTIONS.len() {
            many[direction].push(seconds(|| buffers.copy(direction, size, 0..slots, outstanding))?);
            let some = (0..ALONE).map(|n| (round * ALONE + n) % slots);
            alone[direction].push(seconds(|| buffers.copy(direction, size, some, 1))?);
        }
    }
    let floor = median(floor);
    let gbps = |seconds| rotation.bytes() as f64 / seconds / 1e9;
    let target = (size >= 1 << 20).then_some(TARGET);
    let (floor_us, size) = (floor / slots as f64 * 1e6, size_name(size));
    let many = DIRECTIONS.iter().zip(many).map(|(direction, times)| {
        let name = format!("{direction}, {size}, {outstanding} outstanding");
        Record::new(name, gbps(median(times)), "GB/s", gbps(floor), target)
    });
    let alone = DIRECTIONS.iter().zip(alone).map(|(direction, times)| {
        let time = median(times) / ALONE as f64 * 1e6;
        Record::new(format!("{direction}, {size}, alone"), time, "µs", floor_us, None)
    });
    Ok(many.chain(alone).collect())
}

/// Short copies, which are complete when the call returns, alternating with the driver's own.
fn short(buffers: &Buffers<'_>, rounds: usize, count: usize) -> Result<[Record; 2]> {
    let both = [(Direction::HostToDevice, 0), (Direction::DeviceToHost, 0)];
    let driver = Driver::open(4096, &both, SHORT)?;
    let mut bytes = [7; SHORT as usize];
    let device = buffers.first.address();
    // A sample has as many of the driver's copies as take a few hundredths of a second.
    const SAMPLE: f64 = 0.03;
    let ten = seconds(|| (0..10).try_for_each(|_| driver.copy(0)))?;
    let count = count.min((SAMPLE / ten * 10.0) as usize + 10);
    let mut figures = [const { Vec::new() }; 4];
    // One extra round first, to warm up.
    for round in 0..=rounds {
        let times = [
            seconds(|| (0..count).try_for_each(|_| driver.copy(0)))?,
            seconds(|| {
                (0..count).try_for_each(|_| Ok(buffers.copier.put(black_box(&bytes), device)?))
            })?,
            seconds(|| (0..count).try_for_each(|_| driver.copy(1)))?,
            seconds(|| {
                (0..count)
                    .try_for_each(|_| Ok(buffers.copier.get(device, black_box(&mut bytes))?))
            })?,
        ];
        if round > 0 {
            figures.iter_mut().zip(times).for_each(|(figure, time)| figure.push(time));
        }
    }
    let [driver_put, put, driver_get, get] =
        figures.map(|times| median(times) / count as f64 * 1e9);
    Ok([("put_short", put, driver_put), ("get_short", get, driver_get)].map(
        |(call, value, floor)| {
            let name = format!("{call}, 8 B, floor: the driver's submit and wait");
            Record::new(name, value, "ns", floor, SHORT_TARGET)
        },
    ))
}

/// Measures copies of these sizes, or of the default ones. `quick` only shows that it works, with small sets and few
/// rounds; its figures mean nothing.
pub(super) fn run(ucx: Option<&Path>, quick: bool, sizes: &[usize]) -> Result<()> {
    let sizes = if sizes.is_empty() { &SIZES } else { sizes };
    let watchdog = Watchdog::start("costs", 300.0);
    let domain = Ucx::load(ucx)?.open_domain("gaudi_copy", &[])?;
    let cache = last_level_cache();
    let (cache, most, rounds) =
        if quick { (0, 64 << 20, 1) } else { (cache, usable_memory(), ROUNDS) };
    let rotations: Vec<Rotation> =
        sizes.iter().map(|&size| Rotation::new(size, cache, most)).collect();
    let largest = |of: fn(&Rotation) -> usize| rotations.iter().map(of).max().unwrap_or(0);
    let (bytes, outstanding) = (largest(Rotation::bytes), largest(|r| r.outstanding));
    eprintln!("  {} MiB on each side …", bytes >> 20);
    let buffers = Buffers::new(&domain, bytes, outstanding)?;
    watchdog.step("short copies");
    eprintln!("  copies of {SHORT} B …");
    let short = short(&buffers, rounds, if quick { 500 } else { SHORTS })?;
    let mut records = Vec::new();
    for rotation in rotations {
        watchdog.step(format_args!("copies of {} bytes", rotation.size));
        eprintln!("  copies of {} KiB …", rotation.size >> 10);
        records.extend(measure(&buffers, rotation, rounds)?.into_iter().enumerate());
    }
    watchdog.step("closing");
    // Order by direction, then by size.
    records.sort_by_key(|(row, _)| *row);
    Ok(records.iter().map(|(_, record)| record).chain(&short).try_for_each(Record::print)?)
}
