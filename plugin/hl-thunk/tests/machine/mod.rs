//! A software machine of its own for each test program, through the bindings alone.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use hl_thunk::{ControlDevice, Device, Library};

fn node_name() -> String {
    format!("hl-thunk-{}", std::process::id())
}

extern "C" fn remove_node() {
    let user = rustix::process::geteuid().as_raw();
    for base in [PathBuf::from("/dev/shm"), std::env::temp_dir()] {
        let _ = std::fs::remove_dir_all(base.join(format!("soft-gaudi-{user}")).join(node_name()));
    }
}

/// The software device's library, which cargo builds next to this program, with 64 cards.
pub(crate) fn library(generation: &str) -> &'static Arc<Library> {
    static LIBRARY: OnceLock<Arc<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        // SAFETY: every test of this program comes through here first, and nothing reads the
        // environment before.
        unsafe {
            std::env::set_var("SOFT_GAUDI_NODE", node_name());
            std::env::set_var("SOFT_GAUDI_GENERATION", generation);
            std::env::set_var("SOFT_GAUDI_DEVICES", "64");
            std::env::set_var("SOFT_GAUDI_LENIENT", "import");
        }
        // SAFETY: the handler takes no arguments and may run at any time.
        unsafe { libc::atexit(remove_node) };
        let program = std::env::current_exe().expect("a running program has a path");
        let path = program.with_file_name("libsoft_gaudi.so");
        Library::load_first(&[path.to_str().expect("a path that is text")]).expect("loads")
    })
}

/// What shall go wrong with a Gaudi2. `SOFT_GAUDI_FAULTS` must have been set to `yes`.
pub(crate) fn faults(rule: &str) {
    let user = rustix::process::geteuid().as_raw();
    let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()]
        .map(|base| base.join(format!("soft-gaudi-{user}")).join(node_name()).join("gaudi2"));
    let folder = folders.iter().find(|folder| folder.is_dir()).expect("the machine's folder");
    std::fs::write(folder.join("faults"), format!("{rule}\n")).expect("a rule");
}

/// The PCI address of a card that no other test of this program uses.
pub(crate) fn fresh(library: &Arc<Library>) -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let index = NEXT.fetch_add(1, Ordering::Relaxed);
    ControlDevice::open(library, index).expect("a control node").bus_id().expect("an address")
}

/// Opens such a card.
pub(crate) fn open(library: &Arc<Library>) -> Device {
    Device::open(library, &fresh(library)).expect("opens")
}
