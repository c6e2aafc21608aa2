//! A card that the application opened, which [`Driver`](super::driver::Driver) uses through a descriptor of our own of
//! the same opening: as its own, if the application has lent it; otherwise only for what does not disturb it. Which
//! cards are lent, and the memory on them, is in `runtime/lent_cards.rs`.

use std::os::fd::RawFd;

use synapse::Framework;

use crate::error::ErrorKind;
use crate::{Error, Remedy};

/// The application, whose card it is.
#[derive(Debug)]
pub(crate) struct Lender {
    /// We may use the card as if it were ours; else we only know of it.
    pub(crate) lent: bool,
    /// The application's own descriptor: by its number SCAL knows the card.
    pub(crate) descriptor: RawFd,
}

impl Lender {
    /// Refuses what needs a card that was lent.
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

    /// The same for a submission: a framework may have been started after the card was lent.
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
