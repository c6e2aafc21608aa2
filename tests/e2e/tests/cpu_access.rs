//! Gaudi memory accessed by the CPU: a line says so and what to do, and the process ends as it would have.

mod memory;

use std::os::unix::process::ExitStatusExt;

use e2e::{Device, Finished, Ucx, client};
use memory::Machine;

const EXPLAINED: [&str; 2] =
    ["the CPU accessed Gaudi memory, which only the card can", "--mca pml ucx"];

fn signal(end: &Finished) -> Option<i32> {
    end.status.and_then(|status| status.signal())
}

fn touch(ucx: Ucx, variables: &[(&str, &str)]) -> Finished {
    Machine::one_card().check(ucx, "touch").envs(variables).run()
}

#[test]
fn a_line_says_so_once_and_the_process_dies_of_the_signal() {
    for ucx in Ucx::ALL {
        let end = touch(ucx, &[("UCX_HANDLE_ERRORS", "none")]);
        assert!(end.says(&EXPLAINED), "{}", end.report());
        assert_eq!(end.text().matches(EXPLAINED[0]).count(), 1, "{}", end.report());
        assert_eq!(signal(&end), Some(libc::SIGSEGV), "{}", end.report());
    }
}

/// UCX kills the owner of Gaudi memory with its atomic operations.
#[test]
fn an_access_by_ucp_itself_is_explained() {
    for ucx in Ucx::ALL {
        let tool = client(ucx, &Device::cards(2), "atomics --memory gaudi --alone");
        let end = tool.env("UCX_HANDLE_ERRORS", "none").run();
        assert!(end.says(&EXPLAINED), "{}", end.report());
        assert!(end.crashed(), "{}", end.report());
    }
}

#[test]
fn ucx_reports_the_crash_as_without_us_and_we_are_not_in_its_stack() {
    let on = [("UCX_HANDLE_ERRORS", "bt"), ("UCX_GAUDI_COPY_EXPLAIN_FAULTS", "y")];
    let off = [("UCX_HANDLE_ERRORS", "bt"), ("UCX_GAUDI_COPY_EXPLAIN_FAULTS", "n")];
    let stack = |end: &Finished| {
        let text = end.text();
        let lines = text
            .lines()
            .filter(|line| line.contains("Caught signal") || line.contains("/ucp-check("));
        // Addresses and process ids differ.
        lines
            .map(|line| line.split("[0x").next().unwrap_or(line).to_owned())
            .map(|line| match line.find("Caught") {
                Some(at) => line[at..].to_owned(),
                None => line,
            })
            .collect::<Vec<String>>()
    };
    let (with, without) = (touch(Ucx::V1_22, &on), touch(Ucx::V1_22, &off));
    assert!(with.says(&EXPLAINED) && !without.says(&EXPLAINED), "{}", without.report());
    assert!(!stack(&with).is_empty(), "UCX says so: {}", with.report());
    assert_eq!(stack(&with), stack(&without));
    // Nor is the software card, which has a handler of its own.
    for ours in ["libuct_gaudi", "libucx_gaudi", "libhl-thunk"] {
        assert!(!with.text().contains(ours), "{}", with.report());
    }
    assert_eq!(signal(&with), signal(&without));
}

/// A signal that somebody sent takes the way it would have taken. Rust's own handler takes the first to restore
/// the default, with the plugin or without.
#[test]
fn a_signal_that_was_sent_arrives_and_is_not_explained() {
    let machine = Machine::one_card();
    let holder = machine.check(Ucx::V1_22, "hold").env("UCX_HANDLE_ERRORS", "none").start();
    assert!(holder.wait_until(|_| machine.cards_opened() == 1), "the card is open");
    let id = i32::try_from(holder.id()).expect("a process id");
    let sends = (0..100).take_while(|_| {
        std::thread::sleep(std::time::Duration::from_millis(50));
        // SAFETY: sends a signal to our own child, which is waited for below only.
        !holder.has_ended() && unsafe { libc::kill(id, libc::SIGSEGV) } == 0
    });
    assert!(sends.count() >= 2, "the first goes to the handler of before");
    let end = holder.finish(std::time::Duration::from_secs(20));
    assert!(!end.says(&EXPLAINED), "{}", end.report());
    assert_eq!(signal(&end), Some(libc::SIGSEGV), "{}", end.report());
}
