//! What UCX is told that copies cost, from which UCP chooses its protocols.
//!
//! Bandwidth between host and card is what the card's PCI Express link carries, as sysfs has it;
//! where it has none (a virtual machine, a card in software), the link that the generation is built
//! with. The times are those of the software card, the only one that could be measured so far. The
//! user's variables come before all of it: `UCX_GAUDI_COPY_BW`, `…_LATENCY`, `…_OVERHEAD`.

use gaudi::Generation;
use gaudi::topology::PciLink;
use uct::config::{Keyed, Kind, Values, Variable};
use uct::{Bandwidth, LinearFunc, MemoryType, Perf, PerfQuery};

/// What is left of a link's bandwidth for data of large copies: packet headers, requests and
/// acknowledgements take the rest. UCX's CUDA transport reckons with 0.53 to 0.74.
const LINK_EFFICIENCY: f64 = 0.7;

/// Bytes per second inside a card. Any figure far above the link's leads UCP to the same choices.
const INSIDE: f64 = 200e9;

/// The variables of this model.
pub(crate) const BANDWIDTH: Variable = Variable {
    name: "COPY_BW",
    default: "auto",
    help: "Bandwidth of copies that UCX reckons with when it chooses protocols.\n\
           auto: what the card's PCI Express link carries, or the link its generation is built\n\
           with where the system does not say.",
    kind: Kind::Keyed(&Keyed {
        keys: &[
            ("h2d", "host to device"),
            ("d2h", "device to host"),
            ("d2d", "inside a device, and between devices"),
        ],
        value: Kind::Bandwidth,
    }),
};

/// See [`BANDWIDTH`].
pub(crate) const LATENCY: Variable = Variable {
    name: "COPY_LATENCY",
    default: "short:500ns,zcopy:2us",
    help: "Time from the submission of a copy to its end, beyond its bytes, that UCX reckons with.",
    kind: Kind::Keyed(&Keyed {
        keys: &[
            ("short", "a copy that is waited for on the spot: eager messages, streams"),
            ("zcopy", "a copy that completes later: rendezvous and its pipelines"),
        ],
        value: Kind::Time,
    }),
};

/// See [`BANDWIDTH`].
pub(crate) const OVERHEAD: Variable = Variable {
    name: "COPY_OVERHEAD",
    default: "1us",
    help: "Processor time to submit a copy that UCX reckons with.",
    kind: Kind::Time,
};

/// What the user set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Overrides {
    /// Bytes per second; `None`: `auto`.
    h2d: Option<f64>,
    d2h: Option<f64>,
    d2d: Option<f64>,
    /// Seconds.
    short_latency: f64,
    zcopy_latency: f64,
    overhead: f64,
}

impl Overrides {
    /// Takes over what UCX parsed.
    pub(crate) fn read(values: &Values<'_>) -> Overrides {
        // UCX accepts a bandwidth of nothing, with which nothing can be reckoned.
        let bandwidth = |key| Some(values.keyed(BANDWIDTH.name, key)).filter(|&given| given >= 1.0);
        let latency = |key| values.keyed(LATENCY.name, key).max(0.0);
        Overrides {
            h2d: bandwidth("h2d"),
            d2h: bandwidth("d2h"),
            d2d: bandwidth("d2d"),
            short_latency: latency("short"),
            zcopy_latency: latency("zcopy"),
            overhead: values.real(OVERHEAD.name).max(0.0),
        }
    }
}

/// The costs of copies on one card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimates {
    h2d: f64,
    d2h: f64,
    d2d: f64,
    short_latency: f64,
    zcopy_latency: f64,
    overhead: f64,
}

/// The link a card of this generation has in the servers it is built into.
fn usual_link(generation: Generation) -> PciLink {
    let gigatransfers = match generation {
        // PCIe 3.0 is what the vendor's qualification tool expects of the host.
        Generation::Gaudi => 8.0,
        Generation::Gaudi2 => 16.0,
        Generation::Gaudi3 => 32.0,
    };
    PciLink { gigatransfers, width: 16 }
}

/// Seconds to find memory that is pinned already.
const CACHE_HIT: f64 = 50e-9;

/// What UCX shall reckon a registration with. UCP adds it to the estimate of *every* copy, as if each
/// had to register its buffers. That is so only where nothing is kept pinned: with the registration
/// cache a copy pays for a look-up. `kept`: pins are kept, as far as is known.
pub(crate) fn register_cost(reg_cost: f64, kept: bool) -> LinearFunc {
    LinearFunc { constant: if kept { CACHE_HIT } else { reg_cost }, slope: 0.0 }
}

impl Estimates {
    /// For a card with this link, where it is known. `cost`: factor on all of it.
    pub(crate) fn new(
        overrides: &Overrides,
        generation: Generation,
        link: Option<PciLink>,
        cost: f64,
    ) -> Estimates {
        let link = link.unwrap_or_else(|| usual_link(generation)).bandwidth() * LINK_EFFICIENCY;
        Estimates {
            h2d: overrides.h2d.unwrap_or(link) / cost,
            d2h: overrides.d2h.unwrap_or(link) / cost,
            d2d: overrides.d2d.unwrap_or(INSIDE) / cost,
            short_latency: overrides.short_latency * cost,
            zcopy_latency: overrides.zcopy_latency * cost,
            overhead: overrides.overhead * cost,
        }
    }

    /// Where one figure has to do for all copies: that of the slower direction.
    pub(crate) fn bandwidth(&self) -> Bandwidth {
        Bandwidth { dedicated: 0.0, shared: self.h2d.min(self.d2h) }
    }

    /// Where one figure has to do for all copies.
    pub(crate) fn latency(&self) -> LinearFunc {
        LinearFunc { constant: self.zcopy_latency, slope: 0.0 }
    }

    /// Where one figure has to do for all copies.
    pub(crate) fn overhead(&self) -> f64 {
        self.overhead
    }

    /// What an operation costs; `None` for memory that is not ours to copy.
    pub(crate) fn of(&self, query: &PerfQuery) -> Option<Perf> {
        use MemoryType as M;
        let fetches = query.operation.is_some_and(|operation| operation.is_fetch());
        let (source, target) =
            if fetches { (query.remote, query.local) } else { (query.local, query.remote) };
        let bandwidth = match (source, target) {
            (M::HOST, M::HOST) => return None,
            (M::HOST, M::GAUDI) => self.h2d,
            (M::GAUDI, M::HOST) => self.d2h,
            (M::GAUDI, M::GAUDI) => self.d2d,
            // UCX asks before it knows: about any of the copies there may be.
            (M::HOST | M::GAUDI | M::UNKNOWN, M::HOST | M::GAUDI | M::UNKNOWN) => {
                self.bandwidth().shared
            }
            _ => return None,
        };
        // A short copy is waited for, so what would be latency is the caller's own time.
        let asynchronous = query.operation.is_none_or(|operation| operation.is_zcopy());
        let (latency, waiting) =
            if asynchronous { (self.zcopy_latency, 0.0) } else { (0.0, self.short_latency) };
        Some(Perf {
            send_pre_overhead: self.overhead,
            send_post_overhead: waiting,
            recv_overhead: 0.0,
            bandwidth: Bandwidth { dedicated: 0.0, shared: bandwidth },
            latency: LinearFunc { constant: latency, slope: 0.0 },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use uct::Operation;

    const DEFAULTS: Overrides = Overrides {
        h2d: None,
        d2h: None,
        d2d: None,
        short_latency: 0.5e-6,
        zcopy_latency: 2e-6,
        overhead: 1e-6,
    };

    fn query(operation: Option<Operation>, local: MemoryType, remote: MemoryType) -> PerfQuery {
        PerfQuery { operation, local, remote }
    }

    fn bandwidth(estimates: &Estimates, query: PerfQuery) -> f64 {
        estimates.of(&query).expect("a copy of ours").bandwidth.shared
    }

    #[test]
    fn a_registration_costs_a_look_up_where_pins_are_kept() {
        assert_eq!(register_cost(7e-6, true).constant, CACHE_HIT);
        assert_eq!(register_cost(7e-6, false).constant, 7e-6);
    }

    #[test]
    fn a_link_that_is_known_counts_more_than_the_generation() {
        let [usual, narrow] = [None, Some(PciLink { gigatransfers: 16.0, width: 8 })]
            .map(|link| Estimates::new(&DEFAULTS, Generation::Gaudi2, link, 1.0));
        assert!((usual.h2d - 22e9).abs() < 0.1e9, "{usual:?}");
        assert_eq!((narrow.h2d, narrow.d2h), (usual.h2d / 2.0, usual.d2h / 2.0));
        assert_eq!(narrow.d2d, usual.d2d, "the link is not involved");
    }

    #[test]
    fn each_generation_is_faster_than_the_last() {
        let [one, two, three] = [Generation::Gaudi, Generation::Gaudi2, Generation::Gaudi3]
            .map(|generation| Estimates::new(&DEFAULTS, generation, None, 1.0).h2d);
        assert!(one < two && two < three);
    }

    #[test]
    fn overrides_come_before_everything() {
        let overrides = Overrides { h2d: Some(1e9), d2d: Some(3e9), overhead: 7e-6, ..DEFAULTS };
        let link = Some(PciLink { gigatransfers: 32.0, width: 16 });
        let estimates = Estimates::new(&overrides, Generation::Gaudi2, link, 1.0);
        assert_eq!((estimates.h2d, estimates.d2d, estimates.overhead), (1e9, 3e9, 7e-6));
        assert!(estimates.d2h > 40e9, "what was not wished for is found out");
        assert_eq!(estimates.bandwidth().shared, 1e9);
    }

    #[test]
    fn the_direction_is_that_of_the_bytes_not_of_the_call() {
        use MemoryType as M;
        let overrides = Overrides { h2d: Some(1e9), d2h: Some(2e9), d2d: Some(3e9), ..DEFAULTS };
        let estimates = Estimates::new(&overrides, Generation::Gaudi2, None, 1.0);
        for (put, get) in [
            (Operation::PUT_SHORT, Operation::GET_SHORT),
            (Operation::PUT_ZCOPY, Operation::GET_ZCOPY),
        ] {
            let (put, get) = (Some(put), Some(get));
            assert_eq!(bandwidth(&estimates, query(put, M::HOST, M::GAUDI)), 1e9);
            assert_eq!(bandwidth(&estimates, query(get, M::GAUDI, M::HOST)), 1e9);
            assert_eq!(bandwidth(&estimates, query(put, M::GAUDI, M::HOST)), 2e9);
            assert_eq!(bandwidth(&estimates, query(get, M::HOST, M::GAUDI)), 2e9);
            assert_eq!(bandwidth(&estimates, query(get, M::GAUDI, M::GAUDI)), 3e9);
            assert_eq!(bandwidth(&estimates, query(get, M::UNKNOWN, M::GAUDI)), 1e9, "the slower");
        }
    }

    #[test]
    fn what_is_not_ours_to_copy_has_no_cost() {
        use MemoryType as M;
        let estimates = Estimates::new(&DEFAULTS, Generation::Gaudi2, None, 1.0);
        for (local, remote) in [(M::HOST, M::HOST), (M::CUDA, M::GAUDI), (M::GAUDI, M::CUDA)] {
            assert!(estimates.of(&query(None, local, remote)).is_none());
        }
    }

    #[test]
    fn waiting_for_a_short_copy_is_the_callers_own_time() {
        let estimates = Estimates::new(&DEFAULTS, Generation::Gaudi2, None, 2.0);
        let of = |operation| {
            let query = query(Some(operation), MemoryType::HOST, MemoryType::GAUDI);
            let perf = estimates.of(&query).expect("a copy of ours");
            (perf.send_pre_overhead, perf.send_post_overhead, perf.latency.constant)
        };
        assert_eq!(of(Operation::PUT_SHORT), (2e-6, 1e-6, 0.0));
        assert_eq!(of(Operation::PUT_ZCOPY), (2e-6, 0.0, 4e-6));
    }
}
