//! `cargo xtask install --prefix P`: copies `target/dist`, which was just built, to a prefix.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::progress::Work;
use crate::repo::Repo;
use crate::shell::quote;

/// Copies, then says how to use it from there.
pub(crate) fn run(repo: &Repo, prefix: &Path) -> Result<()> {
    let dist = repo.layout().dist();
    let prefix = check(&dist, prefix)?;
    let work = Work::start(format!("installing to {}", prefix.display()));
    let files = copy_tree(&dist, &prefix)?;
    work.done(&format!("{files} files"));
    let lib = prefix.join("lib/ucx-gaudi");
    eprintln!(
        "\nStock UCX (1.22 or later) loads the plugin with\n\n    export UCX_PLUGIN_PATH={}\n\n\
         and, on a machine without a Gaudi, the software one with\n\n    \
         export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}",
        quote(&lib.join("plugins").to_string_lossy()),
        quote(&lib.join("soft/gaudi").to_string_lossy())
    );
    Ok(())
}

/// The prefix as an absolute path, or why it cannot be one.
fn check(dist: &Path, prefix: &Path) -> Result<PathBuf> {
    if !dist.join("lib/ucx-gaudi/plugins").is_dir() {
        bail!("nothing is built yet; run `cargo xtask build` first");
    }
    if prefix.as_os_str().is_empty() {
        bail!("the prefix is empty; give a folder, for example --prefix /opt/ucx-gaudi");
    }
    if prefix.starts_with("~") {
        bail!("the shell did not expand ~ in the prefix; write --prefix \"$HOME/…\"");
    }
    let absolute = std::path::absolute(prefix)
        .with_context(|| format!("cannot make {} an absolute path", prefix.display()))?;
    // Resolved as far as it exists, so that a link into the build is recognised, too.
    let existing = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let resolved = fs::canonicalize(existing)
        .with_context(|| format!("cannot resolve {}", existing.display()))?
        .join(absolute.strip_prefix(existing).unwrap_or(Path::new("")));
    if resolved == Path::new("/") {
        bail!(
            "a prefix of / would scatter files over the root folder; \
             use --prefix /usr/local or --prefix /opt/ucx-gaudi"
        );
    }
    let source = fs::canonicalize(dist).with_context(|| format!("no {}", dist.display()))?;
    if resolved.starts_with(&source) || source.starts_with(&resolved) {
        bail!(
            "{} is where the build lies; choose a prefix outside of it, for example \
             --prefix /opt/ucx-gaudi",
            prefix.display()
        );
    }
    if !existing.is_dir() {
        bail!("{} is a file; give a folder as prefix", existing.display());
    }
    Ok(absolute)
}

/// Copies a folder, replacing files that are there.
pub(crate) fn copy_tree(from: &Path, to: &Path) -> Result<usize> {
    fs::create_dir_all(to).with_context(|| remedy(to))?;
    let mut copied = 0;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (source, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copied += copy_tree(&source, &target)?;
            continue;
        }
        // Beside, then renamed over: a program that has the old file mapped must not see it change.
        let fresh = to.join(format!(".{}.new", entry.file_name().display()));
        let _ = fs::remove_file(&fresh);
        fs::copy(&source, &fresh).with_context(|| remedy(to))?;
        fs::rename(&fresh, &target).with_context(|| remedy(&target))?;
        copied += 1;
    }
    Ok(copied)
}

fn remedy(path: &Path) -> String {
    format!(
        "cannot write {}; choose a prefix you may write (--prefix \"$HOME/.local\"), or run it with \
         the rights for this one",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use tempfile::TempDir;

    /// A checkout with something built.
    fn built() -> (TempDir, Repo) {
        let place = tempfile::tempdir().expect("temporary folder");
        let repo = Repo::at(place.path());
        let plugins = repo.layout().plugins();
        fs::create_dir_all(&plugins).expect("folders");
        fs::write(plugins.join("libuct_gaudi.so.0.0.0"), "plugin").expect("file");
        (place, repo)
    }

    fn refusal(repo: &Repo, prefix: &Path) -> String {
        format!("{:#}", run(repo, prefix).expect_err("refused"))
    }

    #[test]
    fn a_second_time_replaces_the_files() {
        let (place, repo) = built();
        let prefix = place.path().join("prefix");
        for _ in 0..2 {
            run(&repo, &prefix).expect("installed");
            let file = prefix.join("lib/ucx-gaudi/plugins/libuct_gaudi.so.0.0.0");
            assert_eq!(fs::read(&file).expect("a file"), b"plugin");
        }
        let files = fs::read_dir(prefix.join("lib/ucx-gaudi/plugins")).expect("folder").count();
        assert_eq!(files, 1, "no temporary names stay");
    }

    #[test]
    fn root_is_refused() {
        let (_place, repo) = built();
        for prefix in ["/", "/usr/..", "//"] {
            let text = refusal(&repo, Path::new(prefix));
            assert!(text.contains("/opt/ucx-gaudi"), "{prefix} → {text}");
        }
    }

    #[test]
    fn the_build_itself_is_refused() {
        let (place, repo) = built();
        let dist = repo.layout().dist();
        let link = place.path().join("link");
        symlink(&dist, &link).expect("link");
        for prefix in [dist.clone(), dist.join("lib/new"), dist.join(".."), link.join("x")] {
            let text = refusal(&repo, &prefix);
            assert!(text.contains("outside of it"), "{} → {text}", prefix.display());
        }
    }

    #[test]
    fn file_as_prefix_is_refused() {
        let (place, repo) = built();
        let file = place.path().join("file");
        fs::write(&file, "").expect("file");
        for prefix in [file.clone(), file.join("below")] {
            let text = refusal(&repo, &prefix);
            assert!(text.contains("is a file"), "{text}");
        }
    }

    #[test]
    fn nothing_built_says_what_to_do() {
        let (place, repo) = built();
        fs::remove_dir_all(repo.layout().dist()).expect("removed");
        let text = refusal(&repo, &place.path().join("prefix"));
        assert!(text.contains("cargo xtask build"), "{text}");
    }
}
