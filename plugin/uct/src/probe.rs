//! The layout self-probe: which slot of our tables does *this* libuct really call?
//!
//! libuct exports thin wrappers that do nothing but jump through a slot of an operation table.
//! The probe builds fake objects whose every slot is a function that reports its own index, calls
//! the wrappers and compares. It runs before anything is registered, needs no initialised UCX,
//! and is what decides whether a UCX is supported; version strings are only for messages.
//!
//! It must not crash on a UCX whose tables grew or shrank. An interface begins with its public
//! operations, followed by a pointer to the internal ones: with another number of public ones, that
//! pointer moves. So there are two passes. The first probes the public operations, with [`outside`] in
//! all words after them. If these match, the second probes the internal ones: all words but the known
//! pointer, also the public slots, point to a table full of [`outside`].

use core::cell::Cell;
use core::ffi::{CStr, c_void};

use crate::abi::{
    IFACE_CONFIG_SIZE, IFACE_OP_SLOTS, MD_CONFIG_SIZE, REG_FLAG_HIDE_ERRORS, RawConfigField,
    Variant, internal_op, md_op,
};
use crate::loaded::Loaded;

thread_local! {
    static FIRED: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Slots of the largest table probed.
const SLOTS: usize = 64;
/// Functions of a component, from its third word on.
const COMPONENT_SLOTS: usize = 7;

/// Reports its index. Returns a status that is neither success nor "in progress", so that no
/// wrapper goes on to look at results.
unsafe extern "C" fn slot<const INDEX: usize>() -> i8 {
    FIRED.set(Some(INDEX));
    crate::abi::Status::UNSUPPORTED.0
}

/// Fills words that are no known slot, and reports a call through them.
unsafe extern "C" fn outside() -> i8 {
    FIRED.set(Some(OUTSIDE));
    crate::abi::Status::UNSUPPORTED.0
}

const OUTSIDE: usize = usize::MAX;

macro_rules! slots {
    ($($index:literal)*) => { [$(slot::<$index> as *const c_void),*] };
}

/// `slot::<0> … slot::<63>`.
fn slots() -> [*const c_void; SLOTS] {
    slots!(0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
           32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60
           61 62 63)
}

/// The object that a wrapper takes, and so the table that it uses.
#[derive(Clone, Copy, Debug)]
enum Object {
    /// An interface.
    Iface,
    /// An endpoint of that interface.
    Ep,
    /// The same two; the slot is an [`internal_op`].
    IfaceInternal,
    EpInternal,
    /// A memory domain.
    Md,
    /// A component; its slots start behind the name.
    Component,
}

/// One wrapper, the object it takes, and the slot it must call. A `required` wrapper must exist.
struct WrapperSlot {
    wrapper: &'static CStr,
    object: Object,
    slot: usize,
    required: bool,
}

/// Internal operations sit behind their own pointer, which follows the public ones; their indices are
/// reported with this offset so that a public slot cannot be mistaken for an internal one.
const INTERNAL: usize = IFACE_OP_SLOTS;

const fn required(wrapper: &'static CStr, object: Object, slot: usize) -> WrapperSlot {
    WrapperSlot { wrapper, object, slot, required: true }
}

const fn optional(wrapper: &'static CStr, object: Object, slot: usize) -> WrapperSlot {
    WrapperSlot { wrapper, object, slot, required: false }
}

/// Public operations of interfaces and endpoints.
const PUBLIC: &[WrapperSlot] = &[
    required(c"uct_iface_query", Object::Iface, 46),
    required(c"uct_iface_event_fd_get", Object::Iface, 43),
    required(c"uct_iface_get_address", Object::Iface, 48),
    required(c"uct_ep_check", Object::Ep, 28),
];

/// All others.
const INTERNAL_AND_OTHERS: &[WrapperSlot] = &[
    optional(c"uct_iface_query_v2", Object::IfaceInternal, internal_op::IFACE_QUERY_V2),
    required(c"uct_iface_estimate_perf", Object::IfaceInternal, internal_op::IFACE_ESTIMATE_PERF),
    required(c"uct_ep_query", Object::EpInternal, internal_op::EP_QUERY),
    required(c"uct_ep_invalidate", Object::EpInternal, internal_op::EP_INVALIDATE),
    required(
        c"uct_iface_is_reachable_v2",
        Object::IfaceInternal,
        internal_op::IFACE_IS_REACHABLE_V2,
    ),
    optional(c"uct_ep_get_device_ep", Object::EpInternal, internal_op::EP_GET_DEVICE_EP),
    required(c"uct_md_close", Object::Md, md_op::CLOSE),
    required(c"uct_md_query_v2", Object::Md, md_op::QUERY),
    required(c"uct_md_mem_free", Object::Md, md_op::MEM_FREE),
    required(c"uct_md_mem_advise", Object::Md, md_op::MEM_ADVISE),
    required(c"uct_md_mem_reg_v2", Object::Md, md_op::MEM_REG),
    required(c"uct_md_mem_dereg_v2", Object::Md, md_op::MEM_DEREG),
    required(c"uct_md_mem_query", Object::Md, md_op::MEM_QUERY),
    optional(c"uct_md_mem_query_v2", Object::Md, md_op::MEM_QUERY),
    required(c"uct_md_mkey_pack_v2", Object::Md, md_op::MKEY_PACK),
    required(c"uct_md_mem_attach", Object::Md, md_op::MEM_ATTACH),
    required(c"uct_md_detect_memory_type", Object::Md, md_op::DETECT_MEMORY_TYPE),
    optional(c"uct_md_mem_elem_release", Object::Md, md_op::MEM_ELEM_RELEASE),
    required(c"uct_md_open", Object::Component, 1),
    required(c"uct_rkey_ptr", Object::Component, 4),
];

/// Probes a libuct in a file, without a UCX around it. For tests and diagnosis.
///
/// # Errors
/// Why the file cannot be loaded, or the first slot that differs.
pub fn probe_library(path: &std::path::Path) -> Result<Variant, String> {
    check(&Loaded::open(path)?)
}

/// Memory larger than any structure a wrapper is handed.
#[repr(C, align(64))]
struct Scratch([u64; 512]);

impl Scratch {
    /// Every word is `filler`, but for those from `start` on, which are `words`.
    fn new(filler: u64, start: usize, words: impl IntoIterator<Item = u64>) -> Box<Self> {
        let mut scratch = Box::new(Scratch([filler; 512]));
        for (at, word) in scratch.0[start..].iter_mut().zip(words) {
            *at = word;
        }
        scratch
    }

    fn as_ptr(&mut self) -> *mut c_void {
        (&raw mut *self).cast()
    }
}

/// Checks a libuct against the layouts of [`crate::abi`].
pub(crate) fn check(uct: &Loaded) -> Result<Variant, String> {
    let variant = Variant::of(|wrapper| uct.symbol(wrapper).is_some());
    let slots = slots();
    let word = |function: &*const c_void| function.expose_provenance() as u64;
    let outside = word(&(outside as *const c_void));
    let functions = |count| slots.iter().take(count).map(word);
    // A table behind a pointer: `outside` from the end of the known slots on.
    let table = |start: usize| Scratch::new(outside, 0, slots[start..].iter().map(word));
    let mut internal = table(INTERNAL);
    let mut md_operations = table(0);
    let mut unknown = Scratch::new(outside, 0, []);
    let unknown = unknown.as_ptr().expose_provenance() as u64;

    check_config(uct, c"uct_md_config_table", MD_CONFIG_SIZE)?;
    check_config(uct, c"uct_iface_config_table", IFACE_CONFIG_SIZE)?;
    // In a component that grew, the words after the known functions may be functions, too.
    let mut component = Scratch::new(outside, 2, functions(COMPONENT_SLOTS));
    let md_words =
        [md_operations.as_ptr(), component.as_ptr()].map(|at| at.expose_provenance() as u64);
    let mut md = Scratch::new(unknown, 0, md_words);
    let mut public = Scratch::new(outside, 0, functions(IFACE_OP_SLOTS));
    let internal = internal.as_ptr().expose_provenance() as u64;
    let mut further = Scratch::new(unknown, IFACE_OP_SLOTS, [internal]);
    for (expected, iface) in [(PUBLIC, &mut public), (INTERNAL_AND_OTHERS, &mut further)] {
        let mut ep = Scratch::new(0, 0, [iface.as_ptr().expose_provenance() as u64]);
        for expect in expected {
            let object = match expect.object {
                Object::Iface | Object::IfaceInternal => &mut *iface,
                Object::Ep | Object::EpInternal => &mut ep,
                Object::Md => &mut md,
                Object::Component => &mut component,
            };
            check_one(uct, expect, variant, object.as_ptr())?;
        }
    }
    Ok(variant)
}

fn check_one(
    uct: &Loaded,
    expect: &WrapperSlot,
    variant: Variant,
    object: *mut c_void,
) -> Result<(), String> {
    let name = expect.wrapper.to_string_lossy();
    let Some(wrapper) = uct.symbol(expect.wrapper) else {
        return if expect.required { Err(format!("no {name}")) } else { Ok(()) };
    };
    let expected = match expect.object {
        Object::IfaceInternal | Object::EpInternal => {
            variant.internal(expect.slot).map_or(OUTSIDE, |slot| INTERNAL + slot)
        }
        _ => expect.slot,
    };
    match fire(wrapper, object) {
        Some(OUTSIDE) => Err(format!("{name} calls a slot outside those that are known")),
        Some(slot) if slot == expected => Ok(()),
        Some(slot) => Err(format!("{name} calls slot {slot}, not {expected}")),
        None => Err(format!("{name} calls no slot")),
    }
}

/// Our own configuration values lie behind UCX's, whose size is not exported: no field of UCX's may
/// reach into them.
fn check_config(uct: &Loaded, table: &CStr, size: usize) -> Result<(), String> {
    let name = table.to_string_lossy();
    let mut field = uct.symbol(table).ok_or_else(|| format!("no {name}"))?.cast::<RawConfigField>();
    // SAFETY: a table of UCX, which ends with a field without a name.
    while let (false, offset) = unsafe { ((*field).name.is_null(), (*field).offset) } {
        // Deprecated variables are listed without an offset.
        if offset >= size && offset != usize::MAX {
            return Err(format!("{name} has a field at {offset}, not below {size}"));
        }
        // SAFETY: not the end of the table yet.
        field = unsafe { field.add(1) };
    }
    Ok(())
}

/// Calls a wrapper with the fake object and scratch memory for everything else it may look at.
fn fire(wrapper: *mut c_void, object: *mut c_void) -> Option<usize> {
    type SixArguments = unsafe extern "C" fn(
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
        *mut c_void,
    ) -> i8;
    // To the registration wrapper these are parameters that ask it not to log the failure.
    let mut scratch = Scratch::new(0, 0, [1, REG_FLAG_HIDE_ERRORS]);
    let memory = scratch.as_ptr();
    // SAFETY: every wrapper takes at most six pointer-sized arguments and, apart from the object,
    // reads or writes only structures that fit into the scratch memory before (and not after) it
    // jumps through the slot; extra arguments are ignored by the C calling convention.
    let call = unsafe { core::mem::transmute::<*mut c_void, SixArguments>(wrapper) };
    FIRED.set(None);
    // SAFETY: as above.
    unsafe { call(object, memory, memory, memory, memory, memory) };
    FIRED.take()
}
