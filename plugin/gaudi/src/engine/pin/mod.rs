//! Pinning host memory for DMA: the one place that decides whether a copy pins, and what.
//!
//! [`pin`] takes a range of host memory and the registration it came with, if any. It answers with the
//! address at which the device sees the range and a guard that keeps it pinned, or with the advice to
//! use bounce buffers. The first row that applies decides:
//!
//! | host memory | length | answer |
//! |---|---|---|
//! | the engine's own (the ring of a relay) | any | the region's pin |
//! | of a caller, on a framework's card | any | bounce |
//! | in the registration cache | any | the cached pin |
//! | in a region that has a pin of its own | any | the region's pin |
//! | anything else | up to *small* | bounce |
//! | not registered, or its region has not earned a pin yet | up to *bounce* | bounce |
//! | registered, cache on, region within `RCACHE_MAX_SIZE` | any | the whole region, kept in the cache |
//! | registered, cache off | any | the whole region, kept until it is deregistered |
//! | cache on, and not full | above *bounce* | the pages of the range, kept in the cache |
//! | cache off or full | above *bounce* | the range, for this copy only (one-off) |
//! | whatever the driver refused above | any | bounce; guarded above *bounce* |
//!
//! *small*, *bounce* and what a region has to earn depend on what pinning costs on the kind of card:
//! [`Pinning`], in the table of [`costs`](crate::base::costs). On the software card: 8 KiB, 64 KiB, a sixteenth of the region.
//!
//! So a region that cannot be pinned whole, or is too large for the cache, is *pinned in parts*: each
//! large copy pins its own range. A guarded bounce lets the kernel check the caller's memory, because
//! memory that cannot be pinned may not be mapped at all.
//!
//! The bounce buffers themselves are pinned by [`pin_slab`], whole and for as long as they exist.
//!
//! **Refusals are remembered** (`rcache/refusals.rs`): a driver prints an error line for every
//! refusal, so a range that contains a refused one, or touches a read-only mapping that was refused, is not
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
    /// Where the device sees its first byte.
    pub(crate) addr: DeviceAddr,
    pub(crate) guard: PinRef,
}

/// How a copy reaches its host side.
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
    /// The reason lies in the memory: a copy through bounce buffers works.
    Refused(Reason),
    /// The device failed.
    Failed(Error),
}

/// The device that pins are made for, and that owns them.
pub(crate) trait PinOwner: OnCard + Send + Sync + 'static {
    fn id(&self) -> DeviceId;
    fn backend(&self) -> &dyn Backend;
    fn counts(&self) -> Counts;
    fn pins(&self) -> &Pins;
    /// Whether this process opened it, and not one that it was forked from.
    fn is_ours(&self) -> bool;
    /// Remembers an error that means the card was lost.
    fn note_loss(&self, error: Error) -> Error;
}

/// What a device has pinned.
#[derive(Debug)]
pub(crate) struct Pins {
    /// Pins of whole regions, by region, while the cache is off. The device owns them and a region
    /// has weak references, because a registration must not keep a card open.
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

/// How a copy reaches `range`, which `region` may be the registration of. See the module's table.
///
/// # Safety
/// The memory must stay allocated while the guard in the answer lives; all of the region's, while the
/// region does.
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
        // Never in the cache, which would not learn that it is unmapped.
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

/// Pins a slab of bounce buffers, whole; the first call on a device asks the driver.
///
/// # Safety
/// The slab must stay allocated as long as `slab` lives, or a copy uses the pin.
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

/// Pins all of `region`, which contains `range`. `None`: it was refused, or is more than the cache may
/// keep.
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

/// Pins `range` alone. `None`: it was refused.
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

/// Pins memory, unless that was refused before and nothing has changed since.
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
