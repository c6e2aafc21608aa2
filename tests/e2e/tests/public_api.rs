//! The functions of `ucx_gaudi.h` and the Python module, as programs of others use them.

use std::path::{Path, PathBuf};
use std::process::Command;

use e2e::{Device, Finished, SoftNode, Tool, Ucx, Workbench};

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
    assert!(end.stdout.contains("not imported: "), "{}", end.report());
    assert!(end.stdout.contains("the driver has no dma-buf import"), "{}", end.report());
    let end = run(&importing(1)).ok();
    assert!(end.stdout.contains("the dma-buf was imported"), "{}", end.report());
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
    let source = repository().join("tests/e2e/tests/public_api/errors.c");
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
one, two = g.alloc(70001, '0'), g.alloc(70001, 1)
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
assert g.flush_peer_writes(one.address) is True
assert g.is_device_memory(one.address, 70001) and not g.is_device_memory(one.address + 70001 + 4096)
fd, offset = one.export()
os.close(fd)
for mistake, kind in (
    (lambda: one.read(2, offset=70000), ValueError),
    (lambda: one.write(b'xx', offset=-1), ValueError),
    (lambda: one.fill(256), ValueError),
    (lambda: one.fill(1.5), TypeError),
    (lambda: one.read(-1), ValueError),
    (lambda: one.read(1, offset=0.5), TypeError),
    (lambda: one.write(7), TypeError),
    (lambda: g.alloc(-1), ValueError),
    (lambda: g.alloc(1e6), TypeError),
    (lambda: g.alloc(8, -1), ValueError),
    (lambda: g.alloc(8, 0.0), TypeError),
    (lambda: g.alloc(8, 7), g.GaudiError),
    (lambda: g.alloc(8, 'nonsense'), g.GaudiError),
    (lambda: g.alloc(1 << 60), g.GaudiError),
    (lambda: g.lend(-1), g.GaudiError),
    (lambda: g.flush_peer_writes(4096), g.GaudiError),
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
    for words in [
        "OUT_OF_MEMORY",
        "INVALID_PARAMS",
        "\"nonsense\" names no device",
        "no card is \"7\"",
        "length is -1",
        "256 is no byte",
        "was freed",
    ] {
        assert!(end.stdout.contains(words), "{words}: {}", end.report());
    }
}

#[test]
fn the_python_module_lists_cards_and_knows_its_version() {
    if !have("python3") {
        return;
    }
    let end = ran("import ucx_gaudi as g
cards = g.cards()
assert [card.index for card in cards] == [0, 1] and cards[1].software, cards
with g.alloc(8, cards[1].index) as memory:
    print(g.__version__, cards[1].generation, cards[1].bus_id)
");
    let expected = concat!(env!("CARGO_PKG_VERSION"), " Gaudi2 ");
    assert!(end.stdout.starts_with(expected), "{}", end.report());
    let none = "import ucx_gaudi as g\ntry: g.cards()\nexcept g.GaudiError as error: print(error.name, error)";
    let end = python(none, &Device::cards(0)).run().ok();
    assert!(end.stdout.contains("the driver reports no card"), "{}", end.report());
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

/// A machine whose driver imports dma-bufs.
fn importing(cards: u32) -> Device {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", &cards.to_string());
    Device::Software(node.with("SOFT_GAUDI_LENIENT", "import"))
}

#[test]
fn python_imports_dmabufs_and_copies_odd_parts_of_them() {
    if !have("python3") {
        return;
    }
    let script = "import os, ucx_gaudi as g
N = 200003
data = bytes(i * 11 & 255 for i in range(N))
there, poison = g.alloc(N + 8192, '1'), bytes([0xee]) * (N + 8192)
there.write(poison)
there.write(data, offset=4099)
fd, offset = there.export()
at = offset + 4099
parts = [g.import_dmabuf(fd, at, N, card) for card in ('0', '2', '0', '2', '1')]
assert len({part.address for part in parts}) == 5, 'two cards gave the same address'
size = os.fstat(fd).st_size
whole = g.import_dmabuf(fd, card='0')
assert len(whole) == size
whole.free()
os.close(fd)
for card, part in zip('02021', parts):
    assert part.read() == data and part.read(7, offset=N - 7) == data[-7:]
    here = g.alloc(N + 100, card)
    here.fill(0xdd)
    here.copy_from(part, length=N - 3, offset=51, other_offset=1)
    back = here.read()
    assert back[51:51 + N - 3] == data[1:N - 2] and set(back[:51] + back[51 + N - 3:]) == {0xdd}, card
    part.write(b'odd bytes', offset=70001)
    part.copy_from(here, length=5, offset=3, other_offset=51)
    expected = bytearray(poison)
    expected[4099:4099 + N] = data
    expected[4099 + 70001:4099 + 70010] = b'odd bytes'
    expected[4102:4107] = data[1:6]
    assert there.read() == expected, 'beside its place'
    there.write(data, offset=4099)
    assert not g.is_device_memory(part.address)
other = g.alloc(8, '1')
one, two = parts[0], parts[1]
fd = os.memfd_create('memory'); os.ftruncate(fd, 1 << 20)
real, offset = there.export()
for mistake in (
    lambda: g.import_dmabuf(fd), lambda: g.import_dmabuf(real, size), lambda: g.import_dmabuf(real, size - 5, 6),
    lambda: g.import_dmabuf(99999, 0, 8), lambda: g.import_dmabuf(-1, 0, 8), lambda: g.import_dmabuf(real, 0, 8, 'nonsense'),
    lambda: other.copy_from(one, 8), lambda: one.copy_from(two, 8), lambda: one.fill(0), lambda: one.export(),
    lambda: g._call('copy', one.address, other.address, N + 1), lambda: g._call('unmap_dmabuf', one.address + 1),
):
    try:
        mistake()
    except g.GaudiError as error:
        print(error.name, error)
        assert error.code == -3
    else:
        raise AssertionError('accepted')
os.close(fd); os.close(real)
one.free(); one.free()
try:
    one.read(1)
except ValueError as error:
    print(error)
assert parts[2].read() == data
with two as again:
    print(again)
";
    let end = python(script, &importing(3)).run().ok();
    for words in [
        "the descriptor is not of a dma-buf",
        "are not inside the",
        "imported for software Gaudi2",
        "import it for the card",
        "past the end of what was imported",
        "<dma-buf mapped at 0xfff",
    ] {
        assert!(end.stdout.contains(words), "{words}: {}", end.report());
    }
    // Without import the reason is said.
    let script = "import ucx_gaudi as g
memory = g.alloc(4096)
try:
    g.import_dmabuf(*memory.export(), 4096)
except g.GaudiError as error:
    print(error.name, error)
";
    let end = python(script, &Device::cards(1)).run().ok();
    assert!(end.stdout.contains("INVALID_PARAMS"), "{}", end.report());
    assert!(end.stdout.contains("the driver has no dma-buf import; "), "{}", end.report());
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
