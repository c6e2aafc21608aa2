//! Which cards there are, learnt from their control nodes: nobody's compute node is touched.

use std::fmt;

use hl_thunk::Generation;

use crate::BusId;

/// A card as discovery sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// N of `/dev/accel/accelN`.
    pub index: u32,
    /// The card's place in the server.
    pub module_id: u32,
    /// Its PCI address.
    pub bus_id: BusId,
    /// Its generation.
    pub generation: Generation,
    /// The card's name, such as `HL225`.
    pub card_name: String,
    /// Version of the driver library, as it describes itself.
    pub driver_version: String,
    /// Whether this is the software Gaudi and no hardware.
    pub is_software: bool,
}

impl fmt::Display for DeviceInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let soft = if self.is_software { "software " } else { "" };
        write!(f, "{soft}{} {} ({})", self.generation, self.index, self.bus_id)
    }
}
