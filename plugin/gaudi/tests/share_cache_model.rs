//! The cache of opened handles, run by loom in every order of events that matters: two threads that
//! open, release and evict the same handle.
//!
//! The file is the library's own, compiled a second time with loom's locks.

mod sync {
    pub(crate) use loom::sync::{Arc, Mutex, MutexGuard};
}

#[path = "../src/share/cache.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model uses part of it")]
mod cache;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use cache::{Cache, Found};
use loom::sync::Arc;
use loom::thread;

/// As the library's.
#[derive(Clone, Copy, Debug)]
struct Limits {
    handles: usize,
    bytes: u64,
}

/// What is open, and what ever was; loom need not watch it.
#[derive(Default)]
struct Tally {
    live: AtomicUsize,
    opened: AtomicUsize,
}

struct Handle(std::sync::Arc<Tally>);

impl Handle {
    fn open(tally: &std::sync::Arc<Tally>) -> Self {
        tally.live.fetch_add(1, Ordering::SeqCst);
        tally.opened.fetch_add(1, Ordering::SeqCst);
        Self(std::sync::Arc::clone(tally))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        assert!(self.0.live.fetch_sub(1, Ordering::SeqCst) > 0, "closed twice");
    }
}

type Handles = Cache<u32, Handle>;

struct Model {
    cache: Arc<Handles>,
    tally: std::sync::Arc<Tally>,
}

impl Clone for Model {
    fn clone(&self) -> Self {
        Self { cache: Arc::clone(&self.cache), tally: std::sync::Arc::clone(&self.tally) }
    }
}

impl Model {
    fn new(handles: usize) -> Self {
        let cache = Arc::new(Cache::new(Limits { handles, bytes: 1 << 20 }));
        Self { cache, tally: std::sync::Arc::default() }
    }

    fn open(&self, key: u32) -> Found<Handle> {
        let opened = self.cache.open(key, || {
            // Others may run while it is being opened.
            thread::yield_now();
            Ok::<_, ()>((Handle::open(&self.tally), 4096))
        });
        drop(self.cache.trim());
        opened.expect("it opens")
    }

    fn close(&self, found: Found<Handle>) {
        drop(found);
        drop(self.cache.trim());
    }

    fn live(&self) -> usize {
        self.tally.live.load(Ordering::SeqCst)
    }

    fn opened(&self) -> usize {
        self.tally.opened.load(Ordering::SeqCst)
    }
}

/// Every order there is.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    explore_within(None, model);
}

/// Every order with at most so many switches that nothing forces.
fn explore_within(switches: Option<usize>, model: impl Fn() + Sync + Send + 'static) {
    let runs = std::sync::Arc::new(AtomicUsize::new(0));
    let counter = std::sync::Arc::clone(&runs);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = switches;
    builder.check(move || {
        counter.fetch_add(1, Ordering::Relaxed);
        model();
    });
    let runs = runs.load(Ordering::Relaxed);
    println!("{runs} orders of events");
    assert!(runs > 1, "the threads did not meet");
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    #[test]
    fn two_threads_that_open_the_same_share_one_handle() {
        explore(|| {
            let model = Model::new(8);
            let other = model.clone();
            let thread = thread::spawn(move || {
                let found = other.open(1);
                assert_eq!(other.live(), 1);
                other.close(found);
            });
            let found = model.open(1);
            assert_eq!(model.live(), 1, "never two at once");
            model.close(found);
            thread.join().unwrap();
            assert_eq!((model.opened(), model.live()), (1, 1), "opened once, and kept");
            assert_eq!(model.cache.size(), (1, 4096));
        });
    }

    #[test]
    fn without_room_a_handle_lives_exactly_as_long_as_its_users() {
        explore(|| {
            let model = Model::new(0);
            let other = model.clone();
            let thread = thread::spawn(move || {
                let found = other.open(1);
                assert!(other.live() >= 1);
                other.close(found);
            });
            let found = model.open(1);
            assert!(model.live() >= 1);
            model.close(found);
            thread.join().unwrap();
            assert_eq!(model.live(), 0);
            assert_eq!(model.cache.size(), (0, 0));
            assert!(model.opened() <= 2);
        });
    }

    #[test]
    fn a_peer_that_ends_while_it_is_opened_is_not_kept() {
        explore(|| {
            let model = Model::new(8);
            // Whether the eviction has begun, and has finished.
            let evicting = std::sync::Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
            let (other, seen) = (model.clone(), std::sync::Arc::clone(&evicting));
            // The keeper: the peer has ended.
            let thread = thread::spawn(move || {
                seen.0.store(true, Ordering::SeqCst);
                drop(other.cache.evict(|_| true));
                seen.1.store(true, Ordering::SeqCst);
            });
            let mut during = false;
            let opened = model.cache.open(1, || {
                let before = evicting.0.load(Ordering::SeqCst);
                thread::yield_now();
                during = !before && evicting.1.load(Ordering::SeqCst);
                Ok::<_, ()>((Handle::open(&model.tally), 4096))
            });
            assert_eq!(model.live(), 1, "in use, so open, whatever happens");
            model.close(opened.unwrap());
            if during {
                assert_eq!(model.live(), 0, "opened of a peer that has ended, and kept");
            }
            thread.join().unwrap();
            // Else it may be kept, if the eviction came before.
            let (kept, bytes) = model.cache.size();
            assert_eq!((model.live(), bytes), (kept, 4096 * kept as u64));
            drop(model.cache.evict(|_| true));
            assert_eq!((model.live(), model.cache.size()), (0, (0, 0)));
        });
    }

    #[test]
    fn an_eviction_between_two_users_makes_two_handles_and_closes_both() {
        explore(|| {
            let model = Model::new(8);
            let first = model.open(1);
            let other = model.clone();
            let thread = thread::spawn(move || {
                drop(other.cache.evict(|key| *key == 1));
                let found = other.open(1);
                assert!(!found.hit, "not the one that was evicted");
                other.close(found);
            });
            model.close(first);
            thread.join().unwrap();
            assert_eq!((model.opened(), model.live()), (2, 1));
            assert_eq!(model.cache.size(), (1, 4096));
        });
    }

    #[test]
    fn who_waited_for_an_opening_that_failed_tries_for_himself() {
        explore(|| {
            let model = Model::new(8);
            let other = model.clone();
            let thread = thread::spawn(move || {
                let failed = other.cache.open(1, || {
                    thread::yield_now();
                    Err::<(Handle, u64), _>("no")
                });
                // Either it failed, or the other was faster.
                match failed {
                    Ok(found) => {
                        assert!(found.hit);
                        other.close(found);
                    }
                    Err(why) => assert_eq!(why, "no"),
                }
            });
            let found = model.open(1);
            model.close(found);
            thread.join().unwrap();
            assert_eq!((model.opened(), model.live()), (1, 1));
        });
    }

    #[test]
    fn two_users_and_an_eviction_at_once_close_whatever_they_opened() {
        // Without a bound there are 204,743 orders, which hold too and take a minute.
        explore_within(Some(2), || {
            let model = Model::new(8);
            let (user, keeper) = (model.clone(), model.clone());
            let threads = [
                thread::spawn(move || {
                    let found = user.open(1);
                    user.close(found);
                }),
                thread::spawn(move || drop(keeper.cache.evict(|_| true))),
            ];
            let found = model.open(1);
            assert!(model.live() >= 1);
            model.close(found);
            threads.into_iter().for_each(|thread| thread.join().unwrap());
            let (kept, _) = model.cache.size();
            assert_eq!(model.live(), kept);
            assert!(model.opened() <= 2);
        });
    }
}
