//! Atomic operations: on host memory they are right with the plugin loaded; on Gaudi memory UCX ends
//! the process that owns it, and no transport can keep it from that. See `docs/errors.md`.

use e2e::{Device, Finished, Ucx, client};

fn atomics(ucx: Ucx, words: &str) -> Finished {
    let tool = client(ucx, &Device::cards(2), &format!("atomics {words}"));
    // UCX's report on a crash is long, and may be followed by a debugger where there is one.
    tool.env("UCX_HANDLE_ERRORS", "none").run()
}

#[test]
fn host_memory_has_atomics_with_the_plugin_loaded() {
    for ucx in Ucx::ALL {
        for words in ["--memory host", "--memory host --alone"] {
            let end = atomics(ucx, words).ok();
            assert!(end.stdout.ends_with("16 right, 0 wrong\n"), "{}", end.report());
        }
    }
}

/// Not what anybody wants, but what is: where this fails because nobody dies any more, UCX has learnt
/// to look at the memory type, and the documentation has to be told.
#[test]
fn atomics_on_gaudi_memory_end_the_process_that_owns_it() {
    for ucx in Ucx::ALL {
        let end = atomics(ucx, "--memory gaudi");
        let target_died = end.stderr.contains("target: process 1 was killed by signal 11");
        assert!(target_died && !end.success(), "UCX {}: {}", ucx.name(), end.report());
        assert!(end.stdout.starts_with("0 right, 0 wrong"), "{}", end.report());
        let alone = atomics(ucx, "--memory gaudi --alone");
        assert!(alone.crashed(), "UCX {}: {}", ucx.name(), alone.report());
    }
}
