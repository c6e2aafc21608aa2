//! The Markdown pages name things that exist: files, links and their anchors, variables, commands.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Files below a folder whose name ends like this, `target` and hidden folders left out.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder of the checkout").flatten() {
        let (path, name) = (entry.path(), entry.file_name().display().to_string());
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if name.ends_with(ending) {
            found.push(path);
        }
    }
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Every page, with its text.
fn pages() -> Vec<(PathBuf, String)> {
    let pages: Vec<_> =
        files(&root(), ".md").into_iter().map(|path| (path.clone(), read(&path))).collect();
    assert!(pages.len() > 8, "the pages were not found");
    pages
}

/// Every run of characters in `text` that a name may have, beginning with `start`.
fn names(text: &str, start: &str, part: impl Fn(char) -> bool) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (at, _) in text.match_indices(start) {
        let before = text[..at].chars().next_back();
        if before.is_none_or(|before| !part(before)) {
            let rest = &text[at..];
            found.insert(rest[..rest.find(|c| !part(c)).unwrap_or(rest.len())].to_owned());
        }
    }
    found
}

fn variable_part(c: char) -> bool {
    c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_'
}

/// The anchors that headings of a page make, as GitHub makes them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |line: &str| -> String {
        let title = line.trim_start_matches('#').trim().to_lowercase();
        let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_to_pages_and_their_anchors_resolve() {
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        for (at, _) in text.match_indices("](") {
            let link = text[at + 2..].split(')').next().unwrap_or_default();
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().expect("a folder").join(file),
            };
            let fits =
                target.exists() && (anchor.is_empty() || anchors(&read(&target)).contains(anchor));
            if !fits {
                wrong.push(format!("{}: {link}", page.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_that_are_named_exist() {
    let part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '.' | '_' | '-');
    let sources = files(&root(), ".rs");
    let mut wrong = Vec::new();
    for (page, text) in pages() {
        // A Rust file may be named by the last parts of its path.
        for word in text.split('`').filter(|word| word.ends_with(".rs") && word.chars().all(part)) {
            if !sources.iter().any(|path| path.ends_with(word)) {
                wrong.push(format!("{}: {word}", page.display()));
            }
        }
        for start in
            ["plugin/", "tools/", "soft/soft-", "soft/pci-", "tests/e2e", "docs/", "xtask/"]
        {
            for name in names(&text, start, part) {
                let path = name.trim_end_matches(['.', '/', '-']);
                if !root().join(path).exists() {
                    wrong.push(format!("{}: {path}", page.display()));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A figure without these cannot be repeated or trusted.
#[test]
fn results_name_their_date_commit_machine_and_command() {
    let results = files(&root().join("docs/results"), ".md");
    assert!(!results.is_empty(), "the results were not found");
    for path in results {
        let text = read(&path);
        let not_measured = text.contains("\nNot measured yet");
        for row in ["date", "commit", "machine", "command"] {
            let known = text.contains(&format!("\n| {row} | "));
            assert!(known || not_measured, "{}: no {row}", path.display());
        }
    }
}

/// Tests are named `file::name` in the last column of the tables of threats and of promises.
#[test]
fn tests_that_are_named_as_evidence_exist() {
    let sources = files(&root(), ".rs");
    for (page, least) in [("docs/security.md", 40), ("docs/reliability.md", 20)] {
        let text = read(&root().join(page));
        let rows = text.lines().filter(|line| line.starts_with("| ") && line.contains("::"));
        let mut named = 0;
        for row in rows {
            let evidence =
                row.trim_end_matches([' ', '|']).rsplit(" | ").next().unwrap_or_default();
            for test in evidence.split('`').filter(|word| word.contains("::")) {
                let (file, name) = test.split_once("::").expect("two parts");
                let file = format!("{file}.rs");
                let exists = |path: &PathBuf| path.ends_with(&file) && has_test(&read(path), name);
                assert!(sources.iter().any(exists), "{page}: no test {test}");
                named += 1;
            }
        }
        assert!(named >= least, "{page}: only {named} tests were found in the tables");
    }
}

fn has_test(source: &str, name: &str) -> bool {
    // Fuzz targets are a list of names.
    let listed = || source.contains("targets! {") && !names(source, name, word_part).is_empty();
    source.contains(&format!("fn {name}(")) || listed()
}

fn word_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// The variables that the plugin declares, by their full names. Those of UCX's own interface tables
/// are not ours.
fn declared() -> BTreeSet<String> {
    let source = root().join("plugin/uct-gaudi/src");
    let mut found = BTreeSet::new();
    for path in files(&source, ".rs") {
        let component = if path.starts_with(source.join("ipc")) { "IPC_" } else { "" };
        let text = read(&path);
        let fields = text.split("name: \"").skip(1).filter_map(|rest| rest.split('"').next());
        // Rows of a table: `COPY_DEVICE: Text = "",`.
        let rows = text.lines().filter(|line| line.contains(" = \""));
        let rows = rows.filter_map(|line| Some(line.trim().split_once(": ")?.0));
        for name in fields.chain(rows) {
            if !name.is_empty() && name.chars().all(variable_part) {
                found.insert(format!("UCX_GAUDI_{component}{name}"));
            }
        }
    }
    assert!(found.contains("UCX_GAUDI_COPY_DEVICE"), "the declarations were not found: {found:?}");
    found
}

#[test]
fn every_variable_of_the_plugin_has_a_row_and_every_variable_named_is_declared() {
    let declared = declared();
    let rows = read(&root().join("docs/configuration.md"));
    for name in &declared {
        assert!(rows.contains(&format!("\n| `{name}` |")), "configuration.md: no row for {name}");
    }
    let of_ucx = |name: &str| {
        ["_ALLOC", "_FAILURE", "_MAX_NUM_EPS"].iter().any(|ending| name.ends_with(ending))
    };
    // Its constants have the same beginning.
    let header = read(&root().join("plugin/uct-gaudi/include/ucx_gaudi.h"));
    for (page, text) in pages() {
        for name in names(&text, "UCX_GAUDI_", variable_part) {
            // A beginning such as `UCX_GAUDI_COPY_…`, or a variable of the tests.
            let known = name.ends_with('_') || name.starts_with("UCX_GAUDI_TEST_") || of_ucx(&name);
            let known = known || header.contains(&format!("{name} "));
            assert!(known || declared.contains(&name), "{}: {name}", page.display());
        }
    }
}

#[test]
fn variables_of_the_software_devices_that_are_named_are_read() {
    for (folder, start) in [("soft/soft-gaudi", "SOFT_GAUDI_"), ("soft/soft-rdma", "SOFT_RDMA_")] {
        let source = files(&root().join(folder), ".rs");
        let source: String = source.iter().map(|path| read(path)).collect();
        for (page, text) in pages() {
            for name in names(&text, start, variable_part) {
                let known = name.ends_with('_') || source.contains(&format!("\"{name}\""));
                assert!(known, "{}: {name}", page.display());
            }
        }
    }
}

#[test]
fn commands_of_xtask_that_are_named_exist() {
    let list = |arguments: &[&str]| {
        let output =
            std::process::Command::new(env!("CARGO_BIN_EXE_xtask")).args(arguments).output();
        String::from_utf8(output.expect("xtask runs").stdout).expect("text")
    };
    let part = |c: char| c.is_ascii_lowercase() || c == '-' || c == ' ';
    let (commands, benches) = (list(&["--help"]), list(&["bench", "--help"]));
    for (page, text) in pages() {
        for line in names(&text, "cargo xtask ", part) {
            let mut words = line.split(' ').skip(2).filter(|word| !word.starts_with('-'));
            let (command, name) = (words.next().unwrap_or_default(), words.next());
            let place = page.display();
            if command.is_empty() {
                continue;
            }
            assert!(commands.contains(&format!("\n  {command} ")), "{place}: {line}");
            if let ("bench", Some(name)) = (command, name) {
                assert!(
                    name.is_empty() || benches.contains(&format!("- {name}:")),
                    "{place}: {line}"
                );
            }
        }
    }
}

/// The tool's commands in shell blocks and output of the pages, as the tool that is built has them.
#[test]
fn commands_of_the_tool_that_are_named_exist() {
    let tool = e2e::Layout::from_env().bin().join("ucx-gaudi");
    let Ok(output) = std::process::Command::new(&tool).arg("--help").output() else {
        return println!("skipped: no {}", tool.display());
    };
    let commands = String::from_utf8(output.stdout).expect("text");
    let part = |c: char| c.is_ascii_lowercase() || c == '-' || c == ' ';
    for (page, text) in pages() {
        // Within code only: "ucx-gaudi lets …" is prose.
        let code = text.split("```").skip(1).step_by(2).flat_map(str::lines);
        let spans = text.split('`').skip(1).step_by(2).filter(|span| !span.contains('\n'));
        for line in code.chain(spans) {
            for words in names(line, "ucx-gaudi ", part) {
                let command = words.split(' ').nth(1).unwrap_or_default();
                if !command.is_empty() && !command.starts_with('-') {
                    let known = commands.contains(&format!("\n  {command} "));
                    assert!(known, "{}: ucx-gaudi {command}", page.display());
                }
            }
        }
    }
}

/// Users have no checkout. Only what `cargo xtask` and tests say may name pages there.
#[test]
fn messages_name_pages_where_packages_have_them() {
    let installed = format!("{}/", e2e::Layout::DOCUMENTS);
    let sources = ["plugin", "tools", "soft"].map(|folder| files(&root().join(folder), ".rs"));
    let mut found = 0;
    for path in sources.iter().flatten().filter(|path| !path.components().any(is_tests)) {
        for line in read(path).lines().map(str::trim).filter(|line| !line.starts_with("//")) {
            if ["include_str!", "CARGO_MANIFEST_DIR", "assert"].iter().any(|it| line.contains(it)) {
                continue;
            }
            for (at, _) in line.match_indices("docs/").filter(|(at, _)| line[*at..].contains(".md"))
            {
                let page: String = line[at..].chars().take_while(|c| page_part(*c)).collect();
                let page = page.trim_end_matches('.');
                assert!(root().join(page).is_file(), "{}: no {page}", path.display());
                assert!(line[..at].ends_with(&installed), "{}: {line}", path.display());
                found += 1;
            }
        }
    }
    assert!(found > 5, "messages name pages");
}

fn is_tests(part: std::path::Component<'_>) -> bool {
    part.as_os_str() == "tests"
}

fn page_part(c: char) -> bool {
    c.is_ascii_alphanumeric() || "/.-_".contains(c)
}
