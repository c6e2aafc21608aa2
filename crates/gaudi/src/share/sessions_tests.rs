//! Conversations with a broker, without processes: both ends of each socket are here.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::holds::Holds;
use super::key::Token;
use super::message::{MESSAGE_LEN, Offered, Reply, Request};
use super::sessions::{Holder, Offers, Released, Sessions};
use super::socket;

/// What is on offer: this, and nothing else.
struct One(Offered);

impl Offers for One {
    fn fetch(&self, offered: &Offered) -> Option<OwnedFd> {
        let file = || std::fs::File::open("/dev/null").expect("a Linux");
        (self.0 == *offered).then(|| file().into())
    }
}

const OFFERED: Offered = Offered { base: 0x1001_0000_0000_0000, token: Token([7; 8]) };
const OTHER: Offered = Offered { token: Token([8; 8]), ..OFFERED };

/// A connection; the peer's end of it.
fn connect(sessions: &mut Sessions) -> (OwnedFd, bool) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("sockets");
    let welcome = sessions.welcome(ours, None);
    (theirs, welcome)
}

/// The broker's turn: everybody may have spoken.
fn turn(sessions: &mut Sessions) {
    let spoke = vec![true; sessions.connections().len()];
    sessions.listen(&spoke, &One(OFFERED), None).run();
}

fn say(peer: &OwnedFd, request: Request, file: Option<&Holds>) {
    socket::send(peer.as_fd(), &request.pack(), file.map(AsFd::as_fd)).expect("there is room");
}

/// What the broker said: a reply, and whether a descriptor came with it.
fn hear(peer: &OwnedFd) -> Option<(Reply, bool)> {
    let mut message = [0; MESSAGE_LEN];
    let (len, fd) = socket::receive(peer.as_fd(), &mut message).ok()?;
    Reply::parse(&message[..len]).map(|reply| (reply, fd.is_some()))
}

/// A peer that stays, and its sheet.
fn stay(sessions: &mut Sessions) -> (OwnedFd, Holds) {
    let (peer, _) = connect(sessions);
    let holds = Holds::new().expect("a sheet");
    say(&peer, Request::Stay, Some(&holds));
    turn(sessions);
    assert_eq!(hear(&peer), Some((Reply::Granted, false)));
    (peer, holds)
}

/// Frees the memory; tells whether it was given to others.
fn free(sessions: &mut Sessions) -> Arc<AtomicBool> {
    let given = Arc::new(AtomicBool::new(false));
    let later = Arc::clone(&given);
    let release = Box::new(move || later.store(true, Ordering::Relaxed));
    if let Some(now) = sessions.freed(OFFERED.base, release) {
        now();
    }
    given
}

fn is_given(given: &AtomicBool) -> bool {
    given.load(Ordering::Relaxed)
}

#[test]
fn memory_is_handed_to_who_knows_the_token() {
    let mut sessions = Sessions::default();
    let (friend, _) = connect(&mut sessions);
    say(&friend, Request::Fetch(OFFERED), None);
    let (stranger, _) = connect(&mut sessions);
    say(&stranger, Request::Fetch(OTHER), None);
    turn(&mut sessions);
    assert_eq!(hear(&friend), Some((Reply::Granted, true)));
    assert_eq!(hear(&stranger), Some((Reply::Unknown, false)));
    assert_eq!(sessions.connections().len(), 1, "who was refused is sent away");
}

#[test]
fn freed_memory_is_given_to_others_when_its_holder_lets_go_or_hangs_up() {
    for hangs_up in [false, true] {
        let mut sessions = Sessions::default();
        let (peer, mut holds) = stay(&mut sessions);
        let (idle, _sheet) = stay(&mut sessions);
        holds.add(OFFERED).expect("room");
        assert!(!sessions.withdrawn(&OFFERED), "not by us");
        let given = free(&mut sessions);
        turn(&mut sessions);
        assert!(!is_given(&given));
        assert_eq!(hear(&peer), Some((Reply::Withdrawn(OFFERED), false)));
        assert_eq!(hear(&idle), None, "who does not hold it is not told");
        // Of something else, or by somebody else.
        say(&peer, Request::LetGo(OTHER), None);
        say(&idle, Request::LetGo(OFFERED), None);
        turn(&mut sessions);
        assert!(!is_given(&given));
        match hangs_up {
            true => drop(peer),
            false => say(&peer, Request::LetGo(OFFERED), None),
        }
        turn(&mut sessions);
        assert!(is_given(&given));
    }
}

#[test]
fn a_peer_that_does_not_read_for_a_while_is_told_everything_in_the_end() {
    const MANY: u64 = 1000;
    let mut sessions = Sessions::default();
    let (peer, mut holds) = stay(&mut sessions);
    let offered = |number: u64| Offered { base: number << 12, ..OFFERED };
    for number in 1..=MANY {
        holds.add(offered(number)).expect("room");
        sessions.withdrawn(&offered(number));
    }
    assert!(sessions.is_behind(), "no queue is as long as that");
    let mut told = Vec::new();
    while told.len() < MANY as usize {
        let before = told.len();
        while let Some((Reply::Withdrawn(offered), false)) = hear(&peer) {
            told.push(offered);
        }
        assert!(told.len() > before, "told {before} of {MANY}");
        turn(&mut sessions);
    }
    assert_eq!(told, (1..=MANY).map(offered).collect::<Vec<_>>());
    assert!(!sessions.is_behind());
}

#[test]
fn memory_that_nobody_holds_is_given_to_others_at_once() {
    let mut sessions = Sessions::default();
    let (_peer, mut holds) = stay(&mut sessions);
    let line = holds.add(OFFERED).expect("room");
    holds.strike(line);
    holds.add(OTHER).expect("room");
    sessions.withdrawn(&OFFERED);
    assert!(is_given(&free(&mut sessions)), "another token's hold is not this one's");
}

#[test]
fn memory_that_this_process_holds_itself_waits_too() {
    let mut sessions = Sessions::default();
    sessions.hold(Holder::OWN, OFFERED);
    assert!(sessions.withdrawn(&OFFERED));
    let given = free(&mut sessions);
    assert!(!is_given(&given));
    let mut released = Released::default();
    sessions.let_go(Holder::OWN, &OFFERED, &mut released);
    released.run();
    assert!(is_given(&given));
}

#[test]
fn who_makes_no_sense_is_sent_away() {
    let mut sessions = Sessions::default();
    let long = [Request::Stay.pack(), Request::Stay.pack()].concat();
    let short = &Request::Stay.pack()[1..];
    let early = Request::LetGo(OFFERED).pack();
    for message in [&long[..], short, &early, b"x"] {
        let (peer, _) = connect(&mut sessions);
        socket::send(peer.as_fd(), message, None).expect("there is room");
        turn(&mut sessions);
        assert_eq!(hear(&peer), Some((Reply::NotUnderstood, false)));
        assert_eq!(sessions.connections().len(), 0);
    }
    // Something that is no sheet is not looked at.
    let (peer, _) = connect(&mut sessions);
    let null = std::fs::File::open("/dev/null").expect("a Linux");
    socket::send(peer.as_fd(), &Request::Stay.pack(), Some(null.as_fd())).expect("room");
    turn(&mut sessions);
    assert_eq!(hear(&peer), Some((Reply::Granted, false)));
    sessions.withdrawn(&OFFERED);
    assert_eq!(hear(&peer), None);
}

#[test]
fn a_crowd_is_bounded_and_who_stays_is_not_of_it() {
    let mut sessions = Sessions::default();
    let (_staying, _sheet) = stay(&mut sessions);
    let crowd: Vec<(OwnedFd, bool)> = (0..70).map(|_| connect(&mut sessions)).collect();
    assert_eq!(crowd.iter().filter(|(_, welcome)| *welcome).count(), 64);
    let (last, _) = crowd.last().expect("a crowd");
    assert_eq!(hear(last), Some((Reply::Crowded, false)));
    assert!(sessions.patience().is_some(), "not for ever");
    drop(crowd);
    turn(&mut sessions);
    assert_eq!(sessions.connections().len(), 1);
    assert_eq!(sessions.patience(), None);
}
