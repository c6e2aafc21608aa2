//! Constants as text and rates as numbers.

use core::ffi::{CStr, c_char, c_int};

fn name(names: &[&'static CStr], index: c_int, unknown: &'static CStr) -> *const c_char {
    usize::try_from(index).ok().and_then(|index| names.get(index)).unwrap_or(&unknown).as_ptr()
}

/// Name of a completion status.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    #[rustfmt::skip] // a table
    const NAMES: [&CStr; 24] = [
        c"success", c"local length error", c"local QP operation error",
        c"local EE context operation error", c"local protection error",
        c"Work Request Flushed Error", c"memory management operation error", c"bad response error",
        c"local access error", c"remote invalid request error", c"remote access error",
        c"remote operation error", c"transport retry counter exceeded",
        c"RNR retry counter exceeded", c"local RDD violation error", c"remote invalid RD request",
        c"aborted error", c"invalid EE context number", c"invalid EE context state",
        c"fatal error", c"response timeout error", c"general error", c"TM error",
        c"TM software rendezvous",
    ];
    name(&NAMES, status, c"unknown")
}

/// Name of a node type.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(kind: c_int) -> *const c_char {
    #[rustfmt::skip] // a table
    const NAMES: [&CStr; 8] = [
        c"unknown", c"InfiniBand channel adapter", c"InfiniBand switch", c"InfiniBand router",
        c"iWARP NIC", c"usNIC", c"usNIC UDP", c"unspecified",
    ];
    name(&NAMES, kind, c"unknown")
}

/// Name of a port's state.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    const NAMES: [&CStr; 6] =
        [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];
    name(&NAMES, state, c"unknown")
}

/// Name of an asynchronous event.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: c_int) -> *const c_char {
    #[rustfmt::skip] // a table
    const NAMES: [&CStr; 20] = [
        c"CQ error", c"local work queue catastrophic error",
        c"invalid request local work queue error", c"local access violation work queue error",
        c"communication established", c"send queue drained", c"path migrated",
        c"path migration request error", c"local catastrophic error", c"port active",
        c"port error", c"LID change", c"P_Key change", c"SM change", c"SRQ catastrophic error",
        c"SRQ limit reached", c"last WQE reached", c"client reregistration", c"GID table change",
        c"WQ fatal",
    ];
    name(&NAMES, event, c"unknown")
}

/// Code, multiple of 2.5 Gb/s, Mb/s.
#[rustfmt::skip] // a table
const RATES: [(c_int, c_int, c_int); 19] = [
    (2, 1, 2500), (5, 2, 5000), (3, 4, 10000), (6, 8, 20000), (4, 12, 30000), (7, 16, 40000),
    (8, 24, 60000), (9, 32, 80000), (10, 48, 120_000), (11, 6, 14062), (12, 22, 56250),
    (13, 45, 112_500), (14, 67, 168_750), (15, 10, 25781), (16, 40, 103_125), (17, 80, 206_250),
    (18, 120, 309_375), (19, 11, 28125), (20, 20, 53125),
];

/// A rate as a multiple of 2.5 Gb/s.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.1)
}

/// The rate that is a multiple of 2.5 Gb/s.
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(multiple: c_int) -> c_int {
    RATES.iter().find(|entry| entry.1 == multiple).map_or(0, |entry| entry.0)
}

/// A rate in Mb/s.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.2)
}

/// The rate of so many Mb/s.
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|entry| entry.2 == mbps).map_or(0, |entry| entry.0)
}
