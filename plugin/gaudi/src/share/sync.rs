//! The locks of the cache. The model checker replaces them with its own.

pub(crate) use std::sync::{Arc, Mutex, MutexGuard};
