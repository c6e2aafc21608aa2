//! The component `accelerator/gaudi`.
//!
//! Copies are synchronous: a stream has nothing to wait for, and an event has happened as soon as it is recorded.
//!
//! If messages and windows go through UCX, Open MPI 5.0 and 6.0 call `check_addr`, copies, moves, allocation,
//! `host_register` and `get_memkind`. Address ranges, buffer ids, handles for other processes and the PCI address are
//! for its other transports (`btl/ofi`, `btl/smcuda`, `mtl/ofi`), which cannot move Gaudi memory whatever is returned.

use core::ffi::{c_char, c_int, c_void};
use core::ptr;

use crate::abi::{
    AcceleratorComponent, Description, ERR_NOT_SUPPORTED, ERR_OUT_OF_RESOURCE, ERROR, Exported,
    Memkind, NO_DEVICE, Object, PciAttr, SUCCESS,
};
use crate::{engine, has_gaudi, open_mpi, say};

/// What Open MPI looks for in `mca_accelerator_gaudi.so`.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Open MPI gives the name")]
pub(crate) static mca_accelerator_gaudi_component: Exported<AcceleratorComponent> =
    Exported::new(AcceleratorComponent {
        description: Description::new("opal", "accelerator", [1, 0, 0]),
        init,
        finalize,
    });

/// `opal_accelerator_base_module_t` of 5.0.
#[repr(C)]
struct Module5 {
    check_addr: CheckAddr,
    create_stream: Create,
    create_event: Create,
    record_event: RecordEvent,
    query_event: QueryEvent,
    copy_async: CopyAsync,
    copy: Copy,
    move_: Copy,
    alloc: Alloc,
    release: Release,
    get_address_range: GetAddressRange,
    host_register: HostRegister,
    host_unregister: Release,
    get_device: GetInt,
    get_device_pci_attr: GetPciAttr,
    can_access_peer: CanAccessPeer,
    get_buffer_id: GetBufferId,
}

/// `opal_accelerator_base_module_t` of 6.0.
#[repr(C)]
struct Module6 {
    check_addr: CheckAddr,
    create_stream: Create,
    sync_stream: SyncStream,
    create_event: CreateEvent6,
    record_event: RecordEvent,
    query_event: QueryEvent,
    wait_event: RecordEvent,
    copy_async: CopyAsync,
    copy: Copy,
    move_async: CopyAsync,
    move_: Copy,
    alloc: Alloc,
    release: Release,
    alloc_stream: AllocStream,
    release_stream: ReleaseStream,
    get_address_range: GetAddressRange,
    is_ipc_enabled: extern "C" fn() -> bool,
    /// Of memory and events; unused, as there is none.
    ipc: [extern "C" fn() -> c_int; 7],
    host_register: HostRegister,
    host_unregister: Release,
    get_device: GetInt,
    get_device_pci_attr: GetPciAttr,
    can_access_peer: CanAccessPeer,
    get_buffer_id: GetBufferId,
    num_devices: GetInt,
    get_mem_bw: extern "C" fn(c_int, *mut f32) -> c_int,
    get_memkind: unsafe extern "C" fn(*mut Memkind),
}

const _: () = {
    assert!(size_of::<Module5>() == 17 * 8);
    assert!(size_of::<Module6>() == 33 * 8);
};

type CheckAddr = unsafe extern "C" fn(*const c_void, *mut c_int, *mut u64) -> c_int;
type Create = unsafe extern "C" fn(c_int, *mut *mut Handle) -> c_int;
type CreateEvent6 = unsafe extern "C" fn(c_int, *mut *mut Handle, bool) -> c_int;
type SyncStream = extern "C" fn(*mut Handle) -> c_int;
type RecordEvent = extern "C" fn(c_int, *mut Handle, *mut Handle) -> c_int;
type QueryEvent = extern "C" fn(c_int, *mut Handle) -> c_int;
type Copy = unsafe extern "C" fn(c_int, c_int, *mut c_void, *const c_void, usize, c_int) -> c_int;
type CopyAsync = unsafe extern "C" fn(
    c_int,
    c_int,
    *mut c_void,
    *const c_void,
    usize,
    *mut Handle,
    c_int,
) -> c_int;
type Alloc = unsafe extern "C" fn(c_int, *mut *mut c_void, usize) -> c_int;
type AllocStream = unsafe extern "C" fn(c_int, *mut *mut c_void, usize, *mut Handle) -> c_int;
type Release = extern "C" fn(c_int, *mut c_void) -> c_int;
type ReleaseStream = extern "C" fn(c_int, *mut c_void, *mut Handle) -> c_int;
type GetAddressRange = extern "C" fn(c_int, *const c_void, *mut *mut c_void, *mut usize) -> c_int;
type HostRegister = extern "C" fn(c_int, *mut c_void, usize) -> c_int;
type GetInt = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetPciAttr = extern "C" fn(c_int, *mut PciAttr) -> c_int;
type CanAccessPeer = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type GetBufferId = extern "C" fn(c_int, *const c_void, *mut u64) -> c_int;

static MODULE_5: Module5 = Module5 {
    check_addr,
    create_stream,
    create_event,
    record_event,
    query_event,
    copy_async,
    copy,
    move_,
    alloc,
    release,
    get_address_range,
    host_register,
    host_unregister,
    get_device,
    get_device_pci_attr,
    can_access_peer,
    get_buffer_id,
};

static MODULE_6: Module6 = Module6 {
    check_addr,
    create_stream,
    sync_stream,
    create_event: create_event_6,
    record_event,
    query_event,
    wait_event: record_event,
    copy_async,
    copy,
    move_async,
    move_,
    alloc,
    release,
    alloc_stream,
    release_stream,
    get_address_range,
    is_ipc_enabled,
    ipc: [unsupported; 7],
    host_register,
    host_unregister,
    get_device,
    get_device_pci_attr,
    can_access_peer,
    get_buffer_id,
    num_devices,
    get_mem_bw,
    get_memkind,
};

/// Components for other accelerators, and a file that exists if there is one. Open MPI ends the program if two are ready.
const OTHERS: [(&core::ffi::CStr, &str); 3] = [
    (c"mca_accelerator_cuda_component", "/dev/nvidiactl"),
    (c"mca_accelerator_rocm_component", "/dev/kfd"),
    (c"mca_accelerator_ze_component", "/dev/dri/renderD128"),
];

extern "C" fn init() -> *const c_void {
    if !has_gaudi() {
        return ptr::null();
    }
    if let Some((_, file)) = OTHERS.iter().find(|(name, file)| {
        // SAFETY: looks a name up.
        let loaded = unsafe { !libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()).is_null() };
        let built_in = || open_mpi::symbol::<*const c_void>("libopen-pal.so", name).is_some();
        std::path::Path::new(file).exists() && (loaded || built_in())
    }) && std::env::var_os("OMPI_MCA_accelerator").is_none()
    {
        say(format_args!(
            "there is another accelerator ({file}), and Open MPI takes one kind: collectives on Gaudi memory are \
             off; to have them instead, set OMPI_MCA_accelerator=gaudi,null"
        ));
        return ptr::null();
    }
    let module: *const c_void = match open_mpi::major_version() {
        Some(5) => (&raw const MODULE_5).cast(),
        Some(6) => (&raw const MODULE_6).cast(),
        version => {
            let version =
                version.map_or("of unknown version".to_owned(), |major| major.to_string());
            say(format_args!(
                "is {version}, and 5 and 6 are known: collectives on Gaudi memory are off"
            ));
            return ptr::null();
        }
    };
    if !open_mpi::has_known_objects() {
        say(format_args!(
            "has another layout than is known, as builds for debugging it have: collectives on Gaudi memory are off"
        ));
        return ptr::null();
    }
    match engine::load() {
        Ok(_) => module,
        Err(why) => {
            say(format_args!("collectives on Gaudi memory are off: {why}"));
            ptr::null()
        }
    }
}

extern "C" fn finalize(_module: *const c_void) {}

/// 1 for Gaudi memory.
unsafe extern "C" fn check_addr(
    address: *const c_void,
    device: *mut c_int,
    flags: *mut u64,
) -> c_int {
    let owned = !address.is_null() && engine::get().is_some_and(|engine| engine.owns(address));
    // SAFETY: places for the answers, by Open MPI's header.
    unsafe {
        *flags = 0;
        *device = if owned { 0 } else { NO_DEVICE };
    }
    c_int::from(owned)
}

/// The code that is returned to Open MPI, after a line that says why.
fn told(result: Result<(), String>, code: c_int) -> c_int {
    result.map_or_else(
        |why| {
            say(format_args!("{why}"));
            code
        },
        |()| SUCCESS,
    )
}

const NO_ENGINE: &str = "the component was not started";

unsafe extern "C" fn copy(
    _to_device: c_int,
    _from_device: c_int,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    _kind: c_int,
) -> c_int {
    let Some(engine) = engine::get() else { return told(Err(NO_ENGINE.to_owned()), ERROR) };
    // SAFETY: by Open MPI's header both are valid for it.
    told(unsafe { engine.copy(to, from, len) }, ERROR)
}

unsafe extern "C" fn copy_async(
    to_device: c_int,
    from_device: c_int,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    _stream: *mut Handle,
    kind: c_int,
) -> c_int {
    // SAFETY: passed on.
    unsafe { copy(to_device, from_device, to, from, len, kind) }
}

/// Bytes that are moved at once where the ranges overlap.
const MOVED_AT_ONCE: usize = 1 << 20;

unsafe extern "C" fn move_(
    to_device: c_int,
    from_device: c_int,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    kind: c_int,
) -> c_int {
    if to.addr().abs_diff(from.addr()) >= len {
        // SAFETY: passed on; they do not overlap.
        return unsafe { copy(to_device, from_device, to, from, len, kind) };
    }
    let Some(engine) = engine::get() else { return told(Err(NO_ENGINE.to_owned()), ERROR) };
    // A card copies in any order, so each part goes through host memory. Parts that will be overwritten go first.
    let mut held = vec![0_u8; len.min(MOVED_AT_ONCE)];
    let starts = (0..len).step_by(MOVED_AT_ONCE);
    let mut move_part = |start: usize| {
        let (held, part) = (held.as_mut_ptr().cast(), MOVED_AT_ONCE.min(len - start));
        // SAFETY: inside the ranges, and as long as `held` at most.
        unsafe {
            engine.copy(held, from.byte_add(start), part)?;
            engine.copy(to.byte_add(start), held, part)
        }
    };
    let moved = match to.addr() <= from.addr() {
        true => starts.into_iter().try_for_each(&mut move_part),
        false => starts.rev().try_for_each(&mut move_part),
    };
    told(moved, ERROR)
}

unsafe extern "C" fn move_async(
    to_device: c_int,
    from_device: c_int,
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    _stream: *mut Handle,
    kind: c_int,
) -> c_int {
    // SAFETY: passed on.
    unsafe { move_(to_device, from_device, to, from, len, kind) }
}

unsafe extern "C" fn alloc(_device: c_int, address: *mut *mut c_void, len: usize) -> c_int {
    let Some(engine) = engine::get() else { return told(Err(NO_ENGINE.to_owned()), ERROR) };
    let allocated = engine.alloc(len);
    // SAFETY: a place for the address, by Open MPI's header.
    told(allocated.map(|allocated| unsafe { *address = allocated }), ERR_OUT_OF_RESOURCE)
}

unsafe extern "C" fn alloc_stream(
    device: c_int,
    address: *mut *mut c_void,
    len: usize,
    _stream: *mut Handle,
) -> c_int {
    // SAFETY: passed on.
    unsafe { alloc(device, address, len) }
}

extern "C" fn release(_device: c_int, address: *mut c_void) -> c_int {
    let Some(engine) = engine::get() else { return told(Err(NO_ENGINE.to_owned()), ERROR) };
    if address.is_null() {
        return SUCCESS;
    }
    told(engine.free(address), ERROR)
}

extern "C" fn release_stream(device: c_int, address: *mut c_void, _stream: *mut Handle) -> c_int {
    release(device, address)
}

/// Host memory is pinned when it is copied.
extern "C" fn host_register(_device: c_int, _address: *mut c_void, _len: usize) -> c_int {
    SUCCESS
}

extern "C" fn host_unregister(_device: c_int, _address: *mut c_void) -> c_int {
    SUCCESS
}

/// `opal_accelerator_stream_t` and `opal_accelerator_event_t`.
#[repr(C)]
struct Handle {
    object: Object,
    of_the_device: *mut c_void,
}

/// Creates an object of one of Open MPI's classes.
///
/// # Safety
/// `place` is valid for a pointer.
unsafe fn create(class: &core::ffi::CStr, place: *mut *mut Handle) -> c_int {
    let Some(class) = open_mpi::class("libopen-pal.so", class) else { return ERR_NOT_SUPPORTED };
    let made = class.create(size_of::<Handle>());
    if made.is_null() {
        return ERR_OUT_OF_RESOURCE;
    }
    // SAFETY: the caller's promise.
    unsafe { *place = made.cast() };
    SUCCESS
}

unsafe extern "C" fn create_stream(_device: c_int, stream: *mut *mut Handle) -> c_int {
    // SAFETY: a place for the stream, by Open MPI's header.
    unsafe { create(c"opal_accelerator_stream_t_class", stream) }
}

unsafe extern "C" fn create_event(_device: c_int, event: *mut *mut Handle) -> c_int {
    // SAFETY: a place for the event, by Open MPI's header.
    unsafe { create(c"opal_accelerator_event_t_class", event) }
}

unsafe extern "C" fn create_event_6(device: c_int, event: *mut *mut Handle, _ipc: bool) -> c_int {
    // SAFETY: passed on.
    unsafe { create_event(device, event) }
}

extern "C" fn sync_stream(_stream: *mut Handle) -> c_int {
    SUCCESS
}

extern "C" fn record_event(_device: c_int, _event: *mut Handle, _stream: *mut Handle) -> c_int {
    SUCCESS
}

extern "C" fn query_event(_device: c_int, _event: *mut Handle) -> c_int {
    SUCCESS
}

/// Called by transports that register memory themselves, which then end the program.
extern "C" fn get_address_range(
    _device: c_int,
    _address: *const c_void,
    _base: *mut *mut c_void,
    _len: *mut usize,
) -> c_int {
    say(format_args!("only UCX can move Gaudi memory: use --mca pml ucx --mca osc ucx"));
    ERR_NOT_SUPPORTED
}

/// The card of this process is number 0 to Open MPI, and the only one.
unsafe extern "C" fn get_device(device: *mut c_int) -> c_int {
    // SAFETY: a place for the number, by Open MPI's header.
    unsafe { *device = 0 };
    SUCCESS
}

extern "C" fn get_device_pci_attr(_device: c_int, _attr: *mut PciAttr) -> c_int {
    ERR_NOT_SUPPORTED
}

unsafe extern "C" fn can_access_peer(access: *mut c_int, one: c_int, other: c_int) -> c_int {
    // SAFETY: a place for the answer, by Open MPI's header.
    unsafe { *access = c_int::from(one == other) };
    SUCCESS
}

extern "C" fn get_buffer_id(_device: c_int, _address: *const c_void, _id: *mut u64) -> c_int {
    ERR_NOT_SUPPORTED
}

/// UCX shares memory between processes, not Open MPI.
extern "C" fn is_ipc_enabled() -> bool {
    false
}

extern "C" fn unsupported() -> c_int {
    ERR_NOT_SUPPORTED
}

extern "C" fn get_mem_bw(_device: c_int, _bandwidth: *mut f32) -> c_int {
    ERR_NOT_SUPPORTED
}

unsafe extern "C" fn get_memkind(kind: *mut Memkind) {
    // SAFETY: a place for the answer, by Open MPI's header; the name is freed with `free`.
    unsafe {
        (*kind).name = libc::strdup(c"gaudi".as_ptr()).cast::<c_char>();
        (*kind).no_restrictors = true;
        (*kind).num_restrictors = 0;
    }
}

unsafe extern "C" fn num_devices(number: *mut c_int) -> c_int {
    // SAFETY: a place for the number, by Open MPI's header.
    unsafe { *number = 1 };
    SUCCESS
}
