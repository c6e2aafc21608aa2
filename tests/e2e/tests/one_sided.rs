//! Put and get between two processes whose driver imports dma-bufs: which of them `gaudi_ipc` carries.
//!
//! The transport reaches the peer's Gaudi memory, not its host memory. So a put from Gaudi to the peer's
//! host memory, and a get the other way round, are emulated by UCX as it comes. With one of its variables
//! the peer is asked to do the transfer, and then it is `gaudi_ipc` again.

use e2e::{Choice, Device, ProtocolLogs, Ucx, client};

const SIZE: usize = 1 << 20;

/// What UCP does for a large put or get between these memories, every byte verified.
fn chosen(ucx: Ucx, words: &str, operation: &str, pipelined: &str) -> Choice {
    let logs = ProtocolLogs::new().expect("a folder");
    let tool = client(ucx, &Device::importing(2), &format!("pair --plain --sizes 1M {words}"));
    logs.of(tool).env("UCX_RMA_PPLN_ENABLE", pipelined).run().ok();
    let protocols = logs.read().expect("protocols");
    let choice = protocols.choice("intra-node", operation, SIZE);
    choice.unwrap_or_else(|| panic!("nothing of {operation}")).clone()
}

#[test]
fn the_peers_gaudi_memory_is_reached_directly_whatever_ucx_is_told() {
    let operations = [
        ("--ops put --mem gaudi:gaudi", "remote memory write by ucp_put* from gaudi to gaudi"),
        ("--ops put --mem host:gaudi", "remote memory write by ucp_put* from host memory to gaudi"),
        ("--ops get --mem gaudi:gaudi", "remote memory read by ucp_get* into gaudi from gaudi"),
        (
            "--ops get --mem gaudi:host",
            "remote memory read by ucp_get* into host memory from gaudi",
        ),
    ];
    for ucx in Ucx::ALL {
        for (words, operation) in operations {
            for pipelined in ["n", "y"] {
                let choice = chosen(ucx, words, operation, pipelined);
                assert_eq!(choice.protocol, "zero-copy", "UCX {}, {operation}", ucx.name());
                assert!(choice.transports.starts_with("gaudi_ipc"), "{choice:?}");
            }
        }
    }
}

#[test]
fn the_peers_host_memory_is_reached_by_asking_the_peer() {
    let operations = [
        ("--ops put --mem gaudi:host", "remote memory write by ucp_put* from gaudi to host"),
        ("--ops get --mem host:gaudi", "remote memory read by ucp_get* into gaudi from host"),
    ];
    for ucx in Ucx::ALL {
        for (words, operation) in operations {
            let plain = chosen(ucx, words, operation, "n");
            assert_eq!(plain.protocol, "software emulation", "UCX {}, {operation}", ucx.name());
            let asked = chosen(ucx, words, operation, "y");
            assert!(asked.protocol.starts_with("rndv using zero-copy"), "{operation}: {asked:?}");
            assert!(asked.transports.starts_with("gaudi_ipc"), "{operation}: {asked:?}");
        }
    }
}
