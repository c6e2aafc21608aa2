//! Programs that fork, on both stock UCXes: a child of a program that uses a card is refused Gaudi
//! memory with the reason, and disturbs nothing; one that was forked before has a card of its own. And
//! `fork` itself returns in the child, whatever the parent's other threads were doing.
//!
//! Each test runs the last function of this file in a process of its own.

use std::cell::Cell;
use std::ffi::{CStr, CString, c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use e2e::{Device, Ucx, Workbench};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, WaitOptions};
use rustix::process::{kill_process, pidfd_open, waitpid};
use ucp_check::buffer::Buffer;
use ucp_check::client::Client;
use ucp_check::pattern::{Image, Layout};
use ucp_check::ucp::{self, Features, Memory, WorkerOptions};
use ucp_check::watchdog::Watchdog;

const PROGRAM: &str = "the_program_that_forks";
const SCENE: &str = "UCX_GAUDI_TEST_SCENE";

/// Runs the program on a machine with two cards; what it and UCX said.
fn run(ucx: Ucx, scene: &str) -> String {
    let tool = Workbench::from_env().own_process(ucx, &Device::cards(2), PROGRAM);
    let end = tool.env(SCENE, scene).run().ok();
    assert!(end.stdout.contains("parent and child passed"), "{ucx:?}\n{}", end.report());
    end.text()
}

#[test]
fn a_child_is_refused_gaudi_memory_with_the_reason_and_its_parents_memory_stays() {
    for ucx in Ucx::ALL {
        let text = run(ucx, "after");
        assert!(
            text.contains("this process was forked from the one that opened the card"),
            "{text}"
        );
    }
}

#[test]
fn a_child_forked_before_ucx_starts_has_a_card_of_its_own() {
    for ucx in Ucx::ALL {
        run(ucx, "before");
    }
}

/// UCX runs its hooks of `mmap` and its like under locks that a thread of the parent may have held.
#[test]
fn handlers_of_fork_call_nothing_that_ucx_hooks() {
    for ucx in Ucx::ALL {
        run(ucx, "hooked");
    }
}

/// How many children there are below, for each UCX.
const FORKS: &str = "UCX_GAUDI_TEST_FORKS";

#[test]
fn no_child_hangs_in_fork_while_threads_hold_locks_of_ucx() {
    let forks = std::env::var(FORKS).unwrap_or_else(|_| "1000".to_owned());
    for ucx in Ucx::ALL {
        let tool = Workbench::from_env().own_process(ucx, &Device::cards(1), PROGRAM);
        let tool = tool.env(SCENE, "load").env(FORKS, &forks).limit(Duration::from_secs(300));
        let end = tool.run().ok();
        assert!(end.stdout.contains("parent and child passed"), "{ucx:?}\n{}", end.report());
        print!("{ucx:?}: {}", end.stdout);
    }
}

/// Starts UCP.
fn start(path: &Path, watchdog: &Watchdog) -> Client {
    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    Client::new(ucx, Features::ALL, WorkerOptions::default(), watchdog).expect("UCP starts")
}

/// Memory on a card with known bytes in it.
fn filled(client: &Client, seed: u64) -> (Buffer, Image) {
    const LEN: usize = 100_003;
    let staging = client.region(Memory::Host, Layout::allocation(LEN)).expect("host memory");
    let buffer = Buffer::new(client, Memory::Gaudi, LEN, &staging).expect("Gaudi memory");
    let image = Image::message(Layout::new(LEN, seed), seed, seed);
    buffer.prove(client, &image).expect("every byte");
    (buffer, image)
}

/// Forks, and has the child run `child`; whether it ended without a panic.
fn fork(child: impl FnOnce()) -> impl FnOnce() -> bool {
    // SAFETY: the program has one thread that uses UCX, this one.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let passed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).is_ok();
        // SAFETY: ends the process without its parent's exit handlers.
        unsafe { libc::_exit(if passed { 0 } else { 1 }) };
    }
    move || {
        let mut status = -1;
        // SAFETY: our own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        status == 0
    }
}

thread_local! {
    /// In `fork`, between its call and its return. Other threads of UCX or the plugin may map and unmap meanwhile.
    static FORKING: Cell<bool> = const { Cell::new(false) };
}
/// Events that came meanwhile.
static EVENTS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn on_event(_kind: c_int, _event: *mut c_void, _argument: *mut c_void) {
    EVENTS.fetch_add(u32::from(FORKING.get()), Ordering::Relaxed);
}

type OnEvent = unsafe extern "C" fn(c_int, *mut c_void, *mut c_void);
type SetHandler = unsafe extern "C" fn(c_int, c_int, OnEvent, *mut c_void) -> i8;
type UnsetHandler = unsafe extern "C" fn(c_int, OnEvent, *mut c_void);

/// UCX's reports of whatever changes the process's mappings, through its hooks.
struct MappingEvents {
    set: SetHandler,
    unset: UnsetHandler,
}

impl MappingEvents {
    const VM_MAPPED: c_int = 1 << 16;
    const VM_UNMAPPED: c_int = 1 << 17;
    const KINDS: c_int = Self::VM_MAPPED | Self::VM_UNMAPPED;

    fn of(libucp: &Path) -> Self {
        let path = CString::new(libucp.as_os_str().as_bytes()).expect("no NUL");
        // SAFETY: finds functions of a library that is loaded; they have had these types in every
        // version.
        unsafe {
            let library = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            let function = |name: &CStr| {
                let function = libc::dlsym(library, name.as_ptr());
                assert!(!function.is_null(), "libucm is part of UCX");
                function
            };
            let (set, unset) =
                (function(c"ucm_set_event_handler"), function(c"ucm_unset_event_handler"));
            Self {
                set: std::mem::transmute::<*mut c_void, SetHandler>(set),
                unset: std::mem::transmute::<*mut c_void, UnsetHandler>(unset),
            }
        }
    }

    fn watch(&self) {
        // SAFETY: the handler is there for ever.
        let status = unsafe { (self.set)(Self::KINDS, 0, on_event, std::ptr::null_mut()) };
        assert_eq!(status, 0, "hooks are set");
    }

    fn unwatch(&self) {
        // SAFETY: no preconditions.
        unsafe { (self.unset)(Self::KINDS, on_event, std::ptr::null_mut()) };
    }
}

/// A mapping comes and goes, by libc's functions.
fn map_and_unmap() {
    let both = libc::PROT_READ | libc::PROT_WRITE;
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: new memory, which nobody else knows.
    unsafe {
        let at = libc::mmap(std::ptr::null_mut(), 4096, both, anonymous, -1, 0);
        assert_eq!(libc::munmap(at, 4096), 0);
    }
}

/// No event is reported inside `fork`, neither in the parent nor in the child.
fn fork_is_unhooked() -> bool {
    let none = || {
        FORKING.set(false);
        let events = EVENTS.load(Ordering::Relaxed);
        if events != 0 {
            eprintln!("{events} events inside fork");
        }
        events == 0
    };
    FORKING.set(true);
    let child = fork(|| assert!(none(), "in the child"));
    let in_parent = none();
    FORKING.set(true);
    map_and_unmap();
    assert!(!none(), "events are reported, so that this test can fail");
    child() && in_parent
}

/// Forks children that end at once, while threads do what takes UCX's locks: they start and end UCP, and
/// set and remove handlers of its hooks.
fn fork_under_load(ucx: &'static ucp::Ucx, events: &MappingEvents, forks: u32) -> bool {
    let done = AtomicBool::new(false);
    let until_done = |work: &dyn Fn()| {
        while !done.load(Ordering::Relaxed) {
            work();
        }
    };
    let hung = std::thread::scope(|scope| {
        scope.spawn(|| {
            until_done(&|| {
                drop(ucp::Context::new(ucx, Features::ALL, false).expect("UCP starts"));
            });
        });
        scope.spawn(|| {
            until_done(&|| {
                events.watch();
                events.unwatch();
            });
        });
        let hung = (0..forks).find(|number| !ShortLived::new(*number).ends());
        done.store(true, Ordering::Relaxed);
        hung
    });
    match hung {
        Some(number) => println!("child {number} of {forks} hangs in fork"),
        None => println!("{forks} children ended"),
    }
    hung.is_none()
}

/// A child that is to end as soon as it is made.
struct ShortLived {
    pid: Pid,
    pidfd: OwnedFd,
}

impl ShortLived {
    /// Forks; every second child becomes another program.
    fn new(number: u32) -> Self {
        let arguments = [c"true".as_ptr(), std::ptr::null()];
        // SAFETY: the child only makes system calls.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: ends the process, here or in the program that it becomes.
            unsafe {
                if number.is_multiple_of(2) {
                    libc::execv(c"/bin/true".as_ptr(), arguments.as_ptr());
                }
                libc::_exit(0);
            }
        }
        let pid = Pid::from_raw(pid).expect("a child");
        Self { pid, pidfd: pidfd_open(pid, PidfdFlags::empty()).expect("not waited for yet") }
    }

    /// Waits until it has ended; `false` if it hangs. It has next to nothing to do.
    fn ends(self) -> bool {
        let limit = Timespec { tv_sec: 30, tv_nsec: 0 };
        let ended = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&limit));
        let ended = ended.expect("poll") == 1;
        if !ended {
            kill_process(self.pid, Signal::KILL).expect("our own child");
        }
        waitpid(Some(self.pid), WaitOptions::empty()).expect("our own child");
        ended
    }
}

/// The second half of the tests above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn the_program_that_forks() {
    let path = e2e::libucp_to_test();
    let scene = std::env::var(SCENE).expect("set by the test");
    let watch = || Watchdog::start("fork", 60.0);
    let passed = if scene == "hooked" {
        let client = start(&path, &watch());
        let _memory = filled(&client, 5);
        MappingEvents::of(&path).watch();
        fork_is_unhooked()
    } else if scene == "load" {
        let client = start(&path, &Watchdog::start("fork", 280.0));
        let _memory = filled(&client, 6);
        let forks = std::env::var(FORKS).expect("set by the test");
        let events = MappingEvents::of(&path);
        fork_under_load(client.ucx(), &events, forks.parse().expect("a number"))
    } else if scene == "before" {
        // The driver library and the plugin are loaded, UCP looked for cards: nothing was opened.
        drop(start(&path, &watch()));
        let child = fork(|| drop(filled(&start(&path, &watch()), 1)));
        let client = start(&path, &watch());
        drop(filled(&client, 2));
        child()
    } else {
        let client = start(&path, &watch());
        let (buffer, image) = filled(&client, 3);
        let child = fork(|| {
            assert!(client.region(Memory::Gaudi, 4096).is_err(), "with its parent's context");
            let own = start(&path, &watch());
            assert!(own.region(Memory::Gaudi, 4096).is_err(), "with a context of its own");
            assert!(own.region(Memory::Host, 4096).is_ok(), "host memory is nobody's business");
        });
        let passed = child();
        buffer.verify(&client, &image).expect("readable").expect("as it was");
        drop(filled(&client, 4));
        passed
    };
    assert!(passed, "the child failed");
    println!("parent and child passed");
}
