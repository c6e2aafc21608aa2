//! Recipes of the user's pages and `examples/`, run as they stand there: a page's shell blocks are read from
//! the page. Replaced are only the folders, and cards by software cards.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use e2e::{Device, Tool, Ucx, Workbench};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the checkout")
}

/// The shell blocks of a page, one after the other; `skip` are words of blocks that are left out.
fn blocks(page: &str, skip: &[&str]) -> String {
    let text = std::fs::read_to_string(repository().join(page)).expect(page);
    let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split("```").next());
    blocks.filter(|block| !skip.iter().any(|word| block.contains(word))).collect()
}

/// A shell in an empty folder beside `examples`, with stock UCX as `$UCX` and two software cards for whatever
/// `ucx-gaudi run` starts.
fn shell(place: &Path, script: &str) -> Tool {
    let bench = Workbench::from_env();
    std::os::unix::fs::symlink(repository().join("examples"), place.join("examples"))
        .expect("a link");
    let ucx = Ucx::V1_22.root(bench.layout()).join("libucx");
    let script = script
        .replace("export UCX=/opt/ucx", &format!("export UCX='{}'", ucx.display()))
        .replace("ucx-gaudi run --", "ucx-gaudi run --soft=2 --");
    let script = format!("set -eux\ncd '{}'\n{script}", place.display());
    let path = std::env::var("PATH").unwrap_or_default();
    let tool = bench.program(Ucx::V1_22, "/bin/sh").device(&Device::cards(2));
    tool.arg("-c")
        .arg(script)
        .env("PATH", format!("{}:{path}", bench.layout().bin().display()))
        // Open MPI's own conditions for a container or a small machine.
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .env("OMPI_MCA_rmaps_base_oversubscribe", "1")
        .limit(Duration::from_secs(120))
}

/// Whether this machine has Open MPI 4 with its compiler; else says what is missing.
fn open_mpi() -> bool {
    let said = |program: &str| {
        let output = Command::new(program).arg("--version").output();
        output
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .unwrap_or_default()
    };
    let there = said("mpirun").contains("(Open MPI) 4") && !said("mpicc").is_empty();
    if !there {
        println!("skipped: no Open MPI 4 with mpicc");
    }
    there
}

/// `examples/ucp_gaudi.*`, compiled against stock UCX.
#[test]
fn ucp_examples_in_c_and_rust_move_gaudi_memory() {
    let compilers = [
        "cc -I$UCX/include examples/ucp_gaudi.c -o ucp_gaudi -L$UCX/lib -lucp -lucs -Wl,--allow-shlib-undefined",
        "rustc --edition 2024 -L $UCX/lib -Clink-arg=-Wl,--allow-shlib-undefined examples/ucp_gaudi.rs",
    ];
    for compiler in compilers {
        let place = tempfile::tempdir().expect("a temporary folder");
        let script = format!("export UCX=/opt/ucx\n{compiler}\nucx-gaudi run -- ./ucp_gaudi\n");
        let end = shell(place.path(), &script).run().ok();
        assert!(end.says(&["every byte is right"]), "{}", end.report());
    }
}

#[test]
fn open_mpi_sends_broadcasts_puts_and_gets_as_its_page_says() {
    if !open_mpi() {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let end =
        shell(place.path(), &blocks("docs/mpi.md", &["mpi_ring.py", "mpi_collectives"])).run().ok();
    assert!(end.says(&["2 ranks: every byte is right"]), "{}", end.report());
    assert!(!end.says(&["WARN"]), "{}", end.report());
}

#[test]
fn mpi4py_sends_as_its_page_says() {
    if !open_mpi() || !imports("mpi4py") {
        return;
    }
    let place = tempfile::tempdir().expect("a temporary folder");
    let end = shell(place.path(), &blocks("docs/mpi.md", &["mpicc"])).run().ok();
    assert!(end.says(&["2 ranks: every byte is right"]), "{}", end.report());
}

/// On the UCX that its package asks for and brings, and on a newer one in front of it.
#[test]
fn ucxx_sends_on_its_own_ucx_and_on_a_newer_one() {
    if !imports("ucxx") {
        return;
    }
    let newer = Ucx::V1_22.root(Workbench::from_env().layout());
    let theirs = std::env::var("PYTHONPATH").unwrap_or_default();
    let newer = format!("{}:{theirs}", newer.display());
    for (path, version) in [(theirs, "1.21."), (newer, "1.22.")] {
        let place = tempfile::tempdir().expect("a temporary folder");
        // Its own libraries, wherever they are, instead of those that the harness puts there.
        let blocks = blocks("docs/nixl.md", &["kv_cache", "UCX_MODULES", "pip install"]);
        let script = format!("unset LD_LIBRARY_PATH\n{blocks}");
        let end = shell(place.path(), &script).env("PYTHONPATH", path).run().ok();
        let on = format!("on UCX {version}");
        assert!(end.says(&[&on, "every byte is right"]), "{}", end.report());
        // It sets a variable that UCX has read already, of which UCX warns.
        assert!(!end.says(&["WARN", "PLUGIN_PATH"]), "{}", end.report());
        assert!(!end.says(&["WARN", "incompatible"]), "{}", end.report());
    }
}

/// Whether Python has this module; else says so.
fn imports(module: &str) -> bool {
    let output = Command::new("python3").args(["-c", &format!("import {module}")]).output();
    let there = output.is_ok_and(|output| output.status.success());
    if !there {
        println!("skipped: no Python module {module}");
    }
    there
}
