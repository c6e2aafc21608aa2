//! Receive queues, of a queue pair and shared ones.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::events::{AsyncEvent, EventQueue, Unacknowledged, lock};
use crate::abi::{IBV_EVENT_SRQ_LIMIT_REACHED, ibv_sge};

/// A posted receive buffer.
#[derive(Clone, Debug)]
pub(crate) struct Buffer {
    pub(crate) wr_id: u64,
    pub(crate) sges: Vec<ibv_sge>,
}

impl Buffer {
    /// Bytes that it can take.
    pub(crate) fn length(&self) -> u64 {
        self.sges.iter().map(|sge| u64::from(sge.length)).sum()
    }
}

/// Buffers in the order in which they were posted.
#[derive(Debug)]
pub(crate) struct ReceiveQueue {
    max_wr: usize,
    max_sge: usize,
    queue: VecDeque<Buffer>,
}

impl ReceiveQueue {
    /// An empty queue.
    pub(crate) fn new(max_wr: u32, max_sge: u32) -> Self {
        Self { max_wr: max_wr as usize, max_sge: max_sge as usize, queue: VecDeque::new() }
    }

    /// Adds a buffer: `EINVAL` for too many elements, `ENOMEM` when full, as drivers answer.
    pub(crate) fn post(&mut self, buffer: Buffer) -> Result<(), Errno> {
        if buffer.sges.len() > self.max_sge {
            return Err(Errno::INVAL);
        }
        if self.queue.len() >= self.max_wr {
            return Err(Errno::NOMEM);
        }
        self.queue.push_back(buffer);
        Ok(())
    }

    /// Returns a buffer that was taken but not used: it is the next again.
    pub(crate) fn put_back(&mut self, buffer: Buffer) {
        self.queue.push_front(buffer);
    }

    /// The oldest buffer.
    pub(crate) fn take(&mut self) -> Option<Buffer> {
        self.queue.pop_front()
    }

    /// Buffers that are posted.
    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }
}

/// A shared receive queue.
pub(crate) struct SharedQueue {
    pub(crate) domain: u32,
    inner: Mutex<Shared>,
    asynchronous: Arc<EventQueue<AsyncEvent>>,
    /// The C object, for events.
    pub(crate) object: AtomicUsize,
    pub(crate) unacknowledged: Unacknowledged,
}

struct Shared {
    queue: ReceiveQueue,
    limit: u32,
}

impl SharedQueue {
    /// An empty queue.
    pub(crate) fn new(
        domain: u32,
        max_wr: u32,
        max_sge: u32,
        asynchronous: Arc<EventQueue<AsyncEvent>>,
    ) -> Self {
        Self {
            domain,
            inner: Mutex::new(Shared { queue: ReceiveQueue::new(max_wr, max_sge), limit: 0 }),
            asynchronous,
            object: AtomicUsize::new(0),
            unacknowledged: Unacknowledged::default(),
        }
    }

    /// Adds a buffer.
    pub(crate) fn post(&self, buffer: Buffer) -> Result<(), Errno> {
        lock(&self.inner).queue.post(buffer)
    }

    /// Takes the oldest buffer. If the queue falls below the limit, raises an event, once.
    pub(crate) fn take(&self) -> Option<Buffer> {
        let mut inner = lock(&self.inner);
        let buffer = inner.queue.take()?;
        if inner.queue.len() < inner.limit as usize {
            inner.limit = 0;
            let element = self.object.load(Ordering::Relaxed);
            self.asynchronous.push(AsyncEvent { kind: IBV_EVENT_SRQ_LIMIT_REACHED, element });
        }
        Some(buffer)
    }

    /// Returns a buffer that was taken but not used.
    pub(crate) fn put_back(&self, buffer: Buffer) {
        lock(&self.inner).queue.put_back(buffer);
    }

    /// Sets the limit below which an event is raised; zero for none.
    pub(crate) fn set_limit(&self, limit: u32) -> Result<(), Errno> {
        let mut inner = lock(&self.inner);
        if limit as usize > inner.queue.max_wr {
            return Err(Errno::INVAL);
        }
        inner.limit = limit;
        Ok(())
    }

    /// Capacity, elements per buffer, limit.
    pub(crate) fn attributes(&self) -> (u32, u32, u32) {
        let inner = lock(&self.inner);
        (inner.queue.max_wr as u32, inner.queue.max_sge as u32, inner.limit)
    }

    /// Called before the queue is destroyed: raises no more events, and waits until all are acknowledged.
    pub(crate) fn retire(&self) {
        let element = self.object.load(Ordering::Relaxed);
        self.asynchronous.withdraw(|event| {
            event.kind == IBV_EVENT_SRQ_LIMIT_REACHED && event.element == element
        });
        self.unacknowledged.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(wr_id: u64, sges: usize) -> Buffer {
        Buffer { wr_id, sges: vec![ibv_sge { length: 10, ..Default::default() }; sges] }
    }

    #[test]
    fn a_full_queue_and_too_many_elements_are_refused() {
        let mut queue = ReceiveQueue::new(2, 1);
        assert_eq!(queue.post(buffer(1, 2)), Err(Errno::INVAL));
        assert_eq!(queue.post(buffer(1, 1)), Ok(()));
        assert_eq!(queue.post(buffer(2, 0)), Ok(()));
        assert_eq!(queue.post(buffer(3, 1)), Err(Errno::NOMEM));
        assert_eq!(queue.take().map(|b| (b.wr_id, b.length())), Some((1, 10)));
        assert_eq!(queue.take().map(|b| (b.wr_id, b.length())), Some((2, 0)));
        assert!(queue.take().is_none());
    }

    #[test]
    fn falling_below_the_limit_raises_one_event() {
        let events = Arc::new(EventQueue::new().unwrap());
        rustix::io::ioctl_fionbio(events.fd(), true).unwrap();
        let queue = SharedQueue::new(1, 4, 1, events.clone());
        (0..4).for_each(|id| queue.post(buffer(id, 1)).unwrap());
        assert_eq!(queue.set_limit(5), Err(Errno::INVAL));
        queue.set_limit(3).unwrap();
        queue.take();
        assert_eq!(events.pop(|event| event.kind), Err(Errno::AGAIN));
        queue.take();
        queue.take();
        assert_eq!(events.pop(|event| event.kind), Ok(IBV_EVENT_SRQ_LIMIT_REACHED));
        assert_eq!(events.pop(|event| event.kind), Err(Errno::AGAIN));
    }
}
