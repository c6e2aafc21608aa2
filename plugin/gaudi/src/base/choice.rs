//! Which card the user wants: by an index, a module id or a PCI bus id.

use std::fmt;
use std::str::FromStr;

use crate::environment::number;
use crate::{BusId, DeviceInfo, Error, ErrorKind};

/// Which card to open.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// No choice made: `HLS_MODULE_ID` where the launcher set it, else the first card that opens.
    #[default]
    Any,
    /// The card with this logical index: the one `GAUDI_MAPPING_TABLE` gives it, or without a
    /// table N of `/dev/accel/accelN`.
    Index(u32),
    /// The card with this module id (its place in the server).
    Module(u32),
    /// The card at this PCI address.
    Bus(BusId),
    /// The card at the position of this process's rank on its host, as the launcher reports it: the first card for
    /// rank 0.
    LocalRank,
    /// Any card; those near the processors that this process may run on come first.
    Numa,
}

impl DeviceChoice {
    /// Whether this choice admits the card.
    pub fn selects(&self, card: &DeviceInfo) -> bool {
        match self {
            DeviceChoice::Any | DeviceChoice::LocalRank | DeviceChoice::Numa => true,
            DeviceChoice::Index(index) => card.index == *index,
            DeviceChoice::Module(id) => card.module_id == *id,
            DeviceChoice::Bus(bus) => card.bus_id == *bus,
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    /// Reads `""`, `"<index>"`, `"module:<id>"`, `"<bus id>"`, `"local-rank"` or `"numa"`.
    fn from_str(text: &str) -> Result<Self, Error> {
        let text = text.trim();
        let choice = if text.is_empty() {
            Some(DeviceChoice::Any)
        } else if text.eq_ignore_ascii_case("local-rank") {
            Some(DeviceChoice::LocalRank)
        } else if text.eq_ignore_ascii_case("numa") {
            Some(DeviceChoice::Numa)
        } else if let Some(id) = text.strip_prefix("module:") {
            number(id).map(DeviceChoice::Module)
        } else if text.contains(':') {
            text.parse().ok().map(DeviceChoice::Bus)
        } else {
            number(text).map(DeviceChoice::Index)
        };
        choice.ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidParams,
                "choosing a device",
                format!("\"{}\" names no device", text.escape_debug()),
                "write an index (0), a module id (module:2), a PCI bus id (0000:33:00.0), local-rank or \
                 numa",
            )
            .caused_by_setting()
        })
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Any => Ok(()),
            DeviceChoice::Index(index) => write!(f, "{index}"),
            DeviceChoice::Module(id) => write!(f, "module:{id}"),
            DeviceChoice::Bus(bus) => bus.fmt(f),
            DeviceChoice::LocalRank => f.write_str("local-rank"),
            DeviceChoice::Numa => f.write_str("numa"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_documented_form_is_read() {
        for (text, choice) in [
            ("", DeviceChoice::Any),
            ("0", DeviceChoice::Index(0)),
            (" 7 ", DeviceChoice::Index(7)),
            ("module:2", DeviceChoice::Module(2)),
            ("local-rank", DeviceChoice::LocalRank),
            ("numa", DeviceChoice::Numa),
            ("0000:4D:00.0", DeviceChoice::Bus("0000:4d:00.0".parse().unwrap())),
            ("33:00.0", DeviceChoice::Bus("0000:33:00.0".parse().unwrap())),
        ] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap(), choice, "{text:?}");
        }
    }

    #[test]
    fn everything_else_is_refused_with_the_text_quoted() {
        for text in
            ["-1", "+1", "module:", "module:x", "4294967296", "gaudi0", "0000:33:00", "33:00.8"]
        {
            let error = text.parse::<DeviceChoice>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidParams);
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_choice_goes_by_logical_index_module_id_or_bus_id() {
        let card = DeviceInfo { index: 1, module_id: 2, ..DeviceInfo::example(3) };
        let selects = |text: &str| text.parse::<DeviceChoice>().unwrap().selects(&card);
        assert!(selects("") && selects("1") && selects("module:2"));
        assert!(selects(card.bus_id.as_str()));
        assert!(!selects("3"), "the node number is not the index");
        assert!(!selects("module:1") && !selects("0000:77:00.0"));
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_without_a_panic(text in ".{0,40}") {
            if let Ok(choice) = text.parse::<DeviceChoice>() {
                prop_assert_eq!(choice.to_string().parse::<DeviceChoice>().unwrap(), choice);
            }
        }
    }
}
