//! Importing dma-bufs: the memory behind a descriptor, mapped into this process.
//!
//! The software Gaudi's dma-bufs are recognised and mapped by its own code; any other descriptor is
//! mapped as the exporter allows, and its refusal is passed on. The mapping keeps the exported
//! memory alive for as long as the region is registered, as an attachment does. The driver refuses an
//! HCA that cannot reach its card by PCI peer-to-peer with `EPERM`.

use std::os::fd::BorrowedFd;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use soft_gaudi::dmabuf::Exported;

use crate::config::{self, DmabufSupport};
use crate::hca::events::lock;
use crate::hca::memory::{Backing, Memory};
use crate::placement::Place;
use crate::wire::Segment;

/// 100 MB/s: as seen where a peer's reads and writes are split into single packets.
const SLOW_NS_PER_BYTE: u64 = 10;

struct Mapping {
    base: usize,
    length: usize,
}

impl Memory for Mapping {}

/// Memory of a card. Asking whether the card was reset takes a system call, so the answer is cached for a while; a
/// reset takes longer than that.
struct CardMemory {
    exported: Exported,
    support: DmabufSupport,
    asked: Mutex<(Instant, bool)>,
}

impl Memory for CardMemory {
    /// A reset of the card ends every mapping of its memory.
    fn is_valid(&self) -> bool {
        let mut asked = lock(&self.asked);
        if asked.0.elapsed() >= Duration::from_micros(100) {
            *asked = (Instant::now(), !self.exported.was_reset());
        }
        asked.1
    }

    fn write_to(&self, Segment { addr, len }: Segment) -> Segment {
        Segment { addr: self.exported.write_to(addr as *mut u8) as u64, len }
    }

    fn written(&self, place: Segment) {
        self.delay(place.len);
        let at = place.addr as *mut u8;
        if self.support == DmabufSupport::Garbage && place.len > 0 {
            // SAFETY: inside the card's memory, which this maps, and where the HCA has just written.
            unsafe { at.write_volatile(!at.read_volatile()) };
        }
        self.exported.written(at, place.len);
    }

    fn before_read(&self, len: u64) {
        self.delay(len);
        self.exported.before_read();
    }
}

impl CardMemory {
    /// Models a path between HCA and card that was not made for peer-to-peer.
    fn delay(&self, len: u64) {
        if self.support == DmabufSupport::Slow {
            std::thread::sleep(Duration::from_nanos(len * SLOW_NS_PER_BYTE));
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and unused: the region is gone.
        let _ = unsafe { rustix::mm::munmap(self.base as *mut _, self.length) };
    }
}

/// The bytes `offset..offset + length` of a dma-buf.
pub(super) fn import(
    fd: BorrowedFd<'_>,
    offset: u64,
    length: u64,
    place: &Place,
) -> Result<(Vec<Segment>, Backing), Errno> {
    // Tells a closed descriptor from one that is not a dma-buf.
    rustix::io::fcntl_getfd(fd)?;
    if place.own_port.is_some() {
        return Err(Errno::OPNOTSUPP);
    }
    let (pieces, backing): (Vec<Segment>, Backing) = match Exported::from_fd(fd) {
        Ok(exported) => {
            let card = Place::of_card(exported.device());
            let near = card.is_some_and(|card| card.shares_host_bridge(place));
            let support = config::get().dmabuf;
            match support {
                DmabufSupport::Refused => return Err(Errno::PERM),
                DmabufSupport::HostBridge if !near => return Err(Errno::PERM),
                _ => {}
            }
            let piece = |range: &soft_gaudi::dmabuf::Range| Segment {
                addr: range.ptr as u64,
                len: range.len,
            };
            let pieces = exported.ranges().iter().map(piece).collect();
            let asked = Mutex::new((Instant::now(), true));
            (pieces, Box::new(CardMemory { exported, support, asked }))
        }
        Err(Errno::INVAL) => map(fd)?,
        Err(error) => return Err(error),
    };
    Ok((cut(&pieces, offset, length).ok_or(Errno::INVAL)?, backing))
}

fn map(fd: BorrowedFd<'_>) -> Result<(Vec<Segment>, Backing), Errno> {
    // A dma-buf says its size to `lseek`.
    let length = rustix::fs::seek(fd, rustix::fs::SeekFrom::End(0))? as usize;
    if length == 0 {
        return Err(Errno::INVAL);
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice.
    let base = unsafe {
        rustix::mm::mmap(core::ptr::null_mut(), length, access, MapFlags::SHARED, fd, 0)
    }?;
    let piece = Segment { addr: base as u64, len: length as u64 };
    Ok((vec![piece], Box::new(Mapping { base: base as usize, length })))
}

/// The part of a list of pieces that begins at `offset`.
fn cut(pieces: &[Segment], offset: u64, length: u64) -> Option<Vec<Segment>> {
    let total: u64 = pieces.iter().map(|piece| piece.len).sum();
    if offset.checked_add(length)? > total {
        return None;
    }
    let mut rest = crate::hca::copy::skip(pieces, offset);
    let mut left = length;
    for piece in &mut rest {
        piece.len = piece.len.min(left);
        left -= piece.len;
    }
    rest.retain(|piece| piece.len > 0);
    Some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    #[test]
    fn a_range_is_cut_across_pieces() {
        let pieces = [Segment { addr: 0x1000, len: 0x100 }, Segment { addr: 0x5000, len: 0x100 }];
        let expected = [Segment { addr: 0x10f0, len: 0x10 }, Segment { addr: 0x5000, len: 0x20 }];
        assert_eq!(cut(&pieces, 0xf0, 0x30).unwrap(), expected);
        assert_eq!(cut(&pieces, 0x200, 0).unwrap(), []);
        assert!(cut(&pieces, 0xf0, 0x111).is_none());
        assert!(cut(&pieces, u64::MAX, 2).is_none());
    }

    #[test]
    fn a_memfd_is_mapped_and_what_cannot_be_is_refused_with_the_reason() {
        let fd = rustix::fs::memfd_create("dmabuf", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, 8192).unwrap();
        let place = Place::of_card(0).unwrap();
        let own_port = Place { own_port: Some(0), ..place };
        assert_eq!(import(fd.as_fd(), 0, 4096, &own_port).err(), Some(Errno::OPNOTSUPP));
        let import = |fd, offset, length| import(fd, offset, length, &place);
        let (pieces, _backing) = import(fd.as_fd(), 4096, 4096).unwrap();
        assert_eq!(pieces.iter().map(|piece| piece.len).sum::<u64>(), 4096);
        assert_eq!(import(fd.as_fd(), 4096, 4097).err(), Some(Errno::INVAL));
        let pipe = rustix::pipe::pipe().unwrap();
        assert_eq!(import(pipe.0.as_fd(), 0, 4096).err(), Some(Errno::SPIPE));
    }
}
