//! Random sequences of allocation, freeing, queries and exports on two software cards, held against
//! a model.

mod machine;

use std::os::fd::AsFd;
use std::sync::Arc;

use gaudi::{Allocation, Device, DeviceAddr, runtime};
use machine::{fresh, write};
use proptest::prelude::*;
use soft_gaudi::dmabuf::Exported;

#[derive(Clone, Debug)]
enum Step {
    Alloc {
        card: usize,
        len: u64,
        align_log2: u32,
    },
    Free(usize),
    /// Looks up a range near an allocation, perhaps sticking out of it.
    Query {
        pick: usize,
        offset: i64,
        len: usize,
    },
    Export {
        pick: usize,
        alone: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![4 => 1..10_000_u64, 2 => 1..4_000_000_u64, 1 => 1..1_000_000_000_u64];
    let step = prop_oneof![
        5 => (0..2_usize, len, 0..22_u32)
            .prop_map(|(card, len, align_log2)| Step::Alloc { card, len, align_log2 }),
        3 => any::<usize>().prop_map(Step::Free),
        4 => (any::<usize>(), -5000..5000_i64, 0..9000_usize)
            .prop_map(|(pick, offset, len)| Step::Query { pick, offset, len }),
        2 => (any::<usize>(), any::<bool>())
            .prop_map(|(pick, alone)| Step::Export { pick, alone }),
    ];
    prop::collection::vec(step, 1..60)
}

/// An allocation with its number in its first bytes.
struct Tenant {
    allocation: Allocation,
    tag: [u8; 8],
}

impl Tenant {
    fn range(&self) -> (u64, u64) {
        let start = self.allocation.addr().0;
        (start, start + self.allocation.len())
    }
}

fn check_export(tenant: &Tenant, alone: bool) {
    let allocation = &tenant.allocation;
    let device = allocation.device();
    let exported = if alone {
        device.export_alone(allocation.addr(), allocation.len())
    } else {
        device.export(allocation.addr(), allocation.len())
    };
    let (fd, offset) = exported.unwrap();
    let export = Exported::from_fd(fd.as_fd()).unwrap();
    assert!(offset + allocation.len() <= export.size());
    assert_eq!(export.device(), device.info().index);
    let mut at = offset;
    let range = export.ranges().iter().find(|range| {
        let inside = at < range.len;
        at = if inside { at } else { at - range.len };
        inside
    });
    let len = tenant.tag.len().min(allocation.len() as usize);
    // SAFETY: inside the mapped range (pieces are whole pages, the tag starts one); not written to meanwhile.
    let found = unsafe { std::slice::from_raw_parts(range.unwrap().ptr.add(at as usize), len) };
    assert_eq!(found, &tenant.tag[..len]);
}

fn run(cards: &[Arc<Device>; 2], steps: Vec<Step>) {
    let mut tenants: Vec<Tenant> = Vec::new();
    for (number, step) in steps.into_iter().enumerate() {
        match step {
            Step::Alloc { card, len, align_log2 } => {
                let allocation = cards[card].alloc(len, 1 << align_log2).unwrap();
                assert_eq!(allocation.addr().0 % (1 << align_log2), 0);
                let tag = (number as u64 + 1).to_le_bytes();
                write(&cards[card], allocation.addr(), &tag[..tag.len().min(len as usize)]);
                tenants.push(Tenant { allocation, tag });
            }
            Step::Free(pick) if !tenants.is_empty() => {
                drop(tenants.swap_remove(pick % tenants.len()));
            }
            Step::Query { pick, offset, len } if !tenants.is_empty() => {
                let base = tenants[pick % tenants.len()].allocation.addr().0;
                let addr = base.wrapping_add_signed(offset);
                let end = addr + len as u64;
                let expected = tenants.iter().find(|tenant| {
                    let (start, stop) = tenant.range();
                    start <= addr && addr < stop && end <= stop
                });
                let found = runtime().locate(addr, len);
                assert_eq!(found.is_some(), expected.is_some());
                if let (Some(found), Some(tenant)) = (found, expected) {
                    assert_eq!(found.base, tenant.allocation.addr());
                    assert_eq!(found.length, tenant.allocation.len());
                    assert_eq!(found.offset, addr - found.base.0);
                    assert_eq!(found.device_id, tenant.allocation.device().id());
                }
            }
            Step::Export { pick, alone } if !tenants.is_empty() => {
                check_export(&tenants[pick % tenants.len()], alone);
            }
            Step::Free(_) | Step::Query { .. } | Step::Export { .. } => {}
        }
        for card in cards {
            let mine = tenants.iter().filter(|tenant| tenant.allocation.device().id() == card.id());
            let sizes: Vec<u64> =
                mine.map(|tenant| tenant.allocation.len().next_multiple_of(4096)).collect();
            let memory = card.memory();
            assert_eq!(memory.allocations, sizes.len());
            assert_eq!(memory.used, sizes.iter().sum::<u64>());
            assert!(memory.reserved >= memory.used && memory.reserved <= memory.total);
        }
    }
    // No allocation overwrote another.
    for tenant in &tenants {
        check_export(tenant, false);
    }
    let ranges: Vec<DeviceAddr> = tenants.iter().map(|tenant| tenant.allocation.addr()).collect();
    drop(tenants);
    assert!(ranges.into_iter().all(|addr| runtime().locate(addr.0, 0).is_none()));
}

#[test]
fn memory_agrees_with_a_model_over_any_sequence() {
    machine::set_up("gaudi2");
    let cards = [fresh(), fresh()];
    proptest!(ProptestConfig::with_cases(60), |(steps in steps())| run(&cards, steps));
    for card in &cards {
        assert_eq!(card.memory().allocations, 0);
        card.alloc(card.memory().total, 1).expect("what is kept is given back when it is needed");
    }
}
