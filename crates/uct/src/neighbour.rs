//! The memory domains of another component of the same UCX: which are open, a correction of what they say of
//! themselves, and whether they register a dma-buf.
//!
//! UCX reaches a domain through its component's `md_open` and the domain's operation table only. So `md_open`, and two
//! slots of the tables that such domains turn out to have, get functions of ours, which call those that were there.
//! The [layout probe](crate::probe) has found `md_open` and the slots where this expects them. UCX itself writes to the
//! component when it registers it; a table that cannot be written is left alone, with a line about it.

use core::ffi::{CStr, c_char, c_void};
use core::sync::atomic::{AtomicPtr, Ordering};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::{
    MdAttr, MdOps, MemDeregParams, MemRegParams, MemoryType, REG_FLAG_HIDE_ERRORS, RawComponent,
    RawMd, Status, md_flag, md_op,
};
use crate::border::guarded;
use crate::log;
use crate::ucx::Ucx;

type MdOpen = unsafe extern "C" fn(
    *mut RawComponent,
    *const c_char,
    *const c_void,
    *mut *mut RawMd,
) -> Status;
type Query = unsafe extern "C" fn(*mut RawMd, *mut MdAttr) -> Status;
type Close = unsafe extern "C" fn(*mut RawMd);

/// What a plugin wants of another component's domains. Neither function may call UCX's memory domains.
#[derive(Clone, Copy, Debug)]
pub struct Watch {
    /// Corrects what a domain says of itself.
    pub correct: fn(&mut MdAttr),
    /// A domain of this name was opened; it says this of itself before the correction.
    pub opened: fn(&'static Ucx, &str, &MdAttr),
}

#[derive(Clone, Copy)]
struct Component {
    at: *mut RawComponent,
    name: &'static str,
    ucx: &'static Ucx,
    md_open: MdOpen,
    watch: Watch,
}

/// An operation table of another component, and what its slots had.
#[derive(Clone, Copy)]
struct Table {
    at: *const MdOps,
    query: Query,
    close: Close,
    correct: fn(&mut MdAttr),
}

#[derive(Clone)]
struct Open {
    md: *mut RawMd,
    ucx: &'static Ucx,
    name: String,
    takes_dmabufs: bool,
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

/// Held while domains are used here, and while one leaves the list. (The state is locked for a moment only: UCX also asks for
/// it with locks of its own.)
static CLOSING: Mutex<()> = Mutex::new(());

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ucx {
    /// Watches the domains of a component of this copy, from now on and for ever; those that are open already are not
    /// seen. Does nothing where there is no such component, or it is watched already. To be called when UCX has loaded
    /// its modules, as it has when it asks a component for its domains.
    pub fn watch_domains(&'static self, component: &'static str, watch: Watch) {
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
            // SAFETY: as above. UCX is between the registration of components and the opening of domains, and whoever
            // opens one on another thread reads either value.
            let md_open: MdOpen = unsafe { (&raw mut (*at).md_open).replace(opened) };
            state.components.push(Component { at, name: component, ucx: self, md_open, watch });
        }
    }

    fn components(&self) -> Vec<*mut RawComponent> {
        let (mut list, mut count) = (core::ptr::null_mut(), 0);
        // SAFETY: out-parameters of ours; a list that was returned has so many components and is released once.
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

    /// Names of the watched domains of this copy that are open now and say that they register dma-bufs.
    pub fn dmabuf_domains(&self) -> Vec<String> {
        let state = state();
        let open = state.open.iter().filter(|open| open.takes_dmabufs);
        open.filter(|open| core::ptr::eq(open.ucx, self)).map(|open| open.name.clone()).collect()
    }

    /// Has those domains register bytes of a dma-buf from `offset` on, which are at `address`, and give them up again.
    /// Returns those that refuse, with the system's error number, or 0.
    pub fn try_dmabuf(
        &self,
        (dmabuf, offset): (BorrowedFd<'_>, u64),
        address: u64,
        length: usize,
        mem_type: MemoryType,
    ) -> Vec<(String, i32)> {
        let params = MemRegParams {
            // All of the following.
            field_mask: 0b1111,
            flags: REG_FLAG_HIDE_ERRORS,
            dmabuf_fd: dmabuf.as_raw_fd(),
            dmabuf_offset: offset as usize,
            mem_type,
        };
        let address = core::ptr::without_provenance_mut(address as usize);
        let (register, deregister) =
            (self.symbols.uct_md_mem_reg_v2, self.symbols.uct_md_mem_dereg_v2);
        // None of them is closed meanwhile.
        let _none_closes = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        let open: Vec<Open> = state().open.clone();
        let mut refusals = Vec::new();
        for open in open {
            if !open.takes_dmabufs || !core::ptr::eq(open.ucx, self) {
                continue;
            }
            let mut memh = core::ptr::null_mut();
            // SAFETY: an open domain; the address is only a number to it, and the structures outlive the calls. What
            // was registered is deregistered once.
            unsafe {
                *libc::__errno_location() = 0;
                if register(open.md, address, length, &params, &mut memh) == Status::OK {
                    let null = core::ptr::null_mut();
                    let params = MemDeregParams { field_mask: 1, flags: 0, memh, comp: null };
                    deregister(open.md, &params);
                } else {
                    refusals.push((open.name, *libc::__errno_location()));
                }
            }
        }
        refusals
    }
}

/// Stands in for `md_open` of a component.
unsafe extern "C" fn opened(
    component: *mut RawComponent,
    name: *const c_char,
    config: *const c_void,
    md_p: *mut *mut RawMd,
) -> Status {
    let known = state().components.iter().find(|known| known.at == component).copied();
    let Some(Component { ucx, md_open, watch, .. }) = known else { return Status::IO_ERROR };
    // SAFETY: the caller's arguments, to the function that they are for.
    let status = unsafe { md_open(component, name, config, md_p) };
    if status != Status::OK {
        return status;
    }
    guarded(ucx, "md_open of another component", (), || {
        // SAFETY: UCX passes a C string, and the domain was opened.
        let (name, md) = unsafe { (CStr::from_ptr(name).to_string_lossy(), *md_p) };
        if let Err(reason) = attach(ucx, &name, md, watch) {
            log!(ucx, Info, "what {name} says of itself is left alone: {reason}");
        }
    });
    status
}

/// Takes note of a domain that was opened, and has our functions called for it.
fn attach(ucx: &'static Ucx, name: &str, md: *mut RawMd, watch: Watch) -> Result<(), &'static str> {
    // SAFETY: an open domain has a table.
    let at = unsafe { (*md).ops };
    let mut state = state();
    let known = state.tables.iter().find(|table| table.at == at).copied();
    let table = match known {
        Some(table) => table,
        None if !is_writable(at.addr()) => return Err("its operations cannot be changed"),
        None => {
            // SAFETY: the probe found these slots, with functions of these types. The table lives as long as the
            // component's library, which is for ever, and who calls through it reads a word.
            let table = unsafe {
                let words = at.cast_mut().cast::<*mut c_void>();
                let slot = |index: usize| AtomicPtr::from_ptr(words.add(index));
                let theirs = |index: usize| slot(index).load(Ordering::Relaxed);
                let table = Table {
                    at,
                    query: core::mem::transmute::<*mut c_void, Query>(theirs(md_op::QUERY)),
                    close: core::mem::transmute::<*mut c_void, Close>(theirs(md_op::CLOSE)),
                    correct: watch.correct,
                };
                slot(md_op::QUERY).store(query as *mut c_void, Ordering::Release);
                slot(md_op::CLOSE).store(close as *mut c_void, Ordering::Release);
                table
            };
            // Whoever calls the new functions waits for the lock that is held here.
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
            return Err("it does not say");
        }
        &*attributes
    };
    let takes_dmabufs = attributes.flags & md_flag::REG_DMABUF != 0;
    self::state().open.push(Open { md, ucx, name: name.to_owned(), takes_dmabufs });
    (watch.opened)(ucx, name, attributes);
    Ok(())
}

fn table_of(md: *mut RawMd) -> Option<Table> {
    // SAFETY: UCX passes open domains.
    let at = unsafe { (*md).ops };
    state().tables.iter().find(|table| table.at == at).copied()
}

/// Stands in for `query` of a domain.
unsafe extern "C" fn query(md: *mut RawMd, attributes: *mut MdAttr) -> Status {
    let Some(table) = table_of(md) else { return Status::IO_ERROR };
    // SAFETY: the caller's arguments, to the function that they are for, which fills all fields.
    unsafe {
        let status = (table.query)(md, attributes);
        if status == Status::OK {
            (table.correct)(&mut *attributes);
        }
        status
    }
}

/// Stands in for `close` of a domain.
unsafe extern "C" fn close(md: *mut RawMd) {
    let Some(table) = table_of(md) else { return };
    {
        let _not_in_use = CLOSING.lock().unwrap_or_else(PoisonError::into_inner);
        state().open.retain(|open| open.md != md);
    }
    // SAFETY: UCX closes each domain once.
    unsafe { (table.close)(md) };
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
