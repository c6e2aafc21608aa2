//! The locks of the cache. The model checker puts its own in their place.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
