//! Copies that survive a bad address.
//!
//! A card that reaches for host memory which the program has unmapped raises a device fault; a
//! process copying its own memory would die of SIGSEGV (or SIGBUS, when tmpfs is full). So every
//! access of the software device to memory runs in a few instructions of assembly whose addresses
//! are known, and a signal handler that finds the program counter there moves it to a landing pad
//! that returns "fault" – the way a kernel's exception table does. All other faults are none of
//! our business and go to the handler that was installed before.
//!
//! The handler is installed when a device is opened, never by loading the library.

use core::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// The address could not be read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadAddress;

#[cfg(not(target_arch = "x86_64"))]
compile_error!(
    "soft-gaudi's guarded copies are written for x86-64, the architecture of Gaudi hosts"
);

// rdi = destination, rsi = source (or pattern), rdx = bytes. No stack is used, so the landing pad
// may return straight to the caller. Four and eight bytes are single stores: flags and doorbells
// written by DMA are seen whole.
core::arch::global_asm!(
    ".p2align 6",
    ".hidden soft_gaudi_guarded_begin",
    ".globl soft_gaudi_guarded_begin",
    "soft_gaudi_guarded_begin:",
    ".hidden soft_gaudi_guarded_copy",
    ".globl soft_gaudi_guarded_copy",
    "soft_gaudi_guarded_copy:",
    "cmp rdx, 8",
    "je 2f",
    "cmp rdx, 4",
    "je 3f",
    "mov rcx, rdx",
    "rep movsb",
    "xor eax, eax",
    "ret",
    "2:",
    "mov rax, [rsi]",
    "mov [rdi], rax",
    "xor eax, eax",
    "ret",
    "3:",
    "mov eax, [rsi]",
    "mov [rdi], eax",
    "xor eax, eax",
    "ret",
    ".hidden soft_gaudi_guarded_fill",
    ".globl soft_gaudi_guarded_fill",
    "soft_gaudi_guarded_fill:",
    "mov rax, rsi",
    "mov rcx, rdx",
    "shr rcx, 3",
    "rep stosq",
    "mov rcx, rdx",
    "and ecx, 7",
    "jz 5f",
    "4:",
    "mov [rdi], al",
    "shr rax, 8",
    "inc rdi",
    "dec ecx",
    "jnz 4b",
    "5:",
    "xor eax, eax",
    "ret",
    ".hidden soft_gaudi_guarded_end",
    ".globl soft_gaudi_guarded_end",
    "soft_gaudi_guarded_end:",
    ".hidden soft_gaudi_guarded_fault",
    ".globl soft_gaudi_guarded_fault",
    "soft_gaudi_guarded_fault:",
    "mov eax, 1",
    "ret",
);

unsafe extern "C" {
    fn soft_gaudi_guarded_copy(dst: *mut u8, src: *const u8, len: usize) -> usize;
    fn soft_gaudi_guarded_fill(dst: *mut u8, pattern: u64, len: usize) -> usize;
    static soft_gaudi_guarded_begin: u8;
    static soft_gaudi_guarded_end: u8;
    static soft_gaudi_guarded_fault: u8;
}

/// Copies `len` bytes forward; part of them may have arrived when it fails.
///
/// # Safety
/// Both ranges must be memory that the program or the device's owner gave for this purpose (it
/// may be unmapped or unwritable, it must not be memory that Rust code holds references to), and
/// [`install`] must have been called.
pub(crate) unsafe fn copy(dst: *mut u8, src: *const u8, len: usize) -> Result<(), BadAddress> {
    // SAFETY: faults inside the routine come back as a return value; the rest is the caller's.
    match unsafe { soft_gaudi_guarded_copy(dst, src, len) } {
        0 => Ok(()),
        _ => Err(BadAddress),
    }
}

/// Fills `len` bytes with a repeated 8-byte pattern.
///
/// # Safety
/// As for [`copy`].
pub(crate) unsafe fn fill(dst: *mut u8, pattern: u64, len: usize) -> Result<(), BadAddress> {
    // SAFETY: faults inside the routine come back as a return value; the rest is the caller's.
    match unsafe { soft_gaudi_guarded_fill(dst, pattern, len) } {
        0 => Ok(()),
        _ => Err(BadAddress),
    }
}

const SIGNALS: [libc::c_int; 2] = [libc::SIGSEGV, libc::SIGBUS];

/// What was installed before us, per signal; leaked, since a handler may be reading it.
static PREVIOUS: [AtomicPtr<libc::sigaction>; 2] =
    [const { AtomicPtr::new(core::ptr::null_mut()) }; 2];

/// Thread that is passing a fault on; seeing it again means that two handlers chain to each other.
static PASSING: AtomicI32 = AtomicI32::new(0);

/// Puts the handler in place, also again when someone else's has taken it since.
pub(crate) fn install() {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    for (signal, previous) in SIGNALS.into_iter().zip(&PREVIOUS) {
        // SAFETY: `sigaction` is plain data and zero a valid value.
        let mut now: libc::sigaction = unsafe { core::mem::zeroed() };
        // SAFETY: reads the current action into valid memory.
        unsafe { libc::sigaction(signal, core::ptr::null(), &mut now) };
        if now.sa_sigaction == on_fault as *const () as usize {
            continue;
        }
        // SAFETY: as above.
        let mut ours: libc::sigaction = unsafe { core::mem::zeroed() };
        ours.sa_sigaction = on_fault as *const () as usize;
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK | libc::SA_NODEFER;
        previous.store(Box::into_raw(Box::new(now)), Ordering::Release);
        // SAFETY: `on_fault` has the signature SA_SIGINFO asks for and only does what a signal
        // handler may do.
        unsafe { libc::sigaction(signal, &ours, core::ptr::null_mut()) };
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid ucontext to an SA_SIGINFO handler.
    let registers = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let rip = registers[libc::REG_RIP as usize] as usize;
    let begin = &raw const soft_gaudi_guarded_begin as usize;
    let end = &raw const soft_gaudi_guarded_end as usize;
    if (begin..end).contains(&rip) {
        registers[libc::REG_RIP as usize] =
            &raw const soft_gaudi_guarded_fault as usize as libc::greg_t;
        return;
    }
    pass_on(signal, info, context);
}

fn pass_on(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let slot = SIGNALS.iter().position(|s| *s == signal).unwrap_or(0);
    // SAFETY: the pointer is null or a leaked `sigaction`.
    let previous = unsafe { PREVIOUS[slot].load(Ordering::Acquire).as_ref() };
    // SAFETY: gettid has no preconditions.
    let me = unsafe { libc::gettid() };
    let handler = previous.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN || PASSING.load(Ordering::Relaxed) == me
    {
        // Back at the faulting instruction the default action ends the process as it would have.
        // SAFETY: sets a default action.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        return;
    }
    PASSING.store(me, Ordering::Relaxed);
    if previous.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: an action with SA_SIGINFO holds a function of this type.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut c_void) =
            unsafe { core::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: an action without SA_SIGINFO holds a function of this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { core::mem::transmute(handler) };
        handler(signal);
    }
    PASSING.store(0, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_fills_every_small_length() {
        for len in 0..70usize {
            let src: Vec<u8> = (0..len as u8).map(|b| b.wrapping_mul(7)).collect();
            let mut dst = vec![0xee; len + 2];
            // SAFETY: both vectors are valid for `len` bytes.
            unsafe { copy(dst.as_mut_ptr().add(1), src.as_ptr(), len) }.unwrap();
            assert_eq!(&dst[1..=len], &src[..]);
            assert_eq!((dst[0], dst[len + 1]), (0xee, 0xee));
            // SAFETY: the vector is valid for `len` bytes from 1.
            unsafe { fill(dst.as_mut_ptr().add(1), 0x0807_0605_0403_0201, len) }.unwrap();
            assert!(dst[1..=len].iter().enumerate().all(|(i, b)| *b == (i % 8) as u8 + 1));
            assert_eq!((dst[0], dst[len + 1]), (0xee, 0xee));
        }
    }

    #[test]
    fn bad_addresses_fail_instead_of_killing() {
        install();
        let mut here = [0u8; 64];
        for len in [1usize, 4, 8, 64] {
            // SAFETY: that the addresses are not mapped is what is tested.
            unsafe {
                assert_eq!(copy(here.as_mut_ptr(), 0x10 as *const u8, len), Err(BadAddress));
                assert_eq!(copy(0x10 as *mut u8, here.as_ptr(), len), Err(BadAddress));
                assert_eq!(fill(0x10 as *mut u8, 0, len), Err(BadAddress));
            }
        }
    }
}
