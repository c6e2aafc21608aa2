//! Configuration of `gaudi_ipc`: `UCX_GAUDI_IPC_*`. Settings of how memory is shared belong to the
//! memory domain, estimates of the speed to the transport.

use gaudi::share::Limits;
use gaudi::{CardKind, Costs, DeviceChoice, Generation, Options};
use uct::Ucx;
use uct::config::{Values, Variable};

use crate::estimates::link_bandwidth;
use crate::settings::warn_of_conflicts;

/// Prefix of the variables, behind `UCX_`, of the memory domain and of the transport.
pub(super) const PREFIX: &str = "GAUDI_IPC_";

/// Variables of the memory domain.
pub(crate) const DOMAIN_VARIABLES: &[Variable] = uct::variables! {
    CACHE_MAX_REGIONS: Uint = "1024",
        "Most allocations of peers that are mapped on a card. Those in use count, but only\n\
         unused ones are unmapped, those unused for longest first. 0: none stays mapped.";
    CACHE_MAX_SIZE: MemUnits = "1024g", "The same in bytes.";
};

/// Variables of the transport.
pub(crate) const TRANSPORT_VARIABLES: &[Variable] = uct::variables! {
    BW: Bandwidth = "auto",
        "Bandwidth between the memory of two processes, as UCX shall estimate it.\n\
         auto: what the link carries that the kind of card is built with.";
    LAT: Time = "0us",
        "Latency of a copy, as UCX shall estimate it.\n\
         0: what is known or assumed of the kind of card.";
    OVERHEAD: Time = "0us",
        "CPU time to start a copy, as UCX shall estimate it.\n\
         0: what is known or assumed of the kind of card.";
};

/// Applies what UCX parsed for a domain. Cache and cards belong to the process: keys are unpacked
/// without a domain.
pub(super) fn take_over(ucx: &Ucx, values: &Values<'_>) {
    gaudi::runtime().configure(Options {
        handle_limits: Some(Limits {
            handles: values.uint("CACHE_MAX_REGIONS") as usize,
            bytes: values.bytes("CACHE_MAX_SIZE") as u64,
        }),
        ..Options::default()
    });
    warn_of_conflicts(ucx);
}

/// The cost of an operation that UCX is told.
#[derive(Clone, Copy, Debug)]
pub(super) struct Estimates {
    /// Bytes per second.
    pub(super) bandwidth: f64,
    /// Seconds.
    pub(super) latency: f64,
    /// Seconds.
    pub(super) overhead: f64,
}

impl Estimates {
    /// What the user set, else what is known of the kind of card that this process may use.
    pub(super) fn read(values: &Values<'_>) -> Estimates {
        let cards = gaudi::runtime().candidates(&DeviceChoice::default()).unwrap_or_default();
        let kind = cards
            .first()
            .map_or_else(|| Costs::of_kind(Generation::Gaudi2, CardKind::Hardware), Costs::of);
        let given = |name, least| Some(values.real(name)).filter(|given| *given > least);
        Estimates {
            bandwidth: given("BW", 1.0).unwrap_or_else(|| link_bandwidth(&kind, None)),
            latency: given("LAT", 0.0).unwrap_or(kind.zcopy_latency),
            overhead: given("OVERHEAD", 0.0).unwrap_or(kind.overhead),
        }
    }
}
