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
