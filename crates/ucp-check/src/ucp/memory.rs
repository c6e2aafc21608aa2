//! Memory for UCP: host pages we map (and register, or not), device memory that UCP allocates.
//!
//! A device address is a number here, never a pointer: nobody can read or write a device region
//! through this type, only `ucp_put`/`ucp_get` can.

use super::context::{Context, ContextInner};
use super::sys::{self, MemAttr, MemMapParams};
use super::{Error, Result};
use std::ffi::{c_uint, c_void};
use std::fmt;
use std::ptr;
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Where memory lives.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, serde::Serialize, serde::Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Memory {
    /// Ordinary pages of this process.
    Host,
    /// HBM of a Gaudi, allocated through UCX.
    Gaudi,
}

impl Memory {
    pub(super) fn raw(self) -> c_uint {
        match self {
            Memory::Host => sys::MEMORY_TYPE_HOST,
            Memory::Gaudi => sys::MEMORY_TYPE_GAUDI,
        }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Memory::Host => "host",
            Memory::Gaudi => "gaudi",
        })
    }
}

impl FromStr for Memory {
    type Err = String;
    fn from_str(s: &str) -> std::result::Result<Self, String> {
        match s {
            "host" => Ok(Memory::Host),
            "gaudi" => Ok(Memory::Gaudi),
            _ => Err(format!("unknown memory '{s}': host or gaudi")),
        }
    }
}

/// A piece of memory mapped in a context; unmapped (and freed) when the last reference goes.
pub struct Region {
    context: Arc<ContextInner>,
    /// NULL: UCX was not told of these pages, or knows them no more.
    memh: AtomicPtr<c_void>,
    address: usize,
    length: usize,
    memory: Memory,
}

// SAFETY: `memh` is only used together with the context, which checks the thread; host pages are
// accessed by copies only, and overlapping accesses concern test data, never Rust references.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

/// What a peer needs to reach a region: its address there and the packed key.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct PackedRegion {
    /// Address in the owner's process (or on its device).
    pub address: u64,
    /// Length in bytes.
    pub length: usize,
    /// What `ucp_rkey_pack` gave.
    pub rkey: Vec<u8>,
}

impl Region {
    /// `length` bytes of `memory`: fresh zero pages for the host, `ucp_mem_map(ALLOCATE)` otherwise.
    pub fn new(context: &Context, memory: Memory, length: usize) -> Result<Arc<Region>> {
        let length = length.max(1);
        match memory {
            Memory::Host => Region::host(context, length),
            Memory::Gaudi => Region::allocate(context, memory, length),
        }
    }

    /// `length` bytes of zero pages that UCX is not told about, as an application that registers
    /// nothing has them; at the address `at` if it is given and free.
    ///
    /// # Errors
    /// When there is no such memory.
    pub fn pages(
        context: &Context,
        length: usize,
        at: Option<u64>,
    ) -> std::io::Result<Arc<Region>> {
        let length = length.max(1);
        let address = map_pages(length, at)? as usize;
        let (context, memory) = (context.0.clone(), Memory::Host);
        Ok(Arc::new(Region { context, memh: AtomicPtr::default(), address, length, memory }))
    }

    /// Device memory that somebody else mapped at this address, and of which UCX was told nothing by
    /// us. It must stay mapped as long as operations use it.
    pub fn elsewhere(context: &Context, address: u64, length: usize) -> Arc<Region> {
        let (context, memory) = (context.0.clone(), Memory::Gaudi);
        let address = address as usize;
        Arc::new(Region { context, memh: AtomicPtr::default(), address, length, memory })
    }

    fn host(context: &Context, length: usize) -> Result<Arc<Region>> {
        let pages = map_pages(length, None)
            .unwrap_or_else(|e| panic!("no {length} bytes of host memory: {e}"));
        let params = MemMapParams {
            field_mask: MemMapParams::ADDRESS | MemMapParams::LENGTH,
            address: pages,
            length,
            flags: 0,
            prot: 0,
            memory_type: 0,
            exported_memh_buffer: ptr::null(),
        };
        let inner = &context.0;
        let mut memh = ptr::null_mut();
        // SAFETY: the range was mapped just now and stays mapped until the region is dropped.
        let status = unsafe { (inner.ucx.f.ucp_mem_map)(inner.raw(), &params, &mut memh) };
        if let Err(error) = inner.ucx.check("ucp_mem_map of host memory", status) {
            // SAFETY: nobody knows these pages.
            unsafe { unmap_pages(pages, length) };
            return Err(error);
        }
        let (memh, address, memory) = (AtomicPtr::new(memh), pages as usize, Memory::Host);
        Ok(Arc::new(Region { context: inner.clone(), memh, address, length, memory }))
    }

    fn allocate(context: &Context, memory: Memory, length: usize) -> Result<Arc<Region>> {
        let params = MemMapParams {
            field_mask: MemMapParams::ADDRESS
                | MemMapParams::LENGTH
                | MemMapParams::FLAGS
                | MemMapParams::MEMORY_TYPE,
            address: ptr::null_mut(),
            length,
            flags: sys::MEM_MAP_ALLOCATE,
            prot: 0,
            memory_type: memory.raw(),
            exported_memh_buffer: ptr::null(),
        };
        let inner = &context.0;
        let mut memh = ptr::null_mut();
        // SAFETY: UCX allocates the memory itself.
        let status = unsafe { (inner.ucx.f.ucp_mem_map)(inner.raw(), &params, &mut memh) };
        inner.ucx.check("ucp_mem_map(ALLOCATE)", status)?;
        let mut attr =
            MemAttr { field_mask: MemAttr::ALL, address: ptr::null_mut(), length: 0, mem_type: 0 };
        // SAFETY: `memh` was returned just now.
        let status = unsafe { (inner.ucx.f.ucp_mem_query)(memh, &mut attr) };
        let address = attr.address as usize;
        // From here the region owns `memh` and gives it back on every path.
        let memh = AtomicPtr::new(memh);
        let region = Region { context: inner.clone(), memh, address, length, memory };
        inner.ucx.check("ucp_mem_query", status)?;
        if attr.mem_type != memory.raw() || attr.length < length {
            return Err(Error {
                call: "ucp_mem_map(ALLOCATE)",
                status: super::Status(sys::ERR_LAST),
                text: format!(
                    "asked for {length} bytes of {memory} memory, got {} bytes of type {}",
                    attr.length, attr.mem_type
                ),
            });
        }
        Ok(Arc::new(region))
    }

    /// Where the memory lives.
    pub fn memory(&self) -> Memory {
        self.memory
    }

    /// The address UCX knows it by.
    pub fn address(&self) -> u64 {
        self.address as u64
    }

    /// Length in bytes, as asked for.
    pub fn length(&self) -> usize {
        self.length
    }

    /// Part of the region, as an operand.
    ///
    /// # Panics
    /// When the range is not inside the region.
    pub fn span(self: &Arc<Self>, offset: usize, length: usize) -> Span {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        Span { region: self.clone(), offset, length }
    }

    /// The whole region, as an operand.
    pub fn whole(self: &Arc<Self>) -> Span {
        self.span(0, self.length)
    }

    /// Copies bytes out of a host region.
    ///
    /// # Panics
    /// When the region is device memory, or the range is not inside it.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        let from = self.host_pointer(offset, to.len());
        // SAFETY: host pages owned by this region, long enough, not overlapping a Rust slice.
        unsafe { ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) }
    }

    /// Copies bytes into a host region.
    ///
    /// # Panics
    /// When the region is device memory, or the range is not inside it.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.host_pointer(offset, from.len());
        // SAFETY: as in `read`.
        unsafe { ptr::copy_nonoverlapping(from.as_ptr(), to, from.len()) }
    }

    fn host_pointer(&self, offset: usize, length: usize) -> *mut u8 {
        assert_eq!(self.memory, Memory::Host, "device memory is never dereferenced");
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        (self.address + offset) as *mut u8
    }

    /// Address and packed remote key, ready to be sent to a peer.
    ///
    /// # Panics
    /// When UCX was not told of the region.
    pub fn pack(&self) -> Result<PackedRegion> {
        let memh = self.memh.load(Ordering::Acquire);
        assert!(!memh.is_null(), "only registered memory has a key");
        let ucx = self.context.ucx;
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        // SAFETY: `memh` belongs to this context.
        let status =
            unsafe { (ucx.f.ucp_rkey_pack)(self.context.raw(), memh, &mut buffer, &mut size) };
        ucx.check("ucp_rkey_pack", status)?;
        // SAFETY: UCX returned `size` readable bytes, ours until released.
        let rkey = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), size) }.to_vec();
        // SAFETY: released once, no reference left.
        unsafe { (ucx.f.ucp_rkey_buffer_release)(buffer) };
        Ok(PackedRegion { address: self.address(), length: self.length, rkey })
    }
}

impl Region {
    /// `ucp_mem_unmap`, if it was not done yet. Host pages stay until the region is dropped.
    ///
    /// # Safety
    /// No operation that UCX still holds moves bytes of it any more.
    pub unsafe fn unmap(&self) {
        let memh = self.memh.swap(ptr::null_mut(), Ordering::AcqRel);
        if memh.is_null() {
            return;
        }
        // SAFETY: given back once; the rest is the caller's promise.
        let status = unsafe { (self.context.ucx.f.ucp_mem_unmap)(self.context.raw(), memh) };
        if let Err(error) = self.context.ucx.check("ucp_mem_unmap", status) {
            eprintln!("ucp-check: {} memory at {:#x}: {error}", self.memory, self.address);
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.context.threads.allowed() {
            return; // leaked rather than touched from a foreign thread
        }
        // SAFETY: requests hold their region, so no operation is under way.
        unsafe { self.unmap() };
        if self.memory == Memory::Host {
            // SAFETY: our own mapping, of which no operation is under way.
            unsafe { unmap_pages(self.address as *mut c_void, self.length) };
        }
    }
}

/// Fresh zero pages. By libc's `mmap` as applications call it, not by a bare system call: that is
/// where UCX listens.
fn map_pages(length: usize, at: Option<u64>) -> std::io::Result<*mut c_void> {
    let fixed = at.map_or(0, |_| libc::MAP_FIXED_NOREPLACE);
    // SAFETY: a new anonymous mapping that replaces nothing.
    let pages = unsafe {
        libc::mmap(
            at.unwrap_or(0) as *mut c_void,
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed,
            -1,
            0,
        )
    };
    if pages == libc::MAP_FAILED { Err(std::io::Error::last_os_error()) } else { Ok(pages) }
}

/// Gives pages back, by libc's `munmap` for the same reason.
///
/// # Safety
/// They came from [`map_pages`], with this length, and nobody uses them any more.
unsafe fn unmap_pages(pages: *mut c_void, length: usize) {
    // SAFETY: as the caller promises.
    if unsafe { libc::munmap(pages, length) } != 0 {
        eprintln!("ucp-check: munmap of {length} bytes: {}", std::io::Error::last_os_error());
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
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// No bytes at all: legal in UCP.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// A part of this span.
    ///
    /// # Panics
    /// When the range is not inside the span.
    pub fn part(&self, offset: usize, length: usize) -> Span {
        assert!(offset.checked_add(length).is_some_and(|end| end <= self.length));
        Span { region: self.region.clone(), offset: self.offset + offset, length }
    }

    pub(super) fn memory(&self) -> Memory {
        self.region.memory
    }

    /// Whether what keeps this one alive keeps the other alive, too.
    pub(super) fn shares_region(&self, other: &Span) -> bool {
        Arc::ptr_eq(&self.region, &other.region)
    }

    /// What UCX gets: for device memory a number in a pointer's clothes.
    pub(super) fn pointer(&self) -> *mut c_void {
        (self.region.address + self.offset) as *mut c_void
    }
}
