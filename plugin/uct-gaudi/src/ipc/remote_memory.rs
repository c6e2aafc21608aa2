//! Keys as UCX carries them: a key of the engine, or a marker that there is none.
//!
//! If packing a key fails, UCX fails the whole message, even if there is another way to the memory. So
//! memory that cannot be shared has a key, too, but one that cannot be opened.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use gaudi::share::{self, Identity, Opened, RemoteKey};
use gaudi::{Device, Error, ErrorKind};

/// Bytes of a packed key.
pub(crate) const KEY_LEN: usize = share::KEY_LEN;

/// First byte of a key that opens nothing; the engine's keys begin with their version, from 1.
const NONE: u8 = 0;

/// There is no key; the owner's log says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoKey;

impl NoKey {
    /// The packed form.
    pub(crate) fn pack(self) -> [u8; KEY_LEN] {
        [NONE; KEY_LEN]
    }
}

/// Memory of a peer, as UCX keeps it: a key that could be opened when it was unpacked, or whose owner can be asked for a
/// relay.
///
/// This does not keep the memory mapped: applications keep keys for long, and a mapping keeps the peer's
/// card busy even after the peer has ended. The engine's cache holds the mapping, and drops it then.
pub(crate) struct RemoteMemory {
    key: RemoteKey,
    /// The card that imported it, and copies if the local buffer does not decide which card does. `None`: use a relay.
    card: Option<Arc<Device>>,
}

/// Why a key cannot be used here.
pub(crate) enum Unusable {
    /// Its owner could not share it.
    NoKey,
    /// It is of another host, user, version, or no key at all.
    Key(share::KeyError),
    /// It is of this process, which needs no key.
    OwnMemory,
    /// No card of this process imports it, and it is to be attached.
    NoImport,
    /// No lease was granted, nothing imported, and its owner cannot be asked for a relay.
    Engine(Error),
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unusable::NoKey => {
                f.write_str("its owner could not share it (the owner's log says why)")
            }
            Unusable::Key(error) => error.fmt(f),
            Unusable::OwnMemory => f.write_str("it is memory of this process"),
            Unusable::NoImport => {
                f.write_str("no open card imports it, and the driver may be unable to")
            }
            Unusable::Engine(error) => error.fmt(f),
        }
    }
}

impl RemoteMemory {
    /// Opens a packed key, on the card that `card` names, if there is one. The key comes from another process.
    pub(crate) fn new(
        packed: &[u8],
        card: impl FnOnce() -> Option<Arc<Device>>,
    ) -> Result<RemoteMemory, Unusable> {
        if packed.first() == Some(&NONE) {
            return Err(Unusable::NoKey);
        }
        let key = RemoteKey::parse(packed).map_err(Unusable::Key)?;
        if key.peer().is_own() {
            return Err(Unusable::OwnMemory);
        }
        if !key.is_host()
            && let Some(card) = card()
        {
            // Dropped at once: this only checks that it can be opened, while UCX can still find another way.
            match key.open(&card) {
                Ok(_) => return Ok(RemoteMemory { key, card: Some(card) }),
                Err(error) if is_no_import(&error) => {}
                Err(error) => return Err(Unusable::Engine(error)),
            }
        }
        check_relay(&key).map_err(Unusable::Engine)?;
        Ok(RemoteMemory { key, card: None })
    }

    /// The same for a local buffer, which a card has to import.
    pub(crate) fn attach(
        packed: &[u8],
        card: impl FnOnce() -> Option<Arc<Device>>,
    ) -> Result<RemoteMemory, Unusable> {
        Self::new(packed, card).and_then(|memory| match memory.card {
            Some(_) => Ok(memory),
            None => Err(Unusable::NoImport),
        })
    }

    pub(crate) fn key(&self) -> &RemoteKey {
        &self.key
    }

    /// Maps the memory on this card, or finds it mapped.
    pub(crate) fn open_on(&self, device: &Arc<Device>) -> Result<Arc<Opened>, Error> {
        self.key.open(device)
    }

    /// The card that copies if the local buffer does not decide it. `None`: use a relay.
    pub(crate) fn card(&self) -> Option<&Arc<Device>> {
        self.card.as_ref()
    }
}

/// Whether a card cannot import the memory, or one side lacks descriptors for that, but a relay may reach it.
pub(super) fn is_no_import(error: &Error) -> bool {
    let kinds = [ErrorKind::PermissionDenied, ErrorKind::OutOfMemory];
    error.is_unsupported() || kinds.contains(&error.kind())
}

/// Whether the owner can be asked for a relay. Checked once per owner, as UCX unpacks a key of every host buffer.
fn check_relay(key: &RemoteKey) -> Result<(), Error> {
    const MOST: usize = 64;
    static KNOWN: Mutex<VecDeque<Identity>> = Mutex::new(VecDeque::new());
    let known = || KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if known().contains(key.peer()) {
        return Ok(());
    }
    key.check_relay()?;
    let mut known = known();
    if known.len() >= MOST {
        known.pop_front();
    }
    known.push_back(*key.peer());
    Ok(())
}
