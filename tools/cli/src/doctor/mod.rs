//! `ucx-gaudi doctor`: checks everything between a program and a Gaudi, one item after the other; reports what it found
//! and what to do.
//!
//! Foreign code is only loaded in child processes ([`probe`]): if a UCX crashes or a card is reset, the report must
//! survive.

mod card;
mod machine;
mod probe;
pub(crate) mod ucx;

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use gaudi::{DeviceInfo, Note, Sysfs, runtime};
use hl_thunk::Library;
use serde_json::{Value, json};

use crate::Context;
use crate::driver::Driver;
use crate::failure::{Exit, Failure};
use crate::info::{choice, load};
use crate::open_mpi;
use crate::output::{note, print_failure, print_json};
use crate::report::{Finding, Summary};
use crate::saved_file;

pub(crate) use probe::{Probe, answer};

/// Options of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Look for UCX in this folder, too (may be given several times)
    #[arg(long, value_name = "DIR")]
    ucx: Vec<PathBuf>,
    /// The card to copy on: an index, module:N or a PCI address. Only software cards have a default, the first free one
    #[arg(long, value_name = "CARD")]
    card: Option<String>,
    /// Do not open a card
    #[arg(long)]
    no_card: bool,
    /// Also write the report, without names of users, hosts, home directories and processes, for a bug report
    #[arg(long, value_name = "FILE")]
    bundle: Option<PathBuf>,
}

/// Collects findings, and prints them as they arrive.
struct Findings {
    all: Vec<Finding>,
    json: bool,
}

impl Findings {
    fn add(&mut self, finding: Finding) {
        if !self.json {
            finding.print();
        }
        self.all.push(finding);
    }
}

/// Runs all checks.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    choice(options.card.as_deref())?;
    for folder in &options.ucx {
        if !folder.is_dir() {
            return Err(Failure {
                exit: Exit::Usage,
                ..Failure::unable(
                    format!("--ucx {}: no such folder", folder.display()),
                    "give the folder with libucp.so, or the prefix of a UCX",
                )
            });
        }
    }
    options.bundle.as_deref().map(saved_file::check).transpose()?;
    let mut findings = Findings { all: Vec::new(), json: context.json };
    findings.add(machine::kernel());
    let library = check_library(&mut findings);
    findings.add(machine::settings(context.soft.is_some()));
    let cards = match &library {
        Some(_) => check_cards(&mut findings),
        None => Vec::new(),
    };
    machine::permissions(&cards).into_iter().for_each(|finding| findings.add(finding));
    let early_writes = machine::early_writes(&Sysfs::default(), &cards);
    early_writes.into_iter().for_each(|finding| findings.add(finding));
    check_ucx(context, options, &mut findings);
    open_mpi::finding().into_iter().for_each(|finding| findings.add(finding));
    let hcas = machine::hcas();
    findings.add(machine::limits(hcas.len() > 1));
    hcas.into_iter().for_each(|finding| findings.add(finding));
    for finding in copy_on_a_card(options, &cards) {
        findings.add(finding);
    }
    let summary = Summary::of(&findings.all);
    let report = json!({
        "report": "doctor",
        "version": env!("CARGO_PKG_VERSION"),
        "summary": summary,
        "checks": findings.all,
    });
    if context.json {
        print_json(&report);
    } else {
        summary.print();
    }
    let written = options.bundle.as_deref().map(|path| write_bundle(path, &report)).transpose();
    if let Err(failure) = written {
        // The report is on standard output.
        print_failure(&failure, false);
        return Ok(failure.exit);
    }
    Ok(summary.exit())
}

fn check_library(findings: &mut Findings) -> Option<Arc<Library>> {
    match load() {
        Ok(library) => {
            let version = library.version().unwrap_or("which does not tell its version");
            findings.add(Finding::good("library", format!("{} ({version})", library.name())));
            findings.add(Driver::read(std::path::Path::new("/")).judge(&library));
            Some(library)
        }
        Err(failure) => {
            let remedy = "install habanalabs-thunk, or set HL_THUNK_LIBRARY to its file; to try the software Gaudi \
                          add --soft";
            findings.add(Finding::bad("library", failure.what, remedy));
            findings.add(Driver::read(std::path::Path::new("/")).alone());
            None
        }
    }
}

fn check_cards(findings: &mut Findings) -> Vec<DeviceInfo> {
    let cards = match runtime().discover() {
        Ok(cards) => cards,
        Err(error) => {
            let mut failure = Failure::from(error);
            if failure.remedy.contains("doctor") {
                failure.remedy =
                    String::from("look at hl-smi, and at the finding on the pair above");
            }
            findings.add(Finding::failed("cards", &failure));
            return Vec::new();
        }
    };
    let nodes: Vec<u32> = cards.iter().map(|card| card.node).collect();
    let owners = runtime().owners(&nodes);
    let free = owners.iter().filter(|owners| owners.found.is_empty()).count();
    let rows: Vec<Value> = cards
        .iter()
        .zip(&owners)
        .map(|(card, owners)| {
            let held_by: Vec<&str> = owners.found.iter().map(|owner| &*owner.command).collect();
            json!({"card": card.to_string(), "name": card.card_name, "held_by": held_by})
        })
        .collect();
    let (unknown, notes): (Vec<Note>, Vec<Note>) =
        runtime().take_notes().into_iter().partition(|note| note.is_unknown_card);
    let notes: Vec<String> = notes.into_iter().map(|note| note.text).collect();
    for note in unknown {
        findings.add(Finding::warning("unknown-card", note.text, ""));
    }
    let mut found = format!("{}: {} cards, {free} of them free", cards[0].generation, cards.len());
    for (card, owners) in cards.iter().zip(&owners).filter(|(_, owners)| !owners.found.is_empty()) {
        found = format!("{found}; {card}: {owners}");
    }
    let data = json!({"cards": rows, "notes": notes});
    let finding = if free == 0 {
        Finding::warning("cards", found, "a card has one owner at a time: wait for one, or end it")
    } else if let [first, ..] = &*notes {
        let table = first.contains("GAUDI_MAPPING_TABLE");
        let remedy = if table { "correct GAUDI_MAPPING_TABLE" } else { "" };
        Finding::warning("cards", format!("{found}; {first}"), remedy)
    } else {
        Finding::good("cards", found)
    };
    findings.add(finding.with(data));
    cards
}

fn check_ucx(context: &Context, options: &Options, findings: &mut Findings) {
    let variables = match crate::run::variables(&context.prefix) {
        Ok(variables) => variables,
        Err(failure) => return findings.add(Finding::failed("plugin", &failure)),
    };
    ucx::check(&options.ucx, &variables).into_iter().for_each(|finding| findings.add(finding));
}

fn copy_on_a_card(options: &Options, cards: &[DeviceInfo]) -> Vec<Finding> {
    if options.no_card {
        return vec![Finding::skipped("copy", "not tried: --no-card")];
    }
    if cards.is_empty() {
        return vec![Finding::skipped("copy", "not tried: there is no card")];
    }
    if options.card.is_none() && cards.iter().any(|card| !card.is_software) {
        let why = "not tried: name a card that is yours to use (--card INDEX); closing a Gaudi2 resets its engines";
        return vec![Finding::skipped("copy", why)];
    }
    probe::in_child(&Probe::Card { card: options.card.clone() }, &[]).unwrap_or_else(|failed| {
        let remedy = "look at the kernel log (dmesg), then try `ucx-gaudi check-card`";
        vec![Finding::bad("copy", failed.how, remedy)]
    })
}

/// Writes the report without private names.
fn write_bundle(path: &std::path::Path, report: &Value) -> Result<(), Failure> {
    crate::redact::save(path, report)?;
    note(&format!("wrote {}; look into it before you send it", path.display()));
    Ok(())
}
