//! `cargo xtask env`: shell exports with which stock tools run by hand as in the tests.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use anyhow::{Result, bail};
use e2e::{Layout, Ucx};

use crate::dist;
use crate::repo::Repo;
use crate::setup;
use crate::tuning::STAGING;

/// Prints only exports on standard output, or a failing command if there can be none. First fetches what is missing,
/// and builds what has changed.
pub(crate) fn print_exports(repo: &Repo, soft: bool, ucx: Ucx) -> Result<()> {
    let exports =
        fetch_and_build(repo, ucx).and_then(|()| checked_exports(repo.layout(), soft, ucx));
    print!("{}", script(&exports));
    exports.map(drop)
}

/// The text that the shell evaluates. The shell sees our output but not our exit status, so `eval` fails only if the
/// last command in the output fails.
fn script(exports: &Result<String>) -> &str {
    exports.as_deref().unwrap_or("false\n")
}

fn fetch_and_build(repo: &Repo, ucx: Ucx) -> Result<()> {
    if !ucx.libucp(repo.layout()).exists() {
        setup::fetch(repo, &[ucx])?;
    }
    dist::build_again(repo)
}

fn checked_exports(layout: &Layout, soft: bool, ucx: Ucx) -> Result<String> {
    if !ucx.libucp(layout).exists() {
        bail!("stock UCX {} is not there; run `cargo xtask setup` first", ucx.name());
    }
    if !layout.plugins().exists() {
        bail!("the plugin is not built; run `cargo xtask build` first");
    }
    layout.hide_rdma_libraries()?;
    exports(layout, soft, ucx)
}

fn exports(layout: &Layout, soft: bool, ucx: Ucx) -> Result<String> {
    let mut programs = vec![layout.bin()];
    programs.extend(ucx.bin_dir(layout));
    let mut libraries = Vec::new();
    if soft {
        libraries.push(layout.soft_gaudi());
    }
    // NIXL's UCX brings its own libibverbs and cannot use the machine's; the other UCX has none.
    if ucx == Ucx::Nixl {
        libraries.push(layout.no_rdma());
    }
    libraries.extend(ucx.lib_dirs(layout));

    let mut lines = vec![
        prepend("PATH", &programs)?,
        prepend("LD_LIBRARY_PATH", &libraries)?,
        format!("export UCX_PLUGIN_PATH={}", quote(&text(&layout.plugins())?)),
    ];
    if ucx == Ucx::V1_21 {
        lines.push(prepend("LD_PRELOAD", &[layout.preload()])?);
    }
    // Settings of the user stay.
    let staging =
        STAGING.iter().map(|(name, value)| format!("export {name}=\"${{{name}:-{value}}}\""));
    lines.extend(staging);
    if soft {
        // The user's node, if one is set. The name of ours has no character that is special in a shell.
        lines.push(format!("export SOFT_GAUDI_NODE=\"${{SOFT_GAUDI_NODE:-{}}}\"", node(layout)));
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

/// One software machine per checkout: two terminals share it, different checkouts do not.
fn node(layout: &Layout) -> String {
    let mut hasher = DefaultHasher::new();
    layout.target().hash(&mut hasher);
    format!("env-{:08x}", hasher.finish() as u32)
}

/// The shell expands the old value: the one in this process is not the user's, because `cargo run` adds to it.
fn prepend(name: &str, dirs: &[PathBuf]) -> Result<String> {
    let mut joined = Vec::new();
    for dir in dirs {
        let dir = text(dir)?;
        if dir.contains(':') {
            bail!("{dir}: a colon separates folders in {name}; move the checkout elsewhere");
        }
        joined.push(dir);
    }
    Ok(format!("export {name}={}\"${{{name}:+:${name}}}\"", quote(&joined.join(":"))))
}

fn text(path: &std::path::Path) -> Result<String> {
    match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => bail!("{}: not UTF-8; move the checkout elsewhere", path.display()),
    }
}

/// Quotes one word for any POSIX shell.
fn quote(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eval_fails_where_there_is_nothing_to_export() {
        let nowhere = Layout::new("/nonexistent");
        let exports = checked_exports(&nowhere, true, Ucx::V1_22);
        assert!(exports.is_err());
        let eval = |script: &str| {
            let mut shell = std::process::Command::new("sh");
            shell.args(["-c", "eval \"$1\"", "sh", script]).status().expect("a shell").success()
        };
        assert!(!eval(script(&exports)));
        assert!(eval(script(&super::exports(&nowhere, true, Ucx::V1_22))));
    }
    use std::process::Command;

    /// The variables after a shell has evaluated our exports.
    fn shell_value(exports: &str, before: &str, name: &str) -> String {
        let script = format!("{before}\n{exports}\nprintf %s \"${name}\"");
        let output = Command::new("/bin/sh").args(["-euc", &script]).output().expect("sh");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    #[test]
    fn odd_paths_survive_the_shell() {
        let layout = Layout::new("/a b/it's $HOME/`x`/\"q\"");
        let exports = exports(&layout, true, Ucx::V1_22).expect("exports");
        let value = shell_value(&exports, "", "UCX_PLUGIN_PATH");
        assert_eq!(value, "/a b/it's $HOME/`x`/\"q\"/dist/lib/ucx-gaudi/plugins");
    }

    #[test]
    fn loader_path_of_the_user_is_kept_behind_ours() {
        let exports = exports(&Layout::new("/t"), false, Ucx::V1_22).expect("exports");
        let before = "unset LD_LIBRARY_PATH";
        let ours = "/t/stock/ucx/libucx/lib:/t/stock/ucx/libucx_cu12.libs";
        // An empty entry would be the working directory for the loader.
        assert_eq!(shell_value(&exports, before, "LD_LIBRARY_PATH"), ours);
        let before = "export LD_LIBRARY_PATH=/theirs";
        assert_eq!(shell_value(&exports, before, "LD_LIBRARY_PATH"), format!("{ours}:/theirs"));
    }

    #[test]
    fn settings_of_ucx_are_the_users_where_there_are_any() {
        let exports = exports(&Layout::new("/t"), false, Ucx::V1_22).expect("exports");
        let name = "UCX_POSIX_SEG_SIZE";
        assert_eq!(shell_value(&exports, "export UCX_POSIX_SEG_SIZE=9000", name), "9000");
        for name in ["UCX_SYSV_SEG_SIZE", "UCX_POSIX_SEG_SIZE"] {
            let size: u32 = shell_value(&exports, "", name).parse().expect("a number");
            // A larger value makes stock UCX 1.22 hang, see docs/performance.md.
            assert!(size < 1 << 16, "{name}={size}");
        }
    }

    #[test]
    fn software_gaudi_is_opt_in() {
        let plain = exports(&Layout::new("/t"), false, Ucx::Nixl).expect("exports");
        assert!(!plain.contains("soft") && !plain.contains("SOFT_GAUDI_NODE"), "{plain}");
        let soft = exports(&Layout::new("/t"), true, Ucx::Nixl).expect("exports");
        assert!(soft.contains("LD_LIBRARY_PATH='/t/dist/lib/ucx-gaudi/soft/gaudi:"), "{soft}");
        assert!(soft.lines().all(|line| line.starts_with("export ")), "{soft}");
    }

    #[test]
    fn a_software_machine_that_the_user_named_stays() {
        let exports = exports(&Layout::new("/t"), true, Ucx::V1_22).expect("exports");
        let name = "SOFT_GAUDI_NODE";
        assert_eq!(shell_value(&exports, "export SOFT_GAUDI_NODE=mine", name), "mine");
        assert_eq!(shell_value(&exports, "unset SOFT_GAUDI_NODE", name), node(&Layout::new("/t")));
    }

    #[test]
    fn checkouts_do_not_share_a_node() {
        assert_ne!(node(&Layout::new("/a")), node(&Layout::new("/b")));
        assert_eq!(node(&Layout::new("/a")), node(&Layout::new("/a")));
    }

    #[test]
    fn colon_in_a_path_is_refused() {
        assert!(exports(&Layout::new("/a:b"), false, Ucx::V1_22).is_err());
    }
}
