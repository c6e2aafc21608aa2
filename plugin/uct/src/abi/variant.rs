//! What versions of UCX do differently, other than by growing at the tail.
//!
//! | | snapshots before 1.21 | 1.21.0 | 1.22, 1.23 |
//! |---|---|---|---|
//! | first internal operation of an interface | `iface_query_v2` | `iface_estimate_perf` | `iface_query_v2` |
//! | `iface_mem_element_pack`, before `ep_query` | yes | | |
//! | memory has flags (registrable or not) | | | yes |
//!
//! vllm-gaudi builds such a snapshot. Version numbers do not distinguish these, but the symbols that
//! libuct exports do. The [probe](crate::probe_library) then checks the slots.

use core::ffi::CStr;

use super::internal_op;

/// How a libuct differs from 1.22.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// The internal operations begin with `iface_query_v2`.
    pub iface_query_v2: bool,
    /// `iface_mem_element_pack` is one of the internal operations.
    pub iface_mem_element_pack: bool,
    /// Memory attributes, the memory-type cache and memory events have `mem_flags`, and events the device.
    pub memory_flags: bool,
}

impl Variant {
    /// Derived from the functions that a libuct exports.
    pub(crate) fn of(exports: impl Fn(&CStr) -> bool) -> Variant {
        Variant {
            iface_query_v2: exports(c"uct_iface_query_v2"),
            iface_mem_element_pack: exports(c"uct_iface_mem_element_pack"),
            memory_flags: exports(c"uct_md_mem_query_v2"),
        }
    }

    /// The slot of an [`internal_op`], if there is one.
    pub fn internal(self, operation: usize) -> Option<usize> {
        let before =
            usize::from(self.iface_mem_element_pack && operation > internal_op::IFACE_VFS_REFRESH);
        (operation + before).checked_sub(usize::from(!self.iface_query_v2))
    }
}
