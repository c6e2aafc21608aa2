//! The libuct (and libucs) that a loaded libucp stands on.

use super::sys::{Functions, MemoryInfo, OK, RawStatus, SYS_DEVICE_UNKNOWN};
use super::{Error, Result, Status};
use crate::ucp::Ucx;
use anyhow::Context as _;
use std::ffi::CStr;

/// UCT of one loaded UCX. Lives as long as the process.
pub struct Uct {
    pub(super) f: Functions,
}

impl Uct {
    /// Looks up UCT's functions in the libraries that this libucp brought along.
    pub fn of(ucx: &'static Ucx) -> anyhow::Result<&'static Uct> {
        // SAFETY: libucp links libuct and libucs, whose public API has the signatures of `sys`; the
        // library is never closed.
        let f = unsafe { Functions::load(ucx.library()) }.with_context(|| {
            format!("the libuct under {} is not one that this client can use", ucx.path().display())
        })?;
        Ok(Box::leak(Box::new(Uct { f })))
    }

    pub(super) fn check(&self, call: &'static str, status: RawStatus) -> Result<()> {
        if status == OK {
            return Ok(());
        }
        // SAFETY: returns a static string for any status.
        let text = unsafe { CStr::from_ptr((self.f.ucs_status_string)(status)) };
        Err(Error { call, status: Status(status), text: text.to_string_lossy().into_owned() })
    }

    /// PCI bus id of a system device, `None` if UCX does not know it.
    pub fn bus_id(&self, sys_device: u8) -> Option<String> {
        if sys_device == SYS_DEVICE_UNKNOWN {
            return None;
        }
        let mut name = [0; 64];
        // SAFETY: writes a C string of at most the given length.
        let text = unsafe {
            (self.f.ucs_topo_sys_device_bdf_name)(sys_device, name.as_mut_ptr(), name.len());
            CStr::from_ptr(name.as_ptr())
        };
        Some(text.to_string_lossy().into_owned())
    }

    /// What UCX's memory-type cache says of a range: its type, or `None` for a miss.
    pub fn cached_type(&self, address: u64, length: usize) -> Option<u32> {
        let mut info = MemoryInfo::default();
        // SAFETY: the cache takes any address as a number and fills the structure on success.
        let status = unsafe { (self.f.ucs_memtype_cache_lookup)(address, length, &mut info) };
        (status == OK).then_some(info.kind)
    }
}
