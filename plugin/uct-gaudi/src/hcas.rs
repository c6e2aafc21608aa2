//! Finds out which HCAs cannot register Gaudi memory, and tells UCX, so that it stages instead of failing.
//!
//! Gaudi memory is registered by dma-buf or not at all. UCX does not find out in time that an HCA cannot:
//!
//! 1. **The HCA registers no dma-bufs.** Where the driver's node exists, UCX assumes that every HCA registers Gaudi
//!    memory by address. We remove that from the attributes of HCAs. UCX then stages for this HCA, and for no other.
//! 2. **The HCA refuses dma-bufs of a card** (`EPERM`: no peer-to-peer between the two). Only a trial finds that out: when
//!    UCX first asks about memory of a card, every open HCA has to register a page of it. If one refuses, UCX is told that
//!    memory of this card cannot be registered, and stages it for all HCAs. This cannot be limited to one HCA: UCX passes
//!    dma-bufs of every memory type to a domain with `REG_DMABUF`, and `ucp_mem_map` fails if one of them fails.
//!
//! Until a card was tried with all open HCAs, its memory is of unknown type in UCX's memory-type cache, so that UCX asks.
//! HCAs that UCX opens and closes again, because the user did not select them, do not count.
//!
//! UCX 1.21 does not ask, and has no way to be told: a registration that an HCA refuses is an error in UCX there.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gaudi::{Device, Error};
use uct::abi::{MdAttr, md_flag};
use uct::{DeviceRange, MdHooks, MemoryType, MemoryTypes, SysDevice, Ucx, log};

use crate::memtype_cache;
use crate::status::explain;

/// UCX's components with HCAs; the second is of BlueField.
const COMPONENTS: [&str; 2] = ["ib", "gga"];
/// Bytes of a trial registration.
const PIECE: usize = 4096;
/// After so many trials of a card with a transient error, the HCA counts as one that registers; the registration itself
/// then reports the error.
const MAX_TRANSIENT: u32 = 3;

const STAGED: &str = "staged through host memory";
const NO_PEER_TO_PEER: &str =
    " (no peer-to-peer between the two: IOMMU, ACS, or a kernel without CONFIG_PCI_P2PDMA)";

/// A card, as a copy of UCX knows it.
type Card = (usize, SysDevice);

fn card(ucx: &Ucx, device: SysDevice) -> Card {
    (core::ptr::from_ref(ucx).addr(), device)
}

#[derive(Default)]
struct State {
    /// Whether an HCA registered memory of a card.
    tried: BTreeMap<(Card, String), bool>,
    transient: BTreeMap<Card, u32>,
    /// HCAs without dma-bufs that were warned of.
    warned: BTreeSet<String>,
}

static STATE: Mutex<State> = Mutex::new(State {
    tried: BTreeMap::new(),
    transient: BTreeMap::new(),
    warned: BTreeSet::new(),
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Hooks the HCAs of `ucx`. Call it before UCX opens them.
pub(crate) fn hook(ucx: &'static Ucx) {
    let changed = |ucx: &'static Ucx| memtype_cache::hcas_changed(ucx);
    for component in COMPONENTS {
        ucx.hook_domains(component, MdHooks { correct, changed });
    }
}

fn correct(hca: &mut MdAttr) {
    hca.reg_mem_types &= !MemoryTypes::only(MemoryType::GAUDI).0;
}

/// Names of the open HCAs that register dma-bufs.
fn with_dmabufs(ucx: &Ucx) -> Vec<String> {
    let hcas = ucx.open_domains().into_iter().filter(|hca| hca.flags & md_flag::REG_DMABUF != 0);
    hcas.map(|hca| hca.name).collect()
}

/// Warns, once, of each open HCA that UCX believes to register Gaudi memory by address. Call it when
/// there is Gaudi memory, and UCX has closed the HCAs that the user did not select.
pub(crate) fn warn(ucx: &Ucx) {
    let gaudi = MemoryTypes::only(MemoryType::GAUDI).0;
    let by_address = |hca: &uct::OpenDomain| {
        hca.reg_mem_types & gaudi != 0 && hca.flags & md_flag::REG_DMABUF == 0
    };
    for hca in ucx.open_domains().into_iter().filter(by_address) {
        if state().warned.insert(hca.name.clone()) {
            log!(
                ucx,
                Warn,
                "{} cannot access Gaudi memory: its driver registers no dma-bufs. What it carries is {STAGED}",
                hca.name
            );
        }
    }
}

impl State {
    /// Whether all of these HCAs register memory of a card; `None` if one was not tried.
    fn verdict(&self, card: Card, hcas: &[String]) -> Option<bool> {
        let of = |hca: &String| self.tried.get(&(card, hca.clone())).copied();
        if hcas.iter().any(|hca| of(hca) == Some(false)) {
            return Some(false);
        }
        hcas.iter().all(|hca| of(hca).is_some()).then_some(true)
    }
}

/// Memory of a card as UCX's memory-type cache should have it now.
pub(crate) fn as_registrable(ucx: &Ucx, memory: DeviceRange) -> DeviceRange {
    if !ucx.variant().memory_flags {
        return memory;
    }
    let hcas = with_dmabufs(ucx);
    let verdict = state().verdict(card(ucx, memory.device), &hcas);
    match verdict {
        Some(registrable) => DeviceRange { registrable, ..memory },
        None => DeviceRange { memory_type: MemoryType::UNKNOWN, ..memory },
    }
}

/// Whether HCAs register memory of a card, a page of which is at `address`. If that is not known yet,
/// it is tried with the dma-buf of that page that `export` returns; `None` if UCX gets no dma-bufs.
pub(crate) fn can_register(
    ucx: &'static Ucx,
    device: &Device,
    sys_device: SysDevice,
    address: u64,
    export: impl FnOnce() -> Option<Result<(OwnedFd, u64), Error>>,
) -> bool {
    static TRYING: Mutex<()> = Mutex::new(());
    let card = card(ucx, sys_device);
    let verdict = || {
        let hcas = with_dmabufs(ucx);
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
    let all = |registered: Result<(), i32>| hcas.into_iter().map(move |hca| (hca, registered));
    let tried: Vec<(String, Result<(), i32>)> = match export() {
        // The user wants no dma-bufs: UCX asks no HCA for this card.
        None => all(Ok(())).collect(),
        Some(Ok((dmabuf, offset))) => {
            ucx.try_dmabuf((dmabuf.as_fd(), offset), address, PIECE, MemoryType::GAUDI)
        }
        Some(Err(error)) => {
            let errno = error.errno().unwrap_or(libc::EAGAIN);
            if !is_transient(errno) {
                let reason = explain(&error);
                log!(ucx, Warn, "HCAs cannot register Gaudi memory: {reason}. It is {STAGED}");
                return decide(ucx, card, all(Err(errno)).collect());
            }
            all(Err(errno)).collect()
        }
    };
    for (hca, registered) in &tried {
        let Err(errno) = *registered else { continue };
        if is_transient(errno) {
            continue;
        }
        let reason = match errno {
            0 => String::from("UCX does not say why"),
            errno => std::io::Error::from_raw_os_error(errno).to_string(),
        };
        let hint = if errno == libc::EPERM { NO_PEER_TO_PEER } else { "" };
        log!(
            ucx,
            Warn,
            "{hca} refuses to register memory of {}: {reason}{hint}. With this HCA in use, Gaudi memory is {STAGED} for \
             all; UCX_NET_DEVICES leaves it out",
            device.info()
        );
    }
    decide(ucx, card, tried)
}

/// Whether an error is transient: it may be gone the next time. If it persists, the registration itself reports it.
fn is_transient(errno: i32) -> bool {
    [libc::EMFILE, libc::ENFILE, libc::ENOMEM, libc::EAGAIN, libc::EINTR].contains(&errno)
}

/// Records how HCAs handled memory of a card, and tells UCX. Returns whether the memory is registrable.
fn decide(ucx: &Ucx, card: Card, tried: Vec<(String, Result<(), i32>)>) -> bool {
    let registrable = state().keep(card, tried);
    memtype_cache::hcas_changed(ucx);
    registrable
}

impl State {
    fn keep(&mut self, card: Card, tried: Vec<(String, Result<(), i32>)>) -> bool {
        let failed = |registered: &Result<(), i32>, transient| {
            registered.is_err_and(|errno| is_transient(errno) == transient)
        };
        let transient = self.transient.entry(card).or_default();
        *transient += u32::from(tried.iter().any(|(_, registered)| failed(registered, true)));
        let try_again = *transient < MAX_TRANSIENT;
        let registrable = !tried.iter().any(|(_, registered)| failed(registered, false));
        for (hca, registered) in tried {
            if !(failed(&registered, true) && try_again) {
                self.tried.insert((card, hca), !failed(&registered, false));
            }
        }
        registrable
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: Card = (1, SysDevice(3));

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn tried(state: &mut State, results: &[(&str, Result<(), i32>)]) -> bool {
        state.keep(CARD, results.iter().map(|(hca, it)| ((*hca).to_owned(), *it)).collect())
    }

    #[test]
    fn memory_is_registrable_if_every_open_hca_took_some_of_its_card() {
        let mut state = State::default();
        assert_eq!(state.verdict(CARD, &[]), Some(true), "no HCA, no obstacle");
        assert_eq!(state.verdict(CARD, &names(&["mlx5_0"])), None);
        assert!(!tried(&mut state, &[("mlx5_0", Ok(())), ("mlx5_1", Err(libc::EPERM))]));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_0"])), Some(true));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_0", "mlx5_2"])), None);
        assert_eq!(state.verdict(CARD, &names(&["mlx5_2", "mlx5_1"])), Some(false));
        assert_eq!(state.verdict((1, SysDevice(4)), &names(&["mlx5_0"])), None);
        assert!(tried(&mut state, &[("mlx5_2", Ok(()))]));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_0", "mlx5_2"])), Some(true));
    }

    #[test]
    fn a_transient_error_hides_no_refusal_and_is_tried_again_a_few_times() {
        let mut state = State::default();
        let results = [("mlx5_0", Err(libc::EPERM)), ("mlx5_1", Err(libc::ENOMEM))];
        assert!(!tried(&mut state, &results), "one refused for good");
        assert_eq!(state.verdict(CARD, &names(&["mlx5_0"])), Some(false));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_1"])), None);
        assert!(tried(&mut state, &results[1..]));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_1"])), None);
        assert!(tried(&mut state, &results[1..]));
        assert_eq!(state.verdict(CARD, &names(&["mlx5_1"])), Some(true));
    }
}
