//! Entry points for the crate `fuzz`: parsers of what peers send, which refuse bytes or understand all of them, and messages
//! and a connection for a peer that the fuzzer plays. Not part of any build that users get.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;

use super::identity::Identity;
use super::key::{Fields, KEY_LEN};
use super::relay::fuzzing as relay;
use super::socket::{self, Unconnected};
use super::wire::{Hello, Way, pack_answer, parse_answer};

/// Parses bytes as a key, and as the address of an endpoint.
pub fn key(bytes: &[u8]) {
    if let Ok(fields) = Fields::parse(bytes) {
        assert_eq!(&fields.pack()[..], bytes, "nothing is ignored");
        assert!(
            fields.contains(fields.base, fields.len)
                && !fields.contains(fields.base, fields.len + 1)
        );
        assert!(fields.base.checked_add(fields.dmabuf_len()).is_some());
        let _ = (fields.peer.check_reachable(), format!("{fields:?} {}", fields.peer));
    }
    if let Ok(identity) = Identity::parse(bytes) {
        assert_eq!(&identity.pack()[..], bytes, "nothing is ignored");
    }
}

/// Messages of a lease, in both directions.
pub fn lease(bytes: &[u8]) {
    if let Some(hello) = Hello::parse(bytes) {
        assert_eq!(&hello.pack()[..], bytes, "nothing is ignored");
        key(&hello.key);
    }
    if let Some(answer) = parse_answer(bytes) {
        assert_eq!(&pack_answer(answer)[..], bytes, "nothing is ignored");
    }
}

/// Messages of a relay, in both directions.
pub fn relay_message(bytes: &[u8]) {
    relay::message(bytes);
}

/// An owner of memory that answers anything to a relay.
pub fn relay_owner(bytes: &[u8]) {
    relay::owner(bytes);
}

/// A connection to the owner of a key.
///
/// # Panics
/// If the owner does not listen: a process that shares memory must.
pub fn connect(key: &[u8; KEY_LEN]) -> OwnedFd {
    let owner = Fields::parse(key).expect("a key").peer;
    loop {
        match socket::connect(&owner, |_| true) {
            Ok(socket) => return socket,
            // Its queue is full of earlier connections.
            Err(Unconnected::Nobody(Errno::AGAIN)) => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(why) => panic!("{owner} shares memory and does not listen: {why:?}"),
        }
    }
}

/// The first message to an owner: to import the memory of this key, or to relay.
pub fn hello(to_relay: bool, key: &[u8; KEY_LEN]) -> Vec<u8> {
    let way = if to_relay { Way::Relay } else { Way::Import };
    Hello { way, key: *key }.pack().to_vec()
}

/// The message that comes with a new ring.
pub fn ring_request() -> Vec<u8> {
    relay::ring_request()
}

/// Asks an owner to copy between the ring and pieces of the memory of this key: each has an offset from the first address, a
/// length, and an offset in the ring.
pub fn copy_request(get: bool, id: u32, key: &[u8; KEY_LEN], pieces: &[[u32; 3]]) -> Vec<u8> {
    relay::copy_request(get, id, &Fields::parse(key).expect("a key"), pieces)
}

/// Parses an owner's answer: `Ok(())` for a lease, `Err(Unknown)` for none, `Done` for a copy.
pub fn answer(bytes: &[u8]) -> Option<String> {
    let of_lease = parse_answer(bytes).map(|answer| format!("{answer:?}"));
    of_lease.or_else(|| relay::answer_of(bytes))
}
