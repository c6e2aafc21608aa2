//! What a copy transport says that copies cost (`uct_iface_estimate_perf`).

use super::sys::{self, PerfAttr};
use super::{Copier, Result};
use std::fmt;
use std::mem::zeroed;

/// A copy that may be asked about, by its names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copy {
    /// `put_short`, `put_zcopy`, `get_short` or `get_zcopy`.
    pub operation: &'static str,
    /// The local buffer is Gaudi memory.
    pub from_gaudi: bool,
    /// The remote buffer is Gaudi memory.
    pub to_gaudi: bool,
}

impl Copy {
    /// Every operation between host and Gaudi memory, and inside the latter.
    pub fn all() -> impl Iterator<Item = Copy> {
        let operations = ["put_short", "put_zcopy", "get_short", "get_zcopy"];
        operations.into_iter().flat_map(|operation| {
            [(false, true), (true, false), (true, true)].map(|(from_gaudi, to_gaudi)| Copy {
                operation,
                from_gaudi,
                to_gaudi,
            })
        })
    }
}

impl fmt::Display for Copy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |gaudi| if gaudi { "gaudi" } else { "host" };
        write!(f, "{} {}:{}", self.operation, name(self.from_gaudi), name(self.to_gaudi))
    }
}

/// What a copy costs.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Estimate {
    /// Bytes a second.
    pub bandwidth: f64,
    /// Seconds of the caller's time.
    pub overhead: f64,
    /// Seconds until it has ended, beyond that.
    pub latency: f64,
}

impl Copier<'_> {
    /// What the transport says that a copy costs.
    pub fn estimate(&self, copy: Copy) -> Result<Estimate> {
        let memory = |gaudi| if gaudi { sys::MEMORY_TYPE_GAUDI } else { sys::MEMORY_TYPE_HOST };
        // SAFETY: plain data.
        let mut attr: PerfAttr = unsafe { zeroed() };
        attr.field_mask = PerfAttr::OPERATION
            | PerfAttr::LOCAL_MEMORY_TYPE
            | PerfAttr::REMOTE_MEMORY_TYPE
            | PerfAttr::SEND_PRE_OVERHEAD
            | PerfAttr::SEND_POST_OVERHEAD
            | PerfAttr::BANDWIDTH
            | PerfAttr::LATENCY;
        attr.operation = match copy.operation {
            "put_short" => sys::PUT_SHORT,
            "put_zcopy" => sys::PUT_ZCOPY,
            "get_short" => sys::GET_SHORT,
            _ => sys::GET_ZCOPY,
        };
        attr.local_memory_type = memory(copy.from_gaudi);
        attr.remote_memory_type = memory(copy.to_gaudi);
        let uct = self.uct();
        // SAFETY: an open interface, and room for the answer.
        let status = unsafe { (uct.f.uct_iface_estimate_perf)(self.iface(), &mut attr) };
        uct.check("uct_iface_estimate_perf", status)?;
        Ok(Estimate {
            bandwidth: attr.bandwidth.iter().sum(),
            overhead: attr.send_pre_overhead + attr.send_post_overhead,
            latency: attr.latency[0],
        })
    }
}
