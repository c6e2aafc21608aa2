//! Ways in which a program may have loaded UCX. Which of its libraries are in the global scope
//! differs, and with it where the plugin must look for UCX's functions and variables.

use std::ffi::CString;
use std::path::{Path, PathBuf};

use e2e::{Device, Ucx, Workbench};
use ucp_check::buffer::Buffer;
use ucp_check::client::Client;
use ucp_check::pattern::{Image, Layout};
use ucp_check::ucp::{self, Features, Memory, WorkerOptions};
use ucp_check::watchdog::Watchdog;

/// The file of one of UCX's libraries, beside libucp.
fn library(libucp: &Path, prefix: &str) -> PathBuf {
    let suffix = |name: &str| name.find(".so").map(|at| name[at..].to_owned());
    let libucp_name = libucp.file_name().and_then(|name| name.to_str()).expect("a plain name");
    let folder = std::fs::read_dir(libucp.parent().expect("a folder")).expect("a folder");
    let found = folder.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let rest = name.strip_prefix(prefix);
        rest.is_some_and(|rest| rest.starts_with(['.', '-'])) && suffix(name) == suffix(libucp_name)
    });
    found.unwrap_or_else(|| panic!("no {prefix} beside {}", libucp.display()))
}

/// Python's `ctypes.CDLL(..., RTLD_GLOBAL)`, for example, with some of the libraries and not others.
#[test]
fn some_libraries_of_ucx_in_the_global_scope() {
    for ucx in Ucx::WITH_1_21 {
        for global in ["", "libucs", "libuct", "libucs libuct"] {
            let bench = Workbench::from_env();
            let tool = bench.own_process(ucx, &Device::software(), "allocates_and_copies");
            let end = tool.env("UCX_GAUDI_TEST_GLOBAL", global).run().ok();
            let well = end.stdout.contains("every byte is right");
            assert!(well, "{ucx:?}, global: {global:?}\n{}", end.report());
        }
    }
}

/// The second half of the test above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn allocates_and_copies() {
    let path = e2e::libucp_to_test();
    let global = std::env::var("UCX_GAUDI_TEST_GLOBAL").expect("set by the test");
    for name in global.split_whitespace() {
        let file = library(&path, name);
        let file = CString::new(file.to_str().expect("a plain path")).expect("no NUL");
        // SAFETY: a library of UCX, as any program may load it.
        let handle = unsafe { libc::dlopen(file.as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        assert!(!handle.is_null(), "{file:?} does not load");
    }
    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let watchdog = Watchdog::start("loading", 60.0);
    let options = WorkerOptions::default();
    let client = Client::new(ucx, Features::ALL, options, &watchdog).expect("UCP starts");
    for body in [8, 100_000, 3 << 20] {
        let staging = client.region(Memory::Host, Layout::allocation(body)).expect("host memory");
        let buffer = Buffer::new(&client, Memory::Gaudi, body, &staging).expect("Gaudi memory");
        let image = Image::message(Layout::new(body, 1), 2, 3);
        buffer.prove(&client, &image).expect("what was written");
    }
    println!("every byte is right");
}
