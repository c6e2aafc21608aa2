//! The checkout: its path, the target directory, and how to call cargo.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use e2e::Layout;

/// Where the vendor's tests are, for `soft/soft-gaudi/tests/vendor.rs`.
const VENDOR_TESTS: [&str; 2] = ["SOFT_GAUDI_VENDOR_TESTS", "SOFT_GAUDI_LIBRARY"];

/// The checkout and its target directory.
#[derive(Debug, Clone)]
pub(crate) struct Repo {
    root: PathBuf,
    layout: Layout,
}

impl Repo {
    /// The checkout from which this program was built. If the variable with the target directory is set, cargo is not
    /// called, and need not be installed.
    pub(crate) fn find() -> Result<Self> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"))
            .parent()
            .context("xtask lies at the root of the file system")?
            .to_owned();
        if std::env::var_os(Layout::VARIABLE).is_some() {
            return Ok(Self { root, layout: Layout::from_env() });
        }
        // Ask cargo, because a user may have moved the target directory by a variable or a file.
        let output = cargo_in(&root)
            .args(["metadata", "--no-deps", "--format-version=1", "--offline"])
            .output()
            .context("cannot run cargo")?;
        if !output.status.success() {
            bail!("cargo metadata failed:\n{}", String::from_utf8_lossy(&output.stderr).trim_end());
        }
        let metadata: serde_json::Value =
            serde_json::from_slice(&output.stdout).context("cannot read cargo's metadata")?;
        let target = metadata["target_directory"]
            .as_str()
            .context("cargo's metadata has no target directory")?;
        Ok(Self { root, layout: Layout::new(target) })
    }

    /// Folders under the target directory.
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A file of the checkout.
    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    /// Cargo, run at the root of the checkout, with the variable tests look for.
    pub(crate) fn cargo(&self) -> Command {
        let mut command = cargo_in(&self.root);
        command.env(Layout::VARIABLE, self.layout.target());
        command
    }

    /// Cargo for running tests, without the caller's variables that configure UCX, the driver or a software device,
    /// except those that are meant for tests.
    pub(crate) fn cargo_for_tests(&self) -> Command {
        let mut command = cargo_in(&self.root);
        let asks = |name: &OsStr| {
            let name = name.to_str().unwrap_or_default();
            name.starts_with("UCX_GAUDI_TEST_") || VENDOR_TESTS.contains(&name)
        };
        let settings = std::env::vars_os().map(|(name, _)| name);
        for name in settings.filter(|name| e2e::is_setting(name) && !asks(name)) {
            command.env_remove(name);
        }
        command.env(Layout::VARIABLE, self.layout.target());
        command
    }

    /// A path for messages: relative to the checkout if it lies inside.
    pub(crate) fn shown<'a>(&self, path: &'a Path) -> std::path::Display<'a> {
        path.strip_prefix(&self.root).unwrap_or(path).display()
    }
}

fn cargo_in(root: &Path) -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.current_dir(root);
    // `cargo run` sets variables about this package; passed on, they make cargo rebuild crates whose build scripts
    // watch them.
    for (name, _) in std::env::vars_os() {
        let ours = name.to_str().is_some_and(|name| {
            name.starts_with("CARGO_PKG_")
                || name.starts_with("CARGO_MANIFEST_")
                || name == "CARGO_BIN_NAME"
        });
        if ours {
            command.env_remove(name);
        }
    }
    command
}
