//! What the driver reports about the cards, from their control nodes and sysfs. Neither disturbs a job.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use gaudi::topology::PciLocation;
use gaudi::{DeviceInfo, Sysfs, runtime};
use hl_thunk::{ControlDevice, Library};

use super::users;

/// A card at one moment. `None`: the driver does not report it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Card {
    pub(super) index: u32,
    pub(super) bus_id: String,
    pub(super) name: String,
    pub(super) memory_total: Option<u64>,
    pub(super) memory_used: Option<u64>,
    /// How busy it is, in percent. Current drivers estimate it from the power.
    pub(super) utilization: Option<u32>,
    /// The highest of its sensors, in °C.
    pub(super) temperature: Option<f64>,
    /// In W.
    pub(super) power: Option<f64>,
    /// The users of processes that have it open, with or without the plugin, as far as this user can see.
    pub(super) users: BTreeSet<String>,
}

/// `hlthunk_get_device_utilization`: only this tool calls it, and not every library has it.
type GetUtilization = unsafe extern "C" fn(fd: c_int, period_ms: u32, rate: *mut u32) -> c_int;

fn find_utilization(library: &Library) -> Option<GetUtilization> {
    // SAFETY: the library is loaded already, so no initialiser runs.
    let handle = unsafe { libloading::Library::new(library.name()) }.ok()?;
    // SAFETY: the signature is that of hlthunk.h. The other handle keeps the library loaded.
    unsafe { handle.get(b"hlthunk_get_device_utilization\0") }.ok().map(|symbol| *symbol)
}

/// The cards of this machine.
pub(super) struct Cards {
    library: Option<Arc<Library>>,
    get_utilization: Option<GetUtilization>,
    infos: Vec<DeviceInfo>,
    sysfs: Sysfs,
}

impl Cards {
    /// Finds no card if there is no driver library: the counters of processes can be read all the same.
    pub(super) fn find() -> Self {
        let infos = runtime().discover().unwrap_or_default();
        let library = Library::load().ok();
        let get_utilization = library.as_deref().and_then(find_utilization);
        Self { library, get_utilization, infos, sysfs: Sysfs::default() }
    }

    /// Queries the driver. It opens the control node each time, because an open one would keep the driver from removing
    /// the card.
    pub(super) fn look(&self) -> Vec<Card> {
        self.infos.iter().map(|info| self.card(info)).collect()
    }

    /// Like [`Cards::look`], and with the users that have the cards open.
    pub(super) fn look_with_users(&self) -> Vec<Card> {
        let nodes: Vec<u32> = self.infos.iter().map(|info| info.node).collect();
        let owners = if nodes.is_empty() { Vec::new() } else { runtime().owners(&nodes) };
        let mut cards = self.look();
        for (card, owners) in cards.iter_mut().zip(owners) {
            card.users = owners.found.iter().map(|owner| users::of_process(owner.pid)).collect();
        }
        cards
    }

    fn card(&self, info: &DeviceInfo) -> Card {
        let mut card = Card {
            index: info.index,
            bus_id: info.bus_id.to_string(),
            name: info.card_name.clone(),
            ..Card::default()
        };
        let library = self.library.as_ref();
        if let Some(control) = library.and_then(|one| ControlDevice::open(one, info.node).ok()) {
            card.memory_total = control.hw_info().ok().map(|hw| hw.dram_size);
            card.utilization = self.utilization(control.as_fd());
            let free = control.free_memory();
            card.memory_used =
                card.memory_total.zip(free).map(|(total, free)| total.saturating_sub(free));
        }
        if !info.is_software {
            (card.temperature, card.power) = sensors(&self.sysfs, &card.bus_id);
        }
        card
    }

    fn utilization(&self, control: BorrowedFd<'_>) -> Option<u32> {
        /// The longest period that older drivers can average over.
        const PERIOD_MS: u32 = 1000;
        let mut rate = 0;
        // SAFETY: the fd is open, and the number lives across the call.
        let ret = unsafe { self.get_utilization?(control.as_raw_fd(), PERIOD_MS, &raw mut rate) };
        (ret == 0 && rate <= 100).then_some(rate)
    }
}

/// Temperature in °C and power in W, of the hwmon devices of a card.
fn sensors(sysfs: &Sysfs, bus_id: &str) -> (Option<f64>, Option<f64>) {
    let (mut temperature, mut power) = (None::<f64>, None::<f64>);
    for (_, folder) in sysfs.class("hwmon") {
        let of_card = |place: &PciLocation| place.is_gaudi() && place.bus_id() == bus_id;
        if !sysfs.location_of(&folder).as_ref().is_some_and(of_card) {
            continue;
        }
        for (name, file) in Sysfs::entries(&folder) {
            let Some(sensor) = name.strip_suffix("_input") else { continue };
            // Reading an attribute fails if the firmware does not answer.
            let Some(value) = Sysfs::line(&file).and_then(|line| line.parse::<f64>().ok()) else {
                continue;
            };
            if sensor.starts_with("temp") {
                temperature = Some(temperature.map_or(value / 1e3, |other| other.max(value / 1e3)));
            } else if sensor.starts_with("power") {
                power = Some(power.map_or(value / 1e6, |other| other.max(value / 1e6)));
            }
        }
    }
    (temperature, power)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sensors_are_read_where_the_driver_has_them() {
        let root = tempfile::tempdir().expect("a folder");
        let device = root.path().join("devices/pci0000:30/0000:33:00.0");
        let hwmon = device.join("hwmon/hwmon3");
        let class = root.path().join("class/hwmon");
        for folder in [&hwmon, &class] {
            std::fs::create_dir_all(folder).expect("folders");
        }
        std::os::unix::fs::symlink(&hwmon, class.join("hwmon3")).expect("a link");
        std::fs::write(device.join("vendor"), "0x1da3\n").expect("a file");
        let sysfs = Sysfs::at(root.path());
        assert_eq!(sensors(&sysfs, "0000:33:00.0"), (None, None), "no sensors");
        for (name, text) in [
            ("temp1_input", "41000\n"),
            ("temp2_input", "55500\n"),
            ("temp3_input", ""),
            ("temp2_crit", "105000\n"),
            ("power1_input", "97000000\n"),
            ("in0_input", "12000\n"),
        ] {
            std::fs::write(hwmon.join(name), text).expect("a file");
        }
        assert_eq!(sensors(&sysfs, "0000:33:00.0"), (Some(55.5), Some(97.0)));
        assert_eq!(sensors(&sysfs, "0000:34:00.0"), (None, None), "another card's");
    }
}
