//! Who must get nothing: other users, forged and replayed keys, garbage, crowds.

mod machine;
mod peer;

use gaudi::Side;
use gaudi::share::{Access, Relay, RelayPiece, RemoteKey};
use machine::{alone, open, pattern, read};
use peer::{
    Peer, Set, copy, hash, hex, knock, message, open_request, sockets, stat, stranger, until,
};

/// Where things are in a key (`docs/design/ipc-protocol.md`).
const INSTANCE: std::ops::Range<usize> = 7..13;
const PID: std::ops::Range<usize> = 13..17;
const START: std::ops::Range<usize> = 17..21;
const UID: std::ops::Range<usize> = 29..33;
const TOKEN: std::ops::Range<usize> = 33..41;
const LEN: usize = 10_000;

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

/// A word by which `cargo xtask test ipc` finds them.
mod ipc {
    use super::*;

    /// Numbers that look random and are the same every time.
    struct Dice(u64);

    impl Dice {
        fn below(&mut self, end: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % end as u64) as usize
        }

        fn bytes(&mut self, len: usize) -> Vec<u8> {
            (0..len).map(|_| self.below(256) as u8).collect()
        }
    }

    /// An exporter with one piece of memory, and its key.
    fn exporter() -> (Peer, Vec<u8>) {
        let mut exporter = Peer::on_card(1);
        let key = exporter.share(1, LEN, 5);
        (exporter, key)
    }

    #[test]
    fn another_user_gets_nothing() {
        alone!(2);
        const NOBODY: u32 = 65_500;
        let (mut exporter, key) = exporter();
        let stranger = Set { uid: Some(NOBODY), ..Set::default() };
        let mut stranger = match Peer::try_start(stranger) {
            Ok(stranger) => stranger,
            Err(error) => {
                println!("skipped: another user's process: {error}");
                return;
            }
        };
        // Cards of its own: the software machine is per user.
        stranger.request_ok("card 0");
        let refused = stranger.request(&format!("open 1 {}", hex(&key)));
        assert!(refused.starts_with("failed it is user "), "{refused}");
        // It knows the token, and lies about the user.
        let mut forged = key.clone();
        forged[UID].copy_from_slice(&NOBODY.to_le_bytes());
        let refused = stranger.request(&format!("open 1 {}", hex(&forged)));
        assert!(refused.starts_with("failed PERMISSION_DENIED"), "{refused}");
        // It talks to the sockets itself.
        let fetch = hex(&open_request(&key));
        let [in_no_file, in_folder] = sockets(&key);
        assert_eq!(stranger.request_ok(&format!("knock {in_no_file} {fetch}")), "hung up");
        let answer = stranger.request_ok(&format!("knock {in_folder} {fetch}"));
        assert!(answer.starts_with("not connected"), "{answer}");
        assert!(exporter.stat("ipc_peers_refused_user") >= 2);
        assert_eq!(exporter.stat("ipc_leases_granted"), 0);
        assert_eq!(stranger.stat("ipc_handles_opened"), 0);
        assert_eq!(exporter.sum(1), hash(&pattern(LEN, 5)), "untouched");
        drop(stranger);
        let _ = std::fs::remove_dir_all(format!("/dev/shm/soft-gaudi-{NOBODY}"));
        // The same words from the same user are understood.
        assert_eq!(knock(&in_no_file, &open_request(&key)), "8 bytes, 1 descriptors");
        assert_eq!(knock(&in_folder, &open_request(&key)), "8 bytes, 1 descriptors");
    }

    /// What it sends is closed unread, and the end of some files takes for ever.
    #[test]
    fn another_user_cannot_stop_the_thread_that_closes_its_connection() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let stranger = Set { uid: Some(65_500), ..Set::default() };
        let mut stranger = match Peer::try_start(stranger) {
            Ok(stranger) => stranger,
            Err(error) => {
                println!("skipped: another user's process: {error}");
                return;
            }
        };
        let [name, _] = sockets(&key);
        let before = exporter.stat("ipc_peers_refused_user");
        // What it sends is there when its connection is accepted.
        exporter.stop();
        stranger.request_ok(&format!("linger {name}"));
        exporter.go_on();
        // Else there is no answer.
        assert_eq!(knock(&name, &open_request(&key)), "8 bytes, 1 descriptors");
        assert_eq!(exporter.stat("ipc_peers_refused_user"), before + 1);
        drop(stranger);
    }

    #[test]
    fn a_damaged_key_opens_nothing_else() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let other = exporter.share(2, LEN, 6);
        let device = open(0);
        let here = device.alloc(LEN as u64, 1).unwrap();
        let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
        for round in 0..300 {
            let mut forged = key.clone();
            for _ in 0..=dice.below(3) {
                let at = dice.below(forged.len());
                // Random, or a part of the other key: nearly right.
                forged[at] = if dice.below(2) == 0 { other[at] } else { dice.below(256) as u8 };
            }
            let Ok(parsed) = RemoteKey::parse(&forged) else { continue };
            let Ok(opened) = parsed.open(&device) else { continue };
            assert_eq!(forged, key, "round {round}: damaged, and opens something");
            let there = opened.translate(parsed.base(), LEN).unwrap();
            copy(&device, Side::Device(here.addr()), Side::Device(there), LEN).unwrap();
            assert_eq!(read(&device, here.addr(), LEN), pattern(LEN, 5), "round {round}");
        }
        // The token alone.
        for at in TOKEN {
            let mut forged = key.clone();
            forged[at] ^= 0x10;
            let error = RemoteKey::parse(&forged).unwrap().open(&device).unwrap_err();
            assert!(error.to_string().contains("does not share this memory"), "{error}");
        }
        let mut mixed = key.clone();
        mixed[TOKEN].copy_from_slice(&other[TOKEN]);
        RemoteKey::parse(&mixed).unwrap().open(&device).unwrap_err();
        // An unused process id, or that a process with another start has.
        let mut forged = key.clone();
        forged[PID.start] ^= 1;
        let error = RemoteKey::parse(&forged).unwrap().open(&device).unwrap_err();
        assert!(error.to_string().contains("has ended"), "{error}");
        assert_eq!(error.errno(), Some(libc::ESRCH), "how a transport knows");
        let mut forged = key.clone();
        forged[START.start] ^= 1;
        let error = RemoteKey::parse(&forged).unwrap().open(&device).unwrap_err();
        assert!(error.to_string().contains("does not share this memory"), "{error}");
        assert!(stat("ipc_refused_withdrawn") >= 9 && stat("ipc_refused_ended") >= 1);
        assert_eq!(exporter.sum(2), hash(&pattern(LEN, 6)), "untouched");
    }

    #[test]
    fn a_replayed_key_opens_nothing_after_the_memory_was_freed() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let base = RemoteKey::parse(&key).unwrap().base();
        let device = open(0);
        exporter.request_ok("free 1");
        let again = exporter.share(2, LEN, 6);
        assert_eq!(RemoteKey::parse(&again).unwrap().base(), base, "the same place");
        RemoteKey::parse(&key).unwrap().open(&device).unwrap_err();
        let [socket, _] = sockets(&key);
        assert_eq!(knock(&socket, &open_request(&key)), "8 bytes, 0 descriptors");
        assert_eq!(stat("ipc_handles_opened"), 0);
    }

    #[test]
    fn who_listens_in_an_exporters_place_is_passed_over() {
        alone!(2);
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, bind, listen, socket};
        let (_exporter, key) = exporter();
        // As if the exporter were in another network namespace: its name is not taken in ours.
        let mut elsewhere = key.clone();
        elsewhere[INSTANCE].iter_mut().for_each(|byte| *byte ^= 0x5a);
        let [in_no_file, in_folder] = sockets(&elsewhere);
        let name = SocketAddrUnix::new_abstract_name(&in_no_file.as_bytes()[1..]).unwrap();
        let squatter = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
        bind(&squatter, &name).unwrap();
        listen(&squatter, 8).unwrap();
        let mut importer = Peer::on_card(0);
        let open = format!("open 1 {}", hex(&elsewhere));
        let refused = importer.request(&open);
        assert!(refused.contains("another process listens in its place"), "{refused}");
        // The exporter's own socket in the file system is found behind the squatter's: it is the
        // exporter that refuses, because the key is not exactly its own.
        let [_, real] = sockets(&key);
        std::os::unix::fs::symlink(real, &in_folder).unwrap();
        let opened = importer.request(&open);
        std::fs::remove_file(&in_folder).unwrap();
        assert!(opened.contains("does not share this memory"), "{opened}");
    }

    #[test]
    fn garbage_and_crowds_do_not_keep_the_broker_from_its_work() {
        alone!(2);
        let (mut exporter, key) = exporter();
        let [in_no_file, in_folder] = sockets(&key);
        let before: usize = exporter.request_ok("fds").parse().unwrap();
        let mut dice = Dice(77);
        for round in 0..300 {
            let mut sent = dice.bytes(round % 90);
            if round % 3 == 0 && sent.len() >= 8 {
                sent[..8].copy_from_slice(&message(dice.below(6) as u8, &[]));
            }
            let socket = if round % 2 == 0 { &in_no_file } else { &in_folder };
            let answer = knock(socket, &sent);
            assert!(!answer.contains("1 descriptors"), "round {round}: {answer}");
            assert!(!answer.contains("not connected"), "round {round}: {answer}");
        }
        // A crowd that connects and says nothing, more than there is capacity for, on both sockets.
        let names = [&in_no_file, &in_folder];
        let crowd: Vec<_> = (0..200).map(|at| stranger(names[at % 2], &[])).collect();
        let mut importer = Peer::on_card(0);
        importer.request_ok(&format!("open 1 {}", hex(&key)));
        assert_eq!(importer.request_ok("pull 1"), hash(&pattern(LEN, 5)).to_string());
        assert_eq!(importer.stat("ipc_descriptors_received"), 1);
        assert!(exporter.stat("ipc_peers_refused_malformed") > 100);
        drop((crowd, importer));
        let flat =
            |exporter: &mut Peer| exporter.request_ok("fds").parse::<usize>().unwrap() <= before;
        until("the broker has closed all connections", || flat(&mut exporter));
        assert_eq!(exporter.sum(1), hash(&pattern(LEN, 5)), "untouched");
    }
    /// The number of a user in a namespace of its own means nothing outside.
    #[test]
    fn another_user_who_has_our_number_in_a_namespace_of_its_own_gets_nothing() {
        alone!(2);
        let own = rustix::process::geteuid().as_raw();
        let (mut exporter, key) = exporter();
        let set = Set { uid: Some(65_500), claims: Some(own), ..Set::default() };
        let mut stranger = match Peer::try_start(set) {
            Ok(stranger) => stranger,
            Err(error) => {
                println!("skipped: another user's process in a user namespace: {error}");
                return;
            }
        };
        let fetch = hex(&open_request(&key));
        let [in_no_file, in_folder] = sockets(&key);
        assert_eq!(stranger.request_ok(&format!("knock {in_no_file} {fetch}")), "hung up");
        let answer = stranger.request_ok(&format!("knock {in_folder} {fetch}"));
        assert!(answer.starts_with("not connected"), "{answer}");
        assert!(exporter.stat("ipc_peers_refused_user") >= 1);
        assert_eq!(exporter.stat("ipc_leases_granted"), 0);
    }

    #[test]
    fn long_messages_and_many_descriptors_are_refused_and_closed() {
        alone!(2);
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
        let (mut exporter, key) = exporter();
        let [name, _] = sockets(&key);
        let before: usize = exporter.request_ok("fds").parse().unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let files = [std::os::fd::AsFd::as_fd(&file); 250];
        let send_files = |socket: &std::os::fd::OwnedFd, message: &[u8]| {
            let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(250))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
            let parts = [std::io::IoSlice::new(message)];
            let _ = sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL);
        };
        let relay = message(2, &key);
        let mut strangers = Vec::new();
        for round in 0..60 {
            let socket = stranger(&name, &[]);
            match round % 4 {
                // Longer than any message; with the right beginning.
                0 => drop(send(
                    &socket,
                    &[&open_request(&key)[..], &[0; 60_000]].concat(),
                    SendFlags::NOSIGNAL,
                )),
                1 => send_files(&socket, &open_request(&key)),
                // No descriptor of these is a ring.
                2 => send_files(&socket, &relay),
                // A relay that works, and then descriptors with every request.
                _ => {
                    peer::send_with(&socket, &relay, &peer::ring(64 << 10));
                    for _ in 0..20 {
                        send_files(&socket, &[1, 0, 0, 0, 0, 0, 0, 0]);
                    }
                }
            }
            strangers.push(socket);
        }
        let mut importer = Peer::on_card(0);
        until("an honest peer is served", || {
            importer.request(&format!("open 1 {}", hex(&key))) == "ok"
        });
        // They are still connected. Those that were granted something have a lease.
        let held = |exporter: &mut Peer| exporter.request_ok("fds").parse::<usize>().unwrap();
        until("few descriptors are held", || held(&mut exporter) <= before + 64);
        drop((strangers, importer));
        until("all are closed", || held(&mut exporter) <= before + 4);
        assert_eq!(exporter.sum(1), hash(&pattern(LEN, 5)), "untouched");
    }

    /// The other direction: the ring and the answers are the owner's.
    #[test]
    fn an_owner_that_answers_nonsense_fails_the_copy_and_nothing_else() {
        alone!(2);
        const MARGIN: usize = 64;
        let manners = [
            "unasked",
            "twice",
            "other-request",
            "no-such-request",
            "no-such-outcome",
            "garbage",
            "long",
            "lease",
            "scribble",
            "shrink",
        ];
        for manner in manners {
            let mut owner = Peer::start(Set::default());
            let key = peer::unhex(&owner.request_ok(&format!("hostile-owner {manner}")));
            let key = RemoteKey::parse(&key).unwrap();
            let (len, base) = (key.len() as usize, key.base());
            let mut host = vec![0x5c; len + 2 * MARGIN];
            let local = Side::Host(host[MARGIN..].as_mut_ptr());
            for access in [Access::Read, Access::Write] {
                let relay = Relay::new(&key).unwrap();
                let piece = RelayPiece { access, key, remote: base, local, device: None, len };
                // SAFETY: the memory is kept until the job has ended.
                let ended = unsafe { relay.start(&[piece]) }.unwrap().wait();
                println!("{manner}, {access:?}: {ended:?}");
                let may_succeed = ["scribble", "shrink", "twice"].contains(&manner);
                assert!(ended.is_err() || may_succeed, "{manner}");
            }
            let around = host[..MARGIN].iter().chain(&host[MARGIN + len..]);
            assert!(around.copied().all(|byte| byte == 0x5c), "{manner}: beyond what was read");
        }
        // Honest owners are not held to account for it.
        let mut honest = Peer::start(Set::default());
        let key = RemoteKey::parse(&honest.share_host(1, LEN, 9)).unwrap();
        let mut host = vec![0; LEN];
        let local = Side::Host(host.as_mut_ptr());
        let (remote, len) = (key.base(), LEN);
        let relay = Relay::new(&key).unwrap();
        let piece = RelayPiece { access: Access::Read, key, remote, local, device: None, len };
        // SAFETY: as above.
        unsafe { relay.start(&[piece]) }.unwrap().wait().unwrap();
        assert_eq!(host, pattern(LEN, 9));
    }
}
