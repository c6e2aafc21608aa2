//! Copies that survive a bad address.
//!
//! When a card accesses host memory that the program has unmapped, it raises a device fault. A process that copies its
//! own memory would die of SIGSEGV (or of SIGBUS, when tmpfs is full). So every memory access of the software device
//! runs in a few instructions of assembly whose addresses are known. If the signal handler finds the program counter
//! there, it moves it to a landing pad that returns "fault", like a kernel's exception table. All other faults go to
//! the handler that was installed before ours.
//!
//! The handler is installed when a device is opened, never by loading the library.

use core::ffi::c_void;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

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

/// A handler that was in place when ours was installed.
struct Previous {
    action: libc::sigaction,
    /// It was installed for one call only (SA_RESETHAND) and was called: now the default action applies.
    spent: AtomicBool,
    /// The handler before it, from an earlier installation of ours.
    older: *const Previous,
}

/// The handlers before ours, latest first, per signal; leaked, since a handler may be reading them.
static PREVIOUS: [AtomicPtr<Previous>; 2] = [const { AtomicPtr::new(core::ptr::null_mut()) }; 2];

/// Installs the handler; installs it again if the program has replaced it since.
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
        // The program's handler runs on the stack that it asked for. NODEFER: `next` decides which signals are blocked
        // while that handler runs.
        let inherited = match now.sa_sigaction {
            libc::SIG_DFL | libc::SIG_IGN => libc::SA_ONSTACK | libc::SA_RESTART,
            _ => now.sa_flags & (libc::SA_ONSTACK | libc::SA_RESTART),
        };
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER | inherited;
        let older = previous.load(Ordering::Acquire);
        // SAFETY: null, or leaked below.
        let known = unsafe { older.as_ref() }.is_some_and(|older| {
            let same = older.action.sa_sigaction == now.sa_sigaction;
            same && !older.spent.load(Ordering::Relaxed)
        });
        if !known {
            let latest = Box::new(Previous { action: now, spent: AtomicBool::new(false), older });
            previous.store(Box::into_raw(latest), Ordering::Release);
        }
        // SAFETY: `on_fault` has the signature SA_SIGINFO asks for and only does what a signal
        // handler may do.
        unsafe { libc::sigaction(signal, &ours, core::ptr::null_mut()) };
    }
}

/// Our handler. It jumps to the program's handler, so that backtraces show that one first, as without us.
#[unsafe(naked)]
extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // The return address and three registers leave the stack aligned for a call.
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "call {handler}",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 2f",
        "jmp rax",
        "2:",
        "ret",
        handler = sym handler,
    )
}

/// The handler to run now, or 0.
extern "C" fn handler(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut c_void,
) -> libc::sighandler_t {
    // SAFETY: the kernel passes a valid ucontext to an SA_SIGINFO handler. A program's handler without SA_SIGINFO that
    // chains to ours has no ucontext and passes null.
    let Some(context_of_fault) = (unsafe { context.cast::<libc::ucontext_t>().as_mut() }) else {
        return next(signal, info);
    };
    let registers = &mut context_of_fault.uc_mcontext.gregs;
    let rip = registers[libc::REG_RIP as usize] as usize;
    let begin = &raw const soft_gaudi_guarded_begin as usize;
    let end = &raw const soft_gaudi_guarded_end as usize;
    if (begin..end).contains(&rip) {
        registers[libc::REG_RIP as usize] =
            &raw const soft_gaudi_guarded_fault as usize as libc::greg_t;
        return 0;
    }
    next(signal, info)
}

/// Counts how often one delivery of a signal has reached [`next`].
///
/// More than once means that a program's handler chains to ours, which was installed before it. Then the next older
/// handler is called. The count is kept in the last bytes of the siginfo, which the kernel clears for each delivery. So
/// a handler that leaves by `siglongjmp` leaves no stale count for the next fault.
///
/// # Safety
/// `info` is a siginfo of the kernel's.
unsafe fn chain_depth(info: *mut libc::siginfo_t) -> usize {
    const MARK: u64 = 0x736f_6674_4761_0000;
    const LAST: usize = size_of::<libc::siginfo_t>() / 8 - 1;
    // SAFETY: the siginfo lies in the signal's frame on this thread's stack, aligned to eight bytes, and the
    // kernel uses its first 48 bytes only.
    let word = unsafe { &mut *info.cast::<u64>().add(LAST) };
    let depth = if *word & !0xffff == MARK { (*word & 0xffff) as usize + 1 } else { 0 };
    *word = MARK | depth.min(0xffff) as u64;
    depth
}

/// The handler to call at this depth of the chain.
///
/// # Safety
/// As for [`chain_depth`].
unsafe fn at_this_depth(
    latest: Option<&'static Previous>,
    info: *mut libc::siginfo_t,
) -> Option<&'static Previous> {
    let mut previous = latest;
    // SAFETY: the caller's promise.
    for _ in 0..unsafe { chain_depth(info) } {
        // SAFETY: null, or leaked in `install`.
        previous = previous.and_then(|previous| unsafe { previous.older.as_ref() });
    }
    previous
}

/// The handler to call when a program's handler chains to ours without a siginfo.
///
/// Then there is nowhere to count the depth. The oldest handler was installed before ours, so it does not chain to
/// ours, unless the program installed it again later. In that case it is the one that called us, and only the default
/// action is left. Any other choice could recurse without end.
fn oldest_but_the_caller(
    signal: libc::c_int,
    latest: Option<&'static Previous>,
) -> Option<&'static Previous> {
    let mut oldest = latest?;
    // SAFETY: null, or leaked in `install`.
    while let Some(older) = unsafe { oldest.older.as_ref() } {
        oldest = older;
    }
    // SAFETY: `sigaction` is plain data and zero a valid value.
    let mut now: libc::sigaction = unsafe { core::mem::zeroed() };
    // SAFETY: reads the current action into valid memory.
    unsafe { libc::sigaction(signal, core::ptr::null(), &mut now) };
    // The kernel called the current handler. If that is ours, ours called the latest one.
    let caller = match now.sa_sigaction == on_fault as *const () as usize {
        true => latest?.action.sa_sigaction,
        false => now.sa_sigaction,
    };
    (oldest.action.sa_sigaction != caller).then_some(oldest)
}

/// The handler that would have run without ours; blocks the signals that it asked for. 0: the default action is prepared.
fn next(signal: libc::c_int, info: *mut libc::siginfo_t) -> libc::sighandler_t {
    // SAFETY: valid, or null when a program's handler calls us without one.
    let code = unsafe { info.as_ref() }.map(|info| info.si_code);
    let slot = usize::from(signal == SIGNALS[1]);
    // SAFETY: null, or leaked in `install`.
    let latest = unsafe { PREVIOUS[slot].load(Ordering::Acquire).as_ref() };
    let previous = match code {
        // SAFETY: a siginfo that is not null is the kernel's.
        Some(_) => unsafe { at_this_depth(latest, info) },
        None => oldest_but_the_caller(signal, latest),
    };
    // Without a siginfo, the signal may have been sent by a process. Then it is not raised again unless we raise it.
    let may_be_sent = code.is_none_or(|code| code <= 0);
    let Some(Previous { action, spent, .. }) = previous else {
        return default_action(signal, may_be_sent);
    };
    let once = action.sa_flags & libc::SA_RESETHAND != 0;
    if once && spent.swap(true, Ordering::Relaxed) {
        return default_action(signal, may_be_sent);
    }
    match action.sa_sigaction {
        // A sent signal can be ignored, a fault cannot.
        libc::SIG_IGN if code.is_some_and(|code| code <= 0) => return 0,
        libc::SIG_DFL | libc::SIG_IGN => return default_action(signal, may_be_sent),
        _ => {}
    }
    // SAFETY: a copy of plain data; the calls get valid sets. When our handler returns the kernel restores
    // the mask from the signal's frame.
    unsafe {
        let mut blocked = action.sa_mask;
        if action.sa_flags & libc::SA_NODEFER == 0 {
            libc::sigaddset(&mut blocked, signal);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &blocked, core::ptr::null_mut());
    }
    // A handler without SA_SIGINFO ignores the other two arguments.
    action.sa_sigaction
}

/// Ends the process as the kernel would have.
fn default_action(signal: libc::c_int, may_be_sent: bool) -> libc::sighandler_t {
    // SAFETY: sets a default action.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
    if may_be_sent {
        // SAFETY: no preconditions.
        unsafe { libc::raise(signal) };
    }
    // Otherwise the faulting instruction is executed again.
    0
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
