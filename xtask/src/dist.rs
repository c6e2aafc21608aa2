//! `cargo xtask build`: builds what users get and installs it into `target/dist`.
//!
//! UCX finds plugin files by the suffix under which its own libucs was opened (`.so`, `.so.0` or `.so.0.0.0`), so each
//! plugin has all three names. The file under these names is a small loader (`plugin/plugin-loader`) of the engine next
//! to them, so that any number of copies uses one engine. Another copy is for `LD_PRELOAD`, with a UCX that does not
//! look for plugins.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::fs::{CWD, RenameFlags};

use crate::package::copy_tree;
use crate::progress::Work;
use crate::repo::Repo;

/// How to compile.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// The release for users, optimised across crates.
    Shipped,
    /// A build for tests, which takes less time.
    Release,
    Debug,
}

/// Frameworks of UCX that load the plugin, and the file names that they look for.
const PLUGIN_NAMES: [&str; 2] = ["libuct_gaudi", "libucx_perftest_gaudi"];
const PLUGIN_SUFFIXES: [&str; 3] = [".so", ".so.0", ".so.0.0.0"];

/// The names of the components that Open MPI looks for.
const OPEN_MPI_NAMES: [&str; 3] =
    ["mca_accelerator_gaudi.so", "mca_op_gaudi.so", "mca_coll_gaudi.so"];
/// The module of libucs, and the file with defaults that it reads.
const DEFAULTS_NAME: &str = "libucs_gaudi";
const DEFAULTS: (&str, &str) =
    ("ucx-gaudi.conf", include_str!("../../plugin/ucs-gaudi/ucx-gaudi.conf"));

/// The Python module.
const PYTHON: [(&str, &str); 2] = [
    ("__init__.py", include_str!("../../python/ucx_gaudi/__init__.py")),
    ("py.typed", include_str!("../../python/ucx_gaudi/py.typed")),
];
/// For programs that open a card themselves.
const HEADER: &str = include_str!("../../plugin/uct-gaudi/include/ucx_gaudi.h");

/// Paths relative to the file itself, so that the folder can be moved.
const PKG_CONFIG: &str = concat!(
    "prefix=${pcfiledir}/../..\n\
     libdir=${prefix}/lib/ucx-gaudi\n\
     Name: ucx-gaudi\n\
     Description: Gaudi memory for programs (ucx_gaudi.h)\n\
     Version: ",
    env!("CARGO_PKG_VERSION"),
    "\nCflags: -I${prefix}/include\n\
     Libs: -L${libdir} -Wl,-rpath,${libdir} -lucx_gaudi\n"
);

/// The files that cargo built.
#[derive(Debug)]
struct Artifacts {
    engine: PathBuf,
    loader: PathBuf,
    defaults: PathBuf,
    open_mpi: PathBuf,
    soft_gaudi: PathBuf,
    soft_rdma: PathBuf,
    soft_scal: PathBuf,
    soft_synapse: PathBuf,
    kernel_thunk: PathBuf,
    ucp_check: PathBuf,
    tool: PathBuf,
}

/// Where shells look for completions below a prefix, and under which name.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "share/bash-completion/completions/ucx-gaudi"),
    ("zsh", "share/zsh/site-functions/_ucx-gaudi"),
    ("fish", "share/fish/vendor_completions.d/ucx-gaudi.fish"),
];

/// Builds, then replaces `target/dist` by a new folder.
pub(crate) fn build(repo: &Repo, profile: Profile) -> Result<()> {
    let artifacts = compile(repo, profile)?;
    let dist = repo.layout().dist();
    let work = Work::start(format!("laying out {}", repo.shown(&dist)));
    replace_folder(&dist, |staging| {
        lay_out(staging, &artifacts)?;
        copy_pages(repo, staging)?;
        write_documents(staging, &artifacts.tool)
    })?;
    remember(&dist, profile)?;
    work.done("");
    Ok(())
}

/// Builds in the same way as the last time, or for users; cargo knows what has changed since.
pub(crate) fn build_again(repo: &Repo) -> Result<()> {
    build(repo, remembered(&repo.layout().dist()))
}

const PROFILE: &str = "profile";

/// Next to the folder, because everything inside it gets installed.
fn remember(dist: &Path, profile: Profile) -> Result<()> {
    let file = dist.with_extension(PROFILE);
    fs::write(&file, format!("{profile:?}\n")).with_context(|| format!("no {}", file.display()))
}

fn remembered(dist: &Path) -> Profile {
    let text = fs::read_to_string(dist.with_extension(PROFILE)).unwrap_or_default();
    match text.trim() {
        "Debug" => Profile::Debug,
        "Release" => Profile::Release,
        _ => Profile::Shipped,
    }
}

/// The packages to build. A build of further packages must name these, too: cargo compiles shared libraries anew when
/// the features of their dependencies differ, and those depend on the named packages.
pub(crate) const PACKAGES: [&str; 9] = [
    "--package=uct-gaudi",
    "--package=ucs-gaudi",
    "--package=mpi-gaudi",
    "--package=ucp-check",
    "--package=cli",
    "--package=soft-gaudi",
    "--package=soft-rdma",
    "--package=soft-synapse",
    "--package=kernel-thunk",
];

fn compile(repo: &Repo, profile: Profile) -> Result<Artifacts> {
    let mut cargo = repo.cargo();
    cargo.args(["build", "--message-format=json-render-diagnostics"]);
    cargo.args(PACKAGES);
    match profile {
        Profile::Shipped => _ = cargo.arg("--profile=shipped"),
        Profile::Release => _ = cargo.arg("--release"),
        Profile::Debug => {}
    }
    let messages = messages(&mut cargo)?;
    Ok(Artifacts {
        engine: artifact(&messages, "uct_gaudi", ".so")?,
        loader: compile_loader(repo)?,
        defaults: artifact(&messages, "ucs_gaudi", ".so")?,
        open_mpi: artifact(&messages, "mpi_gaudi", ".so")?,
        soft_gaudi: artifact(&messages, "soft_gaudi", ".so")?,
        soft_rdma: link_soft_rdma(repo, &artifact(&messages, "soft_rdma", ".a")?)?,
        soft_scal: script_output(&messages, "soft-synapse")?.join("libscal.so"),
        soft_synapse: artifact(&messages, "soft_synapse", ".so")?,
        kernel_thunk: artifact(&messages, "kernel_thunk", ".so")?,
        ucp_check: artifact(&messages, "ucp-check", "")?,
        tool: artifact(&messages, "ucx-gaudi", "")?,
    })
}

/// The loader is small only if it is optimised and never unwinds; profiles cannot set the latter for one crate.
fn compile_loader(repo: &Repo) -> Result<PathBuf> {
    let mut cargo = repo.cargo();
    cargo.args(["rustc", "--message-format=json-render-diagnostics", "--release"]);
    cargo.args(["--package=plugin-loader", "--", "-Cpanic=abort"]);
    artifact(&messages(&mut cargo)?, "plugin_loader", ".so")
}

/// The messages that cargo prints as JSON.
pub(crate) fn messages(cargo: &mut Command) -> Result<String> {
    let output = cargo.stderr(Stdio::inherit()).output().context("cannot run cargo")?;
    if !output.status.success() {
        bail!("the build failed (cargo says why above)");
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Makes libibverbs.so.1 from a static library. Its symbols need versions, and cargo cannot give its own shared objects
/// versions: rustc passes a version script without names, and linkers refuse to mix the two.
fn link_soft_rdma(repo: &Repo, archive: &Path) -> Result<PathBuf> {
    let library = archive.with_file_name("libibverbs.so.1");
    let mut cc = Command::new("cc");
    cc.current_dir(repo.path("soft/soft-rdma"));
    cc.arg("@link.args").arg(archive).args(["-Wl,--no-whole-archive", "-o"]).arg(&library);
    let status = cc.status().context("cannot run cc")?;
    if !status.success() {
        bail!("cannot link {} ({status})", library.display());
    }
    Ok(library)
}

/// The programs in cargo's messages.
pub(crate) fn executables(messages: &str) -> Vec<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str(line).ok());
    let executable = |it: serde_json::Value| it["executable"].as_str().map(PathBuf::from);
    messages.filter_map(executable).collect()
}

/// The file of a target in cargo's messages: a library has an extension, a program has none.
pub(crate) fn artifact(messages: &str, target: &str, extension: &str) -> Result<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["reason"] == "compiler-artifact")
        .filter(|message| {
            // cargo has changed between `-` and `_` in target names before.
            message["target"]["name"].as_str().map(|name| name.replace('-', "_"))
                == Some(target.replace('-', "_"))
        })
        .filter_map(|message| match extension {
            "" => message["executable"].as_str().map(PathBuf::from),
            _ => message["filenames"]
                .as_array()?
                .iter()
                .filter_map(|name| name.as_str())
                .find(|name| name.ends_with(extension))
                .map(PathBuf::from),
        })
        .next_back()
        .with_context(|| format!("cargo built no {target}{extension}"))
}

/// The folder that a package's build script wrote to.
fn script_output(messages: &str, package: &str) -> Result<PathBuf> {
    messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["reason"] == "build-script-executed")
        .filter(|message| {
            let id = message["package_id"].as_str().unwrap_or_default();
            id.split('#').next().is_some_and(|path| path.ends_with(package))
        })
        .find_map(|message| message["out_dir"].as_str().map(PathBuf::from))
        .with_context(|| format!("cargo ran no build script of {package}"))
}

fn lay_out(dist: &Path, artifacts: &Artifacts) -> Result<()> {
    let layout = e2e::Layout::new(dist.parent().context("no parent")?);
    // The layout names its folders below `dist`; at this point that folder has another name.
    let place = |path: PathBuf| -> Result<PathBuf> {
        let below = path.strip_prefix(layout.dist()).context("not below dist")?.to_owned();
        let path = dist.join(below);
        fs::create_dir_all(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(path)
    };

    let plugins = place(layout.plugins())?;
    for (file, names) in
        [(&artifacts.loader, &PLUGIN_NAMES[..]), (&artifacts.defaults, &[DEFAULTS_NAME])]
    {
        for name in names {
            for suffix in PLUGIN_SUFFIXES {
                copy(file, &plugins.join(format!("{name}{suffix}")))?;
            }
        }
    }
    let (name, text) = DEFAULTS;
    fs::write(plugins.join(name), text).with_context(|| format!("cannot write {name}"))?;
    copy(&artifacts.engine, &plugins.with_file_name("libucx_gaudi.so"))?;
    let open_mpi = place(layout.open_mpi())?;
    for name in OPEN_MPI_NAMES {
        copy(&artifacts.open_mpi, &open_mpi.join(name))?;
    }
    let preload = layout.preload();
    let folder = place(preload.parent().context("no parent")?.to_owned())?;
    copy(&artifacts.loader, &folder.join(preload.file_name().context("no name")?))?;
    let header = place(layout.dist().join("include"))?.join("ucx_gaudi.h");
    fs::write(&header, HEADER).with_context(|| format!("cannot write {}", header.display()))?;
    let pkg_config = place(layout.dist().join("share/pkgconfig"))?.join("ucx-gaudi.pc");
    fs::write(&pkg_config, PKG_CONFIG).with_context(|| format!("no {}", pkg_config.display()))?;
    let module = place(layout.dist().join("lib/ucx-gaudi/python/ucx_gaudi"))?;
    for (name, text) in PYTHON {
        let path = module.join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    copy(&artifacts.soft_gaudi, &place(layout.soft_gaudi())?.join("libhl-thunk.so"))?;
    let rdma = layout.soft_gaudi().with_file_name("rdma");
    copy(&artifacts.soft_rdma, &place(rdma)?.join("libibverbs.so.1"))?;
    let synapse = place(layout.soft_synapse())?;
    copy(&artifacts.soft_scal, &synapse.join("libscal.so"))?;
    copy(&artifacts.soft_synapse, &synapse.join("libSynapse.so"))?;
    // Not on the loader path: a machine with the vendor's driver has its library.
    copy(&artifacts.kernel_thunk, &place(layout.kernel_thunk())?.join("libhl-thunk.so"))?;
    copy(&artifacts.ucp_check, &place(layout.bin())?.join("ucp-check"))?;
    copy(&artifacts.tool, &place(layout.bin())?.join("ucx-gaudi"))
}

/// Pages and examples for users, with the same relative paths as here: they refer to each other, and messages refer to them.
fn copy_pages(repo: &Repo, dist: &Path) -> Result<()> {
    let documents = dist.join(e2e::Layout::DOCUMENTS);
    for folder in ["docs", "examples"] {
        copy_tree(&repo.path(folder), &documents.join(folder))?;
    }
    for page in ["README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"] {
        copy(&repo.path(page), &documents.join(page))?;
    }
    Ok(())
}

/// The tool writes its own manual pages and completions, so they match its version.
fn write_documents(dist: &Path, tool: &Path) -> Result<()> {
    let run = |command: &mut Command| -> Result<Vec<u8>> {
        let output = command.stderr(Stdio::inherit()).output().context("cannot run ucx-gaudi")?;
        if !output.status.success() {
            bail!("{command:?} failed ({})", output.status);
        }
        Ok(output.stdout)
    };
    run(Command::new(tool).arg("man").arg(dist.join("share/man/man1")))?;
    for (shell, path) in COMPLETIONS {
        let script = run(Command::new(tool).args(["completions", shell]))?;
        let path = dist.join(path);
        let folder = path.parent().context("no parent")?;
        fs::create_dir_all(folder)
            .and_then(|()| fs::write(&path, script))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}

/// Fills a folder next to `place`, then exchanges the two in one step: programs keep the old files mapped, and no
/// reader sees a half-filled folder.
fn replace_folder(place: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let staging = place.with_extension(format!("new-{}", std::process::id()));
    let _ = fs::remove_dir_all(&staging);
    fs::create_dir_all(&staging).with_context(|| format!("cannot create {}", staging.display()))?;
    let filled = fill(&staging).and_then(|()| {
        if place.exists() {
            rustix::fs::renameat_with(CWD, &staging, CWD, place, RenameFlags::EXCHANGE)
                .or_else(|_| {
                    // Some file systems do not support the exchange.
                    fs::remove_dir_all(place)?;
                    fs::rename(&staging, place)
                })
                .with_context(|| format!("cannot replace {}", place.display()))
        } else {
            fs::rename(&staging, place)
                .with_context(|| format!("cannot create {}", place.display()))
        }
    });
    // Now this is the old folder, or what a failed build left.
    let _ = fs::remove_dir_all(&staging);
    filled
}

#[cfg(test)]
mod tests {
    use super::*;
    use tempfile::TempDir;

    fn folder() -> TempDir {
        tempfile::tempdir().expect("temporary folder")
    }

    fn artifacts(root: &Path) -> Artifacts {
        let file = |name: &str| {
            let path = root.join(name);
            fs::write(&path, name).expect("file");
            path
        };
        Artifacts {
            engine: file("engine"),
            loader: file("loader"),
            defaults: file("defaults"),
            open_mpi: file("open-mpi"),
            soft_gaudi: file("soft"),
            soft_rdma: file("rdma"),
            soft_scal: file("scal"),
            soft_synapse: file("synapse"),
            kernel_thunk: file("kernel"),
            ucp_check: file("ucp-check"),
            tool: file("ucx-gaudi"),
        }
    }

    #[test]
    fn every_plugin_name_is_a_loader_of_the_one_engine() {
        let root = folder();
        let dist = root.path().join("dist");
        let artifacts = artifacts(root.path());
        replace_folder(&dist, |staging| lay_out(staging, &artifacts)).expect("laid out");

        let plugins = dist.join("lib/ucx-gaudi/plugins");
        for name in ["libuct_gaudi", "libucx_perftest_gaudi"] {
            for suffix in [".so", ".so.0", ".so.0.0.0"] {
                let path = plugins.join(format!("{name}{suffix}"));
                assert!(!path.is_symlink(), "links do not survive every package format");
                assert_eq!(fs::read(&path).expect("exists"), b"loader");
            }
        }
        for name in
            ["libucs_gaudi.so", "libucs_gaudi.so.0", "libucs_gaudi.so.0.0.0", "ucx-gaudi.conf"]
        {
            assert!(plugins.join(name).exists(), "{name}");
        }
        assert_eq!(fs::read_dir(&plugins).expect("folder").count(), 10, "and nothing else");
        let preload = dist.join("lib/ucx-gaudi/preload/libucx_gaudi_preload.so");
        assert_eq!(fs::read(preload).expect("exists"), b"loader");
        for name in OPEN_MPI_NAMES {
            let path = dist.join("lib/ucx-gaudi/openmpi").join(name);
            assert_eq!(fs::read(path).expect("exists"), b"open-mpi");
        }
        let engine = dist.join("lib/ucx-gaudi/libucx_gaudi.so");
        assert_eq!(fs::read(engine).expect("exists"), b"engine");
        assert!(dist.join("lib/ucx-gaudi/soft/gaudi/libhl-thunk.so").exists());
        assert!(dist.join("lib/ucx-gaudi/soft/rdma/libibverbs.so.1").exists());
        assert!(dist.join("lib/ucx-gaudi/soft/synapse/libscal.so").exists());
        assert!(dist.join("lib/ucx-gaudi/soft/synapse/libSynapse.so").exists());
        assert!(dist.join("lib/ucx-gaudi/kernel/libhl-thunk.so").exists());
        assert!(dist.join("bin/ucp-check").exists());
        assert!(dist.join("bin/ucx-gaudi").exists());
        assert!(dist.join("include/ucx_gaudi.h").exists());
        assert!(dist.join("share/pkgconfig/ucx-gaudi.pc").exists());
        assert!(dist.join("lib/ucx-gaudi/python/ucx_gaudi/py.typed").exists());
    }

    #[test]
    fn the_python_module_has_the_version_of_the_workspace() {
        let line = concat!("\n__version__ = \"", env!("CARGO_PKG_VERSION"), "\"\n");
        assert!(PYTHON[0].1.contains(line));
    }

    #[test]
    fn rebuilding_drops_files_of_the_past() {
        let root = folder();
        let dist = root.path().join("dist");
        replace_folder(&dist, |staging| Ok(fs::write(staging.join("old"), "")?)).expect("first");
        replace_folder(&dist, |staging| Ok(fs::write(staging.join("new"), "")?)).expect("second");
        assert!(dist.join("new").exists() && !dist.join("old").exists());
        assert_eq!(
            fs::read_dir(root.path()).expect("folder").count(),
            1,
            "no staging folder stays"
        );
    }

    #[test]
    fn a_build_as_the_last_time_has_its_profile() {
        let root = folder();
        let dist = root.path().join("dist");
        assert_eq!(remembered(&dist), Profile::Shipped, "there was none");
        for profile in [Profile::Debug, Profile::Release, Profile::Shipped] {
            remember(&dist, profile).expect("written");
            assert_eq!(remembered(&dist), profile);
        }
    }

    #[test]
    fn failed_layout_keeps_the_old_folder() {
        let root = folder();
        let dist = root.path().join("dist");
        replace_folder(&dist, |staging| Ok(fs::write(staging.join("old"), "")?)).expect("first");
        replace_folder(&dist, |_| bail!("no")).expect_err("fails");
        assert!(dist.join("old").exists());
    }

    #[test]
    fn artifacts_are_read_from_cargos_messages() {
        let messages = concat!(
            r#"{"reason":"compiler-artifact","target":{"name":"soft_gaudi"},"filenames":["/t/libsoft_gaudi.so","/t/libsoft_gaudi.rlib"],"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","target":{"name":"ucp-check"},"filenames":["/t/ucp-check"],"executable":"/t/ucp-check"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        assert_eq!(
            artifact(messages, "soft_gaudi", ".so").expect("found"),
            Path::new("/t/libsoft_gaudi.so")
        );
        assert_eq!(artifact(messages, "ucp-check", "").expect("found"), Path::new("/t/ucp-check"));
        assert!(artifact(messages, "uct_gaudi", ".so").is_err());
    }
}
