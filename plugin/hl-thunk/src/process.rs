//! Which process this is: a random number that every process draws for itself.
//!
//! The driver cannot tell a forked child from its parent: both have the same descriptors. So code that
//! opens a card records which process it was. The process id does not serve: it is reused after a
//! process has ended, may be the same in another pid namespace, and costs a system call. The number
//! lies on a page that the kernel clears in every child, however that was made, so that a child draws
//! its own.

use std::num::NonZeroU64;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::rand::{GetRandomFlags, getrandom};

/// A process of this machine. Two are equal only if they are the same process: a forked child is not
/// its parent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessInstance(NonZeroU64);

/// Where the number lies; null until first used. Not a `OnceLock`: a child forked while another
/// thread is inside would wait for that thread for ever.
static NUMBER: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());

impl ProcessInstance {
    /// This process. Two loads, except the first time.
    pub fn current() -> Self {
        // SAFETY: null, or a page that is never given back.
        let number = unsafe { NUMBER.load(Ordering::Acquire).as_ref() };
        match number.map(|number| NonZeroU64::new(number.load(Ordering::Relaxed))) {
            Some(Some(drawn)) => Self(drawn),
            Some(None) => draw(number.expect("just looked at")),
            None => first(),
        }
    }
}

#[cold]
fn first() -> ProcessInstance {
    let Ok(made) = wiped_on_fork() else {
        // A kernel before 4.14. Parent and child live at the same time: their process ids differ.
        return ProcessInstance(NonZeroU64::MIN.saturating_add(std::process::id().into()));
    };
    let (null, pointer) = (ptr::null_mut(), ptr::from_ref(made).cast_mut());
    match NUMBER.compare_exchange(null, pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => draw(made),
        // SAFETY: as in `current`. Another thread was faster; our page stays behind, unused.
        Err(other) => draw(unsafe { &*other }),
    }
}

#[cold]
fn draw(number: &AtomicU64) -> ProcessInstance {
    let mut bytes = [0; 8];
    let drawn = match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => u64::from(std::process::id()),
    };
    let drawn = NonZeroU64::new(drawn).unwrap_or(NonZeroU64::MAX);
    // Another thread may have drawn meanwhile.
    match number.compare_exchange(0, drawn.get(), Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => ProcessInstance(drawn),
        Err(first) => ProcessInstance(NonZeroU64::new(first).expect("only zero is replaced")),
    }
}

/// Zero in a forked child, whatever its parent wrote.
fn wiped_on_fork() -> rustix::io::Result<&'static AtomicU64> {
    const LEN: usize = size_of::<AtomicU64>();
    let (access, kind) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: new memory, anywhere; the advice is for all of its page, which has nothing else on it.
    unsafe {
        let page = mmap_anonymous(ptr::null_mut(), LEN, access, kind)?;
        if let Err(too_old) = madvise(page, LEN, Advice::LinuxWipeOnFork) {
            munmap(page, LEN)?;
            return Err(too_old);
        }
        Ok(&*page.cast::<AtomicU64>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether `make` makes a child that is another instance than its parent.
    fn child_differs(make: impl FnOnce() -> i32) -> bool {
        let own = ProcessInstance::current();
        let child = make();
        if child == 0 {
            let current = ProcessInstance::current();
            let code = if current != own && current == ProcessInstance::current() { 0 } else { 1 };
            // SAFETY: ends the process.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(ProcessInstance::current(), own);
        status == 0
    }

    #[test]
    fn a_forked_child_is_another_instance() {
        // SAFETY: the child only makes system calls.
        assert!(child_differs(|| unsafe { libc::fork() }));
    }

    #[test]
    fn a_child_made_by_a_bare_clone_is_another_instance() {
        // SAFETY: a fork without handlers; the child only makes system calls.
        let clone = || unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        assert!(child_differs(clone));
    }

    #[test]
    fn threads_that_draw_at_the_same_time_agree() {
        for _ in 0..100 {
            let number = AtomicU64::new(0);
            let drawn = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| draw(&number))).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
            });
            assert!(drawn.iter().all(|one| *one == drawn[0]), "{drawn:?}");
        }
    }
}
