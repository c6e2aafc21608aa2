//! A guest in UCX's house: programs that do not care about Gaudi, and features under which a careless
//! transport is known to crash stock UCX, each as its regression test.

mod memory;

use std::time::Duration;

use e2e::{Device, Finished, Perftest, Running, Tool, Ucx, Workbench, client, stock};
use memory::Machine;

/// A ping-pong of memory of this kind between two processes.
fn tag(device: &Device, memory: &str, options: &str) -> Perftest {
    Perftest::on(device, "tag_lat", 4096).words(&format!("-m {memory} {options}"))
}

macro_rules! works {
    ($($(#[$doc:meta])* $name:ident: $memory:literal, $options:literal;)*) => {$(
        $(#[$doc])*
        #[test]
        fn $name() {
            tag(&Device::software(), $memory, $options).works();
        }
    )*};
}

works! {
    /// A copy transport without an event fd leaves a lane empty that UCX then dereferences.
    wakeup_feature_with_gaudi_memory: "gaudi", "-I";
    wakeup_feature_with_host_memory_only: "host", "-I";
    sleeping_worker_with_gaudi_memory: "gaudi", "-E sleep";
    peer_error_mode_with_gaudi_memory: "gaudi", "-e";
    host_only_program_is_not_disturbed: "host", "";
}

/// The old protocols take our transport as a lane for host messages of a process to itself, because
/// its domain accesses and registers host memory.
const OLD_PROTOCOLS: [&str; 2] = ["get_zcopy", "put_zcopy"];

/// Every byte of host messages over the lanes that the old protocols choose, and no card for it.
#[test]
fn old_protocols_send_host_memory_to_themselves_byte_by_byte_and_open_no_card() {
    let words = "loopback --mem host:host --ops tag,am --sizes 1,4095,70001,1M,4194319";
    for ucx in Ucx::ALL {
        for scheme in OLD_PROTOCOLS {
            let machine = Machine::one_card();
            let tool = client(ucx, &machine.device, words).env("UCX_PROTO_ENABLE", "n");
            tool.env("UCX_RNDV_SCHEME", scheme).run().ok();
            assert_eq!(machine.cards_opened(), 0, "UCX {}, {scheme}", ucx.name());
        }
    }
}

/// A lane that refuses makes these wait for ever.
#[test]
fn old_protocols_end_perftest_of_host_memory_with_itself() {
    for scheme in OLD_PROTOCOLS {
        for test in ["tag_bw", "ucp_am_bw"] {
            let words = format!("-l -f -t {test} -s 1048576 -n 200 -w 10");
            let tool = stock("ucx_perftest", &Device::software(), &words);
            let tool = tool.env("UCX_PROTO_ENABLE", "n").env("UCX_RNDV_SCHEME", scheme);
            let end = tool.run().ok();
            assert!(!end.says(&["ERROR"]), "{scheme} {test}\n{}", end.report());
        }
    }
}

/// The plugin loaded on one side only: transports are compared by name and must not be mistaken.
#[test]
fn peer_without_plugin_talks_to_peer_with_it() {
    let device = Device::software();
    for plugin_on_server in [true, false] {
        let test = Perftest::new(&Workbench::from_env(), "tag_bw", 65536).iterations(100, 10);
        let with = |tool: Tool| tool.plugin().device(&device);
        let test = if plugin_on_server {
            test.sides(with, |client| client)
        } else {
            test.sides(|server| server, with)
        };
        test.works();
    }
}

#[test]
fn two_processes_started_alike_take_two_cards() {
    tag(&Device::cards(2), "gaudi", "").works();
}

/// One card and two processes that want one each: the second is refused in words.
#[test]
fn second_process_on_the_only_card_is_refused_in_words() {
    let device = Device::cards(1);
    let owner = hold_the_only_card(&device);
    let second = allocate(&device);
    assert!(!second.crashed(), "{}", second.report());
    assert!(!second.stdout.contains("allocated 1M"), "two owners\n{}", second.report());
    let text = second.text().to_lowercase();
    let said = text.lines().any(|line| line.contains("error") && line.contains("busy"));
    assert!(said, "no reason given\n{}", second.report());

    // A killed owner holds nothing.
    drop(owner);
    let third = allocate(&device).ok();
    assert!(third.stdout.contains("allocated 1M"), "{}", third.report());
}

/// Nobody needs the card, so nobody may miss it.
#[test]
fn host_traffic_runs_while_another_process_owns_the_only_card() {
    let device = Device::cards(1);
    let _owner = hold_the_only_card(&device);
    tag(&device, "host", "").works();
    tag(&device, "host", "-I").works();
}

/// Loading and listing open no card: it is shown even while someone else owns it.
#[test]
fn listing_opens_no_card() {
    let device = Device::cards(1);
    let _owner = hold_the_only_card(&device);
    let listing = stock("ucx_info", &device, "-d").run().ok();
    assert!(listing.stdout.contains("Memory domain: gaudi_copy"), "{}", listing.report());
}

/// The machine's cards vanish while a program that never used them runs.
#[test]
fn host_only_program_survives_the_device_taken_away() {
    let device = Device::software();
    let running = client(Ucx::V1_22, &device, "host-only --max 1M --iters 100").start();
    let plugin_is_loaded = running.wait_until(|pids| {
        pids.iter().any(|pid| {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
            maps.contains("libucx_gaudi")
        })
    });
    if let Device::Software(node) = &device {
        node.remove();
    }
    running.finish(Duration::from_secs(120)).ok();
    assert!(plugin_is_loaded, "the program ended before it loaded the plugin");
}

fn allocate(device: &Device) -> Finished {
    stock("ucx_info", device, "-u r -m 1m,gaudi").run()
}

/// A process that uses card 0 until it is dropped.
fn hold_the_only_card(device: &Device) -> Running {
    let words = "-l -f -t tag_lat -m gaudi -s 8 -n 1000000000 -w 1";
    let owner = stock("ucx_perftest", device, words).start();
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
    let entries = |folder: &str| {
        std::fs::read_dir(format!("/proc/{process}/{folder}")).into_iter().flatten().flatten()
    };
    let files = entries("fd").filter_map(|file| std::fs::read_link(file.path()).ok());
    let files = files.map(|path| path.to_string_lossy().into_owned());
    let cards = files.filter(|path| path.contains("accel") || path.contains("hbm")).collect();
    (entries("task").count(), cards)
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
    client(ucx, &Device::software(), words).env("UCX_LOG_LEVEL", level).run().ok().text()
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
