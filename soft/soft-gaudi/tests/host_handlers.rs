//! A program's own handlers of SIGSEGV and SIGBUS, with a card open: they see what they would see without us.
//!
//! Handlers belong to a process, so each case runs in one of its own.

mod driver;

use core::ffi::{c_int, c_void};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;
use soft_gaudi::testing::Machine;

// What `sigsetjmp` and `siglongjmp` do, as a pair of functions that Rust can call: the first reads a byte and
// returns 0, or 1 if a handler called the second, which does not return. The mask is the caller's to restore.
core::arch::global_asm!(
    ".lcomm host_handlers_stack, 8",
    ".globl host_handlers_read",
    "host_handlers_read:",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "mov [rip + host_handlers_stack], rsp",
    "mov al, [rdi]",
    "xor eax, eax",
    "jmp 2f",
    ".globl host_handlers_leave",
    "host_handlers_leave:",
    "mov rsp, [rip + host_handlers_stack]",
    "mov eax, 1",
    "2:",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    "ret",
);

unsafe extern "C" {
    fn host_handlers_read(at: *const c_void) -> u32;
    fn host_handlers_leave() -> !;
}

static CALLS: AtomicUsize = AtomicUsize::new(0);
static SEEN: AtomicUsize = AtomicUsize::new(0);
static PAGE: AtomicPtr<c_void> = AtomicPtr::new(core::ptr::null_mut());

/// A page that nobody may touch.
fn forbidden_page() -> *mut c_void {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a fresh mapping.
    let page = unsafe { libc::mmap(core::ptr::null_mut(), 4096, libc::PROT_NONE, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED);
    PAGE.store(page, Ordering::Relaxed);
    page
}

fn install(signal: c_int, handler: usize, flags: c_int) -> libc::sigaction {
    // SAFETY: plain data; handlers have the signature their flags ask for.
    unsafe {
        let mut action: libc::sigaction = core::mem::zeroed();
        let mut before: libc::sigaction = core::mem::zeroed();
        action.sa_sigaction = handler;
        action.sa_flags = flags;
        libc::sigaddset(&mut action.sa_mask, libc::SIGUSR1);
        assert_eq!(libc::sigaction(signal, &action, &mut before), 0);
        before
    }
}

/// Opens the page, so that the faulting instruction succeeds, and checks the mask.
fn repair() {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the page of above; a set of our own.
    unsafe {
        libc::mprotect(PAGE.load(Ordering::Relaxed), 4096, libc::PROT_READ);
        let mut mask: libc::sigset_t = core::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, core::ptr::null(), &mut mask);
        let blocked = [libc::SIGUSR1, libc::SIGSEGV].map(|s| libc::sigismember(&mask, s));
        if blocked != [1, 1] {
            libc::_exit(99);
        }
    }
}

extern "C" fn plain(_signal: c_int) {
    repair();
}

extern "C" fn with_info(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel's siginfo.
    SEEN.store(unsafe { (*info).si_addr() } as usize, Ordering::Relaxed);
    repair();
}

extern "C" fn leave(_signal: c_int) {
    CALLS.fetch_add(1, Ordering::Relaxed);
    // SAFETY: `host_handlers_read` waits on this thread's stack.
    unsafe { host_handlers_leave() }
}

/// Reads a forbidden byte; true if a handler left the instruction behind.
fn read(at: *const c_void) -> bool {
    // SAFETY: sets of our own; the functions of above.
    unsafe {
        let mut mask: libc::sigset_t = core::mem::zeroed();
        libc::pthread_sigmask(libc::SIG_BLOCK, core::ptr::null(), &mut mask);
        let left = host_handlers_read(at) == 1;
        libc::pthread_sigmask(libc::SIG_SETMASK, &mask, core::ptr::null_mut());
        left
    }
}

/// A copy to or from host memory that is gone: the card faults, the process does not notice.
fn device_fault(index: u32) {
    let fd = open(index);
    assert!(fd >= 0, "{fd}");
    let page = forbidden_page();
    // SAFETY: the page of above.
    unsafe { libc::mprotect(page, 4096, libc::PROT_READ | libc::PROT_WRITE) };
    let host = hlthunk_host_memory_map(fd, page, 0, 4096);
    assert_ne!(host, 0);
    // SAFETY: as above.
    unsafe { libc::mprotect(page, 4096, libc::PROT_NONE) };
    let mut memory = vec![0u8; 64];
    let target = map_host(fd, &mut memory);
    assert_eq!(run(fd, 0, &gaudi2_copy(host, target, 64)), (-libc::EIO, sys::WAIT_ABORTED));
    assert_eq!(hlthunk_close(fd), 0);
}

/// A handler that passes on to the one it replaced.
static REPLACED: AtomicPtr<libc::sigaction> = AtomicPtr::new(core::ptr::null_mut());

extern "C" fn chaining(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    if CALLS.fetch_add(1, Ordering::Relaxed) > 0 {
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(98) };
    }
    // SAFETY: what `sigaction` gave, with SA_SIGINFO.
    unsafe {
        let replaced = (*REPLACED.load(Ordering::Relaxed)).sa_sigaction;
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            core::mem::transmute(replaced);
        handler(signal, info, context);
    }
}

/// A handler without SA_SIGINFO that passes on to the one it replaced: it has no siginfo to pass.
extern "C" fn chaining_plainly(signal: c_int) {
    chain_with(signal, core::ptr::null_mut());
}

/// A handler that passes on the context alone.
extern "C" fn chaining_with_context(
    signal: c_int,
    _info: *mut libc::siginfo_t,
    context: *mut c_void,
) {
    chain_with(signal, context);
}

fn chain_with(signal: c_int, context: *mut c_void) {
    static DEPTH: AtomicUsize = AtomicUsize::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed);
    if DEPTH.fetch_add(1, Ordering::Relaxed) > 0 {
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(98) };
    }
    // SAFETY: what `sigaction` gave, with SA_SIGINFO.
    unsafe {
        let replaced = (*REPLACED.load(Ordering::Relaxed)).sa_sigaction;
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
            core::mem::transmute(replaced);
        handler(signal, core::ptr::null_mut(), context);
    }
    DEPTH.fetch_sub(1, Ordering::Relaxed);
}

/// Puts a handler that chains without a siginfo in the place of ours.
fn chain_without_info(role: &str) {
    let (handler, flags) = match role.contains("context") {
        true => (chaining_with_context as *const () as usize, libc::SA_SIGINFO),
        false => (chaining_plainly as *const () as usize, 0),
    };
    let replaced = install(libc::SIGSEGV, handler, flags);
    REPLACED.store(Box::into_raw(Box::new(replaced)), Ordering::Relaxed);
}

#[test]
fn child() {
    let Some((role, _)) = child_role() else { return };
    machine("gaudi2");
    let segv = libc::SIGSEGV;
    match role.as_str() {
        "info" | "plain" => {
            let (handler, flags) = match role.as_str() {
                "info" => (with_info as *const () as usize, libc::SA_SIGINFO),
                _ => (plain as *const () as usize, 0),
            };
            install(segv, handler, flags);
            device_fault(0);
            assert_eq!(CALLS.load(Ordering::Relaxed), 0, "the card's faults are not the program's");
            for round in 1..=3 {
                let page = forbidden_page();
                assert!(!read(page));
                assert_eq!(CALLS.load(Ordering::Relaxed), round);
                if flags != 0 {
                    assert_eq!(SEEN.load(Ordering::Relaxed), page as usize);
                }
            }
        }
        "leave" => {
            install(segv, leave as *const () as usize, 0);
            for round in 1..=3 {
                device_fault(0);
                let page = forbidden_page();
                for _ in 0..10 {
                    assert!(read(page));
                }
                assert_eq!(CALLS.load(Ordering::Relaxed), 10 * round);
            }
        }
        "bad pointers" => {
            install(segv, leave as *const () as usize, 0);
            let fd = open(0);
            let bad = forbidden_page();
            for _ in 0..3 {
                let rc = hlthunk_request_command_buffer(fd, 4096, bad.cast());
                assert_eq!(rc, -libc::EFAULT);
                let rc = hlthunk_command_submission(fd, bad.cast(), bad.cast());
                assert_eq!(rc, -libc::EFAULT);
                let rc = hlthunk_reserve_encaps_signals(fd, bad.cast(), bad.cast());
                assert_eq!(rc, -libc::EFAULT);
            }
            let mut handle = 0;
            assert_eq!(hlthunk_request_command_buffer(fd, 4096, &mut handle), 0);
            assert_eq!(CALLS.load(Ordering::Relaxed), 0);
        }
        "default" | "default sent" => {
            install(segv, libc::SIG_DFL, 0);
            device_fault(0);
            if role == "default" {
                read(forbidden_page());
            } else {
                // SAFETY: no preconditions.
                unsafe { libc::raise(segv) };
            }
        }
        "ignored" | "ignored fault" => {
            install(segv, libc::SIG_IGN, 0);
            device_fault(0);
            for _ in 0..3 {
                // SAFETY: no preconditions.
                unsafe { libc::raise(segv) };
            }
            if role == "ignored fault" {
                read(forbidden_page());
            }
        }
        "chain" | "chain once" => {
            let once = if role == "chain once" { libc::SA_RESETHAND } else { 0 };
            install(segv, plain as *const () as usize, 0);
            device_fault(0);
            // Replaces ours and passes on to it; the next open puts ours in front again.
            let replaced = install(segv, chaining as *const () as usize, libc::SA_SIGINFO | once);
            REPLACED.store(Box::into_raw(Box::new(replaced)), Ordering::Relaxed);
            device_fault(0);
            assert_eq!(CALLS.load(Ordering::Relaxed), 0);
            assert!(!read(forbidden_page()));
            assert_eq!(CALLS.load(Ordering::Relaxed), 2, "both handlers, once each");
            if once != 0 {
                read(forbidden_page());
            }
        }
        "chain without info" | "chain with context" => {
            install(segv, plain as *const () as usize, 0);
            device_fault(0);
            chain_without_info(&role);
            assert!(!read(forbidden_page()));
            assert_eq!(CALLS.load(Ordering::Relaxed), 2, "both handlers, once each");
            // The next open puts ours in front again.
            device_fault(0);
            assert_eq!(CALLS.load(Ordering::Relaxed), 2);
            assert!(!read(forbidden_page()));
            assert_eq!(CALLS.load(Ordering::Relaxed), 4, "both handlers, once each");
        }
        "chain to default" | "chain to default, ours in front" | "chain to default, sent" => {
            install(segv, libc::SIG_DFL, 0);
            device_fault(0);
            chain_without_info(&role);
            if role.ends_with("front") {
                device_fault(0);
            }
            if role.ends_with("sent") {
                // SAFETY: no preconditions.
                unsafe { libc::raise(segv) };
            } else {
                read(forbidden_page());
            }
        }
        "chain to itself" | "chain to itself, ours in front" => {
            chain_without_info(&role);
            device_fault(0);
            // Installed again, it has replaced ours, which was in front of itself.
            chain_without_info(&role);
            if role.ends_with("front") {
                device_fault(0);
            }
            read(forbidden_page());
        }
        other => panic!("no such role: {other}"),
    }
}

fn status_of(role: &str) -> ExitStatus {
    let machine = Machine::temporary("handlers");
    let mut child = driver::child(role, 0);
    // Pinned pages do not fault.
    child.env("SOFT_GAUDI_NODE", machine.name()).env("SOFT_GAUDI_LENIENT", "unpinned");
    let output = child.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    println!("{role}: {}\n{text}", output.status);
    output.status
}

#[test]
fn the_programs_handlers_are_called_for_its_own_faults() {
    let _exclusive = exclusive();
    assert!(status_of("info").success());
    assert!(status_of("plain").success());
}

#[test]
fn a_handler_that_leaves_by_a_jump_is_called_the_next_time_as_well() {
    let _exclusive = exclusive();
    assert!(status_of("leave").success());
}

#[test]
fn bad_pointers_are_errors_and_leave_no_lock_behind() {
    let _exclusive = exclusive();
    assert!(status_of("bad pointers").success());
}

#[test]
fn without_a_handler_faults_and_sent_signals_end_the_process() {
    let _exclusive = exclusive();
    assert_eq!(status_of("default").signal(), Some(libc::SIGSEGV));
    assert_eq!(status_of("default sent").signal(), Some(libc::SIGSEGV));
}

#[test]
fn ignored_signals_stay_ignored_and_faults_are_not() {
    let _exclusive = exclusive();
    assert!(status_of("ignored").success());
    assert_eq!(status_of("ignored fault").signal(), Some(libc::SIGSEGV));
}

#[test]
fn a_handler_that_passes_on_to_ours_reaches_the_one_before() {
    let _exclusive = exclusive();
    assert!(status_of("chain").success());
}

#[test]
fn a_handler_for_one_call_passes_on_to_the_one_before_and_leaves_the_default() {
    let _exclusive = exclusive();
    assert_eq!(status_of("chain once").signal(), Some(libc::SIGSEGV));
}

#[test]
fn a_handler_that_passes_on_without_a_siginfo_reaches_the_oldest() {
    let _exclusive = exclusive();
    assert!(status_of("chain without info").success());
    assert!(status_of("chain with context").success());
}

#[test]
fn a_handler_that_passes_on_without_a_siginfo_to_nobody_ends_the_process() {
    let _exclusive = exclusive();
    for role in [
        "chain to default",
        "chain to default, ours in front",
        "chain to default, sent",
        "chain to itself",
        "chain to itself, ours in front",
    ] {
        assert_eq!(status_of(role).signal(), Some(libc::SIGSEGV), "{role}");
    }
}
