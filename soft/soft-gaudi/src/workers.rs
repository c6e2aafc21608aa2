//! Threads that run queues when the program's own threads do not.
//!
//! No worker exists until a submission has not ended when its submitter has run what it may: it is too large, waits, or
//! its end is reported later. Workers belong to the process, not to a card. There are at most as many as processors,
//! but at least two and at most eight may exist.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::context::Context;

#[derive(Default)]
struct Pool {
    state: Mutex<PoolState>,
    work: Condvar,
    /// Set when a task is queued, for the worker that polls instead of sleeping.
    has_tasks: AtomicBool,
}

#[derive(Default)]
struct PoolState {
    tasks: VecDeque<(Arc<Context>, u32)>,
    /// Tasks that are not due yet, in order of time.
    later: VecDeque<(Instant, Arc<Context>, u32)>,
    /// Contexts with submissions in flight, whose timeouts an idle worker checks.
    watched: Vec<Weak<Context>>,
    threads: usize,
    /// Workers that sleep until they are woken.
    idle: usize,
    /// One worker polls [`Pool::has_tasks`] and needs no waking.
    polling: bool,
}

/// How long a worker polls for the next task before it sleeps. The queue of a real card needs no wake; without polling,
/// a copy that follows another would wait for a futex.
const POLL: Duration = Duration::from_micros(50);

/// Most bytes that a worker moves for one queue before it serves others.
const TURN_BYTES: u64 = 16 << 20;

/// Counts forks: a child has none of its parent's threads and contexts, and gets its own pool.
static FORKS: AtomicU64 = AtomicU64::new(0);
static POOL: AtomicPtr<Pool> = AtomicPtr::new(core::ptr::null_mut());

/// A number that differs between a process and its forked children.
pub(crate) fn fork_generation() -> u64 {
    static REGISTERED: OnceLock<()> = OnceLock::new();
    REGISTERED.get_or_init(|| {
        // SAFETY: the handler only touches atomics.
        unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
    });
    FORKS.load(Ordering::Relaxed)
}

extern "C" fn in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    // The parent's pool may be locked, and its threads do not exist in the child: leak it and start without one.
    POOL.store(core::ptr::null_mut(), Ordering::Relaxed);
    crate::ring::forget_after_fork();
}

fn pool() -> &'static Pool {
    let mut current = POOL.load(Ordering::Acquire);
    if current.is_null() {
        let fresh = Box::into_raw(Box::<Pool>::default());
        match POOL.compare_exchange(current, fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => current = fresh,
            Err(winner) => {
                // SAFETY: `fresh` was never shared.
                drop(unsafe { Box::from_raw(fresh) });
                current = winner;
            }
        }
    }
    // SAFETY: a pool is never freed once published.
    unsafe { &*current }
}

/// Queues a task for the workers: run this queue. Starts a worker if all are busy.
pub(crate) fn enqueue(context: Arc<Context>, queue: u32) {
    // Already listed: the worker that takes it from the list runs all jobs that are queued by then.
    if context.queues[queue as usize].listed.swap(true, Ordering::AcqRel) {
        return;
    }
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.tasks.push_back((context, queue));
    pool.has_tasks.store(true, Ordering::Release);
    // The polling worker takes the first task; each further one needs another worker.
    if !state.polling || state.tasks.len() > 1 {
        wake_or_start(pool, &mut state, max_threads());
    }
    if state.threads == 0
        && let Some((context, queue)) = state.tasks.pop_back()
    {
        // No worker could be started. Waiting threads run their own work, and the next call tries again.
        context.queues[queue as usize].listed.store(false, Ordering::Release);
    }
}

/// As [`enqueue`], after a delay, which is the same for all tasks of a process.
pub(crate) fn enqueue_after(context: Arc<Context>, queue: u32, delay: Duration) {
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.later.push_back((Instant::now() + delay, context, queue));
    wake_or_start(pool, &mut state, max_threads());
}

/// Removes the tasks of a closed context: their references would keep its memory and descriptors.
pub(crate) fn forget_context(context: &Arc<Context>) {
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // The caller has a reference to `context`, so no context is dropped under the lock.
    state.tasks.retain(|(of, _)| !Arc::ptr_eq(of, context));
    state.later.retain(|(_, of, _)| !Arc::ptr_eq(of, context));
}

/// Moves delayed tasks that are due to `tasks`; returns the time until the next is due.
fn promote_due(state: &mut PoolState) -> Option<Duration> {
    let now = Instant::now();
    while let Some((due, ..)) = state.later.front() {
        if *due > now {
            return Some(*due - now);
        }
        state.tasks.extend(state.later.pop_front().map(|(_, context, queue)| (context, queue)));
    }
    None
}

/// Makes an idle worker check a context's timeouts until nothing is in flight.
pub(crate) fn watch(context: &Arc<Context>) {
    // SeqCst, like the increment of `in_flight` before it: pairs with `contexts_in_flight`.
    if context.watched.swap(true, Ordering::SeqCst) {
        return;
    }
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.watched.push(Arc::downgrade(context));
    wake_or_start(pool, &mut state, 1);
}

/// Wakes a worker, or starts one if none is idle.
fn wake_or_start(pool: &'static Pool, state: &mut PoolState, most: usize) {
    if state.idle > 0 {
        pool.work.notify_one();
    } else if state.threads < most && start(pool, state.threads + 1) {
        // If no thread can be started, waiting threads still run their own work.
        state.threads += 1;
    }
}

fn max_threads() -> usize {
    static MAX: OnceLock<usize> = OnceLock::new();
    *MAX.get_or_init(|| std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8))
}

fn start(pool: &'static Pool, number: usize) -> bool {
    spawn(format!("soft-gaudi-{number}"), move || work(pool))
}

/// Starts a thread that blocks the program's signals; false if it cannot be started.
pub(crate) fn spawn(name: String, body: impl FnOnce() + Send + 'static) -> bool {
    // A thread inherits its creator's mask, so block the signals around the spawn.
    let before = block_signals();
    let started = std::thread::Builder::new().name(name).spawn(body).is_ok();
    // SAFETY: restores the mask that was in place.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &before, core::ptr::null_mut()) };
    started
}

fn block_signals() -> libc::sigset_t {
    // SAFETY: sigsets are plain data, initialised by the calls; faults stay deliverable.
    unsafe {
        let mut all: libc::sigset_t = core::mem::zeroed();
        let mut before: libc::sigset_t = core::mem::zeroed();
        libc::sigfillset(&mut all);
        for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT] {
            libc::sigdelset(&mut all, fault);
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
        before
    }
}

fn work(pool: &'static Pool) {
    let lock = || pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let mut state = lock();
    let mut last_work = Instant::now();
    loop {
        let next = promote_due(&mut state);
        if let Some((context, queue)) = state.tasks.pop_front() {
            drop(state);
            context.queues[queue as usize].listed.store(false, Ordering::Release);
            let mut budget = TURN_BYTES;
            context.run(queue, &mut budget);
            context.run_ready(&mut budget);
            drop(context);
            last_work = Instant::now();
            state = lock();
            continue;
        }
        pool.has_tasks.store(false, Ordering::Relaxed);
        if last_work.elapsed() < POLL && !state.polling {
            state.polling = true;
            drop(state);
            while !pool.has_tasks.load(Ordering::Acquire) && last_work.elapsed() < POLL {
                std::thread::yield_now();
            }
            state = lock();
            state.polling = false;
            continue;
        }
        let (timeout, busy) = contexts_in_flight(&mut state);
        state.idle += 1;
        state = sleep(pool, state, next.into_iter().chain(timeout).min());
        state.idle -= 1;
        if !busy.is_empty() {
            drop(state);
            busy.iter().for_each(|context| context.check_timeout());
            drop(busy);
            state = lock();
        }
    }
}

/// Sleeps until woken, at most `limit`.
fn sleep<'a>(
    pool: &'a Pool,
    state: MutexGuard<'a, PoolState>,
    limit: Option<Duration>,
) -> MutexGuard<'a, PoolState> {
    match limit {
        Some(limit) => {
            let waited = pool.work.wait_timeout(state, limit);
            waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
        }
        None => pool.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
    }
}

/// When to check timeouts next, and the contexts with work in flight; removes the others from the list.
fn contexts_in_flight(state: &mut PoolState) -> (Option<Duration>, Vec<Arc<Context>>) {
    let mut busy = Vec::new();
    state.watched.retain(|watched| {
        let Some(context) = watched.upgrade() else { return false };
        context.watched.store(false, Ordering::SeqCst);
        // A submission raises `in_flight`, then swaps `watched`; we clear `watched`, then load `in_flight`. All are
        // SeqCst: so either we see the submission here, or it sees `watched` cleared and lists the context again.
        if context.in_flight.load(Ordering::SeqCst) == 0 {
            return false;
        }
        // Such a submission has set it again: the context is on the list twice.
        let twice = context.watched.swap(true, Ordering::SeqCst);
        busy.push(context);
        !twice
    });
    // Ends without a waiting thread are reported by the worker, some time after they are due.
    let limit = |context: &Arc<Context>| match context.timing.is_instant() {
        true => context.until_timeout(),
        false => Duration::from_millis(1),
    };
    (busy.iter().map(limit).min(), busy)
}
