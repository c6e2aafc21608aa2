//! `cargo xtask release VERSION`: checks that the checkout is ready for a release, makes the packages and tags the
//! commit. It pushes nothing: pushing the tag is up to the user.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::dist;
use crate::package::{self, Format};
use crate::repo::Repo;

/// The branch for releases.
const BRANCH: &str = "main";

/// The properties of the checkout that the checks use.
#[derive(Debug, Clone, PartialEq, Eq)]
struct State {
    branch: String,
    /// What `git status --porcelain` prints.
    changes: String,
    /// The version in the workspace's `Cargo.toml`.
    version: String,
    changelog: String,
    tags: String,
}

/// Releases this version, or with `dry_run` says what it would do.
pub(crate) fn run(repo: &Repo, version: &str, dry_run: bool) -> Result<()> {
    let state = State {
        branch: git(repo, &["rev-parse", "--abbrev-ref", "HEAD"])?.trim().to_owned(),
        changes: git(repo, &["status", "--porcelain"])?,
        version: env!("CARGO_PKG_VERSION").to_owned(),
        changelog: std::fs::read_to_string(repo.path("CHANGELOG.md")).context("CHANGELOG.md")?,
        tags: git(repo, &["tag", "--list"])?,
    };
    let problems = problems(&state, version);
    let out = repo.layout().target().join("package");
    let tag = format!("v{version}");
    if dry_run {
        println!("would build for release and write packages to {}", repo.shown(&out));
        println!("would tag this commit {tag} with the section of CHANGELOG.md");
    }
    ensure!(problems.is_empty(), "{version} cannot be released:\n  {}", problems.join("\n  "));
    if dry_run {
        return Ok(());
    }
    dist::build(repo, dist::Profile::Shipped)?;
    package::run(repo, Format::value_variants(), version, &out)?;
    let notes = section(&state.changelog, version).unwrap_or_default();
    // Verbatim: git would treat headings as comments.
    let message = format!("ucx-gaudi {version}\n\n{notes}");
    git(repo, &["tag", "--annotate", "--cleanup=verbatim", "--message", &message, &tag])?;
    println!("{tag} is tagged, packages are in {}", repo.shown(&out));
    println!("not pushed: git push REMOTE {tag}");
    Ok(())
}

fn git(repo: &Repo, arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").current_dir(repo.path("")).args(arguments).output();
    let output = output.context("cannot run git")?;
    if !output.status.success() {
        bail!("git {}: {}", arguments[0], String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The text below the heading of a version, up to the next version's.
fn section<'a>(changelog: &'a str, version: &str) -> Option<&'a str> {
    let sections = changelog.split("\n## ").skip(1);
    // "1.2.3" or "1.2.3 - 2026-01-31".
    let (_, text) = sections
        .filter_map(|section| section.split_once('\n'))
        .find(|(heading, _)| heading.split_whitespace().next() == Some(version))?;
    Some(text.trim())
}

/// The obstacles, each with a remedy.
fn problems(state: &State, version: &str) -> Vec<String> {
    let mut found = Vec::new();
    if state.branch != BRANCH {
        found.push(format!("this is branch {}: git switch {BRANCH}", state.branch));
    }
    if !state.changes.is_empty() {
        found.push("the tree has changes: commit them, or remove them".to_owned());
    }
    if state.version != version {
        let version = &state.version;
        found.push(format!("the workspace has version {version}: change it in Cargo.toml"));
    }
    if section(&state.changelog, version).is_none_or(str::is_empty) {
        found
            .push(format!("CHANGELOG.md has nothing below `## {version}`: rename `## Unreleased`"));
    }
    if state.tags.lines().any(|tag| tag == format!("v{version}")) {
        found.push(format!("v{version} is there already: choose the next version"));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit() -> State {
        State {
            branch: "main".into(),
            changes: String::new(),
            version: "1.2.3".into(),
            changelog:
                "# Changelog\n\n## 1.2.3 - 2026-01-31\n\n### Added\n\n* It.\n\n## 1.2.2\n\nOld.\n"
                    .into(),
            tags: "v1.2.2\n".into(),
        }
    }

    #[test]
    fn notes_are_the_section_of_that_version_alone() {
        let changelog = fit().changelog;
        assert_eq!(section(&changelog, "1.2.3"), Some("### Added\n\n* It."));
        assert_eq!(section(&changelog, "1.2.2"), Some("Old."));
        assert_eq!(section(&changelog, "1.2"), None);
    }

    #[test]
    fn each_thing_that_is_missing_is_named() {
        assert_eq!(problems(&fit(), "1.2.3"), [""; 0]);
        let unreleased = fit().changelog.replace("## 1.2.3 -", "## Unreleased");
        for (state, word) in [
            (State { branch: "work".into(), ..fit() }, "git switch main"),
            (State { changes: " M x\n".into(), ..fit() }, "commit them"),
            (State { version: "1.2.2".into(), ..fit() }, "Cargo.toml"),
            (State { changelog: unreleased, ..fit() }, "`## 1.2.3`"),
            (State { tags: "v1.2.3\n".into(), ..fit() }, "next version"),
        ] {
            let found = problems(&state, "1.2.3");
            assert!(found.len() == 1 && found[0].contains(word), "{found:?}");
        }
    }
}
