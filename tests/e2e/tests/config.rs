//! Configuration: every variable that `ucx_info` lists for us changes something, and the test below
//! knows what.

mod memory;

use std::collections::{BTreeMap, BTreeSet};

use e2e::{Device, Finished, Perftest, Ucx, client, stock};
use memory::Machine;

/// Bus ids of the software Gaudi's cards.
const CARD_0: &str = "memory lies on card 0000:33:00.0";
const CARD_1: &str = "memory lies on card 0000:4d:00.0";
const CARD_3: &str = "memory lies on card 0000:34:00.0";

/// How the effect of a variable is shown: what the client prints with and without it.
struct Effect {
    variable: &'static str,
    value: &'static str,
    /// The client's memory check that shows it.
    check: &'static str,
    /// Printed with the variable set, and not without.
    shows: &'static str,
    /// More variables, set in both runs.
    with: &'static [(&'static str, &'static str)],
    /// Whether the run with the variable set must succeed.
    succeeds: bool,
    /// Faults of the driver, in both runs.
    faults: &'static str,
}

/// A variable, a value, a check, and what the check shows with them.
const fn effect(
    variable: &'static str,
    value: &'static str,
    check: &'static str,
    shows: &'static str,
) -> Effect {
    Effect { variable, value, check, shows, with: &[], succeeds: true, faults: "" }
}

/// Without this driver call there is nothing to export with, unless the other one is asked for.
const NO_MAPPED_EXPORT: &str = "hlthunk_device_mapped_memory_export_dmabuf_fd fail:EINVAL times=0";

/// A row for each variable. The last three of each transport are UCX's own, which all have.
#[rustfmt::skip] // a table
const EFFECTS: &[Effect] = &[
    effect("UCX_GAUDI_COPY_DEVICE", "1", "where", CARD_1),
    effect("UCX_GAUDI_COPY_DMABUF", "no", "attributes", "gaudi_copy does not offer dma-bufs"),
    effect("UCX_GAUDI_COPY_ENABLE_MAPPED_DMABUF", "no", "churn --cycles 1", "1 exports:").faults(NO_MAPPED_EXPORT),
    effect("UCX_GAUDI_COPY_REG_DMABUF", "y", "attributes", "gaudi_copy asks UCX for dma-bufs of others"),
    // Without the cache: with it, UCX is told what finding pinned memory costs.
    effect("UCX_GAUDI_COPY_REG_COST", "31us", "attributes", "gaudi_copy registers in 31000 ns")
        .with(&[("UCX_GAUDI_COPY_ENABLE_RCACHE", "no")]),
    // By default it is done without, at info level; rcache.rs has the rest.
    effect("UCX_GAUDI_COPY_ENABLE_RCACHE", "yes", "attributes", "UCX_GAUDI_COPY_ENABLE_RCACHE=yes, but UCX's memory events")
        .with(&[("UCX_MEM_EVENTS", "n")]).fails(),
    effect("UCX_GAUDI_COPY_BW", "auto,d2h:5GBs", "transport", "gaudi_cpy get_zcopy host:gaudi at 5.37 GB/s"),
    effect("UCX_GAUDI_COPY_LATENCY", "short:500ns,zcopy:123us", "transport", "latency 123000 ns"),
    effect("UCX_GAUDI_COPY_OVERHEAD", "321us", "transport", "overhead 321000 ns"),
    // By default the process ends where the error was; if not, the client is told of it.
    effect("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n", "register", "ucp-check: uct_ep_put_zcopy: ")
        .faults("transfer fail:EIO times=0").fails(),
    // A machine without any NIC, whatever this one has.
    effect("UCX_GAUDI_COPY_ENABLE_NIC_SCALE_OUT", "yes", "where", "no active NIC is near")
        .with(&[("GAUDI_SYSFS_ROOT", "/nonexistent")]),
    effect("UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS", "try", "where", "may be mapped").with(&[("UCX_LOG_LEVEL", "info")]),
    effect("UCX_GAUDI_COPY_MEM_HOOKS", "yes", "where", "maps on a Gaudi by itself is noticed").with(&[("UCX_LOG_LEVEL", "info")]),
    effect("UCX_GAUDI_COPY_LOG_LEVEL", "info", "where", "gaudi_copy uses ").with(&[("UCX_LOG_LEVEL", "warn")]),
    // By default it is tried again until the rule is used up.
    effect("UCX_GAUDI_COPY_OPEN_TIMEOUT", "0s", "where", "hlthunk_open: Resource temporarily unavailable")
        .with(&[("UCX_GAUDI_COPY_DEVICE", "0")]).faults("hlthunk_open fail:EAGAIN times=4").fails(),
    effect("UCX_GAUDI_TRACE", "/dev/null", "where", "driver calls are recorded in /dev/null").with(&[("UCX_LOG_LEVEL", "info")]),
    effect("UCX_GAUDI_CPY_ALLOC", "heap", "transport", "gaudi_cpy gets host memory by heap"),
    effect("UCX_GAUDI_CPY_MAX_NUM_EPS", "77", "transport", "gaudi_cpy takes 77 endpoints"),
    // The level of messages about peers that fail. Our endpoints lead to ourselves and have no such
    // message, nor have those of UCX's own copy transports; UCX reads the variable all the same.
    effect("UCX_GAUDI_CPY_FAILURE", "nonsense", "transport", "Invalid value for FAILURE").fails(),
    effect("UCX_GAUDI_IPC_ALLOC", "heap", "transport --component gaudi_ipc", "gaudi_ipc gets host memory by heap"),
    effect("UCX_GAUDI_IPC_MAX_NUM_EPS", "77", "transport --component gaudi_ipc", "gaudi_ipc takes 77 endpoints"),
    effect("UCX_GAUDI_GDR_ALLOC", "heap", "transport --component gaudi_gdr", "gaudi_gdr gets host memory by heap"),
    effect("UCX_GAUDI_GDR_MAX_NUM_EPS", "77", "transport --component gaudi_gdr", "gaudi_gdr takes 77 endpoints"),
    effect("UCX_GAUDI_GDR_FAILURE", "nonsense", "transport --component gaudi_gdr", "Invalid value for FAILURE").fails(),
];

impl Effect {
    const fn with(self, with: &'static [(&'static str, &'static str)]) -> Effect {
        Effect { with, ..self }
    }

    const fn faults(self, faults: &'static str) -> Effect {
        Effect { faults, ..self }
    }

    const fn fails(self) -> Effect {
        Effect { succeeds: false, ..self }
    }

    fn run(&self, ucx: Ucx, variables: &[(&str, &str)]) -> Finished {
        let machine = Machine::with("Gaudi2 with eight cards", "gaudi2", 8, |node| {
            if self.faults.is_empty() { node } else { node.with_faults(self.faults) }
        });
        machine.check(ucx, self.check).envs(self.with).envs(variables).run()
    }

    fn is_shown(&self, end: &Finished) -> bool {
        end.text().contains(self.shows)
    }
}

/// Where memory of a Gaudi2 with eight cards lies, with these variables.
fn whereabouts(ucx: Ucx, variables: &[(&str, &str)]) -> Finished {
    Machine::eight_cards().check(ucx, "where").envs(variables).run()
}

/// The variables of ours that `ucx_info -c -f` lists.
fn listed() -> BTreeSet<String> {
    let machine = Machine::eight_cards();
    let end = stock("ucx_info", &machine.device, "-c -f").run().ok();
    let names = end.stdout.lines().filter_map(|line| line.split_once('=')).map(|(name, _)| name);
    names.filter(|name| name.starts_with("UCX_GAUDI_")).map(str::to_owned).collect()
}

/// Variables whose effect another file of these tests shows.
const ELSEWHERE: &[(&str, &str)] = &[
    ("UCX_GAUDI_COPY_ABORT_ON_ERROR", "faults.rs"),
    ("UCX_GAUDI_IPC_CACHE_MAX_REGIONS", "ipc.rs"),
    ("UCX_GAUDI_IPC_CACHE_MAX_SIZE", "ipc.rs"),
    ("UCX_GAUDI_IPC_BW", "ipc.rs"),
    ("UCX_GAUDI_IPC_LAT", "ipc.rs"),
    ("UCX_GAUDI_IPC_OVERHEAD", "ipc.rs"),
    ("UCX_GAUDI_IPC_FAILURE", "ipc.rs"),
    ("UCX_GAUDI_COPY_ADOPT", "hooks.rs"),
    ("UCX_GAUDI_COPY_FLUSH_PEER_WRITES", "ib.rs"),
    ("UCX_GAUDI_COPY_FRAMEWORK", "frameworks.rs"),
    ("UCX_GAUDI_COPY_EXPLAIN_FAULTS", "cpu_access.rs"),
    ("UCX_GAUDI_COPY_KEEP_OPEN", "ends.rs"),
    ("UCX_GAUDI_COPY_CLEAR_MEMORY", "ipc.rs"),
    ("UCX_GAUDI_COPY_RCACHE_MAX_REGIONS", "rcache.rs"),
    ("UCX_GAUDI_COPY_RCACHE_MAX_SIZE", "rcache.rs"),
];

#[test]
fn every_listed_variable_has_a_row_here_and_every_row_is_listed() {
    let rows: BTreeSet<String> = EFFECTS.iter().map(|row| row.variable.to_owned()).collect();
    assert_eq!(rows.len(), EFFECTS.len(), "a variable has two rows");
    let mut rows = rows;
    for (variable, file) in ELSEWHERE {
        let path = format!("{}/tests/{file}", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(&path).expect("a file of these tests");
        assert!(text.contains(variable), "{file} says nothing of {variable}");
        rows.insert((*variable).to_owned());
    }
    let listed = listed();
    let unknown: Vec<_> = listed.difference(&rows).collect();
    assert!(unknown.is_empty(), "listed, but no row says what they do: {unknown:?}");
    let gone: Vec<_> = rows.difference(&listed).collect();
    assert!(gone.is_empty(), "not listed any more: {gone:?}");
}

#[test]
fn every_variable_changes_behaviour() {
    for ucx in Ucx::ALL {
        let mut defaults = BTreeMap::new();
        for row in EFFECTS {
            let what = format!("{}={}, UCX {}", row.variable, row.value, ucx.name());
            let setting = (row.check, row.with, row.faults);
            let without = defaults.entry(setting).or_insert_with(|| row.run(ucx, &[]));
            assert!(!row.is_shown(without), "{what}: shown without it: {}", without.report());
            let with = row.run(ucx, &[(row.variable, row.value)]);
            assert!(row.is_shown(&with), "{what}: no effect: {}", with.report());
            assert!(!with.crashed(), "{what}: {}", with.report());
            assert_eq!(with.success(), row.succeeds, "{what}: {}", with.report());
        }
    }
}

/// `UCT_GAUDI_COPY_…` is the spelling of this product's predecessors.
fn aliased(variable: &str) -> Option<String> {
    variable.strip_prefix("UCX_GAUDI_COPY_").map(|name| format!("UCT_GAUDI_COPY_{name}"))
}

#[test]
fn the_alias_does_what_the_variable_does() {
    for ucx in Ucx::ALL {
        let mut tried = 0;
        for row in EFFECTS {
            let Some(alias) = aliased(row.variable) else { continue };
            let end = row.run(ucx, &[(&alias, row.value)]);
            assert!(row.is_shown(&end), "{alias}: {}", end.report());
            assert_eq!(end.success(), row.succeeds, "{alias}: {}", end.report());
            tried += 1;
        }
        assert!(tried >= 5, "{tried} aliases");
    }
}

#[test]
fn of_two_spellings_the_one_of_ucx_wins() {
    for ucx in Ucx::ALL {
        let run = |variables: &[(&str, &str)]| whereabouts(ucx, variables).ok();
        let end = run(&[("UCX_GAUDI_COPY_DEVICE", "3"), ("UCT_GAUDI_COPY_DEVICE", "1")]);
        assert!(end.stdout.contains(CARD_3), "{}", end.report());
        let end =
            run(&[("UCX_GAUDI_COPY_LOG_LEVEL", "error"), ("UCT_GAUDI_COPY_LOG_LEVEL", "info")]);
        assert!(!end.stdout.contains("gaudi_copy uses"), "{}", end.report());
    }
}

/// What a program sets through UCX's API is stronger than the environment, whatever the spelling.
#[test]
fn what_the_program_sets_wins() {
    for variable in ["UCX_GAUDI_COPY_DEVICE", "UCT_GAUDI_COPY_DEVICE"] {
        let machine = Machine::eight_cards();
        let tool = machine.check(Ucx::V1_22, "where --set GAUDI_COPY_DEVICE=1");
        let end = tool.env(variable, "3").run().ok();
        assert!(end.stdout.contains(CARD_1), "{variable}: {}", end.report());
    }
}

#[test]
fn the_card_is_chosen_by_index_module_id_and_bus_id() {
    for ucx in Ucx::ALL {
        for (value, card) in [
            ("", CARD_0),
            ("0", CARD_0),
            ("1", CARD_1),
            ("3", CARD_3),
            ("module:2", CARD_0),
            ("module:0", CARD_1),
            ("module:3", CARD_3),
            ("0000:34:00.0", CARD_3),
            ("34:00.0", CARD_3),
            ("0000:4D:00.0", CARD_1),
        ] {
            let end = whereabouts(ucx, &[("UCX_GAUDI_COPY_DEVICE", value)]).ok();
            assert!(end.stdout.contains(card), "{value:?}: {}", end.report());
        }
    }
}

/// Variables of the launcher and of the container tools.
#[test]
fn the_launchers_variables_are_respected() {
    for ucx in Ucx::ALL {
        for (variables, card) in [
            (&[("HLS_MODULE_ID", "0")][..], CARD_1),
            (&[("HLS_MODULE_ID", "0"), ("UCX_GAUDI_COPY_DEVICE", "3")], CARD_3),
            (&[("HABANA_VISIBLE_MODULES", "3,0")], CARD_1),
            (&[("HABANA_VISIBLE_MODULES", "0")], CARD_1),
            (&[("HABANA_VISIBLE_MODULES", "all")], CARD_0),
        ] {
            let end = whereabouts(ucx, variables).ok();
            assert!(end.stdout.contains(card), "{variables:?}: {}", end.report());
        }
    }
}

/// A table that renumbers: its indices count, and cards it leaves out do not exist.
#[test]
fn the_mapping_table_decides_what_an_index_means() {
    let table = r#"[{"index":0,"module_id":3,"bus_id":"0000:34:00.0"},
                    {"index":5,"module_id":0,"bus_id":"0000:4d:00.0"}]"#;
    for ucx in Ucx::ALL {
        let run = |device| {
            whereabouts(ucx, &[("GAUDI_MAPPING_TABLE", table), ("UCX_GAUDI_COPY_DEVICE", device)])
        };
        for (device, card) in [("", CARD_3), ("0", CARD_3), ("5", CARD_1), ("module:0", CARD_1)] {
            let end = run(device).ok();
            assert!(end.stdout.contains(card), "{device:?}: {}", end.report());
        }
        let end = run("1").refused();
        assert!(end.says(&["WARN", "UCX_GAUDI_COPY_DEVICE=1"]), "{}", end.report());
    }
}

/// A table that makes no sense is quoted, and nothing is used in its place.
#[test]
fn a_broken_mapping_table_is_quoted_and_means_no_gaudi() {
    for (table, quoted) in [
        ("index 0 is the first", "index 0 is the first"),
        (r#"[{"index":0,"module_id":0,"bus_id":"34:zz"}]"#, "34:zz"),
        (r#"[{"index":0,"module_id":0,"bus_id":"0000:77:00.0"}]"#, "0000:77:00.0"),
        (
            r#"[{"index":4,"module_id":3,"bus_id":"0000:34:00.0"},
                {"index":4,"module_id":0,"bus_id":"0000:4d:00.0"}]"#,
            "0000:4d:00.0",
        ),
    ] {
        for ucx in Ucx::ALL {
            let end = whereabouts(ucx, &[("GAUDI_MAPPING_TABLE", table)]).refused();
            assert!(end.says(&["WARN", "GAUDI_MAPPING_TABLE", quoted]), "{}", end.report());
            assert!(!end.stdout.contains("memory lies on"), "{table}: {}", end.report());
        }
        host_traffic_runs_with("GAUDI_MAPPING_TABLE", table);
    }
}

#[track_caller]
fn host_traffic_runs_with(variable: &str, value: &str) {
    let machine = Machine::eight_cards();
    Perftest::on(&machine.device, "tag_bw", 65536).both(|tool| tool.env(variable, value)).works();
}

/// What names no card: a warning with variable and value, no Gaudi, and host traffic unharmed.
#[test]
fn a_card_that_is_not_there_is_named_in_a_warning() {
    for value in ["8", "module:9", "0000:99:00.0", "gaudi0", "-1", "module:", "nonsense"] {
        for ucx in Ucx::ALL {
            let end = whereabouts(ucx, &[("UCX_GAUDI_COPY_DEVICE", value)]).refused();
            let named = end.says(&["WARN", "UCX_GAUDI_COPY_DEVICE", value]);
            assert!(named, "{value}: {}", end.report());
        }
    }
    for value in ["8", "nonsense"] {
        let machine = Machine::eight_cards();
        let tool = stock("ucx_info", &machine.device, "-u t -w");
        let end = tool.env("UCX_GAUDI_COPY_DEVICE", value).run().ok();
        assert!(!end.stdout.contains("gaudi_cpy/"), "{value}: {}", end.report());
        host_traffic_runs_with("UCX_GAUDI_COPY_DEVICE", value);
    }
}

/// A card that another process has: without a choice the next one serves, with one it is an error
/// that names the card and its owner.
#[test]
fn a_busy_card_is_passed_over_or_named() {
    let machine = Machine::eight_cards();
    let holder = machine.check(Ucx::V1_22, "hold").start();
    assert!(holder.wait_until(|_| machine.cards_opened() == 1), "the card was not taken");
    for ucx in Ucx::ALL {
        let end = machine.check(ucx, "where").run().ok();
        assert!(end.stdout.contains(CARD_1), "{}", end.report());
        let end = machine.check(ucx, "where").env("UCX_GAUDI_COPY_DEVICE", "0").run().refused();
        let owner = format!("pid {}", holder.id());
        let named = end.says(&["ERROR", "0000:33:00.0", "DEVICE_BUSY", &owner]);
        assert!(named, "{}", end.report());
    }
}

#[test]
fn log_level_of_our_own_hides_and_shows_our_lines_only() {
    for ucx in Ucx::ALL {
        let run = |ours: &str| {
            whereabouts(ucx, &[("UCX_GAUDI_COPY_DEVICE", "99"), ("UCX_GAUDI_COPY_LOG_LEVEL", ours)])
        };
        let (loud, quiet) = (run("inherit"), run("error"));
        let [warns, silent] =
            [&loud, &quiet].map(|end| end.says(&["WARN", "UCX_GAUDI_COPY_DEVICE"]));
        assert!(warns && !silent, "{}\n{}", loud.report(), quiet.report());
        // Ours at debug level, UCX's stay as they are.
        let levels = [("UCX_LOG_LEVEL", "warn"), ("UCX_GAUDI_COPY_LOG_LEVEL", "trace")];
        let end = whereabouts(ucx, &levels).ok();
        let lines = end.stdout.lines();
        let debug: Vec<&str> =
            lines.filter(|line| line.contains("DEBUG") || line.contains("INFO")).collect();
        assert!(!debug.is_empty(), "{}", end.report());
        let foreign: Vec<_> = debug.iter().filter(|line| !line.contains("ucx-gaudi")).collect();
        assert!(foreign.is_empty(), "lines of others: {foreign:#?}");
    }
}

/// Variables of ours in which any text makes sense, or that name a card.
const TEXTS: [&str; 2] = ["UCX_GAUDI_COPY_DEVICE", "UCX_GAUDI_TRACE"];
/// Variables of ours that UCX gives every transport, and reads by itself.
const OF_UCX: [&str; 3] = ["_ALLOC", "_FAILURE", "_MAX_NUM_EPS"];

/// A typing error is one warning with what is expected, and does not cost the card.
#[test]
fn values_that_are_not_understood_are_warned_of_once_and_the_default_is_used() {
    let parsed: Vec<String> = listed()
        .into_iter()
        .filter(|name| !TEXTS.contains(&name.as_str()))
        .filter(|name| !OF_UCX.iter().any(|end| name.ends_with(end)))
        .collect();
    assert!(parsed.len() > 20, "{parsed:?}");
    let aliases: Vec<String> = parsed.iter().filter_map(|name| aliased(name)).collect();
    assert!(aliases.len() > 15, "{aliases:?}");
    for ucx in Ucx::ALL {
        for names in [&parsed, &aliases] {
            let banana: Vec<(&str, &str)> = names.iter().map(|name| (&**name, "banana")).collect();
            let words = "loopback --ops tag --sizes 8";
            let tool = client(ucx, &Device::cards(1), words).envs(&banana);
            // So that no line of the client comes in between.
            let end = tool.env("UCX_LOG_FILE", "stderr").run().ok();
            for name in names {
                let warning = format!("{name}=banana is not understood");
                let text = end.text();
                let lines = text.lines().filter(|line| line.contains(&warning));
                assert_eq!(lines.count(), 1, "{name}: {}", end.report());
            }
            assert!(!end.says(&[" ERROR "]), "{}", end.report());
        }
    }
}

#[test]
fn what_is_expected_of_a_variable_is_in_the_warning() {
    for (name, value, expected) in [
        ("GAUDI_COPY_DMABUF", "perhaps", "the default, try, is used; expected: <yes|no|try>"),
        ("GAUDI_COPY_ADOPT", "try", "the default, n, is used; expected: <y|n>"),
        ("GAUDI_COPY_LOG_LEVEL", "loud", "is used; expected: [inherit|error|warn|diag|info|"),
        ("GAUDI_COPY_REG_COST", "cheap", "is used; expected: time value: <number>[s|us|ms|ns]"),
        ("GAUDI_COPY_BW", "h2h:1GBs", "where key is one of [h2d,d2h,d2d] and value is: bandwidth"),
        ("GAUDI_COPY_RCACHE_MAX_SIZE", "big", "is used; expected: memory units: <number>[b|kb|"),
        ("GAUDI_COPY_RCACHE_MAX_REGIONS", "many", "is used; expected: unsigned integer"),
    ] {
        for spelling in ["UCX_", "UCT_"] {
            let name = format!("{spelling}{name}");
            let end = whereabouts(Ucx::V1_22, &[(&name, value)]).ok();
            let setting = format!("{name}={value} is not understood");
            assert!(end.says(&["WARN", &setting, expected]), "{}", end.report());
            assert!(!end.says(&[" ERROR "]), "{}", end.report());
            assert!(end.stdout.contains(CARD_0), "{}", end.report());
        }
    }
}

/// Both names keep their card, the one that was chosen, and `ucx_info` shows what is used.
#[test]
fn a_typing_error_changes_neither_the_card_nor_the_listing() {
    let machine = Machine::eight_cards();
    let wrong = [("UCX_GAUDI_COPY_DMABUF", "banana"), ("UCX_GAUDI_COPY_DEVICE", "3")];
    let end = machine.check(Ucx::V1_22, "where").envs(&wrong).run().ok();
    assert!(end.stdout.contains(CARD_3), "{}", end.report());
    let end = stock("ucx_info", &machine.device, "-d -c").envs(&wrong).run().ok();
    for shown in ["gaudi_cpy", "gaudi_gdr", "gaudi_ipc", "UCX_GAUDI_COPY_DMABUF=try"] {
        assert!(end.stdout.contains(shown), "{shown}: {}", end.report());
    }
}

/// `yes` where a card has no register blocks is an error, `try` a line at info level.
#[test]
fn register_blocks_can_be_asked_for_tried_and_left_alone() {
    const NAME: &str = "UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS";
    for ucx in Ucx::ALL {
        let run = |generation, value| {
            let machine = Machine::new("one card", generation, 1);
            machine.check(ucx, "where").env(NAME, value).env("UCX_LOG_LEVEL", "info").run()
        };
        for (value, shown) in [("yes", true), ("try", true), ("no", false)] {
            let end = run("gaudi2", value).ok();
            let said = end.says(&["INFO", "register blocks", "may be mapped"]);
            assert_eq!(said, shown, "{}", end.report());
        }
        let end = run("gaudi1", "try").ok();
        assert!(end.says(&["INFO", "no register blocks", "Gaudi"]), "{}", end.report());
        let end = run("gaudi1", "no").ok();
        assert!(!end.says(&["register blocks"]), "{}", end.report());
        let end = run("gaudi1", "yes").refused();
        assert!(end.says(&["ERROR", NAME, "no register blocks"]), "{}", end.report());
    }
}
