//! Queues that wait for each other, interrupts, and what is recorded of errors – on a Gaudi2.

mod driver;

use std::ffi::c_void;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

/// `struct hlthunk_signal_in`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct SignalIn {
    chunks_restore: *mut c_void,
    num_chunks_restore: u32,
    queue_index: u32,
    flags: u32,
}

/// `struct hlthunk_signal_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct SignalOut {
    seq: u64,
    status: u32,
    sob_base_addr_offset: u32,
    sob_count_before_submission: u16,
}

/// `struct hlthunk_wait_for_signal_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct WaitForSignalData {
    /// Array of sequence numbers, or the id of an encapsulated-signals handle.
    signal_seq: u64,
    signal_seq_nr: u32,
    queue_index: u32,
    flags: u32,
    collective_engine_id: u32,
    encaps_signal_offset: u32,
}

/// `struct hlthunk_wait_in`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct WaitIn {
    chunks_restore: *mut c_void,
    num_chunks_restore: u32,
    wait_for_signal: *const WaitForSignalData,
    num_wait_for_signal: u32,
    flags: u32,
}

/// `struct hlthunk_wait_out`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct WaitOut {
    seq: u64,
    status: u32,
}

/// `struct hl_info_args`, the raw INFO ioctl.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct InfoArgs {
    return_pointer: u64,
    return_size: u32,
    op: u32,
    /// Meaning by operation: dcore, period, PLL, eventfd, array size …
    argument: u32,
    pad: u32,
}

/// `struct hlthunk_page_fault_info`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct PageFaultInfo {
    timestamp: i64,
    addr: u64,
    engine_id: u16,
    num_of_mappings: u32,
    /// Elements of 16 bytes: device address, size.
    mappings_buf: u64,
}

/// First sync object, monitor and completion queue that are the user's.
const SOB: u32 = 416;
const MONITOR: u32 = 296;
const CQ: u32 = 2;
const CFG: u64 = 0x1000_007f_f800_0000;
const FENCE_OF_QUEUE_0: u64 = CFG + 0x4c8_a290;

/// MSG_SHORT: value, control word with base and offset, message barrier.
fn short(base: u32, offset: u32, value: u32) -> Vec<u8> {
    [value.to_le_bytes(), (0x8400_0000 | base << 22 | offset).to_le_bytes()].concat()
}

fn msg_long(addr: u64, value: u32) -> Vec<u8> {
    let mut packet = [value.to_le_bytes(), 0x8300_0000u32.to_le_bytes()].concat();
    packet.extend_from_slice(&addr.to_le_bytes());
    packet
}

fn add_to_sob(sob: u32, by: u32) -> Vec<u8> {
    short(1, sob * 4, 1 << 31 | by)
}

fn set_sob(sob: u32, value: u32) -> Vec<u8> {
    short(1, sob * 4, value)
}

/// Programs a monitor: payload address and data, then armed for "equal".
fn monitor(monitor: u32, sob: u32, target: u32, addr: u64, data: u32, config: u32) -> Vec<u8> {
    let mask = !(1u32 << (sob % 8)) & 0xff;
    [
        short(0, 0x8000 + monitor * 4, config),
        short(0, monitor * 4, addr as u32),
        short(0, 0x2000 + monitor * 4, (addr >> 32) as u32),
        short(0, 0x4000 + monitor * 4, data),
        short(0, 0x6000 + monitor * 4, (sob / 8) | mask << 8 | 1 << 16 | target << 17),
    ]
    .concat()
}

/// FENCE 0: target 1, take 1 off.
fn fence() -> Vec<u8> {
    vec![0x01, 0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x88]
}

#[test]
fn a_queue_blocks_at_a_fence_until_another_queue_signals_it() {
    let fd = card_of("gaudi2");
    let mut memory = pattern(64, 1);
    let host = map_host(fd, &mut memory);
    let mut program = monitor(MONITOR, SOB, 2, FENCE_OF_QUEUE_0, 1, 0);
    program.extend(fence());
    program.extend(gaudi2_copy(host, host + 32, 32));
    let waiting = UserBuffer::new(fd, &program);
    let waiting_seq = waiting.submit(0).unwrap();
    assert_eq!(poll(fd, waiting_seq, 1000), sys::WAIT_BUSY);
    assert!(!hlthunk_is_device_idle(fd));
    // Other queues go on; the first signal is not enough.
    assert_eq!(run(fd, 4, &add_to_sob(SOB, 1)), (0, 0));
    assert_eq!(poll(fd, waiting_seq, 0), sys::WAIT_BUSY);
    assert_ne!(memory[..32], memory[32..]);
    assert_eq!(run(fd, 4, &add_to_sob(SOB, 1)), (0, 0));
    assert_eq!(wait(fd, waiting_seq), (0, sys::WAIT_COMPLETED));
    assert_eq!(memory[..32], memory[32..]);
}

#[test]
fn chunks_of_one_submission_synchronise_with_each_other() {
    let fd = card_of("gaudi2");
    let mut memory = vec![7u8; 64];
    let host = map_host(fd, &mut memory);
    let (_, device) = alloc(fd, 1);
    let mut up = monitor(MONITOR, SOB, 1, FENCE_OF_QUEUE_0, 1, 0);
    up.extend(fence());
    up.extend(gaudi2_copy(device, host + 32, 32));
    // The fence register of queue 0 serves the queue that waits.
    let up = UserBuffer::new(fd, &up);
    let mut down = gaudi2_copy(host, device, 32);
    down.extend(add_to_sob(SOB, 1));
    let down = UserBuffer::new(fd, &down);
    let mut chunks = [user_chunk(0, up.va, 72), user_chunk(4, down.va, 32)];
    let seq = submit(fd, &mut chunks).unwrap();
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
    assert!(memory.iter().all(|b| *b == 7));
}

#[test]
fn completion_queues_count_and_interrupts_wake() {
    let fd = card_of("gaudi2");
    let (mut handle, mut va) = (0, 0);
    assert_eq!(hlthunk_request_mapped_command_buffer(fd, 64, &mut handle), 0);
    assert_eq!(hlthunk_get_mapped_cb_device_va_by_handle(fd, handle, &mut va), 0);
    let mut notes = 0;
    assert_eq!(hlthunk_allocate_timestamp_elements(fd, 4, &mut notes), 0);
    let interrupt = 50;
    assert_eq!(hlthunk_register_timestamp_interrupt(fd, interrupt, handle, 0, 2, notes, 1), 0);
    let cq = |register: u64, value: u32| {
        msg_long(CFG + 0x411_e050 + register * 0x100 + u64::from(CQ) * 4, value)
    };
    let config: Vec<u8> = [(0, va as u32), (1, (va >> 32) as u32), (2, 3), (7, interrupt), (8, 1)]
        .into_iter()
        .flat_map(|(register, value)| cq(register, value))
        .collect();
    assert_eq!(run(fd, 0, &config), (0, 0));
    let fire = || {
        let mut program = set_sob(SOB, 0);
        program.extend(monitor(MONITOR, SOB, 1, CQ.into(), 1, 1 << 4));
        program.extend(add_to_sob(SOB, 1));
        assert_eq!(run(fd, 0, &program), (0, 0));
    };
    let mut status = 99;
    let reached = |target, timeout, status: &mut u32| {
        hlthunk_wait_for_interrupt_by_handle(fd, handle, 0, target, interrupt, timeout, status)
    };
    assert_eq!(reached(1, 1000, &mut status), 0);
    assert_eq!(status, sys::WAIT_BUSY);
    fire();
    assert_eq!(reached(1, 1_000_000, &mut status), 0);
    assert_eq!(status, sys::WAIT_COMPLETED);
    let times = map_handle(fd, notes, 32);
    // SAFETY: within the mapping.
    let time = || unsafe { times.cast::<u64>().add(1).read_volatile() };
    assert_eq!(time(), 0);
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let mut status = 99;
            let rc = reached(2, i64::MAX as u64, &mut status);
            (rc, status)
        });
        fire();
        assert_eq!(waiter.join().unwrap(), (0, sys::WAIT_COMPLETED));
    });
    assert_ne!(time(), 0);
    assert_eq!(hlthunk_wait_for_interrupt_by_handle(fd, handle, 0, 1, 3, 0, &mut status), -22);
    // SAFETY: the mapping of above.
    unsafe { libc::munmap(times, 32) };
}

#[test]
fn page_faults_are_recorded_and_raise_events() {
    let fd = card_of("gaudi2");
    let notifier = hlthunk_notifier_create(fd);
    let mut memory = vec![0u8; 64];
    let host = map_host(fd, &mut memory);
    let bad = 0x1001_0020_1234_5678;
    assert_eq!(run(fd, 0, &gaudi2_copy(bad, host, 64)).0, -libc::EIO);
    let (mut events, mut count) = (0, 0);
    assert_eq!(hlthunk_notifier_recv(fd, notifier, &mut events, &mut count, 0, 1000), 0);
    assert_eq!(events, 1 << 8 | 1 << 5 | 1 << 2);
    assert_eq!(hlthunk_notifier_recv(fd, notifier, &mut events, &mut count, 0, 1), 0);
    assert_eq!(count, 0);
    let mut fault =
        PageFaultInfo { timestamp: 0, addr: 0, engine_id: 9, num_of_mappings: 0, mappings_buf: 0 };
    assert_eq!(hlthunk_get_page_fault_info(fd, (&raw mut fault).cast(), 0), 0);
    // The MMU of DRAM reports all but the low 26 bits.
    assert_eq!(fault.addr, bad & !0x3ff_ffff);
    assert_ne!(fault.timestamp, 0);
    let mut resets = [0; 2];
    assert_eq!(hlthunk_get_reset_count_info(fd, &mut resets), 0);
    assert_eq!(resets[0], 1);
    hlthunk_notifier_release(fd, notifier);
}

#[test]
fn a_signal_unblocks_another_queue() {
    let fd = card_of("gaudi2");
    // The signalling queue is blocked at a fence.
    let mut held = monitor(MONITOR, SOB, 1, FENCE_OF_QUEUE_0, 1, 0);
    held.extend(fence());
    let held = UserBuffer::new(fd, &held);
    held.submit(0).unwrap();
    let signal = SignalIn {
        chunks_restore: core::ptr::null_mut(),
        num_chunks_restore: 0,
        queue_index: 0,
        flags: 0,
    };
    let mut signalled = SignalOut::default();
    assert_eq!(
        hlthunk_signal_submission(fd, (&raw const signal).cast(), (&raw mut signalled).cast()),
        0
    );
    let data = WaitForSignalData {
        signal_seq: (&raw const signalled.seq) as u64,
        signal_seq_nr: 1,
        queue_index: 4,
        flags: 0,
        collective_engine_id: 0,
        encaps_signal_offset: 0,
    };
    let wait_in = WaitIn {
        chunks_restore: core::ptr::null_mut(),
        num_chunks_restore: 0,
        wait_for_signal: &data,
        num_wait_for_signal: 1,
        flags: 0,
    };
    let mut waiting = WaitOut::default();
    assert_eq!(
        hlthunk_wait_for_signal(fd, (&raw const wait_in).cast(), (&raw mut waiting).cast()),
        0
    );
    assert_eq!(poll(fd, waiting.seq, 1000), sys::WAIT_BUSY);
    assert_eq!(run(fd, 1, &add_to_sob(SOB, 1)), (0, 0));
    assert_eq!(wait(fd, waiting.seq), (0, sys::WAIT_COMPLETED));
    assert_eq!(wait(fd, signalled.seq), (0, sys::WAIT_COMPLETED));
    // Nothing to wait for any more.
    assert_eq!(
        hlthunk_wait_for_signal(fd, (&raw const wait_in).cast(), (&raw mut waiting).cast()),
        0
    );
    assert_eq!(waiting.seq, u64::MAX);
}

#[test]
fn endless_programs_end_with_the_timeout_and_leave_the_process_alone() {
    let fd = card_of("gaudi2");
    // A buffer that runs itself on the upper command processor.
    let mut memory = vec![0u8; 4096 + 16];
    let host = map_host(fd, &mut memory);
    let mut jump = [16u32.to_le_bytes(), 0x0500_0020u32.to_le_bytes()].concat();
    jump.extend_from_slice(&host.to_le_bytes());
    memory[..16].copy_from_slice(&jump);
    let mut chunks = [user_chunk(0, host, 16)];
    let seq = submit_by(&mut chunks, 0, |input, out| {
        hlthunk_command_submission_timeout(fd, input.cast(), out.cast(), 1)
    });
    assert_eq!(wait(fd, seq.unwrap()), (-libc::ETIMEDOUT, sys::WAIT_TIMEDOUT));
}

#[test]
fn raw_info_is_bounded_and_checked() {
    let fd = card_of("gaudi2");
    let mut bytes = [0xaau8; 320];
    let mut args = InfoArgs {
        return_pointer: bytes.as_mut_ptr() as u64,
        return_size: 40,
        ..Default::default()
    };
    assert_eq!(hlthunk_get_info(fd, (&raw mut args).cast()), 0);
    assert_eq!(u32::from_le_bytes(bytes[32..36].try_into().unwrap()), sys::PCI_ID_GAUDI2);
    assert_eq!(bytes[40], 0xaa);
    args.return_size = 320;
    assert_eq!(ioctl(fd, 0xc018_6440, (&raw mut args).cast()), 0);
    assert_eq!(bytes[304], 0xaa);
    args.pad = 1;
    assert_eq!(hlthunk_get_info(fd, (&raw mut args).cast()), -libc::EINVAL);
    args.pad = 0;
    args.op = 99;
    assert_eq!(hlthunk_get_info(fd, (&raw mut args).cast()), -libc::EINVAL);
    args.op = 2;
    args.return_pointer = 16;
    assert_eq!(hlthunk_get_info(fd, (&raw mut args).cast()), -libc::EFAULT);
}
