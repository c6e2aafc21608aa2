//! The types in our Python files are right, as mypy sees them.

use std::path::Path;
use std::process::Command;

#[test]
fn mypy_finds_nothing_wrong_with_the_types_of_the_python_module() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    // A program of a user, with whatever has a buffer.
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("program.py");
    let numpy = Command::new("python3").args(["-c", "import numpy"]).output();
    let numpy = match numpy.is_ok_and(|output| output.status.success()) {
        true => "import numpy\ngiven = [numpy.zeros(4)]\n",
        false => "given: list[bytearray] = []\n",
    };
    let text = format!(
        "import array, mmap, ucx_gaudi\n{numpy}\
         with ucx_gaudi.alloc(8, card=0) as memory:\n    \
         memory.write(array.array('d', [1.0]))\n    memory.read_into(mmap.mmap(-1, 8))\n    \
         for each in given:\n        memory.write(each)\n        memory.read_into(each)\n\
         first: int = ucx_gaudi.cards()[0].index\nversion: str = ucx_gaudi.__version__\n"
    );
    std::fs::write(&program, text).expect("a file");
    let ours = ["python/ucx_gaudi", "packaging/wheel.py", "packaging/wheel/__main__.py"];
    for files in ours.map(|files| root.join(files)).into_iter().chain([program]) {
        let mut mypy = Command::new("python3");
        mypy.args(["-m", "mypy", "--strict", "--cache-dir=/dev/null"]).arg(&files);
        mypy.env("MYPYPATH", root.join("python"));
        let Ok(output) = mypy.output() else { return println!("skipped: no python3") };
        let said =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        if said.contains("No module named mypy") {
            return println!("skipped: no mypy (pip install mypy)");
        }
        assert!(output.status.success(), "{}: {said}", files.display());
    }
}
