//! UCP in Rust with Gaudi memory: host → card → host by puts and gets of a worker to itself, every byte checked.
//!
//! ```sh
//! rustc --edition 2024 -L $UCX/lib ucp_gaudi.rs && ucx-gaudi run --soft -- ./ucp_gaudi
//! ```
//!
//! The C interface is declared here, as far as it is used; a binding crate (ucx2-sys and others) works the same.

use std::ffi::c_void;
use std::ptr::{null, null_mut};

const LENGTH: usize = (1 << 20) + 3;
const MEMORY_TYPE_GAUDI: u32 = 9;

type Handle = *mut c_void;

/// `ucp_params_t` and others begin with a mask of the fields that are set; the rest is not read.
#[repr(C)]
struct Params {
    field_mask: u64,
    first: u64,
    rest: [u64; 30],
}

#[repr(C)]
struct MapParams {
    field_mask: u64,
    address: *mut c_void,
    length: usize,
    flags: u32,
    prot: u32,
    memory_type: u32,
    exported: *const c_void,
}

#[repr(C)]
struct MemAttr {
    field_mask: u64,
    address: *mut c_void,
    length: usize,
    memory_type: u32,
}

#[link(name = "ucp")]
unsafe extern "C" {
    fn ucp_init_version(
        major: u32,
        minor: u32,
        params: *const Params,
        config: Handle,
        context: *mut Handle,
    ) -> i8;
    fn ucp_worker_create(context: Handle, params: *const Params, worker: *mut Handle) -> i8;
    fn ucp_worker_get_address(worker: Handle, address: *mut Handle, length: *mut usize) -> i8;
    fn ucp_worker_progress(worker: Handle) -> u32;
    fn ucp_ep_create(worker: Handle, params: *const Params, endpoint: *mut Handle) -> i8;
    fn ucp_mem_map(context: Handle, params: *const MapParams, memory: *mut Handle) -> i8;
    fn ucp_mem_query(memory: Handle, attributes: *mut MemAttr) -> i8;
    fn ucp_mem_unmap(context: Handle, memory: Handle) -> i8;
    fn ucp_rkey_pack(context: Handle, memory: Handle, buffer: *mut Handle, size: *mut usize) -> i8;
    fn ucp_ep_rkey_unpack(endpoint: Handle, buffer: Handle, key: *mut Handle) -> i8;
    fn ucp_rkey_destroy(key: Handle);
    fn ucp_put_nbx(
        ep: Handle,
        from: *const u8,
        n: usize,
        to: u64,
        key: Handle,
        param: *const Params,
    ) -> Handle;
    fn ucp_get_nbx(
        ep: Handle,
        to: *mut u8,
        n: usize,
        from: u64,
        key: Handle,
        param: *const Params,
    ) -> Handle;
    fn ucp_ep_flush_nbx(endpoint: Handle, param: *const Params) -> Handle;
    fn ucp_request_check_status(request: Handle) -> i8;
    fn ucp_request_free(request: Handle);
    fn ucp_ep_close_nbx(endpoint: Handle, param: *const Params) -> Handle;
    fn ucp_worker_destroy(worker: Handle);
    fn ucp_cleanup(context: Handle);
}

fn params(field_mask: u64, first: u64) -> Params {
    Params { field_mask, first, rest: [0; 30] }
}

fn check(status: i8, what: &str) {
    assert_eq!(status, 0, "{what}: UCX status {status}");
}

/// Waits for a request; small values are statuses.
fn finish(worker: Handle, request: Handle, what: &str) {
    if (request as isize) <= 0 {
        return check(request as isize as i8, what);
    }
    // SAFETY: a request of this worker, freed once it has ended.
    unsafe {
        while ucp_request_check_status(request) == 1 {
            ucp_worker_progress(worker);
        }
        check(ucp_request_check_status(request), what);
        ucp_request_free(request);
    }
}

fn main() {
    let (mut context, mut worker, mut endpoint) = (null_mut(), null_mut(), null_mut());
    let (mut memory, mut address, mut packed, mut key) =
        (null_mut(), null_mut(), null_mut(), null_mut());
    let (mut length, none) = (0, params(0, 0));
    let from: Vec<u8> = (0..LENGTH).map(|i| (i * 7 + (i >> 8)) as u8).collect();
    let mut back = vec![0; LENGTH];
    // SAFETY: the structures are as UCX reads them, and what they point to lives until the end.
    unsafe {
        // UCP_PARAM_FIELD_FEATURES: UCP_FEATURE_RMA.
        check(ucp_init_version(1, 22, &params(1, 1 << 1), null_mut(), &mut context), "ucp_init");
        check(ucp_worker_create(context, &none, &mut worker), "ucp_worker_create");
        check(ucp_worker_get_address(worker, &mut address, &mut length), "ucp_worker_get_address");
        // UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
        check(ucp_ep_create(worker, &params(1, address as u64), &mut endpoint), "ucp_ep_create");

        let map = MapParams {
            // LENGTH, FLAGS, MEMORY_TYPE
            field_mask: 1 << 1 | 1 << 2 | 1 << 4,
            address: null_mut(),
            length: LENGTH,
            flags: 1 << 1, // UCP_MEM_MAP_ALLOCATE
            prot: 0,
            memory_type: MEMORY_TYPE_GAUDI,
            exported: null(),
        };
        check(ucp_mem_map(context, &map, &mut memory), "Gaudi memory");
        let mut attr = MemAttr { field_mask: 1, address: null_mut(), length: 0, memory_type: 0 };
        check(ucp_mem_query(memory, &mut attr), "ucp_mem_query");
        check(ucp_rkey_pack(context, memory, &mut packed, &mut length), "ucp_rkey_pack");
        check(ucp_ep_rkey_unpack(endpoint, packed, &mut key), "ucp_ep_rkey_unpack");

        let there = attr.address as u64;
        finish(worker, ucp_put_nbx(endpoint, from.as_ptr(), LENGTH, there, key, &none), "put");
        finish(worker, ucp_ep_flush_nbx(endpoint, &none), "flush");
        finish(worker, ucp_get_nbx(endpoint, back.as_mut_ptr(), LENGTH, there, key, &none), "get");

        ucp_rkey_destroy(key);
        finish(worker, ucp_ep_close_nbx(endpoint, &none), "close");
        check(ucp_mem_unmap(context, memory), "ucp_mem_unmap");
        ucp_worker_destroy(worker);
        ucp_cleanup(context);
    }
    assert!(from == back, "wrong bytes");
    println!("{LENGTH} bytes through Gaudi memory: every byte is right");
}
