//! Catches panics at the boundary to C.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::abi::Status;
use crate::ucx::{Level, Ucx};

/// Runs a callback; a panic becomes a logged error and `on_panic`.
pub(crate) fn guarded<T>(
    ucx: &Ucx,
    what: &'static str,
    on_panic: T,
    body: impl FnOnce() -> T,
) -> T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value,
        Err(panic) => {
            let reason = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| String::from("no message"));
            ucx.log(
                Level::Error,
                file!(),
                line!(),
                format_args!("internal error in {what}: {reason} (please report)"),
            );
            // The payload's own destructor must not panic into C either.
            core::mem::forget(panic);
            on_panic
        }
    }
}

/// The same for callbacks that return a status.
pub(crate) fn guarded_status(
    ucx: &Ucx,
    what: &'static str,
    body: impl FnOnce() -> Result<Status, Status>,
) -> Status {
    guarded(ucx, what, Status::IO_ERROR, || body().unwrap_or_else(|error| error))
}
