//! The functions of the driver library: their C signatures, and how their calls are recorded.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::fmt::Write as _;
use std::slice;

use libloading::os::unix::Library as Handle;

use crate::sys::{
    CsChunk, CsIn, CsOut, DeviceName, DramUsageInfo, HwIpInfo, IOCTL_MEMORY, MemArgs, WAIT_BUSY,
    WAIT_COMPLETED,
};
use crate::trace;

macro_rules! symbols {
    (
        required { $(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty;)* }
        optional { $(fn $optional:ident($($optional_arg:ident: $optional_type:ty),*) -> $optional_out:ty;)* }
        by_hand {
            required { $($hand:ident: $hand_type:ty;)* }
            optional { $($hand_optional:ident: $hand_optional_type:ty;)* }
        }
    ) => {
        /// The functions of the library, each with its C signature. Call the methods of the same names,
        /// which record the call if tracing is on; use the fields only to see what the library has.
        pub(crate) struct Symbols {
            $(pub(crate) $name: unsafe extern "C" fn($($type),*) -> $out,)*
            $(pub(crate) $optional:
                Option<unsafe extern "C" fn($($optional_type),*) -> $optional_out>,)*
            $($hand: $hand_type,)*
            $($hand_optional: Option<$hand_optional_type>,)*
        }

        impl Symbols {
            pub(crate) fn find(handle: &Handle) -> Result<Self, String> {
                Ok(Self {
                    // SAFETY: the types are the signatures that hlthunk.h gives these functions.
                    $($name: unsafe { required(handle, stringify!($name)) }?,)*
                    // SAFETY: as above.
                    $($optional: unsafe { optional(handle, stringify!($optional)) },)*
                    // SAFETY: as above.
                    $($hand: unsafe { required(handle, stringify!($hand)) }?,)*
                    // SAFETY: as above.
                    $($hand_optional: unsafe { optional(handle, stringify!($hand_optional)) },)*
                })
            }

            $(pub(crate) unsafe fn $name(&self, $($arg: $type),*) -> $out {
                // Frequent (some for every copy), so not written to the file at once.
                let quiet = stringify!($name) == "hlthunk_command_submission";
                // SAFETY: the caller's promise, as for all functions here; pointers are still those of the call.
                unsafe {
                    trace::recorded(stringify!($name), quiet, || (self.$name)($($arg),*), |arguments| {
                        $($arg.describe(arguments.key(stringify!($arg)));)*
                    })
                }
            })*

            /// `None`: the library has no such function.
            $(pub(crate) unsafe fn $optional(&self, $($optional_arg: $optional_type),*) -> Option<$optional_out> {
                let call = self.$optional?;
                // SAFETY: as above.
                Some(unsafe {
                    trace::recorded(stringify!($optional), false, || call($($optional_arg),*), |arguments| {
                        $($optional_arg.describe(arguments.key(stringify!($optional_arg)));)*
                    })
                })
            })*
        }
    };
}

symbols! {
    required {
        fn hlthunk_open(device_name: DeviceName, bus_id: *const c_char) -> c_int;
        fn hlthunk_open_control(index: c_int, bus_id: *const c_char) -> c_int;
        fn hlthunk_close(fd: c_int) -> c_int;
        fn hlthunk_get_pci_bus_id_from_fd(fd: c_int, bus_id: *mut c_char, len: c_int) -> c_int;
        fn hlthunk_get_hw_ip_info(fd: c_int, info: *mut HwIpInfo) -> c_int;
        fn hlthunk_device_memory_alloc(
            fd: c_int, size: u64, page_size: u64, contiguous: bool, shared: bool
        ) -> u64;
        fn hlthunk_device_memory_free(fd: c_int, handle: u64) -> c_int;
        fn hlthunk_device_memory_map(fd: c_int, handle: u64, hint: u64) -> u64;
        fn hlthunk_host_memory_map(fd: c_int, ptr: *mut c_void, hint: u64, size: u64) -> u64;
        fn hlthunk_memory_unmap(fd: c_int, addr: u64) -> c_int;
        fn hlthunk_request_command_buffer(fd: c_int, size: u32, handle: *mut u64) -> c_int;
        fn hlthunk_destroy_command_buffer(fd: c_int, handle: u64) -> c_int;
        fn hlthunk_command_submission(fd: c_int, chunks: *mut CsIn, out: *mut CsOut) -> c_int;
        fn hlthunk_device_memory_export_dmabuf_fd(
            fd: c_int, addr: u64, size: u64, flags: u32
        ) -> c_int;
    }
    optional {
        fn hlthunk_device_mapped_memory_export_dmabuf_fd(
            fd: c_int, addr: u64, size: u64, offset: u64, flags: u32
        ) -> c_int;
        fn hlthunk_get_device_count(device_name: DeviceName) -> c_int;
        fn hlthunk_get_device_status_info(fd: c_int) -> c_int;
        fn hlthunk_get_dram_usage(fd: c_int, usage: *mut DramUsageInfo) -> c_int;
        fn hlthunk_get_hw_block(fd: c_int, addr: u64, size: *mut u32, handle: *mut u64) -> c_int;
        fn hlthunk_cs_flush_pci_hbw_writes(fd: c_int) -> c_int;
        fn hlthunk_command_submission_timeout(
            fd: c_int, chunks: *mut CsIn, out: *mut CsOut, timeout: u32
        ) -> c_int;
    }
    by_hand {
        required {
            hlthunk_wait_for_cs: unsafe extern "C" fn(c_int, u64, u64, *mut u32) -> c_int;
        }
        optional {
            hlthunk_get_version: unsafe extern "C" fn() -> *mut c_char;
            hlthunk_free: unsafe extern "C" fn(*mut c_void);
            // Not the library's own, but what its calls use: libc's for the real library, the software
            // device's for that one. Operations without a wrapper must use the same one.
            ioctl: unsafe extern "C" fn(c_int, c_ulong, ...) -> c_int;
        }
    }
}

/// # Safety
/// `T` is the function's type.
unsafe fn required<T: Copy>(handle: &Handle, name: &str) -> Result<T, String> {
    // SAFETY: the caller's promise.
    unsafe { handle.get::<T>(name) }.map(|symbol| *symbol).map_err(|error| reason(&error))
}

/// # Safety
/// As for [`required`].
unsafe fn optional<T: Copy>(handle: &Handle, name: &str) -> Option<T> {
    // SAFETY: the caller's promise.
    unsafe { handle.get::<T>(name) }.ok().map(|symbol| *symbol)
}

thread_local! {
    /// How often this thread polled for submissions in vain since its last recorded wait.
    static IDLE_POLLS: Cell<u64> = const { Cell::new(0) };
}

impl Symbols {
    /// As the library's function. Polls that find nothing are not recorded but counted, as a program
    /// makes as many as it has time for.
    pub(crate) unsafe fn hlthunk_wait_for_cs(
        &self,
        fd: c_int,
        sequence: u64,
        timeout_us: u64,
        status: *mut u32,
    ) -> c_int {
        let began = trace::begin();
        // SAFETY: the caller's promise.
        let ret = unsafe { (self.hlthunk_wait_for_cs)(fd, sequence, timeout_us, status) };
        let Some(began) = began else { return ret };
        // SAFETY: the caller's place for the status.
        let found = unsafe { *status };
        if ret == 0 && timeout_us == 0 && found == WAIT_BUSY {
            IDLE_POLLS.with(|polls| polls.set(polls.get() + 1));
            // If this submission hangs, nothing else may be recorded before the process is killed.
            trace::flush_old(began);
            return ret;
        }
        let idle = IDLE_POLLS.with(Cell::take);
        trace::record(began, "hlthunk_wait_for_cs", found == WAIT_COMPLETED, ret, |arguments| {
            arguments.numbers([
                ("fd", fd as u64),
                ("sequence", sequence),
                ("timeout_us", timeout_us),
            ]);
            arguments.numbers([("status", u64::from(found)), ("idle_polls", idle)]);
        });
        ret
    }

    /// The driver's memory ioctl, for operations that the library has no function for.
    pub(crate) unsafe fn memory_ioctl(&self, fd: c_int, args: *mut MemArgs) -> c_int {
        // SAFETY: the caller's structure; the answer takes the place of what was given.
        let given = unsafe { (*args).fd_or_device_va } & u64::from(u32::MAX);
        let call = || match self.ioctl {
            // SAFETY: the caller's promise.
            Some(ioctl) => unsafe { ioctl(fd, IOCTL_MEMORY, args) },
            // SAFETY: as above.
            None => unsafe { libc::ioctl(fd, IOCTL_MEMORY as _, args) },
        };
        trace::recorded("ioctl_memory", false, call, |arguments| {
            // SAFETY: the caller's structure.
            let MemArgs { op, length, fd_or_device_va, .. } = unsafe { *args };
            arguments.numbers([("op", op.into()), ("dmabuf", given), ("length", length)]);
            arguments.numbers([("device_va", fd_or_device_va)]);
        })
    }

    /// What the library calls itself.
    pub(crate) fn version(&self) -> Option<String> {
        let get = self.hlthunk_get_version?;
        // SAFETY: no arguments; the result is a string the caller owns, or null.
        let text = unsafe { get() };
        if text.is_null() {
            return None;
        }
        // SAFETY: not null, and the library terminates it.
        let version = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        if let Some(free) = self.hlthunk_free {
            // SAFETY: allocated by the library for its caller and not used any more.
            unsafe { free(text.cast()) };
        }
        Some(version)
    }
}

/// The loader's own words, which libloading keeps as the source of its error.
pub(crate) fn reason(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |source| source.to_string())
}

/// An argument of a call, in a record.
trait Argument {
    /// # Safety
    /// Pointers are what the call was given; it has returned.
    unsafe fn describe(&self, line: &mut String);
}

macro_rules! plain_arguments {
    ($($type:ty),*) => {
        $(impl Argument for $type {
            unsafe fn describe(&self, line: &mut String) {
                let _ = write!(line, "{self}");
            }
        })*
    };
}

plain_arguments!(c_int, u32, bool);

impl Argument for u64 {
    unsafe fn describe(&self, line: &mut String) {
        trace::write_number(line, *self);
    }
}

impl Argument for *mut c_void {
    unsafe fn describe(&self, line: &mut String) {
        trace::write_number(line, *self as u64);
    }
}

impl Argument for *const c_char {
    unsafe fn describe(&self, line: &mut String) {
        if self.is_null() {
            line.push_str("null");
            return;
        }
        // SAFETY: a terminated string of the caller's, or of the library's.
        trace::write_text(line, &unsafe { CStr::from_ptr(*self) }.to_string_lossy());
    }
}

impl Argument for *mut c_char {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: as the caller promises.
        unsafe { self.cast_const().describe(line) }
    }
}

impl Argument for *mut u32 {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's place for an answer.
        let _ = write!(line, "{}", unsafe { **self });
    }
}

impl Argument for *mut u64 {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's place for an answer.
        trace::write_number(line, unsafe { **self });
    }
}

impl Argument for *mut HwIpInfo {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's structure.
        let info = unsafe { &**self };
        let numbers = [
            ("device_id", info.device_id.into()),
            ("module_id", info.module_id.into()),
            ("revision_id", info.revision_id.into()),
            ("dram_base_address", info.dram_base_address),
            ("dram_size", info.dram_size),
            ("dram_page_size", info.dram_page_size),
            ("default_page_size", info.device_mem_alloc_default_page_size),
            ("edma_enabled_mask", info.edma_enabled_mask.into()),
            ("pdma_user_owned_ch_mask", info.pdma_user_owned_ch_mask),
            ("nic_ports_mask", info.nic_ports_mask),
            ("security_enabled", info.security_enabled.into()),
        ];
        trace::write_object(line, &numbers);
    }
}

impl Argument for *mut DramUsageInfo {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's place for the answer.
        let usage = unsafe { &**self };
        let numbers = [("free", usage.dram_free_mem), ("context", usage.ctx_dram_mem)];
        trace::write_object(line, &numbers);
    }
}

impl Argument for *mut CsIn {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's structure.
        let cs = unsafe { &**self };
        let (start, count) = (cs.chunks_execute.cast::<CsChunk>(), cs.num_chunks_execute as usize);
        // SAFETY: the chunks that it names. There are no restore chunks: nothing here submits any.
        let chunks = unsafe { slice::from_raw_parts(start, count) };
        line.push('[');
        for (at, chunk) in chunks.iter().enumerate() {
            if at > 0 {
                line.push(',');
            }
            let numbers = [
                ("queue", chunk.queue_index.into()),
                ("size", chunk.cb_size.into()),
                ("flags", chunk.cs_chunk_flags.into()),
                ("cb", chunk.cb_handle),
            ];
            trace::write_object(line, &numbers);
        }
        // An argument of its own in the record.
        line.push_str("],\"flags\":");
        trace::write_number(line, cs.flags.into());
    }
}

impl Argument for *mut CsOut {
    unsafe fn describe(&self, line: &mut String) {
        // SAFETY: the caller's place for the answer.
        let out = unsafe { &**self };
        trace::write_object(line, &[("sequence", out.seq), ("status", out.status.into())]);
    }
}
