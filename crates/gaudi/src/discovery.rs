//! Which cards there are, learnt from their control nodes: nobody's compute node is touched.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use hl_thunk::{ControlDevice, Generation, Library};

use crate::{BusId, Error, ErrorKind};

/// Lists module ids this process may see, as the container tools set it.
pub(crate) const VISIBLE_MODULES: &str = "HABANA_VISIBLE_MODULES";
/// The module a launcher meant for this process.
pub(crate) const MODULE_ID: &str = "HLS_MODULE_ID";
/// Control nodes are numbered below this.
const MAX_INDEX: u32 = 256;
/// What the software Gaudi calls itself in its version.
const SOFTWARE: &str = "soft-gaudi";

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

const LOOKING: &str = "looking for Gaudi devices";

/// Lists the cards this process may see; at least one.
pub(crate) fn discover(library: &Arc<Library>) -> Result<Vec<DeviceInfo>, Error> {
    let visible = std::env::var(VISIBLE_MODULES).ok();
    let visible = visible.as_deref().map(read_modules).transpose()?.flatten();
    // Every open of a node is a search for the vendor's profiler: do not try 256 of them.
    let expected = match library.device_count() {
        Some(Ok(0)) => return Err(none(String::from("the driver reports no card"))),
        Some(Ok(count)) => count,
        Some(Err(_)) | None => MAX_INDEX,
    };
    let (mut cards, mut hidden, mut last_problem) = (Vec::new(), 0, None);
    let mut seen = 0;
    for index in 0..MAX_INDEX {
        if seen == expected {
            break;
        }
        let control = match ControlDevice::open(library, index) {
            Ok(control) => control,
            Err(error) => {
                if !matches!(error.errno, libc::ENOENT | libc::ENXIO | libc::ENODEV) {
                    last_problem = Some(error.to_string());
                }
                continue;
            }
        };
        seen += 1;
        match describe(library, index, &control) {
            Ok(Some(card)) if visible.as_ref().is_none_or(|set| set.contains(&card.module_id)) => {
                cards.push(card);
            }
            Ok(Some(_)) => hidden += 1,
            Ok(None) => {}
            Err(reason) => last_problem = Some(reason),
        }
    }
    if cards.is_empty() {
        return Err(none(match last_problem {
            _ if hidden > 0 => format!("{VISIBLE_MODULES} hides all {hidden} cards"),
            Some(problem) => problem,
            None => String::from("there is no Gaudi in this machine"),
        }));
    }
    Ok(cards)
}

fn none(detail: String) -> Error {
    let remedy = "check with hl-smi that the card is there and the driver is loaded";
    Error::new(ErrorKind::DeviceNotFound, LOOKING, detail, remedy)
}

/// `None` for a card of a generation we do not know.
fn describe(
    library: &Library,
    index: u32,
    control: &ControlDevice,
) -> Result<Option<DeviceInfo>, String> {
    let hw = control.hw_info().map_err(|error| error.to_string())?;
    let Some(generation) = Generation::from_pci_id(hw.device_id) else { return Ok(None) };
    let bus_id = control.bus_id().map_err(|error| error.to_string())?;
    let driver_version = library.version().unwrap_or("unknown").to_owned();
    Ok(Some(DeviceInfo {
        index,
        module_id: hw.module_id,
        bus_id: bus_id.parse().map_err(|error: Error| error.to_string())?,
        generation,
        card_name: text(&hw.card_name),
        is_software: driver_version.contains(SOFTWARE),
        driver_version,
    }))
}

/// Text that ends at the first zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

/// Reads a list of module ids, such as `0,2,3`; empty or `all` means no restriction.
fn read_modules(text: &str) -> Result<Option<BTreeSet<u32>>, Error> {
    let text = text.trim();
    if text.is_empty() || text.eq_ignore_ascii_case("all") {
        return Ok(None);
    }
    let ids: Option<BTreeSet<u32>> = text.split(',').map(|id| id.trim().parse().ok()).collect();
    ids.map(Some).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidParams,
            LOOKING,
            format!("{VISIBLE_MODULES}=\"{}\" is not a list of module ids", text.escape_debug()),
            "write numbers with commas between them, for example 0,2,3",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn module_lists_are_read_or_refused_with_the_text_quoted() {
        assert_eq!(read_modules("").unwrap(), None);
        assert_eq!(read_modules("all").unwrap(), None);
        assert_eq!(read_modules(" 3, 0 ").unwrap(), Some(BTreeSet::from([0, 3])));
        for text in ["0;1", "-1", "0,,1", "x"] {
            let error = read_modules(text).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn names_end_at_the_first_zero() {
        assert_eq!(text(b"HL225\0\0junk"), "HL225");
        assert_eq!(text(b"sixteencharacter"), "sixteencharacter");
    }
}
