//! Structures of Open MPI 5.0 and 6.0: of its component architecture (2.1), of `accelerator` and `op` (both 1.0)
//! and of `coll` (2.4 and 3.0).
//!
//! Builds for debugging Open MPI itself (`--enable-debug`) have more members in each object; they are refused by the sizes of its
//! classes.

use core::cell::UnsafeCell;
use core::ffi::{c_char, c_int, c_void};
use core::mem::offset_of;

/// `OPAL_SUCCESS`, `OMPI_SUCCESS`.
pub(crate) const SUCCESS: c_int = 0;
/// `OPAL_ERROR`.
pub(crate) const ERROR: c_int = -1;
/// `OPAL_ERR_OUT_OF_RESOURCE`.
pub(crate) const ERR_OUT_OF_RESOURCE: c_int = -2;
/// `OPAL_ERR_NOT_SUPPORTED`.
pub(crate) const ERR_NOT_SUPPORTED: c_int = -8;
/// `MCA_ACCELERATOR_NO_DEVICE_ID`.
pub(crate) const NO_DEVICE: c_int = -1;

/// Functions that are not provided.
pub(crate) type Unused = Option<unsafe extern "C" fn()>;

/// `mca_base_component_t`: names and versions of a component.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Description {
    version: [c_int; 3],
    project: [c_char; 16],
    project_version: [c_int; 3],
    framework: [c_char; 32],
    framework_version: [c_int; 3],
    name: [c_char; 64],
    name_version: [c_int; 3],
    functions: [Unused; 4],
    flags: i32,
    reserved: [c_char; 28],
    /// `mca_base_component_data_t`.
    data: [u32; 9],
}

impl Description {
    /// Makes Open MPI call `open` first, before it reads versions.
    pub(crate) const fn opened_by(mut self, open: extern "C" fn() -> c_int) -> Self {
        // SAFETY: Open MPI knows that it takes nothing and returns an int.
        self.functions[0] = Some(unsafe {
            core::mem::transmute::<extern "C" fn() -> c_int, unsafe extern "C" fn()>(open)
        });
        self
    }

    pub(crate) fn set_framework_version(&mut self, version: [c_int; 3]) {
        self.framework_version = version;
    }

    /// The component `gaudi` of a framework.
    pub(crate) const fn new(project: &str, framework: &str, version: [c_int; 3]) -> Self {
        Self {
            version: [2, 1, 0],
            project: text(project),
            project_version: [5, 0, 0],
            framework: text(framework),
            framework_version: version,
            name: text("gaudi"),
            name_version: [0; 3],
            functions: [None; 4],
            flags: 0,
            reserved: [0; 28],
            data: [0; 9],
        }
    }
}

/// A text in an array, with zeros after it.
const fn text<const N: usize>(from: &str) -> [c_char; N] {
    let (from, mut to) = (from.as_bytes(), [0; N]);
    assert!(from.len() < N);
    let mut at = 0;
    while at < from.len() {
        to[at] = from[at] as c_char;
        at += 1;
    }
    to
}

/// A component as Open MPI finds it: it may write to it.
#[repr(transparent)]
#[derive(Debug)]
pub(crate) struct Exported<T>(UnsafeCell<T>);

// SAFETY: only Open MPI accesses it, under rules of its own; we write to it only while Open MPI opens the component.
unsafe impl<T> Sync for Exported<T> {}

impl<T> Exported<T> {
    /// For a static.
    pub(crate) const fn new(component: T) -> Self {
        Self(UnsafeCell::new(component))
    }

    /// To be written while Open MPI waits.
    pub(crate) const fn get(&self) -> *mut T {
        self.0.get()
    }
}

/// `opal_accelerator_base_component_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct AcceleratorComponent {
    /// Names and versions.
    pub(crate) description: Description,
    /// A module; null: there is no accelerator.
    pub(crate) init: extern "C" fn() -> *const c_void,
    /// Called at the end.
    pub(crate) finalize: extern "C" fn(*const c_void),
}

/// `opal_accelerator_pci_attr_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct PciAttr {
    /// Segment.
    pub(crate) domain: u16,
    /// Bus.
    pub(crate) bus: u8,
    /// Device.
    pub(crate) device: u8,
    /// Function.
    pub(crate) function: u8,
}

/// `ompi_memkind_t`, of 6.0.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Memkind {
    /// Name, from `malloc`.
    pub(crate) name: *mut c_char,
    /// Whether the name alone is a kind.
    pub(crate) no_restrictors: bool,
    /// How many follow.
    pub(crate) num_restrictors: c_int,
}

/// From two buffers: source, target, how many, their type.
pub(crate) type Reduce =
    unsafe extern "C" fn(*const c_void, *mut c_void, *mut c_int, *mut *mut c_void, *mut c_void);
/// From three buffers: two sources, target.
pub(crate) type Reduce3 = unsafe extern "C" fn(
    *const c_void,
    *const c_void,
    *mut c_void,
    *mut c_int,
    *mut *mut c_void,
    *mut c_void,
);

/// `OMPI_OP_BASE_TYPE_MAX` of 5.0: how many types there are functions for.
pub(crate) const TYPES_5: usize = 43;
/// `OMPI_OP_BASE_TYPE_MAX` of Debian's 6.0.0~rc2, which has `C_FLOAT128_COMPLEX` before the pairs.
pub(crate) const TYPES_6: usize = 44;

/// `opal_object_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Object {
    /// `opal_class_t`.
    pub(crate) class: *const c_void,
    /// Destroyed at 0.
    pub(crate) references: core::sync::atomic::AtomicI32,
}

/// `ompi_op_base_module_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct OpModule<const TYPES: usize> {
    /// Its class and references.
    pub(crate) object: Object,
    /// Called before its functions are taken.
    pub(crate) enable: Option<unsafe extern "C" fn(*mut Self, *mut Op<TYPES>) -> c_int>,
    /// The operation.
    pub(crate) op: *mut Op<TYPES>,
    /// By type.
    pub(crate) two: [Option<Reduce>; TYPES],
    /// By type.
    pub(crate) three: [Option<Reduce3>; TYPES],
}

/// `ompi_op_base_op_fns_t`: what an operation does, by type.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Functions<F, const TYPES: usize> {
    /// By type; none where the operation is not defined.
    pub(crate) functions: [Option<F>; TYPES],
    /// The module that each function belongs to.
    pub(crate) modules: [*mut OpModule<TYPES>; TYPES],
}

/// `ompi_op_t`, of a predefined operation.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct Op<const TYPES: usize> {
    object: Object,
    name: [c_char; 64],
    kind: c_int,
    flags: u32,
    index: c_int,
    /// From two buffers.
    pub(crate) two: Functions<Reduce, TYPES>,
    /// From three buffers.
    pub(crate) three: Functions<Reduce3, TYPES>,
}

/// `ompi_op_base_component_t`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct OpComponent {
    /// Names and versions.
    pub(crate) description: Description,
    /// Whether it can work at all.
    pub(crate) init_query: extern "C" fn(bool, bool) -> c_int,
    /// A module for an operation, and its priority.
    pub(crate) op_query: unsafe extern "C" fn(*mut c_void, *mut c_int) -> *mut c_void,
}

impl<const TYPES: usize> Op<TYPES> {
    /// Whether it is not the user's (`OMPI_OP_FLAGS_INTRINSIC`).
    pub(crate) fn is_predefined(&self) -> bool {
        self.flags & 1 != 0
    }
}

/// `mca_coll_base_component_2_4_0_t` of 5.0, `_3_0_0_t` of 6.0.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CollComponent {
    /// Names and versions.
    pub(crate) description: Description,
    /// Whether it can work at all.
    pub(crate) init_query: extern "C" fn(bool, bool) -> c_int,
    /// A module for a communicator, and its priority.
    pub(crate) comm_query: unsafe extern "C" fn(*mut c_void, *mut c_int) -> *mut c_void,
}

/// With the communicator that it is for.
pub(crate) type CollEnable = unsafe extern "C" fn(*mut CollModule, *mut c_void) -> c_int;

/// `mca_coll_base_module_t`. 5.0 has one member less at the end.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct CollModule {
    object: Object,
    /// Called before its functions are taken.
    pub(crate) enable: Option<CollEnable>,
    /// Functions of blocking collectives.
    pub(crate) blocking: [*const c_void; 17],
    others: [*const c_void; 51],
    /// Called at the end of a communicator.
    pub(crate) disable: Option<CollEnable>,
    /// The function of `MPI_Reduce_local`.
    pub(crate) reduce_local: *const c_void,
    rest: [*const c_void; 2],
}

/// A collective of a communicator: the function, and whose it is.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CollPair {
    /// Null where there is none.
    pub(crate) function: *const c_void,
    /// Passed to it.
    pub(crate) module: *const c_void,
}

/// The beginning of `mca_coll_base_comm_coll_t`: blocking collectives come first, in the order of a module.
pub(crate) type CollTable = [CollPair; COLL_REDUCE_LOCAL + 1];
/// Where `MPI_Reduce_local` is in it.
pub(crate) const COLL_REDUCE_LOCAL: usize = 66;
/// Where `ompi_communicator_t` has the address of the table.
pub(crate) const COLL_TABLE: usize = 344;
/// Bytes of a communicator, and of a module, of 5.0.7 and 6.0.0~rc2 as Debian builds them.
pub(crate) const COMMUNICATORS: [(usize, usize); 2] = [(384, 592), (392, 600)];

/// As a C compiler lays them out with the headers of Open MPI 5.0.7 on x86-64.
const _: () = {
    assert!(offset_of!(Description, name) == 84);
    assert!(offset_of!(Description, functions) == 160);
    assert!(offset_of!(Description, data) == 224);
    assert!(offset_of!(AcceleratorComponent, init) == 264);
    assert!(size_of::<AcceleratorComponent>() == 280);
    assert!(offset_of!(OpComponent, init_query) == 264);
    assert!(size_of::<OpComponent>() == 280);
    assert!(offset_of!(CollComponent, init_query) == 264);
    assert!(size_of::<CollModule>() == 600);
    assert!(offset_of!(CollModule, blocking) == 24);
    assert!(offset_of!(CollModule, reduce_local) == 16 + 70 * 8);
    assert!(size_of::<Object>() == 16);
    assert!(offset_of!(OpModule<TYPES_5>, enable) == 16);
    assert!(offset_of!(OpModule<TYPES_5>, two) == 32);
    assert!(size_of::<OpModule<TYPES_5>>() == 720);
    assert!(offset_of!(Op<TYPES_5>, two) == 96);
    assert!(offset_of!(Op<TYPES_5>, three) == 784);
    assert!(size_of::<Op<TYPES_5>>() == 1472);
};
