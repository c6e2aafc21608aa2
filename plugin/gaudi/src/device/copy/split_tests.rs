//! Copies that are too long for one packet, whose length has 32 bits. Only planned, not run: no machine has the memory.

use hl_thunk::packet::LinDma;
use proptest::prelude::*;

use super::route::{Pieces, Step, direct};
use crate::backend::fake::Fake;
use crate::{DeviceAddr, Direction};

#[test]
fn pieces_of_a_long_copy_fit_packets_touch_and_cover_it() {
    let (_fake, device) = Fake::device();
    let pieces = |ends, len| {
        let mut pieces = Pieces::new();
        direct(&device, ends, len, Direction::DeviceToDevice, None, &mut pieces);
        pieces
    };
    proptest!(|(
        len in prop_oneof![1..100_000_usize, (1_usize << 32) - 5..(1 << 32) + 5, 1..1_usize << 36],
        dst in 0..1_u64 << 40,
        src in 0..1_u64 << 40,
    )| {
        let mut at = 0;
        for piece in pieces((DeviceAddr(dst), DeviceAddr(src)), len) {
            let Step::Direct { dma: LinDma::Copy { src: s, dst: d, len }, .. } = piece.step else {
                panic!("nothing but packets");
            };
            prop_assert!(len > 0);
            prop_assert_eq!((s.0, d.0), (src + at, dst + at));
            at += u64::from(len);
        }
        prop_assert_eq!(at, len as u64);
    });
    let count = |len| pieces((DeviceAddr(0), DeviceAddr(0)), len).len();
    assert_eq!(count(1 << 30), 1);
    assert!(count(9 << 30) >= 3, "more than two packets can hold");
}
