//! UCX hears of Gaudi memory that is freed: its memory-type free event names the range, so that
//! whoever cached a registration of it lets go.

use std::ffi::c_void;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;

use e2e::{Device, Ucx, Workbench};
use ucp_check::ucp;

const UCM_EVENT_MEM_TYPE_FREE: i32 = 1 << 21;
const GAUDI: u32 = 9;

/// The member of `ucm_event_t` that memory-type events use.
#[repr(C)]
struct Event {
    address: usize,
    size: usize,
    memory_type: u32,
}

static FREED: Mutex<Vec<(u64, usize, u32)>> = Mutex::new(Vec::new());

unsafe extern "C" fn on_free(_event_type: i32, event: *mut Event, _argument: *mut c_void) {
    // SAFETY: UCX passes a memory-type event, as it was asked for.
    let Event { address, size, memory_type } = unsafe { event.read() };
    FREED.lock().expect("not poisoned").push((address as u64, size, memory_type));
}

/// Runs the function below in a process of its own, on each stock UCX.
#[test]
fn freed_memory_is_announced_through_libucm() {
    for ucx in Ucx::ALL {
        let device = Device::software();
        let bench = Workbench::from_env();
        let template = bench.ucp_check(ucx).plugin().device(&device).command();
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "listens_while_memory_is_freed", "--nocapture"])
            .envs(template.get_envs().filter_map(|(name, value)| Some((name, value?))))
            .env("UCX_GAUDI_TEST_UCP", ucx.libucp(bench.layout()))
            .env("UCX_MODULES", "^ib")
            .output()
            .expect("run");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("heard of it"), "{ucx:?}\n{text}");
    }
}

/// The second half of the test above.
#[test]
fn listens_while_memory_is_freed() {
    type SetHandler = unsafe extern "C" fn(
        i32,
        i32,
        unsafe extern "C" fn(i32, *mut Event, *mut c_void),
        *mut c_void,
    ) -> i8;
    let Some(path) = std::env::var_os("UCX_GAUDI_TEST_UCP").map(PathBuf::from) else {
        println!("nothing to do: the test above runs this in a process of its own");
        return;
    };
    let library = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let context = ucp::Context::new(library, ucp::Features::RMA, false).expect("a context");
    let name = std::ffi::CString::new(path.to_str().expect("a plain path")).expect("no NUL");
    // SAFETY: the library is loaded already, and libucm with it; the function has had this type in
    // every version.
    let set_handler = unsafe {
        let handle = libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        assert!(!handle.is_null(), "{path:?} is not the library that was loaded");
        let symbol = libc::dlsym(handle, c"ucm_set_event_handler".as_ptr());
        assert!(!symbol.is_null(), "libucm is not there");
        std::mem::transmute::<*mut c_void, SetHandler>(symbol)
    };
    // SAFETY: the handler lives as long as the program.
    let status = unsafe { set_handler(UCM_EVENT_MEM_TYPE_FREE, 0, on_free, std::ptr::null_mut()) };
    assert_eq!(status, 0);

    let keep = ucp::Region::new(&context, ucp::Memory::Gaudi, 4096).expect("memory");
    let region = ucp::Region::new(&context, ucp::Memory::Gaudi, 100_000).expect("memory");
    let address = region.address();
    assert!(FREED.lock().expect("not poisoned").is_empty());
    drop(region);
    let freed = FREED.lock().expect("not poisoned").clone();
    assert!(freed.contains(&(address, 100_000, GAUDI)), "{freed:x?}");
    assert!(freed.iter().all(|(start, _, _)| *start != keep.address()), "{freed:x?}");

    println!("heard of it");
}
