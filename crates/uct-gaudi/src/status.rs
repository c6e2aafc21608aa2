//! Engine errors as UCX statuses.

use gaudi::{Error, ErrorKind};
use uct::Status;

/// The status that UCX gets for an error of the engine.
pub(crate) fn of(error: &Error) -> Status {
    if error.is_unsupported() {
        return Status::UNSUPPORTED;
    }
    if error.is_device_lost() {
        // Not "busy": the descriptor we hold is dead, and trying again would never succeed.
        return Status::IO_ERROR;
    }
    match error.kind() {
        ErrorKind::DeviceNotFound => Status::NO_DEVICE,
        ErrorKind::OutOfMemory => Status::NO_MEMORY,
        ErrorKind::InvalidParams => Status::INVALID_PARAM,
        ErrorKind::DeviceBusy => Status::BUSY,
        ErrorKind::DmaFailed | ErrorKind::ChannelFailed => Status::IO_ERROR,
        ErrorKind::Timeout => Status::TIMED_OUT,
        ErrorKind::PermissionDenied => Status::REJECTED,
    }
}
