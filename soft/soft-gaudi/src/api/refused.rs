//! Functions that exist because programs link to them: some the driver refuses on these generations, some need a kernel
//! or a profiler, and a few succeed by doing nothing.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::{borrow, get};
use crate::abi::DebugArgs;
use crate::asic::Generation;
use crate::context;
use crate::node::node;

fn not_on_gaudi1(fd: c_int, otherwise: Result<c_int, Errno>) -> Result<c_int, Errno> {
    let context = context::operational(borrow(fd)?)?;
    if context.profile.generation == Generation::Gaudi1 { Err(Errno::PERM) } else { otherwise }
}

const DEBUG_OP_SET_MODE: u32 = 7;

c_functions! {
    /// Debug mode can be entered and left; there are no trace units to set up.
    fn hlthunk_debug(fd: c_int, args: *mut DebugArgs) -> done {
        let args = get(args)?;
        let context = context::operational(borrow(fd)?)?;
        let set_mode = args.get(DebugArgs::OP) == DEBUG_OP_SET_MODE;
        context.debug(set_mode, args.get(DebugArgs::ENABLE) != 0)
    }

    /// Makes earlier writes of other devices visible to the engines.
    fn hlthunk_cs_flush_pci_hbw_writes(fd: c_int) -> done {
        context::operational(borrow(fd)?)?.flush_peer_writes()
    }

    /// There are no embedded cores.
    fn hlthunk_engine_cores_set_mode(fd: c_int, _core_ids: *const u32, _num_cores: u32, _mode: u32) -> status {
        not_on_gaudi1(fd, Err(Errno::INVAL))
    }

    /// There are no engines to stall.
    fn hlthunk_engines_command(fd: c_int, _engine_ids: *const u32, _num_engines: u32, _command: c_int) -> status {
        not_on_gaudi1(fd, Err(Errno::INVAL))
    }

    /// There is no firmware.
    fn hlthunk_fw_send_generic_request(fd: c_int, _buff: *mut c_void, _buff_size: u32, _sub_opcode: u32) -> status {
        node().map_err(|_| Errno::NOTTY)?.identify(borrow(fd)?)?;
        Err(Errno::PERM)
    }

    fn hlthunk_deprecated_func1() -> status { Err(Errno::PERM) }
    fn hlthunk_deprecated_func2() -> status { Err(Errno::PERM) }
    fn hlthunk_deprecated_func3() -> status { Err(Errno::PERM) }

    /// It and the next two need the vendor's shim.
    fn hlthunk_profiler_start(_fd: c_int) -> status { Ok(-1) }
    fn hlthunk_profiler_stop(_fd: c_int) -> status { Ok(-1) }
    fn hlthunk_profiler_get_trace(_fd: c_int, _buffer: *mut c_void, _size: *mut u64, _entries: *mut u64) -> status {
        Ok(-1)
    }

    /// Debugfs belongs to a kernel.
    fn hlthunk_debugfs_open(_fd: c_int, _debugfs: *mut c_void) -> done { Err(Errno::NOENT) }
    fn hlthunk_debugfs_read(_debugfs: *mut c_void, _address: u64, _value: *mut u32) -> done { Err(Errno::NOENT) }
    fn hlthunk_debugfs_write(_debugfs: *mut c_void, _address: u64, _value: u32) -> done { Err(Errno::NOENT) }
    fn hlthunk_debugfs_close(_debugfs: *mut c_void) -> done { Ok(()) }
}

/// `hlthunk_profiler_destroy`.
#[unsafe(no_mangle)]
pub extern "C" fn hlthunk_profiler_destroy() {}
