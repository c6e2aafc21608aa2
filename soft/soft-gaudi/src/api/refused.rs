//! Functions that are there because programs link to them: what the driver refuses on these
//! generations, what needs a kernel or a profiler, and a few that succeed by doing nothing.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{borrow, get, status};
use crate::abi::DebugArgs;
use crate::asic::Generation;
use crate::context;
use crate::node::node;

fn not_on_gaudi1(fd: c_int, otherwise: Result<c_int, Errno>) -> Result<c_int, Errno> {
    let context = context::operational(borrow(fd)?)?;
    if context.profile.generation == Generation::Gaudi1 { Err(Errno::PERM) } else { otherwise }
}

const DEBUG_OP_SET_MODE: u32 = 7;

/// `hlthunk_debug`: debug mode can be entered and left; there are no trace units to set up.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_debug(fd: c_int, args: *mut DebugArgs) -> c_int {
    status("hlthunk_debug", || {
        let args = get(args)?;
        let context = context::operational(borrow(fd)?)?;
        let set_mode = args.get(DebugArgs::OP) == DEBUG_OP_SET_MODE;
        context.debug(set_mode, args.get(DebugArgs::ENABLE) != 0)?;
        Ok(0)
    })
}

/// `hlthunk_cs_flush_pci_hbw_writes`: from now on the engines see what other devices wrote before.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_cs_flush_pci_hbw_writes(fd: c_int) -> c_int {
    status("hlthunk_cs_flush_pci_hbw_writes", || {
        let context = context::operational(borrow(fd)?)?;
        if context.profile.generation == Generation::Gaudi3 {
            return Err(Errno::OPNOTSUPP);
        }
        context.flush_peer_writes()?;
        Ok(0)
    })
}

/// `hlthunk_engine_cores_set_mode`: there are no embedded cores.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_engine_cores_set_mode(
    fd: c_int,
    _core_ids: *const u32,
    _num_cores: u32,
    _mode: u32,
) -> c_int {
    status("hlthunk_engine_cores_set_mode", || not_on_gaudi1(fd, Err(Errno::INVAL)))
}

/// `hlthunk_engines_command`: there are no engines to stall.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_engines_command(
    fd: c_int,
    _engine_ids: *const u32,
    _num_engines: u32,
    _command: c_int,
) -> c_int {
    status("hlthunk_engines_command", || not_on_gaudi1(fd, Err(Errno::INVAL)))
}

/// `hlthunk_fw_send_generic_request`: there is no firmware.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_fw_send_generic_request(
    fd: c_int,
    _buff: *mut c_void,
    _buff_size: u32,
    _sub_opcode: u32,
) -> c_int {
    status("hlthunk_fw_send_generic_request", || {
        node().map_err(|_| Errno::NOTTY)?.identify(borrow(fd)?)?;
        Err(Errno::PERM)
    })
}

/// `hlthunk_profiler_start`: needs the vendor's shim.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_profiler_start(_fd: c_int) -> c_int {
    -1
}

/// `hlthunk_profiler_stop`: needs the vendor's shim.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_profiler_stop(_fd: c_int) -> c_int {
    -1
}

/// `hlthunk_profiler_get_trace`: needs the vendor's shim.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_profiler_get_trace(
    _fd: c_int,
    _buffer: *mut c_void,
    _size: *mut u64,
    _num_entries: *mut u64,
) -> c_int {
    -1
}

/// `hlthunk_profiler_destroy`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_profiler_destroy() {}

/// `hlthunk_debugfs_open`: debugfs belongs to a kernel.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_debugfs_open(_fd: c_int, _debugfs: *mut c_void) -> c_int {
    status("hlthunk_debugfs_open", || Err(Errno::NOENT))
}

/// `hlthunk_debugfs_read`: see [`hlthunk_debugfs_open`].
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_debugfs_read(
    _debugfs: *mut c_void,
    _address: u64,
    _value: *mut u32,
) -> c_int {
    status("hlthunk_debugfs_read", || Err(Errno::NOENT))
}

/// `hlthunk_debugfs_write`: see [`hlthunk_debugfs_open`].
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_debugfs_write(
    _debugfs: *mut c_void,
    _address: u64,
    _value: u32,
) -> c_int {
    status("hlthunk_debugfs_write", || Err(Errno::NOENT))
}

/// `hlthunk_debugfs_close`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_debugfs_close(_debugfs: *mut c_void) -> c_int {
    0
}

/// `hlthunk_deprecated_func1`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_deprecated_func1() -> c_int {
    status("hlthunk_deprecated_func1", || Err(Errno::PERM))
}

/// `hlthunk_deprecated_func2`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_deprecated_func2() -> c_int {
    status("hlthunk_deprecated_func2", || Err(Errno::PERM))
}

/// `hlthunk_deprecated_func3`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_deprecated_func3() -> c_int {
    status("hlthunk_deprecated_func3", || Err(Errno::PERM))
}
