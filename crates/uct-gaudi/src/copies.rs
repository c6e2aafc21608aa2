//! The copies an interface has under way, in the order they were posted.

use std::cell::{Cell, RefCell};

use gaudi::{Error, Transfer};
use uct::{Completion, Posted};

enum Entry {
    Copy(Transfer, Completion),
    /// Ends when everything in front of it has ended.
    Flush(Completion),
}

/// What came of the copies that ended.
pub(crate) type Ended = Vec<(Completion, Result<(), Error>)>;

/// Copies and flushes under way. Used under the worker's lock; no borrow outlives a call here, so
/// that UCX's callbacks may post more.
#[derive(Default)]
pub(crate) struct Copies {
    entries: RefCell<Vec<Entry>>,
    /// A fence was asked for while copies were under way: nothing may start before they end.
    fenced: Cell<bool>,
}

impl Copies {
    pub(crate) fn is_idle(&self) -> bool {
        self.entries.borrow().is_empty()
    }

    /// Whether a fence holds new copies back.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.get()
    }

    /// Holds back what comes until what is under way has ended.
    pub(crate) fn fence(&self) {
        self.fenced.set(!self.is_idle());
    }

    /// Keeps a copy that was started.
    pub(crate) fn add(&self, transfer: Transfer, completion: Completion) -> Posted {
        self.entries.borrow_mut().push(Entry::Copy(transfer, completion));
        Posted::Later
    }

    /// Completes when everything so far has.
    pub(crate) fn flush(&self, completion: Completion) -> Posted {
        if self.is_idle() {
            return Posted::Done(completion);
        }
        if completion.is_wanted() {
            self.entries.borrow_mut().push(Entry::Flush(completion));
        }
        Posted::Later
    }

    /// Takes out what has ended. Never blocks.
    pub(crate) fn reap(&self) -> Ended {
        let mut ended = Ended::new();
        let mut entries = self.entries.borrow_mut();
        let mut still_running = false;
        let mut kept = Vec::with_capacity(entries.len());
        for entry in entries.drain(..) {
            match entry {
                Entry::Copy(mut transfer, completion) => match transfer.poll() {
                    Some(result) => ended.push((completion, result)),
                    None => {
                        still_running = true;
                        kept.push(Entry::Copy(transfer, completion));
                    }
                },
                Entry::Flush(completion) if !still_running => ended.push((completion, Ok(()))),
                flush @ Entry::Flush(_) => kept.push(flush),
            }
        }
        *entries = kept;
        if entries.is_empty() {
            self.fenced.set(false);
        }
        ended
    }
}
