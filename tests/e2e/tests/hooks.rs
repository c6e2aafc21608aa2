//! An application that opens a card and maps memory on it by itself, with the driver's own calls,
//! and then sends that memory with stock UCX: lent, noticed, adopted, or neither.
//!
//! Each test runs the last function of this file in a process of its own. The application's driver
//! calls are in a C library that is linked to `libhl-thunk`, as programs are (`hooks/application.c`).

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};

use e2e::{Device, Layout, Ucx, Workbench};
use ucp_check::client::Client;
use ucp_check::pattern;
use ucp_check::ucp::{self, Endpoint, Features, Memory, Region, WorkerOptions};
use ucp_check::watchdog::Watchdog;

const CHILD: &str = "the_application";
const SCENE: &str = "UCX_GAUDI_TEST_SCENE";

/// Compiles the application's library.
fn compile_application(library: &Path) {
    let layout = Layout::from_env();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hooks/application.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .arg(library)
        .arg(source)
        // Only to see that it is C.
        .arg("-I")
        .arg(layout.dist().join("include"))
        .arg(format!("-L{}", layout.soft_gaudi().display()))
        .arg("-lhl-thunk")
        .output()
        .expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
}

/// Plays a scene on a stock UCX; whether it ended well, and what was said.
fn play(ucx: Ucx, scene: &str, settings: &[(&str, &str)]) -> (bool, String) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let library = folder.path().join("libapplication.so");
    compile_application(&library);
    let tool = Workbench::from_env().own_process(ucx, &Device::software(), CHILD);
    let tool = tool.env("UCX_GAUDI_TEST_APPLICATION", &library).env("UCX_LOG_LEVEL", "info");
    let end = tool.env(SCENE, scene).envs(settings).run();
    (end.success(), end.text())
}

#[track_caller]
fn plays_well(scene: &str, settings: &[(&str, &str)]) {
    for ucx in Ucx::ALL {
        let (well, text) = play(ucx, scene, settings);
        assert!(well && text.contains("the application is content"), "{ucx:?}\n{text}");
    }
}

#[test]
fn hooks_notice_memory_on_a_lent_card() {
    plays_well("lend", &[]);
}

/// What says that hooks were set.
const HOOKED: &str = "memory that this program maps on a Gaudi by itself is noticed";

#[test]
fn hooks_wait_until_a_card_is_used() {
    for ucx in Ucx::ALL {
        for (settings, hooked) in [(None, false), (Some(("UCX_GAUDI_COPY_MEM_HOOKS", "yes")), true)]
        {
            let (well, text) = play(ucx, "use no card", settings.as_slice());
            assert!(well && text.contains("the application is content"), "{ucx:?}\n{text}");
            assert_eq!(text.contains(HOOKED), hooked, "{ucx:?}\n{text}");
        }
        let (well, text) = play(ucx, "open after UCX", &[]);
        assert!(well && text.contains("the application is content"), "{ucx:?}\n{text}");
        assert!(text.contains(HOOKED), "{ucx:?}\n{text}");
    }
}

#[test]
fn without_hooks_the_application_says_what_it_maps() {
    plays_well("lend and say", &[("UCX_GAUDI_COPY_MEM_HOOKS", "no")]);
}

#[test]
fn memory_from_before_ucx_is_told_by_the_application() {
    plays_well("map before UCX", &[]);
}

#[test]
fn hooks_and_adoption_need_no_word_from_the_application() {
    plays_well("say nothing", &[("UCX_GAUDI_COPY_ADOPT", "y")]);
}

/// Recognised, so that nobody touches a device address with the CPU; and told how to go on.
#[test]
fn hooks_on_a_card_that_was_not_lent_end_in_words_and_not_in_a_fault() {
    for ucx in Ucx::ALL {
        let (well, text) = play(ucx, "say nothing", &[]);
        assert!(!well && text.contains("ucx_gaudi_lend"), "{ucx:?}\n{text}");
        assert!(!text.contains("Segmentation fault"), "{ucx:?}\n{text}");
    }
}

#[test]
fn a_card_busy_in_the_same_process_is_explained() {
    for ucx in Ucx::ALL {
        let (well, text) = play(ucx, "allocate", &[("UCX_GAUDI_COPY_DEVICE", "0")]);
        assert!(well && text.contains("this process"), "{ucx:?}\n{text}");
        assert!(text.contains("ucx_gaudi_lend(fd)"), "{ucx:?}\n{text}");
    }
}

/// A function of a library that is loaded.
///
/// # Safety
/// `F` must be the function's type.
unsafe fn function<F: Copy>(library: &Path, name: &CStr, mode: c_int) -> F {
    let path = CString::new(library.to_str().expect("a plain path")).expect("no NUL");
    // SAFETY: loads (or finds) a library of ours or UCX's, never unloaded; the type is the caller's
    // promise.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | mode);
        assert!(!handle.is_null(), "{} does not load", library.display());
        let symbol = libc::dlsym(handle, name.as_ptr());
        assert!(!symbol.is_null(), "{} has no {name:?}", library.display());
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        std::mem::transmute_copy(&symbol)
    }
}

/// The application's side of the driver.
struct Driver {
    library: PathBuf,
    fd: c_int,
}

impl Driver {
    fn open(library: PathBuf) -> Driver {
        // SAFETY: the types are those of application.c.
        let fd = unsafe {
            function::<unsafe extern "C" fn() -> c_int>(&library, c"application_open", 0)()
        };
        assert!(fd >= 0, "the card does not open: {fd}");
        Driver { library, fd }
    }

    fn map(&self, len: u64) -> (u64, u64) {
        type Call = unsafe extern "C" fn(c_int, u64) -> u64;
        // SAFETY: the types are those of application.c.
        let (handle, address) = unsafe {
            let alloc: Call = function(&self.library, c"application_alloc", 0);
            let map: Call = function(&self.library, c"application_map", 0);
            let handle = alloc(self.fd, len);
            (handle, map(self.fd, handle))
        };
        assert!(handle != 0 && address != 0, "no memory: {handle} {address:#x}");
        (handle, address)
    }

    fn give(&self, name: &CStr, what: u64) {
        // SAFETY: the types are those of application.c.
        let answer = unsafe {
            function::<unsafe extern "C" fn(c_int, u64) -> c_int>(&self.library, name, 0)(
                self.fd, what,
            )
        };
        assert_eq!(answer, 0, "{name:?}");
    }

    fn call(&self, name: &CStr) {
        // SAFETY: the types are those of application.c.
        let answer = unsafe {
            function::<unsafe extern "C" fn(c_int) -> c_int>(&self.library, name, 0)(self.fd)
        };
        assert_eq!(answer, 0, "{name:?}");
    }

    /// Opens the card's control node, and closes it with the call that also closes the card.
    fn glance(&self) {
        self.call(c"application_glance");
    }

    fn close(self) {
        self.call(c"application_close");
    }
}

/// Calls one of the plugin's functions for applications.
fn plugin(name: &CStr, fd: c_int, address: u64, length: u64) {
    let path = PathBuf::from(std::env::var_os("UCX_PLUGIN_PATH").expect("set by the test"));
    let path = path.with_file_name("libucx_gaudi.so");
    // SAFETY: a function of ucx_gaudi.h, which looks at as many arguments as it has.
    let (answer, reason) = unsafe {
        let call: unsafe extern "C" fn(c_int, u64, u64) -> c_int = function(&path, name, 0);
        let reason: unsafe extern "C" fn() -> *const c_char =
            function(&path, c"ucx_gaudi_error", 0);
        let answer = call(fd, address, length);
        (answer, CStr::from_ptr(reason()).to_string_lossy().into_owned())
    };
    assert_eq!((answer, reason.as_str()), (0, ""), "{name:?}");
}

/// Sends bytes from host memory to `address` and back, and compares them.
fn exchange(client: &Client, to_myself: &Endpoint, address: u64, len: usize, key: u64) {
    let theirs = Region::elsewhere(client.worker().context(), address, len);
    let (from, back) = (client.region(Memory::Host, len), client.region(Memory::Host, len));
    let (from, back) = (from.expect("host memory"), back.expect("host memory"));
    let mut bytes = vec![0; len];
    pattern::fill(key, 0, &mut bytes);
    from.write(0, &bytes);
    // Odd places: nothing is aligned.
    for (source, destination, tag) in [(&from, &theirs, 1), (&theirs, &back, 2)] {
        let part = |region: &Arc<Region>| region.span(3, len - 3);
        let receive = client.worker().tag_receive(&part(destination), tag).expect("receive");
        let send = to_myself.tag_send(&part(source), tag).expect("send");
        client.finish(send).expect("sent");
        client.finish(receive).expect("received");
    }
    let mut arrived = vec![0; len];
    back.read(0, &mut arrived);
    assert!(arrived[3..] == bytes[3..], "{len} bytes through {address:#x} are not the same");
}

static FREED: Mutex<Vec<(u64, usize)>> = Mutex::new(Vec::new());

/// The member of `ucm_event_t` that memory-type events use.
#[repr(C)]
struct Event {
    address: usize,
    size: usize,
    memory_type: u32,
}

unsafe extern "C" fn on_free(_event_type: c_int, event: *mut Event, _argument: *mut c_void) {
    // SAFETY: UCX passes a memory-type event, as it was asked for.
    let Event { address, size, memory_type } = unsafe { event.read() };
    assert_eq!(memory_type, 9, "Gaudi memory");
    FREED.lock().expect("not poisoned").push((address as u64, size));
}

/// The second half of the tests above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn the_application() {
    let path = e2e::libucp_to_test();
    let variable = |name: &str| std::env::var(name).expect("set by the test");
    let (scene, library) = (variable(SCENE), PathBuf::from(variable("UCX_GAUDI_TEST_APPLICATION")));
    let say = scene == "lend and say";
    const LEN: usize = (1 << 20) + 77;

    // Loads the driver's library, as if the program were linked with it.
    // SAFETY: only looked up.
    unsafe { function::<unsafe extern "C" fn() -> c_int>(&library, c"application_open", 0) };
    let late = ["use no card", "open after UCX"].contains(&scene.as_str());
    let driver = (!late).then(|| Driver::open(library.clone()));
    let early = driver.as_ref().filter(|_| scene == "map before UCX");
    let early = early.map(|driver| driver.map(LEN as u64));

    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let watchdog = Watchdog::start("application", 60.0);
    let options = WorkerOptions::default();
    let client = Client::new(ucx, Features::ALL, options, &watchdog).expect("UCP starts");
    if scene == "use no card" {
        println!("the application is content");
        return;
    }
    let driver = driver.unwrap_or_else(|| Driver::open(library));
    if scene == "allocate" {
        assert!(client.region(Memory::Gaudi, 4096).is_err(), "the application has the card");
        return;
    }
    let address = client.worker().address().expect("address");
    // SAFETY: the address of our own worker.
    let to_myself = unsafe { client.connect(&address, false) }.expect("endpoint");
    type SetHandler = unsafe extern "C" fn(
        c_int,
        c_int,
        unsafe extern "C" fn(c_int, *mut Event, *mut c_void),
        *mut c_void,
    ) -> i8;
    // SAFETY: the function has had this type in every version; the handler lives for ever.
    let status = unsafe {
        let set: SetHandler = function(&path, c"ucm_set_event_handler", libc::RTLD_NOLOAD);
        set(1 << 21, 0, on_free, std::ptr::null_mut())
    };
    assert_eq!(status, 0);

    if scene != "say nothing" {
        plugin(c"ucx_gaudi_lend", driver.fd, 0, 0);
    }
    if let Some((_, address)) = early {
        plugin(c"ucx_gaudi_memory_mapped", driver.fd, address, LEN as u64);
        exchange(&client, &to_myself, address, LEN, 1);
    }
    // Twice: the second mapping comes to lie where the first was.
    let mut places = Vec::new();
    for round in 0..2 {
        let (handle, address) = driver.map(LEN as u64);
        if say {
            plugin(c"ucx_gaudi_memory_mapped", driver.fd, address, LEN as u64);
        }
        driver.glance();
        for len in [100, 5000, LEN] {
            exchange(&client, &to_myself, address, len, round * 100 + len as u64);
        }
        assert!(FREED.lock().expect("not poisoned").is_empty(), "nothing was freed yet");
        if say {
            plugin(c"ucx_gaudi_memory_unmapping", driver.fd, address, 0);
        }
        driver.give(c"application_unmap", address);
        driver.give(c"application_free", handle);
        let freed = std::mem::take(&mut *FREED.lock().expect("not poisoned"));
        assert_eq!(freed, [(address, LEN)], "UCX was told what went");
        places.push(address);
    }
    assert_eq!(places[0], places[1], "or the second round shows less");

    // UCX's own memory on the same card, beside the application's.
    let region = client.region(Memory::Gaudi, LEN).expect("memory on the card that was lent");
    exchange(&client, &to_myself, region.address(), LEN, 7);
    drop(region);
    if let Some((handle, address)) = early {
        FREED.lock().expect("not poisoned").clear();
        driver.give(c"application_unmap", address);
        driver.give(c"application_free", handle);
        let freed = FREED.lock().expect("not poisoned").clone();
        assert!(freed.contains(&(address, LEN)), "{freed:x?}");
    }
    if scene != "say nothing" {
        plugin(c"ucx_gaudi_take_back", driver.fd, 0, 0);
    }
    // UCX is up still, and has let go.
    let library = driver.library.clone();
    driver.close();
    Driver::open(library).close();
    println!("the application is content");
}
