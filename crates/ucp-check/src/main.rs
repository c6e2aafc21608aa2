//! The command line of the verifying UCP client.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use ucp_check::matrix::{Op, Pair, Plan, Sabotage, Size};
use ucp_check::run::environment::{Environment, Refusal, Variable, Via};
use ucp_check::run::{
    Side, alloc, asleep, atomics, costs, loopback, memory, pair, peer_errors, reconnect, rotate,
    soak,
};
use ucp_check::ucp::Features;

/// Moves messages through a stock UCX and checks every byte, and the bytes around, on both sides.
///
/// Host and Gaudi memory, tag, stream, active message, put and get. Gaudi memory needs the plugin
/// (UCX_PLUGIN_PATH) and a driver library, the real or the software one (LD_LIBRARY_PATH); it is allocated,
/// filled and read back through UCX alone. Exit status 0 means that everything that was asked for was run and
/// verified.
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
    /// Several processes, all connected to each other: put, get, tags (and streams, if asked for) between all
    /// of them at once
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
    /// One process, asleep on the event descriptor while copies to and from Gaudi memory are all that is in
    /// flight; fails if it polls instead
    Asleep(asleep::Options),
    /// Two copies of UCX (--ucx A --ucx B) in one process, each in loopback, then taking turns
    TwoUcx(PlanArgs),
    /// A peer is killed in the middle of its transfers: the error must show, nothing may hang
    PeerErrors {
        #[command(flatten)]
        options: peer_errors::Options,
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
    Alloc(alloc::Options),
    /// What memory domains promise, asked through libuct: allocation, detection, dma-bufs, registration
    Memory(memory::Options),
    /// One multi-threaded worker used by several threads
    Threads {
        /// How many threads
        #[arg(long, default_value_t = 3)]
        count: u8,
        #[command(flatten)]
        plan: PlanArgs,
    },
    /// Every atomic operation on a peer's memory, or our own
    Atomics(atomics::Options),
    /// Random messages from many threads for a given time, buffers coming and going meanwhile
    Soak(soak::Options),
    /// Like pair --plain, at a few sizes, with times: latency and bandwidth of verified messages
    Bench(PairArgs),
    /// Figures for `cargo xtask bench`: a name, a tab and a number a line
    #[command(subcommand)]
    Costs(Costs),
    /// Bandwidth of put and get over a working set that no cache holds, beside memcpy
    Rotate {
        /// Operations in flight at any time
        #[arg(long, default_value_t = 16)]
        outstanding: usize,
        /// Working set of each process
        #[arg(long, default_value = "256M")]
        set: Size,
        #[command(flatten)]
        pair: PairArgs,
    },
    #[command(hide = true)]
    Side(Side),
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
    /// Registering host and Gaudi memory, the first time and when it is cached
    Registration,
}

#[derive(Args)]
struct PairArgs {
    #[command(flatten)]
    plan: PlanArgs,
    /// Variable for the processes, e.g. UCX_TLS=tcp,gaudi_cpy, or for one of them: 1:SOFT_GAUDI_KIND=import
    #[arg(long, value_name = "[RANK:]K=V")]
    env: Vec<Variable>,
    /// What the kernel is to refuse the processes
    #[arg(long, value_enum)]
    refuse: Option<Refusal>,
    /// Program that starts the process with this rank, e.g. in another namespace: 1:nsenter -t PID -n
    #[arg(long, value_name = "RANK:COMMAND")]
    via: Vec<Via>,
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
    /// Do something wrong in every transfer: proves that the check can fail
    #[arg(long, value_name = "WHAT")]
    sabotage: Option<Sabotage>,
}

/// What several workers or processes share can tell these apart.
const KEYED: [Op; 3] = [Op::Tag, Op::Put, Op::Get];

/// What a subcommand runs unless the user says otherwise: the plain operations, which bring their variants.
fn everything() -> Plan {
    Plan { ops: Op::PLAIN.to_vec(), ..Plan::default() }
}

impl PlanArgs {
    /// The subcommand's plan, with what the user said in its place.
    fn plan(&self, ucx: Option<&PathBuf>, default: Plan) -> Plan {
        fn or<T: Copy>(given: &[T], default: Vec<T>) -> Vec<T> {
            if given.is_empty() { default } else { given.to_vec() }
        }
        let mut ops = or(&self.ops, default.ops);
        if !self.plain {
            ops = ops.into_iter().flat_map(Op::variants).collect();
        }
        ops.sort();
        ops.dedup();
        let given: Vec<usize> = self.sizes.iter().map(|size| size.0).collect();
        let mut sizes = or(&given, default.sizes);
        sizes.retain(|&size| self.max.is_none_or(|max| size <= max.0));
        let timed = if self.json.is_some() { 10 } else { default.iterations };
        let features = default.features;
        Plan {
            ucx: ucx.cloned(),
            ops,
            pairs: or(&self.mem, default.pairs),
            sizes,
            seed: self.seed,
            iterations: self.iters.unwrap_or(timed),
            features: if self.wakeup { features.with_wakeup() } else { features },
            hint: self.hint,
            timeout_s: self.timeout,
            sabotage: self.sabotage,
            ..default
        }
    }
}

impl PairArgs {
    fn plan(&self, ucx: Option<&PathBuf>, default: Plan) -> Plan {
        let Self { peer_errors, one_way, .. } = *self;
        Plan { peer_errors, one_way, ..self.plan.plan(ucx, default) }
    }

    fn environment(&self) -> Environment {
        Environment { variables: self.env.clone(), refuse: self.refuse, via: self.via.clone() }
    }

    fn json(&self) -> Option<&Path> {
        self.plan.json.as_deref()
    }

    fn run(&self, ucx: Option<&PathBuf>, default: Plan) -> Result<()> {
        pair::run(&self.plan(ucx, default), &self.environment())?.conclude(self.json())
    }
}

/// `Ok(false)`: it failed and has been reported already.
fn execute(cli: Cli) -> Result<bool> {
    let ucx = cli.ucx.first();
    let folder = ucx.map(PathBuf::as_path);
    let keyed = || Plan { ops: KEYED.to_vec(), ..everything() };
    match cli.command {
        Command::Pair(args) => args.run(ucx, everything()),
        Command::HostOnly(args) => args.run(ucx, Plan { pairs: vec![Pair::HOST], ..everything() }),
        Command::Wakeup(args) => {
            let (ops, features) = (vec![Op::Tag], Features::TAG.with_wakeup());
            args.run(ucx, Plan { ops, features, ..everything() })
        }
        Command::Bench(args) => {
            let args = PairArgs { plan: PlanArgs { plain: true, ..args.plan }, ..args };
            let sizes = vec![8, 4096, 65536, 1 << 20, 16 << 20];
            args.run(ucx, Plan { sizes, iterations: 20, ..everything() })
        }
        Command::Asleep(options) => asleep::run(folder, &options),
        Command::Loopback(args) => {
            loopback::run(&args.plan(ucx, everything()))?.conclude(args.json.as_deref())
        }
        Command::TwoUcx(args) => {
            let report = loopback::run_copies(&args.plan(ucx, everything()), &cli.ucx)?;
            report.conclude(args.json.as_deref())
        }
        Command::PeerErrors { options, pair } => {
            let plan = pair.plan(ucx, Plan { sizes: vec![4096, 16 << 20], ..everything() });
            peer_errors::run(&plan, &pair.environment(), &options)?.conclude(pair.json())
        }
        Command::Reconnect { count, fresh, pair } => {
            let plan = pair.plan(ucx, Plan { sizes: vec![65537], ..keyed() });
            reconnect::run(reconnect::Rounds { plan, count, fresh }, &pair.environment())
        }
        Command::Alloc(options) => alloc::run(folder, &options),
        Command::Atomics(options) => atomics::run(folder, &options),
        Command::Memory(options) => memory::run(folder, &options),
        Command::Threads { count, plan } => {
            let report = loopback::run_threads(&plan.plan(ucx, keyed()), count)?;
            report.conclude(plan.json.as_deref())
        }
        Command::Soak(options) => soak::run(folder, &options),
        Command::Costs(Costs::Copies { quick, sizes }) => {
            let sizes: Vec<usize> = sizes.iter().map(|size| size.0).collect();
            costs::copies(folder, quick, &sizes)
        }
        Command::Costs(Costs::Init) => costs::init(folder),
        Command::Costs(Costs::Registration) => costs::registration(folder),
        Command::Mesh { processes, pair } => {
            let (sizes, pairs) = (vec![1, 4097, 65537, (2 << 20) + 13], vec![Pair::GAUDI]);
            let plan = pair.plan(ucx, Plan { sizes, pairs, ..keyed() });
            let report = pair::run_mesh(pair::Mesh { processes, plan }, &pair.environment())?;
            report.conclude(pair.json())
        }
        Command::Rotate { outstanding, set, pair } => {
            let (ops, pairs) = (vec![Op::Get, Op::Put], vec![Pair::GAUDI]);
            let sizes = vec![1 << 20, 4 << 20, 16 << 20];
            let plan = pair.plan(ucx, Plan { ops, sizes, pairs, ..everything() });
            let rotation = rotate::Rotation { plan, outstanding, set: set.0 };
            rotate::run(rotation, &pair.environment())
        }
        Command::Side(side) => return side.run(),
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
            Command::Pair(args) => args.plan(cli.ucx.first(), everything()),
            _ => panic!("not a pair"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn by_default_everything_is_run_and_nothing_is_hinted() {
        assert_eq!(plan(&["pair"]), Plan::default());
        assert!(!Plan::default().hint && Plan::default().ops.len() == 10);
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
    fn wrong_arguments_are_refused_with_what_would_do() {
        for (args, hint) in [
            ("pair --ops send", "tag-many"),
            ("pair --mem host", "host:gaudi"),
            ("pair --mem host:cuda", "host or gaudi"),
            ("pair --sizes big", "4M+13"),
            ("pair --env UCX_TLS", "K=V"),
            ("pair --env x:A=1", "RANK:K=V"),
            ("memory everything", "attributes"),
            ("memory alloc --set X", "K=V"),
            ("soak --threads 0", "1..="),
        ] {
            let Err(error) = Cli::try_parse_from(["ucp-check"].into_iter().chain(args.split(' ')))
            else {
                panic!("{args} was accepted");
            };
            assert!(error.to_string().contains(hint), "{args}: {error}");
        }
    }
}
