//! Allocation, registration and remote keys of memory domains, through stock libuct: every size and
//! odd range, thousands of cycles without a trace, and nothing paid by programs without a Gaudi.

mod memory;

use e2e::Ucx;
use memory::{Machine, counters_after, passes_everywhere};

#[test]
fn attributes_of_the_memory_domains() {
    passes_everywhere("attributes");
}

#[test]
fn allocations_are_disjoint_and_freed_in_any_order() {
    passes_everywhere("alloc");
}

/// Whatever was freed can be had again, also after a dma-buf of it was open: the pool gives its
/// pages back, and counts right.
#[test]
fn all_memory_of_a_card_again_and_again() {
    for ucx in Ucx::ALL {
        for generation in ["gaudi2", "gaudi1"] {
            // Four pages of a Gaudi2 with six stacks of HBM.
            let machine = Machine::with("3 GiB", generation, 1, |node| {
                node.with("SOFT_GAUDI_HBM", "3g").with("SOFT_GAUDI_HBM_STACKS", "6")
            });
            let end = machine.check(ucx, "exhaust --max 256M").run().ok();
            assert!(end.stdout.contains("12 pieces"), "{generation}: {}", end.report());
        }
    }
}

/// Unaligned, overlapping, twice, zero bytes, unmapped, read-only, device memory whole and in part.
#[test]
fn odd_ranges_of_host_and_device_memory() {
    passes_everywhere("register");
}

#[test]
fn remote_keys_are_packed_unpacked_and_released() {
    passes_everywhere("keys");
}

/// 10 000 cycles each of registration, export and allocation: descriptors and mappings stay flat.
#[test]
fn ten_thousand_cycles_leave_nothing_behind() {
    passes_everywhere("churn");
}

/// What is counted as being there is the same after a hundred and after ten thousand cycles.
#[test]
fn ten_thousand_cycles_leave_the_counters_of_device_memory_flat() {
    for ucx in Ucx::ALL {
        let after = |cycles: u32| counters_after(ucx, &format!("churn --cycles {cycles}"), &[]);
        let (few, many) = (after(100), after(10_000));
        for now in [
            "allocations_live",
            "allocated_bytes",
            "reserved_bytes",
            "dmabuf_live",
            "dmabuf_bytes",
            "in_flight",
        ] {
            assert_eq!(few.get(now), many.get(now), "{now}");
        }
        // The cache keeps the one buffer there is, or most of it; the rest is bounce buffers.
        let cached = |page: &stats_reader::Snapshot| page.get("reg_cache_bytes").unwrap_or(0);
        let other =
            |page: &stats_reader::Snapshot| page.get("pinned_bytes").map(|all| all - cached(page));
        assert_eq!(other(&few), other(&many), "pinned outside the cache");
        assert!(cached(&many) <= (1 << 20) + 4096, "{many}");
        assert_eq!(many.get("allocations_live"), Some(0));
        // One export of the driver's page serves all who ask.
        assert_eq!(few.get("dmabuf_exports"), many.get("dmabuf_exports"));
        for worked in ["allocations", "dmabuf_descriptors"] {
            assert!(many.get(worked) >= Some(10_000), "{worked}: {:?}", many.get(worked));
        }
    }
}

#[test]
fn gigabytes_of_host_memory_open_no_card() {
    for ucx in Ucx::ALL {
        for machine in Machine::all() {
            machine.check(ucx, "host-only").run().ok();
            assert_eq!(machine.cards_opened(), 0, "{}: a card was opened", machine.name);
        }
    }
}

/// The counterpart: were cards opened, the test above would see it.
#[test]
fn an_allocation_opens_one_card() {
    for machine in Machine::all() {
        machine.check(Ucx::V1_22, "where").run().ok();
        assert_eq!(machine.cards_opened(), 1, "{}", machine.name);
    }
}
