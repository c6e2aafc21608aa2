//! A card with a latency: nothing is done inside the calls.

mod driver;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

#[test]
fn with_a_latency_even_small_work_is_done_after_the_submission_has_returned() {
    // The longest possible: the test must poll before it is over, also on a busy machine.
    // SAFETY: before the library's first call; the only test of this program.
    unsafe { std::env::set_var("SOFT_GAUDI_LATENCY", "1000000") };
    machine("gaudi2");
    let fd = card();
    let mut memory = vec![0u8; 64];
    memory[..32].fill(7);
    let host = map_host(fd, &mut memory);
    let buffer = UserBuffer::new(fd, &gaudi2_copy(host, host + 32, 32));
    let first = buffer.submit(0).unwrap();
    let mut status = 99;
    assert_eq!(hlthunk_wait_for_cs(fd, first, 0, &mut status), 0);
    assert_eq!(status, sys::WAIT_BUSY);
    assert_eq!(memory[32..], [0; 32], "nothing was moved yet");
    // Behind it in the same queue, and in another one.
    let others = [buffer.submit(0).unwrap(), buffer.submit(1).unwrap()];
    for sequence in [first].into_iter().chain(others) {
        assert_eq!(wait(fd, sequence), (0, 0));
    }
    assert_eq!(memory, [7; 64]);
    assert_eq!(hlthunk_close(fd), 0);
}
