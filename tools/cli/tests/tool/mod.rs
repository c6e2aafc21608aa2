//! Runs the tool as installed: a prefix with the program, the software Gaudi and a stand-in for the plugin.

#![allow(dead_code, reason = "each test program uses a part")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use soft_gaudi::testing::{Machine, link_library};

/// A prefix of its own with a software machine of its own; both are removed with it.
pub(crate) struct Installed {
    prefix: PathBuf,
    machine: Machine,
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
        let machine = Machine::temporary("cli");
        let prefix = std::env::temp_dir().join(machine.name());
        // Process ids come again, and a test that was killed left its folders.
        let _ = std::fs::remove_dir_all(&prefix);
        let lib = prefix.join("lib/ucx-gaudi");
        std::fs::create_dir_all(prefix.join("bin")).expect("a folder");
        for folder in ["plugins", "preload"] {
            std::fs::create_dir_all(lib.join(folder)).expect("a folder");
        }
        std::fs::write(lib.join("plugins/libuct_gaudi.so.0"), "").expect("a stand-in");
        // The loader complains of one that is no library.
        let preload = lib.join("preload/libucx_gaudi_preload.so");
        std::os::unix::fs::symlink("../soft/gaudi/libhl-thunk.so", preload).expect("a link");
        // The tool finds its prefix by its own path, so it must be a file there and not a link.
        let program = Path::new(env!("CARGO_BIN_EXE_ucx-gaudi"));
        let copy = prefix.join("bin/ucx-gaudi");
        if std::fs::hard_link(program, &copy).is_err() {
            std::fs::copy(program, &copy).expect("a copy of the tool");
        }
        link_library(&prefix.join("lib/ucx-gaudi/soft/gaudi")).expect("a link");
        Self { prefix, machine }
    }

    pub(crate) fn prefix(&self) -> &Path {
        &self.prefix
    }

    /// The name of the software machine.
    pub(crate) fn node(&self) -> &str {
        self.machine.name()
    }

    /// The folder of the software machine, once a process has used it.
    pub(crate) fn machine(&self) -> PathBuf {
        self.machine.folder("gaudi2")
    }

    /// Rules for the software card; see docs/software-gaudi.md.
    pub(crate) fn order_faults(&self, rules: &str) {
        self.machine.set_faults("gaudi2", rules);
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
        command.env("SOFT_GAUDI_NODE", self.node()).env("SOFT_GAUDI_HBM", "3g");
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
        let _ = std::fs::remove_dir_all(&self.prefix);
    }
}
