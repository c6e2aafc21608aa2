//! What memory domains do: allocate, register, say what an address is, pack keys.

use super::sys::{
    self, AllocatedMemory, MemAllocParams, MemAttachParams, MemAttr, MemDeregParams, MemRegParams,
    MkeyPackParams, Raw, RkeyBundle, RkeyUnpackParams,
};
use super::{Domain, Result};
use std::mem::zeroed;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr;

/// Gaudi memory, freed when dropped.
pub struct Memory<'d> {
    domain: &'d Domain,
    allocated: AllocatedMemory,
}

// SAFETY: a handle of a memory domain, which is usable from any thread.
unsafe impl Send for Memory<'_> {}

/// A registered range, deregistered when dropped.
pub struct Registration<'d> {
    domain: &'d Domain,
    memh: Raw,
}

// SAFETY: a handle of a memory domain, which is usable from any thread.
unsafe impl Send for Registration<'_> {}

/// An unpacked remote key, released when dropped.
pub struct Key<'d> {
    domain: &'d Domain,
    bundle: RkeyBundle,
}

/// What a memory domain says of a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// It is Gaudi memory.
    pub gaudi: bool,
    /// Number of the device in UCX's topology, 255 for unknown.
    pub sys_device: u8,
    /// First address of the allocation.
    pub base: u64,
    /// Its length.
    pub length: usize,
    /// It can be registered.
    pub registrable: bool,
}

/// A value no answer has, to see which fields were written.
const UNTOUCHED_FD: i32 = -77;

fn nothing() -> MemAttr {
    // SAFETY: plain data.
    let mut attr: MemAttr = unsafe { zeroed() };
    attr.mem_type = u32::MAX;
    attr.dmabuf_fd = UNTOUCHED_FD;
    attr
}

impl Domain {
    /// Allocates Gaudi memory through `uct_mem_alloc`; `quiet` failures are not logged as errors.
    pub fn allocate(&self, length: usize, quiet: bool) -> Result<Memory<'_>> {
        self.allocate_on(length, quiet, None)
    }

    /// The same, on the card with this system device if one is given.
    pub fn allocate_on(
        &self,
        length: usize,
        quiet: bool,
        sys_device: Option<u8>,
    ) -> Result<Memory<'_>> {
        let named = if sys_device.is_some() { MemAllocParams::SYS_DEVICE } else { 0 };
        let params = MemAllocParams {
            field_mask: named
                | MemAllocParams::FLAGS
                | MemAllocParams::MEM_TYPE
                | MemAllocParams::MDS
                | MemAllocParams::NAME,
            flags: (sys::ACCESS_ALL | if quiet { sys::FLAG_HIDE_ERRORS } else { 0 }) as u32,
            address: ptr::null_mut(),
            mem_type: sys::MEMORY_TYPE_GAUDI,
            mds: &self.md,
            md_count: 1,
            name: c"ucp-check".as_ptr(),
            sys_device: sys_device.unwrap_or(sys::SYS_DEVICE_UNKNOWN),
        };
        // SAFETY: plain data.
        let mut allocated: AllocatedMemory = unsafe { zeroed() };
        let method = sys::ALLOC_METHOD_MD;
        // SAFETY: the parameters live through the call.
        let status =
            unsafe { (self.uct.f.uct_mem_alloc)(length, &method, 1, &params, &mut allocated) };
        self.uct.check("uct_mem_alloc", status)?;
        Ok(Memory { domain: self, allocated })
    }

    /// Says what a range is.
    pub fn query(&self, address: u64, length: usize) -> Result<Answer> {
        let mut attr = nothing();
        attr.field_mask = MemAttr::RANGE | MemAttr::MEM_FLAGS;
        // SAFETY: the address is taken as a number; the mask says what to fill.
        let status =
            unsafe { (self.uct.f.uct_md_mem_query_v2)(self.md, address, length, &mut attr) };
        self.uct.check("uct_md_mem_query_v2", status)?;
        Ok(Answer {
            gaudi: attr.mem_type == sys::MEMORY_TYPE_GAUDI,
            sys_device: attr.sys_dev,
            base: attr.base_address,
            length: attr.alloc_length,
            registrable: attr.mem_flags & 1 != 0,
        })
    }

    /// The same question through the two older calls; each says whether it is Gaudi memory.
    pub fn query_older(&self, address: u64, length: usize) -> [bool; 2] {
        let mut attr = nothing();
        attr.field_mask = MemAttr::RANGE;
        let mut kind = u32::MAX;
        // SAFETY: as above; the older structure is the beginning of the newer one.
        let (first, second) = unsafe {
            (
                (self.uct.f.uct_md_mem_query)(self.md, address, length, &mut attr),
                (self.uct.f.uct_md_detect_memory_type)(self.md, address, length, &mut kind),
            )
        };
        [
            first == sys::OK && attr.mem_type == sys::MEMORY_TYPE_GAUDI,
            second == sys::OK && kind == sys::MEMORY_TYPE_GAUDI,
        ]
    }

    /// Asks for the dma-buf of a range: the descriptor, which is now ours, and the offset of the
    /// range in it. `Ok(None)`: the domain answered, and offers none.
    pub fn export(&self, address: u64, length: usize) -> Result<Option<(OwnedFd, u64)>> {
        let mut attr = nothing();
        attr.field_mask = MemAttr::DMABUF_FD | MemAttr::DMABUF_OFFSET;
        // SAFETY: as for `query`.
        let status =
            unsafe { (self.uct.f.uct_md_mem_query_v2)(self.md, address, length, &mut attr) };
        self.uct.check("uct_md_mem_query_v2", status)?;
        if attr.dmabuf_fd < 0 {
            return Ok(None);
        }
        // SAFETY: UCX's contract: the caller closes the descriptor it was given.
        let fd = unsafe { OwnedFd::from_raw_fd(attr.dmabuf_fd) };
        Ok(Some((fd, attr.dmabuf_offset as u64)))
    }

    /// Asks for the offset in the dma-buf alone. No descriptor is handed over.
    pub fn export_offset(&self, address: u64, length: usize) -> Result<u64> {
        let mut attr = nothing();
        attr.field_mask = MemAttr::DMABUF_OFFSET;
        // SAFETY: as for `query`.
        let status =
            unsafe { (self.uct.f.uct_md_mem_query_v2)(self.md, address, length, &mut attr) };
        self.uct.check("uct_md_mem_query_v2", status)?;
        assert_eq!(attr.dmabuf_fd, UNTOUCHED_FD, "a field that was not asked for was written");
        Ok(attr.dmabuf_offset as u64)
    }

    /// Registers a range; `gaudi` tells the domain what it is, `None` leaves it to find out.
    /// Failures are expected here, so they are not logged as errors.
    pub fn register(
        &self,
        address: u64,
        length: usize,
        gaudi: Option<bool>,
    ) -> Result<Registration<'_>> {
        let hint = if gaudi.is_some() { MemRegParams::MEM_TYPE } else { 0 };
        let params = MemRegParams {
            field_mask: MemRegParams::FLAGS | hint,
            flags: sys::ACCESS_ALL | sys::FLAG_HIDE_ERRORS,
            dmabuf_fd: -1,
            dmabuf_offset: 0,
            mem_type: match gaudi {
                Some(true) => sys::MEMORY_TYPE_GAUDI,
                _ => sys::MEMORY_TYPE_HOST,
            },
        };
        let mut memh = ptr::null_mut();
        // SAFETY: the address is taken as a number until the memory is used in a copy.
        let status =
            unsafe { (self.uct.f.uct_md_mem_reg_v2)(self.md, address, length, &params, &mut memh) };
        self.uct.check("uct_md_mem_reg_v2", status)?;
        Ok(Registration { domain: self, memh })
    }

    /// Packs the remote key of a handle into `buffer`, as many bytes as the attributes say.
    ///
    /// # Safety
    /// `buffer` must be as long as the domain's keys; `memh` is null or a live handle of the domain.
    unsafe fn pack(&self, memh: Raw, address: u64, length: usize, buffer: &mut [u8]) -> Result<()> {
        let params = MkeyPackParams::default();
        // SAFETY: as the caller promises.
        let status = unsafe {
            let buffer = buffer.as_mut_ptr().cast();
            (self.uct.f.uct_md_mkey_pack_v2)(self.md, memh, address, length, &params, buffer)
        };
        self.uct.check("uct_md_mkey_pack_v2", status)
    }

    /// Packs a key of no memory at all, which has to be refused.
    pub fn pack_nothing(&self, key_size: usize) -> Result<()> {
        // SAFETY: a null handle, and room for a key.
        unsafe { self.pack(ptr::null_mut(), 0, 0, &mut vec![0; key_size.max(1)]) }
    }

    /// Attaches the memory of a peer by its packed key. Failures are expected, so they are not logged
    /// as errors.
    pub fn attach(&self, key: &[u8]) -> Result<Registration<'_>> {
        let params = MemAttachParams {
            field_mask: MemAttachParams::FLAGS,
            flags: MemAttachParams::HIDE_ERRORS,
            mkey_size: 0,
        };
        let mut memh = ptr::null_mut();
        // SAFETY: the key is as long as the component's keys are.
        let status = unsafe {
            (self.uct.f.uct_md_mem_attach)(self.md, key.as_ptr().cast(), &params, &mut memh)
        };
        self.uct.check("uct_md_mem_attach", status)?;
        Ok(Registration { domain: self, memh })
    }

    /// Unpacks a key that came from this component.
    pub fn unpack(&self, key: &[u8], sys_device: Option<u8>) -> Result<Key<'_>> {
        let mut params = RkeyUnpackParams::default();
        if let Some(device) = sys_device {
            params.field_mask = RkeyUnpackParams::SYS_DEVICE;
            params.sys_device = device;
        }
        // SAFETY: plain data.
        let mut bundle: RkeyBundle = unsafe { zeroed() };
        // SAFETY: the key is as long as the component's keys are.
        let status = unsafe {
            let key = key.as_ptr().cast();
            (self.uct.f.uct_rkey_unpack_v2)(self.component, key, &params, &mut bundle)
        };
        self.uct.check("uct_rkey_unpack_v2", status)?;
        Ok(Key { domain: self, bundle })
    }
}

impl Memory<'_> {
    /// First address.
    pub fn address(&self) -> u64 {
        self.allocated.address
    }

    /// Bytes, as UCX was told.
    #[allow(clippy::len_without_is_empty, reason = "there is no empty memory")]
    pub fn len(&self) -> usize {
        self.allocated.length
    }

    pub(crate) fn handle(&self) -> Raw {
        self.allocated.memh
    }

    /// Packs its remote key.
    pub fn pack(&self, buffer: &mut [u8]) -> Result<()> {
        let (address, length) = (self.address(), self.len());
        // SAFETY: a live handle; the caller sized the buffer by the attributes.
        unsafe { self.domain.pack(self.allocated.memh, address, length, buffer) }
    }
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: freed once.
        let status = unsafe { (self.domain.uct.f.uct_mem_free)(&self.allocated) };
        if let Err(error) = self.domain.uct.check("uct_mem_free", status) {
            panic!("{error}");
        }
    }
}

impl Registration<'_> {
    pub(crate) fn handle(&self) -> Raw {
        self.memh
    }

    /// Packs its remote key.
    pub fn pack(&self, address: u64, length: usize, buffer: &mut [u8]) -> Result<()> {
        // SAFETY: a live handle; the caller sized the buffer by the attributes.
        unsafe { self.domain.pack(self.memh, address, length, buffer) }
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let params = MemDeregParams {
            field_mask: MemDeregParams::MEMH,
            flags: 0,
            memh: self.memh,
            comp: ptr::null_mut(),
        };
        // SAFETY: deregistered once.
        let status = unsafe { (self.domain.uct.f.uct_md_mem_dereg_v2)(self.domain.md, &params) };
        if let Err(error) = self.domain.uct.check("uct_md_mem_dereg_v2", status) {
            panic!("{error}");
        }
    }
}

impl Key<'_> {
    pub(super) fn raw(&self) -> usize {
        self.bundle.rkey
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        // SAFETY: released once.
        let status =
            unsafe { (self.domain.uct.f.uct_rkey_release)(self.domain.component, &self.bundle) };
        if let Err(error) = self.domain.uct.check("uct_rkey_release", status) {
            panic!("{error}");
        }
    }
}
