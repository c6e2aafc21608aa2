//! `cargo xtask bench-report FILE…`: writes the results of benches to `docs/results/NAME.md`.
//!
//! Each file was written by `cargo xtask bench NAME --json NAME.json` (`NAME-model.json` with `--model`). The page is
//! written as a whole and never edited by hand; advice is in `docs/performance.md`. If there are bandwidths of several
//! message sizes, a picture of them lies next to the page (`plot`).

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail, ensure};
use clap::ValueEnum as _;
use comfy_table::{CellAlignment, Table, presets};
use e2e::{Device, SoftNode};
use procfs::sys::kernel::Version as KernelVersion;
use procfs::{CpuInfo, Current, Meminfo};
use ucp_check::measure::Record;

use super::{Name, plot};
use crate::repo::Repo;
use crate::scale::Scale;
use crate::soak::tally::Tally;

const FOLDER: &str = "docs/results";

/// The machine and the commit of the figures, if not this machine and the commit that is checked out.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Origin<'a> {
    /// The machine in words.
    pub(crate) machine: Option<&'a str>,
    /// The commit.
    pub(crate) commit: Option<&'a str>,
}

/// Writes a page for each of `files`.
pub(crate) fn run(repo: &Repo, files: &[PathBuf], origin: Origin<'_>) -> Result<()> {
    let machine = origin.machine.map_or_else(this_machine, |given| Ok(given.to_owned()))?;
    let commit = origin.commit.map_or_else(|| head(repo), |given| Ok(given.to_owned()))?;
    for file in files {
        let name = file.file_stem().unwrap_or_default().display().to_string();
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let origin = [&*date(file)?, &commit, &machine];
        if name == "soak" {
            let tally: Tally = serde_json::from_str(&text).context("not the results of a soak")?;
            write(repo, "soak.md", &tally.page(origin))?;
            continue;
        }
        if name == "scale" {
            let scale: Scale = serde_json::from_str(&text).context("not the results of scale")?;
            write(repo, "scale.md", &scale.page(origin))?;
            continue;
        }
        let records: Vec<Record> = serde_json::from_str(&text)
            .with_context(|| format!("{}: not the results of a bench", file.display()))?;
        ensure!(!records.is_empty(), "{}: no results", file.display());
        let page = page(&name, &records, origin)?;
        let picture = plot::svg(&name, &records).map(|picture| (format!("{name}.svg"), picture));
        for (file, text) in [(format!("{name}.md"), page)].into_iter().chain(picture) {
            write(repo, &file, &text)?;
        }
        eprintln!("{FOLDER}/{name}.md: {} figures", records.len());
    }
    Ok(())
}

fn write(repo: &Repo, file: &str, text: &str) -> Result<()> {
    let path = repo.path(FOLDER).join(file);
    std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// The whole page of a bench.
fn page(name: &str, records: &[Record], [date, commit, machine]: [&str; 3]) -> Result<String> {
    let spec = model(name, records)?;
    let bench = name.strip_suffix("-model").unwrap_or(name);
    let bench_name = Name::from_str(bench, false)
        .map_err(|_| anyhow!("{name}: there is no such bench; name the file after its bench"))?;
    let (what, option) = match spec {
        Some(spec) => (of_a_model(bench_name), format!(" --model {spec}")),
        None => (help(bench_name), String::new()),
    };
    let table = table(records);
    let picture = match plot::svg(name, records) {
        Some(_) => format!("![bandwidths over message sizes]({name}.svg)\n\n"),
        None => String::new(),
    };
    Ok(format!(
        "# Results: {name}\n\n\
         {what}.\n\n\
         | | |\n|---|---|\n\
         | date | {date} |\n\
         | commit | {commit} |\n\
         | machine | {machine} |\n\
         | command | `cargo xtask bench {bench}{option} --json {name}.json` |\n\n\
         Each value is compared with a floor from the same run; the ratio is value to floor, and a target is a bound on it:\n\
         [performance-method.md](../design/performance-method.md). Written by `cargo xtask bench-report {name}.json`.\n\n\
         {picture}{table}"
    ))
}

/// The description of a bench, as in `cargo xtask bench --help`.
fn help(bench: Name) -> String {
    let help = bench.to_possible_value().and_then(|value| value.get_help().cloned());
    help.map(|help| help.to_string()).unwrap_or_default()
}

/// The same of a bench with `--model`.
fn of_a_model(bench: Name) -> String {
    let what = match bench {
        Name::Choice => {
            "Time of a message by the protocol that UCP chooses, compared with the best that was forced by hand"
        }
        Name::OneSided => {
            "Put and get between two processes by every way there is, compared with the modelled link"
        }
        Name::Copy => "Copies through UCT compared with the modelled link",
        Name::Mpi => {
            "Allreduce and Alltoall of Open MPI with Gaudi buffers, two ranks, compared with copies to host memory and back by hand"
        }
        Name::Ipc => "Messages between two processes by gaudi_ipc compared with the modelled link",
        Name::Cliffs => {
            "Messages between two processes, staged through host memory, compared with the modelled link"
        }
        // No other bench takes `--model`.
        _ => "",
    };
    format!(
        "{what}, on a software card with the times of a Gaudi2. These are figures of a model, not of a card"
    )
}

/// The timing model of the figures, such as `gaudi2,slow=20`.
fn model<'a>(name: &str, records: &'a [Record]) -> Result<Option<&'a str>> {
    let specs: BTreeSet<Option<&str>> = records.iter().map(|it| it.model.as_deref()).collect();
    ensure!(specs.len() == 1, "{name}: figures of several models");
    // Files of modelled cards are named `NAME-model.json`.
    match (name.ends_with("-model"), specs.first().copied().flatten()) {
        (true, Some(spec)) => Ok(Some(spec)),
        (false, None) => Ok(None),
        (true, None) => bail!(
            "{name}: measured by a version that did not note the model; add it to each figure: \
             jq 'map(.model = \"gaudi2,slow=N\")'"
        ),
        (false, Some(spec)) => bail!("{name}: these figures are of a model ({spec})"),
    }
}

const HEAD: [&str; 5] = ["", "value", "floor", "ratio", "target"];

/// A row for each figure, in words.
fn rows(records: &[Record]) -> impl Iterator<Item = [String; 5]> {
    records.iter().map(|record| {
        let Record { name, value, unit, floor, ratio, target, met, model: _ } = record;
        let target = match (target, met) {
            (Some(target), Some(false)) => format!("{}: **missed**", digits(*target)),
            (Some(target), _) => format!("{}: met", digits(*target)),
            (None, _) => String::new(),
        };
        let quantity = |value| format!("{} {unit}", digits(value));
        [name.clone(), quantity(*value), quantity(*floor), digits(*ratio), target]
    })
}

/// For a page.
fn table(records: &[Record]) -> String {
    let mut text = format!("| {} |\n|---|--:|--:|--:|---|\n", HEAD.join(" | "));
    for row in rows(records) {
        let row = row.map(|cell| cell.replace('|', "\\|"));
        let _ = writeln!(text, "| {} |", row.join(" | "));
    }
    text
}

/// The same for the terminal.
pub(super) fn terminal(records: &[Record]) -> Table {
    let plain = |row: [String; 5]| row.map(|cell| cell.replace("**", ""));
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(HEAD).add_rows(rows(records).map(plain));
    for column in 1..4 {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// Three significant digits.
fn digits(value: f64) -> String {
    let whole = value.abs().log10().floor() as i32 + 1;
    format!("{value:.*}", usize::try_from(3 - whole.clamp(-2, 3)).unwrap_or(0))
}

/// The day on which a file was written, and so its figures measured.
fn date(file: &Path) -> Result<String> {
    day(&["-r".as_ref(), file.as_os_str()])
}

/// Today's date.
pub(crate) fn today() -> Result<String> {
    day(&[])
}

fn day(of: &[&OsStr]) -> Result<String> {
    let output = Command::new("date").args(["-u", "+%F"]).args(of).output();
    let output = output.context("cannot run date")?;
    ensure!(output.status.success(), "date: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// The commit that is checked out.
pub(crate) fn head(repo: &Repo) -> Result<String> {
    let mut git = Command::new("git");
    git.current_dir(repo.path("")).args(["rev-parse", "--short", "HEAD"]);
    let output = git.output().context("cannot run git; name the commit with --commit")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "git: {}; name the commit with --commit", said.trim_end());
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

pub(crate) fn this_machine() -> Result<String> {
    let (cpus, memory) = (CpuInfo::current()?, Meminfo::current()?.mem_total);
    let model = cpus.model_name(0).unwrap_or("unknown processor");
    let kernel = KernelVersion::current()?;
    Ok(format!(
        "{} × {model}, {:.0} GiB, Linux {}.{}, {}",
        cpus.num_cores(),
        memory as f64 / f64::from(1 << 30),
        kernel.major,
        kernel.minor,
        Device::hardware_or(SoftNode::lenient()).title()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_says_what_was_measured_when_where_and_how() {
        let records = [Record::new("put", 9.0, "GB/s", 10.0, Some(0.8))];
        let text = page("copy", &records, ["2026-01-02", "abc1234", "a machine"]).expect("a page");
        assert!(text.starts_with("# Results: copy\n\nCopies through UCT compared with"), "{text}");
        for row in [
            "| date | 2026-01-02 |",
            "| commit | abc1234 |",
            "| machine | a machine |",
            "| command | `cargo xtask bench copy --json copy.json` |",
        ] {
            assert!(text.contains(row), "{row}: {text}");
        }
        assert!(page("other", &records, [""; 3]).is_err(), "there is no such bench");
    }

    #[test]
    fn every_figure_is_shown_with_a_target_and_without() {
        let records = [
            Record::new("put", 9.0, "GB/s", 10.0, Some(0.8)),
            Record::new("get", 3.0, "µs", 2.0, Some(1.3)),
            Record::new("other", 3.0, "µs", 2.0, None),
        ];
        let text = table(&records);
        assert!(text.contains("| put | 9.00 GB/s | 10.0 GB/s | 0.900 | 0.800: met |"), "{text}");
        assert!(text.contains("| get | 3.00 µs | 2.00 µs | 1.50 | 1.30: **missed** |"), "{text}");
        assert!(text.contains("| other | 3.00 µs | 2.00 µs | 1.50 |  |"), "{text}");
    }

    #[test]
    fn figures_of_a_model_name_it_and_stand_in_no_other_page() {
        let mut records = [Record::new("put", 9.0, "GB/s", 10.0, None)];
        let page = |name, records: &[Record]| page(name, records, [""; 3]);
        assert!(page("copy", &records).is_ok_and(|text| !text.contains("model,")));
        assert!(page("copy-model", &records).is_err());
        records[0].model = Some("gaudi2,slow=20".to_owned());
        let text = page("copy-model", &records).expect("of a model");
        assert!(
            text.contains("bench copy --model gaudi2,slow=20 --json copy-model.json"),
            "{text}"
        );
        assert!(text.contains("figures of a model, not of a card"), "{text}");
        assert!(page("copy", &records).is_err());
    }

    #[test]
    fn three_digits_are_shown() {
        let shown = [0.0123, 0.5, 9.876, 45.67, 123.4, 65536.0].map(digits);
        assert_eq!(shown, ["0.0123", "0.500", "9.88", "45.7", "123", "65536"]);
    }
}
