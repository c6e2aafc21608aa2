//! Memory for UCP: host pages that we map (and may register), Gaudi memory that UCP or a framework
//! ([`crate::framework`]) allocates, CUDA memory that its driver allocates.
//!
//! A device address is a number here, never a pointer: `ucp_put`/`ucp_get` access Gaudi memory, the driver accesses
//! CUDA memory.

use super::{Context, ContextInner, Error, Result};
use crate::cuda::{self, Cuda};
use crate::framework;
use crate::ucx::call;
use crate::ucx::sys::{ERR_LAST, MemMapParams, MemoryType, Plain, UcpMemAttr, ucp};
use anyhow::Context as _;
use serde::{Deserialize, Serialize};
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::{fmt, io, ptr};

/// Where memory lives.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, clap::ValueEnum,
)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Ordinary pages of this process.
    Host,
    /// HBM of a Gaudi, allocated through UCX.
    Gaudi,
    /// Memory of the first GPU, allocated through the CUDA driver.
    Cuda,
}

impl Memory {
    pub(super) fn raw(self) -> MemoryType {
        match self {
            Memory::Host => MemoryType::HOST,
            Memory::Gaudi => MemoryType::GAUDI,
            Memory::Cuda => MemoryType::CUDA,
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Memory mapped in a context; unmapped (and freed) when the last reference is dropped.
pub struct Region {
    context: Arc<ContextInner>,
    /// NULL: UCX was not told about this memory, or has forgotten it.
    memh: AtomicPtr<c_void>,
    address: usize,
    length: usize,
    memory: Memory,
    /// The allocation, if this is CUDA memory.
    cuda: Option<cuda::Allocation>,
    /// The memory belongs to the framework, and must be freed there.
    tensor: bool,
}

/// What a peer needs to access a region: its address and the packed key.
#[derive(Serialize, Deserialize)]
pub struct PackedRegion {
    pub address: u64,
    pub length: usize,
    pub rkey: Vec<u8>,
}

impl Region {
    /// `length` bytes of `memory`: fresh zero pages for the host, `cuMemAlloc` for CUDA,
    /// `ucp_mem_map(ALLOCATE)` or a framework's otherwise.
    pub fn new(context: &Context, memory: Memory, length: usize) -> Result<Arc<Region>> {
        let length = length.max(1);
        let mut region = match memory {
            Memory::Host => {
                let pages = Region::host(context, length, None);
                pages.unwrap_or_else(|e| panic!("no {length} bytes of host memory: {e}"))
            }
            Memory::Gaudi if framework::is_wanted() => Region::tensor(context, length)?,
            Memory::Gaudi => Region::of(context, memory, 0, length),
            Memory::Cuda => Region::cuda(context, length)?,
        };
        region.map()?;
        Ok(Arc::new(region))
    }

    /// `length` bytes of zero pages that UCX is not told about, as in an application that registers nothing; at the
    /// address `at` if it is given and free.
    pub fn pages(context: &Context, length: usize, at: Option<u64>) -> io::Result<Arc<Region>> {
        Region::host(context, length.max(1), at).map(Arc::new)
    }

    /// Device memory that was mapped elsewhere at this address, and that we do not report to UCX. It must stay mapped
    /// as long as operations use it.
    pub fn elsewhere(context: &Context, address: u64, length: usize) -> Arc<Region> {
        Arc::new(Region::of(context, Memory::Gaudi, address as usize, length))
    }

    fn of(context: &Context, memory: Memory, address: usize, length: usize) -> Region {
        let (context, memh) = (context.0.clone(), AtomicPtr::default());
        Region { context, memh, address, length, memory, cuda: None, tensor: false }
    }

    /// Memory of the framework; UCX only gets its address.
    fn tensor(context: &Context, length: usize) -> Result<Region> {
        let address = framework::allocate(length).map_err(|error| Error {
            call: "synDeviceMalloc",
            status: ERR_LAST,
            text: format!("{error:#}"),
        })?;
        let mut region = Region::of(context, Memory::Gaudi, address as usize, length);
        region.tensor = true;
        Ok(region)
    }

    fn cuda(context: &Context, length: usize) -> Result<Region> {
        let memory = Cuda::get().and_then(|cuda| cuda.allocate(length)).map_err(|error| Error {
            call: "the CUDA driver",
            status: ERR_LAST,
            text: format!("{error:#}"),
        })?;
        let mut region = Region::of(context, Memory::Cuda, memory.address() as usize, length);
        region.cuda = Some(memory);
        Ok(region)
    }

    /// Fresh zero pages, mapped by libc's `mmap` as in applications, not by a bare system call: UCX hooks that
    /// function.
    fn host(context: &Context, length: usize, at: Option<u64>) -> io::Result<Region> {
        let fixed = at.map_or(0, |_| libc::MAP_FIXED_NOREPLACE);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
        let (wish, access) = (at.unwrap_or(0) as *mut c_void, libc::PROT_READ | libc::PROT_WRITE);
        // SAFETY: a new anonymous mapping that replaces nothing.
        let pages = unsafe { libc::mmap(wish, length, access, flags, -1, 0) };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Region::of(context, Memory::Host, pages as usize, length))
    }

    /// `ucp_mem_map` of our pages, or of memory that UCX allocates.
    fn map(&mut self) -> Result<()> {
        let (ucx, context) = (self.context.ucx, self.context.handle.get());
        let mut params = MemMapParams {
            field_mask: ucp::MAP_ADDRESS_AND_LENGTH,
            address: self.address as *mut c_void,
            length: self.length,
            ..MemMapParams::zeroed()
        };
        if self.memory == Memory::Gaudi && !self.tensor {
            params.field_mask |= ucp::MAP_FLAGS_AND_TYPE;
            params.flags = ucp::MAP_ALLOCATE;
            params.memory_type = self.memory.raw();
        }
        // SAFETY: UCX allocates the memory itself, or the region keeps it until it is dropped.
        unsafe { call!(ucx, ucp_mem_map(context, &params, self.memh.get_mut())) }?;
        if self.memory == Memory::Host {
            return Ok(());
        }
        let mut attr = UcpMemAttr { field_mask: ucp::MEM_ATTR_ALL, ..UcpMemAttr::zeroed() };
        // SAFETY: the handle was returned just now.
        unsafe { call!(ucx, ucp_mem_query(*self.memh.get_mut(), &mut attr)) }?;
        if self.memory == Memory::Gaudi {
            self.address = attr.address as usize;
        }
        if attr.mem_type != self.memory.raw() || attr.length < self.length {
            let (wanted, got) = ((self.length, self.memory), (attr.length, attr.mem_type.0));
            let text = format!(
                "asked for {} bytes of {} memory, got {} bytes of type {}",
                wanted.0, wanted.1, got.0, got.1
            );
            return Err(Error { call: "ucp_mem_map", status: ERR_LAST, text });
        }
        Ok(())
    }

    /// Registers the whole region by its address, as applications do with existing memory, and deregisters it.
    pub fn register(&self) -> Result<()> {
        let (ucx, context) = (self.context.ucx, self.context.handle.get());
        let params = MemMapParams {
            field_mask: ucp::MAP_ADDRESS_AND_LENGTH,
            address: self.address as *mut c_void,
            length: self.length,
            ..MemMapParams::zeroed()
        };
        let mut memh = std::ptr::null_mut();
        // SAFETY: the region keeps its memory until it is dropped.
        unsafe { call!(ucx, ucp_mem_map(context, &params, &mut memh)) }?;
        // SAFETY: the handle was returned just now and is used for nothing else.
        unsafe { call!(ucx, ucp_mem_unmap(context, memh)) }?;
        Ok(())
    }

    pub fn memory(&self) -> Memory {
        self.memory
    }

    pub fn address(&self) -> u64 {
        self.address as u64
    }

    pub fn length(&self) -> usize {
        self.length
    }

    pub fn span(self: &Arc<Self>, offset: usize, length: usize) -> Span {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        Span { region: self.clone(), offset, length }
    }

    pub fn whole(self: &Arc<Self>) -> Span {
        self.span(0, self.length)
    }

    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = self.host_pointer(offset, to.len());
        // SAFETY: host pages owned by this region, long enough, not overlapping a Rust slice.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.host_pointer(offset, from.len());
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    /// Copies CUDA memory to host memory.
    pub fn download(&self, offset: usize, to: &Region, length: usize) -> anyhow::Result<()> {
        let pointer = to.host_pointer(0, length);
        // SAFETY: host pages owned by `to`, long enough, which nothing else touches meanwhile.
        let bytes = unsafe { std::slice::from_raw_parts_mut(pointer, length) };
        self.cuda.as_ref().context("no CUDA memory")?.read(offset, bytes)
    }

    /// Copies host memory to CUDA memory.
    pub fn upload(&self, offset: usize, from: &Region, length: usize) -> anyhow::Result<()> {
        let pointer = from.host_pointer(0, length);
        // SAFETY: as in `download`.
        let bytes = unsafe { std::slice::from_raw_parts(pointer, length) };
        self.cuda.as_ref().context("no CUDA memory")?.write(offset, bytes)
    }

    fn host_pointer(&self, offset: usize, length: usize) -> *mut u8 {
        assert_eq!(self.memory, Memory::Host, "device memory is never dereferenced");
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        (self.address + offset) as *mut u8
    }

    /// Address and packed remote key, ready to be sent to a peer.
    pub fn pack(&self) -> Result<PackedRegion> {
        let memh = self.memh.load(Ordering::Acquire);
        assert!(!memh.is_null(), "only registered memory has a key");
        let (ucx, context) = (self.context.ucx, self.context.handle.get());
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        // SAFETY: `memh` belongs to this context; what UCX returned is copied, then released once.
        let rkey = unsafe {
            call!(ucx, ucp_rkey_pack(context, memh, &mut buffer, &mut size))?;
            let rkey = std::slice::from_raw_parts(buffer.cast::<u8>(), size).to_vec();
            (ucx.f.ucp_rkey_buffer_release)(buffer);
            rkey
        };
        Ok(PackedRegion { address: self.address(), length: self.length, rkey })
    }

    /// `ucp_mem_unmap`, if it was not done yet. Host pages stay until the region is dropped.
    ///
    /// # Safety
    /// No pending operation of UCX may still access this memory.
    pub unsafe fn unmap(&self) {
        let memh = self.memh.swap(ptr::null_mut(), Ordering::AcqRel);
        if memh.is_null() {
            return;
        }
        // SAFETY: unmapped once; the rest is the caller's promise.
        let done =
            unsafe { call!(self.context.ucx, ucp_mem_unmap(self.context.handle.get(), memh)) };
        if let Err(error) = done {
            eprintln!("ucp-check: {} memory at {:#x}: {error}", self.memory, self.address);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.context.handle.usable() {
            return; // leaked rather than touched from a foreign thread
        }
        // SAFETY: requests keep their region alive, so no operation is in flight.
        unsafe { self.unmap() };
        if self.memory == Memory::Host {
            // By libc's `munmap`, so that UCX's hook sees it.
            // SAFETY: our own mapping, with no operation in flight.
            let done = unsafe { libc::munmap(self.address as *mut c_void, self.length) };
            assert_eq!(done, 0, "munmap: {}", io::Error::last_os_error());
        }
        if self.tensor {
            framework::free(self.address());
        }
    }
}

/// A range of a region that an operation reads or writes; keeps the region alive.
#[derive(Clone)]
pub struct Span {
    region: Arc<Region>,
    offset: usize,
    length: usize,
}

impl Span {
    pub fn len(&self) -> usize {
        self.length
    }

    /// No bytes at all: legal in UCP.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    pub fn part(&self, offset: usize, length: usize) -> Span {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        Span { region: self.region.clone(), offset: self.offset + offset, length }
    }

    pub(super) fn memory(&self) -> Memory {
        self.region.memory
    }

    /// Whether both keep the same region alive.
    pub(super) fn shares_region(&self, other: &Span) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
    }

    /// The argument for UCX: for device memory, the address as a pointer that is never dereferenced.
    pub(super) fn pointer(&self) -> *mut c_void {
        (self.region.address + self.offset) as *mut c_void
    }
}
