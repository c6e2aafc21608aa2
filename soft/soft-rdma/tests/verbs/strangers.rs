//! Connections of processes that do not know the secret.

use std::net::{SocketAddr, TcpStream};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use soft_rdma::api::{ibv_create_comp_channel, ibv_destroy_comp_channel};

use crate::harness::*;
use crate::processes::*;

/// Connects often and says nothing.
fn attack() {
    let [address @ .., port] = read_line().try_into().map(|four: [u64; 5]| four).expect("five");
    let address = SocketAddr::from((address.map(|byte| byte as u8), port as u16));
    let streams: Vec<_> = (0..300).map_while(|_| TcpStream::connect(address).ok()).collect();
    assert_eq!(streams.len(), 300);
    // As many as are admitted at a time have been accepted when this number has a challenge.
    let challenged = || {
        let mut fds: Vec<_> = streams.iter().map(|it| PollFd::new(it, PollFlags::IN)).collect();
        poll(&mut fds, None).expect("they are open")
    };
    while challenged() < 8 {}
    println!("peer:0");
    read_line();
}

#[test]
fn silent_connections_do_not_use_up_the_descriptors_of_a_process() {
    if is_peer() {
        return attack();
    }
    let test = "strangers::silent_connections_do_not_use_up_the_descriptors_of_a_process";
    if rerun(test, &[]) {
        return;
    }
    let device = Device::open();
    let qp = device.rc();
    let mut other = Peer::start(test, 2);
    let limit = Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).expect("less is allowed");
    let nodes = std::env::var("SOFT_RDMA_NODES").expect("set");
    let own = nodes.split(['=', ',']).nth(1).expect("our address");
    let SocketAddr::V4(own) = own.parse().expect("an address") else { panic!("of IPv4") };
    let port = u64::from(own.port()) + u64::from(qp.number() >> 14);
    let [a, b, c, d] = own.ip().octets().map(u64::from);
    other.send(&[a, b, c, d, port]);
    other.receive();
    // SAFETY: the context is open; channels are destroyed once.
    unsafe {
        let channels: Vec<_> = (0..50).map(|_| ibv_create_comp_channel(device.context)).collect();
        assert!(channels.iter().all(|channel| !channel.is_null()), "no descriptor is left");
        channels.iter().for_each(|channel| assert_eq!(ibv_destroy_comp_channel(*channel), 0));
    }
}
