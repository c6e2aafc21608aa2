//! What a program can do wrong, on a real driver: `misuse page-fault` has a queue fetch packets where nothing is
//! mapped, `misuse opcode` gives it bytes that are no packet, `misuse register` makes it write a register that is not
//! for users, `misuse hang` makes it wait for ever. The driver resets the card and ends this process.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

use kernel_thunk::commands::{CsIn, CsOut, hlthunk_command_submission_timeout};
use kernel_thunk::memory::hlthunk_host_memory_map;
use kernel_thunk::nodes::hlthunk_open;
use kernel_thunk::waits::hlthunk_wait_for_cs;

const ANY: i32 = 4;
/// In the range of host memory, where nothing of a new process is mapped.
const UNMAPPED: u64 = 0xfff0_0012_3456_7000;
/// Fence 0, target 1: never raised.
const FENCE: [u32; 4] = [0x0001_0001, 0x8800_0000, 0, 0x0a00_0000];
const NO_PACKET: [u32; 4] = [0, 0x1f00_0000, 0, 0x0a00_0000];
/// A message to a register of the card's controller.
const MESSAGE: [u32; 4] = [553, 0x8300_0000, 0xfcc4_b128, 0x1000_007f];

/// `struct hl_cs_chunk`.
#[repr(C)]
struct Chunk {
    address: u64,
    queue: u32,
    size: u32,
    flags: u32,
    rest: [u32; 11],
}

#[repr(align(4096))]
struct Page([u32; 1024]);

fn main() {
    let what = std::env::args().nth(1).unwrap_or_default();
    // SAFETY: no address given.
    let fd = unsafe { hlthunk_open(ANY, null()) };
    assert!(fd >= 0, "open: {fd}");
    let mut page = Box::new(Page([0; 1024]));
    let packets = match what.as_str() {
        "page-fault" => None,
        "opcode" => Some(NO_PACKET),
        "register" => Some(MESSAGE),
        "hang" => Some(FENCE),
        _ => panic!("page-fault, opcode, register or hang?"),
    };
    let address = match packets {
        None => UNMAPPED,
        Some(packets) => {
            page.0[..4].copy_from_slice(&packets);
            // SAFETY: the page lives until the process ends, and the card only reads it.
            unsafe { hlthunk_host_memory_map(fd, (&raw mut *page).cast(), 0, 4096) }
        }
    };
    assert!(address != 0, "map: {}", std::io::Error::last_os_error());
    const USER_BUFFER: u32 = 1;
    let mut chunk = Chunk { address, queue: 0, size: 16, flags: USER_BUFFER, rest: [0; 11] };
    let mut input = CsIn {
        chunks_restore: null_mut(),
        chunks_execute: (&raw mut chunk).cast::<c_void>(),
        num_chunks_restore: 0,
        num_chunks_execute: 1,
        flags: 0,
    };
    let mut output = CsOut::default();
    // SAFETY: the chunk lives across the call; a limit of two seconds.
    let submitted = unsafe { hlthunk_command_submission_timeout(fd, &mut input, &mut output, 2) };
    assert_eq!(submitted, 0, "submission");
    let mut status = u32::MAX;
    // SAFETY: a place for the status.
    let waited = unsafe { hlthunk_wait_for_cs(fd, output.seq, 20_000_000, &mut status) };
    println!("waiting gave {waited}, status {status}");
    // Until the driver ends this process.
    std::thread::sleep(std::time::Duration::from_secs(60));
    println!("still there");
}
