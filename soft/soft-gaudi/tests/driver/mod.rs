//! A machine of its own for each test program, and the few C calls every test makes.

#![allow(dead_code, unused_imports)] // Each test program uses its own part of this.

use std::ffi::{CString, c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::PathBuf;

use hl_thunk::sys::{self, CsChunk, CsIn, CsOut};
use soft_gaudi::api::*;
use soft_gaudi::asic::bus_id;
use soft_gaudi::testing::{self, CHILD, Machine};
pub(crate) use soft_gaudi::testing::{fresh_index, pattern};

/// A file of this program's machine of Gaudi2.
pub(crate) fn machine_file(name: &str) -> PathBuf {
    Machine::of_this_process().folder("gaudi2").join(name)
}

/// Sets the machine up, once.
pub(crate) fn machine(generation: &str) {
    machine_with(generation, &[]);
}

/// The same with further variables.
pub(crate) fn machine_with(generation: &str, further: &[(&str, &str)]) {
    let variables = [
        // Tests make calls after a reset, and the machine may be slow.
        ("SOFT_GAUDI_RESET_KILL", "no"),
        // Most tests use EDMA queues as queues among others; `strict.rs` has what cards do.
        // Imports are tested as Habana's driver does them.
        ("SOFT_GAUDI_LENIENT", "edma-fetch,import,instant-close"),
    ];
    testing::set_up(generation, &[&variables, further].concat());
}

/// Keeps other tests of this program away: a process being started has copies of all descriptors
/// until it becomes another program, and they keep cards and dma-bufs as any copy does.
pub(crate) fn exclusive() -> std::sync::MutexGuard<'static, ()> {
    static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
    LOCK.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Opens a card by index.
pub(crate) fn open(index: u32) -> c_int {
    let busid = CString::new(bus_id(index)).unwrap();
    hlthunk_open(sys::DEVICE_DONT_CARE, busid.as_ptr())
}

/// What a card's control node says of its opens.
pub(crate) fn open_stats(index: u32) -> sys::OpenStatsInfo {
    let control = hlthunk_open_control(index as i32, core::ptr::null());
    let mut stats = sys::OpenStatsInfo::default();
    assert_eq!(hlthunk_get_open_stats(control, (&raw mut stats).cast()), 0);
    hlthunk_close(control);
    stats
}

/// A dma-buf of a part of a mapping.
pub(crate) fn export(fd: i32, va: u64, size: u64, offset: u64) -> i32 {
    hlthunk_device_mapped_memory_export_dmabuf_fd(fd, va, size, offset, sys::DMABUF_FLAGS)
}

/// The same, which must succeed.
pub(crate) fn export_fd(fd: i32, va: u64, size: u64, offset: u64) -> OwnedFd {
    let dmabuf = export(fd, va, size, offset);
    assert!(dmabuf >= 0, "export: {dmabuf}");
    // SAFETY: a fresh descriptor.
    unsafe { OwnedFd::from_raw_fd(dmabuf) }
}

/// What a card is.
pub(crate) fn hw_info(fd: i32) -> sys::HwIpInfo {
    // SAFETY: plain data.
    let mut info: sys::HwIpInfo = unsafe { core::mem::zeroed() };
    assert_eq!(hlthunk_get_hw_ip_info(fd, (&raw mut info).cast()), 0);
    info
}

/// Maps a buffer as the driver's users do: the handle is the offset.
pub(crate) fn map_handle(fd: i32, handle: u64, len: usize) -> *mut c_void {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let (null, offset) = (core::ptr::null_mut(), handle as i64);
    // SAFETY: new memory.
    let mapped = unsafe { libc::mmap(null, len, protection, libc::MAP_SHARED, fd, offset) };
    assert_ne!(mapped, libc::MAP_FAILED);
    mapped
}

/// Where a card maps a dma-buf of another.
pub(crate) fn import(fd: i32, dmabuf: i32, length: u64) -> Result<u64, i32> {
    let mut args = sys::MemArgs {
        fd_or_device_va: dmabuf as u64,
        length,
        op: sys::MEM_OP_REG_DMABUF_FD,
        ..Default::default()
    };
    match ioctl(fd, sys::IOCTL_MEMORY, (&raw mut args).cast()) {
        0 => Ok(args.fd_or_device_va),
        _ => Err(errno()),
    }
}

/// Opens a card of its own for a test.
pub(crate) fn card() -> c_int {
    let fd = open(fresh_index());
    assert!(fd >= 0, "open: {fd}");
    fd
}

/// The same on the machine of this program. Cards that a test leaves open are closed with the program.
pub(crate) fn card_of(generation: &str) -> c_int {
    machine(generation);
    card()
}

/// `errno` of this thread.
pub(crate) fn errno() -> i32 {
    std::io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Maps host memory and checks that it worked.
pub(crate) fn map_host(fd: c_int, memory: &mut [u8]) -> u64 {
    let va = hlthunk_host_memory_map(fd, memory.as_mut_ptr().cast(), 0, memory.len() as u64);
    assert_ne!(va, 0, "host_memory_map: errno {}", errno());
    va
}

/// Allocates and maps device memory: handle and address.
pub(crate) fn alloc(fd: c_int, size: u64) -> (u64, u64) {
    let handle = hlthunk_device_memory_alloc(fd, size, 0, true, false);
    assert_ne!(handle, 0, "device_memory_alloc: errno {}", errno());
    let va = hlthunk_device_memory_map(fd, handle, 0);
    assert_ne!(va, 0, "device_memory_map: errno {}", errno());
    (handle, va)
}

/// Golden bytes of a Gaudi2 copy: size, control word 0x89000000, source, destination.
pub(crate) fn gaudi2_copy(src: u64, dst: u64, size: u32) -> Vec<u8> {
    copy_packet(src, dst, size, 0x8900_0000)
}

/// Golden bytes of a Gaudi1 copy: size, control word 0xC9000008, source, destination.
pub(crate) fn gaudi1_copy(src: u64, dst: u64, size: u32) -> Vec<u8> {
    copy_packet(src, dst, size, 0xc900_0008)
}

/// With an engine barrier: it is done after those before it.
pub(crate) fn after_barrier(mut packet: Vec<u8>) -> Vec<u8> {
    packet[7] |= 1 << 5;
    packet
}

fn copy_packet(src: u64, dst: u64, size: u32, control: u32) -> Vec<u8> {
    let [src, dst] = [src, dst].map(u64::to_le_bytes);
    [&size.to_le_bytes()[..], &control.to_le_bytes(), &src, &dst].concat()
}

/// Submits chunks: sequence number or negative errno.
pub(crate) fn submit(fd: c_int, chunks: &mut [CsChunk]) -> Result<u64, c_int> {
    submit_flagged(fd, chunks, 0)
}

/// Submits chunks with flags of the driver: sequence number or negative errno.
pub(crate) fn submit_flagged(fd: c_int, chunks: &mut [CsChunk], flags: u32) -> Result<u64, c_int> {
    submit_by(chunks, flags, |input, out| hlthunk_command_submission(fd, input.cast(), out.cast()))
}

/// Submits chunks by one of the driver's functions.
pub(crate) fn submit_by(
    chunks: &mut [CsChunk],
    flags: u32,
    call: impl FnOnce(*const CsIn, *mut CsOut) -> c_int,
) -> Result<u64, c_int> {
    let input = CsIn {
        chunks_restore: core::ptr::null_mut(),
        chunks_execute: chunks.as_mut_ptr().cast::<c_void>(),
        num_chunks_restore: 0,
        num_chunks_execute: chunks.len() as u32,
        flags,
    };
    let mut out = CsOut::default();
    match call(&input, &mut out) {
        0 => Ok(out.seq),
        error => Err(error),
    }
}

/// A chunk whose buffer is in memory that the card reaches.
pub(crate) fn user_chunk(queue: u32, addr: u64, size: usize) -> CsChunk {
    CsChunk {
        cb_handle: addr,
        queue_index: queue,
        cb_size: size as u32,
        cs_chunk_flags: sys::CS_CHUNK_USER_ALLOC_CB,
        ..CsChunk::default()
    }
}

/// Waits "for ever": result and status.
pub(crate) fn wait(fd: c_int, seq: u64) -> (c_int, u32) {
    let mut status = 99;
    let rc = hlthunk_wait_for_cs(fd, seq, i64::MAX as u64, &mut status);
    (rc, status)
}

/// The status after waiting so long at most.
pub(crate) fn poll(fd: c_int, seq: u64, timeout_us: u64) -> u32 {
    let mut status = 99;
    assert_eq!(hlthunk_wait_for_cs(fd, seq, timeout_us, &mut status), 0);
    status
}

/// A command buffer in host memory, for Gaudi2.
pub(crate) struct UserBuffer {
    fd: c_int,
    memory: Box<[u8]>,
    /// Where the card sees it.
    pub(crate) va: u64,
}

impl UserBuffer {
    /// Maps `packets` for the card.
    pub(crate) fn new(fd: c_int, packets: &[u8]) -> Self {
        let mut memory: Box<[u8]> = packets.into();
        let va = map_host(fd, &mut memory);
        Self { fd, memory, va }
    }

    /// Submits it to a queue.
    pub(crate) fn submit(&self, queue: u32) -> Result<u64, c_int> {
        submit(self.fd, &mut [user_chunk(queue, self.va, self.memory.len())])
    }
}

impl Drop for UserBuffer {
    fn drop(&mut self) {
        hlthunk_memory_unmap(self.fd, self.va);
    }
}

/// Copies from the host to an address of a Gaudi2.
pub(crate) fn put(fd: c_int, to: u64, bytes: &[u8]) {
    let mut bytes = bytes.to_vec();
    let src = map_host(fd, &mut bytes);
    assert_eq!(run(fd, 0, &gaudi2_copy(src, to, bytes.len() as u32)), (0, 0));
    hlthunk_memory_unmap(fd, src);
}

/// Copies from an address of a Gaudi2 to the host.
pub(crate) fn get(fd: c_int, from: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let dst = map_host(fd, &mut bytes);
    assert_eq!(run(fd, 4, &gaudi2_copy(from, dst, len as u32)), (0, 0));
    hlthunk_memory_unmap(fd, dst);
    bytes
}

/// Runs packets on a Gaudi2 queue and waits for them.
pub(crate) fn run(fd: c_int, queue: u32, packets: &[u8]) -> (c_int, u32) {
    let buffer = UserBuffer::new(fd, packets);
    wait(fd, buffer.submit(queue).unwrap())
}

/// The `child` test of this program in another process, to play `role` on a machine of its own.
pub(crate) fn child(role: &str, argument: u32) -> std::process::Command {
    let mut command = testing::child("child");
    command.env(CHILD, format!("{role} {argument}"));
    command
}

/// Another process with the same machine, running the `child` test of this program.
pub(crate) struct Child {
    process: std::process::Child,
    /// The child's stdin: what is sent here (bytes, descriptors) it can receive.
    pub(crate) socket: std::os::unix::net::UnixStream,
}

impl Child {
    /// Starts this test program again to play `role`.
    pub(crate) fn start(role: &str, argument: u32) -> Self {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let process = child(role, argument)
            .env("SOFT_GAUDI_NODE", Machine::of_this_process().name())
            .stdin(OwnedFd::from(theirs))
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        Self { process, socket: ours }
    }

    /// A number the child sent with [`send`].
    pub(crate) fn receive_number(&mut self) -> i64 {
        let mut bytes = [0; 8];
        std::io::Read::read_exact(&mut self.socket, &mut bytes).expect("the child has died");
        i64::from_le_bytes(bytes)
    }

    /// A descriptor the child sent with [`send_fd`].
    pub(crate) fn receive_fd(&mut self) -> OwnedFd {
        receive_fd(&self.socket)
    }

    /// Ends it without a chance to clean up.
    pub(crate) fn kill(mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    /// How it ended by itself, with the socket open.
    pub(crate) fn wait(mut self) -> std::process::ExitStatus {
        self.process.wait().unwrap()
    }

    /// Closes the socket, and expects it to end with success.
    pub(crate) fn finish(mut self) {
        drop(self.socket);
        assert!(self.process.wait().unwrap().success());
    }
}

/// In a child: its role and argument; `None` in a normal test run.
pub(crate) fn child_role() -> Option<(String, u32)> {
    let text = std::env::var(CHILD).ok()?;
    let (role, argument) = text.rsplit_once(' ')?;
    Some((role.to_owned(), argument.parse().ok()?))
}

/// In a child: the socket to the parent.
pub(crate) fn parent() -> std::os::unix::net::UnixStream {
    std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned().unwrap().into()
}

/// Sends a number.
pub(crate) fn send(mut to: &std::os::unix::net::UnixStream, number: i64) {
    std::io::Write::write_all(&mut to, &number.to_le_bytes()).unwrap();
}

/// In a child: waits until the parent closes the socket.
pub(crate) fn wait_for_end(mut with: &std::os::unix::net::UnixStream) {
    let _ = std::io::Read::read(&mut with, &mut [0]);
}

/// Sends a descriptor by SCM_RIGHTS.
pub(crate) fn send_fd(to: &std::os::unix::net::UnixStream, fd: c_int) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    // SAFETY: open for the duration of the call.
    let fds = [unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }];
    let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&fds)));
    sendmsg(to, &[std::io::IoSlice::new(b"x")], &mut ancillary, SendFlags::empty()).unwrap();
}

/// Receives a descriptor.
pub(crate) fn receive_fd(from: &std::os::unix::net::UnixStream) -> OwnedFd {
    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    let mut space = [core::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut into = [std::io::IoSliceMut::new(&mut byte)];
    recvmsg(from, &mut into, &mut ancillary, RecvFlags::CMSG_CLOEXEC).unwrap();
    let fds = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.expect("no descriptor came")
}
