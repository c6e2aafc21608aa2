//! Memory domains: found by component name, configured, opened, asked what they can do.

use super::sys::{self, ComponentAttr, MdAttr, MdResource, Raw};
use super::{Result, Uct};
use anyhow::Context as _;
use std::ffi::{CStr, CString};
use std::mem::zeroed;
use std::ptr;

/// An open memory domain. Its operations may be called by several threads at once.
pub struct Domain {
    pub(super) uct: &'static Uct,
    pub(super) component: Raw,
    pub(super) md: Raw,
    name: String,
}

// SAFETY: UCX allows operations of a memory domain from any thread, also at the same time.
unsafe impl Send for Domain {}
// SAFETY: as above.
unsafe impl Sync for Domain {}

/// A set of memory types.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct MemoryTypes(u64);

impl MemoryTypes {
    /// Whether Gaudi memory is one of them.
    pub fn gaudi(self) -> bool {
        self.0 & (1 << sys::MEMORY_TYPE_GAUDI) != 0
    }

    /// Whether host memory is one of them.
    pub fn host(self) -> bool {
        self.0 & (1 << sys::MEMORY_TYPE_HOST) != 0
    }
}

/// What a memory domain says of itself.
#[derive(Clone, Copy, Debug)]
pub struct Attributes {
    /// It allocates memory.
    pub allocates: bool,
    /// It registers memory.
    pub registers: bool,
    /// Transports need a remote key.
    pub needs_key: bool,
    /// Types it registers.
    pub register: MemoryTypes,
    /// Types whose registrations UCP may cache.
    pub cache: MemoryTypes,
    /// Types it recognises.
    pub detect: MemoryTypes,
    /// Types it allocates.
    pub allocate: MemoryTypes,
    /// Types it exports as dma-buf.
    pub dmabuf: MemoryTypes,
    /// Bytes of a packed remote key.
    pub key_size: usize,
    /// What a registration is said to cost, in seconds, however long it is.
    pub register_cost: f64,
}

/// What UCX calls a text in a fixed array.
fn text(chars: &[std::ffi::c_char; 16]) -> String {
    let bytes = chars.map(|c| c as u8);
    CStr::from_bytes_until_nul(&bytes)
        .map_or_else(|_| String::new(), |text| text.to_string_lossy().into_owned())
}

impl Uct {
    /// The components of this UCX by name, each with the names of its memory domains.
    pub fn components(&self) -> Result<Vec<(String, Vec<String>)>> {
        let found = self.handles()?;
        Ok(found.into_iter().map(|(_, name, domains)| (name, domains)).collect())
    }

    fn handles(&self) -> Result<Vec<(Raw, String, Vec<String>)>> {
        let (mut list, mut count) = (ptr::null_mut(), 0);
        // SAFETY: out-parameters; the list is released below, component handles live forever.
        let status = unsafe { (self.f.uct_query_components)(&mut list, &mut count) };
        self.check("uct_query_components", status)?;
        // SAFETY: UCX returned `count` handles.
        let handles = unsafe { std::slice::from_raw_parts(list, count as usize) }.to_vec();
        // SAFETY: released once.
        unsafe { (self.f.uct_release_component_list)(list) };
        handles.into_iter().map(|handle| self.describe(handle)).collect()
    }

    fn describe(&self, component: Raw) -> Result<(Raw, String, Vec<String>)> {
        let query = |attr: &mut ComponentAttr| {
            // SAFETY: a handle from the list; the mask says which fields are valid.
            let status = unsafe { (self.f.uct_component_query)(component, attr) };
            self.check("uct_component_query", status)
        };
        // SAFETY: plain data.
        let mut attr: ComponentAttr = unsafe { zeroed() };
        attr.field_mask = ComponentAttr::NAME | ComponentAttr::MD_RESOURCE_COUNT;
        query(&mut attr)?;
        let name = text(&attr.name);
        let mut domains = vec![MdResource { name: [0; 16] }; attr.md_resource_count as usize];
        if !domains.is_empty() {
            attr.field_mask = ComponentAttr::MD_RESOURCES;
            attr.md_resources = domains.as_mut_ptr();
            query(&mut attr)?;
        }
        Ok((component, name, domains.iter().map(|domain| text(&domain.name)).collect()))
    }

    /// Opens the memory domain of a component, with `settings` on top of the environment.
    pub fn open(
        &'static self,
        component: &str,
        settings: &[(String, String)],
    ) -> anyhow::Result<Domain> {
        let (handle, _, domains) = self
            .handles()?
            .into_iter()
            .find(|(_, name, _)| name == component)
            .with_context(|| format!("this UCX has no component {component}"))?;
        let name = domains
            .into_iter()
            .next()
            .with_context(|| format!("component {component} has no memory domain here"))?;
        let mut config = ptr::null_mut();
        // SAFETY: no prefix and no file: the environment and the defaults.
        let status =
            unsafe { (self.f.uct_md_config_read)(handle, ptr::null(), ptr::null(), &mut config) };
        self.check("uct_md_config_read", status)?;
        let opened = (|| {
            for (key, value) in settings {
                let (key, value) = (CString::new(key.as_str())?, CString::new(value.as_str())?);
                // SAFETY: C strings, and the configuration read above.
                let status =
                    unsafe { (self.f.uct_config_modify)(config, key.as_ptr(), value.as_ptr()) };
                self.check("uct_config_modify", status)?;
            }
            let c_name = CString::new(name.as_str())?;
            let mut md = ptr::null_mut();
            // SAFETY: name and configuration belong to this component.
            let status = unsafe { (self.f.uct_md_open)(handle, c_name.as_ptr(), config, &mut md) };
            self.check("uct_md_open", status)?;
            anyhow::Ok(md)
        })();
        // SAFETY: read above, released once.
        unsafe { (self.f.uct_config_release)(config) };
        Ok(Domain { uct: self, component: handle, md: opened?, name })
    }
}

impl Domain {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The UCT it belongs to.
    pub fn uct(&self) -> &'static Uct {
        self.uct
    }

    /// What it can do.
    pub fn attributes(&self) -> Result<Attributes> {
        // SAFETY: plain data.
        let mut attr: MdAttr = unsafe { zeroed() };
        attr.field_mask = u64::MAX;
        // SAFETY: an open domain, and a structure no smaller than UCX's own.
        let status = unsafe { (self.uct.f.uct_md_query_v2)(self.md, &mut attr) };
        self.uct.check("uct_md_query_v2", status)?;
        Ok(Attributes {
            allocates: attr.flags & 1 != 0,
            registers: attr.flags & 2 != 0,
            needs_key: attr.flags & 8 != 0,
            register: MemoryTypes(attr.reg_mem_types),
            cache: MemoryTypes(attr.cache_mem_types),
            detect: MemoryTypes(attr.detect_mem_types),
            allocate: MemoryTypes(attr.alloc_mem_types),
            dmabuf: MemoryTypes(attr.dmabuf_mem_types),
            key_size: attr.rkey_packed_size,
            register_cost: attr.reg_cost[0],
        })
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        // SAFETY: closed once; memory and copiers borrow the domain and are gone.
        unsafe { (self.uct.f.uct_md_close)(self.md) };
    }
}
