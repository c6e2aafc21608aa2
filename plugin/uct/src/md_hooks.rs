//! Hooks for the memory domains of another component of the same UCX. They tell which domains are open,
//! correct their attributes, and try whether they register a dma-buf.
//!
//! UCX reaches a domain only through its component's `md_open` and the domain's operation table. So we replace
//! `md_open`, and the slots `query` and `close` of the domains' tables, by functions that call the originals.
//! The [layout probe](crate::probe) has checked that all three are where we expect them. The component is
//! writable, as UCX itself writes to it on registration. A table that is read-only is left alone, and logged.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::{
    MdAttr, MdOps, MemDeregParams, MemRegParams, MemoryType, REG_FLAG_HIDE_ERRORS, RawComponent,
    RawMd, Status, md_flag, md_op,
};
use crate::log;
use crate::panic_guard::guarded;
use crate::ucx::Ucx;

type MdOpen = unsafe extern "C" fn(
    *mut RawComponent,
    *const c_char,
    *const c_void,
    *mut *mut RawMd,
) -> Status;
type Query = unsafe extern "C" fn(*mut RawMd, *mut MdAttr) -> Status;
type Close = unsafe extern "C" fn(*mut RawMd);

/// What a plugin does with another component's domains. Neither function may call UCX's memory domains.
#[derive(Clone, Copy, Debug)]
pub struct MdHooks {
    /// Corrects the attributes that a domain returns.
    pub correct: fn(&mut MdAttr),
    /// A domain was opened or closed. Called without a lock.
    pub changed: fn(&'static Ucx),
}

/// A domain that is open, with its attributes before the correction.
#[derive(Clone, Debug)]
pub struct OpenDomain {
    /// Its name, such as `mlx5_0`.
    pub name: String,
    /// [`md_flag`](crate::abi::md_flag)s.
    pub flags: u64,
    /// Memory types that it registers.
    pub reg_mem_types: u64,
}

#[derive(Clone, Copy)]
struct Component {
    at: *mut RawComponent,
    name: &'static str,
    ucx: &'static Ucx,
    md_open: MdOpen,
    hooks: MdHooks,
}

/// An operation table of another component, and its original functions.
#[derive(Clone, Copy)]
struct Table {
    at: *const MdOps,
    query: Query,
    close: Close,
    correct: fn(&mut MdAttr),
    ucx: &'static Ucx,
}

#[derive(Clone)]
struct Open {
    md: *mut RawMd,
    ucx: &'static Ucx,
    hooks: MdHooks,
    domain: OpenDomain,
}

struct State {
    components: Vec<Component>,
    tables: Vec<Table>,
    open: Vec<Open>,
}

// SAFETY: addresses of static structures of libraries that are never unloaded, and of domains, which are used from any
// thread.
unsafe impl Send for State {}

static STATE: Mutex<State> =
    Mutex::new(State { components: Vec::new(), tables: Vec::new(), open: Vec::new() });

/// Held while we use domains, and while one is removed from the list: none is closed while in use. The state
/// has a lock of its own that is held only briefly, because UCX may call `query` while it holds locks.
static CLOSING: Mutex<()> = Mutex::new(());

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ucx {
    /// Hooks the domains of a component of this copy, permanently. Domains that are already open are
    /// not seen. Does nothing if there is no such component, or it is hooked already. Call it after UCX
    /// has loaded its modules, such as when UCX asks a component for its domains.
    pub fn hook_domains(&'static self, component: &'static str, hooks: MdHooks) {
        let is_this = |known: &Component| core::ptr::eq(known.ucx, self) && known.name == component;
        if state().components.iter().any(is_this) {
            return;
        }
        let components = self.components();
        let mut state = state();
        for at in components {
            // SAFETY: a component of libuct, never freed; the name is a C string in an array.
            let name = unsafe { CStr::from_ptr((&raw const (*at).name).cast()) };
            if name.to_bytes() != component.as_bytes()
                || state.components.iter().any(|known| known.at == at)
            {
                continue;
            }
            // SAFETY: as above; the word is a function of this type. Another thread that opens a domain meanwhile reads
            // either value.
            let md_open = unsafe {
                let slot = AtomicPtr::<c_void>::from_ptr((&raw mut (*at).md_open).cast());
                let theirs = slot.swap(opened as *mut c_void, Ordering::AcqRel);
                core::mem::transmute::<*mut c_void, MdOpen>(theirs)
            };
            state.components.push(Component { at, name: component, ucx: self, md_open, hooks });
        }
    }

    /// The components of this copy, which are never freed.
    pub fn components(&self) -> Vec<*mut RawComponent> {
        let (mut list, mut count) = (core::ptr::null_mut(), 0);
        // SAFETY: out-parameters of ours; a list that was returned has `count` components and is released once.
        unsafe {
            let status = (self.symbols.uct_query_components)(&mut list, &mut count);
            if status != Status::OK || list.is_null() {
                return Vec::new();
            }
            let found = core::slice::from_raw_parts(list, count as usize).to_vec();
            (self.symbols.uct_release_component_list)(list);
            found
        }
    }

    /// Registers memory with a domain, as `uct_md_mem_reg_v2` does.
    ///
    /// # Safety
    /// `md` is an open domain of this copy. The handle is [deregistered](Self::deregister) once, before the domain is closed.
    ///
    /// # Errors
    /// The domain's.
    pub unsafe fn register(
        &self,
        md: *mut RawMd,
        address: *mut c_void,
        length: usize,
        params: &MemRegParams,
    ) -> Result<*mut c_void, Status> {
        let mut memh = core::ptr::null_mut();
        // SAFETY: the caller's promise; the structures outlive the call.
        match unsafe { (self.symbols.uct_md_mem_reg_v2)(md, address, length, params, &mut memh) } {
            Status::OK => Ok(memh),
            status => Err(status),
        }
    }

    /// Undoes [`register`](Self::register).
    ///
    /// # Safety
    /// `memh` was returned by [`register`](Self::register) for this domain, and is passed once.
    pub unsafe fn deregister(&self, md: *mut RawMd, memh: *mut c_void) {
        let params = MemDeregParams { field_mask: 1, flags: 0, memh, comp: core::ptr::null_mut() };
        // SAFETY: the caller's promise.
        unsafe { (self.symbols.uct_md_mem_dereg_v2)(md, &params) };
    }

    /// The hooked domains of this copy that are open now.
    pub fn open_domains(&self) -> Vec<OpenDomain> {
        let state = state();
        let open = state.open.iter().filter(|open| core::ptr::eq(open.ucx, self));
        open.map(|open| open.domain.clone()).collect()
    }

    /// Tries the domains that take dma-bufs: each registers `length` bytes of a dma-buf from `offset` on, which are
    /// at `address`, and deregisters them. Returns the name of each domain tried, with errno (or 0) if it refused.
    pub fn try_dmabuf(
        &self,
        (dmabuf, offset): (BorrowedFd<'_>, u64),
        address: u64,
        length: usize,
        mem_type: MemoryType,
    ) -> Vec<(String, Result<(), i32>)> {
        let params = MemRegParams {
            // All of the following.
            field_mask: 0b1111,
            flags: REG_FLAG_HIDE_ERRORS,
            dmabuf_fd: dmabuf.as_raw_fd(),
            dmabuf_offset: offset as usize,
            mem_type,
        };
        let address = core::ptr::without_provenance_mut(address as usize);
        // Prevents any of them from being closed meanwhile.
        let _none_closes = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut open: Vec<Open> = state().open.clone();
        open.retain(|open| {
            core::ptr::eq(open.ucx, self) && open.domain.flags & md_flag::REG_DMABUF != 0
        });
        let try_one = |open: Open| {
            // SAFETY: an open domain; the address is only a number to it. What was registered is deregistered once.
            let registered = unsafe {
                *libc::__errno_location() = 0;
                self.register(open.md, address, length, &params)
                    .map(|memh| self.deregister(open.md, memh))
                    .map_err(|_| *libc::__errno_location())
            };
            (open.domain.name, registered)
        };
        open.into_iter().map(try_one).collect()
    }
}

/// Replaces `md_open` of a component, and calls the original.
unsafe extern "C" fn opened(
    component: *mut RawComponent,
    name: *const c_char,
    config: *const c_void,
    md_p: *mut *mut RawMd,
) -> Status {
    let known = state().components.iter().find(|known| known.at == component).copied();
    let Some(Component { ucx, md_open, hooks, .. }) = known else { return Status::IO_ERROR };
    // SAFETY: the caller's arguments, to the function that they are for.
    let status = unsafe { md_open(component, name, config, md_p) };
    if status != Status::OK {
        return status;
    }
    guarded(ucx, "md_open of another component", (), || {
        // SAFETY: UCX passes a C string, and the domain was opened.
        let (name, md) = unsafe { (CStr::from_ptr(name).to_string_lossy(), *md_p) };
        match attach(ucx, &name, md, hooks) {
            Ok(()) => (hooks.changed)(ucx),
            Err(reason) => log!(ucx, Info, "cannot hook the memory domain {name}: {reason}"),
        }
    });
    status
}

/// Lists a domain that was opened, and puts our functions into its table.
fn attach(
    ucx: &'static Ucx,
    name: &str,
    md: *mut RawMd,
    hooks: MdHooks,
) -> Result<(), &'static str> {
    // SAFETY: an open domain has a table.
    let at = unsafe { (*md).ops };
    let is_writable = is_writable(at.addr());
    let mut state = state();
    let known = state.tables.iter().find(|table| table.at == at).copied();
    let table = match known {
        Some(table) => table,
        None if !is_writable => return Err("its operation table is read-only"),
        None => {
            // SAFETY: the probe found these slots, with functions of these types. The table lives as long
            // as the component's library, which is never unloaded. Callers read a slot as one word.
            let table = unsafe {
                let words = at.cast_mut().cast::<*mut c_void>();
                let slot = |index: usize| AtomicPtr::from_ptr(words.add(index));
                let theirs = |index: usize| slot(index).load(Ordering::Relaxed);
                let table = Table {
                    at,
                    query: core::mem::transmute::<*mut c_void, Query>(theirs(md_op::QUERY)),
                    close: core::mem::transmute::<*mut c_void, Close>(theirs(md_op::CLOSE)),
                    correct: hooks.correct,
                    ucx,
                };
                slot(md_op::QUERY).store(query as *mut c_void, Ordering::Release);
                slot(md_op::CLOSE).store(close as *mut c_void, Ordering::Release);
                table
            };
            // A call of the new functions waits for the state's lock, held here, and then finds the table.
            state.tables.push(table);
            table
        }
    };
    drop(state);
    // UCX's own structure may be longer than ours.
    let mut attributes = [0u64; 512];
    let attributes = attributes.as_mut_ptr().cast::<MdAttr>();
    // SAFETY: zeroed memory, as UCX passes it, and long enough.
    let attributes = unsafe {
        (*attributes).field_mask = u64::MAX;
        if (table.query)(md, attributes) != Status::OK {
            return Err("md_query failed");
        }
        &*attributes
    };
    let MdAttr { flags, reg_mem_types, .. } = *attributes;
    let domain = OpenDomain { name: name.to_owned(), flags, reg_mem_types };
    self::state().open.push(Open { md, ucx, hooks, domain });
    Ok(())
}

fn table_of(md: *mut RawMd) -> Option<Table> {
    // SAFETY: UCX passes open domains.
    let at = unsafe { (*md).ops };
    state().tables.iter().find(|table| table.at == at).copied()
}

/// Replaces `query` of a domain, and calls the original.
unsafe extern "C" fn query(md: *mut RawMd, attributes: *mut MdAttr) -> Status {
    let Some(table) = table_of(md) else { return Status::IO_ERROR };
    // SAFETY: the caller's arguments, to the function that they are for.
    let status = unsafe { (table.query)(md, attributes) };
    if status == Status::OK {
        guarded(table.ucx, "md_query of another component", (), || {
            // SAFETY: that function has filled all fields.
            (table.correct)(unsafe { &mut *attributes });
        });
    }
    status
}

/// Replaces `close` of a domain, and calls the original.
unsafe extern "C" fn close(md: *mut RawMd) {
    let Some(table) = table_of(md) else { return };
    let closed = {
        let _not_in_use = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = state();
        let at = state.open.iter().position(|open| open.md == md);
        at.map(|at| state.open.swap_remove(at))
    };
    // SAFETY: UCX closes each domain once.
    unsafe { (table.close)(md) };
    if let Some(Open { ucx, hooks, .. }) = closed {
        guarded(ucx, "md_close of another component", (), || (hooks.changed)(ucx));
    }
}

/// Whether this process may write to its memory at an address.
fn is_writable(address: usize) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut words = line.split_ascii_whitespace();
        let range = words.next().and_then(|range| range.split_once('-'));
        let number = |text| usize::from_str_radix(text, 16).ok();
        let range = range.and_then(|(start, end)| Some(number(start)?..number(end)?));
        range.is_some_and(|range| range.contains(&address))
            && words.next().is_some_and(|access| access.as_bytes().get(1) == Some(&b'w'))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writable_memory_is_told_from_constants() {
        static CONSTANT: [usize; 2] = [1, 2];
        let local = [1, 2];
        assert!(is_writable((&raw const local).addr()));
        assert!(!is_writable((&raw const CONSTANT).addr()));
        assert!(!is_writable(1));
    }
}
