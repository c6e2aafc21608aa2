//! Gives the shared object the name programs look for, keeps it loaded once it is, and makes it need `libscal.so` and `libhl-thunk.so`:
//! those that are loaded, or on the loader path, or beside it where `cargo xtask build` puts it.

#[path = "../soft-scal/needs.rs"]
mod needs;

use needs::needs;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../soft-scal/needs.rs");
    let arg = |text: &str| println!("cargo:rustc-cdylib-link-arg={text}");
    arg("-Wl,-soname,libSynapse.so");
    arg("-Wl,-z,nodelete");
    arg("-Wl,-rpath,$ORIGIN:$ORIGIN/../gaudi");
    needs("libscal.so", arg);
    needs("libhl-thunk.so", arg);
}
