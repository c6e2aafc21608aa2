//! Prints the statistics of a running process: `cargo run -p gaudi --example stats -- PID`.

use std::process::ExitCode;

fn main() -> ExitCode {
    let Some(pid) = std::env::args().nth(1).and_then(|text| text.parse().ok()) else {
        eprintln!("usage: stats PID");
        return ExitCode::FAILURE;
    };
    match gaudi::stats::read(pid) {
        Ok(snapshot) => {
            println!("{snapshot}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
