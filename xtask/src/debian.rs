//! Downloads and unpacks Debian packages with a separately configured package manager, which installs nothing and needs
//! no privileges. Their programs run with the libraries that came with them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// A program below `root`, run by the loader of its own libraries.
pub(crate) fn through_loader(root: &Path, program: &str) -> Command {
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries).arg(root.join(program));
    command
}

/// Unpacks these files of a package; all files if the list is empty.
pub(crate) fn unpack(package: &Path, into: &Path, files: &[String]) -> Result<()> {
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--no-same-owner", "--directory"]).arg(into).args(files);
    tar.stdin(archive.stdout.take().context("dpkg-deb has no output")?);
    let unpacked = tar.status().context("cannot run tar")?.success();
    if !(unpacked & archive.wait()?.success()) {
        bail!("cannot unpack {}", package.display());
    }
    Ok(())
}

/// The mirror from which this machine gets Debian's packages, or `DEBIAN_MIRROR`.
fn mirror() -> Result<String> {
    if let Ok(mirror) = std::env::var("DEBIAN_MIRROR") {
        return Ok(mirror);
    }
    let asked = ["indextargets", "--format=$(REPO_URI)", "Created-By: Packages", "Label: Debian"];
    let output = Command::new("apt-get").args(asked).output().context("cannot run apt-get")?;
    let text = String::from_utf8_lossy(&output.stdout);
    let first = text.lines().next().map(str::to_owned);
    first.context(
        "apt knows no mirror of Debian: run `apt-get update`, or name one in DEBIAN_MIRROR",
    )
}

/// apt with separate lists, cache and state.
pub(crate) struct Apt {
    folder: PathBuf,
}

impl Apt {
    /// Packages of these suites; the first is the default.
    pub(crate) fn new(folder: &Path, suites: &[&str]) -> Result<Self> {
        for program in ["apt-get", "apt-cache", "dpkg-deb", "xz"] {
            if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
                bail!(
                    "packages of Debian are fetched with `{program}`, which is not there \
                     (Debian and Ubuntu have it)"
                );
            }
        }
        if !Path::new(KEYRING).exists() {
            bail!(
                "{KEYRING} is not there; on Ubuntu, install debian-archive-keyring, and set DEBIAN_MIRROR"
            );
        }
        let folder = std::path::absolute(folder)?;
        let folders = [
            "state/lists/partial",
            "cache/archives/partial",
            "etc/apt.conf.d",
            "etc/preferences.d",
        ];
        for below in folders {
            fs::create_dir_all(folder.join(below))?;
        }
        // apt believes that nothing is installed, so it downloads every dependency.
        fs::write(folder.join("state/status"), "")?;
        let mirror = mirror()?;
        let source = |suite| format!("deb [signed-by={KEYRING}] {mirror} {suite} main\n");
        let sources: String = suites.iter().map(source).collect();
        fs::write(folder.join("etc/sources.list"), sources)?;
        // The machine's own proxies and limits apply.
        let acquire = Command::new("apt-config").args(["dump", "--no-empty", "Acquire"]).output();
        let acquire = acquire.map(|output| output.stdout).unwrap_or_default();
        let place = folder.display();
        let settings = format!(
            "Dir \"{place}\"; Dir::State \"state\"; Dir::State::status \"{place}/state/status\";\n\
             Dir::Cache \"cache\"; Dir::Etc \"etc\"; APT::Sandbox::User \"root\";\n\
             APT::Architecture \"amd64\"; APT::Architectures {{ \"amd64\"; }};\n\
             Acquire::Languages \"none\"; Acquire::Retries \"3\";\n"
        );
        fs::write(
            folder.join("apt.conf"),
            String::from_utf8_lossy(&acquire).into_owned() + &settings,
        )?;
        Ok(Self { folder })
    }

    pub(crate) fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
        let output = Command::new(program)
            .args(arguments)
            .current_dir(self.archives())
            .env("APT_CONFIG", self.folder.join("apt.conf"))
            .env("DEBIAN_FRONTEND", "noninteractive")
            .env("LC_ALL", "C")
            .output()
            .with_context(|| format!("cannot run {program}"))?;
        if !output.status.success() {
            bail!(
                "{program} {} failed: is Debian's mirror reachable from here, if need be through http_proxy?\n{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The package that a meta package stands for.
    pub(crate) fn dependency(&self, package: &str) -> Result<String> {
        let text = self.run("apt-cache", &["depends", package])?;
        let found = text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(found.with_context(|| format!("{package} depends on nothing"))?.to_owned())
    }

    fn archives(&self) -> PathBuf {
        self.folder.join("cache/archives")
    }

    /// The downloaded files.
    pub(crate) fn downloaded(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.archives())?.collect::<std::io::Result<Vec<_>>>()?;
        let files = entries.into_iter().map(|entry| entry.path());
        Ok(files.filter(|path| path.extension().is_some_and(|e| e == "deb")).collect())
    }
}
