//! A few cells of the fault matrix, in every run; `cargo xtask faults` plays all of them.

use std::collections::BTreeSet;

use e2e::Workbench;
use e2e::faults::{SCENARIOS, Tested, Way, play};

/// One way for each scenario, all ways in turn.
#[test]
fn a_few_faults_on_every_way_end_as_promised() {
    let quick = SCENARIOS.iter().filter(|scenario| scenario.quick).enumerate();
    let cells: Vec<_> = quick.map(|(number, it)| (it, it.ways[number % it.ways.len()])).collect();
    let ways: BTreeSet<Way> = cells.iter().map(|(_, way)| *way).collect();
    assert_eq!(ways, BTreeSet::from(Way::ALL), "every way is met");
    let bench = Workbench::from_env();
    let mut wrong = Vec::new();
    for (scenario, way) in cells {
        let played = play(&bench, scenario, way, &|_, _| Ok(Tested::Passed));
        let (kind, phase) = (scenario.kind, scenario.phase);
        println!("{kind} / {phase} / {way}: {:?} ({} runs)", played.outcomes, played.runs);
        wrong.extend(played.wrong);
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}
