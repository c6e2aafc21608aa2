//! Programs that call `exit` while they use a card, on both stock UCXes: to end is no fault, and copies
//! succeed until the process is gone. Programs that abort, as `MPI_Abort` does, leave the plugin's reasons.
//!
//! The tests run the last functions of this file in processes of their own.

use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};

use e2e::{Device, Ucx, Workbench};
use ucp_check::buffer::Buffer;
use ucp_check::client::Client;
use ucp_check::pattern::{Image, Layout};
use ucp_check::ucp::{self, Features, Memory, WorkerOptions};
use ucp_check::watchdog::Watchdog;

const PROGRAM: &str = "the_program_that_exits";
const ABORTS: &str = "the_program_that_aborts";

#[test]
fn exit_handlers_and_other_threads_copy_until_the_process_has_ended() {
    for ucx in Ucx::ALL {
        let tool = Workbench::from_env().own_process(ucx, &Device::cards(1), PROGRAM);
        let end = tool.run().ok();
        assert!(end.stdout.contains("copies inside exit"), "{}", end.report());
    }
}

/// Standard output, to which UCX logs, is no terminal here: what is not flushed is lost.
#[test]
fn a_refusal_is_told_though_the_program_aborts() {
    for ucx in Ucx::ALL {
        let tool = Workbench::from_env().own_process(ucx, &Device::cards(1), ABORTS);
        let end = tool.env("UCX_GAUDI_COPY_DEVICE", "9").run();
        assert!(end.crashed() && end.says(&["ucx-gaudi", "no card is \"9\""]), "{}", end.report());
    }
}

/// What copies through UCP need.
struct Copies {
    client: Client,
    buffer: Buffer,
    image: Image,
}

impl Copies {
    fn new(ucx: &'static ucp::Ucx) -> Self {
        const LEN: usize = 1_000_003;
        let watchdog = Watchdog::start("exit", 50.0);
        let options = WorkerOptions::default();
        let client = Client::new(ucx, Features::ALL, options, &watchdog).expect("UCP starts");
        let staging = client.region(Memory::Host, Layout::allocation(LEN)).expect("host memory");
        let buffer = Buffer::new(&client, Memory::Gaudi, LEN, &staging).expect("Gaudi memory");
        let image = Image::message(Layout::new(LEN, 1), 1, 1);
        Self { client, buffer, image }
    }

    /// To the card and back. No thread survives that it fails.
    fn copy(&self) {
        if let Err(error) = self.buffer.prove(&self.client, &self.image) {
            eprintln!("{error:#}");
            std::process::abort();
        }
    }
}

/// What the handler uses: copies of its own, and a message for each copy of another thread.
struct Last {
    copies: Copies,
    copied: Receiver<()>,
}

/// Used in the thread that made it, which calls `exit`.
static LAST: AtomicPtr<Last> = AtomicPtr::new(std::ptr::null_mut());

extern "C" fn copy_at_exit() {
    // SAFETY: null, or leaked by this thread.
    if let Some(last) = unsafe { LAST.load(Ordering::Relaxed).as_ref() } {
        last.copies.copy();
        last.wait_for_others();
        println!("copies inside exit");
    }
}

impl Last {
    /// Several rounds of each thread.
    fn wait_for_others(&self) {
        (0..20).for_each(|_| self.copied.recv().expect("they copy for ever"));
    }
}

/// The second half of the test above.
#[test]
#[ignore = "run by the other test as a process of its own"]
fn the_program_that_exits() {
    let path = e2e::libucp_to_test();
    // Before the card is opened: it runs after all that plugin and driver arrange then.
    // SAFETY: the handler takes no arguments and may run at any time.
    unsafe { libc::atexit(copy_at_exit) };
    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let (sender, copied) = sync_channel(0);
    for _ in 0..3 {
        let sender = sender.clone();
        std::thread::spawn(move || {
            let copies = Copies::new(ucx);
            loop {
                copies.copy();
                let _ = sender.try_send(());
            }
        });
    }
    let last = Last { copies: Copies::new(ucx), copied };
    last.wait_for_others();
    LAST.store(Box::into_raw(Box::new(last)), Ordering::Relaxed);
    std::process::exit(0);
}

/// The second half of the test of refusals.
#[test]
#[ignore = "run by the other test as a process of its own"]
fn the_program_that_aborts() {
    let path = e2e::libucp_to_test();
    let ucx = ucp::Ucx::load(path.parent()).expect("UCX loads");
    let watchdog = Watchdog::start("abort", 50.0);
    let client = Client::new(ucx, Features::ALL, WorkerOptions::default(), &watchdog);
    let refused = client.expect("UCP starts").region(Memory::Gaudi, 4096).is_err();
    assert!(refused, "there is no such card");
    std::process::abort();
}
