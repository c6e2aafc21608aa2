//! What the drivers of rdma-core read of devices and contexts without asking whose they are: `struct verbs_device`
//! behind a device, `struct verbs_context` in front of a context. Written here as rdma-core 44 has them.

use core::ffi::c_void;

use soft_rdma::abi::{ibv_context, ibv_device};

use crate::harness::Device;

/// `struct verbs_device`, up to what drivers compare.
#[repr(C)]
struct VerbsDevice {
    device: ibv_device,
    ops: *const c_void,
}

/// `struct verbs_context`: 37 functions and a pointer of libibverbs's own, a word that is never used, its size.
#[repr(C)]
struct VerbsContext {
    later_verbs: [*const c_void; 38],
    placeholder: u64,
    sz: usize,
    context: ibv_context,
}

/// As `verbs_get_ctx` finds it.
unsafe fn verbs_context<'a>(context: *mut ibv_context) -> Option<&'a VerbsContext> {
    // SAFETY: the caller passes an open context.
    let is_extended = unsafe { (*context).abi_compat } as usize == usize::MAX;
    let front = context.wrapping_byte_sub(core::mem::offset_of!(VerbsContext, context));
    // SAFETY: an extended context has the rest in front of it.
    is_extended.then(|| unsafe { &*front.cast::<VerbsContext>() })
}

#[test]
fn a_driver_finds_that_a_device_is_not_its_own_and_can_say_so() {
    let device = Device::open();
    // SAFETY: the context is open, its device is never freed, and both lie in the structures above.
    let (ops, extended) = unsafe {
        ((*(*device.context).device.cast::<VerbsDevice>()).ops, verbs_context(device.context))
    };
    assert!(ops.is_null(), "no driver's");
    // libefa names the device of whatever this returns (`verbs_err`).
    let extended = extended.expect("drivers follow the answer without looking");
    assert_eq!(extended.sz, size_of::<VerbsContext>());
    assert_eq!(&raw const extended.context, device.context.cast_const());
    assert!(
        extended.later_verbs.iter().all(|verb| verb.is_null()),
        "the header's inline functions must find no function and use the exported ones"
    );
}
