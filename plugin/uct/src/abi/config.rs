//! UCX's configuration tables.

use core::ffi::{c_char, c_void};

use super::{ListLink, layout};

layout! {
    /// `ucs_config_global_list_entry_t`.
    pub struct ConfigEntry: 56 {
        0 name: *const c_char,
        8 prefix: *const c_char,
        16 table: *mut RawConfigField,
        24 size: usize,
        32 list: ListLink,
        48 flags: u8,
    }

    /// `ucs_config_parser_t`.
    #[derive(Clone, Copy)]
    pub struct ConfigParser: 56 {
        0 read: *const c_void,
        8 write: *const c_void,
        16 clone: *const c_void,
        24 release: *const c_void,
        32 help: *const c_void,
        40 doc: *const c_void,
        48 arg: *const c_void,
    }

    /// `ucs_config_field_t`; a table ends with a field whose name is null.
    pub struct RawConfigField: 88 {
        0 name: *const c_char,
        8 dfl_value: *const c_char,
        16 doc: *const c_char,
        24 offset: usize,
        32 parser: ConfigParser,
    }

    /// `ucs_config_key_field_t`; an array of them ends with one whose name is null.
    pub struct ConfigKeyField: 24 {
        0 name: *const c_char,
        8 doc: *const c_char,
        16 offset: usize,
    }

    /// `ucs_config_key_value_param_t`: what the parser of `key:value` lists works with.
    #[derive(Clone, Copy)]
    pub struct ConfigKeyValue: 64 {
        0 parser: ConfigParser,
        56 keys: *const ConfigKeyField,
    }
}

/// Bytes of `uct_md_config_t`, which every memory domain's configuration begins with.
pub const MD_CONFIG_SIZE: usize = 1;
/// Bytes of `uct_iface_config_t`, which every transport's configuration begins with.
pub const IFACE_CONFIG_SIZE: usize = 32;

layout! {
    /// `uct_iface_config_t`, as far as this crate looks inside.
    pub struct IfaceConfig: IFACE_CONFIG_SIZE {
        0 alloc_methods: *const c_void,
        /// A structure of its own in UCX, hence the padding behind it.
        8 alloc_method_count: u64,
        16 failure: i32,
        24 max_num_eps: usize,
    }
}
