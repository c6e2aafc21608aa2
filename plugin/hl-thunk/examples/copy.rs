//! Copies bytes to a card and back: `LD_LIBRARY_PATH=<folder of libhl-thunk.so> cargo run --example copy`.

use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, ControlDevice, Device, DeviceAddr, DeviceMemory, Direction, HostMapping,
    HostPages, Library, WaitStatus,
};

const LEN: u32 = 4096;

pub(crate) fn main() -> Result<(), Box<dyn std::error::Error>> {
    let library = Library::load()?;
    let bus_id = ControlDevice::open(&library, 0)?.bus_id()?;
    let card = Device::open(&library, &bus_id)?;
    println!("{} at {bus_id}", card.generation());

    let memory = DeviceMemory::alloc(&card, LEN.into())?.map(None)?;
    let host = HostPages::new(2 * LEN as usize)?;
    // SAFETY: fresh pages that live as long as the mapping, which is dropped before them.
    let pinned = unsafe { HostMapping::new(&card, host.as_ptr(), host.len() as u64)? };
    // SAFETY: no transfer is in flight, so nothing else writes there.
    unsafe { host.as_ptr().write_bytes(0x5a, LEN as usize) };

    let there = memory.addr();
    let back = DeviceAddr(pinned.addr().0 + u64::from(LEN));
    copy(&card, Direction::HostToDevice, pinned.addr(), there)?;
    copy(&card, Direction::DeviceToHost, there, back)?;

    // SAFETY: both transfers have ended.
    let bytes = unsafe { std::slice::from_raw_parts(host.as_ptr(), host.len()) };
    assert!(bytes.iter().all(|byte| *byte == 0x5a));
    println!("{LEN} bytes went there and came back");
    Ok(())
}

fn copy(
    card: &Device,
    direction: Direction,
    src: DeviceAddr,
    dst: DeviceAddr,
) -> Result<(), Box<dyn std::error::Error>> {
    let packet =
        LinDma::Copy { src, dst, len: LEN }.encode(card.generation(), &[]).ok_or("no packet")?;
    let queue = *card.generation().queues(direction).first().ok_or("no queue")?;
    let buffer = CommandBuffer::new(card, 4096)?;
    // SAFETY: the buffer is new, so no submission reads it.
    unsafe { buffer.write(0, &packet) };
    let chunk = Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue };
    // SAFETY: both addresses are mapped for `LEN` bytes until the submission has ended.
    let sequence = unsafe { card.submit(chunk)? };
    while card.wait(sequence, 1_000_000)? == WaitStatus::Busy {}
    Ok(())
}
