//! The components for Open MPI 5, called as it does, without it: `open_mpi/open_mpi.c` plays it. A real one runs in
//! `packaging/try-in-debian.sh`, which needs a newer Debian than most machines have.

use std::path::Path;
use std::process::Command;

use e2e::{Device, Finished, SoftNode, Ucx, Workbench};

fn compile(place: &Path, name: &str, options: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/open_mpi/open_mpi.c");
    let mut cc = Command::new("cc");
    cc.args(["-Wall", "-O1", "-o"]).arg(place.join(name)).arg(source).args(options);
    assert!(cc.status().expect("a C compiler").success(), "{name}");
}

/// Runs the program with libraries of which `pal` says how Open MPI was built.
fn run(pal: &str, device: Option<&Device>) -> Finished {
    let place = tempfile::tempdir().expect("a folder");
    compile(place.path(), "libmpi.so.40", &["-shared", "-fPIC", "-DLIBMPI"]);
    compile(place.path(), "libopen-pal.so.80", &["-shared", "-fPIC", "-DLIBOPEN_PAL", pal]);
    let folder = format!("-L{}", place.path().display());
    let libraries = ["-Wl,--no-as-needed", "-l:libmpi.so.40", "-l:libopen-pal.so.80", "-ldl"];
    compile(place.path(), "program", &[&["-pthread", &folder][..], &libraries].concat());
    let bench = Workbench::from_env();
    let mut tool = bench.program(Ucx::V1_22, place.path().join("program"));
    if let Some(device) = device {
        tool = tool.device(device);
    }
    tool.arg(bench.layout().open_mpi()).libraries(place.path()).run()
}

#[test]
fn components_copy_move_and_reduce_gaudi_memory_as_host_memory() {
    let end = run("-DDEBUG_BUILD=0", Some(&Device::cards(1))).ok();
    assert!(end.says(&["every byte is right"]), "{}", end.report());
}

#[test]
fn components_decline_a_build_for_debugging_and_machines_without_a_gaudi() {
    let end = run("-DDEBUG_BUILD=1", Some(&Device::Software(SoftNode::lenient()))).ok();
    assert!(end.says(&["declined"]), "{}", end.report());
    assert!(end.says(&["another layout than is known"]), "{}", end.report());
    let end = run("-DDEBUG_BUILD=0", None).ok();
    assert!(end.says(&["declined"]), "{}", end.report());
    assert!(!end.says(&["ucx-gaudi"]), "nothing to tell: {}", end.report());
}
