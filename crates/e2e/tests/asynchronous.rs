//! Copies that take their time: the software card does nothing inside the calls that submit or wait
//! (`SOFT_GAUDI_LATENCY`), as a real one does not. Every protocol of UCX then runs on copies that are
//! still under way when it goes on, and sleeping workers have something to sleep for.

use e2e::{Device, SoftNode, Ucx, Workbench};

fn node(latency_us: u32) -> SoftNode {
    SoftNode::unique()
        .with("SOFT_GAUDI_DEVICES", "2")
        .with("SOFT_GAUDI_LATENCY", &latency_us.to_string())
}

#[track_caller]
fn passes(ucx: Ucx, latency_us: u32, arguments: &str) -> String {
    passes_on(ucx, node(latency_us), arguments)
}

#[track_caller]
fn passes_on(ucx: Ucx, node: SoftNode, arguments: &str) -> String {
    // Its folder goes with it, and the faults in there.
    let device = Device::Software(node);
    let client = Workbench::from_env().client(ucx, &device, arguments);
    client.env("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n").run().ok().stdout
}

#[test]
fn every_operation_and_memory_pair() {
    for ucx in Ucx::ALL {
        let said = passes(ucx, 300, "pair --plain --sizes 0,1,4K,64K+1,1M+3");
        assert!(said.contains(" passed, 0 failed"), "{said}");
    }
}

#[test]
fn sleeping_workers() {
    for ucx in Ucx::ALL {
        let said = passes(ucx, 300, "wakeup --sizes 0,1,4K,64K+1,1M+3");
        assert!(said.contains(" passed, 0 failed"), "{said}");
    }
}

/// `asleep` fails if waiting takes more than a dozen calls per copy; a worker that cannot be armed
/// while a copy runs makes thousands.
#[test]
fn a_worker_with_nothing_but_a_copy_under_way_sleeps_until_it_is_done() {
    for ucx in Ucx::ALL {
        let said = passes(ucx, 20_000, "asleep --slow --count 4 --sizes 8,4K,64K,1M+3,8M");
        assert_eq!(said.lines().count(), 6, "a line for each size\n{said}");
    }
}

/// Without a latency small copies are over when the call returns: no event is missed, none is needed.
#[test]
fn copies_that_are_over_at_once_need_no_sleep() {
    let said = passes(Ucx::V1_22, 0, "asleep --count 4 --sizes 8,4K,64K");
    assert_eq!(said.lines().count(), 4, "{said}");
}

#[test]
fn several_threads_on_one_worker() {
    let said = passes(Ucx::V1_22, 300, "threads --plain --count 4 --sizes 1,4K,64K+1,1M+3");
    assert!(said.contains(" passed, 0 failed"), "{said}");
}

/// Pieces, fences, flushes, more copies than there is room for, and an interface closed too early:
/// with copies that end at once, and with some that do not.
#[test]
fn order_and_end_of_copies_through_uct() {
    for latency_us in [0, 300] {
        for ucx in Ucx::ALL {
            let said = passes(ucx, latency_us, "memory copies");
            assert!(said.contains(" passed, 0 failed"), "{said}");
        }
    }
}

/// The card is reset in the middle of it all: each completion is called, with the error where there
/// was one, and the flush behind them ends.
#[test]
fn copies_that_fail_under_way_say_so_in_their_completions() {
    for latency_us in [0, 300] {
        let node = node(latency_us).with_faults("transfer fail:EIO after=7");
        let said = passes_on(Ucx::V1_22, node, "memory failing-copies");
        assert!(said.contains(" of 32 copies failed"), "{said}");
    }
}
