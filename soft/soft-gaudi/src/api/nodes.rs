//! Finding, opening and naming cards.

use core::ffi::{CStr, c_char, c_int};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{borrow, set_errno, status};
use crate::abi::{self, DeviceName};
use crate::asic::{bus_id, module_id};
use crate::context;
use crate::node::{Role, node};

/// The index of the card with a bus id; the domain may be left out.
fn index_of(busid: *const c_char) -> Result<Option<u32>, Errno> {
    if busid.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: C's callers promise a NUL-terminated string or NULL.
    let wanted = unsafe { CStr::from_ptr(busid) }.to_bytes();
    let wanted = if wanted.len() == 7 { [b"0000:", wanted].concat() } else { wanted.to_vec() };
    let Ok(node) = node() else { return Ok(None) };
    Ok((0..node.config.devices).find(|index| bus_id(*index).as_bytes() == wanted))
}

fn matches(name: DeviceName) -> bool {
    name == abi::DEVICE_DONT_CARE || node().is_ok_and(|node| node.profile.device_name == name)
}

fn open_control_node(index: u32) -> Result<c_int, Errno> {
    let node = node().map_err(|_| Errno::NOENT)?;
    node.open(index, Role::Control).map(IntoRawFd::into_raw_fd)
}

/// Opens the first card that matches and opens: a descriptor, or -1 with `errno`.
fn open_first(name: DeviceName, open: impl Fn(u32) -> Result<c_int, Errno>) -> c_int {
    let mut last = Errno::NOENT;
    let devices = node().map_or(0, |node| node.config.devices);
    if matches(name) {
        for index in 0..devices {
            match open(index) {
                Ok(fd) => return fd,
                Err(errno) => last = errno,
            }
        }
    }
    set_errno(last);
    -1
}

fn open_compute(index: u32) -> Result<c_int, Errno> {
    context::open(index).map(IntoRawFd::into_raw_fd)
}

/// `hlthunk_open`: a card for computing, by bus id or the first free one.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open(device_name: DeviceName, busid: *const c_char) -> c_int {
    if busid.is_null() {
        return super::guard("hlthunk_open", || Ok(open_first(device_name, open_compute)))
            .unwrap_or(-1);
    }
    status("hlthunk_open", || open_compute(index_of(busid)?.ok_or(Errno::INVAL)?))
}

/// `hlthunk_open_by_module_id`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_by_module_id(wanted: u32) -> c_int {
    let devices = node().map_or(0, |node| node.config.devices);
    match (0..devices).find(|index| module_id(*index) == wanted) {
        Some(index) => status("hlthunk_open_by_module_id", || open_compute(index)),
        None => {
            set_errno(Errno::NOENT);
            -1
        }
    }
}

/// `hlthunk_open_control`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_control(dev_id: c_int, busid: *const c_char) -> c_int {
    status("hlthunk_open_control", || {
        let index = if busid.is_null() {
            u32::try_from(dev_id).map_err(|_| Errno::NOENT)?
        } else {
            index_of(busid)?.ok_or(Errno::INVAL)?
        };
        open_control_node(index)
    })
}

/// `hlthunk_open_control_by_name`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_control_by_name(name: DeviceName, busid: *const c_char) -> c_int {
    if busid.is_null() {
        return super::guard("hlthunk_open_control_by_name", || {
            Ok(open_first(name, open_control_node))
        })
        .unwrap_or(-1);
    }
    hlthunk_open_control(0, busid)
}

/// `hlthunk_open_control_by_module_id`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_control_by_module_id(wanted: u32) -> c_int {
    status("hlthunk_open_control_by_module_id", || {
        let devices = node().map_or(0, |node| node.config.devices);
        let index = (0..devices).find(|index| module_id(*index) == wanted).ok_or(Errno::BADF)?;
        open_control_node(index)
    })
}

/// `hlthunk_open_control_by_bus_id`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_control_by_bus_id(busid: *const c_char) -> c_int {
    status("hlthunk_open_control_by_bus_id", || {
        open_control_node(index_of(busid)?.ok_or(Errno::BADF)?)
    })
}

/// `hlthunk_close`: also the end of the context if it was the last descriptor of its card.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_close(fd: c_int) -> c_int {
    let closed = super::guard("hlthunk_close", || {
        rustix::io::fcntl_getfd(borrow(fd)?)?;
        if context::of(borrow(fd)?).is_ok_and(|context| context.scal.load(Ordering::Acquire) == fd)
        {
            super::scal::forbidden("the descriptor through which SCAL drives a card was closed");
        }
        // SAFETY: open, and the caller gives it up.
        context::close(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(0)
    });
    closed.unwrap_or_else(|errno| {
        set_errno(errno);
        -1
    })
}

/// The index of the card behind a descriptor.
pub(super) fn index_from_fd(fd: c_int) -> Result<u32, Errno> {
    let node = node().map_err(|_| Errno::NOTTY)?;
    node.identify(borrow(fd)?).map(|identity| identity.device)
}

/// `hlthunk_get_device_id_from_fd`: the PCI device id, 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_id_from_fd(fd: c_int) -> u32 {
    match super::guard("hlthunk_get_device_id_from_fd", || {
        index_from_fd(fd).and_then(|_| Ok(node()?.profile.pci_id))
    }) {
        Ok(id) => id,
        Err(errno) => {
            set_errno(errno);
            0
        }
    }
}

/// `hlthunk_get_device_name_from_fd`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_name_from_fd(fd: c_int) -> DeviceName {
    super::guard("hlthunk_get_device_name_from_fd", || {
        index_from_fd(fd).and_then(|_| Ok(node()?.profile.device_name))
    })
    .unwrap_or(abi::DEVICE_INVALID)
}

/// `hlthunk_get_pci_bus_id_from_fd`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_pci_bus_id_from_fd(fd: c_int, out: *mut c_char, len: c_int) -> c_int {
    if out.is_null() {
        return status("hlthunk_get_pci_bus_id_from_fd", || Err(Errno::INVAL));
    }
    match super::guard("hlthunk_get_pci_bus_id_from_fd", || index_from_fd(fd)) {
        Ok(index) if len > 0 => {
            let id = bus_id(index);
            let count = id.len().min(len as usize - 1);
            // SAFETY: the caller promises `len` bytes; `count` and the NUL fit.
            unsafe {
                core::ptr::copy_nonoverlapping(id.as_ptr(), out.cast::<u8>(), count);
                *out.add(count) = 0;
            }
            0
        }
        Ok(_) => -1,
        Err(errno) => {
            set_errno(errno);
            -1
        }
    }
}

/// `hlthunk_get_device_index_from_pci_bus_id`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_index_from_pci_bus_id(busid: *const c_char) -> c_int {
    status("hlthunk_get_device_index_from_pci_bus_id", || {
        Ok(index_of(busid)?.map_or(-1, |index| index as c_int))
    })
}

/// `hlthunk_get_device_count`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_count(name: DeviceName) -> c_int {
    status("hlthunk_get_device_count", || {
        if name == abi::DEVICE_INVALID || !(0..abi::DEVICE_MAX).contains(&name) {
            return Err(Errno::INVAL);
        }
        let devices = node().map_or(0, |node| node.config.devices);
        Ok(if matches(name) { devices as c_int } else { 0 })
    })
}
