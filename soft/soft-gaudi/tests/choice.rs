//! Which card an open finds. A program of its own, because it takes the first free ones.

mod driver;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

#[test]
fn processes_started_alike_take_different_cards() {
    machine("gaudi2");
    let mine = hlthunk_open_by_module_id(soft_gaudi::asic::module_id(60));
    assert!(mine >= 0);
    assert_eq!(hlthunk_open_by_module_id(soft_gaudi::asic::module_id(60)), -libc::EBUSY);
    assert_eq!(hlthunk_open_by_module_id(9999), -1);
    let first = hlthunk_open(sys::DEVICE_GAUDI2, core::ptr::null());
    let second = hlthunk_open(sys::DEVICE_DONT_CARE, core::ptr::null());
    assert!(first >= 0 && second >= 0);
    let bus = |fd| {
        let mut text = [0i8; 13];
        assert_eq!(hlthunk_get_pci_bus_id_from_fd(fd, text.as_mut_ptr(), 13), 0);
        text
    };
    assert_ne!(bus(first), bus(second));
    assert_eq!(hlthunk_open(sys::DEVICE_GAUDI, core::ptr::null()), -1);
    assert_eq!(errno(), libc::ENOENT);
    assert_eq!(hlthunk_get_device_count(sys::DEVICE_DONT_CARE), 64);
    assert_eq!(hlthunk_get_device_count(sys::DEVICE_GAUDI), 0);
    assert_eq!(hlthunk_get_device_count(sys::DEVICE_INVALID), -libc::EINVAL);
    for fd in [mine, first, second] {
        hlthunk_close(fd);
    }
}

/// A program of its own for each: a process has one machine.
#[test]
fn a_card_can_play_every_pci_id_of_its_generation() {
    const EXPECTED: &str = "SOFT_GAUDI_TEST_EXPECTED";
    let cases = [
        ("gaudi1", "0x1011", 1, "HL2000M-soft", sys::DEVICE_GAUDI),
        ("gaudi2", "0x1021:4", 4, "HL288-soft", sys::DEVICE_GAUDI2),
        ("gaudi2", "0x1020:5", 5, "HL225-soft", sys::DEVICE_GAUDI2),
        ("gaudi3", "0x1063", 1, "HL338-soft", sys::DEVICE_GAUDI3),
        ("gaudi2", "0x1070", 1, "unknown-soft", sys::DEVICE_INVALID),
    ];
    if !soft_gaudi::testing::is_child() {
        fn here() {}
        for (at, (_, ids, ..)) in cases.iter().enumerate() {
            let at = at.to_string();
            let variables = [("SOFT_GAUDI_PCI_ID", *ids), (EXPECTED, &at)];
            soft_gaudi::testing::run_alone(std::any::type_name_of_val(&here), &variables);
        }
        return;
    }
    let at: usize = std::env::var(EXPECTED).unwrap().parse().unwrap();
    let (generation, ids, revision, name, kind) = cases[at];
    machine(generation);
    let control = hlthunk_open_control(0, core::ptr::null());
    let info = hw_info(control);
    assert_eq!(format!("{:#x}", info.device_id), ids.split(':').next().unwrap());
    assert_eq!(hlthunk_get_device_id_from_fd(control), info.device_id);
    assert_eq!((info.revision_id, hlthunk_get_device_name_from_fd(control)), (revision, kind));
    assert!(info.card_name.starts_with(name.as_bytes()), "{:?}", info.card_name);
}
