//! A fuzz target for the reader of `GAUDI_MAPPING_TABLE`, on the stable toolchain.
//!
//! * `fuzz_mapping_table [ROUNDS [SEED]]` damages tables in ever new ways and reads what comes of
//!   it. A failure prints the seed and round that make it again.
//! * `fuzz_mapping_table --file F...` reads files: what a fuzzer that runs programs (AFL, honggfuzz)
//!   calls, and how a finding is looked at again.

mod fuzzing;

use std::process::ExitCode;

use fuzzing::Dice;
use gaudi::{ErrorKind, MappingTable};

const SEEDS: [&str; 4] = [
    r#"[{"index":0,"module_id":2,"bus_id":"0000:33:00.0"},{"index":1,"module_id":0,"bus_id":"0000:4d:00.0"}]"#,
    r#"[{"index":0,"module_id":2,"bus_id":"33:00.0","uuid":"ä\u0041","nested":[[{"a":null}]]}]"#,
    "[\n {\"index\": 4294967295 , \"module_id\": 1e3, \"bus_id\": \"FFFF:FF:1F.7\"}\n]",
    "[[[[[[{{{{",
];
/// What a table is made of, so that damage is often nearly right.
const PIECES: [&str; 14] = [
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    "\"",
    "\\",
    "\"index\":0",
    "\"bus_id\":\"0000:33:00.0\"",
    "-1",
    "1e999",
    "\u{0}",
    "ä",
];

/// What must hold for any text at all.
fn check(text: &str) -> bool {
    match text.parse::<MappingTable>() {
        Ok(table) => {
            assert!(!table.cards().is_empty());
            assert!(table.cards().is_sorted_by(|one, next| one.index < next.index));
            let rows: Vec<String> = table.cards().iter().map(ToString::to_string).collect();
            let again: MappingTable = format!("[{}]", rows.join(",")).parse().expect("written");
            assert_eq!(again.cards(), table.cards());
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::InvalidParams);
            assert!(!error.detail().is_empty() && error.detail().len() < 1000);
            assert!(!error.to_string().contains('\n'));
            false
        }
    }
}

fn damaged_table(dice: &mut Dice) -> String {
    let mut bytes = SEEDS[dice.below(SEEDS.len())].as_bytes().to_vec();
    for _ in 0..=dice.below(8) {
        let at = dice.below(bytes.len() + 1);
        let end = (at + dice.below(12)).min(bytes.len());
        match dice.below(4) {
            0 => drop(bytes.drain(at..end)),
            1 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            2 => {
                let piece = PIECES[dice.below(PIECES.len())];
                bytes.splice(at..at, piece.bytes());
            }
            _ => {
                let byte = dice.below(256) as u8;
                bytes.splice(at..at, [byte]);
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn main() -> ExitCode {
    let mut tables = 0_u64;
    let ended = fuzzing::run(
        "fuzz_mapping_table",
        200_000,
        |dice| {
            let text = damaged_table(dice);
            let is_table = std::panic::catch_unwind(|| check(&text));
            tables += u64::from(is_table.map_err(|_| format!("{text:?}"))?);
            Ok(())
        },
        |bytes| {
            let text = String::from_utf8_lossy(bytes);
            check(&text);
            match text.parse::<MappingTable>() {
                Ok(table) => format!("{} cards", table.cards().len()),
                Err(error) => error.to_string(),
            }
        },
    );
    println!("{tables} were tables");
    ended
}
