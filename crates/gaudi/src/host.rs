//! Host memory that was registered: recorded here, pinned for a device only when a DMA needs it.

use std::sync::Arc;

/// A range of host memory that will be used for copies, perhaps often.
///
/// Recording costs nothing: no device is opened, no page is pinned. The first copy that uses the
/// region on a device pins all of it for that device; dropping the last handle unpins it, once the
/// copies that use it are done.
#[derive(Debug)]
pub struct HostRegion {
    start: usize,
    len: usize,
}

impl HostRegion {
    /// Records `len` bytes from `ptr`. Drop the region before the memory goes away.
    pub fn record(ptr: *mut u8, len: usize) -> Arc<Self> {
        Arc::new(Self { start: ptr as usize, len })
    }

    /// Whether all of `[addr, addr + len)` lies inside.
    pub fn contains(&self, addr: usize, len: usize) -> bool {
        addr >= self.start && len <= self.len && addr - self.start <= self.len - len
    }
}
