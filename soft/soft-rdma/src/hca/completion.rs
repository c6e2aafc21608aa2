//! Completion queues, with the notification that a program can ask for.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::events::{AsyncEvent, EventQueue, Unacknowledged, lock};
use crate::abi::{IBV_EVENT_CQ_ERR, IBV_WC_SUCCESS, ibv_wc};

/// Completions of which the program wants to be notified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Armed {
    #[default]
    No,
    Solicited,
    Any,
}

#[derive(Default)]
struct Inner {
    /// Completions, and whether each was solicited.
    queue: VecDeque<(ibv_wc, bool)>,
    armed: Armed,
    overrun: bool,
}

/// A completion channel: the queues (their C objects) with a pending notification.
pub(crate) type Channel = EventQueue<Arc<CompletionQueue>>;

/// A completion queue.
pub(crate) struct CompletionQueue {
    capacity: usize,
    inner: Mutex<Inner>,
    channel: Option<Arc<Channel>>,
    asynchronous: Arc<EventQueue<AsyncEvent>>,
    /// The C object, for events.
    pub(crate) object: AtomicUsize,
    pub(crate) unacknowledged: Unacknowledged,
    pub(crate) unacknowledged_async: Unacknowledged,
}

impl CompletionQueue {
    /// An empty queue.
    pub(crate) fn new(
        capacity: usize,
        channel: Option<Arc<Channel>>,
        asynchronous: Arc<EventQueue<AsyncEvent>>,
    ) -> Self {
        Self {
            capacity,
            inner: Mutex::default(),
            channel,
            asynchronous,
            object: AtomicUsize::new(0),
            unacknowledged: Unacknowledged::default(),
            unacknowledged_async: Unacknowledged::default(),
        }
    }

    /// Adds a completion. A queue that overflows stays in error, as on hardware.
    pub(crate) fn push(self: &Arc<Self>, wc: ibv_wc, solicited: bool) {
        let mut inner = lock(&self.inner);
        if inner.overrun {
            return;
        }
        if inner.queue.len() >= self.capacity {
            inner.overrun = true;
            let element = self.object.load(Ordering::Relaxed);
            self.asynchronous.push(AsyncEvent { kind: IBV_EVENT_CQ_ERR, element });
            return;
        }
        inner.queue.push_back((wc, solicited));
        let notify = match inner.armed {
            Armed::No => false,
            Armed::Any => true,
            Armed::Solicited => solicited || wc.status != IBV_WC_SUCCESS,
        };
        if notify {
            self.notify(&mut inner);
        }
    }

    /// Takes up to `most` completions. `Err` after an overrun.
    pub(crate) fn poll(&self, most: usize, mut take: impl FnMut(ibv_wc)) -> Result<usize, ()> {
        let mut inner = lock(&self.inner);
        if inner.overrun && inner.queue.is_empty() {
            return Err(());
        }
        let count = most.min(inner.queue.len());
        inner.queue.drain(..count).for_each(|(wc, _)| take(wc));
        Ok(count)
    }

    /// Asks for one notification of the next completion that the program has not polled.
    ///
    /// A completion that arrived between its last poll and this call counts, as on ConnectX. Programs (UCX) rely on
    /// that: they arm and sleep without polling again.
    pub(crate) fn arm(self: &Arc<Self>, solicited_only: bool) {
        let mut inner = lock(&self.inner);
        let wanted = if solicited_only { Armed::Solicited } else { Armed::Any };
        // A request for solicited completions does not replace an earlier one for all.
        if inner.armed != Armed::Any {
            inner.armed = wanted;
        }
        let unpolled = match inner.armed {
            Armed::Any => !inner.queue.is_empty(),
            _ => {
                inner.queue.iter().any(|(wc, solicited)| *solicited || wc.status != IBV_WC_SUCCESS)
            }
        };
        if unpolled {
            self.notify(&mut inner);
        }
    }

    fn notify(self: &Arc<Self>, inner: &mut Inner) {
        inner.armed = Armed::No;
        if let Some(channel) = &self.channel {
            channel.push(self.clone());
        }
    }

    /// Removes the completions of a queue pair that is destroyed.
    pub(crate) fn forget(&self, qp_num: u32) {
        lock(&self.inner).queue.retain(|(wc, _)| wc.qp_num != qp_num);
    }

    /// Called before the queue is destroyed: raises no more events, and waits until all are acknowledged.
    pub(crate) fn retire(self: &Arc<Self>) {
        lock(&self.inner).overrun = true;
        if let Some(channel) = &self.channel {
            channel.withdraw(|other| Arc::ptr_eq(other, self));
        }
        let element = self.object.load(Ordering::Relaxed);
        self.asynchronous
            .withdraw(|event| event.kind == IBV_EVENT_CQ_ERR && event.element == element);
        self.unacknowledged.wait();
        self.unacknowledged_async.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(capacity: usize) -> (Arc<CompletionQueue>, Arc<Channel>, Arc<EventQueue<AsyncEvent>>) {
        let channel = Arc::new(Channel::new().unwrap());
        let events = Arc::new(EventQueue::new().unwrap());
        rustix::io::ioctl_fionbio(channel.fd(), true).unwrap();
        rustix::io::ioctl_fionbio(events.fd(), true).unwrap();
        let cq = CompletionQueue::new(capacity, Some(channel.clone()), events.clone());
        (Arc::new(cq), channel, events)
    }

    /// `a`: asked for any, `s`: for solicited ones, `p`: polled; completions: `.` plain, `!` solicited, `x` failed.
    #[test]
    fn each_arming_is_answered_once_by_a_completion_of_its_kind() {
        for (steps, notified) in [
            (".", 0),
            (".pa", 0),
            (".pa..", 1),
            // What was not polled counts.
            (".s", 0),
            (".sa", 1),
            (".a!", 1),
            (".a!s", 2),
            ("s.", 0),
            ("s.x", 1),
            ("s.xps!", 2),
        ] {
            let (cq, channel, _) = queue(9);
            for step in steps.chars() {
                match step {
                    'a' | 's' => cq.arm(step == 's'),
                    'p' => assert!(cq.poll(9, |_| ()).is_ok()),
                    _ => {
                        let status = if step == 'x' { 5 } else { IBV_WC_SUCCESS };
                        cq.push(ibv_wc { status, ..Default::default() }, step == '!');
                    }
                }
            }
            let events = std::iter::from_fn(|| channel.pop(|_| ()).ok()).count();
            assert_eq!(events, notified, "{steps}");
        }
    }

    #[test]
    fn an_overrun_raises_an_event_and_ends_the_queue() {
        let (cq, _, events) = queue(1);
        cq.push(ibv_wc { wr_id: 1, ..Default::default() }, false);
        cq.push(ibv_wc { wr_id: 2, ..Default::default() }, false);
        assert_eq!(events.pop(|event| event.kind), Ok(IBV_EVENT_CQ_ERR));
        let mut seen = Vec::new();
        assert_eq!(cq.poll(9, |wc| seen.push(wc.wr_id)), Ok(1));
        assert_eq!(seen, [1]);
        assert_eq!(cq.poll(9, |_| ()), Err(()));
    }

    #[test]
    fn completions_of_a_destroyed_queue_pair_vanish() {
        let (cq, ..) = queue(9);
        for qp_num in [7, 8, 7] {
            cq.push(ibv_wc { qp_num, ..Default::default() }, false);
        }
        cq.forget(7);
        assert_eq!(cq.poll(9, |wc| assert_eq!(wc.qp_num, 8)), Ok(1));
    }
}
