//! The costs of copies that UCX is told, by which UCP chooses its protocols.
//!
//! Bandwidth between host and card is that of the card's PCI Express link, as sysfs has it. Where sysfs
//! has none (a virtual machine, a card in software), it is that of the link the generation is built
//! with. The rest comes from the engine's table of kinds of cards ([`Costs`]). The user's variables
//! override all of it: `UCX_GAUDI_COPY_BW`, `…_LATENCY`, `…_OVERHEAD`, `…_REG_COST`.

use gaudi::Costs;
use gaudi::topology::PciLink;
use uct::config::{Keyed, Kind, Values};
use uct::{Bandwidth, LinearFunc, MemoryType, Perf, PerfQuery};

/// What is left of a link's bandwidth for data of large copies: packet headers, requests and
/// acknowledgements take the rest. UCX's CUDA transport assumes 0.53 to 0.74.
const LINK_EFFICIENCY: f64 = 0.7;
/// The highest bandwidth that UCX is told of our lane: see [`Estimates::lane_bandwidth`]. UCX's `cma` has 12.8 GB/s.
const LANE_LIMIT: f64 = 12.7e9;

/// The keys of `COPY_BW`.
pub(crate) const BANDWIDTHS: Keyed = Keyed {
    keys: &[
        ("h2d", "host to device"),
        ("d2h", "device to host"),
        ("d2d", "inside a device, and between devices"),
    ],
    value: Kind::Bandwidth,
    fallback: "auto",
};

/// The keys of `COPY_LATENCY`.
pub(crate) const LATENCIES: Keyed = Keyed {
    keys: &[
        ("short", "a copy that is waited for on the spot: eager messages, streams"),
        ("zcopy", "a copy that completes later: rendezvous and its pipelines"),
    ],
    value: Kind::Time,
    fallback: "0us",
};

/// The costs of copies on one card.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimates {
    h2d: f64,
    d2h: f64,
    d2d: f64,
    short_latency: f64,
    zcopy_latency: f64,
    overhead: f64,
    registration: f64,
}

/// Bytes per second between host and card: by its link, or the one that the kind of card is built with.
pub(crate) fn link_bandwidth(costs: &Costs, link: Option<PciLink>) -> f64 {
    link.map_or(costs.link, PciLink::bandwidth) * LINK_EFFICIENCY
}

/// Seconds to look up memory that is pinned already.
const CACHE_HIT: f64 = 50e-9;

impl Estimates {
    /// For a card with these costs and this link, where it is known. `cost`: factor on all of it.
    pub(crate) fn read(
        values: &Values<'_>,
        costs: &Costs,
        link: Option<PciLink>,
        cost: f64,
    ) -> Estimates {
        let given = |name: &str, key: &str| match key {
            "" => values.real(name),
            key => values.keyed(name, key),
        };
        Self::new(given, costs, link, cost)
    }

    /// The same; `given` returns the user's value for a variable and a key of it, or 0 for none.
    fn new(
        given: impl Fn(&str, &str) -> f64,
        costs: &Costs,
        link: Option<PciLink>,
        cost: f64,
    ) -> Estimates {
        let link = link_bandwidth(costs, link);
        // UCX accepts a bandwidth of zero, which makes estimates infinite, and has a negative one for "auto".
        let bandwidth =
            |key, known| Some(given("COPY_BW", key)).filter(|it| *it >= 1.0).unwrap_or(known);
        let time =
            |name, key, known| Some(given(name, key)).filter(|it| *it > 0.0).unwrap_or(known);
        Estimates {
            h2d: bandwidth("h2d", link) / cost,
            d2h: bandwidth("d2h", link) / cost,
            d2d: bandwidth("d2d", costs.inside) / cost,
            short_latency: time("COPY_LATENCY", "short", costs.short_latency) * cost,
            zcopy_latency: time("COPY_LATENCY", "zcopy", costs.zcopy_latency) * cost,
            overhead: time("COPY_OVERHEAD", "", costs.overhead) * cost,
            registration: time("COPY_REG_COST", "", costs.registration),
        }
    }

    /// The registration cost that UCX is told. UCP adds it to the estimate of *every* copy, as if each
    /// had to register its buffers. That is so only where nothing is kept pinned: with the registration
    /// cache a copy pays for a look-up. `kept`: pins are kept, as far as is known.
    pub(crate) fn register_cost(&self, kept: bool) -> LinearFunc {
        LinearFunc { constant: if kept { CACHE_HIT } else { self.registration }, slope: 0.0 }
    }

    /// One bandwidth for all copies: that of the slower direction.
    pub(crate) fn bandwidth(&self) -> Bandwidth {
        Bandwidth { dedicated: 0.0, shared: self.h2d.min(self.d2h) }
    }

    /// The bandwidth by which UCX compares the lanes of an endpoint. UCX drops lanes to its own process
    /// that are slower than a quarter of the fastest, even if only they copy some kind of memory, and
    /// `cuda_copy` gives 4 to 10 GB/s here. So ours is not reported as faster than `cma`.
    pub(crate) fn lane_bandwidth(&self) -> Bandwidth {
        Bandwidth { dedicated: 0.0, shared: self.bandwidth().shared.min(LANE_LIMIT) }
    }

    /// One latency for all copies.
    pub(crate) fn latency(&self) -> LinearFunc {
        LinearFunc { constant: self.zcopy_latency, slope: 0.0 }
    }

    /// One overhead for all copies.
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
            // UCX asks before it knows the types: take the figure for all copies.
            (M::HOST | M::GAUDI | M::UNKNOWN, M::HOST | M::GAUDI | M::UNKNOWN) => {
                self.bandwidth().shared
            }
            _ => return None,
        };
        // The caller waits for a short copy, so its latency counts as the caller's CPU time.
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
    use gaudi::{CardKind, Generation};
    use uct::Operation;

    const SOFT_GAUDI2: (Generation, CardKind) = (Generation::Gaudi2, CardKind::Software);
    const GAUDI2: (Generation, CardKind) = (Generation::Gaudi2, CardKind::Hardware);

    /// With these values given.
    fn estimates(
        given: &[(&str, &str, f64)],
        (generation, kind): (Generation, CardKind),
        link: Option<PciLink>,
        cost: f64,
    ) -> Estimates {
        let value = |name: &str, key: &str| {
            let found = given.iter().find(|(its, its_key, _)| (*its, *its_key) == (name, key));
            found.map_or(0.0, |(_, _, value)| *value)
        };
        Estimates::new(value, &Costs::of_kind(generation, kind), link, cost)
    }

    /// Nothing set.
    fn defaults(kind: (Generation, CardKind), link: Option<PciLink>) -> Estimates {
        estimates(&[], kind, link, 1.0)
    }

    fn query(operation: Option<Operation>, local: MemoryType, remote: MemoryType) -> PerfQuery {
        PerfQuery { operation, local, remote }
    }

    fn bandwidth(estimates: &Estimates, query: PerfQuery) -> f64 {
        estimates.of(&query).expect("a copy of ours").bandwidth.shared
    }

    #[test]
    fn a_registration_costs_a_look_up_where_pins_are_kept() {
        let estimates = defaults(SOFT_GAUDI2, None);
        assert_eq!(estimates.register_cost(true).constant, CACHE_HIT);
        assert_eq!(estimates.register_cost(false).constant, 7e-6);
    }

    #[test]
    fn a_link_that_is_known_counts_more_than_the_generation() {
        let [usual, narrow] = [None, Some(PciLink { gigatransfers: 16.0, width: 8 })]
            .map(|link| defaults(GAUDI2, link));
        assert!((usual.h2d - 22e9).abs() < 0.1e9, "{usual:?}");
        assert_eq!((narrow.h2d, narrow.d2h), (usual.h2d / 2.0, usual.d2h / 2.0));
        assert_eq!(narrow.d2d, usual.d2d, "the link is not involved");
        assert_eq!(usual.lane_bandwidth().shared, LANE_LIMIT);
        assert_eq!(narrow.lane_bandwidth().shared, narrow.h2d);
    }

    #[test]
    fn each_generation_is_faster_than_the_last() {
        let [one, two, three] = [Generation::Gaudi, Generation::Gaudi2, Generation::Gaudi3]
            .map(|generation| defaults((generation, CardKind::Hardware), None).h2d);
        assert!(one < two && two < three);
    }

    #[test]
    fn overrides_come_before_everything() {
        let given = [
            ("COPY_BW", "h2d", 1e9),
            ("COPY_BW", "d2h", -1.0),
            ("COPY_BW", "d2d", 3e9),
            ("COPY_OVERHEAD", "", 7e-6),
            ("COPY_REG_COST", "", 9e-6),
        ];
        let link = Some(PciLink { gigatransfers: 32.0, width: 16 });
        let estimates = estimates(&given, GAUDI2, link, 1.0);
        assert_eq!(estimates.register_cost(false).constant, 9e-6);
        assert_eq!((estimates.h2d, estimates.d2d, estimates.overhead), (1e9, 3e9, 7e-6));
        assert!(estimates.d2h > 40e9, "what was not wished for is found out");
        assert_eq!(estimates.bandwidth().shared, 1e9);
        assert_eq!(estimates.lane_bandwidth().shared, 1e9);
    }

    #[test]
    fn the_direction_is_that_of_the_bytes_not_of_the_call() {
        use MemoryType as M;
        let given =
            [("h2d", 1e9), ("d2h", 2e9), ("d2d", 3e9)].map(|(key, it)| ("COPY_BW", key, it));
        let estimates = estimates(&given, SOFT_GAUDI2, None, 1.0);
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
        let estimates = defaults(SOFT_GAUDI2, None);
        for (local, remote) in [(M::HOST, M::HOST), (M::CUDA, M::GAUDI), (M::GAUDI, M::CUDA)] {
            assert!(estimates.of(&query(None, local, remote)).is_none());
        }
    }

    #[test]
    fn waiting_for_a_short_copy_is_the_callers_own_time() {
        let estimates = estimates(&[], SOFT_GAUDI2, None, 2.0);
        let of = |operation| {
            let query = query(Some(operation), MemoryType::HOST, MemoryType::GAUDI);
            let perf = estimates.of(&query).expect("a copy of ours");
            (perf.send_pre_overhead, perf.send_post_overhead, perf.latency.constant)
        };
        assert_eq!(of(Operation::PUT_SHORT), (2e-6, 1e-6, 0.0));
        assert_eq!(of(Operation::PUT_ZCOPY), (2e-6, 0.0, 4e-6));
    }
}
