//! Values that belong to one process: a forked child neither sees nor ends its parent's.

use std::convert::Infallible;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::Instance;

/// A static that each process initializes for itself, once. A forked child does not see its parent's value: its locks
/// may be taken, and its threads do not exist in the child.
#[derive(Debug)]
pub(crate) struct PerProcess<T: 'static>(AtomicPtr<(Instance, T)>);

impl<T: Send + Sync> PerProcess<T> {
    pub(crate) const fn new() -> Self {
        Self(AtomicPtr::new(ptr::null_mut()))
    }

    /// This process's value, if it has made one.
    pub(crate) fn get(&self) -> Option<&'static T> {
        // SAFETY: only leaked boxes are ever stored.
        let stored = unsafe { self.0.load(Ordering::Acquire).as_ref() };
        stored.filter(|(made_by, _)| *made_by == Instance::current()).map(|(_, value)| value)
    }

    /// This process's value, made now if it has none.
    pub(crate) fn get_or_default(&self) -> &'static T
    where
        T: Default,
    {
        let Ok(value) = self.get_or_make(|| Ok::<_, Infallible>(T::default()));
        value
    }

    /// This process's value, made now if it has none. Two threads may both make one; only one is kept.
    pub(crate) fn get_or_make<E>(
        &self,
        make: impl FnOnce() -> Result<T, E>,
    ) -> Result<&'static T, E> {
        let before = self.0.load(Ordering::Acquire);
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let made = Box::into_raw(Box::new((Instance::current(), make()?)));
        let kept = match self.0.compare_exchange(before, made, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => made,
            Err(first) => {
                // SAFETY: still ours alone: another thread was faster.
                drop(unsafe { Box::from_raw(made) });
                first
            }
        };
        // SAFETY: a leaked box.
        Ok(unsafe { &(*kept).1 })
    }
}

/// Something whose drop has an effect outside this process, such as a mapping on a card. A forked child has the same
/// descriptors, so dropping it there does nothing.
#[derive(Debug)]
pub(crate) struct ProcessBound<T> {
    made_by: Instance,
    value: ManuallyDrop<T>,
}

impl<T> ProcessBound<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { made_by: Instance::current(), value: ManuallyDrop::new(value) }
    }

    /// Whether this is the process that made it, not a forked child.
    pub(crate) fn is_ours(&self) -> bool {
        self.made_by == Instance::current()
    }
}

impl<T> Deref for ProcessBound<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for ProcessBound<T> {
    fn drop(&mut self) {
        if self.is_ours() {
            // SAFETY: dropped once, here, and not used after.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, BorrowedFd};

    use rustix::io::{Errno, read, write};
    use rustix::pipe::{PipeFlags, pipe_with};

    use super::super::fork::tests::holds_in_child;
    use super::*;

    /// Like a mapping on a card: both processes have the descriptor, and either could end it.
    struct Mapping<'a>(BorrowedFd<'a>);

    impl Drop for Mapping<'_> {
        fn drop(&mut self) {
            write(self.0, b"unmapped").expect("space in the pipe");
        }
    }

    #[test]
    fn a_child_drops_what_it_inherited_without_effect() {
        let (ended, end) = pipe_with(PipeFlags::NONBLOCK).expect("a pipe");
        let mut mapping = Some(ProcessBound::new(Mapping(end.as_fd())));
        // The child takes it out of its own copy of this variable.
        assert!(holds_in_child(|| mapping.take().is_some_and(|mapping| !mapping.is_ours())));
        assert_eq!(read(&ended, &mut [0; 8]), Err(Errno::AGAIN), "the child ended it");
        drop(mapping.take());
        assert_eq!(read(&ended, &mut [0; 8]), Ok(8));
    }

    #[test]
    fn a_child_makes_its_own() {
        static VALUE: PerProcess<u32> = PerProcess::new();
        assert_eq!(VALUE.get(), None);
        assert_eq!(VALUE.get_or_make(|| Ok::<_, ()>(1)), Ok(&1));
        assert_eq!(VALUE.get_or_make(|| Ok::<_, ()>(2)), Ok(&1));
        assert!(holds_in_child(|| {
            VALUE.get().is_none() && VALUE.get_or_make(|| Ok::<_, ()>(3)) == Ok(&3)
        }));
        assert_eq!(VALUE.get(), Some(&1));
    }
}
