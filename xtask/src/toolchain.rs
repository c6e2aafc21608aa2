//! What rustc reports about itself: its host, its LLVM, and where its files are.

use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

#[derive(Debug)]
pub(crate) struct Toolchain {
    /// Such as `x86_64-unknown-linux-gnu`.
    pub(crate) host: String,
    /// The major version of its LLVM.
    pub(crate) llvm: String,
    sysroot: PathBuf,
}

impl Toolchain {
    pub(crate) fn find() -> Result<Self> {
        let about = rustc(&["-vV"])?;
        let line = |prefix: &str| {
            let line = about.lines().find_map(|line| line.strip_prefix(prefix));
            line.with_context(|| format!("`rustc -vV` has no line `{prefix}`"))
        };
        let llvm = line("LLVM version: ")?.split('.').next().unwrap_or_default().to_owned();
        let sysroot = PathBuf::from(rustc(&["--print=sysroot"])?.trim_end());
        Ok(Self { host: line("host: ")?.to_owned(), llvm, sysroot })
    }

    /// Files for the host: `bin` has rustup's component `llvm-tools`, `lib` the sanitizers.
    pub(crate) fn for_host(&self, folder: &str) -> PathBuf {
        self.sysroot.join("lib/rustlib").join(&self.host).join(folder)
    }

    /// Whether the sources of the standard library are installed: rustup's component `rust-src`.
    pub(crate) fn has_sources(&self) -> bool {
        self.sysroot.join("lib/rustlib/src/rust/library/Cargo.lock").exists()
    }
}

fn rustc(arguments: &[&str]) -> Result<String> {
    let output = Command::new("rustc").args(arguments).output().context("cannot run rustc")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "rustc {}: {}", arguments.join(" "), said.trim_end());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
