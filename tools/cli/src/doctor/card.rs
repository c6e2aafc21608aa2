//! A verified copy, an export, and a test for imports, on a card that the engine chooses.

use std::path::Path;

use gaudi::{DeviceChoice, Side, runtime};
use serde_json::json;

use crate::failure::Failure;
use crate::info::choice;
use crate::output::size;
use crate::report::Finding;

/// Bytes to copy: a round number, as in the vendor's own programs. `check-card` tries odd ones, last.
const LEN: usize = 1 << 20;

/// In the child: opens a card and copies there and back.
pub(super) fn check(card: Option<&str>) -> Vec<Finding> {
    let choice = choice(card).unwrap_or(DeviceChoice::Any);
    let device = match runtime().open(&choice) {
        Ok(device) => device,
        Err(error) if error.kind() == gaudi::ErrorKind::DeviceBusy => {
            let failure = Failure::from(error);
            return vec![Finding::warning("copy", failure.what, failure.remedy)];
        }
        Err(error) => return vec![Finding::failed("copy", &Failure::from(error))],
    };
    let name = device.info().to_string();
    if let Err(error) = device.can_copy() {
        return vec![Finding::warning("copy", Failure::from(error).to_string(), "")];
    }
    let there = match device.alloc(LEN as u64, 1) {
        Ok(there) => there,
        Err(error) => return vec![Finding::failed("copy", &Failure::from(error))],
    };
    let sent: Vec<u8> = (0..LEN).map(|at| (at * 31 + at / 256) as u8).collect();
    let mut back = vec![0_u8; LEN];
    let mut source = sent.clone();
    let (at, from, to) = (there.addr(), source.as_mut_ptr(), back.as_mut_ptr());
    // SAFETY: both buffers live during the calls, which return when the bytes have arrived, and nothing else uses them.
    let copied = unsafe {
        device
            .copy_blocking(Side::Device(at), Side::Host(from), LEN)
            .and_then(|()| device.copy_blocking(Side::Host(to), Side::Device(at), LEN))
    };
    let copy = match copied {
        Err(error) => Finding::failed("copy", &Failure::from(error)),
        Ok(()) if back != sent => {
            let wrong = back.iter().zip(&sent).filter(|(back, sent)| back != sent).count();
            let found = format!("{name}: {wrong} of {LEN} bytes came back wrong");
            Finding::bad(
                "copy",
                found,
                "run `ucx-gaudi check-card --thorough`, and report what it finds",
            )
        }
        Ok(()) => {
            let found = format!("{name}: {} there and back, every byte right", size(LEN as u64));
            Finding::good("copy", found)
        }
    };
    let export = match device.export(there.addr(), LEN as u64) {
        Ok(_) if is_upstream(Path::new("/")) && lacks_peer_to_peer(&kernel_symbols()) => {
            Finding::warning(
                "dma-buf",
                "memory can be exported, but no HCA can map it: this kernel is built without CONFIG_PCI_P2PDMA",
                "with an HCA use another kernel; with this one messages are staged through host memory (share/doc/ucx-gaudi/docs/rdma.md)",
            )
        }
        Ok(_) if device.info().is_software || is_upstream(Path::new("/")) => {
            Finding::good("dma-buf", "memory can be exported: an HCA may read and write it")
        }
        Ok(_) => Finding::good(
            "dma-buf",
            "memory can be exported; this driver does not look whether an HCA reaches it: `check-card` does",
        ),
        Err(error) => {
            let failure = Failure::from(error);
            let remedy = if failure.remedy.is_empty() {
                "without dma-bufs messages are staged through host memory; check the BIOS (large BAR, IOMMU)".to_owned()
            } else {
                failure.remedy
            };
            Finding::warning("dma-buf", failure.what, remedy)
        }
    };
    let import = match device.can_import() {
        Ok(()) => Finding::good(
            "import",
            "the driver imports dma-bufs: gaudi_ipc copies from card to card",
        ),
        Err(error) if !error.is_unsupported() => {
            let failure = Failure::from(error);
            Finding::warning("import", failure.what, failure.remedy)
        }
        Err(_) => Finding::good(
            "import",
            "the driver imports no dma-bufs, as no upstream kernel does: gaudi_ipc relays through host memory",
        ),
    };
    vec![copy, export.with(json!({"card": name})), import]
}

/// Whether the machine has Linux's own driver. Habana's driver is out of tree, which the kernel records, and does not
/// need the kernel's peer-to-peer support.
fn is_upstream(root: &Path) -> bool {
    let taint = std::fs::read_to_string(root.join("sys/module/habanalabs/taint"));
    taint.is_ok_and(|taint| !taint.contains('O'))
}

fn kernel_symbols() -> String {
    std::fs::read_to_string("/proc/kallsyms").unwrap_or_default()
}

/// Whether a kernel with these symbols cannot give peers access to a card's memory. Without symbols this is unknown.
fn lacks_peer_to_peer(symbols: &str) -> bool {
    let mut names = symbols.lines().filter_map(|line| line.split_whitespace().nth(2)).peekable();
    names.peek().is_some() && !names.any(|name| name == "pci_p2pdma_distance_many")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_told_apart_by_what_the_kernel_notes() {
        let root = tempfile::tempdir().unwrap();
        let module = root.path().join("sys/module/habanalabs");
        assert!(!is_upstream(root.path()), "no driver");
        std::fs::create_dir_all(&module).unwrap();
        for (taint, upstream) in [("\n", true), ("E\n", true), ("OE\n", false)] {
            std::fs::write(module.join("taint"), taint).unwrap();
            assert_eq!(is_upstream(root.path()), upstream, "{taint:?}");
        }
    }

    #[test]
    fn only_a_kernel_whose_symbols_are_known_can_lack_peer_to_peer() {
        let other = "0000000000000000 T pci_enable_device\n";
        let with = format!("{other}0000000000000000 T pci_p2pdma_distance_many\n");
        assert!(lacks_peer_to_peer(other));
        assert!(!lacks_peer_to_peer(&with));
        assert!(!lacks_peer_to_peer(""), "no symbols");
    }
}
