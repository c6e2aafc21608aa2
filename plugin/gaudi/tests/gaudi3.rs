//! The third generation on the software Gaudi: memory, detection and export, but no copies.

mod machine;

use gaudi::{Generation, Segment, Side, SubmitError, runtime};
use machine::fresh;

#[test]
fn memory_works_and_copies_are_refused_with_the_reason() {
    machine::set_up("gaudi3");
    let device = fresh();
    assert_eq!(device.info().generation, Generation::Gaudi3);
    let allocation = device.alloc(100_000, 1).unwrap();
    assert!(device.window().range().contains(&allocation.addr().0));
    assert_eq!(runtime().locate(allocation.addr().0, 100_000).unwrap().device_id, device.id());
    device.export(allocation.addr(), 100_000).unwrap();

    let reason = device.can_copy().unwrap_err();
    assert!(reason.is_unsupported(), "{reason}");
    assert!(reason.to_string().contains("no DMA submissions"), "{reason}");
    let mut host = [0_u8; 8];
    let dst = Side::Host(host.as_mut_ptr());
    let segment = Segment { dst, src: Side::Device(allocation.addr()), len: 8, host_region: None };
    // SAFETY: refused before memory is touched.
    match unsafe { device.copy(&[segment]) } {
        Err(SubmitError::Failed(error)) => assert_eq!(error, reason),
        other => panic!("{other:?}"),
    }
    assert_eq!(device.fill(allocation.addr(), 8, 0).unwrap_err(), reason);
}
