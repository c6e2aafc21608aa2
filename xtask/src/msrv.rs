//! `cargo xtask msrv`: whether the oldest Rust in `Cargo.toml` (`rust-version`) can build this workspace.
//!
//! If that toolchain is installed, it checks the whole workspace. Otherwise clippy compares the functions in use with the version
//! that introduced them, and cargo's metadata has what the dependencies need; neither detects syntax that is too new.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::repo::Repo;

/// `rust-version` of the workspace.
const OLDEST: &str = env!("CARGO_PKG_RUST_VERSION");

pub(crate) fn run(repo: &Repo) -> Result<()> {
    let toolchain = format!("+{OLDEST}");
    let has_toolchain = Command::new("cargo")
        .args([&*toolchain, "--version"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if has_toolchain {
        let mut check = Command::new("cargo");
        check.current_dir(repo.path("")).arg(toolchain);
        // A separate folder, because another toolchain's results would be rebuilt each time.
        check.args(["check", "--workspace", "--all-targets", "--locked", "--target-dir"]);
        return succeed(check.arg(repo.layout().target().join("msrv")));
    }
    let mut clippy = repo.cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--locked", "--"]);
    succeed(clippy.args(["-Aclippy::all", "-Dclippy::incompatible_msrv"]))?;
    let output = repo.cargo().args(["metadata", "--format-version=1", "--locked"]).output();
    let output = output.context("cannot run cargo")?;
    let metadata =
        serde_json::from_slice(&output.stdout).context("cannot read cargo's metadata")?;
    let newer = too_new(&metadata, OLDEST);
    if !newer.is_empty() {
        bail!("dependencies that need a newer Rust than {OLDEST}: {}", newer.join(", "));
    }
    println!(
        "functions and dependencies are of Rust {OLDEST} or older; it was not built with {OLDEST}:"
    );
    println!("  rustup toolchain install {OLDEST} --profile minimal");
    Ok(())
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command.status().context("cannot run cargo")?;
    if status.success() { Ok(()) } else { bail!("cargo: {status}") }
}

/// Packages that need a newer Rust according to their metadata, with that version.
fn too_new(metadata: &serde_json::Value, oldest: &str) -> Vec<String> {
    let number = |version: &str| -> Vec<u32> {
        version.split('.').map(|part| part.parse().unwrap_or(0)).chain([0, 0]).take(3).collect()
    };
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let needs =
        packages.filter_map(|it| Some((it["name"].as_str()?, it["rust_version"].as_str()?)));
    needs
        .filter(|(_, needed)| number(needed) > number(oldest))
        .map(|(name, needed)| format!("{name} ({needed})"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_as_numbers() {
        let metadata = serde_json::json!({"packages": [
            {"name": "old", "rust_version": "1.9"},
            {"name": "same", "rust_version": "1.88.0"},
            {"name": "silent", "rust_version": null},
            {"name": "new", "rust_version": "1.88.1"},
        ]});
        assert_eq!(too_new(&metadata, "1.88"), ["new (1.88.1)"]);
    }
}
