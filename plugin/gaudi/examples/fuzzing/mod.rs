//! What the examples that feed damaged input have in common.

use std::process::ExitCode;

/// Numbers that look random and are the same every time.
pub(crate) struct Dice(u64);

impl Dice {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end.max(1) as u64) as usize
    }
}

/// Runs `[ROUNDS [SEED]]`, each `round` with the dice, or `--file FILE...`, each with `file`. A round says
/// what it was about if something is not as it should be.
pub(crate) fn run(
    name: &str,
    rounds: u64,
    mut round: impl FnMut(&mut Dice) -> Result<(), String>,
    file: impl Fn(&[u8]) -> String,
) -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, files)) = arguments.split_first()
        && first == "--file"
    {
        for path in files {
            let Ok(bytes) = std::fs::read(path) else {
                eprintln!("{path}: cannot be read");
                return ExitCode::FAILURE;
            };
            println!("{path}: {}", file(&bytes));
        }
        return ExitCode::SUCCESS;
    }
    let number = |at: usize, default| arguments.get(at).map_or(Some(default), |n| n.parse().ok());
    let (Some(rounds), Some(seed)) = (number(0, rounds), number(1, 1_u64)) else {
        eprintln!("usage: {name} [ROUNDS [SEED]] | --file FILE...");
        return ExitCode::FAILURE;
    };
    let mut dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for number in 0..rounds {
        if let Err(input) = round(&mut dice) {
            eprintln!("seed {seed}, round {number}: {input}");
            return ExitCode::FAILURE;
        }
    }
    println!("{rounds} rounds, all as they should be");
    ExitCode::SUCCESS
}
