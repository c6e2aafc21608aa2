//! The software Synapse and SCAL against what is known of the real ones: life cycle, status codes, addresses, memory,
//! host mappings, streams and events. Each scene runs in a process of its own, which has one Synapse.

mod acquired;
mod bindings;

use std::ffi::{CStr, c_int};
use std::os::fd::{FromRawFd, OwnedFd};

use acquired::{Acquired, INSIDE, MODULE, TO_DEVICE, TO_HOST, word};
use bindings::{Api, Handle, NULL};
use e2e::{Device, Finished, SoftNode, Ucx, Workbench};

const SCENE: &str = "SOFT_SYNAPSE_SCENE";
/// The file with the rules of the scene's faults.
const FAULTS: &str = "SOFT_SYNAPSE_SCENE_FAULTS";
/// Variables of a scene: the generation, then others.
type Variables = [(&'static str, &'static str)];

fn run(scene: &str, generation: &str, variables: &Variables) -> Finished {
    let mut node = SoftNode::unique().with("SOFT_GAUDI_GENERATION", generation);
    if scene == "a_release_while_a_thread_is_inside_a_call_is_refused" {
        node = node.with_faults("transfer slow:1500");
        let file = node.faults();
        node = node.with(FAULTS, file.to_str().expect("a path in UTF-8"));
    }
    let device = Device::Software(node.with("SOFT_GAUDI_DEVICES", "3"));
    let bench = Workbench::from_env();
    let program = std::env::current_exe().expect("a path");
    let tool = bench.program(Ucx::V1_22, program).device(&device);
    let tool = tool.libraries(bench.layout().soft_synapse()).env(SCENE, scene).envs(variables);
    tool.words("--exact a_scene --nocapture --include-ignored").run()
}

#[track_caller]
fn passes(scene: &str) {
    for generation in ["gaudi2", "gaudi3"] {
        let end = run(scene, generation, &[]).ok();
        assert!(end.stdout.contains("the scene ended"), "{}", end.report());
    }
}

/// Tests whose scene has their name, and passes on both generations.
macro_rules! scenes {
    ($($test:ident: $scene:expr;)*) => {
        $(#[test]
        fn $test() {
            passes(stringify!($test));
        })*

        const SCENES: &[(&str, fn(&Api, bool))] = &[$((stringify!($test), $scene)),*];
    };
}

scenes! {
    calls_before_initialisation_and_without_a_device_have_their_codes: |api, gaudi3| life_cycle(api, gaudi3);
    acquired_memory_is_where_scal_has_it_and_exported_from_the_mapping_s_start: |api, gaudi3| addresses(api, gaudi3);
    device_memory_is_allocated_and_freed_with_synapse_s_codes: |api, _| device_memory(&Acquired::new(api));
    host_mappings_are_not_counted: |api, _| host_mappings(&Acquired::new(api));
    copies_and_fills_move_every_byte_and_nothing_else: |api, _| copies(&Acquired::new(api));
    a_stream_waits_for_an_event_of_another: |api, _| events(&Acquired::new(api));
    a_copy_outside_all_mappings_ends_the_device: |api, _| device_failure(&Acquired::new(api));
    a_card_is_free_after_release_unless_a_dma_buf_lives: |api, _| release(api);
    a_release_while_a_thread_is_inside_a_call_is_refused: |api, _| release_inside(api);
}

/// What the plugin must not do, done by somebody else, is noticed too where it breaks the card.
#[test]
fn what_breaks_the_framework_is_noticed() {
    for scene in ["raw submission", "closed descriptor", "unrecorded event"] {
        let end = run(scene, "gaudi2", &[]);
        assert!(!end.success(), "{scene}: {}", end.report());
        assert!(end.stderr.contains("soft-gaudi: forbidden: "), "{scene}: {}", end.report());
        let end = run(scene, "gaudi2", &[("SOFT_GAUDI_FORBIDDEN", "count")]).ok();
        assert!(end.stdout.contains("1 forbidden"), "{scene}: {}", end.report());
    }
}

/// A library with the plugin's name, which calls whatever it is given.
const GUEST: &str = "int guest(int (*call)(unsigned long, unsigned long, unsigned long, unsigned long), \
                     unsigned long a, unsigned long b, unsigned long c, unsigned long d) \
                     { volatile int answer = call(a, b, c, d); return answer; }";

/// The same calls that the framework makes end the process when the plugin makes them.
#[test]
fn calls_that_are_the_framework_s_alone_end_a_process_whose_plugin_makes_them() {
    let folder = std::env::temp_dir().join(format!("soft-synapse-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (source, library) = (folder.join("guest.c"), folder.join("libucx_gaudi.so"));
    std::fs::write(&source, GUEST).expect("written");
    let mut cc = std::process::Command::new("cc");
    let made = cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).status();
    assert!(made.expect("a C compiler").success());
    let path: &'static str = library.to_str().expect("UTF-8").to_owned().leak();
    for call in GUEST_CALLS {
        let scene = format!("guest {call}");
        let end = run(&scene, "gaudi2", &[("SOFT_SYNAPSE_GUEST", path)]);
        let allowed = *call == "synDeviceGetInfo";
        assert_eq!(end.success(), allowed, "{call}: {}", end.report());
        assert_eq!(
            end.stderr.contains("forbidden: a guest "),
            !allowed,
            "{call}: {}",
            end.report()
        );
    }
    std::fs::remove_dir_all(&folder).expect("removed");
}

const GUEST_CALLS: &[&str] = &[
    "synDeviceGetInfo",
    "synInitialize",
    "synDestroy",
    "synDeviceAcquireByModuleId",
    "synDeviceRelease",
    "scal_init",
    "synHostUnmap",
];

fn guest(api: &Api, call: &str) {
    let acquired = Acquired::new(api);
    let memory = vec![0_u8; 4096];
    let at = memory.as_ptr() as u64;
    // SAFETY: our own memory; a library with one function.
    unsafe {
        assert_eq!((api.synHostMap)(0, 4096, at as Handle), 0);
        let path = std::env::var("SOFT_SYNAPSE_GUEST").expect("set by the test");
        let library = std::mem::ManuallyDrop::new(libloading::Library::new(path).expect("made"));
        let guest: libloading::Symbol<
            '_,
            unsafe extern "C" fn(usize, u64, u64, u64, u64) -> c_int,
        > = library.get(b"guest").expect("there");
        let (mut info, mut out) = ([0_u8; 72], 0_u64);
        let (info, out) = (info.as_mut_ptr() as u64, &raw mut out as u64);
        match call {
            "synDeviceGetInfo" => {
                assert_eq!(guest(api.synDeviceGetInfo as usize, 0, info, 0, 0), 0)
            }
            "synInitialize" => drop(guest(api.synInitialize as usize, 0, 0, 0, 0)),
            "synDestroy" => drop(guest(api.synDestroy as usize, 0, 0, 0, 0)),
            "synDeviceAcquireByModuleId" => {
                guest(api.synDeviceAcquireByModuleId as usize, out, 2, 0, 0);
            }
            "synDeviceRelease" => drop(guest(api.synDeviceRelease as usize, 0, 0, 0, 0)),
            "scal_init" => {
                let (fd, config) = (acquired.fd() as u64, c"".as_ptr() as u64);
                guest(api.scal_init as usize, fd, config, out, 0);
            }
            "synHostUnmap" => drop(guest(api.synHostUnmap as usize, 0, at, 0, 0)),
            other => panic!("no call `{other}`"),
        }
    }
}

/// The second half of the tests above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn a_scene() {
    let scene = std::env::var(SCENE).expect("set by the test");
    let gaudi3 = std::env::var("SOFT_GAUDI_GENERATION").is_ok_and(|name| name == "gaudi3");
    let api = Api::load();
    match scene.as_str() {
        "raw submission" => {
            let acquired = Acquired::new(&api);
            // SAFETY: one chunk that is never looked at.
            let refused = unsafe {
                let input = [0_u64, 0, 0, 0, 1, 0, 0, 0];
                (api.hlthunk_command_submission)(acquired.fd(), &raw const input, &mut [0; 8])
            };
            assert!(refused < 0);
        }
        "closed descriptor" => {
            let acquired = Acquired::new(&api);
            // SAFETY: this is what must not be done.
            drop(unsafe { OwnedFd::from_raw_fd(acquired.fd()) });
            // SAFETY: a number.
            unsafe { (api.synDeviceRelease)(0) };
        }
        "unrecorded event" => {
            let acquired = Acquired::new(&api);
            // SAFETY: a live event.
            unsafe { (api.synEventQuery)(acquired.event(0)) };
        }
        other => {
            match (other.strip_prefix("guest "), SCENES.iter().find(|(name, _)| *name == other)) {
                (Some(call), _) => guest(&api, call),
                (None, Some((_, play))) => play(&api, gaudi3),
                (None, None) => panic!("no scene `{other}`"),
            }
        }
    }
    // SAFETY: NULL asks for forbidden things.
    println!("{} forbidden", unsafe { (api.soft_gaudi_calls)(std::ptr::null()) });
    println!("the scene ended");
}

fn life_cycle(api: &Api, gaudi3: bool) {
    let (mut device, mut addr, mut stream, mut two) = (9_u32, 0, NULL, [0; 2]);
    let mut info = [0; 72];
    let page = [0_u8; 64];
    // SAFETY: out pointers to our own, everywhere here.
    unsafe {
        assert_eq!((api.synDeviceGetInfo)(0, info.as_mut_ptr()), 28);
        assert_eq!((api.synDeviceGetCount)(&mut two[0]), 28);
        assert_eq!((api.synDeviceAcquireByModuleId)(&mut device, MODULE), 28);
        assert_eq!((api.synDestroy)(), 28);
        assert_eq!((api.synInitialize)(), 0);
        assert_eq!((api.synInitialize)(), 0, "a second one does nothing");
        assert_eq!((api.synDeviceGetCount)(&mut two[0]), 0);
        assert_eq!(two[0], 3);
        let (mut ids, mut count) = ([99_u32; 8], 8);
        assert_eq!((api.synDeviceGetModuleIDs)(ids.as_mut_ptr(), &mut count), 0);
        assert_eq!((&ids[..4], count), ([0, 1, 2, 99].as_slice(), 3));
        // Initialised, no device.
        assert_eq!((api.synDeviceGetInfo)(0, info.as_mut_ptr()), 26);
        assert_eq!((api.synDeviceGetInfoV2)(0, info.as_mut_ptr()), 26);
        assert_eq!((api.synDeviceMalloc)(0, 128, 0, 0, &mut addr), 26);
        assert_eq!((api.synStreamCreateGeneric)(&mut stream, 0, 0), 26);
        assert_eq!((api.synHostMap)(0, 64, page.as_ptr() as Handle), 1);
        assert_eq!((api.synDeviceRelease)(0), 8);
        // Acquiring.
        let (right, wrong) = if gaudi3 { (5, 4) } else { (4, 5) };
        assert_eq!((api.synDeviceAcquireByDeviceType)(&mut device, wrong), 9);
        assert_eq!((api.synDeviceAcquireByModuleId)(&mut device, 77), 8, "absent");
        let other = (api.hlthunk_open_by_module_id)(MODULE);
        assert!(other >= 0);
        assert_eq!((api.synDeviceAcquireByModuleId)(&mut device, MODULE), 8, "busy");
        assert_eq!((api.synDeviceAcquire)(&mut device, c"0000:4d:00.0".as_ptr()), 26, "busy");
        assert_eq!((api.synDeviceAcquireByDeviceType)(&mut device, right), 0, "another");
        assert_eq!((device, (api.hlthunk_close)(other)), (0, 0));
        assert_eq!((api.synDeviceAcquireByDeviceType)(&mut device, right), 20);
        assert_eq!((api.synDeviceGetInfoV2)(12345, info.as_mut_ptr()), 0, "the id is ignored");
        assert_eq!(word(&info, 44), 1, "deviceId is the module id, not 0");
        assert_eq!(word(&info, 52), right as u32);
        assert_eq!(info[56], 2, "deviceIndex");
        assert_eq!((api.synStreamCreateGeneric)(&mut stream, 0, 0), 0);
        assert_eq!((api.synDeviceRelease)(5), 0);
        assert_eq!((api.synStreamQuery)(stream), 1, "stale");
        assert_eq!((api.synDeviceRelease)(0), 8);
        // By bus id, and the end by synDestroy.
        assert_eq!((api.synDeviceAcquire)(&mut device, c"0000:4d:00.0".as_ptr()), 0);
        assert_eq!((api.synDestroy)(), 0);
        assert_eq!((api.synDestroy)(), 28);
        assert_eq!((api.synDeviceGetInfo)(0, info.as_mut_ptr()), 28);
        let again = (api.hlthunk_open_by_module_id)(MODULE);
        assert!(again >= 0, "synDestroy gave the card back");
        let mut version = [0; 64];
        assert_eq!((api.synDriverGetVersion)(version.as_mut_ptr(), 64), 0);
        assert!(CStr::from_ptr(version.as_ptr()).to_str().unwrap().starts_with("soft-synapse"));
        let version = CStr::from_ptr((api.scal_get_version_sha1)());
        assert!(version.to_str().unwrap().starts_with("soft-scal"));
        assert_eq!((api.soft_gaudi_calls)(c"synDeviceAcquire".as_ptr()), 2);
    }
}

fn addresses(api: &Api, gaudi3: bool) {
    let acquired = Acquired::new(api);
    let fd = acquired.fd();
    let [scal, _, _, base, _, _, total, free, mapping] = acquired.pool();
    let first = acquired.malloc(1);
    assert!((base..base + total).contains(&first));
    if gaudi3 {
        assert_eq!((base, mapping), (0x0201_e000_1000_0000, base));
    } else {
        assert_eq!((mapping, base - mapping), (0x1001_6001_5000_0000, 160 << 20));
    }
    assert!(total.is_multiple_of(4096) && free < total, "Synapse keeps some");
    let (mut out, mut pool, mut one, mut two) = (NULL, NULL, 0, 0);
    // SAFETY: out pointers to our own; descriptors that are closed once.
    unsafe {
        // By the number of the descriptor, without a reference count.
        assert_eq!((api.scal_get_fd)(scal as Handle), fd);
        let duplicate = libc_dup(fd);
        assert_eq!((api.scal_get_handle_from_fd)(duplicate.0, &mut out), -1);
        assert_eq!((api.scal_init)(fd, c"".as_ptr(), &mut out, NULL), 0);
        assert_eq!(out as u64, scal);
        assert_eq!((api.scal_init)(0, c"".as_ptr(), &mut out, NULL), -4);
        assert_eq!((api.scal_init)(fd, std::ptr::null(), &mut out, NULL), -4);
        let scal = scal as Handle;
        assert_eq!((api.scal_get_pool_handle_by_name)(scal, c"other".as_ptr(), &mut pool), -11);
        assert_eq!((api.scal_get_pool_handle_by_id)(scal, 99, &mut pool), -11);
        assert_eq!((api.scal_get_pool_handle_by_id)(scal, 0, &mut pool), 0);
        assert_eq!((api.scal_allocate_aligned_buffer)(pool, 1 << 40, 128, &mut out), -5);
        assert_eq!((api.scal_allocate_aligned_buffer)(pool, 5, 4096, &mut out), 0);
        let mut info = [0; 4];
        assert_eq!((api.scal_buffer_get_info)(out, &mut info), 0);
        assert!(info[0] == pool as u64 && info[3].is_multiple_of(4096), "{info:x?}");
        assert_eq!((api.scal_free_buffer)(out), 0);
        // The export rule: the mapping's start as address, the rest as offset.
        let flags = 0x80002;
        let export = api.hlthunk_device_mapped_memory_export_dmabuf_fd;
        let dmabuf = export(fd, mapping, total, base - mapping, flags);
        assert!(dmabuf >= 0, "{dmabuf}");
        drop(OwnedFd::from_raw_fd(dmabuf));
        let wrong = export(fd, base, total, 0, flags);
        if gaudi3 {
            drop(OwnedFd::from_raw_fd(wrong));
        } else {
            assert_eq!(wrong, -22, "the pool is not the mapping's start");
        }
        assert_eq!((api.synDeviceGetMemoryInfo)(0, &mut one, &mut two), 0);
    }
    assert!(one < two && two < total);
}

/// A duplicate of a descriptor, closed when dropped.
struct Duplicate(c_int);

impl Drop for Duplicate {
    fn drop(&mut self) {
        // SAFETY: made by `libc_dup`, and nobody else's.
        drop(unsafe { OwnedFd::from_raw_fd(self.0) });
    }
}

fn libc_dup(fd: c_int) -> Duplicate {
    use std::os::fd::{BorrowedFd, IntoRawFd};
    // SAFETY: open while the card is acquired.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    Duplicate(fd.try_clone_to_owned().unwrap().into_raw_fd())
}

fn device_memory(acquired: &Acquired<'_>) {
    let api = acquired.api;
    let (mut addr, mut free, mut total) = (77, 0, 0);
    let (a, b) = (acquired.malloc(1), acquired.malloc(1000));
    assert_eq!((a % 128, b - a), (0, 128));
    // SAFETY: out pointers to our own.
    unsafe {
        assert_eq!((api.synDeviceMalloc)(0, 0, 0, 0, &mut addr), 0);
        assert_eq!(addr, 0, "nothing");
        assert_eq!((api.synDeviceMalloc)(0, 128, 0, 1, &mut addr), 26, "flags");
        assert_eq!((api.synDeviceMalloc)(0, 1 << 40, 0, 0, &mut addr), 26, "too much");
        assert_eq!((api.synDeviceMalloc)(0, u64::MAX, 0, 0, &mut addr), 26, "too much");
        assert_eq!((api.synDeviceFree)(0, 0, 0), 0);
        assert_eq!((api.synDeviceFree)(0, a + 1, 0), 26, "not the start");
        assert_eq!((api.synDeviceFree)(0, a, 1), 26, "flags");
        assert_eq!((api.synDeviceFree)(0, a, 0), 0);
        assert_eq!((api.synDeviceFree)(0, a, 0), 26, "freed");
        assert_eq!(acquired.malloc(64), a, "first fit, whatever was asked for");
        // All that is left, as PyTorch does it; then there is none.
        assert_eq!((api.synDeviceGetMemoryInfo)(0, &mut free, &mut total), 0);
        acquired.malloc(free);
        assert_eq!((api.synDeviceMalloc)(0, 1, 0, 0, &mut addr), 26);
    }
}

fn host_mappings(acquired: &Acquired<'_>) {
    let api = acquired.api;
    let device = acquired.malloc(1 << 20);
    let memory = vec![0_u8; 3 << 12];
    let at = |offset: usize| memory.as_ptr().wrapping_add(offset) as Handle;
    let send = |offset: usize, len: u64| {
        let status = acquired.copy(at(offset) as u64, len, device, TO_DEVICE);
        acquired.finish();
        status
    };
    assert_eq!(send(0, 1), 34, "not mapped");
    // SAFETY: memory of ours.
    unsafe {
        assert_eq!((api.synHostMap)(0, 4096, at(100)), 0);
        assert_eq!((send(100, 4096), send(4195, 1), send(4196, 1), send(99, 1)), (0, 0, 34, 34));
        assert_eq!((api.synHostMap)(0, 50, at(200)), 0, "inside: nothing is added");
        assert_eq!((api.synHostMap)(0, 4096, at(200)), 1, "begins inside, and is longer");
        assert_eq!((api.synHostMap)(0, 100, at(0)), 0, "ends before it");
        assert_eq!(send(50, 100), 34, "two mappings are not one");
        assert_eq!((api.synHostUnmap)(0, at(200)), 0, "no mapping begins here: nothing happens");
        assert_eq!(send(200, 50), 0);
        assert_eq!((api.synHostUnmap)(0, at(100)), 0, "for all");
        assert_eq!(send(200, 50), 34);
        assert_eq!((api.synHostUnmap)(0, at(100)), 0, "again");
        assert_eq!((api.synHostMap)(0, 64, 0x10 as Handle), 26, "the driver refuses");
        assert_eq!((api.synHostFree)(0, at(0), 0), 1, "not of synHostMalloc");
    }
    let own = acquired.host(5000);
    let ptr = own.as_mut_ptr();
    assert_eq!(acquired.copy(ptr as u64, 5000, device, TO_DEVICE), 0);
    acquired.finish();
    // SAFETY: given up here.
    unsafe {
        assert_eq!((api.synHostFree)(0, ptr.wrapping_add(1).cast(), 0), 1);
        assert_eq!((api.synHostFree)(0, ptr.cast(), 0), 0);
        assert_eq!((api.synHostFree)(0, ptr.cast(), 0), 1);
    }
}

fn copies(acquired: &Acquired<'_>) {
    let api = acquired.api;
    const SIZE: usize = 300_000;
    let device = acquired.malloc(2 * SIZE as u64 + 128);
    let (from, to) = (acquired.host(SIZE), acquired.host(SIZE));
    from.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at * 7 + at / 251) as u8);
    let (src, dst) = (from.as_ptr() as u64, to.as_ptr() as u64);
    // Refusals.
    assert_eq!(acquired.copy(0, 1, device, TO_DEVICE), 1);
    assert_eq!(acquired.copy(src, 1, 0, TO_DEVICE), 1);
    assert_eq!(acquired.copy(src, 1, device, 3), 1);
    assert_eq!(acquired.copy(src, 0, device, TO_DEVICE), 0, "nothing");
    // SAFETY: plain numbers; NULL is refused.
    assert_eq!(unsafe { (api.synMemCopyAsync)(NULL, src, 1, device, TO_DEVICE) }, 1);
    // Odd places and lengths, in order on one stream, in all directions.
    for (offset, len) in [(0, SIZE), (1, 1), (3, 17), (127, 4099), (1000, 65_537)] {
        to.fill(0x5a);
        let second = device + SIZE as u64 + 5;
        assert_eq!(
            acquired.copy(
                src + offset,
                len as u64 - offset.min(len as u64 - 1),
                device + offset,
                TO_DEVICE
            ),
            0
        );
        let len = len - (offset as usize).min(len - 1);
        assert_eq!(acquired.copy(device + offset, len as u64, second, INSIDE), 0);
        assert_eq!(
            acquired.copy(second, len as u64, dst + 9.min(SIZE as u64 - len as u64), TO_HOST),
            0
        );
        acquired.finish();
        let begin = 9.min(SIZE - len);
        let offset = offset as usize;
        assert!(to[begin..begin + len] == from[offset..offset + len], "{len} bytes");
        assert!(to[..begin].iter().chain(&to[begin + len..]).all(|byte| *byte == 0x5a), "{len}");
    }
    // Several at once; entries without bytes are skipped.
    let (sources, sizes) = ([src, 0, src + 10], [4, 0, 6]);
    let targets = [device, 0, device + 4];
    to.fill(0);
    // SAFETY: three of each.
    unsafe {
        let many = api.synMemCopyAsyncMultiple;
        let (s, n, t) = (sources.as_ptr(), sizes.as_ptr(), targets.as_ptr());
        assert_eq!(many(acquired.stream, s, n, t, TO_DEVICE, 3), 0);
        assert_eq!((api.synMemsetD16Async)(device + 10, 0x1234, 3, acquired.stream), 0);
        assert_eq!((api.synMemsetD32Async)(device + 16, 0x8765_4321, 2, acquired.stream), 0);
    }
    assert_eq!(acquired.copy(device, 24, dst, TO_HOST), 0);
    acquired.finish();
    assert_eq!(to[..4], from[..4]);
    assert_eq!(to[4..10], from[10..16]);
    assert_eq!(to[10..16], [0x34, 0x12, 0x34, 0x12, 0x34, 0x12]);
    assert_eq!(to[16..24], [0x21, 0x43, 0x65, 0x87, 0x21, 0x43, 0x65, 0x87]);
}

fn events(acquired: &Acquired<'_>) {
    let api = acquired.api;
    const SIZE: u64 = 64 << 20;
    let (device, target) = (acquired.malloc(SIZE), acquired.malloc(SIZE));
    let host = acquired.host(16);
    let (event, timed, later) = (acquired.event(0), acquired.event(1), acquired.event(1));
    let mut other = NULL;
    let mut ns = 0;
    // SAFETY: live handles; stale ones are refused.
    unsafe {
        assert_eq!((api.synStreamCreateGeneric)(&mut other, 0, 0), 0);
        for round in 1..=5_u32 {
            // The other stream's copy comes after the fill of this one, which takes longer.
            assert_eq!((api.synEventRecord)(timed, acquired.stream), 0);
            let words = (SIZE / 4) as usize;
            assert_eq!((api.synMemsetD32Async)(device, round, words, acquired.stream), 0);
            assert_eq!((api.synEventRecord)(event, acquired.stream), 0);
            assert_eq!((api.synStreamWaitEvent)(other, event, 0), 0);
            let end = device + SIZE - 16;
            assert_eq!((api.synMemCopyAsync)(other, end, 16, target, INSIDE), 0);
            assert_eq!((api.synMemCopyAsync)(other, target, 16, host.as_ptr() as u64, TO_HOST), 0);
            assert_eq!((api.synEventRecord)(later, other), 0);
            loop {
                match (api.synEventQuery)(later) {
                    0 => break,
                    22 => std::thread::yield_now(),
                    status => panic!("{status}"),
                }
            }
            assert_eq!(word(host, 0), round);
            assert_eq!(word(host, 12), round);
            assert_eq!(((api.synStreamQuery)(other), (api.synEventQuery)(event)), (0, 0));
            assert_eq!((api.synEventElapsedTime)(&mut ns, timed, later), 0);
            assert!(ns > 0);
        }
        assert_eq!((api.synEventElapsedTime)(&mut ns, timed, event), 41, "collects no time");
        assert_eq!((api.synEventSynchronize)(later), 0);
        assert_eq!(((api.synStreamDestroy)(NULL), (api.synStreamDestroy)(other)), (0, 0));
        assert_eq!(((api.synStreamDestroy)(other), (api.synStreamQuery)(other)), (1, 1));
        assert_eq!(((api.synEventDestroy)(event), (api.synEventDestroy)(event)), (0, 33));
        assert_eq!((api.synEventQuery)(event), 33);
        let mut events = Vec::new();
        let mut one = NULL;
        let status = loop {
            match (api.synEventCreate)(&mut one, 0, 0) {
                0 => events.push(one),
                status => break status,
            }
        };
        assert_eq!((status, events.len()), (23, 2046));
    }
}

fn device_failure(acquired: &Acquired<'_>) {
    let api = acquired.api;
    let host = acquired.host(64);
    let nowhere = acquired.malloc(64) ^ 1 << 45;
    let mut addr = 0;
    assert_eq!(acquired.copy(host.as_ptr() as u64, 64, nowhere, TO_DEVICE), 0, "not checked");
    // SAFETY: live handles.
    unsafe {
        assert_eq!((api.synStreamSynchronize)(acquired.stream), 31);
        assert_eq!((api.synDeviceMalloc)(0, 64, 0, 0, &mut addr), 31);
        assert_eq!((api.synStreamQuery)(acquired.stream), 31);
        assert_eq!((api.synDeviceRelease)(0), 0);
        let mut device = 9;
        assert_eq!((api.synDeviceAcquireByModuleId)(&mut device, MODULE), 0, "it works again");
    }
}

fn release(api: &Api) {
    let acquired = Acquired::new(api);
    let [_, _, _, base, _, _, total, _, mapping] = acquired.pool();
    // SAFETY: descriptors that are closed once, live handles.
    unsafe {
        let export = api.hlthunk_device_mapped_memory_export_dmabuf_fd;
        let dmabuf = export(acquired.fd(), mapping, total, base - mapping, 0x80002);
        assert!(dmabuf >= 0);
        assert_eq!((api.synDeviceRelease)(0), 0, "SCAL only logs what it cannot unmap");
        assert_eq!((api.hlthunk_open_by_module_id)(MODULE), -16, "the dma-buf keeps the card");
        drop(OwnedFd::from_raw_fd(dmabuf));
        let fd = (api.hlthunk_open_by_module_id)(MODULE);
        assert!(fd >= 0, "{fd}");
        assert_eq!((api.hlthunk_close)(fd), 0);
    }
}

/// The first transfer takes a second and a half, inside the call that starts it.
fn release_inside(api: &Api) {
    let acquired = Acquired::new(api);
    let (addr, stream) = (acquired.malloc(8), acquired.stream as usize);
    let faults = std::env::var_os(FAULTS).expect("the file of the rules");
    std::thread::scope(|scope| {
        // SAFETY: live handles, also below.
        let fill = move || unsafe { (api.synMemsetD32Async)(addr, 1, 2, stream as Handle) };
        let inside = scope.spawn(fill);
        // The rule goes as the delay begins.
        while std::fs::read_to_string(&faults).unwrap().contains("transfer") {
            assert!(!inside.is_finished(), "the call has not used the rule");
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // SAFETY: as above.
        assert_eq!(unsafe { (api.synDeviceRelease)(0) }, 26);
        assert_eq!(inside.join().unwrap(), 0);
    });
    // SAFETY: as above.
    assert_eq!(unsafe { (api.synDeviceRelease)(0) }, 0);
}
