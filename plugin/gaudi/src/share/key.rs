//! The key: what an owner gives its peers so that they can reach its memory.
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 1 | version |
//! | 1 | 32 | the owner: boot, instance, pid, start time, pid namespace, user namespace, user |
//! | 33 | 8 | token: random, new each time memory is shared, so it also is the generation |
//! | 41 | 4 | source device: PCI domain, bus, device and function; all ones: host memory |
//! | 45 | 8 | first address of the memory |
//! | 53 | 5 | its length in bytes |
//!
//! The owner accepts only a key in which every bit is the same as in its own.

use std::hash::{Hash, Hasher};

use super::wire::{Reader, VERSION, Writer};
use super::{Identity, KeyError};
use crate::BusId;

/// Bytes of a key.
pub const KEY_LEN: usize = 58;

/// Card allocations start at multiples of this, and the length of a dma-buf is a multiple of it.
pub(super) const PAGE: u64 = crate::PAGE_SIZE;
/// Lengths are below this: more than any card has, and what five bytes can hold.
const LONGEST: u64 = 1 << 40;

/// A random secret: a process that knows it was given the key.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Token(pub(super) [u8; 8]);

impl std::fmt::Debug for Token {
    /// A secret does not belong in a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// The fields of a key. None of them is verified yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fields {
    pub(super) peer: Identity,
    pub(super) token: Token,
    pub(super) source: Bus,
    pub(super) base: u64,
    pub(super) len: u64,
}

impl Hash for Fields {
    /// The token is random, and so tells keys apart.
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.token.hash(state);
    }
}

impl Fields {
    pub(super) fn pack(&self) -> [u8; KEY_LEN] {
        let mut bytes = [0; KEY_LEN];
        let mut to = Writer::new(&mut bytes);
        to.number(VERSION.into(), 1);
        self.peer.write(&mut to);
        to.bytes(&self.token.0);
        to.number(self.source.0.into(), 4);
        to.number(self.base, 8);
        to.number(self.len, 5);
        debug_assert!(to.is_full());
        bytes
    }

    /// Parses any bytes; the error says why they are not a key.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        // The version first: a newer key may have another length.
        if let Some(&version) = bytes.first()
            && version != VERSION
        {
            return Err(KeyError::Version { found: version, expected: VERSION });
        }
        if bytes.len() != KEY_LEN {
            return Err(KeyError::Length { found: bytes.len(), expected: KEY_LEN });
        }
        let mut from = Reader::new(&bytes[1..]);
        let peer = Identity::read(&mut from);
        let token = Token(from.bytes());
        let source = Bus(from.number(4) as u32);
        let (base, len) = (from.number(8), from.number(5));
        if len == 0 {
            return Err(KeyError::Malformed("it is of no length"));
        }
        if base.checked_add(LONGEST).is_none() {
            return Err(KeyError::Malformed("its address is beyond all memory"));
        }
        Ok(Self { peer, token, source, base, len })
    }

    /// Whether `[addr, addr + len)` lies inside.
    pub(super) fn contains(&self, addr: u64, len: u64) -> bool {
        let offset = addr.checked_sub(self.base);
        offset.and_then(|offset| offset.checked_add(len)).is_some_and(|end| end <= self.len)
    }

    /// Length of the dma-buf: the range, rounded up to whole pages.
    pub(super) fn dmabuf_len(&self) -> u64 {
        self.len.next_multiple_of(PAGE)
    }
}

/// Whether a key can hold this range.
pub(super) fn fits(base: u64, len: u64) -> bool {
    (1..LONGEST).contains(&len) && base.checked_add(LONGEST).is_some()
}

/// A PCI address in four bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Bus(u32);

impl Bus {
    /// Host memory, in place of a device.
    pub(super) const HOST: Bus = Bus(u32::MAX);

    /// `None` if it does not fit: no such device exists.
    pub(super) fn new(id: &BusId) -> Option<Self> {
        let text = id.as_str();
        let part = |range| u32::from_str_radix(text.get(range)?, 16).ok();
        let (domain, bus) = (part(0..4)?, part(5..7)?);
        let (device, function) = (part(8..10)?, part(11..12)?);
        (device < 32).then_some(Self(domain << 16 | bus << 8 | device << 3 | function))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_identity() -> impl Strategy<Value = Identity> {
        any::<([u8; 6], [u8; 6], [u32; 5])>().prop_map(|(host, instance, numbers)| {
            let [pid, start, pid_ns, user_ns, uid] = numbers;
            Identity { host, instance, pid, start, pid_ns, user_ns, uid }
        })
    }

    fn any_fields() -> impl Strategy<Value = Fields> {
        let base = 0..u64::MAX - LONGEST;
        (any_identity(), any::<[u8; 8]>(), any::<u32>(), base, 1..LONGEST).prop_map(
            |(peer, token, source, base, len)| Fields {
                peer,
                token: Token(token),
                source: Bus(source),
                base,
                len,
            },
        )
    }

    proptest! {
        #[test]
        fn a_key_says_what_was_put_into_it(fields in any_fields()) {
            prop_assert_eq!(Fields::parse(&fields.pack()), Ok(fields));
        }

        #[test]
        fn any_bytes_are_a_key_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..130)) {
            let _ = Fields::parse(&bytes);
            let mut dressed = bytes;
            dressed.resize(KEY_LEN, 0);
            dressed[0] = VERSION;
            if let Ok(fields) = Fields::parse(&dressed) {
                prop_assert_eq!(&fields.pack()[..], &dressed[..], "nothing is ignored");
                prop_assert!(fields.base.checked_add(fields.dmabuf_len()).is_some());
                prop_assert!(fields.contains(fields.base, fields.len));
            }
        }

        #[test]
        fn a_key_contains_its_range_to_the_byte(fields in any_fields(), inside in any::<u64>()) {
            let Fields { base, len, .. } = fields;
            let offset = inside % len;
            prop_assert!(fields.contains(base + offset, len - offset));
            prop_assert!(!fields.contains(base + offset, len - offset + 1));
            prop_assert!(!fields.contains(base + offset, u64::MAX));
            prop_assert!(base == 0 || !fields.contains(base - 1, 1));
            prop_assert!(!fields.contains(base + len + 1, 0));
            let rounded = fields.dmabuf_len();
            prop_assert!(rounded % PAGE == 0 && (len..len + PAGE).contains(&rounded));
        }
    }

    #[test]
    fn what_a_key_can_say() {
        let last = u64::MAX - LONGEST;
        for (base, len) in [(0, 1), (last, 1), (last, LONGEST - 1)] {
            assert!(fits(base, len), "{len} bytes at {base:#x}");
        }
        for (base, len) in [(0, 0), (0, LONGEST), (last + 1, 1)] {
            assert!(!fits(base, len), "{len} bytes at {base:#x}");
        }
        let bus = |id: &str| Bus::new(&id.parse().unwrap());
        assert_eq!(bus("1234:56:1f.7"), Some(Bus(0x1234_56ff)));
        assert_eq!(bus("0000:00:01.0"), Some(Bus(8)));
    }

    #[test]
    fn what_is_no_key_is_refused_with_the_reason() {
        let own = *Identity::own().unwrap();
        let fields = Fields {
            peer: own,
            token: Token([7; 8]),
            source: Bus(0x0000_3300),
            base: 0x1001_0000_0000_0000,
            len: 5000,
        };
        let good = fields.pack();
        let bus_id = "0000:33:00.0".parse().unwrap();
        assert_eq!(Bus::new(&bus_id), Some(fields.source));
        let with = |at: usize, byte| {
            let mut key = good;
            key[at] = byte;
            Fields::parse(&key).unwrap_err()
        };
        assert_eq!(with(0, 1), KeyError::Version { found: 1, expected: VERSION });
        let beyond = Fields { base: u64::MAX - LONGEST + 1, ..fields };
        assert_eq!(
            Fields::parse(&beyond.pack()).unwrap_err(),
            KeyError::Malformed("its address is beyond all memory")
        );
        let empty = Fields { len: 0, ..fields };
        let refused = KeyError::Malformed("it is of no length");
        assert_eq!(Fields::parse(&empty.pack()), Err(refused));
        for len in [0, 1, KEY_LEN - 1, KEY_LEN + 1, 64] {
            let mut bytes = good.to_vec();
            bytes.resize(len, 0);
            let length = KeyError::Length { found: len, expected: KEY_LEN };
            assert_eq!(Fields::parse(&bytes), Err(length));
        }
        assert_eq!(format!("{:?}", fields.token), "Token(…)", "no secret in a log");
    }
}
