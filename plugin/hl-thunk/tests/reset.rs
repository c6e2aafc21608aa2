//! A device that hangs on a wrong address, in a program of its own: the driver gives up, resets it
//! and refuses everything until it is opened again.

mod machine;

use std::sync::Arc;

use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, Device, DeviceAddr, DeviceMemory, HostMapping, HostPages, Library,
};

fn library() -> &'static Arc<Library> {
    // SAFETY: before the library is loaded; this program has one test.
    unsafe { std::env::set_var("SOFT_GAUDI_CS_TIMEOUT", "200") };
    machine::library("gaudi2")
}

#[test]
fn a_copy_from_nowhere_times_out_and_the_card_can_be_opened_again() {
    let bus_id = machine::fresh(library());
    let device = Device::open(library(), &bus_id).unwrap();
    let mapping = DeviceMemory::alloc(&device, 1).unwrap().map(None).unwrap();
    let buffer = CommandBuffer::new(&device, 4096).unwrap();
    let nowhere = DeviceAddr(0xfff0_1234_0000_0000);
    let dma = LinDma::Copy { src: nowhere, dst: mapping.addr(), len: 64 };
    let packet = dma.encode(device.generation(), &[]).unwrap();
    let chunk = Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue: 0 };
    // SAFETY: the wrong address is the point: the device faults, nothing is touched.
    let sequence = unsafe {
        buffer.write(0, &packet);
        device.submit(chunk).unwrap()
    };
    let error = loop {
        if let Err(error) = device.wait(sequence, 1_000_000) {
            break error;
        }
    };
    assert!(matches!(error.errno, libc::ETIMEDOUT | libc::EIO), "{error}");
    // SAFETY: as above.
    let refused = unsafe { device.submit(chunk) }.unwrap_err();
    assert_eq!(refused.errno, libc::EBUSY, "{refused}");
    let pages = HostPages::new(4096).unwrap();
    // SAFETY: the pages outlive the attempt.
    let refused = unsafe { HostMapping::new(&device, pages.as_ptr(), 4096) }.unwrap_err();
    assert_eq!(refused.errno, libc::EBUSY, "{refused}");
    drop((buffer, mapping, device));
    let again = loop {
        match Device::open(library(), &bus_id) {
            Ok(device) => break device,
            Err(error) => assert_eq!(error.errno, libc::EAGAIN, "{error}"),
        }
    };
    DeviceMemory::alloc(&again, 1).unwrap();
}
