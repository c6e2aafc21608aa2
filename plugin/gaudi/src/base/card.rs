//! A card: its PCI address, what discovery knows of it, and the number of one of its openings.

use std::fmt;
use std::str::FromStr;

use hl_thunk::Generation;

use crate::error::OnCard;
use crate::{Error, ErrorKind};

/// A PCI bus id in its full form, `dddd:bb:dd.f`, lower case.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BusId(String);

impl BusId {
    /// The id as text, such as `0000:33:00.0`.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for BusId {
    type Err = Error;

    /// Accepts `dddd:bb:dd.f` and the short `bb:dd.f`, which means domain 0000.
    fn from_str(text: &str) -> Result<Self, Error> {
        let full = if text.len() == 7 { format!("0000:{text}") } else { text.to_owned() };
        let bytes = full.as_bytes();
        let fits = bytes.len() == 12
            && bytes.iter().enumerate().all(|(at, byte)| match at {
                4 | 7 => *byte == b':',
                10 => *byte == b'.',
                11 => (b'0'..=b'7').contains(byte),
                _ => byte.is_ascii_hexdigit(),
            });
        if !fits {
            return Err(Error::new(
                ErrorKind::InvalidParams,
                "reading a PCI bus id",
                format!("\"{}\" is not of the form dddd:bb:dd.f", text.escape_debug()),
                "write it as lspci shows it, for example 0000:33:00.0",
            ));
        }
        Ok(BusId(full.to_ascii_lowercase()))
    }
}

/// A card as discovery sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The number that chooses it: what `GAUDI_MAPPING_TABLE` says, or without a table the same as
    /// `node`.
    pub index: u32,
    /// N of `/dev/accel/accelN`.
    pub node: u32,
    /// The card's place in the server.
    pub module_id: u32,
    /// Its PCI address.
    pub bus_id: BusId,
    /// Its generation.
    pub generation: Generation,
    /// The card's own network ports.
    pub ports: PortMasks,
    /// The card's name, such as `HL225`.
    pub card_name: String,
    /// Version of the driver library, as it describes itself.
    pub driver_version: String,
    /// Whether this is the software Gaudi and no hardware.
    pub is_software: bool,
}

/// A card's own network ports, one bit each; zero if the driver does not report them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortMasks {
    /// All ports in use.
    pub all: u64,
    /// Those that leave the server; the others lead to other cards of the server.
    pub external: u64,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let soft = if self.is_software { "software " } else { "" };
        write!(f, "{soft}{} {} ({})", self.generation, self.index, self.bus_id)
    }
}

impl OnCard for DeviceInfo {
    fn is_software(&self) -> bool {
        self.is_software
    }
}

/// Identifies one opening of a card in this process; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub(crate) u32);

#[cfg(test)]
impl DeviceInfo {
    /// A card without a location, for tests.
    pub(crate) fn example(node: u32) -> Self {
        Self {
            index: node,
            node,
            module_id: node,
            bus_id: format!("{node:04x}:00:00.0").parse().expect("a bus id"),
            generation: Generation::Gaudi2,
            ports: PortMasks::default(),
            card_name: String::from("HL225"),
            driver_version: String::new(),
            is_software: false,
        }
    }
}
