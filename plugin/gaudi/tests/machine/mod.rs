//! A software machine of its own for each test program, and cards that no other test uses.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Once};

use gaudi::{Device, DeviceAddr, DeviceChoice, Side};

/// Set in programs that a test started.
const CHILD: &str = "GAUDI_TEST_CHILD";

/// The software device's library, which cargo builds next to this program.
pub(crate) fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a running program has a path");
    let library = program.with_file_name("libsoft_gaudi.so");
    assert!(library.exists(), "{} is missing: build with cargo", library.display());
    library
}

fn node_name() -> String {
    std::env::var("SOFT_GAUDI_NODE").unwrap_or_else(|_| format!("gaudi-{}", std::process::id()))
}

/// Where the machine's folder may be.
fn folders() -> [PathBuf; 2] {
    // SAFETY: asks for a number.
    let user = unsafe { libc::geteuid() };
    [PathBuf::from("/dev/shm"), std::env::temp_dir()]
        .map(|base| base.join(format!("soft-gaudi-{user}")).join(node_name()))
}

extern "C" fn remove_node() {
    for folder in folders() {
        let _ = std::fs::remove_dir_all(folder);
    }
}

/// What the kernel would have logged as errors: what was refused, a word each.
#[allow(dead_code, reason = "for some test programs")]
pub(crate) fn kernel_log() -> Vec<String> {
    let logs = folders().map(|folder| std::fs::read_to_string(folder.join("gaudi2/kernel.log")));
    let lines = logs.iter().flatten().flat_map(|log| log.lines());
    lines.filter_map(|line| line.split(' ').nth(1).map(str::to_owned)).collect()
}

/// Sets up a machine with 64 cards of `generation`, once per program; it goes when the program ends.
pub(crate) fn set_up(generation: &str) {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let own_machine = std::env::var_os("SOFT_GAUDI_NODE").is_none();
        let variables = [
            ("HL_THUNK_LIBRARY", library().into_os_string()),
            ("SOFT_GAUDI_NODE", node_name().into()),
            ("SOFT_GAUDI_GENERATION", generation.into()),
            ("SOFT_GAUDI_DEVICES", OsString::from("64")),
            // Sharing is tested with a driver that can; one that cannot, by tests of its own.
            ("SOFT_GAUDI_LENIENT", OsString::from("import")),
        ];
        for (name, value) in variables {
            if std::env::var_os(CHILD).is_none() || std::env::var_os(name).is_none() {
                // SAFETY: all tests of this program come through here first, and nothing reads the
                // environment before.
                unsafe { std::env::set_var(name, value) };
            }
        }
        if own_machine {
            // SAFETY: the handler takes no arguments and may run at any time.
            unsafe { libc::atexit(remove_node) };
        }
    });
}

/// A page of the driver's on a Gaudi2: `cargo xtask test --long` runs these tests on another shape.
pub(crate) fn driver_page() -> u64 {
    let five_stacks = std::env::var_os("SOFT_GAUDI_HBM_STACKS").is_some_and(|shape| shape == "5");
    if five_stacks { 640 << 20 } else { 768 << 20 }
}

/// Opens a card that no other test of this program uses.
pub(crate) fn fresh() -> Arc<Device> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    open(NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn open(index: u32) -> Arc<Device> {
    gaudi::runtime().open(&DeviceChoice::Index(index)).expect("the card opens")
}

/// This program again, to run one of its tests by itself, on a machine of its own.
pub(crate) fn child(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a running program has a path"));
    command.args(["--exact", test, "--nocapture", "--include-ignored"]);
    command.env(CHILD, "1").env_remove("SOFT_GAUDI_NODE");
    command
}

/// Whether this program was started by a test.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Bytes that are different everywhere for a while, and for each seed.
pub(crate) fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state as u8
        })
        .collect()
}

/// Writes host bytes to the device.
pub(crate) fn write(device: &Arc<Device>, to: DeviceAddr, bytes: &[u8]) {
    let host = Side::Host(bytes.as_ptr().cast_mut());
    // SAFETY: the slice lives across the call and is only read.
    unsafe { device.copy_blocking(Side::Device(to), host, bytes.len()) }.expect("write");
}

/// Reads bytes from the device.
pub(crate) fn read(device: &Arc<Device>, from: DeviceAddr, len: usize) -> Vec<u8> {
    let mut bytes = vec![0x5c; len];
    let host = Side::Host(bytes.as_mut_ptr());
    // SAFETY: the vector lives across the call and nothing else uses it.
    unsafe { device.copy_blocking(host, Side::Device(from), len) }.expect("read");
    bytes
}

/// Reads bytes from a side of a copy that is on the device.
pub(crate) fn read_side(device: &Arc<Device>, side: Side, len: usize) -> Vec<u8> {
    match side {
        Side::Device(addr) => read(device, addr, len),
        Side::Host(_) => unreachable!("on the device"),
    }
}

/// Runs the rest of the test in a process of its own, on a machine of its own with so many Gaudi2, and with
/// these variables. Counters, descriptors and limits are then the test's alone.
#[allow(unused_macros, reason = "as above")]
macro_rules! alone {
    ($cards:expr $(, $variable:expr)*) => {
        if machine::is_child() {
            machine::set_up("gaudi2");
        } else {
            fn here() {}
            let cards = $cards.to_string();
            let variables = [("SOFT_GAUDI_DEVICES", &*cards) $(, $variable)*];
            return machine::run_alone(std::any::type_name_of_val(&here), &variables);
        }
    };
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use alone;

/// Runs the test in which `here` (a path) lies in a process of its own, with these variables.
#[track_caller]
pub(crate) fn run_alone(here: &str, variables: &[(&str, &str)]) {
    let test = here.split_once("::").and_then(|(_, path)| path.rsplit_once("::"));
    let (test, _) = test.expect("program::test::here");
    let output = child(test).envs(variables.iter().copied()).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    // What was skipped says so here too.
    text.lines().filter(|line| line.contains("skipped")).for_each(|line| println!("{line}"));
}

/// Installs a seccomp filter that answers some system calls of this thread with `EPERM`.
pub(crate) fn refuse(calls: &[libc::c_long]) -> std::io::Result<()> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0)];
    for (at, call) in calls.iter().enumerate() {
        // Over the rest, and over the statement that allows.
        let jt = (calls.len() - at) as u8;
        let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
        program.push(libc::sock_filter { code, jt, jf: 0, k: *call as u32 });
    }
    program.push(statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let refused = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    program.push(statement(libc::BPF_RET | libc::BPF_K, refused));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the program lives across the call.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// The file in which the software machine of this process is told what shall go wrong.
pub(crate) fn faults_file() -> PathBuf {
    // SAFETY: asks for a number.
    let user = unsafe { libc::geteuid() };
    let folders = [PathBuf::from("/dev/shm"), std::env::temp_dir()]
        .map(|base| base.join(format!("soft-gaudi-{user}")).join(node_name()).join("gaudi2"));
    let folder = folders.iter().find(|folder| folder.is_dir()).expect("the machine's folder");
    folder.join("faults")
}

/// What shall go wrong. `SOFT_GAUDI_FAULTS` must have been set to `yes`.
pub(crate) fn faults(rule: &str) {
    std::fs::write(faults_file(), format!("{rule}\n")).unwrap();
}

/// Fails with the place and not with megabytes of text.
#[track_caller]
pub(crate) fn assert_same(found: &[u8], expected: &[u8], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}: length");
    if let Some(at) = found.iter().zip(expected).position(|(found, expected)| found != expected) {
        panic!(
            "{what}: byte {at} of {} is {:#04x}, not {:#04x}",
            found.len(),
            found[at],
            expected[at]
        );
    }
}

/// Descriptors and mappings of this process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Footprint {
    descriptors: usize,
    mappings: usize,
}

impl Footprint {
    pub(crate) fn now() -> Self {
        Self {
            descriptors: std::fs::read_dir("/proc/self/fd").expect("a Linux").count(),
            mappings: std::fs::read_to_string("/proc/self/maps").expect("a Linux").lines().count(),
        }
    }

    /// Fails if something grew since, beyond a thread's stack and what the software card's own
    /// thread lets go of a moment later: hundreds of cycles with a leak in each show clearly.
    #[track_caller]
    pub(crate) fn assert_flat(self, what: &str) {
        let now = Self::now();
        assert!(now.is_flat(self), "{what}: {self:?} became {now:?}");
    }

    /// Whether nothing grew since `before`, as above.
    pub(crate) fn is_flat(self, before: Self) -> bool {
        self.descriptors <= before.descriptors + 3 && self.mappings <= before.mappings + 15
    }
}
