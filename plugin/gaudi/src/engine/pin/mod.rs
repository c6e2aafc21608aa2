//! Pinning host memory for DMA. Only this module decides whether a copy pins, and which range.
//!
//! [`pin`] takes a range of host memory and its registration, if it has one. It returns either the
//! device address of the range and a guard that keeps it pinned, or the instruction to use bounce
//! buffers. The first row that applies decides:
//!
//! | host memory | length | answer |
//! |---|---|---|
//! | the engine's own (the ring of a relay) | any | the region's pin |
//! | of a caller, on a framework's card | any | bounce |
//! | in the registration cache | any | the cached pin |
//! | in a region that has a pin of its own | any | the region's pin |
//! | any other memory | up to *small* | bounce |
//! | not registered, or its region has not earned a pin yet | up to *bounce* | bounce |
//! | registered, cache on, region within `RCACHE_MAX_SIZE` | any | the whole region, kept in the cache |
//! | registered, cache off | any | the whole region, kept until it is deregistered |
//! | cache on, and not full | above *bounce* | the pages of the range, kept in the cache |
//! | cache off or full | above *bounce* | the range, for this copy only (one-off) |
//! | memory that the driver refused to pin in a row above | any | bounce; guarded above *bounce* |
//!
//! *small*, *bounce* and how much of a region must be copied to earn a pin depend on the cost of pinning on this kind of
//! card: [`Pinning`], in the table of [`costs`](crate::base::costs). On the software card: 8 KiB, 64 KiB, a sixteenth.
//!
//! So a region that cannot be pinned whole, or is too large for the cache, is *pinned in parts*: each
//! large copy pins its own range. In a guarded bounce the kernel checks the caller's memory, because
//! memory that cannot be pinned may not be mapped at all.
//!
//! [`pin_slab`] pins the bounce buffers themselves, whole and for as long as they exist.
//!
//! **Refusals are remembered** (`rcache/refusals.rs`): a driver logs an error for every refusal.
//! So a range that contains a refused one, or touches a read-only mapping that was refused, is not
//! tried again until something has changed.

pub mod rcache;
mod region;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, HostPin};
use crate::error::{OnCard, Phase};
use crate::stats::{Counter, Counts, Gauge};
use crate::{DeviceAddr, DeviceId, Error, Pinning, probes};
use rcache::{Cache, CachedPin, Reason};
pub use region::HostRegion;

/// Keeps host memory pinned until it is dropped.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "kept for its destructor")]
pub(crate) enum PinRef {
    /// A counted reference to a pin in the registration cache.
    Cached(CachedPin),
    /// A region's pin, or a one-off pin.
    Owned(Arc<HostPin>),
}

/// Pinned host memory.
#[derive(Debug)]
pub(crate) struct Pinned {
    /// Device address of its first byte.
    pub(crate) addr: DeviceAddr,
    pub(crate) guard: PinRef,
}

/// How a copy accesses its host memory.
#[derive(Debug)]
pub(crate) enum HostAccess {
    Pinned(Pinned),
    /// Through bounce buffers. `guarded`: pinning was refused, so the CPU must touch the memory only
    /// in ways that cannot fault.
    Bounce {
        guarded: bool,
    },
}

/// Why memory was not pinned.
#[derive(Clone, Debug)]
pub(crate) enum PinError {
    /// The memory cannot be pinned: a copy through bounce buffers works.
    Refused(Reason),
    /// The device failed.
    Failed(Error),
}

/// The device that owns pins.
pub(crate) trait PinOwner: OnCard + Send + Sync + 'static {
    fn id(&self) -> DeviceId;
    fn backend(&self) -> &dyn Backend;
    fn counts(&self) -> Counts;
    fn pins(&self) -> &Pins;
    /// Whether this process opened it. False in a forked child.
    fn is_ours(&self) -> bool;
    /// Records an error that means the card was lost.
    fn note_loss(&self, error: Error) -> Error;
}

/// The pins of a device.
#[derive(Debug)]
pub(crate) struct Pins {
    /// Pins of whole regions outside the cache, by region. The device owns them, and a region has weak
    /// references, because a registration must not keep a card open.
    regions: Mutex<HashMap<u64, Arc<HostPin>>>,
    cache: Cache,
    policy: Pinning,
}

impl Pins {
    pub(crate) fn new(counts: Counts, policy: Pinning) -> Self {
        Self { regions: Mutex::default(), cache: Cache::new(counts), policy }
    }

    pub(crate) fn cache(&self) -> &Cache {
        &self.cache
    }

    fn regions(&self) -> MutexGuard<'_, HashMap<u64, Arc<HostPin>>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Decides how a copy accesses `range`. `region` is its registration, if any. See the module's table.
///
/// # Safety
/// The memory must stay allocated while the returned guard lives. All of the region's memory must stay
/// allocated while the region lives.
pub(crate) unsafe fn pin(
    device: &Arc<impl PinOwner>,
    range: Range<usize>,
    region: Option<&HostRegion>,
) -> Result<HostAccess, Error> {
    let (addr, len) = (range.start, range.len());
    if let Some(region) = region.filter(|region| region.is_engines() && region.contains(addr, len))
    {
        // SAFETY: the caller's promise.
        let pin = none_if_refused(unsafe { region.pin_whole(device) }.map(Some))?;
        // Never in the cache: the cache gets no unmap event for this memory.
        return Ok(match pin {
            Some(pin) => HostAccess::Pinned(region.at(pin, addr)),
            None => HostAccess::Bounce { guarded: true },
        });
    }
    if !device.backend().pins_callers_memory() {
        return Ok(HostAccess::Bounce { guarded: false });
    }
    if let Some(pinned) = device.pins().cache.find(addr, len) {
        return Ok(HostAccess::Pinned(pinned));
    }
    let region = region.filter(|region| region.contains(addr, len));
    if let Some(pinned) = region.and_then(|region| region.pinned_at(&**device, addr)) {
        return Ok(HostAccess::Pinned(pinned));
    }
    let policy = &device.pins().policy;
    let earned = region.is_some_and(|region| region.earns_pin(len, policy));
    if len <= policy.bounce && !earned {
        return Ok(HostAccess::Bounce { guarded: false });
    }
    if let Some(region) = region
        // SAFETY: the caller's promise.
        && let Some(pinned) = unsafe { pin_region(device, &range, region)? }
    {
        return Ok(HostAccess::Pinned(pinned));
    }
    if len > policy.bounce
        // SAFETY: the caller's promise.
        && let Some(pinned) = unsafe { pin_range(&**device, &range)? }
    {
        return Ok(HostAccess::Pinned(pinned));
    }
    Ok(HostAccess::Bounce { guarded: len > policy.bounce })
}

/// Pins a whole slab of bounce buffers. Only the first call for a device calls the driver.
///
/// # Safety
/// The slab must stay allocated as long as `slab` lives and as long as a copy uses the pin.
pub(crate) unsafe fn pin_slab(
    device: &Arc<impl PinOwner>,
    slab: &HostRegion,
) -> Result<(DeviceAddr, Arc<HostPin>), Error> {
    // SAFETY: the caller's promise.
    let pin = unsafe { slab.pin_whole(device) }.map_err(|error| match error {
        PinError::Failed(error) => error,
        PinError::Refused(_) => {
            let call = "hlthunk_host_memory_map";
            Error::os(Phase::Use, "pinning a bounce buffer", call, libc::ENOMEM).on(device)
        }
    })?;
    Ok((pin.addr, pin))
}

/// Pins all of `region`, which contains `range`. `None`: the driver refused, or the region is too large
/// for the cache.
///
/// # Safety
/// As for [`pin`].
unsafe fn pin_region(
    device: &Arc<impl PinOwner>,
    range: &Range<usize>,
    region: &HostRegion,
) -> Result<Option<Pinned>, Error> {
    let cache = &device.pins().cache;
    if !device.backend().pins_callers_memory() {
        return Ok(None);
    }
    if cache.keeps(region.len()) {
        // SAFETY: the caller's promise.
        return none_if_refused(unsafe { pin_in_cache(&**device, range, &region.range()) });
    }
    if cache.is_on() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let pin = none_if_refused(unsafe { region.pin_whole(device) }.map(Some))?;
    Ok(pin.map(|pin| region.at(pin, range.start)))
}

/// Pins only `range`. `None`: the driver refused.
///
/// # Safety
/// As for [`pin`].
unsafe fn pin_range(device: &impl PinOwner, range: &Range<usize>) -> Result<Option<Pinned>, Error> {
    let cached = match device.pins().cache.keeps(range.len()) {
        // SAFETY: the caller's promise.
        true => unsafe { pin_in_cache(device, range, range) },
        false => Ok(None),
    };
    none_if_refused(cached.and_then(|cached| match cached {
        Some(pinned) => Ok(Some(pinned)),
        None => {
            // SAFETY: the caller's promise.
            let pin = unsafe { ask_driver(device, range.start as u64, range.len() as u64)? };
            Ok(Some(Pinned { addr: pin.addr, guard: PinRef::Owned(Arc::new(pin)) }))
        }
    }))
}

/// Pins the pages of `whole`, which contains `range`, and keeps the pin in the cache. `None`: the cache
/// is full.
///
/// # Safety
/// As for [`pin`].
unsafe fn pin_in_cache(
    device: &impl PinOwner,
    range: &Range<usize>,
    whole: &Range<usize>,
) -> Result<Option<Pinned>, PinError> {
    device.pins().cache.insert((range.start, range.len()), whole, |start, len| {
        // SAFETY: the caller's promise; a page stays as long as a byte of it is allocated.
        unsafe { ask_driver(device, start, len) }
    })
}

/// Pins memory, unless the driver refused before and nothing has changed since.
///
/// # Safety
/// The memory must stay allocated as long as copies use the pin.
unsafe fn ask_driver(device: &impl PinOwner, start: u64, len: u64) -> Result<HostPin, PinError> {
    let (cache, counts) = (&device.pins().cache, device.counts());
    let pinned = counts.get(Counter::PinnedBytes);
    if let Some(reason) = cache.known_refusal(start, len, pinned) {
        return Err(PinError::Refused(reason));
    }
    let generation = cache.refusal_generation();
    let ptr = core::ptr::with_exposed_provenance_mut(start as usize);
    // SAFETY: the caller's promise.
    match probes::pin(start, len, || unsafe { device.backend().pin(ptr, len as usize) }) {
        Ok(pin) => Ok(pin.counted(counts.track(Gauge::Pin, len))),
        Err(error) => {
            counts.add(Counter::PinsRefused, 1);
            let Some(reason) = Reason::of(&error) else {
                return Err(PinError::Failed(device.note_loss(error.on(device))));
            };
            cache.remember_refusal((start, len), reason, pinned, generation);
            Err(PinError::Refused(reason))
        }
    }
}

fn none_if_refused<T>(pinned: Result<Option<T>, PinError>) -> Result<Option<T>, Error> {
    match pinned {
        Ok(pinned) => Ok(pinned),
        Err(PinError::Refused(_)) => Ok(None),
        Err(PinError::Failed(error)) => Err(error),
    }
}
