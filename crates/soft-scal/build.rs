//! Gives the shared object the name programs look for, and keeps it loaded once it is.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libscal.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
