//! For tests of programs that run on the software Gaudi: machines of their own, and tests that run in a process of
//! their own.
//!
//! The library itself calls nothing of this, so the linker leaves it out of `libhl-thunk.so`. What tests must not take
//! from here are C structures and packets: they write those independently.

use std::ffi::OsString;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

pub use crate::alone;
use crate::config::{self, Config, user_folder};
use crate::faults;

/// Set in programs that a test started with [`child`]; tests may give it a value of their own.
pub const CHILD: &str = "SOFT_GAUDI_TEST_CHILD";

/// A software machine, by the name under which processes share it.
#[derive(Debug)]
pub struct Machine {
    name: String,
    temporary: bool,
}

impl Machine {
    /// One that nothing else uses; it is removed when this is dropped.
    pub fn temporary(prefix: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        static SWEPT: Once = Once::new();
        SWEPT.call_once(|| remove_abandoned(prefix));
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{prefix}-{}-{serial}", std::process::id());
        let machine = Self { name, temporary: true };
        // Process ids are reused.
        machine.remove();
        machine
    }

    /// That of this process.
    pub fn of_this_process() -> Self {
        let name = std::env::var("SOFT_GAUDI_NODE").unwrap_or_else(|_| "default".to_owned());
        Self { name, temporary: false }
    }

    /// The value of `SOFT_GAUDI_NODE`.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn folders(&self) -> [PathBuf; 2] {
        [PathBuf::from("/dev/shm"), std::env::temp_dir()]
            .map(|base| user_folder(&base).join(&self.name))
    }

    /// The files of its cards of this generation.
    pub fn folder(&self, generation: &str) -> PathBuf {
        let [in_memory, on_disk] = self.folders();
        if Path::new("/dev/shm").is_dir() { in_memory } else { on_disk }.join(generation)
    }

    /// Where its fault rules are.
    pub fn faults_file(&self, generation: &str) -> PathBuf {
        self.folder(generation).join("faults")
    }

    /// Sets its fault rules, as described in `docs/software-gaudi.md`. They apply to processes with
    /// `SOFT_GAUDI_FAULTS=yes`.
    ///
    /// # Panics
    /// When they cannot be written.
    #[track_caller]
    pub fn set_faults(&self, generation: &str, rules: &str) {
        // With the mode that the card gives it: it refuses a folder that others may write to.
        let mut private = std::fs::DirBuilder::new();
        private.recursive(true).mode(0o700);
        let file = self.faults_file(generation);
        private
            .create(self.folder(generation))
            .and_then(|()| std::fs::write(&file, format!("{rules}\n")))
            .unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }

    /// What a kernel would have logged as errors: the cause of each refusal, in a word.
    pub fn kernel_log(&self, generation: &str) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder(generation).join("kernel.log"));
        let log = log.unwrap_or_default();
        log.lines().filter_map(|line| Some(line.split(' ').nth(1)?.to_owned())).collect()
    }

    /// Runs a program that finds this machine and the library on its loader path.
    pub fn run(&self, command: &mut Command) -> std::io::Result<Output> {
        let folder = std::env::temp_dir().join(&self.name);
        link_library(&folder)?;
        command.env("LD_LIBRARY_PATH", &folder).env("SOFT_GAUDI_NODE", &self.name);
        let output = command.output();
        std::fs::remove_dir_all(&folder)?;
        output
    }

    /// Removes it with all its cards, even if processes still use them.
    pub fn remove(&self) {
        for folder in self.folders() {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// Removes the temporary machines with this prefix whose process has ended: a test that was killed left them.
fn remove_abandoned(prefix: &str) {
    let pid =
        |name: &str| name.strip_prefix(prefix)?.strip_prefix('-')?.split_once('-')?.0.parse().ok();
    for folder in
        std::fs::read_dir(user_folder(Path::new("/dev/shm"))).into_iter().flatten().flatten()
    {
        let owner: Option<u32> = folder.file_name().to_str().and_then(pid);
        if owner.is_some_and(|owner| !Path::new("/proc").join(owner.to_string()).exists()) {
            let _ = std::fs::remove_dir_all(folder.path());
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if self.temporary {
            self.remove();
        }
    }
}

/// The shared object, which cargo builds next to test programs.
///
/// # Panics
/// When there is none.
pub fn library() -> PathBuf {
    let library = beside_program();
    assert!(library.exists(), "{} is missing: build with cargo", library.display());
    library
}

fn beside_program() -> PathBuf {
    std::env::current_exe().unwrap_or_default().with_file_name("libsoft_gaudi.so")
}

/// Makes a folder in which the loader finds the library by the name that programs use.
pub fn link_library(folder: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(folder)?;
    std::os::unix::fs::symlink(library(), folder.join("libhl-thunk.so"))
}

/// Gives this program a machine of its own with 64 cards, and sets further variables, once: before anything reads
/// the environment. In a [`child`], variables that its parent set stay. The machine is removed when the program that
/// named it ends.
pub fn set_up(generation: &str, further: &[(&str, &str)]) {
    extern "C" fn remove() {
        Machine::of_this_process().remove();
    }
    static SET: Once = Once::new();
    SET.call_once(|| {
        let own_name = format!("test-{}", std::process::id());
        let further = further.iter().map(|(name, value)| (*name, OsString::from(value)));
        let mut variables = vec![
            ("HL_THUNK_LIBRARY", beside_program().into_os_string()),
            ("SOFT_GAUDI_NODE", own_name.clone().into()),
            ("SOFT_GAUDI_GENERATION", generation.into()),
            ("SOFT_GAUDI_DEVICES", "64".into()),
            // Without it, by tests that say so.
            ("SOFT_GAUDI_LENIENT", "import".into()),
        ];
        variables.extend(further);
        variables.retain(|(name, _)| !is_child() || std::env::var_os(name).is_none());
        for (name, value) in variables {
            // SAFETY: all tests of a program come through here first, and nothing reads the environment before.
            unsafe { std::env::set_var(name, value) };
        }
        if Machine::of_this_process().name == own_name {
            // SAFETY: the handler takes no arguments and may run at any time.
            unsafe { libc::atexit(remove) };
        }
    });
}

/// The configuration that lines `NAME=VALUE` give, or what is wrong with them.
pub fn configuration(lines: &str) -> Result<Config, String> {
    let value =
        |line: &str, name: &str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
    config::with(|name| lines.lines().find_map(|line| value(line, name)))
}

/// A fault rule as it is written back, or what is wrong with it.
pub fn fault_rule(line: &str) -> Result<String, String> {
    faults::normalized(line)
}

/// The index of a card that no other test of this program uses.
pub fn fresh_index() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// This program again, to run one of its tests by itself, on a machine of its own.
pub fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap_or_default());
    command.args(["--exact", test, "--nocapture", "--include-ignored", "--test-threads=1"]);
    command.env(CHILD, "1").env_remove("SOFT_GAUDI_NODE");
    command
}

/// Whether this program was started by a test.
pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Runs the rest of the test in a process of its own, on a machine of its own with so many Gaudi2, and with these
/// variables. Counters, descriptors and limits are then the test's alone.
#[macro_export]
macro_rules! alone {
    ($cards:expr $(, $variable:expr)*) => {
        if $crate::testing::is_child() {
            $crate::testing::set_up("gaudi2", &[]);
        } else {
            fn here() {}
            let cards = $cards.to_string();
            let variables = [("SOFT_GAUDI_DEVICES", &*cards) $(, $variable)*];
            return $crate::testing::run_alone(std::any::type_name_of_val(&here), &variables);
        }
    };
}

/// Runs the test in which `here` (the path of a function) lies in a process of its own, with these variables.
///
/// # Panics
/// When the test fails.
#[track_caller]
pub fn run_alone(here: &str, variables: &[(&str, &str)]) {
    let text = output_alone(here, variables);
    // Pass on what was skipped.
    text.lines().filter(|line| line.contains("skipped")).for_each(|line| println!("{line}"));
}

/// The same; returns what the test wrote.
///
/// # Panics
/// When the test fails.
#[track_caller]
pub fn output_alone(here: &str, variables: &[(&str, &str)]) -> String {
    let test = here.split_once("::").and_then(|(_, path)| path.rsplit_once("::"));
    let (test, _) = test.expect("program::test::here");
    let output = child(test).envs(variables.iter().copied()).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text.into_owned()
}

/// Bytes that differ from place to place, and for each seed.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_of_processes_that_have_ended_are_removed() {
        let ours = Machine::temporary("swept");
        // No process has this number: it is above the largest.
        let theirs = Machine { name: String::from("swept-4194305-0"), temporary: true };
        for machine in [&ours, &theirs] {
            std::fs::create_dir_all(&machine.folders()[0]).expect("a folder");
        }
        remove_abandoned("swept");
        assert!(ours.folders()[0].exists() && !theirs.folders()[0].exists());
    }
}
