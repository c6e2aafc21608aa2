//! Programs that fork, on both stock UCXes: a child of a program that uses a card is refused Gaudi
//! memory with the reason, and disturbs nothing; one that was forked before has a card of its own.
//!
//! Each test runs the last function of this file in a process of its own.

use e2e::{Device, Ucx, Workbench};
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

/// Starts UCP.
fn start(path: &std::path::Path, watchdog: &Watchdog) -> Client {
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

/// The second half of the tests above.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn the_program_that_forks() {
    let path = e2e::libucp_to_test();
    let scene = std::env::var(SCENE).expect("set by the test");
    let watch = || Watchdog::start("fork", 60.0);
    let passed = if scene == "before" {
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
