//! Debian's packages for the virtual machine: QEMU, a kernel with its modules, busybox.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

use super::Folders;
use crate::debian::{Apt, through_loader, unpack};
use crate::progress::Work;

/// The current stable release: its kernel stays available for years. `vfio-user-pci` came with QEMU 10.1, so QEMU is
/// taken from the backports.
const RELEASE: &str = "trixie";
const BACKPORTS: &str = "trixie-backports";

/// Modules of the kernel, below `kernel/`: the driver and its dependencies, another DRM device, and a software RDMA
/// device over a network device that goes nowhere.
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

/// The parts of the machine.
#[derive(Debug)]
pub(super) struct Debian {
    /// Unpacked packages: QEMU and its libraries, busybox.
    pub(super) root: PathBuf,
    /// Version of the kernel, which is also the name of its modules' folder.
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

    /// QEMU, run by the loader of its own libraries.
    pub(super) fn qemu(&self) -> Command {
        let mut command = through_loader(&self.root, "usr/bin/qemu-system-x86_64");
        for share in ["qemu", "seabios"] {
            command.arg("-L").arg(self.root.join("usr/share").join(share));
        }
        command.env("QEMU_MODULE_DIR", self.root.join("usr/lib/x86_64-linux-gnu/qemu"));
        command
    }
}

/// Fetches and unpacks whatever is missing.
pub(super) fn fetch(folders: &Folders) -> Result<Debian> {
    let root = folders.packages();
    let stamp = root.join("kernel-version");
    if let Ok(kernel) = fs::read_to_string(&stamp) {
        let debian = Debian { root: root.clone(), kernel };
        // An earlier version may have unpacked fewer packages.
        if MODULES.iter().all(|name| debian.module(name).exists()) {
            return Ok(debian);
        }
    }
    let apt = Apt::new(&folders.apt(), &[RELEASE, BACKPORTS])?;
    let work = Work::start(format!("lists of packages of Debian {RELEASE}"));
    apt.run("apt-get", &["update", "--error-on=any"])?;
    work.done("");

    let image = apt.dependency(&format!("linux-image-amd64/{RELEASE}"))?;
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
        let is_kernel = name.starts_with("linux-image-");
        unpack(&package, &staging, &if is_kernel { parts(&kernel) } else { Vec::new() })?;
        count += 1;
    }
    fs::write(staging.join("kernel-version"), &kernel)?;
    let _ = fs::remove_dir_all(&root);
    fs::rename(&staging, &root)?;
    // The archives are no longer needed.
    fs::remove_dir_all(folders.apt())?;
    work.done(&format!("{count} packages"));
    Ok(Debian { root, kernel })
}

fn module_path(kernel: &str, name: &str) -> String {
    format!("usr/lib/modules/{kernel}/kernel/{name}.ko.xz")
}

/// The parts of a kernel's package that are used.
fn parts(kernel: &str) -> Vec<String> {
    let modules = MODULES.iter().map(|name| format!("./{}", module_path(kernel, name)));
    std::iter::once(format!("./boot/vmlinuz-{kernel}")).chain(modules).collect()
}
