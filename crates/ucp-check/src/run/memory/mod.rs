//! `memory`: what a memory domain promises, asked of it through stock UCX's own libuct.
//!
//! Every check is a file of its own and counts what it found right and wrong in a `Tally`. The
//! checks know Gaudi memory by its type only: they run as well on a card as on the software one.

mod alloc;
mod attach;
mod attributes;
mod cards;
mod churn;
mod copies;
mod detect;
mod dmabuf;
mod ends;
mod importer;
mod keys;
mod ledger;
mod mapping;
mod model;
mod rcache;
mod register;
mod tally;

use super::process;
use crate::ucp::Ucx;
use crate::uct::{Domain, Uct};
use crate::watchdog::Watchdog;
use anyhow::{Result, bail};
use clap::ValueEnum;
use std::path::Path;
use std::time::Duration;
use tally::Tally;

/// What to check.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Check {
    /// Every check that needs nothing but one free card
    All,
    /// Components, memory domains and what they say of themselves
    Attributes,
    /// What the copy transport says of itself
    Transport,
    /// Allocate and free: sizes, disjoint ranges, any order, more than there is
    Alloc,
    /// Allocate all there is, free it, and get as much again
    Exhaust,
    /// Which address ranges are Gaudi memory, and which are not
    Detect,
    /// Descriptors and offsets of dma-bufs; with --importer also their content
    Dmabuf,
    /// Register host and device memory, and copy with it
    Register,
    /// Register gigabytes of host memory: no card is opened, no page is touched
    HostOnly,
    /// Copies under way: pieces, fences, flushes, more than there is room for, closed in flight
    Copies,
    /// Copies of which some fail, as someone has arranged for: all end, and the failed ones say so
    FailingCopies,
    /// Thousands of cycles of registration, export and allocation: nothing may be left behind
    Churn,
    /// Copy from memory that comes and goes at the same addresses: every byte is that of now
    Rcache,
    /// Pack, unpack and release remote keys
    Keys,
    /// Random allocations, frees, queries and exports, compared with a model
    Model,
    /// The same from several threads at once, each with a worker of its own
    Threads,
    /// Two cards in one process (the first two)
    TwoCards,
    /// Another process attaches our memory and copies in it (two cards)
    Attach,
    /// The other process of attach
    #[value(hide = true)]
    Attached,
    /// Memory on the card that UCX names (the first three)
    Named,
    /// Close an interface with copies under way; needs a card that takes its time
    Closing,
    /// Go on after a reset of the card, which the machine's faults must order for the first copy
    Lost,
    /// What UCX's memory-type cache says around freed memory
    Holes,
    /// Allocate, and say on which card
    Where,
    /// Allocate, and keep the card until killed
    Hold,
}

impl Check {
    const OF_ALL: [Check; 12] = [
        Check::Attributes,
        Check::Transport,
        Check::Alloc,
        Check::Detect,
        Check::Dmabuf,
        Check::Register,
        Check::Copies,
        Check::Churn,
        Check::Rcache,
        Check::Keys,
        Check::Model,
        Check::Threads,
    ];
}

/// How to check it.
pub struct Options<'a> {
    /// Where UCX is.
    pub ucx: Option<&'a Path>,
    /// The component to open.
    pub component: String,
    /// Settings of its memory domain, on top of the environment.
    pub settings: Vec<(String, String)>,
    /// Makes sizes, orders and patterns.
    pub seed: u64,
    /// Largest allocation.
    pub max: usize,
    /// Cycles of `churn`; `rcache` makes a hundredth of it.
    pub cycles: u32,
    /// Steps of `model`, and of each of the `threads`.
    pub steps: u32,
    /// Socket of somebody who maps dma-bufs.
    pub importer: Option<&'a Path>,
    /// When the checks are done: write the verdict here and stay, with the domain open, until killed.
    pub stay: Option<&'a Path>,
    /// A check may take this long.
    pub timeout: Duration,
}

/// What a check works with.
struct Scene<'a> {
    domain: &'a Domain,
    options: &'a Options<'a>,
    dog: Watchdog,
}

impl Scene<'_> {
    /// The copy transport of the component under test.
    fn transport(&self) -> &'static str {
        match self.options.component.as_str() {
            "gaudi_gdr" => "gaudi_gdr",
            "gaudi_ipc" => "gaudi_ipc",
            _ => "gaudi_cpy",
        }
    }
}

/// Runs a check, or all of them, and prints the verdict.
pub fn run(check: Check, options: &Options<'_>) -> Result<()> {
    let dog = Watchdog::start("memory", options.timeout);
    let ucx = Ucx::load(options.ucx)?;
    let uct = Uct::of(ucx)?;
    println!("UCX {}, seed {}", ucx.version(), options.seed);
    let domain = uct.open(&options.component, &options.settings)?;
    let scene = Scene { domain: &domain, options, dog };
    let checks = if check == Check::All { &Check::OF_ALL[..] } else { &[check] };
    let (mut passed, mut failed) = (0, 0);
    for &check in checks {
        let name = check.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned());
        scene.dog.step(&name);
        let mut tally = Tally::new(&name);
        one(check, &scene, &mut tally)?;
        tally.print();
        passed += tally.passed();
        failed += tally.failed();
    }
    if let Some(file) = options.stay {
        std::fs::write(file, format!("{passed} passed, {failed} failed\n"))?;
        cards::stay(&scene);
    }
    scene.dog.step("uct_md_close");
    drop(domain);
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        bail!("{failed} expectations failed");
    }
    if passed == 0 {
        bail!("nothing was checked");
    }
    Ok(())
}

fn one(check: Check, scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    match check {
        Check::All => unreachable!("is a list of the others"),
        Check::Attributes => attributes::run(scene, tally),
        Check::Transport => attributes::transport(scene, tally),
        Check::Alloc => alloc::run(scene, tally),
        Check::Exhaust => alloc::exhaust(scene, tally),
        Check::Detect => detect::run(scene, tally),
        Check::Dmabuf => dmabuf::run(scene, tally),
        Check::Register => register::run(scene, tally),
        Check::HostOnly => register::host_only(scene, tally),
        Check::Copies => copies::run(scene, tally),
        Check::FailingCopies => copies::failing(scene, tally),
        Check::Churn => churn::run(scene, tally),
        Check::Rcache => rcache::run(scene, tally),
        Check::Keys => keys::run(scene, tally),
        Check::Model => model::run(scene, tally),
        Check::Threads => model::threads(scene, tally),
        Check::TwoCards => cards::two(scene, tally),
        Check::Attach => attach::run(scene, tally),
        Check::Attached => attach::attached(scene, tally),
        Check::Named => cards::named(scene, tally),
        Check::Closing => ends::closing(scene, tally),
        Check::Lost => ends::lost(scene, tally),
        Check::Holes => ends::holes(scene, tally),
        Check::Where => cards::whereabouts(scene, tally),
        Check::Hold => cards::hold(scene),
    }
}
