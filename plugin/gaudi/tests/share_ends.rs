//! Processes that end, at any moment and in any way: the others notice, and nothing is left behind.

mod machine;
mod peer;

use std::time::Duration;

use gaudi::share::Limits;
use gaudi::share::{Identity, Relay, RemoteKey};
use gaudi::{ErrorKind, Side};
use machine::{Footprint, alone, open};
use peer::{Peer, Set, copy, stat, unhex, until};

const LEN: usize = 200_000;
/// Where these are in a packed identity (`docs/design/ipc-protocol.md`).
const START: usize = 17;
const PID_NAMESPACE: usize = 21;

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    /// Pauses that look random and are the same every time.
    fn pause(round: u32) {
        let micros = (u64::from(round) * 7919) % 3000;
        std::thread::sleep(Duration::from_micros(micros));
    }

    #[test]
    fn an_exporter_killed_at_any_point_leaves_nothing_behind() {
        alone!(2);
        let device = open(0);
        let here = device.alloc(LEN as u64, 1).unwrap();
        let mut before = None;
        for round in 0..50 {
            // That the card opens shows that the survivor holds nothing of its last owner.
            let mut exporter = Peer::start(Set::default());
            until("the dead owner's card is free", || exporter.request("card 1") == "ok");
            let keys: Vec<RemoteKey> = (0..3)
                .map(|slot| RemoteKey::parse(&exporter.share(slot, LEN, 1)).unwrap())
                .collect();
            std::thread::scope(|scope| {
                let work = scope.spawn(|| {
                    let mut gone = Vec::new();
                    for key in &keys {
                        let Ok(opened) = key.open(&device) else { continue };
                        let there = opened.translate(key.base(), LEN).unwrap();
                        for _ in 0..20 {
                            copy(&device, Side::Device(here.addr()), Side::Device(there), LEN)
                                .unwrap();
                            copy(&device, Side::Device(there), Side::Device(here.addr()), LEN)
                                .unwrap();
                        }
                        gone.push(opened);
                    }
                    gone
                });
                pause(round);
                exporter.kill();
                let opened = work.join().unwrap();
                for opened in &opened {
                    until("the end is seen", || opened.has_peer_ended());
                }
            });
            for key in &keys {
                assert_eq!(key.open(&device).unwrap_err().errno(), Some(libc::ESRCH));
            }
            until("all handles are let go", || stat("ipc_handles_live") == 0);
            assert_eq!(stat("dmabuf_imports_live"), 0);
            if round == 5 {
                before = Some(Footprint::now());
            }
        }
        until("the last peer is forgotten", || stat("ipc_handles_live") == 0);
        before.unwrap().assert_flat("45 killed exporters");
    }

    #[test]
    fn an_importer_killed_at_any_point_leaves_nothing_behind() {
        alone!(2);
        let device = open(1);
        let mut before = None;
        for round in 0..50 {
            let memory = device.alloc(LEN as u64, 1).unwrap();
            let share = device.share(memory.addr(), 1).unwrap();
            let mut importer = Peer::start(Set::default());
            until("the dead owner's card is free", || importer.request("card 0") == "ok");
            importer.send(&format!("open 1 {}", peer::hex(&share.key())));
            for _ in 0..20 {
                importer.send("push 1 1");
            }
            pause(round);
            if round % 3 == 0 {
                // Freed while the other is at it.
                drop((share, memory));
            }
            importer.kill();
            until("its memory is given to others", || stat("ipc_quarantined_bytes") == 0);
            if round == 5 {
                before = Some((Footprint::now(), device.memory().used));
            }
        }
        let (before, used) = before.unwrap();
        assert_eq!((stat("ipc_shares_live"), stat("allocations_live")), (0, 0));
        assert!(device.memory().used <= used);
        // The thread hears of the last end a moment later.
        until("connections are closed", || Footprint::now().is_flat(before));
    }

    /// Stops a process, or lets it go on.
    fn signal(peer: &Peer, signal: i32) {
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(peer.id() as i32, signal) }, 0);
        if signal == libc::SIGSTOP {
            // Each thread stops when it comes to it.
            until("all its threads are stopped", || {
                let tasks = std::fs::read_dir(format!("/proc/{}/task", peer.id())).unwrap();
                tasks.flatten().all(|task| {
                    let stat = std::fs::read_to_string(task.path().join("stat"));
                    stat.unwrap_or_default().contains(") T ")
                })
            });
        }
    }

    /// More messages than a socket's queue holds.
    const MANY: u32 = 400;

    #[test]
    fn memory_taken_back_from_an_importer_that_is_stopped_comes_free_when_it_goes_on() {
        alone!(2);
        let device = open(1);
        let mut importer = Peer::on_card(0);
        let shared: Vec<_> = (0..MANY)
            .map(|_| {
                let memory = device.alloc(4096, 1).unwrap();
                let share = device.share(memory.addr(), 1).unwrap();
                // Opened and closed: kept for the next who opens it.
                importer.request_ok(&format!("open 1 {}", peer::hex(&share.key())));
                importer.request_ok("close 1");
                (share, memory)
            })
            .collect();
        assert_eq!(importer.stat("ipc_handles_live"), u64::from(MANY));
        signal(&importer, libc::SIGSTOP);
        drop(shared);
        assert_eq!(stat("ipc_quarantined_bytes"), u64::from(MANY) * 4096);
        signal(&importer, libc::SIGCONT);
        until("all is given to others", || stat("ipc_quarantined_bytes") == 0);
        assert_eq!(importer.stat("ipc_handles_live"), 0);
    }

    #[test]
    fn an_exporter_that_is_stopped_hears_what_was_let_go_when_it_goes_on() {
        alone!(2);
        let mut exporter = Peer::on_card(1);
        let device = open(0);
        let opened: Vec<_> = (0..MANY)
            .map(|slot| {
                let key = RemoteKey::parse(&exporter.share(slot, 4096, 1)).unwrap();
                key.open(&device).unwrap()
            })
            .collect();
        for slot in 0..MANY {
            exporter.request_ok(&format!("unshare {slot}"));
            exporter.request_ok(&format!("free {slot}"));
        }
        assert_eq!(exporter.stat("ipc_quarantined_bytes"), u64::from(MANY) * 4096);
        signal(&exporter, libc::SIGSTOP);
        drop(opened);
        until("all is let go", || stat("ipc_handles_live") == 0);
        signal(&exporter, libc::SIGCONT);
        exporter.until("stat ipc_quarantined_bytes", "0");
    }

    #[test]
    fn an_exporter_that_does_not_answer_is_not_asked_again_at_once() {
        alone!(2);
        let mut exporter = Peer::on_card(1);
        let keys: Vec<_> = (0..20).map(|slot| peer::hex(&exporter.share(slot, LEN, 1))).collect();
        let mut importer = Peer::on_card(0);
        signal(&exporter, libc::SIGSTOP);
        for key in &keys {
            let refused = importer.request(&format!("open 1 {key}"));
            assert!(refused.starts_with("failed TIMEOUT"), "{refused}");
            assert!(refused.contains("no answer in time; it is stopped"), "{refused}");
        }
        signal(&exporter, libc::SIGCONT);
        until("it is asked again", || importer.request(&format!("open 1 {}", keys[0])) == "ok");
        // It finds all that it was asked meanwhile.
        let asked =
            exporter.stat("ipc_leases_granted") + exporter.stat("ipc_peers_refused_resources");
        assert!(asked < 10, "asked {asked} times");
    }

    /// The stopped ones are waited for in vain for a second, each once.
    #[test]
    fn an_exporter_that_does_not_answer_does_not_delay_the_first_contact_with_another() {
        alone!(2);
        const STOPPED: usize = 5;
        let mut exporter = Peer::on_card(1);
        let mut others: Vec<Peer> = (0..2 * STOPPED).map(|_| Peer::start(Set::default())).collect();
        // They listen, and have nothing to share.
        others.iter_mut().for_each(|other| drop(other.request_ok("listen")));
        let key = exporter.share(1, LEN, 1);
        let key_of = |peer: &mut Peer| {
            let mut key = key.clone();
            let identity = peer::unhex(&peer.request_ok("identity"));
            key[1..33].copy_from_slice(&identity[1..]);
            RemoteKey::parse(&key).unwrap()
        };
        let device = open(0);
        let was_prompt = others.chunks_mut(2).any(|pair| {
            let [stopped, other] = pair else { unreachable!("of two") };
            let (stopped_key, other_key) = (key_of(stopped), key_of(other));
            signal(stopped, libc::SIGSTOP);
            let waits = {
                let device = device.clone();
                std::thread::spawn(move || stopped_key.open(&device))
            };
            std::thread::sleep(std::time::Duration::from_millis(50));
            let refused = other_key.open(&device).unwrap_err().to_string();
            assert!(refused.contains("does not share this memory"), "{refused}");
            let was_prompt = !waits.is_finished();
            assert_eq!(waits.join().unwrap().unwrap_err().kind(), ErrorKind::Timeout);
            signal(stopped, libc::SIGCONT);
            was_prompt
        });
        assert!(was_prompt, "every time the first had to be given up before");
    }

    #[test]
    fn a_grant_that_nobody_waits_for_any_more_is_released() {
        alone!(2);
        let mut exporter = Peer::on_card(1);
        let keys = [1, 2].map(|slot| peer::hex(&exporter.share(slot, LEN, 1)));
        let mut importer = Peer::on_card(0);
        importer.request_ok(&format!("open 1 {}", keys[0]));
        signal(&exporter, libc::SIGSTOP);
        let refused = importer.request(&format!("open 2 {}", keys[1]));
        assert!(refused.contains("no answer in time"), "{refused}");
        signal(&exporter, libc::SIGCONT);
        // It finds that nobody waits.
        exporter.until("stat ipc_peers_refused_resources", "1");
        exporter.request_ok("free 2");
        exporter.until("stat ipc_quarantined_bytes", "0");
        assert_eq!(importer.request_ok("gone 1"), "false");
        exporter.request_ok("free 1");
        assert_eq!(exporter.stat("ipc_quarantined_bytes"), LEN as u64);
        importer.request_ok("close 1");
        exporter.until("stat ipc_quarantined_bytes", "0");
    }

    #[test]
    fn a_forked_child_neither_answers_for_its_parent_nor_hides_its_end() {
        alone!(2);
        let mut exporter = Peer::on_card(1);
        let key = exporter.share(1, LEN, 1);
        // One that has only the connection to go by, connected before the fork.
        let mut importer = Peer::start(Set { refuse: &[libc::SYS_pidfd_open], ..Set::default() });
        importer.request_ok("card 0");
        let opened = importer.request(&format!("open 1 {}", peer::hex(&key)));
        let child: i32 = exporter.request_ok("fork").parse().unwrap();
        assert_eq!(opened, "ok");
        assert_eq!(importer.request_ok("gone 1"), "false");
        exporter.kill();
        importer.until("gone 1", "true");
        importer.request_ok("close 1");
        let refused = importer.request(&format!("open 1 {}", peer::hex(&key)));
        assert!(refused.contains("nobody listens"), "{refused}");
        // SAFETY: our own grandchild, which sleeps for an hour.
        unsafe { libc::kill(child, libc::SIGKILL) };
    }

    #[test]
    fn memory_of_a_card_that_was_reset_or_removed_is_not_shared_any_more() {
        alone!(2, ("SOFT_GAUDI_FAULTS", "yes"));
        let device = open(0);
        // More than is left of the driver's page, and a buffer that is not pinned yet: the card is asked.
        let alloc = ("hlthunk_device_memory_alloc", format!("alloc 3 {}", machine::driver_page()));
        let read = ("hlthunk_host_memory_map", "sum 1".to_owned());
        for ((call, request), fault, is_lost) in [
            (&alloc, "fail:EIO", false),
            (&alloc, "reset", true),
            (&read, "reset", true),
            (&alloc, "remove", true),
        ] {
            let mut exporter = Peer::start(Set::default());
            until("its last owner's card is free", || exporter.request("card 1") == "ok");
            let [kept, new] =
                [1, 2].map(|slot| RemoteKey::parse(&exporter.share(slot, LEN, 1)).unwrap());
            let opened = kept.open(&device).unwrap();
            machine::faults(&format!("{call} {fault}"));
            let refused = exporter.request(request);
            assert!(refused.starts_with("failed "), "{call} {fault}: {refused}");
            if !is_lost {
                // One call that failed is no reset.
                new.open(&device).unwrap();
                continue;
            }
            let withdrawn = |key: &RemoteKey| {
                let error = key.open(&device).err()?.to_string();
                Some(
                    error.contains("does not share this memory")
                        && error.contains("card was reset"),
                )
            };
            assert_eq!(withdrawn(&new), Some(true), "{fault}");
            until("what was open is revoked", || withdrawn(&kept) == Some(true));
            assert!(!opened.has_peer_ended(), "{fault}");
            drop(opened);
            until("it is let go", || stat("ipc_handles_live") == 0);
            // Nor is it shared again.
            let refused = exporter.request("reshare 1");
            assert!(refused.starts_with("failed "), "{fault}: {refused}");
        }
    }

    #[test]
    fn the_socket_of_a_killed_exporter_is_removed_by_the_next() {
        alone!(2);
        let mut exporter = Peer::on_card(1);
        let [_, first] = peer::sockets(&exporter.share(1, LEN, 1));
        assert!(std::path::Path::new(&first).exists(), "{first}");
        exporter.kill();
        let mut exporter = Peer::on_card(1);
        let [_, second] = peer::sockets(&exporter.share(1, LEN, 1));
        assert!(!std::path::Path::new(&first).exists(), "{first} is left");
        assert!(std::path::Path::new(&second).exists(), "{second}");
        drop(exporter);
        assert!(!std::path::Path::new(&second).exists(), "{second} is left by who ended in order");
    }

    #[test]
    fn whether_a_process_lives_is_known_of_exactly_that_process() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let packed = unhex(&peer.request_ok("identity"));
        let identity = Identity::parse(&packed).unwrap();
        identity.check_reachable().unwrap();
        assert!(!identity.is_own());
        assert_eq!(identity.is_alive(), Ok(true));
        let mut reused = packed.clone();
        reused[START] ^= 1;
        assert_eq!(Identity::parse(&reused).unwrap().is_alive(), Ok(false), "its number is reused");
        // In another pid namespace its number means nothing, and there is no connection.
        let mut elsewhere = packed;
        elsewhere[PID_NAMESPACE] ^= 1;
        let elsewhere = Identity::parse(&elsewhere).unwrap();
        assert!(elsewhere.to_string().contains("of another pid namespace"), "{elsewhere}");
        assert!(elsewhere.is_alive().is_err());
        peer.kill();
        until("the end is known", || identity.is_alive() == Ok(false));
    }

    /// The kernel gives the number away again: here at once, as it is asked to.
    #[test]
    fn a_process_that_got_the_number_of_an_ended_one_is_not_taken_for_it() {
        const LAST_PID: &str = "/proc/sys/kernel/ns_last_pid";
        alone!(2);
        let device = open(0);
        let mut peer = Peer::on_card(1);
        let number = peer.id();
        let keys = [peer.share(1, LEN, 1), peer.share_host(2, LEN, 1)];
        let keys = keys.map(|key| RemoteKey::parse(&key).unwrap());
        let identity = Identity::parse(&unhex(&peer.request_ok("identity"))).unwrap();
        // Start times are in hundredths of a second.
        std::thread::sleep(Duration::from_millis(20));
        peer.kill();
        let next = || {
            std::fs::write(LAST_PID, (number - 1).to_string())?;
            Ok::<_, std::io::Error>(Peer::start(Set::default()))
        };
        let mut another = match next() {
            Ok(another) => another,
            Err(error) => return println!("skipped: {LAST_PID}: {error}"),
        };
        for _ in 0..100 {
            if another.id() == number {
                break;
            }
            another = next().unwrap();
        }
        if another.id() != number {
            return println!("skipped: others took the number each time");
        }
        until("the dead owner's card is free", || another.request("card 1") == "ok");
        another.share(1, LEN, 2);
        assert_eq!(identity.is_alive(), Ok(false));
        let [memory, host] = keys;
        let relays = [Relay::new(&memory).map(drop), Relay::new(&host).map(drop)];
        for way in [memory.open(&device).map(drop)].into_iter().chain(relays) {
            let error = way.unwrap_err();
            assert_eq!(error.errno(), Some(libc::ESRCH), "{error}");
        }
        assert_eq!(
            (another.stat("ipc_leases_granted"), another.sum(1)),
            (0, peer::hash(&machine::pattern(LEN, 2)))
        );
    }

    #[test]
    fn a_thousand_cycles_leave_nothing_behind() {
        alone!(2);
        let mut peer = Peer::on_card(1);
        let device = open(0);
        let keep_none = Limits { handles: 0, bytes: 0 };
        let key = RemoteKey::parse(&peer.share(1, LEN, 1)).unwrap();
        let cycle = |_: u32| drop(key.open(&device).unwrap());
        device.set_handle_limits(keep_none);
        (0..20).for_each(cycle);
        let before = Footprint::now();
        (0..1000).for_each(cycle);
        before.assert_flat("opened and closed");
        assert_eq!((stat("ipc_handles_opened"), stat("ipc_handles_closed")), (1020, 1020));

        // New memory each time.
        let used: u64 = peer.request_ok("used").parse().unwrap();
        let fds: usize = peer.request_ok("fds").parse().unwrap();
        let mut importer = Peer::start(Set::default());
        drop(device);
        until("our card is free", || importer.request("card 0") == "ok");
        importer.request_ok("limits 3 1000000000");
        for round in 0..200 {
            let key = peer::hex(&peer.share(2, 8192, round));
            importer.request_ok(&format!("open 1 {key}"));
            peer.request_ok("unshare 2");
            peer.request_ok("free 2");
            importer.request_ok("close 1");
        }
        peer.until("used", &used.to_string());
        importer.until("stat ipc_handles_live", "0");
        assert_eq!(importer.stat("ipc_descriptors_received"), 200);
        assert_eq!(peer.stat("ipc_shares"), 201);
        drop(importer);
        until("descriptors are closed", || peer.request_ok("fds").parse::<usize>().unwrap() <= fds);
    }
}
