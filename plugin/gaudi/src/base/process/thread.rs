//! Threads of the engine's own, which must not disturb the program they are in.

use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Enough for what runs here, also in the driver library. Small, because a program that locks all its
/// memory (`mlockall`) pays for the whole stack.
const STACK: usize = 512 << 10;

/// Pause after a panic: repeated panics must not keep a core busy or fill the log.
const AFTER_PANIC: Duration = Duration::from_secs(1);

/// Signals of a thread's own faults. If they were blocked, a fault would end the process past every handler.
const FAULTS: [libc::c_int; 6] =
    [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP, libc::SIGSYS];

/// Starts a thread that takes none of the program's signals. After a panic, `run` is called again: peers and sleepers
/// depend on these threads, and nothing else would notice that one has ended.
pub(crate) fn spawn(name: &str, run: impl Fn() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // A thread inherits the signal mask of the thread that starts it.
    let _blocked = BlockedSignals::new();
    let label = name.to_owned();
    let run = move || {
        while let Err(panic) = catch_unwind(AssertUnwindSafe(&run)) {
            // Its destructor may panic, too.
            std::mem::forget(panic);
            // Rust has already written the panic there. Not `eprintln`, which panics if the write fails.
            let _ = writeln!(
                io::stderr(),
                "ucx-gaudi: internal error in thread {label} (please report): it goes on in a second"
            );
            std::thread::sleep(AFTER_PANIC);
        }
    };
    Builder::new().name(name.to_owned()).stack_size(STACK).spawn(run)
}

/// A thread that is started when it is first needed, and runs for ever.
#[derive(Debug, Default)]
pub(crate) struct OnDemand(Mutex<bool>);

impl OnDemand {
    /// Starts the thread if it is not running. After an error, the next call tries again.
    pub(crate) fn ensure(&self, name: &str, run: impl Fn() + Send + 'static) -> io::Result<()> {
        let mut runs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !*runs {
            spawn(name, run)?;
            *runs = true;
        }
        Ok(())
    }
}

/// All signals but faults blocked on this thread, until dropped.
struct BlockedSignals {
    before: libc::sigset_t,
}

impl BlockedSignals {
    fn new() -> Self {
        // SAFETY: sigsets are plain data, for which all zeroes is a value, and live across the calls.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            let mut before: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            for fault in FAULTS {
                libc::sigdelset(&raw mut all, fault);
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Self { before }
        }
    }
}

impl Drop for BlockedSignals {
    fn drop(&mut self) {
        let before = &raw const self.before;
        // SAFETY: the mask that was in place.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Instant;

    use super::*;

    fn is_blocked(signal: libc::c_int) -> bool {
        // SAFETY: as above; a null set changes nothing.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, std::ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    /// In a process of its own, whose standard error can be read.
    #[test]
    fn what_panics_is_run_again_after_a_second_with_a_line() {
        const IS_CHILD: &str = "GAUDI_TEST_PANICS";
        if std::env::var_os(IS_CHILD).is_none() {
            let (_, module) = module_path!().split_once("::").unwrap();
            let name = format!("{module}::what_panics_is_run_again_after_a_second_with_a_line");
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let end = child.args(["--exact", &name]).env(IS_CHILD, "1").output().unwrap();
            let said = [&end.stdout, &end.stderr].map(|it| String::from_utf8_lossy(it));
            assert!(end.status.success() && said[0].contains("1 passed"), "{said:?}");
            assert_eq!(said[1].matches("internal error in thread gaudi-test").count(), 1);
            return;
        }
        let (send, receive) = std::sync::mpsc::channel();
        let calls = AtomicU32::new(0);
        let thread = OnDemand::default().ensure("gaudi-test", move || {
            let call = calls.fetch_add(1, Ordering::Relaxed);
            send.send((call, Instant::now())).unwrap();
            assert!(call > 0, "the first call panics");
        });
        thread.unwrap();
        let [(0, first), (1, second)] = receive.iter().collect::<Vec<_>>()[..] else {
            panic!("two calls");
        };
        assert!(second - first >= AFTER_PANIC);
    }

    #[test]
    fn the_thread_has_signals_blocked_but_faults_and_its_starter_keeps_its_mask() {
        let before = [libc::SIGINT, libc::SIGALRM, libc::SIGSEGV].map(is_blocked);
        let (send, receive) = std::sync::mpsc::channel();
        let thread = spawn("gaudi-test", move || {
            let program = [libc::SIGINT, libc::SIGALRM, libc::SIGUSR1, libc::SIGCHLD];
            send.send((program.map(is_blocked), FAULTS.map(is_blocked))).unwrap();
        });
        thread.unwrap().join().unwrap();
        assert_eq!(receive.recv().unwrap(), ([true; 4], [false; FAULTS.len()]));
        assert_eq!([libc::SIGINT, libc::SIGALRM, libc::SIGSEGV].map(is_blocked), before);
    }
}
