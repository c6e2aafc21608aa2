//! `cargo xtask sanitize`: tests of the engine, the driver's binding and the software cards with ThreadSanitizer or
//! AddressSanitizer.
//!
//! Sanitizers are an unstable option of rustc, which `RUSTC_BOOTSTRAP` allows. ThreadSanitizer has to see the atomics of
//! the standard library's locks, or takes whatever they guard for a race: the library is compiled anew, which needs its
//! sources. AddressSanitizer does without.

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::check;
use crate::repo::Repo;
use crate::toolchain::Toolchain;

/// Which sanitizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Sanitizer {
    /// Races between threads.
    Thread,
    /// Accesses outside of allocations or after their end.
    Address,
}

/// Where cargo looks for the sources of the standard library, if not in the toolchain.
const SOURCES: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";
/// Loom has its own threads, which a sanitizer does not know. The others want addresses that a sanitizer takes, or load a
/// library that was built for one into a program that was not.
const TESTS: &str =
    "not (binary(/(queue|cache|slots)_model/) | test(a_blocked_range_is_refused) | binary(readme))";

/// For ThreadSanitizer, which uses memory of its own without bound, and takes what follows a jump out of a signal handler
/// for a part of it.
const THREAD_TESTS: &str = "not test(/leave_nothing_behind$|^a_handler_that_leaves_by_a_jump/)";

pub(crate) fn run(repo: &Repo, sanitizer: Sanitizer, name: Option<&str>) -> Result<()> {
    check::require_nextest(repo, "cargo xtask sanitize")?;
    let toolchain = Toolchain::find()?;
    let mut cargo = repo.cargo_for_tests();
    // A profile with longer limits: tests are many times slower with a sanitizer.
    let mut tests = TESTS.to_owned();
    if sanitizer == Sanitizer::Thread {
        tests += &format!(" and {THREAD_TESTS}");
    }
    cargo.args(["nextest", "run", "--profile=sanitize", "--no-fail-fast", "--filterset", &tests]);
    cargo.args(["--target", &toolchain.host]);
    cargo.args(["--package=gaudi", "--package=hl-thunk", "--package=soft-gaudi"]).args(name);
    let word = match sanitizer {
        Sanitizer::Thread => {
            ensure!(
                std::env::var_os(SOURCES).is_some() || toolchain.has_sources(),
                "the sources of the standard library are not there: `rustup component add rust-src`"
            );
            cargo.arg("-Zbuild-std");
            // Tests fork while other threads run, and the child starts some of its own.
            cargo.env("TSAN_OPTIONS", "die_after_fork=0");
            "thread"
        }
        Sanitizer::Address => {
            // What lives as long as the process is leaked on purpose.
            cargo.env("ASAN_OPTIONS", "detect_leaks=0");
            "address"
        }
    };
    // The mismatch: a build script compiles a library of its own, and AddressSanitizer's standard library is the usual
    // one.
    let mut flags = format!("-Zsanitizer={word} -Cunsafe-allow-abi-mismatch=sanitizer");
    // The software card, loaded at run time, finds the sanitizer in the program.
    for names in ["__asan_*", "__tsan_*", "__sanitizer_*"] {
        flags += &format!(" -Clink-arg=-Wl,--export-dynamic-symbol={names}");
    }
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", flags);
    cargo.env("CARGO_TARGET_DIR", repo.layout().target().join("sanitize").join(word));
    let status = cargo.status().context("cannot run cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo nextest: {status}") }
}
