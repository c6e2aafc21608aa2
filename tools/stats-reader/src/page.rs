//! The format of the page, and how a copy of it is parsed.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use crate::{CardCounters, Counters, Description, Kind, Snapshot, Unit};

const MAGIC: [u8; 8] = *b"ucxgstat";
const VERSION: u32 = 1;

/// Offsets in the header.
mod header {
    pub(crate) const MAGIC: usize = 0;
    pub(crate) const VERSION: usize = 8;
    pub(crate) const HEADER_LEN: usize = 12;
    pub(crate) const SIZE: usize = 16;
    pub(crate) const PID: usize = 24;
    pub(crate) const COUNTERS: usize = 28;
    pub(crate) const START_TIME: usize = 32;
    pub(crate) const CREATED: usize = 40;
    pub(crate) const DESCRIPTIONS_AT: usize = 48;
    pub(crate) const DESCRIPTION_LEN: usize = 52;
    pub(crate) const SLOTS_AT: usize = 56;
    pub(crate) const SLOT_LEN: usize = 60;
    pub(crate) const SLOTS: usize = 64;
    pub(crate) const SLOT_HEADER_LEN: usize = 68;
    pub(crate) const LEN: usize = 128;
}

/// Offsets in the description of a counter.
mod description {
    pub(crate) const NAME: usize = 0;
    pub(crate) const NAME_LEN: usize = 40;
    pub(crate) const KIND: usize = 40;
    pub(crate) const UNIT: usize = 44;
    pub(crate) const LEN: usize = 48;
}

/// Offsets in a slot, and its states.
mod slot {
    pub(crate) const STATE: usize = 0;
    pub(crate) const INDEX: usize = 4;
    pub(crate) const BUS_ID: usize = 8;
    pub(crate) const BUS_ID_LEN: usize = 32;
    pub(crate) const HEADER_LEN: usize = 64;

    pub(crate) const PROCESS: u32 = 1;
    pub(crate) const CARD: u32 = 2;
}

/// What is wrong with a supposed page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// It begins with other bytes.
    #[error("it is not, or not yet, a page of counters")]
    NotAPage,
    /// A later format.
    #[error("its format has version {0}, and this program knows version {known}", known = VERSION)]
    Version(u32),
    /// Not a sealed memory file of a sensible size.
    #[error("it is not a sealed memory file of a sensible size")]
    NotSealed,
    /// It is shorter than its header says.
    #[error("it has {found} bytes and says it has {said}")]
    Size {
        /// Its bytes.
        found: usize,
        /// Its bytes according to the header.
        said: u64,
    },
    /// Parts of it have impossible offsets or contents.
    #[error("its {0} makes no sense")]
    Part(&'static str),
}

/// Reads numbers and texts at offsets of a copied page; `None` beyond its end.
#[derive(Clone, Copy)]
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn part(self, at: usize, len: usize) -> Option<Bytes<'a>> {
        self.0.get(at..at.checked_add(len)?).map(Bytes)
    }

    fn u32(self, at: usize) -> Option<u32> {
        self.part(at, 4)?.0.try_into().ok().map(u32::from_ne_bytes)
    }

    fn u64(self, at: usize) -> Option<u64> {
        self.part(at, 8)?.0.try_into().ok().map(u64::from_ne_bytes)
    }

    fn size(self, at: usize) -> Option<usize> {
        self.u32(at).map(|value| value as usize)
    }

    /// Printable ASCII up to the first zero.
    fn text(self, at: usize, len: usize) -> Option<String> {
        let bytes = self.part(at, len)?.0.split(|&byte| byte == 0).next()?;
        let text = std::str::from_utf8(bytes).ok()?;
        text.bytes().all(|byte| byte.is_ascii_graphic()).then(|| text.to_owned())
    }

    /// `count` parts of `len` bytes each from offset `at`; `len` must be at least `least`.
    fn parts(
        self,
        at: usize,
        len: usize,
        count: usize,
        least: usize,
    ) -> Option<impl Iterator<Item = Bytes<'a>>> {
        let whole = self.part(at, len.checked_mul(count)?)?;
        (len >= least).then(|| whole.0.chunks_exact(len.max(1)).map(Bytes))
    }
}

impl Snapshot {
    /// Parses a copied page.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let page = Bytes(bytes);
        if page.part(header::MAGIC, 8).is_none_or(|magic| magic.0 != MAGIC) {
            return Err(Malformed::NotAPage);
        }
        let short = Malformed::Size { found: bytes.len(), said: header::LEN as u64 };
        let version = page.u32(header::VERSION).ok_or(short.clone())?;
        if version != VERSION {
            return Err(Malformed::Version(version));
        }
        let said =
            page.part(0, header::LEN).and_then(|head| head.u64(header::SIZE)).ok_or(short)?;
        if said != bytes.len() as u64 {
            return Err(Malformed::Size { found: bytes.len(), said });
        }
        let header_makes_sense =
            page.size(header::HEADER_LEN).is_some_and(|len| len >= header::LEN);
        header_makes_sense.then_some(()).ok_or(Malformed::Part("header"))?;
        let descriptions = descriptions(page).ok_or(Malformed::Part("list of counters"))?;
        let (other, cards) = slots(page, &descriptions).ok_or(Malformed::Part("list of cards"))?;
        let field = || Malformed::Part("header");
        let created = Duration::from_nanos(page.u64(header::CREATED).ok_or_else(field)?);
        Ok(Snapshot {
            pid: page.u32(header::PID).ok_or_else(field)?,
            start_time: page.u64(header::START_TIME).ok_or_else(field)?,
            created: UNIX_EPOCH.checked_add(created).ok_or_else(field)?,
            other,
            cards,
        })
    }
}

fn descriptions(page: Bytes<'_>) -> Option<Arc<[Description]>> {
    let count = page.size(header::COUNTERS)?;
    let (at, len) = (page.size(header::DESCRIPTIONS_AT)?, page.size(header::DESCRIPTION_LEN)?);
    let parts = page.parts(at, len, count, description::LEN)?;
    let one = |part: Bytes<'_>| {
        let kind = match part.u32(description::KIND)? {
            1 => Kind::Sum,
            2 => Kind::Now,
            3 => Kind::Most,
            _ => return None,
        };
        let unit = match part.u32(description::UNIT)? {
            1 => Unit::Number,
            2 => Unit::Bytes,
            _ => return None,
        };
        let name = part.text(description::NAME, description::NAME_LEN)?;
        (!name.is_empty()).then_some(Description { name, kind, unit })
    };
    parts.map(one).collect()
}

fn slots(
    page: Bytes<'_>,
    descriptions: &Arc<[Description]>,
) -> Option<(Counters, Vec<CardCounters>)> {
    let count = page.size(header::SLOTS)?;
    let (at, len) = (page.size(header::SLOTS_AT)?, page.size(header::SLOT_LEN)?);
    let numbers_at = page.size(header::SLOT_HEADER_LEN)?;
    let numbers_len = descriptions.len().checked_mul(8)?;
    let least = numbers_at.max(slot::HEADER_LEN).checked_add(numbers_len)?;
    let mut other = None;
    let mut cards = Vec::new();
    for part in page.parts(at, len, count, least)? {
        let numbers = part.part(numbers_at, numbers_len)?.0.chunks_exact(8);
        let values = numbers.map(|number| Bytes(number).u64(0)).collect::<Option<Vec<u64>>>()?;
        let counters = Counters { descriptions: Arc::clone(descriptions), values };
        match part.u32(slot::STATE)? {
            slot::PROCESS if other.is_none() => other = Some(counters),
            slot::CARD => cards.push(CardCounters {
                bus_id: part.text(slot::BUS_ID, slot::BUS_ID_LEN)?,
                index: part.u32(slot::INDEX)?,
                counters,
            }),
            0 => {}
            _ => return None,
        }
    }
    Some((other?, cards))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A page with two counters, for the process and a card, whose parts are longer than necessary.
    fn page() -> Vec<u8> {
        let mut page = vec![0_u8; 4096];
        let mut put = |at: usize, bytes: &[u8]| page[at..at + bytes.len()].copy_from_slice(bytes);
        put(header::MAGIC, &MAGIC);
        for (at, value) in [
            (header::VERSION, 1),
            (header::HEADER_LEN, 256),
            (header::SIZE, 4096),
            (header::PID, 42),
            (header::COUNTERS, 2),
            (header::DESCRIPTIONS_AT, 256),
            (header::DESCRIPTION_LEN, 64),
            (header::SLOTS_AT, 1024),
            (header::SLOT_LEN, 256),
            (header::SLOTS, 2),
            (header::SLOT_HEADER_LEN, 128),
            (256 + description::KIND, 1),
            (256 + description::UNIT, 1),
            (320 + description::KIND, 2),
            (320 + description::UNIT, 2),
            (1024 + slot::STATE, slot::PROCESS),
            (1280 + slot::STATE, slot::CARD),
            (1280 + 128 + 8, 99),
        ] {
            put(at, &u32::to_ne_bytes(value));
        }
        put(256, b"reg_cache_hits");
        put(320, b"something_new");
        put(1280 + slot::BUS_ID, b"0000:33:00.0");
        page
    }

    #[test]
    fn what_is_not_a_page_is_refused_with_the_reason() {
        let good = page();
        Snapshot::parse(&good).unwrap();
        let with = |at: usize, bytes: &[u8]| {
            let mut page = good.clone();
            page[at..at + bytes.len()].copy_from_slice(bytes);
            Snapshot::parse(&page).unwrap_err()
        };
        let int = u32::to_ne_bytes;
        assert_eq!(Snapshot::parse(&[]), Err(Malformed::NotAPage));
        assert_eq!(with(header::MAGIC, &[0; 8]), Malformed::NotAPage);
        assert_eq!(with(header::VERSION, &int(2)), Malformed::Version(2));
        let found = good.len();
        assert_eq!(with(header::SIZE, &8_u64.to_ne_bytes()), Malformed::Size { found, said: 8 });
        let list = Malformed::Part("list of counters");
        for (at, value) in [
            (header::COUNTERS, u32::MAX),
            (header::DESCRIPTIONS_AT, u32::MAX),
            (header::DESCRIPTION_LEN, 0),
            (256 + description::KIND, 9),
            (256 + description::UNIT, 0),
            (256 + description::NAME, 0),
        ] {
            assert_eq!(with(at, &int(value)), list, "{at} {value}");
        }
        let cards = Malformed::Part("list of cards");
        for (at, value) in [
            (header::SLOTS, u32::MAX),
            (header::SLOTS, 0),
            (header::SLOT_LEN, 8),
            (header::SLOTS_AT, found as u32),
            (header::SLOT_HEADER_LEN, u32::MAX),
            (1024 + slot::STATE, 77),
        ] {
            assert_eq!(with(at, &int(value)), cards, "{at} {value}");
        }
        for len in 0..header::LEN {
            assert!(Snapshot::parse(&good[..len]).is_err());
        }
        assert_eq!(with(header::HEADER_LEN, &int(8)), Malformed::Part("header"));
    }

    #[test]
    fn a_page_with_unknown_counters_and_longer_parts_is_read() {
        let snapshot = Snapshot::parse(&page()).unwrap();
        assert_eq!(snapshot.card("0000:33:00.0").unwrap().get("something_new"), Some(99));
        assert_eq!(snapshot.get("reg_cache_hits"), Some(0));
        assert_eq!(snapshot.get("no such counter"), None);
    }

    proptest! {
        #[test]
        fn any_bytes_are_parsed_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            let _ = Snapshot::parse(&bytes);
            let mut dressed = bytes;
            if dressed.len() >= header::LEN {
                dressed[..8].copy_from_slice(&MAGIC);
                dressed[8..12].copy_from_slice(&VERSION.to_ne_bytes());
                let len = dressed.len() as u64;
                dressed[header::SIZE..header::SIZE + 8].copy_from_slice(&len.to_ne_bytes());
            }
            let _ = Snapshot::parse(&dressed);
        }

        #[test]
        fn a_damaged_page_is_parsed_or_refused(
            damage in prop::collection::vec((0..4096_usize, any::<u32>()), 1..8),
            len in prop::option::of(0..4096_usize)
        ) {
            let mut page = page();
            for (at, value) in damage {
                let at = at / 4 * 4;
                page[at..at + 4].copy_from_slice(&value.to_ne_bytes());
            }
            if let Some(len) = len {
                page.truncate(len);
                // Still of the length it says.
                if page.len() >= header::LEN {
                    let len = page.len() as u64;
                    page[header::SIZE..header::SIZE + 8].copy_from_slice(&len.to_ne_bytes());
                }
            }
            if let Ok(snapshot) = Snapshot::parse(&page) {
                let _ = snapshot.to_string();
            }
        }
    }
}
