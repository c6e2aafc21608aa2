//! An owner of memory that answers relays as none should.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, accept, recv, recvmsg, send,
};

use super::{identity, listener, message, sockets};

/// What it says it shares.
pub(crate) const LEN: usize = 100_000;

/// Listens in this process's name, and behaves like this to everyone. A key that names it.
pub(crate) fn own(manner: &str) -> Vec<u8> {
    let mut key = identity().pack().to_vec();
    key.extend([7; 8]);
    key.extend([0xff; 4]);
    key.extend((1_u64 << 40).to_le_bytes());
    key.extend(&(LEN as u64).to_le_bytes()[..5]);
    let listener = listener(&sockets(&key)[0]);
    let manner = manner.to_owned();
    std::thread::spawn(move || {
        while let Ok(socket) = accept(&listener) {
            serve(&socket, &manner);
        }
    });
    key
}

fn serve(socket: &OwnedFd, manner: &str) {
    let ring = hello(socket);
    if manner == "unasked" {
        answer(socket, 1, 0);
    }
    let mut request = [0; 2048];
    while let Ok((_, len @ 1..)) = recv(socket, &mut request, RecvFlags::empty()) {
        let id = u32::from_le_bytes(request[4..8].try_into().expect("four"));
        match manner {
            // One that is silent is waited for.
            "unasked" => return,
            "twice" => {
                answer(socket, id, 0);
                answer(socket, id, 0);
            }
            "other-request" => answer(socket, id % 32 + 1, 0),
            "no-such-request" => answer(socket, u32::MAX, 0),
            "no-such-outcome" => answer(socket, id, 77),
            "garbage" => drop(send(socket, &request[..len], SendFlags::NOSIGNAL)),
            "long" => drop(send(socket, &[0; 100_000], SendFlags::NOSIGNAL)),
            "lease" => drop(send(socket, &message(0x80, &[]), SendFlags::NOSIGNAL)),
            // Every byte of the ring, again and again, while the initiator copies from it.
            "scribble" => {
                let ring = ring.as_ref().expect("a ring comes with the first message");
                for value in [id as u8, 0, 0xff] {
                    let _ = rustix::io::pwrite(ring, &vec![value; 256 << 10], 0);
                }
                answer(socket, id, 0);
            }
            "shrink" => {
                let ring = ring.as_ref().expect("a ring comes with the first message");
                assert!(rustix::fs::ftruncate(ring, 1).is_err(), "it is sealed");
                answer(socket, id, 0);
            }
            other => panic!("no such manner: {other}"),
        }
    }
}

/// The first message, and the ring that comes with it.
fn hello(socket: &OwnedFd) -> Option<OwnedFd> {
    let (mut bytes, mut space) =
        ([0; 128], [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))]);
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut bytes)];
    recvmsg(socket, &mut parts, &mut control, RecvFlags::empty()).ok()?;
    control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    })
}

fn answer(socket: &OwnedFd, id: u32, outcome: u32) {
    let answer = [outcome.to_le_bytes(), id.to_le_bytes()].concat();
    let _ = send(socket, &answer, SendFlags::NOSIGNAL);
}
