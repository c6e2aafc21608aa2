//! Memory domains: allocation, registration, detection, keys.

use core::ffi::{c_char, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};

use crate::abi::{
    LinearFunc, MD_OP_SLOTS, MdAttr, MdOps, MemAttachParams, MemAttr, MemDeregParams, MemRegParams,
    MemoryType, MemoryTypes, REG_FLAG_HIDE_ERRORS, RawComponent, RawMd, Status, SysDevice, md_flag,
    md_op, mem_attr_field as field,
};
use crate::completion::Completion;
use crate::component::{Component, ComponentObject};
use crate::panic_guard::{guarded, guarded_status};
use crate::ucx::{Symbols, Ucx};

/// A memory domain. Calls come from any thread, several at once.
pub trait MemoryDomain: Send + Sync + Sized + 'static {
    /// The object behind a memory handle; dropping it releases everything.
    type Memory: Send + Sync + 'static;

    /// What the domain can do. Asked often: constant and cheap.
    fn attributes(&self) -> DomainAttributes;

    /// Allocates device memory. UCX takes a failure as final.
    ///
    /// # Errors
    /// [`Status::NO_MEMORY`], [`Status::UNSUPPORTED`] and the like.
    fn allocate(&self, request: &AllocRequest) -> Result<Allocated<Self::Memory>, Status> {
        let _ = request;
        Err(Status::UNSUPPORTED)
    }

    /// Registers a range that UCX did not allocate here.
    ///
    /// # Errors
    /// [`Status::UNSUPPORTED`] and the like.
    fn register(&self, region: &Region<'_>) -> Result<Self::Memory, Status>;

    /// Says what an address range is. It must refuse foreign ranges quickly.
    ///
    /// Like UCX's own domains, it describes the allocation that `address` lies in, even if the range
    /// runs past its end; [`MemoryAnswer`] has the bounds. If it refused such a range, UCX would take
    /// it for host memory (`ucp_memory_detect_slowpath`) and access it with the CPU. A dma-buf covers
    /// the whole range or is not given. `uct_md_detect_memory_type` cannot return bounds, so it accepts
    /// only ranges inside one allocation.
    ///
    /// # Errors
    /// [`Status::OUT_OF_RANGE`] when `address` is not memory of this domain.
    fn query(
        &self,
        address: u64,
        length: usize,
        wants: QueryFields,
    ) -> Result<MemoryAnswer, Status> {
        let _ = (address, length, wants);
        Err(Status::OUT_OF_RANGE)
    }

    /// Deregisters memory and invalidates the keys of this registration, as far as the domain can tell
    /// registrations apart. UCX calls it only if the domain's flags include INVALIDATE.
    fn invalidate(&self, memory: Self::Memory) {
        drop(memory);
    }

    /// Maps the memory that a packed key of a peer describes, as if it were registered here. The key
    /// comes from another process: trust nothing in it.
    ///
    /// # Errors
    /// [`Status::UNREACHABLE`] and the like for a key that cannot be used here.
    fn attach(&self, key: &[u8], hide_errors: bool) -> Result<Self::Memory, Status> {
        let _ = (key, hide_errors);
        Err(Status::UNSUPPORTED)
    }

    /// Packs a remote key of exactly [`Component::KEY_SIZE`] bytes.
    ///
    /// # Errors
    /// What prevents the memory from being shared.
    fn pack_key(
        &self,
        memory: &Self::Memory,
        address: u64,
        length: usize,
        key: &mut [u8],
    ) -> Result<(), Status> {
        let _ = (memory, address, length);
        // A key without content needs no packing; one with content needs an implementation.
        if key.is_empty() { Ok(()) } else { Err(Status::UNSUPPORTED) }
    }
}

/// What a memory domain can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct DomainAttributes {
    /// Bits of [`md_flag`](crate::abi::md_flag).
    pub flags: u64,
    /// Types this domain registers.
    pub register: MemoryTypes,
    /// Types whose registrations UCP may keep.
    pub cache: MemoryTypes,
    /// Types this domain recognises by address.
    pub detect: MemoryTypes,
    /// Types this domain allocates.
    pub allocate: MemoryTypes,
    /// Types its transports read and write without a key.
    pub access: MemoryTypes,
    /// Types for which it hands out dma-bufs.
    pub dmabuf: MemoryTypes,
    /// Most bytes of one allocation.
    pub max_alloc: u64,
    /// Seconds to register: constant, and per byte.
    pub register_cost: LinearFunc,
}

/// A request for device memory.
#[derive(Clone, Copy, Debug)]
pub struct AllocRequest {
    /// Bytes wanted.
    pub length: usize,
    /// Type wanted.
    pub memory_type: MemoryType,
    /// Device wanted, or unknown.
    pub device: SysDevice,
    /// The caller expects a failure: do not log it.
    pub hide_errors: bool,
}

/// Memory as allocated.
#[derive(Debug)]
pub struct Allocated<M> {
    /// Device address.
    pub address: u64,
    /// Bytes, not fewer than asked for.
    pub length: usize,
    /// The handle.
    pub memory: M,
}

/// A range to register.
#[derive(Clone, Copy, Debug)]
pub struct Region<'a> {
    /// First byte; a host pointer or a device address.
    pub address: u64,
    /// Bytes, not 0.
    pub length: usize,
    /// What UCX believes it to be.
    pub memory_type: Option<MemoryType>,
    /// The dma-buf behind it, and the offset at which it begins there. The descriptor is the caller's.
    pub dmabuf: Option<(BorrowedFd<'a>, u64)>,
    /// The caller expects a failure: do not log it.
    pub hide_errors: bool,
}

/// Which answers the caller of [`MemoryDomain::query`] wants beyond type, device and range.
#[derive(Clone, Copy, Debug)]
pub struct QueryFields {
    /// A dma-buf for the range.
    pub dmabuf: bool,
    /// Whether network devices can register it.
    pub registrable: bool,
}

/// What a range is.
#[derive(Debug)]
pub struct MemoryAnswer {
    /// Type.
    pub memory_type: MemoryType,
    /// Device in UCX's topology.
    pub device: SysDevice,
    /// First byte of the allocation the range begins in.
    pub base: u64,
    /// Its length.
    pub length: usize,
    /// dma-buf and offset of the *queried address* in it, if wanted and possible. UCX closes it.
    pub dmabuf: Option<(OwnedFd, u64)>,
    /// Whether network devices can register it, if wanted.
    pub registrable: bool,
}

impl MemoryAnswer {
    /// Whether all of `[address, address + length)` lies in the allocation.
    pub fn contains(&self, address: u64, length: usize) -> bool {
        let offset = address.checked_sub(self.base);
        offset.is_some_and(|offset| {
            let size = self.length as u64;
            offset <= size && length as u64 <= size - offset
        })
    }
}

/// What UCX sees as a `uct_md_t`, followed by our fields.
#[repr(C)]
pub(crate) struct MdObject<C: Component> {
    raw: RawMd,
    pub(crate) component: &'static ComponentObject<C>,
    pub(crate) domain: C::Md,
}

impl<C: Component> MdObject<C> {
    pub(crate) fn new(
        component: &'static ComponentObject<C>,
        raw_component: *mut RawComponent,
        domain: C::Md,
    ) -> Box<Self> {
        let raw = RawMd { ops: &component.md_ops, component: raw_component };
        Box::new(MdObject { raw, component, domain })
    }

    pub(crate) fn into_raw(self: Box<Self>) -> *mut RawMd {
        Box::into_raw(self).cast()
    }

    /// # Safety
    /// `md` came from [`into_raw`](Self::into_raw) and was not closed yet.
    pub(crate) unsafe fn from_raw<'a>(md: *mut RawMd) -> &'a Self {
        // SAFETY: as the caller promises; the raw structure is the first field.
        unsafe { &*md.cast() }
    }

    fn ucx(&self) -> &'static Ucx {
        self.component.ucx
    }
}

type MemoryOf<C> = <<C as Component>::Md as MemoryDomain>::Memory;

/// The operation table. Every slot is populated, also those that no supported version has.
///
/// Its functions take the domain by reference: UCX passes a pointer to a domain that the component has
/// opened, whose raw structure is the first field of a `MdObject<C>`, and closes it after its last call.
pub(crate) fn operations<C: Component>(symbols: &Symbols) -> MdOps {
    let mut slots = [symbols.ucs_empty_function_return_unsupported; MD_OP_SLOTS];
    slots[md_op::CLOSE] = close::<C> as *const c_void;
    slots[md_op::QUERY] = query::<C> as *const c_void;
    slots[md_op::MEM_ALLOC] = mem_alloc::<C> as *const c_void;
    slots[md_op::MEM_FREE] = mem_free::<C> as *const c_void;
    slots[md_op::MEM_REG] = mem_reg::<C> as *const c_void;
    slots[md_op::MEM_DEREG] = mem_dereg::<C> as *const c_void;
    slots[md_op::MEM_QUERY] = mem_query::<C> as *const c_void;
    slots[md_op::MKEY_PACK] = mkey_pack::<C> as *const c_void;
    slots[md_op::MEM_ATTACH] = mem_attach::<C> as *const c_void;
    slots[md_op::DETECT_MEMORY_TYPE] = detect_memory_type::<C> as *const c_void;
    slots[md_op::MEM_ELEM_RELEASE] = symbols.ucs_empty_function;
    MdOps(slots)
}

unsafe extern "C" fn close<C: Component>(md: *mut RawMd) {
    // SAFETY: UCX closes each domain once.
    let object = unsafe { Box::from_raw(md.cast::<MdObject<C>>()) };
    let ucx = object.ucx();
    guarded(ucx, "md close", (), || drop(object));
}

unsafe extern "C" fn query<C: Component>(md: &MdObject<C>, attr: *mut MdAttr) -> Status {
    guarded_status(md.ucx(), "md query", || {
        let attributes = md.domain.attributes();
        // SAFETY: UCX's structure, first given UCX's own defaults for all of its fields; all
        // fields written here exist in every supported version.
        unsafe {
            (md.ucx().symbols.uct_md_base_md_query)(attr.cast());
            (*attr).flags = attributes.flags;
            (*attr).reg_mem_types = attributes.register.0;
            (*attr).cache_mem_types = attributes.cache.0;
            (*attr).detect_mem_types = attributes.detect.0;
            (*attr).alloc_mem_types = attributes.allocate.0;
            (*attr).access_mem_types = attributes.access.0;
            (*attr).dmabuf_mem_types = attributes.dmabuf.0;
            (*attr).max_alloc = attributes.max_alloc;
            (*attr).reg_cost = attributes.register_cost;
            (*attr).rkey_packed_size = C::KEY_SIZE;
        }
        Ok(Status::OK)
    })
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn mem_alloc<C: Component>(
    md: &MdObject<C>,
    length_p: *mut usize,
    address_p: *mut *mut c_void,
    memory_type: MemoryType,
    device: SysDevice,
    flags: u32,
    _name: *const c_char,
    memh_p: *mut *mut c_void,
) -> Status {
    guarded_status(md.ucx(), "mem_alloc", || {
        // SAFETY: in- and out-parameter of the caller.
        let length = unsafe { *length_p };
        let hide_errors = u64::from(flags) & REG_FLAG_HIDE_ERRORS != 0;
        let request = AllocRequest { length, memory_type, device, hide_errors };
        let allocated = md.domain.allocate(&request)?;
        // SAFETY: out-parameters of the caller.
        unsafe {
            *length_p = allocated.length;
            *address_p = core::ptr::without_provenance_mut(allocated.address as usize);
            *memh_p = Box::into_raw(Box::new(allocated.memory)).cast();
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mem_free<C: Component>(md: &MdObject<C>, memh: *mut c_void) -> Status {
    guarded_status(md.ucx(), "mem_free", || {
        // SAFETY: made by `mem_alloc`, freed once.
        drop(unsafe { Box::from_raw(memh.cast::<MemoryOf<C>>()) });
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mem_reg<C: Component>(
    md: &MdObject<C>,
    address: *mut c_void,
    length: usize,
    params: *const MemRegParams,
    memh_p: *mut *mut c_void,
) -> Status {
    const FLAGS: u64 = 1 << 0;
    const DMABUF_FD: u64 = 1 << 1;
    const DMABUF_OFFSET: u64 = 1 << 2;
    const MEM_TYPE: u64 = 1 << 3;
    guarded_status(md.ucx(), "mem_reg", || {
        // SAFETY: the mask tells which fields the caller's structure carries.
        let (flags, fd, offset, memory_type) = unsafe {
            let mask = (*params).field_mask;
            (
                if mask & FLAGS != 0 { (*params).flags } else { 0 },
                if mask & DMABUF_FD != 0 { (*params).dmabuf_fd } else { -1 },
                if mask & DMABUF_OFFSET != 0 { (*params).dmabuf_offset as u64 } else { 0 },
                (mask & MEM_TYPE != 0).then(|| (*params).mem_type),
            )
        };
        // SAFETY: the caller keeps it open during the call; one that is not open fails in its first use.
        let dmabuf = (fd >= 0).then(|| (unsafe { BorrowedFd::borrow_raw(fd) }, offset));
        let memory = md.domain.register(&Region {
            address: address.addr() as u64,
            length,
            memory_type,
            dmabuf,
            hide_errors: flags & REG_FLAG_HIDE_ERRORS != 0,
        })?;
        // SAFETY: out-parameter of the caller.
        unsafe { *memh_p = Box::into_raw(Box::new(memory)).cast() };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mem_dereg<C: Component>(
    md: &MdObject<C>,
    params: *const MemDeregParams,
) -> Status {
    const MEMH: u64 = 1 << 0;
    const FLAGS: u64 = 1 << 1;
    const COMPLETION: u64 = 1 << 2;
    const INVALIDATE: u32 = 1 << 0;
    guarded_status(md.ucx(), "mem_dereg", || {
        let null = core::ptr::null_mut();
        // SAFETY: the mask tells which fields the caller's structure carries.
        let (memh, flags, completion) = unsafe {
            let mask = (*params).field_mask;
            (
                if mask & MEMH != 0 { (*params).memh } else { null },
                if mask & FLAGS != 0 { (*params).flags } else { 0 },
                if mask & COMPLETION != 0 { (*params).comp } else { core::ptr::null_mut() },
            )
        };
        let invalidate = flags & INVALIDATE != 0;
        if invalidate && md.domain.attributes().flags & md_flag::INVALIDATE == 0 {
            return Err(Status::UNSUPPORTED);
        }
        if memh.is_null() || invalidate && completion.is_null() {
            return Err(Status::INVALID_PARAM);
        }
        // SAFETY: made by `mem_reg` or `mem_attach`, deregistered once.
        let memory = *unsafe { Box::from_raw(memh.cast::<MemoryOf<C>>()) };
        if invalidate {
            md.domain.invalidate(memory);
            // SAFETY: UCX's completion, which counts this one operation.
            unsafe { Completion::from_raw(completion) }.finish(Ok(()));
        } else {
            drop(memory);
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mem_query<C: Component>(
    md: &MdObject<C>,
    address: *const c_void,
    length: usize,
    attr: *mut MemAttr,
) -> Status {
    guarded_status(md.ucx(), "mem_query", || {
        // SAFETY: the mask is the one field of the caller's structure that is initialised.
        let mask = unsafe { (*attr).field_mask };
        let wants = QueryFields {
            dmabuf: mask & (field::DMABUF_FD | field::DMABUF_OFFSET) != 0,
            registrable: mask & field::MEM_FLAGS != 0,
        };
        let answer = md.domain.query(address.addr() as u64, length, wants)?;
        let (fd, offset) = match answer.dmabuf {
            Some((fd, offset)) if mask & field::DMABUF_FD != 0 => (fd.into_raw_fd(), offset),
            // Only the offset was asked for: the descriptor is closed here.
            Some((_, offset)) => (-1, offset),
            None => (-1, 0),
        };
        // SAFETY: only fields the mask asks for are written; MEM_FLAGS exists since 1.22, and
        // older callers never ask for it.
        unsafe {
            if mask & field::MEM_TYPE != 0 {
                (*attr).mem_type = answer.memory_type;
            }
            if mask & field::SYS_DEV != 0 {
                (*attr).sys_dev = answer.device;
            }
            if mask & field::BASE_ADDRESS != 0 {
                (*attr).base_address = core::ptr::without_provenance_mut(answer.base as usize);
            }
            if mask & field::ALLOC_LENGTH != 0 {
                (*attr).alloc_length = answer.length;
            }
            if mask & field::DMABUF_FD != 0 {
                (*attr).dmabuf_fd = fd;
            }
            if mask & field::DMABUF_OFFSET != 0 {
                (*attr).dmabuf_offset = offset as usize;
            }
            if mask & field::MEM_FLAGS != 0 {
                (*attr).mem_flags = crate::abi::mem_flags(answer.registrable);
            }
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn detect_memory_type<C: Component>(
    md: &MdObject<C>,
    address: *const c_void,
    length: usize,
    memory_type_p: *mut MemoryType,
) -> Status {
    guarded_status(md.ucx(), "detect_memory_type", || {
        let wants = QueryFields { dmabuf: false, registrable: false };
        let address = address.addr() as u64;
        let answer = md.domain.query(address, length, wants).map_err(|_| Status::INVALID_ADDR)?;
        if !answer.contains(address, length) {
            return Err(Status::INVALID_ADDR);
        }
        // SAFETY: out-parameter of the caller.
        unsafe { *memory_type_p = answer.memory_type };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mem_attach<C: Component>(
    md: &MdObject<C>,
    key: *const c_void,
    params: *const MemAttachParams,
    memh_p: *mut *mut c_void,
) -> Status {
    const FLAGS: u64 = 1 << 0;
    const MKEY_SIZE: u64 = 1 << 1;
    const HIDE_ERRORS: u64 = 1 << 0;
    guarded_status(md.ucx(), "mem_attach", || {
        if C::KEY_SIZE == 0 {
            return Err(Status::UNSUPPORTED);
        }
        // SAFETY: the mask tells which fields the caller's structure carries.
        let (hide_errors, length) = unsafe {
            let mask = (*params).field_mask;
            (
                mask & FLAGS != 0 && (*params).flags & HIDE_ERRORS != 0,
                if mask & MKEY_SIZE != 0 { (*params).mkey_size } else { C::KEY_SIZE },
            )
        };
        if key.is_null() || length < C::KEY_SIZE {
            return Err(Status::INVALID_PARAM);
        }
        // SAFETY: the caller has at least as many bytes as our keys have.
        let key = unsafe { core::slice::from_raw_parts(key.cast::<u8>(), C::KEY_SIZE) };
        let memory = md.domain.attach(key, hide_errors)?;
        // SAFETY: out-parameter of the caller.
        unsafe { *memh_p = Box::into_raw(Box::new(memory)).cast() };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn mkey_pack<C: Component>(
    md: &MdObject<C>,
    memh: *mut c_void,
    address: *mut c_void,
    length: usize,
    _params: *const c_void,
    buffer: *mut c_void,
) -> Status {
    guarded_status(md.ucx(), "mkey_pack", || {
        if memh.is_null() {
            return Err(Status::INVALID_PARAM);
        }
        let key = if C::KEY_SIZE == 0 {
            &mut []
        } else {
            // SAFETY: UCX gives as many bytes as our domains said a key has, of any alignment.
            unsafe { core::slice::from_raw_parts_mut(buffer.cast::<u8>(), C::KEY_SIZE) }
        };
        // SAFETY: a live handle of this domain.
        let memory = unsafe { &*memh.cast::<MemoryOf<C>>() };
        md.domain.pack_key(memory, address.addr() as u64, length, key)?;
        Ok(Status::OK)
    })
}
