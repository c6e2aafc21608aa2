//! The program `ucx-gaudi`. All of it is in the library, where the crate `fuzz` reaches its parsers, too.

fn main() -> std::process::ExitCode {
    cli::main()
}
