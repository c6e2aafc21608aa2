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
    device_lost: bool,
    setting_wrong: bool,
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(device) = &self.device {
            write!(f, "{device}: ")?;
        }
        write!(f, "{} failed [{}]: {}", self.operation, self.kind.name(), self.detail)?;
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
        Self {
            kind,
            device: None,
            operation,
            errno: None,
            detail: detail.into(),
            remedy,
            device_lost: false,
            setting_wrong: false,
        }
    }

    /// A driver call that failed while doing `operation`.
    pub(crate) fn driver(phase: Phase, operation: &'static str, error: hl_thunk::Error) -> Self {
        Self::os(phase, operation, error.call, error.errno)
    }

    /// A call into the driver or the system that failed while doing `operation`.
    pub(crate) fn os(phase: Phase, operation: &'static str, call: &str, errno: i32) -> Self {
        let (kind, remedy) = kind_of(phase, errno);
        Self {
            kind,
            device: None,
            operation,
            errno: Some(errno),
            detail: format!("{call}: {}", std::io::Error::from_raw_os_error(errno)),
            remedy,
            device_lost: phase != Phase::Open
                && matches!(errno, libc::EBUSY | libc::EIO | libc::ENODEV | libc::ETIMEDOUT),
            setting_wrong: false,
        }
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

    /// This process is a forked child of the one that opened the card.
    pub(crate) fn forked(operation: &'static str) -> Self {
        Self::new(
            ErrorKind::PermissionDenied,
            operation,
            "this process was forked from the one that opened the card, which cannot be shared",
            "open cards after the fork, or start the child as a new program (exec, or Python's \"spawn\")",
        )
    }

    /// Names the device the error happened on, unless it was named where the error arose.
    pub(crate) fn on(mut self, device: impl fmt::Display) -> Self {
        let device = self.device.get_or_insert_with(|| device.to_string());
        if device.starts_with("software ") { self.on_software() } else { self }
    }

    /// The error is the software Gaudi's: it has neither the vendor's tool nor a kernel log.
    pub(crate) fn on_software(self) -> Self {
        if ["hl-smi", "kernel log"].iter().any(|advice| self.remedy.contains(advice)) {
            let remedy = "it is a software Gaudi: look at SOFT_GAUDI_NODE, SOFT_GAUDI_DEVICES and the \
                          faults that were ordered";
            return self.advise_instead(remedy);
        }
        self
    }

    /// Says that the user's settings are the cause.
    pub(crate) fn blame_setting(mut self) -> Self {
        self.setting_wrong = true;
        self
    }

    /// Says more about what went wrong.
    pub(crate) fn add_detail(&mut self, more: &dyn fmt::Display) {
        self.detail = format!("{}, {more}", self.detail);
    }

    /// Says what to do, where the errno alone did not.
    pub(crate) fn advise(mut self, remedy: &'static str) -> Self {
        if self.remedy.is_empty() {
            self.remedy = remedy;
        }
        self
    }

    /// Says what to do here, whatever the errno alone would advise.
    pub(crate) fn advise_instead(self, remedy: &'static str) -> Self {
        Self { remedy, ..self }
    }

    pub(crate) fn set_errno(&mut self, errno: i32) {
        self.errno = Some(errno);
    }

    /// Nobody mapped anything at this address, as far as we were told.
    pub fn unknown_memory(start: impl fmt::Display) -> Self {
        let detail = format!("no memory that starts at {start} was noted");
        let remedy = "give the address that hlthunk_device_memory_map returned";
        Self::new(ErrorKind::InvalidParams, "forgetting memory of the application", detail, remedy)
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

    /// The errno of the driver call, unchanged; `EOPNOTSUPP` where there is no such call, `ESRCH` where a
    /// peer has ended.
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
        matches!(self.errno, Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS))
    }

    /// Whether something the user set (a variable, a table, a choice of card) is the cause: worth a
    /// warning, where the mere absence of a card is not.
    pub fn is_setting_wrong(&self) -> bool {
        self.setting_wrong
    }

    /// Whether the open device is of no more use: it was reset or went away, and this process must
    /// close it and open it again.
    pub fn is_device_lost(&self) -> bool {
        self.device_lost
    }
}

/// The translation of the driver's errno: which kind it is, and what to do about it.
fn kind_of(phase: Phase, errno: i32) -> (ErrorKind, &'static str) {
    use ErrorKind::*;
    use Phase::*;
    match (phase, errno) {
        (Open, libc::EBUSY) => (
            DeviceBusy,
            "wait for the owner or end it, or choose another card (UCX_GAUDI_COPY_DEVICE)",
        ),
        (Open, libc::EAGAIN) => (
            DeviceBusy,
            "the card is in reset or being released by its last owner: try again in a moment",
        ),
        (Open, libc::EACCES) => (
            PermissionDenied,
            "this user may not open the device node: check its group and mode under /dev/accel",
        ),
        (Open, libc::EPERM) => {
            (PermissionDenied, "the card is not operational: look at hl-smi and the kernel log")
        }
        (Open, libc::EINVAL | libc::ENOENT | libc::ENXIO | libc::ENODEV | libc::EBADF) => {
            (DeviceNotFound, "check with hl-smi that the card is there and the driver is loaded")
        }
        (_, libc::ENODEV | libc::ENXIO) => {
            (DeviceNotFound, "the card went away: look at the kernel log")
        }
        (_, libc::ENOMEM) => (
            OutOfMemory,
            "free device memory, or check the locked-memory limit (ulimit -l) for host memory",
        ),
        (_, libc::EMFILE | libc::ENFILE) => {
            (OutOfMemory, "raise the limit of open files (ulimit -n)")
        }
        (_, libc::ETIMEDOUT) => (
            Timeout,
            "the card did not answer and will be reset: look at the kernel log, then restart",
        ),
        (Copy, libc::EBUSY | libc::EIO) => {
            (DmaFailed, "the card was reset: look at the kernel log, then restart")
        }
        (Use, libc::EIO) => (DmaFailed, "the card was reset: look at the kernel log, then restart"),
        (Share, libc::EBUSY | libc::EIO) => {
            (ChannelFailed, "the card was reset: look at the kernel log, then restart")
        }
        (_, libc::EBUSY) => {
            (DeviceBusy, "the card is being reset: look at the kernel log, then restart")
        }
        (_, libc::EPERM | libc::EACCES) => {
            (PermissionDenied, "the driver does not allow this on this card or to this user")
        }
        (_, libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS) => {
            (InvalidParams, "this driver or card cannot do this")
        }
        (Share, libc::EINVAL) => (
            ChannelFailed,
            "the driver exports whole 4 KiB pages of mapped device memory, and only if the PCI \
             BAR covers all of it (resizable BAR)",
        ),
        (Share, _) => (ChannelFailed, ""),
        (Use | Copy, libc::EFAULT) => {
            (InvalidParams, "the memory is not mapped, or not writable, in this process")
        }
        (Use | Copy, libc::EINVAL) => (InvalidParams, ""),
        (Copy, _) => (DmaFailed, ""),
        (Open | Use, _) => (InvalidParams, ""),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_sent_to_the_vendors_tools_because_of_a_software_card() {
        for (phase, errno) in
            [(Phase::Open, libc::EPERM), (Phase::Open, libc::ENODEV), (Phase::Copy, libc::EIO)]
        {
            let error = |card: &str| Error::os(phase, "opening", "hlthunk_open", errno).on(card);
            let advice = |text: String| text.contains("hl-smi") || text.contains("kernel log");
            assert!(advice(error("Gaudi2 0 (0000:33:00.0)").to_string()));
            let text = error("software Gaudi2 0 (0000:33:00.0)").to_string();
            assert!(text.contains("SOFT_GAUDI_NODE") && !advice(text.clone()), "{text}");
        }
        let busy = Error::os(Phase::Open, "opening", "hlthunk_open", libc::EBUSY);
        assert_eq!(busy.clone().on("software Gaudi2 0").remedy(), busy.remedy());
    }

    #[test]
    fn codes_and_names_are_the_public_ones() {
        let names = [
            "DEVICE_NOT_FOUND",
            "OUT_OF_MEMORY",
            "INVALID_PARAMS",
            "DEVICE_BUSY",
            "DMA_FAILED",
            "TIMEOUT",
            "PERMISSION_DENIED",
            "CHANNEL_FAILED",
        ];
        for (at, kind) in ErrorKind::ALL.into_iter().enumerate() {
            assert_eq!(kind.code(), -1 - at as i32);
            assert_eq!(kind.name(), names[at]);
        }
    }

    #[test]
    fn the_documentation_lists_every_kind() {
        let text = include_str!("../../../docs/errors.md");
        for kind in ErrorKind::ALL {
            let row = format!("\n| {} | `{}` | ", kind.code(), kind.name());
            assert!(text.contains(&row), "{row}");
        }
    }

    #[test]
    fn every_row_of_the_errno_table() {
        use ErrorKind::*;
        use Phase::*;
        let rows = [
            (Open, libc::EBUSY, DeviceBusy, false),
            (Open, libc::EAGAIN, DeviceBusy, false),
            (Open, libc::EACCES, PermissionDenied, false),
            (Open, libc::EPERM, PermissionDenied, false),
            (Open, libc::EINVAL, DeviceNotFound, false),
            (Open, libc::ENOENT, DeviceNotFound, false),
            (Open, libc::ENXIO, DeviceNotFound, false),
            (Open, libc::ENODEV, DeviceNotFound, false),
            (Open, libc::EBADF, DeviceNotFound, false),
            (Open, libc::ENOMEM, OutOfMemory, false),
            (Open, libc::EMFILE, OutOfMemory, false),
            (Open, libc::EILSEQ, InvalidParams, false),
            (Use, libc::ENODEV, DeviceNotFound, true),
            (Use, libc::ENXIO, DeviceNotFound, false),
            (Use, libc::ENOMEM, OutOfMemory, false),
            (Use, libc::ENFILE, OutOfMemory, false),
            (Use, libc::EBUSY, DeviceBusy, true),
            (Use, libc::EIO, DmaFailed, true),
            (Use, libc::EPERM, PermissionDenied, false),
            (Use, libc::EACCES, PermissionDenied, false),
            (Use, libc::EOPNOTSUPP, InvalidParams, false),
            (Use, libc::ENOTTY, InvalidParams, false),
            (Use, libc::ENOSYS, InvalidParams, false),
            (Use, libc::EINVAL, InvalidParams, false),
            (Use, libc::EFAULT, InvalidParams, false),
            (Use, libc::ETIMEDOUT, Timeout, true),
            (Copy, libc::EBUSY, DmaFailed, true),
            (Copy, libc::EIO, DmaFailed, true),
            (Copy, libc::ETIMEDOUT, Timeout, true),
            (Copy, libc::EINVAL, InvalidParams, false),
            (Copy, libc::EFAULT, InvalidParams, false),
            (Copy, libc::ENOEXEC, DmaFailed, false),
            (Share, libc::EINVAL, ChannelFailed, false),
            (Share, libc::EBUSY, ChannelFailed, true),
            (Share, libc::EIO, ChannelFailed, true),
            (Share, libc::EMFILE, OutOfMemory, false),
            (Share, libc::EPERM, PermissionDenied, false),
            (Share, libc::EFAULT, ChannelFailed, false),
        ];
        for (phase, errno, kind, lost) in rows {
            let error = Error::os(phase, "testing", "call", errno);
            assert_eq!(error.kind(), kind, "{phase:?} {errno}");
            assert_eq!(error.errno(), Some(errno));
            assert_eq!(error.is_device_lost(), lost, "{phase:?} {errno}");
        }
    }

    #[test]
    fn the_text_is_one_line_with_device_operation_cause_and_remedy() {
        let error = Error::os(Phase::Open, "opening the card", "hlthunk_open", libc::EBUSY)
            .on("Gaudi2 0 (0000:33:00.0)");
        let text = error.to_string();
        assert!(!text.contains('\n'));
        for part in [
            "Gaudi2 0 (0000:33:00.0): ",
            "opening the card",
            "DEVICE_BUSY",
            "hlthunk_open",
            "16",
            "choose another card",
        ] {
            assert!(text.contains(part), "{part:?} missing in {text:?}");
        }
    }
}
