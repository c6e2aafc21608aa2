//! Copies on a software Gaudi2 whose DMA engines take whole units only (`SOFT_GAUDI_DMA_ALIGNMENT`): any other packet resets
//! it. Every byte is checked, with poisoned surroundings.

mod machine;
mod poison;

use std::sync::Arc;

use gaudi::{Device, HostRegion, Segment, Side};
use machine::{assert_same, fresh, pattern, read, write};
use poison::{MARGIN, POISON, at, framed, poisoned};

/// Around the unit and the borders between ways to copy.
const SIZES: [usize; 13] =
    [1, 3, 63, 64, 127, 128, 129, 256, 4097, 65535, 65537, 300_001, (1 << 20) + 128];
/// Where a copy begins in its unit, on both sides.
const OFFSETS: [(usize, usize); 5] = [(0, 0), (1, 1), (128, 4), (77, 0), (3, 131)];

fn setup() -> Arc<Device> {
    // SAFETY: before the library is loaded; every test of this program sets the same.
    unsafe { std::env::set_var("SOFT_GAUDI_DMA_ALIGNMENT", "4,128") };
    machine::set_up("gaudi2");
    fresh()
}

#[test]
fn every_byte_arrives_and_no_other_changes_in_every_direction() {
    let device = setup();
    for (round, len) in SIZES.into_iter().enumerate() {
        for (here, there) in OFFSETS {
            let what = format!("{len} bytes from {here} to {there}");
            let sent = framed(&pattern(len, round as u64), here);
            let (one, two) = (poisoned(&device, len), poisoned(&device, len));
            let mut back = vec![POISON; len + 2 * MARGIN];
            let region = HostRegion::record(sent.as_ptr().cast_mut(), sent.len());
            let into = Segment {
                dst: Side::Device(at(&one, there)),
                src: Side::Host(sent[here..].as_ptr().cast_mut()),
                len,
                host_region: Some(region),
            };
            // SAFETY: the buffers live until the copies have ended, and nothing else uses them.
            unsafe {
                device.copy(&[into]).expect("started").wait().unwrap();
                let (dst, src) = (Side::Device(at(&two, here)), Side::Device(at(&one, there)));
                device.copy_blocking(dst, src, len).unwrap();
                let dst = Side::Host(back[there..].as_mut_ptr());
                device.copy_blocking(dst, Side::Device(at(&two, here)), len).unwrap();
            }
            let inner = &sent[here..here + len];
            assert_same(&read(&device, one.addr(), back.len()), &framed(inner, there), &what);
            assert_same(&read(&device, two.addr(), back.len()), &framed(inner, here), &what);
            assert_same(&back, &framed(inner, there), &what);
        }
    }
    assert!(!device.is_lost());
}

#[test]
fn fills_change_exactly_their_range() {
    let device = setup();
    for len in SIZES {
        for (offset, _) in OFFSETS {
            let target = poisoned(&device, len);
            device.fill(at(&target, offset), len as u64, 0x5a).unwrap();
            let whole = read(&device, target.addr(), len + 2 * MARGIN);
            assert_same(&whole, &framed(&vec![0x5a; len], offset), &format!("{len} at {offset}"));
        }
    }
}

#[test]
fn copies_between_two_cards_keep_to_the_rule() {
    let (one, two) = (setup(), fresh());
    for len in [1, 129, 300_001, (2 << 20) + 5] {
        for (here, there) in OFFSETS {
            let (from, to) = (poisoned(&one, len), poisoned(&two, len));
            let sent = pattern(len, 3);
            write(&one, at(&from, here), &sent);
            let (dst, src) = (Side::Device(at(&to, there)), Side::Device(at(&from, here)));
            // SAFETY: both allocations live across the call.
            unsafe { one.copy_blocking(dst, src, len).unwrap() };
            let whole = read(&two, to.addr(), len + 2 * MARGIN);
            assert_same(&whole, &framed(&sent, there), &format!("{len} from {here} to {there}"));
        }
    }
}

/// Neighbours share units: a unit that one of them reads, changes and writes back must not undo the other.
#[test]
fn threads_that_write_neighbouring_bytes_do_not_undo_each_other() {
    const THREADS: usize = 4;
    const LEN: usize = 201;
    let device = setup();
    let target = device.alloc((THREADS * LEN) as u64, 1).unwrap();
    for round in 0..20 {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (device, target) = (&device, &target);
                scope.spawn(move || {
                    let sent = pattern(LEN, (round * THREADS + thread) as u64);
                    write(device, at(target, thread * LEN), &sent);
                });
            }
        });
        let sent: Vec<u8> = (0..THREADS)
            .flat_map(|thread| pattern(LEN, (round * THREADS + thread) as u64))
            .collect();
        assert_same(&read(&device, target.addr(), sent.len()), &sent, "all of them");
    }
}
