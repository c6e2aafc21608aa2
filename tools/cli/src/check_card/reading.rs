//! `check-card --read`: a report from another machine next to the results of the software card. The differences are
//! what the software card, and so the tests of the plugin, get wrong about that card.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::{CHECKS, findings_of, own_child};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{note, print_json};
use crate::report::{Finding, Summary};
use crate::saved_file;

/// The parts of a report that are needed.
#[derive(Deserialize)]
struct Report {
    report: String,
    version: String,
    kernel: String,
    checks: Vec<Finding>,
}

/// Figures that differ from card to card, and do not show whether the software card behaves like this one.
const OF_THE_MACHINE: [&str; 12] = [
    "bus_id",
    "node",
    "name",
    "module_id",
    "software",
    "version",
    "firmware",
    "raw",
    "pci_link",
    "kernel",
    "library",
    "bars",
];

/// Shows a report.
pub(super) fn show(context: &Context, file: &Path) -> Result<Exit, Failure> {
    let unreadable = |why: String| {
        Failure::unable(
            format!("{}: {why}", file.display()),
            "give a file that `ucx-gaudi check-card --save` wrote",
        )
    };
    let report: Report = saved_file::read_report(file).map_err(unreadable)?;
    if report.report != "check-card" {
        return Err(unreadable(format!("a report of {}", report.report)));
    }
    let software = on_software(context)?;
    let summary = Summary::of(&report.checks);
    let rows: Vec<Value> = report.checks.iter().map(|finding| row(finding, &software)).collect();
    if context.json {
        print_json(&json!({
            "report": "check-card-read", "version": report.version, "kernel": report.kernel,
            "summary": summary, "checks": rows,
        }));
        return Ok(summary.exit());
    }
    println!("check-card {} on kernel {}\n", report.version, report.kernel);
    for (finding, row) in report.checks.iter().zip(&rows) {
        finding.print();
        for difference in row["differs"].as_array().into_iter().flatten() {
            println!("  {:<14} {}", "", difference.as_str().unwrap_or_default());
        }
    }
    summary.print();
    Ok(summary.exit())
}

/// Runs the same checks on a software card, if it is installed.
fn on_software(context: &Context) -> Result<Vec<Finding>, Failure> {
    let Ok(folder) = context.prefix.soft_gaudi() else {
        note("the software Gaudi is not installed: nothing to compare the report with");
        return Ok(Vec::new());
    };
    let mut command = own_child()?;
    command.env("HL_THUNK_LIBRARY", folder.join("libhl-thunk.so"));
    command.env("SOFT_GAUDI_NODE", format!("read-{}", std::process::id()));
    findings_of(&mut command, true, &CHECKS)
}

/// A finding, and a description of how the software card differs.
fn row(finding: &Finding, software: &[Finding]) -> Value {
    let mut differs = Vec::new();
    if let Some(other) = software.iter().find(|other| other.check == finding.check) {
        if other.verdict != finding.verdict {
            differs.push(format!("software card: {}", other.found));
        }
        let fields = finding.data.as_object().into_iter().flatten();
        for (name, value) in fields.filter(|(name, _)| !OF_THE_MACHINE.contains(&name.as_str())) {
            let there = other.data.get(name).unwrap_or(&Value::Null);
            // Times and rates always differ, so only large differences are shown.
            if !is_alike(value, there) {
                differs.push(format!("{name}: {value}; software card: {there}"));
            }
        }
    }
    json!({"check": finding.check, "verdict": finding.verdict, "found": finding.found, "differs": differs})
}

/// Whether values are equal; numbers with a fraction, and lists of them, may differ by a factor of four.
fn is_alike(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| is_alike(one, other))
        }
        (Value::Number(one), Value::Number(other)) if one.is_f64() && other.is_f64() => {
            let (one, other) = (one.as_f64().unwrap_or(0.0), other.as_f64().unwrap_or(0.0));
            one.max(other) <= 4.0 * one.min(other)
        }
        _ => one == other,
    }
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(report) = saved_file::parse_report::<Report>(bytes) else { return };
    let rows = report.checks.iter().map(|finding| row(finding, &report.checks[..1]));
    for text in rows.map(|row| row.to_string()).chain([report.version, report.kernel]) {
        assert!(!text.contains(char::is_control), "{text:?} goes to a terminal");
    }
    let _ = Summary::of(&report.checks);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_told_and_figures_of_the_machine_are_not() {
        let here = Finding::warning("open", "slow", "")
            .with(json!({"page": 768, "open_ms": [90.5], "bus_id": "a", "rate": 3.5}));
        let there = Finding::good("open", "quick")
            .with(json!({"page": 32, "open_ms": [1.5], "bus_id": "b", "rate": 1.25}));
        let row = row(&here, &[there]);
        let differs = row["differs"].as_array().expect("a list");
        let words = [
            "software card: quick",
            "open_ms: [90.5]; software card: [1.5]",
            "page: 768; software card: 32",
        ];
        assert_eq!(differs.len(), words.len(), "{row:#}");
        for words in words {
            assert!(differs.iter().any(|line| line == words), "{row:#}");
        }
        assert_eq!(super::row(&here, &[])["differs"], json!([]), "nothing to compare with");
    }
}
