//! Which cards there are, from their control nodes; no compute node is opened. The environment decides
//! which of them this process may use, and their numbers.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::Arc;

use hl_thunk::sys::HwIpInfo;
use hl_thunk::{ControlDevice, Generation, Library};

use super::pairing;
use crate::environment::{self, MAPPING_TABLE, VISIBLE_MODULES, number};
use crate::error::Phase;
use crate::{DeviceInfo, Error, ErrorKind, MappingTable, PortMasks, Remedy};

/// Control nodes are numbered below this.
const MAX_INDEX: u32 = 256;

const LOOKING: &str = "looking for Gaudi devices";

/// The result of discovery.
#[derive(Debug)]
pub(crate) struct Discovered {
    /// The cards this process may use, at least one, in the order of their indices.
    pub(crate) cards: Vec<DeviceInfo>,
    /// What discovery ignored, for a log.
    pub(crate) notes: Vec<Note>,
    /// Cards of this machine that are not in `cards`, and why. Also in `notes`; worth adding to the error where a
    /// card that was wanted is missing.
    pub(crate) left_out: Vec<String>,
}

/// A line for a log.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Note {
    /// What it says.
    pub text: String,
    /// It is about a card of a kind that this version does not know: its owner should be told without asking.
    pub is_unknown_card: bool,
}

impl From<String> for Note {
    fn from(text: String) -> Self {
        Self { text, is_unknown_card: false }
    }
}

/// Lists the cards this process may use.
pub(crate) fn discover(library: &Arc<Library>) -> Result<Discovered, Error> {
    let table = environment::read(MAPPING_TABLE)?;
    let table = table.as_deref().map(str::parse::<MappingTable>).transpose()?;
    let visible = environment::read(VISIBLE_MODULES)?;
    let visible = visible.as_deref().map(read_modules).transpose()?.flatten();
    let Enumerated { cards, problems, unknown_ioctl } = enumerate(library)?;
    let (mut cards, mut notes) = match &table {
        Some(table) => {
            let listed = table.apply(&cards).map_err(|mut error| {
                if let Some(problem) = problems.last() {
                    error.add_detail(&format_args!("and a card did not answer: {problem}"));
                }
                error
            });
            (listed?, table.notes().iter().cloned().map(Note::from).collect())
        }
        None => (cards, Vec::new()),
    };
    notes.extend(library.unknown_hw_info_len().map(|len| unknown_structure(library, len).into()));
    let before = cards.len();
    cards.retain(|card| visible.as_ref().is_none_or(|set| set.contains(&card.module_id)));
    if cards.is_empty() {
        if before > 0 {
            let detail = format!("{VISIBLE_MODULES} hides all {before} cards");
            let remedy = "list module ids of cards that are there";
            let hidden = Error::new(ErrorKind::DeviceNotFound, LOOKING, detail, remedy);
            return Err(hidden.caused_by_setting());
        }
        // The last problem with a card of an unknown kind, else the last of all.
        return Err(match problems.iter().max_by_key(|problem| problem.is_unknown_card()) {
            Some(problem) if unknown_ioctl => no_card_error(library, &problem.to_string()),
            Some(problem) => problem.error(library),
            None => no_card_error(library, "there is no Gaudi in this machine"),
        });
    }
    let note = |problem: &Problem| Note {
        text: problem.to_string(),
        is_unknown_card: problem.is_unknown_card(),
    };
    let mut left_notes: Vec<Note> = problems.iter().map(note).collect();
    if before > cards.len() {
        let hidden = before - cards.len();
        left_notes.push(format!("{VISIBLE_MODULES} hides {hidden} of {before} cards").into());
    }
    let left_out = left_notes.iter().map(|note| note.text.clone()).collect();
    notes.extend(left_notes);
    Ok(Discovered { cards, notes, left_out })
}

/// Every card of the machine, numbered by its node.
struct Enumerated {
    cards: Vec<DeviceInfo>,
    /// Those that did not answer, or of a kind that is not known.
    problems: Vec<Problem>,
    /// A control node was opened and does not know the library's ioctl.
    unknown_ioctl: bool,
}

/// A card that exists and cannot be used.
#[derive(Debug)]
struct Problem {
    node: u32,
    reason: String,
    /// The error if it is the only card; `None`: no card was found.
    error: Option<Error>,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "card {} is left out: {}", self.node, self.reason)?;
        match self.error.as_ref().map(Error::remedy) {
            None | Some(Remedy::None | Remedy::CheckCard) => Ok(()),
            Some(remedy) => write!(f, " ({remedy})"),
        }
    }
}

impl Problem {
    fn is_unknown_card(&self) -> bool {
        self.error.as_ref().is_some_and(|error| error.remedy() == Remedy::ReportCard)
    }

    /// The error if it is the only card. A card that exists but does not open is not "not found".
    fn error(&self, library: &Library) -> Error {
        match &self.error {
            Some(error) if !matches!(error.remedy(), Remedy::None | Remedy::CheckCard) => {
                let error = error.clone();
                if library.is_software() { error.on_software() } else { error }
            }
            _ => none(library, self.reason.clone()),
        }
    }
}

fn enumerate(library: &Arc<Library>) -> Result<Enumerated, Error> {
    // Every open of a node makes the library search for the vendor's profiler: do not try 256 of them.
    let expected = match library.device_count() {
        Some(Ok(0)) => return Err(no_card_error(library, "the driver reports no card")),
        Some(Ok(count)) => count,
        Some(Err(_)) | None => MAX_INDEX,
    };
    let (mut cards, mut problems, mut unknown_ioctl) = (Vec::new(), Vec::new(), false);
    let mut seen = 0;
    for node in 0..MAX_INDEX {
        if seen == expected {
            break;
        }
        let control = match ControlDevice::open(library, node) {
            Ok(control) => control,
            Err(error) => {
                if !matches!(error.errno, libc::ENOENT | libc::ENXIO | libc::ENODEV) {
                    let reason = error.to_string();
                    let error = Some(Error::driver(Phase::Open, LOOKING, error));
                    problems.push(Problem { node, reason, error });
                }
                continue;
            }
        };
        seen += 1;
        let described = control.hw_info().map_err(|error| {
            unknown_ioctl |= error.errno == libc::ENOTTY;
            Unusable::NoAnswer(error.to_string())
        });
        match described.and_then(|hw| describe(library, node, &control, &hw)) {
            Ok(card) => cards.push(card),
            Err(Unusable::NoAnswer(reason)) => {
                problems.push(Problem { node, reason, error: None });
            }
            Err(Unusable::UnknownKind(reason)) => {
                let (kind, remedy) = (ErrorKind::DeviceNotFound, Remedy::ReportCard);
                let error = Some(Error::new(kind, LOOKING, reason.clone(), remedy));
                problems.push(Problem { node, reason, error });
            }
        }
    }
    Ok(Enumerated { cards, problems, unknown_ioctl })
}

fn none(library: &Library, detail: String) -> Error {
    let error = Error::new(ErrorKind::DeviceNotFound, LOOKING, detail, Remedy::CheckCard);
    if library.is_software() { error.on_software() } else { error }
}

/// The library finds no card, or none that it can talk to; the kernel may know one.
fn no_card_error(library: &Library, detail: &str) -> Error {
    match pairing::reason(library).filter(|_| !library.is_software()) {
        Some((reason, advice)) => {
            let mut error = Error::new(ErrorKind::DeviceNotFound, LOOKING, reason, advice);
            error.add_detail(&format_args!("the library's answer is: {detail}"));
            error
        }
        None => none(library, detail.to_owned()),
    }
}

/// The library is of a version that is not known here.
fn unknown_structure(library: &Library, len: usize) -> String {
    format!(
        "the driver library {} {} describes a card in {len} bytes, of which {} are known here: the \
         known part is used, as long as cards and their memory are listed rightly; else use another \
         version of the library, and report this",
        library.name(),
        library.version().unwrap_or("of unknown version"),
        size_of::<hl_thunk::sys::HwIpInfo>(),
    )
}

/// Why a card cannot be used, in words.
enum Unusable {
    NoAnswer(String),
    UnknownKind(String),
}

fn describe(
    library: &Library,
    node: u32,
    control: &ControlDevice,
    hw: &HwIpInfo,
) -> Result<DeviceInfo, Unusable> {
    let bus_id = control.bus_id().map_err(|error| Unusable::NoAnswer(error.to_string()))?;
    let Some(generation) = Generation::from_pci_id(hw.device_id) else {
        let (id, revision) = (hw.device_id, hw.revision_id);
        let reason = format!(
            "{bus_id} has the PCI id 1da3:{id:04x}, revision {revision}, which is not known here"
        );
        return Err(Unusable::UnknownKind(reason));
    };
    Ok(DeviceInfo {
        index: node,
        node,
        module_id: hw.module_id,
        bus_id: bus_id.parse().map_err(|error: Error| Unusable::NoAnswer(error.to_string()))?,
        generation,
        ports: PortMasks { all: hw.nic_ports_mask, external: hw.nic_ports_external_mask },
        card_name: text(&hw.card_name),
        is_software: library.is_software(),
        driver_version: library.version().unwrap_or("unknown").to_owned(),
    })
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
    let ids: Option<BTreeSet<u32>> = text.split(',').map(|id| number(id.trim())).collect();
    ids.map(Some).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidParams,
            LOOKING,
            format!("{VISIBLE_MODULES}=\"{}\" is not a list of module ids", text.escape_debug()),
            "write numbers with commas between them, for example 0,2,3",
        )
        .caused_by_setting()
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
        for text in ["0;1", "-1", "+1", "0,,1", "0,", "x", "4294967296"] {
            let error = read_modules(text).unwrap_err();
            assert!(error.to_string().contains(text), "{error}");
            assert!(error.is_setting_wrong(), "{error}");
        }
    }

    #[test]
    fn names_end_at_the_first_zero() {
        assert_eq!(text(b"HL225\0\0junk"), "HL225");
        assert_eq!(text(b"sixteencharacter"), "sixteencharacter");
    }
}
