//! The parsers of the tool, for the crate `fuzz`. Not part of the program that users get.

use gaudi::Sysfs;
use ucp_protocols::Protocols;

use crate::{bench, check_card, counters, explain, open_mpi, scale_out, trace};

/// A recording of driver calls.
pub fn recording(bytes: &[u8]) {
    trace::fuzz(bytes);
}

/// A file of `--save`: of `explain`, `check-card` or `bench`.
pub fn report(bytes: &[u8]) {
    explain::compare::fuzz(bytes);
    check_card::reading::fuzz(bytes);
    bench::compare::fuzz(bytes);
}

/// A page of counters.
pub fn page(bytes: &[u8]) {
    counters::fuzz(bytes);
}

/// Output of other programs and the kernel: UCX's tables of protocols, the version of mpirun, records of the kernel's log.
pub fn listing(text: &str) {
    let protocols = Protocols::parse(text);
    for (scope, operation) in protocols.operations() {
        for size in [0, 1, 8240, usize::MAX] {
            let _ = protocols.choice(scope, operation, size);
        }
    }
    open_mpi::fuzz(text);
    check_card::machine::fuzz_record(text);
}

/// A folder in place of `/sys`, with PCI devices, HCAs and network interfaces.
pub fn sysfs(root: &std::path::Path, bus_id: &str) {
    let text = scale_out::fuzz(&Sysfs::at(root.join("sys")));
    assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?} goes to a terminal");
    check_card::machine::fuzz(root, bus_id);
}
