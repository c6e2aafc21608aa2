//! Forked children: they do not keep a dead parent's connections open, and have no use of its
//! objects.

use rustix::process::{Pid, Signal, kill_process};
use soft_rdma::abi::*;
use soft_rdma::api::{ibv_close_device, ibv_get_async_event};

use crate::harness::*;
use crate::processes::*;

/// The other side: offers memory, and forks a child that stays.
fn peer() {
    let device = Device::open();
    let qp = device.rc();
    let memory = device.buffer(64, |at| at as u8);
    println!("peer:{} {} {} {}", qp.number(), device.lid(), memory.addr(), memory.key());
    let other = read_line();
    qp.connect_to(other[1] as u16, other[0] as u32, |_| ());
    println!("peer:0");
    read_line();
    // SAFETY: the child only makes system calls.
    let child = unsafe { libc::fork() };
    if child == 0 {
        loop {
            // SAFETY: waits for a signal.
            unsafe { libc::pause() };
        }
    }
    println!("peer:{child}");
    read_line();
}

/// A process that is ended with the test, whatever becomes of it.
struct Orphan(Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

fn lose_the_parent(test: &str, node: u16) {
    if is_peer() {
        return peer();
    }
    let device = Device::open();
    let mut other = Peer::start(test, node);
    let received = other.receive();
    let qp = device.rc();
    qp.connect_to(received[1] as u16, received[0] as u32, |_| ());
    other.send(&[u64::from(qp.number()), u64::from(device.lid())]);
    other.receive();
    let local = device.buffer(64, |_| 0);
    let read = || {
        let read = Send::new(IBV_WR_RDMA_READ, 1, &[local.all()]);
        read.remote(received[2], received[3] as u32).posted(&qp);
        device.wait().status
    };
    assert_eq!(read(), IBV_WC_SUCCESS);
    other.send(&[]);
    let _orphan = Orphan(Pid::from_raw(other.receive()[0] as i32).expect("a child"));
    other.child.kill().expect("it runs");
    other.child.wait().expect("it ends");
    assert_eq!(read(), IBV_WC_RETRY_EXC_ERR);
}

#[test]
fn a_killed_process_whose_child_lives_ends_in_retry_exceeded() {
    lose_the_parent("forked::a_killed_process_whose_child_lives_ends_in_retry_exceeded", 1);
}

#[test]
fn a_killed_process_of_another_host_whose_child_lives_ends_in_retry_exceeded() {
    let test = "forked::a_killed_process_of_another_host_whose_child_lives_ends_in_retry_exceeded";
    lose_the_parent(test, 2);
}

#[test]
fn a_child_is_refused_the_objects_of_its_parent() {
    let device = Device::open();
    let (a, b) = device.pair();
    // SAFETY: the child makes calls that are refused before they take a lock, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let mut event = ibv_async_event { element: 0, event_type: -1 };
        // SAFETY: the parent's context, which stays.
        let no_event = unsafe { ibv_get_async_event(device.context, &raw mut event) } == -1
            && last_error() == libc::ENODEV;
        // SAFETY: as above.
        let not_closed = unsafe { ibv_close_device(device.context) } == -1;
        let refused = no_event
            && not_closed
            && Send::new(IBV_WR_SEND, 1, &[]).post(&a) == libc::ENODEV
            && b.receive(1, &[]) == libc::ENODEV
            && b.modify(&ibv_qp_attr::default(), 0) == libc::ENODEV;
        // SAFETY: without the exit handlers of the test.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let child = Pid::from_raw(child).expect("a child");
    let ended = rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty());
    let status = ended.expect("our child").expect("it has ended").1;
    assert_eq!(status.exit_status(), Some(0));
    // The parent's work on.
    assert_eq!(b.receive(2, &[]), 0);
    Send::new(IBV_WR_SEND, 3, &[]).posted(&a);
    device.succeed(2);
}
