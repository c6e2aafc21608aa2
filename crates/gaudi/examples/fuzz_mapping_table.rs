//! A fuzz target for the reader of `GAUDI_MAPPING_TABLE`, on the stable toolchain.
//!
//! * `fuzz_mapping_table [ROUNDS [SEED]]` damages tables in ever new ways and reads what comes of
//!   it. A failure prints the seed and round that make it again.
//! * `fuzz_mapping_table --file F...` reads files: what a fuzzer that runs programs (AFL, honggfuzz)
//!   calls, and how a finding is looked at again.

use std::process::ExitCode;

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

/// Numbers that look random and are the same every time.
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }

    fn damaged_table(&mut self) -> String {
        let mut bytes = SEEDS[self.below(SEEDS.len())].as_bytes().to_vec();
        for _ in 0..=self.below(8) {
            let at = self.below(bytes.len() + 1);
            let end = (at + self.below(12)).min(bytes.len());
            match self.below(4) {
                0 => drop(bytes.drain(at..end)),
                1 => {
                    let copy = bytes[at..end].to_vec();
                    bytes.splice(at..at, copy);
                }
                2 => {
                    let piece = PIECES[self.below(PIECES.len())];
                    bytes.splice(at..at, piece.bytes());
                }
                _ => {
                    let byte = self.below(256) as u8;
                    bytes.splice(at..at, [byte]);
                }
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, files)) = arguments.split_first()
        && first == "--file"
    {
        for file in files {
            let Ok(bytes) = std::fs::read(file) else {
                eprintln!("{file}: cannot be read");
                return ExitCode::FAILURE;
            };
            match String::from_utf8_lossy(&bytes).parse::<MappingTable>() {
                Ok(table) => println!("{file}: {} cards", table.cards().len()),
                Err(error) => println!("{file}: {error}"),
            }
            check(&String::from_utf8_lossy(&bytes));
        }
        return ExitCode::SUCCESS;
    }
    let number = |at: usize, default| arguments.get(at).map_or(Some(default), |n| n.parse().ok());
    let (Some(rounds), Some(seed)) = (number(0, 200_000_u64), number(1, 1_u64)) else {
        eprintln!("usage: fuzz_mapping_table [ROUNDS [SEED]] | --file FILE...");
        return ExitCode::FAILURE;
    };
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut tables = 0_u64;
    for round in 0..rounds {
        let text = dice.damaged_table();
        match std::panic::catch_unwind(|| check(&text)) {
            Ok(is_table) => tables += u64::from(is_table),
            Err(_) => {
                eprintln!("seed {seed}, round {round}: {text:?}");
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{rounds} texts: {tables} tables, {} errors, all as they should be", rounds - tables);
    ExitCode::SUCCESS
}
