//! A few seconds of the soak: many threads, random messages, buffers that come and go meanwhile.
//! The long run is started by hand: `cargo xtask soak --hours 2`, of whose rounds a few are run here.

use e2e::soak::{Fault, Played, Round, Violation, Way};
use e2e::{Device, Finished, Ucx, Workbench, client};

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

/// Each of eight threads uses each of the workers.
#[test]
fn workers_shared_by_all_threads() {
    let end = soak(Ucx::V1_22, "--seconds 1 --threads 8 --workers shared --shared 10").ok();
    assert!(end.stdout.contains("8 of them share 10 workers"), "{}", end.report());
}

#[test]
fn processes_that_stay_connected_use_no_more_in_the_end() {
    let words = "endure --seconds 0 --plain --largest 64K --ops tag,put --mem gaudi:gaudi";
    let end = client(Ucx::V1_22, &Device::not_importing(2), words).run().ok();
    assert!(end.stdout.contains("verified: 288 messages, "), "{}", end.report());
}

/// Three processes for one card: each has it in its turn.
#[test]
fn a_card_goes_round_among_connected_processes() {
    let words = "mesh --processes 3 --turns 3 --usage --plain --sizes 4097";
    let end = client(Ucx::V1_22, &Device::not_importing(1), words).run().ok();
    // 3 turns, 3 pairs, 3 operations, 2 directions.
    assert!(end.stdout.contains("\n54 passed, 0 failed"), "{}", end.report());
    let usage = ucp_check::verify::usage::ProcessUsage::of(&end.stdout);
    assert_eq!(usage.iter().filter(|usage| usage.card).count(), 3, "{}", end.report());
    assert_eq!(usage.len(), 9, "{}", end.report());
}

fn round(way: Way, fault: Fault, further: &str) -> Played {
    let round = Round::draw(7, &[way], &[fault]);
    round.play(&Workbench::from_env(), further)
}

#[test]
fn rounds_keep_the_promises() {
    for (way, fault) in [
        (Way::Relay, Fault::None),
        (Way::Staged, Fault::CopyFailsForGood),
        (Way::Import, Fault::Killed),
        // Else it breaks the promise that something is verified.
        (Way::Nixl, Fault::None),
    ] {
        let played = round(way, fault, "");
        assert_eq!(played.judged.violations, [], "{way}, {fault}: {}", played.report);
        let came = played.judged.came;
        assert_eq!(came.is_none(), fault == Fault::None || played.skipped, "{came:?}");
    }
}

/// A card that changes a byte, and a client that does.
#[test]
fn a_round_with_wrong_bytes_breaks_a_promise() {
    for (fault, further) in [(Fault::Flip, ""), (Fault::None, "--sabotage guard")] {
        let Played { judged, report, .. } = round(Way::Staged, fault, further);
        assert_eq!(judged.violations, [Violation::WrongBytes], "{report}");
        assert_eq!(judged.came, (fault != Fault::None).then_some(true), "{report}");
    }
}

/// A step that takes longer than it may.
#[test]
fn a_round_that_hangs_breaks_a_promise() {
    let Played { judged, report, .. } = round(Way::Staged, Fault::None, "--timeout 0.001");
    assert!(judged.violations.contains(&Violation::Hung), "{report}");
}
