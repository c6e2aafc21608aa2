//! `ucx-gaudi info`: the cards of this machine, and with `--nics` and `--blocks` their network ports and register
//! blocks. Everything except `--blocks` only uses control nodes, which disturbs no job.

use std::sync::Arc;

use clap::Args;
use gaudi::{DeviceAddr, DeviceChoice, DeviceInfo, Generation, Sysfs, runtime};
use hl_thunk::sys::HwIpInfo;
use hl_thunk::{ControlDevice, Library};
use serde::Serialize;

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{print_json, print_table, size, table};
use crate::scale_out::{self, ScaleOut};

/// Options of `info`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Show only this card: an index, module:N or a PCI address
    #[arg(long, value_name = "CARD")]
    card: Option<String>,
    /// Show the cards' own network ports and the host's RDMA devices
    #[arg(long)]
    nics: bool,
    /// Map the register blocks that the driver permits (opens the card; it must be free)
    #[arg(long)]
    blocks: bool,
    /// With --blocks, read this many 32-bit registers from the start of each; reading may change some
    #[arg(long, value_name = "N", default_value_t = 0, requires = "blocks", value_parser = clap::value_parser!(u32).range(..=1024))]
    words: u32,
}

/// A card as `info --json` shows it.
#[derive(Debug, Serialize)]
struct Card {
    index: u32,
    node: u32,
    module_id: u32,
    bus_id: String,
    generation: String,
    /// The stepping of the chip, from its PCI revision.
    stepping: Option<char>,
    name: String,
    software: bool,
    memory_bytes: Option<u64>,
    memory_page_bytes: Option<u64>,
    firmware: Option<String>,
    numa_node: Option<u32>,
    link: Option<String>,
    ports: u32,
    ports_external: u32,
    copies: bool,
    register_blocks: bool,
    held_by: Vec<Holder>,
    /// Whether all processes could be checked.
    holders_complete: bool,
}

#[derive(Debug, Serialize)]
struct Holder {
    pid: u32,
    command: String,
}

/// A register block as `info --blocks --json` shows it.
#[derive(Debug, Serialize)]
struct Block {
    name: String,
    address: String,
    bytes: Option<usize>,
    words: Vec<String>,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Report {
    library: String,
    library_version: Option<String>,
    cards: Vec<Card>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nics: Option<Vec<Nic>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<Vec<Block>>,
    notes: Vec<String>,
}

/// An RDMA device as `--json` shows it.
#[derive(Debug, Serialize)]
pub(crate) struct Nic {
    name: String,
    bus_id: Option<String>,
    numa_node: Option<u32>,
    ports: Vec<String>,
    active: bool,
}

impl From<&scale_out::Nic> for Nic {
    fn from(nic: &scale_out::Nic) -> Self {
        Self {
            name: nic.name.clone(),
            bus_id: nic.location.as_ref().map(|place| place.bus_id().to_owned()),
            numa_node: nic.location.as_ref().and_then(|place| place.numa_node),
            ports: nic.ports.iter().map(ToString::to_string).collect(),
            active: nic.is_active(),
        }
    }
}

/// Shows the cards.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let chosen = choice(options.card.as_deref())?;
    let infos = match &chosen {
        // Without an argument, show all cards, even if a launcher's variable names one.
        DeviceChoice::Any => runtime().discover()?,
        choice => runtime().candidates(choice)?,
    };
    let library = load()?;
    let report = Report {
        library: library.name().to_owned(),
        library_version: library.version().map(str::to_owned),
        cards: cards(&library, &infos),
        nics: options.nics.then(|| {
            ScaleOut::read(&Sysfs::default(), &infos).nics().iter().map(Nic::from).collect()
        }),
        blocks: if options.blocks { Some(blocks(&chosen, options.words)?) } else { None },
        notes: runtime().take_notes().into_iter().map(|note| note.text).collect(),
    };
    if context.json {
        print_json(&report);
    } else {
        print(&report, options, &infos);
    }
    Ok(Exit::Fine)
}

/// The choice that `--card` stands for.
pub(crate) fn choice(text: Option<&str>) -> Result<DeviceChoice, Failure> {
    match text.map(str::parse) {
        None => Ok(DeviceChoice::Any),
        Some(Ok(choice)) => Ok(choice),
        Some(Err(error)) => Err(Failure { exit: Exit::Usage, ..Failure::from(error) }),
    }
}

/// The driver library, for queries that the engine does not make.
pub(crate) fn load() -> Result<Arc<Library>, Failure> {
    Library::load().map_err(|error| {
        Failure::unable(error.to_string(), "run `ucx-gaudi doctor`, which says what is missing")
    })
}

fn cards(library: &Arc<Library>, infos: &[DeviceInfo]) -> Vec<Card> {
    let nodes: Vec<u32> = infos.iter().map(|info| info.node).collect();
    let owners = runtime().owners(&nodes);
    let sysfs = Sysfs::default();
    let card = |(info, owners): (&DeviceInfo, gaudi::Owners)| {
        let hw = ControlDevice::open(library, info.node).and_then(|control| control.hw_info()).ok();
        let real = |place: &gaudi::topology::PciLocation| place.is_gaudi() && !info.is_software;
        let place = sysfs.location(&info.bus_id).filter(real);
        Card {
            index: info.index,
            node: info.node,
            module_id: info.module_id,
            bus_id: info.bus_id.to_string(),
            generation: info.generation.to_string(),
            stepping: hw.and_then(|hw| info.generation.stepping(hw.revision_id)),
            name: info.card_name.clone(),
            software: info.is_software,
            memory_bytes: hw.map(|hw| hw.dram_size),
            memory_page_bytes: hw.map(|hw| hw.dram_page_size),
            firmware: hw.as_ref().map(firmware),
            numa_node: place.and_then(|place| place.numa_node),
            link: runtime().link(info).map(|link| link.to_string()),
            ports: info.ports.all.count_ones(),
            ports_external: info.ports.external.count_ones(),
            copies: info.generation.accepts_submissions(),
            register_blocks: info.generation.maps_register_blocks(),
            held_by: owners
                .found
                .into_iter()
                .map(|owner| Holder { pid: owner.pid, command: owner.command })
                .collect(),
            // Software cards belong to their user, who sees all processes that can have them.
            holders_complete: info.is_software || !owners.incomplete,
        }
    };
    infos.iter().zip(owners).map(card).collect()
}

fn firmware(hw: &HwIpInfo) -> String {
    let end = hw.cpucp_version.iter().position(|&byte| byte == 0).unwrap_or(hw.cpucp_version.len());
    String::from_utf8_lossy(&hw.cpucp_version[..end]).trim().to_owned()
}

/// Register blocks whose addresses are known: globals of the sync managers that the driver leaves to
/// users, from the start of the configuration space. Other blocks are permitted too (ARC, decoders), but
/// their addresses depend on the chip's harvesting.
fn known_blocks(generation: Generation) -> &'static [(&'static str, DeviceAddr)] {
    const GAUDI2: [(&str, DeviceAddr); 3] = [
        ("sync manager globals, dcore 1", DeviceAddr(0x1000_007f_fc31_e000)),
        ("sync manager globals, dcore 2", DeviceAddr(0x1000_007f_fc51_e000)),
        ("sync manager globals, dcore 3", DeviceAddr(0x1000_007f_fc71_e000)),
    ];
    match generation {
        Generation::Gaudi2 => &GAUDI2,
        Generation::Gaudi | Generation::Gaudi3 => &[],
    }
}

fn blocks(choice: &DeviceChoice, words: u32) -> Result<Vec<Block>, Failure> {
    runtime()
        .configure(gaudi::Options { register_access: Some(true), ..gaudi::Options::default() });
    let device = runtime().open(choice)?;
    let generation = device.info().generation;
    let known = known_blocks(generation);
    if known.is_empty() {
        let why = if generation.maps_register_blocks() {
            "the addresses of its register blocks are not public"
        } else {
            "its driver maps none"
        };
        return Err(Failure::unable(
            format!("no register blocks to show on a {generation}: {why}"),
            "choose a Gaudi2 with --card",
        ));
    }
    let block = |&(name, address): &(&str, DeviceAddr)| {
        let mut shown = Block {
            name: name.to_owned(),
            address: address.to_string(),
            bytes: None,
            words: Vec::new(),
            error: None,
        };
        match device.map_block(address) {
            Ok(block) => {
                shown.bytes = Some(block.len());
                let offsets =
                    (0..words as usize).map(|at| at * 4).take_while(|at| *at < block.len());
                let values = offsets.map_while(|at| block.read(at).ok());
                shown.words = values.map(|value| format!("{value:#010x}")).collect();
            }
            Err(error) => shown.error = Some(Failure::from(error).to_string()),
        }
        shown
    };
    Ok(known.iter().map(block).collect())
}

fn print(report: &Report, options: &Options, infos: &[DeviceInfo]) {
    let version = report.library_version.as_deref().unwrap_or("unknown version");
    println!("driver library {} ({version})", report.library);
    let mut cards = table(&[
        "card",
        "generation",
        "name",
        "module",
        "PCI",
        "memory",
        "NUMA",
        "link",
        "held by",
    ]);
    for card in &report.cards {
        let soft = if card.software { "software " } else { "" };
        cards.add_row([
            card.index.to_string(),
            match card.stepping {
                Some(stepping) => format!("{soft}{} {stepping}", card.generation),
                None => format!("{soft}{}", card.generation),
            },
            card.name.clone(),
            card.module_id.to_string(),
            card.bus_id.clone(),
            card.memory_bytes.map_or_else(|| String::from("?"), size),
            card.numa_node.map_or_else(|| String::from("-"), |node| node.to_string()),
            card.link.clone().unwrap_or_else(|| String::from("-")),
            held_by(card),
        ]);
    }
    print_table(&cards);
    if options.nics {
        println!();
        print!("{}", ScaleOut::read(&Sysfs::default(), infos));
    }
    for block in report.blocks.iter().flatten() {
        match (&block.error, block.bytes) {
            (None, Some(bytes)) => println!("{}  {}  {bytes} B", block.address, block.name),
            (error, _) => println!(
                "{}  {}  {}",
                block.address,
                block.name,
                error.as_deref().unwrap_or("not mapped")
            ),
        }
        for (row, words) in block.words.chunks(8).enumerate() {
            println!("    {:#06x}: {}", row * 32, words.join(" "));
        }
    }
    for note in &report.notes {
        crate::output::note(note);
    }
}

fn held_by(card: &Card) -> String {
    let names: Vec<String> =
        card.held_by.iter().map(|holder| format!("{} ({})", holder.command, holder.pid)).collect();
    match (names.is_empty(), card.holders_complete) {
        (false, _) => names.join(", "),
        (true, true) => String::from("no process"),
        (true, false) => String::from("no process that this user may see"),
    }
}
