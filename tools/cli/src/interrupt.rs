//! Ctrl-C while other processes work for a command: they end, and the command goes on to clean up and to print
//! its results.

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
/// The process group of the child that works; 0: none.
static GROUP: AtomicI32 = AtomicI32::new(0);

extern "C" fn note(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::SeqCst);
    end_group();
}

fn end_group() {
    let group = GROUP.load(Ordering::SeqCst);
    if group != 0 {
        // SAFETY: numbers. The group is that of a child that was not waited for, so its number is not reused.
        unsafe { libc::kill(-group, libc::SIGINT) };
    }
}

/// From now on SIGINT and SIGTERM do not end the tool, but the processes of [`ChildGroup`].
pub(crate) fn watch() {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        // SAFETY: the handler loads and stores atomics and calls kill, which signal handlers may do.
        unsafe { libc::signal(signal, note as *const () as libc::sighandler_t) };
    }
}

/// Whether one of the signals came.
pub(crate) fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::SeqCst)
}

/// A child with a process group of its own, which the signals of [`watch`] end. One at a time.
pub(crate) struct ChildGroup(Child);

impl ChildGroup {
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        // Its orphans become ours, so that their end can be waited for.
        let _ = set_child_subreaper(Pid::from_raw(1));
        let child = command.process_group(0).spawn()?;
        GROUP.store(child.id().cast_signed(), Ordering::SeqCst);
        if interrupted() {
            // The handler may have found no group yet.
            end_group();
        }
        Ok(Self(child))
    }

    pub(crate) fn child(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Until it ends. After a signal nothing of its group stays.
    pub(crate) fn wait(mut self) -> io::Result<ExitStatus> {
        // Seen first and reaped later: until then the number of the group is not reused.
        let leader = Pid::from_child(&self.0);
        let ended = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        while let Err(Errno::INTR) = waitid(WaitId::Pid(leader), ended) {}
        GROUP.store(0, Ordering::SeqCst);
        if interrupted() {
            // Such as a process that ignores the other signal.
            let _ = kill_process_group(leader, Signal::KILL);
        }
        let status = self.0.wait();
        while interrupted() && waitpgid(leader, WaitOptions::empty()).is_ok() {}
        status
    }
}
