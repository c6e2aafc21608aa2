//! UCX hears of Gaudi memory that is allocated and freed: its memory-type events name the range, so that
//! whoever cached a registration of it lets go; and the memory-type cache knows it.

use std::ffi::{CStr, c_void};
use std::sync::Mutex;

use e2e::{Device, Ucx, Workbench};
use ucp_check::ucp;

const MEM_TYPE_ALLOC: i32 = 1 << 20;
const MEM_TYPE_FREE: i32 = 1 << 21;
const GAUDI: u32 = 9;

/// The member of `ucm_event_t` that memory-type events use.
#[repr(C)]
struct Event {
    address: usize,
    size: usize,
    memory_type: u32,
}

/// The beginning of `ucs_memory_info_t`, and room for the rest of it.
#[repr(C)]
struct Info {
    memory_type: u32,
    rest: [u64; 7],
}

type Heard = Mutex<Vec<(i32, u64, usize, u32)>>;

static HEARD: Heard = Mutex::new(Vec::new());

unsafe extern "C" fn on_event(event_type: i32, event: *mut Event, heard: *mut c_void) {
    // SAFETY: UCX passes a memory-type event, as it was asked for, and one of the lists above.
    let (Event { address, size, memory_type }, heard) =
        unsafe { (event.read(), &*heard.cast::<Heard>()) };
    heard.lock().expect("not poisoned").push((event_type, address as u64, size, memory_type));
}

/// Runs the function below in a process of its own, on each stock UCX.
#[test]
fn memory_is_announced_through_libucm_and_to_the_memory_type_cache() {
    for ucx in Ucx::ALL {
        let (bench, test) = (Workbench::from_env(), "listens_to_memory_type_events");
        let end = bench.own_process(ucx, &Device::software(), test).run().ok();
        assert!(end.stdout.contains("heard of it"), "{ucx:?}\n{}", end.report());
    }
}

/// The second half of the test above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn listens_to_memory_type_events() {
    type SetHandler = unsafe extern "C" fn(
        i32,
        i32,
        unsafe extern "C" fn(i32, *mut Event, *mut c_void),
        *const Heard,
    ) -> i8;
    let path = e2e::libucp_to_test();
    let library = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let name = std::ffi::CString::new(path.to_str().expect("a plain path")).expect("no NUL");
    // SAFETY: the library is loaded already, and stays so.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    assert!(!handle.is_null(), "{path:?} is not the library that was loaded");
    let symbol = |name: &CStr| {
        // SAFETY: an open handle and a C string.
        let symbol = unsafe { libc::dlsym(handle, name.as_ptr()) };
        assert!(!symbol.is_null(), "{name:?} is not there");
        symbol
    };
    // SAFETY: the functions have had these types in every version.
    let (set_handler, lookup) = unsafe {
        type Lookup = unsafe extern "C" fn(u64, usize, *mut Info) -> i8;
        (
            std::mem::transmute::<*mut c_void, SetHandler>(symbol(c"ucm_set_event_handler")),
            std::mem::transmute::<*mut c_void, Lookup>(symbol(c"ucs_memtype_cache_lookup")),
        )
    };
    let cached = |address: u64, len: usize| {
        let mut info = Info { memory_type: u32::MAX, rest: [0; 7] };
        // SAFETY: the cache takes addresses as numbers, and the structure is large enough.
        let status = unsafe { lookup(address, len, &mut info) };
        (status == 0).then_some(info.memory_type)
    };
    let context = ucp::Context::new(library, ucp::Features::RMA, false).expect("a context");
    // SAFETY: handler and list live as long as the program.
    let status = unsafe { set_handler(MEM_TYPE_ALLOC | MEM_TYPE_FREE, 0, on_event, &HEARD) };
    assert_eq!(status, 0);

    let keep = ucp::Region::new(&context, ucp::Memory::Gaudi, 4096).expect("memory");
    let region = ucp::Region::new(&context, ucp::Memory::Gaudi, 100_000).expect("memory");
    let address = region.address();
    let heard = || HEARD.lock().expect("not poisoned").clone();
    assert!(heard().contains(&(MEM_TYPE_ALLOC, address, 100_000, GAUDI)), "{:x?}", heard());
    assert!(heard().iter().all(|(what, ..)| *what == MEM_TYPE_ALLOC), "{:x?}", heard());

    assert_eq!(cached(address, 100_000), Some(GAUDI));

    drop(region);
    let freed = |start| heard().iter().any(|event| (event.0, event.1) == (MEM_TYPE_FREE, start));
    assert!(heard().contains(&(MEM_TYPE_FREE, address, 100_000, GAUDI)), "{:x?}", heard());
    assert!(!freed(keep.address()), "{:x?}", heard());
    // An address of an open card is never host memory, and the window stays in one piece.
    assert_eq!(cached(address, 100_000), Some(GAUDI), "freed, with the card open");
    assert_eq!(cached(keep.address(), 4096), Some(GAUDI));
    let last = keep.address();
    drop(keep);
    drop(context);
    assert_eq!(cached(last, 1), None, "the card is closed");

    println!("heard of it");
}
