//! `ucx-gaudi topo`: a matrix of distances between Gaudis and HCAs, with their NUMA nodes, in the form of `nvidia-smi
//! topo -m`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::Args;
use gaudi::topology::{Distance, PciLocation};
use gaudi::{Sysfs, runtime};
use serde::Serialize;

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::info::Nic;
use crate::output::{note, print_json, print_table, table};
use crate::scale_out::{self, CardView, ScaleOut};

const LEGEND: &[(&str, &str)] = &[
    ("X", "the device itself"),
    ("PIX", "one PCI switch between them"),
    ("PXB", "several PCI switches, not the host bridge"),
    ("PHB", "the host bridge"),
    ("NODE", "several host bridges of one NUMA node"),
    ("SYS", "the link between processors"),
    ("?", "unknown (software cards have no place in the machine)"),
];

/// Options of `topo`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Print a picture of the machine as a Mermaid diagram, which GitHub, GitLab and mermaid.live draw
    #[arg(long, conflicts_with = "json")]
    mermaid: bool,
}

/// A row and a column of the matrix.
struct MatrixEntry {
    name: String,
    location: Option<PciLocation>,
}

#[derive(Debug, Serialize)]
struct Report {
    devices: Vec<Device>,
    /// `matrix[row][column]`, in the order of `devices`.
    matrix: Vec<Vec<&'static str>>,
    nics: Vec<Nic>,
    nearest: Vec<Nearest>,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    bus_id: Option<String>,
    numa_node: Option<u32>,
    cpus: Option<String>,
}

/// The active HCAs nearest to a card.
#[derive(Debug, Serialize)]
struct Nearest {
    card: String,
    nics: Vec<String>,
}

/// Shows the matrix, or the picture.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let cards = runtime().discover()?;
    let all = ScaleOut::read(&Sysfs::default(), &cards);
    let card = |view: &CardView| MatrixEntry {
        name: format!("Gaudi{}", view.card.index),
        // A software card may have the address of another device.
        location: view.location.clone().filter(|place| place.is_gaudi() && !view.card.is_software),
    };
    let nic = |nic: &scale_out::Nic| MatrixEntry {
        name: nic.name.clone(),
        location: nic.location.clone(),
    };
    let places: Vec<MatrixEntry> =
        all.cards().iter().map(card).chain(all.nics().iter().map(nic)).collect();
    let report = report(&all, &places);
    // For example: a card was left out, and why.
    runtime().take_notes().iter().for_each(|line| note(&line.text));
    match (context.json, options.mermaid) {
        (true, _) => print_json(&report),
        (_, true) => print!("{}", mermaid(&report)),
        _ => print(&report),
    }
    Ok(Exit::Fine)
}

fn report(all: &ScaleOut, places: &[MatrixEntry]) -> Report {
    let device = |place: &MatrixEntry| Device {
        name: place.name.clone(),
        bus_id: place.location.as_ref().map(|location| location.bus_id().to_owned()),
        numa_node: place.location.as_ref().and_then(|location| location.numa_node),
        cpus: place.location.as_ref().and_then(|location| location.local_cpus.clone()),
    };
    let row = |at: usize| (0..places.len()).map(|other| relation(places, at, other)).collect();
    let nearest = |view: &CardView| Nearest {
        card: format!("Gaudi{}", view.card.index),
        nics: match view.location.is_some() && !view.card.is_software {
            true => all.nearest(&view.card.bus_id).iter().map(|nic| nic.name.clone()).collect(),
            false => Vec::new(),
        },
    };
    Report {
        devices: places.iter().map(device).collect(),
        matrix: (0..places.len()).map(row).collect(),
        nics: all.nics().iter().map(Nic::from).collect(),
        nearest: all.cards().iter().map(nearest).collect(),
    }
}

fn relation(places: &[MatrixEntry], one: usize, other: usize) -> &'static str {
    if one == other {
        return "X";
    }
    match (&places[one].location, &places[other].location) {
        (Some(one), Some(other)) => short(Distance::between(one, other)),
        _ => "?",
    }
}

/// The term of `nvidia-smi` for a distance.
fn short(distance: Distance) -> &'static str {
    match distance {
        Distance::SameDevice | Distance::SameSwitch { links: ..=4 } => "PIX",
        Distance::SameSwitch { .. } => "PXB",
        Distance::SameRootComplex => "PHB",
        Distance::SameNumaNode => "NODE",
        Distance::OtherNumaNode => "SYS",
        Distance::Unknown => "?",
    }
}

fn print(report: &Report) {
    let mut header = vec![""];
    header.extend(report.devices.iter().map(|device| &*device.name));
    header.extend(["NUMA", "CPUs"]);
    let mut matrix = table(&header);
    for (device, row) in report.devices.iter().zip(&report.matrix) {
        let mut cells = vec![device.name.clone()];
        cells.extend(row.iter().map(|&cell| cell.to_owned()));
        cells.push(device.numa_node.map_or_else(|| String::from("-"), |node| node.to_string()));
        cells.push(device.cpus.clone().unwrap_or_else(|| String::from("-")));
        matrix.add_row(cells);
    }
    print_table(&matrix);
    println!();
    if report.nics.is_empty() {
        println!("no RDMA devices in this machine");
    }
    for nearest in report.nearest.iter().filter(|nearest| !nearest.nics.is_empty()) {
        println!("nearest active to {}: {}", nearest.card, nearest.nics.join(", "));
    }
    let used = |word: &str| report.matrix.iter().flatten().any(|cell| *cell == word);
    for (word, meaning) in LEGEND.iter().filter(|(word, _)| used(word)) {
        println!("  {word:<4}  {meaning}");
    }
}

/// Draws devices in boxes by NUMA node, with lines between a card and every HCA up to the host bridge's distance.
fn mermaid(report: &Report) -> String {
    let mut nodes: BTreeMap<Option<u32>, Vec<usize>> = BTreeMap::new();
    for (at, device) in report.devices.iter().enumerate() {
        nodes.entry(device.numa_node).or_default().push(at);
    }
    let mut text = String::from("flowchart LR\n");
    for (node, devices) in nodes {
        let name =
            node.map_or_else(|| "place unknown".to_owned(), |node| format!("NUMA node {node}"));
        let id = node.map_or_else(|| "unknown".to_owned(), |node| format!("numa{node}"));
        let _ = writeln!(text, "    subgraph {id}[\"{name}\"]");
        for at in devices {
            let Device { name, bus_id, .. } = &report.devices[at];
            let place = bus_id.as_deref().map_or(String::new(), |bus_id| format!("<br/>{bus_id}"));
            // Cards have square corners, HCAs have round ones.
            let (open, close) = if at < report.nearest.len() { ('[', ']') } else { ('(', ')') };
            let _ = writeln!(text, "        d{at}{open}\"{name}{place}\"{close}");
        }
        text.push_str("    end\n");
    }
    let cards = report.nearest.len();
    for (card, row) in report.matrix.iter().enumerate().take(cards) {
        for (hca, word) in row.iter().enumerate().skip(cards) {
            match *word {
                "PIX" | "PXB" => drop(writeln!(text, "    d{card} ===|{word}| d{hca}")),
                "PHB" => drop(writeln!(text, "    d{card} ---|{word}| d{hca}")),
                _ => {}
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_boxes_by_numa_node_and_lines_to_near_hcas() {
        let device = |name: &str, node: Option<u32>| Device {
            name: name.into(),
            bus_id: node.map(|node| format!("0000:{node}3:00.0")),
            numa_node: node,
            cpus: None,
        };
        let report = Report {
            devices: vec![
                device("Gaudi0", Some(0)),
                device("Gaudi1", None),
                device("mlx5_0", Some(0)),
            ],
            matrix: vec![vec!["X", "?", "PIX"], vec!["?", "X", "?"], vec!["PIX", "?", "X"]],
            nics: Vec::new(),
            nearest: ["Gaudi0", "Gaudi1"]
                .map(|card| Nearest { card: card.into(), nics: Vec::new() })
                .into(),
        };
        let expected = r#"flowchart LR
    subgraph unknown["place unknown"]
        d1["Gaudi1"]
    end
    subgraph numa0["NUMA node 0"]
        d0["Gaudi0<br/>0000:03:00.0"]
        d2("mlx5_0<br/>0000:03:00.0")
    end
    d0 ===|PIX| d2
"#;
        assert_eq!(mermaid(&report), expected);
    }
}
