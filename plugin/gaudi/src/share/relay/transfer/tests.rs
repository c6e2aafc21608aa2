//! Relays whose owner the test plays, message by message.

use std::os::fd::AsRawFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::super::super::descriptors;
use super::super::super::key::{Bus, Fields, Token};
use super::super::Wakeups;
use super::super::wire::MAX_LEN;
use super::*;
use crate::process::holds_in_child;

/// A relay to the other end of a socket pair, as if that were this process.
fn relay() -> (Arc<Relay>, RemoteKey, OwnedFd) {
    relay_to(*Identity::own().unwrap())
}

fn relay_to(owner: Identity) -> (Arc<Relay>, RemoteKey, OwnedFd) {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (ours, theirs) = pair.unwrap();
    let socket = descriptors::keep(ours).unwrap();
    let (ring, _file) = Ring::new(SMALL_RING).unwrap();
    let relay =
        Relay::connected(owner, socket, ring, Counted::new(RELAYS.get_or_default()).unwrap());
    let (token, source, base, len) = (Token([7; 8]), Bus::HOST, 1 << 40, 1 << 30);
    let key = Fields { peer: owner, token, source, base, len };
    (relay, RemoteKey::parse(&key.pack()).unwrap(), theirs)
}

fn get(relay: &Arc<Relay>, key: RemoteKey, to: &mut [u8]) -> Relayed {
    let (access, remote, len) = (Access::Read, key.base(), to.len());
    let local = Side::Host(to.as_mut_ptr());
    let piece = RelayPiece { access, key, remote, local, device: None, len };
    // SAFETY: the tests keep their memory until the job has ended.
    unsafe { relay.start(&[piece]) }.unwrap()
}

#[test]
fn an_owner_that_hangs_up_and_runs_is_not_said_to_have_ended() {
    let (relay, key, theirs) = relay();
    let mut host = [0; 100];
    let mut job = get(&relay, key, &mut host);
    drop(theirs);
    let error = job.wait().unwrap_err();
    assert!(error.to_string().contains("it closed the relay"), "{error}");
    assert_eq!(error.errno(), None);
}

#[test]
fn a_message_of_the_owner_wakes_a_sleeper() {
    let (relay, _key, theirs) = relay();
    let notifier = Notifier::new().unwrap();
    let wakeups = Wakeups::new(&notifier).unwrap();
    let is_woken = || {
        let mut event = [PollFd::new(&wakeups, PollFlags::IN)];
        poll(&mut event, Some(&Timespec::default())).unwrap() > 0
    };
    wakeups.add(&relay).unwrap();
    assert!(!is_woken());
    socket::send(theirs.as_fd(), &[1], None).unwrap();
    assert!(is_woken());
    wakeups.remove(&relay);
    assert!(!is_woken());
}

#[test]
fn a_relay_in_which_a_thread_has_panicked_is_closed() {
    let (relay, key, _theirs) = relay();
    let mut host = [0; 100];
    let mut job = get(&relay, key, &mut host);
    let panic = std::panic::AssertUnwindSafe(|| {
        let mut state = relay.state();
        assert!(state.chunks[0].take().is_some());
        panic!("of a test");
    });
    std::panic::catch_unwind(panic).unwrap_err();
    let error = job.wait().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    assert!(relay.is_closed());
}

#[test]
fn where_the_kernel_cannot_be_asked_an_owner_has_ended_when_it_listens_no_more() {
    let own = Identity::own().unwrap();
    let owner = Identity { instance: *b"asked!", pid_ns: own.pid_ns + 1, ..*own };
    let listening = socket::listen_abstract(&owner).unwrap();
    let after_hanging_up = || {
        let (relay, key, theirs) = relay_to(owner);
        let mut host = [0; 100];
        let mut job = get(&relay, key, &mut host);
        drop(theirs);
        job.wait().unwrap_err().errno()
    };
    assert_eq!(after_hanging_up(), Some(libc::ESRCH));
    assert!(owner.is_alive().unwrap(), "it may serve others");
    drop(listening);
    assert_eq!(after_hanging_up(), Some(libc::ESRCH));
    assert!(!owner.is_alive().unwrap());
}

#[test]
fn a_larger_ring_is_used_when_the_owner_has_taken_it_and_else_the_small_one() {
    for (outcome, len) in [(Outcome::Done, LARGE_RING), (Outcome::Failed, SMALL_RING)] {
        let (relay, key, theirs) = relay();
        let mut host = vec![0; 2 << 20];
        let job = get(&relay, key, &mut host);
        let request = || {
            let mut message = [0; MAX_LEN];
            let received = socket::receive(theirs.as_fd(), &mut message);
            received.ok().map(|(len, file)| (Request::parse(&message[..len]), file.is_some()))
        };
        assert_eq!(request(), Some((Some(Request::Ring), true)));
        assert_eq!(request(), None, "nothing is asked for before the answer");
        assert!(relay.notify_when_ready(&Arc::new(Notifier::new().unwrap())));
        socket::send(theirs.as_fd(), &Answer { id: 0, outcome }.pack(), None).unwrap();
        relay.advance();
        assert_eq!(relay.state().ring.as_ref().map(|ring| ring.len()), Some(len));
        assert!(matches!(request(), Some((Some(Request::Copy { id: 1, .. }), false))));
        assert!(!relay.is_closed());
        drop(job);
    }
}

#[test]
fn a_child_forked_while_another_thread_has_the_lock_is_refused_and_waits_for_nothing() {
    let (relay, key, _theirs) = relay();
    let mut host = [0; 100];
    let mut job = get(&relay, key, &mut host);
    let of_another_thread = relay.state();
    let notifier = Arc::new(Notifier::new().unwrap());
    assert!(holds_in_child(|| {
        let is_over = job.has_ended() && !relay.is_closed() && relay.can_start();
        let refused = job.wait().unwrap_err().to_string().contains("forked");
        is_over && refused && !relay.notify_when_ready(&notifier)
    }));
    drop(of_another_thread);
    assert!(job.poll().is_none() && !job.has_ended() && !relay.is_closed());
}

/// As if too many descriptors of this user were in flight.
#[test]
fn the_small_ring_goes_on_where_the_larger_one_cannot_be_sent() {
    const SO_PASSRIGHTS: libc::c_int = 83;
    let (relay, key, theirs) = relay();
    let (no, len) = (0_i32, size_of::<libc::c_int>() as libc::socklen_t);
    // SAFETY: an option that is a number.
    let refused = unsafe {
        let (socket, value) = (theirs.as_raw_fd(), (&raw const no).cast());
        libc::setsockopt(socket, libc::SOL_SOCKET, SO_PASSRIGHTS, value, len)
    };
    if refused != 0 {
        println!("skipped: no socket can refuse descriptors before Linux 6.16");
        return;
    }
    let mut host = vec![0; 2 << 20];
    let job = get(&relay, key, &mut host);
    let mut message = [0; MAX_LEN];
    let (len, _) = socket::receive(theirs.as_fd(), &mut message).unwrap();
    assert!(matches!(Request::parse(&message[..len]), Some(Request::Copy { id: 1, .. })));
    assert!(!relay.is_closed() && relay.state().new_ring.is_none());
    drop(job);
}
