//! What differs between processes that communicate: on one node, or in reports from two nodes.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::running::{Choice, Peer, Report, Reports};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::print_json;
use crate::saved_file;

/// Compares saved reports of two nodes.
pub(super) fn compare(context: &Context, files: &[PathBuf]) -> Result<Exit, Failure> {
    let reports = files.iter().map(|file| read(file)).collect::<Result<Vec<Reports>, _>>()?;
    let [one, other] = &reports[..] else {
        return Err(Failure::unable("two reports are compared", "write --compare FILE FILE"));
    };
    let pairs = one.processes.iter().flat_map(|a| other.processes.iter().map(move |b| (a, b)));
    let found: Vec<String> = pairs.flat_map(|(a, b)| differences(a, b)).collect();
    if context.json {
        print_json(&serde_json::json!({"differences": found}));
    } else {
        for report in one.processes.iter().chain(&other.processes) {
            println!("{}", report.title());
            report.print_choices(Some(Peer::OtherNode));
        }
        print_differences(&found);
    }
    Ok(if found.is_empty() { Exit::Fine } else { Exit::Problem })
}

fn read(file: &Path) -> Result<Reports, Failure> {
    let shown = file.display();
    let read: Reports = saved_file::read_report(file).map_err(|why| {
        let what = format!("{shown} is no report of `explain --pid`: {why}");
        Failure::unable(what, "write one with `ucx-gaudi explain --pid PID --save FILE`")
    })?;
    if read.report != "explain" {
        let what = format!("{shown} is a report of {}", read.report);
        return Err(Failure::unable(
            what,
            "give files of `ucx-gaudi explain --pid PID --save FILE`",
        ));
    }
    Ok(read)
}

pub(super) fn print_differences(differences: &[String]) {
    for difference in differences {
        println!("≠ {difference}");
    }
}

/// Properties that two communicating processes should share, and that differ.
pub(super) fn differences(a: &Report, b: &Report) -> Vec<String> {
    let name = |report: &Report| format!("{} on {}", report.pid, report.host);
    let (one, other) = (name(a), name(b));
    let mut found = Vec::new();
    if a.ucx != b.ucx {
        found.push(format!("UCX: {one} has {}, {other} has {}", a.ucx, b.ucx));
    }
    let names: BTreeSet<&String> = a.settings.keys().chain(b.settings.keys()).collect();
    // Paths and bus ids differ between hosts, which means nothing.
    let own = [
        "UCX_PLUGIN_PATH",
        "LD_",
        "SOFT_",
        "HL_",
        "HLS_",
        "HABANA_",
        "GAUDI_",
        "UCX_LOG",
        "UCX_GAUDI_COPY_DEVICE",
    ];
    for setting in names.into_iter().filter(|name| !own.iter().any(|start| name.starts_with(start)))
    {
        let (mine, theirs) = (a.settings.get(setting), b.settings.get(setting));
        if mine != theirs {
            let shown = |value: Option<&String>| {
                value.map_or(String::from("nothing"), |value| format!("{value:?}"))
            };
            found.push(format!(
                "{setting}: {one} has {}, {other} has {}",
                shown(mine),
                shown(theirs)
            ));
        }
    }
    let same_host = a.host == b.host;
    for mine in a.choices(if same_host { Peer::SameNode } else { Peer::OtherNode }) {
        let fits = |it: &&Choice| {
            (&it.operation, &it.memories, it.peer) == (&mine.operation, &mine.memories, mine.peer)
        };
        let Some(theirs) = b.predicted.iter().find(fits) else { continue };
        if (&mine.protocol, &mine.transports) != (&theirs.protocol, &theirs.transports) {
            found.push(format!(
                "{} {}: {one} would use {} over {}, {other} {} over {}",
                mine.operation,
                mine.memories,
                mine.protocol,
                mine.transports,
                theirs.protocol,
                theirs.transports
            ));
        }
    }
    found
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(bytes: &[u8]) {
    let Ok(read) = saved_file::parse_report::<Reports>(bytes) else { return };
    for report in &read.processes {
        let found = differences(report, &read.processes[0]);
        for text in found.iter().chain([&report.title()]) {
            assert!(!text.contains(char::is_control), "{text:?} goes to a terminal");
        }
        assert!(differences(report, report).is_empty() || !report.predicted.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::super::running::tests::chosen;
    use super::*;

    #[test]
    fn what_differs_between_two_nodes_is_named() {
        let one = chosen(&[("UCX_TLS", "rc"), ("LD_PRELOAD", "/a")], "gaudi_ipc", "rc_verbs/x");
        let mut other = chosen(&[("LD_PRELOAD", "/b")], "gaudi_ipc", "tcp/y");
        other.host = String::from("second");
        let found = differences(&one, &other).join("; ");
        assert!(found.contains("UCX_TLS") && found.contains("tcp/y"), "{found}");
        assert!(!found.contains("LD_PRELOAD"), "{found}");
        assert_eq!(differences(&one, &one), Vec::<String>::new());
    }
}
