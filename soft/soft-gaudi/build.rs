//! Gives the shared object the name programs look for, and keeps it loaded once it is.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libhl-thunk.so");
    // Worker threads and the fault handler outlive any dlclose.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
