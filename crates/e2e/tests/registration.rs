//! Allocation, registration and remote keys of memory domains, through stock libuct: every size and
//! odd range, thousands of cycles without a trace, and nothing paid by programs without a Gaudi.

mod memory;

use e2e::Ucx;
use memory::{Machine, passes_everywhere};

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
        for (generation, pieces) in [("gaudi2", "12 pieces"), ("gaudi1", "12 pieces")] {
            let machine =
                Machine::with("3 GiB", generation, 1, |node| node.with("SOFT_GAUDI_HBM", "3g"));
            let end = machine.check(ucx, "exhaust --max 256M").run().ok();
            assert!(end.stdout.contains(pieces), "{generation}: {}", end.report());
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
