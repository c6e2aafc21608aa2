//! NIXL on Gaudi memory: `examples/kv_cache.py` in two processes, over InfiniBand and over `gaudi_ipc`,
//! with every byte checked by itself, and on two nodes. `nixl_transfers.py` makes every kind of transfer.

use e2e::nixl::{block_us, kv_cache, run_kv_cache, transfers};
use e2e::rdma::{Fabric, TwoNodes};
use e2e::{Device, Finished, SoftNode, Tool};

fn machine() -> Device {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
    Device::Software(
        node.with("SOFT_GAUDI_LENIENT", "import").with("SOFT_GAUDI_EARLY_WRITES", "yes"),
    )
}

/// InfiniBand alone, and the card's own copies.
const IB: &str = "rc,gaudi_cpy";

#[track_caller]
fn verified(end: Finished) -> Finished {
    let end = end.ok();
    assert!(end.stdout.contains("every byte is right"), "{}", end.report());
    end
}

fn over_ib(tool: Tool, fabric: &Fabric) -> Tool {
    fabric.under(tool).env("UCX_TLS", IB)
}

#[test]
fn a_cache_is_read_and_written_over_infiniband() {
    for operation in ["READ", "WRITE"] {
        let (device, fabric) = (machine(), Fabric::new());
        let words = format!("--layers 3 --blocks 40 --operation {operation}");
        let Some(tool) = kv_cache(&device, &words) else { return };
        verified(over_ib(tool, &fabric).run());
        let counters = fabric.counters().expect("counters");
        assert!(counters.get("dmabuf_regions") > 0, "{operation}");
        assert!(counters.get("direct_bytes") >= 3 * 40 * 46080, "{operation}");
        assert_eq!(counters.get("access_errors"), 0, "{operation}");
    }
}

#[test]
fn a_cache_is_read_and_written_by_the_card_itself() {
    for operation in ["READ", "WRITE"] {
        let device = machine();
        let words = format!("--layers 3 --blocks 40 --operation {operation}");
        let Some(tool) = kv_cache(&device, &words) else { return };
        verified(tool.run());
    }
}

/// Prepared descriptor lists, READs by many workers at once, half blocks because decode has twice the workers, notifications; and
/// a prefill engine that dies and is started again.
#[test]
fn the_calls_of_vllms_connector_are_replayed() {
    let model = "--replay --layers 2 --head-dim 32 --block-tokens 16 --requests 4";
    for (ways, words) in [("relay,hca", ""), ("import", "--decoders 2 --decode-tp 1 --kill")] {
        let (device, fabric) = (Device::cards(3), Fabric::new());
        let Some(tool) = kv_cache(&device, &format!("{model} --ways {ways} {words}")) else {
            return;
        };
        let end = verified(fabric.under(tool).run());
        for way in ways.split(',') {
            assert!(end.says(&[way, "software card"]), "{}", end.report());
        }
        let killed = end.says(&["prefill engine was killed", "DISCONNECT"]);
        assert_eq!(killed, !words.is_empty(), "{}", end.report());
    }
}

/// NIXL's package brings a libibverbs and a libnl; by the machine's libefa a process gets them a second time, and dies at
/// exit. The other tests hide that library.
#[test]
fn run_keeps_the_machines_rdma_libraries_out() {
    let folders = ["/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu"];
    if !folders.iter().any(|folder| std::path::Path::new(folder).join("libefa.so.1").exists()) {
        println!("skipped: this machine has no libefa (rdma-core)");
        return;
    }
    // With the software HCA, libefa itself does no harm: it asks for a driver behind the device, and finds none.
    for (options, modules) in
        [("--soft=2", ""), ("--soft=2 --soft-rdma", ""), ("--soft=2 --soft-rdma", "all")]
    {
        let (device, fabric) = (machine(), Fabric::new());
        let words = "--layers 1 --blocks 2";
        let Some(tool) = run_kv_cache(&device, options, words) else { return };
        let tool = tool.env("SOFT_RDMA_DIR", fabric.folder().join("node"));
        verified(tool.env("UCX_MODULES", modules).run());
    }
}

/// NIXL has tried to switch UCX's emulation off: then each of these must find a lane, on every machine.
#[test]
fn every_transfer_goes_without_emulation() {
    for (name, device, has_hca) in [
        ("import", Device::importing(2), false),
        ("no import", Device::not_importing(2), false),
        ("no import, lenient card", Device::cards(2).lenient("ordered,unpinned"), false),
        ("HCA", Device::not_importing(2), true),
    ] {
        let Some(tool) = transfers(&device, "--sizes 8,4096,46081,1048577") else { return };
        let fabric = Fabric::new();
        let tool = if has_hca { fabric.under(tool) } else { tool };
        let end = tool.env("UCX_PROTO_EMULATION_ENABLE", "n").run();
        assert!(end.stdout.contains("32 transfers, 0 problems"), "{name}: {}", end.report());
        end.ok();
    }
}

/// Two agents of one process, and each with itself: `gaudi_cpy` copies.
#[test]
fn agents_of_one_process_go_without_emulation() {
    let words = "--one-process --sizes 8,4096,46081,1048577";
    let Some(tool) = transfers(&Device::cards(1), words) else { return };
    let end = tool.env("UCX_PROTO_EMULATION_ENABLE", "n").run();
    assert!(end.stdout.contains("24 transfers, 0 problems"), "{}", end.report());
    end.ok();
}

#[test]
fn a_cache_is_handed_over_between_two_nodes() {
    for operation in ["READ", "WRITE"] {
        let (device, fabric) = (machine(), Fabric::new());
        let words = format!("--layers 4 --blocks 64 --operation {operation}");
        let Some(tool) = kv_cache(&device, &words) else { return };
        verified(TwoNodes::here().run(&fabric, tool.env("UCX_TLS", IB)));
        let counters = fabric.counters().expect("counters");
        assert!(counters.get("stream_bytes") >= 4 * 64 * 46080, "{operation}");
    }
}

#[test]
fn ten_thousand_blocks_of_4_kib() {
    let words = "--layers 1 --blocks 10000 --block-bytes 4096";
    let device = machine();
    let Some(tool) = kv_cache(&device, words) else { return };
    let end = verified(tool.run());
    println!("gaudi_ipc: {:.1} us a block", block_us(&end));
    let (device, fabric) = (machine(), Fabric::new());
    let Some(tool) = kv_cache(&device, words) else { return };
    let end = verified(over_ib(tool, &fabric).run());
    println!("rc: {:.1} us a block", block_us(&end));
}

/// What serving does: one transfer of many blocks, here over a cache of 2 000. 100 000 of them are 9 GB on the
/// way through this test, so the suite moves fewer unless `UCX_GAUDI_TEST_BLOCKS` says otherwise.
#[test]
fn many_blocks_of_45_kib_in_one_transfer() {
    let asked = std::env::var("UCX_GAUDI_TEST_BLOCKS").ok().and_then(|text| text.parse().ok());
    let blocks = asked.unwrap_or(5_000_u64);
    println!("{blocks} blocks (UCX_GAUDI_TEST_BLOCKS=100000 for what serving does)");
    let words = format!("--layers 1 --blocks 2000 --descriptors {blocks}");
    let limit = std::time::Duration::from_secs(100 + blocks / 100);
    let device = machine();
    let Some(tool) = kv_cache(&device, &words) else { return };
    let end = verified(tool.limit(limit).run());
    println!("gaudi_ipc: {:.1} us a block", block_us(&end));
    let (device, fabric) = (machine(), Fabric::new());
    let Some(tool) = kv_cache(&device, &words) else { return };
    let end = verified(over_ib(tool, &fabric).limit(limit).run());
    println!("rc: {:.1} us a block", block_us(&end));
}

/// NIXL posts an operation for each block. This card begins late, so that blocks are posted while a copy
/// waits; those share a submission.
#[test]
fn many_blocks_take_few_submissions() {
    let node =
        SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2").with("SOFT_GAUDI_LENIENT", "import");
    let (device, fabric) =
        (Device::Software(node.with("SOFT_GAUDI_LATENCY", "5000")), Fabric::new());
    let words = "--layers 1 --blocks 100 --block-bytes 4096 --descriptors 2000";
    let Some(tool) = kv_cache(&device, words) else { return };
    std::fs::create_dir_all(fabric.folder()).expect("a folder");
    verified(tool.env("UCX_GAUDI_TRACE", fabric.folder().join("trace.%p")).run());
    let files = std::fs::read_dir(fabric.folder()).expect("the folder").flatten();
    let texts = files.map(|file| std::fs::read_to_string(file.path()).expect("a recording"));
    let call = "\"call\":\"hlthunk_command_submission\"";
    let submissions: usize = texts.map(|text| text.matches(call).count()).sum();
    println!("{submissions} submissions");
    // Filling, reading back and set-up are submissions too, about 200 of them.
    assert!((1..1000).contains(&submissions), "{submissions} for 2000 blocks");
}

#[test]
fn a_peer_that_is_killed_in_a_transfer_is_an_error() {
    let words = "--layers 1 --blocks 1000 --timeout 60 --kill";
    for (operation, ib) in [("READ", false), ("WRITE", true)] {
        let (device, fabric) = (machine(), Fabric::new());
        let Some(tool) = kv_cache(&device, &format!("{words} --operation {operation}")) else {
            return;
        };
        let tool = if ib { over_ib(tool, &fabric) } else { tool };
        let tool = tool.env("UCX_RC_TIMEOUT", "100ms").env("UCX_RC_RETRY_COUNT", "3");
        // Who fetches from memory that outlives its process learns of the death from the keep-alive.
        let end = tool.env("UCX_KEEPALIVE_INTERVAL", "1s").run().ok();
        assert!(end.stdout.contains("the peer died"), "{}", end.report());
    }
}
