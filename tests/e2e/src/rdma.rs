//! Programs with the software HCA: NIXL's UCX finds an InfiniBand device, and the HCA counts its work.
//!
//! The library is preloaded (`docs/software-rdma.md` says why). A second node is a separate set of namespaces where the
//! system allows that, otherwise a second loopback address.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use anyhow::{Context, Result, ensure};

use crate::{Finished, Layout, Running, Tool};

/// Reliable connections carry the data; datagrams only set them up.
pub const RC: &str = "rc_verbs,ud_verbs:aux";
/// Data over datagrams.
pub const UD: &str = "ud_verbs";
/// UCX declares a silent peer dead after some 3 s instead of the minutes of its defaults.
pub const IMPATIENT: [(&str, &str); 4] = [
    ("UCX_RC_TIMEOUT", "50ms"),
    ("UCX_RC_RETRY_COUNT", "3"),
    ("UCX_UD_TIMEOUT", "2s"),
    ("UCX_KEEPALIVE_INTERVAL", "1s"),
];

/// HCAs that no other test or run shares, with their counters. Dropping this removes them.
#[derive(Debug)]
pub struct Fabric {
    folder: PathBuf,
    settings: Vec<(String, OsString)>,
}

/// Sums over the processes of a run.
#[derive(Debug, Clone)]
pub struct Counters(Vec<serde_json::Map<String, serde_json::Value>>);

impl Counters {
    /// One counter of `docs/software-rdma.md`, of all processes together.
    ///
    /// # Panics
    /// When there is no such counter: a mistake in the test.
    #[track_caller]
    pub fn get(&self, name: &str) -> u64 {
        let values = self.0.iter().map(|process| {
            let value = process.get(name).and_then(serde_json::Value::as_u64);
            value.unwrap_or_else(|| panic!("no counter `{name}` in {process:?}"))
        });
        values.sum()
    }
}

impl Fabric {
    /// One HCA, unless variables say otherwise.
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        // A short path: the path of a socket is limited to 107 bytes.
        let folder =
            std::env::temp_dir().join(format!("soft-rdma-e2e-{}-{serial}", std::process::id()));
        Self { folder, settings: Vec::new() }
    }

    /// Adds a variable of the software HCA.
    #[must_use]
    pub fn with(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.settings.push((name.to_owned(), value.into()));
        self
    }

    /// The library in its place under the layout.
    pub fn library(layout: &Layout) -> PathBuf {
        layout.soft_rdma().join("libibverbs.so.1")
    }

    /// Makes a program use the HCAs.
    #[must_use]
    pub fn under(&self, tool: Tool) -> Tool {
        let library = Self::library(tool.layout());
        self.variables(&library).into_iter().fold(tool, |tool, (name, value)| tool.env(name, value))
    }

    /// What a program needs in its environment.
    pub fn variables(&self, library: &std::path::Path) -> Vec<(String, OsString)> {
        let mut all = vec![
            ("LD_PRELOAD".to_owned(), library.into()),
            ("SOFT_RDMA_DIR".to_owned(), self.folder.join("node").into()),
            ("SOFT_RDMA_STATS".to_owned(), self.folder.join("stats").into()),
            ("SOFT_RDMA_LOG".to_owned(), "off".into()),
            // By default a user may lock 8 MiB, and UCX's own buffers are larger.
            ("SOFT_RDMA_MEMLOCK".to_owned(), "off".into()),
        ];
        all.extend(self.settings.iter().cloned());
        let _ = std::fs::create_dir_all(&self.folder);
        all
    }

    /// The counters of the processes that have ended.
    ///
    /// # Errors
    /// When no process has left its counters.
    pub fn counters(&self) -> Result<Counters> {
        let path = self.folder.join("stats");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("no process left counters in {}", path.display()))?;
        let lines = text.lines().map(|line| serde_json::from_str(line).context("not JSON"));
        let processes: Vec<_> = lines.collect::<Result<_>>()?;
        ensure!(!processes.is_empty(), "no process left counters");
        Ok(Counters(processes))
    }

    /// A counter of a port (`docs/software-rdma.md`), as any tool reads it: the sum over all processes of node 1.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn port(&self, layout: &Layout, hca: usize, counter: &str) -> Result<u64> {
        let path = format!("/sys/class/infiniband/softrdma{hca}/ports/1/hw_counters/{counter}");
        let mut cat = Command::new("cat");
        cat.arg(&path).envs(self.variables(&Self::library(layout))).env_remove("SOFT_RDMA_STATS");
        let output = cat.output().context("cannot run cat")?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.trim().parse().with_context(|| format!("{path} is `{text}`"))
    }

    /// The folder of the HCAs, to which a test may add files.
    pub fn folder(&self) -> &std::path::Path {
        &self.folder
    }
}

impl Default for Fabric {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Two nodes: process 1 of a program runs on the second, with separate HCAs, cards, shared memory and network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TwoNodes {
    /// Two sets of namespaces, joined by a virtual cable.
    Namespaces {
        /// Whether they are created in a user namespace, which gives the right to do so.
        user: bool,
    },
    /// Two addresses of the loopback device.
    Loopback,
}

/// Makes the second node, then runs the program with `--via` for its process 1.
///
/// `$@`: the program. Each node has its own `/dev/shm`, so that neither sees the other's cards.
const ENTER: &str = r#"
set -e
mount -t tmpfs tmpfs /dev/shm
ip link set lo up
unshare --net --ipc --mount sleep 1000 &
other=$!
trap 'kill $other' EXIT
while kill -0 $other && test "$(readlink /proc/$other/ns/net)" = "$(readlink /proc/self/ns/net)"; do
    sleep 0.05
done
in_other="nsenter -t $other -n -m -i"
$in_other mount -t tmpfs tmpfs /dev/shm
ip link add soft0 type veth peer name soft1 netns $other
ip addr add 10.99.0.1/24 dev soft0
ip link set soft0 up
$in_other ip link set lo up
$in_other ip addr add 10.99.0.2/24 dev soft1
$in_other ip link set soft1 up
"$@" --via "1:$in_other"
"#;

impl TwoNodes {
    /// Finds out what this system allows, and prints it.
    pub fn here() -> Self {
        let works = |user: bool| {
            let run = Self::enter(user, [OsString::from("true")]).output();
            run.is_ok_and(|output| output.status.success())
        };
        let found = match [true, false].into_iter().find(|&user| works(user)) {
            Some(user) => Self::Namespaces { user },
            None => Self::Loopback,
        };
        println!(
            "two nodes: {}",
            match found {
                Self::Namespaces { .. } => "two network namespaces",
                Self::Loopback => "two loopback addresses (this system allows no namespaces)",
            }
        );
        found
    }

    /// A command inside new namespaces.
    fn enter(user: bool, program: impl IntoIterator<Item = OsString>) -> Command {
        let mut command = Command::new("unshare");
        command.args(user.then_some("--map-root-user")).args(["--net", "--ipc", "--mount"]);
        command.args(["sh", "-c", ENTER, "two-nodes"]).args(program);
        command
    }

    /// The addresses of both nodes.
    fn addresses(self) -> String {
        match self {
            Self::Namespaces { .. } => "1=10.99.0.1:7000,2=10.99.0.2:7000".to_owned(),
            Self::Loopback => {
                // The address is unique to this process, and the port ranges of the two nodes do not overlap.
                let [_, a, b, c] = std::process::id().to_be_bytes();
                format!("1=127.{a}.{b}.{c}:24000,2=127.{a}.{b}.{c}:26000")
            }
        }
    }

    /// Runs a program of two processes, with process 1 on the second node. The program must know `--via` and `--env
    /// RANK:NAME=VALUE`.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn run(self, fabric: &Fabric, tool: Tool) -> Finished {
        let mut tool = fabric.under(tool).env("SOFT_RDMA_NODES", self.addresses());
        let own = fabric.folder.join("node2");
        tool = tool.words("--env 1:SOFT_RDMA_NODE=2");
        tool = tool.arg("--env").arg(format!("1:SOFT_RDMA_DIR={}", own.display()));
        let Self::Namespaces { user } = self else {
            return tool.run();
        };
        let inner = tool.command();
        let program = std::iter::once(inner.get_program()).chain(inner.get_args());
        let mut command = Self::enter(user, program.map(OsString::from));
        if let Some(folder) = inner.get_current_dir() {
            command.current_dir(folder);
        }
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        match Running::start(command, tool.line()) {
            Ok(running) => running.finish(tool.time_limit()),
            Err(error) => panic!("{error:#}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_all_processes_are_added() {
        let fabric = Fabric::new();
        std::fs::create_dir_all(fabric.folder()).expect("a folder");
        assert!(fabric.counters().is_err(), "nobody has ended yet");
        let lines = "{\"pid\":1,\"requests\":3}\n{\"pid\":2,\"requests\":4}\n";
        std::fs::write(fabric.folder().join("stats"), lines).expect("written");
        assert_eq!(fabric.counters().expect("two").get("requests"), 7);
    }
}
