//! The bindings on the software Gaudi2: lifetimes, errno, submission and sharing.

mod machine;

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, PoisonError};

use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, ControlDevice, Device, DeviceAddr, DeviceMemory, Direction, DmaBuf,
    Error, ExportCall, Generation, HostMapping, HostPages, HwBlock, ImportedMapping, Library,
    WaitStatus,
};

/// Failures in drops are recorded once per process: for tests that look at the record.
static RECORD: Mutex<()> = Mutex::new(());

const PAGE: u64 = 768 << 20;

fn library() -> &'static Arc<Library> {
    machine::library("gaudi2")
}

/// Host memory the device can use, with bytes in it.
struct Mapped {
    mapping: HostMapping,
    pages: HostPages,
}

impl Mapped {
    fn new(device: &Device, bytes: &[u8]) -> Self {
        let pages = HostPages::new(bytes.len()).unwrap();
        // SAFETY: the pages are new, and are stored with the mapping.
        let mapping = unsafe {
            pages.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            HostMapping::new(device, pages.as_ptr(), bytes.len() as u64).unwrap()
        };
        Self { mapping, pages }
    }

    fn bytes(&self, len: usize) -> Vec<u8> {
        // SAFETY: ours, and the device is done with it.
        unsafe { std::slice::from_raw_parts(self.pages.as_ptr(), len) }.to_vec()
    }
}

/// Runs packets as one submission on the first queue of a direction and waits for it.
fn run(device: &Device, direction: Direction, moves: &[LinDma]) -> Result<(), Error> {
    let buffer = CommandBuffer::new(device, 4096)?;
    let packets = moves.iter().enumerate().flat_map(|(at, dma)| {
        dma.encode(device.generation(), &moves[..at]).expect("this generation has packets")
    });
    let packets: Vec<u8> = packets.collect();
    let queue = device.generation().queues(direction)[0];
    // An offset that is not zero, as the engine uses them.
    let offset = 512;
    // SAFETY: everything named is kept by the caller until the wait has returned.
    let sequence = unsafe {
        buffer.write(offset, &packets);
        device.submit(Chunk { buffer: &buffer, offset, len: packets.len(), queue })?
    };
    while device.wait(sequence, 1_000_000)? == WaitStatus::Busy {}
    Ok(())
}

fn copy(device: &Device, direction: Direction, dst: DeviceAddr, src: DeviceAddr, len: u32) {
    run(device, direction, &[LinDma::Copy { src, dst, len }]).unwrap();
}

#[test]
fn control_nodes_answer_without_taking_the_card() {
    let bus_id = machine::fresh(library());
    let device = Device::open(library(), &bus_id).unwrap();
    assert_eq!(device.bus_id().unwrap(), bus_id);
    assert_eq!(device.generation(), Generation::Gaudi2);
    for index in 0..64 {
        let control = ControlDevice::open(library(), index).unwrap();
        if control.bus_id().unwrap() == bus_id {
            let hw = control.hw_info().unwrap();
            assert_eq!(hw.dram_page_size, PAGE);
            assert_eq!(hw.module_id, device.hw_info().module_id);
        }
    }
    assert_eq!(library().device_count().unwrap().unwrap(), 64);
    assert!(library().version().unwrap().contains("soft-gaudi"));
}

#[test]
fn a_second_opening_is_busy_until_everything_made_from_the_first_is_gone() {
    let bus_id = machine::fresh(library());
    let busy = || Device::open(library(), &bus_id).map(drop).unwrap_err();
    let device = Device::open(library(), &bus_id).unwrap();
    assert_eq!(busy(), Error { call: "hlthunk_open", errno: libc::EBUSY });
    let memory = DeviceMemory::alloc(&device, 1).unwrap();
    let mapping = Arc::new(memory.map(None).unwrap());
    let dmabuf = DmaBuf::export(&mapping, 0, 4096, ExportCall::best(library())).unwrap();
    drop((device, memory, mapping));
    assert_eq!(busy().errno, libc::EBUSY, "the dma-buf keeps mapping, memory and card");
    drop(dmabuf);
    Device::open(library(), &bus_id).expect("closed in the right order");
}

#[test]
fn unknown_cards_are_refused_with_the_drivers_errno() {
    let unknown = Device::open(library(), "0000:ff:1f.7").unwrap_err();
    assert_eq!(unknown, Error { call: "hlthunk_open", errno: libc::EINVAL });
    let error = Device::open(library(), "nul\0byte").unwrap_err();
    assert_eq!(error.errno, libc::EINVAL);
    assert!(ControlDevice::open(library(), 200).is_err());
}

#[test]
fn bytes_go_down_across_and_up_again() {
    let device = machine::open(library());
    let memory = DeviceMemory::alloc(&device, PAGE).unwrap();
    let hint = DeviceAddr(0x1001_6000_0000_0000 + (PAGE - 0x6000_0000_0000 % PAGE));
    let mapping = memory.map(Some(hint)).unwrap();
    assert_eq!(mapping.addr(), hint, "an aligned hint is honoured");
    let sent: Vec<u8> = (0..10_000).map(|at| (at * 7 / 3) as u8).collect();
    let down = Mapped::new(&device, &sent);
    let up = Mapped::new(&device, &[0; 10_000]);
    let (first, second) = (mapping.addr(), DeviceAddr(mapping.addr().0 + 123_457));
    copy(&device, Direction::HostToDevice, first, down.mapping.addr(), 10_000);
    copy(&device, Direction::DeviceToDevice, second, first, 10_000);
    copy(&device, Direction::DeviceToHost, up.mapping.addr(), second, 10_000);
    assert_eq!(up.bytes(10_000), sent);
    let fill = LinDma::Fill { dst: DeviceAddr(second.0 + 1), len: 9_998, byte: 0xa7 };
    run(&device, Direction::DeviceToDevice, &[fill]).unwrap();
    copy(&device, Direction::DeviceToHost, up.mapping.addr(), second, 10_000);
    let bytes = up.bytes(10_000);
    assert_eq!((bytes[0], bytes[9_999]), (sent[0], sent[9_999]));
    assert!(bytes[1..9_999].iter().all(|&byte| byte == 0xa7));
}

/// The card does packets of a submission in any order unless a barrier is between them.
#[test]
fn moves_of_one_submission_that_overlap_are_done_in_order() {
    let device = machine::open(library());
    let memory = DeviceMemory::alloc(&device, 1).unwrap().map(None).unwrap();
    let up = Mapped::new(&device, &[0; 400]);
    let at = |offset| DeviceAddr(memory.addr().0 + offset);
    let fill = |offset, len, byte| LinDma::Fill { dst: at(offset), len, byte };
    let copy = |from, to, len| LinDma::Copy { src: at(from), dst: at(to), len };
    let moves = [
        fill(0, 400, 1),
        // What was just written is read.
        fill(0, 50, 2),
        copy(0, 100, 100),
        // What is read next is written afterwards.
        copy(100, 200, 100),
        fill(100, 100, 3),
        // Written twice, and nothing to do with the last but one.
        fill(300, 60, 4),
        fill(340, 60, 5),
    ];
    run(&device, Direction::DeviceToDevice, &moves).unwrap();
    let to_host = LinDma::Copy { src: at(0), dst: up.mapping.addr(), len: 400 };
    run(&device, Direction::DeviceToHost, &[to_host]).unwrap();
    let runs = [(2, 50), (1, 50), (3, 100), (2, 50), (1, 50), (4, 40), (5, 60)];
    let expected: Vec<u8> = runs.iter().flat_map(|(byte, len)| vec![*byte; *len]).collect();
    assert_eq!(up.bytes(400), expected);
}

#[test]
fn read_only_memory_cannot_be_pinned() {
    static CONSTANT: [u8; 5000] = [1; 5000];
    let device = machine::open(library());
    // SAFETY: a constant lives for ever.
    let error = unsafe { HostMapping::new(&device, CONSTANT.as_ptr().cast_mut(), 5000) };
    assert_eq!(error.unwrap_err(), Error { call: "hlthunk_host_memory_map", errno: libc::EFAULT });
}

#[test]
fn wrong_submissions_are_refused_before_or_by_the_driver() {
    let device = machine::open(library());
    let buffer = CommandBuffer::new(&device, 4096).unwrap();
    let submit = |offset, len, queue| {
        // SAFETY: no packets: nothing can be touched.
        unsafe { device.submit(Chunk { buffer: &buffer, offset, len, queue }) }
    };
    let einval = Err(Error { call: "hlthunk_command_submission", errno: libc::EINVAL });
    assert_eq!(submit(4000, 200, 0), einval, "beyond the buffer");
    assert_eq!(submit(0, 8, 2), einval, "a queue of the firmware's");
    assert_eq!(device.wait(1 << 40, 0).unwrap_err().errno, libc::EINVAL, "never submitted");
}

#[test]
fn a_mapping_with_an_export_abroad_is_given_back_and_a_drop_is_recorded() {
    let _record = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
    let device = machine::open(library());
    let memory = DeviceMemory::alloc(&device, 1).unwrap();
    let mapping = Arc::new(memory.map(None).unwrap());
    let dmabuf = DmaBuf::export(&mapping, 4096, 8192, ExportCall::Mapped).unwrap();
    assert_eq!(dmabuf.len(), 8192);
    let abroad = dmabuf.as_fd().try_clone_to_owned().unwrap();
    drop(dmabuf);
    let mapping = Arc::into_inner(mapping).unwrap();
    let (mapping, error) = mapping.unmap().unwrap_err();
    assert_eq!(error, Error { call: "hlthunk_memory_unmap", errno: libc::EINVAL });
    drop(library().take_drop_errors());
    drop((mapping, memory));
    let errors = library().take_drop_errors();
    let calls: Vec<_> = errors.iter().map(|error| (error.call, error.errno)).collect();
    assert_eq!(
        calls,
        [("hlthunk_memory_unmap", libc::EINVAL), ("hlthunk_device_memory_free", libc::EINVAL)]
    );
    drop(abroad);
}

#[test]
fn a_mapping_with_an_export_abroad_is_left_only_to_a_driver_that_will_take_it() {
    let _record = RECORD.lock().unwrap_or_else(PoisonError::into_inner);
    for own in [true, false] {
        let opened = machine::open(library());
        let device = match own {
            true => opened.clone(),
            false => Device::from_opened(library(), opened.as_fd().try_clone_to_owned().unwrap())
                .unwrap(),
        };
        let mapping = Arc::new(DeviceMemory::alloc(&device, 1).unwrap().map(None).unwrap());
        let dmabuf = DmaBuf::export(&mapping, 0, 4096, ExportCall::Mapped).unwrap();
        let abroad = dmabuf.as_fd().try_clone_to_owned().unwrap();
        drop(dmabuf);
        drop(library().take_drop_errors());
        Arc::into_inner(mapping).unwrap().leave();
        let errors = library().take_drop_errors();
        assert_eq!(errors.is_empty(), own, "{errors:?}");
        drop(abroad);
    }
}

#[test]
fn the_older_export_call_has_no_offset() {
    let device = machine::open(library());
    let mapping = Arc::new(DeviceMemory::alloc(&device, 1).unwrap().map(None).unwrap());
    DmaBuf::export(&mapping, 0, 4096, ExportCall::Whole).unwrap();
    let error = DmaBuf::export(&mapping, 4096, 4096, ExportCall::Whole).unwrap_err();
    assert_eq!(error.errno, libc::EINVAL);
    let physical = DmaBuf::export_physical(&device, mapping.addr(), 4096).unwrap_err();
    assert_eq!(physical.errno, libc::EOPNOTSUPP);
}

#[test]
fn an_imported_dmabuf_is_copied_like_host_memory() {
    let (exporter, importer) = (machine::open(library()), machine::open(library()));
    assert!(ImportedMapping::supported(&importer).unwrap());
    let mapping = Arc::new(DeviceMemory::alloc(&exporter, 1).unwrap().map(None).unwrap());
    let sent: Vec<u8> = (0..8192).map(|at| (at * 5 / 3) as u8).collect();
    let down = Mapped::new(&exporter, &sent);
    let theirs = DeviceAddr(mapping.addr().0 + 4096);
    copy(&exporter, Direction::HostToDevice, theirs, down.mapping.addr(), 8192);
    let dmabuf = DmaBuf::export(&mapping, 4096, 8192, ExportCall::best(library())).unwrap();
    let import = ImportedMapping::new(&importer, dmabuf.as_fd(), 8192).unwrap();
    drop(dmabuf);
    let ours = DeviceMemory::alloc(&importer, 1).unwrap().map(None).unwrap();
    copy(&importer, Direction::HostToDevice, ours.addr(), import.addr(), 8192);
    let up = Mapped::new(&importer, &[0; 8192]);
    copy(&importer, Direction::DeviceToHost, up.mapping.addr(), ours.addr(), 8192);
    assert_eq!(up.bytes(8192), sent);
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(ImportedMapping::new(&importer, file.as_fd(), 4096).is_err());
}

/// Globals of a sync manager: on the driver's list.
const BLOCK: DeviceAddr = DeviceAddr(0x1000_007f_fc31_e000);

#[test]
fn a_register_block_on_the_drivers_list_is_mapped_until_dropped() {
    let library = library();
    let bus_id = machine::fresh(library);
    let device = Device::open(library, &bus_id).unwrap();
    // Inside it, and the same of dcore 0, which is the kernel's.
    for address in [BLOCK.0 + 4, 0x1000_007f_fc11_e000, 0] {
        let other = HwBlock::map(&device, DeviceAddr(address)).unwrap_err();
        assert_eq!((other.call, other.errno), ("hlthunk_get_hw_block", libc::EINVAL));
    }
    let block = HwBlock::map(&device, BLOCK).unwrap();
    assert_eq!((block.len(), block.address()), (4096, BLOCK));
    let words: Vec<u8> =
        (0..16).step_by(4).flat_map(|at| block.read(at).unwrap().to_le_bytes()).collect();
    assert_eq!(words, b"software Gaudi  ", "it cannot be mistaken for hardware");
    // SAFETY: only memory stands behind these registers.
    unsafe {
        assert_eq!(block.write(4092, 7), Some(()));
        assert_eq!(block.write(4096, 7), None);
    }
    assert_eq!((block.read(4092), block.read(64), block.read(4094)), (Some(7), Some(0), None));
    let again = HwBlock::map(&device, BLOCK).unwrap();
    assert_eq!(again.read(4092), Some(7), "the same registers");
    let neighbour = HwBlock::map(&device, DeviceAddr(BLOCK.0 + 0x20_0000)).unwrap();
    assert_eq!(neighbour.read(4092), Some(0), "another dcore's");

    // The mapping keeps the card, and lets it go; the next owner finds nothing of it.
    drop((device, again, neighbour));
    assert_eq!(Device::open(library, &bus_id).unwrap_err().errno, libc::EBUSY);
    drop(block);
    let device = Device::open(library, &bus_id).unwrap();
    assert_eq!(HwBlock::map(&device, BLOCK).unwrap().read(4092), Some(0));
}
