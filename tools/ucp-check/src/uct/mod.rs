//! The part of UCT's API that memory needs: components, memory domains, allocated and registered memory, remote keys,
//! and a copier that moves bytes through a copy transport.
//!
//! [`Ucx`] → [`Domain`] → [`Memory`], [`Registration`], [`Key`]. A [`Copier`] belongs to one thread; several threads
//! may use everything else at once, as UCX allows.

mod copier;
mod memory;

pub use crate::ucx::Status;
pub use ::uct::abi::{MdAttr, MemoryType, Operation, SysDevice, md_flag};
pub use copier::{Completion, Copier, Estimate, Piece, Rma};
pub use memory::{Answer, Key, Memory, Registration};

use crate::ucx::sys::{ComponentAttr, Growing, MdResource, MemoryInfo, Plain, Raw};
use crate::ucx::{Result, Ucx, call};
use anyhow::Context as _;
use std::ffi::{CStr, CString, c_char};
use std::ptr;

/// An open memory domain. Its operations may be called by several threads at once.
pub struct Domain {
    ucx: &'static Ucx,
    component: Raw,
    md: Raw,
    name: String,
}

// SAFETY: UCX allows operations of a memory domain from any thread, also at the same time.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// Whether a bit set of memory types contains this one.
pub fn has(types: u64, kind: MemoryType) -> bool {
    types & (1 << kind.0) != 0
}

/// The text in an array of fixed length that UCX filled.
fn text(chars: &[c_char; 16]) -> String {
    let bytes = chars.map(|c| c as u8);
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}

impl Ucx {
    /// The components of this UCX by handle and name, each with the names of its memory domains.
    pub fn components(&self) -> Result<Vec<(Raw, String, Vec<String>)>> {
        let (mut list, mut count) = (ptr::null_mut(), 0);
        // SAFETY: out-parameters; the list is copied, then released once; handles live for ever.
        let handles = unsafe {
            call!(self, uct_query_components(&mut list, &mut count))?;
            let handles = std::slice::from_raw_parts(list, count as usize).to_vec();
            (self.f.uct_release_component_list)(list);
            handles
        };
        handles.into_iter().map(|handle| self.describe(handle)).collect()
    }

    fn describe(&self, component: Raw) -> Result<(Raw, String, Vec<String>)> {
        // First query the name and the number of domains, then the domains.
        let mut attr = ComponentAttr { field_mask: 0b11, ..ComponentAttr::zeroed() };
        // SAFETY: a handle from the list; the mask says which fields are valid.
        unsafe { call!(self, uct_component_query(component, &mut attr)) }?;
        let count = attr.md_resource_count as usize;
        let mut domains: Vec<_> = (0..count).map(|_| MdResource { md_name: [0; 16] }).collect();
        if count > 0 {
            attr.field_mask = 0b100;
            attr.md_resources = domains.as_mut_ptr();
            // SAFETY: as above; the array has the number of elements that UCX returned.
            unsafe { call!(self, uct_component_query(component, &mut attr)) }?;
        }
        let domains = domains.iter().map(|domain| text(&domain.md_name)).collect();
        Ok((component, text(&attr.name), domains))
    }

    /// Opens the memory domain of a component; `settings` override the environment.
    pub fn open_domain(
        &'static self,
        component: &str,
        settings: &[(String, String)],
    ) -> anyhow::Result<Domain> {
        let mut found = self.components()?.into_iter();
        let (handle, _, domains) = found
            .find(|(_, name, _)| name == component)
            .with_context(|| format!("this UCX has no component {component}"))?;
        let name = domains.into_iter().next();
        let name =
            name.with_context(|| format!("component {component} has no memory domain here"))?;
        let (mut config, mut md) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: no prefix and no file: the environment and the defaults.
        unsafe { call!(self, uct_md_config_read(handle, ptr::null(), ptr::null(), &mut config)) }?;
        let opened = (|| {
            for (key, value) in settings {
                let (key, value) = (CString::new(key.as_str())?, CString::new(value.as_str())?);
                // SAFETY: C strings, and the configuration read above.
                unsafe { call!(self, uct_config_modify(config, key.as_ptr(), value.as_ptr())) }?;
            }
            let name = CString::new(name.as_str())?;
            // SAFETY: name and configuration belong to this component.
            unsafe { call!(self, uct_md_open(handle, name.as_ptr(), config, &mut md)) }?;
            anyhow::Ok(())
        })();
        // SAFETY: read above, released once.
        unsafe { (self.f.uct_config_release)(config) };
        opened?;
        Ok(Domain { ucx: self, component: handle, md, name })
    }

    /// PCI bus id of a system device, `None` if UCX does not know it.
    pub fn bus_id(&self, device: SysDevice) -> Option<String> {
        let mut name = [0; 64];
        // SAFETY: writes a C string of at most the given length.
        let text = unsafe {
            (self.f.ucs_topo_sys_device_bdf_name)(device, name.as_mut_ptr(), name.len());
            CStr::from_ptr(name.as_ptr())
        };
        (device != SysDevice::UNKNOWN).then(|| text.to_string_lossy().into_owned())
    }

    /// The memory type of a range in UCX's memory-type cache, or `None` for a miss.
    pub fn cached_type(&self, address: u64, length: usize) -> Option<MemoryType> {
        self.cached(address, length).map(|(kind, _)| kind)
    }

    /// The same, with the device.
    pub fn cached(&self, address: u64, length: usize) -> Option<(MemoryType, SysDevice)> {
        let mut info = MemoryInfo::zeroed();
        // SAFETY: the cache takes any address as a number and fills the structure on success.
        let status = unsafe { (self.f.ucs_memtype_cache_lookup)(address, length, &mut info) };
        (status == Status::OK).then_some((MemoryType(info.mem_type), SysDevice(info.sys_dev)))
    }
}

impl Domain {
    pub fn ucx(&self) -> &'static Ucx {
        self.ucx
    }

    pub fn attributes(&self) -> Result<MdAttr> {
        let mut attr = Growing::<MdAttr>::zeroed();
        attr.known.field_mask = u64::MAX;
        // SAFETY: an open domain, and a structure no smaller than UCX's own.
        unsafe { call!(self.ucx, uct_md_query_v2(self.md, &mut attr.known)) }?;
        Ok(attr.known)
    }

    /// Whether it exports dma-bufs of Gaudi memory.
    pub fn exports(&self) -> Result<bool> {
        Ok(has(self.attributes()?.dmabuf_mem_types, MemoryType::GAUDI))
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: closed once; memory and copiers borrow the domain, so none is left.
        unsafe { (self.ucx.f.uct_md_close)(self.md) };
    }
}
