//! Part of the build scripts of `soft-scal` and `soft-synapse`: makes a shared object need another by its name.

use std::path::Path;
use std::process::Command;

/// An empty library of that name is all that the linker needs.
pub(crate) fn needs(name: &str, arg: impl Fn(&str)) {
    let folder = std::env::var("OUT_DIR").expect("cargo sets it");
    let library = Path::new(&folder).join(name);
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-nostdlib", "-x", "c", "/dev/null", "-o"]).arg(&library);
    let made = cc.arg(format!("-Wl,-soname,{name}")).status().expect("a C compiler, cc");
    assert!(made.success(), "cc: {made}");
    arg("-Wl,--no-as-needed");
    arg(library.to_str().expect("a path in UTF-8"));
}
