//! Questions to the driver.

use std::ffi::{c_int, c_void};

use crate::ioctl::{self, Info};

mod op {
    pub(super) const HW_IP: u32 = 0;
    pub(super) const HW_EVENTS: u32 = 1;
    pub(super) const DRAM_USAGE: u32 = 2;
    pub(super) const HW_IDLE: u32 = 3;
    pub(super) const DEVICE_STATUS: u32 = 4;
    pub(super) const UTILIZATION: u32 = 6;
    pub(super) const HW_EVENTS_AGGREGATE: u32 = 7;
    pub(super) const CLK_RATE: u32 = 8;
    pub(super) const RESET_COUNT: u32 = 9;
    pub(super) const TIME_SYNC: u32 = 10;
    pub(super) const CS_COUNTERS: u32 = 11;
    pub(super) const PCI_COUNTERS: u32 = 12;
    pub(super) const CLK_THROTTLE: u32 = 13;
    pub(super) const SYNC_MANAGER: u32 = 14;
    pub(super) const TOTAL_ENERGY: u32 = 15;
    pub(super) const PLL: u32 = 16;
    pub(super) const POWER: u32 = 17;
    pub(super) const OPEN_STATS: u32 = 18;
    pub(super) const PAGE_SIZES: u32 = 26;
}

/// The state in which a card can be used.
const OPERATIONAL: c_int = 0;

/// Asks, with a place of `size` bytes for the answer.
///
/// # Safety
/// `into` has `size` bytes, or is null.
unsafe fn ask(fd: c_int, op: u32, argument: u32, into: *mut c_void, size: u32) -> c_int {
    if into.is_null() {
        return -libc::EINVAL;
    }
    ioctl::call(fd, &mut Info { pointer: into as u64, size, op, argument, pad: 0 })
}

/// Asks for a few bytes of our own.
fn ask_for<const N: usize>(fd: c_int, op: u32, argument: u32) -> Result<[u8; N], c_int> {
    let mut answer = [0; N];
    // SAFETY: the place has its length.
    match unsafe { ask(fd, op, argument, answer.as_mut_ptr().cast(), N as u32) } {
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
        ask_for(fd, op::HW_IP, 0).map(Self)
    }

    /// PCI device id.
    pub fn device_id(&self) -> u32 {
        u32::from_le_bytes([self.0[32], self.0[33], self.0[34], self.0[35]])
    }

    /// Position in the machine.
    pub fn module_id(&self) -> u32 {
        u32::from_le_bytes([self.0[36], self.0[37], self.0[38], self.0[39]])
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

macro_rules! questions {
    ($($(#[$doc:meta])* $name:ident: $op:ident, $size:literal bytes;)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// `out` is null or has as many bytes as the structure of that name.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name(fd: c_int, out: *mut c_void) -> c_int {
                // SAFETY: the caller's promise.
                unsafe { ask(fd, op::$op, 0, out, $size) }
            }
        )*
    };
}

questions! {
    /// Free memory, and that of this context.
    hlthunk_get_dram_usage: DRAM_USAGE, 16 bytes;
    /// How often and how long it was open.
    hlthunk_get_open_stats: OPEN_STATS, 24 bytes;
    /// Resets, hard and soft.
    hlthunk_get_reset_count_info: RESET_COUNT, 8 bytes;
    /// Time of device and host.
    hlthunk_get_time_sync_info: TIME_SYNC, 16 bytes;
    /// Why submissions were turned away.
    hlthunk_get_cs_counters_info: CS_COUNTERS, 96 bytes;
    /// Throughput and replays of the link.
    hlthunk_get_pci_counters_info: PCI_COUNTERS, 24 bytes;
    /// Whether clocks are throttled.
    hlthunk_get_clk_throttle_info: CLK_THROTTLE, 40 bytes;
    /// Energy since the driver was loaded.
    hlthunk_get_total_energy_consumption_info: TOTAL_ENERGY, 8 bytes;
    /// Power at the moment.
    hlthunk_get_power_info: POWER, 8 bytes;
    /// Page sizes that an allocation may ask for.
    hlthunk_get_dev_memalloc_page_orders: PAGE_SIZES, 8 bytes;
    /// Which engines are busy.
    hlthunk_get_busy_engines_mask: HW_IDLE, 40 bytes;
}

/// First sync object, monitor and completion queue of a dcore that users may take.
///
/// # Safety
/// `info` is null or a `struct hlthunk_sync_manager_info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_sync_manager_info(
    fd: c_int,
    dcore_id: c_int,
    info: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ask(fd, op::SYNC_MANAGER, dcore_id as u32, info, 16) }
}

/// Frequencies of a PLL.
///
/// # Safety
/// `frequency` is null or a `struct hlthunk_pll_frequency_info`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_pll_frequency(
    fd: c_int,
    index: u32,
    frequency: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { ask(fd, op::PLL, index, frequency, 8) }
}

/// Counts of hardware events since the last reset, or since the driver was loaded.
///
/// # Safety
/// `events` is null or has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_hw_events_arr(
    fd: c_int,
    aggregate: bool,
    size: u32,
    events: *mut u32,
) -> c_int {
    let op = if aggregate { op::HW_EVENTS_AGGREGATE } else { op::HW_EVENTS };
    // SAFETY: the caller's promise.
    unsafe { ask(fd, op, 0, events.cast(), size) }
}

/// Clock now, and the highest, in MHz.
///
/// # Safety
/// The pointers are null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_clk_rate(fd: c_int, now: *mut u32, most: *mut u32) -> c_int {
    // SAFETY: the caller's promise.
    let (Some(now), Some(most)) = (unsafe { (now.as_mut(), most.as_mut()) }) else {
        return -libc::EINVAL;
    };
    match ask_for::<8>(fd, op::CLK_RATE, 0) {
        Ok([a, b, c, d, e, f, g, h]) => {
            *now = u32::from_le_bytes([a, b, c, d]);
            *most = u32::from_le_bytes([e, f, g, h]);
            0
        }
        Err(error) => error,
    }
}

/// How busy the card was over a time, in percent.
///
/// # Safety
/// `rate` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_device_utilization(
    fd: c_int,
    period_ms: u32,
    rate: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    let Some(rate) = (unsafe { rate.as_mut() }) else { return -libc::EINVAL };
    match ask_for::<8>(fd, op::UTILIZATION, period_ms) {
        Ok([a, b, c, d, ..]) => {
            *rate = u32::from_le_bytes([a, b, c, d]);
            0
        }
        Err(error) => error,
    }
}

/// State of the card (0 operational, 1 in reset …), or a negative errno.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_get_device_status_info(fd: c_int) -> c_int {
    match ask_for::<8>(fd, op::DEVICE_STATUS, 0) {
        Ok([a, b, c, d, ..]) => i32::from_le_bytes([a, b, c, d]),
        Err(error) => error,
    }
}

/// `struct hlthunk_hw_asic_status`, with the answers to other questions in it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct AsicStatus {
    throttle: [u64; 5],
    open_stats: [u64; 3],
    power: u64,
    status: i32,
    seconds: u64,
    valid: u8,
}

const _: () = assert!(size_of::<AsicStatus>() == 96);

/// State, throttling, opens and power at once.
///
/// # Safety
/// `status` is null or valid for writing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_hw_asic_status(fd: c_int, status: *mut AsicStatus) -> c_int {
    // SAFETY: the caller's promise.
    let Some(out) = (unsafe { status.as_mut() }) else { return -libc::EINVAL };
    out.valid = 0;
    out.status = hlthunk_get_device_status_info(fd);
    if out.status < 0 {
        return out.status;
    }
    out.valid = 1;
    let mut questions = vec![
        (op::CLK_THROTTLE, (&raw mut out.throttle).cast(), 40),
        (op::OPEN_STATS, (&raw mut out.open_stats).cast(), 24),
    ];
    if out.status == OPERATIONAL {
        questions.push((op::POWER, (&raw mut out.power).cast(), 8));
    }
    for (op, into, size) in questions {
        // SAFETY: each place has that size.
        match unsafe { ask(fd, op, 0, into, size) } {
            0 => {}
            error => return error,
        }
    }
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    out.seconds = now.map_or(0, |time| time.as_secs());
    0
}

/// Whether no engine works.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_is_device_idle(fd: c_int) -> bool {
    ask_for::<40>(fd, op::HW_IDLE, 0).is_ok_and(|answer| answer[..4] != [0; 4])
}

/// What the driver remembers of an event: the last open (0), a timeout (1), an access that was refused (2), an
/// unknown packet (3), errors of hardware (4) and firmware (5).
///
/// # Safety
/// `record` is null or has room for the structure of that event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_event_record(
    fd: c_int,
    id: c_int,
    record: *mut c_void,
) -> c_int {
    let (op, size) = match id {
        0 => (23, 8),
        1 => (24, 16),
        2 => (25, 280),
        3 => (31, 288),
        4 => (36, 16),
        5 => (37, 16),
        _ => return -libc::EINVAL,
    };
    // SAFETY: the caller's promise.
    unsafe { ask(fd, op, 0, record, size) }
}

/// Any question, as the kernel takes it.
///
/// # Safety
/// `info` is null or a `struct hl_info_args` whose pointer has as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hlthunk_get_info(fd: c_int, info: *mut Info) -> c_int {
    // SAFETY: the caller's promise.
    match unsafe { info.as_mut() } {
        Some(info) => ioctl::call(fd, info),
        None => -libc::EINVAL,
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
