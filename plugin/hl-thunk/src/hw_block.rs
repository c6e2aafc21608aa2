//! Register blocks of the device, mapped into this process.
//!
//! The driver decides which blocks there are: none on a Gaudi, a list of them on later generations.
//! A register is device state, not memory: every access is one volatile 32-bit load or store, and
//! no reference into a block is ever made.

use std::ptr::NonNull;

use crate::error::check;
use crate::{Device, DeviceAddr, Error, HostPages};

/// Bytes of a register.
const REGISTER: usize = size_of::<u32>();

/// A register block, mapped as long as this lives.
#[derive(Debug)]
pub struct HwBlock {
    // Dropped first: the mapping holds the device file open, and with it the card.
    pages: HostPages,
    address: DeviceAddr,
    device: Device,
}

impl HwBlock {
    /// Maps the whole block that starts at this address of the device's configuration space.
    ///
    /// `EPERM`: this generation has no such blocks. `EINVAL`: the block is not on the driver's
    /// list. `EOPNOTSUPP`: the library has no such call.
    pub fn map(device: &Device, address: DeviceAddr) -> Result<Self, Error> {
        let name = "hlthunk_get_hw_block";
        let symbols = device.symbols();
        symbols.hlthunk_get_hw_block.ok_or(Error::new(name, libc::EOPNOTSUPP))?;
        let (mut size, mut handle) = (0, 0);
        // SAFETY: the fd is open, and both results have a place to go to.
        check(name, || unsafe {
            let asked =
                symbols.hlthunk_get_hw_block(device.raw_fd(), address.0, &mut size, &mut handle);
            asked.unwrap_or(-libc::EOPNOTSUPP)
        })?;
        // The handle is the offset. A block without a size is refused by the kernel.
        let pages = HostPages::of_file(device, size as usize, handle)
            .map_err(|errno| Error::new("mmap of a register block", errno.raw_os_error()))?;
        Ok(Self { pages, address, device: device.clone() })
    }

    /// Where the block starts on the device.
    pub fn address(&self) -> DeviceAddr {
        self.address
    }

    /// Bytes it has.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// Reads the register at this byte offset; `None` if there is none.
    pub fn read(&self, offset: usize) -> Option<u32> {
        let register = self.register(offset)?;
        // SAFETY: aligned and inside the mapping, which lives as long as `self`.
        Some(unsafe { register.as_ptr().read_volatile() })
    }

    /// Writes the register at this byte offset; `None` if there is none.
    ///
    /// # Safety
    /// Registers command the hardware, which can read and write any memory it is pointed at: the
    /// caller answers for what this value makes the device do.
    #[must_use = "the register may not exist"]
    pub unsafe fn write(&self, offset: usize, value: u32) -> Option<()> {
        let register = self.register(offset)?;
        // SAFETY: aligned and inside the mapping; the effect is the caller's promise.
        unsafe { register.as_ptr().write_volatile(value) };
        Some(())
    }

    /// A forked child has no registers: the mapping was not inherited.
    fn register(&self, offset: usize) -> Option<NonNull<u32>> {
        if self.device.is_ours() { register(&self.pages, offset) } else { None }
    }
}

fn register(pages: &HostPages, offset: usize) -> Option<NonNull<u32>> {
    let inside = offset.is_multiple_of(REGISTER) && offset.checked_add(REGISTER)? <= pages.len();
    // SAFETY: inside the mapping by the check.
    inside.then(|| unsafe { pages.as_ptr().add(offset) }).and_then(|at| NonNull::new(at.cast()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Library;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use soft_gaudi::testing;
    use std::sync::Arc;

    #[test]
    fn registers_are_read_and_written_inside_the_block_only() {
        let file = memfd_create("registers", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 3 * 4096).unwrap();
        let pages = HostPages::of_file(&file, 4096, 8192).unwrap();
        for (offset, exists) in
            [(0, true), (4092, true), (4096, false), (4094, false), (2, false), (usize::MAX, false)]
        {
            assert_eq!(register(&pages, offset).is_some(), exists, "{offset}");
        }
        let last = register(&pages, 4092).unwrap();
        // SAFETY: inside the mapping, which nothing else uses.
        unsafe { last.write_volatile(0x1234_5678) };
        let mut bytes = [0; 4];
        rustix::io::pread(&file, &mut bytes, 8192 + 4092).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 0x1234_5678, "the handle is the offset");
    }

    #[test]
    fn a_block_without_a_size_is_refused() {
        let file = memfd_create("registers", MemfdFlags::CLOEXEC).unwrap();
        assert_eq!(HostPages::of_file(&file, 0, 0).unwrap_err().raw_os_error(), libc::EINVAL);
    }

    /// The rest is tested on the software Gaudi in tests/gaudi2.rs; its library has the call.
    #[test]
    fn a_library_without_the_call_is_no_driver_with_a_block() {
        testing::set_up("gaudi2", &[]);
        let path = testing::library();
        let mut library = Library::load_first(&[path.to_str().unwrap()]).unwrap();
        let symbols = &mut Arc::get_mut(&mut library).unwrap().symbols;
        assert!(symbols.hlthunk_get_hw_block.take().is_some());
        let bus_id = crate::ControlDevice::open(&library, 0).unwrap().bus_id().unwrap();
        let device = Device::open(&library, &bus_id).unwrap();
        let block = DeviceAddr(0x1000_007f_fc31_e000);
        assert_eq!(HwBlock::map(&device, block).unwrap_err().errno, libc::EOPNOTSUPP);
    }
}
