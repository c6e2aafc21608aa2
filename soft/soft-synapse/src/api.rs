//! The C functions. The device id of a call is ignored, as by the real library.

#![allow(clippy::not_unsafe_ptr_arg_deref)] // C functions: their callers promise what C promises.
#![allow(non_snake_case)] // Their names.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use crate::device::{Device, cards, count, device_type, put_text};
use crate::process::{self, device_or, guard, initialised, on_device};
use crate::status::{Status, describe};
use crate::stream::{Event, Stream};
use crate::thunk::{self, Generation, Transfer};

type Handle = *mut c_void;

/// `synDeviceInfoV2`; the first 56 bytes are `synDeviceInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct DeviceInfoV2 {
    pub v1: DeviceInfo,
    pub device_index: u8,
    pub global_hbm_base_address: u64,
}

/// `synDeviceInfo`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[allow(missing_docs)]
pub struct DeviceInfo {
    pub sram_base_address: u64,
    pub dram_base_address: u64,
    pub sram_size: u32,
    pub dram_size: u64,
    pub tpc_enabled_mask: u64,
    pub dram_enabled: u8,
    pub device_id: u32,
    pub fd: u32,
    pub device_type: i32,
}

const _: () = assert!(size_of::<DeviceInfo>() == 56 && size_of::<DeviceInfoV2>() == 72);

fn put<T>(out: *mut T, value: T) -> Result<(), Status> {
    if out.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: not NULL; C's callers promise room for one.
    unsafe { out.write(value) };
    Ok(())
}

fn get<T: Copy>(array: *const T, at: usize) -> Result<T, Status> {
    if array.is_null() {
        return Err(Status::INVALID_ARGUMENT);
    }
    // SAFETY: not NULL; C's callers promise so many.
    Ok(unsafe { *array.add(at) })
}

/// `synDriverGetVersion`: says that this is software.
#[unsafe(no_mangle)]
pub extern "C" fn synDriverGetVersion(out: *mut c_char, len: c_int) -> c_int {
    const VERSION: &[u8] = concat!("soft-synapse ", env!("CARGO_PKG_VERSION"), "\0").as_bytes();
    guard(|| put_text(out, len, CStr::from_bytes_with_nul(VERSION).unwrap_or_default()))
}

fn info(device: &Device) -> DeviceInfoV2 {
    let (base, size, _) = device.memory();
    DeviceInfoV2 {
        v1: DeviceInfo {
            sram_base_address: device.info.sram_base,
            dram_base_address: device.info.dram_base,
            sram_size: device.info.sram_size,
            dram_size: size,
            tpc_enabled_mask: device.info.tpc_mask,
            dram_enabled: device.info.dram_enabled,
            device_id: device.info.module_id,
            fd: device.fd as u32,
            device_type: device_type(device.generation),
        },
        device_index: device.index,
        // Where it lies on a Gaudi2 is not known: 0 is "unknown" there.
        global_hbm_base_address: if device.generation == Generation::Gaudi3 { base } else { 0 },
    }
}

/// A call on a stream; `InvalidArgument` for a stale handle, also of a device that was released.
fn stream(
    handle: Handle,
    body: impl FnOnce(&Arc<Device>, &Arc<Stream>) -> Result<(), Status>,
) -> c_int {
    guard(|| {
        device_or(Status::INVALID_ARGUMENT, |device| {
            body(device, &device.streams.find(handle as usize)?)
        })
    })
}

fn event(handle: Handle, body: impl FnOnce(&Arc<Device>, &Event) -> Result<(), Status>) -> c_int {
    guard(|| {
        device_or(Status::INVALID_EVENT_HANDLE, |device| {
            body(device, &*device.streams.find_event(handle as usize)?)
        })
    })
}

/// `synStreamDestroy`: waits for the work.
#[unsafe(no_mangle)]
pub extern "C" fn synStreamDestroy(handle: Handle) -> c_int {
    if handle.is_null() {
        return 0;
    }
    stream(handle, |device, _| device.streams.destroy(handle as usize, device))
}

/// The transfers of a copy: host addresses are translated, device addresses taken as they are.
fn transfers(
    device: &Device,
    entries: impl Iterator<Item = Result<(u64, u64, u64), Status>>,
    direction: c_int,
) -> Result<Vec<Transfer>, Status> {
    let maps = device.maps();
    let host = |addr, len| maps.translate(addr, len).ok_or(Status::MAPPING_NOT_FOUND);
    let mut transfers = Vec::new();
    for entry in entries {
        let (src, len, dst) = entry?;
        if len == 0 {
            continue;
        }
        if src == 0 || dst == 0 {
            return Err(Status::INVALID_ARGUMENT);
        }
        let (src, dst) = match direction {
            0 => (host(src, len)?, dst),
            1 => (src, host(dst, len)?),
            2 => (src, dst),
            _ => return Err(Status::INVALID_ARGUMENT),
        };
        transfers.push(Transfer { src, dst, len, fill: 0 });
    }
    Ok(transfers)
}

fn copy(
    on: Handle,
    entries: impl Iterator<Item = Result<(u64, u64, u64), Status>>,
    direction: c_int,
) -> c_int {
    stream(on, |device, stream| {
        if !(0..3).contains(&direction) {
            return Err(Status::INVALID_ARGUMENT);
        }
        let transfers = transfers(device, entries, direction)?;
        if transfers.is_empty() { Ok(()) } else { stream.transfer(device, transfers) }
    })
}

/// `synMemCopyAsyncMultiple`: all in one direction.
#[unsafe(no_mangle)]
pub extern "C" fn synMemCopyAsyncMultiple(
    on: Handle,
    src: *const u64,
    size: *const u64,
    dst: *const u64,
    direction: c_int,
    count: u64,
) -> c_int {
    let entries = (0..count as usize).map(|at| Ok((get(src, at)?, get(size, at)?, get(dst, at)?)));
    copy(on, entries, direction)
}

fn fill(on: Handle, dst: u64, value: u32, len: Option<u64>) -> c_int {
    stream(on, |device, stream| {
        let len = len.filter(|_| dst != 0).ok_or(Status::INVALID_ARGUMENT)?;
        let value = u64::from(value) << 32 | u64::from(value);
        match len {
            0 => Ok(()),
            _ => stream.transfer(device, vec![Transfer { src: value, dst, len, fill: 1 }]),
        }
    })
}

c_functions! {
    fn synInitialize() = guard(process::initialise);
    fn synDestroy() = guard(process::destroy);
    fn synDeviceGetCount(out: *mut u32) = guard(|| initialised(|_| put(out, count())));

    fn synDeviceGetCountByDeviceType(out: *mut u32, wanted: c_int) = guard(|| initialised(|_| {
        let cards = cards();
        let types = cards.iter().filter_map(|info| info.generation()).map(device_type);
        put(out, types.filter(|found| *found == wanted).count() as u32)
    }));

    /// `size` is how many fit, then how many there are.
    fn synDeviceGetModuleIDs(ids: *mut u32, size: *mut u32) = guard(|| initialised(|_| {
        let room = get(size, 0)? as usize;
        let mut found: Vec<_> = cards().iter().map(|i| i.module_id).collect();
        found.sort_unstable();
        found.truncate(room);
        for (at, id) in found.iter().enumerate() {
            put(ids.wrapping_add(at), *id)?;
        }
        put(size, found.len() as u32)
    }));

    fn synDeviceAcquireByModuleId(out: *mut u32, module: u32) = guard(|| {
        process::acquire(c"synDeviceAcquireByModuleId", || {
            Device::acquire(module, Status::NO_DEVICE_FOUND)
        })?;
        put(out, 0)
    });

    /// The free card with the lowest module id.
    fn synDeviceAcquireByDeviceType(out: *mut u32, wanted: c_int) = guard(|| {
        process::acquire(c"synDeviceAcquireByDeviceType", || {
            let cards = cards();
            let right =
                |info: &&_| crate::thunk::HwIp::generation(info).map(device_type) == Some(wanted);
            let mut modules: Vec<_> =
                cards.iter().filter(right).map(|info| info.module_id).collect();
            if modules.is_empty() && !cards.is_empty() {
                return Err(Status::DEVICE_TYPE_MISMATCH);
            }
            modules.sort_unstable();
            let acquire = |module: u32| Device::acquire(module, Status::NO_DEVICE_FOUND).ok();
            modules.into_iter().find_map(acquire).ok_or(Status::NO_DEVICE_FOUND)
        })?;
        put(out, 0)
    });

    /// By PCI bus id.
    fn synDeviceAcquire(out: *mut u32, bus: *const c_char) = guard(|| {
        process::acquire(c"synDeviceAcquire", || {
            if bus.is_null() {
                return Err(Status::INVALID_ARGUMENT);
            }
            // SAFETY: C's callers promise a NUL-terminated string.
            let fd = unsafe { thunk::hlthunk_open_control(0, bus) };
            if fd < 0 {
                return Err(Status::FAIL);
            }
            let info = thunk::hw_ip(fd);
            // SAFETY: opened above.
            unsafe { thunk::hlthunk_close(fd) };
            Device::acquire(info.ok_or(Status::FAIL)?.module_id, Status::FAIL)
        })?;
        put(out, 0)
    });

    fn synDeviceRelease(_device: u32) = guard(process::release);
    fn synDeviceSynchronize(_device: u32) = on_device(|device| device.streams.synchronize(device));

    fn synDeviceGetName(out: *mut c_char, len: c_int, _device: u32) = on_device(|device| {
        let name = device.info.card_name;
        put_text(out, len, CStr::from_bytes_until_nul(&name).unwrap_or_default())
    });

    fn synDeviceGetPCIBusId(out: *mut c_char, len: c_int, _device: u32) =
        on_device(|device| put_text(out, len, CStr::from_bytes_until_nul(&device.bus).unwrap_or_default()));

    fn synDeviceGetMemoryInfo(_device: u32, free: *mut u64, total: *mut u64) = on_device(|device| {
        let (_, size, left) = device.memory();
        put(free, left)?;
        put(total, size)
    });

    fn synDeviceGetInfo(_device: u32, out: *mut DeviceInfo) = on_device(|device| put(out, info(device).v1));
    fn synDeviceGetInfoV2(_device: u32, out: *mut DeviceInfoV2) = on_device(|device| put(out, info(device)));

    /// Those of memory, and the type.
    fn synDeviceGetAttribute(out: *mut u64, attributes: *const c_int, count: c_uint, _device: u32) =
        on_device(|device| {
            let info = info(device).v1;
            for at in 0..count as usize {
                let value = match get(attributes, at)? {
                    0 => info.sram_base_address,
                    1 => info.dram_base_address,
                    2 => info.sram_size.into(),
                    3 => info.dram_size,
                    4 => device.memory().2,
                    5 => info.tpc_enabled_mask,
                    6 => info.dram_enabled.into(),
                    7 => info.device_type as u64,
                    11 => 128,
                    _ => return Err(Status::UNSUPPORTED),
                };
                put(out.wrapping_add(at), value)?;
            }
            Ok(())
        });

    /// Out of memory is `Fail`.
    fn synDeviceMalloc(_device: u32, size: u64, _wanted: u64, flags: u32, out: *mut u64) =
        on_device(|device| match (flags, size) {
            (1.., _) => Err(Status::FAIL),
            (0, 0) => put(out, 0),
            (0, _) => put(out, device.allocate(size)?),
        });

    /// By exact address; 0 is nothing.
    fn synDeviceFree(_device: u32, buffer: u64, flags: u32) = on_device(|device| match (flags, buffer) {
        (1.., _) => Err(Status::FAIL),
        (0, 0) => Ok(()),
        (0, _) => device.free(buffer),
    });

    fn synHostMalloc(_device: u32, size: u64, _flags: u32, out: *mut *mut c_void) =
        on_device(|device| put(out, device.host_alloc(size)?));

    fn synHostFree(_device: u32, buffer: *const c_void, _flags: u32) =
        on_device(|device| device.host_free(buffer as u64));

    fn synHostMap(_device: u32, size: u64, buffer: *const c_void) =
        guard(|| device_or(Status::INVALID_ARGUMENT, |device| {
            if buffer.is_null() || size == 0 {
                return Err(Status::INVALID_ARGUMENT);
            }
            device.host_map(buffer as u64, size)
        }));

    /// The first call removes the mapping for all users; an unknown address succeeds.
    fn synHostUnmap(_device: u32, buffer: *const c_void) = on_device(|device| {
        device.host_unmap(buffer as u64);
        Ok(())
    });

    fn synStreamCreateGeneric(out: *mut Handle, _device: u32, flags: u32) = on_device(|device| match flags {
        0 if !out.is_null() => put(out, device.streams.create() as Handle),
        _ => Err(Status::INVALID_ARGUMENT),
    });

    fn synStreamWaitEvent(handle: Handle, wanted: Handle, flags: u32) = stream(handle, |device, stream| {
        if flags != 0 {
            return Err(Status::INVALID_ARGUMENT);
        }
        match device.streams.find_event(wanted as usize)?.mark() {
            Some(mark) => stream.wait(device, mark),
            None => Ok(()),
        }
    });

    fn synStreamSynchronize(handle: Handle) = stream(handle, |device, stream| stream.synchronize(device));

    fn synStreamQuery(handle: Handle) = stream(handle, |device, stream| {
        if stream.is_idle(device)? { Ok(()) } else { Err(Status::BUSY) }
    });

    fn synStreamSetAffinity(_device: u32, handle: Handle, mask: u64) = stream(handle, |_, stream| {
        *stream.affinity.lock().unwrap_or_else(|p| p.into_inner()) = mask;
        Ok(())
    });

    fn synStreamGetAffinity(_device: u32, handle: Handle, out: *mut u64) =
        stream(handle, |_, stream| put(out, *stream.affinity.lock().unwrap_or_else(|p| p.into_inner())));

    fn synEventCreate(out: *mut Handle, _device: u32, flags: u32) =
        on_device(|device| put(out, device.streams.create_event(flags)? as Handle));

    fn synEventDestroy(handle: Handle) = event(handle, |device, _| device.streams.destroy_event(handle as usize));

    fn synEventRecord(handle: Handle, on: Handle) = event(handle, |device, event| {
        event.record(&*device.streams.find(on as usize)?);
        Ok(())
    });

    fn synEventQuery(handle: Handle) = event(handle, |device, event| match event.mark() {
        Some(mark) if !mark.has_ended(device)? => Err(Status::BUSY),
        _ => Ok(()),
    });

    fn synEventSynchronize(handle: Handle) =
        event(handle, |device, event| event.mark().map_or(Ok(()), |mark| mark.wait(device)));

    /// Both events must collect times.
    fn synEventElapsedTime(out: *mut u64, start: Handle, end: Handle) = event(start, |device, start| {
        let end = device.streams.find_event(end as usize)?.time(device)?;
        put(out, end.saturating_sub(start.time(device)?))
    });

    /// To the device 0, to the host 1, inside the device 2.
    fn synMemCopyAsync(on: Handle, src: u64, size: u64, dst: u64, direction: c_int) =
        copy(on, core::iter::once(Ok((src, size, dst))), direction);

    fn synMemsetD8Async(dst: u64, value: u8, count: usize, on: Handle) =
        fill(on, dst, u32::from(value) * 0x0101_0101, Some(count as u64));

    fn synMemsetD16Async(dst: u64, value: u16, count: usize, on: Handle) =
        fill(on, dst, u32::from(value) * 0x0001_0001, (count as u64).checked_mul(2));

    fn synMemsetD32Async(dst: u64, value: u32, count: usize, on: Handle) =
        fill(on, dst, value, (count as u64).checked_mul(4));

    fn synStatusGetBriefDescription(status: c_int, out: *mut c_char, len: usize) =
        guard(|| put_text(out, c_int::try_from(len).unwrap_or(c_int::MAX), describe(status)));

    /// Since release 1.21.
    fn synGetErrorString(status: c_int) -> *const c_char = describe(status).as_ptr();
}
