//! The messages between an importer and an exporter's broker, and the bytes they are made of.
//!
//! Each message is one packet of a `SOCK_SEQPACKET` socket: magic, version, kind and lease, and for
//! [`Request::Open`] the key. Pure, total functions over bytes; `docs/design/ipc-protocol.md` has the
//! layout.

use super::key::KEY_LEN;

const MAGIC: [u8; 4] = *b"ugsh";
const VERSION: u8 = 3;
const HEADER_LEN: usize = 16;

/// Bytes of the longest message.
pub(super) const MAX_LEN: usize = HEADER_LEN + KEY_LEN;

/// A lease, by the number that its importer chose. Never used twice on one connection; 0 is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct LeaseId(pub(super) u64);

impl LeaseId {
    /// In a refusal that answers no request.
    pub(super) const NONE: LeaseId = LeaseId(0);
}

/// From importer to exporter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// Asks for the dma-buf that the key is for, under a lease of this number.
    Open { lease: LeaseId, key: [u8; KEY_LEN] },
    /// The import is unmapped: the lease has ended. Not answered.
    Release { lease: LeaseId },
    /// Makes this connection a relay to memory of the exporter, of which this is a key; the ring comes with this
    /// message. Not answered, unless it is refused.
    Relay { key: [u8; KEY_LEN] },
}

/// From exporter to importer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The lease is recorded; the descriptor comes with this message.
    Grant { lease: LeaseId },
    /// No lease.
    Refused { lease: LeaseId, why: Refusal },
    /// The memory is not shared any more: unmap it and release the lease as soon as possible.
    Revoke { lease: LeaseId },
}

/// Why an exporter refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No memory is shared under exactly this key: it never was, or no more.
    Unknown,
    /// The request makes no sense to this version. The exporter hangs up.
    Malformed,
    /// Too many connections, leases or descriptors; try again later. The exporter hangs up if it has
    /// granted this connection nothing.
    Crowded,
    /// The memory is shared, but not as a dma-buf: the exporter's driver could import none itself.
    NoDmabuf,
}

impl Refusal {
    const ALL: [Refusal; 4] =
        [Refusal::Unknown, Refusal::Malformed, Refusal::Crowded, Refusal::NoDmabuf];

    fn code(self) -> u8 {
        match self {
            Refusal::Unknown => 1,
            Refusal::Malformed => 2,
            Refusal::Crowded => 3,
            Refusal::NoDmabuf => 4,
        }
    }
}

/// A packed message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Packed {
    bytes: [u8; MAX_LEN],
    len: usize,
}

impl AsRef<[u8]> for Packed {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Request {
    pub(super) fn pack(self) -> Packed {
        match self {
            Request::Open { lease, key } => pack(1, 0, lease, &key),
            Request::Release { lease } => pack(2, 0, lease, &[]),
            Request::Relay { key } => pack(3, 0, LeaseId::NONE, &key),
        }
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        match parse(bytes)? {
            (1, 0, lease, key) => Some(Request::Open { lease, key: key.try_into().ok()? }),
            (2, 0, lease, []) => Some(Request::Release { lease }),
            (3, 0, LeaseId::NONE, key) => Some(Request::Relay { key: key.try_into().ok()? }),
            _ => None,
        }
    }
}

impl Reply {
    pub(super) fn pack(self) -> Packed {
        match self {
            Reply::Grant { lease } => pack(0x81, 0, lease, &[]),
            Reply::Refused { lease, why } => pack(0x82, why.code(), lease, &[]),
            Reply::Revoke { lease } => pack(0x83, 0, lease, &[]),
        }
    }

    /// Takes any bytes apart.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        match parse(bytes)? {
            (0x81, 0, lease, []) => Some(Reply::Grant { lease }),
            (0x82, code, lease, []) => {
                let why = Refusal::ALL.into_iter().find(|why| why.code() == code)?;
                Some(Reply::Refused { lease, why })
            }
            (0x83, 0, lease, []) => Some(Reply::Revoke { lease }),
            _ => None,
        }
    }
}

fn pack(kind: u8, code: u8, lease: LeaseId, body: &[u8]) -> Packed {
    let mut bytes = [0; MAX_LEN];
    let len = HEADER_LEN + body.len();
    let mut to = Writer::new(&mut bytes[..len]);
    to.bytes(&MAGIC);
    to.bytes(&[VERSION, kind, code, 0]);
    to.number(lease.0, 8);
    to.bytes(body);
    debug_assert!(to.is_full());
    Packed { bytes, len }
}

fn parse(bytes: &[u8]) -> Option<(u8, u8, LeaseId, &[u8])> {
    let (header, body) = bytes.split_at_checked(HEADER_LEN)?;
    let mut from = Reader::new(header);
    let magic: [u8; 4] = from.bytes();
    let [version, kind, code, zero] = from.bytes();
    let lease = LeaseId(from.number(8));
    let is_ours = magic == MAGIC && version == VERSION && zero == 0;
    is_ours.then_some((kind, code, lease, body))
}

/// Writes fields one behind the other, little end first, in odd widths: keys are packed tightly,
/// because UCX carries one with every remote key.
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

    /// Whether everything is written.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads fields one behind the other. Whoever makes one has checked the length of the whole.
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
        fn messages_come_back_as_they_were_packed(
            lease in any::<u64>().prop_map(LeaseId),
            key in prop::collection::vec(any::<u8>(), KEY_LEN),
        ) {
            let key = key.try_into().expect("as long as a key");
            let requests =
                [Request::Open { lease, key }, Request::Release { lease }, Request::Relay { key }];
            for request in requests {
                prop_assert_eq!(Request::parse(request.pack().as_ref()), Some(request));
                prop_assert_eq!(Reply::parse(request.pack().as_ref()), None);
            }
            let refusals = Refusal::ALL.map(|why| Reply::Refused { lease, why });
            for reply in [Reply::Grant { lease }, Reply::Revoke { lease }].into_iter().chain(refusals) {
                prop_assert_eq!(Reply::parse(reply.pack().as_ref()), Some(reply));
                prop_assert_eq!(Request::parse(reply.pack().as_ref()), None);
            }
        }

        #[test]
        fn any_bytes_are_a_message_or_refused_and_nothing_is_ignored(
            bytes in prop::collection::vec(any::<u8>(), 0..90),
            with_header in any::<bool>(),
        ) {
            let mut bytes = bytes;
            if with_header && bytes.len() >= HEADER_LEN {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4] = VERSION;
                bytes[6] %= 6;
                bytes[7] = 0;
            }
            if let Some(request) = Request::parse(&bytes) {
                let packed = request.pack();
                prop_assert_eq!(packed.as_ref(), &bytes[..]);
            }
            if let Some(reply) = Reply::parse(&bytes) {
                let packed = reply.pack();
                prop_assert_eq!(packed.as_ref(), &bytes[..]);
            }
        }
    }
}
