//! The types in our Python files are right, as mypy sees them.

use std::path::Path;
use std::process::Command;

#[test]
fn mypy_finds_nothing_wrong_with_the_types_of_the_python_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    for files in ["python/ucx_gaudi", "packaging/wheel.py", "packaging/wheel/__main__.py"] {
        let mut mypy = Command::new("python3");
        mypy.args(["-m", "mypy", "--strict", "--cache-dir=/dev/null"]).arg(root.join(files));
        let Ok(output) = mypy.output() else { return println!("skipped: no python3") };
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if said.contains("No module named mypy") {
            return println!("skipped: no mypy (pip install mypy)");
        }
        assert!(output.status.success(), "{files}: {said}");
    }
}
