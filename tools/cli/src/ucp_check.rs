//! Runs `ucp-check`, which is installed with the tool and moves the data of `bench` and `explain`, and explains why it
//! failed.

use std::cell::OnceCell;
use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use tempfile::TempDir;

use crate::Context;
use crate::doctor::ucx;
use crate::failure::Failure;
use crate::interrupt::{self, ChildGroup};
use crate::output::note;
use crate::saved_file;

/// How to start it, and a folder for its files.
pub(crate) struct UcpCheck {
    program: PathBuf,
    variables: Vec<(&'static str, OsString)>,
    folder: TempDir,
    /// The UCX to use if the user named none and the one on the loader path does not fit.
    instead: OnceCell<Option<PathBuf>>,
}

/// Its output on both channels, and how it ended.
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    pub(crate) said: String,
}

impl UcpCheck {
    pub(crate) fn new(context: &Context, command: &str) -> Result<Self, Failure> {
        Ok(Self {
            program: context.prefix.program("ucp-check")?,
            variables: crate::run::variables(&context.prefix)?,
            folder: folder(command)?,
            instead: OnceCell::new(),
        })
    }

    /// An empty folder, for this process alone.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// One operation between two memories, with the UCX in a folder, or on the loader path, or any that fits.
    pub(crate) fn pair(&self, op: &str, memories: &str, ucx: Option<&Path>) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["pair", "--plain", "--one-way", "--ops", op, "--mem", memories]);
        let ucx = ucx.or_else(|| self.instead.get_or_init(|| self.other_ucx()).as_deref());
        command.args(ucx.into_iter().flat_map(|ucx| ["--ucx".as_ref(), ucx.as_os_str()]));
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command.stdin(Stdio::null());
        command
    }

    fn other_ucx(&self) -> Option<PathBuf> {
        let (folder, why) = ucx::instead_of_loader_path(&self.variables)?;
        note(&format!("{why}; --ucx DIR names another"));
        Some(folder)
    }

    /// Runs it; `None` if Ctrl-C ended it.
    pub(crate) fn run(&self, mut command: Command) -> Result<Option<Ended>, Failure> {
        let unable = |error: std::io::Error| {
            Failure::unable(format!("cannot run ucp-check: {error}"), "install all of ucx-gaudi")
        };
        let file = self.folder().join("said");
        let output = File::create(&file).map_err(unable)?;
        command.stderr(output.try_clone().map_err(unable)?).stdout(output);
        interrupt::watch();
        let status = ChildGroup::start(&mut command).map_err(unable)?.wait().map_err(unable)?;
        if interrupt::interrupted() {
            // After Ctrl-C its processes had no time to do that.
            gaudi::share::remove_leftovers();
            return Ok(None);
        }
        let said = fs::read(&file).unwrap_or_default();
        let _ = fs::remove_file(&file);
        Ok(Some(Ended { status, said: String::from_utf8_lossy(&said).into_owned() }))
    }

    /// Why `what` failed, according to output and log.
    pub(crate) fn explain_failure(&self, what: &str, ended: &Ended, ucx: Option<&Path>) -> Failure {
        if NO_UCX.iter().any(|words| ended.said.contains(words)) {
            let (found, remedy) = ucx::advice(ucx, &self.variables);
            return Failure::unable(format!("{what} did not run: {found}"), remedy);
        }
        if what.contains("gaudi")
            && let Err(error) = gaudi::runtime().candidates(&gaudi::DeviceChoice::Any)
        {
            let failure = Failure::from(error);
            return Failure { what: format!("{what} did not run: {}", failure.what), ..failure };
        }
        let reason = reason(&ended.said).unwrap_or_else(|| format!("{}", ended.status));
        let remedy = if reason.contains("DEVICE_BUSY") {
            "gaudi:gaudi needs two free cards (--soft=2 has them); `ucx-gaudi info` says who has them"
        } else {
            "`ucx-gaudi doctor` says what is missing, and --ucx DIR names another UCX"
        };
        Failure::unable(format!("{what} did not run: {reason}"), remedy)
    }
}

/// Messages of `ucp-check` about a UCX that is missing or too old.
const NO_UCX: [&str; 3] =
    ["cannot load UCX from", "is no UCX that this client can use", "no libucp.so.0 and no libucp-"];

/// The first error of the plugin, UCX or `ucp-check`, without its prefix in a log.
fn reason(said: &str) -> Option<String> {
    let words = ["ucx-gaudi ERROR", "ucx-gaudi WARN", "UCX  ERROR", "FAIL", "ucp-check: "];
    let mut lines = words
        .iter()
        .flat_map(|word| said.lines().filter_map(move |line| Some(line.split_once(word)?.1)));
    let line = lines.next().or(said.lines().last())?;
    // `FAIL  process 0: why; process 1: why`
    let line = line.split("; process 1:").next().unwrap_or(line).trim();
    let line =
        line.strip_prefix("process 0: ").or(line.strip_prefix("process 1: ")).unwrap_or(line);
    Some(line.to_owned())
}

/// A folder for this user alone, removed when the value is dropped.
fn folder(command: &str) -> Result<TempDir, Failure> {
    let remedy = "set TMPDIR to a folder that you may write to, on a file system with space";
    let prefix = format!("ucx-gaudi-{command}-");
    let made = tempfile::Builder::new().prefix(&prefix).tempdir().map_err(|error| {
        Failure::unable(format!("cannot create a temporary folder: {error}"), remedy)
    })?;
    // If the file system filled up later, it would look as if nothing had been measured.
    saved_file::check(&made.path().join("said"))
        .map_err(|failure| Failure { remedy: remedy.to_owned(), ..failure })?;
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reason_is_the_first_error_without_time_and_place() {
        let log = "[1.5] [vm:83 :0] x.c:1 UCX  WARN  w\n[1.5] [vm:83 :0]  pipe.c:24   UCX  ERROR pipe() returned -1\n\
                   FAIL  process 0: ucp_init: -3; process 1: ucp_init: -3\n";
        assert_eq!(reason(log).as_deref(), Some("pipe() returned -1"));
        let plugin = format!("{log}[1.6] [vm:83 :0] domain.rs:3 ucx-gaudi ERROR   no card\n");
        assert_eq!(reason(&plugin).as_deref(), Some("no card"));
        assert_eq!(reason("FAIL  process 0: why; process 1: other").as_deref(), Some("why"));
        assert_eq!(reason("FAIL  process 1: other").as_deref(), Some("other"));
        assert_eq!(reason("").as_deref(), None);
    }
}
