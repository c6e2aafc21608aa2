//! RDMA on Gaudi memory: NIXL's UCX with its own InfiniBand transport on the software HCA, every byte
//! verified, and the counters of HCA and card that show which way the bytes went.

use e2e::rdma::{Counters, Fabric, RC, TwoNodes, UD};
use e2e::{Device, Finished, Perftest, ProtocolLogs, Protocols, SoftNode, Tool, Ucx, Workbench};

/// Odd lengths, and what each protocol of UCX is chosen for.
const SIZES: &str = "0,1,16,113,5001,64K+1,1M+7";

/// Inline sizes of the HCA and around them.
const SMALL: &str = "1,7,8,16,31,32,63,64,65,100,127,128,129,200,255,256";

/// Two cards that acknowledge writes of HCAs before their engines see them, as newer drivers let them.
fn machine(import: bool) -> Device {
    let lenient = if import { "import" } else { "" };
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2");
    Device::Software(
        node.with("SOFT_GAUDI_LENIENT", lenient).with("SOFT_GAUDI_EARLY_WRITES", "yes"),
    )
}

fn client(device: &Device, words: &str) -> Tool {
    Workbench::from_env().client(Ucx::Nixl, device, words)
}

/// With this choice of transports, and the card's copies beside them.
fn over(tool: Tool, transports: &str) -> Tool {
    tool.env("UCX_TLS", format!("{transports},gaudi_cpy"))
}

fn run(fabric: &Fabric, tool: Tool) -> (Finished, Counters) {
    let end = fabric.under(tool).run().ok();
    (end, fabric.counters().expect("counters"))
}

#[track_caller]
fn assert_nothing_was_refused(counters: &Counters) {
    assert_eq!((counters.get("access_errors"), counters.get("retries")), (0, 0), "{counters:?}");
}

#[test]
fn every_operation_between_every_pair_of_memories_over_rc() {
    let (fabric, device) = (Fabric::new(), machine(true));
    let words = format!("pair --sizes {SIZES},8M+1");
    let (_, counters) = run(&fabric, over(client(&device, &words), RC));
    assert!(counters.get("dmabuf_regions") > 0 && counters.get("direct_bytes") > 64 << 20);
    assert_nothing_was_refused(&counters);
}

#[test]
fn every_operation_between_every_pair_of_memories_over_ud() {
    let (fabric, device) = (Fabric::new(), machine(true));
    let (_, counters) = run(&fabric, over(client(&device, &format!("pair --sizes {SIZES}")), UD));
    assert!(counters.get("datagrams") > 0);
    assert_eq!(counters.get("requests"), 0, "nothing over reliable connections");
}

#[test]
fn every_operation_between_two_nodes_over_rc_and_ud() {
    let nodes = TwoNodes::here();
    for transports in [RC, UD] {
        let (fabric, device) = (Fabric::new(), machine(true));
        let tool = over(client(&device, &format!("pair --sizes {SIZES}")), transports);
        let end = nodes.run(&fabric, tool).ok();
        let counters = fabric.counters().expect("counters");
        assert!(counters.get("stream_bytes") > 1 << 20, "{}", end.report());
    }
}

/// The client reads what arrived by a copy of the card. (Datagrams arrive in host memory, and need no flush.)
#[test]
fn what_an_hca_wrote_is_right_after_a_flush_and_wrong_without() {
    let words = "pair --plain --ops tag,am,put,get --sizes 5001,1M+7 --mem host:gaudi,gaudi:gaudi";
    let tool = || over(client(&machine(false), words), RC);
    run(&Fabric::new(), tool());
    let fabric = Fabric::new();
    let wrong = fabric.under(tool().env("UCX_GAUDI_COPY_FLUSH_PEER_WRITES", "no")).run();
    assert!(!wrong.success() && !wrong.crashed(), "{}", wrong.report());
    assert!(wrong.text().contains("bytes differ"), "{}", wrong.report());
}

/// `gaudi_ipc`: the card of one process writes memory of another's.
#[test]
fn what_a_peers_card_wrote_is_right_after_a_flush_and_wrong_without() {
    let device = machine(true);
    let words = "pair --plain --ops put --sizes 5001,1M+7 --mem gaudi:gaudi";
    client(&device, words).run().ok();
    let wrong = client(&device, words).env("UCX_GAUDI_COPY_FLUSH_PEER_WRITES", "no").run();
    assert!(!wrong.success() && !wrong.crashed(), "{}", wrong.report());
    assert!(wrong.text().contains("bytes differ"), "{}", wrong.report());
}

/// A driver that cannot flush: `yes` means that no HCA gets the memory.
#[test]
fn memory_is_not_offered_to_hcas_where_a_flush_is_demanded_and_there_is_none() {
    let rules = "hlthunk_cs_flush_pci_hbw_writes fail:EINVAL times=0";
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2").with_faults(rules);
    let (fabric, device) = (Fabric::new(), Device::Software(node));
    let words = "pair --plain --ops tag,put --sizes 5001,1M+7 --mem gaudi:gaudi";
    let tool = || over(client(&device, words), RC);
    let (_, direct) = run(&fabric, tool());
    let demanded = tool().env("UCX_GAUDI_COPY_FLUSH_PEER_WRITES", "yes");
    let (staged, both) = run(&fabric, demanded);
    assert_eq!(both.get("dmabuf_regions"), direct.get("dmabuf_regions"), "{}", staged.report());
    assert!(staged.text().contains("the driver cannot"), "{}", staged.report());
}

/// UCX copies into the request what it sends inline, with the CPU: from Gaudi memory that would be a
/// fault, as the addresses of the card are mapped nowhere.
#[test]
fn small_messages_from_gaudi_memory_are_not_sent_inline() {
    let (fabric, device) = (Fabric::new(), machine(false));
    let words = format!("pair --plain --sizes {SMALL} --mem gaudi:gaudi,gaudi:host,host:gaudi");
    let logs = logs();
    let (_, counters) = run(&fabric, logs.of(over(client(&device, &words), RC)));
    assert_nothing_was_refused(&counters);
    let protocols = logs.read().expect("protocols");
    for operation in [
        "remote memory write by ucp_put* from gaudi to gaudi",
        "remote memory write by ucp_put* from gaudi to host",
    ] {
        for size in [1, 64, 256] {
            let choice = protocols.choice("intra-node", operation, size).expect("a row");
            assert_eq!(choice.protocol, "zero-copy", "{operation}, {size} bytes: {choice:?}");
        }
    }
}

fn logs() -> ProtocolLogs {
    ProtocolLogs::new().expect("a temporary folder")
}

/// The transports of a rendezvous between Gaudi memories, and the protocol.
fn fetch(protocols: &Protocols, size: usize) -> (String, String) {
    let operation = "rendezvous data fetch into gaudi from gaudi";
    let choice = protocols.choice("intra-node", operation, size);
    let choice = choice.unwrap_or_else(|| panic!("nothing of `{operation}`: {protocols:#?}"));
    (choice.protocol.clone(), choice.transports.clone())
}

/// All transports, as a user has them who sets nothing.
fn two_cards(import: bool, rate: &str, extra: &[(&str, &str)]) -> (Protocols, Counters) {
    // An HCA beside each card.
    let hcas = Fabric::new().with("SOFT_RDMA_DEVICES", "2").with("SOFT_RDMA_PLACES", "0,1");
    let (fabric, device) = (hcas.with("SOFT_RDMA_RATE", rate), machine(import));
    let logs = logs();
    let words = "pair --plain --ops tag,put,get --mem gaudi:gaudi --sizes 4K,1M+3,8M";
    let tool =
        extra.iter().fold(client(&device, words), |tool, (name, value)| tool.env(name, value));
    let (_, counters) = run(&fabric, logs.of(tool));
    (logs.read().expect("protocols"), counters)
}

/// What upstream drivers can do: no import. UCX finds out by itself that the HCA's loopback is the
/// shorter way.
#[test]
fn two_cards_without_import_talk_through_the_hca_where_that_is_faster() {
    let (protocols, counters) = two_cards(false, "200", &[]);
    let (protocol, transports) = fetch(&protocols, 8 << 20);
    assert_eq!(protocol, "zero-copy read from remote");
    assert!(transports.contains("rc_verbs/softrdma"), "{transports}");
    // Three operations in both directions, each byte once.
    assert!(counters.get("direct_bytes") >= 3 * 2 * (9 << 20), "{counters:?}");
    assert_nothing_was_refused(&counters);
}

#[test]
fn two_cards_stage_through_host_memory_where_dma_bufs_are_off() {
    let (protocols, counters) = two_cards(false, "200", &[("UCX_GAUDI_COPY_DMABUF", "no")]);
    assert_eq!(counters.get("dmabuf_regions"), 0);
    let (protocol, _) = fetch(&protocols, 8 << 20);
    assert!(protocol.contains("frag host"), "{protocol}");
}

#[test]
fn two_cards_with_import_talk_directly_and_may_use_the_hca_beside_it() {
    let (protocols, _) = two_cards(true, "100", &[]);
    let (_, transports) = fetch(&protocols, 8 << 20);
    assert!(transports.contains("gaudi_ipc"), "{transports}");
}

/// Endpoints are made before the first card is open, and connected after. See
/// `uct-gaudi/src/ipc/interface.rs`, `no_import`.
#[test]
fn keys_unpacked_while_an_endpoint_is_being_connected_stay_valid() {
    for _ in 0..6 {
        let (fabric, device) = (Fabric::new(), machine(false));
        let words = "pair --plain --ops am,put --sizes 1 --mem gaudi:gaudi";
        fabric.under(client(&device, words)).run().ok();
    }
}

/// Names that scripts in the field use, `UCX_MEMTYPE_CACHE` left as it is.
#[test]
fn transport_lists_in_use_work_unchanged() {
    for transports in
        ["gaudi,rc,ud", "ib,rc,gaudi_gdr", "rc,gaudi_gdr,sm", "rc,ud,ib,gaudi_gdr", "ib,gaudi"]
    {
        let (fabric, device) = (Fabric::new(), machine(true));
        let words = "pair --plain --ops tag,am,put,get --sizes 1,113,64K+1,1M+7";
        let tool = client(&device, words).env("UCX_TLS", transports);
        let (end, counters) = run(&fabric, tool);
        assert!(counters.get("dmabuf_regions") > 0, "{transports}: {}", end.report());
        assert!(!end.report().contains("WARN"), "{transports}: {}", end.report());
    }
}

/// A registration of a part of an allocation reaches that part: `ucp-check` puts its buffers at odd
/// offsets of larger allocations, and checks what lies around them.
#[test]
fn interior_ranges_of_an_allocation_are_registered_where_they_are() {
    let (fabric, device) = (Fabric::new(), machine(true));
    for seed in 1..4 {
        let words = format!("pair --plain --ops put,get,tag --sizes 4095,64K-1 --seed {seed}");
        let tool = over(client(&device, &words), RC);
        let tool = tool.words("--mem gaudi:gaudi,host:gaudi,gaudi:host");
        let (_, counters) = run(&fabric, tool);
        assert_nothing_was_refused(&counters);
    }
}

/// NIXL's UCX has a module for EFA, which loads where the machine has libefa and asks it about every device.
#[test]
fn the_libefa_of_the_machine_takes_the_hca_for_none_of_its_own() {
    // SAFETY: a library of rdma-core; its constructors do nothing but register a driver.
    if unsafe { libc::dlopen(c"libefa.so.1".as_ptr(), libc::RTLD_LAZY) }.is_null() {
        println!("skipped: no libefa.so.1 (Debian: ibverbs-providers)");
        return;
    }
    let (fabric, device, bench) = (Fabric::new(), machine(true), Workbench::from_env());
    // The machine's RDMA libraries are not hidden.
    let libraries = [vec![bench.layout().soft_gaudi()], Ucx::Nixl.lib_dirs(bench.layout())];
    let libraries = std::env::join_paths(libraries.concat()).expect("no colons");
    let tool = client(&device, "pair --plain --mem host:host --sizes 64K+1");
    let (_, counters) = run(&fabric, over(tool.env("LD_LIBRARY_PATH", libraries), RC));
    assert!(counters.get("direct_copies") > 0);
}

/// `ucp_worker_fence`, which put and get tests call, ends the connection of an HCA that is no mlx5 device, unless
/// `ucx-gaudi run` chooses how (docs/upstream/ucx-remote-flush.md).
///
/// NIXL's package has the InfiniBand module and no `ucx_perftest`; 1.22's runs on its libraries under their usual names.
#[test]
fn every_kind_of_perftest_between_every_pair_of_memories() {
    let (fabric, bench) = (Fabric::new(), Workbench::from_env());
    let _ = fabric.variables("".as_ref());
    let [names, batch] = ["names", "batch"].map(|name| fabric.folder().join(name));
    std::fs::create_dir(&names).expect("a folder");
    let nixl = Ucx::Nixl.lib_dirs(bench.layout()).remove(0);
    let mut preload = std::path::PathBuf::new();
    for entry in std::fs::read_dir(&nixl).expect("a folder").flatten() {
        let name = entry.file_name().into_string().expect("text");
        let Some((library, _)) = name.split_once('-') else { continue };
        if ["libucp", "libuct", "libucs", "libucm"].contains(&library) {
            let link = names.join(format!("{library}.so.0"));
            std::os::unix::fs::symlink(entry.path(), link).expect("a link");
        }
        // It looks for its modules beside the name by which it was loaded.
        preload = if library == "libucs" { entry.path() } else { preload };
    }
    let kinds = ["tag_bw", "tag_lat", "ucp_put_bw", "ucp_get", "ucp_am_bw", "stream_bw"];
    let lines: Vec<String> = kinds
        .iter()
        .flat_map(|kind| ["gaudi", "gaudi,host", "host,gaudi"].map(|memory| (kind, memory)))
        .map(|(kind, memory)| {
            format!("{kind}/{memory} -t {kind} -m {memory} -s 65536 -n 20 -w 5\n")
        })
        .collect();
    std::fs::write(&batch, lines.concat()).expect("written");
    let perftest = Ucx::V1_22.bin_dir(bench.layout()).expect("programs").join("ucx_perftest");
    let words = ["run -q --soft=2 --soft-rdma --", &perftest.display().to_string(), "-f -v -b"];
    let tool = bench.ucx_gaudi(Ucx::Nixl).device(&machine(false)).libraries(&names);
    let tool = over(tool.words(&words.join(" ")).arg(&batch), "rc").env("LD_PRELOAD", preload);
    let tool = tool.env("SOFT_RDMA_DIR", fabric.folder().join("node")).env("SOFT_RDMA_LOG", "off");
    let pair = Perftest::of_tool(tool).run().expect("a server that listens");
    let said = format!("{}\n{}", pair.client.report(), pair.server.report());
    assert!(pair.client.success() && pair.server.success(), "{said}");
    for line in &lines {
        let name = line.split(' ').next().unwrap_or_default();
        assert!(pair.client.stdout.contains(&format!("\n{name},")), "{name}: {said}");
    }
    assert!(!said.contains("ERROR"), "{said}");
}
