//! Completion channels and completion queues.

use core::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::devices::MAX_CQE;
use super::{
    CompletionChannel, Cq, NO_COND, NO_MUTEX, Users, context_of, from_c, minus_one, object, status,
    write,
};
use crate::abi::*;
use crate::hca::completion::{Channel, CompletionQueue};

/// Creates a completion channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_comp_channel(
    context: *mut ibv_context,
) -> *mut ibv_comp_channel {
    object(|| {
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        let channel = Arc::new(Channel::new()?);
        open.objects.fetch_add(1, Ordering::AcqRel);
        let c = ibv_comp_channel { context, fd: channel.fd().as_raw_fd(), refcnt: 0 };
        Ok(Box::new(CompletionChannel { c, channel, users: Users::default() }))
    })
}

/// Destroys a completion channel; refused while queues use it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &CompletionChannel = unsafe { from_c(channel) }?;
        ours.users.check_none()?;
        // SAFETY: a live channel's context is open.
        let open = unsafe { context_of(ours.c.context) }?;
        // SAFETY: it came from `ibv_create_comp_channel` and nothing uses it.
        drop(unsafe { Box::from_raw(channel.cast::<CompletionChannel>()) });
        open.objects.fetch_sub(1, Ordering::AcqRel);
        Ok(())
    })
}

/// Creates a completion queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    object(|| {
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        let capacity = usize::try_from(cqe)
            .ok()
            .filter(|cqe| (1..=MAX_CQE).contains(cqe))
            .ok_or(Errno::INVAL)?;
        if vector != 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: the caller's promise; NULL means none.
        let notify = unsafe { channel.cast::<CompletionChannel>().as_ref() };
        let events = notify.map(|channel| channel.channel.clone());
        let queue = Arc::new(CompletionQueue::new(capacity, events, open.asynchronous.clone()));
        if let Some(channel) = notify {
            channel.users.add();
        }
        open.objects.fetch_add(1, Ordering::AcqRel);
        let c = ibv_cq {
            context,
            channel,
            cq_context,
            handle: 0,
            cqe,
            mutex: NO_MUTEX,
            cond: NO_COND,
            comp_events_completed: 0,
            async_events_completed: 0,
        };
        let made = Box::new(Cq { c, queue, users: Users::default() });
        made.queue.object.store(&raw const *made as usize, Ordering::Relaxed);
        Ok(made)
    })
}

/// Destroys a completion queue; waits until its events are acknowledged.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Cq = unsafe { from_c(cq) }?;
        ours.users.check_none()?;
        // SAFETY: a live queue's context is open, its channel live.
        let (open, channel) = unsafe {
            (context_of(ours.c.context)?, ours.c.channel.cast::<CompletionChannel>().as_ref())
        };
        ours.queue.retire();
        // SAFETY: it came from `ibv_create_cq` and nothing uses it.
        drop(unsafe { Box::from_raw(cq.cast::<Cq>()) });
        if let Some(channel) = channel {
            channel.users.remove();
        }
        open.objects.fetch_sub(1, Ordering::AcqRel);
        Ok(())
    })
}

/// Waits for the next completion event of a channel.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    minus_one(|| {
        // SAFETY: the caller's promise.
        let ours: &CompletionChannel = unsafe { from_c(channel) }?;
        // SAFETY: a live channel's context is open.
        unsafe { context_of(ours.c.context) }?;
        let accept = |queue: Arc<CompletionQueue>| {
            queue.unacknowledged.add();
            queue.object.load(Ordering::Relaxed) as *mut Cq
        };
        let found = ours.channel.pop(accept)?;
        // SAFETY: a queue with an unacknowledged event is not destroyed.
        let user = unsafe { (*found).c.cq_context };
        // SAFETY: the caller's promise.
        unsafe {
            write(cq, found.cast())?;
            write(cq_context, user)
        }
    })
}

/// Acknowledges completion events.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_cq_events(cq: *mut ibv_cq, count: c_uint) {
    status(|| {
        // SAFETY: the caller's promise.
        let ours: &Cq = unsafe { from_c(cq) }?;
        // SAFETY: a live queue's context is open.
        unsafe { context_of(ours.c.context) }?;
        ours.queue.unacknowledged.acknowledge(count);
        Ok(())
    });
}
