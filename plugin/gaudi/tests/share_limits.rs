//! What is refused though somebody could have been given it: ranges that were not leased, leases that
//! cannot be recorded, connections of strangers, identities that are made up.

mod machine;
mod peer;

use std::sync::Arc;

use gaudi::share::{Access, Relay, RelayPiece, RemoteKey};
use gaudi::{Allocation, Device, Error, Side, SubmitError};
use machine::{alone, open, pattern, read, write};
use peer::{Peer, Set, hash, hex, sockets, stat, unhex, until};

/// Where things are in a key (`docs/design/ipc-protocol.md`).
const IDENTITY: std::ops::Range<usize> = 1..33;
const PID: std::ops::Range<usize> = 13..17;
const TOKEN: std::ops::Range<usize> = 33..41;
const SOURCE: usize = 42;
const PAGE_NUMBER: usize = 45;
const LENGTH: std::ops::Range<usize> = 53..58;
const LEN: usize = 10_000;

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

/// Answers a system call of this thread, and of those that it starts, with an error.
///
/// Not [`Set::refuse`]: that begins before the process has a card, and the software card needs some of these calls.
fn refuse(call: i64, errno: i32) {
    let statement = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let is = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let end = libc::BPF_RET | libc::BPF_K;
    // Of mmap only what maps a file for several processes: the rest is the allocator's, and the loader's.
    let flags = std::mem::offset_of!(libc::seccomp_data, args) as u32 + 3 * 8;
    let is_any = u8::from(call != libc::SYS_mmap);
    let mut program = [
        statement(load, 0, 0, 0),
        statement(is, 0, 3, call as u32),
        statement(load, 0, 0, flags),
        statement(is, 0, 1 - is_any, libc::MAP_SHARED as u32),
        statement(end, 0, 0, libc::SECCOMP_RET_ERRNO | errno as u32),
        statement(end, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program lives across the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const filter), 0);
    }
}

/// Imports a peer's memory, and copies it; the bytes.
fn import(device: &Arc<Device>, key: &RemoteKey, ours: &Allocation) -> Result<Vec<u8>, Error> {
    let opened = key.open(device)?;
    let theirs = opened.translate(key.base(), LEN).expect("all of it");
    peer::copy(device, Side::Device(ours.addr()), Side::Device(theirs), LEN)?;
    Ok(read(device, ours.addr(), LEN))
}

/// Reads a peer's memory by a relay, and writes it as it was; the bytes.
fn relay(key: &RemoteKey) -> Result<Vec<u8>, Error> {
    let relay = Relay::new(key)?;
    let mut host = vec![0; LEN];
    for access in [Access::Read, Access::Write] {
        let local = Side::Host(host.as_mut_ptr());
        let piece =
            RelayPiece { access, key: *key, remote: key.base(), local, device: None, len: LEN };
        // SAFETY: the memory is there until the job has ended.
        match unsafe { relay.start(&[piece]) } {
            Ok(mut job) => job.wait()?,
            Err(SubmitError::Busy) => unreachable!("there is no other job"),
            Err(SubmitError::Failed(error)) => return Err(error),
        }
    }
    Ok(host)
}

/// In this variable: the number of a system call, the error it ends with, and a key.
const FILTER: &str = "UCX_GAUDI_TEST_FILTER";

/// An importer that has a card, and then a filter.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn import_under_a_filter() {
    let Ok(what) = std::env::var(FILTER) else { return };
    let words: Vec<&str> = what.split(' ').collect();
    // A hang ends here, and not in order.
    // SAFETY: a number; nothing else of this process uses the signal.
    unsafe { libc::alarm(30) };
    machine::set_up("gaudi2");
    let device = open(0);
    let ours = device.alloc(LEN as u64, 1).unwrap();
    let own = pattern(LEN, 8);
    write(&device, ours.addr(), &own);
    refuse(words[0].parse().unwrap(), words[1].parse().unwrap());
    // The second time finds what the first has left.
    for _ in 0..2 {
        let key = RemoteKey::parse(&unhex(words[2])).map_err(|error| error.to_string());
        let imported = key
            .clone()
            .and_then(|key| import(&device, &key, &ours).map_err(|error| error.to_string()));
        let relayed = key.and_then(|key| relay(&key).map_err(|error| error.to_string()));
        for (way, copied) in [("import", imported), ("relay", relayed)] {
            match copied {
                Ok(bytes) if bytes == pattern(LEN, 5) => println!("\n{way}: works"),
                Ok(_) => println!("\n{way}: wrong bytes"),
                Err(reason) => println!("\n{way}: {reason}"),
            }
        }
        write(&device, ours.addr(), &own);
        assert_eq!(read(&device, ours.addr(), LEN), own, "its own card works");
    }
    println!("ended in order");
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    /// An exporter on card 1 with one piece of memory, and its key.
    fn exporter_with(set: Set) -> (Peer, Vec<u8>) {
        let mut exporter = Peer::start(set);
        exporter.request_ok("card 1");
        let key = exporter.share(1, LEN, 5);
        (exporter, key)
    }

    fn exporter() -> (Peer, Vec<u8>) {
        exporter_with(Set::default())
    }

    fn importer_with(set: Set) -> Peer {
        let mut importer = Peer::start(set);
        importer.request_ok("card 0");
        importer
    }

    /// The exporter frees its memory: it must wait for the importer, which has it open.
    fn assert_quarantined(exporter: &mut Peer, importer: &mut Peer) {
        exporter.request_ok("unshare 1");
        exporter.request_ok("free 1");
        exporter.request_ok("restore");
        assert_eq!(exporter.stat("ipc_quarantined_bytes"), LEN as u64, "not recorded");
        importer.request_ok("close 1");
        exporter.until("stat ipc_quarantined_bytes", "0");
    }

    #[test]
    fn a_key_that_differs_from_the_cached_one_is_refused() {
        alone!(2);
        let (mut exporter, key) = exporter();
        // Another peer's memory, right behind.
        exporter.share(2, 1 << 20, 6);
        let device = open(0);
        let good = RemoteKey::parse(&key).unwrap();
        let opened = good.open(&device).unwrap();
        for len in [LEN as u64 + 1, 1 << 20, LEN as u64 - 1, 1] {
            let mut forged = key.clone();
            forged[LENGTH].copy_from_slice(&len.to_le_bytes()[..5]);
            let forged = RemoteKey::parse(&forged).unwrap();
            assert_eq!(forged.len(), len);
            let refused = forged.open(&device);
            let reached =
                refused.as_ref().ok().and_then(|o| o.translate(good.base(), len as usize));
            assert!(refused.is_err(), "length {len}: opened, reaches {reached:?}");
        }
        for (at, what) in [(PAGE_NUMBER, "address"), (SOURCE, "source device")] {
            let mut forged = key.clone();
            forged[at] ^= 1;
            assert!(RemoteKey::parse(&forged).unwrap().open(&device).is_err(), "{what}");
        }
        assert_eq!(opened.translate(good.base(), LEN + 1), None);
        assert!(good.open(&device).is_ok(), "the right one still opens");
        assert_eq!(stat("ipc_handles_live"), 1);
    }

    #[test]
    fn an_exporter_short_of_descriptors_grants_nothing_that_it_does_not_record() {
        alone!(2);
        for left in 0..4 {
            let (mut exporter, key) = exporter();
            let mut importer = importer_with(Set::default());
            exporter.request_ok(&format!("exhaust {left}"));
            let opened = importer.request(&format!("open 1 {}", hex(&key)));
            println!("{left} descriptors left: {opened}");
            if opened == "ok" {
                assert_quarantined(&mut exporter, &mut importer);
            } else {
                assert!(opened.contains("it lacks descriptors"), "{opened}");
                exporter.request_ok("restore");
                until("it is granted when there are descriptors again", || {
                    importer.request(&format!("open 1 {}", hex(&key))) == "ok"
                });
                assert_quarantined(&mut exporter, &mut importer);
            }
        }
    }

    #[test]
    fn leases_leave_the_last_descriptors_to_the_application_and_the_peer_is_told_why() {
        alone!(2);
        // An eighth of the limit.
        const FILES: u32 = 120;
        const RESERVE: usize = 15;
        let mut exporter = Peer::on_card(1);
        let before = exporter.request_ok("fds");
        exporter.share(0, LEN, 5);
        let listening: usize = exporter.request_ok("fds").parse().unwrap();
        assert!(listening <= before.parse::<usize>().unwrap() + 4);
        let keys: Vec<_> =
            (1..=FILES).map(|slot| hex(&exporter.share(slot, LEN, slot.into()))).collect();
        assert_eq!(exporter.request_ok("fds"), listening.to_string(), "sharing takes none");
        exporter.request_ok(&format!("nofile {FILES}"));
        let mut importer = importer_with(Set::default());
        let mut open = |slot: usize| importer.request(&format!("open {slot} {}", keys[slot]));
        let (refused, why) = (0..keys.len())
            .find_map(|slot| Some((slot, open(slot))).filter(|(_, answer)| answer != "ok"))
            .expect("there are not so many descriptors");
        println!("{refused}: {why}");
        assert!(why.starts_with("failed OUT_OF_MEMORY"), "{why}");
        assert!(why.contains("it lacks descriptors") && why.contains("ulimit -n"), "{why}");
        // The connection that was refused may still be open.
        until("they are left to the exporter", || {
            exporter.request_ok("restore");
            exporter.request_ok("exhaust 0").parse::<usize>().unwrap() >= RESERVE
        });
        // Without any it refuses, too, and is not silent.
        let why = open(refused);
        assert!(why.contains("it lacks descriptors"), "{why}");
        exporter.request_ok("restore");
        // What is only kept for later gives way.
        importer.request_ok("close 0");
        importer.request_ok(&format!("open {refused} {}", keys[refused]));
    }

    #[test]
    fn an_importer_leaves_the_last_descriptors_to_the_application() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let keys: Vec<_> =
            (2..8).map(|slot| hex(&exporter.share(slot, LEN, slot.into()))).collect();
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        importer.request_ok("nofile 120");
        // Two more than are left to the application, and one for the dma-buf on its way.
        importer.request_ok("exhaust 18");
        for key in &keys {
            importer.request_ok(&format!("open 2 {key}"));
            importer.request_ok("close 2");
        }
        let opened = keys.iter().enumerate().find_map(|(slot, key)| {
            let answer = importer.request(&format!("open {} {key}", slot + 2));
            (answer != "ok").then_some(answer)
        });
        let refused = opened.expect("what is in use does not give way");
        println!("{refused}");
        assert!(refused.starts_with("failed OUT_OF_MEMORY"), "{refused}");
        assert!(
            refused.contains("of 120 descriptors") && refused.contains("ulimit -n"),
            "{refused}"
        );
        importer.request_ok("restore");
        importer.request_ok("exhaust 0");
        let refused = importer.request(&format!("open 9 {}", keys[5]));
        assert!(refused.starts_with("failed OUT_OF_MEMORY"), "{refused}");
        assert_eq!(importer.request_ok("gone 1"), "false");
        importer.request_ok("restore");
        importer.request_ok(&format!("open 9 {}", keys[5]));
        assert_eq!(importer.request_ok("pull 9"), hash(&pattern(LEN, 7)).to_string());
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn a_lease_ends_when_the_peer_closes_its_connection_and_by_nothing_it_sends() {
        alone!(2);
        use rustix::net::{RecvFlags, SendFlags, recv, send};
        let (mut exporter, key) = exporter();
        let [name, _] = sockets(&key);
        let peer = peer::stranger(&name, &peer::open_request(&key));
        let mut message = [0; 64];
        let (_, len) = recv(&peer, &mut message, RecvFlags::empty()).unwrap();
        assert_eq!(&message[..len], peer::message(0x80, &[]));
        for sent in [&b"nonsense"[..], &peer::open_request(&key), &peer::message(0x80, &[])] {
            send(&peer, sent, SendFlags::NOSIGNAL).unwrap();
        }
        exporter.request_ok("unshare 1");
        exporter.request_ok("free 1");
        let (_, len) = recv(&peer, &mut message, RecvFlags::empty()).unwrap();
        assert_eq!(len, 0, "it is revoked, and nothing else was answered");
        assert_eq!(exporter.stat("ipc_quarantined_bytes"), LEN as u64);
        drop(peer);
        exporter.until("stat ipc_quarantined_bytes", "0");
    }

    #[test]
    fn an_exporter_that_sends_without_end_keeps_an_importer_from_nothing() {
        alone!(2);
        let (mut exporter, key) = exporter();
        // This process stands for the hostile exporter.
        let mut hostile = key.clone();
        hostile[IDENTITY].copy_from_slice(&peer::identity().pack()[1..]);
        let listener = peer::listener(&sockets(&hostile)[0]);
        std::thread::spawn(move || peer::grant_once_and_send_for_ever(&listener));
        let mut importer = importer_with(Set::default());
        let granted = importer.request(&format!("open 1 {}", hex(&hostile)));
        assert!(granted.contains("a file of another length"), "{granted}");
        let refused = importer.request(&format!("open 1 {}", hex(&hostile)));
        assert!(refused.contains("no answer in"), "{refused}");
        // The thread that takes in what exporters send has a turn for others. After a wait in vain the next ones are
        // shorter, for a busy machine perhaps too short.
        until("an honest exporter is heard", || {
            importer.request(&format!("open 1 {}", hex(&key))) == "ok"
        });
        importer.request_ok("close 1");
        exporter.request_ok("free 1");
        exporter.until("stat ipc_quarantined_bytes", "0");
    }

    #[test]
    fn a_lease_needs_nothing_that_a_filter_in_the_importer_may_refuse() {
        alone!(2);
        let calls: [&'static [libc::c_long]; 3] = [
            &[libc::SYS_memfd_create],
            &[libc::SYS_pidfd_getfd],
            &[libc::SYS_pidfd_open, libc::SYS_pidfd_getfd, libc::SYS_memfd_create],
        ];
        for refuse in calls {
            let (mut exporter, key) = exporter();
            let mut importer = importer_with(Set { refuse, ..Set::default() });
            importer.request_ok(&format!("open 1 {}", hex(&key)));
            assert_eq!(importer.request_ok("pull 1"), hash(&pattern(LEN, 5)).to_string());
            assert_quarantined(&mut exporter, &mut importer);
        }
    }

    /// What an importer calls, and what is said of the import and of the relay without it.
    const CALLS: [(&str, i64, &str, &str); 21] = [
        ("socket", libc::SYS_socket, "socket: ", "socket: "),
        ("connect", libc::SYS_connect, "nobody listens (", "nobody listens ("),
        ("getsockopt", libc::SYS_getsockopt, "failed [", "failed ["),
        ("sendmsg", libc::SYS_sendmsg, "sendmsg: ", "sendmsg: "),
        ("recvmsg", libc::SYS_recvmsg, "failed [", "works"),
        ("recvfrom", libc::SYS_recvfrom, "works", "failed ["),
        ("shutdown", libc::SYS_shutdown, "works", "works"),
        ("ppoll", libc::SYS_ppoll, "failed [", "works"),
        ("epoll_create1", libc::SYS_epoll_create1, "epoll: ", "works"),
        ("epoll_ctl", libc::SYS_epoll_ctl, "epoll: ", "works"),
        ("epoll_pwait", libc::SYS_epoll_pwait, "works", "works"),
        ("eventfd2", libc::SYS_eventfd2, "works", "works"),
        ("memfd_create", libc::SYS_memfd_create, "works", "memfd_create: "),
        ("fallocate", libc::SYS_fallocate, "works", "fallocate: "),
        // The software card needs it for an import.
        ("fcntl", libc::SYS_fcntl, "importing a dma-buf failed [", "fcntl(F_ADD_SEALS): "),
        ("mmap", libc::SYS_mmap, "works", "mmap: "),
        ("openat", libc::SYS_openat, "cannot tell who it is: ", "cannot tell who it is: "),
        ("getrandom", libc::SYS_getrandom, "getrandom: ", "getrandom: "),
        ("pidfd_open", libc::SYS_pidfd_open, "works", "works"),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, "works", "works"),
        // Where there is none, libc takes the older call.
        ("clone3", libc::SYS_clone3, "works|no thread: ", "works"),
    ];

    #[test]
    fn an_importer_under_a_filter_gets_the_bytes_or_a_reason() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let import = |call: i64, errno: i32| {
            let mut importer = machine::child("import_under_a_filter");
            importer.env(FILTER, format!("{call} {errno} {}", hex(&key)));
            for variable in ["SOFT_GAUDI_NODE", "SOFT_GAUDI_DEVICES"] {
                importer.env(variable, std::env::var_os(variable).unwrap());
            }
            let end = importer.output().unwrap();
            (String::from_utf8_lossy(&end.stdout).into_owned(), end)
        };
        for (name, call, imports, relays) in CALLS {
            for errno in [libc::EPERM, libc::ENOSYS] {
                let (mut said, mut end) = import(call, errno);
                if said.contains("no answer in") {
                    // A busy machine: it waits for a second only.
                    (said, end) = import(call, errno);
                }
                let case = format!("{name}, error {errno}, {}: {said}", end.status);
                let case = case + &String::from_utf8_lossy(&end.stderr);
                assert!(end.status.success() && said.contains("ended in order"), "{case}");
                for (way, expected) in [("import: ", imports), ("relay: ", relays)] {
                    let outcomes = said.lines().filter_map(|line| line.strip_prefix(way));
                    let outcomes: Vec<&str> = outcomes.collect();
                    assert_eq!(outcomes.len(), 2, "{case}");
                    let is_expected = |said: &&str| expected.split('|').any(|it| said.contains(it));
                    assert!(outcomes.iter().all(is_expected), "{way}{expected}; {case}");
                }
            }
        }
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn strangers_without_a_token_hold_no_descriptors_of_an_exporter() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let before: usize = exporter.request_ok("fds").parse().unwrap();
        let [in_no_file, in_folder] = sockets(&key);
        // A request of version 1 to stay connected; a request with a wrong token; nothing.
        let mut guessed = peer::open_request(&key);
        guessed[8 + TOKEN.start] ^= 1;
        let stay = [&b"ugsh\x01\x02\0\0"[..], &[0; 16]].concat();
        let mut crowd: Vec<Peer> = (0..4).map(|_| Peer::start(Set::default())).collect();
        for stranger in &mut crowd {
            for sent in [&stay[..], &guessed, &[]] {
                for name in [&in_no_file, &in_folder] {
                    let sent = if sent.is_empty() { "0".to_owned() } else { hex(sent) };
                    stranger.request_ok(&format!("crowd {name} 100 {sent}"));
                }
            }
        }
        // All of 2400 have been served or refused when an honest peer is.
        let mut importer = importer_with(Set::default());
        until("the honest peer is served", || {
            importer.request(&format!("open 1 {}", hex(&key))) == "ok"
        });
        // Of those that said nothing, 64 at most.
        until("strangers hold little", || {
            exporter.request_ok("fds").parse::<usize>().unwrap() <= before + 4 + 64
        });
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn forged_identities_leave_no_descriptors_in_the_importer() {
        alone!(2);
        let (_exporter, key) = exporter();
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        let before: usize = importer.request_ok("fds").parse().unwrap();
        // Start time, pid namespace, user namespace: each alone, and all with the right token.
        for forged in 0..400_usize {
            let mut other = key.clone();
            let at = [17, 21, 25][forged % 3];
            other[at..at + 2].copy_from_slice(&(forged as u16 + 1).to_le_bytes());
            let refused = importer.request(&format!("open 2 {}", hex(&other)));
            assert!(refused.starts_with("failed "), "{forged}: {refused}");
        }
        let after: usize = importer.request_ok("fds").parse().unwrap();
        assert!(after <= before, "{before} descriptors before, {after} after");
        // The importer's own process id, under the exporter's name.
        let mut own = key.clone();
        own[PID].copy_from_slice(&importer.id().to_le_bytes());
        let refused = importer.request(&format!("open 2 {}", hex(&own)));
        assert!(refused.contains("it is of a process that has ended"), "{refused}");
        assert_eq!(importer.request_ok("pull 1"), hash(&pattern(LEN, 5)).to_string(), "as before");
    }

    #[test]
    fn a_process_that_cannot_listen_says_that_as_the_reason_why_sharing_fails() {
        alone!(2);
        let before = unready_sockets();
        let mut exporter = Peer::start(Set { refuse: &[libc::SYS_listen], ..Set::default() });
        exporter.request_ok("card 1");
        let mut fds = Vec::new();
        for _ in 0..3 {
            fds.push(exporter.request_ok("fds"));
            let refused = exporter.request(&format!("share 1 {LEN} 5"));
            assert!(refused.starts_with("failed CHANNEL_FAILED"), "{refused}");
            assert!(refused.contains("listening for peers failed"), "{refused}");
            assert!(refused.contains("Operation not permitted"), "{refused}");
        }
        assert_eq!(exporter.request_ok("fds"), fds[1], "{fds:?}");
        assert_eq!(exporter.stat("ipc_shares"), 0);
        // Those of other tests are there for a moment only.
        let is_left = || unready_sockets().difference(&before).next().is_some();
        let left = (0..500).all(|_| {
            std::thread::sleep(std::time::Duration::from_millis(10));
            is_left()
        });
        assert!(!left, "socket files were left: {:?}", unready_sockets());
    }

    /// Socket files of processes that do not listen yet.
    fn unready_sockets() -> std::collections::HashSet<std::ffi::OsString> {
        let files =
            ["/dev/shm", "/tmp"].into_iter().filter_map(|folder| std::fs::read_dir(folder).ok());
        let names = files.flatten().flatten().map(|file| file.file_name());
        let is_unready = |name: &str| name.starts_with("ucx-gaudi-") && name.ends_with(".new");
        names.filter(|name| is_unready(&name.to_string_lossy())).collect()
    }

    #[test]
    fn a_thread_that_did_not_start_is_started_by_the_next_share() {
        alone!(2);
        let mut exporter = Peer::start(Set::default());
        let refused = exporter.request("threadless-listen");
        assert!(refused.contains("no thread: "), "{refused}");
        exporter.request_ok("card 1");
        let key = exporter.share(1, LEN, 5);
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn a_forked_child_of_the_importer_does_not_end_its_leases() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        importer.request_ok("forkdrop");
        assert_eq!(importer.request_ok("pull 1"), hash(&pattern(LEN, 5)).to_string());
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn a_forked_child_of_the_exporter_does_not_end_its_shares() {
        alone!(2);
        let (mut exporter, key) = exporter();
        exporter.request_ok("forkdrop");
        let mut importer = importer_with(Set::default());
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        assert_quarantined(&mut exporter, &mut importer);
    }

    #[test]
    fn what_a_former_tenant_left_behind_the_end_of_shared_memory_is_cleared() {
        alone!(1);
        const PAGES: usize = 3 * 4096;
        let device = open(0);
        for len in [LEN, 4096 * 2 + 1, PAGES - 1] {
            let former = device.alloc(PAGES as u64, 1).unwrap();
            let base = former.addr();
            write(&device, base, &[0xab; PAGES]);
            drop(former);
            let memory = device.alloc(len as u64, 1).unwrap();
            assert_eq!(memory.addr(), base, "in the same place");
            let share = device.share(base, 1).unwrap();
            drop((share, memory));
            // All that the dma-buf reached.
            let whole = device.alloc(PAGES as u64, 1).unwrap();
            assert_eq!(whole.addr(), base, "in the same place");
            let found = read(&device, base, PAGES);
            assert!(found[..len].iter().all(|byte| *byte == 0xab), "{len}: its own bytes stay");
            assert!(found[len..].iter().all(|byte| *byte == 0), "{len}: {:x?}", &found[len..]);
        }
    }

    #[test]
    fn memory_is_cleared_before_it_is_handed_out_if_the_process_wants_that() {
        alone!(1);
        let device = open(0);
        for clear in [false, true] {
            let clear_allocations = Some(clear);
            let options = gaudi::Options { clear_allocations, ..gaudi::Options::default() };
            gaudi::runtime().configure(options);
            let former = device.alloc(LEN as u64, 1).unwrap();
            let base = former.addr();
            write(&device, base, &[0xab; LEN]);
            drop(former);
            let memory = device.alloc(LEN as u64, 1).unwrap();
            assert_eq!(memory.addr(), base, "in the same place");
            let expected = if clear { 0 } else { 0xab };
            assert!(read(&device, base, LEN).iter().all(|byte| *byte == expected), "{clear}");
        }
    }
}
