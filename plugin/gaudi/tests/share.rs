//! Memory between processes on the software Gaudi: the whole path, in namespaces, and what becomes of
//! keys that are no good any more.

mod machine;
mod peer;

use gaudi::share::{KeyError, Limits, RemoteKey};
use gaudi::{DeviceAddr, ErrorKind, Segment, Side, runtime};
use machine::{alone, assert_same, faults, open, pattern, read, write};
use peer::{Peer, Set, copy, hash, hex, stat};

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    #[test]
    fn a_peers_memory_is_read_and_written_by_one_copy() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let len = 300_001_usize;
        let bytes = pattern(len, 1);
        let key = RemoteKey::parse(&peer.share(1, len, 1)).unwrap();
        assert_eq!(key.len(), len as u64);
        assert_eq!(key.peer().pid(), peer.id());
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
        // Host memory straight to the other card, small and pinned.
        for len in [5, 200_000] {
            let mut host = pattern(len, 3);
            copy(&device, at(1, len), Side::Host(host.as_mut_ptr()), len).unwrap();
            let mut back = vec![0; len];
            copy(&device, Side::Host(back.as_mut_ptr()), at(1, len), len).unwrap();
            assert_same(&back, &host, "to the peer and back");
            expected[1..1 + len].copy_from_slice(&host);
            assert_eq!(peer.sum(1), hash(&expected), "from host");
        }

        for (addr, len) in [(key.base(), len + 1), (key.base() - 1, 1), (u64::MAX, 2)] {
            assert_eq!(opened.translate(addr, len), None);
        }
        let there = opened.translate(key.base(), 1).unwrap();
        assert_eq!(runtime().locate(there.0, 1), None, "a peer's memory is no allocation of ours");
        assert!(!opened.has_peer_ended());
        assert_eq!((stat("ipc_descriptors_received"), peer.stat("ipc_leases_granted")), (1, 1));
        assert_eq!((stat("staged_operations"), stat("cross_card_operations")), (0, 2));
        device.set_handle_limits(Limits { handles: 0, bytes: 0 });
        drop(opened);
        let (dst, src) = (Side::Device(ours.addr()), Side::Device(there));
        let segment = Segment { dst, src, len: 8, host_region: None };
        // SAFETY: refused before memory is touched.
        assert!(unsafe { device.copy(&[segment]) }.is_err(), "unmapped");
    }

    /// Has one process use another's memory, both ways.
    fn exchange(exporter: &mut Peer, importer: &mut Peer) {
        exporter.request_ok("card 1");
        importer.request_ok("card 0");
        let len = 100_000;
        let key = exporter.share(1, len, 7);
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        assert_eq!(importer.request_ok("pull 1"), hash(&pattern(len, 7)).to_string(), "pulled");
        importer.request_ok("push 1 8");
        assert_eq!(exporter.sum(1), hash(&pattern(len, 8)), "pushed");
        assert_eq!(importer.stat("ipc_descriptors_received"), 1);
    }

    #[test]
    fn the_end_of_an_exporter_is_seen_without_pidfd() {
        alone!(2);
        let filtered = Set { refuse: &[libc::SYS_pidfd_open], ..Set::default() };
        let (mut exporter, mut importer) = (Peer::start(Set::default()), Peer::start(filtered));
        exchange(&mut exporter, &mut importer);
        assert_eq!(importer.request_ok("gone 1"), "false");
        exporter.kill();
        importer.until("gone 1", "true");
    }

    #[test]
    fn namespaces_do_not_keep_processes_apart() {
        alone!(2);
        let (pid, net, user) = (libc::CLONE_NEWPID, libc::CLONE_NEWNET, libc::CLONE_NEWUSER);
        let proc = libc::CLONE_NEWNS | pid;
        let cases = [
            ("pid", pid),
            ("pid, with its own /proc", proc),
            ("network", net),
            ("pid and network, with its own /proc", proc | net),
            ("user", user),
            ("user, pid and network, with its own /proc", user | proc | net),
        ];
        for (name, namespaces) in cases {
            let different = Set { namespaces, ..Set::default() };
            let start = |set| match Peer::try_start(set) {
                Ok(peer) => Some(peer),
                Err(error) => {
                    println!("skipped: a namespace of its own ({name}): {error}");
                    None
                }
            };
            let (Some(mut inside), Some(mut outside)) = (start(different), start(Set::default()))
            else {
                continue;
            };
            println!("importer in another {name} namespace");
            exchange(&mut outside, &mut inside);
            drop((inside, outside));

            let (Some(mut inside), Some(mut outside)) = (start(different), start(Set::default()))
            else {
                continue;
            };
            println!("exporter in another {name} namespace");
            exchange(&mut inside, &mut outside);
            let identity = inside.request_ok("identity");
            assert_eq!(outside.request_ok("gone 1"), "false");
            assert_eq!(outside.request_ok(&format!("alive {identity}")), "true");
            drop(inside);
            outside.until("gone 1", "true");
            outside.until(&format!("alive {identity}"), "false");
        }
    }

    #[test]
    fn eight_processes_reach_each_other() {
        alone!(8);
        const LEN: usize = 70_000;
        let mut peers: Vec<Peer> = (0..8).map(|_| Peer::start(Set::default())).collect();
        let mut keys = Vec::new();
        for (at, peer) in peers.iter_mut().enumerate() {
            peer.request_ok(&format!("card {at}"));
            keys.push(hex(&peer.share(99, LEN, at as u64)));
        }
        for (at, peer) in peers.iter_mut().enumerate() {
            for (from, key) in keys.iter().enumerate().filter(|(from, _)| *from != at) {
                peer.request_ok(&format!("open {from} {key}"));
                let pulled = peer.request_ok(&format!("pull {from}"));
                assert_eq!(pulled, hash(&pattern(LEN, from as u64)).to_string(), "{from} to {at}");
            }
        }
        // Each writes into the next, all at once.
        for (at, peer) in peers.iter_mut().enumerate() {
            peer.send(&format!("push {} {}", (at + 1) % 8, 100 + at));
        }
        for peer in &mut peers {
            assert_eq!(peer.receive(), "ok");
        }
        for (at, peer) in peers.iter_mut().enumerate() {
            let from = 100 + (at as u64 + 7) % 8;
            assert_eq!(peer.sum(99), hash(&pattern(LEN, from)), "into {at}");
            assert_eq!((peer.stat("ipc_handles_live"), peer.stat("ipc_shares_live")), (7, 1));
        }
    }

    #[test]
    fn keys_that_are_not_for_us_are_refused_with_the_reason() {
        alone!(1);
        let device = open(0);
        let memory = device.alloc(5000, 1).unwrap();
        let good = device.share(memory.addr(), 1).unwrap().key();
        RemoteKey::parse(&good).unwrap();
        let refused = |at: usize| {
            let mut key = good;
            key[at] ^= 1;
            RemoteKey::parse(&key).unwrap_err()
        };
        assert!(matches!(refused(0), KeyError::Version { found: 4, .. }), "version");
        assert_eq!(refused(1), KeyError::OtherHost, "host or boot");
        assert!(matches!(refused(29), KeyError::OtherUser { .. }), "user");
        assert!(matches!(RemoteKey::parse(&good[1..]), Err(KeyError::Version { .. })));
        assert_eq!(RemoteKey::parse(&[]).unwrap_err().to_string(), "it has 0 bytes, not 58");
        assert_eq!(stat("ipc_keys_refused"), 5);
    }

    #[test]
    fn one_allocation_has_one_key_which_its_own_process_cannot_open() {
        alone!(2);
        let (one, other) = (open(0), open(1));
        let memory = one.alloc(20_000, 1).unwrap();
        let share = one.share(memory.addr(), 1).unwrap();
        let again = one.share(DeviceAddr(memory.addr().0 + 5), 10).unwrap();
        assert_eq!(share.key(), again.key());
        let key = RemoteKey::parse(&share.key()).unwrap();
        assert!(key.peer().is_own());
        for device in [one, other] {
            let error = key.open(&device).unwrap_err();
            assert!(error.is_unsupported(), "{error}");
        }
    }

    #[test]
    fn a_driver_without_import_says_so_and_why() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let key = RemoteKey::parse(&peer.share(1, 5000, 1)).unwrap();
        // SAFETY: no other thread of this process reads the environment.
        unsafe { std::env::set_var("SOFT_GAUDI_LENIENT", "") };
        let mut old = Peer::on_card(0);
        let refused = old.request(&format!("open 1 {}", hex(&peer.share(2, 5000, 1))));
        assert!(refused.starts_with("failed INVALID_PARAMS"), "{refused}");
        assert!(refused.contains("the driver has no dma-buf import"), "{refused}");
        let _ = key;
    }

    #[test]
    fn a_card_in_reset_does_not_say_that_the_driver_has_no_import() {
        alone!(1, ("SOFT_GAUDI_FAULTS", "yes"));
        let device = open(0);
        let memory = device.alloc(4096, 1).unwrap();
        faults("transfer fail:EIO");
        device.fill(memory.addr(), 4096, 1).unwrap_err();
        let error = device.can_import().unwrap_err();
        assert!(error.is_device_lost() && !error.is_unsupported(), "{error}");
        drop((memory, device));
        open(0).can_import().unwrap();
    }

    #[test]
    fn handles_are_kept_within_bounds_and_opened_once() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let keys: Vec<RemoteKey> =
            (0..4).map(|slot| RemoteKey::parse(&peer.share(slot, 8192, 1)).unwrap()).collect();
        let device = open(0);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let opened: Vec<_> =
                        keys.iter().map(|key| key.open(&device).unwrap()).collect();
                    assert_eq!(opened.len(), 4);
                });
            }
        });
        assert_eq!((stat("ipc_cache_misses"), stat("ipc_cache_hits")), (4, 28));
        assert_eq!((stat("ipc_handles_live"), stat("ipc_handles_bytes")), (4, 4 * 8192));
        assert_eq!(stat("dmabuf_imports_live"), 4);

        device.set_handle_limits(Limits { handles: 2, bytes: 1 << 30 });
        assert_eq!((stat("ipc_handles_live"), stat("ipc_cache_evictions")), (2, 2));
        let in_use: Vec<_> = keys.iter().map(|key| key.open(&device).unwrap()).collect();
        assert_eq!(stat("ipc_handles_live"), 4, "what is in use stays");
        drop(in_use);
        assert_eq!(stat("ipc_handles_live"), 2);
        device.set_handle_limits(Limits { handles: 9, bytes: 8192 });
        assert_eq!(stat("ipc_handles_live"), 1, "bounded by bytes too");
    }

    #[test]
    fn a_new_tenant_at_the_same_address_has_a_key_of_its_own() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        let old = RemoteKey::parse(&peer.share(1, 9000, 1)).unwrap();
        drop(old.open(&device).unwrap());
        assert_eq!(stat("ipc_handles_live"), 1, "kept");
        peer.request_ok("unshare 1");
        peer.request_ok("free 1");
        // The lease is revoked, and what is only cached is unmapped.
        peer::until("the handle is let go", || stat("ipc_handles_live") == 0);
        peer.until("stat ipc_quarantined_bytes", "0");

        let new = RemoteKey::parse(&peer.share(2, 9000, 2)).unwrap();
        assert_eq!(new.base(), old.base(), "the same address again");
        let error = old.open(&device).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ChannelFailed);
        assert!(error.to_string().contains("does not share this memory (any more)"), "{error}");
        assert_eq!(stat("ipc_refused_withdrawn"), 1);
        let opened = new.open(&device).unwrap();
        let here = device.alloc(9000, 1).unwrap();
        let there = opened.translate(new.base(), 9000).unwrap();
        copy(&device, Side::Device(here.addr()), Side::Device(there), 9000).unwrap();
        assert_same(&read(&device, here.addr(), 9000), &pattern(9000, 2), "the new tenant's bytes");
    }

    #[test]
    fn revoked_memory_is_waited_for_until_no_peer_has_it_open() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        let memory = device.alloc(9000, 1).unwrap();
        let open = |peer: &mut Peer, key: &[u8]| {
            peer.request_ok(&format!("open 1 {}", peer::hex(key)));
        };
        let share = device.share(memory.addr(), 1).unwrap();
        open(&mut peer, &share.key());
        peer.request_ok("close 1");
        assert_eq!(peer.stat("ipc_handles_live"), 1, "kept for the next who opens it");
        assert!(share.revoke(), "a peer that only keeps it gives it back");
        assert_eq!(peer.stat("ipc_handles_live"), 0, "before this was answered");

        let (one, other) = (device.share(memory.addr(), 1), device.share(memory.addr(), 1));
        let (one, other) = (one.unwrap(), other.unwrap());
        open(&mut peer, &one.key());
        assert!(one.revoke(), "another share of it remains: its peers go on");
        assert!(!other.revoke(), "the peer is using it");
    }

    #[test]
    fn freed_memory_waits_for_who_has_it_open() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        let key = RemoteKey::parse(&peer.share(1, 9000, 1)).unwrap();
        let opened = key.open(&device).unwrap();
        peer.request_ok("free 1");
        assert_eq!(peer.stat("ipc_quarantined_bytes"), 9000);
        let other = RemoteKey::parse(&peer.share(2, 9000, 2)).unwrap();
        assert_ne!(other.base(), key.base(), "not given to others while we have it open");
        // A late copy does no harm.
        let there = Side::Device(opened.translate(key.base(), 9000).unwrap());
        let here = device.alloc(9000, 1).unwrap();
        copy(&device, there, Side::Device(here.addr()), 9000).unwrap();
        assert_eq!(peer.sum(2), hash(&pattern(9000, 2)));
        drop(opened);
        peer.until("stat ipc_quarantined_bytes", "0");
        let next = RemoteKey::parse(&peer.share(3, 9000, 3)).unwrap();
        assert_eq!(next.base(), key.base(), "then it is used again");
    }

    #[test]
    fn while_one_share_waits_for_the_card_peers_are_served_and_memory_is_freed() {
        alone!(2, ("SOFT_GAUDI_FAULTS", "yes"));
        let mut importer = Peer::on_card(0);
        let device = open(1);
        let alloc = || device.alloc(9000, 1).unwrap();
        let (shared, other) = (alloc(), alloc());
        let key = device.share(shared.addr(), 1).unwrap().key();
        // The rest of the last page is cleared; that this has ended is seen after one more copy.
        let stalled = |memory: &gaudi::Allocation| {
            let (device, addr) = (device.clone(), memory.addr());
            faults("submission late:1");
            let share = std::thread::spawn(move || device.share(addr, 1));
            let file = soft_gaudi::testing::Machine::of_this_process().faults_file("gaudi2");
            peer::until("it waits", || std::fs::read_to_string(&file).unwrap().is_empty());
            share
        };
        let end_stall = || write(&device, shared.addr(), &[1; 100]);

        let again = device.share(shared.addr(), 1).unwrap();
        let memory = alloc();
        let share = stalled(&memory);
        importer.request_ok(&format!("open 1 {}", hex(&again.key())));
        drop(other);
        assert!(!share.is_finished());
        end_stall();
        let share = share.join().unwrap().unwrap();
        importer.request_ok(&format!("open 2 {}", hex(&share.key())));
        assert_ne!(key, again.key(), "the first share had ended");

        // Memory that is freed meanwhile is not shared, and nobody else's before.
        let memory = alloc();
        let addr = memory.addr();
        let share = stalled(&memory);
        drop(memory);
        assert_eq!(stat("ipc_quarantined_bytes"), 9000);
        assert_ne!(alloc().addr(), addr);
        end_stall();
        let error = share.join().unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams, "{error}");
        assert_eq!(stat("ipc_quarantined_bytes"), 0);
        assert_eq!(stat("ipc_shares_live"), 2);
        assert_eq!(alloc().addr(), addr);
    }

    /// The engine itself waits a second, which is not always enough on a busy machine.
    fn eventually<T>(mut make: impl FnMut() -> Result<T, gaudi::Error>) -> T {
        let mut made = None;
        peer::until("peers let go", || {
            made = make().ok();
            made.is_some()
        });
        made.unwrap()
    }

    #[test]
    fn memory_that_peers_only_keep_for_later_is_there_when_it_is_needed() {
        alone!(2);
        let device = open(1);
        let most = device.memory().total / 3 * 2;
        let mut importer = Peer::on_card(0);
        for round in 0..5 {
            // More than half of the card: the next must wait for this one.
            let memory = eventually(|| device.alloc(most, 1));
            let share = device.share(memory.addr(), 1).unwrap();
            importer.request_ok(&format!("open 1 {}", hex(&share.key())));
            importer.request_ok("close 1");
            assert_eq!(importer.stat("ipc_handles_live"), 1, "round {round}: kept for later");
        }
        // While it is in use, there is none; and the error comes after a moment.
        let memory = eventually(|| device.alloc(most, 1));
        let share = device.share(memory.addr(), 1).unwrap();
        importer.request_ok(&format!("open 1 {}", hex(&share.key())));
        drop(memory);
        assert_eq!(device.alloc(most, 1).unwrap_err().kind(), ErrorKind::OutOfMemory);
        importer.request_ok("close 1");
        eventually(|| device.alloc(most, 1));
    }
}
