//! The example of the README, on the software card.

use std::process::Command;

#[path = "../examples/copy.rs"]
mod copy;

/// Tells this program that it was started by its own test.
const CHILD: &str = "HL_THUNK_EXAMPLE_CHILD";

#[test]
fn the_example_copies_bytes_to_a_card_and_back() {
    if std::env::var_os(CHILD).is_some() {
        return copy::main().expect("the example runs");
    }
    let program = std::env::current_exe().expect("a path");
    let node = format!("hl-thunk-example-{}", std::process::id());
    let folder = std::env::temp_dir().join(&node);
    std::fs::create_dir(&folder).expect("a folder");
    let library = program.with_file_name("libsoft_gaudi.so");
    std::os::unix::fs::symlink(library, folder.join("libhl-thunk.so")).expect("a link");
    // Another process, because the loader reads its path at the start of one.
    let output = Command::new(&program)
        .args(["--exact", "the_example_copies_bytes_to_a_card_and_back", "--nocapture"])
        .envs([(CHILD, "1"), ("SOFT_GAUDI_NODE", node.as_str())])
        .env("LD_LIBRARY_PATH", &folder)
        .output()
        .expect("this program starts");
    let _ = std::fs::remove_dir_all(&folder);
    let user = rustix::process::geteuid().as_raw();
    let _ = std::fs::remove_dir_all(format!("/dev/shm/soft-gaudi-{user}/{node}"));
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("4096 bytes went"), "{output:?}");
}
