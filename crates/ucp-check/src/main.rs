//! The command line of the verifying UCP client.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;
use ucp_check::matrix::{Op, Pair, Plan, SIZES, Sabotage, Size};
use ucp_check::run::surroundings::{Refusal, Surroundings, Variable};
use ucp_check::run::{
    self, alloc, asleep, atomics, costs, loopback, memory, mesh, pair, peer_errors, reconnect,
    rotate, soak, threads,
};
use ucp_check::ucp::{Features, Memory};

/// Moves messages through a stock UCX and checks every byte, and the bytes around, on both sides.
///
/// Host and Gaudi memory, tag, stream, active message, put and get. Gaudi memory needs the plugin
/// (UCX_PLUGIN_PATH) and a driver library, the real or the software one (LD_LIBRARY_PATH); it is
/// allocated, filled and read back through UCX alone. Exit status 0 means that everything that was
/// asked for was run and verified.
#[derive(Parser)]
#[command(name = "ucp-check", version)]
struct Cli {
    /// Folder with libucp (or the root of an unpacked wheel); default: what the loader path finds
    #[arg(long, value_name = "DIR", global = true)]
    ucx: Vec<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Two processes, every operation and memory pair in both directions
    Pair(PairArgs),
    /// Several processes, all connected to each other: put, get, tags (and streams, if asked for) between
    /// all of them at once
    Mesh {
        /// How many
        #[arg(long, default_value_t = 8)]
        processes: u8,
        #[command(flatten)]
        pair: PairArgs,
    },
    /// One process whose worker talks to itself
    Loopback(PlanArgs),
    /// Two processes with host memory only: a loaded plugin must disturb nothing
    HostOnly(PairArgs),
    /// Two processes, contexts with TAG and WAKEUP only, asleep on the event descriptor while waiting
    Wakeup(PairArgs),
    /// One process, asleep on the event descriptor while copies to and from Gaudi memory are all that is
    /// under way; fails if it goes round and round instead
    Asleep {
        /// Bytes of the copies
        #[arg(long, value_delimiter = ',', default_value = "8,4K,64K,1M,16M")]
        sizes: Vec<Size>,
        /// How often, there and back
        #[arg(long, default_value_t = 10)]
        count: u64,
        /// The device takes its time (SOFT_GAUDI_LATENCY): most copies must be slept for
        #[arg(long)]
        slow: bool,
        /// Seconds that one step may take
        #[arg(long, default_value_t = 60.0)]
        timeout: f64,
    },
    /// Two copies of UCX (--ucx A --ucx B) in one process, each in loopback, then taking turns
    TwoUcx(PlanArgs),
    /// A peer is killed in the middle of its transfers: the error must show, nothing may hang
    PeerErrors {
        /// A third process must get the dead one's card while the survivor lives; needs exactly two
        /// cards
        #[arg(long)]
        heir: bool,
        /// Everything goes straight to or from the peer's memory: the survivor's operation must end, put and
        /// get by themselves, others at the latest when the memory is unmapped
        #[arg(long)]
        direct: bool,
        /// How often to run each case, each time with another point of death
        #[arg(long, default_value_t = 1)]
        times: u32,
        #[command(flatten)]
        pair: PairArgs,
    },
    /// Two processes connect, transfer and disconnect, many times: nothing may be left behind
    Reconnect {
        /// How many times
        #[arg(long, default_value_t = 1000)]
        count: u32,
        /// A context and a worker of its own each time
        #[arg(long)]
        fresh: bool,
        #[command(flatten)]
        pair: PairArgs,
    },
    /// Allocate and free device memory, many times and in many sizes
    Alloc {
        /// How many allocations
        #[arg(long, default_value_t = 100)]
        count: u64,
        /// Which memory: gaudi or host
        #[arg(long, default_value = "gaudi")]
        memory: Memory,
        /// Largest message size
        #[arg(long, default_value = "8M")]
        max: Size,
        /// Makes sizes and patterns
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Seconds that one step may take
        #[arg(long, default_value_t = 60.0)]
        timeout: f64,
    },
    /// What memory domains promise, asked through libuct: allocation, detection, dma-bufs, registration
    Memory(MemoryArgs),
    /// One multi-threaded worker used by several threads
    Threads {
        /// How many threads
        #[arg(long, default_value_t = 3)]
        count: u8,
        #[command(flatten)]
        plan: PlanArgs,
    },
    /// Every atomic operation on a peer's memory, or our own
    Atomics {
        /// Where the variable is: gaudi or host
        #[arg(long, default_value = "gaudi")]
        memory: Memory,
        /// In this process, not in another
        #[arg(long)]
        alone: bool,
        /// Variable for the two processes
        #[arg(long, value_name = "K=V")]
        env: Vec<Variable>,
        /// Seconds that one step may take
        #[arg(long, default_value_t = 60.0)]
        timeout: f64,
    },
    /// Random messages from many threads for a given time, buffers coming and going meanwhile
    Soak {
        /// For how long
        #[arg(long, default_value_t = 60.0)]
        seconds: f64,
        /// How many threads
        #[arg(long, default_value_t = 8)]
        threads: u8,
        /// Every thread its own worker, one shared by all, or the last quarter sharing one
        #[arg(long, value_enum, default_value = "mixed")]
        workers: soak::Workers,
        /// Largest message size
        #[arg(long, default_value = "16M")]
        max: Size,
        /// Makes everything that is random
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Seconds that one step may take before it counts as hung
        #[arg(long, default_value_t = 120.0)]
        timeout: f64,
        /// Damage one byte after every transfer: proves that the check can fail
        #[arg(long, value_name = "WHERE")]
        sabotage: Option<Sabotage>,
    },
    /// Like pair --plain, at a few sizes, with times: latency and bandwidth of verified messages
    Bench(PairArgs),
    /// Figures for `cargo xtask bench`: a name, a tab and a number a line
    #[command(subcommand)]
    Costs(Costs),
    #[command(name = pair::ROLE, hide = true)]
    PairSide(SideArgs),
    #[command(name = mesh::ROLE, hide = true)]
    MeshSide(SideArgs),
    /// Bandwidth of put and get over a working set that no cache holds, beside memcpy
    Rotate {
        /// Operations under way at any time
        #[arg(long, default_value_t = 16)]
        outstanding: usize,
        /// Working set of each process
        #[arg(long, default_value = "256M")]
        set: Size,
        #[command(flatten)]
        pair: PairArgs,
    },
    #[command(name = rotate::ROLE, hide = true)]
    RotateSide(SideArgs),
    #[command(name = reconnect::ROLE, hide = true)]
    ReconnectSide(SideArgs),
    #[command(name = peer_errors::ROLE, hide = true)]
    PeerErrorsSide(SideArgs),
    #[command(name = atomics::ROLE, hide = true)]
    AtomicsSide(SideArgs),
}

#[derive(Subcommand)]
enum Costs {
    /// Copies through libuct beside memcpy, short ones beside the driver's submission
    Copies {
        /// Only show that it works: the figures mean nothing
        #[arg(long)]
        quick: bool,
        /// Only these sizes (and always the short ones)
        #[arg(long, value_delimiter = ',')]
        sizes: Vec<Size>,
    },
    /// The first ucp_init of a process
    Init,
}

#[derive(Args)]
struct MemoryArgs {
    /// What to check
    #[arg(value_enum)]
    check: memory::Check,
    /// The component: gaudi_copy or gaudi_gdr
    #[arg(long, default_value = "gaudi_copy")]
    component: String,
    /// Setting of the memory domain, e.g. GAUDI_COPY_DEVICE=1; stronger than the environment
    #[arg(long, value_name = "K=V", value_parser = variable)]
    set: Vec<(String, String)>,
    /// Largest allocation
    #[arg(long, default_value = "256M")]
    max: Size,
    /// Cycles of churn; rcache makes a hundredth of it
    #[arg(long, default_value_t = 10_000)]
    cycles: u32,
    /// Steps of model, and of each of the threads
    #[arg(long, default_value_t = 2000)]
    steps: u32,
    /// Unix socket of a program that maps dma-bufs
    #[arg(long, value_name = "SOCKET")]
    importer: Option<PathBuf>,
    /// When done, write the verdict to this file and wait to be killed, with the domain open
    #[arg(long, value_name = "FILE")]
    stay: Option<PathBuf>,
    /// Makes sizes, orders and patterns
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Seconds that one step may take
    #[arg(long, default_value_t = 120.0)]
    timeout: f64,
}

#[derive(Args)]
struct PairArgs {
    #[command(flatten)]
    plan: PlanArgs,
    /// Variable for the processes, e.g. UCX_TLS=tcp,gaudi_cpy, or for one of them: 1:SOFT_GAUDI_IMPORT=no
    #[arg(long, value_name = "[RANK:]K=V")]
    env: Vec<Variable>,
    /// What the kernel is to refuse the processes
    #[arg(long, value_enum)]
    refuse: Option<Refusal>,
    /// Endpoints with UCP_ERR_HANDLING_MODE_PEER
    #[arg(long)]
    peer_errors: bool,
    /// Process 0 sends and process 1 receives: with --mem gaudi:host only process 0 has Gaudi memory
    #[arg(long)]
    one_way: bool,
}

#[derive(Args)]
struct PlanArgs {
    /// Operations: tag, stream, am, put, get (each with its variants), or a variant by name
    /// (tag-unexpected, tag-many, tag-truncated, am-eager, am-rndv)
    #[arg(long, value_delimiter = ',')]
    ops: Vec<Op>,
    /// Only the operations named, without their variants
    #[arg(long)]
    plain: bool,
    /// Memory pairs SOURCE:DESTINATION of host and gaudi; default: all four
    #[arg(long, value_delimiter = ',', value_name = "SRC:DST")]
    mem: Vec<Pair>,
    /// Message sizes, e.g. 0,1,7,64K,4M+13; default: 24 sizes from 0 to 64M
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<Size>,
    /// Leave out sizes above this
    #[arg(long)]
    max: Option<Size>,
    /// Makes patterns, offsets and cuts
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Timed repetitions per case beside the verified message; default: 0, with --json 10
    #[arg(long)]
    iters: Option<u32>,
    /// Write one row per case: op, src, dst, size, ucx, latency_us, gbps, verified
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Context with the WAKEUP feature: sleep on the event descriptor while waiting
    #[arg(long)]
    wakeup: bool,
    /// Tell UCX the memory type of every buffer instead of letting it find out
    #[arg(long)]
    hint: bool,
    /// Seconds that one step may take before it counts as hung
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
    /// Damage one byte after every transfer: proves that the check can fail
    #[arg(long, value_name = "WHERE")]
    sabotage: Option<Sabotage>,
}

#[derive(Args)]
struct SideArgs {
    #[arg(long)]
    rank: u8,
    #[arg(long)]
    parent: u32,
    #[arg(long)]
    plan: String,
    #[arg(long, value_enum)]
    refuse: Option<Refusal>,
}

impl SideArgs {
    /// Begins the work of one process.
    fn run<P: serde::de::DeserializeOwned>(
        &self,
        side: impl FnOnce(u8, u32, &P) -> Result<bool>,
    ) -> Result<bool> {
        self.refuse.map_or(Ok(()), Refusal::impose)?;
        side(self.rank, self.parent, &serde_json::from_str(&self.plan)?)
    }
}

fn variable(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not K=V"))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// What a subcommand runs unless the user says otherwise.
struct Defaults<'a> {
    ops: &'a [Op],
    pairs: &'a [Pair],
    sizes: &'a [usize],
    iterations: u32,
    features: Features,
}

const EVERYTHING: Defaults<'static> = Defaults {
    ops: &Op::PLAIN,
    pairs: &Pair::ALL,
    sizes: &SIZES,
    iterations: 0,
    features: Features::ALL,
};

impl PlanArgs {
    fn plan(&self, ucx: Option<&PathBuf>, defaults: &Defaults<'_>) -> Plan {
        fn or<T: Copy>(given: &[T], default: &[T]) -> Vec<T> {
            if given.is_empty() { default.to_vec() } else { given.to_vec() }
        }
        let mut ops = or(&self.ops, defaults.ops);
        if !self.plain {
            ops = ops.iter().flat_map(|op| op.variants()).copied().collect();
        }
        ops.sort();
        ops.dedup();
        let given: Vec<usize> = self.sizes.iter().map(|size| size.0).collect();
        let mut sizes = or(&given, defaults.sizes);
        sizes.retain(|&size| self.max.is_none_or(|max| size <= max.0));
        let timed = if self.json.is_some() { 10 } else { defaults.iterations };
        let wakeup = self.wakeup;
        Plan {
            ucx: ucx.cloned(),
            ops,
            pairs: or(&self.mem, defaults.pairs),
            sizes,
            seed: self.seed,
            first_case: 0,
            iterations: self.iters.unwrap_or(timed),
            features: if wakeup { defaults.features.with_wakeup() } else { defaults.features },
            peer_errors: false,
            one_way: false,
            hint: self.hint,
            timeout_s: self.timeout,
            sabotage: self.sabotage,
        }
    }
}

impl PairArgs {
    fn plan(&self, ucx: Option<&PathBuf>, defaults: &Defaults<'_>) -> Plan {
        let Self { peer_errors, one_way, .. } = *self;
        Plan { peer_errors, one_way, ..self.plan.plan(ucx, defaults) }
    }

    fn around(&self) -> Surroundings {
        Surroundings { variables: self.env.clone(), refuse: self.refuse }
    }

    fn run(&self, ucx: Option<&PathBuf>, defaults: &Defaults<'_>) -> Result<()> {
        let report = pair::run(&self.plan(ucx, defaults), &self.around())?;
        run::conclude(&report, self.plan.json.as_deref())
    }
}

/// `Ok(false)`: it failed and has been told already.
fn execute(cli: Cli) -> Result<bool> {
    let ucx = cli.ucx.first();
    let host: Defaults<'_> = Defaults { pairs: &[Pair::HOST], ..EVERYTHING };
    match cli.command {
        Command::Pair(args) => args.run(ucx, &EVERYTHING),
        Command::HostOnly(args) => args.run(ucx, &host),
        Command::Wakeup(args) => {
            let features = Features::TAG.with_wakeup();
            args.run(ucx, &Defaults { ops: &[Op::Tag], features, ..EVERYTHING })
        }
        Command::Bench(args) => {
            let ops: Vec<Op> =
                if args.plan.ops.is_empty() { Op::PLAIN.to_vec() } else { args.plan.ops.clone() };
            let args = PairArgs { plan: PlanArgs { plain: true, ops, ..args.plan }, ..args };
            let sizes = &[8, 4096, 65536, 1 << 20, 16 << 20];
            args.run(ucx, &Defaults { sizes, iterations: 20, ..EVERYTHING })
        }
        Command::Asleep { sizes, count, slow, timeout } => asleep::run(&asleep::Options {
            ucx: ucx.map(PathBuf::as_path),
            sizes: &sizes.iter().map(|size| size.0).collect::<Vec<_>>(),
            count,
            slow,
            timeout: Duration::from_secs_f64(timeout),
        }),
        Command::Loopback(args) => {
            let report = loopback::run(&args.plan(ucx, &EVERYTHING))?;
            run::conclude(&report, args.json.as_deref())
        }
        Command::TwoUcx(args) => {
            let report = loopback::run_copies(&args.plan(ucx, &EVERYTHING), &cli.ucx)?;
            run::conclude(&report, args.json.as_deref())
        }
        Command::PeerErrors { heir, direct, times, pair: args } => {
            let defaults = Defaults { sizes: &[4096, 16 << 20], ..EVERYTHING };
            let options = peer_errors::Options { heir, direct, times };
            let report = peer_errors::run(&args.plan(ucx, &defaults), &args.around(), options)?;
            run::conclude(&report, args.plan.json.as_deref())
        }
        Command::Reconnect { count, fresh, pair } => {
            let ops = &[Op::Tag, Op::Put, Op::Get];
            let defaults = Defaults { ops, sizes: &[65537], ..EVERYTHING };
            let plan = pair.plan(ucx, &defaults);
            reconnect::run(&reconnect::Rounds { plan, count, fresh }, &pair.around())
        }
        Command::Alloc { count, memory, max, seed, timeout } => alloc::run(&alloc::Options {
            ucx: ucx.map(PathBuf::as_path),
            memory,
            count,
            max: max.0,
            seed,
            timeout: Duration::from_secs_f64(timeout),
        }),
        Command::Atomics { memory, alone, env, timeout } => {
            let options = atomics::Options { ucx: ucx.cloned(), memory, timeout_s: timeout };
            let around = Surroundings { variables: env, refuse: None };
            if alone { atomics::run_alone(&options) } else { atomics::run(&options, &around) }
        }
        Command::Memory(args) => memory::run(
            args.check,
            &memory::Options {
                ucx: ucx.map(PathBuf::as_path),
                component: args.component,
                settings: args.set,
                seed: args.seed,
                max: args.max.0,
                cycles: args.cycles,
                steps: args.steps,
                importer: args.importer.as_deref(),
                stay: args.stay.as_deref(),
                timeout: Duration::from_secs_f64(args.timeout),
            },
        ),
        Command::Threads { count, plan } => {
            let defaults = Defaults { ops: &[Op::Tag, Op::Put, Op::Get], ..EVERYTHING };
            let report = threads::run(&plan.plan(ucx, &defaults), count)?;
            run::conclude(&report, plan.json.as_deref())
        }
        Command::Soak { seconds, threads, workers, max, seed, timeout, sabotage } => {
            soak::run(&soak::Options {
                ucx: ucx.map(PathBuf::as_path),
                threads,
                workers,
                time: Duration::from_secs_f64(seconds),
                max: max.0,
                seed,
                timeout: Duration::from_secs_f64(timeout),
                sabotage,
            })
        }
        Command::Costs(Costs::Copies { quick, sizes }) => {
            let sizes: Vec<usize> = sizes.iter().map(|size| size.0).collect();
            costs::copies(ucx.map(PathBuf::as_path), quick, &sizes)
        }
        Command::Costs(Costs::Init) => costs::init(ucx.map(PathBuf::as_path)),
        Command::Mesh { processes, pair } => {
            let gaudi = Pair { src: Memory::Gaudi, dst: Memory::Gaudi };
            let (ops, sizes) = (&[Op::Tag, Op::Put, Op::Get], &[1, 4097, 65537, (2 << 20) + 13]);
            let plan = pair.plan(ucx, &Defaults { ops, sizes, pairs: &[gaudi], ..EVERYTHING });
            let report = mesh::run(&mesh::Mesh { processes, plan }, &pair.around())?;
            run::conclude(&report, pair.plan.json.as_deref())
        }
        Command::PairSide(side) => return side.run(pair::side),
        Command::MeshSide(side) => return side.run(mesh::side),
        Command::Rotate { outstanding, set, pair } => {
            let (ops, sizes) = (&[Op::Get, Op::Put], &[1 << 20, 4 << 20, 16 << 20]);
            let gaudi = Pair { src: Memory::Gaudi, dst: Memory::Gaudi };
            let plan = pair.plan(ucx, &Defaults { ops, sizes, pairs: &[gaudi], ..EVERYTHING });
            rotate::run(&rotate::Rotation { plan, outstanding, set: set.0 }, &pair.around())
        }
        Command::RotateSide(side) => return side.run(rotate::side),
        Command::ReconnectSide(side) => return side.run(reconnect::side),
        Command::AtomicsSide(side) => return side.run(atomics::side),
        Command::PeerErrorsSide(side) => return side.run(peer_errors::side),
    }?;
    Ok(true)
}

fn main() -> ExitCode {
    match execute(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("ucp-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn plan(args: &[&str]) -> Plan {
        let cli = Cli::try_parse_from([&["ucp-check"], args].concat()).unwrap();
        match &cli.command {
            Command::Pair(args) => args.plan(cli.ucx.first(), &EVERYTHING),
            _ => panic!("not a pair"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn by_default_everything_is_run_and_nothing_is_hinted() {
        let plan = plan(&["pair"]);
        assert_eq!(plan.ops.len(), 10);
        assert_eq!(plan.pairs, Pair::ALL);
        assert_eq!(plan.sizes, SIZES);
        assert!(!plan.hint && !plan.peer_errors && plan.iterations == 0);
        assert_eq!(plan.features, Features::ALL);
    }

    #[test]
    fn lists_limits_and_flags_are_taken() {
        let text = "--ucx A pair --ops tag,put --mem host:gaudi --sizes 0,7,64K,1M --max 64K \
                    --wakeup --peer-errors --json F --seed 5";
        let plan = plan(&text.split_whitespace().collect::<Vec<_>>());
        assert_eq!(plan.ops, [Op::Tag, Op::TagUnexpected, Op::TagMany, Op::TagTruncated, Op::Put]);
        assert_eq!(plan.pairs, [Pair::ALL[1]]);
        assert_eq!(plan.sizes, [0, 7, 65536]);
        assert_eq!((plan.seed, plan.iterations), (5, 10));
        assert!(plan.peer_errors && plan.features.wakeup());
        assert_eq!(plan.ucx, Some("A".into()));
    }

    #[test]
    fn plain_leaves_the_variants_out() {
        assert_eq!(plan(&["pair", "--plain", "--ops", "tag,am"]).ops, [Op::Tag, Op::Am]);
    }

    #[test]
    fn nonsense_is_refused_with_what_would_do() {
        for (args, hint) in [
            (["pair", "--ops", "send"], "tag-many"),
            (["pair", "--mem", "host"], "host:gaudi"),
            (["pair", "--sizes", "big"], "4M+13"),
            (["pair", "--env", "UCX_TLS"], "K=V"),
        ] {
            let Err(error) = Cli::try_parse_from([&["ucp-check"], &args[..]].concat()) else {
                panic!("{args:?} was accepted");
            };
            assert!(error.to_string().contains(hint), "{error}");
        }
    }
}
