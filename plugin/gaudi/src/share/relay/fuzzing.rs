//! For the crate `fuzz`: messages of relays, and an owner that answers anything.

use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, send, socketpair,
};

use super::super::key::{Bus, Fields, Token};
use super::super::{Identity, RemoteKey};
use super::wire::{Answer, Outcome, Piece, Request};
use super::{Access, Relay, RelayPiece};
use crate::Side;

/// Any bytes are a message or refused.
pub(in super::super) fn message(bytes: &[u8]) {
    if let Some(request) = Request::parse(bytes) {
        assert_eq!(&request.pack()[..], bytes, "nothing is ignored");
    }
    if let Some(answer) = Answer::parse(bytes) {
        assert_eq!(&answer.pack()[..], bytes, "nothing is ignored");
    }
}

/// See [`fuzzing`](super::super::fuzzing).
pub(in super::super) fn ring_request() -> Vec<u8> {
    Request::Ring.pack()
}

/// As above.
pub(in super::super) fn copy_request(
    get: bool,
    id: u32,
    key: &Fields,
    pieces: &[[u32; 3]],
) -> Vec<u8> {
    let access = if get { Access::Read } else { Access::Write };
    let pieces = pieces.iter().map(|[offset, len, at]| Piece {
        token: key.token,
        addr: key.base.wrapping_add(u64::from(*offset)),
        len: *len,
        at: *at,
    });
    Request::Copy { id, access, pieces: pieces.collect() }.pack()
}

/// As above.
pub(in super::super) fn answer_of(bytes: &[u8]) -> Option<String> {
    Answer::parse(bytes).map(|answer| format!("{:?}", answer.outcome))
}

const MARGIN: usize = 64;
/// Longer than a unit of the ring, so that there are several chunks.
const LEN: usize = 100_000;
const POISON: u8 = 0x5c;

/// Puts and gets whose owner answers as the input says: they end with success or an error, and change no memory except what
/// the get reads into.
pub(in super::super) fn owner(bytes: &[u8]) {
    let Ok(own) = Identity::own() else { return };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let Ok((ours, theirs)) = pair else { return };
    let Some(relay) = Relay::to_anyone(*own, ours) else { return };
    let (base, len) = (1 << 40, LEN as u64);
    let fields = Fields { peer: *own, token: Token([7; 8]), source: Bus::HOST, base, len };
    let key = RemoteKey::parse(&fields.pack()).expect("a key");
    let mut got = vec![POISON; LEN + 2 * MARGIN];
    let mut sent: Vec<u8> = (0..LEN).map(|at| at as u8).collect();
    let piece = |access, offset: usize, memory: *mut u8, len| {
        let (remote, local) = (base + offset as u64, Side::Host(memory));
        RelayPiece { access, key, remote, local, device: None, len }
    };
    let (from, to) = (sent.as_mut_ptr(), got[MARGIN..].as_mut_ptr());
    let pieces = [
        piece(Access::Write, 0, from, LEN / 2),
        piece(Access::Read, 0, to, LEN),
        piece(Access::Write, LEN / 2, from.wrapping_add(LEN / 2), 100),
        piece(Access::Write, 5, from.wrapping_add(9), 100),
    ];
    // SAFETY: both vectors live until the jobs were dropped, and nothing else uses them.
    let start = |pieces: &[RelayPiece]| unsafe { relay.start(pieces) }.ok();
    let mut jobs: Vec<_> = [&pieces[..2], &pieces[2..]].into_iter().flat_map(start).collect();
    let mut input = bytes.iter().copied();
    for _ in 0..200 {
        let Some(how) = input.next() else { break };
        answer(how, &mut input, &theirs);
        relay.advance();
        jobs.retain_mut(|job| job.poll().is_none());
    }
    drop(theirs);
    // The owner has hung up: all jobs end.
    for job in &mut jobs {
        let _ = job.wait();
    }
    drop((jobs, relay));
    let around = got[..MARGIN].iter().chain(&got[MARGIN + LEN..]);
    assert!(around.copied().all(|byte| byte == POISON), "memory was written beyond what is read");
    assert!(sent.iter().enumerate().all(|(at, byte)| *byte == at as u8), "what is sent stays");
}

/// One message of the owner.
fn answer(how: u8, input: &mut impl Iterator<Item = u8>, socket: &OwnedFd) {
    let outcome = match how % 4 {
        0 => Outcome::Unknown,
        1 => Outcome::Failed,
        _ => Outcome::Done,
    };
    let send_all = |message: &[u8]| {
        let _ = send(socket, message, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    };
    match how >> 6 {
        // The answer to a request that was received, if there is one.
        0 | 1 => {
            let mut message = [0; super::wire::MAX_LEN];
            let received = recv(socket, &mut message, RecvFlags::DONTWAIT);
            let len = received.map_or(0, |(_, len)| len.min(message.len()));
            match Request::parse(&message[..len]) {
                Some(Request::Copy { id, .. }) => send_all(&Answer { id, outcome }.pack()),
                // A relay must send only valid messages.
                None => assert_eq!(len, 0, "not understood: {:?}", &message[..len]),
                Some(Request::Ring) => {}
            }
        }
        // An answer to a request that may not exist.
        2 => send_all(&Answer { id: input.next().unwrap_or(0).into(), outcome }.pack()),
        // Anything.
        _ => send_all(&input.take(usize::from(how & 0x3f)).collect::<Vec<u8>>()),
    }
}
