//! Plays a framework on Gaudi: this process acquires a card through Synapse. The Gaudi memory of all checks is then
//! Synapse's, and UCX only gets its addresses.
//!
//! `UCP_CHECK_FRAMEWORK=acquired` acquires the card before UCX is loaded. `loaded` only loads Synapse first, and
//! acquires the card when a check first needs Gaudi memory; `late` also loads Synapse only then. Like the PyTorch
//! bridge, the process ends Synapse in an exit handler.

use anyhow::{Context, Result, bail, ensure};
use libloading::Library;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

const VARIABLE: &str = "UCP_CHECK_FRAMEWORK";
/// Gaudi2 and Gaudi3 in `synDeviceType`.
const TYPES: [i32; 2] = [4, 5];
/// `synDeviceTypeMismatch`.
const MISMATCH: i32 = 9;

type Malloc = unsafe extern "C" fn(u32, u64, u64, u32, *mut u64) -> i32;
type Free = unsafe extern "C" fn(u32, u64, u32) -> i32;

struct Synapse {
    acquire: unsafe extern "C" fn(*mut u32, i32) -> i32,
    release: unsafe extern "C" fn(u32) -> i32,
    malloc: Malloc,
    free: Free,
    destroy: unsafe extern "C" fn() -> i32,
}

/// Whether a card was released.
static RELEASED: AtomicBool = AtomicBool::new(false);
static SYNAPSE: OnceLock<Result<Synapse>> = OnceLock::new();

/// Whether Gaudi memory is Synapse's.
pub fn is_wanted() -> bool {
    std::env::var_os(VARIABLE).is_some()
}

/// To be called before UCX is loaded.
pub fn before_ucx() -> Result<()> {
    match std::env::var(VARIABLE).as_deref() {
        Ok("acquired") => synapse().map(|_| ()),
        Ok("loaded") => load().map(|_| ()),
        Ok("late") | Err(_) => Ok(()),
        Ok(other) => bail!("{VARIABLE}={other}: want acquired, loaded or late"),
    }
}

fn synapse() -> Result<&'static Synapse> {
    let acquired = SYNAPSE.get_or_init(acquire);
    acquired.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))
}

extern "C" fn destroy() {
    if let Some(Ok(synapse)) = SYNAPSE.get() {
        // SAFETY: no arguments; undoes `acquire`.
        unsafe { (synapse.destroy)() };
    }
}

/// Loads Synapse for good: libraries of frameworks are never unloaded.
fn load() -> Result<ManuallyDrop<Library>> {
    // SAFETY: runs the initialisers of the library that the loader path names.
    unsafe { Library::new("libSynapse.so") }.map(ManuallyDrop::new).context("no framework")
}

fn acquire() -> Result<Synapse> {
    let library = load()?;
    // SAFETY: the signatures of synapse_api.h, for all functions here.
    let (initialize, synapse) = unsafe {
        let initialize = *library.get::<unsafe extern "C" fn() -> i32>(b"synInitialize")?;
        let synapse = Synapse {
            acquire: *library.get(b"synDeviceAcquireByDeviceType")?,
            release: *library.get(b"synDeviceRelease")?,
            malloc: *library.get(b"synDeviceMalloc")?,
            free: *library.get(b"synDeviceFree")?,
            destroy: *library.get(b"synDestroy")?,
        };
        (initialize, synapse)
    };
    // SAFETY: no arguments.
    let status = unsafe { initialize() };
    ensure!(status == 0, "synInitialize: {status}");
    // SAFETY: takes no arguments, and may run at any time.
    unsafe { libc::atexit(destroy) };
    acquire_card(&synapse)?;
    Ok(synapse)
}

fn acquire_card(synapse: &Synapse) -> Result<()> {
    let mut device = u32::MAX;
    // SAFETY: an out pointer and a number.
    let statuses = TYPES.map(|wanted| unsafe { (synapse.acquire)(&raw mut device, wanted) });
    // Each card has one type. A second acquire fails with another code than a wrong type.
    ensure!(device == 0, "synDeviceAcquireByDeviceType: {statuses:?} ({MISMATCH} is another type)");
    Ok(())
}

/// Releases the card, even if its memory is in use; returns the status.
pub fn release() -> Result<i32> {
    RELEASED.store(true, Ordering::Relaxed);
    // SAFETY: a number.
    Ok(unsafe { (synapse()?.release)(0) })
}

/// Acquires a card after [`release`].
pub fn acquire_again() -> Result<()> {
    acquire_card(synapse()?)
}

/// Allocates this many bytes; returns their address.
pub fn allocate(length: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: plain numbers, and an out pointer.
    let status = unsafe { (synapse()?.malloc)(0, length as u64, 0, 0, &raw mut address) };
    ensure!(status == 0, "synDeviceMalloc of {length} bytes: {status}");
    Ok(address)
}

/// Frees what [`allocate`] returned.
pub fn free(address: u64) {
    let Ok(synapse) = synapse() else { return };
    // SAFETY: plain numbers.
    let status = unsafe { (synapse.free)(0, address, 0) };
    // Releasing the card has freed its memory already.
    assert!(status == 0 || RELEASED.load(Ordering::Relaxed), "synDeviceFree: {status}");
}
