//! The counters of a process that uses the plugin, read while it counts.
//!
//! They are in a memory file of the process, which describes itself: sizes and places are in its header, and counters
//! are found by name (`docs/design/statistics-page.md`). This is a second reading of that page, which shares no code with
//! the plugin. Whatever calls itself a page may have been written by anyone: everything is checked before it is
//! used, in a copy that no longer changes.

use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{FileType, SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

/// Name of the memory file, as `/proc/PID/fd` shows it after `/memfd:`.
const FILE_NAME: &str = "ucx-gaudi-stats";
const MAGIC: [u8; 8] = *b"ucxgstat";
const VERSION: u32 = 1;

/// Places in the header.
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

/// Places in the description of a counter.
mod description {
    pub(crate) const NAME: usize = 0;
    pub(crate) const NAME_LEN: usize = 40;
    pub(crate) const KIND: usize = 40;
    pub(crate) const UNIT: usize = 44;
    pub(crate) const LEN: usize = 48;
}

/// Places in a slot, and its states.
mod slot {
    pub(crate) const STATE: usize = 0;
    pub(crate) const INDEX: usize = 4;
    pub(crate) const BUS_ID: usize = 8;
    pub(crate) const BUS_ID_LEN: usize = 32;
    pub(crate) const HEADER_LEN: usize = 64;

    pub(crate) const PROCESS: u32 = 1;
    pub(crate) const CARD: u32 = 2;
}

/// How a counter behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Only grows.
    Sum,
    /// How much there is at the moment.
    Now,
    /// The most there ever was at one time.
    Most,
}

/// What a counter counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Things.
    Number,
    /// Bytes.
    Bytes,
}

/// Nothing larger than this is a page.
const LARGEST: usize = 1 << 20;

/// The counters of a process, each as it was at some moment during [`read`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// The process, by the number it has in its own pid namespace.
    pub pid: u32,
    /// When the process started, in clock ticks since the machine did.
    pub start_time: u64,
    /// When it opened its first card.
    pub created: SystemTime,
    /// What belongs to no card, or to cards for which the page has no slot.
    pub other: Counters,
    /// The cards that were opened, also those that are closed again.
    pub cards: Vec<CardCounters>,
}

/// The counters of one card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardCounters {
    /// PCI bus id.
    pub bus_id: String,
    /// Index of the card.
    pub index: u32,
    /// The numbers.
    pub counters: Counters,
}

/// Numbers with their names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counters {
    descriptions: Arc<[Description]>,
    values: Vec<u64>,
}

/// What a counter is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// Its name, as in `docs/statistics.md`.
    pub name: String,
    /// How it behaves.
    pub kind: Kind,
    /// What it counts.
    pub unit: Unit,
}

impl Counters {
    /// The value of a counter; `None` if that process does not have it.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.iter().find(|(description, _)| description.name == name).map(|(_, value)| value)
    }

    /// All counters, in the order of the page.
    pub fn iter(&self) -> impl Iterator<Item = (&Description, u64)> {
        self.descriptions.iter().zip(self.values.iter().copied())
    }
}

impl Snapshot {
    /// A counter of the whole process: the sum over its cards, or for a maximum the largest.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.total().get(name)
    }

    /// All counters of the whole process.
    pub fn total(&self) -> Counters {
        let mut total = self.other.clone();
        for card in &self.cards {
            let values = total.values.iter_mut().zip(&card.counters.values);
            for (description, (sum, value)) in total.descriptions.iter().zip(values) {
                *sum = match description.kind {
                    Kind::Sum | Kind::Now => sum.wrapping_add(*value),
                    Kind::Most => (*sum).max(*value),
                };
            }
        }
        total
    }

    /// The counters of a card.
    pub fn card(&self, bus_id: &str) -> Option<&Counters> {
        self.cards.iter().find(|card| card.bus_id == bus_id).map(|card| &card.counters)
    }
}

impl fmt::Display for Snapshot {
    /// A table: counters down, the process and its cards across.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const WIDTH: usize = 16;
        let total = self.total();
        let other = self.other.values.iter().any(|&value| value != 0).then_some(&self.other);
        let mut columns = vec![("total", &total)];
        columns.extend(self.cards.iter().map(|card| (card.bus_id.as_str(), &card.counters)));
        columns.extend(other.map(|other| ("other", other)));
        let names = total.descriptions.iter().map(|description| description.name.len());
        let first = names.max().unwrap_or(0).max("counter".len());
        let title = format!("process {}", self.pid);
        write!(f, "{title:<first$}")?;
        columns.iter().try_for_each(|(title, _)| write!(f, " {title:>WIDTH$}"))?;
        for (at, description) in total.descriptions.iter().enumerate() {
            write!(f, "\n{:<first$}", description.name)?;
            for (_, counters) in &columns {
                write!(f, " {:>WIDTH$}", counters.values[at])?;
            }
        }
        Ok(())
    }
}

/// Why the counters of a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// There is no such process, or it ended just now.
    #[error("process {0} does not exist (any more)")]
    NoProcess(u32),
    /// The process belongs to another user.
    #[error("process {0} may not be looked into: be its user, or root")]
    NotAllowed(u32),
    /// The process has no page.
    #[error("process {0} has opened no Gaudi with ucx-gaudi")]
    NoPage(u32),
    /// The process has only inherited its parent's page.
    #[error("process {pid} was forked from process {owner}, which opened the Gaudi: ask for that")]
    Inherited {
        /// Whom we asked.
        pid: u32,
        /// Whose page it is.
        owner: u32,
    },
    /// There is something with the page's name that is not a page we understand.
    #[error("the statistics of process {pid} cannot be understood: {source}")]
    Malformed {
        /// Whom we asked.
        pid: u32,
        /// What is wrong.
        source: Malformed,
    },
    /// The system failed us.
    #[error("the statistics of process {pid} cannot be read: {source}")]
    System {
        /// Whom we asked.
        pid: u32,
        /// The system's error.
        source: io::Error,
    },
}

/// What is wrong with something that was to be a page.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// Other first bytes.
    #[error("it is not, or not yet, a page of counters")]
    NotAPage,
    /// A later format.
    #[error("its format has version {0}, and this program knows version {known}", known = VERSION)]
    Version(u32),
    /// Not a sealed memory file of a sensible size.
    #[error("it is not a sealed memory file of a sensible size")]
    NotSealed,
    /// It ends before it should.
    #[error("it has {found} bytes and says it has {said}")]
    Size {
        /// Bytes there are.
        found: usize,
        /// Bytes it says there are.
        said: u64,
    },
    /// Parts of it lie where they cannot, or hold what they cannot.
    #[error("its {0} makes no sense")]
    Part(&'static str),
}

/// The counters of a running process.
///
/// Each is exact; together they are not one moment, because the process goes on meanwhile. Needs the
/// right to look into the process: the same user, or root.
pub fn read(pid: u32) -> Result<Snapshot, ReadError> {
    let system = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => ReadError::NoProcess(pid),
        Some(libc::EACCES | libc::EPERM) => ReadError::NotAllowed(pid),
        _ => ReadError::System { pid, source },
    };
    let mut problem = ReadError::NoPage(pid);
    let process = pid.to_string();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(system)? {
        let path = entry.map_err(system)?.path();
        // A descriptor may be closed before we look.
        let Ok(target) = fs::read_link(&path) else { continue };
        let name = target.to_string_lossy();
        let name = name.strip_prefix("/memfd:").and_then(|name| name.split(" (deleted)").next());
        if name != Some(FILE_NAME) {
            continue;
        }
        let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path) {
            Ok(file) => file,
            Err(error) => {
                problem = system(error);
                continue;
            }
        };
        match copy(&file).map_err(system)?.and_then(|bytes| Snapshot::parse(&bytes)) {
            Ok(snapshot) if is_of(&snapshot, &process) => return Ok(snapshot),
            Ok(snapshot) => problem = ReadError::Inherited { pid, owner: snapshot.pid },
            Err(source) => problem = ReadError::Malformed { pid, source },
        }
    }
    Err(problem)
}

/// Whether the process made this page itself. Pids are compared as the process sees its own, in
/// whichever namespace; the start time tells two apart that have the same there.
fn is_of(snapshot: &Snapshot, process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let own_pid = line.and_then(|pids| pids.split_whitespace().next_back()?.parse().ok());
    let same_pid = own_pid.is_none_or(|own: u32| own == snapshot.pid);
    let same_start = start_time(process).is_none_or(|start| start == snapshot.start_time);
    same_pid && same_start
}

/// When a process started, from its line in `/proc`.
fn start_time(process: &str) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    start_time_of(&line)
}

fn start_time_of(line: &str) -> Option<u64> {
    // The second field is the program's name in brackets, and may hold anything, brackets too.
    let (_, fields) = line.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// A copy of a page that others change meanwhile, number by number.
fn copy(file: &File) -> io::Result<Result<Vec<u8>, Malformed>> {
    let about = fstat(file)?;
    let len = usize::try_from(about.st_size).unwrap_or(usize::MAX);
    let is_file = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
    // Unless sealed, it could shrink under our hands, and reading it would be fatal.
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if !is_file || !sealed || len == 0 || len > LARGEST || !len.is_multiple_of(8) {
        return Ok(Err(Malformed::NotSealed));
    }
    // SAFETY: a new mapping wherever there is room.
    let at = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
    let words = (0..len / 8).map(|word| {
        // SAFETY: inside the mapping, which is aligned and, sealed, as long as the file; changed by
        // its owner only through atomics, and only read here.
        unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(word)) }.load(Ordering::Acquire)
    });
    let bytes = words.flat_map(u64::to_ne_bytes).collect();
    // SAFETY: our own mapping, and nothing refers into it any more.
    unsafe { munmap(at, len)? };
    Ok(Ok(bytes))
}

/// Numbers and texts at places of a copied page; `None` beyond its end.
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

    /// `count` parts of `len` bytes from `at`, each at least `least` long.
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
    /// Takes a copied page apart.
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

    /// A page with two counters, for the process and a card, whose parts are longer than they have to be.
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
    fn a_total_adds_up_and_takes_the_largest_maximum() {
        let descriptions: Arc<[Description]> =
            [("a", Kind::Sum), ("b", Kind::Now), ("c", Kind::Most)]
                .map(|(name, kind)| Description { name: name.into(), kind, unit: Unit::Number })
                .into();
        let counters = |values: [u64; 3]| Counters {
            descriptions: Arc::clone(&descriptions),
            values: values.to_vec(),
        };
        let card = |index, values| CardCounters {
            bus_id: format!("0000:0{index}:00.0"),
            index,
            counters: counters(values),
        };
        let snapshot = Snapshot {
            pid: 7,
            start_time: 0,
            created: UNIX_EPOCH,
            other: counters([1, 0, 2]),
            cards: vec![card(0, [10, 3, 5]), card(1, [100, 4, 3])],
        };
        assert_eq!(["a", "b", "c"].map(|name| snapshot.get(name)), [Some(111), Some(7), Some(5)]);
        let table = snapshot.to_string();
        let lines: Vec<Vec<&str>> =
            table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0], ["process", "7", "total", "0000:00:00.0", "0000:01:00.0", "other"]);
        assert_eq!(lines[1], ["a", "111", "10", "100", "1"]);
        assert_eq!(lines[3], ["c", "5", "5", "3", "2"]);
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

    #[test]
    fn the_start_time_is_found_behind_any_program_name() {
        let fields = (3..30).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        for name in ["cat", "a b", "a) b", ")))"] {
            assert_eq!(start_time_of(&format!("12 ({name}) {fields}")), Some(22), "{name}");
        }
        assert_eq!(start_time_of("12 (cat) S 1"), None);
        assert!(start_time("self").is_some());
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
