//! A card through its driver library alone: submits packets and waits for them, with only our binding in between. The
//! floor of copies.

use anyhow::{Context, Result, bail};
use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, ControlDevice, Device, DeviceAddr, DeviceMapping, DeviceMemory,
    Direction, HostMapping, HostPages, Library, WaitStatus,
};

/// A card of our own, with copies ready to be submitted.
pub(super) struct Driver {
    // Fields are in the order in which they must be dropped.
    buffer: CommandBuffer,
    _host: HostMapping,
    _pages: HostPages,
    _memory: Option<DeviceMapping>,
    device: Device,
    /// Bytes of a packet.
    packet: usize,
    queues: Vec<u32>,
}

/// Space for a packet.
const SLOT: usize = 64;

impl Driver {
    /// Opens the first free card, with `set` bytes on the host and on the card, and prepares copies of `len` bytes at
    /// the same offset on both.
    pub(super) fn open(set: usize, copies: &[(Direction, usize)], len: u32) -> Result<Driver> {
        let library = Library::load().context("no driver library")?;
        let count = library.device_count().and_then(Result::ok).unwrap_or(8);
        for index in 0..count.max(1) {
            let bus_id = ControlDevice::open(&library, index).and_then(|node| node.bus_id());
            if let Ok(device) = bus_id.and_then(|bus_id| Device::open(&library, &bus_id)) {
                return Driver::on(device, set, copies, len);
            }
        }
        bail!("no card is free for the driver's own time (one is in use by UCX)")
    }

    fn on(device: Device, set: usize, copies: &[(Direction, usize)], len: u32) -> Result<Driver> {
        let generation = device.generation();
        let (memory, card) = if generation.has_dram_mmu() {
            let memory = DeviceMemory::alloc(&device, set as u64)?.map(None)?;
            let addr = memory.addr();
            (Some(memory), addr)
        } else {
            (None, DeviceAddr(device.hw_info().dram_base_address))
        };
        let pages = HostPages::new(set)?;
        // SAFETY: fresh memory of this length, ours alone.
        unsafe { pages.as_ptr().write_bytes(1, set) };
        // SAFETY: the pages are stored with the mapping, and outlive it.
        let host = unsafe { HostMapping::new(&device, pages.as_ptr(), pages.len() as u64)? };
        let bytes = (copies.len() * SLOT).next_multiple_of(4096);
        let buffer = CommandBuffer::new(&device, bytes as u32)?;
        let (mut packet, mut queues) = (0, Vec::new());
        for (n, (direction, offset)) in copies.iter().enumerate() {
            let (there, here) =
                (DeviceAddr(card.0 + *offset as u64), DeviceAddr(host.addr().0 + *offset as u64));
            let (src, dst) =
                if *direction == Direction::DeviceToHost { (there, here) } else { (here, there) };
            let bytes = LinDma::Copy { src, dst, len }.encode(generation, &[]);
            let bytes = bytes.context("this card takes no packets")?;
            // SAFETY: nothing was submitted yet.
            unsafe { buffer.write(n * SLOT, &bytes) };
            packet = bytes.len();
            queues.push(generation.queues(*direction)[0]);
        }
        Ok(Driver { buffer, _host: host, _pages: pages, _memory: memory, device, packet, queues })
    }

    /// Submits one of the copies.
    pub(super) fn submit(&self, n: usize) -> Result<u64> {
        let (offset, queue) = (n * SLOT, self.queues[n]);
        let chunk = Chunk { buffer: &self.buffer, offset, len: self.packet, queue };
        // SAFETY: this value keeps everything that the packet names until the device is closed.
        Ok(unsafe { self.device.submit(chunk)? })
    }

    pub(super) fn wait(&self, sequence: u64) -> Result<()> {
        while self.device.wait(sequence, 1_000_000)? == WaitStatus::Busy {}
        Ok(())
    }

    /// Submits one of the copies and waits for it.
    pub(super) fn copy(&self, n: usize) -> Result<()> {
        self.wait(self.submit(n)?)
    }
}
