//! Memory between processes on the software Gaudi: the whole path, both ways of handing over, and
//! what becomes of keys that are no good any more.

mod machine;
mod peer;

use gaudi::{Relation, RemoteKey, Side, runtime};
use machine::{alone, assert_same, open, pattern, read, write};
use peer::{Peer, Set, copy, hash};

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

fn stat(counter: &str) -> u64 {
    gaudi::stats::read(std::process::id()).unwrap().get(counter).unwrap()
}

#[test]
fn a_peers_memory_is_read_and_written_by_one_copy() {
    if !alone("a_peers_memory_is_read_and_written_by_one_copy", 2) {
        return;
    }
    let mut peer = Peer::start(Set::default());
    peer.ask("card 1");
    let len = 300_001_usize;
    let bytes = pattern(len, 1);
    let key = RemoteKey::parse(&peer.share(1, len, 1)).unwrap();
    assert_eq!(key.len(), len as u64);
    assert_eq!(key.peer().pid(), peer.id());
    assert_eq!(key.relation(), Relation::OtherDevice);
    let device = open(0);
    let ours = device.alloc(len as u64, 1).unwrap();
    let opened = key.open(&device).unwrap();
    let at = |offset: usize, len: usize| {
        Side::Device(opened.translate(key.base() + offset as u64, len).unwrap())
    };
    copy(&device, Side::Device(ours.addr()), at(0, len), len).unwrap();
    assert_same(&read(&device, ours.addr(), len), &bytes, "read from the peer");
    let other = pattern(len, 2);
    write(&device, ours.addr(), &other);
    copy(&device, at(5, len - 5), Side::Device(ours.addr()), len - 5).unwrap();
    let mut expected = bytes;
    expected[5..].copy_from_slice(&other[..len - 5]);
    assert_eq!(peer.sum(1), hash(&expected), "written to the peer");

    for (addr, len) in [(key.base(), len + 1), (key.base() - 1, 1), (u64::MAX, 2)] {
        assert_eq!(opened.translate(addr, len), None);
    }
    let there = opened.translate(key.base(), 1).unwrap();
    assert_eq!(runtime().locate(there.0, 1), None, "a peer's memory is no allocation of ours");
    assert!(!opened.is_peer_gone());
    assert_eq!((stat("ipc_handovers_pidfd"), stat("ipc_handovers_broker")), (1, 0));
    assert_eq!((stat("staged_operations"), stat("cross_card_operations")), (0, 2));
}
