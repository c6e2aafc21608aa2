//! Devices, queues and buffers for the tests, with the boring parts done.

use core::ffi::c_int;
use std::os::fd::BorrowedFd;
use std::sync::Once;
use std::time::{Duration, Instant};

use soft_rdma::abi::*;
use soft_rdma::api::*;

pub(crate) const ALL_ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC;

/// Gives this test process a node of its own, unless it was started into one.
pub(crate) fn setup() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if std::env::var_os("SOFT_RDMA_DIR").is_none() {
            let folder = format!("/tmp/soft-rdma-test-{}", std::process::id());
            // A process with the same number may have been killed before it could.
            let _ = std::fs::remove_dir_all(&folder);
            // SAFETY: before the library, the only reader in this process, looks at it.
            unsafe { std::env::set_var("SOFT_RDMA_DIR", &folder) };
            // Two nodes at addresses of the loopback network that no other test has.
            let [_, a, b, c] = std::process::id().to_be_bytes();
            let nodes = format!("1=127.{a}.{b}.{c}:20000,2=127.{a}.{b}.{c}:22000");
            // SAFETY: as above.
            unsafe { std::env::set_var("SOFT_RDMA_NODES", nodes) };
            // SAFETY: a function of this program, which stays loaded.
            unsafe { libc::atexit(remove_folder) };
        }
        if std::env::var_os("SOFT_RDMA_MEMLOCK").is_none() {
            // All tests of this program together may be above an ordinary user's limit.
            // SAFETY: as above.
            unsafe { std::env::set_var("SOFT_RDMA_MEMLOCK", "off") };
        }
        // SAFETY: as above.
        unsafe { std::env::set_var("SOFT_RDMA_LOG", "off") };
    });
}

extern "C" fn remove_folder() {
    if let Some(folder) = std::env::var_os("SOFT_RDMA_DIR") {
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// Runs one test once more in a process of its own, with variables. True in the process that did so.
pub(crate) fn rerun(test: &str, variables: &[(&str, &str)]) -> bool {
    const AGAIN: &str = "SOFT_RDMA_TEST_AGAIN";
    if std::env::var_os(AGAIN).is_some() {
        return false;
    }
    let status = std::process::Command::new(std::env::current_exe().expect("our own program"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(AGAIN, "1")
        // Other tests of this program may have set these.
        .env_remove("SOFT_RDMA_DIR")
        .env_remove("SOFT_RDMA_NODES")
        .envs(variables.iter().copied())
        .status();
    assert!(status.expect("it starts").success(), "with {variables:?}");
    true
}

/// `errno` of this thread.
pub(crate) fn last_error() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// An open device with a protection domain and a completion queue.
pub(crate) struct Device {
    pub(crate) context: *mut ibv_context,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) cq: *mut ibv_cq,
}

impl Device {
    pub(crate) fn open() -> Self {
        setup();
        // SAFETY: the functions get what they gave.
        unsafe {
            let list = ibv_get_device_list(core::ptr::null_mut());
            assert!(!(*list).is_null(), "there is a device");
            let context = ibv_open_device(*list);
            ibv_free_device_list(list);
            assert!(!context.is_null(), "{}", std::io::Error::last_os_error());
            let pd = ibv_alloc_pd(context);
            let cq = ibv_create_cq(context, 1000, core::ptr::null_mut(), core::ptr::null_mut(), 0);
            assert!(!pd.is_null() && !cq.is_null());
            Self { context, pd, cq }
        }
    }

    pub(crate) fn lid(&self) -> u16 {
        // SAFETY: all zero is a value; the context is open.
        unsafe {
            let mut port: ibv_port_attr = core::mem::zeroed();
            assert_eq!(ibv_query_port(self.context, 1, &raw mut port), 0);
            port.lid
        }
    }

    pub(crate) fn qp_with(&self, kind: c_int, change: impl FnOnce(&mut ibv_qp_init_attr)) -> Qp {
        let mut init = ibv_qp_init_attr {
            qp_context: core::ptr::null_mut(),
            send_cq: self.cq,
            recv_cq: self.cq,
            srq: core::ptr::null_mut(),
            cap: ibv_qp_cap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 64,
            },
            qp_type: kind,
            sq_sig_all: 0,
        };
        change(&mut init);
        // SAFETY: the domain and queues are live.
        let qp = unsafe { ibv_create_qp(self.pd, &raw mut init) };
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        Qp { qp, lid: self.lid() }
    }

    pub(crate) fn rc(&self) -> Qp {
        self.qp_with(IBV_QPT_RC, |_| ())
    }

    /// Two connected queue pairs.
    pub(crate) fn pair(&self) -> (Qp, Qp) {
        let (a, b) = (self.rc(), self.rc());
        a.connect(&b, |_| ());
        b.connect(&a, |_| ());
        (a, b)
    }

    pub(crate) fn buffer(&self, length: usize, fill: impl Fn(usize) -> u8) -> Buffer {
        Buffer::new(self.pd, length, ALL_ACCESS, fill)
    }

    /// The next completion.
    #[track_caller]
    pub(crate) fn wait(&self) -> ibv_wc {
        poll(self.cq).expect("a completion within a minute")
    }

    /// The next so many completions, by number, with their statuses.
    #[track_caller]
    pub(crate) fn ends(&self, count: usize) -> Vec<(u64, c_int)> {
        let mut ends: Vec<_> =
            (0..count).map(|_| self.wait()).map(|wc| (wc.wr_id, wc.status)).collect();
        ends.sort_unstable();
        ends
    }

    /// The next so many completions are successes.
    #[track_caller]
    pub(crate) fn succeed(&self, count: usize) {
        let ends = self.ends(count);
        assert!(ends.iter().all(|end| end.1 == IBV_WC_SUCCESS), "{ends:?}");
    }

    /// Nothing is in the completion queue, now and a moment later.
    #[track_caller]
    pub(crate) fn assert_quiet(&self) {
        for _ in 0..20 {
            assert_eq!(poll_once(self.cq), None);
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

pub(crate) fn poll_once(cq: *mut ibv_cq) -> Option<ibv_wc> {
    let mut wc = ibv_wc::default();
    // SAFETY: the queue is live; this is what the header's inline function does.
    let count = unsafe { (*(*cq).context).ops.poll_cq.expect("set")(cq, 1, &raw mut wc) };
    assert!(count >= 0, "the completion queue is in error");
    (count == 1).then_some(wc)
}

pub(crate) fn poll(cq: *mut ibv_cq) -> Option<ibv_wc> {
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end {
        if let Some(wc) = poll_once(cq) {
            return Some(wc);
        }
    }
    None
}

/// Calls on a descriptor of the library do not wait.
pub(crate) fn set_nonblocking(fd: i32) {
    // SAFETY: a descriptor of the library, open as long as its object.
    rustix::io::ioctl_fionbio(unsafe { BorrowedFd::borrow_raw(fd) }, true)
        .expect("a valid descriptor");
}

/// The next asynchronous event, if there is one.
pub(crate) fn next_event(device: &Device) -> Option<ibv_async_event> {
    let mut event = ibv_async_event { element: 0, event_type: -1 };
    // SAFETY: the context is open.
    unsafe {
        set_nonblocking((*device.context).async_fd);
        (ibv_get_async_event(device.context, &raw mut event) == 0).then_some(event)
    }
}

/// Registered memory with poison around it.
pub(crate) struct Buffer {
    bytes: Box<[u8]>,
    length: usize,
    pub(crate) mr: *mut ibv_mr,
}

const POISON: u8 = 0xa5;
const GUARD: usize = 64;

impl Buffer {
    pub(crate) fn new(
        pd: *mut ibv_pd,
        length: usize,
        access: u32,
        fill: impl Fn(usize) -> u8,
    ) -> Self {
        let mut bytes = vec![POISON; length + 2 * GUARD].into_boxed_slice();
        for (index, byte) in bytes[GUARD..GUARD + length].iter_mut().enumerate() {
            *byte = fill(index);
        }
        let addr = bytes[GUARD..].as_mut_ptr();
        // SAFETY: the memory lives as long as the buffer.
        let mr = unsafe { ibv_reg_mr(pd, addr.cast(), length.max(1), access as c_int) };
        assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
        Self { bytes, length, mr }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.bytes.as_ptr() as u64 + GUARD as u64
    }

    pub(crate) fn key(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { (*self.mr).rkey }
    }

    pub(crate) fn sge(&self, from: usize, length: usize) -> ibv_sge {
        ibv_sge { addr: self.addr() + from as u64, length: length as u32, lkey: self.key() }
    }

    pub(crate) fn all(&self) -> ibv_sge {
        self.sge(0, self.length)
    }

    /// The bytes as they are now; others write them behind the compiler's back.
    pub(crate) fn read(&self) -> Vec<u8> {
        // SAFETY: inside the box.
        (0..self.length)
            .map(|at| unsafe { (self.addr() as *const u8).add(at).read_volatile() })
            .collect()
    }

    /// Nothing was written outside the buffer.
    #[track_caller]
    pub(crate) fn assert_guards(&self) {
        let guard = |at: usize| {
            // SAFETY: inside the box.
            unsafe { self.bytes.as_ptr().add(at).read_volatile() }
        };
        assert!((0..GUARD).all(|at| guard(at) == POISON), "bytes in front were written");
        assert!(
            (0..GUARD).all(|at| guard(GUARD + self.length + at) == POISON),
            "bytes behind were written"
        );
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the region is live.
        assert_eq!(unsafe { ibv_dereg_mr(self.mr) }, 0);
    }
}

/// A queue pair.
#[derive(Clone, Copy)]
pub(crate) struct Qp {
    pub(crate) qp: *mut ibv_qp,
    pub(crate) lid: u16,
}

/// Work that is posted in one call.
pub(crate) struct Send {
    pub(crate) wr: ibv_send_wr,
    sges: Vec<ibv_sge>,
}

impl Send {
    pub(crate) fn new(opcode: c_int, wr_id: u64, sges: &[ibv_sge]) -> Self {
        // SAFETY: integers and pointers; zero is a value of each.
        let mut wr: ibv_send_wr = unsafe { core::mem::zeroed() };
        (wr.opcode, wr.wr_id, wr.send_flags) = (opcode, wr_id, IBV_SEND_SIGNALED);
        Self { wr, sges: sges.to_vec() }
    }

    pub(crate) fn remote(mut self, addr: u64, rkey: u32) -> Self {
        self.wr.wr.rdma = rdma_wr { remote_addr: addr, rkey };
        self
    }

    pub(crate) fn atomic(mut self, addr: u64, rkey: u32, compare_add: u64, swap: u64) -> Self {
        self.wr.wr.atomic = atomic_wr { remote_addr: addr, compare_add, swap, rkey };
        self
    }

    pub(crate) fn flags(mut self, flags: u32) -> Self {
        self.wr.send_flags = flags;
        self
    }

    pub(crate) fn imm(mut self, imm: u32) -> Self {
        self.wr.imm_data = imm;
        self
    }

    /// Posts it, which must not be refused.
    #[track_caller]
    pub(crate) fn posted(self, qp: &Qp) {
        assert_eq!(self.post(qp), 0);
    }

    /// Posts it; the error number if it is refused.
    pub(crate) fn post(mut self, qp: &Qp) -> c_int {
        self.wr.sg_list = self.sges.as_mut_ptr();
        self.wr.num_sge = self.sges.len() as c_int;
        let mut bad = core::ptr::null_mut();
        // SAFETY: what the header's inline function does.
        unsafe {
            (*(*qp.qp).context).ops.post_send.expect("set")(qp.qp, &raw mut self.wr, &raw mut bad)
        }
    }
}

impl Qp {
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn modify(&self, attr: &ibv_qp_attr, mask: c_int) -> c_int {
        let mut attr = *attr;
        // SAFETY: the queue pair is live.
        unsafe { ibv_modify_qp(self.qp, &raw mut attr, mask) }
    }

    pub(crate) fn enter(&self, state: c_int) {
        assert_eq!(
            self.modify(&ibv_qp_attr { qp_state: state, ..Default::default() }, IBV_QP_STATE),
            0
        );
    }

    pub(crate) fn state(&self) -> c_int {
        let mut attr = ibv_qp_attr::default();
        // SAFETY: all zero is a value; the queue pair is live.
        unsafe {
            let mut init: ibv_qp_init_attr = core::mem::zeroed();
            assert_eq!(ibv_query_qp(self.qp, &raw mut attr, IBV_QP_STATE, &raw mut init), 0);
        }
        attr.qp_state
    }

    /// Moves to RTS, connected to another queue pair.
    pub(crate) fn connect(&self, to: &Qp, change: impl FnOnce(&mut ibv_qp_attr)) {
        self.connect_to(to.lid, to.number(), change);
    }

    pub(crate) fn connect_to(&self, lid: u16, number: u32, change: impl FnOnce(&mut ibv_qp_attr)) {
        let mut attr = ibv_qp_attr {
            port_num: 1,
            qp_access_flags: ALL_ACCESS,
            path_mtu: IBV_MTU_4096,
            dest_qp_num: number,
            rq_psn: 0xff_fffe,
            sq_psn: 0xff_fffe,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            min_rnr_timer: 1,
            timeout: 8,
            retry_cnt: 3,
            rnr_retry: 7,
            ah_attr: ibv_ah_attr { dlid: lid, port_num: 1, ..Default::default() },
            ..Default::default()
        };
        change(&mut attr);
        for (state, mask) in [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS),
            (
                IBV_QPS_RTR,
                IBV_QP_AV
                    | IBV_QP_PATH_MTU
                    | IBV_QP_DEST_QPN
                    | IBV_QP_RQ_PSN
                    | IBV_QP_MAX_DEST_RD_ATOMIC
                    | IBV_QP_MIN_RNR_TIMER,
            ),
            (
                IBV_QPS_RTS,
                IBV_QP_TIMEOUT
                    | IBV_QP_RETRY_CNT
                    | IBV_QP_RNR_RETRY
                    | IBV_QP_SQ_PSN
                    | IBV_QP_MAX_QP_RD_ATOMIC,
            ),
        ] {
            attr.qp_state = state;
            assert_eq!(self.modify(&attr, mask | IBV_QP_STATE), 0, "to state {state}");
        }
    }

    /// Moves a datagram queue pair to RTS.
    pub(crate) fn open_datagrams(&self, qkey: u32) {
        let mut attr = ibv_qp_attr { port_num: 1, qkey, ..Default::default() };
        for (state, mask) in [
            (IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY),
            (IBV_QPS_RTR, 0),
            (IBV_QPS_RTS, IBV_QP_SQ_PSN),
        ] {
            attr.qp_state = state;
            assert_eq!(self.modify(&attr, mask | IBV_QP_STATE), 0, "to state {state}");
        }
    }

    pub(crate) fn receive(&self, wr_id: u64, sges: &[ibv_sge]) -> c_int {
        let mut sges = sges.to_vec();
        let mut wr = ibv_recv_wr {
            wr_id,
            next: core::ptr::null_mut(),
            sg_list: sges.as_mut_ptr(),
            num_sge: sges.len() as c_int,
        };
        let mut bad = core::ptr::null_mut();
        // SAFETY: what the header's inline function does.
        unsafe {
            (*(*self.qp).context).ops.post_recv.expect("set")(self.qp, &raw mut wr, &raw mut bad)
        }
    }

    pub(crate) fn destroy(self) {
        // SAFETY: the queue pair is live.
        assert_eq!(unsafe { ibv_destroy_qp(self.qp) }, 0);
    }
}
