//! Explains the fault when the CPU accesses a device address: one line says what happened and what to do.
//!
//! Libraries that take a Gaudi buffer for host memory (reductions of Open MPI, datatypes, UCP's atomic
//! operations) access it with the CPU and die of SIGSEGV. The plugin may appear in the stack, and the
//! address mostly says nothing: those of a Gaudi2 or Gaudi3 are not canonical on x86, and the kernel reports 0.
//!
//! **Why a handler in a plugin is acceptable.** It is installed when the first card is opened, so
//! programs without a Gaudi are not affected. It writes its line and restores the previous handler
//! *before* it returns. So the instruction faults again, and the program's own handler, UCX's or the
//! kernel's default gets the fault as if ours had never existed: no frame of ours, the same registers.
//! After any fault ours is gone. A runtime that uses faults (a JVM) pays one extra fault in its life. A
//! signal that another process sent is sent again. The handler is async-signal-safe: no lock, no
//! allocation, no dynamic linker. `UCX_GAUDI_COPY_EXPLAIN_FAULTS=n` leaves SIGSEGV alone.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::Once;

use gaudi::WindowEvent;
use uct::{Ucx, log};

/// What the user reads. Fixed text, because a signal handler must not format. UCX's backtrace, if it is
/// on, names the code.
const EXPLANATION: &[u8] =
    b"ucx-gaudi: SIGSEGV: it seems that the CPU accessed Gaudi memory, which only the card can. \
Some library took the buffer for host memory. Open MPI 5 and later can be told (`ucx-gaudi run -- mpirun`); Open MPI 4 \
only sends and receives it, with `--mca pml ucx`. \
See \"CPU access\" in share/doc/ucx-gaudi/docs/errors.md.\n";

/// Address windows that cards of this process have or had, start and end; 0: free. A closed card's
/// window stays, because a stale pointer into it faults just the same.
static WINDOWS: [(AtomicU64, AtomicU64); 64] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64];

/// The handler that was installed before ours, in memory that is never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
/// `si_code` of a fault that the processor reports no address for. libc has no name for it here.
const SI_KERNEL: c_int = 0x80;
/// Whether a fault at an address of ours is still to be explained. The first one that is explained clears it.
static ARMED: AtomicBool = AtomicBool::new(false);

type SigactionFn =
    unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
/// The address of libc's own `sigaction`.
static SIGACTION: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());

/// From the first card on, explains a fault at an address of ours.
pub(crate) fn begin(ucx: &'static Ucx) {
    static BEGUN: Once = Once::new();
    BEGUN.call_once(|| {
        gaudi::runtime().subscribe(Box::new(move |event| {
            if let WindowEvent::Opened(memory) | WindowEvent::Mapped(memory) = event {
                remember(memory.start.0, memory.len);
                install(ucx);
            }
        }));
    });
}

fn remember(start: u64, len: u64) {
    let end = start.saturating_add(len);
    let known = |slot: &(AtomicU64, AtomicU64)| {
        slot.0.load(Ordering::Relaxed) == start && slot.1.load(Ordering::Relaxed) == end
    };
    if WINDOWS.iter().any(known) {
        return;
    }
    // All taken: not explained. The end is stored first: `is_ours` loads the start (acquire) and then finds its end.
    for (first, last) in &WINDOWS {
        if last.compare_exchange(0, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            first.store(start, Ordering::Release);
            return;
        }
    }
}

/// Whether an address is one of ours. Called in the handler.
fn is_ours(address: u64) -> bool {
    WINDOWS.iter().any(|(first, last)| {
        let first = first.load(Ordering::Acquire);
        first != 0 && (first..last.load(Ordering::Relaxed)).contains(&address)
    })
}

/// libc's `sigaction`, looked up in libc: libucs has a function of that name that does nothing for SIGSEGV.
fn libc_sigaction() -> Option<SigactionFn> {
    // SAFETY: libc is loaded, since we use it: this only finds it. Its handle is never closed.
    let symbol = unsafe {
        let libc = libc::dlopen(c"libc.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if libc.is_null() { ptr::null_mut() } else { libc::dlsym(libc, c"sigaction".as_ptr()) }
    };
    SIGACTION.store(symbol, Ordering::Relaxed);
    // SAFETY: libc's function has this type.
    (!symbol.is_null()).then(|| unsafe { core::mem::transmute::<*mut c_void, SigactionFn>(symbol) })
}

/// Replaces the current handler by ours. Once per process: code that replaces ours later does so on purpose.
fn install(ucx: &'static Ucx) {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let Some(sigaction) = libc_sigaction() else { return };
        let mut before = MaybeUninit::<libc::sigaction>::uninit();
        // SAFETY: asks what is installed; the structure is filled on success.
        let before = unsafe {
            if sigaction(libc::SIGSEGV, ptr::null(), before.as_mut_ptr()) != 0 {
                return;
            }
            before.assume_init()
        };
        if before.sa_sigaction == libc::SIG_IGN {
            return;
        }
        BEFORE.store(Box::into_raw(Box::new(before)), Ordering::Release);
        ARMED.store(true, Ordering::Release);
        // SAFETY: a structure of numbers, all of them set that matter.
        let mut ours = unsafe { core::mem::zeroed::<libc::sigaction>() };
        ours.sa_sigaction = handler as *const () as usize;
        // On the alternate stack, if there is one: the fault may be a stack overflow.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe, and this library is never unloaded.
        let installed = unsafe { sigaction(libc::SIGSEGV, &ours, ptr::null_mut()) } == 0;
        log!(ucx, Debug, "faults at Gaudi addresses are explained: {installed}");
    });
}

unsafe extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: glibc's errno of this thread, which the interrupted code must find unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the kernel passes both.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as u64) };
    let sent = code <= 0;
    let accessed = match code {
        // SAFETY: as above.
        SI_KERNEL => unsafe { a_register_is_ours(context.cast()) },
        _ => is_ours(address),
    };
    if !sent && accessed && ARMED.swap(false, Ordering::AcqRel) {
        // SAFETY: a system call on constant bytes. If standard error is closed, the line is lost.
        unsafe { libc::write(libc::STDERR_FILENO, EXPLANATION.as_ptr().cast(), EXPLANATION.len()) };
    }
    // SAFETY: what the kernel passed.
    if unsafe { pass_on(signal, info, context) } {
        // Another handler called this one, and ran the one before it.
    } else if sent {
        // SAFETY: sends the very signal again, to this thread; it is delivered when this handler returns.
        unsafe {
            let [pid, thread] = [libc::getpid(), libc::gettid()];
            libc::syscall(libc::SYS_rt_tgsigqueueinfo, pid, thread, signal, info);
        }
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Restores the previous handler, which gets the fault when the instruction faults again. But if a handler
/// that was installed later called ours, it stays; then this calls the previous handler and returns `true`.
///
/// # Safety
/// With what the kernel passed to a handler of this signal that is still running.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) -> bool {
    let (before, function) = (BEFORE.load(Ordering::Acquire), SIGACTION.load(Ordering::Relaxed));
    // SAFETY: stored before the handler was installed, never freed; libc's function has this type. A handler
    // that was installed takes what its flags say.
    unsafe {
        let sigaction = core::mem::transmute::<*mut c_void, SigactionFn>(function);
        let mut now = MaybeUninit::<libc::sigaction>::uninit();
        let is_last = sigaction(signal, ptr::null(), now.as_mut_ptr()) != 0
            || now.assume_init_ref().sa_sigaction == handler as *const () as usize;
        let called = (*before).sa_sigaction;
        if is_last || called == libc::SIG_DFL {
            sigaction(signal, before, ptr::null_mut());
            return false;
        }
        if (*before).sa_flags & libc::SA_SIGINFO != 0 {
            type Handler = unsafe extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void);
            core::mem::transmute::<usize, Handler>(called)(signal, info, context);
        } else {
            core::mem::transmute::<usize, unsafe extern "C" fn(c_int)>(called)(signal);
        }
        true
    }
}

/// Whether a general register holds an address of ours. An x86 does not report a non-canonical address,
/// but the address was computed from a register.
///
/// # Safety
/// With what the kernel passed to a signal handler that is still running.
#[cfg(target_arch = "x86_64")]
unsafe fn a_register_is_ours(context: *const libc::ucontext_t) -> bool {
    // SAFETY: the caller's promise; indices are libc's.
    let register = |index: c_int| unsafe { (*context).uc_mcontext.gregs[index as usize] };
    (libc::REG_R8..=libc::REG_RCX).any(|index| is_ours(register(index).cast_unsigned()))
}

/// Other processors report the address.
#[cfg(not(target_arch = "x86_64"))]
unsafe fn a_register_is_ours(_: *const libc::ucontext_t) -> bool {
    false
}
