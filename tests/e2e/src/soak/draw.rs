//! Draws a round from a seed: the UCX, the way, the operations, memory and sizes, and the fault.

use fastrand::Rng;

use crate::Ucx;
use crate::named::named;

named! {
    /// How bytes get from one side to the other.
    Way {
        /// Two processes, through host memory, by UCX's own transports.
        Staged = "staged",
        /// Two processes, `gaudi_ipc` with a driver that does not import dma-bufs.
        Relay = "relay",
        /// Two processes, `gaudi_ipc` with a driver that does.
        Import = "import",
        /// Two processes, software HCA, reliable connections.
        Hca = "hca",
        /// The same with datagrams.
        HcaDatagrams = "hca-ud",
        /// One process, many threads.
        Threads = "threads",
        /// Several processes, all connected to each other.
        Mesh = "mesh",
        /// Two processes that connect and disconnect.
        Reconnect = "reconnect",
        /// NIXL's Python package, `examples/kv_cache.py`.
        Nixl = "nixl",
    }
}

impl Way {
    /// Whether this is one pair of processes, so that a fault can hit one of them.
    fn is_pair(self) -> bool {
        matches!(self, Way::Staged | Way::Relay | Way::Import | Way::Hca | Way::HcaDatagrams)
    }

    pub(super) fn has_hca(self) -> bool {
        matches!(self, Way::Hca | Way::HcaDatagrams)
    }

    /// The faults that can happen on this way, besides none.
    fn faults(self) -> Vec<Fault> {
        let apply = |fault: &Fault| match fault {
            Fault::None | Fault::Flip => false,
            Fault::PortDown => self.has_hca(),
            Fault::ImportRefused => self == Way::Import,
            Fault::ExportRefused => self == Way::Import || self.has_hca(),
            Fault::PeerDies => self.is_pair() || self == Way::Nixl,
            Fault::Killed | Fault::Stopped => self != Way::Nixl && self != Way::Threads,
            Fault::FewDescriptors => self.is_pair(),
            // Not on a mesh: it needs a card for each process, and fails without.
            Fault::OpenBusy | Fault::AllocationRefused | Fault::MapRefused => self.is_pair(),
            _ => self != Way::Nixl && self != Way::Reconnect,
        };
        Fault::ALL.into_iter().filter(apply).collect()
    }
}

named! {
    /// What goes wrong.
    Fault {
        /// Nothing: everything has to pass.
        None = "none",
        /// The driver refuses one submission.
        CopyFailsOnce = "copy-fails-once",
        /// From some submission on the driver refuses all.
        CopyFailsForGood = "copy-fails-for-good",
        /// A transfer of the card faults, which resets it.
        PageFault = "page-fault",
        /// No device memory, once or for good.
        AllocationRefused = "allocation-refused",
        /// Host memory is not pinned, or device memory not mapped.
        MapRefused = "map-refused",
        /// No dma-buf of device memory.
        ExportRefused = "export-refused",
        /// The driver refuses a peer's dma-buf.
        ImportRefused = "import-refused",
        /// A card is another process's, or being released, when it is opened.
        OpenBusy = "open-busy",
        /// The card is reset.
        Reset = "reset",
        /// The card disappears.
        Removal = "removal",
        /// A submission never ends by itself: the driver's time limit does.
        Hang = "hang",
        /// Transfers take milliseconds.
        Slow = "slow",
        /// Ends of submissions are reported late, and not in their order.
        LateEnds = "late-ends",
        /// A process is killed at a random moment.
        Killed = "killed",
        /// A process is stopped for some seconds.
        Stopped = "stopped",
        /// A process is killed in a transfer; the other must get its error and work on.
        PeerDies = "peer-dies",
        /// A process may open few files.
        FewDescriptors = "few-descriptors",
        /// The port of the HCA is down for a moment.
        PortDown = "port-down",
        /// A byte that the card wrote is changed. Never drawn: it shows that the judge can fail.
        Flip = "flip",
    }
}

impl Fault {
    /// Rules for the software card.
    fn rules(self, random: &mut Rng) -> Option<String> {
        let after = random.u32(..200);
        let submission = |how: &str| Some(format!("hlthunk_command_submission {how}"));
        match self {
            Fault::CopyFailsOnce => submission(&format!("fail:EIO after={after} times=1")),
            Fault::CopyFailsForGood => submission(&format!("fail:EIO after={after} times=0")),
            Fault::PageFault => Some(format!("transfer fail:EFAULT after={after}")),
            Fault::AllocationRefused => {
                let (after, times) = (random.u32(..3), random.u32(..2));
                Some(format!("hlthunk_device_memory_alloc fail:ENOMEM after={after} times={times}"))
            }
            Fault::MapRefused => {
                let call = if random.bool() {
                    "hlthunk_host_memory_map"
                } else {
                    "hlthunk_device_memory_map"
                };
                let (after, times) = (random.u32(..6), random.u32(..3));
                Some(format!("{call} fail:ENOMEM after={after} times={times}"))
            }
            Fault::ExportRefused => {
                let errno = pick(random, &["EINVAL", "EMFILE", "ENOMEM"]);
                let call = |name| format!("{name} fail:{errno} times=0\n");
                let calls = [
                    "hlthunk_device_mapped_memory_export_dmabuf_fd",
                    "hlthunk_device_memory_export_dmabuf_fd",
                ];
                Some(calls.into_iter().map(call).collect())
            }
            // An import is an ioctl. If the card does not answer it, it goes to the kernel, which does not know it.
            Fault::ImportRefused => Some(format!(
                "ioctl fail:EINVAL after={} times={}",
                random.u32(..4),
                random.u32(..3)
            )),
            Fault::OpenBusy => {
                let errno = pick(random, &["EBUSY", "EAGAIN"]);
                Some(format!("hlthunk_open fail:{errno} times={}", random.u32(1..3)))
            }
            Fault::Reset | Fault::Removal => {
                let what = if self == Fault::Reset { "reset" } else { "remove" };
                let point = pick(
                    random,
                    &[
                        "hlthunk_wait_for_cs",
                        "submission",
                        "transfer",
                        "hlthunk_command_submission",
                    ],
                );
                Some(format!("{point} {what} after={after}"))
            }
            Fault::Hang => Some(format!("submission hang after={after}")),
            Fault::Slow => {
                let (milliseconds, times) = (random.u32(1..40), random.u32(20..200));
                Some(format!("transfer slow:{milliseconds} after={after} times={times}"))
            }
            Fault::Flip => Some("transfer flip:0 times=0".to_owned()),
            _ => None,
        }
    }
}

/// One round. The seed determines all but the moment of a kill or stop, which depends on the machine's speed.
#[derive(Debug, Clone)]
pub struct Round {
    /// The UCX.
    pub ucx: Ucx,
    /// How bytes move.
    pub way: Way,
    /// What goes wrong.
    pub fault: Fault,
    /// Arguments of `ucp-check`, or of the example.
    pub(super) words: String,
    pub(super) variables: Vec<(&'static str, String)>,
    pub(super) cards: u32,
    pub(super) imports: bool,
    pub(super) rules: Option<String>,
    /// Random numbers for what is done while it runs.
    pub(super) random: Rng,
}

fn pick<T: Copy>(random: &mut Rng, from: &[T]) -> T {
    from[random.usize(..from.len())]
}

/// A random selection of these, at least one, in their order.
fn some(random: &mut Rng, from: &[&str]) -> String {
    let must = random.usize(..from.len());
    let chosen = from.iter().enumerate().filter(|(n, _)| *n == must || random.bool());
    chosen.map(|(_, word)| *word).collect::<Vec<_>>().join(",")
}

/// Random sizes up to 2^`power`; each power is equally likely.
fn sizes(random: &mut Rng, count: usize, power: u32) -> String {
    let size = |_| {
        let below = 1_usize << random.u32(..=power);
        (below + random.usize(..below)).min(1 << power).to_string()
    };
    (0..count).map(size).collect::<Vec<_>>().join(",")
}

impl Round {
    /// Draws a round with one of these ways and one of these faults (an empty list stands for all). The same seed gives
    /// the same round.
    pub fn draw(seed: u64, ways: &[Way], faults: &[Fault]) -> Round {
        let mut random = Rng::with_seed(seed);
        let random = &mut random;
        let way = pick(random, if ways.is_empty() { &Way::ALL } else { ways });
        let mut possible = way.faults();
        possible.retain(|fault| faults.is_empty() || faults.contains(fault));
        // One round in four has no fault.
        let fault = match (faults, possible.is_empty()) {
            ([only], _) => *only,
            ([], _) if random.u8(..4) == 0 => Fault::None,
            (_, true) => Fault::None,
            _ => pick(random, &possible),
        };
        let only_nixl = way.has_hca() || way == Way::Nixl;
        let ucx = if only_nixl || random.bool() { Ucx::Nixl } else { Ucx::V1_22 };
        let mut round = Round {
            ucx,
            way,
            fault,
            words: String::new(),
            variables: Vec::new(),
            cards: if fault == Fault::OpenBusy { 3 } else { 2 },
            imports: match way {
                Way::Import => true,
                Way::Mesh | Way::Reconnect | Way::Nixl => random.bool(),
                _ => false,
            },
            rules: fault.rules(random),
            random: random.clone(),
        };
        round.say(random);
        round
    }

    fn say(&mut self, random: &mut Rng) {
        const PAIRS: [&str; 3] = ["host:gaudi", "gaudi:host", "gaudi:gaudi"];
        let seed = random.u32(..);
        match (self.way, self.fault) {
            (Way::Threads, _) => {
                let (threads, workers) =
                    (random.u32(2..=12), pick(random, &["own", "shared", "mixed"]));
                let seconds = random.u32(2..=6);
                self.words = format!(
                    "soak --seconds {seconds} --threads {threads} --workers {workers} --max 1M --seed {seed}"
                );
            }
            (Way::Nixl, fault) => {
                let operation = pick(random, &["READ", "WRITE"]);
                let (layers, blocks) = (random.u32(1..4), random.u32(10..200));
                let kill = if fault == Fault::PeerDies { "--kill --timeout 60" } else { "" };
                let blocks = if fault == Fault::PeerDies { 1000 } else { blocks };
                self.words =
                    format!("--layers {layers} --blocks {blocks} --operation {operation} {kill}");
                // A process that only fetches learns of its peer's death from the keep-alive.
                self.variables.push(("UCX_KEEPALIVE_INTERVAL", "1s".to_owned()));
            }
            (Way::Mesh, _) => {
                self.cards = random.u32(3..=5);
                let (ops, mem) =
                    (some(random, &["tag", "put", "get", "stream"]), some(random, &PAIRS));
                self.words = format!(
                    "mesh --processes {} --plain --ops {ops} --mem {mem} --sizes {} --seed {seed}",
                    self.cards,
                    sizes(random, 3, 21)
                );
            }
            (Way::Reconnect, _) => {
                let fresh = if random.bool() { "--fresh --count 8" } else { "--count 30" };
                let (ops, mem) = (some(random, &["tag", "put", "get"]), some(random, &PAIRS));
                self.words = format!(
                    "reconnect {fresh} --plain --ops {ops} --mem {mem} --sizes {} --seed {seed}",
                    sizes(random, 1, 18)
                );
            }
            (way, Fault::PeerDies) => {
                // Datagrams take long for large messages, and UCX does not complete receives of middle-sized ones.
                let size = pick(
                    random,
                    if way == Way::HcaDatagrams { &["4K", "256K"] } else { &["4K", "4M"] },
                );
                let ops = some(random, &["tag", "put", "get", "am"]);
                let mem = pick(random, &PAIRS);
                self.words =
                    format!("peer-errors --ops {ops} --mem {mem} --sizes {size} --seed {seed}");
            }
            _ => {
                let all = ["tag", "stream", "am", "put", "get"];
                let relayed = matches!(self.way, Way::Relay | Way::Import) && random.bool();
                let ops = some(random, if relayed { &["put", "get"] } else { &all });
                let mem = some(random, &["host:host", "host:gaudi", "gaudi:host", "gaudi:gaudi"]);
                let mem = if mem == "host:host" { "gaudi:gaudi".to_owned() } else { mem };
                let option = pick(random, &["", "", "--peer-errors", "--hint", "--plain"]);
                let power = if self.way == Way::HcaDatagrams { 18 } else { 22 };
                let sizes = sizes(random, 4, power);
                self.words =
                    format!("pair --ops {ops} --mem {mem} --sizes {sizes} --seed {seed} {option}");
                // The rules apply to both processes, or to one.
                if let (true, which @ 0..=1) = (self.rules.is_some(), random.u8(..3)) {
                    self.words += &format!(" --env {which}:SOFT_GAUDI_FAULTS=no");
                }
            }
        }
        match self.way {
            Way::Staged => self.variables.push(("UCX_TLS", "^gaudi_ipc".to_owned())),
            Way::Hca => {
                self.variables.push(("UCX_TLS", format!("{},gaudi_cpy", crate::rdma::RC)));
            }
            Way::HcaDatagrams => {
                self.variables.push(("UCX_TLS", format!("{},gaudi_cpy", crate::rdma::UD)));
            }
            _ => {}
        }
        if self.way.has_hca() && self.fault == Fault::PeerDies {
            self.variables
                .extend(crate::rdma::IMPATIENT.map(|(name, value)| (name, value.to_owned())));
        }
        if self.fault == Fault::LateEnds {
            let microseconds = random.u32(100..5000);
            self.variables.push(("SOFT_GAUDI_JITTER", format!("{microseconds},{seed}")));
        }
        if self.fault == Fault::Hang {
            self.variables.push(("SOFT_GAUDI_CS_TIMEOUT", "2000".to_owned()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn the_same_seed_makes_the_same_round_and_others_make_others() {
        let text = |seed| format!("{:?}", Round::draw(seed, &[], &[]));
        assert_eq!(text(7), text(7));
        assert_eq!((0..100).map(text).collect::<BTreeSet<_>>().len(), 100);
    }

    #[test]
    fn every_way_and_every_fault_is_drawn_but_the_one_for_the_judge() {
        let rounds: Vec<Round> = (0..5000).map(|seed| Round::draw(seed, &[], &[])).collect();
        for way in Way::ALL {
            assert!(rounds.iter().any(|round| round.way == way), "{way}");
        }
        for fault in Fault::ALL {
            let drawn = rounds.iter().any(|round| round.fault == fault);
            assert_eq!(drawn, fault != Fault::Flip, "{fault}");
        }
        let healthy = rounds.iter().filter(|round| round.fault == Fault::None).count();
        assert!((1000..2500).contains(&healthy), "{healthy} rounds without a fault");
    }

    #[test]
    fn who_asks_for_one_gets_it() {
        for seed in 0..100 {
            let round = Round::draw(seed, &[Way::Relay], &[Fault::Reset]);
            assert_eq!((round.way, round.fault), (Way::Relay, Fault::Reset));
            assert_eq!(Round::draw(seed, &[Way::Staged], &[Fault::Flip]).fault, Fault::Flip);
        }
    }
}
