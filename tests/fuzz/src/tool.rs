//! Texts that the tool reads.

/// What other programs print.
pub(crate) fn listing(bytes: &[u8]) {
    cli::fuzzing::listing(&String::from_utf8_lossy(bytes));
}
