//! Copies and fills, every byte compared.

use std::time::Duration;

use hl_thunk::packet::{LinDma, NOP};
use hl_thunk::{Device, Direction};
use serde_json::json;

use super::asking::ms;
use super::bench::{Bench, Image};
use super::memory::Area;
use super::pattern::{Case, IMAGE, Images, SLOTS, Wrong, cases};
use crate::report::Finding;

const SEND_BACK: &str =
    "send this report: the plugin must not copy like this on such a card until it is understood";
const LOOK_AT_LOG: &str = "look at the kernel log (dmesg), and send it with this report";

/// Submits a packet that does nothing to every queue the plugin uses.
pub(super) fn queues(device: &Device, area: &Area) -> (Finding, Option<Bench>) {
    let mut bench = match Bench::new(device, area.base()) {
        Ok(bench) => bench,
        Err(error) => return (Finding::bad("", error.to_string(), LOOK_AT_LOG), None),
    };
    let generation = device.generation();
    let mut queues: Vec<u32> =
        [Direction::HostToDevice, Direction::DeviceToHost, Direction::DeviceToDevice]
            .iter()
            .flat_map(|&direction| generation.queues(direction))
            .copied()
            .collect();
    queues.sort_unstable();
    queues.dedup();
    let mut best = Vec::new();
    for &queue in &queues {
        let mut times = Vec::new();
        for _ in 0..20 {
            match bench.submit(queue, &NOP) {
                Ok(time) => times.push(time),
                Err(why) => return (Finding::bad("", why, LOOK_AT_LOG), None),
            }
        }
        best.push(times.into_iter().min().unwrap_or_default());
    }
    let slowest = best.iter().max().copied().unwrap_or_default();
    let found = format!("queues {queues:?} answer; submit and wait takes {}", ms(slowest));
    let micros: Vec<f64> = best.iter().map(|time| time.as_secs_f64() * 1e6).collect();
    let data = json!({"queues": queues, "submit_and_wait_us": micros});
    (Finding::good("", found).with(data), Some(bench))
}

/// Copies an image down and up again.
pub(super) fn bulk(bench: &mut Bench) -> (Finding, Option<()>) {
    let generation = bench.device().generation();
    let mut wrong = Wrong::default();
    let mut best = [Duration::MAX; 2];
    let downs = generation.queues(Direction::HostToDevice);
    let ups = generation.queues(Direction::DeviceToHost);
    for round in 0..8 {
        let queues = [downs[round % downs.len()], ups[round % ups.len()]];
        match down_and_up(bench, queues, round as u64, &mut wrong) {
            Ok(times) => best = [best[0].min(times[0]), best[1].min(times[1])],
            Err(why) => return (Finding::bad("", why, LOOK_AT_LOG), None),
        }
    }
    if wrong.copies > 0 {
        return (wrong_bytes(&wrong, 8), None);
    }
    let rates = best.map(|time| IMAGE as f64 / time.as_secs_f64() / 1e9);
    let found = format!(
        "{} KiB down at {:.1} GB/s and up at {:.1} GB/s, every byte right",
        IMAGE >> 10,
        rates[0],
        rates[1]
    );
    let data = json!({"h2d_gb_per_s": rates[0], "d2h_gb_per_s": rates[1]});
    (Finding::good("", found).with(data), Some(()))
}

fn down_and_up(
    bench: &mut Bench,
    [down, up]: [u32; 2],
    seed: u64,
    wrong: &mut Wrong,
) -> Result<[Duration; 2], String> {
    let images = Images::new(&[], seed);
    bench.bytes(0)?.copy_from_slice(&images.source);
    bench.bytes(1)?.fill(0);
    let times = [
        bench.copy(Image::Host(0), Image::Device(0), down)?,
        bench.copy(Image::Device(0), Image::Host(1), up)?,
    ];
    wrong.add("copy down and up", &[], &images.source, bench.bytes(1)?);
    Ok(times)
}

/// Copies of odd lengths at odd places, down and up.
pub(super) fn odd(bench: &mut Bench, thorough: bool) -> Finding {
    let directions = [
        ("copy down", Direction::HostToDevice, Image::Host(0), Image::Device(0)),
        ("copy up", Direction::DeviceToHost, Image::Device(0), Image::Host(1)),
    ];
    judge(bench, thorough, &directions)
}

/// The same within device memory.
pub(super) fn within_the_card(bench: &mut Bench, thorough: bool) -> Finding {
    let within =
        ("copy within the card", Direction::DeviceToDevice, Image::Device(0), Image::Device(1));
    judge(bench, thorough, &[within])
}

type Way = (&'static str, Direction, Image, Image);

fn judge(bench: &mut Bench, thorough: bool, ways: &[Way]) -> Finding {
    let cases = cases(thorough);
    let (mut wrong, mut tried) = (Wrong::default(), 0);
    for way in ways {
        let queues = bench.device().generation().queues(way.1);
        for (at, batch) in cases.chunks(SLOTS).enumerate() {
            let queue = queues[at % queues.len()];
            if let Err(why) = copy_batch(bench, way, queue, batch, at as u64, &mut wrong) {
                return Finding::bad("", format!("{}: {why}", way.0), LOOK_AT_LOG);
            }
            tried += batch.len();
        }
    }
    if wrong.copies > 0 {
        return wrong_bytes(&wrong, tried);
    }
    let shown = if thorough { "all lengths and offsets" } else { "some lengths and offsets" };
    let found = format!(
        "{tried} copies of 1 to 4097 B, {shown} modulo 128: every byte right, no guard touched"
    );
    Finding::good("", found).with(json!({"copies": tried, "wrong": 0}))
}

fn wrong_bytes(wrong: &Wrong, tried: usize) -> Finding {
    let found = format!("{} of {tried} wrong: {}", wrong.copies, wrong.examples.join("; "));
    let data = json!({"copies": tried, "wrong": wrong.copies, "examples": wrong.examples});
    Finding::bad("", found, SEND_BACK).with(data)
}

fn copy_batch(
    bench: &mut Bench,
    &(what, _, from, to): &Way,
    queue: u32,
    batch: &[Case],
    seed: u64,
    wrong: &mut Wrong,
) -> Result<(), String> {
    let images = Images::new(batch, seed);
    place(bench, from, &images.source)?;
    place(bench, to, &images.before)?;
    let transfer = |(slot, case): (usize, &Case)| LinDma::Copy {
        src: bench.address(from, case.source(slot)),
        dst: bench.address(to, case.destination(slot)),
        len: case.len,
    };
    let transfers: Vec<LinDma> = batch.iter().enumerate().map(transfer).collect();
    bench.dma(queue, &transfers)?;
    let got = fetch(bench, to)?;
    wrong.add(what, batch, &images.after, got);
    Ok(())
}

/// Puts bytes into an image: by a whole, aligned copy, which was checked before, where it is the card's.
fn place(bench: &mut Bench, image: Image, bytes: &[u8]) -> Result<(), String> {
    match image {
        Image::Host(which) => bench.bytes(which)?.copy_from_slice(bytes),
        Image::Device(_) => {
            // Host image 1 is never copied from.
            let queue = bench.device().generation().queues(Direction::HostToDevice)[0];
            bench.bytes(1)?.copy_from_slice(bytes);
            bench.copy(Image::Host(1), image, queue)?;
        }
    }
    Ok(())
}

/// The bytes of an image.
fn fetch(bench: &mut Bench, image: Image) -> Result<&[u8], String> {
    let which = match image {
        Image::Host(which) => which,
        Image::Device(_) => {
            let queue = bench.device().generation().queues(Direction::DeviceToHost)[0];
            bench.bytes(1)?.fill(0);
            bench.copy(image, Image::Host(1), queue)?;
            1
        }
    };
    Ok(bench.bytes(which)?)
}

/// Fills of odd lengths at odd places.
pub(super) fn fill(bench: &mut Bench, thorough: bool) -> Finding {
    let cases = cases(thorough);
    let queues = bench.device().generation().queues(Direction::DeviceToDevice);
    let (mut wrong, mut tried) = (Wrong::default(), 0);
    for (at, batch) in cases.chunks(SLOTS).enumerate() {
        let byte = [0, 0xff, 0x5a][at % 3];
        let images = Images::for_fills(batch, byte, at as u64);
        let fill = |(slot, case): (usize, &Case)| LinDma::Fill {
            dst: bench.address(Image::Device(0), case.destination(slot)),
            len: case.len,
            byte,
        };
        let transfers: Vec<LinDma> = batch.iter().enumerate().map(fill).collect();
        let filled = place(bench, Image::Device(0), &images.before)
            .and_then(|()| bench.dma(queues[at % queues.len()], &transfers));
        let got = match filled.and_then(|_| fetch(bench, Image::Device(0))) {
            Ok(got) => got,
            Err(why) => return Finding::bad("", why, LOOK_AT_LOG),
        };
        wrong.add(&format!("fill with {byte:#04x}"), batch, &images.after, got);
        tried += batch.len();
    }
    if wrong.copies > 0 {
        return wrong_bytes(&wrong, tried);
    }
    let found = format!("{tried} fills with 0x00, 0xff and 0x5a: every byte right");
    Finding::good("", found).with(json!({"fills": tried, "wrong": 0}))
}
