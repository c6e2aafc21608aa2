//! What a job does with a Gaudi can be read from outside while it runs, on stock UCX.

use std::cell::Cell;

use e2e::{Device, stock};
use stats_reader as stats;

#[test]
fn counters_of_a_running_job_can_be_read_and_grow() {
    let words = "-l -f -t tag_lat -m gaudi -s 65536 -n 1000000000 -w 1";
    let running = stock("ucx_perftest", &Device::software(), words).start();
    let job = running.id();
    let first = Cell::new(None);
    let grows = running.wait_until(|_| {
        let Some(operations) = stats::read(job).ok().and_then(|page| page.get("submissions"))
        else {
            return false;
        };
        let before = first.get().unwrap_or(operations);
        first.set(Some(before));
        operations > before + 100
    });
    let page = stats::read(job).unwrap_or_else(|error| panic!("{error}"));
    assert!(grows, "{page}");
    assert_eq!(page.cards.len(), 1, "one card is open\n{page}");
    assert!(page.get("allocations_live").is_some_and(|live| live >= 2), "{page}");
    assert_eq!(page.get("dma_errors"), Some(0), "{page}");
}

#[test]
fn a_host_only_job_has_no_page() {
    let words = "-l -f -t tag_lat -s 8 -n 1000000000 -w 1";
    let running = stock("ucx_perftest", &Device::software(), words).start();
    // The plugin is mapped once UCX has loaded its modules; the job runs for ever after.
    let loaded = running.wait_until(|processes| {
        processes.iter().any(|process| {
            std::fs::read_to_string(format!("/proc/{process}/maps"))
                .is_ok_and(|maps| maps.contains("libucx_gaudi"))
        })
    });
    assert!(loaded);
    let answer = stats::read(running.id());
    assert!(matches!(answer, Err(stats::ReadError::NoPage(_))), "{answer:?}");
}
