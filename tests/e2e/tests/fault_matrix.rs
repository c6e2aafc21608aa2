//! A few cells of the fault matrix, in every run; `cargo xtask faults` plays all of them.

use e2e::Workbench;
use e2e::faults::{SCENARIOS, Way, play};

/// One way for each scenario, all ways in turn: every transport is met.
#[test]
fn a_few_faults_on_every_way_end_as_promised() {
    let bench = Workbench::from_env();
    let mut wrong = Vec::new();
    for (number, scenario) in SCENARIOS.iter().filter(|scenario| scenario.quick).enumerate() {
        let way: Way = scenario.ways[number % scenario.ways.len()];
        let played = play(&bench, scenario, way, &|_, _| Ok(()));
        let (kind, phase, way) = (scenario.kind.name(), scenario.phase.name(), way.name());
        println!("{kind} / {phase} / {way}: {:?} ({} runs)", played.outcomes, played.runs);
        wrong.extend(played.wrong);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
