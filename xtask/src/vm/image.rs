//! The guest's root file system: one archive with busybox, the driver, stock UCX, our programs, and the libraries of
//! this machine that they need.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufWriter, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use e2e::{Layout, Ucx};

use super::cpio::Archive;
use super::packages::{DRIVER, Debian, MODULES};
use super::{Folders, kernel_module};
use crate::dist::{PACKAGES, artifact};
use crate::progress::Work;
use crate::repo::Repo;

/// The files that were built for the machine.
#[derive(Debug)]
pub(super) struct Programs {
    /// The card, which runs outside the machine.
    pub(super) card: PathBuf,
    /// Small programs for the checks: examples of the libraries.
    helpers: Vec<PathBuf>,
}

/// Examples of `kernel-thunk` and `hl-thunk` that the checks run.
const HELPERS: [&str; 3] = ["misuse", "memory_rules", "rxe_link"];

pub(super) fn build_programs(repo: &Repo) -> Result<Programs> {
    let mut cargo = repo.cargo();
    cargo.args(["build", "--release", "--message-format=json-render-diagnostics"]);
    cargo.args(PACKAGES).args(["--package=pci-gaudi", "--bin=pci-gaudi", "--package=hl-thunk"]);
    cargo.args(HELPERS.map(|name| format!("--example={name}")));
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the build failed (cargo says why above)");
    }
    let messages = String::from_utf8_lossy(&output.stdout);
    Ok(Programs {
        card: artifact(&messages, "pci-gaudi", "")?,
        helpers: HELPERS.iter().map(|name| artifact(&messages, name, "")).collect::<Result<_>>()?,
    })
}

/// Writes the archive anew.
pub(super) fn write(
    repo: &Repo,
    folders: &Folders,
    debian: &Debian,
    programs: &Programs,
) -> Result<()> {
    let work = Work::start("writing the guest's file system");
    let path = folders.initramfs();
    let out = BufWriter::new(fs::File::create(&path)?);
    let mut image = Image { archive: Archive::new(out), folders: BTreeSet::new() };
    let layout = repo.layout();

    image.file("init", include_bytes!("guest.sh"), true)?;
    image.copy(&debian.busybox(), "bin/busybox")?;
    image.file("etc/hosts", b"127.0.0.1 localhost\n", false)?;
    for path in MODULES {
        let module = kernel_module::read(&debian.module(path))?;
        let name = path.rsplit('/').next().unwrap_or(path);
        if *path == DRIVER {
            image.file("mod/habanalabs-unpatched.ko", &module, false)?;
            image.file("mod/habanalabs.ko", &kernel_module::make_openable(module)?, false)?;
        } else {
            image.file(&format!("mod/{name}.ko"), &module, false)?;
        }
    }
    // The emulated card accepts any firmware.
    for name in ["gaudi2-boot-fit.itb", "gaudi2-fit.itb"] {
        image.file(&format!("lib/firmware/habanalabs/gaudi2/{name}"), &[0; 256], false)?;
    }

    let ucx = Ucx::V1_22;
    let mut linked = Vec::new();
    image.tree(&layout.kernel_thunk(), "opt/thunk", &mut linked)?;
    for (name, program) in HELPERS.iter().zip(&programs.helpers) {
        image.copy(program, &format!("bin/{name}"))?;
        linked.push(program.clone());
    }
    image.rdma(layout, &mut linked)?;
    image.plugin(layout, &mut linked)?;
    let parts = [
        (ucx.bin_dir(layout).context("no programs of UCX")?, "opt/ucx/bin"),
        (ucx.lib_dirs(layout)[0].clone(), "opt/ucx/lib"),
        (ucx.lib_dirs(layout)[1].clone(), "opt/ucx-libs"),
    ];
    for (from, to) in &parts {
        image.tree(from, to, &mut linked)?;
    }
    let search = [ucx.lib_dirs(layout), Ucx::Nixl.lib_dirs(layout)].concat();
    for library in needed(&linked, &search)? {
        image.copy(&library, library.to_string_lossy().trim_start_matches('/'))?;
    }
    image.archive.finish()?.flush()?;
    work.done(&format!("{} MiB", fs::metadata(&path)?.len() >> 20));
    Ok(())
}

struct Image<W> {
    archive: Archive<W>,
    folders: BTreeSet<PathBuf>,
}

impl<W: Write> Image<W> {
    /// The folders above a path.
    fn parents(&mut self, path: &str) -> Result<()> {
        let mut above: Vec<_> = Path::new(path).ancestors().skip(1).map(Path::to_owned).collect();
        above.reverse();
        for folder in above {
            let name = folder.to_string_lossy().into_owned();
            if !name.is_empty() && self.folders.insert(folder) {
                self.archive.folder(&name)?;
            }
        }
        Ok(())
    }

    fn file(&mut self, path: &str, data: &[u8], executable: bool) -> Result<()> {
        self.parents(path)?;
        Ok(self.archive.file(path, data, executable)?)
    }

    fn copy(&mut self, from: &Path, path: &str) -> Result<()> {
        let data = fs::read(from).with_context(|| format!("cannot read {}", from.display()))?;
        let executable = fs::metadata(from)?.permissions().mode() & 0o111 != 0;
        self.file(path, &data, executable)
    }

    /// Our programs, and the plugin where UCX finds it: the loaders, and in the folder above them the engine that they open.
    fn plugin(&mut self, layout: &Layout, linked: &mut Vec<PathBuf>) -> Result<()> {
        self.tree(&layout.bin(), "opt/gaudi/bin", linked)?;
        self.tree(&layout.plugins(), "opt/gaudi/lib/ucx-gaudi/plugins", linked)?;
        let engine = layout.plugins().with_file_name("libucx_gaudi.so");
        self.copy(&engine, "opt/gaudi/lib/ucx-gaudi/libucx_gaudi.so")?;
        let preload = "opt/gaudi/lib/ucx-gaudi/preload/libucx_gaudi_preload.so";
        self.copy(&layout.preload(), preload)?;
        linked.push(engine);
        Ok(())
    }

    /// A UCX with InfiniBand, and the part of this machine's rdma-core that drives the kernel's software RDMA device.
    /// Nothing, if there is no rdma-core.
    fn rdma(&mut self, layout: &Layout, linked: &mut Vec<PathBuf>) -> Result<()> {
        let settings = Path::new("/etc/libibverbs.d/rxe.driver");
        let folders = ["/usr/lib/x86_64-linux-gnu/libibverbs", "/usr/lib64/libibverbs"];
        let provider = folders.iter().find_map(|folder| named(Path::new(folder), "librxe-rdmav"));
        let Some(provider) = provider.filter(|_| settings.exists()) else { return Ok(()) };
        let verbs = needed(std::slice::from_ref(&provider), &[])?;
        let verbs = verbs.iter().find(|path| path.ends_with("libibverbs.so.1"));
        let verbs = verbs.context("the provider needs no libibverbs.so.1")?;
        for file in [settings, &provider] {
            self.copy(file, file.to_string_lossy().trim_start_matches('/'))?;
        }
        linked.push(provider);

        let nixl = &Ucx::Nixl.lib_dirs(layout)[0];
        let ib = ["ucx/libuct_ib.so.0.0.0", "ucx/libuct_cma.so.0.0.0"].map(|name| nixl.join(name));
        let parts = ["libucm-", "libucs-", "libuct-", "libucp-"].iter();
        for file in parts.filter_map(|part| named(nixl, part)).chain(ib) {
            let name = file.strip_prefix(nixl)?.to_string_lossy();
            self.copy(&file, &format!("opt/nixl/{name}"))?;
            linked.push(file);
        }
        // The package brings a libibverbs without providers; this machine's replaces it.
        let own = named(nixl, "libibverbs-").context("NIXL's UCX has no libibverbs")?;
        let own = own.file_name().unwrap_or_default().to_string_lossy();
        Ok(self.archive.link(&format!("opt/nixl/{own}"), &verbs.to_string_lossy())?)
    }

    /// A folder of programs and libraries, except those for other accelerators. Also adds the files to `linked`.
    fn tree(&mut self, from: &Path, to: &str, linked: &mut Vec<PathBuf>) -> Result<()> {
        let entries = fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()));
        for entry in entries?.collect::<std::io::Result<Vec<_>>>()? {
            let name = entry.file_name().to_string_lossy().into_owned();
            let path = format!("{to}/{name}");
            let kind = entry.file_type()?;
            let foreign = ["cuda", "rocm", "libze", "_ze", "cmake", "pkgconfig"];
            if foreign.iter().any(|part| name.contains(part)) || name.ends_with(".a") {
                continue;
            }
            if kind.is_dir() {
                self.tree(&entry.path(), &path, linked)?;
            } else if kind.is_symlink() {
                self.parents(&path)?;
                self.archive.link(&path, &fs::read_link(entry.path())?.to_string_lossy())?;
            } else {
                self.copy(&entry.path(), &path)?;
                linked.push(entry.path());
            }
        }
        Ok(())
    }
}

/// Finds a file by the beginning of its name.
fn named(folder: &Path, beginning: &str) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let found = entries.find(|entry| entry.file_name().to_string_lossy().starts_with(beginning));
    found.map(|entry| entry.path())
}

/// The libraries of this machine, including the loader, that these files need.
fn needed(files: &[PathBuf], search: &[PathBuf]) -> Result<BTreeSet<PathBuf>> {
    let search = std::env::join_paths(search)?;
    let output = Command::new("ldd").args(files).env("LD_LIBRARY_PATH", search).output();
    let output = output.context("cannot run ldd")?;
    let text = String::from_utf8_lossy(&output.stdout);
    // "name => /path (address)", and "/path (address)" for the loader.
    let paths =
        text.lines().filter(|line| line.starts_with(char::is_whitespace)).filter_map(|line| {
            let path = line.split("=>").last()?.split_whitespace().next()?;
            path.starts_with('/').then(|| PathBuf::from(path))
        });
    let ours = |path: &PathBuf| {
        let text = path.to_string_lossy();
        text.contains("/target/") || text.contains("libhl-thunk")
    };
    Ok(paths.filter(|path| !ours(path)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_guest_has_the_engine_above_its_loaders() {
        let target = tempfile::tempdir().expect("folder");
        let layout = Layout::new(target.path());
        for folder in [layout.bin(), layout.plugins()] {
            fs::create_dir_all(folder).expect("folder");
        }
        fs::write(layout.plugins().join("libuct_gaudi.so.0"), "loader").expect("file");
        let engine = layout.plugins().with_file_name("libucx_gaudi.so");
        let mut linked = Vec::new();
        let mut image = Image { archive: Archive::new(Vec::new()), folders: BTreeSet::new() };
        assert!(image.plugin(&layout, &mut linked).is_err(), "a build without an engine");

        fs::write(&engine, "the engine").expect("file");
        let preload = layout.preload();
        fs::create_dir_all(preload.parent().expect("a folder")).expect("folder");
        fs::write(preload, "loader").expect("file");
        let mut image = Image { archive: Archive::new(Vec::new()), folders: BTreeSet::new() };
        image.plugin(&layout, &mut linked).expect("complete");
        let archive = image.archive.finish().expect("memory");
        let archive = String::from_utf8_lossy(&archive);
        for path in
            ["plugins/libuct_gaudi.so.0", "libucx_gaudi.so", "preload/libucx_gaudi_preload.so"]
        {
            assert!(archive.contains(&format!("opt/gaudi/lib/ucx-gaudi/{path}\0")), "{path}");
        }
        assert!(linked.contains(&engine), "its libraries are needed too");
    }
}
