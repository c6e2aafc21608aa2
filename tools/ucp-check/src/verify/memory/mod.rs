//! `memory`: what a memory domain promises, checked through stock UCX's own libuct.
//!
//! `CHECKS` is the table of checks; each counts its right and wrong results in a `Checker`. They only use the memory
//! type to recognise Gaudi memory, so they run on a card as well as on the software one.

/// Counts whether a condition holds; the words describe the failure.
macro_rules! expect {
    ($check:expr, $right:expr, $($what:tt)+) => { $check.expect($right, format_args!($($what)+)) };
}
/// The same for two values that must be equal.
macro_rules! equal {
    ($check:expr, $found:expr, $wanted:expr, $($what:tt)+) => {
        $check.equal($found, $wanted, format_args!($($what)+))
    };
}

mod alloc;
mod attach;
mod attributes;
mod cards;
mod churn;
mod copies;
mod detect;
mod dmabuf;
mod host_map;
mod import;
mod model;
mod ranges;
mod rcache;
mod register;

use super::usage;
use crate::matrix::size;
use crate::pattern::{fill, mix};
use crate::processes::setting;
use crate::uct::{Copier, Domain, Status};
use crate::ucx::{self, Ucx};
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, ensure};
use clap::builder::{PossibleValue, PossibleValuesParser};
use std::fmt::{Debug, Display};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A check: its name, its description, whether it is one of `all`, and its function.
type Check = (&'static str, &'static str, bool, fn(&Checker<'_>) -> Result<()>);

#[rustfmt::skip] // a table
const CHECKS: [Check; 26] = [
    ("attributes", "Components, memory domains and what they say of themselves", true, attributes::run),
    ("transport", "What the copy transport says of itself", true, attributes::transport),
    ("alloc", "Allocate and free: sizes, disjoint ranges, any order, more than there is", true, alloc::run),
    ("exhaust", "Allocate all there is, free it, and get as much again", false, alloc::exhaust),
    ("detect", "Which address ranges are Gaudi memory, and which are not", true, detect::run),
    ("dmabuf", "Descriptors and offsets of dma-bufs; with --importer also their content", true, dmabuf::run),
    ("register", "Register host and device memory, and copy with it", true, register::run),
    ("import", "Register dma-bufs, and copy with what was registered", true, import::run),
    ("import-cards", "The same with the memory of three cards (the first three)", false, import::cards),
    ("host-only", "Register gigabytes of host memory: no card is opened, no page is touched", false, register::host_only),
    ("copies", "Copies in flight: pieces, fences, flushes, more than fit, closed in flight", true, copies::run),
    ("failing-copies", "Copies of which some fail, as the machine's faults order: all end, and the failed ones say so", false, copies::failing),
    ("churn", "Thousands of cycles of registration, export and allocation: nothing may be left behind", true, churn::run),
    ("rcache", "Copy from memory that comes and goes at the same addresses: no byte is a stale one", true, rcache::run),
    ("keys", "Pack, unpack and release remote keys", true, alloc::keys),
    ("model", "Random allocations, frees, queries and exports, compared with a model", true, model::run),
    ("threads", "The same from several threads at once, each with a worker of its own", true, model::threads),
    ("two-cards", "Two cards in one process (the first two)", false, cards::two),
    ("attach", "Another process attaches our memory and copies in it (two cards)", false, attach::run),
    ("attached", "The other process of attach", false, attach::attached),
    ("named", "Memory on the card that UCX names (the first three)", false, cards::named),
    ("closing", "Close an interface with copies in flight; needs a card with a latency", false, copies::closing),
    ("lost", "Go on after a reset of the card, which the machine's faults must order for the first copy", false, cards::lost),
    ("holes", "What UCX's memory-type cache says around freed memory", false, detect::holes),
    ("touch", "Read allocated memory with the CPU: it must end the process", false, cards::touch),
    ("where", "Allocate, and say on which card", false, cards::whereabouts),
];
/// Checks outside the table.
const ALL: (&str, &str) = ("all", "Every check that needs nothing but one free card");
const HOLD: (&str, &str) = ("hold", "Allocate, and keep the card until killed");

/// What to check, and how.
#[derive(clap::Args)]
pub struct Options {
    /// What to check
    #[arg(value_parser = names())]
    check: String,
    /// The component: gaudi_copy or gaudi_gdr
    #[arg(long, default_value = "gaudi_copy")]
    component: String,
    /// Setting of the memory domain, e.g. GAUDI_COPY_DEVICE=1; stronger than the environment
    #[arg(long, value_name = "K=V", value_parser = setting)]
    set: Vec<(String, String)>,
    /// Largest allocation
    #[arg(long, default_value = "256M", value_parser = size)]
    max: usize,
    /// Cycles of churn; rcache makes a hundredth of it
    #[arg(long, default_value_t = 10_000)]
    cycles: u32,
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

fn names() -> PossibleValuesParser {
    let rows = CHECKS.iter().map(|(name, help, ..)| (*name, *help));
    let values = [ALL, HOLD].into_iter().chain(rows).map(|(name, help)| {
        let hidden = name == "attached";
        PossibleValue::new(name).help(help).hide(hidden)
    });
    PossibleValuesParser::new(values.collect::<Vec<_>>())
}

/// The environment of a check and its results. It reports failures at once.
struct Checker<'a> {
    domain: &'a Domain,
    options: &'a Options,
    folder: Option<&'a Path>,
    watchdog: Watchdog,
    name: &'static str,
    passed: AtomicU64,
    failed: AtomicU64,
}

/// How many failures are reported in full; more of them would only hide the first ones.
const REPORTED: u64 = 20;

impl Checker<'_> {
    /// Counts whether a condition holds; `what` describes the failure.
    fn expect(&self, right: bool, what: impl Display) {
        if right {
            self.passed.fetch_add(1, Relaxed);
        } else if self.failed.fetch_add(1, Relaxed) < REPORTED {
            println!("FAIL  {}: {what}", self.name);
        }
    }

    fn equal<T: PartialEq + Debug>(&self, found: &T, wanted: &T, what: impl Display) {
        self.expect(found == wanted, format_args!("{what}: found {found:?}, not {wanted:?}"));
    }

    /// Checks that a call failed with this status.
    fn refused<T>(&self, outcome: ucx::Result<T>, status: Status, what: impl Display) {
        self.equal(&outcome.err().map(|error| error.status), &Some(status), what);
    }

    /// The copy transport of the component under test.
    fn transport(&self) -> &'static str {
        match self.options.component.as_str() {
            "gaudi_gdr" => "gaudi_gdr",
            "gaudi_ipc" => "gaudi_ipc",
            _ => "gaudi_cpy",
        }
    }

    fn copier(&self) -> Result<Copier<'_>> {
        Copier::open(self.domain, self.transport())
    }

    /// Pattern number `n` of this run.
    fn bytes(&self, n: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        fill(mix(self.options.seed ^ n), 0, &mut bytes);
        bytes
    }
}

/// First address and length of a slice.
fn range(bytes: &[u8]) -> (u64, usize) {
    (bytes.as_ptr().addr() as u64, bytes.len())
}

/// Runs a check, or all of them, and prints the verdict.
pub fn run(folder: Option<&Path>, options: &Options) -> Result<()> {
    let watchdog = Watchdog::start("memory", options.timeout);
    let ucx = Ucx::load(folder)?;
    println!("UCX {}, seed {}", ucx.version(), options.seed);
    let domain = ucx.open_domain(&options.component, &options.set)?;
    let checker = |name| Checker {
        domain: &domain,
        options,
        folder,
        watchdog: watchdog.clone(),
        name,
        passed: AtomicU64::new(0),
        failed: AtomicU64::new(0),
    };
    if options.check == HOLD.0 {
        return cards::hold(&checker(HOLD.0));
    }
    let wanted = |(name, _, of_all, _): &&Check| {
        if options.check == ALL.0 { *of_all } else { options.check == *name }
    };
    let (mut passed, mut failed) = (0, 0);
    for (name, _, _, run) in CHECKS.iter().filter(wanted) {
        watchdog.step(name);
        let checker = checker(name);
        run(&checker)?;
        let (right, wrong) = (checker.passed.into_inner(), checker.failed.into_inner());
        let word = if wrong == 0 { "ok  " } else { "FAIL" };
        println!("{word}  {name:<12} {right} passed, {wrong} failed");
        (passed, failed) = (passed + right, failed + wrong);
    }
    if let Some(file) = &options.stay {
        std::fs::write(file, format!("{passed} passed, {failed} failed\n"))?;
        cards::stay(&watchdog);
    }
    watchdog.step("uct_md_close");
    drop(domain);
    println!("{passed} passed, {failed} failed");
    ensure!(failed == 0, "{failed} expectations failed");
    ensure!(passed > 0, "nothing was checked");
    Ok(())
}

/// The bus id of the card that has this memory.
fn card(domain: &Domain, address: u64) -> Result<String> {
    let device = domain.query(address, 1)?.sys_device;
    domain.ucx().bus_id(device).context("UCX does not know the card's system device")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_has_a_name_and_a_text_of_its_own() {
        let names: std::collections::BTreeSet<_> = CHECKS.iter().map(|row| row.0).collect();
        assert_eq!(names.len(), CHECKS.len());
        assert!(CHECKS.iter().all(|row| !row.1.is_empty() && row.0 != ALL.0 && row.0 != HOLD.0));
    }
}
