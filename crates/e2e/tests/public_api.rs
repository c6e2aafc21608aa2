//! The functions of `ucx_gaudi.h` and the Python module, as programs of others use them.

use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::{Device, Finished, Tool, Ucx, Workbench};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Whether a program is here; a line if not.
fn have(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok_and(|it| it.status.success());
    if !found {
        println!("skipped: there is no {program} here");
    }
    found
}

/// Compiles a C program against the installed header and library.
fn compile(bench: &Workbench, source: &Path, program: &Path, options: &[&str]) -> bool {
    let (dist, libraries) = (bench.layout().dist(), bench.layout().dist().join("lib/ucx-gaudi"));
    let mut cc = Command::new("cc");
    cc.args(["-std=c99", "-Wall", "-Wextra", "-Werror", "-Wpedantic", "-D_DEFAULT_SOURCE"]);
    cc.args(options).arg("-I").arg(dist.join("include")).arg("-o").arg(program).arg(source);
    cc.arg("-L").arg(&libraries).arg("-lucx_gaudi");
    cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
    cc.status().expect("a compiler").success()
}

#[test]
fn the_example_in_c_moves_bytes_without_ucx() {
    if !have("cc") {
        return;
    }
    let bench = Workbench::from_env();
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("gaudi_memory");
    let source = repository().join("examples/gaudi_memory.c");
    assert!(compile(&bench, &source, &program, &[]), "it compiles without a warning");
    let run = |device: &Device| bench.program(Ucx::V1_22, &program).device(device).run();
    let end = run(&Device::software()).ok();
    assert!(end.stdout.contains("there and back"), "{}", end.report());
    // Without a card the reason is said.
    let end = run(&Device::cards(0)).refused();
    assert!(end.says(&["DEVICE_NOT_FOUND", "no card"]), "{}", end.report());
}

#[test]
fn every_code_has_a_text_and_the_reason_a_lifetime() {
    if !have("cc") {
        return;
    }
    let bench = Workbench::from_env();
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("errors");
    let source = repository().join("crates/e2e/tests/public_api/errors.c");
    assert!(compile(&bench, &source, &program, &["-pthread"]), "it compiles without a warning");
    // The texts need no card.
    let end = bench.program(Ucx::V1_22, &program).device(&Device::cards(0)).run().ok();
    assert_eq!(end.stdout.lines().count(), 8, "{}", end.report());
}

#[test]
fn the_header_is_c_plus_plus_too() {
    if !have("c++") {
        return;
    }
    let bench = Workbench::from_env();
    let folder = tempfile::tempdir().expect("a folder");
    let source = folder.path().join("header.cc");
    std::fs::write(
        &source,
        "#include <ucx_gaudi.h>\nint main() { return ucx_gaudi_api_version() != UCX_GAUDI_API_VERSION; }\n",
    )
    .expect("written");
    let mut compiler = Command::new("c++");
    compiler.args(["-std=c++11", "-Wall", "-Werror", "-fsyntax-only", "-I"]);
    compiler.arg(bench.layout().dist().join("include")).arg(&source);
    assert!(compiler.status().expect("a compiler").success());
}

/// A script with the module, as it is installed.
fn python(script: &str, device: &Device) -> Tool {
    let bench = Workbench::from_env();
    let modules = bench.layout().dist().join("lib/ucx-gaudi/python");
    let tool = bench.program(Ucx::V1_22, "python3").device(device);
    tool.env("PYTHONPATH", modules).env("PYTHONDONTWRITEBYTECODE", "1").arg("-c").arg(script)
}

fn ran(script: &str) -> Finished {
    python(script, &Device::cards(2)).run().ok()
}

#[test]
fn five_lines_of_python_move_bytes() {
    if !have("python3") {
        return;
    }
    let end = ran("import ucx_gaudi
with ucx_gaudi.alloc(1 << 20) as memory:
    memory.fill(0)
    memory.write(b'hello', offset=3)
    print(memory.read(5, offset=3), memory.read(3) == bytes(3), memory)
");
    assert!(end.stdout.starts_with("b'hello' True <Gaudi memory at 0x1001"), "{}", end.report());
}

#[test]
fn the_python_module_takes_any_buffer_and_refuses_mistakes_in_words() {
    if !have("python3") {
        return;
    }
    let end = ran("import gc, os, ucx_gaudi as g
one, two = g.alloc(70001, '0'), g.alloc(70001, '1')
data = bytes(i * 7 & 255 for i in range(70001))
for given in (data, bytearray(data), memoryview(data), memoryview(bytearray(data))):
    one.fill(9)
    one.write(given)
    two.fill(1)
    two.copy_from(one, offset=1, length=70000 - 1)
    back = bytearray(70001)
    two.read_into(back)
    assert back[0] == 1 and back[-1] == 1 and back[1:-1] == data[:69999], 'bytes'
assert one.read(0) == b'' and one.read(offset=70000) == data[70000:]
assert g.is_device_memory(one.address, 70001) and not g.is_device_memory(one.address + 70001 + 4096)
fd, offset = one.export()
os.close(fd)
for mistake, kind in (
    (lambda: one.read(2, offset=70000), ValueError),
    (lambda: one.write(b'xx', offset=-1), ValueError),
    (lambda: one.fill(256), g.GaudiError),
    (lambda: g.alloc(8, 'nonsense'), g.GaudiError),
    (lambda: g.alloc(1 << 60), g.GaudiError),
    (lambda: g.lend(-1), g.GaudiError),
):
    try:
        mistake()
    except kind as error:
        print(type(error).__name__, getattr(error, 'name', ''), error)
    else:
        raise AssertionError('accepted')
one.free(); one.free()
try:
    one.read(1)
except ValueError as error:
    print(error)
del two; gc.collect()
with open('/proc/self/maps') as maps:
    assert 'libucs' not in maps.read(), 'no UCX is needed'
");
    for words in ["OUT_OF_MEMORY", "INVALID_PARAMS", "\"nonsense\" names no device", "was freed"] {
        assert!(end.stdout.contains(words), "{words}: {}", end.report());
    }
}

#[test]
fn the_python_module_has_the_codes_and_their_texts() {
    if !have("python3") {
        return;
    }
    let end = ran("import ucx_gaudi as g
for code in g.ErrorCode:
    assert g.error_string(code).startswith(code.name + ': '), code
assert [code.value for code in g.ErrorCode] == list(range(-1, -9, -1))
assert g.error_string(0) == 'OK: no error' and g.error_string(-9) == g.error_string(7)
try:
    g.alloc(8, 'nonsense')
except g.GaudiError as error:
    assert error.code == g.ErrorCode.INVALID_PARAMS and error.name == 'INVALID_PARAMS', error.code
    print('told')
assert g.GaudiError(-99, 'text').name == '-99'
");
    assert!(end.stdout.contains("told"), "{}", end.report());
}

/// The module's types are part of its surface.
#[test]
fn the_python_module_is_typed() {
    let folder = Workbench::from_env().layout().dist().join("lib/ucx-gaudi/python/ucx_gaudi");
    assert!(folder.join("py.typed").exists());
    if !have("mypy") {
        return;
    }
    let checked = Command::new("mypy").args(["--strict"]).arg(folder).status().expect("it runs");
    assert!(checked.success());
}
