//! The component `op/gaudi`: the predefined operations (`MPI_SUM`, …) where an operand is Gaudi memory.
//!
//! It wraps the functions that Open MPI would have called, which it saves when its own are installed
//! ([`enable`]). Host operands are passed to those directly. Others are copied to host memory chunk by
//! chunk and reduced by those functions, and the result is copied back.

use core::ffi::{c_int, c_void};
use core::ptr;
use core::sync::atomic::{AtomicI32, Ordering};

use crate::abi::{
    Description, ERR_NOT_SUPPORTED, Exported, Functions, Object, Op, OpComponent, OpModule, Reduce,
    Reduce3, SUCCESS, TYPES_5, TYPES_6,
};
use crate::stage::{CHUNK, Side, staged};
use crate::{engine, has_gaudi, open_mpi, say};

/// What Open MPI looks for in `mca_op_gaudi.so`.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Open MPI gives the name")]
pub(crate) static mca_op_gaudi_component: Exported<OpComponent> = Exported::new(OpComponent {
    description: Description::new("ompi", "op", [1, 0, 0]),
    init_query,
    op_query,
});

/// Above all others: installed last, in front of them.
const PRIORITY: c_int = 100;
/// A reference count that never reaches 0.
const FOR_EVER: i32 = 1 << 30;

extern "C" fn init_query(_progress_threads: bool, _mpi_threads: bool) -> c_int {
    // `accelerator` logs why, where it is loaded: Open MPI 4 has only this component.
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

/// A module, and the functions that it wraps.
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

/// Saves the functions that Open MPI has installed so far. It takes ours next.
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
            // Open MPI releases its own reference when it takes our function.
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

/// Bytes of the C structures of the pair types, from `FLOAT_INT` on: the size that MPI returns has no padding.
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
        let module = theirs.modules[INDEX];
        let size = || element(TYPES, INDEX, *datatype);
        let sides = [(source.cast_mut(), true, false), (target, true, true)];
        reduce_by(size, sides, *count, |[source, target], count| {
            reduce(source, target, count, datatype, module.cast());
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
        let read = |at: *const c_void| (at.cast_mut(), true, false);
        let sides = [read(one), read(other), (target, false, true)];
        reduce_by(size, sides, *count, |[one, other, target], count| {
            reduce(one, other, target, count, datatype, module.cast());
        });
    }
}

/// Reduces with operands in host memory. Of each: its address, whether it is read, whether it is written.
///
/// # Safety
/// The operands are valid for as many elements.
unsafe fn reduce_by<const N: usize>(
    size: impl FnOnce() -> Option<usize>,
    sides: [(*mut c_void, bool, bool); N],
    mut count: c_int,
    mut reduce: impl FnMut([*mut c_void; N], *mut c_int),
) {
    let Ok(elements) = usize::try_from(count) else { return };
    let engine =
        engine::get().filter(|engine| sides.iter().any(|(at, ..)| engine.owns(at.cast_const())));
    let Some(engine) = engine.filter(|_| elements > 0) else {
        reduce(sides.map(|(at, ..)| at), &mut count);
        return;
    };
    let reduced = size().ok_or_else(|| "MPI_Type_size failed".to_owned()).and_then(|item| {
        let len = elements * item;
        let sides = sides.map(|(at, enters, leaves)| Side { at, item, len, enters, leaves });
        // SAFETY: the caller's promise.
        unsafe {
            staged(engine, sides, elements, (CHUNK / item).max(1), |at, _, count| {
                reduce(at, &mut (count as c_int)); // a part of what came as one
                Ok(())
            })
        }
    });
    if let Err(why) = reduced {
        let why: String = why;
        say(format_args!("a reduction on Gaudi memory failed, which MPI cannot be told: {why}"));
        open_mpi::abort();
    }
}
