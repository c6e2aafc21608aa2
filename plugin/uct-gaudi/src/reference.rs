//! The tables of variables in `docs/configuration.md` are generated from the declarations: names, values and
//! defaults. The descriptions there are longer than those of `ucx_info -c -f`; they are written by hand, and kept.
//!
//! The test fails if the page differs, and prints the right rows. With `UCX_GAUDI_TEST_WRITE_DOCS=1` it
//! writes them.

use std::path::Path;

use uct::config::{Kind, Variable};

use crate::{ipc, settings};

/// The possible values, as the page words them; `None` for text, which is described by hand.
fn values(kind: Kind, default: &str) -> Option<String> {
    let words = |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>();
    Some(match kind {
        Kind::Bool => words(&["y", "n"]).join(" "),
        Kind::Ternary => words(&["yes", "try", "no"]).join(" "),
        Kind::Choice(all) => words(all).join(" "),
        Kind::Uint => String::from("number, `inf`"),
        Kind::Time => String::from("time"),
        Kind::Bandwidth => String::from("bandwidth, `auto`"),
        // UCX accepts `auto` for every size, but it has a meaning of its own only here.
        Kind::MemUnits if default == "auto" => String::from("size, `auto`, `inf`"),
        Kind::MemUnits => String::from("size, `inf`"),
        Kind::Keyed(keyed) => {
            let keys: Vec<String> = keyed.keys.iter().map(|(key, _)| format!("`{key}:`")).collect();
            let value = values(keyed.value, keyed.fallback)?;
            format!("{value}, or {} and one of them, comma-separated", keys.join(" "))
        }
        Kind::Text => return None,
    })
}

/// A row of the page with the declared values and default in place of the old ones.
fn row(prefix: &str, variable: &Variable, now: &str) -> String {
    let mut cells = now.split(" | ");
    let (_, by_hand) = (cells.next(), cells.next().unwrap_or_default());
    let does = cells.skip(1).collect::<Vec<_>>().join(" | ");
    let values = values(variable.kind, variable.default).unwrap_or_else(|| by_hand.to_owned());
    let default = match variable.default {
        "" => String::from("empty"),
        default => format!("`{default}`"),
    };
    format!("| `UCX_{prefix}{}` | {values} | {default} | {does}", variable.name)
}

#[test]
fn tables_of_the_configuration_page_are_those_of_the_source() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/configuration.md");
    let page = std::fs::read_to_string(&path).expect("the page");
    let mut generated = page.clone();
    let tables = [
        (settings::PREFIX, settings::VARIABLES),
        ("GAUDI_IPC_", ipc::DOMAIN_VARIABLES),
        ("GAUDI_IPC_", ipc::TRANSPORT_VARIABLES),
    ];
    let mut wrong = Vec::new();
    for (prefix, variables) in tables {
        for variable in variables.iter().filter(|variable| !variable.name.is_empty()) {
            let start = format!("| `UCX_{prefix}{}` |", variable.name);
            let now = page.lines().find(|line| line.starts_with(&start));
            let now = now.unwrap_or_else(|| panic!("no row that starts with {start}"));
            let right = row(prefix, variable, now);
            if now != right {
                generated = generated.replacen(now, &right, 1);
                wrong.push(right);
            }
        }
    }
    if std::env::var_os("UCX_GAUDI_TEST_WRITE_DOCS").is_some() {
        std::fs::write(&path, generated).expect("the page is written");
    } else {
        assert!(wrong.is_empty(), "docs/configuration.md should have\n{}", wrong.join("\n"));
    }
}
