//! dma-bufs that a memory domain is given to register, through stock libuct: bytes, refusals, and what UCP is told.

mod memory;

use e2e::{Device, Ucx, stock};
use memory::Machine;
use stats_reader as stats;

/// Machines whose driver imports, as Habana's own may.
fn importing() -> [Machine; 2] {
    ["gaudi2", "gaudi1"].map(|generation| {
        Machine::with(generation, generation, 3, |node| node.with("SOFT_GAUDI_LENIENT", "import"))
    })
}

#[test]
fn a_dmabuf_is_registered_and_copied_by() {
    for ucx in Ucx::ALL {
        for machine in importing() {
            for component in ["gaudi_copy", "gaudi_gdr"] {
                let end = machine.check(ucx, &format!("import --component {component}")).run().ok();
                assert!(end.stdout.contains("copied by dma-buf"), "{}", end.report());
            }
        }
    }
}

/// A process has one card of the first generation only.
#[test]
fn one_registration_serves_all_cards() {
    for ucx in Ucx::ALL {
        let [machine, _] = importing();
        let end = machine.check(ucx, "import-cards").run().ok();
        assert!(end.stdout.contains("copied by dma-buf"), "{}", end.report());
    }
}

/// As with every upstream driver.
#[test]
fn a_driver_that_does_not_import_is_the_reason_of_the_refusal() {
    for ucx in Ucx::ALL {
        let machine = Machine::one_card();
        let end = machine.check(ucx, "import").env("UCX_LOG_LEVEL", "debug").run().ok();
        assert!(end.stdout.contains("the driver imports no dma-bufs"), "{}", end.report());
        assert!(
            end.says(&["cannot register a dma-buf", "has no dma-buf import"]),
            "{}",
            end.report()
        );
    }
}

/// UCP then registers Gaudi memory by the dma-bufs that the domain itself has exported. These are not imported, which
/// the driver of this machine could not.
#[test]
fn a_domain_that_asks_for_dmabufs_gets_its_own_from_ucp() {
    for ucx in Ucx::ALL {
        let words = "pair --plain --sizes 1,4K,1M+3 --env UCX_GAUDI_COPY_REG_DMABUF=y";
        e2e::client(ucx, &Device::software(), words).run().ok();
    }
}

/// What such a domain costs, and why it is one only where the user wants it.
#[test]
fn ucp_exports_memory_only_for_a_domain_that_asks_for_dmabufs() {
    for (asks, exports) in [("n", false), ("y", true)] {
        let words = "-l -f -t ucp_put_lat -m gaudi -s 65536 -n 1000000000 -w 1";
        let job = stock("ucx_perftest", &Device::software(), words);
        let job = job.env("UCX_GAUDI_COPY_REG_DMABUF", asks).start();
        let count = |name| stats::read(job.id()).ok().and_then(|page| page.get(name));
        assert!(job.wait_until(|_| count("submissions").is_some_and(|number| number > 100)));
        assert_eq!(count("dmabuf_exports"), Some(exports.into()), "REG_DMABUF={asks}");
    }
}
