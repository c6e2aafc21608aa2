//! `cargo xtask demo`: what a stranger sees. Nothing here is special to the demo: the tools are stock
//! UCX's, the client is the tests' own, and the environment is the harness's.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use e2e::{Device, Perftest, Row, Ucx, Workbench};

use crate::dist::{self, Profile};
use crate::progress::Work;
use crate::repo::Repo;
use crate::setup;

/// Set-up, build, listing, verified transfers, UCX's own benchmark.
pub(crate) fn run(repo: &Repo) -> Result<()> {
    setup::run(repo)?;
    dist::build(repo, Profile::Release)?;
    let bench = Workbench::new(repo.layout().clone());
    if let Some(missing) = bench.missing() {
        bail!("{} is missing after set-up and build: a defect of xtask", missing.display());
    }
    let device = Device::hardware_or_software();

    heading("What stock UCX sees (ucx_info -d)");
    println!("device: {}", device.title());
    println!("{}", listing(&bench, &device)?);

    heading("Verified transfers between two processes (ucp-check pair)");
    let rows = transfers(&bench, &device)?;
    println!("{}", table(&rows));

    heading("UCX's own benchmark, two processes (ucx_perftest -m gaudi)");
    println!("{}", perftest(&bench, &device)?);
    println!(
        "All {} transfers were verified, every byte and the bytes around, on: {}.",
        rows.len(),
        device.title()
    );
    Ok(())
}

fn heading(text: &str) {
    println!("\n{text}\n{}", "─".repeat(text.chars().count()));
}

fn listing(bench: &Workbench, device: &Device) -> Result<String> {
    let end = bench.tool(Ucx::V1_22, "ucx_info").plugin().device(device).arg("-d").run();
    ensure!(end.success(), "{}", end.report());
    let section = sections(&end.stdout, "gaudi_copy");
    ensure!(
        !section.is_empty(),
        "stock UCX did not list a Gaudi; the reason is in the log of \
         `UCX_LOG_LEVEL=info ucx_info -d`\n{}",
        end.report()
    );
    Ok(section)
}

/// The parts of `ucx_info -d` about one memory domain.
fn sections(listing: &str, domain: &str) -> String {
    let mut inside = false;
    let lines: Vec<&str> = listing
        .lines()
        .filter(|line| {
            if let Some(name) = line.strip_prefix("# Memory domain:") {
                inside = name.trim() == domain;
            }
            inside
        })
        .collect();
    lines.join("\n").trim_end_matches(['#', '\n']).to_owned()
}

fn transfers(bench: &Workbench, device: &Device) -> Result<Vec<Row>> {
    let work = Work::start("moving and checking data");
    let file = bench.layout().target().join(format!("demo-{}.json", std::process::id()));
    let end = bench
        .ucp_check(Ucx::V1_22)
        .plugin()
        .device(device)
        .words("pair --sizes 8,4K,64K,1M,16M --json")
        .arg(&file)
        .limit(Duration::from_secs(300))
        .run();
    let rows = Row::read(&file);
    let _ = std::fs::remove_file(&file);
    ensure!(end.success(), "{}", end.report());
    let rows = rows?;
    ensure!(!rows.is_empty(), "no transfers were made\n{}", end.report());
    if let Some(bad) = rows.iter().find(|row| !row.verified) {
        let why = bad.error.as_deref().unwrap_or("not verified");
        bail!("{} {} → {}, {} bytes: {why}", bad.op, bad.src, bad.dst, bad.size);
    }
    work.done(&format!("{} transfers", rows.len()));
    Ok(rows)
}

/// One line per operation, memory pair and size: the slower of the two directions.
fn measured(rows: &[Row]) -> Vec<Row> {
    let mut lines: Vec<Row> = Vec::new();
    for row in rows.iter().filter(|row| row.latency_us.is_some()) {
        let same = |line: &&mut Row| {
            (&line.op, &line.src, &line.dst, line.size) == (&row.op, &row.src, &row.dst, row.size)
        };
        match lines.iter_mut().find(same) {
            None => lines.push(row.clone()),
            Some(line) if line.latency_us < row.latency_us => *line = row.clone(),
            Some(_) => {}
        }
    }
    lines
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["operation", "from", "to", "size", "latency µs", "GB/s", "verified"]);
    let number = |value: Option<f64>, digits| {
        value.map(|value| format!("{value:.digits$}")).unwrap_or_default()
    };
    for row in measured(rows) {
        table.add_row([
            row.op,
            row.src,
            row.dst,
            size(row.size),
            number(row.latency_us, 2),
            number(row.gbps, 3),
            if row.verified { "yes".to_owned() } else { "NO".to_owned() },
        ]);
    }
    for index in [3, 4, 5] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn perftest(bench: &Workbench, device: &Device) -> Result<Table> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["test", "memory", "size", "median µs", "MB/s"]);
    let runs = [
        ("tag_lat", "gaudi", 8, 1_000),
        ("tag_bw", "gaudi", 1 << 20, 200),
        ("tag_bw", "host,gaudi", 1 << 20, 200),
        ("ucp_put_bw", "gaudi", 1 << 20, 200),
        ("ucp_get", "gaudi", 1 << 20, 200),
    ];
    for (test, memory, bytes, iterations) in runs {
        let work = Work::start(format!("ucx_perftest -t {test} -m {memory} -s {bytes}"));
        let figures = Perftest::new(bench, test, bytes)
            .iterations(iterations, 10)
            .plugin()
            .device(device)
            .both(|tool| tool.words(&format!("-m {memory}")))
            .run()?
            .figures()
            .with_context(|| format!("ucx_perftest -t {test} -m {memory} -s {bytes}"))?;
        work.done("");
        table.add_row([
            test.to_owned(),
            memory.to_owned(),
            size(bytes as u64),
            format!("{:.2}", figures.latency_us),
            format!("{:.0}", figures.bandwidth_mbs),
        ]);
    }
    for index in [2, 3, 4] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    Ok(table)
}

/// A size as people write it.
fn size(bytes: u64) -> String {
    match bytes {
        b if b >= 1 << 20 && b % (1 << 20) == 0 => format!("{} MiB", b >> 20),
        b if b >= 1 << 10 && b % (1 << 10) == 0 => format!("{} KiB", b >> 10),
        b => format!("{b} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn section_ends_where_the_next_domain_begins() {
        let listing = "#\n# Memory domain: self\n#     Component: self\n#\n\
                       # Memory domain: gaudi_copy\n#     Component: gaudi_copy\n\
                       #      Transport: gaudi_cpy\n#\n# Memory domain: tcp\n#     Component: tcp\n";
        let section = sections(listing, "gaudi_copy");
        assert!(section.starts_with("# Memory domain: gaudi_copy"), "{section}");
        assert!(section.ends_with("Transport: gaudi_cpy"), "{section}");
        assert_eq!(sections(listing, "absent"), "");
    }

    #[test]
    fn slower_direction_is_shown() {
        let row = |latency_us| Row {
            op: "tag".into(),
            src: "host".into(),
            dst: "gaudi".into(),
            size: 8,
            ucx: "1.22.0".into(),
            latency_us,
            gbps: latency_us,
            verified: true,
            error: None,
        };
        let lines = measured(&[row(None), row(Some(1.0)), row(Some(3.0)), row(Some(2.0))]);
        assert_eq!(lines, [row(Some(3.0))]);
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            (size(8), size(4096), size(1 << 20)),
            ("8 B".into(), "4 KiB".into(), "1 MiB".into())
        );
        assert_eq!(size((1 << 20) + 1), "1048577 B");
    }
}
