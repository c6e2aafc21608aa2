//! Compares the cache with a model that is too simple to be wrong. `tests/share_cache_model.rs` tests it with threads.

use std::sync::Arc;

use proptest::prelude::*;

use super::Limits;
use super::cache::Cache;

#[derive(Clone, Debug)]
enum Step {
    Open { key: u8, bytes: u64, fails: bool },
    Close(usize),
    Find(u8),
    Evict(u8),
    EvictIdle(u8),
    Limit { handles: usize, bytes: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..6_u8, 1..50_u64, prop::bool::weighted(0.1))
            .prop_map(|(key, bytes, fails)| Step::Open { key, bytes, fails }),
        6 => any::<usize>().prop_map(Step::Close),
        2 => (0..6_u8).prop_map(Step::Find),
        1 => (0..6_u8).prop_map(Step::Evict),
        1 => (0..6_u8).prop_map(Step::EvictIdle),
        1 => (0..5_usize, 0..120_u64).prop_map(|(handles, bytes)| Step::Limit { handles, bytes }),
    ];
    prop::collection::vec(step, 1..120)
}

/// A handle the cache should have, oldest use first.
#[derive(Clone, Debug, PartialEq)]
struct Kept {
    key: u8,
    bytes: u64,
    id: u64,
    users: usize,
}

struct Model {
    limits: Limits,
    kept: Vec<Kept>,
}

impl Model {
    fn trim(&mut self) {
        let over = |model: &Self| {
            model.kept.len() > model.limits.handles
                || model.kept.iter().map(|kept| kept.bytes).sum::<u64>() > model.limits.bytes
        };
        while over(self) {
            let Some(idle) = self.kept.iter().position(|kept| kept.users == 0) else { return };
            self.kept.remove(idle);
        }
    }

    fn used(&mut self, key: u8) -> Option<&mut Kept> {
        let at = self.kept.iter().position(|kept| kept.key == key)?;
        let kept = self.kept.remove(at);
        self.kept.push(kept);
        self.kept.last_mut()
    }
}

proptest! {
    #[test]
    fn the_cache_agrees_with_a_model_over_any_sequence(steps in steps()) {
        let limits = Limits { handles: 3, bytes: 100 };
        let cache: Cache<u8, u64> = Cache::new(limits);
        let mut model = Model { limits, kept: Vec::new() };
        let mut used: Vec<Arc<u64>> = Vec::new();
        let mut next = 0;
        for step in steps {
            match step {
                Step::Open { key, bytes, fails } => {
                    next += 1;
                    let opened = cache.open(key, || if fails { Err(()) } else { Ok((next, bytes)) });
                    let known = model.used(key).map(|kept| {
                        kept.users += 1;
                        kept.id
                    });
                    match (opened, known) {
                        (Ok(found), known) => {
                            prop_assert_eq!(found.hit, known.is_some());
                            prop_assert_eq!(*found.value, known.unwrap_or(next));
                            if known.is_none() {
                                model.kept.push(Kept { key, bytes, id: next, users: 1 });
                            }
                            used.push(found.value);
                        }
                        (Err(()), known) => prop_assert!(fails && known.is_none()),
                    }
                }
                Step::Close(pick) if !used.is_empty() => {
                    let value = used.swap_remove(pick % used.len());
                    if let Some(kept) = model.kept.iter_mut().find(|kept| kept.id == *value) {
                        kept.users -= 1;
                    }
                }
                Step::Close(_) => {}
                Step::Find(key) => {
                    let found = cache.find(&key).map(|value| *value);
                    prop_assert_eq!(found, model.used(key).map(|kept| kept.id));
                }
                Step::EvictIdle(key) => {
                    let evicted = cache.evict_idle(|candidate| *candidate == key);
                    let before = model.kept.len();
                    model.kept.retain(|kept| kept.key != key || kept.users > 0);
                    prop_assert_eq!(evicted.len(), before - model.kept.len());
                }
                Step::Evict(key) => {
                    cache.evict(|candidate| *candidate == key);
                    model.kept.retain(|kept| kept.key != key);
                }
                Step::Limit { handles, bytes } => {
                    model.limits = Limits { handles, bytes };
                    cache.set_limits(model.limits);
                }
            }
            cache.trim();
            model.trim();
            let bytes = model.kept.iter().map(|kept| kept.bytes).sum::<u64>();
            prop_assert_eq!(cache.size(), (model.kept.len(), bytes));
        }
    }
}
