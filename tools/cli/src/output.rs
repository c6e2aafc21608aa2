//! The output of commands: tables and marks for people, one JSON document for programs.
//!
//! `anstream` removes colours if the output is not a terminal or `NO_COLOR` is set.

use anstyle::{AnsiColor, Style};
use comfy_table::{Table, presets};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::failure::Failure;

/// Good news.
pub(crate) const GREEN: Style = AnsiColor::Green.on_default();
/// Worth a look.
pub(crate) const YELLOW: Style = AnsiColor::Yellow.on_default();
/// Wrong.
pub(crate) const RED: Style = AnsiColor::Red.on_default().bold();
/// Less important.
pub(crate) const DIM: Style = Style::new().dimmed();

/// Prints one JSON document on standard output.
pub(crate) fn print_json(value: &impl Serialize) {
    let text = serde_json::to_string_pretty(value);
    println!("{}", text.expect("our types are representable in JSON"));
}

/// Prints on standard error why a command failed and what to do; with `--json` also on standard output.
pub(crate) fn print_failure(failure: &Failure, json: bool) {
    anstream::eprintln!("{RED}error:{RED:#} {}", failure.what);
    if !failure.remedy.is_empty() {
        anstream::eprintln!("{DIM}remedy:{DIM:#} {}", failure.remedy);
    }
    if json {
        print_json(&failure.to_json());
    }
}

/// A line on standard error that is neither a result nor a failure.
pub(crate) fn note(text: &str) {
    anstream::eprintln!("{DIM}ucx-gaudi:{DIM:#} {text}");
}

/// A table without lines.
pub(crate) fn table(header: &[&str]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(header);
    table
}

/// Prints a table without blanks at line ends.
pub(crate) fn print_table(table: &Table) {
    for line in table.lines() {
        println!("{}", line.trim_end());
    }
}

/// A size for people: `96 GiB`, `768 MiB`, `4097 B`.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [(&str, u32); 4] = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    for (unit, shift) in UNITS {
        if bytes >> shift > 0 {
            let (whole, rest) = (bytes >> shift, bytes & ((1 << shift) - 1));
            let tenths = (rest * 10) >> shift;
            return if tenths == 0 {
                format!("{whole} {unit}")
            } else {
                format!("{whole}.{tenths} {unit}")
            };
        }
    }
    format!("{bytes} B")
}

/// Whether a terminal shows the character as it is. The two ranges change the direction of the text that follows.
fn is_printable(c: char) -> bool {
    !c.is_control() && !matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn printable_text(text: String) -> String {
    if text.chars().all(is_printable) {
        return text;
    }
    let mut printable = String::with_capacity(2 * text.len());
    for c in text.chars() {
        match is_printable(c) {
            true => printable.push(c),
            false => printable.extend(c.escape_unicode()),
        }
    }
    printable
}

/// Files are untrusted, and their texts go to a terminal: replaces control characters by their numbers.
pub(crate) fn printable_object(object: Map<String, Value>) -> Map<String, Value> {
    object.into_iter().map(|(key, value)| (printable_text(key), printable(value))).collect()
}

/// The same for any value.
pub(crate) fn printable(value: Value) -> Value {
    match value {
        Value::String(text) => Value::String(printable_text(text)),
        Value::Array(values) => values.into_iter().map(printable).collect(),
        Value::Object(object) => Value::Object(printable_object(object)),
        others => others,
    }
}

#[cfg(test)]
mod tests {
    use super::size;

    #[test]
    fn sizes_are_cut_to_one_digit_behind_the_point() {
        let cases = [
            (0, "0 B"),
            (4097, "4 KiB"),
            (768 << 20, "768 MiB"),
            (103_079_215_104, "96 GiB"),
            ((1 << 30) + (1 << 29), "1.5 GiB"),
            (u64::MAX, "16777215.9 TiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(size(bytes), text);
        }
    }
}
