//! `cargo xtask bench-report FILE…`: puts the results of benches into `docs/performance.md`.
//!
//! Each file is what `cargo xtask bench NAME --json NAME.json` wrote; its table replaces what stands
//! between `<!-- bench NAME -->` and `<!-- end -->` in the page.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::Device;

use super::record::Record;
use crate::repo::Repo;

const PAGE: &str = "docs/performance.md";
const END: &str = "<!-- end -->";

/// Writes the tables of `files` into the page; `machine` says where they were measured, if not here.
pub(crate) fn run(repo: &Repo, files: &[PathBuf], machine: Option<&str>) -> Result<()> {
    let path = repo.path(PAGE);
    let mut page = std::fs::read_to_string(&path).with_context(|| format!("cannot read {PAGE}"))?;
    let machine = machine.map_or_else(this_machine, |given| Ok(given.to_owned()))?;
    for file in files {
        let name = file.file_stem().unwrap_or_default().display().to_string();
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read {}", file.display()))?;
        let records: Vec<Record> = serde_json::from_str(&text)
            .with_context(|| format!("{}: not the results of a bench", file.display()))?;
        ensure!(!records.is_empty(), "{}: no results", file.display());
        let modelled = modelled(&name, &records)?;
        let section = format!("{}, on {machine}{modelled}.\n\n{}", date(file)?, table(&records));
        page = replaced(&page, &name, &section)?;
        eprintln!("{PAGE}: {name}, {} figures", records.len());
    }
    std::fs::write(&path, page).with_context(|| format!("cannot write {PAGE}"))
}

/// Says of which model the figures are, and by how much its times were stretched.
fn modelled(name: &str, records: &[Record]) -> Result<String> {
    let specs: BTreeSet<Option<&str>> = records.iter().map(|it| it.model.as_deref()).collect();
    ensure!(specs.len() == 1, "{name}: figures of several models");
    // Files of modelled cards are named `NAME-model.json`.
    match (name.ends_with("-model"), specs.first().copied().flatten()) {
        (false, None) => Ok(String::new()),
        (true, Some(spec)) => Ok(format!(", its times modelled (`{spec}`)")),
        (true, None) => bail!(
            "{name}: measured by a version that did not note the model; add it to each figure: \
             jq 'map(.model = \"gaudi2,slow=N\")'"
        ),
        (false, Some(spec)) => bail!("{name}: these figures are of a model ({spec})"),
    }
}

/// The page with another section for a bench.
fn replaced(page: &str, name: &str, section: &str) -> Result<String> {
    let start = format!("<!-- bench {name} -->\n");
    let Some((before, rest)) = page.split_once(&start) else {
        bail!("{PAGE} has no line `{}`; name the file after its bench", start.trim_end());
    };
    let (_, after) = rest.split_once(END).with_context(|| format!("{PAGE}: no `{END}`"))?;
    Ok(format!("{before}{start}{section}{END}{after}"))
}

/// What has a target; everything, where nothing has one.
fn table(records: &[Record]) -> String {
    let with_target = records.iter().filter(|record| record.target.is_some()).count();
    let shown = |record: &&Record| with_target == 0 || record.target.is_some();
    let mut text = "| | value | floor | ratio | target |\n|---|--:|--:|--:|---|\n".to_owned();
    for record in records.iter().filter(shown) {
        let Record { name, value, unit, floor, ratio, target, met, model: _ } = record;
        let target = match (target, met) {
            (Some(target), Some(false)) => format!("{}: **missed**", digits(*target)),
            (Some(target), _) => format!("{}: met", digits(*target)),
            (None, _) => String::new(),
        };
        let name = name.replace('|', "\\|");
        let (value, floor, ratio) = (digits(*value), digits(*floor), digits(*ratio));
        let line = format!("| {name} | {value} {unit} | {floor} {unit} | {ratio} | {target} |");
        let _ = writeln!(text, "{line}");
    }
    let left_out = records.len() - records.iter().filter(shown).count();
    if left_out > 0 {
        let _ = writeln!(text, "\n{left_out} further figures, without a target, are not shown.");
    }
    text
}

/// Three significant digits.
fn digits(value: f64) -> String {
    let whole = value.abs().log10().floor() as i32 + 1;
    format!("{value:.*}", usize::try_from(3 - whole.clamp(-2, 3)).unwrap_or(0))
}

/// The day a file was written, which is when its figures were measured.
fn date(file: &Path) -> Result<String> {
    let output = Command::new("date").args(["-u", "+%F", "-r"]).arg(file).output();
    let output = output.context("cannot run date")?;
    ensure!(output.status.success(), "date: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

fn this_machine() -> Result<String> {
    let read = |path| std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"));
    let (cpus, memory) = (read("/proc/cpuinfo")?, read("/proc/meminfo")?);
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    let model = field(&cpus, "model name").unwrap_or_else(|| "unknown processor".to_owned());
    let count = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let kib = field(&memory, "MemTotal").and_then(|text| text.split(' ').next()?.parse().ok());
    let gib = kib.map_or(0.0, |kib: f64| kib / f64::from(1 << 20));
    let kernel = read("/proc/sys/kernel/osrelease")?;
    let version: Vec<&str> = kernel.trim_end().split(['.', '-']).take(2).collect();
    let device = Device::hardware_or_software();
    Ok(format!("{count} × {model}, {gib:.0} GiB, Linux {}, {}", version.join("."), device.title()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_section_is_replaced_and_the_rest_of_the_page_stays() {
        let page =
            "a\n<!-- bench copy -->\nold\n<!-- end -->\nb\n<!-- bench ipc -->\n<!-- end -->\n";
        let page = replaced(page, "copy", "new\n").expect("there is such a section");
        assert_eq!(
            page,
            "a\n<!-- bench copy -->\nnew\n<!-- end -->\nb\n<!-- bench ipc -->\n<!-- end -->\n"
        );
        assert_eq!(replaced(&page, "copy", "new\n").expect("again"), page);
        assert!(replaced(&page, "other", "").is_err());
    }

    #[test]
    fn figures_with_a_target_are_shown_and_the_others_counted() {
        let records = [
            Record::at_least("put", 9.0, "GB/s", 10.0, Some(0.8)),
            Record::at_most("get", 3.0, "µs", 2.0, Some(1.3)),
            Record::at_most("other", 3.0, "µs", 2.0, None),
        ];
        let text = table(&records);
        assert!(text.contains("| put | 9.00 GB/s | 10.0 GB/s | 0.900 | 0.800: met |"), "{text}");
        assert!(text.contains("| get | 3.00 µs | 2.00 µs | 1.50 | 1.30: **missed** |"), "{text}");
        assert!(text.contains("1 further figures") && !text.contains("other |"), "{text}");
        assert!(table(&records[2..]).contains("| other |"), "nothing has a target");
    }

    #[test]
    fn figures_of_a_model_name_it_and_stand_in_no_other_section() {
        let mut records = [Record::at_least("put", 9.0, "GB/s", 10.0, None)];
        assert_eq!(modelled("copy", &records).expect("of the card"), "");
        assert!(modelled("copy-model", &records).is_err());
        records[0].model = Some("gaudi2,slow=20".to_owned());
        let text = modelled("copy-model", &records).expect("of a model");
        assert!(text.contains("gaudi2,slow=20"), "{text}");
        assert!(modelled("copy", &records).is_err());
    }

    #[test]
    fn three_digits_are_shown() {
        let shown = [0.0123, 0.5, 9.876, 45.67, 123.4, 65536.0].map(digits);
        assert_eq!(shown, ["0.0123", "0.500", "9.88", "45.7", "123", "65536"]);
    }
}
