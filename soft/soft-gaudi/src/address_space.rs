//! What a context's device addresses mean: allocations, mappings and the translation that every
//! access of the card goes through.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use rustix::io::Errno;

use crate::asic::Profile;
use crate::card_memory::CardMemory;
use crate::dmabuf;
use crate::dram::{Pages, Segment};
use crate::foreign::Foreign;
use crate::pinning::HostMemory;
use crate::ring::{Pin, PinId};
use crate::va::{Align, FreeRange, Hint};

/// Pages of the host.
pub(crate) const HOST_PAGE: u64 = 4096;
const HUGE_PAGE: u64 = 2 << 20;

/// Memory in this process behind a device address.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostRange {
    /// First byte.
    pub(crate) ptr: *mut u8,
    /// Contiguous bytes from there.
    pub(crate) len: u64,
    /// The pages that were at this address when it was mapped for the card.
    pub(crate) pin: Option<PinId>,
}

#[derive(Debug)]
struct Allocation {
    segments: Vec<Segment>,
    size: u64,
    mapped: u32,
}

#[derive(Debug)]
enum Backing {
    /// Pages of the process that opened the card.
    Host { huge: bool, pins: Vec<Pin> },
    /// An allocation, with the dma-bufs made of this mapping.
    Device { handle: u64, segments: Vec<Segment>, exports: Vec<PathBuf> },
    /// A command buffer of the driver; not the user's to unmap.
    CommandBuffer,
    /// Another card's memory, and the reference that keeps it exported.
    Import { peer: Arc<dmabuf::Exported> },
    /// A dma-buf of another driver.
    Foreign { _memory: Foreign },
}

#[derive(Debug)]
struct Mapping {
    /// What the caller got, in-page offset included.
    va: u64,
    size: u64,
    pieces: Vec<(usize, u64)>,
    backing: Backing,
}

/// A mapping ready to be exported.
#[derive(Debug)]
pub(crate) struct ExportRange {
    pub(crate) segments: Vec<Segment>,
}

/// Allocations and mappings of one context.
#[derive(Debug)]
pub(crate) struct AddressSpace {
    profile: &'static Profile,
    memory: &'static CardMemory,
    dram_size: u64,
    /// Where in DRAM the PCI BAR ends. Other devices reach DRAM through the BAR.
    bar_end: u64,
    pages: Pages,
    allocations: HashMap<u64, Allocation>,
    /// Gaudi1: what the driver believes to be allocated.
    accounted: u64,
    dram_va: FreeRange,
    host_va: FreeRange,
    huge_va: Option<FreeRange>,
    cb_va: FreeRange,
    mappings: BTreeMap<u64, Mapping>,
}

impl AddressSpace {
    pub(crate) fn new(
        profile: &'static Profile,
        memory: &'static CardMemory,
        dram: u64,
        bar: u64,
    ) -> Self {
        let taken = profile.mapped_cb_pool + profile.internal_cbs;
        let mut host_va = FreeRange::new(profile.host_va, profile.host_va_hints);
        host_va.allocate(taken, Align::Power(HOST_PAGE), Hint::default());
        let first = profile.host_va.first;
        let cb_pool = crate::asic::Span {
            first,
            last: (first + profile.mapped_cb_pool).saturating_sub(1).max(first),
        };
        Self {
            profile,
            memory,
            dram_size: dram,
            bar_end: bar.saturating_sub(profile.dram_reserved),
            pages: Pages::new(profile.dram_page, dram),
            allocations: HashMap::new(),
            accounted: 0,
            dram_va: FreeRange::new(profile.dram_va, profile.dram_va_hints),
            host_va,
            huge_va: profile
                .host_huge_va
                .map(|span| FreeRange::new(span, profile.host_huge_va_hints)),
            cb_va: FreeRange::new(cb_pool, None),
            mappings: BTreeMap::new(),
        }
    }

    /// Bytes of DRAM allocated.
    pub(crate) fn dram_used(&self) -> u64 {
        if self.profile.dram_mmu {
            self.dram_size - self.pages.free_bytes()
        } else {
            self.accounted
        }
    }

    /// Allocates DRAM. Gaudi1 only counts and answers handle 0, as its driver does.
    pub(crate) fn alloc(&mut self, size: u64, contiguous: bool) -> Result<u64, Errno> {
        if size == 0 {
            return Err(Errno::INVAL);
        }
        if !self.profile.dram_mmu {
            self.accounted = self.accounted.wrapping_add(size);
            return Ok(0);
        }
        let segments = self.pages.allocate(size, contiguous).ok_or(Errno::NOMEM)?;
        let size = segments.iter().map(|s| s.len).sum();
        // The lowest free one, as from the kernel's id allocator: a stale handle may name other memory.
        let handle = (1..).find(|handle| !self.allocations.contains_key(handle));
        let handle = handle.ok_or(Errno::NOMEM)?;
        self.allocations.insert(handle, Allocation { segments, size, mapped: 0 });
        Ok(handle)
    }

    /// Frees an allocation that is not mapped.
    pub(crate) fn free(&mut self, handle: u64) -> Result<(), Errno> {
        if !self.profile.dram_mmu {
            self.accounted = self.accounted.wrapping_sub(handle);
            return Ok(());
        }
        match self.allocations.get(&handle) {
            Some(allocation) if allocation.mapped == 0 => {}
            _ => return Err(Errno::INVAL),
        }
        if let Some(allocation) = self.allocations.remove(&handle) {
            for segment in &allocation.segments {
                self.memory.discard(segment.offset, segment.len);
            }
            self.pages.free_segments(&allocation.segments);
        }
        Ok(())
    }

    /// Maps an allocation and returns its device address.
    pub(crate) fn map_device(&mut self, handle: u64, hint: Hint) -> Result<u64, Errno> {
        let allocation = self.allocations.get_mut(&handle).ok_or(Errno::INVAL)?;
        let align = if self.profile.dram_page.is_power_of_two() {
            Align::Power(self.profile.dram_page)
        } else {
            Align::Pages(self.profile.dram_page)
        };
        let va = self.dram_va.allocate(allocation.size, align, hint).ok_or(Errno::NOMEM)?;
        allocation.mapped += 1;
        let memory = self.memory;
        let segments = allocation.segments.clone();
        let mapping = Mapping {
            va,
            size: allocation.size,
            pieces: segments.iter().map(|s| (memory.dram(s.offset) as usize, s.len)).collect(),
            backing: Backing::Device { handle, segments, exports: Vec::new() },
        };
        self.mappings.insert(va, mapping);
        Ok(va)
    }

    /// Maps host memory that was checked to be writable.
    pub(crate) fn map_host(
        &mut self,
        ptr: u64,
        memory: HostMemory,
        hint: Hint,
    ) -> Result<u64, Errno> {
        let in_page = ptr % HOST_PAGE;
        if hint.force && hint.addr != 0 && in_page != 0 {
            return Err(Errno::INVAL);
        }
        let HostMemory { huge, pieces, pins } = memory;
        let start = ptr - in_page;
        let len = pieces.iter().map(|(_, len)| len).sum();
        let huge = huge && self.huge_va.is_some();
        let align = if huge || start.is_multiple_of(HUGE_PAGE) { HUGE_PAGE } else { HOST_PAGE };
        let range = match &mut self.huge_va {
            Some(range) if huge => range,
            _ => &mut self.host_va,
        };
        let block = range.allocate(len, Align::Power(align), hint).ok_or(Errno::NOMEM)?;
        let va = block + in_page;
        let backing = Backing::Host { huge, pins };
        self.mappings.insert(block, Mapping { va, size: len, pieces, backing });
        Ok(va)
    }

    /// Maps another card's exported memory, as the out-of-tree driver does: in the host's range.
    pub(crate) fn map_import(
        &mut self,
        exported: dmabuf::Exported,
        length: u64,
    ) -> Result<u64, Errno> {
        if length == 0 || length > exported.size() {
            return Err(Errno::INVAL);
        }
        let len = length.next_multiple_of(HOST_PAGE);
        let mut left = len;
        let mut pieces = Vec::new();
        for range in exported.ranges() {
            let part = range.len.min(left);
            if part > 0 {
                pieces.push((range.ptr as usize, part));
            }
            left -= part;
        }
        self.map_in_host_range(len, pieces, Backing::Import { peer: Arc::new(exported) })
    }

    /// Maps a dma-buf of another driver, in the same way.
    pub(crate) fn map_foreign(&mut self, memory: Foreign, length: u64) -> Result<u64, Errno> {
        if length == 0 || length > memory.len() {
            return Err(Errno::INVAL);
        }
        let len = length.next_multiple_of(HOST_PAGE);
        let pieces = vec![(memory.base(), len)];
        self.map_in_host_range(len, pieces, Backing::Foreign { _memory: memory })
    }

    fn map_in_host_range(
        &mut self,
        size: u64,
        pieces: Vec<(usize, u64)>,
        backing: Backing,
    ) -> Result<u64, Errno> {
        let align = Align::Power(HOST_PAGE);
        let va = self.host_va.allocate(size, align, Hint::default()).ok_or(Errno::NOMEM)?;
        self.mappings.insert(va, Mapping { va, size, pieces, backing });
        Ok(va)
    }

    /// Removes the mapping with exactly this address; returns how many bytes of host memory it had.
    pub(crate) fn unmap(&mut self, va: u64) -> Result<u64, Errno> {
        let (&start, mapping) = self.mappings.range_mut(..=va).next_back().ok_or(Errno::INVAL)?;
        if mapping.va != va || matches!(mapping.backing, Backing::CommandBuffer) {
            return Err(Errno::INVAL);
        }
        if let Backing::Device { exports, .. } = &mut mapping.backing {
            exports.retain(|path| dmabuf::is_alive(path));
            if !exports.is_empty() {
                return Err(Errno::INVAL);
            }
        }
        let Some(mapping) = self.mappings.remove(&start) else { return Err(Errno::INVAL) };
        match mapping.backing {
            Backing::Device { handle, .. } => {
                self.dram_va.release(start, mapping.size);
                if let Some(allocation) = self.allocations.get_mut(&handle) {
                    allocation.mapped -= 1;
                }
            }
            Backing::Host { huge, .. } => {
                match &mut self.huge_va {
                    Some(range) if huge => range.release(start, mapping.size),
                    _ => self.host_va.release(start, mapping.size),
                }
                return Ok(mapping.size);
            }
            Backing::Import { .. } | Backing::Foreign { .. } => {
                self.host_va.release(start, mapping.size);
            }
            Backing::CommandBuffer => self.cb_va.release(start, mapping.size),
        }
        Ok(0)
    }

    /// Allocates device addresses for a command buffer of the driver, so that the card can read it.
    pub(crate) fn map_command_buffer(&mut self, ptr: usize, len: u64) -> Result<u64, Errno> {
        if self.profile.mapped_cb_pool == 0 {
            return Err(Errno::NOMEM);
        }
        let align = Align::Power(HOST_PAGE);
        let va = self.cb_va.allocate(len, align, Hint::default()).ok_or(Errno::NOMEM)?;
        let backing = Backing::CommandBuffer;
        self.mappings.insert(va, Mapping { va, size: len, pieces: vec![(ptr, len)], backing });
        Ok(va)
    }

    /// Undoes [`Self::map_command_buffer`].
    pub(crate) fn unmap_command_buffer(&mut self, va: u64) {
        if let Some(mapping) = self.mappings.remove(&va) {
            self.cb_va.release(va, mapping.size);
        }
    }

    /// Checks an export in the driver's order; returns the DRAM it covers.
    pub(crate) fn export(&self, addr: u64, size: u64, offset: u64) -> Result<ExportRange, Errno> {
        let pages = |value: u64| value.is_multiple_of(HOST_PAGE);
        if !self.profile.dram_mmu {
            if offset != 0 || size == 0 || !pages(addr) || !pages(size) {
                return Err(Errno::INVAL);
            }
            let start = addr.checked_sub(self.profile.dram_base).ok_or(Errno::INVAL)?;
            let end = start.checked_add(size).ok_or(Errno::INVAL)?;
            if end > self.dram_size.min(self.bar_end) {
                return Err(Errno::INVAL);
            }
            return Ok(ExportRange { segments: vec![Segment { offset: start, len: size }] });
        }
        let mapping = self.mappings.get(&addr).filter(|m| m.va == addr).ok_or(Errno::INVAL)?;
        let Backing::Device { segments, .. } = &mapping.backing else { return Err(Errno::INVAL) };
        if size == 0 || !pages(addr) || !pages(size) || !pages(offset) {
            return Err(Errno::INVAL);
        }
        if offset.checked_add(size).is_none_or(|end| end > mapping.size) {
            return Err(Errno::INVAL);
        }
        // All of the mapping, not only the exported part.
        if segments.iter().any(|segment| segment.offset + segment.len > self.bar_end) {
            return Err(Errno::INVAL);
        }
        Ok(ExportRange { segments: cut(segments, offset, size) })
    }

    /// Remembers a dma-buf made of the mapping at `addr`.
    pub(crate) fn exported(&mut self, addr: u64, path: PathBuf) {
        if let Some(Mapping { backing: Backing::Device { exports, .. }, .. }) =
            self.mappings.get_mut(&addr)
        {
            exports.push(path);
        }
    }

    /// The memory of another card that is mapped at an address.
    pub(crate) fn peer(&self, addr: u64) -> Option<Arc<dmabuf::Exported>> {
        let (&start, mapping) = self.mappings.range(..=addr).next_back()?;
        match &mapping.backing {
            Backing::Import { peer } if addr - start < mapping.size => Some(Arc::clone(peer)),
            _ => None,
        }
    }

    /// Memory behind a device address, or `None`: the card faults there.
    pub(crate) fn translate(&self, addr: u64) -> Option<HostRange> {
        if let Some((&start, mapping)) = self.mappings.range(..=addr).next_back() {
            let mut into = addr - start;
            if into < mapping.size {
                for (piece, &(ptr, len)) in mapping.pieces.iter().enumerate() {
                    if into < len {
                        let pin = match &mapping.backing {
                            Backing::Host { pins, .. } => pins.get(piece).map(Pin::id),
                            _ => None,
                        };
                        let ptr = (ptr as u64 + into) as *mut u8;
                        return Some(HostRange { ptr, len: len - into, pin });
                    }
                    into -= len;
                }
            }
        }
        let profile = self.profile;
        let within = |base: u64, size: u64| {
            addr.checked_sub(base).filter(|into| *into < size).map(|into| (into, size - into))
        };
        if let Some((into, len)) = within(profile.sram_base, profile.sram_size) {
            return Some(HostRange { ptr: self.memory.sram(into), len, pin: None });
        }
        if !profile.dram_mmu
            && let Some((into, len)) = within(profile.dram_base, self.dram_size)
        {
            return Some(HostRange { ptr: self.memory.dram(into), len, pin: None });
        }
        None
    }
}

/// The part `[offset, offset + size)` of memory made of `segments`.
fn cut(segments: &[Segment], offset: u64, size: u64) -> Vec<Segment> {
    let (mut skip, mut left) = (offset, size);
    let mut parts = Vec::new();
    for segment in segments {
        let part = segment.len.saturating_sub(skip).min(left);
        if part > 0 {
            parts.push(Segment { offset: segment.offset + skip, len: part });
            left -= part;
        }
        skip = skip.saturating_sub(segment.len);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_cut_covers_the_same_bytes(
            lens in prop::collection::vec(1u64..6, 1..6), offset in 0u64..20, size in 1u64..20
        ) {
            let segments: Vec<Segment> = lens
                .iter()
                .enumerate()
                .map(|(i, len)| Segment { offset: i as u64 * 100, len: *len })
                .collect();
            let bytes = |s: &[Segment]| -> Vec<u64> {
                s.iter().flat_map(|s| s.offset..s.offset + s.len).collect()
            };
            let all = bytes(&segments);
            let from = (offset as usize).min(all.len());
            let to = (from + size as usize).min(all.len());
            prop_assert_eq!(bytes(&cut(&segments, offset, size)), &all[from..to]);
        }
    }
}
