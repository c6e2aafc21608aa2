//! Finding and opening cards.
//!
//! `/dev/accel/accelN` computes, `/dev/accel/accel_controlDN` answers questions. Attributes lie on the PCI device, at
//! `/sys/class/accel/accelN/device`. Control nodes have no such link, so their card is found by N.

use std::ffi::{CStr, c_char, c_int};
use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, IntoRawFd, OwnedFd};
use std::path::PathBuf;

use rustix::fs::{Mode, OFlags, fstat, major, minor, open};

use crate::info::HwIp;

/// `enum hlthunk_device_name`.
pub type DeviceName = c_int;
const GOYA: DeviceName = 0;
const GAUDI: DeviceName = 2;
const INVALID: DeviceName = 3;
const DONT_CARE: DeviceName = 4;
const GAUDI2: DeviceName = 5;
const GAUDI3: DeviceName = 7;
/// Not in the published header; newer ones name the revisions of a Gaudi2.
const GAUDI2B: DeviceName = 8;
const GAUDI2C: DeviceName = 10;
const GAUDI2D: DeviceName = 11;
const MAX: DeviceName = 12;

const MAX_MINOR: c_int = 256;
/// Major number of accelerators that compute.
const ACCEL_MAJOR: u32 = 261;
/// "dddd:bb:dd.f" with its end.
const BUS_ID: usize = 13;

#[derive(Clone, Copy)]
enum Node {
    Compute,
    Control,
}

fn open_node(node: Node, index: c_int) -> io::Result<OwnedFd> {
    let path = match node {
        Node::Compute => format!("/dev/accel/accel{index}"),
        Node::Control => format!("/dev/accel/accel_controlD{index}"),
    };
    Ok(open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)
}

/// The descriptor, or a negative errno.
fn descriptor(opened: io::Result<OwnedFd>) -> c_int {
    match opened {
        Ok(fd) => fd.into_raw_fd(),
        Err(error) => -error.raw_os_error().unwrap_or(libc::EIO),
    }
}

fn attributes(index: u32) -> PathBuf {
    format!("/sys/class/accel/accel{index}/device").into()
}

fn bus_id(index: u32) -> Option<String> {
    let text = fs::read_to_string(attributes(index).join("pci_addr")).ok()?;
    Some(text.trim().to_owned()).filter(|text| text.len() < BUS_ID)
}

/// # Safety
/// `text` is null or a terminated string.
unsafe fn text<'a>(text: *const c_char) -> Option<&'a str> {
    // SAFETY: the caller's promise.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default())
}

/// The card at a PCI address, with or without its domain.
fn index_of(wanted: &str) -> io::Result<Option<u32>> {
    let whole = if wanted.len() == 7 { format!("0000:{wanted}") } else { wanted.to_owned() };
    for entry in fs::read_dir("/sys/class/accel")? {
        let name = entry?.file_name();
        let index = name.to_str().and_then(|name| name.strip_prefix("accel")?.parse().ok());
        if let Some(index) = index.filter(|index| bus_id(*index).as_deref() == Some(&whole)) {
            return Ok(Some(index));
        }
    }
    Ok(None)
}

fn name_of(id: u32, revision: u8) -> DeviceName {
    match (id, revision) {
        (0x0001, _) => GOYA,
        (0x1000 | 0x1001 | 0x1010 | 0x1011, _) => GAUDI,
        (0x1020 | 0x1021, 2) => GAUDI2B,
        (0x1020 | 0x1021, 3) => GAUDI2C,
        (0x1020 | 0x1021, 4) => GAUDI2D,
        (0x1020 | 0x1021, _) => GAUDI2,
        (0x1060..=0x1063, _) => GAUDI3,
        // The name that the header has for this. A test compares with the ids that the plugin knows.
        _ => INVALID,
    }
}

/// What a card calls itself; `None` if it does not answer.
fn name_on(fd: c_int) -> Option<DeviceName> {
    let ip = HwIp::ask(fd).ok()?;
    Some(name_of(ip.device_id(), ip.revision()))
}

/// Cards whose control node opens, lowest first.
fn cards() -> impl Iterator<Item = (c_int, OwnedFd)> {
    (0..MAX_MINOR).filter_map(|index| Some((index, open_node(Node::Control, index).ok()?)))
}

fn matches(fd: &OwnedFd, wanted: DeviceName) -> bool {
    use std::os::fd::AsRawFd;
    name_on(fd.as_raw_fd()).is_some_and(|name| wanted == DONT_CARE || wanted == name)
}

/// -1, with `errno` set.
fn failed(errno: c_int) -> c_int {
    // SAFETY: the thread's own.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// Opens a card to compute: the one at a PCI address, or the first of a kind that opens.
///
/// # Safety
/// `busid` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_open(device_name: DeviceName, busid: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    if let Some(busid) = unsafe { text(busid) } {
        return match index_of(busid) {
            Ok(Some(index)) => descriptor(open_node(Node::Compute, index as c_int)),
            _ => -libc::EINVAL,
        };
    }
    let mut errno = libc::ENOENT;
    for (index, _) in cards().filter(|(_, control)| matches(control, device_name)) {
        match open_node(Node::Compute, index) {
            Ok(fd) => return fd.into_raw_fd(),
            Err(error) => errno = error.raw_os_error().unwrap_or(libc::EIO),
        }
    }
    failed(errno)
}

/// Opens a control node: by PCI address where one is given, else by index.
///
/// # Safety
/// `busid` is null or a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_open_control(dev_id: c_int, busid: *const c_char) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { text(busid) } {
        None => descriptor(open_node(Node::Control, dev_id)),
        Some(busid) => match index_of(busid) {
            Ok(Some(index)) => descriptor(open_node(Node::Control, index as c_int)),
            _ => -libc::EINVAL,
        },
    }
}

/// Closes a descriptor that a function here opened.
///
/// # Safety
/// `fd` comes from a function here, and is not used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_close(fd: c_int) -> c_int {
    // SAFETY: the caller gives the descriptor up.
    unsafe { libc::close(fd) }
}

/// The number N of the card behind a descriptor of either node.
///
/// # Safety
/// `fd` is negative or stays open during the call.
unsafe fn index_from(fd: c_int) -> Option<u32> {
    if fd < 0 {
        return None;
    }
    // SAFETY: the caller's promise.
    let stat = fstat(unsafe { BorrowedFd::borrow_raw(fd) }).ok()?;
    let is_device = stat.st_mode & libc::S_IFMT == libc::S_IFCHR;
    let (major, minor) = (major(stat.st_rdev), minor(stat.st_rdev));
    // Control nodes have a major number of their own, and the minor number of the card as well.
    let known = major == ACCEL_MAJOR
        || fs::read_link(format!("/sys/dev/char/{major}:{minor}"))
            .is_ok_and(|link| link.to_string_lossy().contains("accel_controlD"));
    (is_device && known).then_some(minor)
}

/// The PCI address of the card behind a descriptor of either node.
///
/// # Safety
/// `pci_bus_id` is null or has `len` bytes; `fd` is negative or stays open during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_pci_bus_id_from_fd(
    fd: c_int,
    pci_bus_id: *mut c_char,
    len: c_int,
) -> c_int {
    if pci_bus_id.is_null() {
        return -libc::EINVAL;
    }
    // SAFETY: the caller's promise.
    let Some(id) = (unsafe { index_from(fd) }).and_then(bus_id) else { return -1 };
    if (len as usize) < id.len() + 1 || len < 0 {
        return -1;
    }
    // SAFETY: there is room for the text and its end.
    unsafe {
        std::ptr::copy_nonoverlapping(id.as_ptr().cast(), pci_bus_id, id.len());
        pci_bus_id.add(id.len()).write(0);
    }
    0
}

/// How many cards of a kind there are.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_count(device_name: DeviceName) -> c_int {
    if device_name == INVALID || !(0..MAX).contains(&device_name) {
        return -libc::EINVAL;
    }
    cards().filter(|(_, fd)| matches(fd, device_name)).count() as c_int
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_of_something_else_is_no_card() {
        use std::os::fd::AsRawFd;
        let null = fs::File::open("/dev/null").unwrap();
        // SAFETY: an open file, and no descriptor.
        unsafe {
            assert_eq!(index_from(null.as_raw_fd()), None);
            assert_eq!(index_from(-1), None);
        }
        let mut place = [1; 13];
        // SAFETY: the place has the length.
        let ret =
            unsafe { hlthunk_get_pci_bus_id_from_fd(null.as_raw_fd(), place.as_mut_ptr(), 13) };
        assert_eq!((ret, place), (-1, [1; 13]));
    }

    /// Simulators have no kernel driver.
    #[test]
    fn every_card_that_the_plugin_knows_has_a_name() {
        for id in hl_thunk::Generation::ALL.iter().flat_map(|generation| generation.pci_ids()) {
            assert!(*id >= 0xff00 || name_of(*id, 1) != INVALID, "{id:#x}");
        }
        assert_eq!((name_of(0x1021, 1), name_of(0x1021, 4)), (GAUDI2, GAUDI2D));
        assert_eq!((name_of(0x1063, 1), name_of(0x1070, 1)), (GAUDI3, INVALID));
    }

    #[test]
    fn an_unknown_address_is_refused() {
        // SAFETY: terminated strings.
        unsafe {
            assert_eq!(hlthunk_open(DONT_CARE, c"ffff:ff:1f.7".as_ptr()), -libc::EINVAL);
            assert_eq!(hlthunk_open_control(0, c"ffff:ff:1f.7".as_ptr()), -libc::EINVAL);
            assert_eq!(hlthunk_get_device_count(INVALID), -libc::EINVAL);
        }
    }
}
