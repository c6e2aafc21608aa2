//! Work on Gaudi memory through host memory, chunk by chunk: while the host works on one chunk, the
//! card copies the next one in and the last one out.

use core::array::from_fn;
use core::ffi::c_void;
use std::sync::{Mutex, PoisonError};

use crate::engine::{Copying, Engine};

/// Bytes of a chunk.
pub(crate) const CHUNK: usize = 1 << 20;

/// One operand of the work. Those in host memory are used as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Side {
    /// Where it begins.
    pub(crate) at: *mut c_void,
    /// Bytes from one item to the next.
    pub(crate) item: usize,
    /// Bytes of all.
    pub(crate) len: usize,
    /// Whether the work reads it.
    pub(crate) enters: bool,
    /// Whether the work writes it.
    pub(crate) leaves: bool,
}

impl Side {
    /// One that is a single item.
    pub(crate) fn whole(at: *mut c_void, len: usize, enters: bool, leaves: bool) -> Self {
        Self { at, item: len, len, enters, leaves }
    }
}

/// One chunk comes in, one is worked on, one goes out.
const SETS: usize = 3;

/// What is to be done, and host memory for it.
struct Stage<const N: usize> {
    engine: &'static Engine,
    sides: [Side; N],
    on_card: [bool; N],
    items: usize,
    step: usize,
    /// Where each side is in a set of chunks, in pages, and the pages of a set.
    starts: ([usize; N], usize),
    /// The first page of the buffers.
    pages: *mut Page,
    _buffers: Buffers,
}

/// Calls `work` for `step` items at a time, with addresses in host memory, the number of the first item and how many there are,
/// until a call fails.
///
/// # Safety
/// The operands are valid for so many items until this returns.
pub(crate) unsafe fn staged<const N: usize, E: From<String>>(
    engine: &'static Engine,
    sides: [Side; N],
    items: usize,
    step: usize,
    mut work: impl FnMut([*mut c_void; N], usize, usize) -> Result<(), E>,
) -> Result<(), E> {
    let stage = Stage::new(engine, sides, items, step)?;
    let chunks = items.div_ceil(step);
    // Dropped before the stage; the drop waits for the copies.
    let mut leaving: [[Copying; N]; SETS] = from_fn(|_| from_fn(|_| Copying::default()));
    let mut entering = stage.start(0, true)?;
    for chunk in 0..chunks {
        let mut entered = entering;
        entering = from_fn(|_| Copying::default());
        if chunk + 1 < chunks {
            leaving[(chunk + 1) % SETS].iter_mut().try_for_each(Copying::wait)?;
            entering = stage.start(chunk + 1, true)?;
        }
        entered.iter_mut().try_for_each(Copying::wait)?;
        let (first, count) = stage.part(chunk);
        let at = from_fn(|side| stage.place(chunk, side).1);
        work(at, first, count)?;
        leaving[chunk % SETS] = stage.start(chunk, false)?;
    }
    Ok(leaving.as_flattened_mut().iter_mut().try_for_each(Copying::wait)?)
}

impl<const N: usize> Stage<N> {
    fn new(
        engine: &'static Engine,
        sides: [Side; N],
        items: usize,
        step: usize,
    ) -> Result<Self, String> {
        let on_card = sides.map(|side| engine.owns(side.at));
        let mut set = 0;
        let starts = from_fn(|side| {
            let start = set;
            if on_card[side] {
                // At least one: an operand without bytes needs an address, too.
                set += (step.min(items) * sides[side].item).div_ceil(size_of::<Page>()).max(1);
            }
            start
        });
        let mut buffers = Buffers::take(engine, set * SETS.min(items.div_ceil(step)))?;
        let (starts, pages) = ((starts, set), buffers.0.as_mut_ptr());
        Ok(Self { engine, sides, on_card, items, step, starts, pages, _buffers: buffers })
    }

    /// The first item of a chunk, and how many it has.
    fn part(&self, chunk: usize) -> (usize, usize) {
        let first = chunk * self.step;
        (first, self.step.min(self.items - first))
    }

    /// Where a chunk of an operand is, and where in host memory.
    fn place(&self, chunk: usize, side: usize) -> (*mut c_void, *mut c_void) {
        // Items in host memory may go backwards.
        let offset = self.part(chunk).0.wrapping_mul(self.sides[side].item);
        let at = self.sides[side].at.wrapping_byte_add(offset);
        let page = (chunk % SETS) * self.starts.1 + self.starts.0[side];
        (at, if self.on_card[side] { self.pages.wrapping_add(page).cast() } else { at })
    }

    /// Starts to copy a chunk of all operands that the work reads, or writes.
    fn start(&self, chunk: usize, enters: bool) -> Result<[Copying; N], String> {
        let mut under_way: [Copying; N] = from_fn(|_| Copying::default());
        for (side, copy) in under_way.iter_mut().enumerate() {
            let wanted = if enters { self.sides[side].enters } else { self.sides[side].leaves };
            if !self.on_card[side] || !wanted {
                continue;
            }
            let (at, staged) = self.place(chunk, side);
            let (to, from) = if enters { (staged, at) } else { (at, staged) };
            let (Side { item, len, .. }, (first, count)) = (self.sides[side], self.part(chunk));
            let len = (count * item).min(len - first * item);
            // SAFETY: inside the operand and the buffer, both of which outlast the copy. Each of the
            // buffer's pages belongs to one copy, or to the work, at a time.
            *copy = unsafe {
                match self.items > self.step {
                    true => self.engine.start_copy(to, from, len)?,
                    // There is no other work to overlap with.
                    false => {
                        self.engine.copy_of_card(to, from, len).map(|()| Copying::default())?
                    }
                }
            };
        }
        Ok(under_way)
    }
}

/// Host memory, kept for the next time: it is pinned once.
struct Buffers(Vec<Page>, &'static Engine);

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; 4096]);

static KEPT: Mutex<Vec<Buffers>> = Mutex::new(Vec::new());
/// Larger buffers are kept only if no other is. So many pages hold the longest chunks of two operands of a few hundred ranks.
const MOST_KEPT: usize = SETS * 2 * 4 * CHUNK / size_of::<Page>();

impl Buffers {
    fn take(engine: &'static Engine, pages: usize) -> Result<Self, String> {
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = kept.unwrap_or(Self(Vec::new(), engine));
        if buffers.0.len() < pages {
            buffers.release();
            buffers.0.try_reserve_exact(pages).map_err(|_| {
                format!("no host memory to stage a collective in: {} MiB", pages >> 8)
            })?;
            buffers.0.resize(pages, Page([0; 4096]));
            let len = size_of_val(&buffers.0[..]);
            // SAFETY: `release` unregisters it.
            let registered = unsafe { engine.register(buffers.0.as_mut_ptr().cast(), len) };
            registered.inspect_err(|_| buffers.0 = Vec::new())?;
        }
        Ok(buffers)
    }

    fn release(&mut self) {
        if !self.0.is_empty() {
            // Was registered, so this cannot be refused.
            let _ = self.1.unregister(self.0.as_mut_ptr().cast());
            self.0 = Vec::new();
        }
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        if (1..=MOST_KEPT).contains(&self.0.len()) || (kept.is_empty() && !self.0.is_empty()) {
            kept.push(Self(core::mem::take(&mut self.0), self.1));
        }
        drop(kept);
        self.release();
    }
}
