//! A card that the application opened. [`Driver`](super::driver::Driver) uses it through our own descriptor of the
//! same opening. If the application has lent the card, `Driver` uses it like a card of our own; otherwise only for
//! what does not disturb the application. `runtime/lent_cards.rs` knows which cards are lent, and the memory on them.

use std::os::fd::RawFd;

use synapse::Framework;

use crate::error::ErrorKind;
use crate::{Error, Remedy};

/// The application, whose card it is.
#[derive(Debug)]
pub(crate) struct Lender {
    /// We may use the card as if it were ours; otherwise we only know that it exists.
    pub(crate) lent: bool,
    /// The application's own descriptor: SCAL identifies the card by this descriptor's number.
    pub(crate) descriptor: RawFd,
}

impl Lender {
    /// Refuses operations that need a lent card, if this one is not lent.
    pub(super) fn permit(&self, operation: &'static str) -> Result<(), Error> {
        if self.lent {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::PermissionDenied,
            operation,
            "this process opened the card itself and has not lent it",
            Remedy::LendCard,
        ))
    }

    /// The same for a submission. Refuses it also if a framework was started after the card was lent.
    pub(super) fn permit_submission(&self, operation: &'static str) -> Result<(), Error> {
        if Framework::drives(self.descriptor) {
            return Err(driven_by_framework(operation));
        }
        self.permit(operation)
    }
}

/// Why raw submissions to a card are refused.
pub(crate) fn driven_by_framework(operation: &'static str) -> Error {
    Error::new(
        ErrorKind::PermissionDenied,
        operation,
        "SCAL (Synapse) drives the card: its queues are reprogrammed, and other submissions are not safe",
        "do not lend the framework's card: its memory is found and copied through Synapse",
    )
}
