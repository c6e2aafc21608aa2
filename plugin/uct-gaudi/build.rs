//! The library is never unloaded: UCX keeps pointers into it for ever. It is installed under the name that
//! it has for the loader, see the crate `plugin-loader`.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libucx_gaudi.so");
    println!("cargo:rerun-if-changed=build.rs");
}
