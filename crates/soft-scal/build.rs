//! Gives the shared object the name programs look for, keeps it loaded once it is, and makes it need `libhl-thunk.so`: the
//! one that is loaded, or on the loader path, or beside it where `cargo xtask build` puts it.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let arg = |text: &str| println!("cargo:rustc-cdylib-link-arg={text}");
    arg("-Wl,-soname,libscal.so");
    arg("-Wl,-z,nodelete");
    arg("-Wl,-rpath,$ORIGIN/../gaudi");
    needs("libhl-thunk.so", arg);
}

/// An empty library of that name is all that the linker needs.
fn needs(name: &str, arg: impl Fn(&str)) {
    let folder = std::env::var("OUT_DIR").expect("cargo sets it");
    let library = Path::new(&folder).join(name);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(&library);
    let made = cc.arg(format!("-Wl,-soname,{name}")).status().expect("a C compiler, cc");
    assert!(made.success(), "cc: {made}");
    arg("-Wl,--no-as-needed");
    arg(library.to_str().expect("a path in UTF-8"));
}
