//! What peers send, as the crate `fuzz` calls it: bytes are refused, or understood whole. Not part of any build that users get.

use super::identity::Identity;
use super::key::Fields;
use super::relay::fuzzing as relay;
use super::wire::{Hello, pack_answer, parse_answer};

/// A key, and what an address of an endpoint is.
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

/// Messages of a lease, either way.
pub fn lease(bytes: &[u8]) {
    if let Some(hello) = Hello::parse(bytes) {
        assert_eq!(&hello.pack()[..], bytes, "nothing is ignored");
        key(&hello.key);
    }
    if let Some(answer) = parse_answer(bytes) {
        assert_eq!(&pack_answer(answer)[..], bytes, "nothing is ignored");
    }
}

/// Messages of a relay, either way.
pub fn relay_message(bytes: &[u8]) {
    relay::message(bytes);
}

/// An owner of memory that answers anything to a relay.
pub fn relay_owner(bytes: &[u8]) {
    relay::owner(bytes);
}
