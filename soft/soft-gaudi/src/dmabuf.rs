//! Exported ranges of device memory, as descriptors that travel.
//!
//! A dma-buf is a file of its own in the machine's `dmabuf` folder: as long as the range, opened
//! for writing only (so `mmap` is refused, as the driver's dma-bufs refuse it), starting with a
//! checksummed description of the memory it stands for. The lock on its open file description
//! lasts until the last copy of the descriptor, in whatever process, is closed. Files without a lock are
//! left over and are removed by the next process that finds them.
//!
//! [`Exported`] is what an importer makes of such a descriptor: the software RDMA device maps
//! exported memory with it, and so does the import of a second card.

use std::ffi::OsStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use crate::card_memory::CardMemory;
use crate::config::config;
use crate::dram::Segment;
use crate::node::Node;
use crate::ownership;
use crate::posted::{self, Posted};
use crate::state;
use crate::timing::Links;

const MAGIC: &[u8; 8] = b"softGdma";
/// Version of the description's layout.
const VERSION: u32 = 1;
const HEADER: usize = 64;
/// Longest path and most segments a description may have; keeps reading bounded.
const MAX_PATH: usize = 2048;
const MAX_SEGMENTS: usize = 65536;

/// What a dma-buf stands for: pieces of one file of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Description {
    device: u32,
    memory: (u64, u64),
    path: Vec<u8>,
    segments: Vec<Segment>,
}

impl Description {
    fn size(&self) -> u64 {
        self.segments.iter().fold(0, |sum, s| sum.saturating_add(s.len))
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + self.path.len() + 16 * self.segments.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&self.memory.0.to_le_bytes());
        bytes.extend_from_slice(&self.memory.1.to_le_bytes());
        bytes.extend_from_slice(&self.device.to_le_bytes());
        bytes.extend_from_slice(&(self.path.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&(self.segments.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&VERSION.to_le_bytes());
        bytes.resize(HEADER, 0);
        bytes.extend_from_slice(&self.path);
        for segment in &self.segments {
            bytes.extend_from_slice(&segment.offset.to_le_bytes());
            bytes.extend_from_slice(&segment.len.to_le_bytes());
        }
        let sum = checksum(&bytes[16..]);
        bytes[8..16].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Lengths of path and segment table according to a header.
    fn tail_len(header: &[u8; HEADER]) -> Option<(usize, usize)> {
        let path = u32_at(header, 36)? as usize;
        let segments = u32_at(header, 40)? as usize;
        let known = &header[..8] == MAGIC && u32_at(header, 44)? == VERSION;
        let fits = path <= MAX_PATH && segments <= MAX_SEGMENTS;
        (known && fits).then_some((path, segments))
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let header: &[u8; HEADER] = bytes.get(..HEADER)?.try_into().ok()?;
        let (path_len, count) = Self::tail_len(header)?;
        let whole = bytes.get(..HEADER + path_len + 16 * count)?;
        if checksum(&whole[16..]) != u64_at(header, 8)? {
            return None;
        }
        let table = &whole[HEADER + path_len..];
        let segments = table
            .chunks_exact(16)
            .map(|entry| Some(Segment { offset: u64_at(entry, 0)?, len: u64_at(entry, 8)? }))
            .collect::<Option<Vec<_>>>()?;
        Some(Self {
            device: u32_at(header, 32)?,
            memory: (u64_at(header, 16)?, u64_at(header, 24)?),
            path: whole[HEADER..HEADER + path_len].to_vec(),
            segments,
        })
    }
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// FNV-1a. The file is accessible to us alone, so this only has to catch programs that wrote into the descriptor.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Makes a dma-buf of DRAM segments and returns its descriptor and file.
pub(crate) fn export(
    node: &Node,
    device: u32,
    memory: &CardMemory,
    segments: &[Segment],
) -> Result<(OwnedFd, PathBuf), Errno> {
    static COUNT: AtomicU64 = AtomicU64::new(0);

    let in_file = |s: &Segment| Segment { offset: CardMemory::file_offset(s.offset), len: s.len };
    let description = Description {
        device,
        memory: memory.identity()?,
        path: node.memory_path(device).as_os_str().as_bytes().to_vec(),
        segments: segments.iter().map(in_file).collect(),
    };
    let name = format!("{device}-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let path = node.dmabuf_folder().join(name);
    let private = OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mode = Mode::RUSR | Mode::WUSR;
    // Process ids are reused: an earlier process may have left a file of this name.
    let _ = std::fs::remove_file(&path);
    let fd =
        rustix::fs::open(&path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | private, mode)?;
    let made = (|| {
        ownership::lock(fd.as_fd())?;
        let bytes = description.encode();
        if rustix::io::pwrite(&fd, &bytes, 0)? != bytes.len() {
            return Err(Errno::NOMEM);
        }
        rustix::fs::ftruncate(&fd, description.size())
    })();
    match made {
        Ok(()) => Ok((fd, path)),
        Err(error) => {
            let _ = std::fs::remove_file(&path);
            Err(node.out_of_space(error))
        }
    }
}

/// Whether some process still has the dma-buf of this file open; removes the file if not.
pub(crate) fn is_alive(path: &Path) -> bool {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let Ok(fd) = rustix::fs::open(path, flags, Mode::empty()) else { return false };
    // If the query fails, assume it is open: nothing is lost.
    if ownership::is_locked(fd.as_fd()).unwrap_or(true) {
        return true;
    }
    let _ = std::fs::remove_file(path);
    false
}

/// Whether any dma-buf of a card is open, in whatever process.
pub(crate) fn any_alive(node: &Node, device: u32) -> bool {
    let Ok(entries) = std::fs::read_dir(node.dmabuf_folder()) else { return false };
    let prefix = format!("{device}-");
    entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
        .any(|entry| is_alive(&entry.path()))
}

/// A piece of exported memory in this process.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    /// Its first byte.
    pub ptr: *mut u8,
    /// Its length.
    pub len: u64,
}

/// Device memory that a dma-buf descriptor stands for, mapped into this process.
///
/// Holds a copy of the descriptor, so the memory stays exported (and its card busy) as long as
/// this value lives – as an RDMA registration does with a real dma-buf.
#[derive(Debug)]
pub struct Exported {
    _fd: OwnedFd,
    device: u32,
    size: u64,
    ranges: Vec<Range>,
    /// The card's state file, and how often the card had been reset.
    resets: (OwnedFd, u64),
    early: Option<PostedMemory>,
    /// The links of its card, if times are modelled.
    links: Option<Links>,
}

/// The second file, which writes go to until the card's engines may see them.
#[derive(Debug)]
struct PostedMemory {
    posted: Arc<Posted>,
    /// Where the card's memory and the other file are mapped.
    memory: usize,
    bytes: usize,
}

// SAFETY: the ranges are plain addresses of a mapping that is never undone.
unsafe impl Send for Exported {}
// SAFETY: as above; nothing is changed through a shared reference.
unsafe impl Sync for Exported {}

impl Exported {
    /// Recognises a dma-buf descriptor of the software Gaudi and maps the memory it stands for.
    ///
    /// `EINVAL` when the descriptor is something else or its memory is gone, `EMFILE` when it takes more
    /// descriptors than the process may have. What the caller passes is not trusted: the description is
    /// bounded, checksummed and compared with the file.
    pub fn from_fd(fd: BorrowedFd<'_>) -> Result<Self, Errno> {
        let keep = fd.try_clone_to_owned().map_err(|_| Errno::MFILE)?;
        let link = format!("/proc/self/fd/{}", keep.as_raw_fd());
        let stat = rustix::fs::fstat(&keep)?;
        if rustix::fs::FileType::from_raw_mode(stat.st_mode) != rustix::fs::FileType::RegularFile {
            return Err(Errno::INVAL);
        }
        let reader = rustix::fs::open(link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .map_err(not_ours)?;
        let mut header = [0; HEADER];
        if rustix::io::pread(&reader, &mut header, 0)? != HEADER {
            return Err(Errno::INVAL);
        }
        let (path, count) = Description::tail_len(&header).ok_or(Errno::INVAL)?;
        let mut bytes = vec![0; HEADER + path + 16 * count];
        if rustix::io::pread(&reader, &mut bytes[..], 0)? != bytes.len() {
            return Err(Errno::INVAL);
        }
        let description = Description::decode(&bytes).ok_or(Errno::INVAL)?;
        if description.size() != stat.st_size as u64 {
            return Err(Errno::INVAL);
        }
        let path = Path::new(OsStr::from_bytes(&description.path));
        let (memory, len) = map_memory(&description)?;
        let range = |s: &Segment| Range { ptr: (memory as u64 + s.offset) as *mut u8, len: s.len };
        let ranges = description.segments.iter().map(range).collect();
        let (device, size) = (description.device, description.size());
        let early = match config().is_some_and(|config| config.early_writes) {
            true => {
                let posted = posted::of(path, description.memory)?;
                let bytes = map_once(posted.bytes(), posted.identity()?, len)?;
                Some(PostedMemory { posted, memory, bytes })
            }
            false => None,
        };
        let state = state::open_beside(path, device).map_err(not_ours)?;
        let before = state::resets(&state).ok_or(Errno::INVAL)?;
        let links = match config().is_some_and(|config| config.model.is_some()) {
            true => Some(Links::of(path, device)?),
            false => None,
        };
        Ok(Self { _fd: keep, device, size, ranges, resets: (state, before), early, links })
    }

    /// The address at which another device must write to this part of [`Exported::ranges`]. It is elsewhere if the card
    /// acknowledges writes before its engines see them.
    pub fn write_to(&self, ptr: *mut u8) -> *mut u8 {
        let moved =
            |early: &PostedMemory| ptr.wrapping_byte_add(early.bytes.wrapping_sub(early.memory));
        self.early.as_ref().map_or(ptr, moved)
    }

    /// Another device has written these bytes, at what [`Exported::write_to`] returned.
    pub fn written(&self, at: *mut u8, len: u64) {
        if let Some(early) = &self.early {
            early.posted.add((at as usize).wrapping_sub(early.bytes) as u64, len);
        }
    }

    /// Called before another device reads: on PCI Express, a read does not overtake earlier writes.
    pub fn before_read(&self) {
        if let Some(early) = &self.early {
            early.posted.flush();
        }
    }

    /// Whether the card was reset since. Its memory is then not what was exported.
    pub fn was_reset(&self) -> bool {
        let (state, before) = &self.resets;
        state::resets(state) != Some(*before)
    }

    /// The clocks of its card's links.
    pub(crate) fn links(&self) -> Option<Links> {
        self.links
    }

    /// Index of the card whose memory it is.
    pub fn device(&self) -> u32 {
        self.device
    }

    /// Bytes exported.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The memory, in order. Another process's card writes to it at any time: copy with raw
    /// pointers, never make references into it.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }
}

/// A file that cannot be opened is not one of ours, unless the process or the system is out of descriptors.
fn not_ours(error: Errno) -> Errno {
    if matches!(error, Errno::MFILE | Errno::NFILE) { error } else { Errno::INVAL }
}

/// Foreign memory files, each mapped once per process and kept.
static FOREIGN: Mutex<Vec<Foreign>> = Mutex::new(Vec::new());

struct Foreign {
    file: (u64, u64),
    base: usize,
    len: u64,
}

/// Where the memory file of a dma-buf is mapped in this process, and how long it is.
fn map_memory(description: &Description) -> Result<(usize, u64), Errno> {
    let path = Path::new(OsStr::from_bytes(&description.path));
    let file =
        rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty())
            .map_err(not_ours)?;
    let stat = rustix::fs::fstat(&file)?;
    if (stat.st_dev, stat.st_ino) != description.memory {
        return Err(Errno::INVAL);
    }
    let len = stat.st_size as u64;
    let inside = |s: &Segment| s.offset.checked_add(s.len).is_some_and(|end| end <= len);
    if !description.segments.iter().all(inside) {
        return Err(Errno::INVAL);
    }
    Ok((map_once(file.as_fd(), description.memory, len)?, len))
}

/// Maps a file, unless that was done before.
pub(crate) fn map_once(
    file: BorrowedFd<'_>,
    identity: (u64, u64),
    len: u64,
) -> Result<usize, Errno> {
    let mut foreign = FOREIGN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if let Some(known) = foreign.iter().find(|f| f.file == identity && f.len >= len) {
        return Ok(known.base);
    }
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe {
        rustix::mm::mmap(
            core::ptr::null_mut(),
            len as usize,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED | MapFlags::NORESERVE,
            file,
            0,
        )
    }? as usize;
    foreign.push(Foreign { file: identity, base, len });
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_description() -> impl Strategy<Value = Description> {
        let segments = prop::collection::vec((any::<u64>(), 0u64..1 << 40), 0..9);
        (any::<u32>(), any::<(u64, u64)>(), any::<[u8; 7]>(), segments).prop_map(
            |(device, memory, path, segments)| Description {
                device,
                memory,
                path: path.to_vec(),
                segments: segments
                    .into_iter()
                    .map(|(offset, len)| Segment { offset, len })
                    .collect(),
            },
        )
    }

    proptest! {
        #[test]
        fn descriptions_survive_the_file(description in any_description()) {
            let mut bytes = description.encode();
            bytes.extend_from_slice(&[0; 100]);
            prop_assert_eq!(Description::decode(&bytes), Some(description));
        }

        #[test]
        fn a_changed_byte_is_noticed(description in any_description(), at in 0usize..200, xor in 1u8..) {
            let mut bytes = description.encode();
            let at = at % bytes.len();
            // Bytes 48..64 are padding, but under the checksum as well.
            bytes[at] ^= xor;
            prop_assert_ne!(Description::decode(&bytes), Some(description));
        }

        #[test]
        fn any_bytes_are_parsed_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Description::decode(&bytes);
        }
    }
}
