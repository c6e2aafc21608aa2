//! What went wrong, for people and for programs: one error type with the eight kinds of the
//! product, the device, the operation, the driver's errno and what to do about it.
//!
//! Nothing here is flattened: the errno of a driver call stays readable next to the kind, and the
//! translation from errno to kind is one table (`kind_of`) with a test per row.

use std::fmt;
use std::sync::Arc;

use crate::Remedy;

macro_rules! kinds {
    ($($(#[$about:meta])* $kind:ident = $code:literal $name:literal,)*) => {
        /// The eight kinds of failure, with their public codes and names.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(i32)]
        pub enum ErrorKind { $($(#[$about])* $kind = $code),* }

        impl ErrorKind {
            /// All kinds, in the order of their codes.
            pub const ALL: [ErrorKind; 8] = [$(ErrorKind::$kind),*];

            /// The public code, -1 to -8.
            pub const fn code(self) -> i32 {
                self as i32
            }

            /// The public name, such as `DEVICE_NOT_FOUND`.
            pub const fn name(self) -> &'static str {
                match self { $(ErrorKind::$kind => $name),* }
            }
        }
    };
}

kinds! {
    /// No driver library, no card, or the card went away.
    DeviceNotFound = -1 "DEVICE_NOT_FOUND",
    /// Device memory, device address space, pinned memory or descriptors ran out.
    OutOfMemory = -2 "OUT_OF_MEMORY",
    /// The request makes no sense, or this device cannot do it.
    InvalidParams = -3 "INVALID_PARAMS",
    /// Another process owns the card, or it is in reset.
    DeviceBusy = -4 "DEVICE_BUSY",
    /// The device accepted a copy and did not carry it out.
    DmaFailed = -5 "DMA_FAILED",
    /// The device did not finish in time, or a peer did not answer in time.
    Timeout = -6 "TIMEOUT",
    /// The driver or the system forbids it.
    PermissionDenied = -7 "PERMISSION_DENIED",
    /// Sharing memory with another device or process failed.
    ChannelFailed = -8 "CHANNEL_FAILED",
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
    remedy: Remedy,
    device_lost: bool,
    setting_wrong: bool,
}

/// A card, or something on a card: displayed as its name.
pub(crate) trait OnCard: fmt::Display {
    /// Whether it is a software Gaudi.
    fn is_software(&self) -> bool;
}

impl<T: OnCard> OnCard for Arc<T> {
    fn is_software(&self) -> bool {
        (**self).is_software()
    }
}

impl<T: OnCard> OnCard for &T {
    fn is_software(&self) -> bool {
        (**self).is_software()
    }
}

impl std::error::Error for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.explain(f, self.remedy.words())
    }
}

impl Error {
    /// An error that does not come from a driver call.
    pub(crate) fn new(
        kind: ErrorKind,
        operation: &'static str,
        detail: impl Into<String>,
        remedy: impl Into<Remedy>,
    ) -> Self {
        Self {
            kind,
            device: None,
            operation,
            errno: None,
            detail: detail.into(),
            remedy: remedy.into(),
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
        remedy: impl Into<Remedy>,
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

    /// Names the card the error happened on, unless it was named where the error arose.
    pub(crate) fn on(mut self, card: impl OnCard) -> Self {
        if self.device.is_none() {
            self.device = Some(card.to_string());
        }
        if card.is_software() { self.on_software() } else { self }
    }

    /// The card, or the driver library, is the software Gaudi.
    pub(crate) fn on_software(self) -> Self {
        Self { remedy: self.remedy.for_software(), ..self }
    }

    /// A setting of the user is the cause.
    pub(crate) fn caused_by_setting(mut self) -> Self {
        self.setting_wrong = true;
        self
    }

    /// The open device can no longer be used.
    pub(crate) fn device_is_lost(mut self) -> Self {
        self.device_lost = true;
        self
    }

    /// Adds to what went wrong.
    pub(crate) fn add_detail(&mut self, more: &dyn fmt::Display) {
        self.detail = format!("{}, {more}", self.detail);
    }

    /// Sets the remedy, unless there is one.
    pub(crate) fn advise(self, remedy: impl Into<Remedy>) -> Self {
        if self.remedy == Remedy::None { self.advise_instead(remedy) } else { self }
    }

    /// Sets the remedy, even if there is one.
    pub(crate) fn advise_instead(self, remedy: impl Into<Remedy>) -> Self {
        Self { remedy: remedy.into(), ..self }
    }

    pub(crate) fn set_errno(&mut self, errno: i32) {
        self.errno = Some(errno);
    }

    /// The application has not reported memory at this address.
    pub fn unknown_memory(start: impl fmt::Display) -> Self {
        let detail = format!("no memory that starts at {start} was reported");
        let remedy = "give the address that hlthunk_device_memory_map returned";
        Self::new(ErrorKind::InvalidParams, "withdrawing memory of the application", detail, remedy)
    }

    /// Which of the eight kinds this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The device, as it is named in messages.
    pub fn device(&self) -> Option<&str> {
        self.device.as_deref()
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

    /// What to do about it.
    pub fn remedy(&self) -> Remedy {
        self.remedy
    }

    /// Writes the line that `Display` writes, with these words for the remedy.
    pub fn explain(&self, to: &mut impl fmt::Write, remedy: &str) -> fmt::Result {
        if let Some(device) = &self.device {
            write!(to, "{device}: ")?;
        }
        write!(to, "{} failed [{}]: {}", self.operation, self.kind.name(), self.detail)?;
        if !remedy.is_empty() {
            write!(to, "; {remedy}")?;
        }
        Ok(())
    }

    /// Whether the operation does not exist here (as opposed to: was used wrongly).
    pub fn is_unsupported(&self) -> bool {
        matches!(self.errno, Some(libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS))
    }

    /// Whether something the user set (a variable, a table, a choice of card) is the cause. That is worth a warning;
    /// the mere absence of a card is not.
    pub fn is_setting_wrong(&self) -> bool {
        self.setting_wrong
    }

    /// Whether the open device can no longer be used: it was reset or went away, and this process must close it and
    /// open it again.
    pub fn is_device_lost(&self) -> bool {
        self.device_lost
    }
}

/// What to do when the kernel refuses to open a card that the driver has found.
pub const OPEN_REFUSED: &str = "Linux's own driver opens no card since 6.12 (share/doc/ucx-gaudi/docs/upstream/habanalabs-open.md): use \
                                one with the fix, the vendor's driver or an older kernel";

/// The translation of the driver's errno: which kind it is, and what to do about it.
fn kind_of(phase: Phase, errno: i32) -> (ErrorKind, Remedy) {
    use ErrorKind::*;
    use Phase::*;
    use Remedy::Advice;
    match (phase, errno) {
        (Open, libc::EBUSY) => (DeviceBusy, Remedy::ChooseAnotherCard),
        (Open, libc::EAGAIN) => (
            DeviceBusy,
            Advice(
                "the card is in reset or being released by its last owner: try again in a moment",
            ),
        ),
        (Open, libc::EACCES) => (
            PermissionDenied,
            Advice(
                "this user may not open the device node: check its group and mode under /dev/accel",
            ),
        ),
        (Open, libc::EPERM) => (PermissionDenied, Remedy::CheckHealth),
        // A card that was found, and whose file the kernel refuses to open.
        (Open, libc::EINVAL) => (DeviceNotFound, Advice(OPEN_REFUSED)),
        (Open, libc::ENOENT | libc::ENXIO | libc::ENODEV | libc::EBADF) => {
            (DeviceNotFound, Remedy::CheckCard)
        }
        (_, libc::ENODEV | libc::ENXIO) => (DeviceNotFound, Remedy::CardGone),
        (_, libc::ENOMEM) => (
            OutOfMemory,
            Advice(
                "free device memory, or check the locked-memory limit (ulimit -l) for host memory",
            ),
        ),
        (_, libc::EMFILE | libc::ENFILE) => {
            (OutOfMemory, Advice("raise the limit of open files (ulimit -n)"))
        }
        (_, libc::ETIMEDOUT) => (Timeout, Remedy::NoAnswer),
        (Copy, libc::EBUSY | libc::EIO) => (DmaFailed, Remedy::WasReset),
        (Use, libc::EIO) => (DmaFailed, Remedy::WasReset),
        (Share, libc::EBUSY | libc::EIO) => (ChannelFailed, Remedy::WasReset),
        (_, libc::EBUSY) => (DeviceBusy, Remedy::InReset),
        (_, libc::EPERM | libc::EACCES) => (
            PermissionDenied,
            Advice("the driver does not allow this on this card or to this user"),
        ),
        (_, libc::EOPNOTSUPP | libc::ENOTTY | libc::ENOSYS) => {
            (InvalidParams, Advice("this driver or card cannot do this"))
        }
        (Share, libc::EINVAL) => (
            ChannelFailed,
            Advice(
                "the driver exports whole 4 KiB pages of mapped device memory, and only if the PCI \
                 BAR covers all of it (resizable BAR)",
            ),
        ),
        (Share, _) => (ChannelFailed, Remedy::None),
        (Use | Copy, libc::EFAULT) => {
            (InvalidParams, Advice("the memory is not mapped, or not writable, in this process"))
        }
        (Use | Copy, libc::EINVAL) => (InvalidParams, Remedy::None),
        (Copy, _) => (DmaFailed, Remedy::None),
        (Open | Use, _) => (InvalidParams, Remedy::None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceInfo;

    #[test]
    fn a_software_card_has_its_own_remedies_and_shares_the_others() {
        let real = DeviceInfo::example(0);
        let software = DeviceInfo { is_software: true, ..real.clone() };
        for (phase, errno) in
            [(Phase::Open, libc::EPERM), (Phase::Open, libc::ENODEV), (Phase::Copy, libc::EIO)]
        {
            let error = || Error::os(phase, "opening", "hlthunk_open", errno);
            let words = error().on(&real).remedy().words();
            assert!(words.contains("hl-smi") || words.contains("kernel log"), "{words}");
            assert_eq!(error().on(&software).remedy(), Remedy::CheckSoftwareCard);
        }
        let busy = Error::os(Phase::Open, "opening", "hlthunk_open", libc::EBUSY);
        assert_eq!(busy.on(&software).remedy(), Remedy::ChooseAnotherCard);
    }

    /// Settings are named by the crate that has them: see [`Remedy`].
    #[test]
    fn the_engine_names_no_variable_of_ucx() {
        let mut folders =
            vec![std::path::PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/src"))];
        let prefix = ["UC", "X_"].concat();
        let mut files = 0;
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                files += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!text.contains(&prefix), "{}", path.display());
            }
        }
        assert!(files > 30, "all of them were read");
    }

    #[test]
    fn the_documentation_lists_every_kind() {
        let text = include_str!("../../../../docs/errors.md");
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
            .on(DeviceInfo::example(0));
        let text = error.to_string();
        assert!(!text.contains('\n'));
        for part in [
            "Gaudi2 0 (0000:00:00.0): ",
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
