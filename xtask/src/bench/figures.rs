//! What measuring programs print: a name, a tab and a number a line.

use std::collections::HashMap;
use std::process::Stdio;

use anyhow::{Context, Result, bail};
use e2e::Device;

use super::record::median;
use crate::progress::Work;
use crate::repo::Repo;

/// The figures of one run, by name.
pub(super) type Figures = HashMap<String, f64>;

/// The lines of a program.
pub(super) fn parse(text: &str) -> Result<Figures> {
    let figure = |line: &str| {
        let (name, value) = line.split_once('\t')?;
        Some((name.to_owned(), value.parse().ok()?))
    };
    let line = |line| figure(line).with_context(|| format!("not a figure: {line:?}"));
    text.lines().map(line).collect()
}

/// One of them.
pub(super) fn get(figures: &Figures, name: &str) -> Result<f64> {
    figures.get(name).copied().with_context(|| format!("no figure for {name:?}"))
}

/// The median of one of them over several runs.
pub(super) fn middle(rounds: &[Figures], name: &str) -> Result<f64> {
    let samples: Result<Vec<f64>> = rounds.iter().map(|round| get(round, name)).collect();
    Ok(median(&samples?))
}

/// How carefully an example measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effort {
    /// So many runs, optimized.
    Rounds(usize),
    /// One run, with the build that tests use: its figures are not valid.
    Quick,
}

/// Builds an example of the crate `gaudi` and runs it on the machine's card, or on a software one.
pub(super) fn of_example(
    repo: &Repo,
    example: &str,
    what: &str,
    effort: Effort,
) -> Result<Vec<Figures>> {
    let (count, profile) = match effort {
        Effort::Rounds(count) => (count, "release"),
        Effort::Quick => (1, "dev"),
    };
    let device = Device::hardware_or_software();
    eprintln!("device: {}", device.title());
    let (folders, variables) = device.loader(repo.layout());
    let profile = format!("--profile={profile}");
    let example = [&profile, "--package=gaudi", &format!("--example={example}")];
    let built = repo.cargo().arg("build").args(example).status().context("cannot run cargo")?;
    if !built.success() {
        bail!("the build failed (cargo says why above)");
    }
    let mut rounds = Vec::new();
    for round in 1..=count {
        let work = Work::start(format!("{what}, round {round} of {count}"));
        let mut cargo = repo.cargo();
        cargo.args(["run", "--quiet"]).args(example).envs(variables.iter().cloned());
        if let Some(folder) = folders.first() {
            cargo.env("HL_THUNK_LIBRARY", folder.join("libhl-thunk.so"));
        }
        let output = cargo.stderr(Stdio::piped()).output().context("cannot run cargo")?;
        if !output.status.success() {
            bail!("it failed:\n{}", String::from_utf8_lossy(&output.stderr).trim_end());
        }
        rounds.push(parse(&String::from_utf8_lossy(&output.stdout))?);
        work.done("");
    }
    Ok(rounds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_a_name_a_tab_and_a_number() {
        let parsed = parse("floor call\t1.5\nhit 16\t20\n").expect("two figures");
        assert_eq!((parsed["floor call"], parsed["hit 16"]), (1.5, 20.0));
        assert!(parse("hit 16 20").is_err());
        assert!(parse("hit 16\tmany").is_err());
    }
}
