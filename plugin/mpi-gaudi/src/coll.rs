//! The component `coll/gaudi`: collectives that are better staged in host memory as a whole than step by step.
//!
//! It wraps the functions that Open MPI has chosen for a communicator ([`enable`]), and calls them with
//! host memory. So operations of the user, too, get addresses that the CPU can access.
//!
//! | collective | with Gaudi memory |
//! |---|---|
//! | Allreduce, Reduce, Scan, Exscan, Reduce_local | chunk by chunk, copied while the last one is reduced |
//! | Reduce_scatter, Reduce_scatter_block | as a whole if it is short, or the operation is the user's; else by `op/gaudi` |
//! | Alltoall | as a whole if it is short: one copy of the card instead of one for each rank; else by UCX |

use core::ffi::{c_int, c_void};
use core::ptr;

use crate::abi::{
    COLL_REDUCE_LOCAL, CollComponent, CollModule, CollPair, CollTable, Description,
    ERR_NOT_SUPPORTED, ERROR, Exported, Op, SUCCESS, TYPES_5,
};
use crate::engine::Engine;
use crate::open_mpi::Datatype;
use crate::stage::{CHUNK, Side, staged};
use crate::{engine, has_gaudi, open_mpi, say};

/// What Open MPI looks for in `mca_coll_gaudi.so`.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "Open MPI gives the name")]
pub(crate) static mca_coll_gaudi_component: Exported<CollComponent> =
    Exported::new(CollComponent {
        description: Description::new("ompi", "coll", [2, 4, 0]).opened_by(open),
        init_query,
        comm_query,
    });

/// Above all others: enabled last, in front of them.
const PRIORITY: c_int = 90;
/// Bytes up to which a collective is staged as a whole. Of an exchange: of all ranks together.
const SHORT: usize = 2 * CHUNK;
const SHORT_EXCHANGE: usize = 512 << 10;
/// A long one is split into so many chunks, within limits of their size: each costs as many messages as the whole.
const CHUNKS: usize = 8;
const LONGEST_CHUNK: usize = 4 * CHUNK;
/// Least bytes of a chunk for each rank: less would be slow with many ranks.
const CHUNK_OF_RANK: usize = 16 << 10;
/// `MPI_IN_PLACE`.
const IN_PLACE: In = ptr::without_provenance(1);

/// Sets the version of the framework, which differs between 5.0 and 6.0.
extern "C" fn open() -> c_int {
    if open_mpi::major_version() == Some(6) {
        // SAFETY: Open MPI opens a component once, before it reads more of it than its name.
        unsafe { (*mca_coll_gaudi_component.get()).description.set_framework_version([3, 0, 0]) };
    }
    SUCCESS
}

/// Succeeds also without a Gaudi: all ranks must agree on how a reduction is split ([`any_rank`]), and
/// ranks on other hosts may have one.
extern "C" fn init_query(_progress_threads: bool, _mpi_threads: bool) -> c_int {
    if has_gaudi() {
        // Where it cannot be loaded, `accelerator` says why.
        let _ = engine::load();
    }
    // Without this component collectives work, only slower: an unknown layout is not logged.
    match open_mpi::has_known_communicators() {
        true => SUCCESS,
        false => ERR_NOT_SUPPORTED,
    }
}

/// What is replaced: where in the table of a communicator, and by what.
const OURS: [(usize, In); 8] = [
    (ALLREDUCE, reduces::<ALLREDUCE> as In),
    (ALLTOALL, alltoall as In),
    (EXSCAN, reduces::<EXSCAN> as In),
    (REDUCE, reduce as In),
    (REDUCE_SCATTER, scatters::<REDUCE_SCATTER> as In),
    (REDUCE_SCATTER_BLOCK, scatters::<REDUCE_SCATTER_BLOCK> as In),
    (SCAN, reduces::<SCAN> as In),
    (COLL_REDUCE_LOCAL, reduce_local as In),
];
const ALLREDUCE: usize = 2;
const ALLTOALL: usize = 3;
const EXSCAN: usize = 8;
const REDUCE: usize = 11;
const REDUCE_SCATTER: usize = 12;
const REDUCE_SCATTER_BLOCK: usize = 13;
const SCAN: usize = 14;

/// A module, and the functions that it wraps.
#[repr(C)]
struct Module {
    base: CollModule,
    theirs: CollTable,
}

unsafe extern "C" fn comm_query(_communicator: At, priority: *mut c_int) -> At {
    let made = open_mpi::class("libmpi.so", c"mca_coll_base_module_t_class")
        .map_or(ptr::null_mut(), |class| class.create(size_of::<Module>()).cast::<Module>());
    if !made.is_null() {
        // SAFETY: as long as a module, and zero but for its class; and a place for the priority, by Open MPI's header.
        unsafe {
            *priority = PRIORITY;
            (*made).base.enable = Some(enable);
        }
    }
    made.cast()
}

/// Saves the functions that Open MPI has installed so far. 5.0 takes ours next; in 6.0 a module installs them itself.
unsafe extern "C" fn enable(module: *mut CollModule, communicator: At) -> c_int {
    // SAFETY: a module of `comm_query`, and the communicator that is being set up.
    unsafe {
        let (module, table) =
            (&mut *module.cast::<Module>(), &mut *open_mpi::functions(communicator));
        module.theirs = *table;
        // Intercommunicators have no scan.
        if OURS.iter().any(|&(slot, _)| table[slot].function.is_null()) {
            return ERR_NOT_SUPPORTED;
        }
        let own: *mut Module = module;
        for (slot, function) in OURS {
            if open_mpi::major_version() == Some(6) {
                table[slot] = CollPair { function, module: own.cast() };
            } else if slot == COLL_REDUCE_LOCAL {
                module.base.reduce_local = function;
            } else {
                module.base.blocking[slot] = function;
            }
        }
        if open_mpi::major_version() == Some(6) {
            module.base.disable = Some(disable);
        }
    }
    SUCCESS
}

/// Restores the saved functions, for modules that were enabled before.
unsafe extern "C" fn disable(module: *mut CollModule, communicator: At) -> c_int {
    // SAFETY: an enabled module of `comm_query`, and its communicator.
    unsafe {
        let (own, table) = (&*module.cast::<Module>(), &mut *open_mpi::functions(communicator));
        for (slot, _) in OURS {
            if table[slot].module == module.cast_const().cast() {
                table[slot] = own.theirs[slot];
            }
        }
    }
    SUCCESS
}

type In = *const c_void;
type At = *mut c_void;
/// Source, target, count or counts, type, operation, communicator, module.
type Reduces = unsafe extern "C" fn(In, At, usize, At, At, At, In) -> c_int;
/// The same with a root.
type Rooted = unsafe extern "C" fn(In, At, usize, At, At, c_int, At, In) -> c_int;
/// The same without a communicator.
type Local = unsafe extern "C" fn(In, At, usize, At, At, In) -> c_int;
/// Source, count, type, target, count, type, communicator, module.
type Exchange = unsafe extern "C" fn(In, usize, At, At, usize, At, At, In) -> c_int;

/// In 5.0 a count is an `int`: the upper half is undefined. Passed on, it does no harm: a callee that takes an `int` ignores it.
fn counted(count: usize) -> usize {
    if open_mpi::major_version() == Some(5) { count as u32 as usize } else { count }
}

/// Open MPI's function of a slot, with its module.
///
/// # Safety
/// `F` is its type, and the module is one of ours.
unsafe fn theirs<F: Copy>(module: In, slot: usize) -> (F, In) {
    const { assert!(size_of::<F>() == size_of::<In>()) };
    // SAFETY: the caller's promise.
    unsafe {
        let pair = (*module.cast::<Module>()).theirs[slot];
        (core::mem::transmute_copy(&pair.function), pair.module)
    }
}

/// Allreduce, Scan, Exscan.
unsafe extern "C" fn reduces<const SLOT: usize>(
    source: In,
    target: At,
    count: usize,
    datatype: At,
    op: At,
    communicator: At,
    module: In,
) -> c_int {
    // SAFETY: by Open MPI's header these are the operands, and our own module; its functions have the same parameters.
    unsafe {
        let (function, of) = theirs::<Reduces>(module, SLOT);
        // The first rank of an exclusive scan leaves its target as it is.
        let (target, keeps) = (Some(target), SLOT == EXSCAN);
        let operands = Operands { source, target, keeps, count, datatype };
        elementwise(operands, Some((communicator, module)), |source, target, count| {
            function(source, target, count, datatype, op, communicator, of)
        })
    }
}

unsafe extern "C" fn reduce(
    source: In,
    target: At,
    count: usize,
    datatype: At,
    op: At,
    root: c_int,
    communicator: At,
    module: In,
) -> c_int {
    // SAFETY: as for `reduces`.
    unsafe {
        let (function, of) = theirs::<Rooted>(module, REDUCE);
        let is_root = open_mpi::rank(communicator) == root;
        let operands =
            Operands { source, target: is_root.then_some(target), keeps: false, count, datatype };
        elementwise(operands, Some((communicator, module)), |source, into, count| {
            let into = if is_root { into } else { target };
            function(source, into, count, datatype, op, root, communicator, of)
        })
    }
}

unsafe extern "C" fn reduce_local(
    source: In,
    target: At,
    count: usize,
    datatype: At,
    op: At,
    module: In,
) -> c_int {
    // SAFETY: as for `reduces`.
    unsafe {
        let (function, of) = theirs::<Local>(module, COLL_REDUCE_LOCAL);
        let operands = Operands { source, target: Some(target), keeps: true, count, datatype };
        elementwise(operands, None, |source, target, count| {
            function(source, target, count, datatype, op, of)
        })
    }
}

/// What is reduced, element by element.
struct Operands {
    source: In,
    /// None where MPI ignores it.
    target: Option<At>,
    /// Whether the previous content of the target matters.
    keeps: bool,
    count: usize,
    datatype: At,
}

/// Calls `reduce` with host memory, for all elements at once or for some at a time.
///
/// # Safety
/// The operands are valid; the communicator is that of our module.
unsafe fn elementwise(
    operands: Operands,
    among: Option<(At, In)>,
    reduce: impl Fn(In, At, usize) -> c_int,
) -> c_int {
    let Operands { source, target, keeps, datatype, .. } = operands;
    let (count, into) = (counted(operands.count), target.unwrap_or(ptr::null_mut()));
    let engine = engine::get();
    let on_card = engine.is_some_and(|engine| engine.owns(source) || engine.owns(into));
    // Elements of 2 GiB and more have no size in `int`, on any rank.
    let Some(size) = open_mpi::type_size(datatype) else { return reduce(source, into, count) };
    let step = match among {
        _ if size == 0 || size * count <= SHORT => count,
        None if !on_card => count,
        None => CHUNK / size,
        // All ranks have to split in the same way, wherever their operands are.
        // SAFETY: the caller's promise.
        Some((communicator, module)) => match unsafe { any_rank(on_card, communicator, module) } {
            Ok(false) => count,
            Ok(true) => {
                let chunk = (size * count / CHUNKS).clamp(CHUNK, LONGEST_CHUNK);
                chunk.max(CHUNK_OF_RANK * open_mpi::size(communicator)) / size
            }
            Err(code) => return code,
        },
    }
    .max(1);
    if count == 0 || (step >= count && !on_card) {
        return reduce(source, into, count);
    }
    let Some(layout) = Datatype::of(datatype) else { return ERROR };
    let extent = layout.extent;
    let Some(engine) = engine.filter(|_| !on_card || layout.is_apart) else {
        // Not staged: there is no card, or elements overlap. A user's function may then get Gaudi addresses.
        for first in (0..count).step_by(step) {
            let at = first.wrapping_mul(extent);
            let from = if source == IN_PLACE { source } else { source.wrapping_byte_add(at) };
            match reduce(from, into.wrapping_byte_add(at), step.min(count - first)) {
                SUCCESS => {}
                code => return code,
            }
        }
        return SUCCESS;
    };
    let in_place = source == IN_PLACE;
    let side =
        |at, enters, leaves| Side { at, item: extent, len: layout.span(count), enters, leaves };
    let sides = [
        side(source.cast_mut(), !in_place, false),
        side(into, in_place || keeps || layout.has_gaps(), true),
    ];
    // SAFETY: the caller's promise.
    unsafe { on_host(engine, sides, layout.begin, (count, step), reduce) }
}

/// Whether `mine` is true on any rank, or Open MPI's error.
///
/// # Safety
/// The communicator is that of our module.
unsafe fn any_rank(mine: bool, communicator: At, module: In) -> Result<bool, c_int> {
    let (mine, mut any) = (u8::from(mine), 0_u8);
    let (from, to) = ((&raw const mine).cast(), (&raw mut any).cast());
    // SAFETY: the caller's promise; one byte each.
    let said = unsafe {
        let (function, of) = theirs::<Reduces>(module, ALLREDUCE);
        function(from, to, 1, open_mpi::byte(), open_mpi::bitwise_or(), communicator, of)
    };
    if said == SUCCESS { Ok(any != 0) } else { Err(said) }
}

/// Reduce_scatter, and Reduce_scatter_block with a count instead of counts.
unsafe extern "C" fn scatters<const SLOT: usize>(
    source: In,
    target: At,
    counts: usize,
    datatype: At,
    op: At,
    communicator: At,
    module: In,
) -> c_int {
    // SAFETY: as for `reduces`; counts are an array with one for each rank.
    unsafe {
        let (function, of) = theirs::<Reduces>(module, SLOT);
        let of_all_and_own = || {
            let (ranks, own) = (open_mpi::size(communicator), open_mpi::rank(communicator));
            let count = |rank| match SLOT {
                REDUCE_SCATTER => open_mpi::count_of(counts, rank),
                _ => counted(counts),
            };
            ((0..ranks).map(count).sum(), count(own as usize))
        };
        scattered(source, target, of_all_and_own, datatype, op, |source, target| {
            function(source, target, counts, datatype, op, communicator, of)
        })
    }
}

/// Calls `reduce` with host memory where that is better. `counts`: of all elements, and of those of this rank.
///
/// # Safety
/// The operands are valid.
unsafe fn scattered(
    source: In,
    target: At,
    counts: impl Fn() -> (usize, usize),
    datatype: At,
    op: At,
    reduce: impl Fn(In, At) -> c_int,
) -> c_int {
    let engine = engine::get().filter(|engine| engine.owns(source) || engine.owns(target));
    let Some(engine) = engine else { return reduce(source, target) };
    let (all, own) = counts();
    let Some(layout) = Datatype::of(datatype) else { return ERROR };
    // SAFETY: by Open MPI's header an operation.
    let of_the_user = unsafe { !(*op.cast::<Op<TYPES_5>>()).is_predefined() };
    if all == 0 || !layout.is_apart || !(of_the_user || all * layout.size <= SHORT) {
        return reduce(source, target);
    }
    let in_place = source == IN_PLACE;
    let written = if in_place { all } else { own };
    let sides = [
        Side::whole(source.cast_mut(), layout.span(all), !in_place, false),
        Side::whole(target, layout.span(written), in_place || layout.has_gaps(), true),
    ];
    let reduce = |source, target, _| reduce(source, target);
    // SAFETY: the caller's promise.
    unsafe { on_host(engine, sides, layout.begin, (1, 1), reduce) }
}

unsafe extern "C" fn alltoall(
    source: In,
    source_count: usize,
    source_type: At,
    target: At,
    target_count: usize,
    target_type: At,
    communicator: At,
    module: In,
) -> c_int {
    // SAFETY: as for `reduces`.
    unsafe {
        let (function, of) = theirs::<Exchange>(module, ALLTOALL);
        let exchange = |source, target, _| {
            function(
                source,
                source_count,
                source_type,
                target,
                target_count,
                target_type,
                communicator,
                of,
            )
        };
        let engine = engine::get().filter(|engine| engine.owns(source) || engine.owns(target));
        let Some(engine) = engine else { return exchange(source, target, 1) };
        let Some(to) = Datatype::of(target_type) else { return ERROR };
        let in_place = source == IN_PLACE;
        let Some(from) = (if in_place { Some(to) } else { Datatype::of(source_type) }) else {
            return ERROR;
        };
        let ranks = open_mpi::size(communicator);
        let (sent, taken) = (ranks * counted(source_count), ranks * counted(target_count));
        if from.has_gaps() || to.has_gaps() || taken == 0 || taken * to.size > SHORT_EXCHANGE {
            return exchange(source, target, 1);
        }
        let sides = [
            Side::whole(source.cast_mut(), from.span(sent), !in_place, false),
            Side::whole(target, to.span(taken), in_place, true),
        ];
        on_host(engine, sides, 0, (1, 1), exchange)
    }
}

/// Calls `work` with source and target in host memory and a number of items, until all items are done.
/// MPI's addresses are `begin` bytes before the data.
///
/// # Safety
/// Both sides are valid for so many items; a source may be [`IN_PLACE`].
unsafe fn on_host(
    engine: &'static Engine,
    sides: [Side; 2],
    begin: usize,
    (items, step): (usize, usize),
    work: impl Fn(In, At, usize) -> c_int,
) -> c_int {
    let in_place = sides[0].at.cast_const() == IN_PLACE;
    let sides = sides.map(|side| Side { at: side.at.wrapping_byte_add(begin), ..side });
    let call = |[from, to]: [At; 2], _, count| {
        let from = if in_place { IN_PLACE } else { from.wrapping_byte_sub(begin).cast_const() };
        Failure::of(work(from, to.wrapping_byte_sub(begin), count))
    };
    // SAFETY: the caller's promise.
    Failure::code(unsafe { staged(engine, sides, items, step, call) })
}

/// Why a collective failed.
enum Failure {
    /// In Open MPI, with this code.
    Theirs(c_int),
    /// In a copy.
    Copy(String),
}

impl From<String> for Failure {
    fn from(why: String) -> Self {
        Self::Copy(why)
    }
}

impl Failure {
    fn of(code: c_int) -> Result<(), Self> {
        if code == SUCCESS { Ok(()) } else { Err(Self::Theirs(code)) }
    }

    /// The code that is returned to Open MPI.
    fn code(result: Result<(), Self>) -> c_int {
        match result {
            Ok(()) => SUCCESS,
            Err(Self::Theirs(code)) => code,
            Err(Self::Copy(why)) => {
                say(format_args!("{why}"));
                ERROR
            }
        }
    }
}
