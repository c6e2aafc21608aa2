//! The floor of a short copy: one packet handed to the driver library and waited for, with nothing
//! of ours in between but the binding.

use anyhow::{Context, Result, bail};
use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, ControlDevice, Device, DeviceAddr, DeviceMapping, DeviceMemory,
    Direction, HostMapping, HostPages, Library, WaitStatus,
};

/// A card of our own, with a packet ready for each way.
pub(super) struct Driver {
    // In the order in which they have to go.
    buffer: CommandBuffer,
    _host: HostMapping,
    _pages: HostPages,
    _memory: Option<DeviceMapping>,
    device: Device,
    len: usize,
    queues: [u32; 2],
}

/// Where the packets of the two ways start.
const OFFSETS: [usize; 2] = [0, 2048];

impl Driver {
    /// The first card that is free. `bytes` is the length of the copies.
    pub(super) fn open(bytes: u32) -> Result<Driver> {
        let library = Library::load().context("no driver library")?;
        let count = library.device_count().and_then(Result::ok).unwrap_or(8);
        for index in 0..count.max(1) {
            let bus_id = ControlDevice::open(&library, index).and_then(|node| node.bus_id());
            if let Ok(device) = bus_id.and_then(|bus_id| Device::open(&library, &bus_id)) {
                return Driver::on(device, bytes);
            }
        }
        bail!("no card is free for the driver's own time (one is in use by UCX)")
    }

    fn on(device: Device, bytes: u32) -> Result<Driver> {
        let generation = device.generation();
        let (memory, addr) = if generation.has_dram_mmu() {
            let memory = DeviceMemory::alloc(&device, 4096)?.map(None)?;
            let addr = memory.addr();
            (Some(memory), addr)
        } else {
            (None, DeviceAddr(device.hw_info().dram_base_address))
        };
        let pages = HostPages::new(4096)?;
        // SAFETY: the pages are kept beside the mapping, and outlive it.
        let host = unsafe { HostMapping::new(&device, pages.as_ptr(), pages.len() as u64)? };
        let buffer = CommandBuffer::new(&device, 4096)?;
        let (there, back) = (
            LinDma::Copy { src: host.addr(), dst: addr, len: bytes },
            LinDma::Copy { src: addr, dst: host.addr(), len: bytes },
        );
        let mut len = 0;
        for (dma, at) in [there, back].into_iter().zip(OFFSETS) {
            let packet = dma.encode(generation).context("this card takes no packets")?;
            // SAFETY: nothing was submitted yet.
            unsafe { buffer.write(at, &packet) };
            len = packet.len();
        }
        let queues = [Direction::HostToDevice, Direction::DeviceToHost]
            .map(|direction| generation.queues(direction)[0]);
        Ok(Driver { buffer, _host: host, _pages: pages, _memory: memory, device, len, queues })
    }

    /// Submits one copy (0: to the card, 1: from it) and waits for it.
    pub(super) fn copy(&self, way: usize) -> Result<()> {
        let (offset, queue) = (OFFSETS[way], self.queues[way]);
        let chunk = Chunk { buffer: &self.buffer, offset, len: self.len, queue };
        // SAFETY: everything the packet names is kept here, and the copy is waited for.
        let sequence = unsafe { self.device.submit(&[chunk])? };
        while self.device.wait(sequence, 1_000_000)? == WaitStatus::Busy {}
        Ok(())
    }
}
