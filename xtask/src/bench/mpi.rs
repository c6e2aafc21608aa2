//! `bench mpi`: Allreduce and Alltoall of a real Open MPI on Gaudi memory (`examples/mpi_bench.c`). The floor does the
//! same by hand in the same run: copy to host memory, the collective, copy back.
//!
//! Only `--model` has targets: a software card copies with the processors that also reduce, so the two cannot overlap.

use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::{Device, SoftNode, Ucx};
use ucp_check::measure::{Record, size_name};

use super::model::{MIB, named};
use crate::progress::Work;
use crate::repo::Repo;

/// Compiles the program and runs it; its arguments are size and rounds.
const SCRIPT: &str = r#"
mpicc -O2 -I"$DIST/include" "$HERE/examples/mpi_bench.c" -o "$PROGRAM" -L"$DIST/lib/ucx-gaudi" -lucx_gaudi \
    -Wl,-rpath,"$DIST/lib/ucx-gaudi"
exec "$DIST/bin/ucx-gaudi" run $SOFT -- mpirun --oversubscribe -np 2 "$PROGRAM" "$@"
"#;

/// The major version in "mpirun (Open MPI) 5.0.7".
fn major(said: &str) -> Option<u32> {
    said.split_once("(Open MPI) ")?.1.split('.').next()?.parse().ok()
}

/// A shell in which `mpirun` belongs to a recent enough Open MPI: this machine's, or one in a root that is made for it.
fn shell(repo: &Repo) -> Result<Command> {
    let said = |program: &str| {
        let output = Command::new(program).arg("--version").output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).ok()
    };
    let own = said("mpirun").and_then(|said| major(&said));
    let mut command = match own {
        Some(5..) => Command::new("bash"),
        _ if said("debootstrap").is_some() && rustix::process::geteuid().is_root() => {
            let mut command = Command::new(repo.path("packaging/in-debian.sh"));
            command.arg(repo.layout().target().join("debian/trixie")).arg("bash");
            command
        }
        _ => {
            let own = own.map_or("none".to_owned(), |major| format!("version {major}"));
            bail!(
                "this needs Open MPI 5 or later, and the one here is: {own}. As root and with debootstrap installed it \
                 makes a root of Debian 13, which has one (packaging/in-debian.sh)"
            )
        }
    };
    command.args(["-euc", SCRIPT, "bench"]);
    Ok(command)
}

/// The target compared with the floor: no slower (within 1 % of noise), and faster if copies can overlap.
fn target(size: usize) -> f64 {
    if size >= 4 * MIB { 1.3 } else { 0.99 }
}

/// Parses "allreduce 4096 12.30 14.50": bytes, and µs with Gaudi buffers and by hand.
fn figure(line: &str, modelled: bool) -> Result<Record> {
    let words: Vec<&str> = line.split(' ').collect();
    let [collective, bytes, gaudi, by_hand] = words[..] else { bail!("not understood: {line}") };
    let size: usize = bytes.parse().context("no size")?;
    let rate = |us: &str| Ok::<_, anyhow::Error>(size as f64 / us.parse::<f64>()? / 1e3);
    let name = format!("{collective}, {}", size_name(size));
    let name = if modelled { named(name) } else { name };
    let target = modelled.then(|| target(size));
    Ok(Record::new(name, rate(gaudi)?, "GB/s", rate(by_hand)?, target))
}

pub(super) fn run(repo: &Repo, model: Option<&str>, quick: bool) -> Result<Vec<Record>> {
    let layout = repo.layout();
    let ucx = Ucx::V1_22.lib_dirs(layout);
    let libraries = std::env::join_paths(ucx).context("a folder of UCX has a colon")?;
    std::fs::create_dir_all(layout.scratch()).context("cannot make a folder")?;
    let mut shell = shell(repo)?;
    shell
        .args(if quick { ["65536", "1"] } else { ["67108864", "9"] })
        .env("DIST", layout.dist())
        .env("HERE", repo.path(""))
        .env("PROGRAM", layout.scratch().join("mpi_bench"))
        .env("LD_LIBRARY_PATH", libraries)
        .env("SOFT_GAUDI_LENIENT", "ordered,unpinned");
    if let Some(model) = model {
        shell.env("SOFT_GAUDI_MODEL", model).env("SOFT_GAUDI_CLOSE_TIME", "10");
    }
    let software = matches!(Device::hardware_or(SoftNode::lenient()), Device::Software(_));
    shell.env("SOFT", if software || model.is_some() { "--soft=2" } else { "" });
    let work = Work::start("collectives with Gaudi buffers and by hand");
    let output = shell.output().context("cannot run bash")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    work.done("");
    let lines = text.lines().filter(|line| line.starts_with("all"));
    let mut figures =
        lines.map(|line| figure(line, model.is_some())).collect::<Result<Vec<_>>>()?;
    figures.sort_by_key(|record| record.name.contains("alltoall"));
    ensure!(!figures.is_empty(), "nothing was measured:\n{text}");
    Ok(figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_rates_and_the_target_grows_with_the_size() {
        let record = figure("allreduce 4194304 1000.00 1500.00", true).expect("a figure");
        assert_eq!(record.name, "modelled Gaudi2: allreduce, 4 MiB");
        assert!((record.value - 4.194).abs() < 0.001 && (record.ratio - 1.5).abs() < 0.001);
        assert_eq!((record.target, record.met), (Some(1.3), Some(true)));
        let record = figure("alltoall 64 10.00 9.00", true).expect("a figure");
        assert_eq!(record.name, "modelled Gaudi2: alltoall, 64 B");
        assert_eq!((record.target, record.met), (Some(0.99), Some(false)));
        let record = figure("alltoall 64 10.00 9.00", false).expect("a figure");
        assert_eq!((record.name.as_str(), record.target), ("alltoall, 64 B", None));
        assert!(figure("alltoall 64 10.00", true).is_err());
    }

    #[test]
    fn the_version_of_open_mpi_is_read() {
        assert_eq!(major("mpirun (Open MPI) 5.0.7\n\nReport bugs"), Some(5));
        assert_eq!(major("HYDRA build details:"), None);
    }
}
