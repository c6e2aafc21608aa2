//! `ucx-gaudi`: lists and checks Gaudis, and runs programs with the plugin.
//!
//! It needs no checkout and no cargo: it finds plugin and software devices relative to the program (`prefix.rs`). Each
//! command has a module; this file has their names and arguments. Results go to standard output, everything else to
//! standard error.

mod bench;
mod check_card;
mod counters;
mod doctor;
mod driver;
mod explain;
mod failure;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod info;
mod interrupt;
mod open_mpi;
mod output;
mod prefix;
#[allow(dead_code, reason = "the end-to-end tests use all of it")]
mod redact;
mod report;
mod run;
mod saved_file;
mod scale_out;
mod topo;
mod trace;
mod ucp_check;
mod verbs;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use failure::{Exit, Failure};
use prefix::Prefix;
use ucp_protocols::tuning;

const EXIT_CODES: &str = "\
Exit codes:
  0    done, nothing is wrong
  1    done, something is wrong: a check failed, recordings differ, a result is slower
  2    the command line is wrong
  3    not possible: no card, card busy, file not readable
  126  run: the program cannot be run
  127  run: there is no such program
  130  bench, check-card, explain: ended by Ctrl-C, after the results so far
Otherwise `run` ends as its program does.";

/// Gaudi memory in stock UCX: list and check cards, find problems, run programs with the plugin
#[derive(Debug, Parser)]
#[command(name = "ucx-gaudi", version, after_help = EXIT_CODES, disable_help_subcommand = true)]
struct Cli {
    /// Print one JSON document on standard output
    #[arg(long, global = true)]
    json: bool,
    /// Use the software Gaudi instead of the machine's, with N cards
    ///
    /// It is as strict as hardware with an upstream driver. `import` (or `N,import`): its driver imports dma-bufs, so that
    /// gaudi_ipc copies from card to card; without, it relays.
    #[arg(
        long, global = true, value_name = "N|import", num_args = 0..=1, require_equals = true,
        default_missing_value = "as-set", value_parser = soft_machine
    )]
    soft: Option<Soft>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Check everything between a program and a Gaudi, and say what to do
    ///
    /// Opens a free card for a moment to copy on it, unless --no-card is given.
    Doctor(doctor::Options),
    /// Run a program with the plugin
    ///
    /// Sets UCX_PLUGIN_PATH, LD_PRELOAD for UCX 1.21, and with --soft what the software Gaudi needs. Prints on
    /// standard error what it set, then executes the program. UCX and the plugin log to standard output, or to
    /// the file that UCX_LOG_FILE names.
    Run(run::Options),
    /// Show the Gaudis of this machine: generation, memory, and the processes that have them open
    Info(info::Options),
    /// Show the PCI distance between Gaudis, HCAs and NUMA nodes
    Topo(topo::Options),
    /// Test a card step by step, safest first, and compare every byte
    ///
    /// For cards on which the plugin never ran. Takes the card for some seconds. Stops before any step that
    /// may hang an engine, unless --may-reset is given. --save FILE writes a report to send back.
    CheckCard(check_card::Options),
    /// Explain which protocol UCX uses for an operation, or in a running process (--pid)
    ///
    /// Runs the operation once between two processes, with the UCX on the loader path (or of --ucx) and the
    /// settings in the environment. Takes a card for each side with Gaudi memory. With --pid it takes none.
    #[command(
        override_usage = "ucx-gaudi explain OPERATION SOURCE DESTINATION SIZE [--ucx DIR]\n       \
        ucx-gaudi explain --pid PID [--pid PID]... [--size SIZE] [--save FILE]\n       \
        ucx-gaudi explain --compare FILE FILE"
    )]
    Explain(explain::Options),
    /// Measure the bandwidth and latency of messages between two processes, and compare every byte
    ///
    /// Measures operation × memories × size, and host memory and memcpy for comparison; the best of several
    /// rounds counts. gaudi:gaudi takes two cards. Ctrl-C ends it with the results so far.
    Bench(bench::Options),
    /// Show the counters of running processes
    Stats(counters::stats::Options),
    /// Show cards and what running processes do with them, updated every second
    ///
    /// On a terminal: q ends it, ? lists the keys. Elsewhere, or with --once, it prints lists.
    Top(counters::top::Options),
    /// Serve the counters to Prometheus, over HTTP in the OpenMetrics format
    ///
    /// Counts per card and user; the numbers of processes that ended are kept while it runs. As root it sees the
    /// processes of all users.
    Exporter(counters::exporter::Options),
    /// Show or compare recordings of driver calls (UCX_GAUDI_TRACE)
    Trace(trace::Options),
    /// Print completions for a shell: source <(ucx-gaudi completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
    /// A check of `doctor` in a process of its own
    #[command(hide = true)]
    Probe {
        #[command(subcommand)]
        what: doctor::Probe,
    },
    /// Write the manual pages to a folder
    #[command(hide = true)]
    Man {
        /// Where to
        folder: std::path::PathBuf,
    },
}

/// `--soft[=N][,import]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Soft {
    /// `None`: as `SOFT_GAUDI_DEVICES` says.
    cards: Option<u32>,
    /// Whether its driver imports dma-bufs, whatever `SOFT_GAUDI_LENIENT` says.
    import: bool,
}

impl Soft {
    /// The settings for the software Gaudi.
    pub(crate) fn variables(self) -> Vec<(&'static str, String)> {
        let mut variables = Vec::new();
        if self.import {
            let set = std::env::var("SOFT_GAUDI_LENIENT").unwrap_or_default();
            let list = if set.is_empty() { String::from("import") } else { set + ",import" };
            variables.push(("SOFT_GAUDI_LENIENT", list));
        }
        if let Some(cards) = self.cards {
            variables.push(("SOFT_GAUDI_DEVICES", cards.to_string()));
        }
        variables
    }
}

fn soft_machine(text: &str) -> Result<Soft, String> {
    let mut soft = Soft::default();
    for word in text.split(',').filter(|_| text != "as-set") {
        match (word, word.parse()) {
            ("import", _) => soft.import = true,
            (_, Ok(cards @ 1..=256)) => soft.cards = Some(cards),
            _ => {
                let ways = "give a number of cards from 1 to 256, `import`, or --soft alone";
                return Err(String::from(ways));
            }
        }
    }
    Ok(soft)
}

/// What every command may need.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) json: bool,
    pub(crate) soft: Option<Soft>,
    pub(crate) prefix: Prefix,
}

/// The whole program.
pub fn main() -> ExitCode {
    restore_sigpipe();
    explain_unwritable_output();
    let cli = Cli::try_parse().unwrap_or_else(|error| {
        // Skip `--help` and `--version`, and options of the program that `run` starts.
        let mut ours = std::env::args().take_while(|argument| argument != "--");
        if error.use_stderr() && ours.any(|argument| argument == "--json") {
            output::print_json(&Failure::usage(&error.render().to_string()).to_json());
        }
        error.exit()
    });
    let json = cli.json;
    match dispatch(cli) {
        Ok(exit) => exit.into(),
        Err(failure) => {
            output::print_failure(&failure, json);
            failure.exit.into()
        }
    }
}

fn dispatch(cli: Cli) -> Result<Exit, Failure> {
    let context = Context { json: cli.json, soft: cli.soft, prefix: Prefix::find()? };
    match cli.command {
        Command::Run(options) => run::run(&context, &options),
        Command::Info(options) => info::run(&on_card(context)?, &options),
        Command::Doctor(options) => doctor::run(&on_card(context)?, &options),
        Command::Probe { what } => Ok(doctor::answer(&what)),
        Command::Topo(options) => topo::run(&on_card(context)?, &options),
        Command::CheckCard(options) => check_card::run(&on_card(context)?, &options),
        Command::Explain(options) => explain::run(&on_card(context)?, &options),
        Command::Bench(options) => bench::run(&on_card(context)?, &options),
        Command::Stats(options) => counters::stats::run(&context, &options),
        Command::Top(options) => counters::top::run(&on_card(context)?, &options),
        Command::Exporter(options) => counters::exporter::run(&on_card(context)?, &options),
        Command::Trace(options) => trace::run(&context, &options),
        Command::Completions { shell } => {
            print!("{}", completions(shell));
            Ok(Exit::Fine)
        }
        Command::Man { folder } => write_manual(&folder),
    }
}

/// Chooses the software Gaudi for this process, if asked to.
fn on_card(context: Context) -> Result<Context, Failure> {
    let Some(soft) = context.soft else { return Ok(context) };
    let library = context.prefix.soft_gaudi()?.join("libhl-thunk.so");
    let set = |name: &str, value: &std::ffi::OsStr| {
        // SAFETY: there is no other thread yet: nothing was loaded, and we started none.
        unsafe { std::env::set_var(name, value) }
    };
    set("HL_THUNK_LIBRARY", library.as_os_str());
    if std::env::var_os("SOFT_GAUDI_NODE").is_none() {
        set("SOFT_GAUDI_NODE", context.prefix.soft_node().as_ref());
    }
    for (name, value) in soft.variables() {
        set(name, value.as_ref());
    }
    Ok(context)
}

/// Lets `ucx-gaudi info | head -1` end quietly, like other programs.
fn restore_sigpipe() {
    // SAFETY: no handler of ours; the default action is set before anything else runs.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
}

/// `println!` panics if standard output cannot be written, for example to a file on a full disk.
fn explain_unwritable_output() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let text = info.payload().downcast_ref::<String>().map_or("", String::as_str);
        let Some((_, error)) = text.split_once("failed printing to stdout: ") else {
            return usual(info);
        };
        let failure = Failure::unable(
            format!("cannot write to standard output: {error}"),
            "free space where it goes to, or send it elsewhere",
        );
        output::print_failure(&failure, false);
        std::process::exit(failure.exit as i32);
    }));
}

fn completions(shell: Shell) -> String {
    let mut script = Vec::new();
    // clap_complete lists hidden commands, too, so it only gets the others.
    let all = Cli::command();
    let shown = all.get_subcommands().filter(|it| !it.is_hide_set()).cloned();
    let mut command = clap::Command::new("ucx-gaudi")
        .version(env!("CARGO_PKG_VERSION"))
        .disable_help_subcommand(true)
        .args(all.get_arguments().cloned())
        .subcommands(shown);
    clap_complete::generate(shell, &mut command, "ucx-gaudi", &mut script);
    // For bash, clap_complete 4.6 takes the hyphen in our name for a subcommand in one of the two places that must match.
    String::from_utf8_lossy(&script).replace("ucx__subcmd__gaudi", "ucx__gaudi")
}

fn write_manual(folder: &std::path::Path) -> Result<Exit, Failure> {
    std::fs::create_dir_all(folder)
        .and_then(|()| clap_mangen::generate_to(Cli::command().hide_possible_values(true), folder))
        .map(|()| Exit::Fine)
        .map_err(|error| {
            let what = format!("cannot write to {}: {error}", folder.display());
            Failure::unable(what, "give a folder that you may write to")
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn software_cards_are_counted_from_1_to_256() {
        let soft = |arg: &str| Cli::try_parse_from(["ucx-gaudi", arg, "info"]).map(|cli| cli.soft);
        assert_eq!(soft("--soft").expect("alone"), Some(Soft::default()));
        let three = Soft { cards: Some(3), import: false };
        assert_eq!(soft("--soft=3").expect("a number"), Some(three));
        let import = Soft { import: true, ..three };
        assert_eq!(soft("--soft=3,import").expect("with import"), Some(import));
        for wrong in ["--soft=0", "--soft=257", "--soft=x", "--soft=-1", "--soft=,", "--soft=2,x"] {
            assert!(soft(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn arguments_of_the_program_are_not_ours() {
        for line in [
            &["ucx-gaudi", "run", "--soft=2", "--tuned", "--", "ls", "--json"][..],
            &["ucx-gaudi", "run", "--soft=2", "ls", "--json", "--tuned"],
        ] {
            let cli = Cli::try_parse_from(line).expect("parsed");
            assert!(!cli.json, "{line:?}");
            assert_eq!(cli.soft, Some(Soft { cards: Some(2), import: false }));
        }
    }
}
