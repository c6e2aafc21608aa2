//! The C functions of `libibverbs.so.1`.
//!
//! Each is thin: it reads what the program passed, calls the `hca`, and turns errors into what the
//! manual pages say: an error number or NULL with `errno`. No panic leaves a function.
//!
//! Objects that programs hold pointers to start with the C structure, then come our own fields. A
//! program must pass pointers that it got from here and has not destroyed, as with any such library;
//! that is the safety argument for every pointer that is read below, and the contract of every function: a
//! pointer is live, of the type it has in the manual page, or NULL where that allows it.

#![expect(clippy::missing_safety_doc, reason = "said once, above, for all functions")]

mod addresses;
mod channels;
mod devices;
mod dmabuf;
mod drivers;
mod events;
mod files;
mod memory;
mod names;
mod posting;
mod process;
mod queue_pairs;
mod shared_queues;
mod unsupported;

use core::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::io::Errno;

use crate::abi::*;
use crate::hca::completion::{Channel, CompletionQueue};
use crate::hca::events::{AsyncEvent, EventQueue};
use crate::hca::memory::Region;
use crate::hca::pinned::Pages;
use crate::hca::qp::QueuePair;
use crate::hca::receive::SharedQueue;

pub use addresses::*;
pub use channels::*;
pub use devices::*;
pub use drivers::*;
pub use events::*;
pub use files::*;
pub use memory::*;
pub use names::*;
pub use queue_pairs::*;
pub use shared_queues::*;
pub use unsupported::*;

use process::Process;

/// An open device. Programs get a pointer to `c`.
#[repr(C)]
struct Context {
    /// Drivers of rdma-core read what lies in front of a context without checking that it is there: libefa does, to find
    /// that this is not a device of its own. No function is set in this front part, so that the header's inline
    /// functions use the exported ones.
    front: verbs_context_front,
    c: ibv_context,
    device: &'static devices::Device,
    process: &'static Process,
    asynchronous: Arc<EventQueue<AsyncEvent>>,
    /// Objects that the program has made and not destroyed.
    objects: AtomicUsize,
}

/// A protection domain.
#[repr(C)]
struct Domain {
    c: ibv_pd,
    id: u32,
    users: Users,
}

/// How many objects use this one: it cannot be destroyed before them.
#[derive(Default)]
struct Users(AtomicUsize);

impl Users {
    fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn remove(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    fn check_none(&self) -> Result<(), Errno> {
        if self.0.load(Ordering::Acquire) == 0 { Ok(()) } else { Err(Errno::BUSY) }
    }
}

#[repr(C)]
struct MemoryRegion {
    c: ibv_mr,
    region: Arc<Region>,
    _pinned: Option<Pages<'static>>,
}

#[repr(C)]
struct CompletionChannel {
    c: ibv_comp_channel,
    channel: Arc<Channel>,
    users: Users,
}

#[repr(C)]
struct Cq {
    c: ibv_cq,
    queue: Arc<CompletionQueue>,
    users: Users,
}

#[repr(C)]
struct Srq {
    c: ibv_srq,
    queue: Arc<SharedQueue>,
    users: Users,
}

#[repr(C)]
struct Qp {
    c: ibv_qp,
    qp: Arc<QueuePair>,
}

#[repr(C)]
struct AddressHandle {
    c: ibv_ah,
    attr: ibv_ah_attr,
}

/// Runs a function's body; a panic becomes `EIO`.
fn caught<T>(body: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(Err(Errno::IO))
}

fn set_errno(error: Errno) {
    // SAFETY: the C library's own thread-local variable.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// For functions that return zero or an error number.
fn status(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    match caught(body) {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            error.raw_os_error()
        }
    }
}

/// For functions that return -1 and set `errno`.
fn minus_one(body: impl FnOnce() -> Result<(), Errno>) -> c_int {
    if status(body) == 0 { 0 } else { -1 }
}

/// For functions that return a new object or NULL.
fn object<T, C>(body: impl FnOnce() -> Result<Box<T>, Errno>) -> *mut C {
    match caught(body) {
        Ok(object) => Box::into_raw(object).cast(),
        Err(error) => {
            set_errno(error);
            core::ptr::null_mut()
        }
    }
}

/// Our object behind a C pointer.
///
/// # Safety
/// `pointer` came from here, as an object of type `T`, and was not destroyed.
unsafe fn from_c<'a, T, C>(pointer: *mut C) -> Result<&'a T, Errno> {
    // SAFETY: the caller's promise; NULL is caught.
    unsafe { pointer.cast::<T>().as_ref() }.ok_or(Errno::INVAL)
}

/// A copy of a structure that the program passed.
///
/// # Safety
/// `pointer` is NULL or points to a `T`.
unsafe fn read<T: Copy>(pointer: *const T) -> Result<T, Errno> {
    // SAFETY: the caller's promise; NULL is caught.
    unsafe { pointer.as_ref() }.copied().ok_or(Errno::INVAL)
}

/// Fills in a structure of the program.
///
/// # Safety
/// `pointer` is NULL or points to memory for a `T`.
unsafe fn write<T>(pointer: *mut T, value: T) -> Result<(), Errno> {
    if pointer.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: the caller's promise; NULL is caught.
    unsafe { pointer.write(value) };
    Ok(())
}

/// The open device behind a context.
///
/// # Safety
/// `context` is open, or the context of a live object.
unsafe fn context_of<'a>(context: *mut ibv_context) -> Result<&'a Context, Errno> {
    // SAFETY: contexts outlive their objects: one that is closed with objects stays.
    let open: &Context = unsafe { from_c(whole(context)) }?;
    // A forked child cannot use its parent's context: the sockets, the thread and the holders of its locks do not exist
    // in the child.
    if open.process.is_ours() { Ok(open) } else { Err(Errno::NODEV) }
}

/// The object around a context; NULL for NULL.
fn whole(context: *mut ibv_context) -> *mut Context {
    if context.is_null() {
        return core::ptr::null_mut();
    }
    context.wrapping_byte_sub(core::mem::offset_of!(Context, c)).cast()
}

/// An unused `pthread_mutex_t`: programs never lock those in verbs objects.
const NO_MUTEX: libc::pthread_mutex_t = libc::PTHREAD_MUTEX_INITIALIZER;
const NO_COND: libc::pthread_cond_t = libc::PTHREAD_COND_INITIALIZER;

const NONE: *const c_void = core::ptr::null();
