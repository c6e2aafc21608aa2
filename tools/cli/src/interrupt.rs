//! Handles Ctrl-C while other processes work for a command: they end, and the command goes on to clean up and print its
//! results.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process_group, set_child_subreaper,
    waitid, waitpgid,
};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
/// The process group of the working child; 0: none.
static GROUP: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
    end_group();
}

fn end_group() {
    let group = GROUP.load(Ordering::SeqCst);
    if group != 0 {
        // SAFETY: plain numbers. The group's leader was not waited for, so its number is not reused.
        unsafe { libc::kill(-group, libc::SIGINT) };
    }
}

/// After this, SIGINT and SIGTERM do not end the tool; they end the processes of [`ChildGroup`].
pub(crate) fn watch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler loads and stores atomics and calls kill, which signal handlers may do.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
}

/// Whether one of the signals arrived.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// A child with a new process group, which the signals of [`watch`] end. Only one at a time.
pub(crate) struct ChildGroup(Child);

impl ChildGroup {
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        // Orphans of the child become our children, so that we can wait for them.
        let _ = set_child_subreaper(Pid::from_raw(1));
        let child = command.process_group(0).spawn()?;
        GROUP.store(child.id().cast_signed(), Ordering::SeqCst);
        if interrupted() {
            // The signal may have arrived before the handler knew the group.
            end_group();
        }
        Ok(Self(child))
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Waits until it ends. After a signal no process of its group stays.
    pub(crate) fn wait(mut self) -> io::Result<ExitStatus> {
        // Wait without reaping first: until the child is reaped, the number of the group is not reused.
        let leader = Pid::from_child(&self.0);
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(Errno::INTR) = waitid(WaitId::Pid(leader), ended) {}
        GROUP.store(0, Ordering::SeqCst);
        if interrupted() {
            // A process may ignore the other signal.
            let _ = kill_process_group(leader, Signal::KILL);
        }
        let status = self.0.wait();
        while interrupted() && waitpgid(leader, WaitOptions::empty()).is_ok() {}
        status
    }
}
