//! Gives the shared object the name programs look for, keeps it loaded once it is, and makes it need `libhl-thunk.so`: the
//! one that is loaded, or on the loader path, or beside it where `cargo xtask build` puts it.

mod needs;

use needs::needs;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=needs.rs");
    let arg = |text: &str| println!("cargo:rustc-cdylib-link-arg={text}");
    arg("-Wl,-soname,libscal.so");
    arg("-Wl,-z,nodelete");
    arg("-Wl,-rpath,$ORIGIN/../gaudi");
    needs("libhl-thunk.so", arg);
}
