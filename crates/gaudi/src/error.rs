//! What went wrong, for people and for programs: one error type with the eight kinds of the
//! product, the device, the operation, the driver's errno and what to do about it.
//!
//! Nothing here is flattened: the errno a driver call gave stays readable beside the kind, and the
//! translation from errno to kind is one table (`kind_of`) with a test per row.

use std::fmt;

/// The eight kinds of failure, with their public codes and names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum ErrorKind {
    /// No driver library, no card, or the card went away.
    DeviceNotFound = -1,
    /// Device memory, device address space, pinned memory or descriptors ran out.
    OutOfMemory = -2,
    /// The request makes no sense, or this device cannot do it.
    InvalidParams = -3,
    /// Another process owns the card, or it is in reset.
    DeviceBusy = -4,
    /// The device accepted a copy and did not carry it out.
    DmaFailed = -5,
    /// The device did not finish in time.
    Timeout = -6,
    /// The driver or the system forbids it.
    PermissionDenied = -7,
    /// Sharing memory with another device or process failed.
    ChannelFailed = -8,
}

impl ErrorKind {
    /// All kinds, in the order of their codes.
    pub const ALL: [ErrorKind; 8] = [
        ErrorKind::DeviceNotFound,
        ErrorKind::OutOfMemory,
        ErrorKind::InvalidParams,
        ErrorKind::DeviceBusy,
        ErrorKind::DmaFailed,
        ErrorKind::Timeout,
        ErrorKind::PermissionDenied,
        ErrorKind::ChannelFailed,
    ];

    /// The public code, -1 to -8.
    pub const fn code(self) -> i32 {
        self as i32
    }

    /// The public name, such as `DEVICE_NOT_FOUND`.
    pub const fn name(self) -> &'static str {
        match self {
            ErrorKind::DeviceNotFound => "DEVICE_NOT_FOUND",
            ErrorKind::OutOfMemory => "OUT_OF_MEMORY",
            ErrorKind::InvalidParams => "INVALID_PARAMS",
            ErrorKind::DeviceBusy => "DEVICE_BUSY",
            ErrorKind::DmaFailed => "DMA_FAILED",
            ErrorKind::Timeout => "TIMEOUT",
            ErrorKind::PermissionDenied => "PERMISSION_DENIED",
            ErrorKind::ChannelFailed => "CHANNEL_FAILED",
        }
    }
}

/// What the driver was asked to do when it failed; the same errno means different things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "the engine behind the API follows")]
pub(crate) enum Phase {
    /// Opening a compute or control node.
    Open,
    /// Anything on a device that is already open, except the phases below.
    Use,
    /// Submitting a copy or waiting for one.
    Copy,
    /// Exporting or importing a dma-buf.
    Share,
}

/// A failure of the engine.
///
/// `Display` is one line for people. Programs look at [`Error::kind`] and [`Error::errno`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    kind: ErrorKind,
    device: Option<String>,
    operation: &'static str,
    errno: Option<i32>,
    detail: String,
    remedy: &'static str,
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.device {
            write!(f, "{device}: ")?;
        }
        write!(f, "{} failed ({}", self.operation, self.kind.name())?;
        if let Some(errno) = self.errno {
            write!(f, ", errno {errno}")?;
        }
        write!(f, "): {}", self.detail)?;
        if !self.remedy.is_empty() {
            write!(f, "; {}", self.remedy)?;
        }
        Ok(())
    }
}

impl Error {
    /// An error that does not come from a driver call.
    pub(crate) fn new(
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self { kind, device: None, operation, errno: None, detail: detail.into(), remedy }
    }

    /// An operation that this device, generation or driver does not have.
    pub(crate) fn unsupported(
        operation: &'static str,
        detail: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        let mut error = Self::new(ErrorKind::InvalidParams, operation, detail, remedy);
        error.errno = Some(libc::EOPNOTSUPP);
        error
    }

    /// Names the device the error happened on.
    #[allow(dead_code, reason = "the engine behind the API follows")]
    pub(crate) fn on(mut self, device: impl fmt::Display) -> Self {
        self.device = Some(device.to_string());
        self
    }

    /// Which of the eight kinds this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The device, as it is named in messages.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
    }

    /// What was being done.
    pub fn operation(&self) -> &'static str {
        self.operation
    }

    /// The errno of the driver call, unchanged.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }

    /// What exactly went wrong.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// What to do about it; may be empty.
    pub fn remedy(&self) -> &'static str {
        self.remedy
    }

    /// Whether the operation does not exist here (as opposed to: was used wrongly).
    pub fn is_unsupported(&self) -> bool {
        matches!(self.errno, Some(libc::EOPNOTSUPP | libc::ENOTTY))
    }
}
