use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::harness::*;

#[test]
fn device_port_and_tables_are_described() {
    let device = Device::open();
    // SAFETY: structures of ours; the context is open.
    unsafe {
        let mut count = 0;
        let list = ibv_get_device_list(&raw mut count);
        assert_eq!(count, 1);
        let name = core::ffi::CStr::from_ptr(ibv_get_device_name(*list));
        assert_eq!(name, c"softrdma0");
        let guid = ibv_get_device_guid(*list);
        assert_eq!(ibv_get_device_index(*list), -1, "the kernel does not know it");
        ibv_free_device_list(list);
        let mut attr: ibv_device_attr = core::mem::zeroed();
        assert_eq!(ibv_query_device(device.context, &raw mut attr), 0);
        assert_eq!((attr.node_guid, attr.phys_port_cnt, attr.vendor_id), (guid, 1, 0xff_5352));
        let mut port: ibv_port_attr = core::mem::zeroed();
        port.port_cap_flags2 = 0x5555;
        assert_eq!(ibv_query_port(device.context, 2, &raw mut port), libc::EINVAL);
        assert_eq!(ibv_query_port(device.context, 1, &raw mut port), 0);
        assert_eq!((port.state, port.link_layer), (IBV_PORT_ACTIVE, IBV_LINK_LAYER_INFINIBAND));
        // Callers may have the old, shorter structure.
        assert_eq!(port.port_cap_flags2, 0x5555);
        let mut gid = [0; 16];
        assert_eq!(ibv_query_gid(device.context, 1, 0, &raw mut gid), 0);
        assert_eq!(gid[8..], guid.to_ne_bytes());
        assert_eq!(ibv_query_gid(device.context, 1, 1, &raw mut gid), -1);
        let mut pkey = 0;
        assert_eq!(ibv_query_pkey(device.context, 1, 0, &raw mut pkey), 0);
        assert_eq!(pkey, 0xffff);
        assert_eq!(ibv_query_pkey(device.context, 1, 1, &raw mut pkey), -1);
    }
}

#[test]
fn capacities_are_reported_and_limits_kept() {
    let device = Device::open();
    let qp = device.qp_with(IBV_QPT_RC, |init| {
        init.cap = ibv_qp_cap { max_send_wr: 3, max_recv_wr: 2, ..Default::default() };
    });
    qp.connect_to(device.lid(), qp.number(), |_| ());
    assert_eq!(qp.receive(1, &[]), 0);
    assert_eq!(qp.receive(1, &[]), 0);
    assert_eq!(qp.receive(1, &[]), libc::ENOMEM);
    let mut attr = ibv_qp_attr::default();
    // SAFETY: the queue pair is live; all zero is a value.
    unsafe {
        let mut init: ibv_qp_init_attr = core::mem::zeroed();
        assert_eq!(ibv_query_qp(qp.qp, &raw mut attr, 0, &raw mut init), 0);
        assert_eq!((init.cap.max_send_wr, init.cap.max_send_sge), (3, 1));
        assert_eq!((attr.timeout, attr.dest_qp_num), (8, qp.number()));
    }
}

#[test]
fn a_queue_pair_connected_to_itself_works() {
    let device = Device::open();
    let qp = device.rc();
    qp.connect_to(device.lid(), qp.number(), |_| ());
    let (from, to) = (device.buffer(2000, |at| at as u8), device.buffer(2000, |_| 0));
    assert_eq!(qp.receive(1, &[to.all()]), 0);
    Send::new(IBV_WR_SEND, 2, &[from.all()]).posted(&qp);
    device.succeed(2);
    assert_eq!(to.read(), from.read());
}

#[test]
fn after_reset_a_queue_pair_can_be_connected_again() {
    let device = Device::open();
    let (a, b) = device.pair();
    Send::new(IBV_WR_SEND, 1, &[]).posted(&a);
    a.enter(IBV_QPS_RESET);
    b.enter(IBV_QPS_RESET);
    device.assert_quiet();
    a.connect(&b, |_| ());
    b.connect(&a, |_| ());
    assert_eq!(b.receive(2, &[]), 0);
    Send::new(IBV_WR_SEND, 3, &[]).posted(&a);
    assert_eq!(device.ends(2), [2, 3].map(|id| (id, IBV_WC_SUCCESS)));
}
