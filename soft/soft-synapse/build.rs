//! Builds `libscal.so`, and makes `libSynapse.so`, which cargo builds, need it and `libhl-thunk.so` as the vendor's do:
//! those that are loaded, or on the loader path, or where `cargo xtask build` puts them.
//!
//! A crate has one shared object in cargo, so the other is built here, of the same sources with `--cfg libscal`. One
//! object under both names would not do: programs would find `syn…` in libscal, and two copies of SCAL in a process.

use std::path::Path;
use std::process::Command;

/// Both stay loaded once they are.
const STAY: &str = "-Wl,-z,nodelete";
const EVEN_IF_UNUSED: &str = "-Wl,--no-as-needed";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src");
    println!("cargo:rustc-check-cfg=cfg(libscal)");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    let [thunk, scal] = ["libhl-thunk.so", "libscal.so"].map(|name| format!("{out}/{name}"));

    // All that the linker needs of it is its name.
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-Wl,-soname,libhl-thunk.so", "-o"]);
    run(cc.arg(&thunk));
    let link = ["-Wl,-soname,libscal.so", STAY, "-Wl,-rpath,$ORIGIN/../gaudi"];
    build_scal(&scal, &[&link[..], &[EVEN_IF_UNUSED, &thunk]].concat());

    let link = ["-Wl,-soname,libSynapse.so", STAY, "-Wl,-rpath,$ORIGIN:$ORIGIN/../gaudi"];
    for arg in [&link[..], &[EVEN_IF_UNUSED, &scal, &thunk]].concat() {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
}

/// It uses no crate but the standard library. Lints see it as a part of this crate's tests.
fn build_scal(library: &str, link: &[&str]) {
    let set = |name| std::env::var(name).expect("cargo sets it");
    let mut rustc = Command::new(set("RUSTC"));
    rustc.args(["--crate-type=cdylib", "--crate-name=scal", "--edition=2024", "--cfg=libscal"]);
    rustc.args(["--cap-lints=allow", "-Cdebuginfo=line-tables-only"]);
    rustc.arg(format!("-Copt-level={}", set("OPT_LEVEL")));
    rustc.arg(format!("--target={}", set("TARGET")));
    rustc.args(set("CARGO_ENCODED_RUSTFLAGS").split('\x1f').filter(|flag| !flag.is_empty()));
    rustc.args(link.iter().map(|arg| format!("-Clink-arg={arg}")));
    run(rustc.arg(Path::new("src").join("lib.rs")).args(["-o", library]));
}

fn run(command: &mut Command) {
    let status = command.status().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(status.success(), "{command:?}: {status}");
}
