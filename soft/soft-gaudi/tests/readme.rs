//! What the crate's README shows, run.

use std::process::Command;

#[test]
fn the_python_lines_of_the_readme_open_a_card() {
    let readme = include_str!("../README.md");
    let (_, from) = readme.split_once("```python\n").expect("lines of Python");
    let (script, _) = from.split_once("```").expect("their end");
    let program = std::env::current_exe().expect("a path");
    let node = format!("readme-{}", std::process::id());
    let folder = std::env::temp_dir().join(&node);
    std::fs::create_dir(&folder).expect("a folder");
    let library = program.with_file_name("libsoft_gaudi.so");
    std::os::unix::fs::symlink(library, folder.join("libhl-thunk.so")).expect("a link");
    let output = Command::new("python3")
        .args(["-c", script])
        .env("LD_LIBRARY_PATH", &folder)
        .env("SOFT_GAUDI_NODE", &node)
        .output();
    let _ = std::fs::remove_dir_all(&folder);
    let user = rustix::process::geteuid().as_raw();
    let _ = std::fs::remove_dir_all(format!("/dev/shm/soft-gaudi-{user}/{node}"));
    let output = match output {
        Ok(output) => output,
        Err(error) => return eprintln!("skipped: python3: {error}"),
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = text.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].contains("soft-gaudi") && lines[1] == "opened",
        "{output:?}"
    );
}
