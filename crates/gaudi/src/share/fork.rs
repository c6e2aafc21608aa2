//! What a forked child must not take for its own: its parent's state, and some descriptors.
//!
//! A child inherits every descriptor. If it kept its parent's sockets, peers would not see them hang
//! up when the parent dies, and new ones would connect to a listener that nobody serves. A `fork`
//! handler closes in the child what is noted here; it may only make system calls, so the notes are
//! a fixed table of atomics.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};
use std::{process, ptr};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The number of this process, as `getpid` says, without asking the kernel each time: it is noted on a
/// page that the kernel empties in every child, however that was made.
pub(super) fn own_pid() -> u32 {
    static NOTE: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();
    let Some(note) = NOTE.get_or_init(|| note_for_one_process().ok()) else {
        return process::id();
    };
    match note.load(Ordering::Relaxed) {
        0 => {
            let pid = process::id();
            note.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

/// Zero in a forked child, whatever its parent wrote.
fn note_for_one_process() -> rustix::io::Result<&'static AtomicU32> {
    const LEN: usize = size_of::<AtomicU32>();
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: new memory, anywhere; the advice is for all of its page, which has nothing else on it.
    unsafe {
        let page = mmap_anonymous(ptr::null_mut(), LEN, access, kind)?;
        if let Err(too_old) = madvise(page, LEN, Advice::LinuxWipeOnFork) {
            munmap(page, LEN)?;
            return Err(too_old);
        }
        Ok(&*page.cast::<AtomicU32>())
    }
}

/// Something that each process makes for itself, once; a forked child does not see its parent's,
/// whose locks may be held and whose threads are not there.
#[derive(Debug)]
pub(super) struct PerProcess<T: 'static>(AtomicPtr<(u32, T)>);

impl<T: Send + Sync> PerProcess<T> {
    pub(super) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's, if it has made one.
    pub(super) fn get(&self) -> Option<&'static T> {
        // SAFETY: only leaked boxes are ever stored.
        let stored = unsafe { self.0.load(Ordering::Acquire).as_ref() };
        stored.filter(|(pid, _)| *pid == own_pid()).map(|(_, value)| value)
    }

    /// This process's, made now if it has none. Two threads may both make one; only one is kept.
    pub(super) fn get_or_make<E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<&'static T, E> {
        let before = self.0.load(Ordering::Acquire);
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let made = Box::into_raw(Box::new((own_pid(), make()?)));
        let kept = match self.0.compare_exchange(before, made, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => made,
            Err(first) => {
                // SAFETY: ours still: another thread was faster.
                drop(unsafe { Box::from_raw(made) });
                first
            }
        };
        // SAFETY: shared, and never freed.
        Ok(unsafe { &(*kept).1 })
    }
}

/// Something that ends outside this process when it is dropped, such as a mapping on a card: a forked
/// child, which has a copy of it and the same descriptors, drops it without effect.
#[derive(Debug)]
pub(super) struct Here<T> {
    pid: u32,
    value: ManuallyDrop<T>,
}

impl<T> Here<T> {
    pub(super) fn new(value: T) -> Self {
        Self { pid: own_pid(), value: ManuallyDrop::new(value) }
    }

    /// Whether this is the process that made it.
    pub(super) fn is_here(&self) -> bool {
        self.pid == own_pid()
    }
}

impl<T> Deref for Here<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for Here<T> {
    fn drop(&mut self) {
        if self.is_here() {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

/// More than a process ever has of these: listeners, connections, watched peers.
const ROOM: usize = 2048;
const FREE: i32 = -1;

static NOTED: [AtomicI32; ROOM] = [const { AtomicI32::new(FREE) }; ROOM];

/// A descriptor that forked children do not keep.
#[derive(Debug)]
pub(super) struct Private {
    note: usize,
    // Closed after the note is gone: its number may be somebody else's at once.
    fd: Option<OwnedFd>,
}

impl Private {
    /// `None` if there are too many.
    pub(super) fn new(fd: OwnedFd) -> Option<Self> {
        static HANDLER: Once = Once::new();
        // SAFETY: the handler may run at any time, and the plugin is never unloaded.
        HANDLER.call_once(|| unsafe {
            libc::pthread_atfork(None, None, Some(in_child));
        });
        let take = |note: &AtomicI32| {
            note.compare_exchange(FREE, fd.as_raw_fd(), Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        let note = NOTED.iter().position(take)?;
        Some(Self { note, fd: Some(fd) })
    }
}

impl AsFd for Private {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("taken only when dropped").as_fd()
    }
}

impl Drop for Private {
    fn drop(&mut self) {
        let fd = self.fd.take().expect("taken only here");
        let own = fd.as_raw_fd();
        let note = &NOTED[self.note];
        if note.compare_exchange(own, FREE, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            // A forked child drops what it inherited: closed already, the number is not ours.
            std::mem::forget(fd);
        }
    }
}

extern "C" fn in_child() {
    for note in &NOTED {
        let fd = note.swap(FREE, Ordering::AcqRel);
        if fd != FREE {
            // SAFETY: a system call on a number. Its owner in this process notices and lets it be.
            unsafe { libc::close(fd) };
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::{Errno, read, write};
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    /// As a mapping on a card: both processes have the descriptor, and either could end it.
    struct Mapping<'a>(BorrowedFd<'a>);

    impl Drop for Mapping<'_> {
        fn drop(&mut self) {
            write(self.0, b"unmapped").expect("room");
        }
    }

    /// Children that no handler of the C library hears of have a number of their own, too.
    #[test]
    fn a_child_has_its_own_number_however_it_was_made() {
        let own = own_pid();
        assert_eq!(own, process::id());
        // SAFETY: a fork without handlers; the child only makes system calls.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if child == 0 {
            let right = own_pid() == process::id() && own_pid() != own;
            // SAFETY: ends the process.
            unsafe { libc::_exit(if right { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it took its parent's number for its own");
        assert_eq!(own_pid(), own);
    }

    #[test]
    fn what_a_child_has_inherited_it_cannot_end() {
        let (ended, end) = pipe_with(PipeFlags::NONBLOCK).expect("a pipe");
        let mapping = Here::new(Mapping(end.as_fd()));
        // SAFETY: the child only drops the value, and makes system calls.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop(mapping);
            // SAFETY: ends the process.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(read(&ended, &mut [0; 8]), Err(Errno::AGAIN), "the child ended it");
        drop(mapping);
        assert_eq!(read(&ended, &mut [0; 8]), Ok(8));
    }
}
