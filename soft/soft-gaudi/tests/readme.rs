//! What the crate's README shows, run.

use std::process::Command;

use soft_gaudi::testing::Machine;

#[test]
fn the_python_lines_of_the_readme_open_a_card() {
    let readme = include_str!("../README.md");
    let (_, from) = readme.split_once("```python\n").expect("lines of Python");
    let (script, _) = from.split_once("```").expect("their end");
    let mut python = Command::new("python3");
    let output = Machine::temporary("readme").run(python.args(["-c", script]));
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
