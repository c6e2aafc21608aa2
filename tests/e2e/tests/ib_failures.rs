//! RDMA on Gaudi memory where something is missing or breaks: HCAs without dma-bufs, limits, ports that
//! fail, a card that is reset, a peer that dies. Every byte is right, or the error shows.

use e2e::rdma::{Counters, Fabric, IMPATIENT, RC, UD};
use e2e::{Device, Finished, SoftNode, Tool, Ucx, Workbench};

const WORDS: &str = "pair --plain --ops tag,am,put,get --sizes 1,113,64K+1,2M+7 \
                     --mem gaudi:gaudi,host:gaudi,gaudi:host";

fn machine() -> SoftNode {
    SoftNode::unique().with("SOFT_GAUDI_DEVICES", "2")
}

fn client(device: &Device, words: &str) -> Tool {
    client_over(RC, device, words)
}

fn client_over(transports: &str, device: &Device, words: &str) -> Tool {
    let tool = Workbench::from_env().client(Ucx::Nixl, device, words);
    tool.env("UCX_TLS", format!("{transports},gaudi_cpy"))
}

fn run(fabric: &Fabric, tool: Tool) -> (Finished, Counters) {
    let end = fabric.under(tool).run().ok();
    (end, fabric.counters().expect("counters"))
}

/// Two HCAs near the first card, which both processes' memory is near to.
fn two_rails() -> Fabric {
    let fabric = Fabric::new().with("SOFT_RDMA_DEVICES", "2").with("SOFT_RDMA_PLACES", "0,0");
    fabric.with("SOFT_RDMA_RATE", "200")
}

/// UCX asks the HCA when it opens it, and does not offer it Gaudi memory.
#[test]
fn an_hca_that_cannot_register_dma_bufs_is_used_with_staging() {
    for (transports, counter, least) in [(RC, "direct_bytes", 2 << 20), (UD, "datagrams", 1000)] {
        let fabric = Fabric::new().with("SOFT_RDMA_DMABUF", "off");
        let device = Device::Software(machine());
        let (_, counters) = run(&fabric, client_over(transports, &device, WORDS));
        assert_eq!(counters.get("dmabuf_regions"), 0);
        assert!(counters.get(counter) > least, "through the HCA all the same");
    }
}

/// Lines of the warning that Gaudi memory is staged because of an HCA.
fn warnings<'a>(text: &'a str, hca: &str) -> Vec<&'a str> {
    let line = |line: &&str| line.contains("WARN") && line.contains("staged") && line.contains(hca);
    text.lines().filter(line).collect()
}

/// Makes `/dev/hl0` for one process and its children: a driver's node, by which UCX takes every HCA for one that
/// registers Gaudi memory by address.
const WITH_NODE: &str = r#"
set -e
new=$(mktemp -d)
mount -t tmpfs tmpfs "$new"
for old in /dev/*; do
    name="$new/${old##*/}"
    if [ -L "$old" ]; then cp -P "$old" "$name"; continue; fi
    if [ -d "$old" ]; then mkdir "$name"; else : > "$name"; fi
    mount --rbind "$old" "$name"
done
: > "$new/hl0"
mount --move "$new" /dev
rmdir "$new"
exec "$@"
"#;

#[test]
fn an_hca_without_dma_bufs_is_used_with_staging_where_the_driver_has_a_node() {
    let fabric = Fabric::new().with("SOFT_RDMA_DMABUF", "off");
    std::fs::create_dir_all(fabric.folder()).expect("a folder");
    let script = fabric.folder().join("with-node.sh");
    std::fs::write(&script, WITH_NODE).expect("written");
    let enter = format!("unshare --mount sh {}", script.display());
    let tried = std::process::Command::new("sh").arg("-c").arg(format!("{enter} true")).output();
    match tried {
        Ok(tried) if tried.status.success() => {}
        tried => {
            println!("skipped: no mount namespace of one's own: {tried:?}");
            return;
        }
    }
    let device = Device::Software(machine());
    for transports in [RC, UD] {
        let tool = client_over(transports, &device, WORDS);
        let tool =
            tool.arg("--via").arg(format!("0:{enter}")).arg("--via").arg(format!("1:{enter}"));
        let (end, counters) = run(&fabric, tool);
        assert_eq!(counters.get("dmabuf_regions"), 0);
        assert_eq!(warnings(&end.text(), "softrdma0").len(), 2, "{}", end.report());
    }
    // UCX opens an HCA that the user did not select, too, and closes it again.
    let tool = client_over("sysv,self", &device, WORDS);
    let tool = tool.arg("--via").arg(format!("0:{enter}")).arg("--via").arg(format!("1:{enter}"));
    let end = fabric.under(tool).run().ok();
    assert!(warnings(&end.text(), "").is_empty(), "{}", end.report());
}

/// One warning in each of two processes, and so many dma-bufs registered, to try, by HCAs that do not refuse them.
#[track_caller]
fn staged(fabric: &Fabric, device: &Device, reason: &str, who: &[&str], tried: u64) {
    for (runs, transports) in [(1, RC), (2, UD)] {
        let (end, counters) = run(fabric, client_over(transports, device, WORDS));
        assert_eq!(counters.get("dmabuf_regions"), runs * tried, "{}", end.report());
        let text = end.text();
        assert_eq!(warnings(&text, "").len(), 2, "{}", end.report());
        for who in who {
            let named = warnings(&text, who);
            assert!(!named.is_empty(), "no word of {who}: {}", end.report());
            assert!(named.iter().all(|line| line.contains(reason)), "no `{reason}`: {named:?}");
        }
    }
}

#[test]
fn a_dma_buf_that_the_hca_refuses_is_staged_with_one_warning() {
    let fabric = Fabric::new().with("SOFT_RDMA_DMABUF", "refused");
    staged(&fabric, &Device::Software(machine()), "not permitted", &["softrdma0 refuses"], 0);
}

/// Each process has a card, and an HCA that reaches it: staged, until the user leaves out the other one.
#[test]
fn one_of_two_hcas_that_refuses_is_named_and_left_out_by_the_user() {
    let fabric = Fabric::new().with("SOFT_RDMA_DMABUF", "bridge");
    let fabric = fabric.with("SOFT_RDMA_DEVICES", "2").with("SOFT_RDMA_PLACES", "0,1");
    let device = Device::Software(machine());
    staged(&fabric, &device, "not permitted", &["softrdma0 refuses", "softrdma1 refuses"], 2);
    let near = "--env 0:UCX_GAUDI_COPY_DEVICE=0 --env 0:UCX_NET_DEVICES=softrdma0:1 \
                --env 1:UCX_GAUDI_COPY_DEVICE=1 --env 1:UCX_NET_DEVICES=softrdma1:1";
    let (end, counters) = run(&fabric, client(&device, WORDS).words(near));
    assert!(counters.get("dmabuf_regions") > 3 * 2, "only tried: {}", end.report());
    assert!(warnings(&end.text(), "").is_empty(), "{}", end.report());
}

#[test]
fn memory_that_the_driver_does_not_export_is_staged_with_one_warning() {
    let rules = "hlthunk_device_mapped_memory_export_dmabuf_fd fail:EINVAL times=0\n\
                 hlthunk_device_memory_export_dmabuf_fd fail:EINVAL times=0";
    let device = Device::Software(machine().with_faults(rules));
    staged(&Fabric::new(), &device, "Invalid argument", &["resizable BAR"], 0);
}

/// Two Gaudi buffers and one of host memory are more than the limit: only the last one counts.
#[test]
fn a_limit_on_locked_memory_leaves_gaudi_memory_direct() {
    let fabric = Fabric::new().with("SOFT_RDMA_MEMLOCK", "250000000");
    let device = Device::Software(machine());
    let words = "pair --plain --ops put,get --sizes 1,64K+1,96M --mem gaudi:gaudi";
    let (_, counters) = run(&fabric, client(&device, words));
    assert!(counters.get("dmabuf_regions") > 0);
    assert!(counters.get("direct_bytes") > 4 * (96 << 20), "{counters:?}");
}

/// What a run wrote in which no process crashed, hung, or received other bytes than were sent.
#[track_caller]
fn sound(end: &Finished) -> String {
    let text = end.text();
    for bad in ["wrong", "hung", "killed by signal"] {
        assert!(!text.contains(bad), "{bad}: {}", end.report());
    }
    text
}

/// Each limit on open files stops another step: UCX's own, opening the card, the export, the registration.
/// Each says so. Where only the registration is too much, staging works.
#[test]
fn a_process_with_few_descriptors_says_so_and_staging_takes_fewer() {
    let (fabric, device) = (Fabric::new(), Device::Software(machine()));
    let words = "pair --plain --ops tag,put,get --sizes 1,64K+1 --mem gaudi:gaudi";
    let limited = |limit: u32| {
        let via = format!("1:prlimit --nofile={limit}");
        fabric.under(client(&device, words)).arg("--via").arg(via)
    };
    if let Err(error) = std::process::Command::new("prlimit").arg("--version").output() {
        println!("skipped: prlimit: {error}");
        return;
    }
    let mut reasons = String::new();
    let enough = (26..200).find(|&limit| {
        let end = limited(limit).run();
        if end.success() {
            return true;
        }
        let text = sound(&end);
        assert!(text.contains("Too many open files"), "{limit}: {}", end.report());
        reasons.push_str(&text);
        false
    });
    let enough = enough.expect("a limit that suffices");
    for reason in ["exporting a dma-buf failed", "(ulimit -n)", "ibv_reg_dmabuf_mr"] {
        assert!(reasons.contains(reason), "no `{reason}` below {enough} descriptors: {reasons}");
    }
    limited(enough - 1).env("UCX_GAUDI_COPY_DMABUF", "no").run().ok();
}

/// A reset ends what the card's memory was registered for: an operation of the HCA on it is an error, at
/// the process that started it, whichever of the two has lost its card.
#[test]
fn a_card_that_is_reset_under_a_registration_is_an_error_and_never_wrong_bytes() {
    for (op, lost, shown) in [
        ("put", 1, "Connection reset by remote peer"),
        ("get", 0, "Connection reset by remote peer"),
        ("put", 0, "local protection error"),
        ("get", 1, "local protection error"),
    ] {
        // The copy that fills the buffer is small: it is complete when the reset comes, and does not fail.
        let node = machine().with("SOFT_GAUDI_LENIENT", "ordered");
        let device = Device::Software(node.with_faults("hlthunk_wait_for_cs reset"));
        let words = format!(
            "pair --plain --one-way --ops {op} --sizes 40K+7 --mem gaudi:gaudi --peer-errors \
             --timeout 20 --env {}:SOFT_GAUDI_FAULTS=no",
            1 - lost
        );
        let fabric = Fabric::new();
        let end = fabric.under(client(&device, &words)).run().refused();
        assert!(sound(&end).contains(shown), "{op}, process {lost}, {shown}: {}", end.report());
    }
}

#[test]
fn large_messages_use_both_rails() {
    let (fabric, device) = (two_rails(), Device::Software(machine()));
    let words = "pair --plain --ops tag,put,get --sizes 64K+1,8M+5 --mem gaudi:gaudi";
    run(&fabric, client(&device, words).env("UCX_MAX_RMA_RAILS", "2"));
    let [first, second] = rails(&fabric);
    let (less, more) = (first.min(second), first.max(second));
    assert!(less * 2 > more, "{first} and {second} bytes");
}

#[test]
fn an_hca_on_the_other_numa_node_is_left_alone() {
    let fabric = Fabric::new().with("SOFT_RDMA_DEVICES", "2").with("SOFT_RDMA_RATE", "200");
    let fabric = fabric.with("SOFT_RDMA_PLACES", "0000:c1:00.0@1,0");
    let device = Device::Software(machine());
    let words = "pair --plain --ops tag,put,get --sizes 64K+1,8M+5 --mem gaudi:gaudi --one-way";
    run(&fabric, client(&device, words));
    let [far, near] = rails(&fabric);
    assert!(near > 20 * far, "{far} bytes through the far HCA, {near} through the near one");
}

/// Bytes that each of two HCAs sent.
fn rails(fabric: &Fabric) -> [u64; 2] {
    let bench = Workbench::from_env();
    [0, 1].map(|hca| fabric.port(bench.layout(), hca, "xmit_bytes").expect("a counter"))
}

/// Requests that are lost are repeated, for some seconds.
#[test]
fn a_rail_that_fails_in_a_transfer_and_comes_back_loses_nothing() {
    let fabric = two_rails().with("SOFT_RDMA_MODEL", "bandwidth=400,latency=5");
    let device = Device::Software(machine());
    let words = "pair --plain --ops tag,put --sizes 16M+5 --iters 6 --mem gaudi:gaudi";
    let tool = fabric.under(client(&device, words).env("UCX_MAX_RMA_RAILS", "2"));
    let running = tool.start();
    let port = fabric.folder().join("node/ports-1/softrdma1");
    let layout = Workbench::from_env().layout().clone();
    let carried = || fabric.port(&layout, 1, "xmit_bytes").unwrap_or(0);
    assert!(running.wait_until(|_| carried() > 20 << 20), "the second rail was not used");
    std::fs::write(&port, "down").expect("the port's file");
    let lost = || fabric.port(&layout, 1, "xmit_discards").unwrap_or(0);
    assert!(running.wait_until(|_| lost() > 0), "the port was not down in a transfer");
    std::fs::write(&port, "up").expect("the port's file");
    let end = running.finish(tool.time_limit()).ok();
    assert!(end.stdout.contains("4 passed, 0 failed"), "{}", end.report());
    let counters = fabric.counters().expect("counters");
    assert!(counters.get("retries") > 0, "{counters:?}");
}

/// One that does not come back ends the endpoint: the program learns it, nothing hangs, no byte is wrong.
#[test]
fn a_rail_that_stays_down_is_an_error_of_the_endpoint() {
    let fabric = two_rails().with("SOFT_RDMA_FAIL", "1@30000000");
    let device = Device::Software(machine());
    let words = "pair --plain --ops tag --sizes 16M+5 --iters 4 --mem gaudi:gaudi --peer-errors";
    let tool = client(&device, words).env("UCX_RC_TIMEOUT", "50ms").env("UCX_RC_RETRY_COUNT", "3");
    let end = fabric.under(tool).run();
    assert!(!end.success() && !end.crashed(), "{}", end.report());
    assert!(end.stdout.contains("Endpoint timeout"), "{}", end.report());
}

/// Datagrams that are lost are sent again by UCX.
#[test]
fn a_port_that_fails_under_datagrams_and_comes_back_loses_nothing() {
    let (fabric, device) = (Fabric::new(), Device::Software(machine()));
    let words = "pair --plain --ops tag,put --sizes 2M+5 --iters 15 --mem gaudi:gaudi";
    let tool = fabric.under(client_over(UD, &device, words));
    let running = tool.start();
    let port = fabric.folder().join("node/ports-1/softrdma0");
    let layout = Workbench::from_env().layout().clone();
    let carried = || fabric.port(&layout, 0, "xmit_bytes").unwrap_or(0);
    assert!(running.wait_until(|_| carried() > 4 << 20), "nothing was sent");
    std::fs::write(&port, "down").expect("the port's file");
    let lost = || fabric.port(&layout, 0, "xmit_discards").unwrap_or(0);
    assert!(running.wait_until(|_| lost() > 0), "the port was not down in a transfer");
    std::fs::write(&port, "up").expect("the port's file");
    let end = running.finish(tool.time_limit()).ok();
    assert!(end.stdout.contains("4 passed, 0 failed"), "{}", end.report());
    assert!(fabric.counters().expect("counters").get("datagrams_lost") > 0);
}

#[test]
fn a_killed_peer_is_noticed_by_the_active_side() {
    for (transports, size) in [(RC, "16M"), (UD, "256K")] {
        let (fabric, device) = (Fabric::new(), Device::Software(machine()));
        let words = format!("peer-errors --ops put,get --sizes {size} --mem gaudi:gaudi");
        fabric.under(client_over(transports, &device, &words).envs(&IMPATIENT)).run().ok();
    }
}

/// Who only receives learns it from the keep-alive of UCX. Eager messages, and those that the receiver reads.
#[test]
fn a_killed_peer_is_noticed_by_who_only_receives() {
    for (transports, sizes) in [(RC, "4K,4M"), (UD, "4K")] {
        let (fabric, device) = (Fabric::new(), Device::Software(machine()));
        let words = format!("peer-errors --ops tag,am --sizes {sizes} --mem gaudi:gaudi");
        let end =
            fabric.under(client_over(transports, &device, &words).envs(&IMPATIENT)).run().ok();
        println!("{transports}: {}", end.stdout);
    }
}
