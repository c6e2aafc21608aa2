//! A card that the application opened by itself, on the software Gaudi2. The application is played
//! by `hl_thunk`, which knows nothing of the engine.

mod machine;
mod peer;

use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gaudi::{Device, DeviceAddr, DeviceChoice, ErrorKind, Options, Remedy, Side, runtime};
use hl_thunk::{ControlDevice, DeviceMapping, DeviceMemory, Library};
use machine::{alone, assert_same, pattern, read, write};
use peer::{Peer, Set, hex, stat};

/// What the application has.
struct Application {
    card: hl_thunk::Device,
    choice: DeviceChoice,
    index: u32,
}

impl Application {
    /// Opens a card that no other test uses.
    fn start() -> Application {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        machine::set_up("gaudi2");
        let index = NEXT.fetch_add(1, Ordering::Relaxed);
        let cards = runtime().discover().unwrap();
        let bus_id = cards[index as usize].bus_id.clone();
        let library = Library::load().unwrap();
        let card = hl_thunk::Device::open(&library, bus_id.as_str()).unwrap();
        Application { card, choice: DeviceChoice::Bus(bus_id), index }
    }

    fn map(&self, len: u64, hint: Option<DeviceAddr>) -> DeviceMapping {
        DeviceMemory::alloc(&self.card, len).unwrap().map(hint).unwrap()
    }

    /// Somewhere no other card has memory or a window (those of the first cards are in the upper half
    /// of the range): the engine refuses two cards at one address.
    fn map_apart(&self, len: u64) -> DeviceMapping {
        let page = machine::driver_page();
        let aligned = 0x5000_0000_0000_u64.next_multiple_of(page);
        let hint = (0x1001 << 48) + aligned + u64::from(self.index) * 64 * page;
        let mapping = self.map(len, Some(DeviceAddr(hint)));
        assert_eq!(mapping.addr().0, hint, "the driver takes the hint");
        mapping
    }

    fn device(&self) -> Arc<Device> {
        runtime().open(&self.choice).unwrap()
    }
}

/// Whether cards are adopted is a setting of the process: tests about it take turns.
fn adopting(adopt: bool) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    runtime().configure(Options { adopt_own_cards: Some(adopt), ..Options::default() });
    turn
}

fn copy(device: &Arc<Device>, dst: DeviceAddr, src: DeviceAddr, len: usize) {
    // SAFETY: no host memory is involved.
    unsafe { device.copy_blocking(Side::Device(dst), Side::Device(src), len) }.unwrap();
}

#[test]
fn memory_of_the_application_on_a_lent_card_is_like_our_own() {
    let _turn = adopting(false);
    let application = Application::start();
    let theirs = application.map_apart(1 << 20);
    let fd = application.card.as_fd();
    runtime().lend(fd).unwrap();
    runtime().lend(fd).expect("lending twice is lending");
    assert!(runtime().locate(theirs.addr().0, 1).is_none(), "not reported yet");
    runtime().add_memory(fd, theirs.addr(), 1 << 20).unwrap();

    let device = application.device();
    let found = runtime().locate(theirs.addr().0 + 5, 100).unwrap();
    assert_eq!((found.device_id, found.base, found.offset), (device.id(), theirs.addr(), 5));
    assert!(runtime().locate(theirs.addr().0 + (1 << 20) - 1, 2).is_none(), "beyond its end");

    let bytes = pattern(300_001, 7);
    write(&device, DeviceAddr(theirs.addr().0 + 3), &bytes);
    let ours = device.alloc(400_000, 1).unwrap();
    copy(&device, ours.addr(), DeviceAddr(theirs.addr().0 + 3), bytes.len());
    assert_same(&read(&device, ours.addr(), bytes.len()), &bytes, "their memory to ours");

    assert!(runtime().remove_memory(fd, theirs.addr()).is_some());
    assert!(runtime().remove_memory(fd, theirs.addr()).is_none());
    assert!(runtime().locate(theirs.addr().0, 1).is_none());
    theirs.unmap().expect("nothing of ours keeps it");

    runtime().take_back(fd).unwrap();
    assert_eq!(runtime().take_back(fd).unwrap_err().kind(), ErrorKind::InvalidParams);
    assert_same(
        &read(&device, ours.addr(), 8),
        &bytes[..8],
        "what we have on it stays until freed",
    );
    drop((ours, device));
    let choice = application.choice.clone();
    drop(application);
    runtime().open(&choice).expect("the card is free again");
}

#[test]
fn exports_of_the_applications_memory_do_not_keep_it_mapped() {
    let application = Application::start();
    let theirs = application.map_apart(1 << 20);
    let fd = application.card.as_fd();
    runtime().lend(fd).unwrap();
    runtime().add_memory(fd, theirs.addr(), 1 << 20).unwrap();
    let device = application.device();
    let at = DeviceAddr(theirs.addr().0 + 0x5123);
    let (dmabuf, offset) = device.export(at, 0x2000).unwrap();
    let size = rustix::fs::seek(&dmabuf, rustix::fs::SeekFrom::End(0)).unwrap();
    assert_eq!((size, offset), (0x3000, 0x123), "whole pages around the range");

    // While the descriptor is open the driver will not unmap; the memory is then still known.
    let unmapping = runtime().remove_memory(fd, theirs.addr()).unwrap();
    let (theirs, refused) = theirs.unmap().unwrap_err();
    assert_eq!(refused.errno, libc::EINVAL);
    runtime().keep_memory(fd, unmapping).unwrap();
    assert!(runtime().locate(theirs.addr().0, 1 << 20).is_some());

    drop(dmabuf);
    let share = device.share(at, 100).unwrap();
    runtime().remove_memory(fd, theirs.addr()).unwrap();
    theirs.unmap().expect("no export of ours is left, not even the shared one");
    drop(share);
    runtime().take_back(fd).unwrap();
}

#[test]
fn a_card_that_was_not_lent_is_known_but_not_used() {
    let _turn = adopting(false);
    let application = Application::start();
    let theirs = application.map_apart(1 << 20);
    let fd = application.card.as_fd();
    runtime().add_memory(fd, theirs.addr(), 1 << 20).unwrap();
    let device = application.device();
    assert!(runtime().locate(theirs.addr().0, 1 << 20).is_some());
    device.export(theirs.addr(), 4096).expect("the driver exports on any descriptor of the card");
    device.share(theirs.addr(), 4096).expect("and peers have cards of their own");
    assert_eq!(device.can_import().unwrap_err().kind(), ErrorKind::PermissionDenied);
    for refused in [device.can_copy().unwrap_err(), device.alloc(1, 1).unwrap_err()] {
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
        assert_eq!(refused.remedy(), Remedy::LendCard, "{refused}");
    }

    // A loan that fails changes nothing.
    let control = ControlDevice::open(&Library::load().unwrap(), application.index).unwrap();
    runtime().lend(control.as_fd()).unwrap_err();
    let found = runtime().locate(theirs.addr().0, 1 << 20).expect("known as before");
    assert_eq!(found.device_id, device.id());
    assert!(runtime().is_lent(device.id()), "the application's card as before");
    let refused = device.can_copy().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");

    // Lent after all: what was known stays known.
    runtime().lend(fd).unwrap();
    drop(device);
    let device = application.device();
    let bytes = pattern(5000, 3);
    write(&device, theirs.addr(), &bytes);
    assert_same(&read(&device, theirs.addr(), 5000), &bytes, "on the card that is lent now");
    runtime().take_back(fd).unwrap();
    assert!(runtime().locate(theirs.addr().0, 1).is_none(), "taken back with its memory");
}

#[test]
fn a_card_that_is_busy_in_this_process_says_how_to_lend_it_or_is_adopted() {
    let turn = adopting(false);
    let application = Application::start();
    let busy = runtime().open(&application.choice).unwrap_err();
    assert_eq!((busy.kind(), busy.errno()), (ErrorKind::DeviceBusy, Some(libc::EBUSY)));
    let text = busy.to_string();
    assert!(text.contains("this process") && text.contains("lend the card"), "{text}");
    drop(turn);

    let _turn = adopting(true);
    let device = application.device();
    let memory = device.alloc(100, 1).unwrap();
    write(&device, memory.addr(), &pattern(100, 1));
    drop((memory, device));
    runtime().take_back(application.card.as_fd()).unwrap();
    runtime().configure(Options { adopt_own_cards: Some(false), ..Options::default() });
}

#[test]
fn what_makes_no_sense_is_refused() {
    let _turn = adopting(false);
    let [one, other] = [Application::start(), Application::start()];
    let library = Library::load().unwrap();
    let control = ControlDevice::open(&library, one.index).unwrap();
    let refused = runtime().lend(control.as_fd()).unwrap_err();
    assert!(refused.to_string().contains("compute node"), "{refused}");
    let no_card = std::fs::File::open("/dev/null").unwrap();
    runtime().lend(no_card.as_fd()).unwrap_err();

    // Without a hint both drivers answer with the same address.
    let same = [&one, &other].map(|application| application.map(4096, None));
    assert_eq!(same[0].addr(), same[1].addr(), "or this test shows nothing");
    runtime().add_memory(one.card.as_fd(), same[0].addr(), 4096).unwrap();
    let refused = runtime().add_memory(other.card.as_fd(), same[1].addr(), 4096).unwrap_err();
    assert!(refused.to_string().contains("overlap"), "{refused}");
    for (start, len) in [(DeviceAddr(0), 4096), (same[1].addr(), 0), (same[1].addr(), u64::MAX)] {
        runtime().add_memory(other.card.as_fd(), start, len).unwrap_err();
    }
    for application in [&one, &other] {
        runtime().take_back(application.card.as_fd()).unwrap();
    }
}

#[test]
fn a_handle_that_was_seen_says_how_much_was_mapped() {
    let application = Application::start();
    let fd = application.card.as_fd();
    let theirs = application.map_apart(8192);
    let unknown = runtime().memory_mapped(fd, 77, theirs.addr()).unwrap_err();
    assert_eq!(unknown.remedy(), Remedy::ReportLength, "{unknown}");
    runtime().memory_allocated(fd, 77, 4096);
    // While the driver frees it, another thread is given the same handle; or the driver refuses.
    assert_eq!(runtime().memory_freeing(fd, 77), Some(4096));
    runtime().memory_mapped(fd, 77, theirs.addr()).expect_err("freed");
    runtime().memory_allocated(fd, 77, 8192);
    runtime().memory_mapped(fd, 77, theirs.addr()).unwrap();
    assert_eq!(runtime().locate(theirs.addr().0, 8192).unwrap().length, 8192);

    // Other descriptors of the same card are closed: that ends nothing.
    let control = ControlDevice::open(&Library::load().unwrap(), application.index).unwrap();
    runtime().card_closing(control.as_fd());
    runtime().card_closing(fd.try_clone_to_owned().unwrap().as_fd());
    assert!(runtime().locate(theirs.addr().0, 8192).is_some(), "the card is open still");
    assert_eq!(runtime().memory_freeing(fd, 77), Some(8192), "handles are known still");
    runtime().memory_allocated(fd, 77, 8192);

    runtime().card_closing(fd);
    assert!(runtime().locate(theirs.addr().0, 1).is_none(), "closed with its memory");
    runtime().memory_mapped(fd, 77, theirs.addr()).expect_err("handles are forgotten, too");
    assert!(fd.as_raw_fd() >= 0);
}

#[test]
#[ignore = "run by the other tests as a process of its own"]
fn serve() {
    peer::serve();
}

/// A peer that has the memory at hand must not make the application's own unmapping fail.
#[test]
fn peers_that_keep_memory_open_let_it_go_before_it_is_unmapped() {
    alone!(2);
    let application = Application::start();
    let fd = application.card.as_fd();
    runtime().lend(fd).unwrap();
    let device = application.device();
    let mut peer = Peer::start(Set::default());
    peer.request_ok("card 1");
    for slot in 0..20 {
        let theirs = application.map_apart(1 << 20);
        runtime().add_memory(fd, theirs.addr(), 1 << 20).unwrap();
        let share = device.share(theirs.addr(), 1).unwrap();
        peer.request_ok(&format!("open {slot} {}", hex(&share.key())));
        peer.request_ok(&format!("close {slot}"));
        assert_eq!(peer.stat("dmabuf_imports_live"), 1, "kept for the next time");
        runtime().remove_memory(fd, theirs.addr()).unwrap();
        theirs.unmap().expect("the peer has let it go");
    }

    // One that is using it is waited for in vain; the wait ends, and nothing is lost.
    let theirs = application.map_apart(1 << 20);
    runtime().add_memory(fd, theirs.addr(), 1 << 20).unwrap();
    let share = device.share(theirs.addr(), 1).unwrap();
    peer.request_ok(&format!("open 50 {}", hex(&share.key())));
    let unmapping = runtime().remove_memory(fd, theirs.addr()).unwrap();
    let (theirs, refused) = theirs.unmap().unwrap_err();
    assert_eq!(refused.errno, libc::EINVAL);
    runtime().keep_memory(fd, unmapping).unwrap();
    peer.request_ok("close 50");
    runtime().remove_memory(fd, theirs.addr()).unwrap();
    theirs.unmap().expect("the peer has let it go");
    assert_eq!(stat("ipc_quarantined_bytes"), 0);
    runtime().take_back(fd).unwrap();
}

/// SCAL maps its pool at fixed addresses of every card it opens. On a card that a framework lends, both of
/// us map memory.
#[test]
fn a_card_with_a_framework_s_pool_has_room_for_ours() {
    alone!(2);
    let _turn = adopting(false);
    let application = Application::start();
    let page = machine::driver_page();
    let low = if page == 640 << 20 { 0x5000_0000_0000 } else { 0x6000_0000_0000 };
    let pool = application.map(8 * page, Some(DeviceAddr((0x1001 << 48) + low)));
    assert_eq!(pool.addr().0 & 0xffff_ffff_ffff, low, "the driver takes the hint");
    runtime().lend(application.card.as_fd()).unwrap();
    let device = application.device();
    let ours = device.alloc(3 * page, 1).unwrap();
    let bytes = pattern(4099, 3);
    write(&device, ours.addr(), &bytes);
    assert_same(&read(&device, ours.addr(), bytes.len()), &bytes, "next to the pool");

    // The framework's pool on another card is not taken for memory of this one.
    for other in runtime().discover().unwrap() {
        let card = runtime().open(&DeviceChoice::Bus(other.bus_id)).unwrap();
        assert!(!card.window().range().contains(&pool.addr().0), "{card}");
    }
}

#[test]
fn memory_that_the_application_maps_in_our_window_is_gone_round() {
    let _turn = adopting(false);
    let application = Application::start();
    runtime().lend(application.card.as_fd()).unwrap();
    let device = application.device();
    let page = machine::driver_page();
    let window = device.window().range();
    let low = (window.start & 0xffff_ffff_ffff).next_multiple_of(page);
    let theirs = application.map(4 * page, Some(DeviceAddr((0x1001 << 48) + low)));
    assert!(window.contains(&theirs.addr().0), "the driver takes the hint");
    let ours = device.alloc(2 * page, 1).unwrap();
    assert!(window.contains(&ours.addr().0));
    let bytes = pattern(257, 4);
    write(&device, ours.addr(), &bytes);
    assert_same(&read(&device, ours.addr(), bytes.len()), &bytes, "next to it");
}
