//! Feeding UCX's memory-type cache.
//!
//! UCP asks that cache what an address is and takes a miss for host memory, without asking any
//! memory domain. So each UCX copy is told of a device's whole window before its first address is
//! handed out. Not earlier: a region in that cache also costs UCP its short path for host memory,
//! which a program that never touches a Gaudi must not pay for.
//!
//! And the other way round: UCX remembers registrations of memory, and is told when memory is freed.

use std::sync::Mutex;

use gaudi::{Allocation, Window, WindowEvent};
use uct::{MemoryType, SysDevice, Ucx, log};

/// A place that no memory of ours or of a host can have (a Gaudi2's on-chip memory lies there). It
/// stays in the cache for good: UCP looks without a lock whether the cache is empty, and changing a
/// region means that it is gone for a moment. A cache with one region would then look empty, and
/// another thread's Gaudi buffer pass for host memory.
const SENTINEL: (u64, usize) = (0x1000_0000_0000_0000, 4096);

/// The UCX copies that are being told.
static TOLD: Mutex<Vec<&'static Ucx>> = Mutex::new(Vec::new());

/// Has `ucx` told of the windows there are and of those that come.
pub(crate) fn begin(ucx: &'static Ucx) {
    let mut told = TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    if told.iter().any(|known| core::ptr::eq(*known, ucx)) {
        return;
    }
    told.push(ucx);
    // The list stays locked until the observer is there: another thread that finds `ucx` in it may
    // allocate at once.
    gaudi::runtime().subscribe(Box::new(move |event| match event {
        WindowEvent::Opened(window) => {
            log!(
                ucx,
                Debug,
                "memory of {} is at {:#x}, {:#x} bytes",
                window.info,
                window.start.0,
                window.len
            );
            let device = sys_device(ucx, &window.info);
            let (start, len) = SENTINEL;
            ucx.memory_type_cache_insert(start, len, MemoryType::GAUDI, device);
            insert_window(ucx, window);
        }
        WindowEvent::Retired(window) => {
            ucx.memory_type_cache_remove(window.start.0, length(window));
        }
        WindowEvent::Mapped(memory) => {
            log!(
                ucx,
                Debug,
                "the application mapped {} bytes at {} on {}",
                memory.len,
                memory.start,
                memory.info
            );
            let device = sys_device(ucx, &memory.info);
            let (start, len) = SENTINEL;
            ucx.memory_type_cache_insert(start, len, MemoryType::GAUDI, device);
            // The first makes the cache if there is none yet, and the event goes to everybody else.
            ucx.memory_type_cache_insert(
                memory.start.0,
                bytes(memory.len),
                MemoryType::GAUDI,
                device,
            );
            ucx.memory_allocated(memory.start.0, bytes(memory.len), MemoryType::GAUDI, device);
        }
        WindowEvent::Unmapping(memory) => {
            ucx.memory_freed(memory.start.0, bytes(memory.len), MemoryType::GAUDI);
            // If it lay in the card's window, it has taken a hole out of that.
            if let Some(card) = gaudi::runtime().device(memory.device)
                && card.window().range().contains(&memory.start.0)
                && card.memory().reserved > 0
            {
                insert_window(ucx, card.window());
            }
        }
    }));
}

/// Has every UCX copy drop what it remembers of memory that is about to be freed: a network
/// device's registration would keep the driver's page in use, and reach its next tenant.
pub(crate) fn freeing(allocation: &Allocation) {
    let window = allocation.device().window();
    let told = TOLD.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    for ucx in told {
        ucx.memory_freed(allocation.addr().0, allocation.len() as usize, MemoryType::GAUDI);
        // That took a hole out of the window. The whole window goes in again: pieces that only touch
        // are never joined, and an allocation across two of them would not be recognised.
        insert_window(ucx, window);
    }
}

fn insert_window(ucx: &Ucx, window: &Window) {
    let device = sys_device(ucx, &window.info);
    ucx.memory_type_cache_insert(window.start.0, length(window), MemoryType::GAUDI, device);
}

fn length(window: &Window) -> usize {
    bytes(window.len)
}

fn bytes(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

/// UCX's topology number of a card, under the name `ucx_info -T` shows.
pub(crate) fn sys_device(ucx: &Ucx, card: &gaudi::DeviceInfo) -> SysDevice {
    ucx.sys_device(card.bus_id.as_str(), &format!("GAUDI_{}", card.index))
}
