//! `docs/names.md`, which leads from the names of this product's predecessors to today's: each name
//! that it says is here must be here.

use std::path::Path;

use e2e::{Device, stock};

/// The page.
fn page() -> String {
    let path = format!("{}/../../docs/names.md", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("the documentation")
}

/// Rows of a chapter's table: what stands between backticks in the first two columns, or the second
/// column as it is.
fn rows(chapter: &str) -> Vec<(String, String)> {
    let text = page();
    let start = text.find(&format!("## {chapter}\n")).expect("the chapter");
    let body = &text[start + 4..];
    let body = &body[..body.find("\n## ").unwrap_or(body.len())];
    let bare = |cell: &str| cell.trim().trim_matches('`').to_owned();
    let row = |line: &str| {
        let mut cells = line.strip_prefix("| `")?.split('|');
        Some((bare(cells.next()?), bare(cells.next()?)))
    };
    body.lines().filter_map(row).collect()
}

/// What the page has between backticks, one by one.
fn quoted() -> Vec<String> {
    page().split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

#[test]
fn settings_of_before_are_settings_now_or_said_to_be_gone() {
    let listed = stock("ucx_info", &Device::software(), "-c").run().ok().stdout;
    let is_listed = |name: &str| listed.lines().any(|line| line.starts_with(&format!("{name}=")));
    let settings = rows("Settings");
    assert!(settings.len() > 25, "{settings:?}");
    for (before, now) in settings {
        let same = before.replacen("UCT_", "UCX_", 1);
        match now.as_str() {
            "GAUDI_MAPPING_TABLE" => assert_eq!(before, now, "shown to be read in config.rs"),
            "none" => assert!(!is_listed(&same), "{same} is listed\n{listed}"),
            _ => {
                assert!(is_listed(&now), "{now} is not listed\n{listed}");
                assert_eq!(is_listed(&same), same == now, "{before} is {now}");
            }
        }
    }
}

#[test]
fn counters_of_before_are_counted_now() {
    let counters = rows("Counters");
    assert_eq!(counters.len(), 4);
    for (before, now) in counters {
        assert_eq!(before, now);
        assert!(gaudi::stats::NAMES.contains(&now.as_str()), "{now} is not counted");
    }
}

#[test]
fn errors_have_the_codes_and_names_of_before() {
    let errors = rows("Errors");
    let now: Vec<(String, String)> = gaudi::ErrorKind::ALL
        .iter()
        .map(|kind| (kind.name().to_owned(), kind.code().to_string()))
        .collect();
    assert_eq!(errors, now);
}

#[test]
fn tests_of_ucx_perftest_are_those_that_it_has() {
    let help = stock("ucx_perftest", &Device::software(), "-h").run().stdout;
    let known =
        |name: &str| help.lines().any(|line| line.trim().starts_with(&format!("{name} - ")));
    let test = |command: &str| {
        Some(command.strip_prefix("ucx_perftest -t ")?.split_once(' ')?.0.to_owned())
    };
    let tests: Vec<(String, String)> = rows("Commands")
        .iter()
        .filter_map(|(before, now)| Some((test(before)?, test(now)?)))
        .collect();
    assert_eq!(tests.len(), 2, "{tests:?}");
    for (before, now) in tests {
        assert!(!known(&before) && known(&now), "{before}, {now}: {help}");
    }
}

#[test]
fn files_functions_and_sets_of_tests_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect("a file of ours");
    let header = read("plugin/uct-gaudi/include/ucx_gaudi.h");
    let sets = read("xtask/src/sets.rs");
    let mut seen = [0; 3];
    for name in quoted() {
        if ["plugin/", "tools/", "soft/", "tests/"].iter().any(|part| name.starts_with(part)) {
            assert!(root.join(&name).exists(), "{name}");
            seen[0] += 1;
        } else if name.starts_with("ucx_gaudi_") && name != "ucx_gaudi_info" {
            assert!(
                header.contains(&format!(" {name}(")) || header.contains(&format!("*{name}(")),
                "{name}"
            );
            seen[1] += 1;
        } else if let Some(set) = name.strip_prefix("cargo xtask test ") {
            assert!(sets.contains(&format!("name: \"{set}\"")), "{name}");
            seen[2] += 1;
        }
    }
    assert!(seen.iter().all(|count| *count >= 7), "{seen:?}");
}
