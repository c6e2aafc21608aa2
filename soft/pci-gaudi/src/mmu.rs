//! The card's MMUs: one for host memory, whose tables lie in guest memory, and sixteen alike for HBM,
//! whose tables lie in HBM and translate *scrambled* addresses.

use std::sync::Mutex;

use crate::registers::{HBM, HBM_LEN};

/// Address spaces: 0 is the driver's, 1 the user's.
const SPACES: usize = 2;
const PRESENT: u64 = 1;
const LAST: u64 = 1 << 11;
const ADDRESS: u64 = !0xfff;

/// Host memory is mapped from here on.
const HOST_VIRTUAL: std::ops::Range<u64> = 0xfff0_0000_0000_0000..0xfff1_0000_0000_0000;
const HOST_SHIFTS: [u32; 6] = [57, 48, 39, 30, 21, 12];
/// HBM is mapped behind its physical addresses.
const HBM_VIRTUAL: std::ops::Range<u64> = HBM + HBM_LEN..0x1002_0000_0000_0000;
const HBM_SHIFTS: [u32; 4] = [57, 48, 39, 30];

/// Interleaving puts 8 MiB of each of six stacks into 64 MiB of scrambled addresses.
const CHUNK: u64 = 48 << 20;
const LOW: u64 = (1 << 48) - 1;

/// What an address is translated to, and for how many bytes from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Translation {
    /// Physical address: of the guest, or of HBM.
    pub addr: u64,
    /// Contiguous bytes.
    pub len: u64,
}

/// Roots of the page tables.
#[derive(Debug, Default)]
pub struct Mmu {
    host: Mutex<[Option<u64>; SPACES]>,
    hbm: Mutex<[Option<u64>; SPACES]>,
}

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Host memory.
    Host,
    /// HBM.
    Hbm,
}

impl Mmu {
    fn roots(&self, kind: Kind) -> &Mutex<[Option<u64>; SPACES]> {
        match kind {
            Kind::Host => &self.host,
            Kind::Hbm => &self.hbm,
        }
    }

    /// Sets the root of an address space.
    pub fn set_root(&self, kind: Kind, asid: u32, root: u64) {
        if let Some(place) = self.roots(kind).lock().unwrap().get_mut(asid as usize) {
            *place = Some(root);
        }
    }

    /// Forgets all roots.
    pub fn reset(&self) {
        *self.host.lock().unwrap() = [None; SPACES];
        *self.hbm.lock().unwrap() = [None; SPACES];
    }

    /// Which MMU is asked about a virtual address.
    pub fn kind_of(addr: u64) -> Option<Kind> {
        if HOST_VIRTUAL.contains(&addr) {
            Some(Kind::Host)
        } else if HBM_VIRTUAL.contains(&addr) {
            Some(Kind::Hbm)
        } else {
            None
        }
    }

    /// Walks the tables; `entry` reads an entry of the tables of a kind at a physical address.
    pub fn translate(
        &self,
        asid: u32,
        addr: u64,
        entry: impl Fn(Kind, u64) -> Option<u64>,
    ) -> Option<Translation> {
        let kind = Self::kind_of(addr)?;
        let root = (*self.roots(kind).lock().unwrap().get(asid as usize)?)?;
        match kind {
            Kind::Host => walk(root, addr, &HOST_SHIFTS, |at| entry(kind, at)),
            Kind::Hbm => {
                let found = walk(root, scramble(addr), &HBM_SHIFTS, |at| entry(kind, at))?;
                let len = CHUNK - (addr & LOW) % CHUNK;
                Some(Translation { addr: unscramble(found.addr), len: len.min(found.len) })
            }
        }
    }
}

fn walk(
    root: u64,
    addr: u64,
    shifts: &[u32],
    entry: impl Fn(u64) -> Option<u64>,
) -> Option<Translation> {
    let mut table = root;
    for (hop, shift) in shifts.iter().enumerate() {
        let index = addr >> shift & if *shift == 57 { 0x7f } else { 0x1ff };
        let found = entry(table + 8 * index)?;
        if found & PRESENT == 0 {
            return None;
        }
        if found & LAST != 0 || hop + 1 == shifts.len() {
            let page = 1u64 << shift;
            let inside = addr & (page - 1);
            return Some(Translation {
                addr: (found & ADDRESS & !(page - 1)) + inside,
                len: page - inside,
            });
        }
        table = found & ADDRESS;
    }
    None
}

/// The address that HBM's MMU sees.
pub fn scramble(addr: u64) -> u64 {
    let low = addr & LOW;
    (addr - low) + ((low / CHUNK) << 26) + low % CHUNK
}

/// Back from what HBM's MMU gives.
fn unscramble(addr: u64) -> u64 {
    let low = addr & LOW;
    (addr - low) + (low >> 26) * CHUNK + (low & 0x3ff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    /// Tables in a map, built as the driver builds them.
    #[derive(Default)]
    struct Tables {
        words: HashMap<u64, u64>,
        next: u64,
    }

    impl Tables {
        fn new() -> Self {
            Self { words: HashMap::new(), next: 0x10_0000 }
        }

        fn map(&mut self, root: u64, addr: u64, shifts: &[u32], leaf: u64) {
            let mut table = root;
            for (hop, shift) in shifts.iter().enumerate() {
                let mask = if *shift == 57 { 0x7f } else { 0x1ff };
                let at = table + 8 * (addr >> shift & mask);
                if hop + 1 == shifts.len() {
                    self.words.insert(at, leaf | PRESENT | LAST);
                    return;
                }
                let next = self.next;
                let entry = *self.words.entry(at).or_insert(next | PRESENT);
                if entry & ADDRESS == next {
                    self.next += 0x1000;
                }
                table = entry & ADDRESS;
            }
        }
    }

    #[test]
    fn host_pages_of_both_sizes_translate_to_their_end() {
        let mut tables = Tables::new();
        let small = 0xfff0_0000_0123_4000;
        let huge = 0xfff0_8000_0040_0000;
        tables.map(0x1000, small, &HOST_SHIFTS, 0x7777_7000);
        tables.map(0x1000, huge, &HOST_SHIFTS[..5], 0x4000_0000);
        let mmu = Mmu::default();
        mmu.set_root(Kind::Host, 1, 0x1000);
        let find = |asid, addr| mmu.translate(asid, addr, |_, at| tables.words.get(&at).copied());
        assert_eq!(find(1, small + 5), Some(Translation { addr: 0x7777_7005, len: 0xffb }));
        assert_eq!(find(1, huge + 0x1_0000).unwrap().len, (2 << 20) - 0x1_0000);
        assert_eq!(find(1, small + 0x1000), None);
        assert_eq!(find(0, small), None);
    }

    #[test]
    fn a_page_of_hbm_translates_chunk_by_chunk() {
        let mut tables = Tables::new();
        let page = 16 * CHUNK;
        // Page 3 of the user's memory, at a virtual address that is a multiple of the page.
        let (physical, addr) = (HBM + 3 * page, HBM + 500 * page);
        tables.map(0x1000, scramble(addr), &HBM_SHIFTS, scramble(physical));
        let mmu = Mmu::default();
        mmu.set_root(Kind::Hbm, 1, 0x1000);
        for offset in [0, 1, CHUNK - 1, CHUNK, 7 * CHUNK + 4097, page - 1] {
            let found = mmu.translate(1, addr + offset, |_, at| tables.words.get(&at).copied());
            let len = CHUNK - offset % CHUNK;
            assert_eq!(found, Some(Translation { addr: physical + offset, len }), "{offset:#x}");
        }
    }

    proptest! {
        #[test]
        fn scrambling_is_reversible(low in 0..LOW / 2) {
            prop_assert_eq!(unscramble(scramble(HBM + low)), HBM + low);
        }
    }
}
