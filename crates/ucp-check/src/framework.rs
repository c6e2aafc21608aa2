//! Plays a framework on Gaudi: this process acquires a card through Synapse, and the Gaudi memory of all checks is then
//! Synapse's, of which UCX is only told the addresses.
//!
//! `UCP_CHECK_FRAMEWORK=before` acquires the card before UCX is loaded, `after` when Gaudi memory is first asked for. Like
//! the PyTorch bridge, the process ends Synapse in an exit handler.

use anyhow::{Context, Result, bail, ensure};
use libloading::Library;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;

const VARIABLE: &str = "UCP_CHECK_FRAMEWORK";
/// Gaudi2 and Gaudi3 in `synDeviceType`.
const TYPES: [i32; 2] = [4, 5];
/// `synDeviceTypeMismatch`.
const MISMATCH: i32 = 9;

type Malloc = unsafe extern "C" fn(u32, u64, u64, u32, *mut u64) -> i32;
type Free = unsafe extern "C" fn(u32, u64, u32) -> i32;

struct Synapse {
    malloc: Malloc,
    free: Free,
    destroy: unsafe extern "C" fn() -> i32,
}

static SYNAPSE: OnceLock<Result<Synapse>> = OnceLock::new();

/// Whether Gaudi memory is Synapse's.
pub fn is_wanted() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// To be called before UCX is loaded.
pub fn before_ucx() -> Result<()> {
    match std::env::var(VARIABLE).as_deref() {
        Ok("before") => synapse().map(|_| ()),
        Ok("after") | Err(_) => Ok(()),
        Ok(other) => bail!("{VARIABLE}={other}: want before or after"),
    }
}

fn synapse() -> Result<&'static Synapse> {
    let acquired = SYNAPSE.get_or_init(acquire);
    acquired.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))
}

extern "C" fn destroy() {
    if let Some(Ok(synapse)) = SYNAPSE.get() {
        // SAFETY: no arguments; ends what `acquire` began.
        unsafe { (synapse.destroy)() };
    }
}

fn acquire() -> Result<Synapse> {
    // SAFETY: runs the initialisers of the library that the loader path names.
    let library = unsafe { Library::new("libSynapse.so") }.context("no framework")?;
    let library = ManuallyDrop::new(library);
    // SAFETY: the signatures of synapse_api.h, for all functions here.
    let (initialize, by_type, synapse) = unsafe {
        let initialize = *library.get::<unsafe extern "C" fn() -> i32>(b"synInitialize")?;
        let by_type = *library
            .get::<unsafe extern "C" fn(*mut u32, i32) -> i32>(b"synDeviceAcquireByDeviceType")?;
        let synapse = Synapse {
            malloc: *library.get(b"synDeviceMalloc")?,
            free: *library.get(b"synDeviceFree")?,
            destroy: *library.get(b"synDestroy")?,
        };
        (initialize, by_type, synapse)
    };
    // SAFETY: no arguments.
    let status = unsafe { initialize() };
    ensure!(status == 0, "synInitialize: {status}");
    // SAFETY: takes no arguments, and may run at any time.
    unsafe { libc::atexit(destroy) };
    let mut device = u32::MAX;
    // SAFETY: an out pointer and a number.
    let statuses = TYPES.map(|wanted| unsafe { by_type(&raw mut device, wanted) });
    // Each card is of one type; a second acquire is refused with another code than a wrong type.
    ensure!(device == 0, "synDeviceAcquireByDeviceType: {statuses:?} ({MISMATCH} is another type)");
    Ok(synapse)
}

/// The address of so many bytes.
pub fn allocate(length: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: plain numbers, and an out pointer.
    let status = unsafe { (synapse()?.malloc)(0, length as u64, 0, 0, &raw mut address) };
    ensure!(status == 0, "synDeviceMalloc of {length} bytes: {status}");
    Ok(address)
}

/// Gives back what [`allocate`] gave.
pub fn free(address: u64) {
    let Ok(synapse) = synapse() else { return };
    // SAFETY: plain numbers.
    let status = unsafe { (synapse.free)(0, address, 0) };
    assert_eq!(status, 0, "synDeviceFree of {address:#x}");
}
