//! Finding, opening and naming cards.

use core::ffi::{CStr, c_char, c_int};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::{borrow, guard, handle, or_minus_one, set_errno, status};
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

/// Opens the first card that matches and opens.
fn open_first(
    name: DeviceName,
    open: impl Fn(u32) -> Result<c_int, Errno>,
) -> Result<c_int, Errno> {
    let mut last = Errno::NOENT;
    if matches(name) {
        for index in 0..devices() {
            match open(index) {
                Ok(fd) => return Ok(fd),
                Err(errno) => last = errno,
            }
        }
    }
    Err(last)
}

fn devices() -> u32 {
    node().map_or(0, |node| node.config.devices)
}

fn index_of_module(wanted: u32) -> Option<u32> {
    (0..devices()).find(|index| module_id(*index) == wanted)
}

fn open_compute(index: u32) -> Result<c_int, Errno> {
    context::open(index).map(IntoRawFd::into_raw_fd)
}

/// The index of the card behind a descriptor.
pub(super) fn index_from_fd(fd: c_int) -> Result<u32, Errno> {
    let node = node().map_err(|_| Errno::NOTTY)?;
    node.identify(borrow(fd)?).map(|identity| identity.device)
}

/// Opens by bus id (on failure returns a negative errno), or without one the first card that opens (-1 if none does).
fn open_by(
    name: &str,
    busid: *const c_char,
    wanted: DeviceName,
    open: fn(u32) -> Result<c_int, Errno>,
) -> c_int {
    if busid.is_null() {
        or_minus_one(name, || open_first(wanted, open))
    } else {
        status(name, || open(index_of(busid)?.ok_or(Errno::INVAL)?))
    }
}

/// `hlthunk_open`: a card for computing, by bus id or the first free one.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open(device_name: DeviceName, busid: *const c_char) -> c_int {
    open_by("hlthunk_open", busid, device_name, open_compute)
}

/// `hlthunk_open_control_by_name`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_control_by_name(name: DeviceName, busid: *const c_char) -> c_int {
    open_by("hlthunk_open_control_by_name", busid, name, open_control_node)
}

/// `hlthunk_open_by_module_id`: -1 if there is no such card.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_open_by_module_id(wanted: u32) -> c_int {
    const NAME: &str = "hlthunk_open_by_module_id";
    match index_of_module(wanted) {
        Some(index) => status(NAME, || open_compute(index)),
        None => or_minus_one(NAME, || Err(Errno::NOENT)),
    }
}

/// `hlthunk_get_device_id_from_fd`: the PCI device id, 0 on failure.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_id_from_fd(fd: c_int) -> u32 {
    handle("hlthunk_get_device_id_from_fd", || {
        index_from_fd(fd).and_then(|index| Ok(node()?.config.pci_id(index).device.into()))
    }) as u32
}

/// `hlthunk_get_device_name_from_fd`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_name_from_fd(fd: c_int) -> DeviceName {
    guard("hlthunk_get_device_name_from_fd", || {
        let (node, index) = (node()?, index_from_fd(fd)?);
        let known = node.config.pci_id(index).generation().map(|_| node.profile.device_name);
        Ok(known.unwrap_or(abi::DEVICE_INVALID))
    })
    .unwrap_or(abi::DEVICE_INVALID)
}

c_functions! {
    fn hlthunk_open_control(dev_id: c_int, busid: *const c_char) -> status {
        open_control_node(if busid.is_null() {
            u32::try_from(dev_id).map_err(|_| Errno::NOENT)?
        } else {
            index_of(busid)?.ok_or(Errno::INVAL)?
        })
    }

    fn hlthunk_open_control_by_module_id(wanted: u32) -> status {
        open_control_node(index_of_module(wanted).ok_or(Errno::BADF)?)
    }

    fn hlthunk_open_control_by_bus_id(busid: *const c_char) -> status {
        open_control_node(index_of(busid)?.ok_or(Errno::BADF)?)
    }

    /// Also the end of the context if it was the last descriptor of its card.
    fn hlthunk_close(fd: c_int) -> or_minus_one {
        rustix::io::fcntl_getfd(borrow(fd)?)?;
        if context::of(borrow(fd)?).is_ok_and(|context| context.scal.load(Ordering::Acquire) == fd) {
            super::scal::forbidden("the descriptor through which SCAL drives a card was closed");
        }
        // SAFETY: open, and the caller gives it up.
        context::close(unsafe { OwnedFd::from_raw_fd(fd) });
        Ok(0)
    }

    fn hlthunk_get_pci_bus_id_from_fd(fd: c_int, out: *mut c_char, len: c_int) -> or_minus_one {
        if out.is_null() {
            set_errno(Errno::INVAL);
            return Ok(-Errno::INVAL.raw_os_error());
        }
        let id = bus_id(index_from_fd(fd)?);
        if len <= 0 {
            return Ok(-1);
        }
        let count = id.len().min(len as usize - 1);
        // SAFETY: the caller promises `len` bytes; `count` and the NUL fit.
        unsafe {
            core::ptr::copy_nonoverlapping(id.as_ptr(), out.cast::<u8>(), count);
            *out.add(count) = 0;
        }
        Ok(0)
    }

    fn hlthunk_get_device_index_from_pci_bus_id(busid: *const c_char) -> status {
        Ok(index_of(busid)?.map_or(-1, |index| index as c_int))
    }

    fn hlthunk_get_device_count(name: DeviceName) -> status {
        if name == abi::DEVICE_INVALID || !(0..abi::DEVICE_MAX).contains(&name) {
            return Err(Errno::INVAL);
        }
        Ok(if matches(name) { devices() as c_int } else { 0 })
    }
}
