//! The modules of this crate lie on floors, one folder each, and none uses one of a floor above: a lower module is
//! given what it needs. This reads the sources (not their tests) and follows `crate::`, `super::` and what `lib.rs`
//! re-exports.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// The floors from the bottom up.
const FLOORS: [&str; 6] = ["base", "backend", "engine", "device", "share", "runtime"];

/// Modules that use each other in a circle, at most.
const LARGEST_CYCLE: usize = 3;

/// The names of a module and those around it, from the root of the crate.
type Names = Vec<String>;

/// Modules, each with those that it uses.
type Uses = BTreeMap<String, BTreeSet<String>>;

#[test]
fn no_module_uses_a_floor_above() {
    let mut wrong = Vec::new();
    for (from, targets) in &uses() {
        if floor(from).is_none() {
            wrong.push(format!("{from} has no floor: move it to a folder of FLOORS"));
        }
        for to in targets.iter().filter(|to| floor(from) < floor(to)) {
            wrong.push(format!("{from} uses {to}, on a floor above: give it what it needs"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn few_modules_use_each_other_in_a_circle() {
    let reach = reachable(&uses());
    let circle = |module: &String| -> BTreeSet<&String> {
        let back = |other: &&String| reach[*other].contains(module);
        reach[module].iter().filter(back).collect()
    };
    let largest = reach.keys().map(circle).max_by_key(BTreeSet::len).unwrap_or_default();
    assert!(largest.len() <= LARGEST_CYCLE, "{largest:?}");
}

#[test]
fn the_architecture_page_shows_the_floors() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ARCHITECTURE.md");
    let text = fs::read_to_string(&page).unwrap();
    let (start, end) = ("```mermaid\n", "```\n");
    let (before, rest) = text.split_once(start).expect("a picture");
    let (shown, after) = rest.split_once(end).expect("its end");
    let picture = picture(&uses());
    if std::env::var_os("UPDATE_FLOORS").is_some() {
        fs::write(&page, [before, start, &picture, end, after].concat()).unwrap();
    } else {
        assert_eq!(shown, picture, "UPDATE_FLOORS=1 cargo test -p gaudi --test floors updates it");
    }
}

/// The floors, each with its modules. Each may use all below it.
fn picture(uses: &Uses) -> String {
    let mut picture = String::from("flowchart TD\n");
    for (at, name) in FLOORS.iter().enumerate().rev() {
        let here = uses.keys().filter(|module| floor(module) == Some(at));
        let names: Vec<&str> = here.filter_map(|module| Some(module.split_once('/')?.1)).collect();
        let names = names.join(" · ");
        picture += &format!("    {name}[\"<b>{name}</b><br/>{names}\"]\n");
    }
    let chain: Vec<&str> = FLOORS.into_iter().rev().collect();
    picture + &format!("    {}\n", chain.join(" --> "))
}

fn floor(module: &str) -> Option<usize> {
    let folder = module.split('/').next();
    FLOORS.iter().position(|floor| Some(*floor) == folder)
}

/// Everything that a module uses, by itself or through others.
fn reachable(uses: &Uses) -> Uses {
    let mut reach = uses.clone();
    for through in uses.keys() {
        let further = reach[through].clone();
        for targets in reach.values_mut().filter(|targets| targets.contains(through)) {
            targets.extend(further.iter().cloned());
        }
    }
    reach
}

/// Which module uses which. A module is a floor, or a file or folder on it, such as `base/error`.
fn uses() -> Uses {
    let sources = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let module_of = |names: &[String]| -> Option<String> {
        let known =
            (1..=names.len().min(2)).rev().find(|len| sources.contains_key(&names[..*len]))?;
        Some(names[..known].join("/"))
    };
    let exported: BTreeMap<String, Names> = used(&sources[&Names::new()], "use ", &[])
        .into_iter()
        .filter_map(|names| Some((names.last()?.clone(), names)))
        .collect();
    let mut uses = Uses::new();
    for (path, text) in sources.iter().filter(|(path, _)| !path.is_empty()) {
        let Some(module) = module_of(path) else { continue };
        let targets = uses.entry(module.clone()).or_default();
        let mut found = used(text, "crate::", &[]);
        for up in 1..=path.len() {
            found.extend(used(text, &"super::".repeat(up), &path[..path.len() - up]));
        }
        for names in found {
            let is_module = sources.contains_key(&names[..1]);
            let names = exported.get(&names[0]).filter(|_| !is_module).unwrap_or(&names);
            targets.extend(module_of(names).filter(|target| *target != module));
        }
    }
    uses
}

/// The modules of the crate by path, each with its text, without comments and tests.
fn sources(root: &Path) -> BTreeMap<Names, String> {
    let mut all = BTreeMap::new();
    let mut waiting = vec![(Names::new(), root.join("lib.rs"))];
    while let Some((path, file)) = waiting.pop() {
        let text = fs::read_to_string(&file);
        let text = text.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        let text = without_tests(&text);
        let folder = path.iter().fold(root.to_path_buf(), |folder, name| folder.join(name));
        for name in declared(&text) {
            let file = folder.join(format!("{name}.rs"));
            let file = if file.exists() { file } else { folder.join(&name).join("mod.rs") };
            waiting.push(([&path[..], &[name]].concat(), file));
        }
        all.insert(path, text);
    }
    all
}

fn without_tests(text: &str) -> String {
    let code = |line| str::split(line, "//").next().unwrap_or_default();
    let mut lines = text.lines().map(code);
    let mut kept = String::new();
    while let Some(line) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            kept.extend([line, "\n"]);
            continue;
        }
        // The item that follows: one line, or as far as the line that closes it.
        let Some(item) = lines.find(|line| !line.trim().starts_with("#[")) else { break };
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
    text.lines().filter(|line| !line.starts_with(' ')).filter_map(name).collect()
}

/// What follows each `prefix`, such as `a::{b, c::d}`, as names below `parent`.
fn used(text: &str, prefix: &str, parent: &[String]) -> Vec<Names> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices(prefix).filter(|(at, _)| !text[..*at].ends_with("super::")) {
        expand(&text[at + prefix.len()..], parent, &mut found);
    }
    found
}

/// Adds the names of `a::b`, or of each in `a::{b, c::d}`; what follows them.
fn expand<'a>(text: &'a str, parent: &[String], found: &mut Vec<Names>) -> &'a str {
    let text = text.trim_start();
    if let Some(mut list) = text.strip_prefix('{') {
        loop {
            list = expand(list, parent, found).trim_start();
            match list.strip_prefix(',') {
                Some(more) if !more.trim_start().starts_with('}') => list = more,
                more => return more.unwrap_or(list).trim_start().strip_prefix('}').unwrap_or(""),
            }
        }
    }
    let end = text.find(|letter: char| !letter.is_alphanumeric() && letter != '_');
    let (name, rest) = text.split_at(end.unwrap_or(text.len()));
    let names =
        if name == "self" { parent.to_vec() } else { [parent, &[name.to_owned()]].concat() };
    match rest.strip_prefix("::") {
        Some(rest) => expand(rest, &names, found),
        None => {
            found.extend(Some(names).filter(|names| !names.is_empty()));
            rest
        }
    }
}
