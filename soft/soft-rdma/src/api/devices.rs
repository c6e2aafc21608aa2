//! Devices, ports and their tables.

use core::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::io::Errno;

use super::{
    Context, NO_MUTEX, NONE, context_of, from_c, minus_one, object, posting, process, set_errno,
    status, whole, write,
};
use crate::abi::*;
use crate::config;
use crate::fabric::{MAX_QPS, Port};
use crate::hca::events::EventQueue;
use crate::hca::memory::MAX_REGIONS;
use crate::hca::{MAX_RD_ATOMIC, MAX_SGE, MAX_WR};
use crate::placement::Place;
use crate::sysfs::device_name;
use crate::wire::MAX_MESSAGE;

/// Completion queue entries of one queue.
pub(super) const MAX_CQE: usize = 1 << 22;
/// The default partition, full member.
const PKEY: u16 = 0xffff;
/// "SR" as a vendor: no IEEE OUI has these bits.
const VENDOR: u32 = 0x00ff_5352;
const PART: u32 = 0x5352;

/// A device of this node.
#[repr(C)]
pub(super) struct Device {
    c: ibv_device,
    /// `struct verbs_device` behind the public structure: drivers of rdma-core compare its `ops`, the first, with
    /// their own.
    _no_driver: [usize; 32],
    pub(super) port: Port,
    pub(super) place: Place,
}

// SAFETY: the pointers inside are NULL and nothing is changed after the list was made.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

fn text<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    for (to, from) in chars[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    chars
}

fn devices() -> &'static [Device] {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| {
        let config = config::get();
        let device = |device: u8, place: Place| {
            let name = device_name(config, device);
            Device {
                c: ibv_device {
                    _ops: [NONE; 2],
                    node_type: IBV_NODE_CA,
                    transport_type: IBV_TRANSPORT_IB,
                    name: text(&name),
                    dev_name: text(&name),
                    dev_path: text(&format!("/sys/class/infiniband_verbs/{name}")),
                    ibdev_path: text(&format!("/sys/class/infiniband/{name}")),
                },
                _no_driver: [0; 32],
                port: Port { node: config.node, device },
                place,
            }
        };
        (0..).zip(&config.places).map(|(index, place)| device(index, *place)).collect()
    })
}

/// Whether a name under `/dev/infiniband` is one of our devices.
pub(super) fn is_device(name: &[u8]) -> bool {
    let config = config::get();
    (0..config.devices).any(|index| device_name(config, index).as_bytes() == name)
}

/// Lists the devices; NULL at the end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let list = super::caught(|| Ok(devices())).unwrap_or(&[]);
    // SAFETY: an array for the pointers and the NULL at its end.
    let array = unsafe { libc::calloc(list.len() + 1, size_of::<*mut ibv_device>()) }
        .cast::<*mut ibv_device>();
    if array.is_null() {
        set_errno(Errno::NOMEM);
        return array;
    }
    for (index, device) in list.iter().enumerate() {
        // SAFETY: inside the array. Programs only read devices.
        unsafe { array.add(index).write((&raw const device.c).cast_mut()) };
    }
    if !count.is_null() {
        // SAFETY: the caller's promise.
        unsafe { count.write(list.len() as c_int) };
    }
    array
}

/// Frees a list. Devices stay: they belong to the library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: it was made by `calloc`.
    unsafe { libc::free(list.cast()) };
}

/// Name of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: devices are never freed.
    unsafe { (&raw const (*device).name).cast() }
}

/// The kernel's index of a device: none. With an index, UCX would ask the kernel, by netlink, about a device that is
/// not ours or does not exist, and print errors.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_device_index(_device: *mut ibv_device) -> c_int {
    -1
}

/// GUID of a device, in network byte order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_guid(device: *mut ibv_device) -> u64 {
    // SAFETY: devices are never freed.
    unsafe { from_c::<Device, _>(device) }
        .map_or(0, |device| u64::from_ne_bytes(device.port.guid()))
}

/// Opens a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    let open: *mut Context = object(|| {
        // SAFETY: devices are never freed.
        let found: &'static Device = unsafe { from_c(device) }?;
        let process = process::get()?;
        let asynchronous = Arc::new(EventQueue::new()?);
        process.hca.listen(found.port.device, &asynchronous);
        let async_fd = std::os::fd::AsRawFd::as_raw_fd(asynchronous.fd());
        let c = ibv_context {
            device,
            ops: posting::operations(),
            cmd_fd: -1,
            async_fd,
            num_comp_vectors: 1,
            mutex: NO_MUTEX,
            abi_compat: VERBS_ABI_IS_EXTENDED,
        };
        let front = verbs_context_front {
            later_verbs: [NONE; 38],
            _placeholder: 0,
            sz: size_of::<verbs_context_front>() + size_of::<ibv_context>(),
        };
        Ok(Box::new(Context {
            front,
            c,
            device: found,
            process,
            asynchronous,
            objects: AtomicUsize::new(0),
        }))
    });
    if open.is_null() {
        return core::ptr::null_mut();
    }
    // SAFETY: it was just made.
    unsafe { &raw mut (*open).c }
}

/// Closes a device. Like rdma-core's it never refuses: programs leave objects behind (perftest does).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    minus_one(|| {
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        let objects = open.objects.load(Ordering::Acquire);
        if objects != 0 {
            // Objects refer to the context, so context and objects stay until the process ends.
            config::log!(Debug, "closed with {objects} objects that were not destroyed");
            return Ok(());
        }
        // SAFETY: it came from `ibv_open_device` and nothing refers to it.
        drop(unsafe { Box::from_raw(whole(context)) });
        Ok(())
    })
}

fn device_attributes(port: Port) -> ibv_device_attr {
    let guid = u64::from_ne_bytes(port.guid());
    // SAFETY: integers and arrays of them; zero is a value of each.
    let zero: ibv_device_attr = unsafe { core::mem::zeroed() };
    ibv_device_attr {
        fw_ver: text(concat!("soft-rdma ", env!("CARGO_PKG_VERSION"))),
        node_guid: guid,
        sys_image_guid: guid,
        max_mr_size: 1 << 46,
        page_size_cap: !0xfff,
        vendor_id: VENDOR,
        vendor_part_id: PART,
        hw_ver: 1,
        max_qp: MAX_QPS as c_int,
        max_qp_wr: MAX_WR as c_int,
        device_cap_flags: IBV_DEVICE_CURR_QP_STATE_MOD
            | IBV_DEVICE_SYS_IMAGE_GUID
            | IBV_DEVICE_RC_RNR_NAK_GEN,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: MAX_SGE as c_int,
        max_cq: 1 << 16,
        max_cqe: MAX_CQE as c_int,
        max_mr: MAX_REGIONS as c_int,
        max_pd: 1 << 16,
        max_qp_rd_atom: MAX_RD_ATOMIC as c_int,
        max_res_rd_atom: (MAX_RD_ATOMIC * MAX_QPS) as c_int,
        max_qp_init_rd_atom: MAX_RD_ATOMIC as c_int,
        atomic_cap: IBV_ATOMIC_HCA,
        max_ah: c_int::MAX,
        max_srq: 1 << 16,
        max_srq_wr: MAX_WR as c_int,
        max_srq_sge: MAX_SGE as c_int,
        max_pkeys: 1,
        local_ca_ack_delay: 16,
        phys_port_cnt: 1,
        ..zero
    }
}

/// Attributes of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(
    context: *mut ibv_context,
    attr: *mut ibv_device_attr,
) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        unsafe { write(attr, device_attributes(context_of(context)?.device.port)) }
    })
}

fn port_attributes(port: Port, down: bool) -> ibv_port_attr {
    ibv_port_attr {
        state: if down { IBV_PORT_DOWN } else { IBV_PORT_ACTIVE },
        max_mtu: IBV_MTU_4096,
        active_mtu: IBV_MTU_4096,
        gid_tbl_len: 1,
        port_cap_flags: 0,
        max_msg_sz: MAX_MESSAGE,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: port.lid(),
        sm_lid: Port { node: 1, device: 0 }.lid(),
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 18,
        init_type_reply: 0,
        // 4X
        active_width: 2,
        active_speed: crate::config::get().active_speed,
        phys_state: if down { PHYS_STATE_DISABLED } else { PHYS_STATE_LINK_UP },
        link_layer: IBV_LINK_LAYER_INFINIBAND,
        flags: 0,
        port_cap_flags2: 0,
    }
}

fn check_port(port: u32) -> Result<(), Errno> {
    if port == 1 { Ok(()) } else { Err(Errno::INVAL) }
}

/// Attributes of a port. The caller's structure may be the old, short one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    status(|| {
        check_port(port.into())?;
        if attr.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        let down = open.process.hca.counters(open.device.port).is_down();
        let found = port_attributes(open.device.port, down);
        let short = core::mem::offset_of!(ibv_port_attr, port_cap_flags2);
        // SAFETY: every caller's structure is at least that long.
        unsafe {
            core::ptr::copy_nonoverlapping(
                (&raw const found).cast::<u8>(),
                attr.cast::<u8>(),
                short,
            )
        };
        Ok(())
    })
}

fn gid_at(context: *mut ibv_context, port: u32, index: i64) -> Result<ibv_gid, Errno> {
    check_port(port)?;
    if index != 0 {
        return Err(Errno::INVAL);
    }
    // SAFETY: callers pass an open context.
    Ok(unsafe { context_of(context) }?.device.port.gid())
}

/// An entry of the GID table.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut [u8; 16],
) -> c_int {
    // SAFETY: the caller's promise.
    minus_one(|| unsafe { write(gid, gid_at(context, port.into(), index.into())?.raw) })
}

/// Type of an entry of the GID table: InfiniBand.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: core::ffi::c_uint,
    kind: *mut c_int,
) -> c_int {
    minus_one(|| {
        gid_at(context, port.into(), index.into())?;
        // SAFETY: the caller's promise.
        unsafe { write(kind, 0) }
    })
}

/// An entry of the GID table, with its type.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    status(|| {
        if flags != 0 || size < size_of::<ibv_gid_entry>() {
            return Err(Errno::INVAL);
        }
        let gid = gid_at(context, port, index.into()).map_err(|_| Errno::NODATA)?;
        // SAFETY: the caller's promise.
        unsafe {
            write(
                entry,
                ibv_gid_entry {
                    gid,
                    gid_index: index,
                    port_num: port,
                    gid_type: 0,
                    ndev_ifindex: 0,
                },
            )
        }
    })
}

/// All entries of all GID tables.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    if max == 0 {
        return -(Errno::INVAL.raw_os_error() as isize);
    }
    // SAFETY: the caller's promise.
    match unsafe { _ibv_query_gid_ex(context, 1, 0, entries, flags, size) } {
        0 => 1,
        error => -(error as isize),
    }
}

/// An entry of the partition key table, in network byte order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    minus_one(|| {
        check_port(port.into())?;
        if index != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        unsafe { write(pkey, PKEY.to_be()) }
    })
}

/// Index of a partition key (in network byte order) in the table.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_pkey_index(_context: *mut ibv_context, port: u8, pkey: u16) -> c_int {
    if port == 1 && pkey == PKEY.to_be() { 0 } else { -1 }
}

/// Makes verbs safe to use around `fork`. Nothing needs to be done: no memory is pinned.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// Whether that is needed: no (`IBV_FORK_UNNEEDED`).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    2
}

/// Where sysfs is.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Reads a file of sysfs, without the newline at its end; -1 if it is not there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    let read = super::caught(|| {
        if folder.is_null() || file.is_null() || buffer.is_null() || size == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise.
        let [folder, file] =
            unsafe { [core::ffi::CStr::from_ptr(folder), core::ffi::CStr::from_ptr(file)] };
        let path = [folder.to_bytes(), b"/", file.to_bytes()].concat();
        let path = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(&path);
        let mut bytes = std::fs::read(path).map_err(|_| Errno::NOENT)?;
        bytes.truncate(size - 1);
        if bytes.last() == Some(&b'\n') {
            bytes.pop();
        }
        // SAFETY: shorter than the buffer, with room for the NUL.
        unsafe {
            core::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast::<u8>(), bytes.len());
            buffer.add(bytes.len()).write(0);
        }
        Ok(bytes.len() as c_int)
    });
    read.unwrap_or(-1)
}
