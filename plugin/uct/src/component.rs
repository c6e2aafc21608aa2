//! Components: what a plugin registers, and through which UCX opens its memory domains.

use core::any::TypeId;
use core::ffi::{CStr, c_char, c_int, c_void};

use crate::abi::{
    INVALID_RKEY, ListLink, MD_CONFIG_SIZE, MdOps, MdResource, RawComponent, RawMd,
    RkeyUnpackParams, Status, SysDevice,
};
use crate::config::{Table, Values, Variable};
use crate::iface::{Interface, TransportObject};
use crate::md::{self, MdObject, MemoryDomain};
use crate::panic_guard::{guarded, guarded_status};
use crate::ucx::Ucx;

/// A component: finds and opens memory domains and understands their remote keys.
pub trait Component: Send + Sync + Sized + 'static {
    /// What [`open`](Component::open) returns.
    type Md: MemoryDomain;
    /// A remote key, unpacked. A zero-sized type where transports need none.
    type RemoteKey: Send + Sync + 'static;

    /// Name, at most 15 characters.
    const NAME: &'static str;
    /// Prefix of the variables, behind `UCX_`.
    const CONFIG_PREFIX: &'static str;
    /// A second, complete prefix (no `UCX_` is added) for the variables; the first one wins.
    const CONFIG_ALIAS: Option<&'static str> = None;
    /// Configuration of the memory domains.
    const VARIABLES: &'static [Variable] = &[];
    /// Bytes of a packed remote key; also what [`MemoryDomain::pack_key`] fills.
    const KEY_SIZE: usize = 0;

    /// Names of the available memory domains. UCX calls this often and in every program: it must be
    /// cheap, log little and return an empty list (never an error) where there is no hardware.
    fn domains(&self, ucx: &'static Ucx) -> Vec<String>;

    /// Opens a domain. Failure means that UCX goes on without it.
    ///
    /// # Errors
    /// The status UCX logs at debug level.
    fn open(
        &self,
        ucx: &'static Ucx,
        domain: &str,
        config: &Values<'_>,
    ) -> Result<Self::Md, Status>;

    /// Unpacks a key. It comes from another process: trust nothing in it.
    ///
    /// # Errors
    /// [`Status::UNREACHABLE`] and the like for a key that cannot be used here.
    fn unpack_key(
        &self,
        ucx: &'static Ucx,
        key: &[u8],
        device: SysDevice,
    ) -> Result<Self::RemoteKey, Status>;
}

/// What UCX sees as a `uct_component_t`, followed by our fields.
#[repr(C)]
pub(crate) struct ComponentObject<C: Component> {
    raw: core::cell::UnsafeCell<RawComponent>,
    pub(crate) ucx: &'static Ucx,
    component: C,
    pub(crate) md_ops: MdOps,
    config: Table,
    /// Interface type → its registered transport (UCX does not pass the transport to callbacks).
    transports: Vec<(TypeId, *const c_void)>,
}

impl<C: Component> ComponentObject<C> {
    /// # Safety
    /// `raw` was registered by [`Registration`] for component type `C`.
    pub(crate) unsafe fn from_raw(raw: *mut RawComponent) -> &'static ComponentObject<C> {
        // SAFETY: the raw structure is the first field, and the object is never freed.
        unsafe { &*raw.cast() }
    }

    pub(crate) fn transport<I: Interface>(&self) -> Option<&'static TransportObject<I>> {
        let wanted = TypeId::of::<I>();
        let (_, object) = self.transports.iter().find(|(id, _)| *id == wanted)?;
        // SAFETY: stored by `Registration::transport::<I>` under the same type id; never freed.
        Some(unsafe { &*object.cast::<TransportObject<I>>() })
    }
}

/// Registers a component and its transports with one copy of UCX.
///
/// UCX cannot unregister a component. So check everything that may fail before
/// [`register`](Registration::register).
pub struct Registration<C: Component> {
    ucx: &'static Ucx,
    component: C,
    transports: Vec<(TypeId, *const c_void)>,
}

impl<C: Component> Registration<C> {
    /// Starts the registration of a component.
    pub fn new(ucx: &'static Ucx, component: C) -> Self {
        Registration { ucx, component, transports: Vec::new() }
    }

    /// Adds a transport.
    #[must_use]
    pub fn transport<I: Interface<Component = C>>(mut self) -> Self {
        let object = Box::into_raw(Box::new(TransportObject::<I>::new(self.ucx)));
        self.transports.push((TypeId::of::<I>(), object.cast_const().cast()));
        self
    }

    /// Registers everything with UCX. This cannot be undone.
    pub fn register(self) {
        let symbols = &self.ucx.symbols;
        let null_link = || ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() };
        let config = Table::new(
            self.ucx,
            &format!("{} memory domain", C::NAME),
            (C::CONFIG_PREFIX, C::CONFIG_ALIAS),
            C::VARIABLES,
            (symbols.uct_md_config_table, MD_CONFIG_SIZE),
        );
        let object: &'static ComponentObject<C> = Box::leak(Box::new(ComponentObject {
            raw: core::cell::UnsafeCell::new(RawComponent {
                name: name_array(C::NAME),
                query_md_resources: query_md_resources::<C>,
                md_open: md_open::<C>,
                cm_open: symbols.ucs_empty_function_return_unsupported,
                rkey_unpack: rkey_unpack::<C>,
                rkey_ptr: symbols.ucs_empty_function_return_unsupported,
                rkey_release: rkey_release::<C>,
                rkey_compare: rkey_compare::<C>,
                md_config: config.entry(),
                cm_config: Table::empty_entry(),
                tl_list: null_link(),
                list: null_link(),
                flags: 0,
                md_vfs_init: symbols.ucs_empty_function,
            }),
            ucx: self.ucx,
            component: self.component,
            md_ops: md::operations::<C>(symbols),
            config,
            transports: self.transports,
        }));
        // Derived from a reference to the whole object: callbacks reach the other fields through this pointer.
        let raw: *mut RawComponent = core::ptr::from_ref(object).cast_mut().cast();
        // SAFETY: the object is not shared yet; it has its final address, so the list head
        // may point at itself; it is never freed, as UCX requires.
        unsafe {
            let head = &raw mut (*raw).tl_list;
            (*raw).tl_list = ListLink { prev: head, next: head };
            (symbols.uct_component_register)(raw);
            for (_, transport) in &object.transports {
                (symbols.uct_tl_register)(raw, transport.cast_mut().cast());
            }
        }
    }
}

/// A name in a fixed array, truncated if it does not fit.
pub(crate) fn name_array<const N: usize>(name: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array[..N - 1].iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    array
}

unsafe extern "C" fn query_md_resources<C: Component>(
    component: *mut RawComponent,
    resources: *mut *mut MdResource,
    count: *mut u32,
) -> Status {
    // SAFETY: UCX passes back what was registered.
    let object = unsafe { ComponentObject::<C>::from_raw(component) };
    guarded_status(object.ucx, "query_md_resources", || {
        let names = object.component.domains(object.ucx);
        let list = names.iter().map(|name| MdResource { md_name: name_array(name) }).collect();
        let (array, length) = object.ucx.array(list).ok_or(Status::NO_MEMORY)?;
        // SAFETY: both are out-parameters of the caller.
        unsafe {
            *resources = array;
            *count = length;
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn md_open<C: Component>(
    component: *mut RawComponent,
    name: *const c_char,
    config: *const c_void,
    md_p: *mut *mut RawMd,
) -> Status {
    // SAFETY: UCX passes back what was registered.
    let object = unsafe { ComponentObject::<C>::from_raw(component) };
    guarded_status(object.ucx, "md_open", || {
        // SAFETY: UCX passes a C string, and values it parsed with our table.
        let (name, values) = unsafe { (CStr::from_ptr(name), object.config.values(config)) };
        let domain = object.component.open(object.ucx, &name.to_string_lossy(), &values)?;
        let md = MdObject::<C>::new(object, component, domain);
        // SAFETY: out-parameter of the caller.
        unsafe { *md_p = md.into_raw() };
        Ok(Status::OK)
    })
}

unsafe extern "C" fn rkey_unpack<C: Component>(
    component: *mut RawComponent,
    buffer: *const c_void,
    params: *const RkeyUnpackParams,
    rkey_p: *mut usize,
    handle_p: *mut *mut c_void,
) -> Status {
    // SAFETY: UCX passes back what was registered.
    let object = unsafe { ComponentObject::<C>::from_raw(component) };
    guarded_status(object.ucx, "rkey_unpack", || {
        let bytes = if C::KEY_SIZE == 0 {
            &[]
        } else {
            // SAFETY: UCX passes exactly as many bytes as our domains said a key has.
            unsafe { core::slice::from_raw_parts(buffer.cast::<u8>(), C::KEY_SIZE) }
        };
        // SAFETY: the parameters are valid when present; the mask says whether the device is.
        let device = unsafe {
            match params.as_ref() {
                Some(params) if params.field_mask & 1 != 0 => params.sys_device,
                _ => SysDevice::UNKNOWN,
            }
        };
        let key = object.component.unpack_key(object.ucx, bytes, device)?;
        // SAFETY: out-parameters of the caller.
        unsafe {
            *rkey_p = Box::into_raw(Box::new(key)) as usize;
            *handle_p = core::ptr::null_mut();
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn rkey_release<C: Component>(
    component: *mut RawComponent,
    rkey: usize,
    _handle: *mut c_void,
) -> Status {
    // SAFETY: UCX passes back what was registered.
    let object = unsafe { ComponentObject::<C>::from_raw(component) };
    guarded_status(object.ucx, "rkey_release", || {
        if rkey != 0 && rkey != INVALID_RKEY {
            // SAFETY: made by `rkey_unpack`, released once.
            drop(unsafe { Box::from_raw(rkey as *mut C::RemoteKey) });
        }
        Ok(Status::OK)
    })
}

unsafe extern "C" fn rkey_compare<C: Component>(
    component: *mut RawComponent,
    left: usize,
    right: usize,
    params: *const c_void,
    result: *mut c_int,
) -> Status {
    // SAFETY: UCX passes back what was registered.
    let object = unsafe { ComponentObject::<C>::from_raw(component) };
    guarded(object.ucx, "rkey_compare", Status::IO_ERROR, || {
        // SAFETY: the parameters begin with a field mask; no field is known to us.
        let unknown_fields = unsafe { params.cast::<u64>().as_ref() }.is_none_or(|mask| *mask != 0);
        if unknown_fields || result.is_null() {
            return Status::INVALID_PARAM;
        }
        // SAFETY: out-parameter of the caller, checked above.
        unsafe { *result = left.cmp(&right) as c_int };
        Status::OK
    })
}

/// Borrows an unpacked key. Keys of zero size carry nothing, and UCP passes "invalid" for them on
/// some paths.
///
/// # Safety
/// `rkey` is 0, the invalid key, or made by `rkey_unpack::<C>` and not yet released.
pub(crate) unsafe fn borrow_key<'a, C: Component>(rkey: usize) -> Option<&'a C::RemoteKey> {
    if rkey == 0 || rkey == INVALID_RKEY || size_of::<C::RemoteKey>() == 0 {
        return None;
    }
    // SAFETY: as the caller promises.
    Some(unsafe { &*(rkey as *const C::RemoteKey) })
}
