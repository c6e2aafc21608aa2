//! Debian's packages for the virtual machine, downloaded and unpacked by a package manager of our own
//! configuration, which installs nothing and needs no privileges.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use super::Folders;
use crate::progress::Work;

/// The current stable release: its kernel stays available for years. QEMU needs `vfio-user-pci`, which came
/// with 10.1, so it is taken from the backports.
const RELEASE: &str = "trixie";
const BACKPORTS: &str = "trixie-backports";
const MIRROR: &str = "http://deb.debian.org/debian";
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Modules of the kernel, below `kernel/`: the driver and what it needs, another DRM device, and a software RDMA
/// device over a network device that leads nowhere.
pub(super) const MODULES: &[&str] = &[
    "drivers/gpu/drm/drm",
    DRIVER,
    "drivers/gpu/drm/drm_kms_helper",
    "drivers/gpu/drm/drm_shmem_helper",
    "drivers/gpu/drm/vgem/vgem",
    "drivers/infiniband/core/ib_core",
    "drivers/infiniband/core/ib_uverbs",
    "net/ipv4/udp_tunnel",
    "net/ipv6/ip6_udp_tunnel",
    "crypto/crc32_generic",
    "drivers/infiniband/sw/rxe/rdma_rxe",
    "drivers/net/dummy",
];
pub(super) const DRIVER: &str = "drivers/accel/habanalabs/habanalabs";

/// What the machine is made of.
#[derive(Debug)]
pub(super) struct Debian {
    /// Unpacked packages: QEMU and its libraries, busybox.
    pub(super) root: PathBuf,
    /// Version of the kernel, as its modules' folder is called.
    pub(super) kernel: String,
}

impl Debian {
    pub(super) fn vmlinuz(&self) -> PathBuf {
        self.root.join("boot").join(format!("vmlinuz-{}", self.kernel))
    }

    /// One of [`MODULES`], still compressed.
    pub(super) fn module(&self, name: &str) -> PathBuf {
        self.root.join(module_path(&self.kernel, name))
    }

    pub(super) fn busybox(&self) -> PathBuf {
        self.root.join("usr/bin/busybox")
    }

    /// QEMU through the loader that belongs to its libraries.
    pub(super) fn qemu(&self) -> Command {
        let libraries = self.root.join("usr/lib/x86_64-linux-gnu");
        let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
        command.arg("--library-path").arg(&libraries);
        command.arg(self.root.join("usr/bin/qemu-system-x86_64"));
        for share in ["qemu", "seabios"] {
            command.arg("-L").arg(self.root.join("usr/share").join(share));
        }
        command.env("QEMU_MODULE_DIR", libraries.join("qemu"));
        command
    }
}

/// Fetches and unpacks what is not there yet.
pub(super) fn fetch(folders: &Folders) -> Result<Debian> {
    let root = folders.packages();
    let stamp = root.join("kernel-version");
    if let Ok(kernel) = fs::read_to_string(&stamp) {
        let debian = Debian { root: root.clone(), kernel };
        // An earlier version may have unpacked fewer.
        if MODULES.iter().all(|name| debian.module(name).exists()) {
            return Ok(debian);
        }
    }
    let apt = Apt::new(&folders.apt())?;
    let work = Work::start(format!("lists of packages of Debian {RELEASE}"));
    apt.run("apt-get", &["update", "--error-on=any"])?;
    work.done("");

    let image = apt.dependency("linux-image-amd64")?;
    let kernel = image.trim_start_matches("linux-image-").to_owned();
    let work = Work::start("downloading QEMU and its libraries (40 MB)");
    let qemu =
        ["install", "--download-only", "--no-install-recommends", "--yes", "--target-release"];
    apt.run("apt-get", &[&qemu[..], &[BACKPORTS, "qemu-system-x86"]].concat())?;
    work.done("");
    let work = Work::start(format!("downloading Linux {kernel} (108 MB)"));
    apt.run("apt-get", &["download", &image, "busybox-static"])?;
    work.done("");

    let work = Work::start("unpacking");
    let staging = folders.root.join("packages.new");
    let _ = fs::remove_dir_all(&staging);
    fs::create_dir_all(&staging)?;
    let mut count = 0;
    for package in apt.downloaded()? {
        let name = package.file_name().unwrap_or_default().to_string_lossy().into_owned();
        unpack(&package, &staging, name.starts_with("linux-image-").then_some(&kernel))?;
        count += 1;
    }
    fs::write(staging.join("kernel-version"), &kernel)?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&staging, &root)?;
    // The archives have served.
    fs::remove_dir_all(folders.apt())?;
    work.done(&format!("{count} packages"));
    Ok(Debian { root, kernel })
}

fn module_path(kernel: &str, name: &str) -> String {
    format!("usr/lib/modules/{kernel}/kernel/{name}.ko.xz")
}

/// All of a package; of a kernel's only what is used.
fn unpack(package: &Path, into: &Path, kernel: Option<&String>) -> Result<()> {
    let mut archive = Command::new("dpkg-deb")
        .arg("--fsys-tarfile")
        .arg(package)
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run dpkg-deb")?;
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--no-same-owner", "--directory"]).arg(into);
    if let Some(version) = kernel {
        tar.arg(format!("./boot/vmlinuz-{version}"));
        tar.args(MODULES.iter().map(|name| format!("./{}", module_path(version, name))));
    }
    tar.stdin(archive.stdout.take().context("dpkg-deb has no output")?);
    let unpacked = tar.status().context("cannot run tar")?.success();
    if !(unpacked & archive.wait()?.success()) {
        bail!("cannot unpack {}", package.display());
    }
    Ok(())
}

/// apt with lists, cache and state of its own.
struct Apt {
    folder: PathBuf,
}

impl Apt {
    fn new(folder: &Path) -> Result<Self> {
        for program in ["apt-get", "apt-cache", "dpkg-deb", "xz"] {
            if Command::new(program).arg("--version").stdout(Stdio::null()).status().is_err() {
                bail!(
                    "the virtual machine is made of Debian's packages, for which `{program}` is needed \
                     (Debian and Ubuntu have it)"
                );
            }
        }
        if !Path::new(KEYRING).exists() {
            bail!("{KEYRING} is not there; on Ubuntu, install debian-archive-keyring");
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
        // Nothing is installed as far as it knows, so every dependency is downloaded.
        fs::write(folder.join("state/status"), "")?;
        let source = |suite| format!("deb [signed-by={KEYRING}] {MIRROR} {suite} main\n");
        fs::write(folder.join("etc/sources.list"), source(RELEASE) + &source(BACKPORTS))?;
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

    fn run(&self, program: &str, arguments: &[&str]) -> Result<String> {
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
                "{program} {} failed: is {MIRROR} reachable from here, if need be through http_proxy?\n{}",
                arguments.join(" "),
                String::from_utf8_lossy(&output.stderr).trim_end()
            );
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The package that a meta package of the release stands for.
    fn dependency(&self, package: &str) -> Result<String> {
        let text = self.run("apt-cache", &["depends", &format!("{package}/{RELEASE}")])?;
        let found = text.lines().find_map(|line| line.trim().strip_prefix("Depends: "));
        Ok(found.with_context(|| format!("{package} depends on nothing"))?.to_owned())
    }

    fn archives(&self) -> PathBuf {
        self.folder.join("cache/archives")
    }

    fn downloaded(&self) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.archives())?.collect::<std::io::Result<Vec<_>>>()?;
        let files = entries.into_iter().map(|entry| entry.path());
        Ok(files.filter(|path| path.extension().is_some_and(|e| e == "deb")).collect())
    }
}
