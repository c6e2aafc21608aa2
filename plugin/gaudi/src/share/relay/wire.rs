//! The messages of a relay: pure, total functions over bytes. `docs/design/ipc-protocol.md` has the layout.
//!
//! The initiator numbers requests from 1 to [`MAX_REQUESTS`], and reuses a number when its request was answered. A request
//! for a new ring has the number 0.

use smallvec::SmallVec;

use super::super::key::Token;
use super::super::wire::{Reader, Writer};

const HEADER_LEN: usize = 8;
const PIECE_LEN: usize = 24;
/// Most pieces in one request.
pub(super) const MAX_PIECES: usize = 64;
/// Most requests that one initiator may have in flight: so few that neither queue of the socket is ever full.
pub(super) const MAX_REQUESTS: usize = 32;
/// Bytes of the longest message.
pub(super) const MAX_LEN: usize = HEADER_LEN + MAX_PIECES * PIECE_LEN;

/// What the initiator does to the owner's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Put: the owner copies from the ring to its memory.
    Write,
    /// Get: the owner copies from its memory to the ring.
    Read,
}

/// One range of the owner's memory, and where in the ring its bytes are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) token: Token,
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) at: u32,
}

pub(super) type Pieces = SmallVec<[Piece; 1]>;

/// From initiator to owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Replaces the ring by the one that comes with this message, unless the owner is out of descriptors or memory
    /// ([`Outcome::Failed`]). No copy is in flight, and the initiator requests none before the answer.
    Ring,
    /// Copies all pieces.
    Copy { id: u32, access: Access, pieces: Pieces },
}

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    /// A piece is not in memory that is shared under its token (any more).
    Unknown,
    /// The owner's card, or the kernel, could not copy.
    Failed,
}

/// From owner to initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) id: u32,
    pub(super) outcome: Outcome,
}

impl Request {
    pub(super) fn pack(&self) -> Vec<u8> {
        let (kind, id, pieces) = match self {
            Request::Ring => (1, 0, &[][..]),
            Request::Copy { id, access: Access::Write, pieces } => (2, *id, &pieces[..]),
            Request::Copy { id, access: Access::Read, pieces } => (3, *id, &pieces[..]),
        };
        let mut bytes = vec![0; HEADER_LEN + pieces.len() * PIECE_LEN];
        let mut to = Writer::new(&mut bytes);
        to.number(kind, 4);
        to.number(id.into(), 4);
        for piece in pieces {
            to.bytes(&piece.token.0);
            to.number(piece.addr, 8);
            to.number(piece.len.into(), 4);
            to.number(piece.at.into(), 4);
        }
        debug_assert!(to.is_full());
        bytes
    }

    /// Parses any bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (header, rest) = bytes.split_at_checked(HEADER_LEN)?;
        let mut from = Reader::new(header);
        let (kind, id) = (from.number(4), from.number(4) as u32);
        let (pieces, odd) = rest.as_chunks::<PIECE_LEN>();
        let access = match kind {
            1 if id == 0 && rest.is_empty() => return Some(Request::Ring),
            2 => Access::Write,
            3 => Access::Read,
            _ => return None,
        };
        let is_sound = odd.is_empty() && (1..=MAX_PIECES).contains(&pieces.len());
        let pieces = pieces.iter().map(|piece| {
            let mut from = Reader::new(piece);
            let (token, addr) = (Token(from.bytes()), from.number(8));
            Piece { token, addr, len: from.number(4) as u32, at: from.number(4) as u32 }
        });
        is_sound.then(|| Request::Copy { id, access, pieces: pieces.collect() })
    }
}

impl Answer {
    pub(super) const LEN: usize = 8;

    pub(super) fn pack(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut to = Writer::new(&mut bytes);
        to.number(self.outcome as u64, 4);
        to.number(self.id.into(), 4);
        bytes
    }

    /// Parses any bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let mut from = Reader::new(bytes);
        let outcome = match from.number(4) {
            0 => Outcome::Done,
            1 => Outcome::Unknown,
            2 => Outcome::Failed,
            _ => return None,
        };
        Some(Self { id: from.number(4) as u32, outcome })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_refused_and_nothing_is_ignored(
            bytes in prop::collection::vec(any::<u8>(), 0..MAX_LEN + 40),
            kind in 0..5_u8,
        ) {
            let mut bytes = bytes;
            if bytes.len() >= 4 {
                bytes[..4].copy_from_slice(&[kind, 0, 0, 0]);
            }
            let whole = HEADER_LEN + bytes.len().saturating_sub(HEADER_LEN) / PIECE_LEN * PIECE_LEN;
            for bytes in [&bytes[..], &bytes[..whole.min(bytes.len())]] {
                if let Some(request) = Request::parse(bytes) {
                    prop_assert_eq!(&request.pack()[..], bytes);
                }
                if let Some(answer) = Answer::parse(bytes) {
                    prop_assert_eq!(&answer.pack()[..], bytes);
                }
            }
        }
    }

    #[test]
    fn messages_come_back_as_they_were_packed() {
        let piece = Piece { token: Token([7; 8]), addr: 1 << 60, len: 45 << 10, at: 64 << 10 };
        for pieces in [1, 2, MAX_PIECES] {
            let pieces: Pieces = std::iter::repeat_n(piece, pieces).collect();
            for access in [Access::Write, Access::Read] {
                let request = Request::Copy { id: 5, access, pieces: pieces.clone() };
                assert_eq!(Request::parse(&request.pack()), Some(request));
            }
        }
        let many = std::iter::repeat_n(piece, MAX_PIECES + 1).collect();
        let many = Request::Copy { id: 5, access: Access::Read, pieces: many };
        assert_eq!(Request::parse(&many.pack()), None);
        assert_eq!(Request::parse(&Request::Ring.pack()), Some(Request::Ring));
        for outcome in [Outcome::Done, Outcome::Unknown, Outcome::Failed] {
            let answer = Answer { id: 9, outcome };
            assert_eq!(Answer::parse(&answer.pack()), Some(answer));
        }
    }
}
