//! Whether HCAs register Gaudi memory, and what UCX is told where one does not: so that it is staged, and nothing fails.
//!
//! The driver's memory is registered by dma-buf or not at all. UCX does not find out in time that an HCA cannot:
//!
//! 1. **The HCA registers no dma-bufs.** Where the driver's node exists, UCX takes every HCA for one that registers Gaudi
//!    memory by address. That is taken out of what HCAs say of themselves. UCX then stages for this HCA, and for no other.
//! 2. **It refuses ours** (`EPERM`: no peer-to-peer between the two). That takes a dma-buf to find out: when UCX first asks
//!    about memory of a card, every open HCA gets a page of it to register. If one refuses, UCX is told that memory of
//!    this card cannot be registered, and stages it for all HCAs. It has no way to say so of one HCA: who takes dma-bufs of
//!    one memory type takes those of all, and a registration with one HCA that fails is a failure of `ucp_mem_map`.
//!
//! Until a card was asked about, UCX's memory-type cache has its memory as unknown, so that UCX does ask.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gaudi::{Device, Error};
use uct::abi::{MdAttr, md_flag};
use uct::{DeviceRange, MemoryType, MemoryTypes, SysDevice, Ucx, Watch, log};

use crate::memtype_cache;
use crate::status::explain;

/// UCX's component with the HCAs.
const COMPONENT: &str = "ib";
/// What is registered to see whether it can be.
const PIECE: usize = 4096;

const STAGED: &str = "staged through host memory";
const NO_PEER_TO_PEER: &str =
    " (no peer-to-peer between the two: IOMMU, ACS, or a kernel without CONFIG_PCI_P2PDMA)";

/// A card, as a copy of UCX knows it.
type Card = (usize, SysDevice);

fn card(ucx: &Ucx, device: SysDevice) -> Card {
    (core::ptr::from_ref(ucx).addr(), device)
}

/// What HCAs did with dma-bufs of a card.
struct Tried {
    card: Card,
    /// Names of HCAs.
    accepted: Vec<String>,
    refused: Vec<String>,
}

#[cfg_attr(test, derive(Default))]
struct State {
    tried: Vec<Tried>,
    /// HCAs of the first kind; the warning about one waits until there is Gaudi memory.
    incapable: Vec<(String, bool)>,
}

static STATE: Mutex<State> = Mutex::new(State { tried: Vec::new(), incapable: Vec::new() });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Watches the HCAs of `ucx`. To be called before it opens them.
pub(crate) fn watch(ucx: &'static Ucx) {
    ucx.watch_domains(COMPONENT, Watch { correct, opened });
}

fn correct(hca: &mut MdAttr) {
    hca.reg_mem_types &= !MemoryTypes::only(MemoryType::GAUDI).0;
}

fn opened(ucx: &'static Ucx, name: &str, hca: &MdAttr) {
    let by_address = hca.reg_mem_types & MemoryTypes::only(MemoryType::GAUDI).0 != 0;
    if by_address && hca.flags & md_flag::REG_DMABUF == 0 {
        let mut state = state();
        if !state.incapable.iter().any(|(known, _)| known == name) {
            state.incapable.push((name.to_owned(), false));
        }
    }
    memtype_cache::hcas_changed(ucx);
}

/// There is Gaudi memory: warns, once, of each HCA that is of no use to it.
pub(crate) fn warn(ucx: &Ucx) {
    let mut hcas = Vec::new();
    for (hca, warned) in &mut state().incapable {
        if !core::mem::replace(warned, true) {
            hcas.push(hca.clone());
        }
    }
    for hca in hcas {
        log!(
            ucx,
            Warn,
            "{hca} cannot access Gaudi memory: its driver registers no dma-bufs. What it carries is {STAGED}"
        );
    }
}

impl State {
    /// Whether all of these HCAs register memory of a card; `None` if one was not tried.
    fn verdict(&self, card: Card, hcas: &[String]) -> Option<bool> {
        let of_card = || self.tried.iter().filter(|tried| tried.card == card);
        let refused = |hca| of_card().any(|tried| tried.refused.contains(hca));
        let accepted = |hca| of_card().any(|tried| tried.accepted.contains(hca));
        if hcas.iter().any(refused) {
            return Some(false);
        }
        hcas.iter().all(accepted).then_some(true)
    }
}

/// What UCX's memory-type cache has to know of memory of a card now.
pub(crate) fn as_known(ucx: &Ucx, memory: DeviceRange) -> DeviceRange {
    let hcas = ucx.dmabuf_domains();
    let verdict = state().verdict(card(ucx, memory.device), &hcas);
    match verdict {
        Some(registrable) => DeviceRange { registrable, ..memory },
        None => DeviceRange { memory_type: MemoryType::UNKNOWN, ..memory },
    }
}

/// Whether HCAs register memory of a card, a page of which is at `address`. Where that is not known yet, `export` gives a
/// dma-buf of that page, or `None` if UCX gets none.
pub(crate) fn are_able(
    ucx: &'static Ucx,
    device: &Device,
    sys_device: SysDevice,
    address: u64,
    export: impl FnOnce() -> Option<Result<(OwnedFd, u64), Error>>,
) -> bool {
    static TRYING: Mutex<()> = Mutex::new(());
    let card = card(ucx, sys_device);
    let verdict = || {
        let hcas = ucx.dmabuf_domains();
        state().verdict(card, &hcas).ok_or(hcas)
    };
    if let Ok(known) = verdict() {
        return known;
    }
    let _one_at_a_time = TRYING.lock().unwrap_or_else(PoisonError::into_inner);
    let hcas = match verdict() {
        Ok(known) => return known,
        Err(hcas) => hcas,
    };
    let (dmabuf, offset) = match export() {
        // The user wants no dma-bufs: UCX asks no HCA.
        None => return decide(ucx, card, hcas, Vec::new()),
        Some(Ok(exported)) => exported,
        Some(Err(error)) if error.errno().is_none_or(is_passing) => return true,
        Some(Err(error)) => {
            let reason = explain(&error);
            log!(ucx, Warn, "HCAs cannot register Gaudi memory: {reason}. It is {STAGED}");
            return decide(ucx, card, Vec::new(), hcas);
        }
    };
    let refusals = ucx.try_dmabuf((dmabuf.as_fd(), offset), address, PIECE, MemoryType::GAUDI);
    if refusals.iter().any(|(_, errno)| is_passing(*errno)) {
        return true;
    }
    for (hca, errno) in &refusals {
        let reason = match errno {
            0 => String::from("UCX does not say why"),
            errno => std::io::Error::from_raw_os_error(*errno).to_string(),
        };
        let hint = if *errno == libc::EPERM { NO_PEER_TO_PEER } else { "" };
        log!(
            ucx,
            Warn,
            "{hca} refuses to register memory of {}: {reason}{hint}. With this HCA in use, Gaudi memory is {STAGED} for \
             all; UCX_NET_DEVICES leaves it out",
            device.info()
        );
    }
    let refused: Vec<_> = refusals.into_iter().map(|(hca, _)| hca).collect();
    decide(ucx, card, hcas, refused)
}

/// Whether an error is for want of something that may be there the next time. The registration itself then says so.
fn is_passing(errno: i32) -> bool {
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN, libc::EINTR].contains(&errno)
}

/// Keeps what `tried` HCAs did, and has UCX know.
fn decide(ucx: &Ucx, card: Card, tried: Vec<String>, refused: Vec<String>) -> bool {
    let accepted = tried.into_iter().filter(|hca| !refused.contains(hca)).collect();
    let registrable = refused.is_empty();
    state().tried.push(Tried { card, accepted, refused });
    memtype_cache::hcas_changed(ucx);
    registrable
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_registrable_if_every_open_hca_took_some_of_its_card() {
        let names = |names: &[&str]| -> Vec<String> {
            names.iter().map(|name| (*name).to_owned()).collect()
        };
        let (card, other) = ((1, SysDevice(3)), (1, SysDevice(4)));
        let mut state = State::default();
        assert_eq!(state.verdict(card, &[]), Some(true), "no HCA, no obstacle");
        assert_eq!(state.verdict(card, &names(&["mlx5_0"])), None);
        let (accepted, refused) = (names(&["mlx5_0"]), names(&["mlx5_1"]));
        state.tried.push(Tried { card, accepted, refused });
        assert_eq!(state.verdict(card, &names(&["mlx5_0"])), Some(true));
        assert_eq!(state.verdict(card, &names(&["mlx5_0", "mlx5_2"])), None);
        assert_eq!(state.verdict(card, &names(&["mlx5_2", "mlx5_1"])), Some(false));
        assert_eq!(state.verdict(other, &names(&["mlx5_0"])), None);
        let (accepted, refused) = (names(&["mlx5_2"]), Vec::new());
        state.tried.push(Tried { card, accepted, refused });
        assert_eq!(state.verdict(card, &names(&["mlx5_0", "mlx5_2"])), Some(true));
    }
}
