//! As the guest of a framework: the process has acquired a card through the software Synapse, and UCX and NIXL move its
//! memory. The software Synapse ends a process in which the plugin calls what only a framework may call, so every test
//! here also shows that it does not.

use std::ffi::{CStr, CString};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use e2e::nixl::kv_cache;
use e2e::rdma::{Fabric, RC, TwoNodes};
use e2e::{Device, Finished, SoftNode, Tool, Ucx, Workbench};
use ucp_check::buffer::Buffer;
use ucp_check::client::Client;
use ucp_check::framework;
use ucp_check::pattern::{Image, Layout};
use ucp_check::ucp::{self, Features, Memory, WorkerOptions};
use ucp_check::watchdog::Watchdog;

const GENERATIONS: [&str; 2] = ["gaudi2", "gaudi3"];
/// What Synapse did before UCX was loaded.
const ORDERS: [&str; 3] = ["acquired", "loaded", "late"];
const ORDER: &str = "UCP_CHECK_FRAMEWORK";
const SIZES: &str = "0,1,16,113,5001,64K+1,1M+7";

fn machine(generation: &str, cards: &str) -> SoftNode {
    let node = SoftNode::unique().with("SOFT_GAUDI_GENERATION", generation);
    node.with("SOFT_GAUDI_DEVICES", cards)
}

fn device(generation: &str) -> Device {
    Device::Software(machine(generation, "2"))
}

fn client(ucx: Ucx, device: &Device, order: &str, words: &str) -> Tool {
    let bench = Workbench::from_env();
    let tool = bench.client(ucx, device, words).env(ORDER, order);
    let tool = tool.libraries(bench.layout().soft_synapse());
    // Only Python programs are expected to load Synapse later.
    if order == "late" { tool.env("UCX_GAUDI_COPY_FRAMEWORK", "y") } else { tool }
}

/// The card was given back whole, and nothing was done that is the framework's to do.
#[track_caller]
fn clean(end: Finished) -> Finished {
    let end = end.ok();
    let said = [&end.stdout, &end.stderr];
    let complaint = |text: &&&String| text.contains("forbidden") || text.contains("soft-scal:");
    assert!(!said.iter().any(|text| complaint(&text)), "{}", end.report());
    end
}

#[test]
fn every_operation_of_one_process_with_each_order_of_start() {
    for generation in GENERATIONS {
        for order in ORDERS {
            let words = format!("loopback --sizes {SIZES},8M+1");
            clean(client(Ucx::V1_22, &device(generation), order, &words).run());
        }
    }
}

#[test]
fn every_operation_between_two_frameworks_on_one_node() {
    for (generation, order) in GENERATIONS.into_iter().zip(ORDERS) {
        for ucx in [Ucx::V1_22, Ucx::Nixl] {
            let words = format!("pair --sizes {SIZES}");
            clean(client(ucx, &device(generation), order, &words).env("UCX_MODULES", "^ib").run());
        }
    }
}

#[test]
fn every_operation_between_two_frameworks_over_infiniband() {
    for (generation, order) in GENERATIONS.into_iter().zip(ORDERS) {
        let fabric = Fabric::new();
        let words = format!("pair --sizes {SIZES}");
        let tool = client(Ucx::Nixl, &device(generation), order, &words);
        clean(fabric.under(tool.env("UCX_TLS", format!("{RC},gaudi_cpy"))).run());
        let counters = fabric.counters().expect("counters");
        assert!(counters.get("dmabuf_regions") > 0 && counters.get("direct_bytes") > 1 << 20);
        assert_eq!(counters.get("access_errors"), 0);
    }
}

#[test]
fn threads_sleepers_many_processes_and_killed_peers_as_guests() {
    for generation in GENERATIONS {
        let run = |words: &str, cards: &str| {
            let device = Device::Software(machine(generation, cards));
            clean(client(Ucx::V1_22, &device, "acquired", words).run());
        };
        run("threads --sizes 1,5001,64K+1", "1");
        run("wakeup --sizes 1,5001,1M+7", "2");
        run("mesh --processes 3 --sizes 4097,64K+1", "3");
        run("asleep", "1");
        run("soak --seconds 2", "1");
        run("peer-errors --sizes 1M --mem gaudi:gaudi", "2");
    }
}

#[track_caller]
fn verified(end: Finished) -> Finished {
    let end = end.ok();
    assert!(end.stdout.contains("every byte is right"), "{}", end.report());
    assert!(end.stdout.contains("soft-synapse"), "{}", end.report());
    assert!(!end.stderr.contains("forbidden"), "{}", end.report());
    end
}

#[test]
fn prefill_hands_its_cache_to_decode_on_one_node() {
    for (generation, operation, order) in
        [("gaudi2", "READ", "late"), ("gaudi3", "WRITE", "loaded")]
    {
        let words = format!("--layers 3 --blocks 40 --operation {operation} --framework {order}");
        let device = device(generation);
        let Some(tool) = kv_cache(&device, &words) else { return };
        verified(tool.run());
    }
}

#[test]
fn prefill_hands_its_cache_to_decode_over_infiniband() {
    for (generation, operation, order) in [
        ("gaudi2", "READ", "loaded"),
        ("gaudi2", "WRITE", "acquired"),
        ("gaudi3", "READ", "late"),
        ("gaudi3", "WRITE", "loaded"),
    ] {
        let fabric = Fabric::new();
        let words = format!("--layers 3 --blocks 40 --operation {operation} --framework {order}");
        let device = device(generation);
        let Some(tool) = kv_cache(&device, &words) else { return };
        verified(fabric.under(tool).env("UCX_TLS", "rc,gaudi_cpy").run());
        let counters = fabric.counters().expect("counters");
        assert!(counters.get("direct_bytes") >= 3 * 40 * 46080, "{generation} {operation}");
        assert_eq!(counters.get("access_errors"), 0, "{generation} {operation}");
    }
}

/// A Gaudi3 acknowledges writes of an HCA before its engines see them; a Gaudi2 does not.
#[test]
fn a_framework_that_reads_its_cache_without_a_flush_gets_old_bytes_on_a_gaudi3() {
    for (generation, is_right) in [("gaudi2", true), ("gaudi3", false)] {
        let words = "--layers 2 --blocks 4 --operation WRITE --framework acquired --no-flush";
        let device = device(generation);
        let Some(tool) = kv_cache(&device, words) else { return };
        let end = Fabric::new().under(tool).env("UCX_TLS", "rc,gaudi_cpy").run();
        assert_eq!(end.stdout.contains("every byte is right"), is_right, "{}", end.report());
        assert_eq!(end.stderr.contains("wrong bytes arrived"), !is_right, "{}", end.report());
    }
}

#[test]
fn prefill_hands_its_cache_to_decode_on_another_node() {
    let fabric = Fabric::new();
    let device = device("gaudi2");
    let words = "--layers 2 --blocks 40 --operation READ --framework acquired";
    let Some(tool) = kv_cache(&device, words) else { return };
    verified(TwoNodes::here().run(&fabric, tool.env("UCX_TLS", "rc,gaudi_cpy")));
    assert!(fabric.counters().expect("counters").get("stream_bytes") >= 2 * 40 * 46080);
}

const SCENE: &str = "FRAMEWORKS_SCENE";

/// Runs a scene of [`a_framework`] in a process of its own, on a machine with one card.
fn scene(name: &str, generation: &str, libraries: &Path) -> Finished {
    let bench = Workbench::from_env();
    let device = Device::Software(machine(generation, "1"));
    let tool = bench.own_process(Ucx::V1_22, &device, "a_framework").env(SCENE, name);
    // UCX ignores failures of copies inside the process; a scene wants to see them, not to be aborted.
    let tool = tool.libraries(libraries).env("UCX_GAUDI_COPY_ABORT_ON_ERROR", "n");
    tool.env("UCX_LOG_LEVEL", "info").run()
}

fn stand_ins() -> std::path::PathBuf {
    Workbench::from_env().layout().soft_synapse()
}

#[track_caller]
fn plays(name: &str) {
    for generation in GENERATIONS {
        let end = scene(name, generation, &stand_ins()).ok();
        assert!(end.stdout.contains("the scene ended"), "{}", end.report());
        assert!(!end.stderr.contains("forbidden"), "{}", end.report());
    }
}

#[test]
fn a_card_that_is_released_early_is_free_and_its_memory_refused() {
    plays("release early");
}

#[test]
fn a_framework_that_comes_late_is_left_in_time() {
    for generation in GENERATIONS {
        let end = scene("come late", generation, &stand_ins()).ok();
        assert!(end.stdout.contains("the scene ended"), "{}", end.report());
        let said = [&*end.stdout, &*end.stderr].concat();
        assert!(said.contains("maps on a Gaudi by itself is noticed"), "{}", end.report());
        assert!(!said.contains("forbidden") && !said.contains("soft-scal:"), "{}", end.report());
    }
}

#[test]
fn a_release_is_not_refused_because_of_our_copies() {
    plays("release while copying");
}

/// By a function that was found with `dlsym`: no hook sees the call.
#[test]
fn a_release_that_is_not_seen_does_not_hang_because_of_our_copies() {
    plays("release unseen while copying");
}

#[test]
fn a_forked_child_leaves_the_framework_alone() {
    plays("fork");
}

#[test]
fn synapse_is_not_loaded_by_us() {
    let end = scene("no framework", "gaudi2", &stand_ins()).ok();
    assert!(end.stdout.contains("the scene ended"), "{}", end.report());
}

/// A copy of the libraries in which dlsym does not find this function.
fn without(function: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["libSynapse.so", "libscal.so"] {
        let mut bytes = std::fs::read(stand_ins().join(name)).expect("built");
        let wanted = [b"\0", function.as_bytes(), b"\0"].concat();
        for at in 0..bytes.len() - wanted.len() {
            if bytes[at..].starts_with(&wanted) {
                bytes[at + 1] = b'X';
            }
        }
        std::fs::write(folder.path().join(name), bytes).expect("written");
    }
    folder
}

/// Functions that releases of Synapse lack, or that may go: with a reason, never by a crash.
#[test]
fn without_an_optional_function_it_works_or_says_why_not() {
    for (function, works) in [
        ("synDeviceGetInfoV2", true),
        ("synGetErrorString", true),
        ("scal_get_version_sha1", true),
        ("scal_pool_get_infoV2", false),
        ("synStreamCreateGeneric", false),
        ("synMemCopyAsync", false),
    ] {
        let libraries = without(function);
        let end = scene("one tensor", "gaudi2", libraries.path()).ok();
        assert_eq!(end.stdout.contains("verified"), works, "{function}: {}", end.report());
        let said = [&*end.stdout, &*end.stderr].concat();
        assert!(works || said.contains(function), "{function}: {}", end.report());
    }
}

/// Starts UCP.
fn start(watchdog: &Watchdog) -> Client {
    let path = e2e::libucp_to_test();
    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    Client::new(ucx, Features::ALL, WorkerOptions::default(), watchdog).expect("UCP starts")
}

/// A tensor with known bytes in it.
fn filled(client: &Client, seed: u64) -> anyhow::Result<(Buffer, Image)> {
    const LEN: usize = 100_003;
    let staging = client.region(Memory::Host, Layout::allocation(LEN))?;
    let buffer = Buffer::new(client, Memory::Gaudi, LEN, &staging)?;
    let image = Image::message(Layout::new(LEN, seed), seed, seed);
    buffer.prove(client, &image)?;
    Ok((buffer, image))
}

fn set_order(order: &str) {
    // SAFETY: before anything else runs in this process.
    unsafe { std::env::set_var(ORDER, order) };
}

/// The second half of the tests above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn a_framework() {
    let watchdog = Watchdog::start("framework", 60.0);
    match std::env::var(SCENE).expect("set by the test").as_str() {
        "release early" => release_early(&watchdog, "acquired"),
        "come late" => {
            // SAFETY: before anything else runs in this process.
            unsafe { std::env::set_var("UCX_GAUDI_COPY_FRAMEWORK", "y") };
            release_early(&watchdog, "late");
        }
        "release while copying" => {
            set_order("acquired");
            let release = linked_release();
            // SAFETY: the id of the only card.
            release_while_copying(&watchdog, &|| unsafe { release(0) }, true);
        }
        "release unseen while copying" => {
            set_order("acquired");
            release_while_copying(&watchdog, &|| framework::release().expect("loaded"), false);
        }
        "fork" => fork(&watchdog),
        "no framework" => {
            let client = start(&watchdog);
            filled(&client, 1).expect("a card of our own");
            let maps = std::fs::read_to_string("/proc/self/maps").expect("maps");
            assert!(!maps.contains("libSynapse") && !maps.contains("libscal"), "{maps}");
        }
        "one tensor" => {
            set_order("acquired");
            match filled(&start(&watchdog), 1) {
                Ok(_) => println!("verified"),
                Err(error) => println!("refused: {error:#}"),
            }
        }
        other => panic!("no scene `{other}`"),
    }
    println!("the scene ended");
}

fn release_early(watchdog: &Watchdog, order: &str) {
    set_order(order);
    let client = start(watchdog);
    let (buffer, image) = filled(&client, 1).expect("a tensor");
    // Registered, exported or not, and known to UCX: the framework ends all the same.
    assert_eq!(framework::release().expect("loaded"), 0);
    let after = buffer.verify(&client, &image);
    assert!(!matches!(after, Ok(Ok(()))), "bytes of a card that is gone");
    drop(buffer);
    // There is one card: it is free only if nothing of ours keeps it.
    framework::acquire_again().expect("the card is free");
    let (buffer, image) = filled(&client, 2).expect("a tensor of the second time");
    buffer.verify(&client, &image).expect("readable").expect("as it was");
}

/// Synapse refuses to release a card while another thread is in a call of its. A `release` that we see ends our copies
/// first; one that we do not see may be refused, and must neither hang nor fail a copy if it is.
fn release_while_copying(watchdog: &Watchdog, release: &dyn Fn() -> i32, is_seen: bool) {
    type Copy = unsafe extern "C" fn(*mut u8, u64, usize) -> i32;
    const LEN: usize = 3 << 20;
    let client = start(watchdog);
    filled(&client, 1).expect("a tensor");
    let plugin = std::env::var_os("UCX_PLUGIN_PATH").expect("set by the test");
    let plugin = Path::new(&plugin).with_file_name("libucx_gaudi.so");
    // SAFETY: a function of ucx_gaudi.h.
    let copy: Copy = unsafe { function(&plugin, c"ucx_gaudi_copy") };
    let (tensor, copied) = (AtomicU64::new(0), AtomicU64::new(0));
    // Odd while the card is being released, until it is acquired again.
    let (releases, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let allocate = || tensor.store(framework::allocate(LEN).expect("a tensor"), Ordering::SeqCst);
    std::thread::scope(|scope| {
        let copier = scope.spawn(|| {
            let mut bytes = vec![0_u8; LEN];
            loop {
                let before = releases.load(Ordering::SeqCst);
                let address = match tensor.load(Ordering::SeqCst) {
                    0 => {
                        std::thread::yield_now();
                        continue;
                    }
                    u64::MAX => return,
                    address => address,
                };
                // SAFETY: memory of the thread; what is no tensor any more is refused.
                let is_copied = unsafe { copy(bytes.as_mut_ptr(), address, LEN) } == 0;
                if is_copied {
                    copied.fetch_add(1, Ordering::SeqCst);
                } else if before.is_multiple_of(2) && releases.load(Ordering::SeqCst) == before {
                    failed.fetch_add(1, Ordering::SeqCst);
                }
            }
        });
        allocate();
        for _ in 0..20 {
            let before = copied.load(Ordering::SeqCst);
            while copied.load(Ordering::SeqCst) == before && failed.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            releases.fetch_add(1, Ordering::SeqCst);
            let status = release();
            if status == 0 {
                tensor.store(0, Ordering::SeqCst);
                framework::acquire_again().expect("the card is free");
            }
            releases.fetch_add(1, Ordering::SeqCst);
            if status == 0 {
                allocate();
            } else if is_seen {
                tensor.store(u64::MAX, Ordering::SeqCst);
                panic!("synDeviceRelease: {status}");
            }
        }
        tensor.store(u64::MAX, Ordering::SeqCst);
        copier.join().expect("no panic");
    });
    assert_eq!(failed.into_inner(), 0, "copies that failed while the framework had its card");
    assert_eq!(release(), 0, "nobody copies any more");
}

/// `synDeviceRelease` as a library calls it that is linked with libSynapse.
fn linked_release() -> unsafe extern "C" fn(u32) -> i32 {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, library) = (folder.path().join("bridge.c"), folder.path().join("libbridge.so"));
    let text =
        "int synDeviceRelease(unsigned); int bridge(unsigned id) { return synDeviceRelease(id); }";
    std::fs::write(&source, text).expect("written");
    let mut cc = std::process::Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O0", "-o"]).arg(&library).arg(&source);
    let made = cc.arg(stand_ins().join("libSynapse.so")).status().expect("a C compiler");
    assert!(made.success(), "cc: {made}");
    // SAFETY: the function above.
    unsafe { function(&library, c"bridge") }
}

/// A function of a library, which stays loaded.
///
/// # Safety
/// `F` is its type.
unsafe fn function<F: Copy>(library: &Path, name: &CStr) -> F {
    let path = CString::new(library.to_str().expect("text")).expect("a path");
    // SAFETY: libraries of these tests.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null(), "{path:?} does not load");
    // SAFETY: loaded just above.
    let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
    assert!(!found.is_null() && size_of::<F>() == size_of_val(&found), "{name:?}");
    // SAFETY: a function pointer, as the caller promises.
    unsafe { std::mem::transmute_copy(&found) }
}

fn fork(watchdog: &Watchdog) {
    set_order("acquired");
    let client = start(watchdog);
    let (buffer, image) = filled(&client, 1).expect("a tensor");
    // SAFETY: one thread of this program uses UCX, this one.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let child = || {
            let registered = buffer.verify(&client, &image);
            assert!(!matches!(registered, Ok(Ok(()))), "the card is the parent's");
            let own = start(&Watchdog::start("child", 30.0));
            assert!(own.region(Memory::Host, 4096).is_ok(), "host memory is nobody's business");
            assert!(filled(&own, 2).is_err(), "no card here");
        };
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).is_ok();
        // SAFETY: ends the process without its parent's exit handlers.
        unsafe { libc::_exit(if passed { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    buffer.verify(&client, &image).expect("readable").expect("as it was");
    filled(&client, 3).expect("the parent goes on");
    assert_eq!(status, 0, "the child failed");
}
