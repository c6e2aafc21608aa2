//! Checks where UCX puts rendezvous fragments (`UCX_RNDV_FRAG_MEM_TYPES`): Gaudi memory does not serve
//! well, nor does CUDA memory next to Gaudi memory.
//!
//! UCX stages pipelined messages in fragments, by default in host memory or in CUDA memory. For fragments
//! in Gaudi memory it has no default size and no default count: they are 0, UCX creates an empty memory
//! pool, and the process ends with a fatal error or a null pointer in UCX. The defaults are constants of
//! libucp, and the user's values are parsed before plugins are loaded, so this plugin cannot set them. It
//! can keep UCX away from that path: without a copy domain for Gaudi memory UCX stages nothing in it.
//!
//! UCX chooses fragments in CUDA memory for messages from Gaudi memory, although nothing copies between
//! the two. That is slow between processes, and hangs inside one (docs/cuda.md). UCX asks only the CUDA
//! transport about such copies, so no estimate of ours prevents it. `ucs-gaudi` lowers that transport's
//! estimate. If it was not loaded and the user has set nothing against it, we log a warning.

use std::ffi::c_int;
use std::sync::Once;

use uct::{Ucx, log};

/// Variables that name the memory types of fragments; the second is the older name of the first.
const TYPES: [&str; 2] = ["UCX_RNDV_FRAG_MEM_TYPES", "UCX_RNDV_FRAG_MEM_TYPE"];
/// Variables that must then have a value for Gaudi memory.
const SIZES: [&str; 2] = ["UCX_RNDV_FRAG_SIZE", "UCX_RNDV_FRAG_ALLOC_COUNT"];
/// The variable by which UCX estimates copies by CUDA. A user's value stays.
const CUDA_SPEED: &str = "UCX_CUDA_COPY_BW";

/// Whether the user wants fragments in Gaudi memory without a size or a count; the reason is logged if
/// `log_error`.
pub(crate) fn lack_size(ucx: &Ucx, log_error: bool) -> bool {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let missing = missing(variable);
    if let Some(missing) = missing
        && log_error
    {
        log!(
            ucx,
            Error,
            "no Gaudi: fragments in Gaudi memory are wanted (UCX_RNDV_FRAG_MEM_TYPES), but {missing} \
             gives none for gaudi, UCX has no default, and would end the process; set \
             UCX_RNDV_FRAG_SIZE=host:512K,gaudi:4M and UCX_RNDV_FRAG_ALLOC_COUNT=host:128,gaudi:16"
        );
    }
    missing.is_some()
}

/// The variable that should give a value for Gaudi memory, and does not.
fn missing(variable: impl Fn(&str) -> String) -> Option<&'static str> {
    let names_gaudi = |list: String| list.split(',').any(|item| item.eq_ignore_ascii_case("gaudi"));
    if !TYPES.iter().any(|name| names_gaudi(variable(name))) {
        return None;
    }
    let gives_gaudi = |list: String| {
        // As UCX: the last one counts.
        let mut values = list.rsplit(',').filter_map(|item| item.split_once(':'));
        let value = values.find(|(name, _)| name.eq_ignore_ascii_case("gaudi"));
        value.is_some_and(|(_, value)| value.starts_with(|first: char| first != '0'))
    };
    SIZES.into_iter().find(|name| !gives_gaudi(variable(name)))
}

/// Warns, once in a process, if there are NVIDIA GPUs and Gaudis and UCX may choose fragments in their memory
/// for messages from Gaudi memory.
pub(crate) fn warn_of_cuda(ucx: &Ucx) {
    static ONCE: Once = Once::new();
    let variable = |name: &str| std::env::var(name).ok();
    let has_defaults = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
        maps.contains("/libucs_gaudi.")
    };
    if !may_be_cuda(variable, has_defaults) || !has_cuda_devices() {
        return;
    }
    ONCE.call_once(|| {
        log!(
            ucx,
            Warn,
            "NVIDIA GPUs and Gaudis: UCX may stage messages from Gaudi memory in CUDA memory, which is slow, \
             and hangs inside one process; set UCX_CUDA_COPY_BW=4000MBs,h2d:8300MBs,d2h:11660MBs,d2d:320GBs in \
             all processes of the job"
        );
    });
}

/// Whether UCX may put fragments of Gaudi memory into CUDA memory: by its own defaults it does. A `ucx.conf` is not
/// seen here.
fn may_be_cuda(
    variable: impl Fn(&str) -> Option<String>,
    has_defaults: impl FnOnce() -> bool,
) -> bool {
    let types = TYPES.iter().find_map(|name| variable(name));
    let names_cuda = |list: String| list.split(',').any(|item| item.eq_ignore_ascii_case("cuda"));
    types.is_none_or(names_cuda) && variable(CUDA_SPEED).is_none() && !has_defaults()
}

/// Whether CUDA is initialised in this process and has devices. UCX's CUDA module initialises it when
/// it is loaded, which is before any memory domain is opened.
fn has_cuda_devices() -> bool {
    type DeviceGetCount = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: with RTLD_NOLOAD nothing is loaded, and no constructor runs. The handle is never closed,
    // so the library stays loaded.
    let library =
        unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return false;
    }
    // SAFETY: the handle is open, and the name is a C string.
    let symbol = unsafe { libc::dlsym(library, c"cuDeviceGetCount".as_ptr()) };
    if symbol.is_null() {
        return false;
    }
    // SAFETY: CUDA's driver API declares the function so; c_int is its enum of results.
    let device_get_count =
        unsafe { core::mem::transmute::<*mut libc::c_void, DeviceGetCount>(symbol) };
    let mut count = 0;
    // SAFETY: the pointer is valid. Before cuInit the call fails and does nothing.
    let result = unsafe { device_get_count(&raw mut count) };
    result == 0 && count > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(variables: &[(&str, &str)]) -> Option<&'static str> {
        missing(|name| {
            let found = variables.iter().find(|(other, _)| *other == name);
            found.map_or_else(String::new, |(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn fragments_may_be_in_cuda_memory_where_neither_our_defaults_nor_the_user_prevent_it() {
        let set = |set: &'static str, value: &'static str, defaults: bool| {
            may_be_cuda(|name| (name == set).then(|| value.to_owned()), || defaults)
        };
        for types in ["host,cuda", "CUDA"] {
            assert!(set(TYPES[0], types, false) && !set(TYPES[0], types, true), "{types}");
        }
        for types in ["host", "host,gaudi"] {
            assert!(!set(TYPES[0], types, false) && !set(TYPES[1], types, false), "{types}");
        }
        assert!(!set(CUDA_SPEED, "10000MBs", false), "who sets it decides for himself");
        assert!(!may_be_cuda(|_| None, || true));
        assert!(may_be_cuda(|_| None, || false));
    }

    #[test]
    fn fragments_in_gaudi_memory_need_a_size_and_a_count() {
        let [types, older] = TYPES;
        let [size, count] = SIZES;
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[(types, "host,cuda")]), None);
        assert_eq!(with(&[(types, "host,Gaudi")]), Some(size));
        assert_eq!(with(&[(older, "gaudi")]), Some(size));
        let sized = (size, "host:512K,gaudi:4M");
        assert_eq!(with(&[(types, "gaudi"), sized]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "gaudi:0")]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "gaudi:1,gaudi:0")]), Some(count));
        assert_eq!(with(&[(types, "gaudi"), sized, (count, "cuda:9,GAUDI:16")]), None);
    }
}
