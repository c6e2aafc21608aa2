//! What the kernel's own driver was seen to do with memory, in a virtual machine, the software card does too.

mod driver;
mod memory_rules;

use driver::*;
use memory_rules::Thunk;
use soft_gaudi::api::*;

#[test]
fn the_drivers_rules_for_memory_hold_on_the_software_card() {
    machine("gaudi2");
    memory_rules::check(&Thunk {
        open: || open(0),
        close: |fd| hlthunk_close(fd),
        alloc: |fd, size| hlthunk_device_memory_alloc(fd, size, 0, false, false),
        free: |fd, handle| hlthunk_device_memory_free(fd, handle),
        map: |fd, handle| hlthunk_device_memory_map(fd, handle, 0),
        map_host: |fd, at, len| hlthunk_host_memory_map(fd, at, 0, len),
        unmap: |fd, addr| hlthunk_memory_unmap(fd, addr),
        export: |fd, addr, size, offset, flags| {
            hlthunk_device_mapped_memory_export_dmabuf_fd(fd, addr, size, offset, flags)
        },
        importer: None,
    });
}
