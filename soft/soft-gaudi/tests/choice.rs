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
