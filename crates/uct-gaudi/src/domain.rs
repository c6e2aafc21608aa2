//! Memory domains `gaudi_copy` and `gaudi_gdr`: allocation, registration, detection, dma-buf.

use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use gaudi::{Allocation, Device, DeviceAddr, DeviceId, Error, ErrorKind, ExportCall, HostRegion};
use uct::abi::md_flag;
use uct::config::{Ternary, Values, Variable};
use uct::{
    AllocRequest, Allocated, Component, DomainAttributes, LinearFunc, MemoryAnswer, MemoryDomain,
    MemoryType, MemoryTypes, Region, Status, SysDevice, Ucx, Wants, log,
};

use crate::flavour::Flavour;
use crate::settings::{self, Settings};
use crate::{seeding, status};

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
    let choice = Settings::current().map(|settings| settings.device).unwrap_or_default();
    gaudi::runtime().open(&choice)
}

impl<F: Flavour> Component for GaudiComponent<F> {
    type Md = GaudiDomain<F>;
    /// Copies stay in the process and address memory directly: nothing to know about a remote key.
    type RemoteKey = ();

    const NAME: &'static str = F::COMPONENT;
    const CONFIG_PREFIX: &'static str = F::DOMAIN_PREFIX;
    const CONFIG_ALIAS: Option<&'static str> = Some("UCT_GAUDI_COPY_");
    const VARIABLES: &'static [Variable] = if F::LEADS { settings::VARIABLES } else { &[] };

    fn domains(&self, ucx: &'static Ucx) -> Vec<String> {
        let found = gaudi::runtime().discover();
        for note in gaudi::runtime().take_notes() {
            log!(ucx, Info, "{note}");
        }
        match found {
            Ok(_) => vec![F::COMPONENT.to_owned()],
            Err(reason) => {
                if F::LEADS && !self.explained.swap(true, Ordering::Relaxed) {
                    // No Gaudi is nothing to bother anyone with; a mistake in a variable is.
                    match reason.kind() {
                        ErrorKind::InvalidParams => log!(ucx, Warn, "no Gaudi: {reason}"),
                        _ => log!(ucx, Info, "no Gaudi here: {reason}"),
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
        let settings = if F::LEADS {
            Settings::configure(ucx, config)?
        } else {
            Settings::current().ok_or(Status::INVALID_PARAM)?
        };
        let choice = &settings.device;
        let cards = gaudi::runtime().discover().map_err(|error| status::of(&error))?;
        let candidates = cards.iter().filter(|card| choice.selects(card));
        let card = candidates.clone().next().ok_or_else(|| {
            if F::LEADS {
                log!(
                    ucx,
                    Warn,
                    "UCX_GAUDI_COPY_DEVICE={choice}: there is no such Gaudi; found: {}",
                    cards.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                );
            }
            Status::NO_DEVICE
        })?;
        let copies = card.generation.accepts_submissions();
        if !copies && F::LEADS {
            log!(
                ucx,
                Info,
                "no {}: a {} takes no copies through the driver; memory can be allocated, \
                 detected and exported",
                F::TRANSPORT,
                card.generation
            );
        }
        let only = candidates.clone().count() == 1;
        let sys_device = if only { seeding::sys_device(ucx, card) } else { SysDevice::UNKNOWN };
        seeding::begin(ucx);
        Ok(GaudiDomain {
            ucx,
            settings,
            copies,
            sys_device,
            device: Mutex::new(None),
            first_sys_device: OnceLock::new(),
            flavour: PhantomData,
        })
    }

    fn unpack_key(&self, _: &'static Ucx, _: &[u8], _: SysDevice) -> Result<(), Status> {
        Ok(())
    }
}

/// An open memory domain. Opening it opens no card; the first allocation does.
pub(crate) struct GaudiDomain<F> {
    pub(crate) ucx: &'static Ucx,
    settings: Settings,
    /// Whether this generation copies through the driver.
    pub(crate) copies: bool,
    pub(crate) sys_device: SysDevice,
    /// The card, once it was needed: kept open as long as the domain.
    device: Mutex<Option<Arc<Device>>>,
    /// UCX's number of the first card asked about.
    first_sys_device: OnceLock<(DeviceId, SysDevice)>,
    flavour: PhantomData<F>,
}

/// What stands behind a memory handle.
pub(crate) enum Memory {
    /// Allocated here; dropping it frees it.
    Device(Allocation),
    /// Registered device memory: kept alive by whoever allocated it.
    Foreign,
    /// Registered host memory: recorded, and pinned when a copy first uses it.
    Host(Arc<HostRegion>),
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Device(allocation) = self {
            seeding::freeing(allocation);
        }
    }
}

impl Memory {
    /// The registration a copy can use for a host buffer.
    pub(crate) fn host_region(&self) -> Option<&Arc<HostRegion>> {
        match self {
            Memory::Host(region) => Some(region),
            Memory::Device(_) | Memory::Foreign => None,
        }
    }
}

impl<F: Flavour> GaudiDomain<F> {
    fn device(&self) -> Result<Arc<Device>, Error> {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = &*device {
            return Ok(Arc::clone(device));
        }
        let opened = gaudi::runtime().open(&self.settings.device)?;
        log!(self.ucx, Info, "{} uses {}", F::COMPONENT, opened.info());
        *device = Some(Arc::clone(&opened));
        Ok(opened)
    }

    fn fail(&self, hidden: bool, what: &str, error: &Error) -> Status {
        if hidden {
            log!(self.ucx, Debug, "{what}: {error}");
        } else {
            log!(self.ucx, Error, "{what}: {error}");
        }
        status::of(error)
    }

    /// A dma-buf, by the driver call that the user wants.
    fn export(
        &self,
        device: &Device,
        address: DeviceAddr,
        length: u64,
    ) -> Result<(OwnedFd, u64), Error> {
        match self.settings.mapped_dmabuf {
            Ternary::Try => device.export(address, length),
            Ternary::Yes => device.export_with(address, length, ExportCall::Mapped),
            Ternary::No => device.export_with(address, length, ExportCall::Whole),
        }
    }

    /// UCX's number of a card. Nearly always it is the same card that is asked about.
    fn sys_device_of(&self, device: &Device) -> SysDevice {
        let look_up = || seeding::sys_device(self.ucx, device.info());
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
            flags: md_flag::ALLOC | md_flag::REG,
            register: both,
            cache: MemoryTypes::NONE,
            detect: gaudi,
            allocate: gaudi,
            // A domain that cannot copy must not claim access: UCP would build a copy endpoint.
            access: if self.copies { both } else { MemoryTypes::NONE },
            dmabuf: if self.settings.dmabuf == Ternary::No { MemoryTypes::NONE } else { gaudi },
            max_alloc: u64::MAX,
            register_cost: LinearFunc { constant: self.settings.reg_cost, slope: 0.0 },
        }
    }

    fn allocate(&self, request: &AllocRequest<'_>) -> Result<Allocated<Memory>, Status> {
        if request.memory_type != MemoryType::GAUDI {
            return Err(Status::UNSUPPORTED);
        }
        let hidden = request.hide_errors;
        let fail = |error| self.fail(hidden, "cannot allocate Gaudi memory", &error);
        let device = self.device().map_err(fail)?;
        let length = request.length.max(1) as u64;
        let allocation = device.alloc(length, 1).map_err(fail)?;
        if self.settings.dmabuf == Ternary::Yes {
            self.export(&device, allocation.addr(), length)
                .map_err(|error| self.fail(hidden, "DMABUF=yes, but the export failed", &error))?;
        }
        Ok(Allocated {
            address: allocation.addr().0,
            length: request.length,
            memory: Memory::Device(allocation),
        })
    }

    fn register(&self, region: &Region) -> Result<Memory, Status> {
        if gaudi::runtime().locate(region.address, region.length).is_some() {
            return Ok(Memory::Foreign);
        }
        if region.memory_type == Some(MemoryType::GAUDI) {
            if !region.hide_errors {
                log!(
                    self.ucx,
                    Error,
                    "cannot register {:#x}, {} bytes: not inside one Gaudi allocation of this \
                     process",
                    region.address,
                    region.length
                );
            }
            return Err(Status::INVALID_ADDR);
        }
        let start = core::ptr::with_exposed_provenance_mut::<u8>(region.address as usize);
        Ok(Memory::Host(HostRegion::record(start, region.length)))
    }

    fn query(&self, address: u64, length: usize, wants: Wants) -> Result<MemoryAnswer, Status> {
        let place = gaudi::runtime().locate(address, length).ok_or(Status::OUT_OF_RANGE)?;
        let device = place.device().ok_or(Status::OUT_OF_RANGE)?;
        let dmabuf = if wants.dmabuf && self.settings.dmabuf != Ternary::No {
            match self.export(&device, DeviceAddr(address), length as u64) {
                Ok(export) => Some(export),
                Err(error) => {
                    // UCX goes on without a dma-buf and stages through host memory.
                    log!(self.ucx, Info, "no dma-buf for {address:#x}, {length} bytes: {error}");
                    None
                }
            }
        } else {
            None
        };
        Ok(MemoryAnswer {
            memory_type: MemoryType::GAUDI,
            device: self.sys_device_of(&device),
            base: place.base.0,
            length: place.length as usize,
            dmabuf,
        })
    }
}
