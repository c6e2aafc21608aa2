//! Times the engine on whatever card the driver library offers: small copies, and the border between
//! bounce slots and pinning (`memory_costs` is for memory). `cargo run --release -p gaudi --example
//! measure`, with `HL_THUNK_LIBRARY` naming the software Gaudi where there is no card.

mod timing;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use gaudi::{Device, DeviceAddr, DeviceChoice, HostRegion, Segment, Side, runtime};
use timing::time;

/// The floor: one packet of eight bytes through the driver's calls alone, on a card of its own.
fn bare(first: &gaudi::DeviceInfo) -> f64 {
    use hl_thunk::packet::LinDma;
    let library = hl_thunk::Library::load().expect("loaded before");
    let cards = runtime().discover().expect("found before");
    let other = cards.iter().find(|card| card.bus_id != first.bus_id).expect("a second card");
    let device = hl_thunk::Device::open(&library, other.bus_id.as_str()).expect("open");
    let pages = hl_thunk::HostPages::new(4096).expect("memory");
    // SAFETY: the pages outlive the mapping, which is dropped first.
    let host = unsafe { hl_thunk::HostMapping::new(&device, pages.as_ptr(), 4096) }.expect("map");
    let memory = hl_thunk::DeviceMemory::alloc(&device, 1).expect("alloc");
    let mapping = memory.map(None).expect("map");
    let buffer = hl_thunk::CommandBuffer::new(&device, 4096).expect("command buffer");
    let dma = LinDma::Copy { src: host.addr(), dst: mapping.addr(), len: 8 };
    let packet = dma.encode(device.generation()).expect("a generation with packets");
    let chunk = hl_thunk::Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue: 0 };
    time(|| {
        // SAFETY: everything named lives until the wait has returned.
        let sequence = unsafe {
            buffer.write(0, &packet);
            device.submit(&[chunk]).expect("submit")
        };
        let status = device.wait(sequence, 1_000_000).expect("wait");
        assert_eq!(status, hl_thunk::WaitStatus::Completed);
    })
}

/// Throughput with 16 copies outstanding over a working set larger than the caches, compared with memcpy
/// over the same.
fn many_in_flight(device: &Arc<Device>) {
    const SET: usize = 256 << 20;
    let mut host = vec![1_u8; SET];
    let mut other = vec![2_u8; SET];
    let target = device.alloc(SET as u64, 1).expect("memory");
    let region = HostRegion::record(host.as_mut_ptr(), SET);
    println!(
        "{:>10} {:>14} {:>14} {:>14}",
        "bytes", "to device GB/s", "to host GB/s", "memcpy GB/s"
    );
    for len in [64 << 10, 1 << 20, 16 << 20] {
        let pieces = SET / len;
        let run = |down: bool| {
            let mut flying = VecDeque::new();
            let start = Instant::now();
            for piece in 0..pieces {
                let offset = piece * len;
                let on_device = Side::Device(DeviceAddr(target.addr().0 + offset as u64));
                let on_host = Side::Host(region.start().wrapping_add(offset));
                let (dst, src) = if down { (on_device, on_host) } else { (on_host, on_device) };
                let host_region = Some(region.clone());
                if flying.len() == 16 {
                    let mut oldest: gaudi::Transfer = flying.pop_front().expect("sixteen");
                    oldest.wait().expect("copy");
                }
                let segment = Segment { dst, src, len, host_region };
                // SAFETY: the buffer lives until all transfers have finished.
                flying.push_back(unsafe { device.copy(&[segment]) }.expect("copy"));
            }
            for mut transfer in flying {
                transfer.wait().expect("copy");
            }
            SET as f64 / start.elapsed().as_nanos() as f64
        };
        let best = |f: &mut dyn FnMut() -> f64| (0..4).map(|_| f()).fold(0.0, f64::max);
        let (down, up) = (best(&mut || run(true)), best(&mut || run(false)));
        let plain = best(&mut || {
            let start = Instant::now();
            for (to, from) in other.chunks_mut(len).zip(host.chunks(len)) {
                to.copy_from_slice(from);
            }
            SET as f64 / start.elapsed().as_nanos() as f64
        });
        println!("{len:>10} {down:>14.2} {up:>14.2} {plain:>14.2}");
    }
}

fn main() {
    let device = match runtime().open(&DeviceChoice::Any) {
        Ok(device) => device,
        Err(error) => return eprintln!("{error}"),
    };
    println!("{device}, driver library {}", device.info().driver_version);

    println!("{:>10.0} ns for a bare submission of one packet and its wait", bare(device.info()));
    let target = device.alloc(64 << 20, 1).expect("memory");
    let mut host = vec![1_u8; 64 << 20];
    let region = HostRegion::record(host.as_mut_ptr(), host.len());
    let (on_device, on_host) = (Side::Device(target.addr()), Side::Host(host.as_mut_ptr()));
    println!("{:>10} {:>14} {:>14} {:>14}", "bytes", "to device ns", "to host ns", "by region ns");
    for shift in [3, 10, 12, 14, 15, 16, 17, 18, 20, 22, 26] {
        let len = 1_usize << shift;
        let copy = |dst, src| {
            // SAFETY: the buffer lives across the call and is used by nothing else.
            time(|| unsafe { device.copy_blocking(dst, src, len) }.expect("copy"))
        };
        let registered = Segment {
            dst: on_device,
            src: on_host,
            len: 64 << 20,
            host_region: Some(region.clone()),
        };
        // SAFETY: as above. The first use pins the region.
        unsafe { device.copy(std::slice::from_ref(&registered)) }
            .expect("copy")
            .wait()
            .expect("copy");
        let by_region = time(|| {
            let segment = Segment { len, ..registered.clone() };
            // SAFETY: as above.
            unsafe { device.copy(&[segment]) }.expect("copy").wait().expect("copy");
        });
        let (down, up) = (copy(on_device, on_host), copy(on_host, on_device));
        println!("{len:>10} {down:>14.0} {up:>14.0} {by_region:>14.0}");
    }

    many_in_flight(&device);
}
