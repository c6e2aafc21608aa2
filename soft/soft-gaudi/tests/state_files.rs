//! The machine's files when they are damaged, of another version, or the file system is full: an error of
//! the call, and the process lives on.

mod driver;

use std::ffi::CStr;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;

use driver::*;
use hl_thunk::sys;
use soft_gaudi::api::*;

fn state_file(index: u32) -> PathBuf {
    machine_file(&format!("state{index}"))
}

fn open_stats(control: i32) -> i32 {
    let mut stats = sys::OpenStatsInfo::default();
    hlthunk_get_open_stats(control, (&raw mut stats).cast())
}

fn truncate(path: PathBuf, len: u64) {
    std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
}

#[test]
fn a_state_file_truncated_under_its_users_is_an_error_of_their_calls() {
    machine("gaudi2");
    let index = fresh_index();
    let fd = open(index);
    let control = hlthunk_open_control(index as i32, core::ptr::null());
    assert_eq!(open_stats(control), 0);
    for len in [0, 8, 100] {
        truncate(state_file(index), len);
        assert_eq!(open_stats(control), -libc::EIO);
        assert!(!hlthunk_is_device_idle(control));
        // The owner has what it needs in its own memory.
        let (handle, va) = alloc(fd, 1);
        let mut memory = vec![7u8; 100];
        let host = map_host(fd, &mut memory);
        assert_eq!(run(fd, 0, &gaudi2_copy(host, va, 100)), (0, sys::WAIT_COMPLETED));
        assert_eq!(hlthunk_memory_unmap(fd, host), 0);
        assert_eq!(hlthunk_memory_unmap(fd, va), 0);
        assert_eq!(hlthunk_device_memory_free(fd, handle), 0);
    }
    assert_eq!(hlthunk_close(fd), 0);
    assert_eq!(open(index), -libc::EIO);
    hlthunk_close(control);
}

#[test]
fn a_state_file_of_another_version_or_kind_is_refused() {
    machine("gaudi2");
    for (offset, byte) in [(0, 0xff), (8, 0xff)] {
        let index = fresh_index();
        hlthunk_close(open(index));
        let file = std::fs::OpenOptions::new().write(true).open(state_file(index)).unwrap();
        file.write_all_at(&[byte], offset).unwrap();
        assert_eq!(open(index), -libc::EIO);
        let control = hlthunk_open_control(index as i32, core::ptr::null());
        assert_eq!(open_stats(control), -libc::EIO);
        hlthunk_close(control);
    }
}

#[test]
fn memory_and_node_files_truncated_under_a_running_card_are_device_faults() {
    machine("gaudi2");
    let index = fresh_index();
    let fd = open(index);
    let (_, va) = alloc(fd, 1);
    let mut memory = vec![7u8; 1 << 20];
    let host = map_host(fd, &mut memory);
    let packets = gaudi2_copy(va, host, 1 << 20);
    assert_eq!(run(fd, 0, &packets), (0, sys::WAIT_COMPLETED));
    truncate(machine_file(&format!("hbm{index}")), 0);
    assert_eq!(run(fd, 0, &packets), (-libc::EIO, sys::WAIT_ABORTED));
    assert_eq!(hlthunk_close(fd), 0);

    let index = fresh_index();
    let fd = open(index);
    let (mut counter, mut note) = (0, 0);
    assert_eq!(hlthunk_request_command_buffer(fd, 4096, &mut counter), 0);
    assert_eq!(hlthunk_allocate_timestamp_elements(fd, 1, &mut note), 0);
    truncate(machine_file(&format!("accel{index}")), 0);
    let mut status = 0;
    let waited = hlthunk_wait_for_interrupt_by_handle(fd, counter, 0, 0, 48, 1, &mut status);
    assert_eq!(waited, -libc::EFAULT);
    assert_eq!(hlthunk_register_timestamp_interrupt(fd, 48, counter, 0, 0, note, 0), 0);
    assert_eq!(hlthunk_close(fd), 0);
}

/// Runs in a process with a small file system of its own, see below.
#[test]
fn child() {
    let Some((role, argument)) = child_role() else { return };
    assert_eq!((role.as_str(), argument), ("full", 0));
    machine("gaudi2");
    let fd = open(0);
    assert!(fd >= 0, "there is space for one card: {fd}");
    let (_, va) = alloc(fd, 1);
    let mut memory = vec![7u8; 1 << 20];
    let host = map_host(fd, &mut memory);
    // Fills what is left.
    let filler = std::fs::File::create("/dev/shm/filler").unwrap();
    let mut at = 0;
    while filler.write_at(&[1; 4096], at).is_ok_and(|written| written == 4096) {
        at += 4096;
    }
    let mut handle = 0;
    assert_eq!(hlthunk_request_command_buffer(fd, 4096, &mut handle), -libc::ENOMEM);
    assert_eq!(hlthunk_device_memory_export_dmabuf_fd(fd, va, 4096, 0), -libc::ENOMEM);
    assert_eq!(open(1), -libc::ENOMEM);
    assert_eq!(hlthunk_get_device_status_info(fd), sys::STATUS_OPERATIONAL);
    assert_eq!(run(fd, 0, &gaudi2_copy(host, va, 1 << 20)), (-libc::EIO, sys::WAIT_ABORTED));
    assert_eq!(hlthunk_close(fd), 0);
    // Space again: everything works.
    drop(filler);
    std::fs::remove_file("/dev/shm/filler").unwrap();
    for index in [0, 1] {
        let fd = open(index);
        assert!(fd >= 0, "{fd}");
        assert_eq!(hlthunk_request_command_buffer(fd, 4096, &mut handle), 0);
        assert_eq!(hlthunk_close(fd), 0);
    }
}

fn write_file(path: &CStr, text: &str) -> bool {
    // SAFETY: plain system calls with valid arguments; may run between fork and exec.
    unsafe {
        let fd = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        let written = libc::write(fd, text.as_ptr().cast(), text.len());
        libc::close(fd);
        written == text.len() as isize
    }
}

#[test]
fn a_full_file_system_is_an_error_of_the_call() {
    // SAFETY: no preconditions.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    let maps = [format!("{user} {user} 1"), format!("{group} {group} 1")];
    let mut command = driver::child("full", 0);
    let unsupported = 77;
    // SAFETY: only system calls between fork and exec; the texts were made before.
    unsafe {
        command.pre_exec(move || {
            let own = libc::unshare(libc::CLONE_NEWNS) == 0
                || (libc::unshare(libc::CLONE_NEWNS | libc::CLONE_NEWUSER) == 0
                    && write_file(c"/proc/self/uid_map", &maps[0])
                    && write_file(c"/proc/self/setgroups", "deny")
                    && write_file(c"/proc/self/gid_map", &maps[1]));
            let nothing = core::ptr::null();
            let private = libc::MS_PRIVATE | libc::MS_REC;
            let (tmpfs, shm) = (c"tmpfs".as_ptr(), c"/dev/shm".as_ptr());
            let size = c"size=256k,mode=1777".as_ptr().cast();
            if !own
                || libc::mount(nothing, c"/".as_ptr(), nothing, private, nothing.cast()) != 0
                || libc::mount(tmpfs, shm, tmpfs, 0, size) != 0
            {
                libc::_exit(unsupported);
            }
            Ok(())
        });
    }
    let output = command.output().unwrap();
    if output.status.code() == Some(unsupported) {
        println!("skipped: a process may not mount a file system of its own here");
        return;
    }
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {text}", output.status);
    for part in [
        "no space left in /dev/shm/soft-gaudi-",
        "remove the folders of machines that nobody uses",
        ": no space left for the card's memory; the device is reset",
    ] {
        assert!(text.contains(part), "no `{part}` in {text}");
    }
}
