//! Flushes what other devices write to this card's memory, so that the card's engines see it.
//!
//! A NIC, or the card of a peer, writes exported memory over PCI Express. Such writes are posted, and cards
//! with *early write response* acknowledge them before they are in HBM: the NIC reports completion, but
//! an engine that reads the memory then gets the old bytes. Likewise, an older write of a peer can land after a
//! copy has written the same memory. So we call the driver to flush these writes before each submission that
//! touches memory of which a dma-buf was handed out, and before such memory is reused.
//!
//! Nothing tells us when a NIC has written, or when its registration ends. So memory counts as exported from
//! the first dma-buf until it is freed, and each submission that touches it flushes. A flush is a driver call
//! that reads a register of the card.
//!
//! Reads by peers need no flush: a read over PCI Express does not overtake the writes before it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hl_thunk::packet::LinDma;

use crate::backend::Backend;
use crate::memory::{AddressTable, DeviceRange};
use crate::options::{Configuration, FlushPeerWrites};
use crate::stats::{Counter, Counts};
use crate::{DeviceAddr, Direction, Error};

/// The memory of one card that other devices may write to.
#[derive(Debug)]
pub(crate) struct PeerWrites {
    options: Arc<Configuration>,
    exported: AddressTable,
    /// The driver has no flush call.
    unsupported: AtomicBool,
}

impl PeerWrites {
    pub(super) fn new(options: Arc<Configuration>) -> Self {
        let (exported, unsupported) = (AddressTable::default(), AtomicBool::new(false));
        Self { options, exported, unsupported }
    }

    fn policy(&self) -> FlushPeerWrites {
        self.options.get().flush_peer_writes.unwrap_or_default()
    }

    /// Whether memory may be exported: not if the policy is `Always` and the driver cannot flush.
    pub(crate) fn permit_export(&self, backend: &dyn Backend) -> Result<(), Error> {
        if self.policy() == FlushPeerWrites::Always { backend.flush_peer_writes() } else { Ok(()) }
    }

    /// A dma-buf of this allocation is about to be handed out.
    pub(crate) fn exported(&self, range: DeviceRange) {
        if self.exported.find(range.base, 1).is_none() {
            self.exported.insert(range);
        }
    }

    /// The allocation that starts at `base` is about to be freed: writes of peers that are still under way must not
    /// land in the next allocation at that address.
    pub(crate) fn freed(&self, base: u64, backend: &dyn Backend, counts: Counts) {
        if let Some(range) = self.exported.find(base, 1) {
            self.exported.remove(base, range.device);
            // If the flush fails, the card is lost and its memory will not be used again.
            let _ = self.flush(backend, counts);
        }
    }

    /// Part of an exported range is about to be freed; the rest stays exported.
    pub(crate) fn part_freed(&self, addr: u64, backend: &dyn Backend, counts: Counts) {
        if self.exported.find(addr, 1).is_some() {
            let _ = self.flush(backend, counts);
        }
    }

    /// Flushes, if these moves touch exported memory.
    pub(super) fn flush_for(
        &self,
        direction: Direction,
        moves: &[LinDma],
        backend: &dyn Backend,
        counts: Counts,
    ) -> Result<(), Error> {
        let exported = |addr: DeviceAddr| self.exported.find(addr.0, 1).is_some();
        // The side that is not checked is host memory or another card's.
        let touched = moves.iter().any(|dma| match (*dma, direction) {
            (LinDma::Copy { src, .. }, Direction::DeviceToHost) => exported(src),
            (LinDma::Copy { dst, .. }, Direction::HostToDevice) => exported(dst),
            (LinDma::Copy { src, dst, .. }, _) => exported(src) || exported(dst),
            (LinDma::Fill { dst, .. }, _) => exported(dst),
        });
        if touched { self.flush(backend, counts) } else { Ok(()) }
    }

    fn flush(&self, backend: &dyn Backend, counts: Counts) -> Result<(), Error> {
        if self.policy() == FlushPeerWrites::Never {
            return Ok(());
        }
        self.flush_now(backend, counts).map(drop)
    }

    /// Flushes, whatever the policy: for memory that others will use next. `false`: the driver has no flush call.
    pub(crate) fn flush_now(&self, backend: &dyn Backend, counts: Counts) -> Result<bool, Error> {
        // Relaxed: a thread that does not see the store calls the driver once more.
        if self.unsupported.load(Ordering::Relaxed) {
            return Ok(false);
        }
        match backend.flush_peer_writes() {
            Ok(()) => {
                counts.add(Counter::PeerWriteFlushes, 1);
                Ok(true)
            }
            Err(error) if error.is_unsupported() => {
                self.unsupported.store(true, Ordering::Relaxed);
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::backend::fake::Fake;
    use crate::{Allocation, Device, ErrorKind, FlushPeerWrites, Options, Side, runtime};
    use std::sync::Arc;

    fn policy(flush: FlushPeerWrites) {
        runtime().configure(Options { flush_peer_writes: Some(flush), ..Options::default() });
    }

    /// A card with two allocations: a dma-buf of the first was handed out, the second was only exported for trial.
    fn card() -> (Arc<Fake>, Arc<Device>, Allocation, Allocation) {
        let (fake, device) = Fake::device();
        let (exported, other) = (device.alloc(100, 1).unwrap(), device.alloc(100, 1).unwrap());
        device.export(exported.addr(), 10).expect("exported");
        device.export_for_trial(other.addr(), 10, None).expect("exported");
        (fake, device, exported, other)
    }

    /// Copies one byte. Whether the fake hardware flushed before the submission.
    fn flushed(fake: &Arc<Fake>, device: &Arc<Device>, dst: Side, src: Side) -> bool {
        let before = fake.flushes().len();
        let segment = crate::Segment { dst, src, len: 1, host_region: None };
        // SAFETY: the host byte outlives the copy, which ends here.
        let mut transfer = unsafe { device.copy(&[segment]) }.expect("started");
        let submitted = *fake.queued().last().expect("submitted");
        fake.finish_all();
        transfer.wait().expect("copied");
        let flushes = &fake.flushes()[before..];
        assert!(flushes.iter().all(|after| *after < submitted), "before the submission");
        flushes.len() == 1
    }

    #[test]
    fn writes_are_flushed_before_a_copy_touches_exported_memory() {
        let (fake, device, exported, other) = card();
        let mut byte = 0_u8;
        let host = Side::Host(&raw mut byte);
        let [exported_side, other_side] = [&exported, &other].map(|it| Side::Device(it.addr()));
        let flushed = |dst, src| flushed(&fake, &device, dst, src);
        assert!(flushed(host, exported_side) && flushed(exported_side, host), "read and written");
        assert!(flushed(other_side, exported_side), "read within the card");
        assert!(!flushed(host, other_side) && !flushed(other_side, host), "no peer writes it");
        let before = fake.flushes().len();
        drop((exported, other));
        assert_eq!(fake.flushes().len(), before + 1, "before the memory is used again");
    }

    #[test]
    fn nothing_is_flushed_where_it_is_off_or_the_driver_cannot() {
        let (fake, device, exported, _other) = card();
        let mut byte = 0_u8;
        let (host, memory) = (Side::Host(&raw mut byte), Side::Device(exported.addr()));
        policy(FlushPeerWrites::Never);
        assert!(!flushed(&fake, &device, host, memory));
        assert_eq!(device.flush_peer_writes(), Ok(true), "who asks gets it");
        policy(FlushPeerWrites::IfPossible);
        fake.refuse_flushes(libc::EOPNOTSUPP);
        assert!(flushed(&fake, &device, host, memory), "asked once");
        assert!(!flushed(&fake, &device, host, memory), "and not again");
        assert_eq!(device.flush_peer_writes(), Ok(false), "there is none");
    }

    #[test]
    fn a_flush_that_fails_fails_the_copy() {
        let (fake, device, exported, _other) = card();
        let mut byte = 0_u8;
        let (host, memory) = (Side::Host(&raw mut byte), Side::Device(exported.addr()));
        fake.refuse_flushes(libc::EIO);
        // SAFETY: nothing is copied.
        let failed = unsafe { device.copy_blocking(host, memory, 1) }.expect_err("not flushed");
        assert!(failed.is_device_lost(), "{failed}");
        assert!(fake.queued().is_empty());
    }

    #[test]
    fn memory_is_not_exported_where_a_flush_is_demanded_and_there_is_none() {
        let (fake, device) = Fake::device();
        let memory = device.alloc(100, 1).unwrap();
        policy(FlushPeerWrites::Always);
        device.export(memory.addr(), 10).expect("the driver can");
        fake.refuse_flushes(libc::EOPNOTSUPP);
        let refused = device.export(memory.addr(), 10).expect_err("it cannot");
        assert!(refused.is_unsupported(), "{refused}");
        assert_eq!(refused.kind(), ErrorKind::InvalidParams);
        policy(FlushPeerWrites::IfPossible);
        device.export(memory.addr(), 10).expect("not demanded");
    }
}
