//! The component: whether there is a domain at all, and what a peer's key opens.

use std::sync::Arc;

use gaudi::Device;
use uct::config::{Values, Variable};
use uct::{Component, Status, SysDevice, Ucx, log};

use super::domain::IpcDomain;
use super::remote_memory::{KEY_LEN, RemoteMemory, Unusable};
use super::{NAME, settings};
use crate::{cards, domain, memtype_cache};

/// The component.
pub(crate) struct IpcComponent;

impl Component for IpcComponent {
    type Md = IpcDomain;
    type RemoteKey = RemoteMemory;

    const NAME: &'static str = NAME;
    const CONFIG_PREFIX: &'static str = settings::PREFIX;
    const VARIABLES: &'static [Variable] = settings::DOMAIN_VARIABLES;
    const KEY_SIZE: usize = KEY_LEN;

    fn domains(&self, _: &'static Ucx) -> Vec<String> {
        // gaudi_copy logs why there is no Gaudi. Cards that take no copies through the driver count:
        // they may be a framework's, whose memory is relayed.
        let found = cards::discover().is_ok_and(|found| !found.is_empty());
        found.then(|| NAME.to_owned()).into_iter().collect()
    }

    fn open(
        &self,
        ucx: &'static Ucx,
        _domain: &str,
        config: &Values<'_>,
    ) -> Result<IpcDomain, Status> {
        // Without a copy domain nothing can be allocated, and UCX would list a Gaudi that cannot be used.
        if domain::is_refused() {
            return Err(Status::NO_DEVICE);
        }
        settings::take_over(ucx, config);
        // Whether a framework is expected is a setting of the copy domains.
        memtype_cache::begin(ucx, false);
        Ok(IpcDomain::new(ucx))
    }

    fn unpack_key(
        &self,
        ucx: &'static Ucx,
        key: &[u8],
        device: SysDevice,
    ) -> Result<RemoteMemory, Status> {
        RemoteMemory::new(key, || card_near(ucx, device)).map_err(|why| unreachable(ucx, &why))
    }
}

/// Logs why a key cannot be used. UCX then finds another way.
pub(super) fn unreachable(ucx: &Ucx, why: &Unusable) -> Status {
    match why {
        // Nothing is wrong: UCX asks for every buffer.
        Unusable::OwnMemory | Unusable::NoKey => {
            log!(ucx, Debug, "{NAME}: a peer's memory is not reachable: {why}");
        }
        Unusable::NoImport | Unusable::Key(_) | Unusable::Engine(_) => {
            log!(ucx, Info, "{NAME}: a peer's memory is not reachable: {why}");
        }
    }
    Status::UNREACHABLE
}

/// The card that imports: the one UCX names (of the local buffer), else one that is open.
pub(super) fn card_near(ucx: &Ucx, wanted: SysDevice) -> Option<Arc<Device>> {
    let mut open = gaudi::runtime().devices();
    open.retain(|card| !card.is_surely_lost());
    let is_wanted = |card: &&Arc<Device>| {
        wanted != SysDevice::UNKNOWN && memtype_cache::sys_device(ucx, card.info()) == wanted
    };
    if let Some(card) = open.iter().find(is_wanted) {
        return Some(Arc::clone(card));
    }
    // Of several, the first opened that can import: always the same one.
    open.into_iter().min_by_key(|card| (card.can_import().is_err(), card.id()))
}
