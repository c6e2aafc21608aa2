//! Threads that run queues when the program's own threads do not.
//!
//! None exists until a submission is too large to be run by its submitter. They belong to the
//! process, not to a card, and are as many as there are processors, at most eight.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use crate::context::Context;

#[derive(Default)]
struct Pool {
    state: Mutex<PoolState>,
    work: Condvar,
}

#[derive(Default)]
struct PoolState {
    tasks: VecDeque<(Arc<Context>, u32)>,
    /// Tasks whose time has not come yet; the first is the next.
    later: VecDeque<(Instant, Arc<Context>, u32)>,
    /// Contexts with submissions in flight, whose timeouts an idle worker minds.
    watched: Vec<Weak<Context>>,
    threads: usize,
    idle: usize,
}

/// Counts forks: a child starts with threads, contexts and the pool of nobody.
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
    // The parent's pool may be locked and its threads are not here: begin anew, leak the old one.
    POOL.store(core::ptr::null_mut(), Ordering::Relaxed);
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

/// Leaves a queue to the workers, starting one if all are busy.
pub(crate) fn run_later(context: Arc<Context>, queue: u32) {
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.tasks.push_back((context, queue));
    wake_or_start(pool, state, most_threads());
}

/// Leaves a queue to the workers after some time, the same for all tasks of a process.
pub(crate) fn run_after(context: Arc<Context>, queue: u32, delay: Duration) {
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.later.push_back((Instant::now() + delay, context, queue));
    wake_or_start(pool, state, most_threads());
}

/// Makes tasks of those whose time has come; how long until the next.
fn promote(state: &mut PoolState) -> Option<Duration> {
    let now = Instant::now();
    while let Some((due, ..)) = state.later.front() {
        if *due > now {
            return Some(*due - now);
        }
        state.tasks.extend(state.later.pop_front().map(|(_, context, queue)| (context, queue)));
    }
    None
}

/// Lets an idle worker mind a context's timeouts until nothing is in flight any more.
pub(crate) fn watch(context: &Arc<Context>) {
    if context.watched.swap(true, Ordering::AcqRel) {
        return;
    }
    let pool = pool();
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    state.watched.push(Arc::downgrade(context));
    wake_or_start(pool, state, 1);
}

fn wake_or_start(pool: &'static Pool, mut state: MutexGuard<'_, PoolState>, most: usize) {
    if state.idle > 0 {
        pool.work.notify_one();
    } else if state.threads < most {
        state.threads += 1;
        let started = start(pool, state.threads);
        if !started {
            // Waiters run their own work; without memory for a thread that has to be enough.
            state.threads -= 1;
        }
    }
}

fn most_threads() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 8))
}

fn start(pool: &'static Pool, number: usize) -> bool {
    // The program's signals are not for these threads; masks are inherited, so set it around.
    let before = block_signals();
    let thread = std::thread::Builder::new().name(format!("soft-gaudi-{number}"));
    let started = thread.spawn(move || work(pool)).is_ok();
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
    let mut state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    loop {
        let next = if state.later.is_empty() { None } else { promote(&mut state) };
        match state.tasks.pop_front() {
            Some((context, queue)) => {
                drop(state);
                let mut unlimited = u64::MAX;
                context.run(queue, &mut unlimited);
                context.run_ready(&mut unlimited);
                drop(context);
                state = pool.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            None => {
                let (limit, busy) = next_timeout(&mut state);
                let limit = limit.into_iter().chain(next).min();
                state.idle += 1;
                state = match limit {
                    Some(limit) => {
                        let waited = pool.work.wait_timeout(state, limit);
                        waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0
                    }
                    None => pool.work.wait(state).unwrap_or_else(|poisoned| poisoned.into_inner()),
                };
                state.idle -= 1;
                for context in busy {
                    context.check_timeout();
                }
            }
        }
    }
}

/// When to look at timeouts again, and the contexts with work in flight; forgets the others.
fn next_timeout(state: &mut PoolState) -> (Option<Duration>, Vec<Arc<Context>>) {
    let mut busy = Vec::new();
    state.watched.retain(|watched| {
        let Some(context) = watched.upgrade() else { return false };
        context.watched.store(false, Ordering::Release);
        // Checked after the flag is down: whoever submits now either is seen or watches anew.
        if context.in_flight.load(Ordering::Acquire) == 0 {
            return false;
        }
        context.watched.store(true, Ordering::Release);
        busy.push(context);
        true
    });
    (busy.iter().map(|context| context.until_timeout()).min(), busy)
}
