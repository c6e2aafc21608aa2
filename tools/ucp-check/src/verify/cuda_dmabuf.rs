//! `cuda-dmabuf`: what can be done with a dma-buf that the CUDA driver exports, on a machine with a Gaudi.
//!
//! The CPU cannot map GPU memory through its dma-buf. So the software Gaudi, which moves bytes with the CPU, must
//! refuse the dma-buf and keep working. The driver of a card that imports may accept it: then this check says so.

use crate::cuda::Cuda;
use anyhow::{Context, Result, ensure};
use hl_thunk::{ControlDevice, Device, DeviceMemory, ImportedMapping, Library};
use rustix::fs::SeekFrom;
use rustix::mm::{MapFlags, ProtFlags};
use std::os::fd::AsFd;

const LENGTH: usize = 2 << 20;

pub fn run() -> Result<()> {
    let memory = match Cuda::get() {
        Ok(cuda) => cuda.allocate(LENGTH)?,
        Err(error) => {
            println!("skipped: {error:#}");
            return Ok(());
        }
    };
    let dmabuf = match memory.dma_buf(LENGTH) {
        Ok(dmabuf) => dmabuf,
        Err(error) => {
            println!("skipped: CUDA exports no dma-buf here ({error:#})");
            return Ok(());
        }
    };
    println!("size: {:?} bytes", rustix::fs::seek(&dmabuf, SeekFrom::End(0)));
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a fresh mapping at an address of the kernel's choice; never read or written.
    let mapped = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), LENGTH, access, MapFlags::SHARED, &dmabuf, 0)
    };
    println!("mmap: {}", mapped.map_or_else(|errno| errno.to_string(), |_| "mapped".into()));

    let library = Library::load().context("no driver library of a Gaudi")?;
    let bus_id = ControlDevice::open(&library, 0)?.bus_id()?;
    let device = Device::open(&library, &bus_id)?;
    ensure!(ImportedMapping::supported(&device)?, "this Gaudi's driver imports no dma-bufs");
    let imported = ImportedMapping::new(&device, dmabuf.as_fd(), LENGTH as u64);
    match &imported {
        Ok(mapping) => println!("import by the Gaudi: mapped at {:#x}", mapping.addr().0),
        Err(error) => println!("import by the Gaudi: refused, {error}"),
    }
    drop(imported);
    let own = DeviceMemory::alloc(&device, 4096)?.map(None)?;
    println!("the Gaudi works on: memory at {:#x}", own.addr().0);
    Ok(())
}
