//! What peers and the broker say to each other: one fixed request, one fixed reply, each a datagram.

use super::field::{Reader, Writer};
use super::key::Token;

const MAGIC: [u8; 4] = *b"ugsh";
const VERSION: u8 = 1;

/// Bytes of a request.
pub(super) const REQUEST_LEN: usize = 24;
/// Bytes of a reply.
pub(super) const REPLY_LEN: usize = 8;

/// What a peer asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// The dma-buf of the allocation at `base`.
    Fetch { base: u64, token: Token },
    /// Nothing but that the connection stays, to see it hang up.
    Watch,
}

impl Request {
    pub(super) fn pack(self) -> [u8; REQUEST_LEN] {
        let (kind, base, token) = match self {
            Request::Fetch { base, token } => (1, base, token),
            Request::Watch => (2, 0, Token([0; 8])),
        };
        let mut bytes = [0; REQUEST_LEN];
        let mut to = Writer::new(&mut bytes);
        to.bytes(&MAGIC);
        to.number(VERSION.into(), 1);
        to.number(kind, 3);
        to.number(base, 8);
        to.bytes(&token.0);
        debug_assert!(to.is_full());
        bytes
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; REQUEST_LEN] = bytes.try_into().ok()?;
        let mut from = Reader::new(bytes);
        let ours = from.bytes() == MAGIC && from.number(1) == u64::from(VERSION);
        let (kind, base, token) = (from.number(3), from.number(8), Token(from.bytes()));
        match kind {
            1 if ours => Some(Request::Fetch { base, token }),
            2 if ours && base == 0 && token.0 == [0; 8] => Some(Request::Watch),
            _ => None,
        }
    }
}

/// What the broker answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Here it is: a descriptor comes along, if one was asked for.
    Granted,
    /// No such memory is shared under this token: it never was, or no more.
    Unknown,
    /// The request made no sense to this version.
    NotUnderstood,
    /// Too many at once; try again later.
    Crowded,
}

impl Reply {
    const ALL: [Reply; 4] = [Reply::Granted, Reply::Unknown, Reply::NotUnderstood, Reply::Crowded];

    pub(super) fn pack(self) -> [u8; REPLY_LEN] {
        let mut bytes = [0; REPLY_LEN];
        let mut to = Writer::new(&mut bytes);
        to.bytes(&MAGIC);
        to.number(VERSION.into(), 1);
        to.number(self as u64, 3);
        debug_assert!(to.is_full());
        bytes
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        Self::ALL.into_iter().find(|reply| reply.pack() == bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn requests_survive_the_wire(base in any::<u64>(), token in any::<[u8; 8]>()) {
            let fetch = Request::Fetch { base, token: Token(token) };
            prop_assert_eq!(Request::parse(&fetch.pack()), Some(fetch));
        }

        #[test]
        fn any_bytes_are_understood_or_not(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
            dressed in any::<bool>()
        ) {
            let mut bytes = bytes;
            if dressed {
                bytes.resize(REQUEST_LEN, 0);
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4] = VERSION;
                bytes[6..8].fill(0);
            }
            if let Some(request) = Request::parse(&bytes) {
                prop_assert_eq!(&request.pack()[..], &bytes[..], "nothing is ignored");
            }
            if let Some(reply) = Reply::parse(&bytes) {
                prop_assert_eq!(&reply.pack()[..], &bytes[..]);
            }
        }
    }

    #[test]
    fn replies_and_watches_survive_the_wire() {
        for reply in Reply::ALL {
            assert_eq!(Reply::parse(&reply.pack()), Some(reply));
        }
        assert_eq!(Request::parse(&Request::Watch.pack()), Some(Request::Watch));
        assert_eq!(Reply::parse(&[]), None);
    }
}
