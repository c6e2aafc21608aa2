//! What libSynapse answers, and what that means for a guest.

use std::fmt;

/// A `synStatus`. Numbers that are not in the table are newer than it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u32);

impl Status {
    /// Done.
    pub const SUCCESS: Status = Status(0);
    /// An argument, or a handle that is not (any more) valid.
    pub const INVALID_ARGUMENT: Status = Status(1);
    /// The host is out of memory.
    pub const OUT_OF_HOST_MEMORY: Status = Status(3);
    /// Documented for a pool that is exhausted; the library answers [`Status::FAIL`] instead.
    pub const OUT_OF_DEVICE_MEMORY: Status = Status(4);
    /// The work was not accepted.
    pub const COMMAND_SUBMISSION_FAILURE: Status = Status(7);
    /// No card: what `synDeviceRelease` answers where there is none.
    pub const NO_DEVICE_FOUND: Status = Status(8);
    /// The card was reset.
    pub const DEVICE_RESET: Status = Status(17);
    /// Not in this library.
    pub const UNSUPPORTED: Status = Status(18);
    /// Still running; not an error.
    pub const BUSY: Status = Status(22);
    /// A kind of resource is used up, such as events.
    pub const ALL_RESOURCES_TAKEN: Status = Status(23);
    /// Any failure, including "no card is acquired" and "no device memory is left".
    pub const FAIL: Status = Status(26);
    /// The library, or the card, is out of some resource.
    pub const OUT_OF_RESOURCES: Status = Status(27);
    /// `synInitialize` was not called, or `synDestroy` was.
    pub const UNINITIALIZED: Status = Status(28);
    /// The card has failed for good.
    pub const SYNAPSE_TERMINATED: Status = Status(31);
    /// A check on the card has failed.
    pub const ASSERT_ASYNC: Status = Status(32);
    /// The event is not valid (any more).
    pub const INVALID_EVENT_HANDLE: Status = Status(33);
    /// The host memory of a copy is not mapped for the card.
    pub const MAPPING_NOT_FOUND: Status = Status(34);
    /// The card did not answer in time.
    pub const TIMEOUT: Status = Status(42);

    /// The name in the library's header, without its prefix.
    pub fn name(self) -> Option<&'static str> {
        const NAMES: &str = "Success InvalidArgument CbFull OutOfHostMemory OutOfDeviceMemory \
             ObjectAlreadyInitialized ObjectNotInitialized CommandSubmissionFailure \
             NoDeviceFound DeviceTypeMismatch FailedToInitializeCb FailedToFreeCb \
             FailedToMapCb FailedToUnmapCb FailedToAllocateDeviceMemory \
             FailedToFreeDeviceMemory FailedNotEnoughDevicesFound DeviceReset Unsupported \
             WrongParamsFile DeviceAlreadyAcquired NameIsAlreadyUsed Busy AllResourcesTaken \
             Unavailable InvalidTensorDimensions Fail OutOfResources Uninitialized \
             AlreadyInitialized FailedSectionValidation SynapseTerminated AssertAsync \
             InvalidEventHandle MappingNotFound FailedDynamicPatching FailedStaticPatching \
             FailedToSubmitWorkload InvalidSectionsDefinition InvalidTensorProperties \
             FailHccl FailedToCollectTime Timeout ResourceBadUsage NullPtr FailFuser \
             FailComplexGuid FailTpcKernels";
        NAMES.split(' ').nth(self.0 as usize)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "status {} ({name})", self.0),
            None => write!(f, "unknown status {}", self.0),
        }
    }
}

/// A call that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// The library has no such function.
    Missing(&'static str),
    /// The function refused.
    Refused {
        /// Its name.
        call: &'static str,
        /// Its answer.
        status: Status,
    },
    /// A function of libscal refused; libscal has its own codes.
    Scal {
        /// Its name.
        call: &'static str,
        /// Its answer, negative.
        code: i32,
    },
}

impl CallError {
    /// The answer of libSynapse, if one came.
    pub fn status(&self) -> Option<Status> {
        match *self {
            CallError::Refused { status, .. } => Some(status),
            CallError::Missing(_) | CallError::Scal { .. } => None,
        }
    }
}

impl std::error::Error for CallError {}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CallError::Missing(call) => write!(f, "the library in this process has no {call}"),
            CallError::Refused { call, status } => write!(f, "{call}: {status}"),
            CallError::Scal { call, code } => write!(f, "{call}: {code}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_names_of_the_header_and_new_ones_are_printed() {
        for (status, name) in [
            (Status::BUSY, "Busy"),
            (Status::FAIL, "Fail"),
            (Status::UNINITIALIZED, "Uninitialized"),
            (Status::SYNAPSE_TERMINATED, "SynapseTerminated"),
            (Status::MAPPING_NOT_FOUND, "MappingNotFound"),
            (Status::TIMEOUT, "Timeout"),
            (Status(47), "FailTpcKernels"),
        ] {
            assert_eq!(status.name(), Some(name));
        }
        assert_eq!(Status(48).to_string(), "unknown status 48");
        let refused = CallError::Refused { call: "synDeviceMalloc", status: Status::FAIL };
        assert_eq!(refused.to_string(), "synDeviceMalloc: status 26 (Fail)");
    }
}
