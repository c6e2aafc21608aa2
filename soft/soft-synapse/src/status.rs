//! `synStatus`.

use core::ffi::CStr;

/// A status other than success; an open set, so a plain number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Status(pub(crate) i32);

impl Status {
    pub(crate) const INVALID_ARGUMENT: Self = Self(1);
    pub(crate) const OUT_OF_HOST_MEMORY: Self = Self(3);
    pub(crate) const NO_DEVICE_FOUND: Self = Self(8);
    pub(crate) const DEVICE_TYPE_MISMATCH: Self = Self(9);
    pub(crate) const UNSUPPORTED: Self = Self(18);
    pub(crate) const DEVICE_ALREADY_ACQUIRED: Self = Self(20);
    pub(crate) const BUSY: Self = Self(22);
    pub(crate) const ALL_RESOURCES_TAKEN: Self = Self(23);
    pub(crate) const FAIL: Self = Self(26);
    pub(crate) const UNINITIALIZED: Self = Self(28);
    pub(crate) const SYNAPSE_TERMINATED: Self = Self(31);
    pub(crate) const INVALID_EVENT_HANDLE: Self = Self(33);
    pub(crate) const MAPPING_NOT_FOUND: Self = Self(34);
    pub(crate) const FAILED_TO_COLLECT_TIME: Self = Self(41);
}

/// Texts of our own, as the real ones are not public facts.
pub(crate) fn describe(status: i32) -> &'static CStr {
    match status {
        0 => c"success",
        1 => c"invalid argument",
        3 => c"out of host memory",
        8 => c"no device found",
        9 => c"device type mismatch",
        18 => c"unsupported",
        20 => c"device already acquired",
        22 => c"busy",
        23 => c"all resources taken",
        26 => c"generic failure",
        28 => c"not initialized",
        31 => c"terminated after a device failure",
        33 => c"invalid event handle",
        34 => c"mapping not found",
        41 => c"failed to collect time",
        _ => c"a status that this software does not give",
    }
}
