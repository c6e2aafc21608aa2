//! What the drivers and helpers of rdma-core ask of its libibverbs besides verbs.
//!
//! Programs such as perftest are linked to `libmlx5` and `libefa`, which the loader refuses without
//! these names. There is no hardware for such a driver here and no kernel device behind it, so it is
//! never asked for anything and never calls them; if it did, it would get `EOPNOTSUPP`.

use core::ffi::{c_int, c_void};

/// A driver registers itself when it is loaded. It is not used.
#[unsafe(no_mangle)]
pub extern "C" fn verbs_register_driver_34(_driver: *const c_void) {}

/// A variable of rdma-core.
#[unsafe(no_mangle)]
pub static verbs_allow_disassociate_destroy: bool = false;

/// Nothing is pinned, so nothing needs to be kept from a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dontfork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

/// Nothing is pinned, so nothing needs to be given back to a forked child.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_dofork_range(_base: *mut c_void, _size: usize) -> c_int {
    0
}

macro_rules! never_called {
    ($($name:ident)*) => {$(
        /// Refused.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            super::set_errno(rustix::io::Errno::OPNOTSUPP);
            rustix::io::Errno::OPNOTSUPP.raw_os_error()
        }
    )*};
}

never_called! {
    ibv_copy_ah_attr_from_kern ibv_copy_path_rec_from_kern ibv_copy_qp_attr_from_kern __verbs_log
    _verbs_init_and_alloc_context execute_ioctl ibv_cmd_advise_mr ibv_cmd_alloc_dm ibv_cmd_alloc_mw
    ibv_cmd_alloc_pd ibv_cmd_attach_mcast ibv_cmd_close_xrcd ibv_cmd_create_ah
    ibv_cmd_create_counters ibv_cmd_create_cq_ex ibv_cmd_create_flow ibv_cmd_create_flow_action_esp
    ibv_cmd_create_qp_ex ibv_cmd_create_qp_ex2 ibv_cmd_create_rwq_ind_table ibv_cmd_create_srq
    ibv_cmd_create_srq_ex ibv_cmd_create_wq ibv_cmd_dealloc_mw ibv_cmd_dealloc_pd ibv_cmd_dereg_mr
    ibv_cmd_destroy_ah ibv_cmd_destroy_counters ibv_cmd_destroy_cq ibv_cmd_destroy_flow
    ibv_cmd_destroy_flow_action ibv_cmd_destroy_qp ibv_cmd_destroy_rwq_ind_table ibv_cmd_destroy_srq
    ibv_cmd_destroy_wq ibv_cmd_detach_mcast ibv_cmd_free_dm ibv_cmd_get_context ibv_cmd_modify_cq
    ibv_cmd_modify_flow_action_esp ibv_cmd_modify_qp ibv_cmd_modify_qp_ex ibv_cmd_modify_srq
    ibv_cmd_modify_wq ibv_cmd_open_qp ibv_cmd_open_xrcd ibv_cmd_query_context
    ibv_cmd_query_device_any ibv_cmd_query_mr ibv_cmd_query_port ibv_cmd_query_qp ibv_cmd_query_srq
    ibv_cmd_read_counters ibv_cmd_reg_dm_mr ibv_cmd_reg_dmabuf_mr ibv_cmd_reg_mr ibv_cmd_rereg_mr
    ibv_cmd_resize_cq verbs_init_cq verbs_open_device verbs_set_ops verbs_uninit_context
}
