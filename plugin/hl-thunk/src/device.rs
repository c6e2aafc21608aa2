//! Open nodes: the control node, which any process may query, and the compute node, which one process
//! owns.

use std::ffi::{CStr, CString, c_char};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use crate::error::check;
use crate::packet::DmaRule;
use crate::symbols::Symbols;
use crate::sys::{self, HwIpInfo};
use crate::{Error, Generation, Library, ProcessInstance};

/// Buffer into which the library writes its hardware info. The library does not know our size, and the
/// structure of another version may be larger than the one we know.
#[repr(C)]
struct HwIpBuffer {
    info: HwIpInfo,
    beyond: [u8; HW_IP_BUFFER_SIZE - size_of::<HwIpInfo>()],
}

const HW_IP_BUFFER_SIZE: usize = 4096;
/// Fills the buffer beyond the structure that we know.
const CANARY: u8 = 0xc5;

/// An open descriptor. Our own is closed through the library.
#[derive(Debug)]
struct Node {
    library: Arc<Library>,
    fd: NodeFd,
    opened_by: ProcessInstance,
}

#[derive(Debug)]
enum NodeFd {
    /// `None` in `drop` only.
    Ours(Option<OwnedFd>),
    /// Borrowed: the owner closes it.
    Borrowed(RawFd),
}

impl Node {
    fn new(
        library: &Arc<Library>,
        call: &'static str,
        open: impl FnOnce() -> i32,
    ) -> Result<Self, Error> {
        let fd = check(call, open)?;
        // SAFETY: the library just opened it for us.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self::from_fd(library, fd))
    }

    fn from_fd(library: &Arc<Library>, fd: OwnedFd) -> Self {
        let opened_by = ProcessInstance::current();
        Self { library: Arc::clone(library), fd: NodeFd::Ours(Some(fd)), opened_by }
    }

    fn is_ours(&self) -> bool {
        self.opened_by == ProcessInstance::current()
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match &self.fd {
            NodeFd::Ours(fd) => fd.as_ref().expect("taken only in drop").as_fd(),
            // SAFETY: promised when this was made.
            NodeFd::Borrowed(fd) => unsafe { BorrowedFd::borrow_raw(*fd) },
        }
    }

    fn hw_info(&self) -> Result<HwIpInfo, Error> {
        // SAFETY: the structure is plain numbers; all zeroes is a value of it.
        let info: HwIpInfo = unsafe { std::mem::zeroed() };
        let mut buffer =
            HwIpBuffer { info, beyond: [CANARY; HW_IP_BUFFER_SIZE - size_of::<HwIpInfo>()] };
        let place: *mut HwIpBuffer = &mut buffer;
        // SAFETY: the fd is open, and the place is larger than any structure of this kind.
        check("hlthunk_get_hw_ip_info", || unsafe {
            self.library.symbols.hlthunk_get_hw_ip_info(self.fd().as_raw_fd(), place.cast())
        })?;
        if let Some(last) = buffer.beyond.iter().rposition(|&byte| byte != CANARY) {
            self.library.record_hw_info_len(size_of::<HwIpInfo>() + last + 1);
        }
        Ok(buffer.info)
    }

    fn bus_id(&self) -> Result<String, Error> {
        self.library.bus_id_of(self.fd())
    }

    fn free_memory(&self) -> Option<u64> {
        let (mut usage, fd) = (sys::DramUsageInfo::default(), self.fd().as_raw_fd());
        // SAFETY: the fd is open; the structure lives across the call.
        let ret = unsafe { self.library.symbols.hlthunk_get_dram_usage(fd, &raw mut usage) };
        (ret == Some(0)).then_some(usage.dram_free_mem)
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let NodeFd::Ours(fd) = &mut self.fd else { return };
        let Some(fd) = fd.take() else { return };
        if !self.is_ours() {
            // A fork handler may have closed it, and the number may be in use again.
            let _ = fd.into_raw_fd();
            return;
        }
        let symbols = &self.library.symbols;
        // SAFETY: ours, and given up here.
        let closed = check("hlthunk_close", || unsafe { symbols.hlthunk_close(fd.into_raw_fd()) });
        if let Err(error) = closed {
            self.library.record_drop_error(error);
        }
    }
}

impl Library {
    /// PCI address, `dddd:bb:dd.f`, of the card behind a descriptor of either node.
    pub fn bus_id_of(&self, fd: BorrowedFd<'_>) -> Result<String, Error> {
        let name = "hlthunk_get_pci_bus_id_from_fd";
        let mut text = [0 as c_char; 16];
        // SAFETY: the fd is open; the buffer's length is passed with it, and its last byte is
        // kept zero whatever the library writes.
        check(name, || unsafe {
            let (fd, len) = (fd.as_raw_fd(), text.len() as i32 - 1);
            self.symbols.hlthunk_get_pci_bus_id_from_fd(fd, text.as_mut_ptr(), len)
        })?;
        // SAFETY: at least the last byte is zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        Ok(text.to_string_lossy().trim().to_owned())
    }
}

/// A card's control node: any process may open it, for queries only.
#[derive(Debug)]
pub struct ControlDevice {
    node: Node,
}

impl ControlDevice {
    /// Opens the control node with this index.
    pub fn open(library: &Arc<Library>, index: u32) -> Result<Self, Error> {
        // SAFETY: a number and no string.
        let node = Node::new(library, "hlthunk_open_control", || unsafe {
            library.symbols.hlthunk_open_control(index as i32, std::ptr::null())
        })?;
        Ok(Self { node })
    }

    /// What the hardware is.
    pub fn hw_info(&self) -> Result<HwIpInfo, Error> {
        self.node.hw_info()
    }

    /// Bytes that [`ControlDevice::hw_info`] and [`Device::open`] reserve for the library's structure.
    pub const HW_INFO_BUFFER_SIZE: usize = HW_IP_BUFFER_SIZE;

    /// Lets the library write its structure into `buffer`, to look at every byte of it.
    ///
    /// # Panics
    /// If it is smaller than [`HW_INFO_BUFFER_SIZE`](Self::HW_INFO_BUFFER_SIZE).
    pub fn hw_info_into(&self, buffer: &mut [u64]) -> Result<(), Error> {
        assert!(size_of_val(buffer) >= HW_IP_BUFFER_SIZE, "the buffer is too small");
        // SAFETY: the fd is open; the place is aligned, and larger than any structure of this kind.
        check("hlthunk_get_hw_ip_info", || unsafe {
            let symbols = &self.node.library.symbols;
            symbols.hlthunk_get_hw_ip_info(self.node.fd().as_raw_fd(), buffer.as_mut_ptr().cast())
        })
        .map(drop)
    }

    /// PCI address, `dddd:bb:dd.f`.
    pub fn bus_id(&self) -> Result<String, Error> {
        self.node.bus_id()
    }

    /// As [`Device::free_memory`].
    pub fn free_memory(&self) -> Option<u64> {
        self.node.free_memory()
    }
}

impl AsFd for ControlDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.node.fd()
    }
}

/// A card's compute node, owned by this process. Cloning is cheap; the node is closed when the
/// last clone, and everything made from it, is gone.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    node: Node,
    generation: Generation,
    hw: HwIpInfo,
    /// There are no other descriptors of this opening.
    own_opening: bool,
}

impl Device {
    /// Opens the compute node of the card at this PCI address.
    ///
    /// `EBUSY`: another process (or another opening in this one) has it. `EAGAIN`: it is in reset
    /// or being released; worth another try. A card of unknown generation gives `ENODEV`.
    pub fn open(library: &Arc<Library>, bus_id: &str) -> Result<Self, Error> {
        let name = "hlthunk_open";
        let bus_id = CString::new(bus_id).map_err(|_| Error::new(name, libc::EINVAL))?;
        // SAFETY: the string is terminated and outlives the call.
        let node = Node::new(library, name, || unsafe {
            library.symbols.hlthunk_open(sys::DEVICE_DONT_CARE, bus_id.as_ptr())
        })?;
        let hw = node.hw_info()?;
        let generation =
            Generation::from_pci_id(hw.device_id).ok_or(Error::new(name, libc::ENODEV))?;
        Ok(Self { inner: Arc::new(Inner { node, generation, hw, own_opening: true }) })
    }

    /// Which lengths and addresses its DMA engines take.
    pub fn dma_rule(&self) -> DmaRule {
        DmaRule::of(self.generation(), self.library().version())
    }

    /// Whether the driver accepts work for the card: not during a reset, nor after one until the card
    /// is opened again. `true` if the library cannot be asked.
    pub fn is_operational(&self) -> bool {
        const OPERATIONAL: i32 = 0;
        // SAFETY: the fd is open.
        let status = unsafe { self.symbols().hlthunk_get_device_status_info(self.raw_fd()) };
        status.is_none_or(|status| status == OPERATIONAL)
    }

    /// Bytes of its memory that are free; `None` where the library cannot be asked.
    pub fn free_memory(&self) -> Option<u64> {
        self.inner.node.free_memory()
    }

    /// A card that other code of this process opened, through a descriptor of our own (`dup`):
    /// all descriptors of one opening share its context, and the card is free when the last is
    /// closed. `ENOTTY` if it is not a compute node.
    pub fn from_opened(library: &Arc<Library>, fd: OwnedFd) -> Result<Self, Error> {
        Self::of_node(Node::from_fd(library, fd))
    }

    /// As [`Device::from_opened`], through the owner's descriptor, which is never closed here: for a caller that
    /// must be able to give the card up by closing it.
    ///
    /// # Safety
    /// The descriptor stays open, and of the same card, as long as the answer, or anything made of it, is used.
    pub unsafe fn borrow(library: &Arc<Library>, fd: RawFd) -> Result<Self, Error> {
        let (library, opened_by) = (Arc::clone(library), ProcessInstance::current());
        Self::of_node(Node { library, fd: NodeFd::Borrowed(fd), opened_by })
    }

    fn of_node(node: Node) -> Result<Self, Error> {
        let name = "hlthunk_get_hw_ip_info";
        let hw = node.hw_info()?;
        // A control node answers this call as well. It is recognised by its name: calls that it does
        // not support would be logged by the kernel.
        if is_control_node(node.fd()) {
            return Err(Error::new(name, libc::ENOTTY));
        }
        let generation =
            Generation::from_pci_id(hw.device_id).ok_or(Error::new(name, libc::ENODEV))?;
        Ok(Self { inner: Arc::new(Inner { node, generation, hw, own_opening: false }) })
    }

    /// The library it was opened with.
    pub fn library(&self) -> &Arc<Library> {
        &self.inner.node.library
    }

    /// The functions to call on it.
    pub(crate) fn symbols(&self) -> &Symbols {
        &self.library().symbols
    }

    /// Its generation.
    pub fn generation(&self) -> Generation {
        self.inner.generation
    }

    /// What the hardware said when it was opened.
    pub fn hw_info(&self) -> &HwIpInfo {
        &self.inner.hw
    }

    /// PCI address, `dddd:bb:dd.f`.
    pub fn bus_id(&self) -> Result<String, Error> {
        self.inner.node.bus_id()
    }

    /// Whether the driver releases everything when this is closed: the card has no other descriptor of this opening.
    pub fn is_own_opening(&self) -> bool {
        self.inner.own_opening
    }

    /// Whether this process opened it, and not one that it was forked from.
    pub fn is_ours(&self) -> bool {
        self.inner.node.is_ours()
    }

    /// Releases something in a `drop`. Does nothing in a forked child: the driver would take the call for the parent's.
    pub(crate) fn give_back(&self, call: &'static str, give: impl FnOnce(&Symbols, i32) -> i32) {
        if self.is_ours()
            && let Err(error) = check(call, || give(self.symbols(), self.raw_fd()))
        {
            self.library().record_drop_error(error);
        }
    }

    /// The descriptor for calls; none (-1) in a forked child, so that no call reaches the parent's
    /// card.
    pub(crate) fn raw_fd(&self) -> i32 {
        if self.is_ours() { self.inner.node.fd().as_raw_fd() } else { -1 }
    }
}

/// Whether a descriptor is of a control node (`accel_controlD0`, `hl_controlD0`), as far as `/proc` says.
fn is_control_node(fd: BorrowedFd<'_>) -> bool {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let name = link.ok().and_then(|path| Some(path.file_name()?.to_str()?.to_owned()));
    name.is_some_and(|name| name.contains("_controlD"))
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.node.fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, memfd_create};

    /// Bytes of the structure of a library that is newer than this crate.
    const NEWER: usize = 1000;

    unsafe extern "C" fn newer_hw_ip_info(_fd: i32, info: *mut HwIpInfo) -> i32 {
        // SAFETY: such a library trusts its caller to have its own structure.
        unsafe {
            info.cast::<u8>().write_bytes(1, NEWER);
            (*info).device_id = sys::PCI_ID_GAUDI2;
        }
        0
    }

    #[test]
    fn a_library_with_a_larger_structure_overwrites_nothing_and_is_noticed() {
        let path = soft_gaudi::testing::library();
        let mut library = Library::load_first(&[path.to_str().unwrap()]).unwrap();
        let symbols = &mut Arc::get_mut(&mut library).unwrap().symbols;
        symbols.hlthunk_get_hw_ip_info = newer_hw_ip_info;
        assert_eq!(library.unknown_hw_info_len(), None);
        let node = Node::from_fd(&library, memfd_create("node", MemfdFlags::CLOEXEC).unwrap());
        assert_eq!(node.hw_info().unwrap().device_id, sys::PCI_ID_GAUDI2);
        assert_eq!(library.unknown_hw_info_len(), Some(NEWER));
    }
}
