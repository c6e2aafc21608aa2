//! USDT probes: the installed plugin has those that docs/statistics.md lists, with their arguments; and the
//! page's recipe for VTune, which has no use for them.

use std::collections::BTreeMap;
use std::process::Command;

use e2e::{Device, Ucx, Workbench, client};
use object::{Object, ObjectSection};

/// Names of ours in a section of notes, each with the number of its arguments. A note of SystemTap has three
/// addresses, then provider, name and arguments, each ending in a zero byte.
fn probes(mut notes: &[u8]) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    while notes.len() >= 12 {
        let word =
            |at: usize| u32::from_le_bytes(notes[at..at + 4].try_into().expect("four bytes"));
        let (name, length) = (word(0).next_multiple_of(4) as usize, word(4) as usize);
        let description = &notes[12 + name..12 + name + length];
        let mut texts = description[24..].split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let mut text = || texts.next().expect("three texts").into_owned();
        let (provider, probe, arguments) = (text(), text(), text());
        if provider == "ucx_gaudi" {
            found.insert(probe, arguments.split_whitespace().count());
        }
        notes = &notes[12 + name + length.next_multiple_of(4)..];
    }
    found
}

#[test]
fn the_plugin_has_the_probes_that_are_documented() {
    let layout = Workbench::from_env().layout().clone();
    let library = layout.dist().join("lib/ucx-gaudi/libucx_gaudi.so");
    let file = std::fs::read(library).expect("the plugin");
    let file = object::File::parse(&*file).expect("an ELF file");
    let notes = file.section_by_name(".note.stapsdt").expect("a section of probes");
    let found = probes(notes.data().expect("its bytes"));
    let expected = [
        ("copy_start", 4),
        ("copy_end", 3),
        ("pin_start", 2),
        ("pin_end", 3),
        ("export_start", 2),
        ("export_end", 3),
        ("hand_over_start", 1),
        ("hand_over_end", 2),
    ];
    let expected: BTreeMap<String, usize> =
        expected.into_iter().map(|(name, count)| (name.to_owned(), count)).collect();
    assert_eq!(found, expected);
    let text = include_str!("../../../docs/statistics.md");
    for name in expected.keys() {
        assert!(text.contains(&format!("`{name}`")), "docs/statistics.md does not list {name}");
    }
}

/// The recipe of docs/statistics.md, as it is there, on a recording. VTune's guide has the format: names, and times as
/// `2013-08-28 01:02:03.0004`.
#[test]
fn a_recording_becomes_intervals_for_vtune_as_the_page_says() {
    if !Command::new("jq").arg("--version").output().is_ok_and(|it| it.status.success()) {
        println!("skipped: there is no jq here");
        return;
    }
    let home = tempfile::tempdir().expect("a folder");
    let recording = home.path().join("gaudi.trace");
    let words = "memory where";
    let tool = client(Ucx::V1_22, &Device::software(), words).env("UCX_GAUDI_TRACE", &recording);
    tool.run().ok();
    let page = include_str!("../../../docs/statistics.md");
    let recipe = &page[page.find("jq -rn").expect("a recipe")..];
    let recipe = &recipe[..recipe.find(" > result/").expect("its end")];
    let run = Command::new("sh").args(["-c", recipe]).env("HOME", home.path()).output();
    let run = run.expect("a shell");
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
    let table = String::from_utf8(run.stdout).expect("text");
    let mut lines = table.lines();
    assert_eq!(lines.next(), Some("name,start_tsc.UTC,end_tsc,pid,tid"));
    let rows: Vec<Vec<&str>> = lines.map(|line| line.split(',').collect()).collect();
    assert!(rows.iter().any(|row| row[0] == "hlthunk_open"), "{table}");
    for row in &rows {
        let [_, start, end, pid, tid] = row[..] else { panic!("{row:?}") };
        let shape = |time: &str| time.replace(|c: char| c.is_ascii_digit(), "0");
        assert_eq!([shape(start), shape(end)], ["0000-00-00 00:00:00.000000"; 2], "{row:?}");
        // Texts of equal length with the largest unit first.
        assert!(start <= end, "{row:?}");
        assert!([pid, tid].iter().all(|id| id.parse::<u32>().is_ok()), "{row:?}");
    }
}
