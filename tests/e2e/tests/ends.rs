//! What is left when something ends, on both stock UCXes: an interface with copies under way, a card
//! that was reset, an allocation among others. And memory on the very card that UCX names.

mod memory;

use e2e::{Device, SoftNode, Ucx, client};
use memory::Machine;

#[test]
fn copies_under_way_are_waited_for_when_an_interface_closes() {
    for ucx in Ucx::ALL {
        // Nothing is done before the interface closes.
        let machine = Machine::with("a Gaudi2 that takes its time", "gaudi2", 1, |node| {
            node.with("SOFT_GAUDI_LATENCY", "100000")
        });
        let end = machine.check(ucx, "closing").run().ok();
        assert!(end.stdout.contains("copies under way"), "{}", end.report());
    }
}

#[test]
fn a_card_that_was_reset_is_opened_again_when_its_memory_is_freed() {
    for ucx in Ucx::ALL {
        let machine = Machine::with("a Gaudi2 that is reset", "gaudi2", 1, |node| {
            node.with_faults("hlthunk_command_submission reset times=1")
        });
        let tool = machine.check(ucx, "lost").env("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n");
        let end = tool.run().ok();
        assert!(end.stdout.contains("opened again after its reset"), "{}", end.report());
    }
}

/// Put and get between processes are errors when a card is reset, five times over, with and without UCX's handling of errors;
/// new contexts in the same processes work each time, and no descriptor is left behind.
#[test]
fn after_resets_new_contexts_in_the_same_processes_work() {
    let reset = "hlthunk_command_submission reset after=300\n";
    for (lenient, op, mode) in [
        ("import", "put", "--peer-errors"),
        ("", "get", "--peer-errors"),
        ("import", "get", ""),
        ("", "put", ""),
    ] {
        let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
        let node = node.with("SOFT_GAUDI_LENIENT", lenient).with_faults(&reset.repeat(5));
        let words = format!("recover --count 5 {mode} --ops {op} --env 1:SOFT_GAUDI_FAULTS=no");
        let end = client(Ucx::V1_22, &Device::Software(node), &words).run().ok();
        assert_eq!(end.stdout.matches("works after 5 failures").count(), 2, "{}", end.report());
    }
}

/// The check can fail: without the reset, what it expects does not happen.
#[test]
fn an_expectation_that_fails_is_reported() {
    let end = Machine::one_card().check(Ucx::V1_22, "lost").run().refused();
    assert!(end.stdout.contains("FAIL  lost: the copy succeeded"), "{}", end.report());
    assert!(end.stdout.contains("1 passed, 2 failed"), "{}", end.report());
}

#[test]
fn the_memory_type_cache_has_no_holes_where_memory_was_freed() {
    for ucx in Ucx::ALL {
        Machine::one_card().check(ucx, "holes").run().ok();
    }
}

#[test]
fn memory_is_allocated_on_the_card_that_ucx_names() {
    for ucx in Ucx::ALL {
        Machine::eight_cards().check(ucx, "named").run().ok();
    }
}

/// The driver calls of a run, by name, as its record has them.
fn calls(ucx: Ucx, variables: &[(&str, &str)]) -> Vec<String> {
    let machine = Machine::new("a Gaudi2", "gaudi2", 1);
    let path = std::env::temp_dir().join(format!("e2e-ends-{}.trace", std::process::id()));
    let tool = machine.check(ucx, "where").env("UCX_GAUDI_TRACE", path.to_str().expect("text"));
    variables.iter().fold(tool, |tool, (name, value)| tool.env(name, value)).run().ok();
    let text = std::fs::read_to_string(&path).expect("a record");
    std::fs::remove_file(&path).expect("just read");
    let line = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect("JSON");
    let calls = text.lines().map(line).filter_map(|line| Some(line["call"].as_str()?.to_owned()));
    calls.collect()
}

#[test]
fn a_card_is_closed_with_the_last_memory_domain_unless_it_is_kept_open() {
    let count = |calls: &[String], name: &str| calls.iter().filter(|call| *call == name).count();
    let left_open = |calls: &[String]| {
        let opened = count(calls, "hlthunk_open") + count(calls, "hlthunk_open_control");
        opened - count(calls, "hlthunk_close")
    };
    for ucx in Ucx::ALL {
        let (closed, kept) = (calls(ucx, &[]), calls(ucx, &[("UCX_GAUDI_COPY_KEEP_OPEN", "1m")]));
        assert_eq!((left_open(&closed), left_open(&kept)), (0, 1), "{closed:?} {kept:?}");
        assert_eq!(count(&kept, "hlthunk_open"), 1, "{kept:?}");
    }
}
