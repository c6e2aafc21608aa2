//! `uct_component_t` and `uct_tl_t`: what a plugin registers.

use core::ffi::{c_char, c_int, c_void};

use super::{
    ConfigEntry, DeviceType, IfaceParams, ListLink, RawMd, Status, SysDevice, assert_layout,
};

/// `uct_component_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct RawComponent {
    pub name: [c_char; 16],
    pub query_md_resources:
        unsafe extern "C" fn(*mut RawComponent, *mut *mut MdResource, *mut u32) -> Status,
    pub md_open: unsafe extern "C" fn(
        *mut RawComponent,
        *const c_char,
        *const c_void,
        *mut *mut RawMd,
    ) -> Status,
    pub cm_open: *const c_void,
    pub rkey_unpack: unsafe extern "C" fn(
        *mut RawComponent,
        *const c_void,
        *const RkeyUnpackParams,
        *mut usize,
        *mut *mut c_void,
    ) -> Status,
    pub rkey_ptr: *const c_void,
    pub rkey_release: unsafe extern "C" fn(*mut RawComponent, usize, *mut c_void) -> Status,
    pub rkey_compare:
        unsafe extern "C" fn(*mut RawComponent, usize, usize, *const c_void, *mut c_int) -> Status,
    pub md_config: ConfigEntry,
    pub cm_config: ConfigEntry,
    /// Must point at itself before registration.
    pub tl_list: ListLink,
    pub list: ListLink,
    pub flags: u64,
    pub md_vfs_init: *const c_void,
}
assert_layout!(RawComponent, 232, name @ 0, query_md_resources @ 16, md_open @ 24, cm_open @ 32,
    rkey_unpack @ 40, rkey_ptr @ 48, rkey_release @ 56, rkey_compare @ 64, md_config @ 72,
    cm_config @ 128, tl_list @ 184, list @ 200, flags @ 216, md_vfs_init @ 224);

/// `uct_tl_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct RawTl {
    pub name: [c_char; 10],
    pub query_devices: unsafe extern "C" fn(*mut RawMd, *mut *mut TlResource, *mut u32) -> Status,
    pub iface_open: unsafe extern "C" fn(
        *mut RawMd,
        *mut c_void,
        *const IfaceParams,
        *const c_void,
        *mut *mut c_void,
    ) -> Status,
    pub config: ConfigEntry,
    pub list: ListLink,
}
assert_layout!(RawTl, 104, name @ 0, query_devices @ 16, iface_open @ 24, config @ 32, list @ 88);

/// `uct_md_resource_desc_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct MdResource {
    pub md_name: [c_char; 16],
}
assert_layout!(MdResource, 16);

/// `uct_tl_device_resource_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct TlResource {
    pub name: [c_char; 32],
    pub device_type: DeviceType,
    pub sys_device: SysDevice,
}
assert_layout!(TlResource, 40, name @ 0, device_type @ 32, sys_device @ 36);

/// `uct_rkey_unpack_params_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct RkeyUnpackParams {
    pub field_mask: u64,
    pub sys_device: SysDevice,
}
assert_layout!(RkeyUnpackParams, 16, field_mask @ 0, sys_device @ 8);
