//! Engine errors for UCX: as a status, and as a line for the log with the names of UCX's variables.

use std::fmt;

use gaudi::{Error, ErrorKind, Remedy};
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

/// The error as a line for users of UCX: its remedy names what they can set or call.
pub(crate) fn explain(error: &Error) -> impl fmt::Display {
    struct Explained<'a>(&'a Error);
    impl fmt::Display for Explained<'_> {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            self.0.explain(f, words(self.0.remedy()))
        }
    }
    Explained(error)
}

fn words(remedy: Remedy) -> &'static str {
    match remedy {
        Remedy::ChooseAnotherCard => {
            "wait for the owner or end it, or choose another card (UCX_GAUDI_COPY_DEVICE)"
        }
        Remedy::LendCard => {
            "call ucx_gaudi_lend(fd) with its descriptor, or set UCX_GAUDI_COPY_ADOPT=y"
        }
        Remedy::PermitRegisterAccess => "set UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS=yes",
        Remedy::ReportLength => "report its length with ucx_gaudi_memory_mapped()",
        others => others.words(),
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
    fn remedies_that_the_user_of_ucx_can_take_name_the_variable_or_the_function() {
        for (remedy, name) in [
            (Remedy::ChooseAnotherCard, "UCX_GAUDI_COPY_DEVICE"),
            (Remedy::LendCard, "ucx_gaudi_lend(fd)"),
            (Remedy::PermitRegisterAccess, "UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS"),
            (Remedy::ReportLength, "ucx_gaudi_memory_mapped()"),
        ] {
            assert!(words(remedy).contains(name), "{remedy:?}");
            assert!(!remedy.words().contains("UCX") && !remedy.words().contains("ucx"));
        }
        assert_eq!(words(Remedy::WasReset), Remedy::WasReset.words());
        let error = "nonsense".parse::<gaudi::DeviceChoice>().expect_err("names no device");
        assert_eq!(explain(&error).to_string(), error.to_string());
    }

    #[test]
    fn an_error_of_the_engine_is_translated_by_its_kind() {
        let error = "nonsense".parse::<gaudi::DeviceChoice>().expect_err("names no device");
        assert_eq!(of(&error), Status::INVALID_PARAM);
    }
}
