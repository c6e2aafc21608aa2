//! A few seconds of the soak: many threads, random messages, buffers that come and go meanwhile.
//! The long run is started by hand: `ucp-check soak --seconds 1860`.

use e2e::{Device, Finished, Ucx, Workbench};

fn soak(ucx: Ucx, arguments: &str) -> Finished {
    let words = format!("soak --max 4M {arguments}");
    Workbench::from_env().client(ucx, &Device::software(), &words).run()
}

#[test]
fn threads_with_and_without_a_worker_of_their_own() {
    for ucx in Ucx::ALL {
        let end = soak(ucx, "--seconds 4").ok();
        assert!(end.stdout.contains("2 of them share a worker"), "{}", end.report());
        for moved in ["host:gaudi", "gaudi:host", "gaudi:gaudi", "stream", "am"] {
            let line = format!("\n{moved} messages ");
            assert!(end.stdout.contains(&line), "{moved}: {}", end.report());
        }
    }
}

#[test]
fn one_worker_shared_by_all_threads() {
    for ucx in Ucx::ALL {
        soak(ucx, "--seconds 2 --threads 4 --workers shared").ok();
    }
}

/// A soak that finds nothing must be one that would have found something.
#[test]
fn a_damaged_byte_is_found_wherever_it_is() {
    for (damage, found) in [
        ("message", "message wrong"),
        ("guard", "guard behind the message violated"),
        ("source", "guard before the message violated"),
    ] {
        let end = soak(Ucx::V1_22, &format!("--seconds 60 --threads 2 --sabotage {damage}"));
        assert!(!end.success(), "{}", end.report());
        assert!(end.stderr.contains(found), "{}", end.report());
    }
}
