//! The bindings on the software machine of this test program.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::sync::{Arc, OnceLock};

use hl_thunk::{ControlDevice, Device, Library};
use soft_gaudi::testing;

/// The software device's library, with 64 cards.
pub(crate) fn library(generation: &str) -> &'static Arc<Library> {
    static LIBRARY: OnceLock<Arc<Library>> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        testing::set_up(generation, &[]);
        Library::load_first(&[testing::library().to_str().expect("a path that is text")])
            .expect("loads")
    })
}

/// The PCI address of a card that no other test of this program uses.
pub(crate) fn fresh(library: &Arc<Library>) -> String {
    let control = ControlDevice::open(library, testing::fresh_index()).expect("a control node");
    control.bus_id().expect("an address")
}

/// Opens such a card.
pub(crate) fn open(library: &Arc<Library>) -> Device {
    Device::open(library, &fresh(library)).expect("opens")
}
