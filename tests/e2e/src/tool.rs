//! A program run against a stock UCX, in an environment that only the test controls: every UCX, Gaudi and
//! software-Gaudi variable of the caller is dropped first.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::{Device, Finished, Layout, Running, Ucx};
use soft_gaudi::testing::Machine;

/// Whether a variable configures UCX, the driver or a software device: the caller's variables must not change the
/// result of a test.
pub fn is_setting(name: &OsStr) -> bool {
    const PREFIXES: [&str; 9] =
        ["UCX_", "UCT_", "UCS_", "SOFT_GAUDI", "SOFT_RDMA", "GAUDI_", "HABANA_", "HLS_", "HL_"];
    // Launchers set these: a rank's number on its host chooses a card.
    const RANKS: [&str; 4] = ["OMPI_COMM_WORLD", "SLURM_LOCALID", "PMI_LOCAL", "LOCAL_RANK"];
    let all = PREFIXES.iter().chain(&RANKS);
    name.to_str().is_some_and(|name| all.into_iter().any(|prefix| name.starts_with(prefix)))
}

/// Names, separated by commas, of such variables that programs on a software machine get from the caller all the same:
/// with it `cargo xtask test --long` runs the tests on other machines than the default.
pub const KEEP: &str = "UCX_GAUDI_TEST_KEEP";

/// Longest a single program may run unless a test says otherwise.
const DEFAULT_LIMIT: Duration = Duration::from_secs(60);

/// The same for our verifying client, which moves gigabytes.
const CLIENT_LIMIT: Duration = Duration::from_secs(300);

/// Where programs are taken from.
#[derive(Debug, Clone)]
pub struct Workbench {
    layout: Layout,
}

impl Workbench {
    /// The programs that tests need, under the layout that `cargo xtask` announced.
    ///
    /// # Panics
    /// When something is missing, with the command that makes it.
    #[track_caller]
    pub fn from_env() -> Self {
        match Self::ready(Layout::from_env(), &Ucx::WITH_1_21) {
            Ok(bench) => bench,
            Err(error) => panic!("{error:#}"),
        }
    }

    /// Checks that our programs are built and that these UCXes are present, and makes the folders to run programs in.
    ///
    /// # Errors
    /// When something is missing, with the command that makes it.
    pub fn ready(layout: Layout, ucx: &[Ucx]) -> Result<Self> {
        if let Some(missing) = missing(&layout, ucx) {
            bail!(
                "{} is not there: run `cargo xtask test`, or `cargo xtask setup` and \
                 `cargo xtask build` first",
                missing.display()
            );
        }
        let empty = layout.scratch();
        std::fs::create_dir_all(&empty)
            .with_context(|| format!("cannot create {}", empty.display()))?;
        layout.hide_rdma_libraries()?;
        Ok(Self { layout })
    }

    /// The layout in use.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// A program of stock UCX.
    ///
    /// # Panics
    /// When that UCX has no programs: a mistake in the test.
    #[track_caller]
    pub fn tool(&self, ucx: Ucx, program: &str) -> Tool {
        let Some(dir) = ucx.bin_dir(&self.layout) else {
            panic!("the package with UCX {} has no programs", ucx.name());
        };
        Tool::new(self.layout.clone(), ucx, dir.join(program))
    }

    /// A program of the machine, with the libraries of the given UCX.
    pub fn program(&self, ucx: Ucx, program: impl Into<PathBuf>) -> Tool {
        Tool::new(self.layout.clone(), ucx, program.into())
    }

    /// Our verifying client on the given UCX.
    pub fn ucp_check(&self, ucx: Ucx) -> Tool {
        Tool::new(self.layout.clone(), ucx, self.layout.bin().join("ucp-check"))
    }

    /// The tool `ucx-gaudi`, with the libraries of the given UCX on the loader path.
    pub fn ucx_gaudi(&self, ucx: Ucx) -> Tool {
        Tool::new(self.layout.clone(), ucx, self.layout.bin().join("ucx-gaudi"))
    }

    /// A program of stock UCX with the plugin, a device and these arguments.
    #[track_caller]
    pub fn stock(&self, program: &str, device: &Device, words: &str) -> Tool {
        self.tool(Ucx::V1_22, program).plugin().device(device).words(words)
    }

    /// The running test program once more, to run one of its ignored tests in a separate process, with the plugin and a
    /// device. That test finds the libucp of this UCX by [`libucp_to_test`].
    ///
    /// # Panics
    /// When this program has no path.
    pub fn own_process(&self, ucx: Ucx, device: &Device, test: &str) -> Tool {
        let program = std::env::current_exe().expect("a running program has a path");
        let tool = Tool::new(self.layout.clone(), ucx, program).plugin().device(device);
        let tool = tool
            .words(&format!("--exact {test} --nocapture --include-ignored"))
            .env("UCX_MODULES", "^ib");
        tool.env(LIBUCP, ucx.libucp(&self.layout))
    }

    /// Our client with the plugin, a device and these arguments; it loads exactly that UCX.
    pub fn client(&self, ucx: Ucx, device: &Device, words: &str) -> Tool {
        let tool = self.ucp_check(ucx).plugin().device(device).words(words);
        tool.arg("--ucx").arg(ucx.root(&self.layout)).limit(CLIENT_LIMIT)
    }
}

/// The variable that tells a test in a separate process where libucp is.
const LIBUCP: &str = "UCX_GAUDI_TEST_UCP";

/// The libucp to load, in a test that runs by [`Workbench::own_process`].
///
/// # Panics
/// When it was started in another way.
#[track_caller]
pub fn libucp_to_test() -> PathBuf {
    std::env::var_os(LIBUCP).expect("run by another test").into()
}

/// A program of stock UCX 1.22 with the plugin, a device and these arguments.
#[track_caller]
pub fn stock(program: &str, device: &Device, words: &str) -> Tool {
    Workbench::from_env().stock(program, device, words)
}

/// Our verifying client with the plugin, a device and these arguments.
#[track_caller]
pub fn client(ucx: Ucx, device: &Device, words: &str) -> Tool {
    Workbench::from_env().client(ucx, device, words)
}

/// A program about to be run.
#[derive(Debug, Clone)]
pub struct Tool {
    layout: Layout,
    ucx: Ucx,
    program: PathBuf,
    args: Vec<OsString>,
    envs: Vec<(OsString, OsString)>,
    extra_libs: Vec<PathBuf>,
    last_libs: Vec<PathBuf>,
    machine: Option<Arc<Machine>>,
    plugin: bool,
    limit: Duration,
}

impl Tool {
    fn new(layout: Layout, ucx: Ucx, program: PathBuf) -> Self {
        Self {
            layout,
            ucx,
            program,
            args: Vec::new(),
            envs: Vec::new(),
            extra_libs: Vec::new(),
            last_libs: Vec::new(),
            machine: None,
            plugin: false,
            limit: DEFAULT_LIMIT,
        }
    }

    /// The layout with its files.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Lets UCX find our plugin.
    #[must_use]
    pub fn plugin(mut self) -> Self {
        self.plugin = true;
        self
    }

    /// Puts a driver library (or none) on the loader path.
    #[must_use]
    pub fn device(mut self, device: &Device) -> Self {
        let (libs, envs) = device.loader(&self.layout);
        self.extra_libs.extend(libs);
        self.machine = device.machine();
        self.envs.extend(envs);
        self
    }

    /// Puts the machine's CUDA driver on the loader path, if the loader does not find it by itself.
    #[must_use]
    pub fn cuda(mut self) -> Self {
        let inherited = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let folders = std::env::split_paths(&inherited);
        self.last_libs = folders.filter(|folder| folder.join("libcuda.so.1").exists()).collect();
        self
    }

    /// Puts a folder on the loader path, for example [`Layout::soft_synapse`].
    #[must_use]
    pub fn libraries(mut self, folder: impl Into<PathBuf>) -> Self {
        self.extra_libs.push(folder.into());
        self
    }

    /// Starts it through another program, for example `prlimit`.
    #[must_use]
    pub fn under(mut self, program: &str, words: &[&str]) -> Self {
        let own = std::mem::replace(&mut self.program, program.into()).into_os_string();
        self.args.splice(0..0, words.iter().map(OsString::from).chain([own]));
        self
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().to_owned());
        self
    }

    /// Adds arguments, separated by blanks, as on a command line.
    #[must_use]
    pub fn words(mut self, words: &str) -> Self {
        self.args.extend(words.split_whitespace().map(OsString::from));
        self
    }

    /// Sets a variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.envs.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Sets variables.
    #[must_use]
    pub fn envs(self, variables: &[(&str, &str)]) -> Self {
        variables.iter().fold(self, |tool, (name, value)| tool.env(name, value))
    }

    /// Changes the time limit.
    #[must_use]
    pub fn limit(mut self, limit: Duration) -> Self {
        self.limit = limit;
        self
    }

    /// The time limit.
    pub fn time_limit(&self) -> Duration {
        self.limit
    }

    /// Starts it in the background.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn start(&self) -> Running {
        match Running::start(self.command(), self.line()) {
            Ok(running) => running.on(self.machine.clone()),
            Err(error) => panic!("{error:#}"),
        }
    }

    /// Runs it until it ends or reaches its time limit.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn run(&self) -> Finished {
        self.start().finish(self.limit)
    }

    /// The command with its whole environment.
    pub fn command(&self) -> Command {
        let scratch = self.layout.scratch();
        let mut command = Command::new(&self.program);
        // Only with a software machine: the mere name of such a variable says that there is one.
        let keep = self.machine.as_ref().and_then(|_| std::env::var(KEEP).ok()).unwrap_or_default();
        let kept = |name: &OsStr| keep.split(',').any(|kept| name == kept);
        for (name, _) in std::env::vars_os().filter(|(name, _)| is_setting(name) && !kept(name)) {
            command.env_remove(name);
        }
        command.current_dir(&scratch).env("HOME", &scratch).env("LC_ALL", "C");
        command.env("LD_LIBRARY_PATH", join_paths(&self.lib_dirs()));
        if self.plugin {
            match self.ucx {
                Ucx::V1_21 => command.env("LD_PRELOAD", self.layout.preload()),
                _ => command.env("UCX_PLUGIN_PATH", self.layout.plugins()),
            };
        }
        command.envs(self.envs.iter().map(|(name, value)| (name, value)));
        command.args(&self.args);
        command
    }

    fn lib_dirs(&self) -> Vec<PathBuf> {
        // The driver first: the first libhl-thunk.so that the loader finds is the device.
        let mut dirs = self.extra_libs.clone();
        dirs.push(self.layout.no_rdma());
        dirs.extend(self.ucx.lib_dirs(&self.layout));
        dirs.extend(self.last_libs.iter().cloned());
        dirs
    }

    /// The command line to repeat this by hand, without the paths.
    pub fn line(&self) -> String {
        let mut words: Vec<String> = self
            .envs
            .iter()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect();
        words.push(self.program.file_name().unwrap_or_default().display().to_string());
        words.extend(self.args.iter().map(|arg| arg.display().to_string()));
        words.join(" ")
    }
}

/// The first missing file that `cargo xtask setup` or `cargo xtask build` should have made.
fn missing(layout: &Layout, ucx: &[Ucx]) -> Option<PathBuf> {
    let built = [
        layout.plugins().join("libuct_gaudi.so.0"),
        layout.preload(),
        layout.soft_gaudi().join("libhl-thunk.so"),
        layout.soft_synapse().join("libSynapse.so"),
        layout.bin().join("ucp-check"),
        layout.bin().join("ucx-gaudi"),
    ];
    ucx.iter().map(|ucx| ucx.libucp(layout)).chain(built).find(|path| !path.exists())
}

fn join_paths(dirs: &[PathBuf]) -> OsString {
    let mut joined = OsString::new();
    for dir in dirs {
        if !joined.is_empty() {
            joined.push(":");
        }
        joined.push(dir);
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool() -> Tool {
        let bench = Workbench { layout: Layout::new("/t") };
        bench.tool(Ucx::V1_22, "ucx_info")
    }

    fn value(command: &Command, name: &str) -> Option<String> {
        command
            .get_envs()
            .find(|(key, _)| *key == name)
            .and_then(|(_, value)| value)
            .map(|value| value.display().to_string())
    }

    #[test]
    fn without_plugin_ucx_is_not_told_of_it() {
        assert_eq!(value(&tool().command(), "UCX_PLUGIN_PATH"), None);
        let with = tool().plugin().command();
        assert_eq!(
            value(&with, "UCX_PLUGIN_PATH").as_deref(),
            Some("/t/dist/lib/ucx-gaudi/plugins")
        );
    }

    #[test]
    fn software_driver_comes_first_on_the_loader_path() {
        let device = Device::software();
        let command = tool().device(&device).command();
        let path = value(&command, "LD_LIBRARY_PATH").unwrap_or_default();
        assert!(path.starts_with("/t/dist/lib/ucx-gaudi/soft/gaudi:/t/e2e/no-rdma:"), "{path}");
        assert!(value(&command, "SOFT_GAUDI_NODE").is_some());
    }

    #[test]
    fn line_reads_as_typed() {
        let line = tool().env("UCX_TLS", "all").words("-u t -e").line();
        assert_eq!(line, "UCX_TLS=all ucx_info -u t -e");
    }

    #[test]
    fn missing_names_the_first_absent_thing() {
        let refusal =
            Workbench::ready(Layout::new("/nonexistent"), &Ucx::ALL).expect_err("nothing");
        assert!(refusal.to_string().contains("/libucp.so.0 is not there"), "{refusal}");
    }
}
