//! Engine errors as UCX statuses: one table.

use gaudi::{Error, ErrorKind};
use uct::Status;

/// The status that UCX gets for an error of the engine.
pub(crate) fn of(error: &Error) -> Status {
    translate(error.kind(), error.is_unsupported(), error.is_device_lost())
}

fn translate(kind: ErrorKind, unsupported: bool, device_lost: bool) -> Status {
    match kind {
        _ if unsupported => Status::UNSUPPORTED,
        // Not "busy": the descriptor we hold is dead, and trying again would never succeed.
        _ if device_lost => Status::IO_ERROR,
        ErrorKind::DeviceNotFound => Status::NO_DEVICE,
        ErrorKind::OutOfMemory => Status::NO_MEMORY,
        ErrorKind::InvalidParams => Status::INVALID_PARAM,
        ErrorKind::DeviceBusy => Status::BUSY,
        ErrorKind::DmaFailed => Status::IO_ERROR,
        ErrorKind::Timeout => Status::TIMED_OUT,
        ErrorKind::PermissionDenied => Status::REJECTED,
        ErrorKind::ChannelFailed => Status::IO_ERROR,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_error_has_its_status() {
        for (kind, status) in [
            (ErrorKind::DeviceNotFound, Status::NO_DEVICE),
            (ErrorKind::OutOfMemory, Status::NO_MEMORY),
            (ErrorKind::InvalidParams, Status::INVALID_PARAM),
            (ErrorKind::DeviceBusy, Status::BUSY),
            (ErrorKind::DmaFailed, Status::IO_ERROR),
            (ErrorKind::Timeout, Status::TIMED_OUT),
            (ErrorKind::PermissionDenied, Status::REJECTED),
            (ErrorKind::ChannelFailed, Status::IO_ERROR),
        ] {
            assert_eq!(translate(kind, false, false), status, "{}", kind.name());
            assert_eq!(translate(kind, true, false), Status::UNSUPPORTED, "{}", kind.name());
            assert_eq!(translate(kind, false, true), Status::IO_ERROR, "{}", kind.name());
        }
        assert_eq!(ErrorKind::ALL.len(), 8, "a new kind needs a row above");
    }

    #[test]
    fn an_error_of_the_engine_is_translated_by_its_kind() {
        let error = "nonsense".parse::<gaudi::DeviceChoice>().expect_err("names no device");
        assert_eq!(of(&error), Status::INVALID_PARAM);
    }
}
