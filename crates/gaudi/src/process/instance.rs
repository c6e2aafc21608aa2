//! Which process this is: a random number that every process draws for itself.
//!
//! Not the process id: that is used again after a process has ended, may be the same in another pid
//! namespace, and asking for it is a system call. The number lies on a page that the kernel clears in
//! every child, however that was made, so that a child draws its own.

use std::num::NonZeroU64;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use rustix::rand::{GetRandomFlags, getrandom};

use super::watch_forks;

/// A process of this machine. Two are equal only if they are the same process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instance(NonZeroU64);

/// Where the number lies; null until somebody asks. Not a `OnceLock`: a child forked while another
/// thread is inside would wait for that thread for ever.
static NUMBER: AtomicPtr<AtomicU64> = AtomicPtr::new(ptr::null_mut());
/// Where the number lies if the kernel has no wipe-on-fork (before 4.14): the fork handler clears it.
static WITHOUT_WIPING: AtomicU64 = AtomicU64::new(0);

impl Instance {
    /// This process. Two loads, except the first time.
    pub(crate) fn current() -> Self {
        // SAFETY: null, or a page or static that is never given back.
        let number = unsafe { NUMBER.load(Ordering::Acquire).as_ref() };
        let number = number.unwrap_or_else(locate);
        match NonZeroU64::new(number.load(Ordering::Relaxed)) {
            Some(drawn) => Self(drawn),
            None => draw(number),
        }
    }
}

/// In a forked child: it is not its parent.
pub(super) fn in_child() {
    WITHOUT_WIPING.store(0, Ordering::Relaxed);
}

#[cold]
fn locate() -> &'static AtomicU64 {
    watch_forks();
    let made = wiped_on_fork().unwrap_or(&WITHOUT_WIPING);
    let pointer = ptr::from_ref(made).cast_mut();
    let null = ptr::null_mut();
    match NUMBER.compare_exchange(null, pointer, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => made,
        // SAFETY: as in `current`. Another thread was faster; our page stays behind, unused.
        Err(first) => unsafe { &*first },
    }
}

#[cold]
fn draw(number: &AtomicU64) -> Instance {
    let mut bytes = [0; 8];
    let drawn = match getrandom(&mut bytes[..], GetRandomFlags::empty()) {
        Ok(_) => u64::from_ne_bytes(bytes),
        // Parent and child live at the same time, so that their process ids differ.
        Err(_) => u64::from(std::process::id()),
    };
    let drawn = NonZeroU64::new(drawn).unwrap_or(NonZeroU64::MAX);
    // Another thread may have drawn meanwhile.
    match number.compare_exchange(0, drawn.get(), Ordering::Relaxed, Ordering::Relaxed) {
        Ok(_) => Instance(drawn),
        Err(first) => Instance(NonZeroU64::new(first).expect("only zero is replaced")),
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
    use super::super::fork::tests::{holds_in_child, succeeded};
    use super::*;

    #[test]
    fn parent_and_child_are_different_instances() {
        let own = Instance::current();
        let differs = || Instance::current() != own && Instance::current() == Instance::current();
        assert!(holds_in_child(differs));
        assert_eq!(Instance::current(), own);
    }

    #[test]
    fn a_child_made_by_a_bare_clone_is_another_instance() {
        let own = Instance::current();
        // SAFETY: a fork without handlers; the child only makes system calls.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as i32;
        if child == 0 {
            let code = if Instance::current() == own { 1 } else { 0 };
            // SAFETY: ends the process.
            unsafe { libc::_exit(code) };
        }
        assert!(succeeded(child), "it took itself for its parent");
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
