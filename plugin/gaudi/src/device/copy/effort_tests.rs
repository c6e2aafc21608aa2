//! The code path of a copy stays short (docs/design/copy-path.md): tests how many locks it takes, and how often it
//! searches a table of addresses.

use crate::backend::fake::Fake;
use crate::engine::effort;
use crate::rcache::{CacheLimits, Switch};
use crate::{Segment, runtime};

const LARGE: usize = 1 << 20;

#[test]
fn copies_of_known_memory_take_few_locks_and_look_ups() {
    let (fake, device) = Fake::device();
    let switch = Box::leak(Box::<Switch>::default());
    switch.enable(CacheLimits { regions: 9, bytes: 1 << 40 }, Box::new(|| true));
    assert!(device.pins().cache().switch.set(switch).is_ok());
    let memory = device.alloc(LARGE as u64, 1).unwrap();
    device.export(memory.addr(), 10).expect("exported, so that a NIC may write it");
    let mut host = vec![7_u8; LARGE];
    let (there, here) = (memory.addr().0, host.as_mut_ptr().expose_provenance() as u64);

    let large = || {
        let (dst, src) = (runtime().find(there, LARGE), runtime().find(here, LARGE));
        let segment = Segment { dst, src, len: LARGE, host_region: None };
        // SAFETY: the buffer is kept until the fake hardware is done.
        let mut started = unsafe { device.copy(&[segment]) }.unwrap();
        let spent = effort::take();
        fake.finish_all();
        started.wait().unwrap();
        effort::take();
        spent
    };
    large();
    // Locks: permit, pin, record. Lookups: the allocation, and whether it is exported.
    assert_eq!(large(), (3, 2));

    let short = |dst, src| {
        std::thread::scope(|scope| {
            let copy = scope.spawn(move || {
                // SAFETY: as above.
                unsafe { runtime().copy(dst, src, 8) }.unwrap().unwrap();
                effort::take()
            });
            while !copy.is_finished() {
                fake.finish_all();
                std::thread::yield_now();
            }
            copy.join().unwrap()
        })
    };
    short(there, here);
    // The second lock returns the permit.
    assert_eq!([short(there, here), short(here, there)], [(2, 2); 2]);
}
