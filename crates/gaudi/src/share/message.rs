//! What peers and the broker say to each other: messages of a fixed length, each a datagram.

use super::field::{Reader, Writer};
use super::key::Token;

const MAGIC: [u8; 4] = *b"ugsh";
const VERSION: u8 = 1;

/// Bytes of a message, either way.
pub(super) const MESSAGE_LEN: usize = 24;

/// Memory, as messages name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Offered {
    /// First address of the allocation, in the exporter.
    pub(super) base: u64,
    pub(super) token: Token,
}

const NONE: Offered = Offered { base: 0, token: Token([0; 8]) };

/// What a peer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Send me this dma-buf.
    Fetch(Offered),
    /// Let this connection stay, so that I see you end; answered with `Granted`. With a descriptor:
    /// here I write what I am about to open (see `holds`). Do not give it to anybody else before I
    /// let it go or hang up.
    Stay,
    /// I do not have this open any more; the answer to `Withdrawn`. Not answered.
    LetGo(Offered),
}

impl Request {
    pub(super) fn pack(self) -> [u8; MESSAGE_LEN] {
        match self {
            Request::Fetch(offered) => pack(1, offered),
            Request::Stay => pack(2, NONE),
            Request::LetGo(offered) => pack(3, offered),
        }
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        match parse(bytes)? {
            (1, offered) => Some(Request::Fetch(offered)),
            (2, NONE) => Some(Request::Stay),
            (3, offered) => Some(Request::LetGo(offered)),
            _ => None,
        }
    }
}

/// What the broker says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Yes; the descriptor comes along, if one was asked for.
    Granted,
    /// No such memory is shared under this token: it never was, or no more.
    Unknown,
    /// The request made no sense to this version.
    NotUnderstood,
    /// Too many at once; try again later.
    Crowded,
    /// Unasked, to who holds it: this memory is not shared any more. Let it go when you can.
    Withdrawn(Offered),
}

impl Reply {
    pub(super) fn pack(self) -> [u8; MESSAGE_LEN] {
        match self {
            Reply::Granted => pack(0x80, NONE),
            Reply::Unknown => pack(0x81, NONE),
            Reply::NotUnderstood => pack(0x82, NONE),
            Reply::Crowded => pack(0x83, NONE),
            Reply::Withdrawn(offered) => pack(0x84, offered),
        }
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        match parse(bytes)? {
            (0x80, NONE) => Some(Reply::Granted),
            (0x81, NONE) => Some(Reply::Unknown),
            (0x82, NONE) => Some(Reply::NotUnderstood),
            (0x83, NONE) => Some(Reply::Crowded),
            (0x84, offered) => Some(Reply::Withdrawn(offered)),
            _ => None,
        }
    }
}

fn pack(kind: u64, Offered { base, token }: Offered) -> [u8; MESSAGE_LEN] {
    let mut bytes = [0; MESSAGE_LEN];
    let mut to = Writer::new(&mut bytes);
    to.bytes(&MAGIC);
    to.number(VERSION.into(), 1);
    to.number(kind, 3);
    to.number(base, 8);
    to.bytes(&token.0);
    debug_assert!(to.is_full());
    bytes
}

fn parse(bytes: &[u8]) -> Option<(u64, Offered)> {
    let bytes: &[u8; MESSAGE_LEN] = bytes.try_into().ok()?;
    let mut from = Reader::new(bytes);
    let ours = from.bytes() == MAGIC && from.number(1) == u64::from(VERSION);
    let kind = from.number(3);
    let (base, token) = (from.number(8), Token(from.bytes()));
    ours.then_some((kind, Offered { base, token }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn messages_survive_the_wire(base in any::<u64>(), token in any::<[u8; 8]>()) {
            let offered = Offered { base, token: Token(token) };
            for request in [Request::Fetch(offered), Request::Stay, Request::LetGo(offered)]
            {
                prop_assert_eq!(Request::parse(&request.pack()), Some(request));
                prop_assert_eq!(Reply::parse(&request.pack()), None);
            }
            for reply in [
                Reply::Granted,
                Reply::Unknown,
                Reply::NotUnderstood,
                Reply::Crowded,
                Reply::Withdrawn(offered),
            ] {
                prop_assert_eq!(Reply::parse(&reply.pack()), Some(reply));
                prop_assert_eq!(Request::parse(&reply.pack()), None);
            }
        }

        #[test]
        fn any_bytes_are_understood_or_not(
            bytes in prop::collection::vec(any::<u8>(), 0..40),
            dressed in any::<bool>()
        ) {
            let mut bytes = bytes;
            if dressed {
                bytes.resize(MESSAGE_LEN, 0);
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
}
