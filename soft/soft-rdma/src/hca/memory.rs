//! Memory regions: what a key stands for, who may do what with it, and where its bytes are.

use std::collections::HashMap;
use std::sync::{Arc, RwLock};

use rustix::io::Errno;

use super::permit::Permit;
use crate::abi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_OPTIONAL_RANGE,
    IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_sge,
};
use crate::wire::Segment;

/// Regions of one process.
pub(crate) const MAX_REGIONS: usize = 1 << 20;

/// The memory behind a region; keeps its pages mapped.
pub(crate) trait Memory: Send + Sync {
    /// Whether it is still the memory that was registered.
    fn is_valid(&self) -> bool {
        true
    }

    /// Where the HCA must write instead of this place: a card may acknowledge writes before others see them.
    fn write_to(&self, place: Segment) -> Segment {
        place
    }

    /// Called after the HCA has written there.
    fn written(&self, _place: Segment) {}

    /// Called before the HCA reads.
    fn before_read(&self, _len: u64) {}
}

/// What an operation does with memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Intent {
    Read,
    Write,
    /// Reads and writes in one step.
    Atomic,
}

/// The owner of a region's memory.
pub(crate) type Backing = Box<dyn Memory>;

/// A registered range of memory.
pub(crate) struct Region {
    key: u32,
    domain: u32,
    access: u32,
    /// First address as work requests name it.
    iova: u64,
    length: u64,
    /// Where the bytes are in this process, in order.
    pieces: Vec<Segment>,
    /// Revoked when it is deregistered.
    pub(super) permit: Permit,
    backing: Option<Backing>,
}

/// Part of a region that an operation may use.
#[derive(Clone)]
pub(crate) struct Located {
    pub(super) region: Arc<Region>,
    /// The bytes in this process.
    pub(crate) segments: Vec<Segment>,
    intent: Intent,
}

/// The bytes were written; must be called before the write is reported.
pub(crate) fn written(list: &[Located]) {
    for located in list.iter().filter(|located| located.intent == Intent::Write) {
        if let Some(memory) = &located.region.backing {
            located.segments.iter().for_each(|segment| memory.written(*segment));
        }
    }
}

/// Shortens a list to `length` bytes.
pub(crate) fn trim(list: &mut Vec<Located>, length: u64) {
    let mut left = length;
    for located in list.iter_mut() {
        for segment in &mut located.segments {
            segment.len = segment.len.min(left);
            left -= segment.len;
        }
        located.segments.retain(|segment| segment.len > 0);
    }
    list.retain(|located| !located.segments.is_empty());
}

impl Region {
    /// The bytes from `addr` on, if they are all inside.
    fn resolve(self: &Arc<Self>, addr: u64, len: u64, intent: Intent) -> Option<Located> {
        if self.backing.as_ref().is_some_and(|memory| !memory.is_valid()) {
            return None;
        }
        let early = self.backing.as_ref().filter(|_| intent == Intent::Write);
        match &self.backing {
            Some(memory) if intent != Intent::Write => memory.before_read(len),
            _ => {}
        }
        let mut skip = addr.checked_sub(self.iova)?;
        if skip.checked_add(len)? > self.length {
            return None;
        }
        let mut left = len;
        let mut segments = Vec::with_capacity(1);
        for piece in &self.pieces {
            if left == 0 {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let take = (piece.len - skip).min(left);
            let place = Segment { addr: piece.addr + skip, len: take };
            segments.push(early.map_or(place, |memory| memory.write_to(place)));
            (skip, left) = (0, left - take);
        }
        (left == 0).then(|| Located { region: self.clone(), segments, intent })
    }

    /// The key, local and remote.
    pub(crate) fn key(&self) -> u32 {
        self.key
    }
}

/// What a remote peer wants to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RemoteAccess {
    Read,
    Write,
    Atomic,
}

impl RemoteAccess {
    /// The flag that queue pair and region must both have.
    pub(crate) fn flag(self) -> u32 {
        match self {
            Self::Read => IBV_ACCESS_REMOTE_READ,
            Self::Write => IBV_ACCESS_REMOTE_WRITE,
            Self::Atomic => IBV_ACCESS_REMOTE_ATOMIC,
        }
    }
}

/// What to register.
pub(crate) struct Registration {
    pub(crate) domain: u32,
    pub(crate) access: u32,
    pub(crate) iova: u64,
    pub(crate) pieces: Vec<Segment>,
    pub(crate) backing: Option<Backing>,
}

/// All regions of this process, by key.
#[derive(Default)]
pub(crate) struct Regions {
    table: RwLock<HashMap<u32, Arc<Region>>>,
}

/// The flags a registration may have, as the kernel's `ib_check_mr_access`.
pub(crate) fn check_access(access: u32) -> Result<(), Errno> {
    let known = IBV_ACCESS_LOCAL_WRITE
        | IBV_ACCESS_REMOTE_WRITE
        | IBV_ACCESS_REMOTE_READ
        | IBV_ACCESS_REMOTE_ATOMIC
        | IBV_ACCESS_MW_BIND;
    if access & !(known | IBV_ACCESS_OPTIONAL_RANGE) != 0 {
        return Err(Errno::OPNOTSUPP);
    }
    let needs_local_write = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
    if access & needs_local_write != 0 && access & IBV_ACCESS_LOCAL_WRITE == 0 {
        return Err(Errno::INVAL);
    }
    Ok(())
}

impl Regions {
    /// Registers memory under a fresh random key.
    pub(crate) fn register(
        &self,
        what: Registration,
        random: impl Fn() -> u32,
    ) -> Result<Arc<Region>, Errno> {
        check_access(what.access)?;
        let length = what.pieces.iter().try_fold(0u64, |sum, piece| sum.checked_add(piece.len));
        let length = length.ok_or(Errno::INVAL)?;
        what.iova.checked_add(length).ok_or(Errno::INVAL)?;
        let mut table = self.table.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if table.len() >= MAX_REGIONS {
            return Err(Errno::NOMEM);
        }
        // Small keys are skipped: programs pass 0 for "none".
        let key = loop {
            let key = random();
            if key > 0xffff && !table.contains_key(&key) {
                break key;
            }
        };
        let region = Arc::new(Region {
            key,
            domain: what.domain,
            access: what.access,
            iova: what.iova,
            length,
            pieces: what.pieces,
            permit: Permit::default(),
            backing: what.backing,
        });
        table.insert(key, region.clone());
        Ok(region)
    }

    /// Ends a registration. When it returns no copy uses the memory any more.
    pub(crate) fn deregister(&self, key: u32) {
        let region =
            self.table.write().unwrap_or_else(|poisoned| poisoned.into_inner()).remove(&key);
        if let Some(region) = region {
            region.permit.revoke();
        }
    }

    fn find(&self, key: u32, domain: u32) -> Option<Arc<Region>> {
        let table = self.table.read().unwrap_or_else(|poisoned| poisoned.into_inner());
        table.get(&key).filter(|region| region.domain == domain).cloned()
    }

    /// The memory of a scatter/gather list, or `None` if a key, range or right is wrong.
    pub(crate) fn local(&self, domain: u32, sges: &[ibv_sge], write: bool) -> Option<Vec<Located>> {
        let mut list = Vec::with_capacity(sges.len());
        for sge in sges.iter().filter(|sge| sge.length > 0) {
            let region = self.find(sge.lkey, domain)?;
            if write && region.access & IBV_ACCESS_LOCAL_WRITE == 0 {
                return None;
            }
            let intent = if write { Intent::Write } else { Intent::Read };
            list.push(region.resolve(sge.addr, u64::from(sge.length), intent)?);
        }
        Some(list)
    }

    /// The memory a peer names, or `None` if key, range or right is wrong.
    pub(crate) fn remote(
        &self,
        domain: u32,
        (addr, key): (u64, u32),
        len: u32,
        access: RemoteAccess,
    ) -> Option<Located> {
        let region = self.find(key, domain)?;
        if region.access & access.flag() == 0 {
            return None;
        }
        let intent = match access {
            RemoteAccess::Read => Intent::Read,
            RemoteAccess::Write => Intent::Write,
            RemoteAccess::Atomic => Intent::Atomic,
        };
        region.resolve(addr, u64::from(len), intent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn regions(access: u32, iova: u64, pieces: &[(u64, u64)]) -> (Regions, u32) {
        let regions = Regions::default();
        let pieces = pieces.iter().map(|&(addr, len)| Segment { addr, len }).collect();
        let what = Registration { domain: 1, access, iova, pieces, backing: None };
        let key = regions.register(what, || 0x1234_5678).expect("registered").key();
        (regions, key)
    }

    #[test]
    fn a_range_over_two_pieces_is_found_in_both() {
        let (regions, key) =
            regions(IBV_ACCESS_REMOTE_READ, 0x1000, &[(0x7000, 0x100), (0x9000, 0x100)]);
        let found = regions.remote(1, (0x10f0, key), 0x20, RemoteAccess::Read).expect("inside");
        let expected = [Segment { addr: 0x70f0, len: 0x10 }, Segment { addr: 0x9000, len: 0x10 }];
        assert_eq!(found.segments, expected);
    }

    #[test]
    fn wrong_key_domain_range_or_right_is_refused() {
        use RemoteAccess::{Atomic, Read, Write};
        let (regions, key) = regions(IBV_ACCESS_REMOTE_READ, 0x1000, &[(0x7000, 0x100)]);
        for (domain, addr, key, len, access, found) in [
            (1, 0x1000, key, 0x100, Read, true),
            (1, 0x1000, key + 1, 1, Read, false),
            (2, 0x1000, key, 1, Read, false),
            (1, 0x0fff, key, 1, Read, false),
            (1, 0x1001, key, 0x100, Read, false),
            (1, u64::MAX, key, 2, Read, false),
            (1, 0x1000, key, 1, Write, false),
            (1, 0x1000, key, 8, Atomic, false),
        ] {
            let is_found = regions.remote(domain, (addr, key), len, access).is_some();
            assert_eq!(is_found, found, "{domain} {addr:#x} {key:#x} {len} {access:?}");
        }
    }

    #[test]
    fn remote_write_without_local_write_is_refused() {
        assert_eq!(check_access(IBV_ACCESS_REMOTE_WRITE), Err(Errno::INVAL));
        assert_eq!(check_access(IBV_ACCESS_REMOTE_ATOMIC), Err(Errno::INVAL));
        assert_eq!(check_access(1 << 6), Err(Errno::OPNOTSUPP));
        assert_eq!(check_access(IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE), Ok(()));
    }

    #[test]
    fn a_deregistered_region_is_not_used() {
        let (regions, key) = regions(IBV_ACCESS_REMOTE_READ, 0x1000, &[(0x7000, 0x100)]);
        let found = regions.remote(1, (0x1000, key), 1, RemoteAccess::Read).expect("inside");
        regions.deregister(key);
        assert!(found.region.permit.is_revoked());
        assert!(regions.remote(1, (0x1000, key), 1, RemoteAccess::Read).is_none());
    }

    proptest! {
        #[test]
        fn resolved_bytes_are_those_of_the_flat_range(
            lens in prop::collection::vec(1u64..50, 1..6), from in 0u64..300, len in 0u64..300
        ) {
            let pieces: Vec<_> = lens.iter().enumerate().map(|(i, len)| (i as u64 * 1000, *len)).collect();
            let flat: Vec<u64> = pieces.iter().flat_map(|&(addr, len)| addr..addr + len).collect();
            let (regions, key) = regions(IBV_ACCESS_REMOTE_READ, 0x1000, &pieces);
            let found = regions.remote(1, (0x1000 + from, key), len as u32, RemoteAccess::Read);
            let expected = flat.get(from as usize..(from + len) as usize).map(<[u64]>::to_vec);
            let got = found.map(|f| f.segments.iter().flat_map(|s| s.addr..s.addr + s.len).collect::<Vec<_>>());
            prop_assert_eq!(got, expected);
        }

        #[test]
        fn trimming_keeps_the_first_bytes(lens in prop::collection::vec(1u64..50, 1..6), keep in 0u64..300) {
            let pieces: Vec<_> = lens.iter().enumerate().map(|(i, len)| (i as u64 * 1000, *len)).collect();
            let total: u64 = lens.iter().sum();
            let flat: Vec<u64> = pieces.iter().flat_map(|&(addr, len)| addr..addr + len).collect();
            let (regions, key) = regions(IBV_ACCESS_REMOTE_READ, 0, &pieces);
            let mut list = vec![regions.remote(1, (0, key), total as u32, RemoteAccess::Read).unwrap()];
            trim(&mut list, keep);
            let got: Vec<u64> = list.iter().flat_map(|l| &l.segments).flat_map(|s| s.addr..s.addr + s.len).collect();
            prop_assert_eq!(&got[..], &flat[..keep.min(total) as usize]);
        }
    }
}
