//! Device memory: large pages from the driver, a pool that divides them into allocations, and a table
//! that finds allocations by address.

mod pool;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hl_thunk::ExportCall;
pub(crate) use table::{AddressTable, DeviceRange};

use crate::backend::{Backend, Geometry, MapOutcome, Page, Placement};
use crate::stats::{Counter, Counts};
use crate::window::find_gap;
use crate::{DeviceAddr, DeviceId, Error, ErrorKind};
use pool::{GRANULE, Pool, SpanInfo};

/// The allocation that an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Location {
    /// The open device.
    pub device_id: DeviceId,
    /// First address of the allocation.
    pub base: DeviceAddr,
    /// Length of the allocation.
    pub length: u64,
    /// Offset of the address in the allocation.
    pub offset: u64,
}

/// How much memory a device has and how it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes of device memory that can be allocated in total.
    pub total: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// Bytes in live allocations (rounded to the pool's granule).
    pub used: u64,
    /// Number of live allocations.
    pub allocations: usize,
}

/// How much of a page an export covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The whole page, which its allocations share. Made with this driver call; `None`: with the best there is.
    Page(Option<ExportCall>),
    /// Only the range, rounded out to 4 KiB.
    Alone,
}

/// A device's memory: the driver's pages, and the pool over them.
#[derive(Debug)]
pub(crate) struct Memory {
    window: Range<u64>,
    geometry: Geometry,
    counts: Counts,
    /// The foreign pool (a framework's) that contains all of it, if any: exports are made from that.
    pool: Option<Box<dyn Page>>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    pool: Pool,
    /// The driver's page under each span of the pool.
    pages: BTreeMap<u64, Box<dyn Page>>,
    /// Ranges of the window that others use and we avoid: first address and length.
    obstacles: Vec<(u64, u64)>,
}

const ALLOCATING: &str = "allocating device memory";
const EXPORTING: &str = "exporting a dma-buf";

impl Memory {
    pub(crate) fn new(
        window: Range<u64>,
        geometry: Geometry,
        pool: Option<Box<dyn Page>>,
        counts: Counts,
    ) -> Self {
        Self { window, geometry, counts, pool, state: Mutex::default() }
    }

    /// Whether this memory is in a foreign pool.
    pub(crate) fn is_in_pool(&self) -> bool {
        self.pool.is_some()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `len` bytes from the pool, which grows by new pages from the driver if necessary. `refused`: pages
    /// that the driver would not take back for this allocation; they are not offered to it again.
    pub(crate) fn take(
        &self,
        backend: &dyn Backend,
        (len, align): (u64, u64),
        refused: &mut BTreeSet<u64>,
    ) -> Result<u64, Error> {
        let invalid = |detail: String, remedy| {
            Err(Error::new(ErrorKind::InvalidParams, ALLOCATING, detail, remedy))
        };
        if len == 0 {
            return invalid("nothing was asked for".into(), "ask for at least one byte");
        }
        if !align.is_power_of_two() {
            return invalid(format!("alignment {align} is not a power of two"), "");
        }
        let mut state = self.state();
        if let Some(addr) = state.pool.take(len, align) {
            return Ok(addr);
        }
        self.grow(&mut state, backend, (len, align), refused)?;
        state.pool.take(len, align).ok_or_else(|| self.exhausted(&state, len))
    }

    /// Adds enough pages for `len` bytes. The driver logs an error in the kernel log when a request exceeds its
    /// free memory, and when an exported page is returned to it: so it is called only if that can help.
    fn grow(
        &self,
        state: &mut State,
        backend: &dyn Backend,
        (len, align): (u64, u64),
        refused: &mut BTreeSet<u64>,
    ) -> Result<(), Error> {
        let page = self.geometry.page;
        // Pages are aligned to some large power of two, but `align` may be larger.
        let whole = Pool::needed(len, align).and_then(|need| need.checked_next_multiple_of(page));
        let Some(bytes) = whole.filter(|&bytes| bytes <= self.geometry.total) else {
            return Err(self.exhausted(state, len));
        };
        let reserved: u64 = state.pool.spans().map(|span| span.len).sum();
        let room = self.geometry.total.saturating_sub(reserved);
        let room = backend.free_memory().map_or(room, |free| free.min(room));
        let missing = bytes.saturating_sub(room);
        let spare: u64 = spares(state, refused).iter().map(|span| span.len).sum();
        if spare < missing || self.give_back_spares(state, missing, refused) < missing {
            return Err(self.exhausted(state, bytes));
        }
        let first = match self.add_page(state, backend, bytes) {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => error,
            other => return other,
        };
        // Another thread took the memory first, or the window has no free addresses.
        match self.give_back_spares(state, u64::MAX, refused) {
            0 => Err(first),
            _ => self.add_page(state, backend, bytes),
        }
    }

    /// Returns unused pages to the driver until at least `bytes` bytes were returned. Returns how many were.
    /// Pages that the driver is certain to take come first.
    fn give_back_spares(&self, state: &mut State, bytes: u64, refused: &mut BTreeSet<u64>) -> u64 {
        let mut returned = 0;
        for span in spares(state, refused) {
            if returned >= bytes {
                break;
            }
            if self.give_back(state, span, true) {
                returned += span.len;
            } else {
                refused.insert(span.start);
            }
        }
        returned
    }

    fn add_page(&self, state: &mut State, backend: &dyn Backend, bytes: u64) -> Result<(), Error> {
        if let Placement::Pool { .. } = self.geometry.placement {
            let (at, page) = backend.take_from_pool(bytes)?;
            self.add(state, at.0, bytes, page);
            return Ok(());
        }
        let mut instead = None;
        while let Some(at) = self.gap(state, bytes) {
            let taken = backend.take_page(DeviceAddr(at), bytes).map_err(|error| {
                let usual = error.errno() == Some(libc::ENOMEM);
                if usual { self.exhausted(state, bytes) } else { error }
            })?;
            match taken {
                MapOutcome::Page(page) => {
                    self.add(state, at, bytes, page);
                    return Ok(());
                }
                // A foreign mapping is in the way. It is at most as large as the card's memory: skip that much.
                MapOutcome::Elsewhere(addr) => {
                    state.obstacles.push((at, self.geometry.total.max(bytes)));
                    instead = Some((at, addr));
                }
            }
        }
        let Some((at, instead)) = instead else { return Err(self.exhausted(state, bytes)) };
        let detail = format!("the driver maps at {instead} instead of {}", DeviceAddr(at));
        let remedy = "another part of this process may use the card's address space; report this";
        Err(Error::new(ErrorKind::OutOfMemory, ALLOCATING, detail, remedy))
    }

    fn add(&self, state: &mut State, at: u64, bytes: u64, page: Box<dyn Page>) {
        state.pages.insert(at, page);
        state.pool.add_span(at, bytes);
        self.counts.add(Counter::ReservedBytes, bytes);
    }

    /// A free address for `bytes` of new pages.
    fn gap(&self, state: &State, bytes: u64) -> Option<u64> {
        match self.geometry.placement {
            Placement::Physical(_) if !state.pages.is_empty() => None,
            Placement::Physical(base) => Some(base),
            Placement::Pool { .. } => None,
            Placement::Window => {
                // The driver honours a hint only if the free addresses continue beyond the mapping:
                // keep a page of addresses free behind each mapping.
                let page = self.geometry.page;
                let spans = state.pool.spans().map(|span| (span.start, span.len + page));
                let mut taken: Vec<_> = spans.chain(state.obstacles.iter().copied()).collect();
                taken.sort_unstable();
                find_gap(&self.window, taken.into_iter(), page, bytes.checked_add(page)?)
            }
        }
    }

    fn exhausted(&self, state: &State, len: u64) -> Error {
        let detail = format!(
            "not enough device memory for {len} bytes: {} of {} bytes are allocated in {} pieces",
            state.pool.used(),
            self.geometry.total,
            state.pool.allocations()
        );
        let mut error = Error::new(
            ErrorKind::OutOfMemory,
            ALLOCATING,
            detail,
            "free device memory or use another card",
        );
        error.set_errno(libc::ENOMEM);
        error
    }

    /// Frees an allocation. One empty page is kept for the next allocation; others are returned to
    /// the driver.
    pub(crate) fn give(&self, addr: u64) {
        let mut state = self.state();
        if let Some(emptied) = state.pool.give(addr) {
            let only_spare = state.pool.empty_spans().len() == 1;
            if !(only_spare && emptied.len == self.geometry.page) {
                self.give_back(&mut state, emptied, false);
            }
        }
    }

    /// Whether the address lies in one of our pages.
    pub(crate) fn has(&self, addr: u64) -> bool {
        self.state().pool.span_at(addr).is_some()
    }

    /// Whether [`Memory::export`] can export this address.
    pub(crate) fn exports(&self, addr: u64) -> bool {
        self.is_in_pool() || self.has(addr)
    }

    /// A dma-buf for a range inside one allocation (or the foreign pool), and the range's offset in the dma-buf.
    pub(crate) fn export(
        &self,
        addr: u64,
        len: u64,
        extent: Extent,
    ) -> Result<(OwnedFd, u64), Error> {
        let state = self.state();
        let found = match &self.pool {
            Some(pool) => Some((pool, addr - self.window.start)),
            None => state.pool.span_at(addr).and_then(|span| {
                let page = state.pages.get(&span.start)?;
                Some((page, addr - span.start))
            }),
        };
        let Some((page, offset)) = found else {
            let detail = format!("{} is not device memory", DeviceAddr(addr));
            return Err(Error::new(ErrorKind::InvalidParams, EXPORTING, detail, ""));
        };
        if let Extent::Page(call) = extent {
            return Ok((page.export_whole(call, self.counts)?, offset));
        }
        let start = offset & !(GRANULE - 1);
        let end = (offset + len).next_multiple_of(GRANULE);
        Ok((page.export_part(start, end - start, self.counts)?, offset - start))
    }

    pub(crate) fn info(&self) -> MemoryInfo {
        let state = self.state();
        MemoryInfo {
            total: self.geometry.total,
            reserved: state.pool.spans().map(|span| span.len).sum(),
            used: state.pool.used(),
            allocations: state.pool.allocations(),
        }
    }

    /// Returns an unused span to the driver. If the driver does not take it, we keep it: a dma-buf of it is still
    /// open in some process, or could be, and the memory is not `needed`.
    fn give_back(&self, state: &mut State, span: SpanInfo, needed: bool) -> bool {
        let Some(page) = state.pages.remove(&span.start) else { return false };
        match page.give_back(needed) {
            Ok(()) => {
                self.counts.subtract(Counter::ReservedBytes, span.len);
                state.pool.remove_span(span.start)
            }
            Err(page) => {
                state.pages.insert(span.start, page);
                false
            }
        }
    }
}

/// Unused pages, except those that the driver refused. Pages of which a dma-buf may be open come last.
fn spares(state: &State, refused: &BTreeSet<u64>) -> Vec<SpanInfo> {
    let mut spare = state.pool.empty_spans();
    spare.retain(|span| !refused.contains(&span.start));
    let exported = |span: &SpanInfo| state.pages.get(&span.start).is_some_and(|p| p.was_exported());
    spare.sort_by_key(exported);
    spare
}

impl Drop for Memory {
    fn drop(&mut self) {
        let reserved = self.info().reserved;
        self.counts.subtract(Counter::ReservedBytes, reserved);
        let pages = std::mem::take(&mut self.state().pages);
        pages.into_values().for_each(|page| page.leave());
        if let Some(pool) = self.pool.take() {
            pool.leave();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::backend::fake::Fake;

    const PAGE: u64 = 16 << 20;

    /// A page of which a dma-buf is open; counts how often it was returned to the driver.
    #[derive(Debug)]
    struct Exported(Arc<AtomicUsize>);

    impl Page for Exported {
        fn export_whole(&self, _: Option<ExportCall>, _: Counts) -> Result<OwnedFd, Error> {
            unreachable!("not in this test")
        }

        fn export_part(&self, _: u64, _: u64, _: Counts) -> Result<OwnedFd, Error> {
            unreachable!("not in this test")
        }

        fn was_exported(&self) -> bool {
            true
        }

        fn give_back(self: Box<Self>, _needed: bool) -> Result<(), Box<dyn Page>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(self)
        }
    }

    #[test]
    fn the_driver_is_asked_once_for_each_allocation_to_take_back_an_exported_page() {
        let (backend, device) = Fake::device();
        let geometry = Geometry { total: 2 * PAGE, page: PAGE, placement: Placement::Window };
        let memory = Memory::new(PAGE..16 * PAGE, geometry, None, Counts::of(device.info()));
        let asked = Arc::new(AtomicUsize::new(0));
        let exported = Box::new(Exported(Arc::clone(&asked)));
        memory.add(&mut memory.state(), PAGE, PAGE, exported);
        for allocation in 1..=2 {
            let mut refused = BTreeSet::new();
            for _ in 0..3 {
                let error = memory.take(&*backend, (2 * PAGE, 1), &mut refused).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
            }
            assert_eq!(asked.load(Ordering::Relaxed), allocation);
        }
        assert_eq!(backend.page_calls(), 0, "nor for new ones");
        memory.take(&*backend, (PAGE, 1), &mut BTreeSet::new()).unwrap();
    }
}
