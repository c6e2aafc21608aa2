//! Variables of the environment that are not UCX's, read with one rule: unset and empty are the same,
//! and what is not text is an error.

use crate::{Error, ErrorKind};

/// JSON table of the cards this process may use: logical index, module id, PCI bus id.
pub(crate) const MAPPING_TABLE: &str = "GAUDI_MAPPING_TABLE";
/// Lists module ids this process may see, as the container tools set it.
pub(crate) const VISIBLE_MODULES: &str = "HABANA_VISIBLE_MODULES";
/// The module a launcher meant for this process.
pub(crate) const MODULE_ID: &str = "HLS_MODULE_ID";

/// A variable's value without white space around it; `None` if there is nothing.
pub(crate) fn read(name: &str) -> Result<Option<String>, Error> {
    let Some(value) = std::env::var_os(name) else { return Ok(None) };
    let text = value.into_string().map_err(|value| {
        Error::new(
            ErrorKind::InvalidParams,
            "reading the environment",
            format!("{name}={value:?} is not UTF-8 text"),
            "set it to plain text, or unset it",
        )
        .caused_by_setting()
    })?;
    let text = text.trim();
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

/// A number of plain digits: no sign, no space, nothing behind it.
pub(crate) fn number(digits: &str) -> Option<u32> {
    let plain = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    plain.then(|| digits.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_digits_are_a_number() {
        assert_eq!(number("0"), Some(0));
        assert_eq!(number("4294967295"), Some(u32::MAX));
        for text in ["", "+1", "-1", " 1", "1 ", "0x1", "4294967296", "１"] {
            assert_eq!(number(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_variable_that_is_not_set_says_nothing() {
        assert_eq!(read("GAUDI_TEST_NO_SUCH_VARIABLE"), Ok(None));
    }
}
