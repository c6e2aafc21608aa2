//! Queries to the driver.

use std::ffi::{c_int, c_void};

use crate::ioctl::{self, Info};

mod op {
    pub(super) const HW_IP: u32 = 0;
    pub(super) const DRAM_USAGE: u32 = 2;
    pub(super) const DEVICE_STATUS: u32 = 4;
}

/// Queries the driver, with a buffer of `size` bytes for the answer.
///
/// # Safety
/// `into` has `size` bytes, or is null.
unsafe fn ask(fd: c_int, op: u32, into: *mut c_void, size: u32) -> c_int {
    if into.is_null() {
        return -libc::EINVAL;
    }
    ioctl::call(fd, &mut Info { pointer: into as u64, size, op, ..Info::default() })
}

/// Queries the driver for `N` bytes.
fn ask_for<const N: usize>(fd: c_int, op: u32) -> Result<[u8; N], c_int> {
    let mut answer = [0; N];
    // SAFETY: the place has its length.
    match unsafe { ask(fd, op, answer.as_mut_ptr().cast(), N as u32) } {
        0 => Ok(answer),
        error => Err(error),
    }
}

/// `struct hl_info_hw_ip_info` as the kernel gives it, and the library's own layout of the same.
#[derive(Debug)]
pub struct HwIp([u8; HwIp::KERNEL]);

impl HwIp {
    const KERNEL: usize = 304;
    const LIBRARY: usize = 336;

    /// Asks a card.
    pub fn ask(fd: c_int) -> Result<Self, c_int> {
        ask_for(fd, op::HW_IP).map(Self)
    }

    /// PCI device id.
    pub fn device_id(&self) -> u32 {
        u32::from_le_bytes([self.0[32], self.0[33], self.0[34], self.0[35]])
    }

    /// PCI revision.
    pub fn revision(&self) -> u8 {
        self.0[277]
    }

    /// As `struct hlthunk_hw_ip_info`: the same fields in another order. Those that neither header names
    /// stay zero.
    fn for_library(&self) -> [u8; Self::LIBRARY] {
        /// Where in the kernel's, where in the library's, how many bytes.
        const FIELDS: [(usize, usize, usize); 29] = [
            // SRAM base, DRAM base and size; SRAM size, events, PCI id.
            (0, 0, 24),
            (24, 24, 12),
            // Module id, decoder mask, first interrupt, server type.
            (36, 188, 4),
            (40, 208, 4),
            (44, 232, 2),
            (46, 240, 2),
            // CPLD, PLL (four values).
            (48, 36, 4),
            (52, 40, 16),
            // TPC mask (a byte), DRAM enabled, security, MME mode.
            (68, 56, 1),
            (69, 58, 1),
            (70, 301, 1),
            (71, 212, 1),
            // Firmware version, card name.
            (72, 59, 128),
            (200, 192, 16),
            // TPC mask (all), DRAM page, EDMA mask.
            (216, 216, 8),
            (224, 224, 8),
            (232, 236, 4),
            // User interrupts, two reserved bytes (interposer, substrate), user PDMA channels.
            (236, 256, 2),
            (238, 280, 2),
            (240, 248, 8),
            // Default page, NIC ports, external ones, MME mask, ODP.
            (248, 264, 8),
            (256, 272, 8),
            (264, 288, 8),
            (272, 296, 5),
            // Revision, TPC interrupt, rotator and scheduler masks, interrupt register of cores, reserved DRAM.
            (277, 302, 1),
            (278, 304, 2),
            (280, 320, 8),
            (288, 312, 8),
            (296, 328, 8),
        ];
        let mut out = [0; Self::LIBRARY];
        for (from, to, len) in FIELDS {
            out[to..to + len].copy_from_slice(&self.0[from..from + len]);
        }
        out
    }
}

/// What the card is.
///
/// # Safety
/// `hw_ip` is null or a `struct hlthunk_hw_ip_info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_hw_ip_info(fd: c_int, hw_ip: *mut c_void) -> c_int {
    if hw_ip.is_null() {
        return -libc::EINVAL;
    }
    match HwIp::ask(fd) {
        Ok(ip) => {
            // SAFETY: the caller's structure has this size.
            unsafe { hw_ip.cast::<[u8; HwIp::LIBRARY]>().write_unaligned(ip.for_library()) };
            0
        }
        Err(error) => error,
    }
}

/// Free memory, and that of this context.
///
/// # Safety
/// `usage` is null or a `struct hlthunk_dram_usage_info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_dram_usage(fd: c_int, usage: *mut c_void) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ask(fd, op::DRAM_USAGE, usage, 16) }
}

/// State of the card (0 operational, 1 in reset …), or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_status_info(fd: c_int) -> c_int {
    match ask_for::<8>(fd, op::DEVICE_STATUS) {
        Ok([a, b, c, d, ..]) => i32::from_le_bytes([a, b, c, d]),
        Err(error) => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_keep_their_values_in_the_librarys_layout() {
        let mut kernel = [0; HwIp::KERNEL];
        let fields: [(usize, usize, &[u8]); 12] = [
            (8, 8, &0x1001_0018_0000_0000_u64.to_le_bytes()),
            (36, 188, &7u32.to_le_bytes()),
            (44, 232, &48u16.to_le_bytes()),
            (68, 56, &[0xff]),
            (69, 58, &[1]),
            (72, 59, b"version"),
            (200, 192, b"HL225"),
            (224, 224, &0x3000_0000_u64.to_le_bytes()),
            (232, 236, &0xff_u32.to_le_bytes()),
            (248, 264, &0x3000_0000_u64.to_le_bytes()),
            (288, 312, &77u64.to_le_bytes()),
            (296, 328, &78u64.to_le_bytes()),
        ];
        for (from, _, bytes) in fields {
            kernel[from..from + bytes.len()].copy_from_slice(bytes);
        }
        kernel[277] = 1;
        let library = HwIp(kernel).for_library();
        for (_, to, bytes) in fields {
            assert_eq!(&library[to..to + bytes.len()], bytes, "at {to}");
        }
        assert_eq!(library[302], 1);
    }
}
