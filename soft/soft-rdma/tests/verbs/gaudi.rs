//! A software Gaudi in this process, whose memory is exported.

use std::ffi::CString;
use std::os::fd::{FromRawFd, OwnedFd};

use soft_gaudi::api::*;
use soft_gaudi::testing::{self, Machine};

/// An open card and some of its memory.
pub(crate) struct Card {
    fd: i32,
    address: u64,
}

impl Card {
    /// Opens a card of a machine that this process has for itself.
    pub(crate) fn open(index: u32) -> Self {
        Self::try_open(index).unwrap_or_else(|error| panic!("open: {error}"))
    }

    /// The same, or the driver's error.
    pub(crate) fn try_open(index: u32) -> Result<Self, i32> {
        let further = [("SOFT_GAUDI_FAULTS", "yes"), ("SOFT_GAUDI_RESET_KILL", "no")];
        testing::set_up("gaudi2", &further);
        let name = CString::new(soft_gaudi::asic::bus_id(index)).expect("no NUL");
        let fd = hlthunk_open(soft_gaudi::abi::DEVICE_DONT_CARE, name.as_ptr());
        if fd < 0 {
            return Err(fd);
        }
        let handle = hlthunk_device_memory_alloc(fd, 4 << 20, 0, true, false);
        let address = hlthunk_device_memory_map(fd, handle, 0);
        assert_ne!(address, 0, "{}", std::io::Error::last_os_error());
        Ok(Self { fd, address })
    }

    /// Closes it; what was exported stays.
    pub(crate) fn close(self) {
        assert_eq!(hlthunk_close(self.fd), 0);
    }

    /// Exports the first bytes.
    pub(crate) fn export(&self, length: u64) -> OwnedFd {
        let fd = hlthunk_device_memory_export_dmabuf_fd(self.fd, self.address, length, 0);
        assert!(fd >= 0, "export: {fd}");
        // SAFETY: a fresh descriptor.
        unsafe { OwnedFd::from_raw_fd(fd) }
    }

    /// The driver makes writes of other devices visible to the engines.
    pub(crate) fn flush(&self) {
        assert_eq!(hlthunk_cs_flush_pci_hbw_writes(self.fd), 0);
    }

    /// The driver resets the card.
    pub(crate) fn reset(&self) {
        let machine = Machine::of_this_process();
        machine.set_faults("gaudi2", "hlthunk_device_memory_alloc reset");
        assert_eq!(hlthunk_device_memory_alloc(self.fd, 1, 0, true, false), 0);
    }
}
