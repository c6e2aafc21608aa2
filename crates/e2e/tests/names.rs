//! `docs/names.md`, which leads from the names of this product's predecessors to today's: each name
//! that it says is here must be here.

use e2e::{Device, stock};

/// Rows of a chapter's table: what stands between backticks in the first two columns, or the second
/// column as it is.
fn rows(chapter: &str) -> Vec<(String, String)> {
    let path = format!("{}/../../docs/names.md", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).expect("the documentation");
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

#[test]
fn settings_of_before_are_settings_now() {
    let listed = stock("ucx_info", &Device::software(), "-c").run().ok().stdout;
    let settings = rows("Settings");
    assert_eq!(settings.len(), 8);
    for (before, now) in settings {
        if before == "GAUDI_MAPPING_TABLE" {
            assert_eq!(before, now, "shown to be read in config.rs");
            continue;
        }
        assert_eq!(before.strip_prefix("UCT_"), now.strip_prefix("UCX_"), "the accepted alias");
        assert!(listed.contains(&format!("{now}=")), "{now} is not listed\n{listed}");
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
