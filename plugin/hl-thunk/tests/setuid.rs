//! `HL_THUNK_LIBRARY` and recordings of driver calls in a program that runs with more rights than its user has.

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use hl_thunk::Library;

const NAMED: &str = "/nonexistent/named-by-the-user.so";
const NOBODY: u32 = 65534;

/// A copy of this program with these permissions, removed with the test.
struct Program(PathBuf);

impl Program {
    fn new(mode: u32) -> std::io::Result<Self> {
        let name = format!("hl-thunk-setuid-{}-{mode:o}", std::process::id());
        let program = Self(std::env::temp_dir().join(name));
        // By a child: a file that this process had open for writing may not be executable yet.
        let copied = Command::new("cp").arg(std::env::current_exe()?).arg(&program.0).status()?;
        assert!(copied.success());
        std::fs::set_permissions(&program.0, std::fs::Permissions::from_mode(mode))?;
        Ok(program)
    }

    /// What an ordinary user sees when it loads the driver library.
    fn run(&self) -> std::io::Result<String> {
        let output = Command::new(&self.0)
            .args(["--exact", "loads_the_library_and_prints_what_was_tried", "--nocapture"])
            .env("HL_THUNK_LIBRARY", NAMED)
            .env("HL_THUNK_TEST_CHILD", "1")
            .current_dir("/")
            .uid(NOBODY)
            .gid(NOBODY)
            .output()?;
        let text = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_setuid_program_ignores_the_library_that_its_user_names() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can make a setuid program of another user");
        return;
    }
    let ordinary = Program::new(0o755).and_then(|program| program.run()).expect("runs");
    assert!(ordinary.contains(NAMED), "the variable counts: {ordinary}");
    let setuid = Program::new(0o4755).and_then(|program| program.run()).expect("runs");
    if setuid.contains("secure: no") {
        println!("skipped: {} is mounted nosuid", std::env::temp_dir().display());
        return;
    }
    assert!(setuid.contains("tried:") && !setuid.contains(NAMED), "{setuid}");
    // Nor does it write a file that its user names.
    assert!(ordinary.contains("recorded: yes"), "{ordinary}");
    assert!(setuid.contains("recorded: no"), "{setuid}");
}

/// The other half of the test above, in the program that it starts.
#[test]
fn loads_the_library_and_prints_what_was_tried() {
    if std::env::var_os("HL_THUNK_TEST_CHILD").is_none() {
        println!("nothing to do: the test above runs this in a process of its own");
        return;
    }
    let (real, effective) = (rustix::process::getuid(), rustix::process::geteuid());
    println!("secure: {}", if real == effective { "no" } else { "yes" });
    match hl_thunk::trace::start("/dev/null") {
        Ok(_) => println!("recorded: yes"),
        Err(error) => println!("recorded: no, {error}"),
    }
    match Library::load() {
        Ok(library) => println!("tried: {}", Path::new(library.name()).display()),
        Err(error) => println!("tried: {error}"),
    }
}
