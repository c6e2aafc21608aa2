//! `cargo xtask sanitize`: tests of the engine, the driver's binding and the software cards with ThreadSanitizer or
//! AddressSanitizer.
//!
//! Sanitizers are an unstable option of rustc, which `RUSTC_BOOTSTRAP` permits. ThreadSanitizer must see the atomics in
//! the standard library's locks; otherwise it reports races on whatever they guard. So the standard library is compiled
//! anew, which needs its sources. AddressSanitizer does not need that.

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

/// Where cargo looks for the sources of the standard library if they are not in the toolchain.
const SOURCES: &str = "__CARGO_TESTS_ONLY_SRC_ROOT";
/// Loom has its own threads, which a sanitizer does not know. The others need addresses that a sanitizer uses itself,
/// or load a library that was built with a sanitizer into a program that was not.
const TESTS: &str =
    "not (binary(/(queue|cache|slots)_model/) | test(a_blocked_range_is_refused) | binary(readme))";

/// Not with ThreadSanitizer: its own memory would grow without bound, and it treats the code after a jump out of a
/// signal handler as part of the handler.
const THREAD_TESTS: &str = "not test(/leave_nothing_behind$|^a_handler_that_leaves_by_a_jump/)";

pub(crate) fn run(repo: &Repo, sanitizer: Sanitizer, name: Option<&str>) -> Result<()> {
    check::require_nextest(repo, "cargo xtask sanitize")?;
    let toolchain = Toolchain::find()?;
    let mut cargo = repo.cargo_for_tests();
    // A profile with longer limits: tests run many times slower with a sanitizer.
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
            // Tests fork while other threads run, and the child starts threads.
            cargo.env("TSAN_OPTIONS", "die_after_fork=0");
            "thread"
        }
        Sanitizer::Address => {
            // Objects that live as long as the process are leaked on purpose.
            cargo.env("ASAN_OPTIONS", "detect_leaks=0");
            "address"
        }
    };
    // The mismatch that this allows: a build script compiles its own library, and AddressSanitizer's standard library
    // is the usual one.
    let mut flags = format!("-Zsanitizer={word} -Cunsafe-allow-abi-mismatch=sanitizer");
    // The software card is loaded at run time, and finds the sanitizer's symbols in the program.
    for names in ["__asan_*", "__tsan_*", "__sanitizer_*"] {
        flags += &format!(" -Clink-arg=-Wl,--export-dynamic-symbol={names}");
    }
    cargo.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", flags);
    cargo.env("CARGO_TARGET_DIR", repo.layout().target().join("sanitize").join(word));
    let status = cargo.status().context("cannot run cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo nextest: {status}") }
}
