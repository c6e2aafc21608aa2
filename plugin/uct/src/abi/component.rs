//! `uct_component_t` and `uct_tl_t`: what a plugin registers.

use core::ffi::{c_char, c_int, c_void};

use super::{ConfigEntry, DeviceType, IfaceParams, ListLink, RawMd, Status, SysDevice, layout};

layout! {
    /// `uct_component_t`.
    pub struct RawComponent: 232 {
        0 name: [c_char; 16],
        16 query_md_resources: unsafe extern "C" fn(
            *mut RawComponent, *mut *mut MdResource, *mut u32) -> Status,
        24 md_open: unsafe extern "C" fn(
            *mut RawComponent, *const c_char, *const c_void, *mut *mut RawMd) -> Status,
        32 cm_open: *const c_void,
        40 rkey_unpack: unsafe extern "C" fn(
            *mut RawComponent, *const c_void, *const RkeyUnpackParams, *mut usize, *mut *mut c_void) -> Status,
        48 rkey_ptr: *const c_void,
        56 rkey_release: unsafe extern "C" fn(*mut RawComponent, usize, *mut c_void) -> Status,
        64 rkey_compare: unsafe extern "C" fn(
            *mut RawComponent, usize, usize, *const c_void, *mut c_int) -> Status,
        72 md_config: ConfigEntry,
        128 cm_config: ConfigEntry,
        /// Must point at itself before registration.
        184 tl_list: ListLink,
        200 list: ListLink,
        216 flags: u64,
        224 md_vfs_init: *const c_void,
    }

    /// `uct_tl_t`.
    pub struct RawTl: 104 {
        0 name: [c_char; 10],
        16 query_devices: unsafe extern "C" fn(
            *mut RawMd, *mut *mut TlResource, *mut u32) -> Status,
        24 iface_open: unsafe extern "C" fn(
            *mut RawMd, *mut c_void, *const IfaceParams, *const c_void, *mut *mut c_void) -> Status,
        32 config: ConfigEntry,
        88 list: ListLink,
    }

    /// `uct_md_resource_desc_t`.
    pub struct MdResource: 16 {
        0 md_name: [c_char; 16],
    }

    /// `uct_tl_device_resource_t`.
    pub struct TlResource: 40 {
        0 name: [c_char; 32],
        32 device_type: DeviceType,
        36 sys_device: SysDevice,
    }

    /// `uct_rkey_unpack_params_t`.
    pub struct RkeyUnpackParams: 16 {
        0 field_mask: u64,
        8 sys_device: SysDevice,
    }
}
