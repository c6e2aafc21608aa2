//! What to do about an error, as a value: the crate that shows the error to users renders it with the
//! names of its own settings. The words here name no setting.

use std::fmt;

/// What to do about an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Remedy {
    /// No advice beyond what the error itself says.
    #[default]
    None,
    /// What these words say, wherever the engine is used.
    Advice(&'static str),
    /// Another process has the card.
    ChooseAnotherCard,
    /// The program itself has the card, and has not lent it.
    LendCard,
    /// Register access is off.
    PermitRegisterAccess,
    /// The length of the application's memory is not known.
    ReportLength,
    /// No card was found.
    CheckCard,
    /// A card of a kind that this version does not know.
    ReportCard,
    /// The card refuses to work.
    CheckHealth,
    /// The card went away.
    CardGone,
    /// The card does not answer.
    NoAnswer,
    /// The card was reset.
    WasReset,
    /// The card is being reset.
    InReset,
    /// The software Gaudi produces a fault that was ordered, or lacks space for its memory.
    CheckSoftwareCard,
}

impl Remedy {
    /// The remedy if the card is a software Gaudi, which has neither the vendor's tools nor a kernel log.
    pub(crate) fn for_software(self) -> Self {
        match self {
            Remedy::CheckCard
            | Remedy::CheckHealth
            | Remedy::CardGone
            | Remedy::NoAnswer
            | Remedy::WasReset
            | Remedy::InReset => Remedy::CheckSoftwareCard,
            Remedy::None
            | Remedy::Advice(_)
            | Remedy::ChooseAnotherCard
            | Remedy::LendCard
            | Remedy::PermitRegisterAccess
            | Remedy::ReportLength
            | Remedy::ReportCard
            | Remedy::CheckSoftwareCard => self,
        }
    }

    /// The engine's words; empty for [`Remedy::None`].
    pub fn words(self) -> &'static str {
        match self {
            Remedy::None => "",
            Remedy::Advice(words) => words,
            Remedy::ChooseAnotherCard => "wait for the owner or end it, or choose another card",
            Remedy::LendCard => "lend the card, or have cards of this process adopted",
            Remedy::PermitRegisterAccess => "permit register access for this process",
            Remedy::ReportLength => "report the memory together with its length",
            Remedy::CheckCard => {
                "check with hl-smi that the card is there and the driver is loaded"
            }
            Remedy::ReportCard => {
                "it is not opened; send us what `ucx-gaudi check-card --save report.json` writes, so that it \
                 can be added"
            }
            Remedy::CheckHealth => {
                "the card is not operational (look at hl-smi and the kernel log), or a cgroup or container \
                 forbids its node"
            }
            Remedy::CardGone => "the card went away: look at the kernel log",
            Remedy::NoAnswer => {
                "the card did not answer and will be reset: look at the kernel log, then restart"
            }
            Remedy::WasReset => "the card was reset: look at the kernel log, then restart",
            Remedy::InReset => "the card is being reset: look at the kernel log, then restart",
            Remedy::CheckSoftwareCard => {
                "it is a software Gaudi: look at its messages on stderr, the space in /dev/shm, \
                 SOFT_GAUDI_NODE, SOFT_GAUDI_DEVICES and the faults that were ordered"
            }
        }
    }
}

impl From<&'static str> for Remedy {
    fn from(words: &'static str) -> Self {
        if words.is_empty() { Remedy::None } else { Remedy::Advice(words) }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.words())
    }
}
