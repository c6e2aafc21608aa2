//! Tests of `setup` with a fake package index and a fake Python.

use super::*;
use std::os::unix::fs::PermissionsExt;

const PACKAGE: Package = Package {
    folder: "pkg",
    project: "some-package",
    version: "1.0",
    sha256: "00",
    bytes: 1,
    left_out: &["left_out/"],
};

struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("temporary folder"))
    }

    /// A `python3` that is a shell script.
    fn fake_python(&self, script: &str) -> Setup {
        let python = self.0.path().join("python3");
        // A child writes it: if this process had it open for writing, a fork of another test thread might keep it open,
        // and then it could not be executed.
        let status = Command::new("sh")
            .args([
                "-c",
                r#"rm -f "$1"; printf '#!/bin/sh\n%s\n' "$2" >"$1" && chmod 755 "$1""#,
                "sh",
            ])
            .arg(&python)
            .arg(script)
            .status()
            .expect("sh");
        assert!(status.success());
        self.with_python(&python)
    }

    fn with_python(&self, python: &Path) -> Setup {
        Setup { stock: self.0.path().join("stock"), python: python.to_owned() }
    }

    fn leftovers(&self) -> Vec<String> {
        fs::read_dir(self.0.path().join("stock"))
            .map(|entries| {
                entries
                    .flatten()
                    .map(|entry| entry.file_name().display().to_string())
                    .filter(|name| name != ".lock")
                    .collect()
            })
            .unwrap_or_default()
    }
}

/// A wheel like the real ones: a program, a library under three names, an archive, a part to skip.
fn make_wheel(path: &Path) {
    let script = r#"
import sys, zipfile
def add(name, mode, data):
    info = zipfile.ZipInfo(name); info.external_attr = (0o100000 | mode) << 16
    archive.writestr(info, data)
with zipfile.ZipFile(sys.argv[1], "w") as archive:
    add("p/bin/tool", 0o755, b"program")
    for name in ("p/lib/libx.so", "p/lib/libx.so.0", "p/lib/libx.so.0.0.0"):
        add(name, 0o755, b"library")
    add("p/lib/liby.so", 0o755, b"library")
    add("p/lib/libx.a", 0o644, b"archive")
    add("left_out/big", 0o644, b"big")
"#;
    let status = Command::new("python3").args(["-c", script]).arg(path).status().expect("python3");
    assert!(status.success());
}

/// A Python that "downloads" the given wheel, and is the real one otherwise.
fn serving(wheel: &Path) -> String {
    format!(
        r#"if [ "$2" = pip ]; then
             while [ $# -gt 0 ]; do if [ "$1" = --dest ]; then mkdir -p "$2"; cp '{}' "$2"; fi; shift; done
             exit 0
           fi
           exec python3 "$@""#,
        wheel.display()
    )
}

#[test]
fn warm_cache_needs_neither_python_nor_network() {
    let place = Place::new();
    let setup = place.with_python(Path::new("/nonexistent/python3"));
    fs::create_dir_all(setup.place(&PACKAGE)).expect("folder");
    fs::write(setup.stamp(&setup.place(&PACKAGE)), PACKAGE.stamp()).expect("stamp");
    setup.run(&[PACKAGE]).expect("nothing to do");
}

#[test]
fn missing_python_is_named_with_a_remedy() {
    let place = Place::new();
    let error = place.with_python(Path::new("/nonexistent/python3")).run(&[PACKAGE]);
    let text = format!("{:#}", error.expect_err("no Python"));
    assert!(text.contains("not installed") && text.contains("apt install"), "{text}");
}

#[test]
fn missing_pip_is_named_with_a_remedy() {
    let place = Place::new();
    let setup = place.fake_python("echo 'python3: No module named pip' >&2; exit 1");
    let text = format!("{:#}", setup.run(&[PACKAGE]).expect_err("no pip"));
    assert!(text.contains("ensurepip"), "{text}");
}

#[test]
fn failed_download_leaves_nothing_behind() {
    let place = Place::new();
    let setup = place.fake_python(
        "[ \"$3\" = --version ] && exit 0; echo 'NewConnectionError: no route' >&2; exit 1",
    );
    let text = format!("{:#}", setup.run(&[PACKAGE]).expect_err("no network"));
    assert!(text.contains("some-package 1.0") && text.contains("cannot be reached"), "{text}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn package_is_unpacked_as_it_was_before_it_became_a_zip() {
    let place = Place::new();
    let wheel = place.0.path().join("some_package-1.0-py3-none-any.whl");
    make_wheel(&wheel);
    let setup = place.fake_python(&serving(&wheel));
    setup.run(&[PACKAGE]).expect("unpacked");

    let root = setup.place(&PACKAGE);
    let mode = fs::metadata(root.join("p/bin/tool")).expect("program").permissions().mode();
    assert_eq!(mode & 0o111, 0o111, "the program is executable");
    for link in ["p/lib/libx.so", "p/lib/libx.so.0"] {
        let target = fs::read_link(root.join(link)).expect("a link");
        assert_eq!(target, Path::new("libx.so.0.0.0"));
    }
    assert!(!root.join("p/lib/liby.so").is_symlink(), "another library with the same bytes");
    assert!(!root.join("p/lib/libx.a").exists(), "archives are left out");
    assert!(!root.join("left_out").exists());
    assert_eq!(place.leftovers(), ["pkg"]);

    // The second time everything is there, so it works even with a Python that always fails.
    place.fake_python("exit 1").run(&[PACKAGE]).expect("nothing to do");
}

#[test]
fn package_of_another_version_is_replaced() {
    let place = Place::new();
    let wheel = place.0.path().join("some_package-1.0-py3-none-any.whl");
    make_wheel(&wheel);
    let setup = place.fake_python(&serving(&wheel));
    fs::create_dir_all(setup.place(&PACKAGE)).expect("folder");
    fs::write(setup.place(&PACKAGE).join("old-file"), "").expect("file");
    setup.run(&[PACKAGE]).expect("replaced");
    assert!(!setup.place(&PACKAGE).join("old-file").exists());
    assert!(setup.is_there(&PACKAGE));
}
