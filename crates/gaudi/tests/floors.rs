//! The modules of this crate lie on floors, and none uses one of a floor above: a lower module is given what it
//! needs. This reads the sources (not their tests) and follows `crate::`, `super::` and what `lib.rs` re-exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The floors from the bottom up, with their modules. A module may use those of its own floor and of floors below.
const FLOORS: [(&str, &[&str]); 6] = [
    (
        "base",
        &[
            "card",
            "choice",
            "costs",
            "environment",
            "error",
            "marks",
            "options",
            "process",
            "remedy",
            "stats",
            "sysfs",
            "topology",
        ],
    ),
    ("backend", &["backend"]),
    ("engine", &["memory", "pin", "submit", "window"]),
    ("device", &["copy", "device", "import", "registers"]),
    ("share", &["share"]),
    (
        "runtime",
        &[
            "discovery",
            "guest",
            "kept",
            "lent",
            "mapping_table",
            "opening",
            "owners",
            "pairing",
            "runtime",
            "scale_out",
            "selection",
        ],
    ),
];

/// Modules that use each other in a circle, at most.
const LARGEST_CYCLE: usize = 3;

type Edges = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_module_uses_a_floor_above() {
    let edges = edges();
    let mut wrong = Vec::new();
    for module in edges.keys().filter(|module| floor(module).is_none()) {
        wrong.push(format!("{module} has no floor: add it to FLOORS"));
    }
    for (from, targets) in &edges {
        for to in targets.iter().filter(|to| floor(from) < floor(to)) {
            wrong.push(format!(
                "{from} uses {to}, which is on a floor above: give it what it needs"
            ));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_more_modules_use_each_other_in_a_circle() {
    let reach = reachable(&edges());
    let circle = |module: &String| -> BTreeSet<&String> {
        let back = |other: &&String| reach[*other].contains(module);
        reach[module].iter().filter(back).collect()
    };
    let largest = reach.keys().map(circle).max_by_key(BTreeSet::len).unwrap_or_default();
    assert!(largest.len() <= LARGEST_CYCLE, "{largest:?}");
}

fn floor(module: &str) -> Option<usize> {
    FLOORS.iter().position(|(_, modules)| modules.contains(&module))
}

/// Everything that a module uses, by itself or through others.
fn reachable(edges: &Edges) -> Edges {
    let mut reach = edges.clone();
    for through in edges.keys() {
        let further = reach[through].clone();
        for targets in reach.values_mut().filter(|targets| targets.contains(through)) {
            targets.extend(further.iter().cloned());
        }
    }
    reach
}

/// Which module uses which.
fn edges() -> Edges {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let sources = sources(&root);
    let lib = &sources[&Vec::<String>::new()];
    let exported = exported(lib);
    let mut edges = Edges::new();
    for (path, text) in sources.iter().filter(|(path, _)| !path.is_empty()) {
        let targets = edges.entry(path[0].clone()).or_default();
        for name in used(text, path.len()) {
            let module = exported.get(&name).unwrap_or(&name);
            if *module != path[0] && sources.contains_key(&vec![module.clone()]) {
                targets.insert(module.clone());
            }
        }
    }
    edges
}

/// The modules of the crate by path, each with its text, without comments and tests.
fn sources(root: &Path) -> BTreeMap<Vec<String>, String> {
    let mut all = BTreeMap::new();
    let mut waiting = vec![(Vec::new(), root.join("lib.rs"))];
    while let Some((path, file)) = waiting.pop() {
        let text =
            fs::read_to_string(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let text = without_tests(&text);
        let folder = path.iter().fold(root.to_path_buf(), |folder, name| folder.join(name));
        for name in declared(&text) {
            let files = [folder.join(format!("{name}.rs")), folder.join(&name).join("mod.rs")];
            let file = files.into_iter().find(|file| file.exists());
            waiting.push(([&path[..], &[name]].concat(), file.unwrap_or_else(PathBuf::new)));
        }
        all.insert(path, text);
    }
    all
}

fn without_tests(text: &str) -> String {
    let code: Vec<&str> =
        text.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    let mut kept = String::new();
    let mut lines = code.iter();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            kept.extend([line, "\n"]);
            continue;
        }
        // The item that follows: one line, or as far as the line that closes it.
        let Some(item) = lines.next() else { break };
        if !item.ends_with([';', '}', ',']) {
            let indent = item.len() - item.trim_start().len();
            lines.find(|line| line[indent.min(line.len())..].starts_with(['}', ')']));
        }
    }
    kept
}

/// `mod name;`
fn declared(text: &str) -> Vec<String> {
    let name = |line: &str| Some(line.rsplit_once("mod ")?.1.strip_suffix(';')?.to_owned());
    text.lines()
        .filter(|line| line.starts_with("mod ") || line.starts_with("pub"))
        .filter_map(name)
        .collect()
}

/// What `lib.rs` re-exports, and from which module.
fn exported(lib: &str) -> BTreeMap<String, String> {
    let mut exported = BTreeMap::new();
    for (at, word) in lib.match_indices("use ") {
        let Some((module, names)) = lib[at + word.len()..].split_once("::") else { continue };
        let names = first_names(names);
        exported.extend(names.into_iter().map(|name| (name, module.to_owned())));
    }
    exported
}

/// The names at the root of the crate that a module at this depth uses.
fn used(text: &str, depth: usize) -> BTreeSet<String> {
    let above = "super::".repeat(depth);
    let starts = |prefix: &str| -> Vec<usize> {
        text.match_indices(prefix).map(|(at, found)| at + found.len()).collect()
    };
    let roots = starts("crate::").into_iter().chain(starts(&above));
    roots.flat_map(|at| first_names(&text[at..])).collect()
}

/// The first names of `{a::b, c::{d, e}}`, or of `a::b`.
fn first_names(path: &str) -> Vec<String> {
    let Some(list) = path.strip_prefix('{') else { return vec![first_name(path)] };
    let mut names = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, letter) in list.char_indices() {
        if depth == 0 && matches!(letter, ',' | '}') {
            names.push(first_name(list[start..at].trim_start()));
            start = at + 1;
        }
        match letter {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            _ => {}
        }
    }
    names.retain(|name| !name.is_empty());
    names
}

fn first_name(path: &str) -> String {
    path.chars().take_while(|letter| letter.is_alphanumeric() || *letter == '_').collect()
}
