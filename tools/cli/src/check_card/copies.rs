//! Copies and fills. Every byte is compared.

use std::time::Duration;

use hl_thunk::packet::{LinDma, NOP};
use hl_thunk::{Device, Direction};
use serde_json::json;

use super::bench::{Bench, HostImage, Image, SubmitFailure};
use super::memory::Area;
use super::pattern::{Batch, Case, IMAGE, Images, Mismatches, SLOTS, batches, noise};
use super::queries::ms;
use crate::report::Finding;

const SEND_BACK: &str =
    "send this report: the plugin must not copy like this on such a card until it is understood";
const LOOK_AT_LOG: &str = "look at the kernel log (dmesg), and send it with this report";

/// Most submissions that the plugin has in flight; the driver's limit is 64.
const IN_FLIGHT: usize = 60;
/// Packets per submission when measuring a rate, so that the cost of the submission itself hardly counts.
const IN_ONE_SUBMISSION: usize = 16;
/// The images of copies within the card.
const WITHIN: (Image, Image) = (Image::Device(0), Image::Device(1));
/// The values to fill with; the vendor only fills with zero.
const FILLS: [(&str, u8); 3] =
    [("fill with 0x00", 0), ("fill with 0xff", 0xff), ("fill with 0x5a", 0x5a)];

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
        let mut least = [Duration::MAX; 2];
        for _ in 0..20 {
            match bench.submit(queue, &NOP) {
                Ok(took) => least = [least[0].min(took.submit), least[1].min(took.total)],
                Err(why) => {
                    let found = format!("queue {queue}: {why}");
                    return (Finding::bad("", found, LOOK_AT_LOG), None);
                }
            }
        }
        best.push(least);
    }
    let slowest = best.iter().map(|best| best[1]).max().unwrap_or_default();
    let found = format!("queues {queues:?} answer; submit and wait takes {}", ms(slowest));
    let micros = |which: usize| -> Vec<f64> {
        best.iter().map(|best| best[which].as_secs_f64() * 1e6).collect()
    };
    let data = json!({"queues": queues, "submit_us": micros(0), "submit_and_wait_us": micros(1)});
    (Finding::good("", found).with(data), Some(bench))
}

/// Copies a whole image to the card and back, on each queue; then many in one submission, to measure the rate.
pub(super) fn bulk(bench: &mut Bench) -> (Finding, Option<()>) {
    let before = bench.transfers();
    let downs = bench.device().generation().queues(Direction::HostToDevice);
    let ups = bench.device().generation().queues(Direction::DeviceToHost);
    let (host, device, back) = (Image::Host(0), Image::Device(0), Image::Host(1));
    for round in 0..8 {
        let (down, up) = (downs[round % downs.len()], ups[round % ups.len()]);
        let bytes = noise(round as u64, SLOTS);
        let copied = (|| {
            bench.bytes(0)?.copy_from_slice(&bytes);
            bench.bytes(1)?.fill(0);
            bench.dma(down, &[bench.copy(host, device, IMAGE)])?;
            bench.dma(up, &[bench.copy(device, back, IMAGE)])?;
            Ok(different(bench.bytes(1)?, &bytes))
        })();
        let how = format!("copy down on queue {down} and up on queue {up}");
        if let Some(finding) = whole_image(copied, &how) {
            return (finding, None);
        }
    }
    let mut rates = [0.0; 2];
    for (rate, (from, to, queue)) in
        rates.iter_mut().zip([(host, device, downs[0]), (device, back, ups[0])])
    {
        let packets = [bench.copy(from, to, IMAGE); IN_ONE_SUBMISSION];
        match bench.dma(queue, &packets) {
            Ok(took) => {
                *rate = (IMAGE * IN_ONE_SUBMISSION) as f64 / took.total.as_secs_f64() / 1e9;
            }
            Err(why) => {
                let found = format!("queue {queue}, {IN_ONE_SUBMISSION} packets: {why}");
                return (Finding::bad("", found, LOOK_AT_LOG), None);
            }
        }
    }
    let found = format!(
        "{} KiB down at {:.1} GB/s and up at {:.1} GB/s, every byte right",
        IMAGE >> 10,
        rates[0],
        rates[1]
    );
    let data = json!({
        "h2d_gb_per_s": rates[0], "d2h_gb_per_s": rates[1], "transfers": bench.transfers() - before,
    });
    (Finding::good("", found).with(data), Some(()))
}

/// Keeps as many submissions in flight as the plugin does at most, on all queues in turn: to the card, then back.
pub(super) fn in_flight(bench: &mut Bench) -> (Finding, Option<()>) {
    let before = bench.transfers();
    let len = IMAGE / IN_FLIGHT / 128 * 128;
    let bytes = noise(60, SLOTS);
    let ways = [
        (Direction::HostToDevice, Image::Host(0), Image::Device(0)),
        (Direction::DeviceToHost, Image::Device(0), Image::Host(1)),
    ];
    let copied = (|| {
        bench.bytes(0)?.copy_from_slice(&bytes);
        bench.bytes(1)?.fill(0);
        for (direction, from, to) in ways {
            let queues = bench.device().generation().queues(direction);
            let transfer = |at: usize| {
                let (src, dst) = (bench.address(from, at * len), bench.address(to, at * len));
                (queues[at % queues.len()], LinDma::Copy { src, dst, len: len as u32 })
            };
            let transfers: Vec<_> = (0..IN_FLIGHT).map(transfer).collect();
            bench.dma_at_once(&transfers)?;
        }
        let copied = len * IN_FLIGHT;
        Ok(different(&bench.bytes(1)?[..copied], &bytes[..copied]))
    })();
    let how = format!("{} submissions in flight", IN_FLIGHT);
    match whole_image(copied, &how) {
        Some(finding) => (finding, None),
        None => {
            let data = json!({"transfers": bench.transfers() - before});
            (
                Finding::good("", format!("{how}, down and up: every byte right")).with(data),
                Some(()),
            )
        }
    }
}

/// Bytes of a large copy: one packet.
const LARGE: usize = 64 << 20;

/// One packet to the card and one back, larger than the images.
pub(super) fn large(bench: &mut Bench) -> (Finding, Option<()>) {
    let images = HostImage::new(bench.device(), LARGE)
        .and_then(|down| Ok((down, HostImage::new(bench.device(), LARGE)?)));
    let (mut down, mut up) = match images {
        Ok(images) => images,
        Err(error) => return (Finding::skipped("", format!("host memory: {error}")), Some(())),
    };
    let card = bench.address(Image::Device(0), 0);
    let queue = |direction| bench.device().generation().queues(direction)[0];
    let ways = [
        (queue(Direction::HostToDevice), down.addr(), card),
        (queue(Direction::DeviceToHost), card, up.addr()),
    ];
    // SAFETY: neither has been submitted to the card yet.
    let (sent, back) = unsafe { (down.bytes(LARGE), up.bytes(LARGE)) };
    let bytes = noise(64, SLOTS);
    for (chunk, mark) in sent.chunks_mut(bytes.len()).zip(0_u8..) {
        chunk.copy_from_slice(&bytes[..chunk.len()]);
        chunk[0] = mark;
    }
    back.fill(0);
    let mut rates = [0.0; 2];
    let copied = (|| {
        for (rate, (queue, src, dst)) in rates.iter_mut().zip(ways) {
            let took = bench.dma(queue, &[LinDma::Copy { src, dst, len: LARGE as u32 }])?;
            *rate = LARGE as f64 / took.total.as_secs_f64() / 1e9;
        }
        // SAFETY: we waited for both copies.
        Ok(different(unsafe { up.bytes(LARGE) }, unsafe { down.bytes(LARGE) }))
    })();
    if bench.lost() {
        // The card may still use them.
        std::mem::forget((down, up));
    }
    match whole_image(copied, &format!("{} MiB in one packet", LARGE >> 20)) {
        Some(finding) => (finding, None),
        None => {
            let found = format!("{} MiB in one packet down and up: every byte right", LARGE >> 20);
            let data = json!({"h2d_gb_per_s": rates[0], "d2h_gb_per_s": rates[1], "transfers": 2});
            (Finding::good("", found).with(data), Some(()))
        }
    }
}

/// A bad finding if a copy or a fill of a whole image failed, or left wrong bytes.
fn whole_image(wrong: Result<usize, SubmitFailure>, how: &str) -> Option<Finding> {
    match wrong {
        Ok(0) => None,
        Ok(count) => {
            let found = format!("{how}: {count} bytes wrong");
            Some(Finding::bad("", found, SEND_BACK))
        }
        Err(why) => Some(Finding::bad("", format!("{how}: {why}"), LOOK_AT_LOG)),
    }
}

fn different(got: &[u8], expected: &[u8]) -> usize {
    got.iter().zip(expected).filter(|(got, expected)| got != expected).count()
}

/// Copies a whole image within the card, on each queue.
pub(super) fn within_the_card(bench: &mut Bench) -> Finding {
    let (before, (from, to)) = (bench.transfers(), WITHIN);
    let queues = bench.device().generation().queues(Direction::DeviceToDevice);
    for (round, &queue) in queues.iter().enumerate() {
        let bytes = noise(round as u64, SLOTS);
        let copied = (|| {
            place(bench, from, &bytes)?;
            place(bench, to, &noise(!0, SLOTS))?;
            bench.dma(queue, &[bench.copy(from, to, IMAGE)])?;
            Ok(different(fetch(bench, to, IMAGE)?, &bytes))
        })();
        let how = format!("copy within the card on queue {queue}");
        if let Some(finding) = whole_image(copied, &how) {
            return finding;
        }
    }
    let found = format!("{} KiB within the card, every byte right", IMAGE >> 10);
    let data = json!({"queues": queues, "transfers": bench.transfers() - before});
    Finding::good("", found).with(data)
}

/// Fills a whole image.
pub(super) fn fill(bench: &mut Bench) -> Finding {
    let (before, image) = (bench.transfers(), Image::Device(0));
    let queues = bench.device().generation().queues(Direction::DeviceToDevice);
    for (round, (_, byte)) in FILLS.into_iter().enumerate() {
        let queue = queues[round % queues.len()];
        let filled = (|| {
            place(bench, image, &vec![!byte; IMAGE])?;
            let dst = bench.address(image, 0);
            bench.dma(queue, &[LinDma::Fill { dst, len: IMAGE as u32, byte }])?;
            Ok(different(fetch(bench, image, IMAGE)?, &vec![byte; IMAGE]))
        })();
        let how = format!("fill with {byte:#04x} on queue {queue}");
        if let Some(finding) = whole_image(filled, &how) {
            return finding;
        }
    }
    let found = format!("{} KiB with 0x00, 0xff and 0x5a, every byte right", IMAGE >> 10);
    Finding::good("", found).with(json!({"transfers": bench.transfers() - before}))
}

/// Copies of odd lengths at odd offsets, to the card and back.
pub(super) fn odd(bench: &mut Bench, thorough: bool) -> Finding {
    let way =
        |what, direction, from, to| TransferKind { what, direction, from: Bytes::Image(from), to };
    let ways = [
        way("copy down", Direction::HostToDevice, Image::Host(0), Image::Device(0)),
        way("copy up", Direction::DeviceToHost, Image::Device(0), Image::Host(1)),
    ];
    judge(bench, thorough, &ways)
}

/// The same within device memory.
pub(super) fn odd_within_the_card(bench: &mut Bench, thorough: bool) -> Finding {
    let (what, (from, to)) = ("copy within the card", WITHIN);
    let way =
        TransferKind { what, direction: Direction::DeviceToDevice, from: Bytes::Image(from), to };
    judge(bench, thorough, &[way])
}

/// Fills of odd lengths at odd offsets.
pub(super) fn odd_fill(bench: &mut Bench, thorough: bool) -> Finding {
    let (direction, to) = (Direction::DeviceToDevice, Image::Device(0));
    let ways =
        FILLS.map(|(what, byte)| TransferKind { what, direction, from: Bytes::Byte(byte), to });
    judge(bench, thorough, &ways)
}

/// The source of the bytes.
enum Bytes {
    Image(Image),
    Byte(u8),
}

/// A kind of transfer.
struct TransferKind {
    what: &'static str,
    direction: Direction,
    from: Bytes,
    to: Image,
}

fn judge(bench: &mut Bench, thorough: bool, ways: &[TransferKind]) -> Finding {
    let (before, batches) = (bench.transfers(), batches(thorough));
    let (mut wrong, mut tried) = (Mismatches::default(), 0);
    let mut failed = None;
    'all: for way in ways {
        let queues = bench.device().generation().queues(way.direction);
        for (at, cases) in batches.iter().enumerate() {
            let batch = Batch { what: way.what, queue: queues[at % queues.len()], cases };
            if let Err(why) = try_batch(bench, way, batch, at as u64, &mut wrong) {
                failed = Some((why, batch));
                break 'all;
            }
            tried += cases.len();
        }
    }
    let data = json!({
        "copies": tried, "wrong": wrong.copies, "examples": wrong.examples, "wrong_kinds": wrong.kinds(),
        "failed": failed.as_ref().map(|(_, batch)| batch.data()),
        "transfers": bench.transfers() - before,
    });
    let wrong_ones = || format!("{} of {tried} wrong: {}", wrong.copies, wrong.examples.join("; "));
    let finding = match failed {
        Some((why, batch)) => {
            let earlier =
                if wrong.copies > 0 { wrong_ones() } else { format!("{tried} were right") };
            let found = format!("{batch}: {why}; before that, {earlier}");
            Finding::bad("", found, LOOK_AT_LOG)
        }
        None if wrong.copies > 0 => Finding::bad("", wrong_ones(), SEND_BACK),
        None => {
            let shown = if thorough { "all" } else { "some" };
            let found = format!(
                "{tried} transfers of 1 to 4097 B, {shown} lengths and offsets modulo 128: every byte right, no guard touched"
            );
            Finding::good("", found)
        }
    };
    finding.with(data)
}

fn try_batch(
    bench: &mut Bench,
    way: &TransferKind,
    batch: Batch<'_>,
    seed: u64,
    wrong: &mut Mismatches,
) -> Result<(), SubmitFailure> {
    let images = match way.from {
        Bytes::Image(from) => {
            let images = Images::new(batch.cases, seed);
            place(bench, from, &images.source)?;
            images
        }
        Bytes::Byte(byte) => Images::for_fills(batch.cases, byte, seed),
    };
    place(bench, way.to, &images.before)?;
    let transfer = |(slot, case): (usize, &Case)| {
        let (dst, len) = (bench.address(way.to, case.destination(slot)), case.len);
        match way.from {
            Bytes::Image(from) => {
                LinDma::Copy { src: bench.address(from, case.source(slot)), dst, len }
            }
            Bytes::Byte(byte) => LinDma::Fill { dst, len, byte },
        }
    };
    let transfers: Vec<LinDma> = batch.cases.iter().enumerate().map(transfer).collect();
    bench.dma(batch.queue, &transfers)?;
    let got = fetch(bench, way.to, images.after.len())?;
    wrong.add(batch, &images.after, got);
    Ok(())
}

/// Puts bytes into an image; into device memory by an aligned copy of whole slots, which was checked before.
pub(super) fn place(bench: &mut Bench, image: Image, bytes: &[u8]) -> Result<(), SubmitFailure> {
    match image {
        Image::Host(which) => bench.bytes(which)?[..bytes.len()].copy_from_slice(bytes),
        Image::Device(_) => {
            // Host image 1 is never copied from.
            let queue = bench.device().generation().queues(Direction::HostToDevice)[0];
            bench.bytes(1)?[..bytes.len()].copy_from_slice(bytes);
            bench.dma(queue, &[bench.copy(Image::Host(1), image, bytes.len())])?;
        }
    }
    Ok(())
}

/// The first bytes of an image.
pub(super) fn fetch(bench: &mut Bench, image: Image, len: usize) -> Result<&[u8], SubmitFailure> {
    let which = match image {
        Image::Host(which) => which,
        Image::Device(_) => {
            let queue = bench.device().generation().queues(Direction::DeviceToHost)[0];
            bench.bytes(1)?[..len].fill(0);
            bench.dma(queue, &[bench.copy(image, Image::Host(1), len)])?;
            1
        }
    };
    Ok(&bench.bytes(which)?[..len])
}
