//! Device memory, host memory mapped for the card, and dma-bufs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hl_thunk::{
    Device, DeviceAddr, DeviceMapping, DeviceMemory, DmaBuf, Error, ExportCall, HostMapping,
    HostPages, ImportedMapping, PAGE_SIZE,
};
use rustix::fs::{SeekFrom, seek};
use serde_json::json;

use super::queries::ms;
use crate::output::size;
use crate::report::Finding;

const LOOK_AT_LOG: &str = "look at the kernel log (dmesg), and send it with this report";
/// Used if the driver does not report its page size.
const FALLBACK_PAGE: u64 = 32 << 20;
/// Offset of our hint in the range for hints: a framework's own pool is at its start or its middle.
const INTO_RANGE: u64 = 8 << 40;
/// Mask for device addresses: the driver aligns the low 48 bits.
const LOW: u64 = (1 << 48) - 1;

/// Device memory to copy in.
pub(super) enum Area {
    /// Mapped by the driver.
    Mapped(Arc<DeviceMapping>),
    /// Physical, on a card without an MMU for its memory.
    Physical(DeviceAddr),
}

impl Area {
    pub(super) fn base(&self) -> DeviceAddr {
        match self {
            Area::Mapped(mapping) => mapping.addr(),
            Area::Physical(addr) => *addr,
        }
    }
}

pub(super) fn page_of(device: &Device) -> u64 {
    let hw = device.hw_info();
    let reported = [hw.device_mem_alloc_default_page_size, hw.dram_page_size];
    let usable = |page: &u64| *page != 0 && page.is_multiple_of(PAGE_SIZE);
    reported.into_iter().find(usable).unwrap_or(FALLBACK_PAGE)
}

/// Allocates a page and maps it where we ask, then another one next to it.
pub(super) fn device_memory(device: &Device) -> (Finding, Option<Area>) {
    let page = page_of(device);
    let Some(range) = device.generation().hint_range() else {
        let base = DeviceAddr(device.hw_info().dram_base_address.next_multiple_of(PAGE_SIZE));
        let found = format!("physical addresses from {base}; the driver allocates nothing");
        return (Finding::good("", found), Some(Area::Physical(base)));
    };
    let hint = (range.start & !LOW) | ((range.start & LOW) + INTO_RANGE).next_multiple_of(page);
    let mapped = (|| -> Result<_, Error> {
        let began = Instant::now();
        let memory = DeviceMemory::alloc(device, page)?;
        let allocated = began.elapsed();
        let mapping = memory.map(Some(DeviceAddr(hint)))?;
        Ok((mapping, allocated, began.elapsed() - allocated))
    })();
    let (mapping, alloc, map) = match mapped {
        Ok(mapped) => mapped,
        Err(error) => {
            let remedy = match error.errno {
                libc::ENOMEM => "the card's memory is taken, or another process uses it: hl-smi",
                _ => LOOK_AT_LOG,
            };
            return (Finding::bad("", error.to_string(), remedy), None);
        }
    };
    let data = json!({
        "page": page, "hint": format!("{hint:#x}"), "address": format!("{:#x}", mapping.addr().0),
        "alloc_ms": alloc.as_secs_f64() * 1e3, "map_ms": map.as_secs_f64() * 1e3,
    });
    if mapping.addr().0 != hint {
        let found = format!(
            "the driver mapped memory at {} though {hint:#x} was asked for: the plugin needs its own addresses",
            mapping.addr()
        );
        let remedy = "is another library of this process using the card? else send this report";
        return (Finding::bad("", found, remedy).with(data), None);
    }
    let neighbour = map_beside(device, hint + page, page);
    let finding = match neighbour {
        Ok(addr) if addr.0 == hint + page => {
            let found = format!(
                "a page of {} at the address asked for, another next to it; allocating takes {}, mapping {}",
                size(page),
                ms(alloc),
                ms(map)
            );
            Finding::good("", found)
        }
        Ok(addr) => Finding::warning(
            "",
            format!(
                "the first page is where it was asked for, the second at {addr} instead of next to it"
            ),
            "the plugin can use one page of this card; send this report",
        ),
        Err(error) if error.errno == libc::ENOMEM => {
            let found =
                format!("a page of {} at the address asked for; no second one free", size(page));
            Finding::good("", found)
        }
        Err(error) => Finding::warning("", format!("a second page: {error}"), LOOK_AT_LOG),
    };
    (finding.with(data), Some(Area::Mapped(Arc::new(mapping))))
}

fn map_beside(device: &Device, at: u64, page: u64) -> Result<DeviceAddr, Error> {
    let mapping = DeviceMemory::alloc(device, page)?.map(Some(DeviceAddr(at)))?;
    let addr = mapping.addr();
    mapping.unmap().map_err(|(_, error)| error)?;
    Ok(addr)
}

/// Maps host memory of growing sizes, with times.
pub(super) fn host_memory(device: &Device, thorough: bool) -> Finding {
    let mut sizes = vec![4 << 10, 2 << 20, 64 << 20];
    if thorough && available() > 4 << 30 {
        sizes.push(1 << 30);
    }
    let (mut words, mut rows, mut refused) = (Vec::new(), Vec::new(), None);
    for &len in &sizes {
        match map_host(device, len) {
            Ok([map, unmap]) => {
                words.push(format!("{} {} + {}", size(len as u64), ms(map), ms(unmap)));
                rows.push(json!({
                    "bytes": len, "map_us": map.as_secs_f64() * 1e6,
                    "unmap_us": unmap.as_secs_f64() * 1e6,
                }));
            }
            Err(error) => {
                refused = Some((len, error));
                break;
            }
        }
    }
    let finding = match refused {
        None => Finding::good("", format!("map + unmap: {}", words.join(", "))),
        Some((len, error)) if len <= 2 << 20 => {
            Finding::bad("", format!("{}: {error}", size(len as u64)), LOOK_AT_LOG)
        }
        Some((len, error)) => Finding::warning(
            "",
            format!("{} is refused: {error}; {}", size(len as u64), words.join(", ")),
            "check the locked-memory limit (ulimit -l); larger buffers go through bounce buffers",
        ),
    };
    finding.with(json!({ "sizes": rows }))
}

/// Best of three, at an offset in the middle of a page.
fn map_host(device: &Device, len: usize) -> Result<[Duration; 2], Error> {
    const INTO_PAGE: usize = 124;
    let pages = HostPages::new(len + INTO_PAGE).map_err(|error| Error {
        call: "mmap",
        errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
    })?;
    let mut best = [Duration::MAX; 2];
    for _ in 0..3 {
        let began = Instant::now();
        // SAFETY: inside the pages, which outlive the mapping; nothing is copied.
        let mapping =
            unsafe { HostMapping::new(device, pages.as_ptr().add(INTO_PAGE), len as u64)? };
        let mapped = began.elapsed();
        if mapping.addr().0 % PAGE_SIZE != INTO_PAGE as u64 {
            return Err(Error {
                call: "hlthunk_host_memory_map (place in the page)",
                errno: libc::EINVAL,
            });
        }
        drop(mapping);
        if let errors = device.library().take_drop_errors()
            && let Some(error) = errors.first()
        {
            return Err(*error);
        }
        best = [best[0].min(mapped), best[1].min(began.elapsed() - mapped)];
    }
    Ok(best)
}

/// Bytes of memory that the host can spare.
fn available() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let number = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    number.unwrap_or(0) << 10
}

/// Exports memory, checks the descriptor, and tries to unmap the memory while it is exported.
pub(super) fn export(device: &Device, area: &Area) -> Finding {
    let call = ExportCall::best(device.library());
    let len = 16 * PAGE_SIZE;
    let exported = match area {
        Area::Physical(addr) => {
            DmaBuf::export_physical(device, *addr, len).map(|dmabuf| (dmabuf, None))
        }
        Area::Mapped(_) => own_mapping(device).and_then(|mapping| {
            let dmabuf = DmaBuf::export(&mapping, 0, len, call)?;
            Ok((dmabuf, Some(mapping)))
        }),
    };
    let (dmabuf, mapping) = match exported {
        Ok(exported) => exported,
        Err(error) => {
            let remedy = match error.errno {
                libc::EPERM | libc::EOPNOTSUPP => {
                    "peer-to-peer is off: check the BIOS (large BAR, IOMMU) and the kernel log"
                }
                _ => LOOK_AT_LOG,
            };
            return Finding::bad("", error.to_string(), remedy);
        }
    };
    let seen = seek(&dmabuf, SeekFrom::End(0)).map_err(|errno| errno.to_string());
    if seen != Ok(len) {
        let found = format!("a dma-buf of {} has the size {seen:?}", size(len));
        return Finding::bad("", found, LOOK_AT_LOG);
    }
    let Some(mapping) = mapping else {
        return Finding::good("", format!("a dma-buf of {}", size(len)));
    };
    // Drop the mapping, which the dma-buf holds, but keep the descriptor.
    let fd = dmabuf.into_fd();
    let Ok(mapping) = Arc::try_unwrap(mapping) else {
        return Finding::bad("", "the mapping has other users", "");
    };
    let mapping = match mapping.unmap() {
        Err((mapping, error)) if error.errno == libc::EINVAL => mapping,
        Err((_, error)) => {
            let found = format!("unmapping exported memory answers {error}, not EINVAL");
            return Finding::warning("", found, "send this report");
        }
        Ok(()) => {
            let found = "the driver unmapped memory while a dma-buf of it was open";
            return Finding::bad("", found, "send this report: peers could see memory of others");
        }
    };
    drop(fd);
    match mapping.unmap() {
        Ok(()) => {
            let how = if call == ExportCall::Mapped { "with" } else { "without" };
            let found = format!(
                "a dma-buf of {}, {how} offsets; memory cannot be unmapped while it is open, and can afterwards",
                size(len)
            );
            Finding::good("", found).with(json!({"offsets": call == ExportCall::Mapped}))
        }
        Err((_, error)) => {
            let found =
                format!("the dma-buf is closed, and its memory cannot be unmapped: {error}");
            Finding::warning("", found, LOOK_AT_LOG)
        }
    }
}

fn own_mapping(device: &Device) -> Result<Arc<DeviceMapping>, Error> {
    Ok(Arc::new(DeviceMemory::alloc(device, page_of(device))?.map(None)?))
}

/// Checks, once, whether the driver imports foreign dma-bufs.
pub(super) fn import(device: &Device) -> Finding {
    let supported = match ImportedMapping::supported(device) {
        Ok(supported) => supported,
        Err(error) => return Finding::bad("", error.to_string(), LOOK_AT_LOG),
    };
    let found = if supported {
        "the driver imports dma-bufs: gaudi_ipc copies from card to card"
    } else {
        "the driver imports no dma-bufs, as no upstream kernel does: gaudi_ipc relays through host memory"
    };
    Finding::good("", found).with(json!({ "import": supported }))
}
