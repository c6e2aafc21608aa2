//! dma-bufs: device memory as a file descriptor that a NIC, another device or another process can
//! use.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use crate::error::check;
use crate::memory::Mapped;
use crate::sys::{self, MemArgs};
use crate::{Device, DeviceAddr, DeviceMapping, Error, Library};

/// Which of the library's two export calls to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportCall {
    /// The call that takes an offset into a mapping; `ENOSYS` where the library has none.
    Mapped,
    /// The older call, which exports from the start of a mapping.
    Whole,
}

impl ExportCall {
    /// The call that takes an offset, if the library has it, else the older one.
    pub fn best(library: &Library) -> Self {
        match library.symbols.hlthunk_device_mapped_memory_export_dmabuf_fd {
            Some(_) => ExportCall::Mapped,
            None => ExportCall::Whole,
        }
    }
}

/// An exported piece of device memory. It keeps the mapping it was made from.
///
/// While any copy of the descriptor is open, here or elsewhere, the driver refuses to unmap the
/// memory, and the card stays busy.
#[derive(Debug)]
pub struct DmaBuf {
    // Closed before the source is released: fields drop in this order.
    fd: OwnedFd,
    len: u64,
    _source: Source,
}

#[derive(Debug)]
enum Source {
    Mapping(#[allow(dead_code, reason = "held, not read")] Arc<DeviceMapping>),
    Device(#[allow(dead_code, reason = "held, not read")] Device),
}

impl DmaBuf {
    /// Exports `len` bytes from `offset` of a mapping; both multiples of 4 KiB.
    pub fn export(
        mapping: &Arc<DeviceMapping>,
        offset: u64,
        len: u64,
        call: ExportCall,
    ) -> Result<Self, Error> {
        let fd = export_mapped(mapping.device(), mapping.addr(), offset, len, call)?;
        mapping.mark_exported();
        Ok(Self { fd, len, _source: Source::Mapping(Arc::clone(mapping)) })
    }

    /// As [`DmaBuf::export`], for a foreign mapping on this card, which starts at `mapping`. Its owner
    /// is responsible for it.
    pub fn export_foreign(
        device: &Device,
        mapping: DeviceAddr,
        offset: u64,
        len: u64,
        call: ExportCall,
    ) -> Result<Self, Error> {
        let fd = export_mapped(device, mapping, offset, len, call)?;
        Ok(Self { fd, len, _source: Source::Device(device.clone()) })
    }

    /// Exports physical device memory, on devices without an MMU for it.
    pub fn export_physical(device: &Device, addr: DeviceAddr, len: u64) -> Result<Self, Error> {
        if device.generation().has_dram_mmu() {
            return Err(Error::new(EXPORT_WHOLE, libc::EOPNOTSUPP));
        }
        let fd = export_whole(device, addr, len)?;
        Ok(Self { fd, len, _source: Source::Device(device.clone()) })
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty, reason = "never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The close-on-exec descriptor, without our reference to the memory: the driver refuses to unmap
    /// the memory while the descriptor is open.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

fn export_mapped(
    device: &Device,
    mapping: DeviceAddr,
    offset: u64,
    len: u64,
    call: ExportCall,
) -> Result<OwnedFd, Error> {
    if call == ExportCall::Whole {
        let is_start =
            if offset == 0 { Ok(()) } else { Err(Error::new(EXPORT_WHOLE, libc::EINVAL)) };
        return is_start.and_then(|()| export_whole(device, mapping, len));
    }
    // SAFETY: plain numbers on an open fd.
    let fd = check("hlthunk_device_mapped_memory_export_dmabuf_fd", || unsafe {
        let (symbols, fd, flags) = (device.symbols(), device.raw_fd(), sys::DMABUF_FLAGS);
        symbols
            .hlthunk_device_mapped_memory_export_dmabuf_fd(fd, mapping.0, len, offset, flags)
            .unwrap_or(-libc::ENOSYS)
    })?;
    // SAFETY: the library just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

const EXPORT_WHOLE: &str = "hlthunk_device_memory_export_dmabuf_fd";

fn export_whole(device: &Device, addr: DeviceAddr, len: u64) -> Result<OwnedFd, Error> {
    // SAFETY: plain numbers on an open fd. The library ignores the flags.
    let fd = check(EXPORT_WHOLE, || unsafe {
        let (fd, flags) = (device.raw_fd(), sys::DMABUF_FLAGS);
        device.symbols().hlthunk_device_memory_export_dmabuf_fd(fd, addr.0, len, flags)
    })?;
    // SAFETY: the library just opened it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Another device's or process's dma-buf, mapped for this device.
#[derive(Debug)]
pub struct ImportedMapping(Mapped);

impl ImportedMapping {
    const CALL: &'static str = "ioctl(HL_MEM_OP_REG_DMABUF_FD)";

    /// Maps the first `len` bytes of `dmabuf`. For the DMA engines they look like host memory.
    pub fn new(device: &Device, dmabuf: BorrowedFd<'_>, len: u64) -> Result<Self, Error> {
        let addr = import(device, dmabuf.as_raw_fd(), len)?;
        if addr == 0 {
            return Err(Error::new(Self::CALL, libc::EIO));
        }
        Ok(Self(Mapped { device: device.clone(), addr: DeviceAddr(addr) }))
    }

    /// Whether the driver can import at all: most cannot. Probes with an invalid descriptor, which only
    /// a driver that knows the operation checks. Other drivers write an error to the kernel log, so one
    /// answer is kept for the process: it depends on the driver, not on the card. An error means that
    /// it is not known yet: a card in reset does not answer.
    pub fn supported(device: &Device) -> Result<bool, Error> {
        let known = &device.library().imports;
        if let Some(&answer) = known.get() {
            return Ok(answer);
        }
        let Err(error) = import(device, -1, crate::PAGE_SIZE) else {
            return Err(Error::new(Self::CALL, libc::EIO));
        };
        match error.errno {
            libc::EBADF => Ok(*known.get_or_init(|| true)),
            libc::EINVAL | libc::ENOTTY | libc::EOPNOTSUPP => Ok(*known.get_or_init(|| false)),
            _ => Err(error),
        }
    }

    /// Where the device sees the first byte.
    pub fn addr(&self) -> DeviceAddr {
        self.0.addr
    }
}

fn import(device: &Device, dmabuf: i32, length: u64) -> Result<u64, Error> {
    let mut args = MemArgs {
        fd_or_device_va: i64::from(dmabuf) as u64,
        length,
        op: sys::MEM_OP_REG_DMABUF_FD,
        ..MemArgs::default()
    };
    // SAFETY: the structure is the one this request takes and lives on this stack frame.
    check(ImportedMapping::CALL, || unsafe {
        device.symbols().memory_ioctl(device.raw_fd(), &mut args)
    })?;
    Ok(args.fd_or_device_va)
}
