//! Runs the vendor's own test programs against the built library, where they were built.
//!
//! `SOFT_GAUDI_VENDOR_TESTS` names the folder of hl-thunk-open's built programs (its `build/bin`);
//! `SOFT_GAUDI_LIBRARY` the folder with this library as `libhl-thunk.so`. They are not part of the
//! project, so without them there is nothing to run.

use std::path::PathBuf;
use std::process::Command;

use soft_gaudi::testing::Machine;

/// Group, further arguments, tests that must pass on Gaudi1 and on Gaudi2.
///
/// Not in the list: what fails by itself on a stand-in (see the documentation) and what takes
/// minutes or hours.
const GROUPS: [(&str, &[&str], [usize; 2]); 8] = [
    ("open_close", &[], [4, 4]),
    ("command_buffer", &[], [6, 9]),
    ("command_submission", &["-s", "test_cs_*"], [16, 19]),
    ("dma", &[], [5, 11]),
    ("dma_sram", &[], [69, 77]),
    ("dma_dram", &["-s", "test_dma_dram_*"], [92, 87]),
    ("gaudi_dma", &[], [1, 0]),
    ("sync_manager", &[], [17, 13]),
];

#[test]
fn vendor_programs_pass() {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let (Some(programs), Some(library)) =
        (folder("SOFT_GAUDI_VENDOR_TESTS"), folder("SOFT_GAUDI_LIBRARY"))
    else {
        println!(
            "skipped: SOFT_GAUDI_VENDOR_TESTS and SOFT_GAUDI_LIBRARY do not name the vendor's \
             built programs and the library"
        );
        return;
    };
    let mut failures = Vec::new();
    for (which, generation) in ["gaudi1", "gaudi2"].into_iter().enumerate() {
        for (group, arguments, expected) in GROUPS {
            let machine = Machine::temporary("vendor");
            let mut path = library.clone().into_os_string();
            path.push(":");
            path.push(programs.join("../lib"));
            let output = Command::new(programs.join(group))
                .args(arguments)
                .env("LD_LIBRARY_PATH", path)
                .env("SOFT_GAUDI_NODE", machine.name())
                .env("SOFT_GAUDI_GENERATION", generation)
                .env("SOFT_GAUDI_HBM", ["30g", "3g"][which])
                .env("SOFT_GAUDI_LENIENT", "edma-fetch,pdma-streams,unpinned")
                // A program whose card was reset waits for hours for it: it is killed, as by the driver.
                .env("SOFT_GAUDI_RESET_KILL", "1000")
                .output()
                .expect("the program does not start");
            let text = String::from_utf8_lossy(&output.stdout);
            let passed = text.lines().filter(|line| line.starts_with("[       OK ]")).count();
            println!("{generation} {group}: {passed} passed, {}", output.status);
            // The status alone says little: it is 0 also when nothing ran.
            if !output.status.success() || passed < expected[which] {
                failures.push(format!(
                    "{generation} {group}: {passed} of {} passed, {}",
                    expected[which], output.status
                ));
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
