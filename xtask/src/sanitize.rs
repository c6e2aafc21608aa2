//! `cargo xtask sanitize`: tests of the engine, the driver's binding and the software cards with ThreadSanitizer or
//! AddressSanitizer.
//!
//! Sanitizers are an unstable option of rustc, which `RUSTC_BOOTSTRAP` allows. ThreadSanitizer has to see the atomics of
//! the standard library's locks, or takes whatever they guard for a race: the library is compiled anew, which needs its
//! sources. AddressSanitizer does without.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::repo::Repo;

/// Which sanitizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sanitizer {
    /// Races between threads.
    Thread,
    /// Accesses outside of allocations or after their end, and leaks.
    Address,
}

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Where cargo looks for the sources of the standard library, if not in the toolchain.
const SOURCES: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";
/// Loom has its own threads, which a sanitizer does not know.
const TESTS: &str = "not binary(/(queue|cache|slots)_model/)";

pub(crate) fn run(repo: &Repo, sanitizer: Sanitizer, name: Option<&str>) -> Result<()> {
    let mut cargo = repo.cargo_for_tests();
    cargo.args(["nextest", "run", "--no-fail-fast", "--target", TARGET, "--filterset", TESTS]);
    cargo.args(["--package=gaudi", "--package=hl-thunk", "--package=soft-gaudi"]).args(name);
    let word = match sanitizer {
        Sanitizer::Thread => {
            ensure!(
                std::env::var_os(SOURCES).is_some() || sources()?.exists(),
                "the sources of the standard library are not there: `rustup component add rust-src`"
            );
            cargo.arg("-Zbuild-std");
            "thread"
        }
        Sanitizer::Address => {
            // What lives as long as the process is leaked on purpose.
            cargo.env("ASAN_OPTIONS", "detect_leaks=0");
            "address"
        }
    };
    // The mismatch: a build script compiles a library of its own, and AddressSanitizer's standard library is the usual
    // one. `-rdynamic`: the software card, loaded at run time, finds the sanitizer in the program.
    let flags =
        format!("-Zsanitizer={word} -Cunsafe-allow-abi-mismatch=sanitizer -Clink-arg=-rdynamic");
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", flags);
    cargo.env("CARGO_TARGET_DIR", repo.layout().target().join("sanitize").join(word));
    let status = cargo.status().context("cannot run cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo nextest: {status}") }
}

/// Where rustup's component `rust-src` is.
fn sources() -> Result<PathBuf> {
    let output =
        Command::new("rustc").arg("--print=sysroot").output().context("cannot run rustc")?;
    let sysroot = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok(Path::new(&sysroot).join("lib/rustlib/src/rust/library/Cargo.lock"))
}
