//! Memory between processes whose driver imports nothing: puts and gets through a relay.

mod machine;
mod peer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use gaudi::share::{Access, Relay, RelayPiece, Relayed, RemoteKey};
use gaudi::{Device, Error, Side, SubmitError};
use machine::{alone, assert_same, open, pattern, read, write};
use peer::{Peer, hash, stat, unhex};

const NO_IMPORT: (&str, &str) = ("SOFT_GAUDI_LENIENT", "");

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

fn key(bytes: &[u8]) -> RemoteKey {
    RemoteKey::parse(bytes).expect("a key")
}

/// A piece of the memory of this key, from so many bytes behind its beginning.
fn piece(
    access: Access,
    key: &RemoteKey,
    offset: usize,
    local: (Side, Option<&Arc<Device>>),
    len: usize,
) -> RelayPiece {
    let (local, device) = (local.0, local.1.cloned());
    RelayPiece { access, key: *key, remote: key.base() + offset as u64, local, device, len }
}

fn start(relay: &Arc<Relay>, pieces: &[RelayPiece]) -> Relayed {
    loop {
        // SAFETY: the tests keep their memory until the job has ended.
        match unsafe { relay.start(pieces) } {
            Ok(job) => return job,
            Err(SubmitError::Busy) => relay.advance(),
            Err(SubmitError::Failed(error)) => panic!("{error}"),
        }
    }
}

fn run(relay: &Arc<Relay>, pieces: &[RelayPiece]) -> Result<(), Error> {
    start(relay, pieces).wait()
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    /// All pairs of memory, both ways, at odd places; what lies around stays as it was.
    #[test]
    fn relay_copies_between_all_kinds_of_memory_to_the_byte() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        let len = 3_000_011_usize;
        let keys = [key(&peer.share(1, len, 1)), key(&peer.share_host(2, len, 1))];
        let mut there = [pattern(len, 1), pattern(len, 1)];
        let ours = device.alloc(len as u64, 1).unwrap();
        for (kind, key) in keys.iter().enumerate() {
            assert_eq!((key.is_host(), key.len()), (kind == 1, len as u64));
            let relay = Relay::new(key).unwrap();
            for (round, size) in [1, 8, 4097, 65_537, 300_000, 2_500_003].into_iter().enumerate() {
                for is_card in [true, false] {
                    let (seed, at, from) = (round as u64 + 10, 7 + round * 1001, 3 + round * 5);
                    let bytes = pattern(size, seed);
                    let mut host = pattern(size + 64, 5);
                    let around = host.clone();
                    let local = if is_card {
                        write(&device, ours.addr(), &vec![0xa5; len]);
                        write(&device, gaudi::DeviceAddr(ours.addr().0 + from as u64), &bytes);
                        let addr = gaudi::DeviceAddr(ours.addr().0 + from as u64);
                        (Side::Device(addr), Some(&device))
                    } else {
                        host[from..from + size].copy_from_slice(&bytes);
                        (Side::Host(host[from..].as_mut_ptr()), None)
                    };
                    run(&relay, &[piece(Access::Write, key, at, local, size)]).unwrap();
                    there[kind][at..at + size].copy_from_slice(&bytes);
                    let sum = if kind == 0 { peer.sum(1) } else { peer.sum_host(2) };
                    assert_eq!(sum, hash(&there[kind]), "put of {size}, {kind}, {is_card}");

                    let expected = &there[kind][at + 13..];
                    let size = size.min(expected.len());
                    run(&relay, &[piece(Access::Read, key, at + 13, local, size)]).unwrap();
                    if is_card {
                        let all = read(&device, ours.addr(), len);
                        assert_same(&all[from..from + size], &expected[..size], "got");
                        let rest = all[..from].iter().chain(&all[from + size..]);
                        assert!(rest.copied().all(|byte| byte == 0xa5), "around {size}");
                    } else {
                        assert_same(&host[from..from + size], &expected[..size], "got");
                        assert_same(&host[..from], &around[..from], "before");
                        assert_same(&host[from + size..], &around[from + size..], "behind");
                    }
                }
            }
        }
        assert!(peer.stat("ipc_relay_requests") > 100);
        assert_eq!((peer.stat("ipc_relay_refused"), peer.stat("dmabuf_exports")), (0, 0));
        assert_eq!(stat("ipc_handles_opened"), 0);
    }

    #[test]
    fn many_small_pieces_go_in_few_requests() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        const BLOCK: usize = 45 << 10;
        const COUNT: usize = 200;
        let key = key(&peer.share(1, BLOCK * COUNT, 1));
        let bytes = pattern(BLOCK * COUNT, 2);
        let ours = device.alloc(bytes.len() as u64, 1).unwrap();
        write(&device, ours.addr(), &bytes);
        let relay = Relay::new(&key).unwrap();
        let at = |block: usize| {
            let addr = gaudi::DeviceAddr(ours.addr().0 + (block * BLOCK) as u64);
            (Side::Device(addr), Some(&device))
        };
        // Block n goes to the place of block 7 n, in jobs of ten.
        let place = |block: usize| block * 7 % COUNT * BLOCK;
        let mut jobs: Vec<Relayed> = Vec::new();
        for first in (0..COUNT).step_by(10) {
            let pieces: Vec<RelayPiece> = (first..first + 10)
                .map(|block| piece(Access::Write, &key, place(block), at(block), BLOCK))
                .collect();
            jobs.push(start(&relay, &pieces));
        }
        for job in &mut jobs {
            job.wait().unwrap();
        }
        let mut expected = vec![0; bytes.len()];
        for block in 0..COUNT {
            let from = &bytes[block * BLOCK..][..BLOCK];
            expected[place(block)..][..BLOCK].copy_from_slice(from);
        }
        assert_eq!(peer.sum(1), hash(&expected));
        let requests = peer.stat("ipc_relay_requests");
        assert!((COUNT / 11..COUNT / 2).contains(&(requests as usize)), "{requests}");
        assert_eq!(peer.stat("ipc_relay_bytes"), bytes.len() as u64);
    }

    #[test]
    fn what_is_not_shared_under_the_key_is_refused_and_the_rest_goes_on() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let (good, other) = (peer.share(1, 9000, 1), peer.share_host(2, 9000, 1));
        let mut host = vec![0; 9000];
        let mut here = || (Side::Host(host.as_mut_ptr()), None);
        for good in [good, other] {
            let relay = Relay::new(&key(&good)).unwrap();
            for at in 33..41 {
                let mut forged = good.clone();
                forged[at] ^= 1;
                let put = piece(Access::Write, &key(&forged), 0, here(), 100);
                let error = run(&relay, &[put]).unwrap_err();
                assert!(error.to_string().contains("does not share this memory"), "{error}");
            }
            // Beyond the end, with a key that says it is longer: the length is not in the request.
            let mut longer = good.clone();
            longer[53..58].copy_from_slice(&[0, 0, 1, 0, 0]);
            let refused = run(&relay, &[piece(Access::Read, &key(&longer), 8999, here(), 2)]);
            assert!(refused.is_err());
            let put = piece(Access::Read, &key(&good), 8999, here(), 2);
            // SAFETY: refused before memory is touched.
            let error = unsafe { relay.start(&[put]) }.unwrap_err();
            assert!(error.to_string().contains("not in the memory of the key"), "{error}");
            run(&relay, &[piece(Access::Read, &key(&good), 8990, here(), 10)]).unwrap();
            assert!(!relay.is_closed());

            // Whoever has no key gets no relay.
            let mut forged = good;
            forged[33] ^= 1;
            let stranger = Relay::new(&key(&forged)).unwrap();
            let error = run(&stranger, &[piece(Access::Read, &key(&forged), 0, here(), 1)]);
            assert!(error.unwrap_err().to_string().contains("does not share this memory"));
            assert!(stranger.is_closed());
        }
        assert_eq!(peer.sum(1), hash(&pattern(9000, 1)));
        assert_eq!(peer.sum_host(2), hash(&pattern(9000, 1)));
        assert_eq!(peer.stat("ipc_relay_refused"), 18);
    }

    /// They travel in one request, and are told apart.
    #[test]
    fn of_jobs_that_share_a_request_only_the_refused_one_fails() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let good = peer.share(1, 9000, 1);
        let mut forged = good.clone();
        forged[35] ^= 1;
        let (good, forged) = (key(&good), key(&forged));
        let relay = Relay::new(&good).unwrap();
        let mut bytes = pattern(9000, 2);
        let mut expected = pattern(9000, 1);
        let mut jobs = Vec::new();
        // The first is alone, as nothing waits; all others wait together.
        for number in 0..30_usize {
            let (at, len) = (number * 300, 299);
            let key = if number == 20 { &forged } else { &good };
            let here = (Side::Host(bytes[at..].as_mut_ptr()), None);
            jobs.push(start(&relay, &[piece(Access::Write, key, at, here, len)]));
            if number != 20 {
                expected[at..at + len].copy_from_slice(&bytes[at..at + len]);
            }
        }
        for (number, job) in jobs.iter_mut().enumerate() {
            assert_eq!(job.wait().is_err(), number == 20, "{number}");
        }
        assert_eq!(peer.sum(1), hash(&expected));
    }

    /// The CPU would copy it.
    #[test]
    fn device_addresses_are_not_taken_for_host_memory() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let key = key(&peer.share(1, 9000, 1));
        let relay = Relay::new(&key).unwrap();
        let address = open(0).alloc(4096, 1).unwrap().addr();
        let as_host = Side::Host(core::ptr::without_provenance_mut(address.0 as usize));
        for local in [as_host, Side::Device(address)] {
            // SAFETY: refused before memory is touched.
            let refused =
                unsafe { relay.start(&[piece(Access::Write, &key, 0, (local, None), 8)]) };
            let error = refused.unwrap_err().to_string();
            assert!(error.contains("not memory of this process"), "{error}");
        }
    }

    #[test]
    fn memory_that_is_withdrawn_or_freed_is_not_written_any_more() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let len = 4 << 20;
        let (card, host) = (key(&peer.share(1, len, 1)), key(&peer.share_host(2, len, 1)));
        let relay = Relay::new(&card).unwrap();
        let mut bytes = pattern(len, 3);
        let local = (Side::Host(bytes.as_mut_ptr()), None);
        peer.request_ok("hostunshare 2");
        run(&relay, &[piece(Access::Write, &host, 0, local, len)]).unwrap_err();
        assert_eq!(peer.sum_host(2), hash(&pattern(len, 1)));
        // Freed while puts are under way, again and again.
        for round in 0..20 {
            let card = key(&peer.share(1, len, 1));
            let mut job = start(&relay, &[piece(Access::Write, &card, 0, local, len)]);
            peer.send("free 1");
            for _ in 0..round * 3 {
                relay.advance();
            }
            let ended = job.wait();
            assert_eq!(peer.receive(), "ok");
            peer.request_ok("unshare 1");
            if let Err(error) = ended {
                let text = error.to_string();
                assert!(
                    text.contains("does not share") || text.contains("could not copy"),
                    "{text}"
                );
            }
            peer.until("stat ipc_quarantined_bytes", "0");
            // The next tenant has its own bytes.
            peer.share(3, len, 9);
            assert_eq!(peer.sum(3), hash(&pattern(len, 9)));
            peer.request_ok("unshare 3");
            peer.request_ok("free 3");
        }
    }

    #[test]
    fn host_memory_that_its_owner_has_taken_away_is_an_error_and_harms_nobody() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::start(peer::Set::default());
        let len = 300_007;
        let gone = key(&unhex(&peer.request_ok(&format!("hostgone 1 {len}"))));
        let kept = key(&peer.share_host(2, len, 1));
        let relay = Relay::new(&kept).unwrap();
        for access in [Access::Read, Access::Write] {
            let mut host = pattern(len, 5);
            let local = (Side::Host(host.as_mut_ptr()), None);
            let error = run(&relay, &[piece(access, &gone, 0, local, len)]).unwrap_err();
            assert!(error.to_string().contains("could not copy"), "{error}");
            assert_same(&host, &pattern(len, 5), "not a byte of it");
            run(&relay, &[piece(access, &kept, 0, local, len)]).unwrap();
            let seed = if access == Access::Read { 1 } else { 5 };
            assert_same(&host, &pattern(len, seed), "what is still there");
            assert_eq!(peer.sum_host(2), hash(&host));
        }
    }

    #[test]
    fn a_peer_that_is_killed_or_was_stopped_ends_every_job() {
        alone!(2, NO_IMPORT);
        let device = open(0);
        // More than three times a ring: what two calls of `advance` and the one after the end can take in.
        let len = (25 << 20) + 3;
        let ours = device.alloc(len as u64, 1).unwrap();
        for round in 0..12_u64 {
            let mut peer = Peer::on_card(1);
            let is_card = round % 2 == 0;
            let key =
                key(&if is_card { peer.share(1, len, 1) } else { peer.share_host(1, len, 1) });
            let relay = Relay::new(&key).unwrap();
            let access = if round % 4 < 2 { Access::Write } else { Access::Read };
            let local = (Side::Device(ours.addr()), Some(&device));
            let mut job = start(&relay, &[piece(access, &key, 0, local, len)]);
            for advances in 0..round % 3 {
                relay.advance();
                // It has got on by different amounts when its owner ends.
                std::thread::sleep(Duration::from_micros(round * (advances + 1) * 200));
            }
            if round % 4 == 3 {
                peer.stop();
            }
            peer.kill();
            let error = job.wait().unwrap_err();
            assert_eq!(error.errno(), Some(libc::ESRCH), "{error}");
            assert!(relay.is_closed());
        }
    }

    /// The kernel cannot be asked about it. Between two of its sockets it closes what was opened between them, and takes
    /// connections meanwhile.
    #[test]
    fn an_owner_of_another_pid_namespace_that_is_killed_is_said_to_have_ended() {
        alone!(2, NO_IMPORT);
        // Root needs no user namespace.
        // SAFETY: no arguments.
        let user = if unsafe { libc::geteuid() } == 0 { 0 } else { libc::CLONE_NEWUSER };
        let namespaces = user | libc::CLONE_NEWPID | libc::CLONE_NEWNS;
        let mut failed = 0;
        for round in 0..10_u64 {
            let mut peer = match Peer::try_start(peer::Set { namespaces, ..Default::default() }) {
                Ok(peer) => peer,
                Err(error) => return println!("skipped: no namespaces here ({error})"),
            };
            let len = (25 << 20) + 3;
            let key = key(&peer.share_host(1, len, 1));
            // Files between the socket that listens and the relay's.
            peer.request_ok("nofile 1000");
            peer.request_ok("exhaust 100");
            let relay = Relay::new(&key).unwrap();
            let mut host = vec![0; len];
            let local = (Side::Host(host.as_mut_ptr()), None);
            let mut job = start(&relay, &[piece(Access::Read, &key, 0, local, len)]);
            std::thread::sleep(Duration::from_micros(round * 100));
            // Not waited for: the relay is polled while the kernel closes its descriptors.
            // SAFETY: our own child, which has not been waited for.
            assert_eq!(unsafe { libc::kill(peer.id() as i32, libc::SIGKILL) }, 0);
            // On a busy machine the owner may get the signal after its last chunk.
            if let Err(error) = job.wait() {
                assert_eq!(error.errno(), Some(libc::ESRCH), "{error}");
                failed += 1;
            }
        }
        assert!(failed > 0, "no job was under way");
    }

    /// Nothing tells it from a slow one.
    #[test]
    fn a_job_of_a_peer_that_is_stopped_goes_on_with_it() {
        alone!(2, NO_IMPORT);
        // More than three times a ring: what two calls of `advance` and the one after the stop can take in.
        let (mut peer, device, len) = (Peer::on_card(1), open(0), (25 << 20) + 3);
        let key = key(&peer.share(1, len, 1));
        let relay = Relay::new(&key).unwrap();
        let ours = device.alloc(len as u64, 1).unwrap();
        let local = (Side::Device(ours.addr()), Some(&device));
        let bytes = pattern(len, 2);
        for (access, advances) in [(Access::Write, 2), (Access::Read, 0), (Access::Read, 2)] {
            let before = if access == Access::Write { &bytes } else { &vec![0x77; len] };
            write(&device, ours.addr(), before);
            let mut job = start(&relay, &[piece(access, &key, 0, local, len)]);
            for _ in 0..advances {
                relay.advance();
            }
            peer.stop();
            let until = Instant::now() + Duration::from_secs(1);
            while Instant::now() < until {
                relay.advance();
                assert!(job.poll().is_none(), "it ended without its owner");
            }
            assert!(!relay.is_closed());
            peer.go_on();
            job.wait().unwrap();
            assert_eq!(peer.sum(1), hash(&bytes));
            assert_same(&read(&device, ours.addr(), len), &bytes, "here");
        }
    }

    /// It does not look as if it had ended, and the next relay is served.
    #[test]
    fn an_owner_that_lacks_descriptors_says_so() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let len = 4 << 20;
        let key = key(&peer.share(1, len, 1));
        let mut host = vec![0; len];
        let local = (Side::Host(host.as_mut_ptr()), None);
        let get = |len| [piece(Access::Read, &key, 0, local, len)];
        // No number for the connection, and for the ring.
        for left in [0, 1] {
            peer.request_ok(&format!("exhaust {left}"));
            let relay = Relay::new(&key).unwrap();
            let error = run(&relay, &get(100)).unwrap_err();
            assert!(error.to_string().contains("it lacks descriptors"), "{left}: {error}");
            assert_eq!(error.errno(), None, "{left}: {error}");
            assert!(relay.is_closed());
            peer.request_ok("restore");
            run(&Relay::new(&key).unwrap(), &get(len)).unwrap();
        }
        assert_same(&host, &pattern(len, 1), "got");
    }

    /// Each pins memory on both sides.
    #[test]
    fn the_number_of_relays_is_bounded_on_both_sides() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::start(peer::Set::default());
        let packed = peer.share_host(1, 100, 1);
        let key = key(&packed);
        let mut host = [0; 100];
        let get = [piece(Access::Read, &key, 0, (Side::Host(host.as_mut_ptr()), None), 100)];
        let mut relays: Vec<_> = (0..128).map(|_| Relay::new(&key).unwrap()).collect();
        relays.iter().for_each(|relay| run(relay, &get).unwrap());
        let error = Relay::new(&key).unwrap_err().to_string();
        assert!(error.contains("128 relays"), "{error}");
        // Another process has its own to open, and the owner no more to give.
        let [name, _] = peer::sockets(&packed);
        let other = peer::stranger(&name, &[]);
        let ring = peer::ring(512 << 10);
        peer::send_with(&other, &peer::message(2, &packed), &ring);
        let refused = peer::message(0x83, &[]);
        assert_eq!(peer::received(&other), refused);
        relays.pop();
        // When the owner has seen it close.
        peer::until("there is one less", || run(&Relay::new(&key).unwrap(), &get).is_ok());
        assert_eq!(&host[..], &pattern(100, 1)[..]);
    }

    /// The only process of another version that gets this far is one that does not read the version of a key.
    #[test]
    fn a_message_of_another_version_is_refused_and_the_owner_goes_on() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let packed = peer.share(1, 100, 1);
        let [name, _] = peer::sockets(&packed);
        for kind in [1, 2] {
            let mut older = peer::message(kind, &packed);
            older[4] -= 1;
            let other = peer::stranger(&name, &[]);
            peer::send_with(&other, &older, &peer::ring(512 << 10));
            assert_eq!(peer::received(&other), peer::message(0x82, &[]), "{kind}");
            assert!(peer::received(&other).is_empty(), "{kind}: it hangs up");
        }
        assert_eq!(peer.stat("ipc_peers_refused_malformed"), 2);
        let (key, mut host) = (key(&packed), [0; 100]);
        let get = [piece(Access::Read, &key, 0, (Side::Host(host.as_mut_ptr()), None), 100)];
        run(&Relay::new(&key).unwrap(), &get).unwrap();
        assert_eq!(&host[..], &pattern(100, 1)[..]);
    }

    /// A card pins the ring for its first copy.
    #[test]
    fn a_card_that_is_lost_when_it_pins_the_ring_fails_the_job() {
        alone!(3, NO_IMPORT, ("SOFT_GAUDI_FAULTS", "yes"));
        let len = 100_000;
        let mut host = vec![0; len];
        let local = (Side::Host(host.as_mut_ptr()), None);
        for (card, loss) in [(1, "reset"), (2, "remove")] {
            let mut peer = Peer::on_card(card);
            let key = key(&peer.share(1, len, 1));
            let relay = Relay::new(&key).unwrap();
            machine::faults(&format!("hlthunk_host_memory_map {loss}\n"));
            for access in [Access::Write, Access::Read] {
                let error = run(&relay, &[piece(access, &key, 0, local, len)]).unwrap_err();
                assert!(error.to_string().contains("does not share"), "{loss}: {error}");
                assert_eq!(peer.stat("pins_refused"), 1, "{loss}: the ring's");
            }
            assert!(!relay.is_closed(), "{loss}");
        }
    }

    #[test]
    fn a_process_without_a_card_counts_what_it_relays() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::start(peer::Set::default());
        let key = key(&peer.share_host(1, 1000, 1));
        let mut host = [0; 1000];
        let get = [piece(Access::Read, &key, 0, (Side::Host(host.as_mut_ptr()), None), 1000)];
        run(&Relay::new(&key).unwrap(), &get).unwrap();
        assert_eq!((peer.stat("ipc_relay_requests"), peer.stat("ipc_relay_bytes")), (1, 1000));
    }

    /// The owner's program does nothing meanwhile: its service works by itself.
    #[test]
    fn a_job_that_is_dropped_leaves_memory_alone_and_the_relay_working() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let len = 8 << 20;
        let key = key(&peer.share(1, len, 1));
        let relay = Relay::new(&key).unwrap();
        for turns in 0..30 {
            let mut host = vec![0x77_u8; len];
            let local = (Side::Host(host.as_mut_ptr()), None);
            let job = start(&relay, &[piece(Access::Read, &key, 0, local, len)]);
            for _ in 0..turns {
                relay.advance();
            }
            drop(job);
            host.fill(0x11);
            for _ in 0..1000 {
                relay.advance();
            }
            assert!(host.iter().all(|byte| *byte == 0x11), "written after it was dropped");
        }
        let mut host = vec![0_u8; len];
        let local = (Side::Host(host.as_mut_ptr()), None);
        run(&relay, &[piece(Access::Read, &key, 0, local, len)]).unwrap();
        assert_same(&host, &pattern(len, 1), "got");
    }

    /// On whichever side: UCX would fail the endpoint with it. One that fails twice has failed, and the relay goes on.
    #[test]
    fn a_copy_that_fails_once_is_made_again() {
        alone!(2, NO_IMPORT, ("SOFT_GAUDI_FAULTS", "yes"));
        let (mut peer, device, len) = (Peer::on_card(1), open(0), 1_000_003);
        let key = key(&peer.share(1, len, 1));
        let relay = Relay::new(&key).unwrap();
        let ours = device.alloc(len as u64, 1).unwrap();
        let local = (Side::Device(ours.addr()), Some(&device));
        for round in 0..8 {
            let sent = pattern(len, 10 + round);
            write(&device, ours.addr(), &sent);
            machine::faults(&format!("hlthunk_command_submission fail:EIO after={round}"));
            run(&relay, &[piece(Access::Write, &key, 0, local, len)]).unwrap();
            machine::faults("");
            assert_eq!(peer.sum(1), hash(&sent), "{round}");
            write(&device, ours.addr(), &pattern(len, 9));
            machine::faults(&format!("hlthunk_command_submission fail:EIO after={round}"));
            run(&relay, &[piece(Access::Read, &key, 0, local, len)]).unwrap();
            machine::faults("");
            assert_same(&read(&device, ours.addr(), len), &sent, "got");
        }
        machine::faults("hlthunk_command_submission fail:EIO times=0");
        run(&relay, &[piece(Access::Write, &key, 0, local, len)]).unwrap_err();
        machine::faults("");
        run(&relay, &[piece(Access::Write, &key, 0, local, len)]).unwrap();
    }

    #[test]
    fn a_card_that_was_reset_is_refused_and_so_is_a_forked_child() {
        alone!(2, NO_IMPORT, ("SOFT_GAUDI_FAULTS", "yes"));
        let mut peer = Peer::on_card(1);
        let key = key(&peer.share(1, 1 << 20, 1));
        let relay = Relay::new(&key).unwrap();
        let mut host = vec![0_u8; 1 << 20];
        let local = (Side::Host(host.as_mut_ptr()), None);
        let put = [piece(Access::Write, &key, 0, local, 1 << 20)];
        run(&relay, &put).unwrap();
        // SAFETY: the child only tries, and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above.
            let refused = unsafe { relay.start(&put) }.is_err();
            // SAFETY: ends the process.
            unsafe { libc::_exit(i32::from(!refused)) };
        }
        let mut status = -1;
        // SAFETY: our own child.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(status, 0, "the child is refused");
        run(&relay, &put).unwrap();
        machine::faults("transfer fail:EIO");
        run(&relay, &put).unwrap_err();
        let error = run(&relay, &put).unwrap_err();
        assert!(error.to_string().contains("does not share"), "{error}");
        assert!(!relay.is_closed());
    }

    #[test]
    fn an_owner_without_a_descriptor_for_the_larger_ring_goes_on_with_the_small_one() {
        alone!(2, NO_IMPORT);
        let mut peer = Peer::on_card(1);
        let len = 4 << 20;
        let key = key(&peer.share(1, len, 1));
        let mut host = vec![0; len];
        let local = (Side::Host(host.as_mut_ptr()), None);
        let get = |len| [piece(Access::Read, &key, 0, local, len)];
        let relay = Relay::new(&key).unwrap();
        run(&relay, &get(100)).unwrap();
        peer.request_ok("exhaust 0");
        run(&relay, &get(len)).unwrap();
        peer.request_ok("restore");
        assert_same(&host, &pattern(len, 1), "got");
        host.fill(0);
        run(&relay, &get(len)).unwrap();
        assert_same(&host, &pattern(len, 1), "got");
        assert!(!relay.is_closed());
    }
}
