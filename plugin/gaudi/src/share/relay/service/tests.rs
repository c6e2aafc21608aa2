//! The service without its thread: what it accepts, answers and keeps, step by step.

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::super::super::key::{Fields, Token};
use super::super::super::wire::parse_answer;
use super::super::wire::Piece;
use super::*;
use crate::backend::fake::{BUDGET, Fake};

/// A service without a thread, with one peer, and the peer's end of the connection.
fn service_and_peer() -> (&'static Service, State, OwnedFd) {
    let owner = Owner::started().unwrap();
    let service = Box::leak(Box::new(Service::new(owner).unwrap()));
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let (ours, theirs) = pair.unwrap();
    let socket = Arc::new(CloseOnFork::new(ours).unwrap());
    let (ring, counted) = (Ring::new(4096).unwrap().0, Counted::new(&service.peers).unwrap());
    let peer = Peer { socket, ring, _counted: counted };
    service.new.lock().unwrap().push(peer);
    let mut state = State::default();
    state.take_new(service);
    (service, state, theirs)
}

/// A request for memory that is not shared.
fn request(id: u32, len: usize) -> Vec<u8> {
    let piece = Piece { token: Token([7; 8]), addr: 0, len: len as u32, at: 0 };
    let pieces = Pieces::from_elem(piece, 1);
    Request::Copy { id, access: Access::Read, pieces }.pack()
}

#[test]
fn a_peer_that_never_reads_its_answers_is_hung_up_on() {
    let (service, mut state, theirs) = service_and_peer();
    let answer = |state: &mut State, id| state.answer(service, 1, id, Outcome::Done);
    // A peer that is only late to read can have this many answers waiting.
    (0..=MAX_REQUESTS as u32).for_each(|id| answer(&mut state, id));
    for id in 0..=MAX_REQUESTS as u32 {
        let mut message = [0; 64];
        let len = socket::receive_plain(theirs.as_fd(), &mut message).unwrap();
        let expected = Answer { id, outcome: Outcome::Done };
        assert_eq!(Answer::parse(&message[..len]), Some(expected));
    }
    set_socket_send_buffer_size(&*state.peers[&1].socket, 1).unwrap();
    (0..1000).for_each(|id| answer(&mut state, id));
    assert!(state.peers.is_empty());
    assert!(state.timeout(service).is_none(), "nothing is left to do for it");
}

#[test]
fn messages_that_are_cut_short_or_too_long_end_a_relay_with_the_reason() {
    let whole = request(1, 1);
    let longer = [&whole[..], &[0]].concat();
    for message in (1..whole.len()).map(|len| &whole[..len]).chain([&longer[..]]) {
        let (service, mut state, theirs) = service_and_peer();
        socket::send(theirs.as_fd(), message, None).unwrap();
        state.receive(service, 1, Server::Thread);
        let mut answer = [0; 64];
        let len = socket::receive_plain(theirs.as_fd(), &mut answer).unwrap();
        assert_eq!(parse_answer(&answer[..len]), Some(Err(Refusal::Malformed)));
        assert!(state.peers.is_empty());
    }
}

#[test]
fn a_thread_of_the_program_takes_in_small_requests_and_leaves_all_else() {
    let (service, mut state, theirs) = service_and_peer();
    let takes = |state: &mut State, message: &[u8], descriptor, server: Server| {
        socket::send(theirs.as_fd(), message, descriptor).unwrap();
        state.receive(service, 1, server);
        let was_answered = socket::receive_plain(theirs.as_fd(), &mut [0; 64]).is_ok();
        let unread = socket::receive_plain(state.peers[&1].socket.as_fd(), &mut [0; MAX_LEN]);
        assert_eq!(unread.is_err(), was_answered);
        was_answered
    };
    assert!(takes(&mut state, &request(1, MAX_ASSISTED), None, Server::Assistant));
    assert!(!takes(&mut state, &request(1, MAX_ASSISTED + 1), None, Server::Assistant));
    assert!(takes(&mut state, &request(1, MAX_ASSISTED + 1), None, Server::Thread));
    assert!(!takes(&mut state, &Request::Ring.pack(), None, Server::Assistant));
    assert!(takes(&mut state, &Request::Ring.pack(), None, Server::Thread));
    // It would have to close the descriptor.
    let enclosed = Some(theirs.as_fd());
    assert!(!takes(&mut state, &request(1, 1), enclosed, Server::Assistant));
    assert!(!takes(&mut state, &[7; 9], None, Server::Assistant));
    // The limit is for all requests of one call together.
    for id in 1..4 {
        socket::send(theirs.as_fd(), &request(id, MAX_ASSISTED / 2), None).unwrap();
    }
    state.receive(service, 1, Server::Assistant);
    let answers = || socket::receive_plain(theirs.as_fd(), &mut [0; 64]).ok();
    assert_eq!(std::iter::from_fn(answers).count(), 2);
    state.receive(service, 1, Server::Thread);
    drop(theirs);
    state.receive(service, 1, Server::Assistant);
    assert_eq!(state.peers.len(), 1, "its end is left, too");
    state.receive(service, 1, Server::Thread);
    assert_eq!((state.peers.len(), state.ended.peers.len()), (0, 1));
}

#[test]
fn peers_and_rings_end_without_the_lock_and_not_on_a_thread_of_the_program() {
    let (service, mut state, theirs) = service_and_peer();
    state.hang_up(service, 1);
    *service.state() = state;
    let left = || service.state().ended.peers.len();
    assert_eq!(socket::receive_plain(theirs.as_fd(), &mut [0; 64]), Ok(0), "at once");
    assert!(service.serve(service.state(), &[], Server::Assistant).is_some(), "for the thread");
    assert_eq!(left(), 1);
    service.serve(service.state(), &[], Server::Thread);
    assert_eq!(left(), 0);
}

#[test]
fn cards_of_requests_that_are_refused_end_or_are_abandoned_are_kept_until_the_lock_is_free() {
    let (service, mut state, _theirs) = service_and_peer();
    let (fake, device) = Fake::device();
    let memory = device.alloc(4096, 1).unwrap();
    let share = device.share(memory.addr(), 1).unwrap();
    let token = Fields::parse(&share.key()).unwrap().token;
    let good = Piece { token, addr: memory.addr().0, len: 8, at: 0 };
    let begin = |state: &mut State, pieces: &[Piece]| {
        let ring = Arc::clone(&state.peers[&1].ring);
        state.begin(service, (1, 1), (Access::Read, &pieces.into()), ring, Server::Thread);
    };
    let kept = |state: &mut State| {
        let cards = std::mem::take(&mut state.ended.cards);
        cards.iter().filter(|card| Arc::ptr_eq(card, &device)).count()
    };
    begin(&mut state, &[good, Piece { token: Token([7; 8]), ..good }]);
    assert_eq!(kept(&mut state), 1, "refused");
    let busy = BUDGET as usize;
    for _ in 0..=busy {
        begin(&mut state, &[good]);
    }
    assert_eq!((state.work.len(), kept(&mut state)), (busy + 1, 0));
    assert!(state.timeout(service).is_none(), "the end of a copy wakes the thread");
    state.hang_up(service, 1);
    state.advance(service, Server::Thread);
    assert_eq!(kept(&mut state), 1, "abandoned");
    drop(std::mem::take(&mut state.ended));
    fake.finish_all();
    state.advance(service, Server::Thread);
    assert_eq!((state.work.len(), kept(&mut state)), (0, 1), "ended");
    assert_eq!(state.ended.rings.len(), 1, "nothing else has it any more");
}

#[test]
fn a_thread_of_the_program_does_not_pin_rings_and_closes_no_card() {
    let (service, mut state, _theirs) = service_and_peer();
    let (fake, device) = Fake::device();
    let memory = device.alloc(4096, 1).unwrap();
    let share = device.share(memory.addr(), 1).unwrap();
    let token = Fields::parse(&share.key()).unwrap().token;
    let piece = Piece { token, addr: memory.addr().0, len: 8, at: 0 };
    let begin = |state: &mut State, server: Server| {
        let ring = Arc::clone(&state.peers[&1].ring);
        state.begin(service, (1, 1), (Access::Read, &[piece].into()), ring, server);
    };
    let waiting = |state: &State| state.work.iter().filter(|work| work.running.is_none()).count();
    begin(&mut state, Server::Assistant);
    state.advance(service, Server::Assistant);
    assert_eq!(waiting(&state), 1, "the card has not used the ring");
    assert!(state.timeout(service).is_some(), "for the thread");
    state.advance(service, Server::Thread);
    begin(&mut state, Server::Assistant);
    assert_eq!((state.work.len(), waiting(&state)), (2, 0));
    for _ in 2..=BUDGET {
        begin(&mut state, Server::Assistant);
    }
    assert_eq!(waiting(&state), 1, "the card is busy");
    fake.finish_all();
    state.advance(service, Server::Assistant);
    assert_eq!(waiting(&state), 0);
    fake.finish_all();
    state.advance(service, Server::Thread);
    *service.state() = state;
    drop((share, memory));
    drop(device);
    assert!(service.serve(service.state(), &[], Server::Assistant).is_some(), "for the thread");
    assert_eq!(service.state().ended.closing.len(), 1);
    assert!(service.serve(service.state(), &[], Server::Assistant).is_some(), "still");
    service.serve(service.state(), &[], Server::Thread);
    assert!(service.state().ended.is_empty());
}

#[test]
fn a_panic_in_a_thread_of_the_program_wakes_the_thread_that_hangs_up() {
    let (service, ..) = service_and_peer();
    let is_woken = || {
        let mut event = [PollFd::new(&*service.notifier, PollFlags::IN)];
        poll(&mut event, Some(&Timespec::default())).unwrap() > 0
    };
    service.notifier.clear();
    drop(WokenAfterPanic(service));
    assert!(!is_woken());
    let panic = std::panic::AssertUnwindSafe(|| {
        let _woken = WokenAfterPanic(service);
        panic!("of a test");
    });
    std::panic::catch_unwind(panic).unwrap_err();
    assert!(is_woken());
}

#[test]
fn peers_are_hung_up_on_after_a_panic_that_may_have_lost_their_requests() {
    let (service, state, theirs) = service_and_peer();
    *service.state() = state;
    let panic = std::panic::AssertUnwindSafe(|| {
        let _state = service.state();
        panic!("of a test");
    });
    std::panic::catch_unwind(panic).unwrap_err();
    assert!(service.state().peers.is_empty());
    // Before anything is closed, which may take long.
    assert_eq!(socket::receive_plain(theirs.as_fd(), &mut [0; 64]), Ok(0));
    service.serve(service.state(), &[], Server::Thread);
    assert!(service.state.try_lock().is_ok(), "others serve again");
}
