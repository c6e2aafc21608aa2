//! The C interface of `infiniband/verbs.h`: structures by hand, constants by name.
//!
//! `objects` are what a program holds pointers to, `attributes` what it fills in or asks for, `work`
//! what it posts and polls. Names and field names are those of the header, so that they can be
//! looked up there. Layouts are checked at compile time here, and against a real header by the
//! tests where one is installed.

#![expect(missing_docs, reason = "fields are documented by verbs.h")]
#![allow(non_camel_case_types)]

mod attributes;
mod objects;
mod work;

pub use attributes::*;
pub use objects::*;
pub use work::*;

macro_rules! layout {
    ($($type:ident: $size:literal { $($field:ident @ $at:literal),* $(,)? })*) => {
        $(
            const _: () = assert!(core::mem::size_of::<$type>() == $size);
            $(const _: () = assert!(core::mem::offset_of!($type, $field) == $at);)*
        )*
        /// Every structure with its size and offsets, for the comparison with a C compiler.
        pub const LAYOUTS: &[(&str, usize, &[(&str, usize)])] =
            &[$((stringify!($type), $size, &[$((stringify!($field), $at)),*])),*];
    };
}

layout! {
    ibv_device: 664 { node_type @ 16, transport_type @ 20, name @ 24, dev_name @ 88, dev_path @ 152, ibdev_path @ 408 }
    ibv_context: 328 { device @ 0, ops @ 8, cmd_fd @ 264, async_fd @ 268, num_comp_vectors @ 272, mutex @ 280, abi_compat @ 320 }
    ibv_context_ops: 256 { poll_cq @ 88, req_notify_cq @ 96, post_srq_recv @ 160, post_send @ 200, post_recv @ 208 }
    ibv_pd: 16 { context @ 0, handle @ 8 }
    ibv_mr: 48 { context @ 0, pd @ 8, addr @ 16, length @ 24, handle @ 32, lkey @ 36, rkey @ 40 }
    ibv_comp_channel: 16 { context @ 0, fd @ 8, refcnt @ 12 }
    ibv_cq: 128 { context @ 0, channel @ 8, cq_context @ 16, handle @ 24, cqe @ 28, mutex @ 32, cond @ 72, comp_events_completed @ 120, async_events_completed @ 124 }
    ibv_srq: 128 { context @ 0, srq_context @ 8, pd @ 16, handle @ 24, mutex @ 32, cond @ 72, events_completed @ 120 }
    ibv_qp: 160 { context @ 0, qp_context @ 8, pd @ 16, send_cq @ 24, recv_cq @ 32, srq @ 40, handle @ 48, qp_num @ 52, state @ 56, qp_type @ 60, mutex @ 64, cond @ 104, events_completed @ 152 }
    ibv_ah: 24 { context @ 0, pd @ 8, handle @ 16 }
    ibv_device_attr: 232 { fw_ver @ 0, node_guid @ 64, sys_image_guid @ 72, max_mr_size @ 80, page_size_cap @ 88, vendor_id @ 96, max_qp @ 108, device_cap_flags @ 116, max_sge @ 120, atomic_cap @ 164, max_srq @ 212, max_pkeys @ 224, local_ca_ack_delay @ 226, phys_port_cnt @ 227 }
    ibv_port_attr: 52 { state @ 0, max_mtu @ 4, active_mtu @ 8, gid_tbl_len @ 12, max_msg_sz @ 20, pkey_tbl_len @ 32, lid @ 34, sm_lid @ 36, active_width @ 43, active_speed @ 44, phys_state @ 45, link_layer @ 46, flags @ 47, port_cap_flags2 @ 48 }
    ibv_gid_entry: 32 { gid @ 0, gid_index @ 16, port_num @ 20, gid_type @ 24, ndev_ifindex @ 28 }
    ibv_global_route: 24 { dgid @ 0, flow_label @ 16, sgid_index @ 20, hop_limit @ 21, traffic_class @ 22 }
    ibv_ah_attr: 32 { grh @ 0, dlid @ 24, sl @ 26, src_path_bits @ 27, static_rate @ 28, is_global @ 29, port_num @ 30 }
    ibv_srq_attr: 12 { max_wr @ 0, max_sge @ 4, srq_limit @ 8 }
    ibv_srq_init_attr: 24 { srq_context @ 0, attr @ 8 }
    ibv_qp_cap: 20 { max_send_wr @ 0, max_inline_data @ 16 }
    ibv_qp_init_attr: 64 { qp_context @ 0, send_cq @ 8, recv_cq @ 16, srq @ 24, cap @ 32, qp_type @ 52, sq_sig_all @ 56 }
    ibv_qp_attr: 144 { qp_state @ 0, path_mtu @ 8, qkey @ 16, rq_psn @ 20, sq_psn @ 24, dest_qp_num @ 28, qp_access_flags @ 32, cap @ 36, ah_attr @ 56, alt_ah_attr @ 88, pkey_index @ 120, en_sqd_async_notify @ 124, max_rd_atomic @ 126, max_dest_rd_atomic @ 127, min_rnr_timer @ 128, port_num @ 129, timeout @ 130, retry_cnt @ 131, rnr_retry @ 132, rate_limit @ 136 }
    ibv_ece: 12 { vendor_id @ 0, options @ 4, comp_mask @ 8 }
    ibv_async_event: 16 { element @ 0, event_type @ 8 }
    ibv_sge: 16 { addr @ 0, length @ 8, lkey @ 12 }
    ibv_send_wr: 128 { wr_id @ 0, next @ 8, sg_list @ 16, num_sge @ 24, opcode @ 28, send_flags @ 32, imm_data @ 36, wr @ 40, qp_type @ 72 }
    ibv_recv_wr: 32 { wr_id @ 0, next @ 8, sg_list @ 16, num_sge @ 24 }
    ibv_wc: 48 { wr_id @ 0, status @ 8, opcode @ 12, vendor_err @ 16, byte_len @ 20, imm_data @ 24, qp_num @ 28, src_qp @ 32, wc_flags @ 36, pkey_index @ 40, slid @ 42, sl @ 44, dlid_path_bits @ 45 }
}
