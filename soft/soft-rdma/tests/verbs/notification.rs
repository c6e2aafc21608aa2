use soft_rdma::abi::*;
use soft_rdma::api::*;

use crate::harness::*;

#[test]
fn a_program_asleep_on_the_channel_is_woken_by_a_completion() {
    let device = Device::open();
    // SAFETY: objects of the library, destroyed in the right order.
    unsafe {
        let channel = ibv_create_comp_channel(device.context);
        let mut tag = 5u32;
        let cq = ibv_create_cq(device.context, 10, (&raw mut tag).cast(), channel, 0);
        let (a, b) = (device.rc(), device.qp_with(IBV_QPT_RC, |init| init.recv_cq = cq));
        a.connect(&b, |_| ());
        b.connect(&a, |_| ());
        assert_eq!(b.receive(1, &[]), 0);
        assert_eq!((*device.context).ops.req_notify_cq.expect("set")(cq, 0), 0);
        Send::new(IBV_WR_SEND, 2, &[]).posted(&a);
        let (mut from, mut context) = (core::ptr::null_mut(), core::ptr::null_mut());
        // Blocks: no thread polls, so the engine's thread has to do it all.
        assert_eq!(ibv_get_cq_event(channel, &raw mut from, &raw mut context), 0);
        assert_eq!((from, context), (cq, (&raw mut tag).cast()));
        assert_eq!(poll_once(cq).map(|wc| wc.wr_id), Some(1));
        set_nonblocking((*channel).fd);
        assert_eq!(ibv_get_cq_event(channel, &raw mut from, &raw mut context), -1);
        assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
        ibv_ack_cq_events(cq, 1);
        assert_eq!(ibv_destroy_comp_channel(channel), libc::EBUSY);
        b.destroy();
        assert_eq!(ibv_destroy_cq(cq), 0);
        assert_eq!(ibv_destroy_comp_channel(channel), 0);
    }
}

#[test]
fn a_queue_pair_with_a_shared_queue_says_when_it_uses_it_no_more() {
    let device = Device::open();
    // SAFETY: objects of the library, destroyed in the right order.
    unsafe {
        let mut init = ibv_srq_init_attr {
            srq_context: core::ptr::null_mut(),
            attr: ibv_srq_attr { max_wr: 8, max_sge: 1, srq_limit: 0 },
        };
        let srq = ibv_create_srq(device.pd, &raw mut init);
        assert!(!srq.is_null());
        let (a, b) = (device.rc(), device.qp_with(IBV_QPT_RC, |init| init.srq = srq));
        a.connect(&b, |_| ());
        b.connect(&a, |_| ());
        let to = device.buffer(64, |_| 0);
        let mut sge = to.all();
        let mut wr = ibv_recv_wr {
            wr_id: 4,
            next: core::ptr::null_mut(),
            sg_list: &raw mut sge,
            num_sge: 1,
        };
        let mut bad = core::ptr::null_mut();
        assert_eq!(
            (*device.context).ops.post_srq_recv.expect("set")(srq, &raw mut wr, &raw mut bad),
            0
        );
        assert_eq!(b.receive(1, &[]), libc::EINVAL);
        // Asked for once, told once: with the first buffer that is taken.
        let mut limit = ibv_srq_attr { srq_limit: 1, ..init.attr };
        assert_eq!(ibv_modify_srq(srq, &raw mut limit, IBV_SRQ_LIMIT), 0);
        let from = device.buffer(64, |at| at as u8);
        Send::new(IBV_WR_SEND, 1, &[from.all()]).flags(0).posted(&a);
        let wc = device.wait();
        assert_eq!((wc.wr_id, wc.qp_num, to.read()), (4, b.number(), from.read()));
        let mut event = next_event(&device).expect("the limit");
        let expected = (IBV_EVENT_SRQ_LIMIT_REACHED, srq as usize);
        assert_eq!((event.event_type, event.element), expected);
        ibv_ack_async_event(&raw mut event);
        assert_eq!(ibv_query_srq(srq, &raw mut limit), 0);
        assert_eq!(limit.srq_limit, 0);
        assert!(next_event(&device).is_none());
        b.enter(IBV_QPS_ERR);
        let mut event = next_event(&device).expect("an event");
        assert_eq!(
            (event.event_type, event.element),
            (IBV_EVENT_QP_LAST_WQE_REACHED, b.qp as usize)
        );
        b.enter(IBV_QPS_ERR);
        assert!(next_event(&device).is_none());
        assert_eq!(ibv_destroy_srq(srq), libc::EBUSY);
        ibv_ack_async_event(&raw mut event);
        b.destroy();
        assert_eq!(ibv_destroy_srq(srq), 0);
    }
}

#[test]
fn a_refused_access_raises_an_event_at_the_responder() {
    let device = Device::open();
    let (a, b) = device.pair();
    let local = device.buffer(8, |_| 0);
    Send::new(IBV_WR_RDMA_WRITE, 1, &[local.all()]).remote(0, 0xff).posted(&a);
    assert_eq!(device.wait().status, IBV_WC_REM_ACCESS_ERR);
    let mut event = next_event(&device).expect("an event");
    assert_eq!((event.event_type, event.element), (IBV_EVENT_QP_ACCESS_ERR, b.qp as usize));
    // SAFETY: the event just read.
    unsafe { ibv_ack_async_event(&raw mut event) };
    b.destroy();
}

/// Context switches of the engine's thread; `None` while it has not begun, and so has not its name.
fn switches() -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("tasks");
    let engine = tasks.flatten().find(|task| {
        std::fs::read_to_string(task.path().join("comm"))
            .is_ok_and(|name| name.trim() == "soft-rdma")
    });
    let status = std::fs::read_to_string(engine?.path().join("status")).expect("status");
    let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
    Some(lines.filter_map(|line| line.split_whitespace().last()?.parse::<u64>().ok()).sum())
}

#[test]
fn the_engine_sleeps_while_nothing_happens() {
    let device = Device::open();
    let (a, b) = device.pair();
    assert_eq!(b.receive(1, &[]), 0);
    Send::new(IBV_WR_SEND, 2, &[]).posted(&a);
    device.succeed(2);
    // It stands back for a moment after the last poll; other tests of this process may be busy.
    let quiet = (0..600).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let before = switches();
        std::thread::sleep(std::time::Duration::from_millis(100));
        before.is_some() && switches() == before
    });
    assert!(quiet, "the thread runs with nothing to do");
}
