//! UCX's configuration tables.

use core::ffi::{c_char, c_void};

use super::{ListLink, assert_layout};

/// `ucs_config_global_list_entry_t`.
#[repr(C)]
#[allow(missing_docs)]
pub struct ConfigEntry {
    pub name: *const c_char,
    pub prefix: *const c_char,
    pub table: *mut RawConfigField,
    pub size: usize,
    pub list: ListLink,
    pub flags: u8,
}
assert_layout!(ConfigEntry, 56, name @ 0, prefix @ 8, table @ 16, size @ 24, list @ 32, flags @ 48);

/// `ucs_config_parser_t`.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct ConfigParser {
    pub read: *const c_void,
    pub write: *const c_void,
    pub clone: *const c_void,
    pub release: *const c_void,
    pub help: *const c_void,
    pub doc: *const c_void,
    pub arg: *const c_void,
}
assert_layout!(ConfigParser, 56, read @ 0, write @ 8, clone @ 16, release @ 24, help @ 32,
    doc @ 40, arg @ 48);

/// `ucs_config_field_t`; a table ends with a field whose name is null.
#[repr(C)]
#[allow(missing_docs)]
pub struct RawConfigField {
    pub name: *const c_char,
    pub dfl_value: *const c_char,
    pub doc: *const c_char,
    pub offset: usize,
    pub parser: ConfigParser,
}
assert_layout!(RawConfigField, 88, name @ 0, dfl_value @ 8, doc @ 16, offset @ 24, parser @ 32);

/// `ucs_config_key_field_t`; an array of them ends with one whose name is null.
#[repr(C)]
#[allow(missing_docs)]
pub struct ConfigKeyField {
    pub name: *const c_char,
    pub doc: *const c_char,
    pub offset: usize,
}
assert_layout!(ConfigKeyField, 24, name @ 0, doc @ 8, offset @ 16);

/// `ucs_config_key_value_param_t`: what the parser of `key:value` lists works with.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct ConfigKeyValue {
    pub parser: ConfigParser,
    pub keys: *const ConfigKeyField,
}
assert_layout!(ConfigKeyValue, 64, parser @ 0, keys @ 56);

/// Bytes of `uct_md_config_t`, which every memory domain's configuration begins with.
pub const MD_CONFIG_SIZE: usize = 1;
/// Bytes of `uct_iface_config_t`, which every transport's configuration begins with.
pub const IFACE_CONFIG_SIZE: usize = 32;

/// `uct_iface_config_t`, as far as this crate looks inside.
#[repr(C)]
#[allow(missing_docs)]
pub struct IfaceConfig {
    pub alloc_methods: *const c_void,
    /// A structure of its own in UCX, hence the padding behind it.
    pub alloc_method_count: u64,
    pub failure: i32,
    pub max_num_eps: usize,
}
assert_layout!(IfaceConfig, IFACE_CONFIG_SIZE, failure @ 16, max_num_eps @ 24);
