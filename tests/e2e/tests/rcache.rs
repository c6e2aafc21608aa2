//! The registration cache on stock UCX: memory that comes and goes at the same addresses is copied
//! with the bytes of now, and the plugin's counters say that it was pinned, found and given up as
//! often as it should have been.
//!
//! The software card reads memory by its address, so that a stale pin would not show in the bytes
//! (the engine's own tests have a card where it does); it shows in the counters here, and in the
//! bytes on a real card.

mod memory;

use e2e::Ucx;
use memory::{Machine, counters_after};
use stats_reader::Snapshot;

/// The client makes a hundredth of `--cycles`.
const CYCLES: u64 = 60;

/// Counters of the client's process after its check.
fn counters(ucx: Ucx, component: &str, variables: &[(&str, &str)]) -> Snapshot {
    let words = format!("rcache --cycles {} --component {component}", CYCLES * 100);
    counters_after(ucx, &words, variables)
}

fn get(counters: &Snapshot, name: &str) -> u64 {
    counters.get(name).unwrap_or_else(|| panic!("no counter {name}: {counters}"))
}

#[test]
fn memory_that_comes_and_goes_is_pinned_anew_and_memory_that_stays_is_found() {
    for ucx in Ucx::ALL {
        for component in ["gaudi_copy", "gaudi_gdr"] {
            let counters = counters(ucx, component, &[]);
            let count = |name: &str| get(&counters, name);
            let (hits, misses) = (count("reg_cache_hits"), count("reg_cache_misses"));
            // munmap, mmap over it, madvise: each cycle took memory away that was in the cache.
            let gone = 3 * CYCLES;
            assert!(count("reg_cache_invalidations") >= gone, "UCX {}: {counters}", ucx.name());
            assert!(misses >= gone, "UCX {}: {counters}", ucx.name());
            // The steady loop makes 6000 copies from and to 40 buffers, and misses each once; a cycle
            // misses at most six times.
            assert!(hits >= 5_900, "UCX {}: {counters}", ucx.name());
            assert!(misses <= 6 * CYCLES + 40, "UCX {}: {counters}", ucx.name());
            assert_eq!(count("reg_cache_evictions"), 0, "{counters}");
            assert!(count("reg_cache_regions") < 250, "nothing piles up: {counters}");
            assert_eq!(count("dma_errors"), 0, "{counters}");
            // What is pinned is in the cache, but for the bounce buffers.
            let bounce = count("pinned_bytes") - count("reg_cache_bytes");
            assert!(bounce <= 8 << 20, "{counters}");
        }
    }
}

#[test]
fn without_the_cache_every_copy_pins_and_unpins() {
    for ucx in Ucx::ALL {
        for off in [("UCX_GAUDI_COPY_ENABLE_RCACHE", "no"), ("UCX_MEM_EVENTS", "n")] {
            let counters = counters(ucx, "gaudi_copy", &[off]);
            let count = |name: &str| get(&counters, name);
            for name in ["hits", "misses", "invalidations", "evictions", "regions", "bytes"] {
                assert_eq!(count(&format!("reg_cache_{name}")), 0, "{off:?} {name}: {counters}");
            }
            assert!(count("pins") >= 6_000, "{off:?}: {counters}");
            assert!(count("pins") - count("unpins") <= 2, "{off:?}: {counters}");
        }
    }
}

#[test]
fn the_bounds_are_kept_and_the_bytes_are_right_all_the_same() {
    const BUFFER: u64 = 256 << 10;
    for (variable, value, regions, bytes) in [
        ("UCX_GAUDI_COPY_RCACHE_MAX_REGIONS", "7", 7, u64::MAX),
        ("UCX_GAUDI_COPY_RCACHE_MAX_SIZE", "3M", u64::MAX, 3 << 20),
        // Less than one buffer: nothing is kept.
        ("UCX_GAUDI_COPY_RCACHE_MAX_SIZE", "100k", 0, 0),
        ("UCX_GAUDI_COPY_RCACHE_MAX_REGIONS", "0", 0, 0),
    ] {
        let counters = counters(Ucx::V1_22, "gaudi_copy", &[(variable, value)]);
        let count = |name: &str| get(&counters, name);
        assert!(count("reg_cache_regions") <= regions, "{variable}={value}: {counters}");
        assert!(count("reg_cache_bytes") <= bytes, "{variable}={value}: {counters}");
        if regions > 0 {
            assert!(count("reg_cache_bytes") >= BUFFER, "{variable}={value}: {counters}");
            assert!(count("reg_cache_evictions") > 1000, "{variable}={value}: {counters}");
        }
    }
}

#[test]
fn where_events_cannot_be_had_try_says_why_and_yes_fails() {
    for ucx in Ucx::ALL {
        for off in [("UCX_MEM_EVENTS", "n"), ("UCX_MEM_MMAP_HOOK_MODE", "none")] {
            let run = |value: &str| {
                let machine = Machine::eight_cards();
                let check = machine.check(ucx, "rcache --cycles 100").env(off.0, off.1);
                let check = check.env("UCX_GAUDI_COPY_LOG_LEVEL", "info");
                check.env("UCX_GAUDI_COPY_ENABLE_RCACHE", value).run()
            };
            let end = run("try").ok();
            let why = ["INFO", "pinned host memory is not kept", "UCX_MEM_EVENTS", "HOOK_MODE"];
            assert!(end.says(&why), "{off:?}: {}", end.report());
            let end = run("yes").refused();
            let why = ["ERROR", "ENABLE_RCACHE=yes", "UCX_MEM_EVENTS"];
            assert!(end.says(&why), "{off:?}: {}", end.report());
            let end = run("no").ok();
            assert!(!end.says(&["INFO", "not kept"]), "{off:?}: {}", end.report());
        }
    }
}

/// The other way UCX has to learn of memory that is unmapped.
#[test]
fn events_by_relocation_do_as_well() {
    for ucx in Ucx::ALL {
        let counters = counters(
            ucx,
            "gaudi_copy",
            &[("UCX_MEM_MMAP_HOOK_MODE", "reloc"), ("UCX_GAUDI_COPY_ENABLE_RCACHE", "yes")],
        );
        assert!(get(&counters, "reg_cache_invalidations") >= 3 * CYCLES, "{counters}");
    }
}
