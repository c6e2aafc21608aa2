//! `cargo xtask package`: makes packages of `target/dist` in `target/package`.
//!
//! Each format is written with tools that every build machine has (`tar`, Python's `zipfile`) or with its own standard
//! tool (`rpmbuild`): the content is a folder, and the metadata are a few lines. That is less than the configuration of
//! cargo-deb and cargo-generate-rpm, and needs no installation.
//!
//! The software devices are in a separate package: nobody should get a second `libhl-thunk.so` or `libibverbs.so.1` by
//! accident. The library for the kernel's own driver is outside the loader path.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;

use crate::progress::Work;
use crate::repo::Repo;
use crate::tuning::STAGING;

/// What can be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// A folder that may be unpacked anywhere
    Tar,
    /// For Debian and Ubuntu
    Deb,
    /// For Fedora, RHEL and SUSE; needs rpmbuild
    Rpm,
    /// For pip
    Wheel,
}

/// One package: its name, its description, and the part of `target/dist` in it.
struct Part {
    name: &'static str,
    summary: &'static str,
    folders: &'static [&'static str],
    without: Option<&'static str>,
}

const PARTS: [Part; 2] = [
    Part {
        name: "ucx-gaudi",
        summary: "Gaudi memory for stock UCX: plugin and tool",
        folders: &["bin", "include", "lib", "share"],
        without: Some("lib/ucx-gaudi/soft"),
    },
    Part {
        name: "ucx-gaudi-soft",
        summary: "Gaudi accelerators and an InfiniBand HCA in software, to try and test ucx-gaudi",
        folders: &["lib/ucx-gaudi/soft"],
        without: None,
    },
];

/// A `target/dist` without this file is not ours, or of another version.
const ENGINE: &str = "lib/ucx-gaudi/libucx_gaudi.so";

/// The files of a part, stripped, in a separate folder.
struct Staged<'a> {
    part: &'a Part,
    root: PathBuf,
    version: &'a str,
    glibc: (u32, u32),
}

/// Makes these packages in `out`.
pub(crate) fn run(repo: &Repo, formats: &[Format], version: &str, out: &Path) -> Result<()> {
    check_version(version)?;
    let engine = repo.layout().dist().join(ENGINE);
    ensure!(engine.exists(), "no {}; `cargo xtask build` makes it", repo.shown(&engine));
    fs::create_dir_all(out).with_context(|| format!("cannot create {}", out.display()))?;
    let scratch = tempfile::tempdir_in(out).context("no temporary folder")?;
    for part in &PARTS {
        let root = scratch.path().join(part.name);
        stage(repo, part, version, &root)?;
        let staged = Staged { part, version, glibc: glibc_needed(&root)?, root };
        for format in formats {
            let work = Work::start(format!("{} as {format:?}", part.name));
            let made = match format {
                Format::Tar => Some(tar(&staged, out)?),
                Format::Deb => Some(deb(&staged, scratch.path(), out)?),
                Format::Rpm => rpm(&staged, scratch.path(), out)?,
                Format::Wheel => Some(wheel(repo, &staged, scratch.path(), out)?),
            };
            work.done(
                &made
                    .map_or("skipped: no rpmbuild (package `rpm` or `rpm-build`)".into(), |made| {
                        repo.shown(&made).to_string()
                    }),
            );
        }
    }
    Ok(())
}

/// A version that all formats accept.
fn check_version(version: &str) -> Result<()> {
    let fits = version.starts_with(|c: char| c.is_ascii_digit())
        && version.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '.');
    ensure!(
        fits,
        "{version} is no version for all formats; digits, dots and small letters, as 0.1.0.dev3"
    );
    Ok(())
}

/// Copies the files of a part, strips programs and libraries, and adds further files of packages.
fn stage(repo: &Repo, part: &Part, version: &str, root: &Path) -> Result<()> {
    let dist = repo.layout().dist();
    for folder in part.folders {
        copy_tree(&dist.join(folder), &root.join(folder))?;
    }
    if let Some(without) = part.without {
        fs::remove_dir_all(root.join(without)).with_context(|| format!("no {without}"))?;
        write(&root.join("share/ucx-gaudi/ucx.conf"), &ucx_conf(""))?;
        let module = format!("share/modulefiles/ucx-gaudi/{version}");
        write(&root.join(module), &modulefile())?;
    }
    let license = fs::read_to_string(repo.path("LICENSE")).context("no LICENSE")?;
    write(&root.join("share/doc").join(part.name).join("copyright"), &license)?;
    for file in elf_files(root)? {
        run_quietly(Command::new("strip").arg("--strip-unneeded").arg(&file))?;
    }
    Ok(())
}

/// Settings of UCX in its own file format. `plugins` is empty if the package can be unpacked anywhere.
fn ucx_conf(plugins: &str) -> String {
    let mut text = String::from(
        "# Settings of UCX that suit Gaudi memory. UCX reads this file with UCX_CONFIG_DIR=(this folder),\n\
         # and any ucx.conf in the home directory or the working directory. The environment wins.\n",
    );
    match plugins {
        "" => text.push_str("# UCX_PLUGIN_PATH=PREFIX/lib/ucx-gaudi/plugins\n"),
        plugins => text.push_str(&format!("UCX_PLUGIN_PATH={plugins}\n")),
    }
    text.extend(STAGING.iter().map(|(name, value)| format!("{name}={value}\n")));
    text
}

/// A file for Environment Modules and Lmod, with paths relative to itself.
fn modulefile() -> String {
    let up = "[file dirname ".repeat(4);
    let tuning = STAGING.iter().map(|(name, value)| format!("setenv {name} {value}\n"));
    format!(
        "#%Module1.0\n\
         module-whatis \"Gaudi memory for stock UCX (1.22 or later)\"\n\
         conflict ucx-gaudi\n\
         set prefix {up}[file normalize $ModulesCurrentModulefile]]]]]\n\
         prepend-path PATH $prefix/bin\n\
         prepend-path MANPATH $prefix/share/man\n\
         prepend-path UCX_PLUGIN_PATH $prefix/lib/ucx-gaudi/plugins\n{}",
        tuning.collect::<String>()
    )
}

pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy_tree(&source, &target)?;
        } else {
            fs::copy(&source, &target)
                .with_context(|| format!("cannot write {}", target.display()))?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<()> {
    let folder = path.parent().context("no parent")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn run_quietly(command: &mut Command) -> Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    if !output.status.success() {
        bail!("{command:?} failed:\n{}", String::from_utf8_lossy(&output.stderr).trim_end());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Every program and library below a folder.
fn elf_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(elf_files(&path)?);
        } else if fs::read(&path)?.starts_with(b"\x7fELF") {
            found.push(path);
        }
    }
    Ok(found)
}

/// The newest glibc that any of these files needs for a symbol.
fn glibc_needed(root: &Path) -> Result<(u32, u32)> {
    let mut needed = (2, 17);
    for file in elf_files(root)? {
        let headers = run_quietly(Command::new("objdump").arg("-p").arg(&file))?;
        needed = newest_glibc(&headers).into_iter().chain([needed]).max().unwrap_or(needed);
    }
    Ok(needed)
}

fn newest_glibc(headers: &str) -> Option<(u32, u32)> {
    let version = |word: &str| {
        let mut numbers = word.strip_prefix("GLIBC_")?.split('.').map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    };
    headers.split_whitespace().filter_map(version).max()
}

/// `tar` without anything specific to this machine: the same files give the same archive.
fn archive(folder: &Path, to: &Path, rename: &str) -> Result<()> {
    let mut tar = Command::new("tar");
    tar.args(["--create", "--gzip", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--mtime=@0", "--mode=u+w,go-w", "--format=gnu"]);
    tar.arg(format!("--transform=flags=r;s,^\\.,{rename},")).arg("--file").arg(to);
    tar.env("GZIP", "-n").arg("--directory").arg(folder).arg(".");
    run_quietly(&mut tar).map(drop)
}

fn tar(staged: &Staged<'_>, out: &Path) -> Result<PathBuf> {
    let name = format!("{}-{}", staged.part.name, staged.version);
    let path = out.join(format!("{name}-x86_64.tar.gz"));
    // Both parts unpack into one folder, so the tool finds the software devices next to itself.
    archive(&staged.root, &path, &format!("ucx-gaudi-{}", staged.version))?;
    Ok(path)
}

/// Moves a staged part below `usr`, so that `ucx.conf` can name the plugin's folder.
fn under_usr(staged: &Staged<'_>, scratch: &Path, format: &str) -> Result<PathBuf> {
    let root = scratch.join(format!("{}.{format}", staged.part.name));
    copy_tree(&staged.root, &root.join("usr"))?;
    if staged.part.without.is_some() {
        let conf = root.join("usr/share/ucx-gaudi/ucx.conf");
        write(&conf, &ucx_conf("/usr/lib/ucx-gaudi/plugins"))?;
    }
    Ok(root)
}

fn deb(staged: &Staged<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let Staged { part, version, glibc, .. } = staged;
    let data = under_usr(staged, scratch, "deb")?;
    let needs = match part.without {
        Some(_) => {
            format!("libc6 (>= {}.{}), libgcc-s1\nSuggests: ucx-gaudi-soft", glibc.0, glibc.1)
        }
        None => format!("ucx-gaudi (= {version})"),
    };
    let control = format!(
        "Package: {}\nVersion: {version}\nArchitecture: amd64\nMaintainer: ucx-gaudi developers\n\
         Installed-Size: {}\nSection: libs\nPriority: optional\nDepends: {needs}\nDescription: {}\n",
        part.name,
        kibibytes(&data)?,
        part.summary
    );
    let folder = scratch.join(format!("{}.control", part.name));
    write(&folder.join("control"), &control)?;
    let (control, content) = (scratch.join("control.tar.gz"), scratch.join("data.tar.gz"));
    archive(&folder, &control, ".")?;
    archive(&data, &content, ".")?;

    let path = out.join(format!("{}_{version}_amd64.deb", part.name));
    let mut deb = fs::File::create(&path).with_context(|| format!("no {}", path.display()))?;
    deb.write_all(b"!<arch>\n")?;
    ar_member(&mut deb, "debian-binary", b"2.0\n")?;
    ar_member(&mut deb, "control.tar.gz", &fs::read(&control)?)?;
    ar_member(&mut deb, "data.tar.gz", &fs::read(&content)?)?;
    Ok(path)
}

/// The size of the files below a folder, each rounded up, as `Installed-Size` counts.
fn kibibytes(folder: &Path) -> Result<u64> {
    let mut sum = 0;
    for entry in fs::read_dir(folder).with_context(|| format!("no {}", folder.display()))? {
        let entry = entry?;
        sum += match entry.file_type()?.is_dir() {
            true => kibibytes(&entry.path())?,
            false => entry.metadata()?.len().div_ceil(1024),
        };
    }
    Ok(sum)
}

/// One file in an `ar` archive: a text header, and the bytes padded to an even length.
fn ar_member(to: &mut impl Write, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    writeln!(to, "{name:<16}{:<12}{:<6}{:<6}{:<8}{:<10}`", 0, 0, 0, "100644", bytes.len())?;
    to.write_all(bytes)?;
    to.write_all(if bytes.len() % 2 == 1 { b"\n" } else { b"" })
}

/// `None` without rpmbuild, as build machines have no other tool for this format.
fn rpm(staged: &Staged<'_>, scratch: &Path, out: &Path) -> Result<Option<PathBuf>> {
    if Command::new("rpmbuild").arg("--version").output().is_err() {
        return Ok(None);
    }
    let Staged { part, version, .. } = staged;
    let files = under_usr(staged, scratch, "rpm")?;
    let needs = part.without.map_or(format!("Requires: ucx-gaudi = {version}"), |_| String::new());
    // Nothing is compiled or stripped here, and the listed files are packed as they are. rpmbuild finds the required
    // libraries and symbol versions; the package does not announce its own libraries.
    let spec = format!(
        "Name: {name}\nVersion: {version}\nRelease: 1\nSummary: {}\nLicense: BSD-3-Clause\n{needs}\n\
         AutoProv: no\n%define __os_install_post %{{nil}}\n%define debug_package %{{nil}}\n\
         %define _build_id_links none\n\
         %description\n{}\n%install\ncp -a '{}/.' '%{{buildroot}}'\n%files\n{}",
        part.summary,
        part.summary,
        files.display(),
        file_list(&files)?,
        name = part.name,
    );
    let (spec_file, top) = (scratch.join("spec"), scratch.join("rpmbuild"));
    write(&spec_file, &spec)?;
    let mut rpmbuild = Command::new("rpmbuild");
    rpmbuild.args(["-bb", "--quiet", "--target=x86_64", "--define"]);
    rpmbuild.arg(format!("_topdir {}", top.display())).arg(&spec_file);
    run_quietly(&mut rpmbuild)?;
    let name = format!("{}-{version}-1.x86_64.rpm", part.name);
    let path = out.join(&name);
    fs::copy(top.join("RPMS/x86_64").join(&name), &path).context("rpmbuild made no package")?;
    Ok(Some(path))
}

/// Every file below a folder as seen from there, one per line, with a leading slash; and the folders that only we use,
/// which rpm would otherwise not remove.
fn file_list(root: &Path) -> Result<String> {
    fn walk(root: &Path, folder: &Path, lines: &mut Vec<String>) -> Result<()> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let below = path.strip_prefix(root)?;
            if path.is_dir() {
                if below.iter().any(|name| name.to_string_lossy().starts_with("ucx-gaudi")) {
                    lines.push(format!("%dir /{}\n", below.display()));
                }
                walk(root, &path, lines)?;
            } else {
                lines.push(format!("/{}\n", below.display()));
            }
        }
        Ok(())
    }
    let mut lines = Vec::new();
    walk(root, root, &mut lines)?;
    lines.sort();
    Ok(lines.concat())
}

/// The Python package's folder is the prefix, so that the tool finds everything and the wheel also works with `pip
/// install --target`. Both wheels put files there, but never the same ones.
fn wheel(repo: &Repo, staged: &Staged<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let Staged { part, version, glibc, .. } = staged;
    let root = scratch.join(format!("{}.wheel", part.name));
    let package = root.join("ucx_gaudi");
    copy_tree(&staged.root, &package)?;
    // The licence is part of the metadata.
    fs::remove_file(package.join("share/doc").join(part.name).join("copyright"))
        .context("no copyright")?;
    fs::copy(repo.path("LICENSE"), root.join("LICENSE")).context("no LICENSE")?;
    if part.without.is_some() {
        // Where `man` and shells look in a virtual environment.
        let data = root.join(format!("{}-{version}.data/data", part.name.replace('-', "_")));
        fs::create_dir_all(data.join("share"))?;
        for folder in ["man", "bash-completion", "fish", "zsh"] {
            let below = Path::new("share").join(folder);
            fs::rename(package.join(&below), data.join(&below)).context("no documents")?;
        }
        copy_tree(&repo.path("packaging/wheel"), &package)?;
        let python = package.join("lib/ucx-gaudi/python");
        copy_tree(&python.join("ucx_gaudi"), &package)?;
        fs::remove_dir_all(&python)?;
        let module = package.join("__init__.py");
        let text = fs::read_to_string(&module).context("no Python module")?;
        let line = |version: &str| format!("\n__version__ = \"{version}\"\n");
        write(&module, &text.replace(&line(env!("CARGO_PKG_VERSION")), &line(version)))?;
        write(
            &root.join("entry_points.txt"),
            "[console_scripts]\nucx-gaudi = ucx_gaudi.__main__:main\nucp-check = ucx_gaudi.__main__:main\n",
        )?;
    }
    let tag = format!("manylinux_{}_{}_x86_64", glibc.0, glibc.1);
    let mut python = Command::new("python3");
    python.arg(repo.path("packaging/wheel.py")).arg(&root);
    python.args([part.name, version, &tag, part.summary]).arg(out);
    Ok(PathBuf::from(run_quietly(&mut python)?.trim_end()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newest_glibc_is_compared_by_numbers() {
        let headers = "  NEEDED  libc.so.6\n required from libc.so.6:\n\
                       0x069691b4 0x00 04 GLIBC_2.9\n 0x0 0x00 05 GLIBC_2.34\n 0x0 0x00 06 GLIBC_2.4\n\
                       0x0 0x00 07 GLIBC_PRIVATE\n";
        assert_eq!(newest_glibc(headers), Some((2, 34)));
        assert_eq!(newest_glibc(""), None);
    }

    #[test]
    fn ar_members_are_padded_to_even_lengths() {
        let mut bytes = Vec::new();
        ar_member(&mut bytes, "debian-binary", b"2.0").expect("written");
        let text = String::from_utf8(bytes).expect("text");
        assert_eq!(text.len(), 60 + 4);
        assert_eq!(&text[48..], "3         `\n2.0\n");
    }

    #[test]
    fn versions_that_a_format_would_refuse_are_refused() {
        for version in ["0.1.0", "1.2.3.dev4"] {
            check_version(version).expect(version);
        }
        for version in ["", "v1", "0.1-2", "0.1.0/..", "1.0~rc1"] {
            check_version(version).expect_err(version);
        }
    }

    #[test]
    fn configuration_names_the_plugin_only_where_its_place_is_known() {
        assert!(ucx_conf("/usr/x").contains("\nUCX_PLUGIN_PATH=/usr/x\n"));
        assert!(!ucx_conf("").contains("\nUCX_PLUGIN_PATH="));
        let settings: Vec<_> =
            STAGING.iter().map(|(name, value)| format!("{name}={value}\n")).collect();
        assert!(ucx_conf("").ends_with(&settings.concat()));
        let page = include_str!("../../docs/getting-started.md");
        assert!(page.contains(&format!("```\n{}```\n", settings.concat())), "the page has others");
    }
}
