//! Copies through UCT on stock UCX, beside memcpy over the same memory; short ones beside the driver's
//! own submission; `ucp_init` beside one without the plugin.
//!
//! The figures come from `ucp-check costs`, which prints a name and a number a line.

use std::io::Read;
use std::process::Stdio;

use anyhow::{Context, Result, ensure};
use e2e::{Device, Tool, Ucx, Workbench};

use super::figures::{Figures, get, parse};
use super::record::{Record, median};
use crate::progress::Work;
use crate::repo::Repo;
use crate::units;

pub(super) const SIZES: [u64; 5] = [64 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20];

/// Name in the output, name for people.
pub(super) const DIRECTIONS: [(&str, &str); 3] =
    [("h2d", "host to device"), ("d2h", "device to host"), ("d2d", "device to device")];

/// A short copy may cost this many times what the driver alone does.
const SHORT_TARGET: f64 = 1.3;
/// Milliseconds that `ucp_init` may take longer with the plugin.
const INIT_TARGET_MS: f64 = 5.0;
/// Processes that do nothing but `ucp_init`, of each kind.
const INIT_ROUNDS: usize = 9;

/// The share of memcpy's bandwidth that a size should reach. The software card promises nothing for less.
fn target(size: u64) -> Option<f64> {
    (size >= 1 << 20).then_some(0.80)
}

/// What the terminal and the JSON file show.
fn records(figures: &Figures) -> Result<Vec<Record>> {
    let mut records = Vec::new();
    for (name, people) in DIRECTIONS {
        for size in SIZES {
            let (value, floor) = (
                get(figures, &format!("{name} {size}"))?,
                get(figures, &format!("memcpy {size}"))?,
            );
            let outstanding = get(figures, &format!("outstanding {size}"))?;
            let title = format!("{people}, {}, {outstanding} outstanding", units::size(size));
            records.push(Record::at_least(title, value, "GB/s", floor, target(size)));
        }
    }
    for (name, people) in DIRECTIONS {
        for size in SIZES {
            let value = get(figures, &format!("{name} alone {size}"))?;
            let floor = size as f64 / get(figures, &format!("memcpy {size}"))? / 1e3;
            let title = format!("{people}, {}, alone", units::size(size));
            records.push(Record::at_most(title, value, "µs", floor, None));
        }
    }
    for (name, floor) in [("put_short", "driver put"), ("get_short", "driver get")] {
        let (value, floor) = (get(figures, name)?, get(figures, floor)?);
        let title = format!("{name}, 8 B, beside the driver's submit and wait");
        records.push(Record::at_most(title, value, "ns", floor, Some(SHORT_TARGET)));
    }
    Ok(records)
}

/// Runs the client with its progress shown; its figures.
pub(super) fn figures(tool: &Tool) -> Result<Figures> {
    let mut child = tool
        .command()
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start `{}`", tool.line()))?;
    let mut text = String::new();
    if let Some(mut stdout) = child.stdout.take() {
        stdout.read_to_string(&mut text).context("cannot read figures")?;
    }
    let status = child.wait().context("cannot wait")?;
    ensure!(status.success(), "`{}`: {status}", tool.line());
    parse(&text)
}

/// `ucp_init` with the plugin absent, without a device, and with one that is not used.
fn init_records(bench: &Workbench, device: &Device, rounds: usize) -> Result<Vec<Record>> {
    let work = Work::start(format!("ucp_init, {rounds} rounds"));
    let client = || bench.ucp_check(Ucx::V1_22).words("costs init");
    let variants = [
        ("", client()),
        ("ucp_init, plugin loaded, no driver library", client().plugin()),
        ("ucp_init, plugin loaded, Gaudi there and unused", client().plugin().device(device)),
    ];
    let mut samples = [const { Vec::new() }; 3];
    for round in 0..rounds {
        for turn in 0..variants.len() {
            // Another order each round: whoever runs first must not always be the same.
            let index = (turn + round) % variants.len();
            samples[index].push(get(&figures(&variants[index].1)?, "ucp_init")?);
        }
    }
    work.done("");
    let floor = median(&samples[0]);
    let record = |index: usize| {
        let name = format!("{} (at most {INIT_TARGET_MS} ms longer)", variants[index].0);
        let most = (floor + INIT_TARGET_MS) / floor;
        Record::at_most(name, median(&samples[index]), "ms", floor, Some(most))
    };
    Ok(vec![record(1), record(2)])
}

/// Measures everything; `quick` only shows that it runs.
pub(super) fn run(repo: &Repo, quick: bool) -> Result<Vec<Record>> {
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::hardware_or_software();
    eprintln!("device: {}", device.title());
    if quick {
        eprintln!("quick: it shows that everything runs, the figures mean nothing");
    }
    let words = if quick { "costs copies --quick" } else { "costs copies" };
    let client = bench.ucp_check(Ucx::V1_22).words(words).plugin().device(&device);
    let work = Work::start("copies through UCT");
    let figures = figures(&client)?;
    work.done("");
    let mut records = records(&figures)?;
    records.extend(init_records(&bench, &device, if quick { 1 } else { INIT_ROUNDS })?);
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made_up() -> Figures {
        let mut figures = Figures::new();
        for size in SIZES {
            figures.insert(format!("memcpy {size}"), 10.0);
            figures.insert(format!("outstanding {size}"), 16.0);
            for (name, _) in DIRECTIONS {
                figures.insert(format!("{name} {size}"), 9.0);
                figures.insert(format!("{name} alone {size}"), 100.0);
            }
        }
        for (name, value) in [
            ("put_short", 1300.0),
            ("driver put", 1000.0),
            ("get_short", 1400.0),
            ("driver get", 1000.0),
        ] {
            figures.insert(name.to_owned(), value);
        }
        figures
    }

    #[test]
    fn figures_stand_beside_floors_and_targets() {
        let mut figures = made_up();
        figures.insert(format!("d2d {}", 64 << 20), 7.9);
        let records = records(&figures).expect("records");
        assert_eq!(records.len(), 15 + 15 + 2);
        let find = |name: &str| {
            records.iter().find(|record| record.name.starts_with(name)).expect(name).clone()
        };
        assert_eq!(find("host to device, 64 KiB, 16").met, None);
        assert_eq!(find("device to host, 1 MiB, 16").met, Some(true));
        assert_eq!(find("device to device, 64 MiB, 16").met, Some(false), "0.79 is below 0.8");
        assert_eq!(find("put_short").met, Some(true));
        assert_eq!(find("get_short").met, Some(false));
        // 64 KiB at 10 GB/s are 6.5 µs.
        assert!((find("host to device, 64 KiB, alone").floor - 6.5536).abs() < 1e-9);
    }

    #[test]
    fn a_missing_figure_is_named() {
        let mut figures = made_up();
        figures.remove("get_short");
        assert!(records(&figures).expect_err("incomplete").to_string().contains("get_short"));
        assert!(parse("h2d 64 5").is_err());
    }
}
