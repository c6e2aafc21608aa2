//! Ports that are taken down and up again by hand.
//!
//! The node's folder has a folder `ports-NODE`. A port is down while the file with its HCA's name in
//! there says `down`. Each process watches the folder, and tells its programs of a change.

use std::path::PathBuf;
use std::sync::Mutex;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};

use super::descriptor::Descriptor;
use crate::config::{self, Config, log};
use crate::fabric::MAX_DEVICES;
use crate::hca::events::lock;
use crate::ports::Ports;
use crate::sysfs::device_name;

/// The folder, as this process has seen it.
pub(super) struct Control {
    folder: PathBuf,
    devices: u8,
    watch: Option<Descriptor>,
    down: Mutex<[bool; MAX_DEVICES as usize]>,
}

impl Control {
    /// Starts to watch the folder; makes it if needed.
    pub(super) fn open(config: &Config) -> Self {
        let folder = config.folder.join(format!("ports-{}", config.node));
        let _ = rustix::fs::mkdir(&folder, Mode::RWXU);
        let changes = WatchFlags::CLOSE_WRITE | WatchFlags::MOVED_TO | WatchFlags::DELETE;
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)
            .and_then(|watch| inotify::add_watch(&watch, &folder, changes).map(|_| watch))
            .inspect_err(|error| log!(Info, "ports cannot be watched ({error})"));
        Self {
            folder,
            devices: config.devices,
            watch: watch.ok().map(Descriptor::from),
            down: Mutex::new([false; _]),
        }
    }

    /// Readable when something has changed.
    pub(super) fn fd(&self) -> Option<&Descriptor> {
        self.watch.as_ref()
    }

    /// Reads the files and sets the ports. Returns the ports that have changed since the last call, and whether they
    /// are down now.
    pub(super) fn changes(&self, ports: &Ports) -> Vec<(u8, bool)> {
        let mut events = [0; 4096];
        while self.watch.as_ref().is_some_and(|fd| rustix::io::read(fd, &mut events).is_ok()) {}
        let mut known = lock(&self.down);
        let mut changes = Vec::new();
        for device in 0..self.devices {
            let at = usize::from(device);
            let text =
                std::fs::read_to_string(self.folder.join(device_name(config::get(), device)));
            let down = text.is_ok_and(|text| text.trim() == "down");
            ports[at].set_down(down);
            if known[at] != down {
                known[at] = down;
                changes.push((device, down));
            }
        }
        changes
    }

    /// Takes a port down, for all processes of the node.
    pub(super) fn take_down(&self, device: u8) {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC;
        let path = self.folder.join(device_name(config::get(), device));
        let written = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)
            .and_then(|file| rustix::io::write(file, b"down\n"));
        if let Err(error) = written {
            log!(Info, "{}: {error}", self.folder.display());
        }
    }
}
