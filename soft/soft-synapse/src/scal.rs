//! The functions of `libscal.so` that Synapse uses; linked, as the vendor's are.

use core::ffi::{c_char, c_int, c_void};

pub(crate) type Handle = *mut c_void;
/// `scal_memory_pool_info`, as words: 3 is the first address, 6 the size, 7 what is free.
pub(crate) type PoolInfo = [u64; 8];
/// `scal_buffer_info_t`, as words: 3 is the address.
pub(crate) type BufferInfo = [u64; 4];

linked! {
    fn scal_init(fd: c_int, config: *const c_char, scal: *mut Handle, firmware: *mut c_void) -> c_int;
    fn scal_destroy(scal: Handle);
    fn scal_get_pool_handle_by_name(scal: Handle, name: *const c_char, pool: *mut Handle) -> c_int;
    fn scal_pool_get_info(pool: Handle, info: *mut PoolInfo) -> c_int;
    fn scal_allocate_buffer(pool: Handle, size: u64, buffer: *mut Handle) -> c_int;
    fn scal_free_buffer(buffer: Handle) -> c_int;
    fn scal_buffer_get_info(buffer: Handle, info: *mut BufferInfo) -> c_int;
}
