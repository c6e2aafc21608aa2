//! Classifies the addresses in UCX's operations.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use gaudi::{Device, HostRegion, Location, Side, USER_SPACE_END};
use uct::{MemoryType, Region, Status, Ucx, log};

/// What an address of this process is, and the device it lies on if it is a device address.
pub(crate) fn classify(address: u64, length: usize) -> (Side, Option<Arc<Device>>) {
    let side = gaudi::runtime().find(address, length);
    (side, side.device_id().and_then(|id| gaudi::runtime().device(id)))
}

/// The allocation that contains a range to be registered. UCX's registration cache rounds ranges up. Such
/// a range may end past the allocation, but inside its last page, which no other allocation uses.
pub(crate) fn allocation_of(address: u64, length: usize) -> Option<Location> {
    let found = gaudi::runtime().locate(address, 1)?;
    let rest = found.length.next_multiple_of(gaudi::PAGE_SIZE) - found.offset;
    (length as u64 <= rest).then_some(found)
}

/// What a range to be registered is.
pub(crate) enum Registered<'a> {
    /// Gaudi memory of this process, in this allocation.
    Device(Location),
    /// Other memory, of which a dma-buf and the offset in it were given.
    Dmabuf(BorrowedFd<'a>, u64),
    /// Host memory: recorded, and pinned when a copy first uses it.
    Host(Arc<HostRegion>),
}

/// Registers a range for the domain of this name. Gaudi memory of this process needs no dma-buf, though
/// UCP may pass the one that the domain exported.
pub(crate) fn register<'a>(
    ucx: &Ucx,
    name: &str,
    region: &Region<'a>,
) -> Result<Registered<'a>, Status> {
    let Region { address, length, .. } = *region;
    if let Some(found) = allocation_of(address, length) {
        return Ok(Registered::Device(found));
    }
    if let Some((dmabuf, offset)) = region.dmabuf {
        return Ok(Registered::Dmabuf(dmabuf, offset));
    }
    if region.memory_type == Some(MemoryType::GAUDI) {
        if !region.hide_errors {
            log!(
                ucx,
                Error,
                "{name}: cannot register {address:#x}, {length} bytes: not inside one Gaudi \
                 allocation of this process"
            );
        }
        return Err(Status::INVALID_ADDR);
    }
    let start = core::ptr::with_exposed_provenance_mut::<u8>(address as usize);
    Ok(Registered::Host(HostRegion::record(start, length)))
}

/// Whether the CPU may access `[address, address + length)`, as far as Gaudi is concerned: no byte of
/// it is a device address, whether allocated or freed. `length` is not 0.
pub(crate) fn is_host_memory(address: u64, length: usize) -> bool {
    let runtime = gaudi::runtime();
    let Some(end) = address.checked_add(length as u64) else { return false };
    let overlaps = |window: std::ops::Range<u64>| address < window.end && window.start < end;
    end <= USER_SPACE_END
        // Memory that an application mapped itself lies outside of the windows.
        && runtime.locate(address, 1).is_none()
        && runtime.locate(end - 1, 1).is_none()
        && !runtime.devices().iter().any(|device| overlaps(device.window().range()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_memory_ends_where_user_space_does() {
        let here = [0_u8; 16];
        let start = here.as_ptr().addr() as u64;
        assert!(is_host_memory(start, here.len()));
        assert!(!is_host_memory(0x1001_0000_0000_0000, 8), "where a Gaudi2 has its memory");
        assert!(!is_host_memory(USER_SPACE_END - 4, 8), "across the end");
        assert!(!is_host_memory(u64::MAX - 3, 8), "beyond the last address");
    }
}
