//! `gaudi_ipc` on stock UCX: chosen wherever Gaudi memory of another process is reached, right to the
//! byte, gone without a trace when it cannot be or must not be used, and honest when a peer dies.

use std::time::Duration;

use e2e::{Device, Perftest, ProtocolLogs, Protocols, Ucx, client};
use stats_reader as stats;

/// What UCX logs, one file per process.
fn logs() -> ProtocolLogs {
    ProtocolLogs::new().expect("a temporary folder")
}

#[track_caller]
fn protocols(logs: &ProtocolLogs) -> Protocols {
    logs.read().unwrap_or_else(|error| panic!("{error:#}"))
}

#[track_caller]
fn assert_say(logs: &ProtocolLogs, words: &str) {
    assert!(logs.say(words).expect("logs"), "no process said `{words}`");
}

/// Transports for messages of one size to another process of the machine; empty where UCX names none.
#[track_caller]
fn transports(protocols: &Protocols, operation: &str, size: usize) -> String {
    let choice = protocols.choice("intra-node", operation, size);
    let all = || protocols.operations().collect::<Vec<_>>();
    choice.unwrap_or_else(|| panic!("nothing about `{operation}`: {:#?}", all())).transports.clone()
}

/// Every kind of message with Gaudi memory on a side that a transport could reach directly. Left out:
/// streams, which UCX always copies, and put and get with *host* memory of the peer, which no card of
/// another process can reach.
const KINDS: [&str; 9] = [
    "remote memory write by ucp_put* from host memory to gaudi",
    "remote memory write by ucp_put* from gaudi to gaudi",
    "remote memory read by ucp_get* into host memory from gaudi",
    "remote memory read by ucp_get* into gaudi from gaudi",
    "tagged message by ucp_tag_send* from gaudi",
    "active message by ucp_am_send* from gaudi",
    "rendezvous data fetch into host memory from gaudi",
    "rendezvous data fetch into gaudi from gaudi",
    "rendezvous data fetch into gaudi from host",
];

#[track_caller]
fn assert_chosen_everywhere(protocols: &Protocols) {
    for kind in KINDS {
        for size in [64 << 10, 1 << 20, 64 << 20] {
            let with = transports(protocols, kind, size);
            assert!(with.contains("gaudi_ipc"), "{kind}, {size} bytes: `{with}`");
        }
    }
}

#[track_caller]
fn is_chosen(ucx: Ucx, arguments: &str) {
    let logs = logs();
    logs.of(client(ucx, &Device::importing(2), arguments)).run().ok();
    assert_chosen_everywhere(&protocols(&logs));
}

#[test]
fn ipc_is_chosen_for_every_message_it_can_carry() {
    for ucx in Ucx::WITH_1_21 {
        is_chosen(ucx, "pair --sizes 1,4K,64K,1M+3,8M");
    }
}

/// The condition under which NIXL uses a transport at all.
#[test]
fn ipc_is_chosen_with_error_handling_and_for_sleeping_workers() {
    for (ucx, options) in
        [(Ucx::V1_22, "--peer-errors"), (Ucx::Nixl, "--peer-errors"), (Ucx::V1_22, "--wakeup")]
    {
        is_chosen(ucx, &format!("pair --plain --sizes 1,64K,1M+3 {options}"));
    }
}

#[test]
fn perftest_with_gaudi_memory_selects_ipc() {
    for test in ["tag_bw", "tag_lat", "ucp_put_bw", "ucp_get", "ucp_am_bw"] {
        let logs = logs();
        let run = Perftest::on(&Device::importing(2), test, 1 << 20).words("-m gaudi");
        run.both(|tool| logs.of(tool)).works();
        assert!(protocols(&logs).name_transport("gaudi_ipc"), "{test}");
    }
}

/// Without UCP: the operations themselves.
#[test]
fn perftest_of_the_transport_alone() {
    for test in ["put_bw", "get_bw"] {
        let words = "-m gaudi -x gaudi_ipc -d gaudi_ipc -D zcopy";
        Perftest::on(&Device::importing(2), test, 65536).words(words).works();
    }
}

/// Without UCP: a peer attaches memory by its key and copies from it to other memory. A forged key and a
/// range beyond the memory get nothing.
#[test]
fn attached_memory_of_a_peer_is_a_local_buffer() {
    for ucx in Ucx::WITH_1_21 {
        client(ucx, &Device::importing(2), "memory attach").run().ok();
    }
}

/// Nothing that a copy reaches may be unmapped under it, however little is kept: not the attached side
/// when the key's side is opened, either.
#[test]
fn attached_memory_stays_mapped_during_the_copy() {
    for regions in ["0", "1"] {
        let tool = client(Ucx::V1_22, &Device::importing(2), "memory attach");
        tool.env("UCX_GAUDI_IPC_CACHE_MAX_REGIONS", regions).run().ok();
    }
}

/// Eight processes with a card each, all connected to each other, each of the 28 pairs in both
/// directions at once. Every process has one allocation, of which all others have a part.
fn mesh(ucx: Ucx, arguments: &str, cases: usize) {
    let logs = logs();
    let words = format!("mesh --processes 8 --plain {arguments}");
    let tool = client(ucx, &Device::importing(8), &words);
    let end = logs.of(tool).run().ok();
    let verdict = format!("\n{} passed, 0 failed", 28 * 2 * cases);
    assert!(end.stdout.contains(&verdict), "{}", end.report());
    let each = logs.each().expect("logs");
    assert_eq!(each.len(), 8, "processes");
    for protocols in each {
        let put = "remote memory write by ucp_put* from gaudi to gaudi";
        assert!(transports(&protocols, put, 2 << 20).contains("gaudi_ipc"), "{}", end.report());
    }
}

#[test]
fn eight_processes_reach_each_other_all_at_once() {
    for ucx in Ucx::ALL {
        mesh(ucx, "--ops tag,put,get --mem gaudi:gaudi --sizes 1,4097,2M+13", 3 * 3);
    }
}

#[test]
fn eight_processes_reach_each_other_from_and_to_host_memory() {
    let pairs = "host:gaudi,gaudi:host,gaudi:gaudi";
    let arguments = format!("--ops tag,stream,put,get --mem {pairs} --sizes 7,65537");
    mesh(Ucx::V1_22, &arguments, 4 * 3 * 2);
}

fn staged(device: &Device, variables: &str) -> ProtocolLogs {
    let logs = logs();
    let arguments = "pair --sizes 0,1,4K,1M+3,8M --env UCX_LOG_LEVEL=debug";
    logs.of(client(Ucx::V1_22, device, &format!("{arguments} {variables}"))).run().ok();
    logs
}

/// Every message arrives, and puts and gets are relayed: no memory is exported or imported.
#[test]
fn without_import_in_the_driver_ipc_relays() {
    for ucx in Ucx::WITH_1_21 {
        let logs = logs();
        let words = "pair --sizes 0,1,4K,64K,1M+3,8M";
        logs.of(client(ucx, &Device::not_importing(2), words)).run().ok();
        let protocols = protocols(&logs);
        for kind in KINDS.iter().filter(|kind| kind.contains("ucp_put") || kind.contains("ucp_get"))
        {
            let with = transports(&protocols, kind, 1 << 20);
            assert!(with.contains("gaudi_ipc"), "{kind}: `{with}`");
        }
    }
}

/// A sleeping worker is woken by what comes from the owner of the memory.
#[test]
fn without_import_sleeping_workers_relay() {
    for ucx in Ucx::ALL {
        let words = "pair --plain --ops put,get --sizes 1,64K,1M+3 --wakeup";
        client(ucx, &Device::not_importing(2), words).run().ok();
    }
}

/// Two drivers that differ, as during an upgrade: all messages arrive, and puts and gets are relayed.
#[test]
fn import_in_one_process_only_is_relayed() {
    for ucx in Ucx::ALL {
        for rank in [0, 1] {
            let logs = logs();
            let arguments = "pair --plain --sizes 0,1,4K,1M+3";
            let variable = format!("--env {rank}:SOFT_GAUDI_LENIENT=");
            let words = format!("{arguments} {variable}");
            logs.of(client(ucx, &Device::importing(2), &words)).run().ok();
            let each = logs.each().expect("the logs are there");
            assert_eq!(each.len(), 2, "both processes choose protocols");
            for put in ["put* from gaudi to gaudi", "get* into gaudi from gaudi"] {
                let mut chosen = 0;
                for protocols in &each {
                    let mut names = protocols.operations().map(|(_, name)| name);
                    let Some(operation) = names.find(|name| name.ends_with(put)) else { continue };
                    let with = transports(protocols, operation, 1 << 20);
                    assert!(with.contains("gaudi_ipc"), "{operation}: {with}");
                    chosen += 1;
                }
                assert!(chosen > 0, "nothing about {put}");
            }
        }
    }
}

/// As with `kernel.yama.ptrace_scope=1`, which asks the same question of the same hook. UCX's own ways of
/// looking into another process are refused as well, so it must not try them.
#[test]
fn ipc_is_chosen_where_processes_may_not_look_into_each_other() {
    // SAFETY: asks the kernel for the version and changes nothing.
    let version =
        unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0, 1) };
    if version < 1 {
        println!("skipped: no Landlock ({})", std::io::Error::last_os_error());
        return;
    }
    for ucx in Ucx::ALL {
        let logs = logs();
        let words = "pair --plain --sizes 1,64K,1M+3 --refuse ptrace";
        let tool = client(ucx, &Device::importing(2), words);
        let tool = tool.env("UCX_TLS", "^cma").env("UCX_POSIX_USE_PROC_LINK", "n");
        logs.of(tool).run().ok();
        assert_chosen_everywhere(&protocols(&logs));
    }
}

#[test]
fn ipc_left_out_of_ucx_tls_is_not_used() {
    let logs = staged(&Device::importing(2), "--env UCX_TLS=^gaudi_ipc");
    assert!(!protocols(&logs).name_transport("gaudi_ipc"));
}

/// A lane to oneself would take the place of the copies that UCX's protocols are made of.
#[test]
fn a_process_does_not_reach_itself_by_ipc() {
    for ucx in Ucx::ALL {
        let logs = logs();
        let tool = client(ucx, &Device::software(), "loopback --plain --sizes 1,64K,1M+3");
        logs.of(tool.env("UCX_LOG_LEVEL", "debug")).run().ok();
        assert!(!protocols(&logs).name_transport("gaudi_ipc"));
        assert_say(&logs, "gaudi_ipc: not reachable: same process");
    }
}

/// How often a test that draws its own points of failure does so: few in every run, as many as
/// `UCX_GAUDI_TEST_DEATHS` says (the acceptance run: 100) when asked.
fn deaths() -> u32 {
    let asked = std::env::var("UCX_GAUDI_TEST_DEATHS").ok().and_then(|text| text.parse().ok());
    let deaths = asked.unwrap_or(6);
    println!("{deaths} deaths (UCX_GAUDI_TEST_DEATHS=100 for the acceptance run)");
    deaths
}

/// A peer is killed at a random point of its transfers, as receiver and as sender; the survivor gets
/// its error, and while it lives a third process gets the dead one's card.
#[test]
fn killed_peer_is_an_error_and_its_card_is_free_again() {
    // Six deaths in a round: of tag and am as both sides, of put and get as one.
    let rounds = deaths().div_ceil(6);
    let arguments = format!(
        "peer-errors --reuse-card --times {rounds} --ops tag,am,put,get --mem gaudi:gaudi --sizes 4M"
    );
    let device = Device::importing(2);
    client(Ucx::V1_22, &device, &arguments).limit(Duration::from_secs(600)).run().ok();
}

#[test]
fn killed_peer_leaves_a_survivor_that_works_on() {
    for (ucx, size) in [(Ucx::V1_22, "4M"), (Ucx::Nixl, "4096")] {
        let arguments = format!(
            "peer-errors --ops put,get,tag --mem gaudi:gaudi,host:gaudi,gaudi:host --sizes {size}"
        );
        client(ucx, &Device::importing(2), &arguments).run().ok();
    }
    let relayed = "peer-errors --ops put,get --mem gaudi:gaudi,gaudi:host --sizes 4M";
    client(Ucx::V1_22, &Device::not_importing(2), relayed).run().ok();
}

/// A put or get is ours from end to end, and ends. UCX keeps a rendezvous of a dead peer until the memory
/// is unmapped, and not longer.
#[test]
fn killed_peer_ends_every_operation() {
    let times = deaths().div_ceil(6);
    for (ucx, device, ops) in [
        (Ucx::V1_22, Device::importing(2), "put,get,tag,am"),
        (Ucx::Nixl, Device::importing(2), "put,get,tag,am"),
        (Ucx::V1_22, Device::not_importing(2), "put,get"),
    ] {
        let arguments = format!(
            "peer-errors --direct --times {times} --ops {ops} --mem gaudi:gaudi --sizes 4M"
        );
        let end = client(ucx, &device, &arguments).limit(Duration::from_secs(600)).run().ok();
        // A lost peer is a lost connection, however it is found out. If UCX finds out by another lane first, it cancels a put or
        // get, or finds the endpoint not connected when it flushes. Of messages it may say that the endpoint timed out.
        let shown = end.stdout.lines().filter(|line| line.contains(" ms after the death: "));
        let ours = |line: &&str| ["ok    put ", "ok    get "].iter().any(|ok| line.starts_with(ok));
        let (ours, others): (Vec<_>, Vec<_>) = shown.partition(ours);
        let ends = ["Connection reset by", "Request canceled", "Endpoint is not connected"];
        let is_told = |line: &&&str| ends.iter().any(|end| line.contains(end));
        assert_eq!(ours.iter().filter(is_told).count(), 2 * times as usize, "{ours:?}");
        assert!(!others.iter().any(|line| line.contains("Input/output error")), "{others:?}");
        let is_error = |line: &str| line.contains("ERROR") && line.contains("has ended");
        assert!(!end.stderr.lines().any(is_error), "{}", end.report());
    }
}

/// Nothing tells a stopped process from a slow one: operations wait. Who closes the endpoint by force gets rid of them, by
/// relay, too, where the other process has to do its part.
#[test]
fn operations_on_a_stopped_peer_end_when_the_endpoint_is_closed_by_force() {
    let words = "peer-errors --stop --direct --ops put,get --mem gaudi:gaudi --sizes 4M";
    client(Ucx::V1_22, &Device::not_importing(2), words).run().ok();
}

#[test]
fn thousand_connections_leave_no_descriptor_behind() {
    for (device, count) in [(Device::importing(2), 1000), (Device::not_importing(2), 100)] {
        let arguments = format!(
            "reconnect --count {count} --plain --ops tag,put --mem gaudi:gaudi,gaudi:host --sizes 64K+1"
        );
        client(Ucx::V1_22, &device, &arguments).run().ok();
    }
}

#[test]
fn many_contexts_leave_nothing_behind() {
    for ucx in Ucx::ALL {
        let device = Device::importing(2);
        client(ucx, &device, "reconnect --count 30 --fresh --plain").run().ok();
    }
}

/// Only process 0 has Gaudi memory; process 1 fetches it into host memory, and opens no card for that: there is only one.
#[test]
fn process_with_host_memory_only_fetches_gaudi_memory_without_a_card() {
    for device in [Device::importing(1), Device::not_importing(1)] {
        let logs = logs();
        let words = "pair --one-way --mem gaudi:host --plain --ops tag,am,get --sizes 1,64K,1M+3";
        logs.of(client(Ucx::V1_22, &device, words)).run().ok();
        let fetch = "remote memory read by ucp_get* into host memory from gaudi";
        let with = transports(&protocols(&logs), fetch, 1 << 20);
        assert!(with.contains("gaudi_ipc"), "{with}");
    }
}

/// Runs messages of 1 MiB for ever, and waits until `condition` holds for the counters of one of the two
/// processes.
#[track_caller]
fn counters(variables: &[(&str, &str)], condition: impl Fn(&dyn Fn(&str) -> u64) -> bool) {
    let arguments = "pair --plain --ops tag --mem gaudi:gaudi --sizes 1M --iters 1000000";
    let running = client(Ucx::V1_22, &Device::importing(2), arguments).envs(variables).start();
    let seen = running.wait_until(|processes| {
        processes.iter().any(|process| {
            let Ok(page) = stats::read(*process) else { return false };
            condition(&|name| page.get(name).unwrap_or_else(|| panic!("no counter {name}")))
        })
    });
    assert!(seen, "{variables:?}: {}", running.finish(Duration::ZERO).report());
}

#[test]
fn config_cache_bounds_decide_what_stays_mapped() {
    let warm = |count: &dyn Fn(&str) -> u64| {
        assert!(count("ipc_cache_misses") < 8, "one allocation, mapped again and again");
        count("ipc_cache_hits") > 100
    };
    counters(&[], warm);
    for tight in [("UCX_GAUDI_IPC_CACHE_MAX_REGIONS", "0"), ("UCX_GAUDI_IPC_CACHE_MAX_SIZE", "64k")]
    {
        counters(&[tight], |count| {
            count("ipc_cache_misses") > 20 && count("ipc_cache_evictions") > 20
        });
    }
}

/// What is cleared to the byte, the engine's tests show.
#[test]
fn config_clear_memory_fills_allocations_before_they_are_handed_out() {
    let whole = 1 << 20;
    counters(&[], |count| {
        // The rest of the last page is cleared where memory is shared.
        assert!(count("fill_bytes") < whole, "cleared without being asked to");
        count("ipc_cache_hits") > 10
    });
    counters(&[("UCX_GAUDI_COPY_CLEAR_MEMORY", "y")], |count| {
        count("ipc_cache_hits") > 10 && count("fill_bytes") >= whole
    });
}

/// By default large messages go by `gaudi_ipc` (where that begins is up to the estimates of both ways); with
/// an estimate bad enough none do.
#[test]
fn config_estimates_decide_what_ucx_chooses() {
    let goes = |variables: &[(&str, &str)]| {
        let logs = logs();
        let words = "pair --plain --ops tag --mem gaudi:gaudi --sizes 1M";
        let tool = client(Ucx::V1_22, &Device::importing(2), words).envs(variables);
        logs.of(tool).run().ok();
        let protocols = protocols(&logs);
        [64 << 10, 1 << 20, 64 << 20].map(|size| {
            transports(&protocols, "tagged message by ucp_tag_send* from gaudi", size)
                .contains("gaudi_ipc")
        })
    };
    assert_eq!(goes(&[]), [true; 3]);
    for (variable, value) in [
        ("UCX_GAUDI_IPC_BW", "1MBs"),
        ("UCX_GAUDI_IPC_LAT", "1s"),
        ("UCX_GAUDI_IPC_OVERHEAD", "1s"),
    ] {
        assert_eq!(goes(&[(variable, value)]), [false; 3], "{variable}={value}");
    }
}

#[test]
fn config_failure_is_the_level_at_which_a_lost_peer_is_told() {
    let told = |level: &str, deaths: u32| {
        let device = Device::importing(2);
        let arguments =
            format!("peer-errors --times {deaths} --ops put --mem gaudi:gaudi --sizes 4M");
        let tool = client(Ucx::V1_22, &device, &arguments);
        let end = tool.env("UCX_GAUDI_IPC_FAILURE", level).run().ok();
        end.says(&["gaudi_ipc: copy to or from memory of process"])
    };
    // The client asks for errors only. Whether a death shows as a failed copy is chance: five times as
    // many deaths as it took to see one at level error must show none at level diag.
    let deaths = [1, 2, 4, 8].into_iter().find(|deaths| told("error", *deaths));
    let deaths = deaths.expect("fifteen deaths, and never a word at level error");
    assert!(!told("diag", 5 * deaths), "told at level diag as well");
}
