//! The program `ucx-gaudi`. All its code is in the library, so that the crate `fuzz` can call its parsers, too.

fn main() -> std::process::ExitCode {
    cli::main()
}
