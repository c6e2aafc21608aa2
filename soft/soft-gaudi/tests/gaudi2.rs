//! The driver contract of a Gaudi2, through the C functions.

mod driver;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

const PAGE: u64 = 768 << 20;

#[test]
fn identity_and_info_are_those_of_a_gaudi2_in_software() {
    machine("gaudi2");
    let index = fresh_index();
    let fd = open(index);
    assert_eq!(hlthunk_get_device_name_from_fd(fd), sys::DEVICE_GAUDI2);
    assert_eq!(hlthunk_get_device_id_from_fd(fd), sys::PCI_ID_GAUDI2);
    let mut bus = [0i8; 13];
    assert_eq!(hlthunk_get_pci_bus_id_from_fd(fd, bus.as_mut_ptr(), 13), 0);
    assert_eq!(hlthunk_get_device_index_from_pci_bus_id(bus.as_ptr()), index as i32);
    let mut info = hw_info(fd);
    assert_eq!(info.dram_base_address, 0x1001_0018_0000_0000);
    assert_eq!((info.dram_size, info.dram_page_size), (127 * PAGE, PAGE));
    assert_eq!(info.module_id, soft_gaudi::asic::module_id(index));
    assert!(String::from_utf8_lossy(&info.cpucp_version).contains("soft-gaudi"));
    assert!(String::from_utf8_lossy(&info.card_name).contains("soft"));
    assert_eq!(hlthunk_get_device_status_info(fd), sys::STATUS_OPERATIONAL);
    assert!(hlthunk_is_device_idle(fd));
    assert_eq!(hlthunk_get_hw_ip_info(fd, core::ptr::null_mut()), -libc::EINVAL);
    assert_eq!(hlthunk_close(fd), 0);
    assert_eq!(hlthunk_get_hw_ip_info(fd, (&raw mut info).cast()), -libc::EBADF);
    assert_eq!(errno(), libc::EBADF);
    let file = std::fs::File::open("/proc/self/maps").unwrap();
    let other = std::os::fd::AsRawFd::as_raw_fd(&file);
    assert_eq!(hlthunk_get_hw_ip_info(other, (&raw mut info).cast()), -libc::ENOTTY);
}

#[test]
fn packets_without_a_barrier_between_them_are_done_in_another_order() {
    let fd = card_of("gaudi2");
    for (barrier, expected) in [(false, [1, 1, 2]), (true, [1, 1, 1])] {
        let mut memory = [1, 2, 3];
        let host = map_host(fd, &mut memory);
        let next = gaudi2_copy(host + 1, host + 2, 1);
        let next = if barrier { after_barrier(next) } else { next };
        let packets = [gaudi2_copy(host, host + 1, 1), next].concat();
        assert_eq!(run(fd, 0, &packets), (0, sys::WAIT_COMPLETED));
        assert_eq!(memory, expected);
        assert_eq!(hlthunk_memory_unmap(fd, host), 0);
    }
    assert_eq!(hlthunk_close(fd), 0);
}

#[test]
fn allocation_is_rounded_to_pages_and_rules_are_kept() {
    let fd = card_of("gaudi2");
    let mut usage = sys::DramUsageInfo::default();
    let (handle, va) = alloc(fd, 1);
    assert_eq!(va, 0x1001_0018_0000_0000);
    assert_eq!(hlthunk_get_dram_usage(fd, (&raw mut usage).cast()), 0);
    assert_eq!((usage.ctx_dram_mem, usage.dram_free_mem), (PAGE, 126 * PAGE));
    // Mapped twice: two addresses; freed only when neither is left.
    let again = hlthunk_device_memory_map(fd, handle, 0);
    assert_eq!(again, va + PAGE);
    assert_eq!(hlthunk_device_memory_free(fd, handle), -libc::EINVAL);
    assert_eq!(hlthunk_memory_unmap(fd, va + 4096), -libc::EINVAL);
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
    assert_eq!(hlthunk_device_memory_free(fd, handle), -libc::EINVAL);
    assert_eq!(hlthunk_memory_unmap(fd, again), 0);
    assert_eq!(hlthunk_device_memory_free(fd, handle), 0);
    assert_eq!(hlthunk_device_memory_free(fd, handle), -libc::EINVAL);
    // 127 pages and not one more.
    let all: Vec<u64> =
        (0..127).map(|_| hlthunk_device_memory_alloc(fd, 1, 0, false, false)).collect();
    assert!(all.iter().all(|handle| *handle != 0));
    assert_eq!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
    assert_eq!(errno(), libc::ENOMEM);
    assert_eq!(hlthunk_device_memory_alloc(fd, 0, 0, false, false), 0);
    assert_eq!(errno(), libc::EINVAL);
    let hint = 0x1001_5000_0000_0000 / PAGE * PAGE;
    let hint = 0x1001_0000_0000_0000 + (hint & 0xffff_ffff_ffff).next_multiple_of(PAGE);
    assert_eq!(hlthunk_device_memory_map(fd, all[0], hint), hint);
    assert_eq!(hlthunk_device_memory_map(fd, 4711, 0), 0);
    assert_eq!(errno(), libc::EINVAL);
}

#[test]
fn a_freed_handle_is_the_next_one_given_out() {
    let fd = card_of("gaudi2");
    let alloc = || hlthunk_device_memory_alloc(fd, 1, 0, true, true);
    assert_eq!((alloc(), alloc(), alloc()), (1, 2, 3));
    assert_eq!(hlthunk_device_memory_free(fd, 2), 0);
    assert_eq!((alloc(), alloc()), (2, 4));
}

#[test]
fn host_mappings_keep_the_offset_in_the_page() {
    let fd = card_of("gaudi2");
    let mut memory = vec![0u8; 8192 + 4096];
    let skip = memory.as_ptr().align_offset(4096);
    let page = &mut memory[skip..skip + 8192];
    let aligned_2m = (page.as_ptr() as u64).is_multiple_of(2 << 20);
    let va = map_host(fd, &mut page[100..200]);
    if !aligned_2m {
        assert_eq!(va, 0xfff0_0001_0020_0000 + 100);
    }
    let hint = 0xfff0_0002_0000_0000;
    let at = page.as_mut_ptr().wrapping_add(100).cast();
    assert_eq!(hlthunk_host_memory_map(fd, at, hint, 100), hint + 100);
    // Forced: unaligned pointer, address in use.
    assert_eq!(hlthunk_host_memory_map_flags(fd, at, hint, 100, sys::MEM_FORCE_HINT), 0);
    assert_eq!(errno(), libc::EINVAL);
    let start = page.as_mut_ptr().cast();
    assert_eq!(hlthunk_host_memory_map_flags(fd, start, hint, 100, sys::MEM_FORCE_HINT), 0);
    assert_eq!(errno(), libc::ENOMEM);
    assert_eq!(hlthunk_memory_unmap(fd, va - 100), -libc::EINVAL);
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
    static CONSTANT: [u8; 100] = [1; 100];
    assert_eq!(hlthunk_host_memory_map(fd, CONSTANT.as_ptr() as *mut _, 0, 100), 0);
    assert_eq!(errno(), libc::EFAULT);
}

#[test]
fn odd_sizes_and_offsets_arrive_and_nothing_around_them_changes() {
    let fd = card_of("gaudi2");
    let (_, device) = alloc(fd, 1);
    let sizes = [1usize, 2, 3, 4, 7, 8, 9, 63, 64, 65, 4095, 4096, 4097, 65_537, 1_000_003];
    for (round, size) in sizes.into_iter().enumerate() {
        let offset = round * 13 % 64;
        let mut source = pattern(size + 128, round as u64);
        let mut target = vec![0xa5u8; size + 128];
        let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
        let place = device + 5000 + offset as u64;
        let mut packets = gaudi2_copy(src + offset as u64, place, size as u32);
        assert_eq!(run(fd, 0, &packets), (0, sys::WAIT_COMPLETED));
        packets = gaudi2_copy(place, dst + 64, size as u32);
        assert_eq!(run(fd, 4, &packets), (0, sys::WAIT_COMPLETED));
        assert_eq!(&target[64..64 + size], &source[offset..offset + size], "size {size}");
        assert!(target[..64].iter().chain(&target[64 + size..]).all(|b| *b == 0xa5));
        assert_eq!(hlthunk_memory_unmap(fd, src), 0);
        assert_eq!(hlthunk_memory_unmap(fd, dst), 0);
    }
}

#[test]
fn copies_cross_768_mib_pages_and_go_device_to_device() {
    let fd = card_of("gaudi2");
    let (_, first) = alloc(fd, 1);
    let (_, device) = alloc(fd, 2 * PAGE);
    let size = 3 << 20;
    let mut source = pattern(size, 9);
    let mut target = vec![0; size];
    let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
    let edge = device + PAGE - (1 << 20) - 7;
    let mut packets = gaudi2_copy(src, edge, size as u32);
    packets.extend(after_barrier(gaudi2_copy(edge, first + 3, size as u32)));
    packets.extend(after_barrier(gaudi2_copy(first + 3, dst, size as u32)));
    assert_eq!(run(fd, 1, &packets), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
}

#[test]
fn fill_repeats_the_value() {
    let fd = card_of("gaudi2");
    let mut target = vec![0xeeu8; 64];
    let dst = map_host(fd, &mut target);
    let mut packet = gaudi2_copy(0x0403_0201, dst + 1, 37);
    packet[4] = 0x10;
    assert_eq!(run(fd, 0, &packet), (0, sys::WAIT_COMPLETED));
    assert!(target[1..38].iter().enumerate().all(|(i, b)| *b == (i % 4) as u8 + 1));
    assert!(target[38..].iter().all(|b| *b == 0xee));
}

#[test]
fn submissions_are_checked_as_the_driver_does() {
    let fd = card_of("gaudi2");
    let nop = [0, 0, 0, 0, 0, 0, 0, 0x0a];
    let buffer = UserBuffer::new(fd, &nop);
    for queue in [2, 3, 5, 6, 7, 156, 260, 261, u32::MAX] {
        assert_eq!(buffer.submit(queue), Err(-libc::EINVAL), "queue {queue}");
        assert_eq!(errno(), libc::EINVAL);
    }
    // Without USER_ALLOC_CB, too short, outside every range.
    let mut chunk = user_chunk(0, buffer.va, 8);
    chunk.cs_chunk_flags = 0;
    assert_eq!(submit(fd, &mut [chunk]), Err(-libc::EINVAL));
    assert_eq!(submit(fd, &mut [user_chunk(0, buffer.va, 7)]), Err(-libc::EINVAL));
    assert_eq!(submit(fd, &mut [user_chunk(0, 0x1234_5000, 8)]), Err(-libc::EFAULT));
    assert_eq!(submit(fd, &mut []), Err(-libc::EINVAL));
    assert_eq!(hlthunk_command_submission(fd, core::ptr::null(), core::ptr::null_mut()), -22);
    // Rejected ones have used up numbers.
    let seq = buffer.submit(0).unwrap();
    assert_eq!(seq, 9 + 3 + 1);
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
    let mut status = 99;
    assert_eq!(hlthunk_wait_for_cs(fd, seq + 1, 0, &mut status), -libc::EINVAL);
    assert_eq!(hlthunk_wait_for_cs(fd, 0, 0, &mut status), 0);
    for _ in 0..200 {
        assert_eq!(wait(fd, buffer.submit(0).unwrap()).0, 0);
    }
    // Forgotten, hence finished.
    assert_eq!((hlthunk_wait_for_cs(fd, seq, 0, &mut status), status), (0, 0));
    drop(buffer);
}

#[test]
fn unmapped_addresses_fault_and_take_the_device_down_until_reopened() {
    machine("gaudi2");
    let index = fresh_index();
    for bad in [0x1001_0018_0000_0000u64, 0xfff0_0000_0000_1000, 0x7f12_3456_7000, 0] {
        let fd = open(index);
        assert!(fd >= 0);
        let mut memory = vec![0u8; 64];
        let host = map_host(fd, &mut memory);
        let buffer = UserBuffer::new(fd, &gaudi2_copy(bad, host, 64));
        let seq = buffer.submit(0).unwrap();
        assert_eq!(wait(fd, seq), (-libc::EIO, sys::WAIT_ABORTED));
        assert_eq!(errno(), libc::EIO);
        assert_eq!(buffer.submit(0), Err(-libc::EBUSY));
        assert_eq!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
        assert_eq!(errno(), libc::EBUSY);
        assert_eq!(hlthunk_get_device_status_info(fd), 1);
        assert_eq!(hlthunk_close(fd), 0);
    }
}

#[test]
fn undefined_packets_are_accepted_and_then_abort() {
    let fd = card_of("gaudi2");
    let buffer = UserBuffer::new(fd, &[0xff; 64]);
    let seq = buffer.submit(0).unwrap();
    assert_eq!(wait(fd, seq), (-libc::EIO, sys::WAIT_ABORTED));
}

#[test]
fn mapped_command_buffers_are_seen_by_program_and_card() {
    let fd = card_of("gaudi2");
    let (mut handle, mut va) = (0, 0);
    assert_eq!(hlthunk_request_mapped_command_buffer(fd, 77, &mut handle), 0);
    assert_eq!(hlthunk_get_mapped_cb_device_va_by_handle(fd, handle, &mut va), 0);
    assert_eq!(va, 0xfff0_0000_0000_0000);
    let packets = map_handle(fd, handle, 77);
    let mut target = vec![0u8; 16];
    let dst = map_host(fd, &mut target);
    let (_, device) = alloc(fd, 1);
    let mut source = pattern(16, 3);
    let src = map_host(fd, &mut source);
    let mut bytes = gaudi2_copy(src, device, 16);
    bytes.extend(after_barrier(gaudi2_copy(device, dst, 16)));
    // SAFETY: the mapping is a page long.
    unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), packets.cast(), bytes.len()) };
    let seq = submit(fd, &mut [user_chunk(0, va, bytes.len())]).unwrap();
    assert_eq!(wait(fd, seq), (0, sys::WAIT_COMPLETED));
    assert_eq!(source, target);
    let mut plain = 0;
    assert_eq!(hlthunk_request_command_buffer(fd, 0, &mut plain), 0);
    assert_ne!(plain, handle);
    assert_eq!(hlthunk_get_mapped_cb_device_va_by_handle(fd, plain, &mut va), -libc::EINVAL);
    assert_eq!(hlthunk_request_command_buffer(fd, 0x20_0000, &mut plain), -libc::EINVAL);
    assert_eq!(hlthunk_destroy_command_buffer(fd, handle), 0);
    assert_eq!(hlthunk_destroy_command_buffer(fd, handle), -libc::EINVAL);
    assert_eq!(hlthunk_close(fd), 0);
    // SAFETY: the mapping of above.
    unsafe { libc::munmap(packets, 77) };
}

/// A program that polls and never waits depends on the workers alone: a submission that arrives just as a
/// worker leaves the queue must not be missed.
#[test]
fn work_is_done_when_the_program_only_polls() {
    let fd = card_of("gaudi2");
    let (_, device) = alloc(fd, 1);
    // Just too large to be done by the submitting call.
    let size = (64 << 10) + 8;
    let mut source = pattern(size, 7);
    let src = map_host(fd, &mut source);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(src, device, size as u32));
    for round in 0..8_000 {
        let first = buffer.submit(0).unwrap();
        // The second arrives at every moment of the first one's life, its end above all.
        for _ in 0..round % 4000 {
            std::hint::spin_loop();
        }
        for seq in [first, buffer.submit(0).unwrap()] {
            let mut status = sys::WAIT_BUSY;
            while status == sys::WAIT_BUSY {
                assert_eq!(hlthunk_wait_for_cs(fd, seq, 0, &mut status), 0, "the card was reset");
                std::hint::spin_loop();
            }
            assert_eq!(status, sys::WAIT_COMPLETED);
        }
    }
}

#[test]
fn threads_share_a_card_with_more_submissions_than_the_window_has() {
    let fd = card_of("gaudi2");
    let (_, device) = alloc(fd, 1);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            scope.spawn(move || {
                let size = 200_000;
                let mut source = pattern(size, thread);
                let mut target = vec![0u8; size];
                let (src, dst) = (map_host(fd, &mut source), map_host(fd, &mut target));
                let place = device + thread * (1 << 20);
                let mut packets = gaudi2_copy(src, place, size as u32);
                packets.extend(after_barrier(gaudi2_copy(place, dst, size as u32)));
                let buffer = UserBuffer::new(fd, &packets);
                let queue = [0, 1, 4][thread as usize % 3];
                let seqs: Vec<u64> = (0..40).map(|_| buffer.submit(queue).unwrap()).collect();
                assert_eq!(wait(fd, seqs[39]), (0, sys::WAIT_COMPLETED));
                assert_eq!(source, target);
            });
        }
    });
    assert!(hlthunk_is_device_idle(fd));
}
