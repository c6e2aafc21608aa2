//! A guest in UCX's house: programs that do not care about Gaudi, and features under which a careless
//! transport is known to crash stock UCX, each as its regression test.

mod memory;

use std::time::Duration;

use e2e::{Device, Finished, Perftest, Running, SoftNode, Ucx, Workbench};
use memory::Machine;

#[track_caller]
fn works(test: Perftest) {
    let pair = test.run().unwrap_or_else(|error| panic!("{error:#}"));
    pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
}

fn tag(memory: &str, options: &str) -> Perftest {
    Perftest::new(&Workbench::from_env(), "tag_lat", 4096)
        .iterations(100, 10)
        .plugin()
        .both(|tool| tool.words(&format!("-m {memory}")).words(options))
}

/// A copy transport without an event fd leaves a lane empty that UCX then dereferences.
#[test]
fn wakeup_feature_with_gaudi_memory() {
    works(tag("gaudi", "-I").device(&Device::software()));
}

#[test]
fn wakeup_feature_with_host_memory_only() {
    works(tag("host", "-I").device(&Device::software()));
}

#[test]
fn sleeping_worker_with_gaudi_memory() {
    works(tag("gaudi", "-E sleep").device(&Device::software()));
}

#[test]
fn peer_error_mode_with_gaudi_memory() {
    works(tag("gaudi", "-e").device(&Device::software()));
}

#[test]
fn host_only_program_is_not_disturbed() {
    works(tag("host", "").device(&Device::software()));
}

/// The old protocols take our transport as a lane for host messages of a process to itself, because
/// its domain accesses and registers host memory.
const OLD_PROTOCOLS: [&str; 2] = ["get_zcopy", "put_zcopy"];

/// Every byte of host messages over the lanes that the old protocols choose, and no card for it.
#[test]
fn old_protocols_send_host_memory_to_themselves_byte_by_byte_and_open_no_card() {
    let bench = Workbench::from_env();
    for ucx in Ucx::ALL {
        for scheme in OLD_PROTOCOLS {
            let machine = Machine::new("Gaudi2 with one card", "gaudi2", 1);
            bench
                .ucp_check(ucx)
                .plugin()
                .device(&machine.device)
                .words("loopback --mem host:host --ops tag,am --sizes 1,4095,70001,1M,4194319")
                .arg("--ucx")
                .arg(ucx.root(bench.layout()))
                .env("UCX_PROTO_ENABLE", "n")
                .env("UCX_RNDV_SCHEME", scheme)
                .run()
                .ok();
            assert_eq!(machine.cards_opened(), 0, "UCX {}, {scheme}", ucx.name());
        }
    }
}

/// A lane that refuses makes these wait for ever.
#[test]
fn old_protocols_end_perftest_of_host_memory_with_itself() {
    for scheme in OLD_PROTOCOLS {
        for test in ["tag_bw", "ucp_am_bw"] {
            let end = Workbench::from_env()
                .tool(Ucx::V1_22, "ucx_perftest")
                .plugin()
                .device(&Device::software())
                .words(&format!("-l -f -t {test} -s 1048576 -n 200 -w 10"))
                .env("UCX_PROTO_ENABLE", "n")
                .env("UCX_RNDV_SCHEME", scheme)
                .limit(Duration::from_secs(60))
                .run()
                .ok();
            let said = format!("{}{}", end.stdout, end.stderr);
            assert!(!said.contains("ERROR"), "{scheme} {test}\n{}", end.report());
        }
    }
}

/// The plugin loaded on one side only: transports are compared by name and must not be mistaken.
#[test]
fn peer_without_plugin_talks_to_peer_with_it() {
    let device = Device::software();
    for plugin_on_server in [true, false] {
        works(Perftest::new(&Workbench::from_env(), "tag_bw", 65536).iterations(100, 10).sides(
            |server| if plugin_on_server { server.plugin().device(&device) } else { server },
            |client| if plugin_on_server { client } else { client.plugin().device(&device) },
        ));
    }
}

#[test]
fn two_processes_started_alike_take_two_cards() {
    let device = Device::Software(SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2"));
    works(tag("gaudi", "").device(&device));
}

/// One card and two processes that want one each: the second is refused in words.
#[test]
fn second_process_on_the_only_card_is_refused_in_words() {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1");
    let device = Device::Software(node);
    let owner = hold_the_only_card(&device);
    let second = allocate(&device);
    assert!(!second.crashed(), "{}", second.report());
    assert!(!second.stdout.contains("allocated 1M"), "two owners\n{}", second.report());
    let said = second
        .stdout
        .lines()
        .chain(second.stderr.lines())
        .any(|line| line.contains("ERROR") && line.to_lowercase().contains("busy"));
    assert!(said, "no reason given\n{}", second.report());

    // A killed owner holds nothing.
    drop(owner);
    let third = allocate(&device).ok();
    assert!(third.stdout.contains("allocated 1M"), "{}", third.report());
}

/// Nobody needs the card, so nobody may miss it.
#[test]
fn host_traffic_runs_while_another_process_owns_the_only_card() {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1");
    let device = Device::Software(node);
    let _owner = hold_the_only_card(&device);
    works(tag("host", "").device(&device));
    works(tag("host", "-I").device(&device));
}

/// Loading and listing open no card: it is shown even while someone else owns it.
#[test]
fn listing_opens_no_card() {
    let node = SoftNode::unique().with("SOFT_GAUDI_DEVICES", "1");
    let device = Device::Software(node);
    let _owner = hold_the_only_card(&device);
    let listing = Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_info")
        .plugin()
        .device(&device)
        .arg("-d")
        .run()
        .ok();
    assert!(listing.stdout.contains("Memory domain: gaudi_copy"), "{}", listing.report());
}

/// The machine's cards vanish while a program that never used them runs.
#[test]
fn host_only_program_survives_the_device_taken_away() {
    let device = Device::software();
    let running = Workbench::from_env()
        .ucp_check(Ucx::V1_22)
        .plugin()
        .device(&device)
        .words("host-only --max 1M --iters 100")
        .start();
    let plugin_is_loaded = running.wait_until(|pids| {
        pids.iter().any(|pid| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            maps.contains("libuct_gaudi")
        })
    });
    if let Device::Software(node) = &device {
        node.remove();
    }
    running.finish(Duration::from_secs(120)).ok();
    assert!(plugin_is_loaded, "the program ended before it loaded the plugin");
}

fn allocate(device: &Device) -> Finished {
    Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_info")
        .plugin()
        .device(device)
        .words("-u r -m 1m,gaudi")
        .run()
}

/// A process that uses card 0 until it is dropped.
fn hold_the_only_card(device: &Device) -> Running {
    let owner = Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_perftest")
        .plugin()
        .device(device)
        .words("-l -f -t tag_lat -m gaudi -s 8 -n 1000000000 -w 1")
        .start();
    let held = owner.wait_until(|pids| {
        pids.iter().any(|pid| {
            let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd"));
            descriptors.into_iter().flatten().flatten().any(|descriptor| {
                std::fs::read_link(descriptor.path()).is_ok_and(|path| path.ends_with("accel0"))
            })
        })
    });
    if !held {
        panic!("the card was not taken\n{}", owner.finish(Duration::ZERO).report());
    }
    owner
}

/// What a process holds: threads, and open files that look like a card's.
fn footprint(process: u32) -> (usize, Vec<String>) {
    let count = |folder: &str| std::fs::read_dir(format!("/proc/{process}/{folder}"));
    let threads = count("task").map_or(0, Iterator::count);
    let cards = count("fd").map_or_else(
        |_| Vec::new(),
        |files| {
            files
                .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
                .map(|path| path.to_string_lossy().into_owned())
                .filter(|path| path.contains("accel") || path.contains("hbm"))
                .collect()
        },
    );
    (threads, cards)
}

/// A host-only program in the middle of its traffic has no thread and no card more than without us.
#[test]
fn loaded_and_unused_plugin_adds_no_thread_and_opens_no_card() {
    let device = Device::software();
    let run = |plugin: bool| {
        let tool = Workbench::from_env().tool(Ucx::V1_22, "ucx_perftest");
        let tool = if plugin { tool.plugin().device(&device) } else { tool };
        let running = tool.words("-l -f -t tag_lat -s 8 -n 1000000000 -w 1").start();
        let in_traffic = running.wait_until(|processes| {
            processes.iter().any(|process| {
                let stat = std::fs::read_to_string(format!("/proc/{process}/stat"));
                // User time, in ticks of 10 ms: half a second of it is long after start-up.
                let ticks = stat.ok().and_then(|stat| {
                    stat.rsplit(')').next()?.split_whitespace().nth(11)?.parse::<u64>().ok()
                });
                ticks.is_some_and(|ticks| ticks > 50)
            })
        });
        assert!(in_traffic, "no traffic");
        footprint(running.id())
    };
    let (threads_without, _) = run(false);
    let (threads_with, cards) = run(true);
    assert_eq!(threads_with, threads_without);
    assert_eq!(cards, Vec::<String>::new());
}

/// What both processes of a pair say in words, at this log level.
fn said_at(ucx: Ucx, level: &str, words: &str) -> String {
    let bench = Workbench::from_env();
    let end = bench
        .ucp_check(ucx)
        .plugin()
        .device(&Device::software())
        .words(words)
        .arg("--ucx")
        .arg(ucx.root(bench.layout()))
        .env("UCX_LOG_LEVEL", level)
        .run()
        .ok();
    format!("{}{}", end.stdout, end.stderr)
}

/// UCX asks whether a peer can be reached, with room for the reason, and logs that.
#[test]
fn ucx_is_told_why_a_peer_cannot_be_reached() {
    for ucx in Ucx::ALL {
        let said = said_at(ucx, "debug", "pair --plain --ops tag --mem gaudi:gaudi --sizes 8");
        for transport in ["gaudi_cpy", "gaudi_gdr"] {
            let reason = format!("{transport} copies inside one process only");
            let logged = said.lines().any(|line| line.contains("reach") && line.contains(&reason));
            assert!(logged, "UCX {}: no \"{reason}\"\n{said}", ucx.name());
        }
    }
}

/// One line for each operation, as UCX's own transports write them; none at the level before.
#[test]
fn every_put_and_get_is_logged_at_level_data_and_no_other() {
    for ucx in Ucx::ALL {
        let words = "loopback --ops tag --mem gaudi:gaudi --sizes 8,9194319";
        let said = said_at(ucx, "data", words);
        for operation in ["PUT_SHORT", "GET_SHORT", "_ZCOPY"] {
            let logged = said.lines().any(|line| {
                line.contains("gaudi_") && line.contains(operation) && line.contains(" size ")
            });
            assert!(logged, "UCX {}: no {operation}", ucx.name());
        }
        assert!(!said_at(ucx, "debug", words).contains("_SHORT size "), "UCX {}", ucx.name());
    }
}
