//! The bindings on the software Gaudi of the first generation: kernel command buffers and physical
//! addresses.

mod machine;

use std::sync::Arc;

use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, Device, DeviceAddr, DeviceMemory, DmaBuf, Generation, HostMapping,
    HostPages, HwBlock, Library, WaitStatus,
};

fn library() -> &'static Arc<Library> {
    machine::library("gaudi1")
}

#[test]
fn there_is_no_allocator_and_the_errno_says_so() {
    let device = machine::open(library());
    assert_eq!(device.generation(), Generation::Gaudi);
    assert!(!device.generation().has_dram_mmu());
    assert_eq!(DeviceMemory::alloc(&device, 4096).unwrap_err().errno, libc::EOPNOTSUPP);
    let base = DeviceAddr(device.hw_info().dram_base_address);
    assert_eq!(DmaBuf::export_physical(&device, base, 8192).unwrap().len(), 8192);
    assert!(DmaBuf::export_physical(&device, DeviceAddr(0), 8192).is_err(), "below user memory");
}

#[test]
fn a_kernel_command_buffer_copies_down_and_up() {
    let device = machine::open(library());
    let base = DeviceAddr(device.hw_info().dram_base_address + 12_345);
    let pages = HostPages::new(8192).unwrap();
    // SAFETY: the pages are ours and outlive the mapping.
    let mapping = unsafe {
        for at in 0..4000 {
            pages.as_ptr().add(at).write((at * 3 / 2) as u8);
        }
        HostMapping::new(&device, pages.as_ptr(), 8192).unwrap()
    };
    let up = DeviceAddr(mapping.addr().0 + 4096);
    let moves = [
        (0, LinDma::Copy { src: mapping.addr(), dst: base, len: 4000 }),
        (4, LinDma::Copy { src: base, dst: up, len: 4000 }),
    ];
    for (queue, dma) in moves {
        let buffer = CommandBuffer::new(&device, 100).unwrap();
        assert_eq!(buffer.len(), 4096, "whole pages");
        let packet = dma.encode(Generation::Gaudi, &[]).unwrap();
        let chunk = Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue };
        // SAFETY: memory and buffer live until the wait has returned.
        let sequence = unsafe {
            buffer.write(0, &packet);
            device.submit(chunk).unwrap()
        };
        while device.wait(sequence, 1_000_000).unwrap() == WaitStatus::Busy {}
        // SAFETY: as above.
        let error = unsafe { device.submit(Chunk { offset: 8, len: 8, ..chunk }) };
        assert_eq!(error.unwrap_err().errno, libc::EINVAL, "kernel buffers start at their start");
    }
    // SAFETY: ours, and the device is done with it.
    let (sent, received) = unsafe {
        let all = std::slice::from_raw_parts(pages.as_ptr(), 8192);
        (&all[..4000], &all[4096..8096])
    };
    assert_eq!(sent, received);
    drop(mapping);
}

#[test]
fn an_unmapped_command_buffer_does_not_keep_the_card() {
    let bus_id = machine::fresh(library());
    let device = Device::open(library(), &bus_id).unwrap();
    let buffer = CommandBuffer::new(&device, 4096).unwrap();
    drop(device);
    assert_eq!(Device::open(library(), &bus_id).unwrap_err().errno, libc::EBUSY);
    drop(buffer);
    Device::open(library(), &bus_id).expect("mapping and buffer are gone");
}

#[test]
fn no_register_block_is_mappable_and_the_errno_says_so() {
    let device = machine::open(library());
    let error = HwBlock::map(&device, DeviceAddr(0x7f_fc00_0000)).unwrap_err();
    assert_eq!((error.call, error.errno), ("hlthunk_get_hw_block", libc::EPERM));
}
