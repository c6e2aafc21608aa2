//! The slots of a slab, run by loom in every order of events that matters: a slot has one owner, who sees what the
//! last one did with its memory.
//!
//! The file is the library's own, compiled a second time with loom's atomics.

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicU64, Ordering};
}

#[path = "../src/engine/submit/free_slots.rs"]
#[allow(unreachable_pub, reason = "it is a module of the library")]
mod free_slots;

use free_slots::FreeSlots;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

#[test]
fn slots_are_handed_out_once_until_released() {
    loom::model(|| {
        let slots = FreeSlots::new(3);
        assert_eq!([slots.take(), slots.take(), slots.take()], [Some(0), Some(1), Some(2)]);
        assert_eq!(slots.take(), None);
        slots.release(1);
        assert_eq!(slots.take(), Some(1));
    });
}

/// Two threads take a slot, change its memory and release it, twice each. Loom fails if they access a cell without an
/// order between them.
#[test]
fn a_slot_has_one_owner_who_sees_what_the_last_one_did() {
    loom::model(|| {
        let cells = [0, 0].map(UnsafeCell::new);
        let shared = Arc::new((FreeSlots::new(2), cells));
        let work = |(slots, cells): &(FreeSlots, [UnsafeCell<u32>; 2])| {
            for _ in 0..2 {
                let Some(slot) = slots.take() else { continue };
                // SAFETY: loom checks that nothing else accesses the cell meanwhile.
                cells[slot as usize].with_mut(|count| unsafe { *count += 1 });
                slots.release(slot);
            }
        };
        let other = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || work(&shared))
        };
        work(&shared);
        other.join().unwrap();
        assert_eq!([shared.0.take(), shared.0.take(), shared.0.take()], [Some(0), Some(1), None]);
    });
}
