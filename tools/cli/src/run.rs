//! `ucx-gaudi run`: runs a program in the environment that UCX needs to find the plugin.
//!
//! The user's own settings stay, unless they would undo what was asked for. One line on standard error lists everything
//! that was set.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::Args;
use gaudi::Sysfs;
use serde_json::json;

use crate::failure::{Exit, Failure};
use crate::output::note;
use crate::prefix::Prefix;
use crate::scale_out::Hcas;
use crate::tuning::STAGING;
use crate::{Context, Soft, open_mpi};

/// Options of `run`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Set also the settings of UCX that suit Gaudi memory between processes; yours stay
    #[arg(long)]
    tuned: bool,
    /// Also put the software HCA under the program, with N ports
    #[arg(
        long, value_name = "N", num_args = 0..=1, require_equals = true, default_missing_value = "1",
        value_parser = clap::value_parser!(u32).range(1..=64)
    )]
    soft_rdma: Option<u32>,
    /// Do not print the line that says what was set
    #[arg(long, short)]
    quiet: bool,
    /// The program and its arguments
    #[arg(
        required = true,
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// The loader's list of libraries to preload.
const PRELOAD: &str = "LD_PRELOAD";

/// Unless this is 0, libmlx5 makes the CPU write the data of small receives, and the CPU cannot write Gaudi memory.
const SCATTER: &str = "MLX5_SCATTER_TO_CQE";
/// How `ucp_worker_fence` orders operations.
const FENCE: &str = "UCX_FENCE_MODE";

/// Which modules UCX loads. The one for EFA loads the machine's libefa, and with it a second libnl if UCX brings its
/// own, as inside NIXL: such a process dies at exit.
pub(crate) const MODULES: &str = "UCX_MODULES";
/// All modules except EFA's.
pub(crate) const NO_EFA: &str = "^efa";
/// A change to the environment of the program.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Change {
    Set(&'static str, OsString),
    Remove(&'static str),
}

/// Replaces this process by the program; returns only if that failed.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let mut changes: Vec<Change> = variables(&context.prefix)?
        .into_iter()
        .map(|(name, value)| Change::Set(name, value))
        .collect();
    if let Some(soft) = context.soft {
        changes.extend(software_card(context, soft)?);
    }
    if let Some(hcas) = options.soft_rdma {
        software_hca(context.prefix.soft_rdma()?, hcas, &mut changes)?;
    }
    let hcas = Hcas::read(&Sysfs::default());
    if hcas.mlx5 && var(SCATTER).is_none() {
        changes.push(Change::Set(SCATTER, "0".into()));
    }
    if (hcas.others || options.soft_rdma.is_some()) && !is_fence_chosen() {
        changes.push(Change::Set(FENCE, "ep_based".into()));
    }
    if options.tuned {
        let unset = STAGING.iter().filter(|(name, _)| var(name).is_none());
        changes.extend(unset.map(|(name, value)| Change::Set(name, value.into())));
    }
    let (program, args) = options.command.split_first().expect("clap requires one");
    let for_mpi = open_mpi::variables(program, &context.prefix)?;
    changes.extend(for_mpi.into_iter().map(|(name, value)| Change::Set(name, value)));
    match (options.quiet, context.json) {
        (true, _) => {}
        // Standard output belongs to the program.
        (false, true) => eprintln!("{}", in_json(&changes)),
        (false, false) => note(&in_words(&changes)),
    }
    let mut command = Command::new(program);
    command.args(args);
    for change in &changes {
        match change {
            Change::Set(name, value) => command.env(name, value),
            Change::Remove(name) => command.env_remove(name),
        };
    }
    Err(cannot_run(program, &command.exec()))
}

/// Whether the user has set a fence mode; UCX refuses `ep_based` without its new protocols.
pub(crate) fn is_fence_chosen() -> bool {
    let old_protocols = |value: OsString| value.as_encoded_bytes().starts_with(b"n");
    var(FENCE).is_some() || var("UCX_PROTO_ENABLE").is_some_and(old_protocols)
}

fn cannot_run(program: &OsStr, error: &std::io::Error) -> Failure {
    let shown = Path::new(program).display();
    let what = format!("cannot run {shown}: {error}");
    match error.kind() {
        std::io::ErrorKind::NotFound if is_path(program) && Path::new(program).exists() => {
            Failure {
                what: format!(
                    "cannot run {shown}: the interpreter it names in its first line is not there"
                ),
                remedy: String::from(
                    "correct its first line, or run the interpreter: run -- sh FILE",
                ),
                exit: Exit::NotRunnable,
            }
        }
        // The search in PATH also returns this if it met a folder that this user may not search.
        std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied
            if !is_path(program) && !is_in_path(program) =>
        {
            Failure {
                what: format!("cannot run {shown}: no such program on PATH"),
                remedy: String::from(
                    "write its path (./NAME for this folder), or add its folder to PATH",
                ),
                exit: Exit::NotFound,
            }
        }
        std::io::ErrorKind::NotFound => Failure {
            what,
            remedy: String::from(
                "write its path (./NAME for this folder), or add its folder to PATH",
            ),
            exit: Exit::NotFound,
        },
        std::io::ErrorKind::PermissionDenied => Failure {
            what,
            remedy: String::from("is it a program? `chmod +x` makes a file of yours one"),
            exit: Exit::NotRunnable,
        },
        _ => Failure { what, remedy: String::new(), exit: Exit::NotRunnable },
    }
}

/// Whether it is a path, not a name to search in `PATH`.
fn is_path(program: &OsStr) -> bool {
    program.as_encoded_bytes().contains(&b'/')
}

fn is_in_path(program: &OsStr) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).exists())
}

/// A variable of the user, unless it is empty.
fn var(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

/// The variables that make programs load the plugin, whatever UCX they use: the first is for UCX 1.22 and later, the second for
/// 1.21. Ours come before the user's, because UCX takes the first file of a name. The third excludes one module.
pub(crate) fn variables(prefix: &Prefix) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let mut variables =
        vec![("UCX_PLUGIN_PATH", prepend(prefix.plugins()?, var("UCX_PLUGIN_PATH"))?)];
    let preload = prefix.preload()?;
    // The loader ends a name at a blank.
    if !preload.as_os_str().as_encoded_bytes().contains(&b' ') {
        variables.push((PRELOAD, prepend(preload, var(PRELOAD))?));
    }
    if var(MODULES).is_none() && !Hcas::read(&Sysfs::default()).efa {
        variables.push((MODULES, NO_EFA.into()));
    }
    Ok(variables)
}

fn software_card(context: &Context, soft: Soft) -> Result<Vec<Change>, Failure> {
    let libraries = prepend(context.prefix.soft_gaudi()?, var("LD_LIBRARY_PATH"))?;
    let mut changes = vec![Change::Set("LD_LIBRARY_PATH", libraries)];
    // This variable would override the loader path.
    if var("HL_THUNK_LIBRARY").is_some() {
        changes.push(Change::Remove("HL_THUNK_LIBRARY"));
    }
    if var("SOFT_GAUDI_NODE").is_none() {
        changes.push(Change::Set("SOFT_GAUDI_NODE", context.prefix.soft_node().into()));
    }
    changes
        .extend(soft.variables().into_iter().map(|(name, value)| Change::Set(name, value.into())));
    Ok(changes)
}

/// UCX finds the HCA only if the library is also preloaded (docs/software-rdma.md).
fn software_hca(library: PathBuf, hcas: u32, changes: &mut Vec<Change>) -> Result<(), Failure> {
    let is_preload = |change: &Change| matches!(change, Change::Set(PRELOAD, _));
    let others = match changes.iter().position(is_preload).map(|at| changes.remove(at)) {
        Some(Change::Set(_, ours)) => Some(ours),
        _ => var(PRELOAD),
    };
    changes.push(Change::Set(PRELOAD, prepend(library, others)?));
    changes.push(Change::Set("SOFT_RDMA_DEVICES", hcas.to_string().into()));
    // By default a user may lock 8 MiB, less than UCX needs for its own buffers.
    if var("SOFT_RDMA_MEMLOCK").is_none() {
        changes.push(Change::Set("SOFT_RDMA_MEMLOCK", "off".into()));
    }
    Ok(())
}

/// Puts this folder at the beginning of a list, and removes it from the rest.
fn prepend(folder: PathBuf, list: Option<OsString>) -> Result<OsString, Failure> {
    let others = list.iter().flat_map(std::env::split_paths).filter(|other| *other != folder);
    // The loader takes an empty entry for the working directory, which nobody wants.
    let others = others.filter(|other| !other.as_os_str().is_empty());
    std::env::join_paths(std::iter::once(folder.clone()).chain(others)).map_err(|_| {
        Failure::unable(
            format!("{} contains a colon, which separates folders in such lists", folder.display()),
            "install ucx-gaudi under a path without colons",
        )
    })
}

fn in_words(changes: &[Change]) -> String {
    let words = changes.iter().map(|change| match change {
        Change::Set(name, value) => format!("{name}={}", value.display()),
        Change::Remove(name) => format!("{name} unset"),
    });
    words.collect::<Vec<_>>().join(" ")
}

fn in_json(changes: &[Change]) -> String {
    let value = |change: &Change| match change {
        Change::Set(name, value) => ((*name).to_owned(), json!(value.to_string_lossy())),
        Change::Remove(name) => ((*name).to_owned(), serde_json::Value::Null),
    };
    serde_json::Value::Object(changes.iter().map(value).collect()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_folder_comes_first_and_once_and_no_entry_is_empty() {
        let list = |text: &str| prepend("/ours".into(), Some(text.into())).expect("a list");
        assert_eq!(list("/a:/ours:/b"), "/ours:/a:/b");
        assert_eq!(list("/a::"), "/ours:/a");
        assert_eq!(prepend("/ours".into(), None).expect("a list"), "/ours");
        let refused = prepend("/o:urs".into(), None).expect_err("a colon");
        assert!(refused.what.contains("/o:urs"), "{refused}");
    }
}
