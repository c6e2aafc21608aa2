//! The card driven as the kernel's driver drives it, without a virtual machine: registers, descriptors in guest
//! memory, interrupts on eventfds.

use std::os::fd::{AsFd, OwnedFd};
use std::thread;
use std::time::{Duration, Instant};

use pci_gaudi::card::{Card, Options, View};
use pci_gaudi::registers::{self as reg, core, cpu, psoc, qman, router, stlb};
use pci_gaudi::vfio_user::Irqs;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const GUEST: u64 = 16 << 20;
/// Places in guest memory.
const RING: u64 = 0x10_0000;
const BUFFER: u64 = 0x20_0000;
const DATA: u64 = 0x30_0000;
const COMPLETIONS: u64 = 0x40_0000;
const DOORBELL: u64 = 0x50_0000;
const TABLES: u64 = 0x60_0000;

const PDMA: u32 = 0x4c8_a000;
const HOST_STLB: u32 = 0x4d0_1000;
/// A user's address of [`BUFFER`].
const MAPPED: u64 = 0xfff0_0001_0020_0000;
const PHYSICAL: View = View::Physical;

fn guest_memory() -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&fd, GUEST).unwrap();
    fd
}

/// Runs `test` beside an engine thread.
fn with_card(test: impl FnOnce(&Card)) {
    let card = Card::new(Options::default()).unwrap();
    card.guest.map(0, GUEST, Some((guest_memory(), 0))).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| card.queues.work(&card));
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| test(&card)));
        card.queues.end();
        if let Err(panic) = ended {
            std::panic::resume_unwind(panic);
        }
    });
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what} did not come");
        thread::sleep(Duration::from_millis(1));
    }
}

/// A vector's eventfd.
fn vector(card: &Card, number: u32) -> OwnedFd {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    card.interrupts.set(Irqs::Eventfds(number, vec![fd.as_fd().try_clone_to_owned().unwrap()]));
    fd
}

fn raised(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

/// Sets stream 0 of the first PDMA up as the driver does, with completions to sync object 5, and monitor 5 on
/// completion queue 0, which raises vector 21.
fn set_up(card: &Card, protection: u32) {
    let write = |register, value| card.write_register(register, value);
    write(PDMA + qman::ENABLE, 0x7ff3);
    write(PDMA + qman::PQ_BASE_LO, RING as u32);
    write(PDMA + qman::PQ_SIZE, 12);
    write(PDMA + qman::PROT, protection);
    write(PDMA + qman::ASID, 0x0001_0001);
    write(PDMA + 0x1000 + core::ASID, 0x0001_0001);
    let objects = reg::CFG + u64::from(reg::sync(0));
    write(PDMA + qman::COMPLETION_DATA, 0x8000_0001);
    write(PDMA + qman::COMPLETION_LO, objects as u32);
    write(PDMA + qman::COMPLETION_HI, (objects >> 32) as u32);
    write(PDMA + qman::COMPLETION_ENABLE, 1);
    card.set_doorbell(DOORBELL);
    let sync = reg::sync(0);
    for (register, value) in [
        // Completion queue 0: where, how long, whom to interrupt.
        (0x1_e050, COMPLETIONS as u32),
        (0x1_e250, 14),
        (0x1_e550, DOORBELL as u32),
        (0x1_e750, 21),
        // Monitor 5: on queue 0, when sync object 5 is 1.
        (0x8000 + 20, 0),
        (0xc000 + 20, 0xc000_0005),
        (0x1_0000 + 20, 0x110),
        (0xe000 + 20, !(1 << 5) << 8 & 0xff00 | 1 << 16 | 1 << 17),
    ] {
        write(sync + register, value);
    }
}

/// Submits packets at an address as job 5.
fn submit(card: &Card, at: u64, packets: &[u32]) {
    let bytes: Vec<u8> = packets.iter().flat_map(|word| word.to_le_bytes()).collect();
    card.guest.write(BUFFER, &bytes).unwrap();
    let mut descriptor = at.to_le_bytes().to_vec();
    descriptor.extend((bytes.len() as u32).to_le_bytes());
    descriptor.extend((5u32 << 16).to_le_bytes());
    card.guest.write(RING, &descriptor).unwrap();
    card.write_register(PDMA + qman::PQ_PI, 1);
}

/// A copy.
fn lin_dma(size: u32, src: u64, dst: u64) -> [u32; 6] {
    [size, 0xa900_0000, src as u32, (src >> 32) as u32, dst as u32, (dst >> 32) as u32]
}

/// A message.
fn write_word(addr: u64, value: u32) -> [u32; 4] {
    [value, 0x8300_0000, addr as u32, (addr >> 32) as u32]
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|n| (n * 7 + n / 251) as u8).collect()
}

#[test]
fn a_trusted_descriptor_copies_to_hbm_reports_its_end_and_interrupts() {
    with_card(|card| {
        let interrupt = vector(card, 21);
        set_up(card, 0x1_5eff);
        // The core, too, must be told to use physical addresses.
        card.write_register(PDMA + 0x1000 + core::ASID, 0);
        let data = pattern(300_001);
        card.guest.write(DATA, &data).unwrap();
        let hbm = reg::HBM + 0x3000_0000 + 1;
        submit(card, BUFFER, &lin_dma(data.len() as u32, DATA, hbm));
        wait_until("the interrupt", || raised(&interrupt));
        let mut entry = [0; 4];
        card.guest.read(COMPLETIONS, &mut entry).unwrap();
        assert_eq!(u32::from_le_bytes(entry), 0xc000_0005);
        let mut around = vec![0xaa; data.len() + 2];
        card.read(PHYSICAL, hbm - 1, &mut around).unwrap();
        assert!(around[1..=data.len()] == data, "the bytes have arrived");
        assert_eq!((around[0], around[data.len() + 1]), (0, 0), "and no others");
        assert_eq!(card.read_register(PDMA + qman::PQ_CI), 1);
    });
}

/// Maps one host page of a user, through tables as the driver writes them.
fn map_user_page(card: &Card, addr: u64, page: u64) {
    let shifts = [57, 48, 39, 30, 21, 12];
    for (hop, shift) in shifts.into_iter().enumerate() {
        let index = addr >> shift & if shift == 57 { 0x7f } else { 0x1ff };
        let table = TABLES + 0x1000 * hop as u64;
        let entry = if shift == 12 { page | 0x801 } else { (table + 0x1000) | 1 };
        card.guest.write(table + 8 * index, &entry.to_le_bytes()).unwrap();
    }
    for (register, value) in [
        (stlb::ASID, 1),
        (stlb::HOP0_LOW, (TABLES >> 12) as u32),
        (stlb::HOP0_HIGH, 0),
        (stlb::BUSY, 1 << 31),
    ] {
        card.write_register(HOST_STLB + register, value);
    }
    assert_eq!(card.read_register(HOST_STLB + stlb::BUSY), 0);
}

#[test]
fn a_users_queue_reaches_mapped_pages_only() {
    with_card(|card| {
        let interrupt = vector(card, 21);
        set_up(card, 0x1_400f);
        map_user_page(card, MAPPED, BUFFER);
        // From the page of the packets itself to SRAM.
        submit(card, MAPPED, &lin_dma(24, MAPPED, reg::SRAM));
        wait_until("the interrupt", || raised(&interrupt));
        let mut copied = [0; 4];
        card.read(PHYSICAL, reg::SRAM, &mut copied).unwrap();
        assert_eq!(u32::from_le_bytes(copied), 24);
    });
    // The same with a physical address of the guest, with the next page, and with a register of the driver's.
    let message = write_word(reg::CFG + u64::from(psoc::HALT), 553);
    let copies = [lin_dma(24, DATA, reg::SRAM), lin_dma(24, MAPPED + 0x1000, reg::SRAM)];
    for packets in [&copies[0][..], &copies[1], &message] {
        with_card(|card| {
            let interrupt = vector(card, 21);
            set_up(card, 0x1_400f);
            map_user_page(card, MAPPED, BUFFER);
            card.write_register(cpu::QUEUE_INIT, 7);
            submit(card, MAPPED, packets);
            wait_until("the fault", || card.queues.has_stopped(PDMA, 0));
            assert!(!raised(&interrupt), "{packets:x?} came to an end");
            assert_eq!(card.read_register(PDMA + qman::PQ_CI), 0);
            assert_eq!(card.get(cpu::QUEUE_INIT), 7, "a user has reset the card");
        });
    }
}

/// Packets that have monitor `n` of a sync manager write 553 to HALT as soon as its sync object 8 is 1.
fn halt_by_monitor(dcore: usize, n: u32) -> Vec<u32> {
    let halt = reg::CFG + u64::from(psoc::HALT);
    let sync = reg::CFG + u64::from(reg::sync(dcore));
    let words = [
        (0x8000 + 4 * n, halt as u32),
        (0xa000 + 4 * n, (halt >> 32) as u32),
        (0xc000 + 4 * n, 553),
        (0x1_0000 + 4 * n, 0),
        (0xe000 + 4 * n, !1 << 8 & 0xff00 | 1 << 16 | 1),
        (4 * 8, 1),
    ];
    words.iter().flat_map(|(at, value)| write_word(sync + u64::from(*at), *value)).collect()
}

#[test]
fn monitors_do_not_reset_the_card() {
    // A user's monitor, and one of the driver's, which has physical addresses.
    for (dcore, n) in [(1, 100), (0, 6)] {
        with_card(|card| {
            let interrupt = vector(card, 21);
            set_up(card, 0x1_400f);
            map_user_page(card, MAPPED, BUFFER);
            card.write_register(cpu::QUEUE_INIT, 7);
            let before = card.log.unexpected_kinds();
            submit(card, MAPPED, &halt_by_monitor(dcore, n));
            wait_until("the end of the stream", || raised(&interrupt));
            assert_eq!(card.read_register(reg::sync(dcore) + 4 * 8), 1);
            assert_eq!(card.get(cpu::QUEUE_INIT), 7, "a monitor has reset the card");
            assert_eq!(card.log.unexpected_kinds(), before + 1, "the refusal is logged");
        });
    }
}

#[test]
fn a_trusted_stream_stops_when_it_writes_what_only_the_driver_may() {
    // The controller resets the card, and a consumer index restarts the stream: both wait for streams.
    for register in [psoc::HALT, PDMA + qman::PQ_CI] {
        with_card(|card| {
            set_up(card, 0x1_5eff);
            card.write_register(cpu::QUEUE_INIT, 7);
            submit(card, BUFFER, &write_word(reg::CFG + u64::from(register), 553));
            wait_until("the fault", || card.queues.has_stopped(PDMA, 0));
            assert_eq!(card.get(cpu::QUEUE_INIT), 7);
        });
    }
}

#[test]
fn a_fence_holds_a_stream_until_it_is_raised() {
    with_card(|card| {
        let interrupt = vector(card, 21);
        set_up(card, 0x1_5eff);
        // Fence 2 of this stream, target 1.
        submit(card, BUFFER, &[0x8001_0001, 0x8800_0000]);
        thread::sleep(Duration::from_millis(50));
        assert!(!raised(&interrupt));
        card.write_register(PDMA + qman::FENCE_RAISE + 40, 1);
        wait_until("the interrupt", || raised(&interrupt));
        assert_eq!(card.read_register(PDMA + qman::FENCE_COUNT + 40), 0);
    });
}

#[test]
fn a_queue_manager_that_is_stopped_or_disabled_fetches_nothing() {
    with_card(|card| {
        let interrupt = vector(card, 21);
        set_up(card, 0x1_5eff);
        for (register, off, on) in [(qman::ENABLE, 0, 0x7ff3), (qman::STOP, 0x3fff, 0)] {
            card.write_register(PDMA + register, off);
            submit(card, BUFFER, &[0, 0x0a00_0000]);
            thread::sleep(Duration::from_millis(50));
            assert!(!raised(&interrupt));
            card.write_register(PDMA + register, on);
            wait_until("the interrupt", || raised(&interrupt));
            card.write_register(PDMA + qman::ENABLE, 0);
            card.write_register(PDMA + qman::PQ_PI, 0);
            card.write_register(PDMA + qman::PQ_CI, 0);
            card.write_register(reg::sync(0) + 20, 0);
            set_up(card, 0x1_5eff);
        }
    });
}

#[test]
fn a_reset_by_the_driver_leaves_the_card_as_after_power_on() {
    with_card(|card| {
        set_up(card, 0x1_5eff);
        submit(card, BUFFER, &[0x8001_0001, 0x8800_0000]);
        card.write_register(reg::sync(0) + 4 * 7, 3);
        assert_eq!(card.read_register(reg::sync(0) + 4 * 7), 3);
        card.write_register(psoc::HALT, 553);
        assert_eq!(card.read_register(reg::sync(0) + 4 * 7), 0);
        assert_eq!(card.read_register(psoc::BOOT_STATUS), 16);
        assert_eq!(card.read_register(PDMA + qman::PQ_PI), 0);
        assert_eq!(card.read_register(PDMA + qman::IDLE[0]), u32::MAX);
    });
}

const EVENTS: u64 = 0x70_0000;

/// The next event of the driver's queue, after its interrupt.
fn event_of(card: &Card, cause: impl FnOnce(&Card)) -> u32 {
    let interrupt = vector(card, 0);
    set_up(card, 0x1_400f);
    map_user_page(card, MAPPED, BUFFER);
    card.set(cpu::EQ_BASE, EVENTS as u32);
    card.write_register(psoc::EVENTS, 554);
    cause(card);
    wait_until("the interrupt", || raised(&interrupt));
    let mut entry = [0; 8];
    card.guest.read(EVENTS, &mut entry).unwrap();
    let control = u32::from_le_bytes(entry[4..].try_into().unwrap());
    assert_eq!(control >> 31, 1, "ready");
    control >> 16 & 0xfff
}

#[test]
fn a_page_fault_is_reported_with_its_address() {
    with_card(|card| {
        let missing = 0xfff0_0001_2345_6000;
        assert_eq!(event_of(card, |card| submit(card, missing, &[0, 0x0a00_0000])), 520);
        let registers = [reg::mmu::FAULT_HIGH, reg::mmu::FAULT_LOW, reg::mmu::FAULT_VALID];
        let found = registers.map(|register| card.get(reg::mmu::HOST + register));
        assert_eq!(found, [0xfff0_0001, 0x2345_6000, 1]);
    });
}

#[test]
fn bytes_that_are_no_packet_are_reported_by_their_queue_manager() {
    with_card(|card| {
        assert_eq!(event_of(card, |card| submit(card, MAPPED, &[0, 0x1f00_0000])), 1244);
        assert_eq!(card.get(PDMA + qman::ERROR), qman::OPCODE_ERROR);
        assert_eq!(card.get(PDMA + qman::ERROR + 4), 0, "another stream");
    });
}

#[test]
fn a_register_that_users_may_not_write_is_reported_with_its_offset() {
    with_card(|card| {
        let message = write_word(reg::CFG + u64::from(psoc::HALT), 553);
        assert_eq!(event_of(card, |card| submit(card, MAPPED, &message)), 540);
        assert_eq!(card.get(PDMA + qman::ERROR), qman::REGISTER_ERROR);
        let [write, read] = router::REGISTER_VALID.map(|valid| card.get(router::REGISTER + valid));
        assert_eq!((write, read), (1, 0));
        assert_eq!(card.get(router::REGISTER + router::REGISTER_OFFSET[0]), psoc::HALT);
    });
}

/// One COMMS command, as the driver gives it; the status word at its end.
fn comms(card: &Card, command: u32, size: u32) -> u32 {
    let word = |command: u32| card.write_register(psoc::COMMS_COMMAND, command << 27 | size);
    let status = || card.read_register(psoc::COMMS_STATUS);
    word(1);
    assert_eq!(status() >> 28, 0);
    word(command);
    assert_eq!(status() >> 28, 1, "acknowledged");
    word(1);
    assert_eq!(status() >> 28, 0);
    word(0);
    status()
}

#[test]
fn the_boot_protocol_leads_from_preboot_to_running_firmware() {
    with_card(|card| {
        assert_eq!(comms(card, 2, 0) >> 28, 2);
        assert_eq!(comms(card, 3, 1280) >> 28, 2);
        let mut descriptor = vec![0; 1280];
        card.read(PHYSICAL, reg::SRAM, &mut descriptor).unwrap();
        assert_eq!(&descriptor[..4], &0x4843_444d_u32.to_le_bytes());
        for status in [15, 3] {
            assert_eq!(comms(card, 4, 0) >> 28, 2);
            comms(card, 5, 0);
            assert_eq!(card.read_register(psoc::BOOT_STATUS), status);
        }
        // Then its message queue, and one message: the test.
        card.set(cpu::PQ_BASE, RING as u32);
        card.set(cpu::QUEUE_INIT, 1);
        card.write_register(psoc::MESSAGE, 552);
        assert_eq!(card.get(cpu::QUEUE_INIT), 2);
        let mut packet = [0; 24];
        packet[8..12].copy_from_slice(&(18u32 << 16).to_le_bytes());
        card.guest.write(DATA, &packet).unwrap();
        let mut descriptor = DATA.to_le_bytes().to_vec();
        descriptor.extend(24u32.to_le_bytes());
        descriptor.extend(1u32.to_le_bytes());
        card.guest.write(RING, &descriptor).unwrap();
        card.set(cpu::PQ_PI, 1);
        card.write_register(psoc::MESSAGE, 552);
        card.guest.read(DATA, &mut packet).unwrap();
        assert_eq!(&packet[..4], &0xfe8c_e7a5_u32.to_le_bytes());
        assert_eq!(&packet[12..16], &1u32.to_le_bytes(), "the fence is the descriptor's word");
    });
}

#[test]
fn rings_and_indices_at_the_last_address_are_faults() {
    const ONES: u32 = u32::MAX;
    // A ring that ends behind the last address.
    with_card(|card| {
        set_up(card, 0x1_5eff);
        card.write_register(PDMA + qman::PQ_BASE_LO, ONES);
        card.write_register(PDMA + qman::PQ_BASE_HI, ONES);
        card.write_register(PDMA + qman::PQ_CI, 1);
        card.write_register(PDMA + qman::PQ_PI, 2);
        wait_until("the fault", || card.queues.has_stopped(PDMA, 0));
    });
    // The last index of all, and a completion behind the last address.
    with_card(|card| {
        set_up(card, 0x1_5eff);
        card.write_register(PDMA + qman::COMPLETION_LO, ONES);
        card.write_register(PDMA + qman::COMPLETION_HI, ONES);
        card.guest.write(BUFFER, &0x0a00_0000_0000_0000_u64.to_le_bytes()).unwrap();
        let mut descriptor = BUFFER.to_le_bytes().to_vec();
        descriptor.extend(8u32.to_le_bytes());
        descriptor.extend((5u32 << 16).to_le_bytes());
        card.guest.write(RING + 16 * 0xfff, &descriptor).unwrap();
        card.write_register(PDMA + qman::PQ_CI, ONES);
        card.write_register(PDMA + qman::PQ_PI, 0);
        wait_until("the next index", || card.read_register(PDMA + qman::PQ_CI) == 0);
    });
    // Events and messages.
    with_card(|card| {
        for base in [cpu::EQ_BASE, cpu::PQ_BASE] {
            card.set(base, ONES);
            card.set(base + 4, ONES);
        }
        card.write_register(psoc::EVENTS, 554);
        pci_gaudi::events::page_fault(card, 0xfff0_0001_2345_6000);
        pci_gaudi::events::page_fault(card, 0xfff0_0001_2345_6000);
        card.set(cpu::PQ_PI, 2);
        card.write_register(psoc::MESSAGE, 552);
    });
}
