//! The rules of `memory_rules` on the kernel's own driver.

#[path = "../../../soft/soft-gaudi/tests/memory_rules/mod.rs"]
mod memory_rules;

use std::ptr::null;

use kernel_thunk::memory::*;
use kernel_thunk::nodes::{hlthunk_close, hlthunk_open};
use memory_rules::Thunk;

const ANY: i32 = 4;

fn main() {
    memory_rules::check(&Thunk {
        // SAFETY: no address given.
        open: || unsafe { hlthunk_open(ANY, null()) },
        // SAFETY: the rules use a descriptor no more that they closed.
        close: |fd| unsafe { hlthunk_close(fd) },
        alloc: |fd, size| hlthunk_device_memory_alloc(fd, size, 0, false, false),
        free: |fd, handle| hlthunk_device_memory_free(fd, handle),
        map: |fd, handle| hlthunk_device_memory_map(fd, handle, 0),
        // SAFETY: the memory stays mapped, no queue touches it.
        map_host: |fd, at, len| unsafe { hlthunk_host_memory_map(fd, at, 0, len) },
        unmap: |fd, addr| hlthunk_memory_unmap(fd, addr),
        export: |fd, addr, size, offset, flags| {
            hlthunk_device_mapped_memory_export_dmabuf_fd(fd, addr, size, offset, flags)
        },
        importer: Some("/dev/dri/card0"),
    });
}
