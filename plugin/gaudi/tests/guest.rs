//! The card of a framework, on the software Synapse: detection, copies, exports, allocation, and its coming and going.

mod framework;
mod machine;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use framework::Framework;
use gaudi::share::{Access, Relay, RelayPiece, RemoteKey};
use gaudi::{
    Device, DeviceAddr, DeviceChoice, ErrorKind, Generation, Segment, Side, WindowEvent, runtime,
};
use machine::{assert_same, pattern, read, write};

fn device_of(addr: u64) -> Arc<Device> {
    let found = runtime().locate(addr, 1).expect("the framework's memory is found");
    found.device().expect("its card is known")
}

fn size_of(dmabuf: &OwnedFd) -> u64 {
    rustix::fs::seek(dmabuf, rustix::fs::SeekFrom::End(0)).unwrap()
}

/// What the framework's own memory is good for, on either generation.
fn tensors_are_found_copied_and_exported(generation: &str) {
    let framework = Framework::with_card(generation, 3);
    let tensor = framework.malloc(5 << 20) + 128;
    let device = device_of(tensor);
    assert!(device.is_guest());
    assert_eq!(device.info().module_id, 3);
    device.can_copy().unwrap();
    assert!(device.window().range().contains(&tensor));

    // Short, bounced, and more than all bounce slots together.
    for len in [1, 63, 4097, 65_536, 65_537, 3_000_001] {
        let bytes = pattern(len, len as u64);
        write(&device, DeviceAddr(tensor + 3), &vec![0xa5; len + 64]);
        write(&device, DeviceAddr(tensor + 35), &bytes);
        let around = read(&device, DeviceAddr(tensor + 3), len + 64);
        assert_same(&around[32..32 + len], &bytes, "through the framework's streams");
        assert!(around[..32].iter().chain(&around[32 + len..]).all(|&byte| byte == 0xa5));
    }
    let large = framework.malloc(40 << 20);
    let bytes = pattern(33 << 20, 9);
    write(&device, DeviceAddr(large), &bytes);
    assert_same(&read(&device, DeviceAddr(large), bytes.len()), &bytes, "33 MiB");
    let within = framework.malloc(40 << 20);
    // SAFETY: no host memory is involved.
    unsafe {
        let (to, from) = (Side::Device(DeviceAddr(within)), Side::Device(DeviceAddr(large)));
        device.copy_blocking(to, from, bytes.len()).unwrap();
    }
    assert_same(&read(&device, DeviceAddr(within), bytes.len()), &bytes, "within the card");
    device.fill(DeviceAddr(within), 1000, 0x5a).unwrap();
    assert_eq!(read(&device, DeviceAddr(within), 1000), vec![0x5a; 1000]);

    let (one, offset) = device.export(DeviceAddr(tensor), 4096).unwrap();
    assert_eq!(offset, tensor - device.window().start.0);
    let (other, other_offset) = device.export(DeviceAddr(large), 10).unwrap();
    assert_eq!(other_offset - offset, large - tensor);
    assert_eq!(size_of(&one), device.window().len / 4096 * 4096, "the whole pool");
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_ino;
    assert_eq!(inode(&one), inode(&other), "exported once");
    let (alone, at) = device.export_alone(DeviceAddr(tensor), 100).unwrap();
    assert_eq!((size_of(&alone), at), (4096, tensor % 4096));
    assert_eq!(Framework::calls(None), 0, "nothing that breaks the framework");
}

#[test]
fn tensors_on_a_gaudi2_are_found_copied_and_exported() {
    tensors_are_found_copied_and_exported("gaudi2");
    assert_eq!(Framework::calls(Some(c"synDeviceAcquireByModuleId")), 1);
}

#[test]
fn tensors_on_a_gaudi3_are_found_copied_and_exported() {
    tensors_are_found_copied_and_exported("gaudi3");
    let device = runtime().devices().pop().unwrap();
    assert_eq!(device.info().generation, Generation::Gaudi3);
}

/// The driver refuses each export: peers reach it through a relay.
#[test]
fn tensors_that_cannot_be_exported_are_shared() {
    // SAFETY: no other thread of this process reads the environment.
    unsafe { std::env::set_var("SOFT_GAUDI_FAULTS", "yes") };
    let framework = Framework::with_card("gaudi2", 3);
    let tensor = DeviceAddr(framework.malloc(1 << 20));
    let device = device_of(tensor.0);
    let bytes = pattern(5000, 1);
    write(&device, tensor, &bytes);
    machine::faults("hlthunk_device_memory_export_dmabuf_fd fail:EIO");
    let share = device.share(tensor, 1).unwrap();
    // To this process itself, as to any other.
    let key = RemoteKey::parse(&share.key()).unwrap();
    let mut back = vec![0; bytes.len()];
    let (remote, len) = (tensor.0, bytes.len());
    let local = Side::Host(back.as_mut_ptr());
    let get = RelayPiece { access: Access::Read, key, remote, local, device: None, len };
    // SAFETY: the buffer lives until the job has ended.
    unsafe { Relay::new(&key).unwrap().start(&[get]) }.unwrap().wait().unwrap();
    assert_same(&back, &bytes, "through a relay");
}

#[test]
fn a_copy_in_the_background_is_polled_and_lets_others_go_on() {
    let framework = Framework::with_card("gaudi2", 1);
    let tensor = framework.malloc(8 << 20);
    let device = device_of(tensor);
    let bytes = pattern(6_000_000, 4);
    let mut back = vec![0_u8; bytes.len()];
    let src = Side::Host(bytes.as_ptr().cast_mut());
    let to = [Segment {
        dst: Side::Device(DeviceAddr(tensor)),
        src,
        len: bytes.len(),
        host_region: None,
    }];
    // SAFETY: both buffers live until the copies have ended, and nothing else uses them.
    unsafe {
        let mut transfer = device.copy(&to).unwrap();
        while transfer.poll().is_none() {
            device.progress();
        }
        transfer.wait().unwrap();
        let dst = Side::Host(back.as_mut_ptr());
        let src = Side::Device(DeviceAddr(tensor));
        let from = [Segment { dst, src, len: back.len(), host_region: None }];
        device.copy(&from).unwrap().wait().unwrap();
    }
    assert_same(&back, &bytes, "there and back");
    assert_eq!(Framework::calls(None), 0);
}

#[test]
fn memory_comes_from_the_framework_and_goes_back_to_it() {
    let framework = Framework::with_card("gaudi2", 0);
    let device = runtime().open(&DeviceChoice::Any).unwrap();
    assert!(device.is_guest());
    let (before, _) = framework.memory();
    let ours = device.alloc(1 << 20, 1).unwrap();
    assert!(ours.addr().0.is_multiple_of(4096));
    let (during, _) = framework.memory();
    assert!(before - during >= 1 << 20, "{before} {during}");
    let bytes = pattern(1 << 20, 3);
    write(&device, ours.addr(), &bytes);
    assert_same(&read(&device, ours.addr(), 1 << 20), &bytes, "our memory in its pool");
    let tensor = framework.malloc(1 << 20);
    assert_eq!(device_of(tensor).id(), device.id(), "memory around ours is still found");
    let large = device.alloc(64 << 20, 1).unwrap();
    drop((large, ours));
    device_of(tensor);
    let (after, _) = framework.memory();
    // One page of ours is kept for the next allocation.
    assert!(before - after <= (1 << 20) + (3 << 20), "{before} {after}");
}

#[test]
fn a_framework_that_took_everything_is_named_with_the_variable_that_helps() {
    let framework = Framework::with_card("gaudi2", 0);
    let (free, _) = framework.memory();
    let taken = framework.malloc(free - (1 << 20));
    let device = device_of(taken);
    let error = device.alloc(4 << 20, 1).unwrap_err();
    assert_eq!((error.kind(), error.errno()), (ErrorKind::OutOfMemory, Some(libc::ENOMEM)));
    let text = error.to_string();
    assert!(
        text.contains("PT_HPU_POOL_MEM_ACQUIRE_PERC") && text.contains("bytes of its pool"),
        "{text}"
    );
    assert!(!device.is_lost(), "the card is as good as before");
    framework.free(taken);
    device.alloc(4 << 20, 1).unwrap();
}

#[test]
fn a_card_that_is_acquired_late_is_found_at_the_first_pointer() {
    let framework = Framework::load("gaudi2");
    runtime().discover().unwrap();
    let error = runtime().open(&DeviceChoice::Any).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeviceBusy);
    assert!(error.to_string().contains("Synapse is in this process"), "{error}");
    assert!(runtime().locate(0x1001_6001_6000_0000, 1).is_none());
    framework.acquire(5);
    let tensor = framework.malloc(4096);
    let device = device_of(tensor);
    assert_eq!(device.info().module_id, 5);
    assert_eq!(runtime().open(&DeviceChoice::Any).unwrap().id(), device.id());
    assert_eq!(runtime().open(&DeviceChoice::Module(5)).unwrap().id(), device.id());
}

#[test]
fn a_card_of_our_own_beside_the_frameworks_has_other_addresses() {
    let framework = Framework::with_card("gaudi2", 2);
    let tensor = framework.malloc(1 << 20);
    let guest = device_of(tensor);
    let own = runtime().open(&DeviceChoice::Module(6)).unwrap();
    assert!(!own.is_guest());
    let (ours, theirs) = (own.window().range(), guest.window().range());
    assert!(ours.end <= theirs.start || theirs.end <= ours.start, "{ours:#x?} {theirs:#x?}");
    let memory = own.alloc(1 << 20, 1).unwrap();
    assert_eq!(device_of(memory.addr().0).id(), own.id());
    let bytes = pattern(1 << 20, 8);
    write(&guest, DeviceAddr(tensor), &bytes);
    // SAFETY: no host memory is involved.
    unsafe {
        let (to, from) = (Side::Device(memory.addr()), Side::Device(DeviceAddr(tensor)));
        own.copy_blocking(to, from, bytes.len()).unwrap();
    }
    assert_same(
        &read(&own, memory.addr(), bytes.len()),
        &bytes,
        "from the framework's card to ours",
    );
    assert_eq!(Framework::calls(None), 0, "no raw submission on the framework's card");
}

#[test]
fn the_frameworks_own_host_mapping_survives_our_copies_of_the_same_memory() {
    let framework = Framework::with_card("gaudi2", 0);
    let tensor = framework.malloc(4 << 20);
    let device = device_of(tensor);
    let bytes = pattern(2 << 20, 6);
    assert_eq!(framework.host_map(&bytes), 0);
    write(&device, DeviceAddr(tensor), &bytes);
    assert_eq!(framework.copy_in(&bytes, tensor + (2 << 20)), 0, "it is mapped still");
    assert_same(
        &read(&device, DeviceAddr(tensor + (2 << 20)), 2 << 20),
        &bytes,
        "by the framework",
    );
}

/// What observers hear of the framework's pool.
fn record() -> Arc<Mutex<Vec<&'static str>>> {
    let heard = Arc::new(Mutex::new(Vec::new()));
    let record = Arc::clone(&heard);
    runtime().subscribe(Box::new(move |event| {
        let what = match event {
            WindowEvent::Mapped(_) => "mapped",
            WindowEvent::Unmapping(_) => "unmapping",
            WindowEvent::Opened(_) => "opened",
            WindowEvent::Retired(_) => "retired",
        };
        record.lock().unwrap().push(what);
    }));
    heard
}

#[test]
fn a_release_that_is_announced_finds_nothing_of_ours_on_the_card() {
    let framework = Framework::with_card("gaudi2", 4);
    let heard = record();
    let tensor = framework.malloc(1 << 20);
    let device = device_of(tensor);
    let ours = device.alloc(4096, 1).unwrap();
    write(&device, DeviceAddr(tensor), &pattern(1 << 20, 1));
    let (dmabuf, _) = device.export(DeviceAddr(tensor), 4096).unwrap();
    drop(dmabuf);
    let log = machine::kernel_log().len();
    let releasing = runtime().framework_releasing();
    assert_eq!(*heard.lock().unwrap(), ["mapped", "unmapping"]);
    let found = || runtime().locate(tensor, 1).is_some();
    let elsewhere = std::thread::spawn(move || runtime().locate(tensor, 1).is_some());
    assert!(!found() && !elsewhere.join().unwrap(), "no thread attaches before it is released");
    assert_eq!(framework.release(), 0);
    drop(releasing);
    assert_eq!(machine::kernel_log().len(), log, "no unmap was refused");
    assert!(runtime().locate(tensor, 1).is_none());
    assert!(device.is_lost());
    let error = device.alloc(4096, 1).unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("released"), "{error}");
    drop(ours);

    framework.acquire(4);
    let tensor = framework.malloc(1 << 20);
    let again = device_of(tensor);
    assert_ne!(again.id(), device.id());
    let bytes = pattern(100_000, 2);
    write(&again, DeviceAddr(tensor), &bytes);
    assert_same(&read(&again, DeviceAddr(tensor), bytes.len()), &bytes, "after a new start");
    assert_eq!(Framework::calls(None), 0);
}

#[test]
fn memory_that_we_have_when_a_release_is_refused_goes_back_to_the_pool() {
    let framework = Framework::with_card("gaudi2", 4);
    let (before, _) = framework.memory();
    let tensor = framework.malloc(4096);
    let device = device_of(tensor);
    let ours = device.alloc(8 << 20, 1).unwrap();
    let releasing = runtime().framework_releasing();
    // As if the framework had answered 26, because a thread of its own was in a call.
    releasing.refused();
    drop(releasing);
    let again = device_of(tensor);
    assert_ne!(again.id(), device.id());
    let bytes = pattern(8 << 20, 5);
    write(&again, ours.addr(), &bytes);
    assert_same(&read(&again, ours.addr(), bytes.len()), &bytes, "memory that we had before");
    let late = again.alloc(8 << 20, 1).unwrap();
    let releasing = runtime().framework_releasing();
    releasing.refused();
    drop((releasing, device, again, ours, late));
    framework.free(tensor);
    assert_eq!(framework.memory().0, before, "all of it went back");

    let tensor = framework.malloc(4096);
    let device = device_of(tensor);
    let ours = device.alloc(8 << 20, 1).unwrap();
    let releasing = runtime().framework_releasing();
    releasing.refused();
    drop(releasing);
    let releasing = runtime().framework_releasing();
    assert_eq!(framework.release(), 0);
    drop(releasing);
    framework.acquire(4);
    let all = framework.malloc(before);
    drop((device, ours));
    assert_eq!(framework.memory().0, 0, "a card that was released after all gets nothing back");
    framework.free(all);

    let device = device_of(framework.malloc(4096));
    let ours = device.alloc(8 << 20, 1).unwrap();
    let releasing = runtime().framework_releasing();
    releasing.refused();
    drop(releasing);
    assert_eq!(framework.release(), 0, "without a word");
    framework.acquire(7);
    let all = framework.malloc(framework.memory().0);
    assert!(runtime().framework_card().unwrap().is_some());
    drop((device, ours));
    assert_eq!(framework.memory().0, 0, "nor does another card, once it was looked at");
    framework.free(all);
    assert_eq!(Framework::calls(None), 0);
}

#[test]
fn a_release_without_a_word_is_noticed_and_fails_copies_with_the_reason() {
    let framework = Framework::with_card("gaudi2", 4);
    let tensor = framework.malloc(1 << 20);
    let device = device_of(tensor);
    write(&device, DeviceAddr(tensor), &pattern(1 << 20, 1));
    assert_eq!(framework.release(), 0);
    let mut byte = 0_u8;
    let (to, from) = (Side::Host(&raw mut byte), Side::Device(DeviceAddr(tensor)));
    // SAFETY: the byte lives across the call.
    let error = unsafe { device.copy_blocking(to, from, 1) }.unwrap_err();
    assert!(error.is_device_lost() && error.to_string().contains("released"), "{error}");
    let error = device.export(DeviceAddr(tensor), 1).unwrap_err();
    assert!(error.to_string().contains("released"), "{error}");

    framework.acquire(7);
    let tensor = framework.malloc(1 << 20);
    // Perhaps at the very address of the card that is gone: not before the next look.
    let open = runtime().open(&DeviceChoice::Any).unwrap();
    assert_eq!(open.info().module_id, 7);
    assert_eq!(device_of(tensor).id(), open.id());
    write(&open, DeviceAddr(tensor), &pattern(1000, 1));
    assert_eq!(Framework::calls(None), 0);
}

#[test]
fn a_card_that_another_thread_attaches_to_while_the_last_is_left_stays_known() {
    let framework = Framework::with_card("gaudi2", 4);
    let tensor = framework.malloc(1 << 20);
    let first = device_of(tensor).id();
    // In the middle of the leave: before the others are notified, and before the table is touched.
    let attached = Arc::new(Mutex::new(None));
    let result = Arc::clone(&attached);
    runtime().subscribe(Box::new(move |event| {
        if matches!(event, WindowEvent::Unmapping(_)) {
            let attach = std::thread::spawn(|| runtime().framework_card().unwrap().unwrap().id());
            *result.lock().unwrap() = Some(attach.join().unwrap());
        }
    }));
    let heard = record();
    assert_eq!(framework.release(), 0);
    framework.acquire(4);
    let tensor = framework.malloc(1 << 20);
    let found = runtime().framework_card().unwrap().unwrap();
    assert_eq!(Some(found.id()), *attached.lock().unwrap());
    assert_ne!(found.id(), first);
    assert_eq!(device_of(tensor).id(), found.id(), "its memory is in the table");
    assert_eq!(heard.lock().unwrap().last(), Some(&"mapped"), "what observers heard last");
    assert_eq!(Framework::calls(None), 0);
}

#[test]
fn a_child_that_is_forked_does_not_touch_the_frameworks_card() {
    let framework = Framework::with_card("gaudi2", 0);
    let tensor = framework.malloc(4096);
    let device = device_of(tensor);
    write(&device, DeviceAddr(tensor), &[1, 2, 3]);
    // SAFETY: the child only asks the engine, and ends without running handlers.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused = device.can_copy().is_err()
            && device.alloc(1, 1).is_err()
            && runtime().open(&DeviceChoice::Any).is_err()
            && runtime().locate(tensor + (1 << 40), 1).is_none();
        drop(device);
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!refused)) };
    }
    let mut status = 0;
    // SAFETY: our child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    assert_eq!(status, 0, "the child was refused everything");
    assert_eq!(read(&device, DeviceAddr(tensor), 3), [1, 2, 3], "the parent goes on");
}

#[test]
fn the_frameworks_card_is_not_lent() {
    let framework = Framework::with_card("gaudi2", 0);
    let tensor = framework.malloc(4096);
    let device = device_of(tensor);
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let fds = fds.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let refusals = fds.filter_map(|fd| {
        // SAFETY: open a moment ago; whatever it is, it is only asked.
        runtime().lend(unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }).err()
    });
    let refusals: Vec<String> = refusals.map(|error| error.to_string()).collect();
    assert!(refusals.iter().any(|text| text.contains("SCAL")), "{refusals:?}");
    assert!(device.can_import().unwrap_err().kind() == ErrorKind::PermissionDenied);
    assert_eq!(Framework::calls(None), 0);
}
