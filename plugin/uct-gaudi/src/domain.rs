//! Memory domains `gaudi_copy` and `gaudi_gdr`: allocation, registration, detection, dma-buf.
//!
//! They register dma-bufs, but do not tell UCX so (`REG_DMABUF`), unless `COPY_REG_DMABUF=y`. UCP gains
//! nothing by that flag: its copies between two kinds of device memory go through host memory, whatever a
//! domain registers. But with the flag UCP asks for the dma-buf of every Gaudi buffer that it registers. All
//! memory would be exported, and flushed before each copy, even without a network device. UCP would also pass
//! every CUDA buffer, and fail to register it where the driver refuses it (`ucp_memh_register_internal`).

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use gaudi::{
    Allocation, Costs, Device, DeviceAddr, DeviceChoice, DeviceId, DeviceInfo, Error, ExportCall,
    HostRegion, ImportedRegion, Remedy,
};
use uct::abi::md_flag;
use uct::config::{Ternary, Values, Variable};
use uct::{
    AllocRequest, Allocated, Component, DomainAttributes, MemoryAnswer, MemoryDomain, MemoryType,
    MemoryTypes, QueryFields, Region, Status, SysDevice, Ucx, log,
};

use crate::addresses::{Registered, allocation_of, register};
use crate::estimates::Estimates;
use crate::flavour::Flavour;
use crate::settings::{self, Settings};
use crate::status::explain;
use crate::{
    cards, fault, fragments, hcas, hooks, memory_events, memtype_cache, requested, status, summary,
};

/// The component of one flavour.
pub(crate) struct GaudiComponent<F> {
    /// Whether the reason for having no device was logged.
    explained: AtomicBool,
    flavour: PhantomData<F>,
}

impl<F> GaudiComponent<F> {
    pub(crate) fn new() -> Self {
        GaudiComponent { explained: AtomicBool::new(false), flavour: PhantomData }
    }
}

/// Opens (or shares) the card this process is configured for.
pub(crate) fn configured_device() -> Result<Arc<Device>, Error> {
    open(&settings::chosen_device())
}

/// Opens a card. From the first card on, hooks may be needed to detect what the application does with it.
pub(crate) fn open(choice: &DeviceChoice) -> Result<Arc<Device>, Error> {
    let device = gaudi::runtime().open(choice)?;
    hooks::install_if_needed();
    Ok(device)
}

impl<F: Flavour> Component for GaudiComponent<F> {
    type Md = GaudiDomain<F>;
    /// Copies stay in the process and use plain addresses, so a remote key has no content.
    type RemoteKey = ();

    const NAME: &'static str = F::COMPONENT;
    const CONFIG_PREFIX: &'static str = settings::PREFIX;
    const CONFIG_ALIAS: Option<&'static str> = Some(settings::ALIAS);
    const VARIABLES: &'static [Variable] = settings::VARIABLES;

    fn domains(&self, ucx: &'static Ucx) -> Vec<String> {
        let found = cards::discover();
        for note in gaudi::runtime().take_notes() {
            match note.is_unknown_card {
                true => log!(ucx, Warn, "{}", note.text),
                false => log!(ucx, Info, "{}", note.text),
            }
        }
        match found {
            Ok(_) => {
                hcas::hook(ucx);
                vec![F::COMPONENT.to_owned()]
            }
            Err(reason) => {
                if F::PRIMARY && !self.explained.swap(true, Ordering::Relaxed) {
                    // A machine without a Gaudi is worth a warning only if a setting asks for a Gaudi.
                    // An invalid variable and an unknown card always are.
                    let asked = requested::settings();
                    if reason.is_setting_wrong() || reason.remedy() == Remedy::ReportCard {
                        log!(ucx, Warn, "no Gaudi: {}", explain(&reason));
                    } else if asked.is_empty() {
                        log!(ucx, Info, "no Gaudi here: {}", explain(&reason));
                    } else {
                        let asked = asked.join(", ");
                        log!(ucx, Warn, "{asked} is set, but no Gaudi here: {}", explain(&reason));
                    }
                }
                Vec::new()
            }
        }
    }

    fn open(
        &self,
        ucx: &'static Ucx,
        _domain: &str,
        config: &Values<'_>,
    ) -> Result<GaudiDomain<F>, Status> {
        let opened = self.open_domain(ucx, config);
        REFUSED.set(opened.is_err());
        opened
    }

    fn unpack_key(&self, _: &'static Ucx, _: &[u8], _: SysDevice) -> Result<(), Status> {
        Ok(())
    }
}

thread_local! {
    /// Whether UCX failed to open a copy domain for the context that this thread is creating: other
    /// domains are useless to that context then. Per thread, because other threads create other contexts.
    static REFUSED: Cell<bool> = const { Cell::new(false) };
}

/// See [`REFUSED`].
pub(crate) fn is_refused() -> bool {
    REFUSED.get()
}

impl<F: Flavour> GaudiComponent<F> {
    fn open_domain(
        &self,
        ucx: &'static Ucx,
        config: &Values<'_>,
    ) -> Result<GaudiDomain<F>, Status> {
        let settings = Settings::read(ucx, config, F::PRIMARY)?;
        if fragments::lack_size(ucx, F::PRIMARY) {
            return Err(Status::INVALID_PARAM);
        }
        if F::PRIMARY {
            fragments::warn_of_cuda(ucx);
        }
        let candidates = gaudi::runtime().candidates(&settings.device).map_err(|error| {
            if F::PRIMARY {
                match &settings.device {
                    DeviceChoice::Any => log!(ucx, Warn, "no Gaudi: {}", explain(&error)),
                    choice => {
                        log!(ucx, Warn, "UCX_GAUDI_COPY_DEVICE={choice}: {}", explain(&error))
                    }
                }
            }
            status::of(&error)
        })?;
        let card = candidates.first().ok_or(Status::NO_DEVICE)?;
        summary::at_start(ucx, &settings.device, &candidates);
        register_access(ucx, settings.hw_block_access, card, F::PRIMARY)?;
        requested::warn_if_excluded(ucx, false);
        // A framework's card copies through the framework, whatever the generation; it may appear later.
        let expects_framework = settings::expects_framework(settings.framework);
        let copies = card.generation.accepts_submissions() || expects_framework;
        if !copies && F::PRIMARY {
            log!(
                ucx,
                Info,
                "no {}: a {} takes no copies through the driver; memory can be allocated, \
                 detected and exported",
                F::TRANSPORT,
                card.generation
            );
        }
        let sys_device = match candidates.as_slice() {
            [only] => memtype_cache::sys_device(ucx, only),
            _ => SysDevice::UNKNOWN,
        };
        let link = gaudi::runtime().link(card);
        if F::PRIMARY {
            match link {
                Some(link) => log!(ucx, Info, "link of {card}: {link}"),
                None => log!(ucx, Debug, "the link of {card} is not in sysfs"),
            }
        }
        let estimates = Estimates::read(config, &Costs::of(card), link, F::COST);
        memtype_cache::begin(ucx, expects_framework);
        if settings.explain_faults {
            fault::begin(ucx);
        }
        memory_events::begin(ucx, &settings, F::PRIMARY)?;
        settings::warn_of_conflicts(ucx);
        hooks::configure(ucx, settings.mem_hooks);
        if let Err(error) = gaudi::runtime().framework_card()
            && F::PRIMARY
        {
            log!(ucx, Warn, "the card of Synapse cannot be used: {}", explain(&error));
        }
        Ok(GaudiDomain {
            ucx,
            settings,
            copies,
            estimates,
            sys_device,
            device: Mutex::default(),
            first_sys_device: OnceLock::new(),
            flavour: PhantomData,
        })
    }
}

/// Applies ENABLE_HW_BLOCK_ACCESS, as far as the kind of card decides it. `log`: log the result.
fn register_access(ucx: &Ucx, wanted: Ternary, card: &DeviceInfo, log: bool) -> Result<(), Status> {
    const NAME: &str = "UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS";
    let generation = card.generation;
    let possible = generation.maps_register_blocks();
    if log && wanted != Ternary::No {
        if possible {
            log!(ucx, Info, "{NAME}: register blocks of a {generation} may be mapped");
        } else if wanted == Ternary::Try {
            log!(ucx, Info, "{NAME}=try: there are no register blocks to map on a {generation}");
        } else {
            log!(
                ucx,
                Error,
                "{NAME}=yes, but there are no register blocks to map on a {generation}: use try or no"
            );
        }
    }
    if possible || wanted != Ternary::Yes { Ok(()) } else { Err(Status::UNSUPPORTED) }
}

/// An open memory domain. Opening it opens no card; the first allocation does.
pub(crate) struct GaudiDomain<F> {
    pub(crate) ucx: &'static Ucx,
    pub(crate) settings: Settings,
    /// Whether this generation copies through the driver.
    pub(crate) copies: bool,
    /// What copies cost.
    pub(crate) estimates: Estimates,
    pub(crate) sys_device: SysDevice,
    /// The card, once it was needed. Weak: the settings keep it open. A card that the application lent,
    /// or that was reset, is not kept.
    device: Mutex<Weak<Device>>,
    /// UCX's number of the first card asked about.
    first_sys_device: OnceLock<(DeviceId, SysDevice)>,
    flavour: PhantomData<F>,
}

/// The object behind a memory handle.
pub(crate) enum Memory {
    /// Allocated here; dropping it frees it.
    Device(Allocation),
    /// Registered device memory: kept alive by its owner.
    Foreign,
    /// Registered host memory: recorded, and pinned when a copy first uses it.
    Host(Arc<HostRegion>),
    /// Other memory, registered by its dma-buf.
    Imported(ImportedRegion),
}

impl<F> Drop for GaudiDomain<F> {
    fn drop(&mut self) {
        for error in gaudi::runtime().take_drop_errors() {
            log!(self.ucx, Warn, "{}", explain(&error));
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Device(allocation) = self {
            memtype_cache::freeing(allocation);
        }
    }
}

impl Memory {
    /// The registration a copy can use for a host buffer.
    pub(crate) fn host_region(&self) -> Option<&Arc<HostRegion>> {
        match self {
            Memory::Host(region) => Some(region),
            Memory::Device(_) | Memory::Foreign | Memory::Imported(_) => None,
        }
    }

    /// The import through which copies access a dma-buf.
    pub(crate) fn imported(&self) -> Option<&ImportedRegion> {
        match self {
            Memory::Imported(region) => Some(region),
            Memory::Device(_) | Memory::Foreign | Memory::Host(_) => None,
        }
    }
}

impl<F: Flavour> GaudiDomain<F> {
    fn device(&self) -> Result<Arc<Device>, Error> {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = device.upgrade().filter(|known| !known.is_surely_lost()) {
            return Ok(known);
        }
        let opened = open(&self.settings.device)?;
        self.log_card(&opened);
        *device = Arc::downgrade(&opened);
        Ok(opened)
    }

    /// Logs which card is used, and applies and logs the settings that concern it.
    fn log_card(&self, device: &Device) {
        let card = device.info();
        let how = if device.is_guest() { ", as a guest of Synapse" } else { "" };
        log!(self.ucx, Info, "{} uses {card}{how}", F::COMPONENT);
        if let Some(reason) = gaudi::stats::why_unreadable() {
            log!(self.ucx, Info, "statistics cannot be read from outside: {reason}");
        }
        let nics = self.nearest_nics(card);
        summary::at_first_use(self.ucx, device, self.settings.dmabuf, &nics);
    }

    /// The active NICs near a card, in words; a warning where one is wanted and there is none.
    fn nearest_nics(&self, card: &DeviceInfo) -> String {
        if self.settings.nic_scale_out == Ternary::No {
            return String::from("not looked for");
        }
        let near = gaudi::runtime().nearest_nics(card);
        if near.is_empty() && self.settings.nic_scale_out == Ternary::Yes {
            log!(self.ucx, Warn, "ENABLE_NIC_SCALE_OUT=yes, but no active NIC is near {card}");
        }
        if near.is_empty() { String::from("no active one") } else { near.join(", ") }
    }

    /// The card that UCX names, or the one that was chosen where UCX names none.
    fn device_for(&self, wanted: SysDevice) -> Result<Arc<Device>, Error> {
        if wanted == SysDevice::UNKNOWN || wanted == self.sys_device {
            return self.device();
        }
        let cards = gaudi::runtime().candidates(&self.settings.device)?;
        let named = cards.iter().find(|card| memtype_cache::sys_device(self.ucx, card) == wanted);
        match named {
            Some(card) => open(&DeviceChoice::Bus(card.bus_id.clone())),
            // Not one of ours: a device of another kind near which the memory is wanted.
            None => self.device(),
        }
    }

    fn fail(&self, hidden: bool, what: &str, error: &Error) -> Status {
        if hidden {
            log!(self.ucx, Debug, "{what}: {}", explain(error));
        } else {
            log!(self.ucx, Error, "{what}: {}", explain(error));
        }
        status::of(error)
    }

    /// The driver library's export call that the user chose.
    fn export_call(&self) -> Option<ExportCall> {
        match self.settings.mapped_dmabuf {
            Ternary::Try => None,
            Ternary::Yes => Some(ExportCall::Mapped),
            Ternary::No => Some(ExportCall::Whole),
        }
    }

    /// UCX's number of a card. Cached for one card: nearly always it is the same that is asked about.
    fn sys_device_of(&self, device: &Device) -> SysDevice {
        let look_up = || memtype_cache::sys_device(self.ucx, device.info());
        let (first, number) = *self.first_sys_device.get_or_init(|| (device.id(), look_up()));
        if first == device.id() { number } else { look_up() }
    }
}

impl<F: Flavour> MemoryDomain for GaudiDomain<F> {
    type Memory = Memory;

    fn attributes(&self) -> DomainAttributes {
        let gaudi = MemoryTypes::only(MemoryType::GAUDI);
        let both = gaudi.with(MemoryType::HOST);
        DomainAttributes {
            flags: md_flag::ALLOC
                | md_flag::REG
                // Keys of this domain open nothing: its copies stay in the process.
                | md_flag::INVALIDATE
                | md_flag::INVALIDATE_RMA
                | if self.settings.reg_dmabuf { md_flag::REG_DMABUF } else { 0 },
            register: both,
            // All types that are registered: UCP's old protocols register buffers only through its cache,
            // and debug builds assert that every domain they register with may be cached. No entry goes
            // stale: UCX is told when device memory is freed, and hooks the calls that unmap host memory.
            cache: both,
            detect: gaudi,
            allocate: gaudi,
            // A domain that cannot copy must not claim access: UCP would build a copy endpoint.
            access: if self.copies { both } else { MemoryTypes::NONE },
            dmabuf: if self.settings.dmabuf == Ternary::No { MemoryTypes::NONE } else { gaudi },
            max_alloc: u64::MAX,
            // `caches_registrations` is false if watching unmapped memory was tried and refused.
            register_cost: self.estimates.register_cost(gaudi::runtime().caches_registrations()),
        }
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocated<Memory>, Status> {
        if request.memory_type != MemoryType::GAUDI {
            return Err(Status::UNSUPPORTED);
        }
        let hidden = request.hide_errors;
        let fail = |error| self.fail(hidden, "cannot allocate Gaudi memory", &error);
        let device = self.device_for(request.device).map_err(fail)?;
        let length = request.length.max(1) as u64;
        let allocation = device.alloc(length, 1).map_err(fail)?;
        if self.settings.dmabuf == Ternary::Yes {
            device
                .export_with(allocation.addr(), length, self.export_call())
                .map_err(|error| self.fail(hidden, "DMABUF=yes, but the export failed", &error))?;
        }
        memtype_cache::allocated(&allocation);
        Ok(Allocated {
            address: allocation.addr().0,
            length: request.length,
            memory: Memory::Device(allocation),
        })
    }

    fn register(&self, region: &Region<'_>) -> Result<Memory, Status> {
        Ok(match register(self.ucx, F::COMPONENT, region)? {
            Registered::Device(_) => Memory::Foreign,
            Registered::Dmabuf(dmabuf, offset) => {
                let range = (region.address, region.length as u64);
                let imported = self
                    .device()
                    .and_then(|device| ImportedRegion::new(&device, range, dmabuf, offset));
                Memory::Imported(imported.map_err(|error| {
                    self.fail(region.hide_errors, "cannot register a dma-buf", &error)
                })?)
            }
            Registered::Host(region) => Memory::Host(region),
        })
    }

    fn query(
        &self,
        address: u64,
        length: usize,
        wants: QueryFields,
    ) -> Result<MemoryAnswer, Status> {
        let no_dmabuf = |why: &dyn std::fmt::Display| {
            if wants.dmabuf {
                log!(self.ucx, Info, "no dma-buf for {address:#x}, {length} bytes: {why}");
            }
        };
        let not_exported = |error: &Error| {
            // UCX then registers the address itself, which fails, and does not say why.
            static WARNED: AtomicBool = AtomicBool::new(false);
            no_dmabuf(&explain(error));
            if !WARNED.swap(true, Ordering::Relaxed) {
                log!(
                    self.ucx,
                    Warn,
                    "Gaudi memory cannot be registered with network devices: {}; with \
                     UCX_GAUDI_COPY_DMABUF=no it is staged through host memory",
                    explain(error)
                );
            }
        };
        let found = gaudi::runtime().locate(address, 1).ok_or_else(|| {
            no_dmabuf(
                &"not in a Gaudi allocation of this process (the driver exports device memory only; \
                  network devices register host memory directly)",
            );
            Status::OUT_OF_RANGE
        })?;
        let device = found.device().ok_or(Status::OUT_OF_RANGE)?;
        let mut answer = MemoryAnswer {
            memory_type: MemoryType::GAUDI,
            device: self.sys_device_of(&device),
            base: found.base.0,
            length: found.length as usize,
            dmabuf: None,
            registrable: true,
        };
        if wants.registrable {
            let base = found.base;
            answer.registrable =
                hcas::can_register(self.ucx, &device, answer.device, base.0, || {
                    let wanted = self.settings.dmabuf != Ternary::No;
                    let len = found.length.min(gaudi::PAGE_SIZE);
                    wanted.then(|| device.export_for_trial(base, len, self.export_call()))
                });
        }
        if wants.dmabuf && self.settings.dmabuf != Ternary::No {
            if allocation_of(address, length).is_some() {
                // UCP rounds a range up to 16 bytes before it asks. The dma-buf covers the allocation's
                // whole last page, so the rounded range stays within it.
                let len = (length as u64).min(found.length - found.offset);
                let exported = device.export_with(DeviceAddr(address), len, self.export_call());
                answer.dmabuf = exported.inspect_err(not_exported).ok();
            } else {
                no_dmabuf(&"it runs past the end of the Gaudi allocation it begins in");
            }
        }
        Ok(answer)
    }
}
