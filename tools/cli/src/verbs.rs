//! The part of libibverbs that is needed to move bytes between host memory and a dma-buf by each HCA: two connected
//! queue pairs on the same port. Bound at run time; no HCA is needed to build.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use verbs_abi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_PORT_ACTIVE,
    IBV_QP_ACCESS_FLAGS, IBV_QP_AV, IBV_QP_DEST_QPN, IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC, IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT,
    IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPT_RC, IBV_SEND_SIGNALED, IBV_WC_SUCCESS,
    IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, ibv_ah_attr, ibv_context, ibv_cq, ibv_device, ibv_gid,
    ibv_global_route, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_cap,
    ibv_qp_init_attr, ibv_send_wr, ibv_sge, ibv_wc, rdma_wr, wr_union,
};

const ACCESS: c_int =
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ) as c_int;
/// The port to use.
const PORT: u8 = 1;
/// How long one transfer may take.
const LIMIT: Duration = Duration::from_secs(5);

/// The function that failed, with its errno.
pub(crate) type Refused = (&'static str, i32);

/// The loaded library. It is never unloaded, as it may have started threads or handlers.
pub(crate) struct Verbs {
    library: ManuallyDrop<Library>,
}

/// The direction in which an HCA moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transfer {
    /// From host memory to the dma-buf.
    Write,
    /// From the dma-buf to host memory.
    Read,
}

/// An HCA that has registered a dma-buf and host memory. Its resources are leaked, because the process ends soon.
pub(crate) struct Loopback {
    context: *mut ibv_context,
    cq: *mut ibv_cq,
    qp: *mut ibv_qp,
    host: ibv_sge,
    rkey: u32,
}

impl Verbs {
    /// `None` if there is no libibverbs.
    pub(crate) fn load() -> Option<Self> {
        // SAFETY: runs the initialisers of the libibverbs that the user installed.
        let library = unsafe { Library::open(Some("libibverbs.so.1"), RTLD_NOW | RTLD_LOCAL) };
        library.ok().map(|library| Self { library: ManuallyDrop::new(library) })
    }

    /// Whether it has the call that registers dma-bufs (rdma-core 34).
    pub(crate) fn knows_dmabufs(&self) -> bool {
        // SAFETY: only checks that the symbol exists.
        unsafe { self.library.get::<*const ()>("ibv_reg_dmabuf_mr") }.is_ok()
    }

    /// # Safety
    /// `T` is the function's type.
    unsafe fn function<T: Copy>(&self, name: &'static str) -> Result<T, Refused> {
        // SAFETY: the caller's promise.
        let found = unsafe { self.library.get::<T>(name) };
        found.map(|symbol| *symbol).map_err(|_| (name, libc::ENOSYS))
    }

    /// Every HCA, by name.
    pub(crate) fn hcas(&self) -> Vec<(String, *mut ibv_device)> {
        type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ibv_device;
        type Name = unsafe extern "C" fn(*mut ibv_device) -> *const c_char;
        // SAFETY: the signatures in verbs.h.
        let functions = unsafe {
            (
                self.function::<List>("ibv_get_device_list"),
                self.function::<Name>("ibv_get_device_name"),
            )
        };
        let (Ok(list), Ok(name)) = functions else { return Vec::new() };
        let mut count = 0;
        // SAFETY: a valid pointer for the count. The list is leaked, because the process ends soon.
        let devices = unsafe { list(&mut count) };
        if devices.is_null() {
            return Vec::new();
        }
        let one = |at: usize| {
            // SAFETY: inside the list, whose length the call returned.
            let device = unsafe { *devices.add(at) };
            // SAFETY: a device of the list; the name is terminated and lives as long as the device.
            let hca = unsafe { CStr::from_ptr(name(device)) }.to_string_lossy().into_owned();
            (hca, device)
        };
        (0..count.max(0) as usize).map(one).collect()
    }

    /// Registers `len` bytes of the dma-buf with an HCA, without a connection.
    pub(crate) fn register(
        &self,
        device: *mut ibv_device,
        dmabuf: BorrowedFd<'_>,
        len: u64,
    ) -> Result<Registered, Refused> {
        type Open = unsafe extern "C" fn(*mut ibv_device) -> *mut ibv_context;
        type Alloc = unsafe extern "C" fn(*mut ibv_context) -> *mut ibv_pd;
        type Register =
            unsafe extern "C" fn(*mut ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ibv_mr;
        // SAFETY: the signatures in verbs.h.
        let (open, alloc, register) = unsafe {
            (
                self.function::<Open>("ibv_open_device")?,
                self.function::<Alloc>("ibv_alloc_pd")?,
                self.function::<Register>("ibv_reg_dmabuf_mr")?,
            )
        };
        // SAFETY: a device of the list.
        let context = made("ibv_open_device", unsafe { open(device) })?;
        // SAFETY: an open device.
        let pd = made("ibv_alloc_pd", unsafe { alloc(context) })?;
        // SAFETY: a live domain and an open descriptor.
        let region = unsafe { register(pd, 0, len as usize, 0, dmabuf.as_raw_fd(), ACCESS) };
        let region = made("ibv_reg_dmabuf_mr", region)?;
        Ok(Registered { context, pd, region })
    }

    /// Releases a registration, which keeps the card's memory from being unmapped.
    pub(crate) fn deregister(&self, registered: Registered) {
        type Deregister = unsafe extern "C" fn(*mut ibv_mr) -> c_int;
        // SAFETY: the signature in verbs.h; the registration is ours, and no transfer uses it any more.
        let _ = unsafe {
            self.function::<Deregister>("ibv_dereg_mr").map(|call| call(registered.region))
        };
    }

    /// Connects a port of the HCA to itself, and registers host memory.
    ///
    /// # Safety
    /// The memory must stay alive until the process ends.
    pub(crate) unsafe fn connect(
        &self,
        registered: &Registered,
        host: *mut u8,
        len: usize,
    ) -> Result<Loopback, Refused> {
        type Register = unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        type CreateCq = unsafe extern "C" fn(
            *mut ibv_context,
            c_int,
            *mut c_void,
            *mut c_void,
            c_int,
        ) -> *mut ibv_cq;
        type CreateQp = unsafe extern "C" fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
        type QueryPort = unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        type QueryGid = unsafe extern "C" fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int;
        let Registered { context, pd, region: remote } = *registered;
        // SAFETY: the signatures in verbs.h.
        let (register, create_cq, create_qp, query_port, query_gid) = unsafe {
            (
                self.function::<Register>("ibv_reg_mr")?,
                self.function::<CreateCq>("ibv_create_cq")?,
                self.function::<CreateQp>("ibv_create_qp")?,
                self.function::<QueryPort>("ibv_query_port")?,
                self.function::<QueryGid>("ibv_query_gid")?,
            )
        };
        // SAFETY: only numbers, so all zeroes is a valid value.
        let mut port: ibv_port_attr = unsafe { std::mem::zeroed() };
        // SAFETY: an open device, and a valid pointer for the result.
        done("ibv_query_port", unsafe { query_port(context, PORT, &mut port) })?;
        if port.state != IBV_PORT_ACTIVE {
            return Err(("the port is not active", libc::ENETDOWN));
        }
        let mut route = ibv_global_route { hop_limit: 1, ..Default::default() };
        for index in 0..port.gid_tbl_len.min(255) {
            let mut gid = ibv_gid::default();
            // SAFETY: as above.
            let status = unsafe { query_gid(context, PORT, index, &mut gid) };
            if status == 0 && gid != ibv_gid::default() {
                (route.dgid, route.sgid_index) = (gid, index as u8);
                break;
            }
        }
        // SAFETY: the caller's promise.
        let region = made("ibv_reg_mr", unsafe { register(pd, host.cast(), len, ACCESS) })?;
        let null = std::ptr::null_mut();
        // SAFETY: an open device.
        let cq = made("ibv_create_cq", unsafe { create_cq(context, 16, null, null, 0) })?;
        let mut init = ibv_qp_init_attr {
            qp_context: null,
            send_cq: cq,
            recv_cq: cq,
            srq: std::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: 4,
                max_recv_wr: 1,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: 0,
            },
            qp_type: IBV_QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: live objects.
        let qps = unsafe { [create_qp(pd, &mut init), create_qp(pd, &mut init)] };
        let qps = [made("ibv_create_qp", qps[0])?, made("ibv_create_qp", qps[1])?];
        for (qp, other) in [(qps[0], qps[1]), (qps[1], qps[0])] {
            // SAFETY: live queue pairs.
            self.bring_up(qp, unsafe { (*other).qp_num }, &port, route)?;
        }
        // SAFETY: live regions.
        let (lkey, rkey) = unsafe { ((*region).lkey, (*remote).rkey) };
        let host = ibv_sge { addr: host as u64, length: len as u32, lkey };
        Ok(Loopback { context, cq, qp: qps[0], host, rkey })
    }

    /// Connects a queue pair to another one of the same port.
    fn bring_up(
        &self,
        qp: *mut ibv_qp,
        other: u32,
        port: &ibv_port_attr,
        grh: ibv_global_route,
    ) -> Result<(), Refused> {
        type Modify = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        // SAFETY: the signature in verbs.h.
        let modify = unsafe { self.function::<Modify>("ibv_modify_qp")? };
        let mut attributes = ibv_qp_attr {
            qp_state: IBV_QPS_INIT,
            qp_access_flags: ACCESS as c_uint,
            port_num: PORT,
            path_mtu: port.active_mtu,
            dest_qp_num: other,
            max_rd_atomic: 1,
            max_dest_rd_atomic: 1,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ah_attr: ibv_ah_attr {
                grh,
                dlid: port.lid,
                // Without a LID (RoCE), only the GID identifies the port.
                is_global: u8::from(port.lid == 0),
                port_num: PORT,
                ..Default::default()
            },
            ..Default::default()
        };
        let init = IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        let receive = IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        let send = IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN
            | IBV_QP_MAX_QP_RD_ATOMIC;
        for (state, mask) in [(IBV_QPS_INIT, init), (IBV_QPS_RTR, receive), (IBV_QPS_RTS, send)] {
            attributes.qp_state = state;
            // SAFETY: a live queue pair and filled-in attributes.
            let status = unsafe { modify(qp, &mut attributes, IBV_QP_STATE | mask) };
            done("ibv_modify_qp", status)?;
        }
        Ok(())
    }
}

/// A dma-buf that an HCA has registered.
pub(crate) struct Registered {
    context: *mut ibv_context,
    pd: *mut ibv_pd,
    region: *mut ibv_mr,
}

impl Loopback {
    /// Moves the bytes between the host memory at `from` and the dma-buf at `at`, and waits.
    pub(crate) fn transfer(
        &self,
        transfer: Transfer,
        from: usize,
        at: u64,
        len: usize,
    ) -> Result<Duration, String> {
        let addr = self.host.addr + from as u64;
        let mut piece = ibv_sge { addr, length: len as u32, lkey: self.host.lkey };
        let mut work = ibv_send_wr {
            wr_id: 1,
            next: std::ptr::null_mut(),
            sg_list: &mut piece,
            num_sge: 1,
            opcode: match transfer {
                Transfer::Write => IBV_WR_RDMA_WRITE,
                Transfer::Read => IBV_WR_RDMA_READ,
            },
            send_flags: IBV_SEND_SIGNALED,
            imm_data: 0,
            wr: wr_union { rdma: rdma_wr { remote_addr: at, rkey: self.rkey } },
            qp_type: 0,
            _bind_or_tso: [0; 6],
        };
        // SAFETY: an open device, whose functions libibverbs has filled in.
        let (post, poll) = unsafe { ((*self.context).ops.post_send, (*self.context).ops.poll_cq) };
        let (Some(post), Some(poll)) = (post, poll) else {
            return Err(String::from("the HCA's driver cannot post work"));
        };
        let began = Instant::now();
        let mut refused = std::ptr::null_mut();
        // SAFETY: a connected queue pair; the call reads the request before it returns, and the memory that it names is ours.
        let status = unsafe { post(self.qp, &mut work, &mut refused) };
        done("ibv_post_send", status).map_err(|(call, errno)| {
            format!("{call}: {}", std::io::Error::from_raw_os_error(errno))
        })?;
        let mut completion = ibv_wc::default();
        loop {
            // SAFETY: a live queue, and space for one completion.
            match unsafe { poll(self.cq, 1, &mut completion) } {
                0 if began.elapsed() > LIMIT => {
                    return Err(format!("not done after {} s", LIMIT.as_secs()));
                }
                0 => {}
                1 => break,
                failed => return Err(format!("ibv_poll_cq: {failed}")),
            }
        }
        match completion.status {
            IBV_WC_SUCCESS => Ok(began.elapsed()),
            status => {
                Err(format!("completed with status {status} (vendor {:#x})", completion.vendor_err))
            }
        }
    }
}

fn made<T>(call: &'static str, pointer: *mut T) -> Result<*mut T, Refused> {
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    if pointer.is_null() { Err((call, errno)) } else { Ok(pointer) }
}

/// Most of these functions return an errno, some -1.
fn done(call: &'static str, status: c_int) -> Result<(), Refused> {
    match status {
        0 => Ok(()),
        -1 => Err((call, std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))),
        errno => Err((call, errno)),
    }
}
