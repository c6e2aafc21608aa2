//! Two processes, each with a card of its own, whose driver cannot import dma-bufs: UCP does messages in pipelines
//! through host memory, and without `gaudi_ipc` everything.

use e2e::{Device, ProtocolLogs, Protocols, Ucx, client};
use ucp_protocols::tuning::STAGING;

/// What `docs/performance.md` recommends for puts, and for gets from Gaudi memory, where there is no `gaudi_ipc`.
const PIPELINED_RMA: (&str, &str) = ("UCX_RMA_PPLN_ENABLE", "y");

/// As between machines without an HCA.
const NO_IPC: (&str, &str) = ("UCX_TLS", "^gaudi_ipc");

/// All operations between all memories, every byte verified.
fn moved(ucx: Ucx, variables: &[(&str, &str)]) -> Protocols {
    let device = Device::not_importing(2);
    let logs = ProtocolLogs::new().expect("a folder");
    let words = "pair --plain --sizes 1,4097,65536,2M+13";
    let end = logs.of(client(ucx, &device, words).envs(variables)).run().ok();
    // Five operations, four pairs of memories, four sizes, two directions. 1.21: without two of active messages.
    let cases = if ucx == Ucx::V1_21 { 144 } else { 160 };
    assert!(end.stdout.contains(&format!("{cases} passed, 0 failed")), "{}", end.report());
    logs.read().expect("protocols")
}

#[track_caller]
fn protocol(protocols: &Protocols, operation: &str, size: usize) -> String {
    let choice = protocols.choice("intra-node", operation, size);
    let told =
        || panic!("nothing of {operation} in {:?}", protocols.operations().collect::<Vec<_>>());
    choice.unwrap_or_else(told).protocol.clone()
}

const LARGE: usize = (2 << 20) + 13;

#[test]
fn messages_are_staged_in_pipelines() {
    for ucx in Ucx::WITH_1_21 {
        let protocols = moved(ucx, &[]);
        for (into, from) in [("gaudi", "gaudi"), ("gaudi", "host"), ("host memory", "gaudi")] {
            let fetch = format!("rendezvous data fetch into {into} from {from}");
            let chosen = protocol(&protocols, &fetch, LARGE);
            let staged = chosen.starts_with("pipeline ") && chosen.contains("frag host");
            assert!(staged, "UCX {}, {fetch}: {chosen}", ucx.name());
        }
        // Straight into the receiver's fragments: one copy at each end and none between.
        let between = protocol(&protocols, "rendezvous data fetch into gaudi from gaudi", LARGE);
        assert!(between.contains("copy to attached"), "{between}");
        assert!(protocols.name_transport("gaudi_cpy"));
    }
}

/// UCX's own choice without `gaudi_ipc`: segment by segment in active messages. With one of its variables they become
/// pipelines, too.
#[test]
fn put_and_get_without_ipc_are_emulated_unless_ucx_is_told_to_pipeline_them() {
    let operations = [
        "remote memory write by ucp_put* from gaudi to gaudi",
        "remote memory write by ucp_put* from host memory to gaudi",
        "remote memory read by ucp_get* into gaudi from gaudi",
        "remote memory read by ucp_get* into host memory from gaudi",
    ];
    for ucx in Ucx::ALL {
        let plain = moved(ucx, &[NO_IPC]);
        let pipelined = moved(ucx, &[NO_IPC, PIPELINED_RMA]);
        for operation in operations {
            assert_eq!(protocol(&plain, operation, LARGE), "software emulation");
            let chosen = protocol(&pipelined, operation, LARGE);
            assert!(chosen.starts_with("rndv using pipeline "), "{operation}: {chosen}");
        }
    }
}

/// Streams have no other way than segment by segment; larger ones need fewer copies. Messages of host
/// memory do not feel it.
#[test]
fn larger_segments_move_the_same_bytes() {
    let larger = ["UCX_SYSV_SEG_SIZE", "UCX_POSIX_SEG_SIZE"].map(|name| (name, "32832"));
    let operations = [
        "tagged message by ucp_tag_send* from host memory",
        "stream message by ucp_stream_send* from host memory",
        "stream message by ucp_stream_send* from gaudi",
    ];
    for ucx in Ucx::ALL {
        let (plain, larger) = (moved(ucx, &[]), moved(ucx, &larger));
        for (operation, size) in operations.into_iter().flat_map(|op| [(op, 1), (op, LARGE)]) {
            let chosen = [&plain, &larger].map(|protocols| protocol(protocols, operation, size));
            assert_eq!(chosen[0], chosen[1], "UCX {}, {operation}, {size} bytes", ucx.name());
        }
    }
}

/// Between machines without an HCA UCX emulates put and get, segment by segment.
#[test]
fn tuned_tcp_needs_fewer_copies_of_the_card() {
    let folder = tempfile::tempdir().expect("a folder");
    let submissions = |name: &str, settings: &[(&str, &str)]| {
        let (device, file) = (Device::not_importing(2), folder.path().join(name));
        let words = "pair --plain --ops put,get,stream --mem gaudi:gaudi --sizes 1M";
        let tool = client(Ucx::V1_22, &device, words).envs(settings).env("UCX_GAUDI_TRACE", &file);
        tool.env("UCX_TLS", "tcp,self,gaudi_cpy").run().ok();
        let calls = std::fs::read_to_string(file).expect("a recording");
        calls.matches("\"hlthunk_command_submission\"").count()
    };
    let (plain, tuned) = (submissions("plain", &[]), submissions("tuned", STAGING));
    println!("{plain} submissions, {tuned} with larger segments");
    assert!(tuned * 4 < plain, "{plain} submissions, {tuned} with larger segments");
}
