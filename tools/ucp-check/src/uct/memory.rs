//! What memory domains do: allocate, register, identify addresses, pack keys.

use super::Domain;
use crate::ucx::sys::{
    AllocatedMemory, MemAllocParams, MemAttachParams, MemAttr, MemDeregParams, MemRegParams,
    MemoryType, MkeyPackParams, Plain, Raw, RkeyBundle, RkeyUnpackParams, SysDevice,
};
use crate::ucx::{Result, Status, call};
use ::uct::abi::{MEM_FLAG_REGISTRABLE, REG_FLAG_HIDE_ERRORS, mem_attr_field as field};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

/// Read and write, local and remote.
pub(super) const ACCESS_ALL: u64 = 0b11_1110_0000;
const ALLOC_METHOD_MD: u32 = 1;
/// A value that no answer has, to detect which fields were written.
const UNTOUCHED_FD: i32 = -77;

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

/// What a memory domain reports about a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    pub kind: MemoryType,
    pub sys_device: SysDevice,
    pub base: u64,
    pub length: usize,
    pub registrable: bool,
}

impl Answer {
    /// The allocation, if it is Gaudi memory.
    pub fn gaudi(&self) -> Option<(u64, usize)> {
        (self.kind == MemoryType::GAUDI).then_some((self.base, self.length))
    }
}

impl Domain {
    /// Allocates Gaudi memory through `uct_mem_alloc`.
    pub fn allocate(&self, length: usize) -> Result<Memory<'_>> {
        self.allocate_on(length, false, None)
    }

    /// The same, on the card with this system device if one is given; with `quiet`, failures are not logged as errors.
    pub fn allocate_on(
        &self,
        length: usize,
        quiet: bool,
        sys_device: Option<SysDevice>,
    ) -> Result<Memory<'_>> {
        // Flags, type, domains and name; then the device.
        let named = u64::from(sys_device.is_some()) << 5;
        let params = MemAllocParams {
            field_mask: 0b1_1101 | named,
            flags: (ACCESS_ALL | if quiet { REG_FLAG_HIDE_ERRORS } else { 0 }) as u32,
            mem_type: MemoryType::GAUDI,
            mds: &self.md,
            md_count: 1,
            name: c"ucp-check".as_ptr(),
            sys_device: sys_device.unwrap_or(SysDevice::UNKNOWN),
            ..MemAllocParams::zeroed()
        };
        let mut memory = AllocatedMemory::zeroed();
        // SAFETY: the parameters live through the call.
        unsafe {
            call!(self.ucx, uct_mem_alloc(length, &ALLOC_METHOD_MD, 1, &params, &mut memory))
        }?;
        Ok(Memory { domain: self, allocated: memory })
    }

    /// Queries the fields of `mask`. UCX 1.21 has no flags: for it all memory is registrable.
    fn ask(&self, address: u64, length: usize, mask: u64) -> Result<MemAttr> {
        let (query, mask) = match self.ucx.mem_query_v2 {
            Some(query) => (query, mask),
            None => (self.ucx.f.uct_md_mem_query, mask & !field::MEM_FLAGS),
        };
        let mut attr = MemAttr { mem_flags: MEM_FLAG_REGISTRABLE, ..blank(mask) };
        // SAFETY: the address is taken as a number; the mask says what to fill.
        let status = unsafe { query(self.md, address, length, &mut attr) };
        self.ucx.check("uct_md_mem_query", status)?;
        Ok(attr)
    }

    pub fn query(&self, address: u64, length: usize) -> Result<Answer> {
        let attr = self.ask(address, length, RANGE | field::MEM_FLAGS)?;
        Ok(Answer {
            kind: attr.mem_type,
            sys_device: attr.sys_dev,
            base: attr.base_address.addr() as u64,
            length: attr.alloc_length,
            registrable: attr.mem_flags & MEM_FLAG_REGISTRABLE != 0,
        })
    }

    /// The same query through the two older calls; each says whether it is Gaudi memory.
    pub fn query_older(&self, address: u64, length: usize) -> [bool; 2] {
        let (mut attr, mut kind) = (blank(RANGE), MemoryType(u32::MAX));
        let f = &self.ucx.f;
        // SAFETY: as above; the older structure is the beginning of the newer one.
        let answers = unsafe {
            [
                (f.uct_md_mem_query)(self.md, address, length, &mut attr),
                (f.uct_md_detect_memory_type)(self.md, address, length, &mut kind),
            ]
        };
        let gaudi = [attr.mem_type, kind].map(|kind| kind == MemoryType::GAUDI);
        [0, 1].map(|n| answers[n] == Status::OK && gaudi[n])
    }

    /// Asks for the dma-buf of a range. Returns a descriptor, which is ours, and the offset of the range in it.
    /// `Ok(None)`: the domain answered that it has none.
    pub fn export(&self, address: u64, length: usize) -> Result<Option<(OwnedFd, u64)>> {
        let attr = self.ask(address, length, field::DMABUF_FD | field::DMABUF_OFFSET)?;
        // SAFETY: UCX's contract: the caller closes the descriptor it was given.
        let fd = (attr.dmabuf_fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(attr.dmabuf_fd) });
        Ok(fd.map(|fd| (fd, attr.dmabuf_offset as u64)))
    }

    /// Asks only for the offset in the dma-buf; no descriptor is passed.
    pub fn export_offset(&self, address: u64, length: usize) -> Result<u64> {
        let attr = self.ask(address, length, field::DMABUF_OFFSET)?;
        assert_eq!(attr.dmabuf_fd, UNTOUCHED_FD, "a field that was not asked for was written");
        Ok(attr.dmabuf_offset as u64)
    }

    /// Registers a range. `kind` tells the domain the memory type; with `None` it detects the type. Failures are
    /// expected here, so they are not logged as errors.
    pub fn register(
        &self,
        address: u64,
        length: usize,
        kind: Option<MemoryType>,
    ) -> Result<Registration<'_>> {
        let params = MemRegParams {
            field_mask: 1 | u64::from(kind.is_some()) << 3, // flags, and the type
            flags: ACCESS_ALL | REG_FLAG_HIDE_ERRORS,
            dmabuf_fd: -1,
            dmabuf_offset: 0,
            mem_type: kind.unwrap_or(MemoryType::HOST),
        };
        self.register_by((address, length), &params)
    }

    /// Registers a range by its dma-buf, in which it begins at `offset`.
    pub fn register_dmabuf(
        &self,
        range: (u64, usize),
        dmabuf: BorrowedFd<'_>,
        offset: u64,
    ) -> Result<Registration<'_>> {
        self.register_raw_dmabuf(range, dmabuf.as_raw_fd(), offset)
    }

    /// The same with any number in place of a descriptor.
    pub fn register_raw_dmabuf(
        &self,
        range: (u64, usize),
        dmabuf: RawFd,
        offset: u64,
    ) -> Result<Registration<'_>> {
        let params = MemRegParams {
            field_mask: 0b111, // flags, descriptor and offset
            flags: ACCESS_ALL | REG_FLAG_HIDE_ERRORS,
            dmabuf_fd: dmabuf,
            dmabuf_offset: offset as usize,
            mem_type: MemoryType::HOST,
        };
        self.register_by(range, &params)
    }

    fn register_by(
        &self,
        (address, length): (u64, usize),
        params: &MemRegParams,
    ) -> Result<Registration<'_>> {
        let mut memh = ptr::null_mut();
        // SAFETY: the address is only a number until a copy uses the memory.
        unsafe { call!(self.ucx, uct_md_mem_reg_v2(self.md, address, length, params, &mut memh)) }?;
        Ok(Registration { domain: self, memh })
    }

    pub fn register_slice(&self, bytes: &[u8]) -> Result<Registration<'_>> {
        self.register(bytes.as_ptr().addr() as u64, bytes.len(), None)
    }

    /// Packs the remote key of a handle into `buffer`.
    ///
    /// # Safety
    /// `buffer` must be as long as the domain's keys; `memh` is null or a live handle of the domain.
    unsafe fn pack(&self, memh: Raw, address: u64, length: usize, buffer: &mut [u8]) -> Result<()> {
        let (params, buffer) = (MkeyPackParams::zeroed(), buffer.as_mut_ptr().cast());
        // SAFETY: as the caller promises.
        unsafe {
            call!(self.ucx, uct_md_mkey_pack_v2(self.md, memh, address, length, &params, buffer))
        }
    }

    /// Packs a key of no memory at all, which must be refused.
    pub fn pack_nothing(&self, key_size: usize) -> Result<()> {
        // SAFETY: a null handle, and space for a key.
        unsafe { self.pack(ptr::null_mut(), 0, 0, &mut vec![0; key_size.max(1)]) }
    }

    /// Attaches the memory of a peer by its packed key. Failures are expected, so they are not logged as
    /// errors.
    pub fn attach(&self, key: &[u8]) -> Result<Registration<'_>> {
        const HIDE_ERRORS: u64 = 1;
        let params = MemAttachParams { field_mask: 1, flags: HIDE_ERRORS, mkey_size: 0 };
        let (key, mut memh) = (key.as_ptr().cast(), ptr::null_mut());
        // SAFETY: the key is as long as the component's keys are.
        unsafe { call!(self.ucx, uct_md_mem_attach(self.md, key, &params, &mut memh)) }?;
        Ok(Registration { domain: self, memh })
    }

    /// Unpacks a key that came from this component.
    pub fn unpack(&self, key: &[u8], sys_device: Option<SysDevice>) -> Result<Key<'_>> {
        let params = RkeyUnpackParams {
            field_mask: sys_device.is_some().into(),
            sys_device: sys_device.unwrap_or(SysDevice::UNKNOWN),
        };
        let (key, mut bundle) = (key.as_ptr().cast(), RkeyBundle::zeroed());
        // SAFETY: the key is as long as the component's keys are.
        unsafe { call!(self.ucx, uct_rkey_unpack_v2(self.component, key, &params, &mut bundle)) }?;
        Ok(Key { domain: self, bundle })
    }
}

const RANGE: u64 = field::MEM_TYPE | field::SYS_DEV | field::BASE_ADDRESS | field::ALLOC_LENGTH;

fn blank(field_mask: u64) -> MemAttr {
    let mem_type = MemoryType(u32::MAX);
    MemAttr { field_mask, mem_type, dmabuf_fd: UNTOUCHED_FD, ..MemAttr::zeroed() }
}

impl Memory<'_> {
    pub fn address(&self) -> u64 {
        self.allocated.address
    }

    /// Its length, as given to UCX.
    #[allow(clippy::len_without_is_empty, reason = "there is no empty memory")]
    pub fn len(&self) -> usize {
        self.allocated.length
    }

    pub fn range(&self) -> (u64, usize) {
        (self.address(), self.len())
    }

    pub(crate) fn handle(&self) -> Raw {
        self.allocated.memh
    }

    /// Packs its remote key; `buffer` is as long as the attributes say.
    pub fn pack(&self, buffer: &mut [u8]) -> Result<()> {
        // SAFETY: a live handle; the caller sized the buffer by the attributes.
        unsafe { self.domain.pack(self.allocated.memh, self.address(), self.len(), buffer) }
    }
}

impl Registration<'_> {
    pub(crate) fn handle(&self) -> Raw {
        self.memh
    }

    /// Packs its remote key; `buffer` is as long as the attributes say.
    pub fn pack(&self, address: u64, length: usize, buffer: &mut [u8]) -> Result<()> {
        // SAFETY: a live handle; the caller sized the buffer by the attributes.
        unsafe { self.domain.pack(self.memh, address, length, buffer) }
    }
}

impl Key<'_> {
    pub(super) fn raw(&self) -> usize {
        self.bundle.rkey
    }
}

/// Releasing something must never fail.
#[track_caller]
fn given_back(result: Result<()>) {
    result.unwrap_or_else(|error| panic!("{error}"));
}

impl Drop for Memory<'_> {
    fn drop(&mut self) {
        // SAFETY: freed once.
        given_back(unsafe { call!(self.domain.ucx, uct_mem_free(&self.allocated)) });
    }
}

impl Drop for Registration<'_> {
    fn drop(&mut self) {
        let memh = self.memh;
        let params = MemDeregParams { field_mask: 1, flags: 0, memh, comp: ptr::null_mut() };
        // SAFETY: deregistered once.
        given_back(unsafe { call!(self.domain.ucx, uct_md_mem_dereg_v2(self.domain.md, &params)) });
    }
}

impl Key<'_> {
    /// How UCX orders it relative to another key of the component.
    pub fn compare(&self, other: &Self) -> Result<std::cmp::Ordering> {
        let Domain { ucx, component, .. } = self.domain;
        let (ours, theirs, no_field, mut result) = (self.raw(), other.raw(), 0, 0);
        // SAFETY: two keys of this component that were not released; parameters without a field.
        unsafe { call!(ucx, uct_rkey_compare(*component, ours, theirs, &no_field, &mut result)) }?;
        Ok(result.cmp(&0))
    }
}

impl Drop for Key<'_> {
    fn drop(&mut self) {
        let Domain { ucx, component, .. } = self.domain;
        // SAFETY: released once.
        given_back(unsafe { call!(ucx, uct_rkey_release(*component, &self.bundle)) });
    }
}
