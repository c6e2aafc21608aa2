//! The table of cases (operation × memory pair × size × direction), and how users name them.
//!
//! Pure functions. Both processes of a pair compute the same list from the same [`Plan`].

use crate::pattern::mix;
use crate::ucp::{Features, Memory};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// One way of moving a message.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize, ValueEnum)]
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
    /// The five operations of UCP's API; the others are variants.
    pub const PLAIN: [Op; 5] = [Op::Tag, Op::Stream, Op::Am, Op::Put, Op::Get];
    /// Operations whose messages can be told apart when several threads or peers share a worker.
    pub const KEYED: [Op; 3] = [Op::Tag, Op::Put, Op::Get];

    /// The plain operation that this is, or is a variant of.
    pub fn group(self) -> Op {
        match self {
            Op::TagUnexpected | Op::TagMany | Op::TagTruncated => Op::Tag,
            Op::AmEager | Op::AmRndv => Op::Am,
            plain => plain,
        }
    }

    /// A plain operation's variants and itself, or a variant alone.
    pub fn variants(self) -> impl Iterator<Item = Op> {
        let all = Op::value_variants().iter().copied();
        all.filter(move |op| *op == self || op.group() == self)
    }

    /// Whether it is put or get, which need no receiver.
    pub fn one_sided(self) -> bool {
        matches!(self, Op::Put | Op::Get)
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Memory on the sending and on the receiving side.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub struct Pair {
    pub src: Memory,
    pub dst: Memory,
}

impl Pair {
    pub const HOST: Pair = Pair { src: Memory::Host, dst: Memory::Host };
    pub const GAUDI: Pair = Pair { src: Memory::Gaudi, dst: Memory::Gaudi };
    /// The four pairs of host and Gaudi.
    pub const ALL: [Pair; 4] = [
        Pair::HOST,
        Pair { src: Memory::Host, dst: Memory::Gaudi },
        Pair { src: Memory::Gaudi, dst: Memory::Host },
        Pair::GAUDI,
    ];
    /// The five pairs with CUDA.
    pub const CUDA: [Pair; 5] = [
        Pair { src: Memory::Host, dst: Memory::Cuda },
        Pair { src: Memory::Cuda, dst: Memory::Host },
        Pair { src: Memory::Gaudi, dst: Memory::Cuda },
        Pair { src: Memory::Cuda, dst: Memory::Gaudi },
        Pair { src: Memory::Cuda, dst: Memory::Cuda },
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
        let found = Pair::ALL.into_iter().chain(Pair::CUDA).find(|pair| pair.to_string() == s);
        found.ok_or_else(|| {
            format!("SOURCE:DESTINATION of host, gaudi and cuda, e.g. host:gaudi, not '{s}'")
        })
    }
}

/// A number of bytes as users write it: `65537`, `64K`, `4M+13`, `1M-1`.
pub fn size(text: &str) -> Result<usize, String> {
    let units = |text: &str| {
        let digits = text.trim_end_matches(['K', 'M', 'G', 'k', 'm', 'g']);
        let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
            "" => 0,
            "K" => 10,
            "M" => 20,
            "G" => 30,
            _ => return None,
        };
        digits.parse::<usize>().ok()?.checked_mul(1 << shift)
    };
    let size = match text.find(['+', '-']) {
        None => units(text),
        Some(at) => units(&text[..at]).zip(units(&text[at + 1..])).and_then(|(base, more)| {
            if text[at..].starts_with('+') {
                base.checked_add(more)
            } else {
                base.checked_sub(more)
            }
        }),
    };
    size.ok_or_else(|| format!("a number with K, M or G, e.g. 65537, 64K, 4M+13, not '{text}'"))
}

/// From empty to 64 MiB, mostly odd, with sizes around UCX's protocol switches.
#[rustfmt::skip]
pub const SIZES: [usize; 24] = [
    0, 1, 7, 8, 63, 64, 65, 255, 1000, 2049, 4095, 4096, 8191, 16385, 32769, 65535, 65536, 131_073,
    (1 << 19) + 1, (1 << 20) - 1, 1 << 20, (4 << 20) + 13, (16 << 20) + 1, 64 << 20,
];

/// What is done wrong on purpose in each transfer: the check must report every case.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ValueEnum)]
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

/// Everything both processes must agree on, and how users say it.
#[derive(Clone, PartialEq, Debug, clap::Args, Serialize, Deserialize)]
pub struct Plan {
    #[arg(skip)]
    pub ucx: Option<PathBuf>,
    /// Operations: tag, stream, am, put, get (each with its variants), or a variant by name
    #[arg(long, value_delimiter = ',', hide_possible_values = true)]
    pub ops: Vec<Op>,
    /// Only the operations named, without their variants
    #[arg(long)]
    pub plain: bool,
    /// Memory pairs SOURCE:DESTINATION of host, gaudi and cuda; default: the four of host and gaudi
    #[arg(long = "mem", value_delimiter = ',', value_name = "SRC:DST")]
    pub pairs: Vec<Pair>,
    /// The five pairs with CUDA memory as well, where there is a GPU
    #[arg(long)]
    pub cuda: bool,
    /// Message sizes, e.g. 0,1,7,64K,4M+13; default: 24 sizes from 0 to 64M
    #[arg(long, value_delimiter = ',', value_parser = size)]
    pub sizes: Vec<usize>,
    /// Leave out sizes above this
    #[arg(long, value_parser = size)]
    pub max: Option<usize>,
    /// Makes patterns, offsets and cuts
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Number of the first case: plans that share a worker must not share numbers.
    #[arg(skip)]
    pub first_case: u64,
    /// Timed repetitions per case besides the verified message; default: 0, with --json 10
    #[arg(long)]
    pub iters: Option<u32>,
    /// Time one message at a time only, and report the least of the times: what others do on the machine counts less
    #[arg(long, requires = "iters")]
    pub least: bool,
    /// Write one row per case: op, src, dst, size, ucx, latency_us, gbps, verified
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// What the context asks for.
    #[arg(skip = Features::ALL)]
    pub features: Features,
    /// Context with the WAKEUP feature: sleep on the event descriptor while waiting
    #[arg(long)]
    pub wakeup: bool,
    /// Endpoints with UCP_ERR_HANDLING_MODE_PEER
    #[arg(long)]
    pub peer_errors: bool,
    /// Process 0 sends and process 1 receives: with --mem gaudi:host only process 0 has Gaudi memory
    #[arg(long)]
    pub one_way: bool,
    /// Tell UCX the memory type of every buffer instead of letting it find out
    #[arg(long)]
    pub hint: bool,
    /// Seconds that one step may take before it counts as hung
    #[arg(long, default_value_t = 60.0)]
    pub timeout: f64,
    /// Do something wrong in every transfer: proves that the check can fail
    #[arg(long, value_name = "WHAT")]
    pub sabotage: Option<Sabotage>,
}

/// One message to move and check.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Case {
    /// Unique in its plan, so that tags and patterns are unique, too.
    pub id: u64,
    pub op: Op,
    pub pair: Pair,
    pub size: usize,
    /// Rank of the sender, 0 or 1.
    pub from: u8,
}

impl Case {
    /// A key for one purpose (`what`) of this case: equal on both sides, different for every `what`.
    pub fn key(&self, seed: u64, what: u64) -> u64 {
        mix(mix(seed ^ mix(self.id)) ^ what)
    }

    pub fn to(&self) -> u8 {
        1 - self.from
    }

    /// Whether a UCX of this version can run it. When the receiver keeps an active message that came in several
    /// fragments, 1.21 crashes, with host memory too (openucx/ucx#11468): cases that may be fragmented are left out.
    pub fn runs_on(&self, version: &str) -> bool {
        let one_fragment = self.size <= 4096;
        let rendezvous = self.op == Op::AmRndv || self.op == Op::Am && self.size >= 1 << 20;
        self.op.group() != Op::Am || !version.starts_with("1.21.") || one_fragment || rendezvous
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Case { op, pair, size, from, .. } = self;
        write!(f, "{op} {pair} {size} bytes, {from}->{}", self.to())
    }
}

impl Plan {
    /// The plan with a subcommand's defaults where the user said nothing, and with variants expanded.
    #[must_use]
    pub fn or(mut self, ops: &[Op], pairs: &[Pair], sizes: &[usize]) -> Plan {
        fn or<T: Copy>(given: &mut Vec<T>, default: &[T]) {
            if given.is_empty() {
                given.extend_from_slice(default);
            }
        }
        or(&mut self.ops, ops);
        or(&mut self.pairs, pairs);
        or(&mut self.sizes, sizes);
        if !self.plain {
            self.ops = self.ops.iter().flat_map(|op| op.variants()).collect();
        }
        self.ops.sort();
        self.ops.dedup();
        self.sizes.retain(|&size| self.max.is_none_or(|max| size <= max));
        self.iters = self.iters.or(self.json.is_some().then_some(10));
        if self.wakeup {
            self.features = self.features.with_wakeup();
        }
        self
    }

    /// Whether the process with this rank has such memory.
    pub fn has(&self, memory: Memory, rank: u8) -> bool {
        let sides = |pair: &Pair| [pair.src, pair.dst];
        let has = |(side, its)| its == memory && (!self.one_way || side == usize::from(rank));
        self.pairs.iter().any(|pair| sides(pair).into_iter().enumerate().any(has))
    }

    /// All cases, grouped by size because buffers are allocated per size.
    pub fn groups(&self) -> Vec<(usize, Vec<Case>)> {
        let mut id = self.first_case;
        let mut cases_of = |size| {
            let mut cases = Vec::new();
            for &pair in &self.pairs {
                // A message of no bytes cannot be truncated.
                for &op in self.ops.iter().filter(|op| size > 0 || **op != Op::TagTruncated) {
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

    pub fn cases(&self) -> impl Iterator<Item = Case> {
        self.groups().into_iter().flat_map(|(_, cases)| cases)
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::HashSet;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        plan: Plan,
    }

    /// What the command line `words` asks for.
    pub(crate) fn plan(words: &str) -> Plan {
        let line = Line::try_parse_from(["plan"].into_iter().chain(words.split_whitespace()));
        line.unwrap_or_else(|error| panic!("{error}")).plan.or(&Op::PLAIN, &Pair::ALL, &SIZES)
    }

    #[test]
    fn active_messages_of_several_fragments_are_left_out_on_1_21() {
        let left_out = |version, size: &str| {
            let plan = plan(&format!("--mem host:host --one-way --sizes {size}"));
            let left_out = plan.cases().filter(|case: &Case| !case.runs_on(version));
            left_out.map(|case| case.op).collect::<Vec<_>>()
        };
        assert_eq!(left_out("1.21.0", "4096"), []);
        assert_eq!(left_out("1.21.0", "64K"), [Op::Am, Op::AmEager]);
        assert_eq!(left_out("1.21.0", "1M"), [Op::AmEager]);
        assert_eq!(left_out("1.22.0", "64K"), []);
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        let (odd, less) = ((4 << 20) + 13, (1 << 20) - 1);
        for (text, bytes) in
            [("0", 0), ("65537", 65537), ("64K", 65536), ("4M+13", odd), ("1m-1", less)]
        {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "x", "1Q", "1KK", "1-2", "-1", "99999999999999999999G"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn names_are_the_same_on_the_command_line_in_json_and_in_reports() {
        for op in Op::value_variants() {
            let name = op.to_possible_value().unwrap().get_name().to_owned();
            assert_eq!(op.to_string(), name);
            assert_eq!(serde_json::to_string(op).unwrap(), format!("\"{name}\""));
            assert!(op.group().variants().any(|variant| variant == *op));
        }
        assert_eq!(format!("{:<5}|", Op::Am), "am   |");
        assert_eq!(Op::Am.variants().collect::<Vec<_>>(), [Op::Am, Op::AmEager, Op::AmRndv]);
        assert_eq!(Op::AmEager.variants().collect::<Vec<_>>(), [Op::AmEager]);
        assert_eq!(Pair::ALL.map(|pair| pair.to_string().parse()), Pair::ALL.map(Ok));
        assert_eq!(Pair::CUDA.map(|pair| pair.to_string().parse()), Pair::CUDA.map(Ok));
    }

    #[test]
    fn by_default_everything_is_run_and_nothing_is_hinted() {
        let all = plan("");
        assert_eq!(all.ops, Op::value_variants());
        assert!(!all.hint && all.iters.is_none() && all.sizes == SIZES && all.pairs == Pair::ALL);
        assert_eq!(plan("--plain --ops am,tag").ops, [Op::Tag, Op::Am]);
    }

    #[test]
    fn lists_limits_and_flags_are_taken() {
        let plan =
            plan("--ops tag,put --mem host:gaudi --sizes 0,7,64K,1M --max 64K --wakeup --json F");
        assert_eq!(plan.ops, [Op::Tag, Op::TagUnexpected, Op::TagMany, Op::TagTruncated, Op::Put]);
        assert_eq!((plan.pairs, plan.sizes), (vec![Pair::ALL[1]], vec![0, 7, 65536]));
        assert!(plan.iters == Some(10) && plan.features.wakeup());
    }

    #[test]
    fn every_combination_runs_in_both_directions_with_keys_of_its_own() {
        let words = "--plain --ops tag,tag-truncated,put --sizes 0,1,8";
        let cases: Vec<Case> = plan(words).cases().collect();
        // 4 pairs × 2 directions × (2 operations at size 0, 3 at sizes 1 and 8)
        assert_eq!(cases.len(), 4 * 2 * (2 + 3 + 3));
        let keys: HashSet<_> =
            cases.iter().flat_map(|case| (0..4).map(|what| case.key(7, what))).collect();
        assert_eq!(keys.len(), 4 * cases.len());
        let one_way: Vec<Case> = plan(&format!("{words} --one-way")).cases().collect();
        assert!(one_way.len() == cases.len() / 2 && one_way.iter().all(|case| case.from == 0));
    }

    #[test]
    fn a_plan_reaches_the_other_process_unchanged() {
        let plan = plan("--sizes 1 --sabotage guard --mem gaudi:host --wakeup");
        let text = serde_json::to_string(&plan).unwrap();
        assert_eq!(serde_json::from_str::<Plan>(&text).unwrap(), plan);
    }
}
