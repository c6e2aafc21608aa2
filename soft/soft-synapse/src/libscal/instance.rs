//! SCAL on one card: takes all HBM, and gives it back.

use core::ffi::c_int;

use super::pool::{Pool, new_handle};
use super::{FAILURE, OUT_OF_MEMORY};
use crate::thunk::{self, Generation};

/// Where SCAL maps its memory on a Gaudi2; moved up where that is no multiple of the page.
const GAUDI2_BASE: u64 = 0x1001_5000_0000_0000;
const GAUDI2_NEXT_BASE: u64 = 0x1000_0000_0000;
const GAUDI2_OFFSET: u64 = 0x5000_0000;
const GAUDI2_STEP: u64 = 4 << 30;
const GAUDI3_BASE: u64 = 0x0201_e000_0000_0000;
const LOW_48: u64 = (1 << 48) - 1;
/// The end of HBM that is left unused, because TPCs prefetch beyond what they read.
const PREFETCH: u64 = 4096;

/// Pools of fixed size, which come before `global_hbm`.
const POOLS: [(&core::ffi::CStr, u64); 2] = [(c"hbm_shared", 128 << 20), (c"hbm_binary", 32 << 20)];
const GAUDI3_POOLS: [(&core::ffi::CStr, u64); 3] = [POOLS[0], POOLS[1], (c"hbm_pdma", 72 << 20)];
const GLOBAL: &core::ffi::CStr = c"global_hbm";

/// A running SCAL.
#[derive(Debug)]
pub(crate) struct Instance {
    handle: usize,
    pub(crate) fd: c_int,
    pub(crate) sram_size: u32,
    pub(crate) pools: Vec<Pool>,
    /// Driver handles and addresses of the memory it took.
    mappings: Vec<(u64, u64)>,
}

/// The address of the one mapping on a Gaudi2.
fn gaudi2_address(page: u64) -> u64 {
    let aligned = |addr: u64| (addr & LOW_48).is_multiple_of(page);
    let base = if aligned(GAUDI2_BASE) { GAUDI2_BASE } else { GAUDI2_BASE + GAUDI2_NEXT_BASE };
    let mut offset = GAUDI2_OFFSET;
    while !offset.is_multiple_of(page) {
        offset += GAUDI2_STEP;
    }
    base + offset
}

impl Instance {
    pub(crate) fn handle(&self) -> usize {
        self.handle
    }

    /// Takes all HBM that is free, and the engines.
    pub(crate) fn start(fd: c_int) -> Result<Self, c_int> {
        let info = thunk::hw_ip(fd).ok_or(FAILURE)?;
        let generation = info.generation().ok_or(FAILURE)?;
        let mut usage = [0; 2];
        // SAFETY: two words, as the structure has.
        if unsafe { thunk::hlthunk_get_dram_usage(fd, &raw mut usage) } != 0 {
            return Err(FAILURE);
        }
        // SAFETY: takes a number.
        if unsafe { thunk::soft_gaudi_scal_begin(fd) } != 0 {
            return Err(FAILURE);
        }
        let mut this = Self {
            handle: new_handle(),
            fd,
            sram_size: info.sram_size,
            pools: Vec::new(),
            mappings: Vec::new(),
        };
        let page = info.dram_page;
        let taken = match generation {
            Generation::Gaudi2 => this.take_gaudi2(usage[0] / page * page, page),
            Generation::Gaudi3 => this.take_gaudi3(usage[0] / page * page, page),
        };
        if let Err(code) = taken {
            this.stop();
            return Err(code);
        }
        Ok(this)
    }

    /// One mapping, out of which all pools are cut.
    fn take_gaudi2(&mut self, size: u64, page: u64) -> Result<(), c_int> {
        let (allocation, mapping) = self.map(size, page, gaudi2_address(page))?;
        let mut at = mapping;
        for (name, size) in POOLS {
            self.add(name, at, size, mapping, allocation);
            at += size;
        }
        let left = (mapping + size).checked_sub(at + PREFETCH).ok_or(OUT_OF_MEMORY)?;
        self.add(GLOBAL, at, left, mapping, allocation);
        Ok(())
    }

    /// A mapping for each pool.
    fn take_gaudi3(&mut self, size: u64, page: u64) -> Result<(), c_int> {
        let (mut at, mut left) = (GAUDI3_BASE, size);
        for (name, size) in GAUDI3_POOLS {
            let mapped = size.next_multiple_of(page);
            let (allocation, mapping) = self.map(mapped, page, at)?;
            self.add(name, mapping, size, mapping, allocation);
            at += mapped;
            left = left.checked_sub(mapped).ok_or(OUT_OF_MEMORY)?;
        }
        let (allocation, mapping) = self.map(left, page, at)?;
        let usable = left.checked_sub(PREFETCH).ok_or(OUT_OF_MEMORY)?;
        self.add(GLOBAL, mapping, usable, mapping, allocation);
        Ok(())
    }

    fn map(&mut self, size: u64, page: u64, hint: u64) -> Result<(u64, u64), c_int> {
        // SAFETY: plain numbers.
        let handle =
            unsafe { thunk::hlthunk_device_memory_alloc(self.fd, size, page, false, false) };
        if handle == 0 {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: as above.
        let addr = unsafe { thunk::hlthunk_device_memory_map(self.fd, handle, hint) };
        if addr != 0 {
            self.mappings.push((handle, addr));
        }
        // The real one forces its hint.
        if addr == hint {
            return Ok((handle, addr));
        }
        eprintln!("soft-scal: the address {hint:#x} is taken; the driver gave {addr:#x}");
        Err(FAILURE)
    }

    fn add(
        &mut self,
        name: &'static core::ffi::CStr,
        base: u64,
        size: u64,
        mapping: u64,
        allocation: u64,
    ) {
        let mut pool = Pool::new(name, self.pools.len() as u32, base, size);
        (pool.mapping, pool.allocation) = (mapping, allocation);
        self.pools.push(pool);
    }

    /// Releases everything. Memory that a dma-buf still refers to stays allocated, as in the driver.
    pub(crate) fn stop(self) {
        for (handle, addr) in self.mappings {
            // SAFETY: plain numbers; an address of 0 is not mapped.
            let unmapped = unsafe { thunk::hlthunk_memory_unmap(self.fd, addr) };
            // SAFETY: as above.
            if unmapped != 0 || unsafe { thunk::hlthunk_device_memory_free(self.fd, handle) } != 0 {
                eprintln!(
                    "soft-scal: cannot give back the memory at {addr:#x}: {} (a dma-buf of it is alive?)",
                    std::io::Error::from_raw_os_error(-unmapped)
                );
            }
        }
        // SAFETY: as above.
        unsafe { thunk::soft_gaudi_scal_end(self.fd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gaudi2_with_six_stacks_is_mapped_16_tib_higher_than_one_with_five() {
        assert_eq!(gaudi2_address(768 << 20), 0x1001_6001_5000_0000);
        assert_eq!(gaudi2_address(640 << 20), 0x1001_5000_0000_0000 + 0x5000_0000);
    }
}
