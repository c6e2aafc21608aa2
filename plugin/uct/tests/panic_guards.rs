//! No panic crosses into C: each function of `uct` and `uct-gaudi` that C calls mentions a guard in its source, so that
//! none is forgotten. Which of them were seen to catch panics under UCX, `tests/e2e/tests/foreign.rs` says.

use std::path::{Path, PathBuf};

/// Calls that catch panics, by the crate. A function that makes none of them must be an exception below.
const CRATES: [(&str, &[&str]); 2] = [
    ("src", &["guarded(", "guarded_status(", "catch_unwind("]),
    ("../uct-gaudi/src", &["guarded(", "attempt(", "run(", "report(", "releasing()"]),
];

/// Functions that need no guard, and why.
const EXCEPTIONS: [(&str, &str, &str); 8] = [
    ("plugin.rs", "ucs_module_global_init", "naked: jumps to the entry behind it, which has one"),
    ("probe.rs", "slot", "stores a number in a thread-local cell without a destructor"),
    ("probe.rs", "outside", "the same"),
    ("loaded.rs", "collect", "copies a string, for our own call of dl_iterate_phdr"),
    ("c_errors.rs", "ucx_gaudi_error", "returns a pointer; a missing thread-local is an answer"),
    ("c_errors.rs", "ucx_gaudi_error_string", "chooses a constant text"),
    ("memory_api.rs", "ucx_gaudi_api_version", "returns a constant"),
    ("fault.rs", "handler", "a signal handler: atomics and system calls only, nothing may unwind"),
];

fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|it| it == "rs") {
            found.push(path);
        }
    }
    found
}

/// Names and bodies of the functions that C may call; types of functions have no name. rustfmt puts the end of a function
/// where its first line begins.
fn callbacks(source: &str) -> Vec<(&str, String)> {
    let lines: Vec<&str> = source.lines().collect();
    let named = lines.iter().enumerate().filter_map(|(at, line)| {
        let (before, name) = line.split_once("extern \"C\" fn ")?;
        let is_function =
            before.split_whitespace().all(|word| word.starts_with("pub") || word == "unsafe");
        let is_name_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let name = name.split(|c| !is_name_part(c)).next().filter(|name| !name.is_empty())?;
        is_function.then_some((at, name))
    });
    let body = |at: usize| {
        let indent = lines[at].len() - lines[at].trim_start().len();
        let end = format!("{}}}", " ".repeat(indent));
        let body = lines[at..].iter().take_while(|line| **line != end);
        let code = body.map(|line| line.split("//").next().unwrap_or_default());
        code.collect::<Vec<_>>().join("\n")
    };
    named.map(|(at, name)| (name, body(at))).collect()
}

/// Whether a body calls one of these, and not something whose name only ends like it.
fn calls(body: &str, guards: &[&str]) -> bool {
    guards.iter().any(|guard| {
        body.match_indices(guard)
            .any(|(at, _)| !body[..at].ends_with(|c: char| c.is_ascii_alphanumeric() || c == '_'))
    })
}

#[test]
fn each_function_that_c_calls_catches_panics_or_is_a_known_exception() {
    let (mut found, mut wrong) = (0, Vec::new());
    let mut unused: Vec<_> = EXCEPTIONS.iter().map(|(file, name, _)| (*file, *name)).collect();
    let mut is_whole = true;
    for (folder, guards) in CRATES {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        if !folder.exists() {
            println!("skipped: {} is not part of this package", folder.display());
            is_whole = false;
            continue;
        }
        for path in sources(&folder) {
            let source = std::fs::read_to_string(&path).expect("a source file");
            let file = path.file_name().and_then(|name| name.to_str()).expect("a plain name");
            for (name, body) in callbacks(&source) {
                found += 1;
                let before = unused.len();
                unused.retain(|known| *known != (file, name));
                let is_exception = unused.len() < before;
                if calls(&body, guards) == is_exception {
                    wrong.push(format!("{}: {name}", path.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "no guard, or needlessly an exception:\n{}", wrong.join("\n"));
    assert!(unused.is_empty() || !is_whole, "exceptions that are no functions: {unused:?}");
    assert!(found >= 70 || !is_whole, "only {found} functions were found");
}

#[test]
fn functions_are_told_from_types_and_end_where_they_end() {
    let source = "\
type Call = unsafe extern \"C\" fn(c_int) -> c_int;
/// extern \"C\" fn not_this()
unsafe extern \"C\" fn one<T>(a: c_int) -> c_int {
    // guarded( would be right
    a
}
mod inner {
    pub(crate) extern \"C\" fn two() {
        let not_guarded = unguarded(1);
        guarded(|| ());
    }
}
";
    let found = callbacks(source);
    assert_eq!(found.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["one", "two"]);
    let is_guarded: Vec<_> = found.iter().map(|(_, body)| calls(body, &["guarded("])).collect();
    assert_eq!(is_guarded, [false, true]);
    assert!(!calls("unguarded(1)", &["guarded("]));
}
