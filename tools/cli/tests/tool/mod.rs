//! Runs the tool as installed: a prefix with the program, the software Gaudi and a stand-in for the plugin.

#![allow(dead_code, reason = "each test program uses a part")]

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

/// A prefix of its own with a software machine of its own; both are removed with it.
pub(crate) struct Installed {
    prefix: PathBuf,
    node: String,
}

/// What a run of the tool brought.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Installed {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let node = format!("cli-{}-{count}", std::process::id());
        let prefix = std::env::temp_dir().join(&node);
        let new = Self { prefix: prefix.clone(), node };
        // Process ids come again, and a test that was killed left its folders.
        new.remove();
        let plugins = prefix.join("lib/ucx-gaudi/plugins");
        let soft = prefix.join("lib/ucx-gaudi/soft/gaudi");
        for folder in [&plugins, &soft, &prefix.join("bin")] {
            std::fs::create_dir_all(folder).expect("a folder");
        }
        std::fs::write(plugins.join("libuct_gaudi.so.0"), "").expect("a stand-in");
        // The tool finds its prefix by its own path, so it must be a file there and not a link.
        let program = Path::new(env!("CARGO_BIN_EXE_ucx-gaudi"));
        let copy = prefix.join("bin/ucx-gaudi");
        if std::fs::hard_link(program, &copy).is_err() {
            std::fs::copy(program, &copy).expect("a copy of the tool");
        }
        let library = std::env::current_exe().expect("a path").with_file_name("libsoft_gaudi.so");
        std::os::unix::fs::symlink(library, soft.join("libhl-thunk.so")).expect("a link");
        new
    }

    fn remove(&self) {
        let _ = std::fs::remove_dir_all(&self.prefix);
        if let Some(node) = self.machine().parent() {
            let _ = std::fs::remove_dir_all(node);
        }
    }

    pub(crate) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The name of the software machine.
    pub(crate) fn node(&self) -> &str {
        &self.node
    }

    /// The folder of the software machine, once a process has used it.
    pub(crate) fn machine(&self) -> PathBuf {
        let user = rustix::process::geteuid().as_raw();
        PathBuf::from(format!("/dev/shm/soft-gaudi-{user}")).join(&self.node).join("gaudi2")
    }

    /// Rules for the software card; see docs/software-gaudi.md.
    pub(crate) fn order_faults(&self, rules: &str) {
        // As the software card makes it: it refuses a folder that others may write to.
        let mut folders = std::fs::DirBuilder::new();
        folders.mode(0o700).recursive(true);
        folders.create(self.machine()).expect("the machine's folder");
        std::fs::write(self.machine().join("faults"), rules).expect("rules");
    }

    /// The tool with these words, in an environment in which nothing of the caller decides.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new(self.prefix.join("bin/ucx-gaudi"));
        for (name, _) in std::env::vars_os() {
            let text = name.to_string_lossy();
            if ["UCX_", "SOFT_", "GAUDI_", "HABANA_", "HLS_", "HL_", "LD_", "NO_COLOR", "CLICOLOR"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(&name);
            }
        }
        command.args(words.split_whitespace());
        command.env("SOFT_GAUDI_NODE", &self.node).env("SOFT_GAUDI_HBM", "3g");
        command
    }

    pub(crate) fn run(&self, words: &str) -> Ran {
        Ran::of(&self.command(words).output().expect("the tool runs"))
    }
}

impl Ran {
    pub(crate) fn of(output: &Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// The JSON on standard output.
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The exit code and these words in the message.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:?}");
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {}", self.err);
        }
    }
}

/// The keys of an object, sorted.
pub(crate) fn keys(value: &serde_json::Value) -> Vec<&str> {
    let mut keys: Vec<&str> =
        value.as_object().expect("an object").keys().map(String::as_str).collect();
    keys.sort_unstable();
    keys
}

impl Drop for Installed {
    fn drop(&mut self) {
        self.remove();
    }
}
