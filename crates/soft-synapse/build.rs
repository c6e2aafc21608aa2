//! Gives the shared object the name programs look for, and keeps it loaded once it is. It finds `libscal.so` beside itself.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libSynapse.so");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-rpath,$ORIGIN");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}
