//! The component `op/gaudi`: the predefined operations (`MPI_SUM`, …) where an operand is Gaudi memory.
//!
//! It stands in front of the functions that Open MPI would have called, which it learns when its own are installed
//! ([`enable`]). Host operands go to those at once. Others are brought to host memory chunk by chunk, reduced by those
//! functions, and the result is written back.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::abi::{
    Description, ERR_NOT_SUPPORTED, Exported, Functions, Object, Op, OpComponent, OpModule, Reduce,
    Reduce3, SUCCESS, TYPES_5, TYPES_6,
};
use crate::engine::Engine;
use crate::{engine, has_gaudi, open_mpi, say};

/// What Open MPI looks for in `mca_op_gaudi.so`.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Open MPI gives the name")]
pub(crate) static mca_op_gaudi_component: Exported<OpComponent> = Exported::new(OpComponent {
    description: Description::new("ompi", "op"),
    init_query,
    op_query,
});

/// Above all others: installed last, in front of them.
const PRIORITY: c_int = 100;
/// So many references are never given back.
const FOR_EVER: i32 = 1 << 30;

extern "C" fn init_query(_progress_threads: bool, _mpi_threads: bool) -> c_int {
    // The other component says why, where there is one: Open MPI 4 has only this kind.
    let known = matches!(open_mpi::major_version(), Some(5 | 6));
    if !known || !has_gaudi() || engine::load().is_err() {
        return ERR_NOT_SUPPORTED;
    }
    match open_mpi::types() {
        Some(_) => SUCCESS,
        None => {
            say(format_args!(
                "has another layout of operations than is known: no reductions on Gaudi memory"
            ));
            ERR_NOT_SUPPORTED
        }
    }
}

/// A module, and the functions that it stands in front of.
#[repr(C)]
struct Module<const TYPES: usize> {
    base: OpModule<TYPES>,
    two: Functions<Reduce, TYPES>,
    three: Functions<Reduce3, TYPES>,
}

unsafe extern "C" fn op_query(op: *mut c_void, priority: *mut c_int) -> *mut c_void {
    // SAFETY: a place for the priority, by Open MPI's header.
    unsafe { *priority = PRIORITY };
    match open_mpi::types() {
        Some(TYPES_5) => Module::<TYPES_5>::make(op.cast()),
        _ => Module::<TYPES_6>::make(op.cast()),
    }
}

impl<const TYPES: usize> Module<TYPES> {
    fn make(op: *mut Op<TYPES>) -> *mut c_void {
        let module = Box::new(Self {
            base: OpModule {
                object: Object { class: ptr::null(), references: AtomicI32::new(FOR_EVER) },
                enable: Some(enable::<TYPES>),
                op,
                two: [None; TYPES],
                three: [None; TYPES],
            },
            two: Functions { functions: [None; TYPES], modules: [ptr::null_mut(); TYPES] },
            three: Functions { functions: [None; TYPES], modules: [ptr::null_mut(); TYPES] },
        });
        Box::into_raw(module).cast()
    }
}

/// Learns what Open MPI has installed so far. It takes our functions next.
unsafe extern "C" fn enable<const TYPES: usize>(
    module: *mut OpModule<TYPES>,
    op: *mut Op<TYPES>,
) -> c_int {
    // SAFETY: a module of `make`, and the operation that is being set up.
    unsafe {
        let (module, op) = (&mut *module.cast::<Module<TYPES>>(), &*op);
        module.two = ptr::read(&op.two);
        module.three = ptr::read(&op.three);
        for &other in op.two.modules.iter().chain(&op.three.modules) {
            if other.is_null() {
                say(format_args!(
                    "sets up operations in an unknown way: no reductions on Gaudi memory"
                ));
                return ERR_NOT_SUPPORTED;
            }
            // Open MPI gives back its own reference when it takes our function.
            (*other).object.references.fetch_add(1, Ordering::Relaxed);
            module.base.object.class = (*other).object.class;
        }
        for index in 0..TYPES {
            module.base.two[index] =
                module.two.functions[index].map(|_| Module::<TYPES>::TWO[index]);
            module.base.three[index] =
                module.three.functions[index].map(|_| Module::<TYPES>::THREE[index]);
        }
    }
    SUCCESS
}

macro_rules! table {
    ($function:ident) => {
        table!($function, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33
               34 35 36 37 38 39 40 41 42 43)
    };
    ($function:ident, $($index:literal)*) => { [$($function::<TYPES, $index>),*] };
}

/// Open MPI calls one function for each type, and does not say which type it means.
impl<const TYPES: usize> Module<TYPES> {
    const TWO: [Reduce; TYPES_6] = table!(two);
    const THREE: [Reduce3; TYPES_6] = table!(three);
}

/// Bytes of the C structures of which the type is a pair, from `FLOAT_INT` on: the size that MPI tells has no padding.
const PAIRS: [usize; 6] = [8, 16, 16, 8, 8, 32];
/// How many types come after them.
const AFTER_PAIRS: usize = 3;

fn element(types: usize, index: usize, datatype: *mut c_void) -> Option<usize> {
    let pair = (index + AFTER_PAIRS + PAIRS.len()).checked_sub(types);
    let size = pair.and_then(|pair| PAIRS.get(pair).copied());
    size.or_else(|| open_mpi::type_size(datatype)).filter(|size| *size > 0)
}

unsafe extern "C" fn two<const TYPES: usize, const INDEX: usize>(
    source: *const c_void,
    target: *mut c_void,
    count: *mut c_int,
    datatype: *mut *mut c_void,
    module: *mut c_void,
) {
    // SAFETY: by Open MPI's header these are the operands, and our own module.
    unsafe {
        let theirs = &(*module.cast::<Module<TYPES>>()).two;
        let Some(&Some(reduce)) = theirs.functions.get(INDEX) else { return };
        let (operands, module) = ([source, target.cast_const()], theirs.modules[INDEX]);
        let size = || element(TYPES, INDEX, *datatype);
        reduce_by(size, operands, target, *count, |at: [*mut c_void; 3], count| {
            reduce(at[0], at[1], count, datatype, module.cast());
            at[1]
        });
    }
}

unsafe extern "C" fn three<const TYPES: usize, const INDEX: usize>(
    one: *const c_void,
    other: *const c_void,
    target: *mut c_void,
    count: *mut c_int,
    datatype: *mut *mut c_void,
    module: *mut c_void,
) {
    // SAFETY: by Open MPI's header these are the operands, and our own module.
    unsafe {
        let theirs = &(*module.cast::<Module<TYPES>>()).three;
        let Some(&Some(reduce)) = theirs.functions.get(INDEX) else { return };
        let module = theirs.modules[INDEX];
        let size = || element(TYPES, INDEX, *datatype);
        reduce_by(size, [one, other], target, *count, |at: [*mut c_void; 3], count| {
            reduce(at[0], at[1], at[2], count, datatype, module.cast());
            at[2]
        });
    }
}

/// Bytes of a chunk.
const CHUNK: usize = 1 << 20;

/// Reduces chunk by chunk: `reduce` gets host memory for both operands and the target, and says where the result is.
///
/// # Safety
/// The operands are valid for as many elements.
unsafe fn reduce_by(
    size: impl FnOnce() -> Option<usize>,
    operands: [*const c_void; 2],
    target: *mut c_void,
    count: c_int,
    mut reduce: impl FnMut([*mut c_void; 3], *mut c_int) -> *mut c_void,
) {
    let (mut count, Ok(elements)) = (count, usize::try_from(count)) else { return };
    let host = [operands[0].cast_mut(), operands[1].cast_mut(), target];
    let engine = engine::get().filter(|engine| host.iter().any(|at| engine.owns(at.cast_const())));
    let Some(engine) = engine.filter(|_| elements > 0) else {
        reduce(host, &mut count);
        return;
    };
    let size = size().ok_or_else(|| "MPI_Type_size failed".to_owned());
    // SAFETY: the caller's promise.
    let reduced = size
        .and_then(|size| unsafe { staged(engine, operands, target, elements, size, &mut reduce) });
    if let Err(why) = reduced {
        say(format_args!("a reduction on Gaudi memory failed, which MPI cannot be told: {why}"));
        open_mpi::abort();
    }
}

/// Reduces by way of host memory.
///
/// # Safety
/// As for [`reduce_by`].
unsafe fn staged(
    engine: &Engine,
    operands: [*const c_void; 2],
    target: *mut c_void,
    elements: usize,
    size: usize,
    reduce: &mut impl FnMut([*mut c_void; 3], *mut c_int) -> *mut c_void,
) -> Result<(), String> {
    let step = (CHUNK / size).max(1);
    let mut buffers = Buffers::take(step.min(elements) * size);
    let on_card = [operands[0], operands[1], target.cast_const()].map(|at| engine.owns(at));
    for first in (0..elements).step_by(step) {
        let (offset, now) = (first * size, step.min(elements - first));
        let len = now * size;
        let mut at = [operands[0].cast_mut(), operands[1].cast_mut(), target];
        let mut count = now as c_int; // a part of what came as one
        // SAFETY: inside the operands, and the buffers are as long as the longest chunk.
        unsafe {
            for which in 0..3 {
                at[which] = at[which].byte_add(offset);
                if on_card[which] {
                    let buffer = buffers.at(which);
                    if which < 2 {
                        engine.copy(buffer, at[which], len)?;
                    }
                    at[which] = buffer;
                }
            }
            let result = reduce(at, &mut count);
            if on_card[2] {
                engine.copy(target.byte_add(offset), result, len)?;
            }
        }
    }
    Ok(())
}

/// Host memory for a chunk of each operand, kept for the next reduction: it is pinned once.
struct Buffers(Vec<Page>);

#[repr(C, align(4096))]
#[derive(Clone)]
struct Page([u8; 4096]);

static KEPT: Mutex<Vec<Buffers>> = Mutex::new(Vec::new());

impl Buffers {
    fn take(len: usize) -> Self {
        let pages = len.div_ceil(size_of::<Page>()) * 3;
        let kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut buffers = kept.unwrap_or(Self(Vec::new()));
        if buffers.0.len() < pages {
            buffers.0 = vec![Page([0; 4096]); pages];
        }
        buffers
    }

    fn at(&mut self, which: usize) -> *mut c_void {
        let third = self.0.len() / 3;
        (&raw mut self.0[which * third]).cast()
    }
}

impl Drop for Buffers {
    fn drop(&mut self) {
        let pages = core::mem::take(&mut self.0);
        if !pages.is_empty() {
            KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(Self(pages));
        }
    }
}
