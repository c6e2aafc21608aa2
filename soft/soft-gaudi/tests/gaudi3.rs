//! A Gaudi3 to its driver's users: memory and dma-bufs, but no DMA of their own.

mod driver;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

#[test]
fn memory_can_be_allocated_and_submissions_are_refused() {
    let fd = card_of("gaudi3");
    assert_eq!(hlthunk_get_device_name_from_fd(fd), sys::DEVICE_GAUDI3);
    let info = hw_info(fd);
    assert_eq!(info.device_id, sys::PCI_ID_GAUDI3);
    // As in a log of Synapse 1.18.
    assert_eq!((info.dram_base_address, info.dram_page_size), (0x0201_0020_0000_0000, 32 << 20));
    assert_eq!((info.sram_base_address, info.sram_size), (0x0200_ffff_fa00_0000, 0));
    assert_eq!(info.reserved_dram_size, 672 << 20);
    let (handle, va) = alloc(fd, info.dram_page_size + 1);
    assert_eq!(va >> 48, 0x0201);
    let mut usage = sys::DramUsageInfo::default();
    assert_eq!(hlthunk_get_dram_usage(fd, (&raw mut usage).cast()), 0);
    assert_eq!(usage.ctx_dram_mem, 2 * info.dram_page_size);
    // The framework places its pool in the range that is kept for hints.
    let hint = 0x0201_e000_0000_0000;
    assert_eq!(hlthunk_device_memory_map(fd, handle, hint), hint);
    let flags = sys::DMABUF_FLAGS;
    let dmabuf = hlthunk_device_mapped_memory_export_dmabuf_fd(fd, hint, 8192, 4096, flags);
    assert!(dmabuf >= 0);
    assert_eq!(hlthunk_cs_flush_pci_hbw_writes(fd), 0);
    assert_eq!(hlthunk_memory_unmap(fd, hint), -libc::EINVAL);
    // SAFETY: a descriptor of this test.
    unsafe { libc::close(dmabuf) };
    assert_eq!(hlthunk_memory_unmap(fd, hint), 0);
    let mut packets = vec![0u8; 64];
    let cb = map_host(fd, &mut packets);
    for queue in [0, 1, 4, 8] {
        assert_eq!(submit(fd, &mut [user_chunk(queue, cb, 24)]), Err(-libc::EINVAL));
    }
}
