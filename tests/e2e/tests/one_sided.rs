//! Put and get between two processes: `gaudi_ipc` carries all that has Gaudi memory on a side, also where the driver imports
//! nothing. There, and to host memory of the peer, it relays. Inside one process `gaudi_cpy` carries them.

use e2e::{Choice, Device, ProtocolLogs, Ucx, client};

const SIZE: usize = 1 << 20;

/// Words for the client, what UCX calls the operation, and whether the peer's memory is a card's.
const OPERATIONS: [(&str, &str); 6] = [
    ("--ops put --mem gaudi:gaudi", "remote memory write by ucp_put* from gaudi to gaudi"),
    ("--ops put --mem host:gaudi", "remote memory write by ucp_put* from host memory to gaudi"),
    ("--ops put --mem gaudi:host", "remote memory write by ucp_put* from gaudi to host"),
    ("--ops get --mem gaudi:gaudi", "remote memory read by ucp_get* into gaudi from gaudi"),
    ("--ops get --mem gaudi:host", "remote memory read by ucp_get* into host memory from gaudi"),
    ("--ops get --mem host:gaudi", "remote memory read by ucp_get* into gaudi from host"),
];

/// What UCP does for a large put or get between these memories, every byte verified.
fn chosen(ucx: Ucx, device: &Device, words: &str, operation: &str) -> Choice {
    let logs = ProtocolLogs::new().expect("a folder");
    let tool = client(ucx, device, &format!("pair --plain --sizes 1M {words}"));
    logs.of(tool).run().ok();
    let protocols = logs.read().expect("protocols");
    let choice = protocols.choice("intra-node", operation, SIZE);
    choice.unwrap_or_else(|| panic!("nothing of {operation}")).clone()
}

#[test]
fn gaudi_memory_on_either_side_is_carried_by_ipc_whether_the_driver_imports_or_not() {
    for ucx in Ucx::ALL {
        for device in [Device::importing(2), Device::not_importing(2)] {
            for (words, operation) in OPERATIONS {
                let choice = chosen(ucx, &device, words, operation);
                assert_eq!(choice.protocol, "zero-copy", "UCX {}, {operation}", ucx.name());
                assert!(choice.transports.starts_with("gaudi_ipc"), "{operation}: {choice:?}");
            }
        }
    }
}

#[test]
fn host_memory_on_both_sides_is_left_to_ucx() {
    let operation = "remote memory write by ucp_put* from host memory to host";
    for device in [Device::importing(2), Device::not_importing(2)] {
        let choice = chosen(Ucx::V1_22, &device, "--ops put --mem host:host", operation);
        assert!(!choice.transports.contains("gaudi_ipc"), "{choice:?}");
    }
}

/// As NIXL has tried: nothing is emulated, and every size has to find a lane. With error handling too, and inside one process.
#[test]
fn every_size_goes_without_emulation() {
    for ucx in Ucx::ALL {
        for device in [Device::importing(2), Device::not_importing(2)] {
            for (run, options) in
                [("pair", ""), ("pair", "--peer-errors"), ("loopback", "--peer-errors")]
            {
                let words = format!(
                    "{run} --plain --ops put,get --mem gaudi:gaudi,gaudi:host,host:gaudi \
                     --sizes 1,8,4K,64K+1,1M+3,8M {options}"
                );
                let tool = client(ucx, &device, &words);
                tool.env("UCX_PROTO_EMULATION_ENABLE", "n").run().ok();
            }
        }
    }
}
