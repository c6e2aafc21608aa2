//! The first message of a connection, the owner's answer, and how their fields are read and written.
//!
//! Each message is one packet of a `SOCK_SEQPACKET` socket. Pure, total functions over bytes;
//! `docs/design/ipc-protocol.md` has the layout.

use super::key::KEY_LEN;

const MAGIC: [u8; 4] = *b"ugsh";
/// Version of everything that processes send each other: addresses, keys, and messages of leases and relays. It is one
/// number, so that another version is refused when its address or key is parsed, while UCX can still use another transport.
pub(super) const VERSION: u8 = 5;
const HEADER_LEN: usize = 8;
const GRANTED: u8 = 0x80;

/// How an initiator wants to reach memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// Asks for a dma-buf. The connection is the lease: it stays open while the dma-buf is mapped.
    Import = 1,
    /// Comes with a ring. Requests follow on this connection ([`relay`](super::relay)).
    Relay = 2,
}

/// The first message, from the initiator: names memory that the owner must share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) way: Way,
    pub(super) key: [u8; KEY_LEN],
}

/// Why an owner refuses. It closes the connection after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No memory is shared under exactly this key (any more).
    Unknown = 1,
    /// The message makes no sense to this version.
    Malformed = 2,
    /// The owner lacks descriptors, memory or a thread, or has too many peers.
    Short = 3,
    /// The memory is shared, but not as a dma-buf.
    NoDmabuf = 4,
}

impl Hello {
    /// Length in bytes.
    pub(super) const LEN: usize = HEADER_LEN + KEY_LEN;

    pub(super) fn pack(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..HEADER_LEN].copy_from_slice(&header(self.way as u8));
        bytes[HEADER_LEN..].copy_from_slice(&self.key);
        bytes
    }

    /// Parses any bytes.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (head, key) = bytes.split_at_checked(HEADER_LEN)?;
        let way = [Way::Import, Way::Relay].into_iter().find(|way| head == header(*way as u8))?;
        Some(Self { way, key: key.try_into().ok()? })
    }
}

/// The owner's answer. The dma-buf comes with the answer to a granted import; a relay is answered only if it is refused.
pub(super) type Answer = Result<(), Refusal>;

pub(super) fn pack_answer(answer: Answer) -> [u8; HEADER_LEN] {
    header(answer.map_or_else(|why| GRANTED | why as u8, |()| GRANTED))
}

/// Parses any bytes.
pub(super) fn parse_answer(bytes: &[u8]) -> Option<Answer> {
    use Refusal::{Malformed, NoDmabuf, Short, Unknown};
    let all = [Ok(()), Err(Unknown), Err(Malformed), Err(Short), Err(NoDmabuf)];
    all.into_iter().find(|answer| bytes == pack_answer(*answer))
}

fn header(kind: u8) -> [u8; HEADER_LEN] {
    let [a, b, c, d] = MAGIC;
    [a, b, c, d, VERSION, kind, 0, 0]
}

/// Writes consecutive little-endian fields, in odd widths too: keys are packed tightly, because UCX sends one with every
/// remote key.
pub(super) struct Writer<'a>(&'a mut [u8]);

impl<'a> Writer<'a> {
    /// Writes from the start of `bytes`, which must be as long as what will be written.
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self(bytes)
    }

    /// The lowest `width` bytes of a number.
    pub(super) fn number(&mut self, value: u64, width: usize) {
        self.bytes(&value.to_le_bytes()[..width]);
    }

    pub(super) fn bytes(&mut self, field: &[u8]) {
        let rest = std::mem::take(&mut self.0);
        let (here, rest) = rest.split_at_mut(field.len());
        here.copy_from_slice(field);
        self.0 = rest;
    }

    /// Whether all bytes are written.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads consecutive fields. The caller has checked the total length.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn number(&mut self, width: usize) -> u64 {
        let (here, rest) = self.0.split_at(width);
        self.0 = rest;
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(here);
        u64::from_le_bytes(bytes)
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (here, rest) = self.0.split_at(N);
        self.0 = rest;
        here.try_into().expect("split at this length")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_refused_and_nothing_is_ignored(
            bytes in prop::collection::vec(any::<u8>(), 0..90),
            kind in prop_oneof![0..4_u8, 0x80..0x86_u8],
            is_whole in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if is_whole && bytes.len() >= HEADER_LEN {
                bytes[..HEADER_LEN].copy_from_slice(&header(kind));
                bytes.truncate(if kind < GRANTED { Hello::LEN } else { HEADER_LEN });
            }
            let hello = Hello::parse(&bytes);
            if let Some(hello) = hello {
                prop_assert_eq!(&hello.pack()[..], &bytes[..]);
            }
            if let Some(answer) = parse_answer(&bytes) {
                prop_assert_eq!(&pack_answer(answer)[..], &bytes[..]);
                prop_assert_eq!(hello, None);
            }
            let is_hello = matches!(kind, 1 | 2) && bytes.len() == Hello::LEN;
            prop_assert_eq!(hello.is_some(), is_whole && is_hello);
        }
    }

    /// As in `docs/design/ipc-protocol.md`: processes of different builds talk to each other.
    #[test]
    fn messages_are_laid_out_as_the_protocol_says() {
        let key = [7; KEY_LEN];
        for (way, number) in [(Way::Import, 1), (Way::Relay, 2)] {
            let bytes = Hello { way, key }.pack();
            let (head, rest) = bytes.split_at(8);
            assert_eq!(head, [b'u', b'g', b's', b'h', 5, number, 0, 0]);
            assert_eq!(rest, key);
        }
        use Refusal::{Malformed, NoDmabuf, Short, Unknown};
        let refusals = [(Unknown, 0x81), (Malformed, 0x82), (Short, 0x83), (NoDmabuf, 0x84)];
        let refusals = refusals.map(|(why, number)| (Err(why), number));
        for (answer, number) in [(Ok(()), 0x80)].into_iter().chain(refusals) {
            let bytes = [b'u', b'g', b's', b'h', 5, number, 0, 0];
            assert_eq!(pack_answer(answer), bytes);
            assert_eq!(parse_answer(&bytes), Some(answer));
        }
    }

    #[test]
    fn a_writer_is_full_when_its_bytes_are_written() {
        let mut bytes = [0; 5];
        let mut writer = Writer::new(&mut bytes);
        writer.number(0x1234_5678, 3);
        assert!(!writer.is_full());
        writer.bytes(&[9, 8]);
        assert!(writer.is_full());
        assert_eq!(bytes, [0x78, 0x56, 0x34, 9, 8]);
        let mut reader = Reader::new(&bytes);
        assert_eq!((reader.number(3), reader.bytes()), (0x34_5678, [9, 8]));
    }
}
