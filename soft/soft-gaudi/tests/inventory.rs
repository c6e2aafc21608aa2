//! Every function of the vendor's header that the vendor's library defines is there.

mod driver;

use soft_gaudi::api::*;

macro_rules! functions {
    ($($name:ident)*) => {
        [$((stringify!($name), $name as *const ())),*]
    };
}

#[test]
fn the_whole_library_is_there() {
    let functions = functions! {
        hlthunk_open hlthunk_open_by_module_id hlthunk_open_control hlthunk_open_control_by_name
        hlthunk_open_control_by_module_id hlthunk_open_control_by_bus_id hlthunk_close
        hlthunk_get_device_id_from_fd hlthunk_get_device_name_from_fd
        hlthunk_get_pci_bus_id_from_fd hlthunk_get_device_index_from_pci_bus_id
        hlthunk_get_device_count
        hlthunk_get_hw_ip_info hlthunk_get_open_stats hlthunk_get_hw_asic_status
        hlthunk_get_dram_usage hlthunk_get_device_status_info hlthunk_is_device_idle
        hlthunk_get_busy_engines_mask hlthunk_get_pll_frequency hlthunk_get_device_utilization
        hlthunk_get_hw_events_arr hlthunk_get_clk_rate hlthunk_get_reset_count_info
        hlthunk_get_time_sync_info hlthunk_get_sync_manager_info hlthunk_get_cs_counters_info
        hlthunk_get_pci_counters_info hlthunk_get_clk_throttle_info
        hlthunk_get_total_energy_consumption_info hlthunk_get_power_info hlthunk_get_info
        hlthunk_get_event_record hlthunk_get_dram_replaced_rows_info
        hlthunk_get_dram_pending_rows_info hlthunk_get_sec_attest_info hlthunk_get_page_fault_info
        hlthunk_get_engine_status hlthunk_get_dev_memalloc_page_orders
        hlthunk_request_command_buffer hlthunk_request_mapped_command_buffer
        hlthunk_destroy_command_buffer hlthunk_get_cb_usage_count
        hlthunk_get_mapped_cb_device_va_by_handle
        hlthunk_command_submission hlthunk_command_submission_timeout
        hlthunk_staged_command_submission hlthunk_staged_command_submission_timeout
        hlthunk_signal_submission hlthunk_signal_submission_timeout hlthunk_wait_for_signal
        hlthunk_wait_for_signal_timeout hlthunk_wait_for_collective_signal
        hlthunk_wait_for_collective_signal_timeout hlthunk_reserve_encaps_signals
        hlthunk_unreserve_encaps_signals hlthunk_staged_command_submission_encaps_signals
        hlthunk_wait_for_reserved_encaps_signals
        hlthunk_wait_for_reserved_encaps_collective_signals hlthunk_cs_flush_pci_hbw_writes
        hlthunk_engine_cores_set_mode hlthunk_engines_command
        hlthunk_wait_for_cs hlthunk_wait_for_cs_with_timestamp hlthunk_wait_for_multi_cs
        hlthunk_wait_for_multi_cs_with_timestamp hlthunk_wait_for_interrupt
        hlthunk_wait_for_interrupt_with_timestamp hlthunk_wait_for_interrupt_by_handle
        hlthunk_wait_for_interrupt_by_handle_with_timestamp hlthunk_register_timestamp_interrupt
        hlthunk_allocate_timestamp_elements
        hlthunk_device_memory_alloc hlthunk_device_memory_free hlthunk_device_memory_map
        hlthunk_host_memory_map hlthunk_host_memory_map_flags hlthunk_memory_unmap
        hlthunk_device_memory_export_dmabuf_fd hlthunk_device_mapped_memory_export_dmabuf_fd
        hlthunk_get_hw_block
        hlthunk_debug hlthunk_malloc hlthunk_free hlthunk_get_version hlthunk_profiler_start
        hlthunk_profiler_stop hlthunk_profiler_get_trace hlthunk_profiler_destroy
        hlthunk_debugfs_open hlthunk_debugfs_read hlthunk_debugfs_write hlthunk_debugfs_close
        hlthunk_notifier_create hlthunk_notifier_release hlthunk_notifier_recv
        hlthunk_fw_send_generic_request hlthunk_deprecated_func1 hlthunk_deprecated_func2
        hlthunk_deprecated_func3 ioctl
    };
    // That they exist is what the compiler has checked; that each is a function of its own, this.
    let addresses: std::collections::HashSet<_> = functions.iter().map(|(_, a)| *a).collect();
    assert!(addresses.len() > functions.len() / 2);
    for (name, address) in functions {
        assert!(!address.is_null(), "{name}");
    }
}

#[test]
fn it_says_that_it_is_software() {
    let version = hlthunk_get_version();
    // SAFETY: a NUL-terminated string of the library.
    let text = unsafe { std::ffi::CStr::from_ptr(version) }.to_string_lossy().into_owned();
    // SAFETY: allocated by the library for its caller.
    unsafe { hlthunk_free(version.cast()) };
    assert!(text.contains("soft-gaudi"), "{text}");
}
