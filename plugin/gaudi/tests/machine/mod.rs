//! The engine on the software machine of this test program.

#![allow(dead_code, unused_imports, reason = "each test program uses its own part of this")]

use std::sync::Arc;

use gaudi::{Device, DeviceAddr, DeviceChoice, Side};
use soft_gaudi::testing::{self, Machine};
pub(crate) use soft_gaudi::testing::{alone, child, is_child, library, pattern, run_alone};

/// Sets up a machine with 64 cards of `generation`, once per program.
pub(crate) fn set_up(generation: &str) {
    testing::set_up(generation, &[]);
}

/// What the kernel would have logged as errors, a word each.
pub(crate) fn kernel_log() -> Vec<String> {
    Machine::of_this_process().kernel_log("gaudi2")
}

/// Sets the fault rules of this process's machine. `SOFT_GAUDI_FAULTS` must have been set to `yes`.
pub(crate) fn faults(rule: &str) {
    Machine::of_this_process().set_faults("gaudi2", rule);
}

/// A page of the driver's on a Gaudi2: `cargo xtask test --long` runs these tests on another shape.
pub(crate) fn driver_page() -> u64 {
    let five_stacks = std::env::var_os("SOFT_GAUDI_HBM_STACKS").is_some_and(|shape| shape == "5");
    if five_stacks { 640 << 20 } else { 768 << 20 }
}

/// Opens a card that no other test of this program uses.
pub(crate) fn fresh() -> Arc<Device> {
    open(testing::fresh_index())
}

pub(crate) fn open(index: u32) -> Arc<Device> {
    gaudi::runtime().open(&DeviceChoice::Index(index)).expect("the card opens")
}

/// Writes host bytes to the device.
pub(crate) fn write(device: &Arc<Device>, to: DeviceAddr, bytes: &[u8]) {
    let host = Side::Host(bytes.as_ptr().cast_mut());
    // SAFETY: the slice lives across the call and is only read.
    unsafe { device.copy_blocking(Side::Device(to), host, bytes.len()) }.expect("write");
}

/// Reads bytes from the device.
pub(crate) fn read(device: &Arc<Device>, from: DeviceAddr, len: usize) -> Vec<u8> {
    try_read(device, from, len).expect("read")
}

pub(crate) fn try_read(
    device: &Arc<Device>,
    from: DeviceAddr,
    len: usize,
) -> Result<Vec<u8>, gaudi::Error> {
    let mut bytes = vec![0x5c; len];
    let host = Side::Host(bytes.as_mut_ptr());
    // SAFETY: the vector lives across the call and nothing else uses it.
    unsafe { device.copy_blocking(host, Side::Device(from), len) }?;
    Ok(bytes)
}

/// Reads bytes from a side of a copy that is on the device.
pub(crate) fn read_side(device: &Arc<Device>, side: Side, len: usize) -> Vec<u8> {
    match side {
        Side::Device(addr) => read(device, addr, len),
        Side::Host(_) | Side::Found(_) => unreachable!("on the device"),
    }
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
