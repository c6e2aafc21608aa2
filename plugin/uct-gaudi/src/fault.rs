//! A device address accessed by the CPU: one line says what happened and what to do.
//!
//! Libraries that take a Gaudi buffer for host memory (reductions of Open MPI, datatypes, UCP's atomic
//! operations) touch it with the CPU and die of SIGSEGV, with a stack in which the plugin may appear and an
//! address that says nothing: Gaudi addresses are no addresses to an x86, and the kernel reports 0.
//!
//! **Why a handler in a plugin is bearable.** It is installed when the first card is opened, so programs
//! without a Gaudi keep what they have. It writes its line and puts the handler of before back *before* it
//! returns, so the instruction faults again and the program's own handler, UCX's or the kernel's default gets
//! the fault as if ours had never been: no frame of ours, the same registers. After any fault it is gone. A
//! runtime that lives with faults (a JVM) pays one extra fault in its life. A signal that another process sent
//! is sent again. What runs in the handler is async-signal-safe: no lock, no allocation, no dynamic linker.
//! `UCX_GAUDI_COPY_EXPLAIN_FAULTS=n` leaves SIGSEGV alone.

use core::ffi::{c_int, c_void};
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::Once;

use gaudi::WindowEvent;
use uct::{Ucx, log};

/// What the user reads. Fixed, so that nothing has to be composed in a signal handler; UCX's backtrace, where it is on,
/// names the code.
const EXPLANATION: &[u8] =
    b"ucx-gaudi: SIGSEGV: it seems that the CPU accessed Gaudi memory, which only the card can. \
Some library took the buffer for host memory. Open MPI 5 and later can be told (`ucx-gaudi run -- mpirun`); Open MPI 4 \
only sends and receives it, with `--mca pml ucx`. \
See \"CPU access\" in share/doc/ucx-gaudi/docs/errors.md.\n";

/// Address windows that cards of this process had, first and last address; 0: none. One that was closed stays:
/// a stale pointer is no better.
static WINDOWS: [(AtomicU64, AtomicU64); 64] =
    [const { (AtomicU64::new(0), AtomicU64::new(0)) }; 64];

/// What was installed before us, in memory that is never freed.
static BEFORE: AtomicPtr<libc::sigaction> = AtomicPtr::new(ptr::null_mut());
/// `si_code` of a fault that the processor reports no address for. libc has no name for it here.
const SI_KERNEL: c_int = 0x80;
/// Whether a fault is to be explained, and none was yet.
static ARMED: AtomicBool = AtomicBool::new(false);

type SigactionFn =
    unsafe extern "C" fn(c_int, *const libc::sigaction, *mut libc::sigaction) -> c_int;
/// libc's own, as a number.
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
    // Full: those beyond are not explained. The end is stored first: a slot with a start is complete.
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

/// libc's `sigaction`. Not by the usual name: libucs has one of that name that does nothing for SIGSEGV.
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

/// Puts the handler in front of whatever there is. Once per process: who replaces it later wants that.
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
        // On the alternate stack, where there is one: the fault may be a stack that ran out.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe, and this library is never unloaded.
        let installed = unsafe { sigaction(libc::SIGSEGV, &ours, ptr::null_mut()) } == 0;
        log!(ucx, Debug, "faults at Gaudi addresses are explained: {installed}");
    });
}

unsafe extern "C" fn handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: glibc's errno of this thread; what was interrupted must find its own again.
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

/// Passes the next fault, which comes at once, to where it would have gone without us. If a handler that was
/// installed later called this one, it stays, and the one from before us is called: `true`.
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

/// Whether a general register holds an address of ours: an x86 does not report a non-canonical address, but one of
/// these made it.
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
