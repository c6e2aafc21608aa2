//! The table of cases: operation × memory pair × size × direction, and how users name them.
//!
//! Pure. Both processes of a pair compute the same list from the same [`Plan`].

use crate::pattern::mix;
use crate::ucp::{Features, Memory};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// One way of moving a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Op {
    /// Tag send to a posted receive.
    Tag,
    /// Tag send before the receive is posted.
    TagUnexpected,
    /// The message in several tagged parts, all outstanding, received in reverse order.
    TagMany,
    /// The receive is too small: it must fail with "truncated" and write nothing beyond its end.
    TagTruncated,
    /// A byte stream, cut differently on the two sides.
    Stream,
    /// Active message, protocol chosen by UCX.
    Am,
    /// Active message, data sent along.
    AmEager,
    /// Active message, data fetched by the receiver.
    AmRndv,
    /// The sender writes the receiver's memory.
    Put,
    /// The receiver reads the sender's memory.
    Get,
}

impl Op {
    /// Every operation, its name, and the plain operation that it is (a variant of).
    const TABLE: [(Op, &'static str, Op); 10] = [
        (Op::Tag, "tag", Op::Tag),
        (Op::TagUnexpected, "tag-unexpected", Op::Tag),
        (Op::TagMany, "tag-many", Op::Tag),
        (Op::TagTruncated, "tag-truncated", Op::Tag),
        (Op::Stream, "stream", Op::Stream),
        (Op::Am, "am", Op::Am),
        (Op::AmEager, "am-eager", Op::Am),
        (Op::AmRndv, "am-rndv", Op::Am),
        (Op::Put, "put", Op::Put),
        (Op::Get, "get", Op::Get),
    ];
    /// The five an application knows; the others are variants.
    pub const PLAIN: [Op; 5] = [Op::Tag, Op::Stream, Op::Am, Op::Put, Op::Get];

    /// The plain operation that this one is (a variant of).
    pub fn group(self) -> Op {
        Op::TABLE[self as usize].2
    }

    /// A plain operation with its variants, or a variant alone.
    pub fn variants(self) -> impl Iterator<Item = Op> {
        let rows = Op::TABLE.into_iter();
        rows.filter(move |&(op, _, group)| op == self || group == self).map(|(op, ..)| op)
    }

    /// Put and get need no receiver.
    pub fn one_sided(self) -> bool {
        matches!(self, Op::Put | Op::Get)
    }

    /// Nothing can be truncated from nothing.
    fn applies_to(self, size: usize) -> bool {
        self != Op::TagTruncated || size > 0
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(Op::TABLE[*self as usize].1)
    }
}

impl FromStr for Op {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let found = Op::TABLE.iter().find(|(_, name, _)| *name == s);
        let known = || Op::TABLE.map(|(_, name, _)| name).join(", ");
        found.map(|(op, ..)| *op).ok_or_else(|| format!("unknown operation '{s}': {}", known()))
    }
}

/// Memory on the sending and on the receiving side.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Pair {
    pub src: Memory,
    pub dst: Memory,
}

impl Pair {
    /// Host to host.
    pub const HOST: Pair = Pair { src: Memory::Host, dst: Memory::Host };
    /// Gaudi to Gaudi.
    pub const GAUDI: Pair = Pair { src: Memory::Gaudi, dst: Memory::Gaudi };
    /// The four pairs of host and Gaudi.
    pub const ALL: [Pair; 4] = [
        Pair::HOST,
        Pair { src: Memory::Host, dst: Memory::Gaudi },
        Pair { src: Memory::Gaudi, dst: Memory::Host },
        Pair::GAUDI,
    ];
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}:{}", self.src, self.dst))
    }
}

impl FromStr for Pair {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let (src, dst) = s.split_once(':').ok_or_else(|| {
            format!("'{s}' is no memory pair: SOURCE:DESTINATION, e.g. host:gaudi")
        })?;
        Ok(Pair { src: src.parse()?, dst: dst.parse()? })
    }
}

/// A number of bytes as users write it: `65537`, `64K`, `4M+13`, `1M-1`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Size(pub usize);

impl FromStr for Size {
    type Err = String;
    fn from_str(s: &str) -> Result<Self, String> {
        let size = match s.find(['+', '-']) {
            None => units(s),
            Some(at) => units(&s[..at]).zip(units(&s[at + 1..])).and_then(|(base, more)| {
                if s[at..].starts_with('+') {
                    base.checked_add(more)
                } else {
                    base.checked_sub(more)
                }
            }),
        };
        size.map(Size).ok_or_else(|| {
            format!("'{s}' is no size: a number with K, M or G, e.g. 65537, 64K, 4M+13")
        })
    }
}

fn units(s: &str) -> Option<usize> {
    let (digits, shift) = match s.as_bytes().last()?.to_ascii_uppercase() {
        b'K' => (&s[..s.len() - 1], 10),
        b'M' => (&s[..s.len() - 1], 20),
        b'G' => (&s[..s.len() - 1], 30),
        _ => (s, 0),
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

/// Empty to 64 MiB; around the sizes where UCX changes protocol; mostly odd.
#[rustfmt::skip]
pub const SIZES: [usize; 24] = [
    0, 1, 7, 8, 63, 64, 65, 255, 1000, 2049, 4095, 4096, 8191, 16385, 32769, 65535, 65536, 131_073,
    (1 << 19) + 1, (1 << 20) - 1, 1 << 20, (4 << 20) + 13, (16 << 20) + 1, 64 << 20,
];

/// What is done wrong on purpose in each transfer: the check must report every case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, clap::ValueEnum)]
pub enum Sabotage {
    /// The last byte of what was received is changed.
    Message,
    /// The first byte behind the message is changed.
    Guard,
    /// The first guard byte of the sender's buffer is changed.
    Source,
    /// One byte less is moved.
    Length,
    /// The destination is compared before the message is sent, as if a completion came too early.
    Early,
}

/// Everything both processes must agree on.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Where UCX is.
    pub ucx: Option<PathBuf>,
    /// Operations, variants spelled out.
    pub ops: Vec<Op>,
    /// Memory pairs.
    pub pairs: Vec<Pair>,
    /// Message sizes.
    pub sizes: Vec<usize>,
    /// Makes the patterns, offsets and cuts.
    pub seed: u64,
    /// Number of the first case: plans that share a worker must not share numbers.
    pub first_case: u64,
    /// Timed messages per case beside the verified one; 0: none.
    pub iterations: u32,
    /// What the context asks for.
    pub features: Features,
    /// Endpoints report the death of a peer.
    pub peer_errors: bool,
    /// Process 0 sends and process 1 receives; neither has other memory than that takes.
    pub one_way: bool,
    /// Pass the memory type with every operation.
    pub hint: bool,
    /// A step may take this long.
    pub timeout_s: f64,
    /// Test of the test.
    pub sabotage: Option<Sabotage>,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            ucx: None,
            ops: Op::TABLE.map(|(op, ..)| op).to_vec(),
            pairs: Pair::ALL.to_vec(),
            sizes: SIZES.to_vec(),
            seed: 1,
            first_case: 0,
            iterations: 0,
            features: Features::ALL,
            peer_errors: false,
            one_way: false,
            hint: false,
            timeout_s: 60.0,
            sabotage: None,
        }
    }
}

/// One message to be moved and checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Unique in its plan; makes tags and patterns unique.
    pub id: u64,
    /// How.
    pub op: Op,
    /// From which memory to which.
    pub pair: Pair,
    /// How much.
    pub size: usize,
    /// Rank of the sender, 0 or 1.
    pub from: u8,
}

impl Case {
    /// Key for something of this case; equal on both sides, different for every `what`.
    pub fn key(&self, seed: u64, what: u64) -> u64 {
        mix(mix(seed ^ mix(self.id)) ^ what)
    }

    /// Rank of the receiver.
    pub fn to(&self) -> u8 {
        1 - self.from
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { op, pair, size, from, .. } = self;
        write!(f, "{op} {pair} {size} bytes, {from}->{}", self.to())
    }
}

impl Plan {
    /// All cases, grouped by size because buffers are allocated per size.
    pub fn groups(&self) -> Vec<(usize, Vec<Case>)> {
        let mut id = self.first_case;
        let mut cases_of = |size| {
            let mut cases = Vec::new();
            for &pair in &self.pairs {
                for &op in self.ops.iter().filter(|op| op.applies_to(size)) {
                    for from in if self.one_way { 0..=0 } else { 0..=1 } {
                        cases.push(Case { id, op, pair, size, from });
                        id += 1;
                    }
                }
            }
            cases
        };
        self.sizes.iter().map(|&size| (size, cases_of(size))).collect()
    }

    /// All cases.
    pub fn cases(&self) -> impl Iterator<Item = Case> {
        self.groups().into_iter().flat_map(|(_, cases)| cases)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn plan() -> Plan {
        let ops = vec![Op::Tag, Op::TagTruncated, Op::Put];
        Plan { ops, sizes: vec![0, 1, 8], sabotage: Some(Sabotage::Guard), ..Plan::default() }
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("65537", 65537),
            ("64K", 65536),
            ("4M+13", (4 << 20) + 13),
            ("1m-1", 1048575),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
        for text in ["", "K", "x", "1Q", "1-2", "-1", "99999999999999999999G"] {
            assert!(text.parse::<Size>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_survive_a_round_trip() {
        for (n, (op, name, group)) in Op::TABLE.into_iter().enumerate() {
            assert_eq!((op as usize, op.to_string().parse()), (n, Ok(op)));
            assert_eq!(serde_json::to_string(&op).unwrap(), format!("\"{name}\""));
            assert!(group.variants().any(|variant| variant == op) && Op::PLAIN.contains(&group));
        }
        assert_eq!(Op::Am.variants().collect::<Vec<_>>(), [Op::Am, Op::AmEager, Op::AmRndv]);
        assert_eq!(Op::AmEager.variants().collect::<Vec<_>>(), [Op::AmEager]);
        for pair in Pair::ALL {
            assert_eq!(pair.to_string().parse(), Ok(pair));
        }
        assert!("host".parse::<Pair>().unwrap_err().contains("host:gaudi"));
        assert!("cuda:host".parse::<Pair>().is_err());
    }

    #[test]
    fn every_combination_runs_in_both_directions_with_keys_of_its_own() {
        let cases: Vec<Case> = plan().cases().collect();
        // 4 pairs × 2 directions × (2 operations at size 0, 3 at sizes 1 and 8)
        assert_eq!(cases.len(), 4 * 2 * (2 + 3 + 3));
        let keys: HashSet<_> =
            cases.iter().flat_map(|case| (0..4).map(|what| case.key(7, what))).collect();
        assert_eq!(keys.len(), 4 * cases.len());
        let one_way: Vec<Case> = Plan { one_way: true, ..plan() }.cases().collect();
        assert!(one_way.len() == cases.len() / 2 && one_way.iter().all(|case| case.from == 0));
    }

    #[test]
    fn a_plan_reaches_the_other_process_unchanged() {
        let text = serde_json::to_string(&plan()).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan());
    }
}
