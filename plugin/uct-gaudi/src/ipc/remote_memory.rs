//! Keys as UCX carries them: one of the engine's, or a reason code.
//!
//! UCX takes a failure to pack a key as the failure of the whole message, also where another way to
//! the memory exists. So memory that cannot be shared has a key too, which says why, and which nobody
//! can open.

use std::fmt;
use std::sync::Arc;

use gaudi::share::{self, Opened, RemoteKey};
use gaudi::{Device, Error};

/// Bytes of a packed key.
pub(crate) const KEY_LEN: usize = share::KEY_LEN;

/// First byte of a key that opens nothing; the engine's keys begin with their version, from 1.
const NONE: u8 = 0;

/// Why there is no key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoKey {
    /// Nobody on this machine could import it.
    NoImport,
    /// Host memory has other ways.
    HostMemory,
    /// The exporter's log says why.
    Refused,
}

impl NoKey {
    const ALL: [NoKey; 3] = [NoKey::NoImport, NoKey::HostMemory, NoKey::Refused];

    fn code(self) -> u8 {
        match self {
            NoKey::NoImport => 1,
            NoKey::HostMemory => 2,
            NoKey::Refused => 3,
        }
    }

    /// The packed form.
    pub(crate) fn pack(self) -> [u8; KEY_LEN] {
        let mut key = [0; KEY_LEN];
        (key[0], key[1]) = (NONE, self.code());
        key
    }

    /// The reason in a packed key, if it is one that opens nothing.
    fn parse(key: &[u8]) -> Option<NoKey> {
        match key {
            [NONE, code, ..] => Some(
                Self::ALL.into_iter().find(|none| none.code() == *code).unwrap_or(Self::Refused),
            ),
            _ => None,
        }
    }
}

impl fmt::Display for NoKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoKey::NoImport => "its owner finds that the driver has no dma-buf import",
            NoKey::HostMemory => "it is host memory",
            NoKey::Refused => "its owner could not share it (the owner's log says why)",
        })
    }
}

/// Memory of a peer, as UCX keeps it: a key that could be opened when it was unpacked.
///
/// It is not mapped by this: applications keep keys for long, and a mapping keeps the peer's card busy
/// also when the peer has ended. The engine's cache has the mapping, and gives it up then.
pub(crate) struct RemoteMemory {
    key: RemoteKey,
    /// The card that copies where the local buffer does not decide it.
    card: Arc<Device>,
}

/// Why a key cannot be used here.
pub(crate) enum Unusable {
    /// The other side said so.
    None(NoKey),
    /// It is of another host, user, version, or no key at all.
    Key(share::KeyError),
    /// It is of this process, which needs no key.
    OwnMemory,
    /// This process has no card open, and is to open none.
    NoCard,
    /// No card could be opened, no lease granted, or nothing imported.
    Engine(Error),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::None(reason) => reason.fmt(f),
            Unusable::Key(error) => error.fmt(f),
            Unusable::OwnMemory => f.write_str("it is memory of this process"),
            Unusable::NoCard => f.write_str(
                "this process has no Gaudi open, and UCX_GAUDI_IPC_OPEN_DEVICE=n keeps it from \
                 opening one",
            ),
            Unusable::Engine(error) => error.fmt(f),
        }
    }
}

impl RemoteMemory {
    /// Opens a packed key, on the card that `card` names. The key comes from another process.
    pub(crate) fn new(
        packed: &[u8],
        card: impl FnOnce() -> Result<Arc<Device>, Unusable>,
    ) -> Result<RemoteMemory, Unusable> {
        if let Some(reason) = NoKey::parse(packed) {
            return Err(Unusable::None(reason));
        }
        let key = RemoteKey::parse(packed).map_err(Unusable::Key)?;
        if key.peer().is_own() {
            return Err(Unusable::OwnMemory);
        }
        let card = card()?;
        // Closed at once; that it can be opened is what matters, while there is another way.
        key.open(&card).map_err(Unusable::Engine)?;
        Ok(RemoteMemory { key, card })
    }

    /// Maps the memory on this card, or finds it mapped.
    pub(crate) fn open_on(&self, device: &Arc<Device>) -> Result<Arc<Opened>, Error> {
        self.key.open(device)
    }

    /// The card that copies where the local buffer does not decide it.
    pub(crate) fn card(&self) -> &Arc<Device> {
        &self.card
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_opens_nothing_says_why() {
        for reason in NoKey::ALL {
            assert_eq!(NoKey::parse(&reason.pack()), Some(reason));
        }
        let mut unknown = [0; KEY_LEN];
        unknown[1] = 200;
        assert_eq!(NoKey::parse(&unknown), Some(NoKey::Refused), "of a later version");
        assert_eq!(NoKey::parse(&[1; KEY_LEN]), None, "a key of the engine");
        assert_eq!(NoKey::parse(&[]), None);
    }
}
