//! `cargo xtask demo`: a demonstration for newcomers. The tools are those of stock UCX, the client and the environment
//! those of the tests.

use anyhow::{Context, Result, bail, ensure};
use comfy_table::{CellAlignment, Table, presets};
use e2e::{Device, Listing, Perftest, Row, SoftNode, Ucx, Workbench};
use ucp_check::measure::size_name;

use crate::dist::{self, Profile};
use crate::progress::Work;
use crate::repo::Repo;
use crate::setup;

/// Set-up, build, listing, verified transfers, UCX's own benchmark.
pub(crate) fn run(repo: &Repo) -> Result<()> {
    setup::fetch(repo, &[Ucx::V1_22])?;
    dist::build(repo, Profile::Release)?;
    let bench = Workbench::ready(repo.layout().clone(), &[Ucx::V1_22])?;
    let device = Device::hardware_or(SoftNode::unique());

    heading("What stock UCX sees (ucx_info -d)");
    println!("UCX:    stock 1.22.0, from {}", repo.shown(&Ucx::V1_22.root(bench.layout())));
    println!("plugin: {}", repo.shown(&bench.layout().plugins()));
    println!("device: {}", device.title());
    println!();
    println!("{}", listing(&bench, &device)?);

    heading("Verified transfers between two processes (ucp-check pair)");
    let rows = transfers(&bench, &device)?;
    println!("{}", table(&rows));

    heading("UCX's own benchmark, two processes (ucx_perftest -m gaudi)");
    println!("{}", perftest(&bench, &device)?);
    println!(
        "\nAll {} transfers were verified, every byte and the bytes around, on: {}.",
        rows.len(),
        device.title()
    );
    Ok(())
}

fn heading(text: &str) {
    println!("\n{text}\n{}", "─".repeat(text.chars().count()));
}

fn listing(bench: &Workbench, device: &Device) -> Result<String> {
    let end = bench.stock("ucx_info", device, "-d").run();
    ensure!(end.success(), "{}", end.report());
    let section = Listing::of(&end.stdout).domain("gaudi_copy");
    ensure!(
        !section.is_empty(),
        "stock UCX did not list a Gaudi; the reason is in the log of \
         `UCX_LOG_LEVEL=info ucx_info -d`\n{}",
        end.report()
    );
    Ok(section)
}

fn transfers(bench: &Workbench, device: &Device) -> Result<Vec<Row>> {
    let work = Work::start("moving and checking data");
    let words = "pair --plain --sizes 8,4K,64K,1M,16M --iters 10";
    let rows = bench.client(Ucx::V1_22, device, words).rows()?;
    ensure!(!rows.is_empty(), "no transfers were made");
    if let Some(bad) = rows.iter().find(|row| !row.verified) {
        let why = bad.error.as_deref().unwrap_or("not verified");
        bail!("{} {} → {}, {} bytes: {why}", bad.op, bad.src, bad.dst, bad.size);
    }
    work.done(&format!("{} transfers", rows.len()));
    Ok(rows)
}

/// One line per operation and memory pair, one column per size: the time of a small message, the bandwidth of a large
/// one; the slower of the two directions counts.
fn table(rows: &[Row]) -> Table {
    let mut sizes: Vec<usize> = rows.iter().map(|row| row.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let mut lines: Vec<(&str, &str, &str)> = Vec::new();
    for row in rows {
        let line = (row.op.as_str(), row.src.as_str(), row.dst.as_str());
        if !lines.contains(&line) {
            lines.push(line);
        }
    }
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let titles = ["operation", "from", "to"].map(str::to_owned).into_iter();
    table.set_header(
        titles.chain(sizes.iter().map(|bytes| size_name(*bytes))).chain(["verified".to_owned()]),
    );
    for line in lines {
        let of_line: Vec<&Row> = rows
            .iter()
            .filter(|row| (row.op.as_str(), row.src.as_str(), row.dst.as_str()) == line)
            .collect();
        let right = of_line.iter().filter(|row| row.verified).count();
        let cells = sizes.iter().map(|bytes| figure(&of_line, *bytes));
        table.add_row(
            [line.0.to_owned(), line.1.to_owned(), line.2.to_owned()]
                .into_iter()
                .chain(cells)
                .chain([format!("{right} of {}", of_line.len())]),
        );
    }
    right_align(&mut table, 3);
    table
}

/// Above this size, bandwidth matters more than time.
const LARGE: usize = 64 << 10;

fn figure(rows: &[&Row], bytes: usize) -> String {
    let of_size = rows.iter().filter(|row| row.size == bytes);
    if bytes < LARGE {
        let slowest = of_size.filter_map(|row| row.latency_us).max_by(f64::total_cmp);
        slowest.map(|us| format!("{us:.1} µs")).unwrap_or_default()
    } else {
        let slowest = of_size.filter_map(|row| row.gbps).min_by(f64::total_cmp);
        slowest.map(|gbps| format!("{gbps:.2} GB/s")).unwrap_or_default()
    }
}

fn right_align(table: &mut Table, from: usize) {
    for column in table.column_iter_mut().skip(from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
}

fn perftest(bench: &Workbench, device: &Device) -> Result<Table> {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["test", "memory", "size", "result"]);
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
            size_name(bytes),
            if test.ends_with("_lat") {
                format!("{:.2} µs", figures.latency_us)
            } else {
                format!("{:.0} MB/s", figures.bandwidth_mbs)
            },
        ]);
    }
    right_align(&mut table, 2);
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(size: usize, figure: f64, verified: bool) -> Row {
        Row {
            op: "tag".into(),
            src: "host".into(),
            dst: "gaudi".into(),
            size,
            from: 0,
            ucx: "1.22.0".into(),
            latency_us: Some(figure),
            gbps: Some(figure),
            verified,
            error: None,
        }
    }

    #[test]
    fn slower_direction_is_shown() {
        let rows =
            [row(8, 1.0, true), row(8, 3.0, true), row(LARGE, 5.0, true), row(LARGE, 4.0, true)];
        let rows: Vec<&Row> = rows.iter().collect();
        assert_eq!(figure(&rows, 8), "3.0 µs");
        assert_eq!(figure(&rows, LARGE), "4.00 GB/s");
        assert_eq!(figure(&rows, 9), "");
    }

    #[test]
    fn unverified_transfers_are_counted_as_such() {
        let table = table(&[row(8, 1.0, true), row(8, 1.0, false)]).to_string();
        assert!(table.contains("1 of 2"), "{table}");
    }
}
