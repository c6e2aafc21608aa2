//! Opened interfaces as UCX sees them, and the calls that open, query and close them.
//!
//! UCX's base structures have a size only the running library knows (builds with statistics
//! differ). Our part therefore lies *in front of* the base structure, at a distance known at
//! compile time; UCX gets the address of the base.

use core::alloc::Layout;
use core::cell::{Cell, UnsafeCell};
use core::ffi::{c_char, c_int, c_void};
use core::marker::PhantomData;
use core::ptr::NonNull;
use std::alloc::{alloc_zeroed, dealloc};
use std::os::fd::AsRawFd;

use super::{Device, Interface, OpenRequest, Peer, PerfQuery, data, endpoint};
use crate::abi::{
    Class, IFACE_CONFIG_SIZE, IFACE_OP_SLOTS, IFACE_PARAM_STATS_ROOT, INTERNAL_OP_SLOTS, IfaceAttr,
    IfaceConfig, IfaceOps, IfaceParams, InternalOps, ListLink, MemoryType, PerfAttr, RawMd, RawTl,
    ReachableParams, Status, TlResource, iface_op, internal_op, perf_field, reachable_field,
};
use crate::component::name_array;
use crate::config::Table;
use crate::md::MdObject;
use crate::panic_guard::{guarded, guarded_status};
use crate::ucx::{Level, Symbols, Ucx};

/// A registered transport. UCX gets the address of its first field.
#[repr(C)]
pub(crate) struct TransportObject<I: Interface> {
    raw: UnsafeCell<RawTl>,
    ucx: &'static Ucx,
    config: Table,
    operations: IfaceOps,
    internal: InternalOps,
    interface: PhantomData<fn() -> I>,
}

impl<I: Interface> TransportObject<I> {
    pub(crate) fn new(ucx: &'static Ucx) -> Self {
        let symbols = &ucx.symbols;
        let config = Table::new(
            ucx,
            &format!("{} transport", I::TRANSPORT),
            (I::CONFIG_PREFIX, None),
            I::VARIABLES,
            (symbols.uct_iface_config_table, IFACE_CONFIG_SIZE),
        );
        TransportObject {
            raw: UnsafeCell::new(RawTl {
                name: name_array(I::TRANSPORT),
                query_devices: query_devices::<I>,
                iface_open: iface_open::<I>,
                config: config.entry(),
                list: ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() },
            }),
            ucx,
            config,
            operations: operations::<I>(symbols),
            internal: internal_operations::<I>(ucx),
            interface: PhantomData,
        }
    }
}

/// Our part of an interface, in front of UCX's.
pub(crate) struct IfaceHead<I: Interface> {
    pub(crate) ucx: &'static Ucx,
    pub(crate) interface: I,
    /// Whether every operation is logged.
    pub(super) traces_data: bool,
    progress: Progress,
    /// Length of addresses, learnt once.
    pub(super) address_length: usize,
    allocation: Layout,
}

/// Whether the worker calls the interface's progress.
#[derive(Default)]
struct Progress {
    /// What UCX has enabled progress for (sending, receiving).
    wanted: Cell<u32>,
    /// Whether the worker calls it already.
    enabled: Cell<bool>,
}

/// `UCT_PROGRESS_SEND | UCT_PROGRESS_RECV`.
const SEND_AND_RECEIVE: u32 = 0b11;

/// Everything is aligned to cache lines.
const ALIGN: usize = 64;

/// Distance from a head of type `T` to the base structure behind it.
pub(super) const fn distance<T>() -> usize {
    assert!(align_of::<T>() <= ALIGN);
    size_of::<T>().next_multiple_of(ALIGN)
}

/// The head in front of a base structure.
///
/// # Safety
/// `base` was made by [`construct`] with the same `T` and its head was written.
pub(crate) unsafe fn head<'a, T>(base: *mut c_void) -> &'a T {
    // SAFETY: as the caller promises.
    unsafe { &*base.byte_sub(distance::<T>()).cast::<T>() }
}

/// Allocates space for a head of type `T`, and behind it an object of one of UCX's classes, which `init`
/// constructs; returns the object.
///
/// # Safety
/// `class` is a class of libuct, and `init` its constructor, which gets zeroed memory of its size.
pub(super) unsafe fn construct<T>(
    ucx: &Ucx,
    class: *mut Class,
    init: impl FnOnce(*mut c_void, &mut c_int) -> Status,
) -> Result<(*mut c_void, Layout), Status> {
    // SAFETY: as the caller promises: its size is that of this build's base structure.
    let size = unsafe { (*class).size };
    let layout = Layout::from_size_align(distance::<T>() + size, ALIGN);
    let layout = layout.map_err(|_| Status::NO_MEMORY)?;
    // SAFETY: the size is not zero.
    let memory = unsafe { alloc_zeroed(layout) };
    if memory.is_null() {
        return Err(Status::NO_MEMORY);
    }
    // SAFETY: inside the allocation.
    let base: *mut c_void = unsafe { memory.add(distance::<T>()) }.cast();
    let mut initialised: c_int = 1;
    match init(base, &mut initialised) {
        Status::OK => Ok((base, layout)),
        status => {
            // SAFETY: undoes what the constructor did, as UCX's own callers do. It is not shared yet.
            unsafe { destroy::<T>(ucx, class, base, layout, initialised) };
            Err(status)
        }
    }
}

/// Runs the clean-up of `initialised` constructors (-1: of all), and frees the memory.
///
/// # Safety
/// `base` and `layout` came from [`construct`] with the same `T` and class; nothing uses it any more, and
/// the head was taken out.
pub(super) unsafe fn destroy<T>(
    ucx: &Ucx,
    class: *mut Class,
    base: *mut c_void,
    layout: Layout,
    initialised: c_int,
) {
    // SAFETY: as the caller promises.
    unsafe {
        (ucx.symbols.ucs_class_call_cleanup_chain)(class, base, initialised);
        dealloc(base.byte_sub(distance::<T>()).cast(), layout);
    }
}

/// An open interface of type `I`, as UCX passes it to a function of its operation tables.
///
/// The functions of the tables take it by this type in place of a bare pointer, so what makes it sound is
/// argued once, in [`Deref`](core::ops::Deref), and not in every function.
#[repr(transparent)]
pub(crate) struct IfaceRef<'call, I: Interface> {
    base: NonNull<c_void>,
    head: PhantomData<&'call IfaceHead<I>>,
}

impl<I: Interface> Clone for IfaceRef<'_, I> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<I: Interface> Copy for IfaceRef<'_, I> {}

impl<I: Interface> core::ops::Deref for IfaceRef<'_, I> {
    type Target = IfaceHead<I>;

    fn deref(&self) -> &IfaceHead<I> {
        // SAFETY: A value of this type is an argument of a call through the tables `operations::<I>` or
        // `internal_operations::<I>`, or made by `from_raw` with the same promise. Those tables are in a
        // `TransportObject<I>`, and only `iface_open::<I>` gives them to UCX, for a base structure that
        // `construct` put behind space for an `IfaceHead<I>`, which is written before UCX learns the address.
        // UCX calls with that address, after open and before close returns; `iface_close::<I>` does not
        // use this type once it has taken the head. There is no `&mut` to the head in between, and UCX
        // holds the worker's lock, so that its cells are used by one thread at a time.
        unsafe { head(self.base.as_ptr()) }
    }
}

impl<I: Interface> IfaceRef<'_, I> {
    /// # Safety
    /// `base` is an open interface of type `I`, and this is for the time of a call of UCX on it.
    pub(super) unsafe fn from_raw(base: *mut c_void) -> Self {
        // SAFETY: an open interface has an address, as the caller promises.
        IfaceRef { base: unsafe { NonNull::new_unchecked(base) }, head: PhantomData }
    }

    /// The pointer that UCX's own functions take.
    pub(super) fn as_ptr(self) -> *mut c_void {
        self.base.as_ptr()
    }

    /// An operation is in progress: makes the worker call this interface's progress, if it does not yet.
    pub(super) fn needs_progress(self) {
        let progress = &self.progress;
        if progress.wanted.get() != 0 && !progress.enabled.replace(true) {
            let wanted = progress.wanted.get();
            // SAFETY: UCX's own function on an open interface, under the worker's lock.
            unsafe { (self.ucx.symbols.uct_base_iface_progress_enable)(self.as_ptr(), wanted) };
        }
    }
}

fn operations<I: Interface>(symbols: &Symbols) -> IfaceOps {
    let mut slots = [symbols.ucs_empty_function_return_unsupported; IFACE_OP_SLOTS];
    // No operation returns `NO_RESOURCE`, so UCX never has a request to add. If it did, "busy" would make it retry.
    slots[iface_op::EP_PENDING_ADD] = symbols.ucs_empty_function_return_busy;
    slots[iface_op::EP_PENDING_PURGE] = symbols.ucs_empty_function;
    slots[iface_op::EP_TAG_RNDV_ZCOPY] = symbols.ucs_empty_function_return_ptr_unsupported;
    data::fill::<I>(&mut slots);
    endpoint::fill::<I>(&mut slots);
    slots[iface_op::IFACE_PROGRESS_ENABLE] = progress_enable::<I> as *const c_void;
    slots[iface_op::IFACE_PROGRESS_DISABLE] = progress_disable::<I> as *const c_void;
    slots[iface_op::IFACE_EVENT_FD_GET] = event_fd_get::<I> as *const c_void;
    slots[iface_op::IFACE_EVENT_ARM] = event_arm::<I> as *const c_void;
    slots[iface_op::IFACE_CLOSE] = iface_close::<I> as *const c_void;
    slots[iface_op::IFACE_QUERY] = iface_query::<I> as *const c_void;
    // Device addresses are empty.
    slots[iface_op::IFACE_GET_DEVICE_ADDRESS] = symbols.ucs_empty_function_return_success;
    slots[iface_op::IFACE_GET_ADDRESS] = get_address::<I> as *const c_void;
    slots[iface_op::IFACE_IS_REACHABLE] = symbols.uct_base_iface_is_reachable;
    IfaceOps(slots)
}

fn internal_operations<I: Interface>(ucx: &Ucx) -> InternalOps {
    let unsupported = ucx.symbols.ucs_empty_function_return_unsupported;
    let query_v2 = ucx.symbol(c"uct_iface_base_query_v2").map_or(unsupported, |it| it.cast_const());
    let mut slots = [unsupported; INTERNAL_OP_SLOTS];
    for (operation, function) in [
        (internal_op::IFACE_QUERY_V2, query_v2),
        (internal_op::IFACE_ESTIMATE_PERF, estimate_perf::<I> as *const c_void),
        (internal_op::IFACE_VFS_REFRESH, ucx.symbols.ucs_empty_function),
        (internal_op::IFACE_IS_REACHABLE_V2, is_reachable_v2::<I> as *const c_void),
        (internal_op::EP_IS_CONNECTED, endpoint::is_connected::<I> as *const c_void),
    ] {
        if let Some(slot) = ucx.variant().internal(operation) {
            slots[slot] = function;
        }
    }
    InternalOps(slots)
}

unsafe extern "C" fn query_devices<I: Interface>(
    md: *mut RawMd,
    resources: *mut *mut TlResource,
    count: *mut u32,
) -> Status {
    // SAFETY: an open domain of the transport's component.
    let md = unsafe { MdObject::<I::Component>::from_raw(md) };
    let ucx = md.component.ucx;
    guarded_status(ucx, "query_devices", || {
        let list = I::devices(ucx, &md.domain)
            .into_iter()
            .map(|Device { name, kind, sys_device }| TlResource {
                name: name_array(&name),
                device_type: kind,
                sys_device,
            })
            .collect();
        let (array, length) = ucx.array(list).ok_or(Status::NO_MEMORY)?;
        // SAFETY: out-parameters of the caller.
        unsafe {
            *resources = array;
            *count = length;
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn iface_open<I: Interface>(
    raw_md: *mut RawMd,
    worker: *mut c_void,
    params: *const IfaceParams,
    config: *const c_void,
    iface_p: *mut *mut c_void,
) -> Status {
    // SAFETY: an open domain of the transport's component.
    let md = unsafe { MdObject::<I::Component>::from_raw(raw_md) };
    let ucx = md.component.ucx;
    guarded_status(ucx, "iface_open", || {
        let transport = md.component.transport::<I>().ok_or(Status::NO_DEVICE)?;
        // SAFETY: the mask tells whether the root is there. Builds with statistics need it.
        let stats_root = unsafe {
            let given = (*params).field_mask & IFACE_PARAM_STATS_ROOT != 0;
            if given { (*params).stats_root } else { core::ptr::null_mut() }
        };
        // SAFETY: UCX parsed these values with the transport's table.
        let values = unsafe { transport.config.values(config) };
        // SAFETY: every such block begins with UCX's own part.
        let failure_level = Level::of_number(unsafe { (*config.cast::<IfaceConfig>()).failure });
        let request = OpenRequest { ucx, config: values, failure_level };
        let interface = I::open(&md.domain, &request)?;
        let address_length = interface.address().len();

        let class = ucx.symbols.uct_base_iface_t_class;
        let init = |base, initialised: &mut c_int| {
            // SAFETY: the tables live for ever. The two last arguments exist in builds with statistics
            // only; others ignore them.
            unsafe {
                (ucx.symbols.uct_base_iface_t_init)(
                    base,
                    class,
                    initialised,
                    (&raw const transport.operations).cast(),
                    (&raw const transport.internal).cast(),
                    raw_md,
                    worker,
                    params.cast(),
                    config,
                    stats_root,
                    c"plugin".as_ptr(),
                )
            }
        };
        // SAFETY: the class and its constructor.
        let (base, allocation) = unsafe { construct::<IfaceHead<I>>(ucx, class, init)? };
        let (progress, traces_data) = (Progress::default(), ucx.logs(Level::TraceData));
        let head = IfaceHead { ucx, interface, traces_data, progress, address_length, allocation };
        // SAFETY: `construct` left space for the head in front; out-parameter of the caller.
        unsafe {
            base.byte_sub(distance::<IfaceHead<I>>()).cast::<IfaceHead<I>>().write(head);
            *iface_p = base;
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn iface_close<I: Interface>(iface: IfaceRef<'_, I>) {
    let base = iface.as_ptr();
    let (ucx, allocation) = (iface.ucx, iface.allocation);
    let class = ucx.symbols.uct_base_iface_t_class;
    // SAFETY: an open interface, closed once; its endpoints are gone. Progress uses the head, so it is
    // disabled before the head is taken out. `iface` is not used afterwards.
    unsafe {
        (ucx.symbols.uct_base_iface_progress_disable)(base, SEND_AND_RECEIVE);
        let head = base.byte_sub(distance::<IfaceHead<I>>()).cast::<IfaceHead<I>>().read();
        guarded(ucx, "iface_close", (), || drop(head));
        destroy::<IfaceHead<I>>(ucx, class, base, allocation, -1);
    }
}

unsafe extern "C" fn progress_enable<I: Interface>(iface: IfaceRef<'_, I>, flags: u32) {
    guarded(iface.ucx, "progress_enable", (), || {
        let progress = &iface.progress;
        progress.wanted.set(progress.wanted.get() | flags & SEND_AND_RECEIVE);
        if iface.interface.is_busy() || progress.enabled.get() {
            progress.enabled.set(true);
            // SAFETY: UCX's own function on an open interface.
            unsafe { (iface.ucx.symbols.uct_base_iface_progress_enable)(iface.as_ptr(), flags) };
        }
    });
}

unsafe extern "C" fn progress_disable<I: Interface>(iface: IfaceRef<'_, I>, flags: u32) {
    guarded(iface.ucx, "progress_disable", (), || {
        let progress = &iface.progress;
        progress.wanted.set(progress.wanted.get() & !flags);
        if progress.enabled.get() {
            progress.enabled.set(progress.wanted.get() != 0);
            // SAFETY: UCX's own function on an open interface.
            unsafe { (iface.ucx.symbols.uct_base_iface_progress_disable)(iface.as_ptr(), flags) };
        }
    });
}

unsafe extern "C" fn iface_query<I: Interface>(
    iface: IfaceRef<'_, I>,
    attr: *mut IfaceAttr,
) -> Status {
    guarded_status(iface.ucx, "iface_query", || {
        let attributes = iface.interface.attributes();
        // SAFETY: UCX's structure, zeroed and given defaults by UCX first.
        unsafe {
            (iface.ucx.symbols.uct_base_iface_query)(iface.as_ptr(), attr.cast());
            (*attr).put = attributes.put;
            (*attr).get = attributes.get;
            (*attr).flags = attributes.flags;
            (*attr).event_flags = attributes.event_flags;
            (*attr).device_addr_len = 0;
            (*attr).iface_addr_len = iface.address_length;
            (*attr).bandwidth = attributes.bandwidth;
            (*attr).latency = attributes.latency;
            (*attr).overhead = attributes.overhead;
            if let Some(most) = attributes.max_endpoints {
                (*attr).max_num_eps = most;
            }
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn estimate_perf<I: Interface>(
    iface: IfaceRef<'_, I>,
    attr: *mut PerfAttr,
) -> Status {
    guarded_status(iface.ucx, "estimate_perf", || {
        // SAFETY: the caller's structure; only fields in its mask are initialised or written.
        let attr = unsafe { &mut *attr };
        let asked = |bit: u64| attr.field_mask & bit != 0;
        let query = PerfQuery {
            operation: asked(perf_field::OPERATION).then_some(attr.operation),
            local: if asked(perf_field::LOCAL_MEMORY_TYPE) {
                attr.local_memory_type
            } else {
                MemoryType::UNKNOWN
            },
            remote: if asked(perf_field::REMOTE_MEMORY_TYPE) {
                attr.remote_memory_type
            } else {
                MemoryType::UNKNOWN
            },
        };
        let perf = iface.interface.estimate(&query)?;
        let mask = attr.field_mask;
        macro_rules! answer {
            ($($bit:ident => $field:ident = $value:expr;)*) => {
                $(if mask & perf_field::$bit != 0 { attr.$field = $value; })*
            };
        }
        answer! {
            SEND_PRE_OVERHEAD => send_pre_overhead = perf.send_pre_overhead;
            SEND_POST_OVERHEAD => send_post_overhead = perf.send_post_overhead;
            RECV_OVERHEAD => recv_overhead = perf.recv_overhead;
            BANDWIDTH => bandwidth = perf.bandwidth;
            PATH_BANDWIDTH => path_bandwidth = perf.bandwidth;
            LATENCY => latency = perf.latency;
            MAX_INFLIGHT_EPS => max_inflight_eps = usize::MAX;
            FLAGS => flags = 0;
        }
        Ok(Status::OK)
    })
}

/// `length` bytes at `address`; empty if the address is null or the length 0.
///
/// # Safety
/// `address` is null or valid for `length` bytes while the result is used.
pub(super) unsafe fn bytes<'a>(address: *const c_void, length: usize) -> &'a [u8] {
    if address.is_null() || length == 0 {
        return &[];
    }
    // SAFETY: as the caller promises.
    unsafe { core::slice::from_raw_parts(address.cast(), length) }
}

unsafe extern "C" fn is_reachable_v2<I: Interface>(
    iface: IfaceRef<'_, I>,
    params: *const ReachableParams,
) -> c_int {
    guarded(iface.ucx, "is_reachable", 0, || {
        // SAFETY: the caller's structure; fields count only where the mask names them.
        let params_ref = unsafe { &*params };
        let has = |bit: u64| params_ref.field_mask & bit != 0;
        let length = if has(reachable_field::IFACE_ADDR_LENGTH) {
            params_ref.iface_addr_length
        } else {
            iface.address_length
        };
        let interface = match has(reachable_field::IFACE_ADDR) {
            // SAFETY: an address packed by a transport of the same name, of the length given or ours.
            true => unsafe { bytes(params_ref.iface_addr, length) },
            false => &[],
        };
        let peer = Peer { interface };
        match iface.interface.reachable(&peer) {
            // SAFETY: UCX's own check of the scope, on UCX's own parameters.
            Ok(()) => unsafe {
                (iface.ucx.symbols.uct_iface_scope_is_reachable)(iface.as_ptr(), params.cast())
            },
            Err(reason) => {
                explain(params_ref, &reason);
                0
            }
        }
    })
}

/// Puts the reason into the caller's info string, if it has one.
fn explain(params: &ReachableParams, reason: &str) {
    let wanted = reachable_field::INFO_STRING | reachable_field::INFO_STRING_LENGTH;
    if params.field_mask & wanted != wanted
        || params.info_string.is_null()
        || params.info_string_length == 0
    {
        return;
    }
    let length = reason.len().min(params.info_string_length - 1);
    // SAFETY: the caller gave `info_string_length` bytes, and the text plus NUL fits.
    unsafe {
        core::ptr::copy_nonoverlapping(
            reason.as_ptr().cast::<c_char>(),
            params.info_string,
            length,
        );
        *params.info_string.add(length) = 0;
    }
}

unsafe extern "C" fn get_address<I: Interface>(iface: IfaceRef<'_, I>, to: *mut c_void) -> Status {
    guarded_status(iface.ucx, "get_address", || {
        let address = iface.interface.address();
        if address.len() != iface.address_length {
            return Err(Status::INVALID_ADDR);
        }
        // SAFETY: the caller gives as many bytes as `iface_query` said.
        unsafe { core::ptr::copy_nonoverlapping(address.as_ptr(), to.cast(), address.len()) };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn event_fd_get<I: Interface>(
    iface: IfaceRef<'_, I>,
    fd_p: *mut c_int,
) -> Status {
    guarded_status(iface.ucx, "event_fd_get", || {
        let fd = iface.interface.event_fd().ok_or(Status::UNSUPPORTED)?;
        // SAFETY: out-parameter of the caller; the descriptor stays ours.
        unsafe { *fd_p = fd.as_raw_fd() };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn event_arm<I: Interface>(iface: IfaceRef<'_, I>, _events: u32) -> Status {
    guarded_status(iface.ucx, "event_arm", || iface.interface.arm().map(|()| Status::OK))
}
