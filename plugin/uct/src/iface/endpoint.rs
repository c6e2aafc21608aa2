//! Endpoints as UCX sees them: the calls that create, check and destroy them, and [`Link`], which
//! reports a failed endpoint to UCX.

use core::alloc::Layout;
use core::ffi::{c_int, c_uint, c_void};
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::object::{IfaceRef, bytes, construct, destroy, distance, head};
use super::{Interface, Peer};
use crate::abi::{
    BaseEp, EP_PARAM_IFACE_ADDR, EpParams, IFACE_OP_SLOTS, IsConnectedParams, RawCompletion,
    Status, iface_op, is_connected_field,
};
use crate::panic_guard::{guarded, guarded_status};
use crate::ucx::Ucx;

/// Our part of an endpoint, in front of UCX's.
pub(crate) struct EpHead<I: Interface> {
    pub(crate) endpoint: I::Endpoint,
    link: Link,
    allocation: Layout,
}

/// A handle to UCX's endpoint. It may outlive the endpoint, and then does nothing.
#[derive(Clone, Debug)]
pub struct Link {
    ucx: &'static Ucx,
    /// Null when the endpoint is gone, or when UCX was told of its failure.
    ep: Arc<AtomicPtr<c_void>>,
}

impl Link {
    /// Tells UCX, once, that the endpoint has failed. Call it from an operation or from progress, as
    /// UCX's handler expects. Hold no lock or borrow: the handler may flush and destroy the endpoint,
    /// and create others. Returns whether UCX handled the failure; without a handler it does not.
    pub fn fail(&self, status: Status) -> bool {
        let ep = self.ep.swap(core::ptr::null_mut(), Ordering::Relaxed);
        if ep.is_null() {
            return true;
        }
        // SAFETY: the pointer is taken out before the endpoint is destroyed, so it is a live one; the
        // caller is inside a call of UCX on its interface and holds the worker's lock.
        let taken = unsafe {
            let iface = (*ep.cast::<BaseEp>()).iface;
            (self.ucx.symbols.uct_iface_handle_ep_err)(iface, ep, status)
        };
        taken == Status::OK
    }

    /// Whether the endpoint still exists and no failure of it was reported.
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

/// A live endpoint of an interface of type `I`, as UCX passes it to a function of the operation table.
/// See [`IfaceRef`].
#[repr(transparent)]
pub(super) struct EpRef<'call, I: Interface> {
    base: NonNull<BaseEp>,
    head: PhantomData<&'call EpHead<I>>,
}

impl<I: Interface> Clone for EpRef<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I: Interface> Copy for EpRef<'_, I> {}

impl<I: Interface> core::ops::Deref for EpRef<'_, I> {
    type Target = EpHead<I>;

    fn deref(&self) -> &EpHead<I> {
        // SAFETY: A value of this type is an argument of a call through the table `operations::<I>`. UCX
        // makes such calls on endpoints of the interface that has the table, and those come from
        // `ep_create::<I>` alone: `construct` put their base structure behind space for an `EpHead<I>`, which
        // is written before UCX learns the address. UCX destroys an endpoint once, after its last call,
        // and `ep_destroy::<I>` does not use this type once it has taken the head.
        unsafe { head(self.as_ptr()) }
    }
}

impl<'call, I: Interface> EpRef<'call, I> {
    pub(super) fn as_ptr(self) -> *mut c_void {
        self.base.as_ptr().cast()
    }

    /// The interface it belongs to.
    pub(super) fn iface(self) -> IfaceRef<'call, I> {
        // SAFETY: UCX's part of a live endpoint, see above, begins with its interface, which UCX closes
        // after its endpoints.
        unsafe { IfaceRef::from_raw((*self.base.as_ptr()).iface) }
    }
}

unsafe extern "C" fn ep_create<I: Interface>(
    params: *const EpParams,
    ep_p: *mut *mut c_void,
) -> Status {
    // SAFETY: UCX calls through the table of an open interface, and names that in the parameters.
    let (params, head) = unsafe { (&*params, IfaceRef::<I>::from_raw((*params).iface)) };
    guarded_status(head.ucx, "ep_create", || {
        let interface = match params.field_mask & EP_PARAM_IFACE_ADDR {
            0 => &[],
            // SAFETY: an address of a transport of the same name, thus of our length.
            _ => unsafe { bytes(params.iface_addr, head.address_length) },
        };
        let peer = Peer { interface };
        let class = head.ucx.symbols.uct_base_ep_t_class;
        let init = |base, initialised: &mut c_int| {
            // SAFETY: `iface` is an open interface.
            unsafe { (head.ucx.symbols.uct_base_ep_t_init)(base, class, initialised, params.iface) }
        };
        // SAFETY: the class and its constructor.
        let (base, allocation) = unsafe { construct::<EpHead<I>>(head.ucx, class, init)? };
        let link = Link { ucx: head.ucx, ep: Arc::new(AtomicPtr::new(base)) };
        let endpoint = head.interface.connect(&peer, link.clone()).inspect_err(|_| {
            // SAFETY: it is not shared yet.
            unsafe { destroy::<EpHead<I>>(head.ucx, class, base, allocation, -1) };
        })?;
        // SAFETY: `construct` left space for the head in front; out-parameter of the caller.
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

unsafe extern "C" fn ep_destroy<I: Interface>(ep: EpRef<'_, I>) {
    let (iface, base) = (ep.iface(), ep.as_ptr());
    let class = iface.ucx.symbols.uct_base_ep_t_class;
    // SAFETY: a live endpoint, destroyed once, before its interface. Its head is taken out, and not used
    // through `ep` afterwards.
    unsafe {
        let head = base.byte_sub(distance::<EpHead<I>>()).cast::<EpHead<I>>().read();
        let EpHead { endpoint, link, allocation } = head;
        link.ep.store(core::ptr::null_mut(), Ordering::Relaxed);
        guarded(iface.ucx, "ep_destroy", (), || drop(endpoint));
        destroy::<EpHead<I>>(iface.ucx, class, base, allocation, -1);
    }
}

unsafe extern "C" fn ep_check<I: Interface>(
    ep: EpRef<'_, I>,
    _flags: c_uint,
    _completion: *mut RawCompletion,
) -> Status {
    let iface = ep.iface();
    guarded_status(iface.ucx, "ep_check", || {
        // As in UCX's own transports, a failure goes to the error handler, not to the caller.
        if let Err(status) = iface.interface.check(&ep.endpoint) {
            let link = ep.link.clone();
            link.fail(status);
        }
        Ok(Status::OK)
    })
}

pub(super) unsafe extern "C" fn is_connected<I: Interface>(
    ep: EpRef<'_, I>,
    params: *const IsConnectedParams,
) -> c_int {
    let iface = ep.iface();
    guarded(iface.ucx, "ep_is_connected", 0, || {
        let is_connected = iface.ucx.symbols.uct_base_ep_is_connected;
        // SAFETY: UCX's own check of whether the address can be reached, on UCX's own parameters.
        if unsafe { is_connected(ep.as_ptr(), params.cast()) } == 0 {
            return 0;
        }
        // SAFETY: the caller's structure; fields count only where the mask names them.
        let params = unsafe { &*params };
        let interface = match params.field_mask & is_connected_field::IFACE_ADDR {
            0 => &[],
            // SAFETY: an address of a transport of the same name, thus of our length.
            _ => unsafe { bytes(params.iface_addr, iface.address_length) },
        };
        let peer = Peer { interface };
        c_int::from(iface.interface.leads_to(&ep.endpoint, &peer))
    })
}
