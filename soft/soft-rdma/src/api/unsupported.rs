//! Verbs that this device does not have. Each says so: `EOPNOTSUPP`, or NULL with that `errno`.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::set_errno;
use crate::abi::*;

fn refuse() -> c_int {
    set_errno(Errno::OPNOTSUPP);
    Errno::OPNOTSUPP.raw_os_error()
}

fn refuse_object<T>() -> *mut T {
    refuse();
    core::ptr::null_mut()
}

pub(super) unsafe extern "C" fn alloc_mw(_pd: *mut ibv_pd, _kind: c_int) -> *mut c_void {
    refuse_object()
}

pub(super) unsafe extern "C" fn bind_mw(
    _qp: *mut ibv_qp,
    _mw: *mut c_void,
    _bind: *mut c_void,
) -> c_int {
    refuse()
}

pub(super) unsafe extern "C" fn dealloc_mw(_mw: *mut c_void) -> c_int {
    refuse()
}

macro_rules! refused {
    ($($(#[doc = $doc:literal])* $name:ident($($argument:ident: $type:ty),*) $(-> $object:ty)?;)*) => {$(
        $(#[doc = $doc])*
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($argument: $type),*) -> refused!(@type $($object)?) {
            $(let _ = $argument;)*
            refused!(@body $($object)?)
        }
    )*};
    (@type) => { c_int };
    (@type $object:ty) => { *mut $object };
    (@body) => { refuse() };
    (@body $object:ty) => { refuse_object() };
}

refused! {
    /// Multicast is not there.
    ibv_attach_mcast(qp: *mut ibv_qp, gid: *const c_void, lid: u16);
    /// Multicast is not there.
    ibv_detach_mcast(qp: *mut ibv_qp, gid: *const c_void, lid: u16);
    /// Queues keep their size.
    ibv_resize_cq(cq: *mut ibv_cq, cqe: c_int);
    /// Connections have no options to negotiate.
    ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece);
    /// Connections have no options to negotiate.
    ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece);
    /// Link addresses are for RoCE.
    ibv_resolve_eth_l2_from_gid(context: *mut ibv_context, attr: *mut ibv_ah_attr, mac: *mut u8, vid: *mut u16);
    /// A context cannot be passed to another process.
    ibv_import_device(fd: c_int) -> ibv_context;
    /// A domain cannot be passed to another process.
    ibv_import_pd(context: *mut ibv_context, handle: u32) -> ibv_pd;
    /// A region cannot be passed to another process.
    ibv_import_mr(pd: *mut ibv_pd, handle: u32) -> ibv_mr;
    /// There is no memory on the device.
    ibv_import_dm(context: *mut ibv_context, handle: u32) -> c_void;
    /// There is no extended queue pair behind a plain one.
    ibv_qp_to_qp_ex(qp: *mut ibv_qp) -> c_void;
}

/// A region keeps its memory, domain and rights: -1 (`IBV_REREG_MR_ERR_INPUT`, the old one is valid).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rereg_mr(
    _mr: *mut ibv_mr,
    _flags: c_int,
    _pd: *mut ibv_pd,
    _addr: *mut c_void,
    _length: usize,
    _access: c_int,
) -> c_int {
    refuse();
    -1
}

/// Whether data arrives in the order of addresses: not promised.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_query_qp_data_in_order(
    _qp: *mut ibv_qp,
    _opcode: c_int,
    _flags: u32,
) -> c_int {
    0
}
