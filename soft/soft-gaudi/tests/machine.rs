//! One machine, several processes: who owns a card, and until when.

mod driver;

use std::sync::OnceLock;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

/// The card that [`copy_at_exit`] uses, and where it has bytes of a known pattern.
static WRITTEN: OnceLock<(i32, u64)> = OnceLock::new();

extern "C" fn copy_at_exit() {
    let Some((fd, va)) = WRITTEN.get() else { return };
    let read = std::panic::catch_unwind(|| {
        let mut memory = vec![0; 1 << 20];
        let host = map_host(*fd, &mut memory);
        assert_eq!(run(*fd, 0, &gaudi2_copy(*va, host, 1 << 20)), (0, 0));
        assert!(memory == pattern(1 << 20, 1), "other bytes");
    });
    if read.is_err() {
        // SAFETY: ends the process.
        unsafe { libc::_exit(1) };
    }
}

/// What the second process does; in a normal run there is nothing to do.
#[test]
fn child() {
    let Some((role, argument)) = child_role() else { return };
    machine("gaudi2");
    let _exclusive = exclusive();
    let parent = parent();
    match role.as_str() {
        "open" => {
            send(&parent, open(argument).into());
            wait_for_end(&parent);
        }
        "open and exit" => {
            send(&parent, open(argument).into());
            std::process::exit(0);
        }
        "copy until the end" => {
            // Before the card is opened: runs after whatever the library has arranged then.
            // SAFETY: the handler takes no arguments and may run at any time.
            unsafe { libc::atexit(copy_at_exit) };
            let fd = open(argument);
            let (_, va) = alloc(fd, 1);
            let memory = Box::leak(pattern(1 << 20, 1).into_boxed_slice());
            let host = map_host(fd, memory);
            assert_eq!(run(fd, 0, &gaudi2_copy(host, va, 1 << 20)), (0, 0));
            WRITTEN.set((fd, va)).unwrap();
            // Other threads do not stop because one of them has called `exit`.
            std::thread::spawn(move || {
                let copied = std::panic::catch_unwind(|| {
                    loop {
                        assert_eq!(run(fd, 1, &gaudi2_copy(host, va, 1 << 20)), (0, 0));
                    }
                });
                // SAFETY: ends the process.
                copied.unwrap_or_else(|_| unsafe { libc::_exit(1) })
            });
            std::process::exit(0);
        }
        "pass" => {
            let fd = open(argument);
            let (_, va) = alloc(fd, 1);
            send(&parent, va as i64);
            send_fd(&parent, fd);
            hlthunk_close(fd);
            wait_for_end(&parent);
        }
        "be reset" | "be reset and close" => {
            let closes = role == "be reset and close";
            // Long enough to close the card in, also on a busy machine. Set before the library's first call,
            // which `open` is.
            // SAFETY: no other thread reads the environment meanwhile.
            unsafe {
                std::env::set_var("SOFT_GAUDI_RESET_KILL", if closes { "2000" } else { "200" })
            };
            let fd = open(argument);
            let buffer = UserBuffer::new(fd, &[0xff; 64]);
            let seq = buffer.submit(0).unwrap();
            assert_eq!(wait(fd, seq), (-libc::EIO, sys::WAIT_ABORTED));
            drop(buffer);
            if closes {
                assert_eq!(hlthunk_close(fd), 0);
                // Longer than the time to live of one that holds the card.
                std::thread::sleep(std::time::Duration::from_millis(2500));
                send(&parent, open(argument).into());
            }
            wait_for_end(&parent);
        }
        "copy for ever" => {
            let fd = open(argument);
            let mut memory = vec![0xabu8; 32 << 20];
            let host = map_host(fd, &mut memory);
            let (_, va) = alloc(fd, 1);
            let packets = gaudi2_copy(host, va, 32 << 20);
            assert_eq!(run(fd, 0, &packets), (0, 0));
            send(&parent, 0);
            loop {
                assert_eq!(run(fd, 0, &packets), (0, 0));
            }
        }
        "first free" => {
            let fd = hlthunk_open(sys::DEVICE_DONT_CARE, core::ptr::null());
            let mut bus = [0i8; 13];
            assert_eq!(hlthunk_get_pci_bus_id_from_fd(fd, bus.as_mut_ptr(), 13), 0);
            send(&parent, hlthunk_get_device_index_from_pci_bus_id(bus.as_ptr()).into());
            wait_for_end(&parent);
        }
        other => panic!("no such role: {other}"),
    }
}

#[test]
fn a_card_has_one_owner_and_any_number_of_control_nodes() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let fd = open(index);
    assert_eq!(open(index), -libc::EBUSY);
    assert_eq!(errno(), libc::EBUSY);
    let mut other = Child::start("open", index);
    assert_eq!(other.receive_number(), i64::from(-libc::EBUSY));
    other.finish();
    assert_eq!(open_stats(index).is_compute_ctx_active, 1);
    hlthunk_close(fd);
    assert_eq!(open_stats(index).is_compute_ctx_active, 0);
    let mut other = Child::start("open", index);
    assert!(other.receive_number() >= 0);
    assert_eq!(open(index), -libc::EBUSY);
    assert_eq!(open_stats(index).open_counter, 2);
    other.finish();
    hlthunk_close(open(index));
}

#[test]
fn kill_and_exit_release_the_card() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    for role in ["open", "open and exit"] {
        let mut other = Child::start(role, index);
        assert!(other.receive_number() >= 0);
        if role == "open" {
            assert_eq!(open(index), -libc::EBUSY);
            other.kill();
        } else {
            other.finish();
        }
        let fd = open(index);
        assert!(fd >= 0, "after {role}: {fd}");
        hlthunk_close(fd);
    }
}

/// The kernel takes a card away when the process is gone, not when it begins to end.
#[test]
fn a_process_that_exits_copies_until_it_has_ended() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let other = Child::start("copy until the end", index);
    assert!(other.wait().success());
    hlthunk_close(open(index));
}

#[test]
fn copies_of_the_descriptor_share_the_context_and_keep_it_open() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let fd = open(index);
    let (_, va) = alloc(fd, 1);
    // SAFETY: plain system calls on descriptors of this test.
    let copy = unsafe { libc::dup(fd) };
    hlthunk_close(fd);
    assert_eq!(open(index), -libc::EBUSY);
    assert_eq!(hlthunk_memory_unmap(copy, va), 0);
    // A plain close, behind the library's back.
    // SAFETY: as above.
    unsafe { libc::close(copy) };
    let again = open(index);
    assert!(again >= 0);
    // The new context knows nothing of the old one's memory.
    assert_eq!(hlthunk_memory_unmap(again, va), -libc::EINVAL);
    assert_eq!(hlthunk_device_memory_free(again, 1), -libc::EINVAL);
    hlthunk_close(again);
}

#[test]
fn a_reused_descriptor_number_is_not_mistaken_for_the_card() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let fd = open(fresh_index());
    // SAFETY: replaces the card's descriptor by one of another file.
    unsafe {
        let null = libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY);
        libc::dup2(null, fd);
        libc::close(null);
    }
    assert_eq!(hlthunk_device_memory_alloc(fd, 1, 0, false, false), 0);
    assert_eq!(errno(), libc::ENOTTY);
    // SAFETY: as above.
    unsafe { libc::close(fd) };
}

#[test]
fn a_mapped_command_buffer_keeps_the_card_busy() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let fd = open(index);
    let mut handle = 0;
    assert_eq!(hlthunk_request_command_buffer(fd, 4096, &mut handle), 0);
    let mapped = map_handle(fd, handle, 4096);
    hlthunk_close(fd);
    assert_eq!(open(index), -libc::EBUSY);
    // SAFETY: the mapping of above.
    unsafe { libc::munmap(mapped, 4096) };
    let fd = open(index);
    assert!(fd >= 0);
}

#[test]
fn a_passed_descriptor_keeps_the_card_busy_and_calls_on_it_are_refused() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let mut other = Child::start("pass", index);
    let va = other.receive_number() as u64;
    let fd = other.receive_fd();
    let raw = std::os::fd::AsRawFd::as_raw_fd(&fd);
    assert_eq!(hlthunk_get_device_name_from_fd(raw), sys::DEVICE_GAUDI2);
    // A documented difference: contexts do not move between processes.
    assert_eq!(hlthunk_memory_unmap(raw, va), -libc::EOPNOTSUPP);
    other.finish();
    assert_eq!(open(index), -libc::EBUSY);
    drop(fd);
    let fd = open(index);
    assert!(fd >= 0);
}

#[test]
fn a_process_that_holds_a_card_after_its_reset_is_killed_and_one_that_closes_it_is_not() {
    use std::os::unix::process::ExitStatusExt;
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let holder = Child::start("be reset", index);
    assert_eq!(holder.wait().signal(), Some(libc::SIGKILL));
    let mut other = Child::start("be reset and close", index);
    assert!(other.receive_number() >= 0, "it lives and has opened the card again");
    other.finish();
}

#[test]
fn a_card_whose_owner_was_killed_in_the_middle_of_copies_is_clean() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let mut other = Child::start("copy for ever", index);
    assert_eq!(other.receive_number(), 0);
    other.kill();
    let fd = open(index);
    assert!(fd >= 0, "{fd}");
    let mut usage = sys::DramUsageInfo::default();
    assert_eq!(hlthunk_get_dram_usage(fd, (&raw mut usage).cast()), 0);
    assert_eq!(usage.ctx_dram_mem, 0);
    assert!(hlthunk_is_device_idle(fd));
    let (_, va) = alloc(fd, 1);
    let mut memory = vec![1u8; 1 << 20];
    let host = map_host(fd, &mut memory);
    assert_eq!(run(fd, 4, &gaudi2_copy(va, host, 1 << 20)), (0, 0));
    assert!(
        memory.chunks(64).all(|part| part != [0xab; 64]),
        "bytes of the process that was killed"
    );
}

#[test]
fn processes_that_race_for_cards_get_different_ones() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let mut others: Vec<Child> = (0..6).map(|_| Child::start("first free", 0)).collect();
    let mut cards: Vec<i64> = others.iter_mut().map(Child::receive_number).collect();
    others.into_iter().for_each(Child::finish);
    cards.sort_unstable();
    cards.dedup();
    assert_eq!(cards.len(), 6);
}

#[test]
fn a_forked_child_is_refused_and_does_not_disturb_its_parent() {
    machine("gaudi2");
    let _exclusive = exclusive();
    let index = fresh_index();
    let fd = open(index);
    let (_, va) = alloc(fd, 1);
    // SAFETY: the child makes two calls and leaves without running anything of the parent's.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = hlthunk_memory_unmap(fd, va) == -libc::EOPNOTSUPP;
        let busy = open(index) == -libc::EBUSY;
        // SAFETY: ends the child at once.
        unsafe { libc::_exit(if refused && busy { 0 } else { 1 }) };
    }
    let mut status = -1;
    // SAFETY: waits for the child of above.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    assert_eq!(hlthunk_memory_unmap(fd, va), 0);
    hlthunk_close(fd);
    let fd = open(index);
    assert!(fd >= 0);
}
