//! Endpoints as UCX sees them: the calls that make, check and end them, and the way to tell UCX that
//! one has failed.

use core::alloc::Layout;
use core::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::object::{IfaceHead, bytes, distance, head, iface_head, place, unplace};
use super::{Interface, Peer};
use crate::abi::{
    BaseEp, EP_PARAM_DEV_ADDR, EP_PARAM_IFACE_ADDR, EpParams, IFACE_OP_SLOTS, IsConnectedParams,
    RawCompletion, Status, iface_op, is_connected_field,
};
use crate::border::{guarded, guarded_status};
use crate::ucx::Ucx;

/// Our part of an endpoint, in front of UCX's.
pub(crate) struct EpHead<I: Interface> {
    pub(crate) endpoint: I::Endpoint,
    link: Link,
    allocation: Layout,
}

/// An endpoint as UCX knows it. It may outlive the endpoint, and then does nothing.
#[derive(Clone, Debug)]
pub struct Link {
    ucx: &'static Ucx,
    /// Null when the endpoint is gone, or when UCX was told of its failure.
    ep: Arc<AtomicPtr<c_void>>,
}

impl Link {
    /// Tells UCX, once, that the endpoint has failed. Call it from an operation or from progress, as
    /// UCX's handler expects, and hold no lock or borrow: the handler may flush and destroy the
    /// endpoint, and start others. Whether UCX took note: without a handler it does not.
    pub fn fail(&self, status: Status) -> bool {
        let ep = self.ep.swap(core::ptr::null_mut(), Ordering::Relaxed);
        if ep.is_null() {
            return true;
        }
        // SAFETY: the pointer is taken out before the endpoint is destroyed, so it is a live one; the
        // caller is inside a call of UCX on its interface and holds the worker's lock.
        let taken = unsafe { (self.ucx.symbols.uct_iface_handle_ep_err)(iface_of(ep), ep, status) };
        taken == Status::OK
    }

    /// Whether the endpoint is still there and was not said to have failed.
    pub fn is_up(&self) -> bool {
        !self.ep.load(Ordering::Relaxed).is_null()
    }
}

/// Puts these calls into an operation table.
pub(super) fn fill<I: Interface>(slots: &mut [*const c_void; IFACE_OP_SLOTS]) {
    slots[iface_op::EP_CHECK] = ep_check::<I> as *const c_void;
    slots[iface_op::EP_CREATE] = ep_create::<I> as *const c_void;
    slots[iface_op::EP_DESTROY] = ep_destroy::<I> as *const c_void;
}

/// # Safety
/// `ep` is a live endpoint.
pub(crate) unsafe fn iface_of(ep: *mut c_void) -> *mut c_void {
    // SAFETY: as the caller promises; UCX's endpoint begins with its interface.
    unsafe { (*ep.cast::<BaseEp>()).iface }
}

/// # Safety
/// `ep` is a live endpoint of an interface of type `I`.
pub(crate) unsafe fn ep_heads<'a, I: Interface>(
    ep: *mut c_void,
) -> (&'a IfaceHead<I>, &'a EpHead<I>) {
    // SAFETY: as the caller promises.
    unsafe { (iface_head(iface_of(ep)), head(ep)) }
}

unsafe extern "C" fn ep_create<I: Interface>(
    params: *const EpParams,
    ep_p: *mut *mut c_void,
) -> Status {
    // SAFETY: UCX names an open interface of this type in every call.
    let (params, head) = unsafe { (&*params, iface_head::<I>((*params).iface)) };
    guarded_status(head.ucx, "ep_create", || {
        let pick = |bit: u64, address| {
            if params.field_mask & bit != 0 { address } else { core::ptr::null() }
        };
        // SAFETY: addresses of a transport of the same name, thus of our lengths.
        let peer = unsafe {
            Peer {
                device: bytes(pick(EP_PARAM_DEV_ADDR, params.dev_addr), head.address_lengths.0),
                interface: bytes(
                    pick(EP_PARAM_IFACE_ADDR, params.iface_addr),
                    head.address_lengths.1,
                ),
            }
        };
        let class = head.ucx.symbols.uct_base_ep_t_class;
        // SAFETY: a class object of libuct: its size is that of this build's base structure.
        let size = unsafe { (*class).size };
        let (base, allocation) = place::<EpHead<I>>(size).ok_or(Status::NO_MEMORY)?;
        let mut initialised: c_int = 1;
        // SAFETY: `base` is zeroed memory of the class's size, `iface` an open interface.
        let status = unsafe {
            (head.ucx.symbols.uct_base_ep_t_init)(base, class, &mut initialised, params.iface)
        };
        if status != Status::OK {
            // SAFETY: undoes what the constructor did; then frees.
            unsafe {
                (head.ucx.symbols.ucs_class_call_cleanup_chain)(class, base, initialised);
                unplace::<EpHead<I>>(base, allocation);
            }
            return Err(status);
        }
        let link = Link { ucx: head.ucx, ep: Arc::new(AtomicPtr::new(base)) };
        let endpoint = head.interface.connect(&peer, link.clone()).inspect_err(|_| {
            // SAFETY: undoes what the constructor did; then frees. Nobody else knows it.
            unsafe {
                (head.ucx.symbols.ucs_class_call_cleanup_chain)(class, base, -1);
                unplace::<EpHead<I>>(base, allocation);
            }
        })?;
        // SAFETY: `place` left room for the head in front; out-parameter of the caller.
        unsafe {
            base.byte_sub(distance::<EpHead<I>>()).cast::<EpHead<I>>().write(EpHead {
                endpoint,
                link,
                allocation,
            });
            *ep_p = base;
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn ep_destroy<I: Interface>(ep: *mut c_void) {
    // SAFETY: a live endpoint, destroyed once, before its interface.
    unsafe {
        let (iface, _) = ep_heads::<I>(ep);
        let EpHead { endpoint, link, allocation } =
            ep.byte_sub(distance::<EpHead<I>>()).cast::<EpHead<I>>().read();
        link.ep.store(core::ptr::null_mut(), Ordering::Relaxed);
        guarded(iface.ucx, "ep_destroy", (), || iface.interface.disconnect(endpoint));
        let class = iface.ucx.symbols.uct_base_ep_t_class;
        (iface.ucx.symbols.ucs_class_call_cleanup_chain)(class, ep, -1);
        unplace::<EpHead<I>>(ep, allocation);
    }
}

unsafe extern "C" fn ep_check<I: Interface>(
    ep: *mut c_void,
    _flags: c_uint,
    _completion: *mut RawCompletion,
) -> Status {
    // SAFETY: a live endpoint of this type.
    let (iface, ep) = unsafe { ep_heads::<I>(ep) };
    guarded_status(iface.ucx, "ep_check", || {
        // As UCX's own transports: what is found out goes to the error handler, not to the caller.
        if let Err(status) = iface.interface.check(&ep.endpoint) {
            let link = ep.link.clone();
            link.fail(status);
        }
        Ok(Status::OK)
    })
}

pub(super) unsafe extern "C" fn is_connected<I: Interface>(
    ep: *mut c_void,
    params: *const IsConnectedParams,
) -> c_int {
    // SAFETY: a live endpoint of this type.
    let (iface, head) = unsafe { ep_heads::<I>(ep) };
    guarded(iface.ucx, "ep_is_connected", 0, || {
        // SAFETY: UCX's own check of whether the address can be reached, on UCX's own parameters.
        if unsafe { (iface.ucx.symbols.uct_base_ep_is_connected)(ep, params.cast()) } == 0 {
            return 0;
        }
        // SAFETY: the caller's structure; fields count only where the mask names them.
        let params = unsafe { &*params };
        let pick = |bit: u64, address| {
            if params.field_mask & bit != 0 { address } else { core::ptr::null() }
        };
        // SAFETY: addresses of a transport of the same name, thus of our lengths.
        let peer = unsafe {
            let (device, interface) = iface.address_lengths;
            Peer {
                device: bytes(pick(is_connected_field::DEVICE_ADDR, params.device_addr), device),
                interface: bytes(
                    pick(is_connected_field::IFACE_ADDR, params.iface_addr),
                    interface,
                ),
            }
        };
        c_int::from(iface.interface.leads_to(&head.endpoint, &peer))
    })
}
