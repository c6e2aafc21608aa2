//! All targets as one libFuzzer program: `FUZZ_TARGET` names the one to run. `cargo xtask fuzz` builds and runs it.

#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
        let target = fuzz::TARGETS.iter().find(|target| target.name == name);
        let target = target.unwrap_or_else(|| panic!("FUZZ_TARGET={name} is no target"));
        let _ = TARGET.set(target.run);
    },
    |bytes: &[u8]| TARGET.get().expect("set before")(bytes)
);
