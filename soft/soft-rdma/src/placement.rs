//! Where the HCAs and the software Gaudi's cards sit in the machine.
//!
//! UCX prefers an HCA that is near a card, by what sysfs says of both. The machine modelled here has
//! four PCI switches with two cards each, as eight-card Gaudi servers have, two on each of two NUMA
//! nodes. An HCA sits on the switch of a card, or at an address of its own host bridge.

use std::fmt;
use std::str::FromStr;

use soft_gaudi::asic;

/// Cards of the modelled machine.
const CARDS: u32 = 8;
/// Host bridges with a switch below them. Its devices are on the fourth bus and those after it.
const SWITCHES: [u8; 4] = [0x30, 0x4a, 0x97, 0xb0];
/// Buses of one switch that have devices.
const DEVICE_BUSES: u8 = 4;

/// A PCI address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct BusId {
    domain: u16,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for BusId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let parts: Vec<_> = text.split([':', '.']).collect();
        let [domain, bus, device, function] = parts[..] else { return Err(()) };
        let hex = |text: &str| u16::from_str_radix(text, 16).map_err(|_| ());
        let id = Self {
            domain: hex(domain)?,
            bus: hex(bus)?.try_into().map_err(|_| ())?,
            device: hex(device)?.try_into().map_err(|_| ())?,
            function: hex(function)?.try_into().map_err(|_| ())?,
        };
        // One way to write it, the kernel's.
        if id.device < 32 && id.function < 8 && id.to_string() == text { Ok(id) } else { Err(()) }
    }
}

impl fmt::Display for BusId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl BusId {
    /// The host bridge of the switch that it is behind, if it is behind one.
    fn switch(self) -> Option<u8> {
        let below = |root: &u8| (root + 3..root + 3 + DEVICE_BUSES).contains(&self.bus);
        SWITCHES.into_iter().find(below).filter(|_| self.domain == 0)
    }

    /// Bus of its host bridge.
    fn host_bridge(self) -> (u16, u8) {
        (self.domain, self.switch().unwrap_or(self.bus))
    }

    /// Its folder below `/sys/devices`, and that of every bridge above it.
    fn folder(self) -> String {
        match self.switch() {
            None => format!("/sys/devices/pci{:04x}:{:02x}/{self}", self.domain, self.bus),
            Some(root) => format!(
                "/sys/devices/pci0000:{root:02x}/0000:{root:02x}:01.0/0000:{:02x}:00.0/\
                 0000:{:02x}:{:02x}.0/{self}",
                root + 1,
                root + 2,
                self.bus - root - 3,
            ),
        }
    }
}

/// Where a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) bus_id: BusId,
    /// The memory near it, if that is known.
    pub(crate) numa_node: Option<u32>,
    /// It is not an HCA but a port of this card itself, as Habana's driver shows them.
    pub(crate) own_port: Option<u32>,
}

impl Place {
    /// The place of a card of the software Gaudi.
    pub(crate) fn of_card(index: u32) -> Option<Self> {
        let bus_id = asic::bus_id(index).parse().ok()?;
        Some(Self { bus_id, numa_node: Some(asic::numa_node(index)), own_port: None })
    }

    /// The place of an HCA on the switch of a card: `count` are there already.
    fn near_card(index: u32, count: usize) -> Option<Self> {
        let card = Self::of_card(index).filter(|card| card.bus_id.switch().is_some())?;
        let function = u8::try_from(count).ok().filter(|count| *count < 8)?;
        Some(Self { bus_id: BusId { bus: card.bus_id.bus + 2, function, ..card.bus_id }, ..card })
    }

    /// Its folder in sysfs.
    pub(crate) fn folder(&self) -> String {
        self.bus_id.folder()
    }

    /// Whether both are below one host bridge.
    pub(crate) fn shares_host_bridge(&self, other: &Self) -> bool {
        self.bus_id.host_bridge() == other.bus_id.host_bridge()
    }
}

/// Places of the cards of the modelled machine.
pub(crate) fn cards() -> impl Iterator<Item = Place> {
    (0..CARDS).filter_map(Place::of_card)
}

/// Places of `count` HCAs. `text` has one entry for each: the index of a card to be near to, or an
/// address, with the NUMA node if that is known (`0000:81:00.0@1`), or a port of a card itself (`own:0`). Without an entry two HCAs
/// are near each card, from the first card on. The error is the entry that cannot be used.
pub(crate) fn hcas(count: u8, text: &str) -> Result<Vec<Place>, String> {
    let entries: Vec<_> =
        text.split(',').map(str::trim).filter(|entry| !entry.is_empty()).collect();
    let mut places: Vec<Place> = Vec::new();
    for index in 0..usize::from(count) {
        let near = |card: u32| {
            let taken = |count: &usize| {
                Place::near_card(card, *count)
                    .is_some_and(|place| places.iter().any(|other| other.bus_id == place.bus_id))
            };
            Place::near_card(card, (0..8).take_while(taken).count())
        };
        let place = match entries.get(index) {
            None => near(index as u32 / 2 % CARDS),
            Some(entry) => match entry.parse() {
                Ok(card) => near(card),
                Err(_) if entry.starts_with("own:") => {
                    let card = entry["own:".len()..].parse().ok().filter(|card| *card < CARDS);
                    let free = |place: &Place| places.iter().all(|it| it.bus_id != place.bus_id);
                    let place = card.and_then(Place::of_card).filter(free);
                    place.map(|place| Place { own_port: card, ..place })
                }
                Err(_) => address(entry).filter(|place| {
                    places
                        .iter()
                        .chain(&Vec::from_iter(cards()))
                        .all(|other| other.bus_id != place.bus_id)
                }),
            },
        };
        let name =
            || entries.get(index).map_or_else(|| format!("HCA {index}"), |s| (*s).to_owned());
        places.push(place.ok_or_else(name)?);
    }
    Ok(places)
}

/// `0000:81:00.0@1`
fn address(entry: &str) -> Option<Place> {
    let (bus_id, node) = match entry.split_once('@') {
        Some((bus_id, node)) => (bus_id, Some(node.parse().ok()?)),
        None => (entry, None),
    };
    Some(Place { bus_id: bus_id.parse().ok()?, numa_node: node, own_port: None })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(places: &[Place]) -> Vec<String> {
        places.iter().map(|place| place.bus_id.to_string()).collect()
    }

    #[test]
    fn two_hcas_are_near_each_card_and_all_addresses_differ() {
        let places = hcas(64, "").unwrap();
        assert_eq!(
            names(&places[..4]),
            ["0000:35:00.0", "0000:35:00.1", "0000:4f:00.0", "0000:4f:00.1"]
        );
        assert_eq!((places[0].numa_node, places[8].numa_node), (Some(0), Some(1)));
        let mut all: Vec<_> =
            places.iter().copied().chain(cards()).map(|place| place.bus_id.to_string()).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 72);
        let card = Place::of_card(0).unwrap();
        assert!(card.shares_host_bridge(&places[0]) && !card.shares_host_bridge(&places[2]));
    }

    #[test]
    fn a_switch_is_the_folder_above_a_card_and_its_hcas() {
        let hca = hcas(1, "3").unwrap()[0];
        let card = Place::of_card(3).unwrap();
        let switch = "/sys/devices/pci0000:30/0000:30:01.0/0000:31:00.0";
        assert_eq!(card.folder(), format!("{switch}/0000:32:01.0/0000:34:00.0"));
        assert_eq!(hca.folder(), format!("{switch}/0000:32:03.0/0000:36:00.0"));
    }

    #[test]
    fn entries_are_cards_or_addresses_and_others_are_refused() {
        let places = hcas(4, "4, 4,0001:81:1f.7@1").unwrap();
        assert_eq!(
            names(&places),
            ["0000:9c:00.0", "0000:9c:00.1", "0001:81:1f.7", "0000:4f:00.0"]
        );
        assert_eq!(places[2].folder(), "/sys/devices/pci0001:81/0001:81:1f.7");
        assert_eq!((places[2].numa_node, places[0].numa_node), (Some(1), Some(1)));
        for wrong in
            ["x", "8", "81:00.0", "0000:81:00.0@x", "0000:81:20.0", "0000:33:00.0", "+1:81:00.0"]
        {
            assert_eq!(hcas(1, wrong), Err(wrong.to_owned()), "{wrong}");
        }
        assert!(hcas(9, "0,0,0,0,0,0,0,0,0").is_err(), "a card has eight functions next to it");
    }
}
