//! Open MPI closes components when it ends; what they started (pinned buffers, the engine's threads) lives on. And it loads
//! the library under several names, all with the same symbols: each copy has to use its own.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo:rerun-if-changed=build.rs");
}
