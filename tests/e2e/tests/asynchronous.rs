//! Copies that take their time: the software card does nothing inside the calls that submit or wait
//! (`SOFT_GAUDI_LATENCY`), as a real one does not. Every protocol of UCX then runs on copies that are
//! still under way when it goes on, and sleeping workers have something to sleep for.

use e2e::{Device, SoftNode, Ucx, client};

fn node(latency_us: u32) -> SoftNode {
    SoftNode::unique()
        .with("SOFT_GAUDI_DEVICES", "2")
        .with("SOFT_GAUDI_LATENCY", &latency_us.to_string())
}

/// Runs the client to its end; it has to print these words.
#[track_caller]
fn passes(ucx: Ucx, node: SoftNode, arguments: &str, says: &str) -> String {
    let client = client(ucx, &Device::Software(node), arguments);
    let end = client.env("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n").run().ok();
    assert!(end.stdout.contains(says), "{}", end.report());
    end.stdout
}

#[test]
fn every_operation_and_memory_pair_and_sleeping_workers() {
    for ucx in Ucx::ALL {
        for run in ["pair --plain", "wakeup"] {
            let arguments = format!("{run} --sizes 0,1,4K,64K+1,1M+3");
            passes(ucx, node(300), &arguments, " passed, 0 failed");
        }
    }
}

/// `asleep` fails if waiting takes more than a dozen calls per copy; a worker that cannot be armed
/// while a copy runs makes thousands.
#[test]
fn a_worker_with_nothing_but_a_copy_under_way_sleeps_until_it_is_done() {
    for ucx in Ucx::ALL {
        let arguments = "asleep --slow --count 4 --sizes 8,4K,64K,1M+3,8M";
        let said = passes(ucx, node(20_000), arguments, "progress");
        assert_eq!(said.lines().count(), 6, "a line for each size\n{said}");
    }
}

/// Without a latency small copies are over when the call returns: no event is missed, none is needed.
#[test]
fn copies_that_are_over_at_once_need_no_sleep() {
    let said = passes(Ucx::V1_22, node(0), "asleep --count 4 --sizes 8,4K,64K", "progress");
    assert_eq!(said.lines().count(), 4, "{said}");
}

#[test]
fn several_threads_on_one_worker() {
    let arguments = "threads --plain --count 4 --sizes 1,4K,64K+1,1M+3";
    passes(Ucx::V1_22, node(300), arguments, " passed, 0 failed");
}

/// Pieces, fences, flushes, more copies than there is room for, and an interface closed too early:
/// with copies that end at once, and with some that do not.
#[test]
fn order_and_end_of_copies_through_uct() {
    for latency_us in [0, 300] {
        for ucx in Ucx::ALL {
            passes(ucx, node(latency_us), "memory copies", " passed, 0 failed");
        }
    }
}

/// The card is reset in the middle of it all: each completion is called, with the error where there
/// was one, and the flush behind them ends.
#[test]
fn copies_that_fail_under_way_say_so_in_their_completions() {
    for latency_us in [0, 300] {
        let node = node(latency_us).with_faults("transfer fail:EIO after=7");
        passes(Ucx::V1_22, node, "memory failing-copies", " of 32 copies failed");
    }
}
