//! `ucx-gaudi explain --pid`: which paths the bytes of a running process take.
//!
//! UCX does not reveal its choices to other processes. So the tool reads from the process's counters what was moved
//! (observed), and runs two processes of `ucp-check` with the same UCX and settings to learn what UCX would choose
//! (predicted). Those run on software cards, because the process uses its cards exclusively.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use stats_reader::Snapshot;
use ucp_protocols::Protocols;

use super::compare::{differences, print_differences};
use super::process::Process;
use super::{Memory, Operation, Step};
use crate::Context;
use crate::failure::{Exit, Failure};
use crate::output::{DIM, print_json, print_table, size, table};
use crate::saved_file;
use crate::ucp_check::UcpCheck;

/// The report about one process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) host: String,
    pub(super) pid: u32,
    command: String,
    pub(super) ucx: String,
    libucp: PathBuf,
    plugin: PathBuf,
    /// Whether endpoints have error handling, like NIXL's.
    nixl: bool,
    pub(super) settings: BTreeMap<String, String>,
    /// Counters that are not 0.
    observed: BTreeMap<String, u64>,
    /// Why it has no counters.
    not_observed: Option<String>,
    pub(super) predicted: Vec<Choice>,
    advice: Vec<String>,
}

/// A choice that UCX would make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Choice {
    pub(super) operation: String,
    pub(super) memories: String,
    pub(super) peer: Peer,
    /// Which side moves the data.
    who: String,
    pub(super) protocol: String,
    pub(super) transports: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Peer {
    SameNode,
    OtherNode,
}

/// All reports, as they are saved.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reports {
    pub(super) report: String,
    size: usize,
    pub(super) processes: Vec<Report>,
    differences: Vec<String>,
}

const OPERATIONS: [Operation; 4] = [Operation::Put, Operation::Get, Operation::Tag, Operation::Am];
const MEMORIES: [(Memory, Memory); 3] =
    [(Memory::Host, Memory::Gaudi), (Memory::Gaudi, Memory::Host), (Memory::Gaudi, Memory::Gaudi)];

/// Variables that choose among the process's cards, or name files that it writes. The prediction runs on other cards, and
/// must not write to the files of the process.
const NOT_PASSED_ON: [&str; 14] = [
    "GAUDI_MAPPING_TABLE",
    "HABANA_VISIBLE",
    "HLS_MODULE_ID",
    "UCX_GAUDI_COPY_DEVICE",
    "UCT_GAUDI_COPY_DEVICE",
    "UCX_GAUDI_TRACE",
    "UCX_STATS",
    "UCX_PROFILE",
    "SOFT_GAUDI_FAULTS",
    "SOFT_RDMA_STATS",
    "OMPI_COMM_WORLD",
    "SLURM_LOCALID",
    "PMI_LOCAL",
    "LOCAL_RANK",
];

/// Explains processes, and what differs between them.
pub(super) fn explain(
    context: &Context,
    pids: &[u32],
    len: usize,
    save: Option<&Path>,
) -> Result<Exit, Failure> {
    save.map(saved_file::check).transpose()?;
    let processes = pids.iter().map(|&pid| Process::look(pid)).collect::<Result<Vec<_>, _>>()?;
    let processes: Vec<Report> =
        processes.iter().map(|process| report(context, process, len)).collect::<Result<_, _>>()?;
    let differences = processes.windows(2).flat_map(|two| differences(&two[0], &two[1])).collect();
    let reports = Reports { report: String::from("explain"), size: len, processes, differences };
    if context.json {
        print_json(&reports);
    } else {
        reports.processes.iter().for_each(|report| report.print(len));
        print_differences(&reports.differences);
    }
    if let Some(file) = save {
        let text = serde_json::to_string_pretty(&reports).expect("representable in JSON");
        saved_file::replace(file, &(text + "\n"))?;
    }
    Ok(Exit::Fine)
}

fn report(context: &Context, process: &Process, len: usize) -> Result<Report, Failure> {
    let (observed, not_observed) = match stats_reader::read(process.pid) {
        Ok(snapshot) => (counted(&snapshot), None),
        Err(error) => (BTreeMap::new(), Some(error.to_string())),
    };
    let imports = match process.var("SOFT_GAUDI_LENIENT") {
        Some(list) => list.to_string_lossy().split(',').any(|word| word == "import"),
        None => observed.contains_key("ipc_handles_opened"),
    };
    let mut report = Report {
        host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        pid: process.pid,
        command: process.command.clone(),
        libucp: process.libucp.clone(),
        plugin: process.plugin.clone(),
        nixl: process.has_nixl,
        settings: process.settings().collect(),
        observed,
        not_observed,
        ..Report::default()
    };
    for peer in [Peer::SameNode, Peer::OtherNode] {
        let (ucx, protocols) = predict(context, process, len, peer, imports)?;
        report.ucx = ucx;
        for operation in OPERATIONS {
            for (source, destination) in MEMORIES {
                let title = operation.title(source, destination);
                let steps = super::steps(&protocols, &title, source, destination, len);
                let Some(Step { who, choice }) = steps.into_iter().next_back() else { continue };
                report.predicted.push(Choice {
                    operation: operation.word().to_owned(),
                    memories: format!("{}:{}", source.word(), destination.word()),
                    peer,
                    who: who.to_owned(),
                    protocol: choice.protocol,
                    transports: choice.transports,
                });
            }
        }
    }
    let has_ib = has_ib_module(&process.libucp);
    report.advice = report.find_advice(imports, has_ib);
    Ok(report)
}

fn counted(snapshot: &Snapshot) -> BTreeMap<String, u64> {
    let total = snapshot.total();
    let counted = total.iter().filter(|(_, value)| *value != 0);
    counted.map(|(counter, value)| (counter.name.clone(), value)).collect()
}

/// Whether this UCX has InfiniBand.
fn has_ib_module(libucp: &Path) -> bool {
    let modules = libucp.with_file_name("ucx");
    let names = std::fs::read_dir(modules).into_iter().flatten().flatten();
    names.into_iter().any(|file| file.file_name().to_string_lossy().starts_with("libuct_ib."))
}

/// Which UCX it is, and what it chooses with the settings of the process.
fn predict(
    context: &Context,
    process: &Process,
    len: usize,
    peer: Peer,
    imports: bool,
) -> Result<(String, Protocols), Failure> {
    let checker = UcpCheck::new(context, "explain")?;
    let operations = OPERATIONS.map(Operation::word).join(",");
    let memories =
        MEMORIES.map(|(source, to)| format!("{}:{}", source.word(), to.word())).join(",");
    let ucx = process.libucp.parent();
    let mut command = checker.pair(&operations, &memories, ucx);
    command.args(["--sizes", &len.to_string()]).args(process.has_nixl.then_some("--peer-errors"));
    let rows = checker.folder().join("rows");
    command.args(["--iters", "0", "--json"]).arg(&rows);
    command.env_clear();
    let passed_on = process.environment.iter().filter(|(name, _)| {
        let name = name.to_string_lossy();
        !NOT_PASSED_ON.iter().any(|start| name.starts_with(start))
    });
    command.envs(passed_on.map(|(name, value)| (name, value)));
    let node = format!("explain-{}", std::process::id());
    command.env("HL_THUNK_LIBRARY", context.prefix.soft_gaudi()?.join("libhl-thunk.so"));
    command.env("SOFT_GAUDI_NODE", &node).env("SOFT_GAUDI_DEVICES", "2");
    if let Some(generation) = generation(process) {
        command.env("SOFT_GAUDI_GENERATION", generation);
    }
    if process.var("SOFT_GAUDI_LENIENT").is_none() && imports {
        command.env("SOFT_GAUDI_LENIENT", "import");
    }
    command.env("SOFT_RDMA_DIR", checker.folder().join("rdma"));
    command.env("UCX_WARN_UNUSED_ENV_VARS", "n");
    if peer == Peer::OtherNode {
        let set = process.var("UCX_TLS").map(|list| list.to_string_lossy());
        command.env("UCX_TLS", between_nodes(set.as_deref()));
    }
    process.folder.iter().for_each(|folder| _ = command.current_dir(folder));
    let what = format!("the prediction for process {}", process.pid);
    let observed = super::observe(&checker, command, &what, ucx);
    remove_machine(&node);
    let protocols = observed?;
    Ok((version(&rows), protocols))
}

/// The generation of the machine's cards, in the software Gaudi's terms; a process on software cards has it in its environment.
fn generation(process: &Process) -> Option<&'static str> {
    if process.var("SOFT_GAUDI_NODE").is_some() {
        return None;
    }
    gaudi::runtime().discover().ok()?.first().map(|card| match card.generation {
        gaudi::Generation::Gaudi => "gaudi1",
        gaudi::Generation::Gaudi2 => "gaudi2",
        gaudi::Generation::Gaudi3 => "gaudi3",
    })
}

/// Which UCX it was, from the rows that `ucp-check` wrote.
fn version(rows: &Path) -> String {
    let text = std::fs::read_to_string(rows).unwrap_or_default();
    let rows: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    rows[0]["ucx"].as_str().unwrap_or("of unknown version").to_owned()
}

/// `UCX_TLS` without transports that only work within a node.
fn between_nodes(set: Option<&str>) -> String {
    const WITHIN: [&str; 9] =
        ["sm", "shm", "mm", "sysv", "posix", "cma", "knem", "xpmem", "gaudi_ipc"];
    match set.map(str::trim).filter(|set| !set.is_empty() && *set != "all") {
        None => String::from("^sm,gaudi_ipc"),
        Some(set) if set.starts_with('^') => format!("{set},sm,gaudi_ipc"),
        Some(set) => {
            let rest = set.split(',').map(str::trim).filter(|name| !WITHIN.contains(name));
            let rest: Vec<&str> = rest.collect();
            // UCX would take an empty list for "all".
            if rest.is_empty() { String::from("self") } else { rest.join(",") }
        }
    }
}

/// Removes what a software machine leaves in shared memory.
fn remove_machine(node: &str) {
    let shared = PathBuf::from("/dev/shm");
    let base = if shared.is_dir() { shared } else { std::env::temp_dir() };
    let user = rustix::process::geteuid().as_raw();
    let _ = std::fs::remove_dir_all(base.join(format!("soft-gaudi-{user}")).join(node));
}

/// Whether a list of `UCX_TLS` excludes a transport.
fn leaves_out(list: &str, transports: &[&str]) -> bool {
    let (negated, names) = list.strip_prefix('^').map_or((false, list), |names| (true, names));
    let mut names = names.split(',').map(str::trim);
    let named = names.any(|name| name == "all" || transports.contains(&name));
    named == negated
}

impl Report {
    pub(super) fn title(&self) -> String {
        let Report { command, pid, host, ucx, .. } = self;
        format!("{command} (pid {pid} on {host}): UCX {ucx} ({})", self.libucp.display())
    }

    fn observed(&self, name: &str) -> u64 {
        self.observed.get(name).copied().unwrap_or(0)
    }

    /// Choices for a peer.
    pub(super) fn choices(&self, peer: Peer) -> impl Iterator<Item = &Choice> {
        self.predicted.iter().filter(move |choice| choice.peer == peer)
    }

    /// Why UCX does not take the better path, and what to set.
    fn find_advice(&self, imports: bool, has_ib: bool) -> Vec<String> {
        let mut advice = Vec::new();
        let setting = |name: &str| self.settings.get(name).map(String::as_str);
        let over = |peer, words: &[&str]| {
            let mut choices = self.choices(peer);
            choices.any(|choice| {
                let text = format!("{} {}", choice.protocol, choice.transports);
                words.iter().any(|word| text.contains(word))
            })
        };
        let tls = setting("UCX_TLS").filter(|list| !list.is_empty());
        if !over(Peer::SameNode, &["gaudi_ipc"]) {
            advice.push(match tls.filter(|list| leaves_out(list, &["gaudi_ipc"])) {
                Some(list) => format!(
                    "same node: UCX_TLS={list} leaves gaudi_ipc out, so data is staged through host memory: add gaudi_ipc \
                     to it, or unset it"
                ),
                None => String::from(
                    "same node: gaudi_ipc is not used; UCX_LOG_LEVEL=info makes the plugin say why (share/doc/ucx-gaudi/docs/ipc.md)",
                ),
            });
        } else if !imports {
            advice.push(String::from(
                "same node: gaudi_ipc relays through shared host memory, because the driver does not import dma-bufs: there is \
                 nothing to set",
            ));
        }
        if !over(Peer::OtherNode, &["rc_", "dc_", "ud_", "rc/", "srd"]) {
            let why = match tls.filter(|list| {
                leaves_out(
                    list,
                    &["ib", "rc", "rc_v", "rc_verbs", "rc_mlx5", "rc_x", "dc", "dc_mlx5"],
                )
            }) {
                _ if !has_ib => String::from(
                    "this UCX has no module for InfiniBand: use one that has (share/doc/ucx-gaudi/docs/rdma.md)",
                ),
                Some(list) => format!("UCX_TLS={list} leaves HCAs out: add rc"),
                None => {
                    String::from("UCX sees no HCA here that is up: `ucx-gaudi doctor` shows HCAs")
                }
            };
            advice.push(format!("other node: no HCA moves the data: {why}"));
        }
        for (name, value) in [("UCX_IB_GPU_DIRECT_RDMA", "n"), ("UCX_GAUDI_COPY_DMABUF", "n")] {
            if let Some(set) = setting(name).filter(|set| set.starts_with(value)) {
                advice.push(format!(
                    "other node: {name}={set} keeps Gaudi memory from HCAs: unset it"
                ));
            }
        }
        for (peer, words) in [(Peer::SameNode, "same node"), (Peer::OtherNode, "other node")] {
            if over(peer, &["software emulation"]) {
                advice.push(format!(
                    "{words}: put or get is emulated by the peer's CPU; `ucx-gaudi run --tuned` has it use larger segments"
                ));
            }
        }
        for (counter, words) in [
            (
                "ipc_refused_unreachable",
                "keys of peers were not opened, because the owner could not be reached: another user, or other pid and network namespaces (share/doc/ucx-gaudi/docs/ipc.md)",
            ),
            (
                "ipc_keys_refused",
                "keys of peers were refused: of another host, boot, user or version of the plugin (share/doc/ucx-gaudi/docs/ipc.md)",
            ),
            (
                "pins_refused",
                "times host memory could not be pinned and went through bounce buffers: raise `ulimit -l`",
            ),
            ("dma_errors", "submissions to the card failed: UCX_LOG_LEVEL=warn shows them"),
        ] {
            let count = self.observed(counter);
            if count > 0 {
                advice.push(format!("observed: {count} {words}"));
            }
        }
        advice
    }

    fn print(&self, len: usize) {
        println!("{}", self.title());
        anstream::println!("{DIM}plugin {}{DIM:#}", self.plugin.display());
        let set = self.settings.iter().map(|(name, value)| format!("{name}={value}"));
        anstream::println!("{DIM}started with {}{DIM:#}", set.collect::<Vec<_>>().join(" "));
        println!("\nobserved, by its counters:");
        match &self.not_observed {
            Some(why) => println!("  nothing: {why}"),
            None => self.print_ways(),
        }
        let as_nixl = if self.nixl { ", with endpoints as NIXL makes them" } else { "" };
        println!(
            "\npredicted for {} by this UCX with these settings{as_nixl}, on software cards:",
            size(len as u64)
        );
        self.print_choices(None);
        println!();
        for line in &self.advice {
            println!("→ {line}");
        }
    }

    /// Prints what was moved, by path.
    fn print_ways(&self) {
        let mut shown = table(&["  way", "bytes", "operations"]);
        for (way, bytes, operations) in [
            ("host memory to card", "h2d_bytes", "h2d_operations"),
            ("card to host memory", "d2h_bytes", "d2h_operations"),
            ("within a card", "d2d_bytes", "d2d_operations"),
            ("between cards", "cross_card_bytes", "cross_card_operations"),
            ("for peers, by relay", "ipc_relay_bytes", "ipc_relay_requests"),
        ] {
            if self.observed(operations) > 0 {
                let count = self.observed(operations).to_string();
                shown.add_row([format!("  {way}"), size(self.observed(bytes)), count]);
            }
        }
        if shown.row_count() == 0 {
            println!("  no bytes were moved yet");
            return;
        }
        print_table(&shown);
        println!(
            "  peers' allocations imported: {}, leases granted to peers: {}, descriptors for HCAs and peers: {}",
            self.observed("ipc_handles_opened"),
            self.observed("ipc_broker_granted"),
            self.observed("dmabuf_descriptors"),
        );
    }

    pub(super) fn print_choices(&self, only: Option<Peer>) {
        let mut shown = table(&["  op", "memories", "peer", "protocol", "transports"]);
        for choice in
            self.predicted.iter().filter(|choice| only.is_none_or(|peer| choice.peer == peer))
        {
            shown.add_row([
                format!("  {}", choice.operation),
                choice.memories.clone(),
                String::from(match choice.peer {
                    Peer::SameNode => "same node",
                    Peer::OtherNode => "other node",
                }),
                choice.protocol.clone(),
                choice.transports.clone(),
            ]);
        }
        print_table(&shown);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn transports_within_a_node_are_left_out_however_the_list_is_written() {
        for (set, between) in [
            (None, "^sm,gaudi_ipc"),
            (Some("all"), "^sm,gaudi_ipc"),
            (Some("^ib"), "^ib,sm,gaudi_ipc"),
            (Some("rc,gaudi_cpy, gaudi_ipc"), "rc,gaudi_cpy"),
            (Some("sm"), "self"),
        ] {
            assert_eq!(between_nodes(set), between, "{set:?}");
        }
    }

    pub(in super::super) fn chosen(settings: &[(&str, &str)], same: &str, other: &str) -> Report {
        let text = |text: &str| text.to_owned();
        let choice = |peer, transports: &str| Choice {
            operation: text("put"),
            memories: text("gaudi:gaudi"),
            peer,
            who: text("initiator"),
            protocol: text("zero-copy"),
            transports: text(transports),
        };
        Report {
            settings: settings.iter().map(|(name, value)| (text(name), text(value))).collect(),
            predicted: vec![choice(Peer::SameNode, same), choice(Peer::OtherNode, other)],
            ..Report::default()
        }
    }

    #[test]
    fn advice_names_the_cause() {
        let set = |list| [("UCX_TLS", list)];
        for (report, imports, has_ib, words) in [
            (chosen(&[], "gaudi_ipc/gaudi_ipc", "rc_mlx5/mlx5_0"), true, true, &[][..]),
            (
                chosen(&[], "gaudi_ipc/gaudi_ipc", "rc_mlx5/mlx5_0"),
                false,
                true,
                &["nothing to set"],
            ),
            (
                chosen(&set("^gaudi_ipc"), "sysv", "rc_verbs/x"),
                true,
                true,
                &["UCX_TLS=^gaudi_ipc leaves gaudi_ipc"],
            ),
            (
                chosen(&set("sm,gaudi_ipc"), "gaudi_ipc", "tcp/lo"),
                true,
                true,
                &["UCX_TLS=sm,gaudi_ipc leaves HCAs out"],
            ),
            (chosen(&[], "gaudi_ipc", "tcp/lo"), true, false, &["no module for InfiniBand"]),
            (chosen(&[], "sysv", "tcp/lo"), true, true, &["not used", "no HCA"]),
        ] {
            let advice = report.find_advice(imports, has_ib);
            assert_eq!(advice.len(), words.len(), "{advice:?}");
            assert!(advice.iter().zip(words).all(|(line, word)| line.contains(word)), "{advice:?}");
        }
        let mut refused = chosen(&[], "gaudi_ipc", "rc_verbs/x");
        refused.observed.insert(String::from("ipc_refused_unreachable"), 3);
        assert!(refused.find_advice(true, true)[0].starts_with("observed: 3 keys"));
    }
}
