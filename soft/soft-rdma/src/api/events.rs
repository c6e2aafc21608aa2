//! Asynchronous events.

use core::ffi::c_int;

use super::{Cq, Qp, Srq, context_of, from_c, minus_one, status, write};
use crate::abi::*;
use crate::hca::events::{AsyncEvent, Unacknowledged};

/// The counter of the object that an event is about.
///
/// # Safety
/// The object is live.
unsafe fn counter<'a>(event: &AsyncEvent) -> Option<&'a Unacknowledged> {
    let element = event.element as *mut u8;
    // SAFETY: the caller's promise; the type of the event says which object it is.
    unsafe {
        match event.kind {
            IBV_EVENT_CQ_ERR => {
                from_c::<Cq, _>(element).ok().map(|cq| &cq.queue.unacknowledged_async)
            }
            IBV_EVENT_SRQ_LIMIT_REACHED => {
                from_c::<Srq, _>(element).ok().map(|srq| &srq.queue.unacknowledged)
            }
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                from_c::<Qp, _>(element).ok().map(|qp| &qp.qp.unacknowledged)
            }
            _ => None,
        }
    }
}

/// Waits for the next asynchronous event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    minus_one(|| {
        // SAFETY: the caller's promise.
        let open = unsafe { context_of(context) }?;
        let found = open.asynchronous.pop(|found| {
            // SAFETY: an object withdraws its events before it goes, under the lock held here.
            if let Some(counter) = unsafe { counter(&found) } {
                counter.add();
            }
            found
        })?;
        // SAFETY: the caller's promise.
        unsafe { write(event, ibv_async_event { element: found.element, event_type: found.kind }) }
    })
}

/// Acknowledges an asynchronous event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    status(|| {
        // SAFETY: the caller's promise.
        let event = unsafe { super::read(event) }?;
        let event = AsyncEvent { kind: event.event_type, element: event.element };
        // SAFETY: an object with an unacknowledged event is not destroyed.
        if let Some(counter) = unsafe { counter(&event) } {
            counter.acknowledge(1);
        }
        Ok(())
    });
}
