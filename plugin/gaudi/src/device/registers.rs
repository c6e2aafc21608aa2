//! Register blocks, for debugging and profiling. Access is off until the process enables it, and then
//! limited to what the driver permits.

use std::sync::Arc;

use crate::backend::Registers;
use crate::{Device, DeviceAddr, Error, ErrorKind, Remedy};

const MAPPING: &str = "mapping a register block";
const READING: &str = "reading a register";
const WRITING: &str = "writing a register";

/// A block of a device's registers, mapped as long as this lives. It keeps its device open.
#[derive(Debug)]
pub struct RegisterBlock {
    // Declared before `device`: unmapped before the device can close.
    registers: Box<dyn Registers>,
    address: DeviceAddr,
    device: Arc<Device>,
}

impl Device {
    /// Maps the register block that starts at `address` in the device's configuration space.
    ///
    /// Fails unless [`crate::Options::register_access`] permits it. The driver checks as well, and the error
    /// keeps its errno: it maps no blocks on a Gaudi1 (`EPERM`), and only those on its list on later
    /// generations (`EINVAL`).
    pub fn map_block(self: &Arc<Self>, address: DeviceAddr) -> Result<RegisterBlock, Error> {
        self.check_process(MAPPING)?;
        if !self.registry().options.get().register_access.unwrap_or(false) {
            return Err(Error::new(
                ErrorKind::PermissionDenied,
                MAPPING,
                "register access is off in this process",
                Remedy::PermitRegisterAccess,
            )
            .on(self));
        }
        let mapped = self.backend().map_block(address).map_err(|mut error| {
            error.add_detail(&format_args!("for the block at {address}"));
            error.advise("the driver maps only the blocks on its list, by their first address")
        });
        let registers = mapped.map_err(|error| error.on(self))?;
        Ok(RegisterBlock { registers, address, device: Arc::clone(self) })
    }
}

impl RegisterBlock {
    /// The block's first address on the device.
    pub fn address(&self) -> DeviceAddr {
        self.address
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> usize {
        self.registers.len()
    }

    /// The device it belongs to.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Reads the 32-bit register at this byte offset. Reading some registers changes them.
    pub fn read(&self, offset: usize) -> Result<u32, Error> {
        self.device.check_process(READING)?;
        self.registers.read(offset).ok_or_else(|| self.no_register(READING, offset))
    }

    /// Writes the 32-bit register at this byte offset.
    ///
    /// # Safety
    /// Registers command the hardware, which can be made to read and write any memory that is mapped for
    /// it. The caller must make sure that this value does no harm.
    pub unsafe fn write(&self, offset: usize, value: u32) -> Result<(), Error> {
        self.device.check_process(WRITING)?;
        // SAFETY: the caller's promise.
        let written = unsafe { self.registers.write(offset, value) };
        written.ok_or_else(|| self.no_register(WRITING, offset))
    }

    fn no_register(&self, operation: &'static str, offset: usize) -> Error {
        let detail = format!(
            "the block at {} has {:#x} bytes and no register at offset {offset:#x}",
            self.address,
            self.len()
        );
        let remedy = "registers are at multiples of 4 below the block's length";
        Error::new(ErrorKind::InvalidParams, operation, detail, remedy).on(&self.device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options;
    use crate::backend::fake::{BLOCK, Fake};
    use crate::runtime;

    /// Sets whether registers may be mapped.
    fn permit_registers(permitted: bool) {
        runtime().configure(Options { register_access: Some(permitted), ..Options::default() });
    }

    #[test]
    fn registers_are_refused_until_allowed_and_bounded_then() {
        let (_fake, device) = Fake::device();
        let refused = device.map_block(BLOCK).unwrap_err();
        assert_eq!((refused.kind(), refused.errno()), (ErrorKind::PermissionDenied, None));
        assert_eq!(refused.remedy(), Remedy::PermitRegisterAccess);

        permit_registers(true);
        let unlisted = device.map_block(DeviceAddr(0x1000)).unwrap_err();
        assert_eq!(unlisted.errno(), Some(libc::EINVAL), "the driver's own");
        assert!(unlisted.to_string().contains("0x1000"), "{unlisted}");
        assert!(unlisted.to_string().contains("on its list"), "{unlisted}");

        let block = device.map_block(BLOCK).unwrap();
        assert_eq!((block.address(), block.len()), (BLOCK, 8));
        // SAFETY: the fake device does nothing with it.
        unsafe { block.write(4, 7).unwrap() };
        assert_eq!((block.read(0), block.read(4)), (Ok(0), Ok(7)));
        let beyond = block.read(8).unwrap_err();
        assert_eq!(beyond.kind(), ErrorKind::InvalidParams);
        assert!(beyond.to_string().contains("offset 0x8"), "{beyond}");
        // SAFETY: as above.
        assert!(unsafe { block.write(8, 1) }.is_err());

        let id = device.id();
        drop(device);
        assert!(runtime().device(id).is_some(), "the block holds the device");
        drop(block);
        assert!(runtime().device(id).is_none());
        permit_registers(false);
    }
}
