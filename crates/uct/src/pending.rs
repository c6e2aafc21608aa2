//! Requests that wait because the transport was busy.
//!
//! An operation that returns [`Status::NO_RESOURCE`](crate::Status::NO_RESOURCE) is queued by UCX
//! here and driven again from progress, in order.

use core::cell::RefCell;
use core::ffi::c_void;
use std::collections::VecDeque;

use crate::abi::{PendingReq, PurgeCallback, Status};

/// The waiting requests of one interface. Used under the worker's lock only.
#[derive(Default)]
pub(crate) struct PendingQueue {
    waiting: RefCell<VecDeque<(*mut c_void, *mut PendingReq)>>,
}

impl PendingQueue {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.borrow().is_empty()
    }

    pub(crate) fn add(&self, ep: *mut c_void, request: *mut PendingReq) {
        self.waiting.borrow_mut().push_back((ep, request));
    }

    /// Drives waiting requests until the transport is busy. No borrow is held while UCX runs, since
    /// it may add or purge requests meanwhile.
    ///
    /// # Safety
    /// The queued requests are alive, as UCX promises until they succeed or are purged.
    pub(crate) unsafe fn dispatch(&self) -> u32 {
        let mut progressed = 0;
        loop {
            let Some((ep, request)) = self.waiting.borrow_mut().pop_front() else {
                return progressed;
            };
            // SAFETY: as the caller promises.
            let status = match unsafe { (*request).func } {
                // SAFETY: as the caller promises.
                Some(func) => unsafe { func(request) },
                None => Status::OK,
            };
            match status {
                Status::OK => progressed += 1,
                Status::INPROGRESS => {
                    progressed += 1;
                    self.waiting.borrow_mut().push_front((ep, request));
                }
                _ => {
                    self.waiting.borrow_mut().push_front((ep, request));
                    return progressed;
                }
            }
        }
    }

    /// Takes out the requests of one endpoint and hands each to `callback`.
    ///
    /// # Safety
    /// The queued requests are alive, and `callback` takes them with `argument`.
    pub(crate) unsafe fn purge(
        &self,
        ep: *mut c_void,
        callback: Option<PurgeCallback>,
        argument: *mut c_void,
    ) {
        let mut taken = Vec::new();
        self.waiting.borrow_mut().retain(|(owner, request)| {
            if *owner == ep {
                taken.push(*request);
            }
            *owner != ep
        });
        if let Some(callback) = callback {
            for request in taken {
                // SAFETY: as the caller promises.
                unsafe { callback(request, argument) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request that needs `private[0]` calls before it succeeds and counts them in `private[1]`.
    unsafe extern "C" fn count_down(request: *mut PendingReq) -> Status {
        // SAFETY: the tests pass requests of their own.
        let request = unsafe { &mut *request };
        request.private[1] += 1;
        if request.private[0] == 0 {
            return Status::OK;
        }
        request.private[0] -= 1;
        Status::NO_RESOURCE
    }

    fn request(misses: u64) -> PendingReq {
        PendingReq { func: Some(count_down), private: [misses, 0, 0, 0, 0] }
    }

    #[test]
    fn order_is_kept_while_the_transport_is_busy() {
        let queue = PendingQueue::default();
        let (mut first, mut second) = (request(1), request(0));
        let ep = core::ptr::without_provenance_mut(8);
        queue.add(ep, &raw mut first);
        queue.add(ep, &raw mut second);
        // SAFETY: both requests live to the end of the test.
        assert_eq!(unsafe { queue.dispatch() }, 0);
        assert_eq!((first.private[1], second.private[1]), (1, 0));
        // SAFETY: as above.
        assert_eq!(unsafe { queue.dispatch() }, 2);
        assert!(queue.is_empty());
    }

    #[test]
    fn purge_takes_only_the_requests_of_that_endpoint() {
        unsafe extern "C" fn note(request: *mut PendingReq, argument: *mut c_void) {
            // SAFETY: the test passes a vector.
            unsafe { (*argument.cast::<Vec<*mut PendingReq>>()).push(request) };
        }
        let queue = PendingQueue::default();
        let (mut mine, mut other) = (request(0), request(0));
        let (my_ep, other_ep) =
            (core::ptr::without_provenance_mut(8), core::ptr::without_provenance_mut(16));
        queue.add(my_ep, &raw mut mine);
        queue.add(other_ep, &raw mut other);
        let mut purged: Vec<*mut PendingReq> = Vec::new();
        // SAFETY: the requests and the vector live through the call.
        unsafe { queue.purge(my_ep, Some(note), (&raw mut purged).cast()) };
        assert_eq!(purged, [&raw mut mine]);
        assert!(!queue.is_empty());
    }
}
