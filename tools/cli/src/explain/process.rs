//! What can be learned about a running process without disturbing it: the settings it was started with, and which UCX
//! and plugin it has loaded.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// A process with UCX and the plugin.
pub(super) struct Process {
    pub(super) pid: u32,
    pub(super) command: String,
    /// Its whole environment at its start.
    pub(super) environment: Vec<(OsString, OsString)>,
    pub(super) folder: Option<PathBuf>,
    pub(super) libucp: PathBuf,
    pub(super) plugin: PathBuf,
    /// NIXL asks for endpoints with error handling, for which UCX makes other choices.
    pub(super) has_nixl: bool,
}

/// Variables that affect UCX's choice.
const SETTINGS: [&str; 9] =
    ["UCX_", "UCT_", "SOFT_GAUDI_", "SOFT_RDMA_", "GAUDI_", "HABANA_", "HLS_", "HL_", "LD_"];

/// Marks a program that contains UCX: the name of a function.
const STATIC_UCX: &[u8] = b"ucp_worker_create";

impl Process {
    /// Looks at a process of this user.
    pub(super) fn look(pid: u32) -> Result<Self, Failure> {
        let at = PathBuf::from(format!("/proc/{pid}"));
        let owner = fs::metadata(&at).map_err(|error| unreadable(pid, &error))?.uid();
        // We load its UCX with its environment: as root we would run another user's code.
        if owner != rustix::process::geteuid().as_raw() {
            return Err(other_user(pid));
        }
        let maps = fs::read(at.join("maps")).map_err(|error| unreadable(pid, &error))?;
        let environ = fs::read(at.join("environ")).map_err(|error| unreadable(pid, &error))?;
        let stat = fs::read_to_string(at.join("stat")).unwrap_or_default();
        if state(&stat) == Some('Z') {
            return Err(gone(pid));
        }
        let own = |name| fs::read_link(format!("/proc/self/ns/{name}")).ok();
        if fs::read_link(at.join("ns/mnt")).ok() != own("mnt") {
            return Err(Failure::unable(
                format!("process {pid} sees other files than this one: it is in a container"),
                "run ucx-gaudi in that container, with the pid as it is there",
            ));
        }
        let command = fs::read_to_string(at.join("comm")).unwrap_or_default();
        let command = command.trim().escape_debug().to_string();
        let libraries = libraries(&maps);
        let named = |wanted: &[&str]| {
            let is_it = |path: &&PathBuf| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                wanted.iter().any(|start| name.starts_with(start))
            };
            libraries.iter().filter(is_it).cloned().collect::<Vec<PathBuf>>()
        };
        let has_nixl = !named(&["libnixl", "libplugin_UCX"]).is_empty();
        let mut ucx = named(&["libucp.so", "libucp-"]);
        // There may be several: NIXL's moves its caches.
        let in_nixl = |path: &PathBuf| path.to_string_lossy().contains("nixl");
        ucx.sort_by_key(|path| !(has_nixl && in_nixl(path)));
        let Some(libucp) = ucx.into_iter().next() else {
            return Err(without_ucx(pid, &command, &at.join("exe")));
        };
        if contains(&maps, &[libucp.as_os_str().as_bytes(), b" (deleted)"].concat()) {
            return Err(Failure::unable(
                format!("{command} (pid {pid}) has {}, which was replaced since", libucp.display()),
                "start the process again",
            ));
        }
        let environment = environment(&environ);
        let Some(plugin) = named(&["libucx_gaudi.so"]).into_iter().next() else {
            return Err(without_plugin(pid, &command, &libucp, &environment));
        };
        let folder = fs::read_link(at.join("cwd")).ok().filter(|folder| folder.is_dir());
        Ok(Self { pid, command, environment, folder, libucp, plugin, has_nixl })
    }

    /// A variable of its environment.
    pub(super) fn var(&self, name: &str) -> Option<&OsStr> {
        self.environment.iter().find(|(own, _)| own == name).map(|(_, value)| value.as_os_str())
    }

    /// The variables that affect the choice, as text.
    pub(super) fn settings(&self) -> impl Iterator<Item = (String, String)> {
        let of_interest = self.environment.iter().filter(|(name, _)| {
            SETTINGS.iter().any(|start| name.as_bytes().starts_with(start.as_bytes()))
        });
        let text = |text: &OsString| text.to_string_lossy().into_owned();
        of_interest.map(move |(name, value)| (text(name), text(value)))
    }
}

fn gone(pid: u32) -> Failure {
    Failure::unable(
        format!("process {pid} does not exist (any more)"),
        "`ucx-gaudi stats` shows the processes that use a Gaudi",
    )
}

fn unreadable(pid: u32, error: &io::Error) -> Failure {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => gone(pid),
        Some(libc::EACCES | libc::EPERM) => other_user(pid),
        _ => Failure::unable(format!("cannot look at process {pid}: {error}"), ""),
    }
}

fn other_user(pid: u32) -> Failure {
    Failure::unable(
        format!("process {pid} belongs to another user, or may not be looked into"),
        "run it as that user",
    )
}

fn without_ucx(pid: u32, command: &str, program: &Path) -> Failure {
    let what = format!("{command} (pid {pid}) has no UCX");
    let content = fs::read(program).unwrap_or_default();
    if content.windows(STATIC_UCX.len()).any(|part| part == STATIC_UCX) {
        return Failure::unable(
            format!("{what} among its libraries: it is linked into the program"),
            "a UCX that is linked statically loads no plugin: build the program with a shared libucp",
        );
    }
    Failure::unable(
        format!("{what} loaded"),
        "name the process that moves the data (a launcher such as mpirun does not), after it has begun",
    )
}

fn without_plugin(
    pid: u32,
    command: &str,
    libucp: &Path,
    environment: &[(OsString, OsString)],
) -> Failure {
    let has = |name: &str| environment.iter().any(|(own, value)| own == name && !value.is_empty());
    let why = if has("UCX_PLUGIN_PATH") || has("LD_PRELOAD") {
        "its UCX is too old, or has not begun; `ucx-gaudi doctor` says which UCX takes the plugin"
    } else {
        "neither UCX_PLUGIN_PATH nor LD_PRELOAD was set; start it by `ucx-gaudi run -- PROGRAM`"
    };
    let shown = libucp.display();
    Failure::unable(format!("{command} (pid {pid}) has UCX ({shown}), but not the plugin"), why)
}

/// The letter of a process's state.
fn state(stat: &str) -> Option<char> {
    // The name before it may contain any characters.
    stat.rsplit_once(") ")?.1.chars().next()
}

/// The files of shared libraries in `/proc/PID/maps`, each once.
fn libraries(maps: &[u8]) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = Vec::new();
    for line in maps.split(|&byte| byte == b'\n') {
        let Some(at) = line.iter().position(|&byte| byte == b'/') else { continue };
        let path = line[at..].strip_suffix(b" (deleted)").unwrap_or(&line[at..]);
        let path = Path::new(OsStr::from_bytes(path));
        let is_library = path.file_name().is_some_and(|name| contains(name.as_bytes(), b".so"));
        if is_library
            && found.last().is_none_or(|last| last != path)
            && !found.iter().any(|it| it == path)
        {
            found.push(path.to_owned());
        }
    }
    found
}

fn contains(text: &[u8], word: &[u8]) -> bool {
    text.windows(word.len()).any(|part| part == word)
}

/// Parses `/proc/PID/environ`; skips entries that are no variables.
fn environment(environ: &[u8]) -> Vec<(OsString, OsString)> {
    let variable = |text: &[u8]| {
        let at = text.iter().position(|&byte| byte == b'=').filter(|&at| at > 0)?;
        let own = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        Some((own(&text[..at]), own(&text[at + 1..])))
    };
    environ.split(|&byte| byte == 0).filter_map(variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn libraries_are_found_once_also_deleted_ones() {
        let maps = b"7f-80 r--p 0 08:01 5  /a b/libucp.so.0.0.0\n80-81 r-xp 0 08:01 5  /a b/libucp.so.0.0.0\n\
            81-82 r--p 0 08:01 6  /x/libucx_gaudi.so (deleted)\n82-83 rw-p 0 00:00 0  [heap]\n83-84 r-xp 0 08:01 7  /bin/sh\n";
        let found = libraries(maps);
        assert_eq!(found, ["/a b/libucp.so.0.0.0", "/x/libucx_gaudi.so"].map(PathBuf::from));
    }

    #[test]
    fn a_process_that_is_waited_for_has_ended() {
        assert_eq!(state("12 (a) (b) Z 1 1"), Some('Z'));
        assert_eq!((state(""), state("12 (a) ")), (None, None));
    }

    proptest! {
        #[test]
        fn whatever_another_process_has_is_read(bytes: Vec<u8>) {
            let _ = libraries(&bytes);
            for (name, _) in environment(&bytes) {
                prop_assert!(!name.is_empty());
            }
        }
    }
}
