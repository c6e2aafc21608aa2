//! The command line of the verifying UCP client.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use ucp_check::cuda::Cuda;
use ucp_check::matrix::{Op, Pair, Plan, SIZES, size};
use ucp_check::measure::{self, Cost};
use ucp_check::processes::{Environment, Side};
use ucp_check::ucp::Features;
use ucp_check::verify::{
    asleep, atomics, cuda_dmabuf, endure, loopback, memory, pair, peer_errors, reconnect, recover,
    soak, two_hosts,
};

/// Moves messages through a stock UCX and checks every byte, and the bytes around, on both sides.
///
/// Host, Gaudi and CUDA memory, tag, stream, active message, put and get. Gaudi memory needs the plugin
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
    Pair {
        /// Be one side of a pair on two hosts; standard input is the connection to the other (see `ucx-gaudi bench`)
        #[arg(long, value_name = "RANK", hide = true, value_parser = clap::value_parser!(u8).range(..=1))]
        remote: Option<u8>,
        #[command(flatten)]
        run: Processes,
    },
    /// Several processes, all connected to each other: put, get, tags (and streams, if asked for) between all
    /// of them at once
    Mesh {
        /// How many
        #[arg(long, default_value_t = 8)]
        processes: u8,
        #[command(flatten)]
        turns: pair::Turns,
        #[command(flatten)]
        run: Processes,
    },
    /// One process whose worker talks to itself
    Loopback(Plan),
    /// Two processes with host memory only: a loaded plugin must disturb nothing
    HostOnly(Processes),
    /// Two processes, contexts with TAG and WAKEUP only, asleep on the event descriptor while waiting
    Wakeup(Processes),
    /// One process, asleep on the event descriptor while copies to and from Gaudi memory are all that is in
    /// flight; fails if it polls instead
    Asleep(asleep::Options),
    /// Two copies of UCX (--ucx A --ucx B) in one process, each in loopback, then taking turns
    TwoUcx(Plan),
    /// A peer is killed in the middle of its transfers: the error must show, nothing may hang
    PeerErrors {
        #[command(flatten)]
        options: peer_errors::Options,
        #[command(flatten)]
        run: Processes,
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
        run: Processes,
    },
    /// A card fails, as the machine's faults order: new contexts in the same processes work again
    Recover {
        /// How many failures there will be
        #[arg(long, default_value_t = 1)]
        count: u32,
        #[command(flatten)]
        run: Processes,
    },
    /// Two processes stay connected and move verified messages of random sizes for a given time: nothing may grow
    Endure {
        #[command(flatten)]
        options: endure::Options,
        #[command(flatten)]
        run: Processes,
    },
    /// What memory domains promise, asked through libuct: allocation, detection, dma-bufs, registration
    Memory(memory::Options),
    /// One multi-threaded worker used by several threads
    Threads {
        /// How many threads
        #[arg(long, default_value_t = 3)]
        count: u8,
        #[command(flatten)]
        plan: Plan,
    },
    /// Every atomic operation on a peer's memory, or our own
    Atomics(atomics::Options),
    /// Random messages from many threads for a given time, buffers coming and going meanwhile
    Soak(soak::Options),
    /// What things cost, for `cargo xtask bench`: a line of JSON for each figure, with a floor from the same run
    #[command(subcommand)]
    Measure(Measure),
    /// A dma-buf of CUDA memory: can the processor map it, does a Gaudi's driver import it?
    CudaDmabuf,
    #[command(hide = true)]
    Side(Side),
}

#[derive(Args)]
struct Processes {
    #[command(flatten)]
    plan: Plan,
    #[command(flatten)]
    environment: Environment,
}

#[derive(Subcommand)]
enum Measure {
    #[command(flatten)]
    Cost(Cost),
    /// Bandwidth of put, get, tag and active message over a working set that no cache holds; floor: memcpy
    Messages {
        /// Working set of each process
        #[arg(long, default_value = "256M", value_parser = size)]
        set: usize,
        /// Passes over the working set before anything is measured
        #[arg(long, default_value_t = 0)]
        warm_up: usize,
        /// Passes that are measured; the median counts
        #[arg(long, default_value_t = 7)]
        passes: usize,
        #[command(flatten)]
        run: Box<Processes>,
    },
}

/// Runs the command. `Ok(false)`: it failed, and has been reported.
fn execute(cli: Cli) -> Result<bool> {
    let ucx = cli.ucx.first().cloned();
    let folder = ucx.as_deref();
    let plan = |mut plan: Plan, ops: &[Op], pairs: &[Pair], sizes: &[usize]| {
        plan.ucx.clone_from(&ucx);
        let mut plan = plan.or(ops, pairs, sizes);
        if plan.cuda {
            match Cuda::get() {
                Ok(_) => plan.pairs.extend(Pair::CUDA),
                Err(error) => println!("skipped: the pairs with CUDA memory ({error:#})"),
            }
        }
        plan
    };
    let everything = |it: Plan| plan(it, &Op::PLAIN, &Pair::ALL, &SIZES);
    let two =
        |plan: Plan, environment: &Environment| pair::run(2, plan, pair::Turns::ONE, environment);
    match cli.command {
        Command::Pair { remote: None, run } => two(everything(run.plan), &run.environment),
        Command::Pair { remote: Some(0), run } => two_hosts::lead(everything(run.plan)),
        Command::Pair { remote: Some(_), .. } => two_hosts::follow(folder),
        Command::HostOnly(run) => {
            two(plan(run.plan, &Op::PLAIN, &[Pair::HOST], &SIZES), &run.environment)
        }
        Command::Wakeup(run) => {
            let asleep = Plan { features: Features::TAG, wakeup: true, ..run.plan };
            two(plan(asleep, &[Op::Tag], &Pair::ALL, &SIZES), &run.environment)
        }
        Command::Mesh { processes, turns, run } => {
            let sizes = [1, 4097, 65537, (2 << 20) + 13];
            let plan = plan(run.plan, &Op::KEYED, &[Pair::GAUDI], &sizes);
            pair::run(processes, plan, turns, &run.environment)
        }
        Command::Asleep(options) => asleep::run(folder, &options),
        Command::Loopback(plan) => loopback::run(&everything(plan)),
        Command::TwoUcx(plan) => loopback::run_copies(&everything(plan), &cli.ucx),
        Command::Threads { count, plan: it } => {
            loopback::run_threads(&plan(it, &Op::KEYED, &Pair::ALL, &SIZES), count)
        }
        Command::PeerErrors { options, run } => {
            let plan = plan(run.plan, &Op::PLAIN, &Pair::ALL, &[4096, 16 << 20]);
            peer_errors::run(&plan, &run.environment, &options)
        }
        Command::Reconnect { count, fresh, run } => {
            let plan = plan(run.plan, &Op::KEYED, &Pair::ALL, &[65537]);
            reconnect::run(reconnect::Rounds { plan, count, fresh }, &run.environment)
        }
        Command::Recover { count, run } => {
            let plan = plan(run.plan, &[Op::Put], &[Pair::GAUDI], &[(1 << 20) + 3]);
            recover::run(recover::Recovery { plan, count }, &run.environment)
        }
        Command::Endure { options, run } => {
            let plan = plan(run.plan, &Op::PLAIN, &Pair::ALL, &[1]);
            endure::run(plan, options, &run.environment)
        }
        Command::Atomics(options) => atomics::run(folder, options),
        Command::Memory(options) => memory::run(folder, &options),
        Command::Soak(options) => soak::run(folder, &options),
        Command::Measure(Measure::Cost(cost)) => cost.measure(folder),
        Command::Measure(Measure::Messages { set, warm_up, passes, run }) => {
            let sizes = [1 << 20, 4 << 20, 16 << 20];
            let plan = plan(run.plan, &[Op::Get, Op::Put], &[Pair::GAUDI], &sizes);
            let rotation = measure::Rotation { plan, set, warm_up, passes };
            measure::messages(rotation, &run.environment)
        }
        Command::CudaDmabuf => cuda_dmabuf::run(),
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

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn wrong_arguments_are_refused_with_what_would_do() {
        for (args, hint) in [
            ("pair --ops send", "tag-many"),
            ("pair --mem host", "host:gaudi"),
            ("pair --mem host:rocm", "host, gaudi and cuda"),
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
