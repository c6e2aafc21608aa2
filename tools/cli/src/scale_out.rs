//! The network of the server: which NICs are near which Gaudi, which ports the cards have, and the state of all of
//! them.

use std::fmt;
use std::path::{Path, PathBuf};

use gaudi::topology::{Distance, PciLocation};
use gaudi::{BusId, DeviceInfo, Sysfs};

/// State of an RDMA port, as its driver reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PortState {
    /// No link.
    Down,
    /// A link, not yet configured by a subnet manager.
    Initialising,
    /// Configured, not yet carrying data.
    Armed,
    /// Ready.
    Active,
    /// Something else, or nothing at all.
    Unknown,
}

impl PortState {
    /// From the text in sysfs, such as `4: ACTIVE`.
    fn read(text: &str) -> Self {
        match text.split(':').next().map(str::trim) {
            Some("1") => PortState::Down,
            Some("2") => PortState::Initialising,
            Some("3") => PortState::Armed,
            Some("4") => PortState::Active,
            _ => PortState::Unknown,
        }
    }
}

impl fmt::Display for PortState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            PortState::Down => "down",
            PortState::Initialising => "initialising",
            PortState::Armed => "armed",
            PortState::Active => "active",
            PortState::Unknown => "state unknown",
        })
    }
}

/// One port of a NIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NicPort {
    /// Its number; the first port is 1.
    pub(crate) number: u32,
    /// Whether it can carry data.
    pub(crate) state: PortState,
    /// `InfiniBand` or `Ethernet`.
    pub(crate) link_layer: Option<String>,
    /// Such as `400 Gb/sec (4X NDR)`.
    pub(crate) rate: Option<String>,
    /// Names of its network interfaces.
    pub(crate) netdevs: Vec<String>,
}

impl fmt::Display for NicPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "port {} {}", self.number, self.state)?;
        for known in [&self.link_layer, &self.rate].into_iter().flatten().chain(&self.netdevs) {
            write!(f, ", {known}")?;
        }
        Ok(())
    }
}

/// An RDMA device (a host channel adapter).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Nic {
    /// Such as `mlx5_0`.
    pub(crate) name: String,
    /// Its place in the PCI tree; `None` if it is no PCI device.
    pub(crate) location: Option<PciLocation>,
    /// Its ports.
    pub(crate) ports: Vec<NicPort>,
}

impl Nic {
    /// Whether one of its ports can carry data.
    pub(crate) fn is_active(&self) -> bool {
        self.ports.iter().any(|port| port.state == PortState::Active)
    }
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NetDevice {
    /// Such as `eth0`.
    pub(crate) name: String,
    /// Such as `up` or `down`.
    pub(crate) state: Option<String>,
    /// The port of its device, counted from 0.
    pub(crate) port: Option<u32>,
    /// The place of its device in the PCI tree; `None` for virtual ones.
    pub(crate) location: Option<PciLocation>,
}

impl fmt::Display for NetDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.state.as_deref().unwrap_or("state unknown"))
    }
}

/// The NICs of the machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Network {
    /// RDMA devices, the cards' own included.
    pub(crate) nics: Vec<Nic>,
    /// Network interfaces.
    pub(crate) netdevs: Vec<NetDevice>,
}

impl Network {
    /// Reads everything; skips what cannot be read.
    pub(crate) fn read(sysfs: &Sysfs) -> Self {
        let netdevs: Vec<NetDevice> = sysfs
            .class("net")
            .into_iter()
            .map(|(name, folder)| NetDevice {
                name,
                state: Sysfs::line(&folder.join("operstate")),
                port: Sysfs::line(&folder.join("dev_port")).and_then(|text| text.parse().ok()),
                location: sysfs.location_of(&folder.join("device")),
            })
            .collect();
        let nic = |(name, folder): (String, PathBuf)| {
            let location = sysfs.location_of(&folder.join("device"));
            let ports = read_ports(&folder.join("ports"), location.as_ref(), &netdevs);
            Nic { name, location, ports }
        };
        let nics = sysfs.class("infiniband").into_iter().map(nic).collect();
        Self { nics, netdevs }
    }
}

/// Which transports of UCX drive the HCAs of this machine: those for mlx5 devices, or `rc_verbs`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hcas {
    pub(crate) mlx5: bool,
    pub(crate) others: bool,
    /// Whether Amazon's EFA is among the others.
    pub(crate) efa: bool,
}

impl Hcas {
    pub(crate) fn read(sysfs: &Sysfs) -> Self {
        const MELLANOX: &str = "0x15b3";
        const AMAZON: &str = "0x1d0f";
        sysfs.class("infiniband").into_iter().fold(Self::default(), |found, (_, folder)| {
            // Do not rely on names: many distributions name HCAs by their place.
            let vendor = Sysfs::line(&folder.join("device/vendor"));
            match vendor.as_deref() {
                Some(MELLANOX) => Self { mlx5: true, ..found },
                Some(AMAZON) => Self { others: true, efa: true, ..found },
                _ => Self { others: true, ..found },
            }
        })
    }
}

fn read_ports(
    folder: &Path,
    location: Option<&PciLocation>,
    netdevs: &[NetDevice],
) -> Vec<NicPort> {
    let numbered = |(name, folder): (String, _)| Some((name.parse::<u32>().ok()?, folder));
    let ports: Vec<(u32, PathBuf)> =
        Sysfs::entries(folder).into_iter().filter_map(numbered).collect();
    let only = ports.len() == 1;
    let of_device = |netdev: &&NetDevice| {
        location.is_some_and(|location| is_at(netdev.location.as_ref(), location.bus_id()))
    };
    let interfaces = |number: u32| {
        let names = |fits: &dyn Fn(&NetDevice) -> bool| -> Vec<String> {
            let fitting = netdevs.iter().filter(of_device).filter(|netdev| fits(netdev));
            fitting.map(|netdev| netdev.name.clone()).collect()
        };
        let same_port =
            |netdev: &NetDevice| netdev.port.and_then(|port| port.checked_add(1)) == Some(number);
        match names(&same_port) {
            // Not every driver counts ports per device.
            none if none.is_empty() && only => names(&|_| true),
            found => found,
        }
    };
    let port = |(number, folder): (u32, PathBuf)| NicPort {
        number,
        state: Sysfs::line(&folder.join("state"))
            .map_or(PortState::Unknown, |text| PortState::read(&text)),
        link_layer: Sysfs::line(&folder.join("link_layer")),
        rate: Sysfs::line(&folder.join("rate")),
        netdevs: interfaces(number),
    };
    ports.into_iter().map(port).collect()
}

fn is_at(location: Option<&PciLocation>, bus_id: &str) -> bool {
    location.is_some_and(|location| location.bus_id() == bus_id)
}

/// A NIC relative to one card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Near {
    /// Its index in [`ScaleOut::nics`].
    pub(crate) nic: usize,
    /// How far it is.
    pub(crate) distance: Distance,
}

/// A card and the NICs near it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CardView {
    /// The card.
    pub(crate) card: DeviceInfo,
    /// Its place in the PCI tree; `None` if sysfs does not have it.
    pub(crate) location: Option<PciLocation>,
    /// The host's NICs, nearest first.
    pub(crate) near: Vec<Near>,
    /// The card's own ports as RDMA devices, if the driver has them.
    pub(crate) own_nics: Vec<Nic>,
    /// The card's own ports as network interfaces, if the driver has them.
    pub(crate) own_netdevs: Vec<NetDevice>,
}

/// All cards of this process, and the NICs of the server. Its `Display` is for people.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ScaleOut {
    cards: Vec<CardView>,
    nics: Vec<Nic>,
}

impl ScaleOut {
    /// Reads what sysfs has about these cards and their NICs.
    pub(crate) fn read(sysfs: &Sysfs, cards: &[DeviceInfo]) -> Self {
        let placed = cards.iter().map(|card| (card.clone(), sysfs.location(&card.bus_id)));
        Self::assemble(placed.collect(), Network::read(sysfs))
    }

    /// Relates cards to NICs.
    pub(crate) fn assemble(
        cards: Vec<(DeviceInfo, Option<PciLocation>)>,
        network: Network,
    ) -> Self {
        // Also those of cards that this process may not use: they serve no other card.
        let is_of_a_card = |nic: &Nic| {
            let location = nic.location.as_ref();
            location.is_some_and(PciLocation::is_gaudi)
                || cards.iter().any(|(card, _)| is_at(location, card.bus_id.as_str()))
        };
        let (own, nics): (Vec<Nic>, Vec<Nic>) = network.nics.into_iter().partition(is_of_a_card);
        let view = |(card, location): (DeviceInfo, Option<PciLocation>)| {
            let bus_id = card.bus_id.as_str();
            let distance = |nic: &Nic| match (&location, &nic.location) {
                (Some(card), Some(nic)) => Distance::between(card, nic),
                _ => Distance::Unknown,
            };
            let near = |(at, nic)| Near { nic: at, distance: distance(nic) };
            let mut near: Vec<Near> = nics.iter().enumerate().map(near).collect();
            near.sort_by_key(|near| near.distance);
            let own_nics = own.iter().filter(|nic| is_at(nic.location.as_ref(), bus_id));
            let own_netdevs =
                network.netdevs.iter().filter(|netdev| is_at(netdev.location.as_ref(), bus_id));
            CardView {
                near,
                own_nics: own_nics.cloned().collect(),
                own_netdevs: own_netdevs.cloned().collect(),
                card,
                location,
            }
        };
        let cards = cards.clone().into_iter().map(view).collect();
        Self { cards, nics }
    }

    /// The cards, in the order they were given.
    pub(crate) fn cards(&self) -> &[CardView] {
        &self.cards
    }

    /// The host's NICs.
    pub(crate) fn nics(&self) -> &[Nic] {
        &self.nics
    }

    /// The NICs that can carry data and are nearest to a card; several if they are equally near.
    pub(crate) fn nearest(&self, card: &BusId) -> Vec<&Nic> {
        let Some(view) = self.cards.iter().find(|view| view.card.bus_id == *card) else {
            return Vec::new();
        };
        let active = view.near.iter().filter(|near| self.nics[near.nic].is_active());
        let best = active.clone().next().map(|near| near.distance);
        active.filter(|near| Some(near.distance) == best).map(|near| &self.nics[near.nic]).collect()
    }

    fn write_card(&self, f: &mut fmt::Formatter<'_>, view: &CardView) -> fmt::Result {
        write!(f, "{}, module {}, ", view.card, view.card.module_id)?;
        match &view.location {
            Some(location) => writeln!(f, "{location}")?,
            None => writeln!(f, "not in sysfs")?,
        }
        // One line per class of distance: eight cards and eight NICs are 64 pairs.
        for class in view.near.chunk_by(|one, next| same_class(one.distance, next.distance)) {
            let names: Vec<&str> = class.iter().map(|near| &*self.nics[near.nic].name).collect();
            writeln!(f, "    {:<19}{}", class[0].distance, names.join(", "))?;
        }
        let masks = view.card.ports;
        if masks.all != 0 {
            let (all, external) = (masks.all.count_ones(), masks.external.count_ones());
            writeln!(f, "    {:<19}{all}, {external} of them external", "own ports")?;
        }
        for nic in &view.own_nics {
            writeln!(f, "    {:<19}{}: {}", "own RDMA device", nic.name, joined(&nic.ports))?;
        }
        if !view.own_netdevs.is_empty() {
            writeln!(f, "    {:<19}{}", "own interfaces", joined(&view.own_netdevs))?;
        }
        Ok(())
    }
}

fn same_class(one: Distance, other: Distance) -> bool {
    std::mem::discriminant(&one) == std::mem::discriminant(&other)
}

fn joined(items: &[impl fmt::Display]) -> String {
    items.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

impl fmt::Display for ScaleOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for view in &self.cards {
            self.write_card(f, view)?;
        }
        if self.nics.is_empty() {
            return writeln!(f, "no RDMA devices in this machine");
        }
        for nic in &self.nics {
            let address = nic.location.as_ref().map_or("not a PCI device", PciLocation::bus_id);
            let node = nic.location.as_ref().and_then(|location| location.numa_node);
            let node = node.map_or(String::from("-"), |node| node.to_string());
            let ports = joined(&nic.ports);
            let ports = if ports.is_empty() { "no ports" } else { &ports };
            writeln!(f, "{:<10} {address:<14} NUMA node {node}  {ports}", nic.name)?;
        }
        Ok(())
    }
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(sysfs: &Sysfs) -> String {
    let _ = Hcas::read(sysfs);
    ScaleOut::read(sysfs, &[]).to_string()
}

#[cfg(test)]
mod tests;
