//! Whether HCAs can access the card's memory, and whether the bytes have arrived when an HCA reports completion.
//!
//! On some paths between two devices the registration succeeds, the transfer completes, and the data is wrong. So a loopback
//! connection of each HCA moves bytes, and the card compares them: at the start, in the middle and at the end of a page.

use std::os::fd::AsFd;
use std::path::Path;

use hl_thunk::packet::LinDma;
use hl_thunk::{Device, DeviceAddr, Direction, DmaBuf, ExportCall, PAGE_SIZE};
use serde_json::json;

use super::bench::{Bench, HostImage, Image};
use super::memory::{Area, page_of};
use super::pattern::{SLOTS, noise};
use crate::driver::is_port_of_gaudi;
use crate::report::Finding;
use crate::verbs::{Loopback, Transfer, Verbs};

const NO_PEER_TO_PEER: &str = "peer-to-peer from card to HCA is refused: both should be below one PCI switch, with ACS \
                               and IOMMU off; otherwise messages are staged through host memory";
const NO_DMABUFS: &str = "this HCA registers no dma-bufs: Gaudi memory is staged through host memory (share/doc/ucx-gaudi/docs/rdma.md)";
const GARBAGE: &str = "do not use this HCA with Gaudi memory (UCX_GAUDI_COPY_DMABUF=no stages instead): its path to the \
                       card is broken; look at ACS, IOMMU and the PCI switch, and send this report";
/// Bytes at each of the three places.
const PIECE: usize = 64 << 10;
/// Bytes per transfer when measuring the rate.
const BULK: usize = 1 << 20;

/// Tests each HCA.
pub(super) fn check(device: &Device, area: &Area, mut bench: Option<&mut Bench>) -> Finding {
    let Some(verbs) = Verbs::load() else {
        return Finding::skipped("", "there is no libibverbs.so.1");
    };
    // A whole page of the card, which is what the plugin exports.
    let (exported, len) = match area {
        Area::Physical(addr) => {
            let len = 64 * PAGE_SIZE.max(PIECE as u64);
            (DmaBuf::export_physical(device, *addr, len), len)
        }
        Area::Mapped(mapping) => {
            let len = page_of(device);
            (DmaBuf::export(mapping, 0, len, ExportCall::best(device.library())), len)
        }
    };
    let dmabuf = match exported {
        Ok(dmabuf) => dmabuf,
        Err(error) => return Finding::skipped("", format!("nothing to register: {error}")),
    };
    let mut hcas = verbs.hcas();
    hcas.retain(|(hca, _)| !is_port_of_gaudi(Path::new("/"), hca));
    if hcas.is_empty() {
        return Finding::skipped("", "there is no HCA");
    }
    let (mut good, mut refused, mut wrong, mut rows) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut untried = Vec::new();
    let mut remedy = NO_PEER_TO_PEER;
    // HCAs keep this registered until the process ends.
    let mut pages = match HostImage::new(device, 2 * BULK) {
        Ok(pages) => std::mem::ManuallyDrop::new(pages),
        Err(error) => return Finding::skipped("", format!("host memory: {error}")),
    };
    for (hca, handle) in hcas {
        let registered = match verbs.register(handle, dmabuf.as_fd(), len) {
            Ok(registered) => registered,
            Err((call, errno)) => {
                rows.push(json!({"hca": hca, "errno": errno}));
                let error = std::io::Error::from_raw_os_error(errno);
                refused.push(format!("{hca}: {call}: {error}"));
                if matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS) {
                    remedy = NO_DMABUFS;
                }
                continue;
            }
        };
        // SAFETY: the memory is never freed.
        let connected = unsafe { verbs.connect(&registered, pages.start(), 2 * BULK) };
        let hca_loop = match connected {
            Ok(connected) => connected,
            Err((call, errno)) => {
                let error = std::io::Error::from_raw_os_error(errno);
                rows.push(json!({"hca": hca, "errno": null, "moved": null, "not_tried": call}));
                untried.push(format!("{hca} (registers; no bytes moved: {call}: {error})"));
                verbs.deregister(registered);
                continue;
            }
        };
        let moved =
            move_bytes(&hca_loop, &mut pages, device, (area.base(), len), bench.as_deref_mut());
        verbs.deregister(registered);
        rows.push(json!({"hca": hca, "errno": null, "moved": moved.as_ref().ok(), "failed": moved.as_ref().err()}));
        match moved {
            Ok([write, read]) => good.push(format!("{hca} ({write:.1} GB/s in, {read:.1} out)")),
            Err(why) => wrong.push(format!("{hca}: {why}")),
        }
    }
    let finding = if !wrong.is_empty() {
        wrong.extend(refused);
        Finding::bad("", wrong.join("; "), GARBAGE)
    } else if !refused.is_empty() {
        Finding::warning("", refused.join("; "), remedy)
    } else {
        let by = if bench.is_some() { "the card" } else { "the HCA" };
        good.extend(untried);
        Finding::good(
            "",
            format!("written and read, every byte right by {by}: {}", good.join(", ")),
        )
    };
    finding.with(json!({ "hcas": rows, "registered": len }))
}

/// Writes and reads at three places of the page, then measures the rate; returns GB/s of both.
fn move_bytes(
    hca: &Loopback,
    pages: &mut HostImage,
    device: &Device,
    (card, len): (DeviceAddr, u64),
    mut bench: Option<&mut Bench>,
) -> Result<[f64; 2], String> {
    for (seed, at) in [0, len / 2, len - PIECE as u64].into_iter().enumerate() {
        let bytes = noise(seed as u64 + 7, SLOTS);
        let bytes = &bytes[..PIECE];
        // SAFETY: the card does not use it, and the HCA's work has ended.
        let sent = unsafe { &mut pages.bytes(2 * BULK)[..PIECE] };
        sent.copy_from_slice(bytes);
        hca.transfer(Transfer::Write, 0, at, PIECE)?;
        if let Some(bench) = bench.as_deref_mut() {
            compare(&seen_by_card(bench, device, DeviceAddr(card.0 + at))?, bytes, at, "the card")?;
        }
        hca.transfer(Transfer::Read, BULK, at, PIECE)?;
        // SAFETY: as above.
        let back = &unsafe { pages.bytes(2 * BULK) }[BULK..BULK + PIECE];
        compare(back, bytes, at, "the HCA")?;
    }
    rates(hca)
}

/// The bytes at that address, copied out by the card.
fn seen_by_card(bench: &mut Bench, device: &Device, src: DeviceAddr) -> Result<Vec<u8>, String> {
    // A peer's writes may not be visible to the engines yet.
    match device.flush_peer_writes() {
        // A driver without this call: an older one treats it as an empty submission.
        Err(error) if matches!(error.errno, libc::EOPNOTSUPP | libc::EINVAL) => {}
        flushed => flushed.map_err(|error| error.to_string())?,
    }
    let queue = device.generation().queues(Direction::DeviceToHost)[0];
    let dst = bench.address(Image::Host(1), 0);
    bench
        .dma(queue, &[LinDma::Copy { src, dst, len: PIECE as u32 }])
        .map_err(|why| why.to_string())?;
    Ok(bench.bytes(1).map_err(|why| why.to_string())?[..PIECE].to_vec())
}

fn compare(got: &[u8], expected: &[u8], at: u64, by: &str) -> Result<(), String> {
    let wrong = got.iter().zip(expected).filter(|(got, expected)| got != expected).count();
    if wrong == 0 {
        return Ok(());
    }
    Err(format!(
        "{wrong} of {PIECE} bytes written at {at:#x} of the page are wrong, as {by} reads them"
    ))
}

/// The best of eight transfers of [`BULK`] bytes each way.
fn rates(hca: &Loopback) -> Result<[f64; 2], String> {
    let mut rates = [0.0_f64; 2];
    for (rate, transfer) in rates.iter_mut().zip([Transfer::Write, Transfer::Read]) {
        for _ in 0..8 {
            let took = hca.transfer(transfer, 0, 0, BULK)?;
            *rate = rate.max(BULK as f64 / took.as_secs_f64() / 1e9);
        }
    }
    Ok(rates)
}
