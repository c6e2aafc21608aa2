//! Several devices of one process on the software Gaudi2: their addresses, their registers, and who
//! holds them.

mod machine;

use std::sync::Arc;

use gaudi::{Device, DeviceAddr, DeviceChoice, ErrorKind, Options, Remedy, Sysfs, runtime};
use hl_thunk::{DeviceMemory, Library};
use machine::{assert_same, pattern, read, write};

fn setup() -> Arc<Device> {
    machine::set_up("gaudi2");
    machine::fresh()
}

/// Whether registers may be mapped.
fn permit_registers(permitted: bool) {
    runtime().configure(Options { register_access: Some(permitted), ..Options::default() });
}

#[test]
fn cards_whose_driver_answers_with_equal_addresses_are_kept_apart() {
    let cards = [setup(), setup()].map(|device| device.info().bus_id.clone());
    // Without a wish for an address, the driver answers the same for both cards.
    let library = Library::load().unwrap();
    let addresses = cards.each_ref().map(|bus_id| {
        let card = hl_thunk::Device::open(&library, bus_id.as_str()).unwrap();
        let memory = DeviceMemory::alloc(&card, 4096).unwrap();
        memory.map(None).unwrap().addr()
    });
    assert_eq!(addresses[0], addresses[1], "or this test shows nothing");

    let devices = cards.map(|bus_id| runtime().open(&DeviceChoice::Bus(bus_id)).unwrap());
    let memory = devices.each_ref().map(|device| device.alloc(8192, 1).unwrap());
    let contents = [pattern(8192, 1), pattern(8192, 2)];
    for (at, device) in devices.iter().enumerate() {
        write(device, memory[at].addr(), &contents[at]);
    }
    for (at, device) in devices.iter().enumerate() {
        let (mine, other) = (memory[at].addr().0, memory[1 - at].addr().0);
        assert!(device.window().range().contains(&mine));
        assert!(!device.window().range().contains(&other));
        let found = runtime().locate(mine, 8192).unwrap();
        assert_eq!((found.device_id, found.base.0), (device.id(), mine));
        assert_same(&read(device, memory[at].addr(), 8192), &contents[at], "each its own bytes");
        let foreign = device.export(memory[1 - at].addr(), 8192).unwrap_err();
        assert_eq!(foreign.kind(), ErrorKind::InvalidParams, "{foreign}");
    }
}

#[test]
fn registers_are_refused_by_us_and_then_by_the_driver_unless_on_its_list() {
    let device = setup();
    // Inside the configuration space, but no block starts there.
    let address = DeviceAddr(0x1000_007f_f800_0004);
    let off = device.map_block(address).unwrap_err();
    assert_eq!((off.kind(), off.errno()), (ErrorKind::PermissionDenied, None));
    permit_registers(true);
    let unlisted = device.map_block(address).unwrap_err();
    let listed = DeviceAddr(0x1000_007f_fc31_e000);
    let block = device.map_block(listed).unwrap();
    permit_registers(false);
    assert_eq!((block.address(), block.len(), block.device().id()), (listed, 4096, device.id()));
    assert_eq!(block.read(0), Ok(u32::from_le_bytes(*b"soft")), "says that it is no hardware");
    assert_eq!((unlisted.kind(), unlisted.errno()), (ErrorKind::InvalidParams, Some(libc::EINVAL)));
    let text = unlisted.to_string();
    assert!(text.contains("hlthunk_get_hw_block") && text.contains("on its list"), "{text}");
    assert!(!device.is_lost());
}

#[test]
fn a_card_that_another_library_of_this_process_holds_is_said_to_be_ours() {
    let bus_id = setup().info().bus_id.clone();
    let library = Library::load().unwrap();
    let elsewhere = hl_thunk::Device::open(&library, bus_id.as_str()).unwrap();
    let busy = runtime().open(&DeviceChoice::Bus(bus_id.clone())).unwrap_err();
    assert_eq!((busy.kind(), busy.errno()), (ErrorKind::DeviceBusy, Some(libc::EBUSY)));
    assert!(busy.to_string().contains("this process"), "{busy}");
    drop(elsewhere);
    runtime().open(&DeviceChoice::Bus(bus_id)).unwrap();
}

#[test]
fn the_place_of_a_card_is_read_from_the_sysfs_that_the_variable_names() {
    machine::set_up("gaudi2");
    if machine::is_child() {
        let place =
            |at: usize| Sysfs::default().location(&runtime().discover().unwrap()[at].bus_id);
        let first = place(0).expect("the first card is there");
        assert_eq!((first.numa_node, first.path().len(), place(1)), (Some(5), 2, None));
        assert!(runtime().devices().is_empty(), "no card was opened");
        return;
    }
    let bus_id = runtime().discover().unwrap()[0].bus_id.clone();
    let root = std::env::temp_dir().join(format!("gaudi-devices-sysfs-{}", std::process::id()));
    let device = root.join("devices/pci0000:00").join(bus_id.as_str());
    std::fs::create_dir_all(&device).unwrap();
    std::fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
    std::fs::write(device.join("numa_node"), "5\n").unwrap();
    std::os::unix::fs::symlink(&device, root.join("bus/pci/devices").join(bus_id.as_str()))
        .unwrap();
    let mut command =
        machine::child("the_place_of_a_card_is_read_from_the_sysfs_that_the_variable_names");
    let output = command.env("GAUDI_SYSFS_ROOT", &root).output().unwrap();
    std::fs::remove_dir_all(root).unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Nodes of a driver that takes other ioctls than the library's open, and answer nothing.
#[test]
fn a_node_that_does_not_know_the_librarys_ioctl_is_a_pair_that_does_not_fit() {
    if machine::is_child() {
        machine::set_up("gaudi2");
        let library = Library::load().unwrap();
        assert!(!library.is_software(), "{:?}", library.version());
        // The machine's folder is there from now on.
        drop(hl_thunk::ControlDevice::open(&library, 0).unwrap());
        for (errno, is_pair) in [("EIO", false), ("ENOTTY", true)] {
            machine::faults(&format!("hlthunk_get_hw_ip_info fail:{errno} times=0"));
            let error = runtime().discover().unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::DeviceNotFound, "{text}");
            assert_eq!(text.contains("has a Gaudi, accel0 at 0000:33:00.0"), is_pair, "{text}");
            assert!(text.contains("hlthunk_get_hw_ip_info: "), "{text}");
        }
        return;
    }
    // The software Gaudi's library under another name than its own: with that one no kernel driver is asked.
    let folder = tempfile::tempdir().unwrap();
    let mut library = std::fs::read(machine::library()).unwrap();
    let (name, other) = (b"1.10.0-soft-gaudi-", b"1.10.0-some-gaudi-");
    let at = library.windows(name.len()).position(|bytes| bytes == name).expect("its version");
    library[at..at + other.len()].copy_from_slice(other);
    let renamed = folder.path().join("libhl-thunk.so");
    std::fs::write(&renamed, library).unwrap();
    let sysfs = folder.path().join("sys");
    let card = sysfs.join("devices/pci0000:30/0000:33:00.0");
    std::fs::create_dir_all(card.join("accel/accel0")).unwrap();
    std::fs::write(card.join("vendor"), "0x1da3\n").unwrap();
    std::fs::create_dir_all(sysfs.join("class/accel")).unwrap();
    let class = sysfs.join("class/accel/accel0");
    std::os::unix::fs::symlink(card.join("accel/accel0"), class).unwrap();
    let paths = [&renamed, &sysfs].map(|path| path.to_str().unwrap());
    let variables = [
        ("HL_THUNK_LIBRARY", paths[0]),
        ("GAUDI_SYSFS_ROOT", paths[1]),
        ("SOFT_GAUDI_FAULTS", "yes"),
    ];
    fn here() {}
    machine::run_alone(std::any::type_name_of_val(&here), &variables);
}

#[test]
fn a_card_of_an_unknown_kind_is_reported_with_its_id_and_not_opened() {
    soft_gaudi::alone!(3, ("SOFT_GAUDI_PCI_ID", "0x1021:4,0x1070:2,0x1020"));
    let cards = runtime().discover().unwrap();
    assert_eq!(cards.iter().map(|card| card.index).collect::<Vec<_>>(), [0, 2]);
    assert_eq!(cards[0].card_name, "HL288-soft");
    let notes = runtime().take_notes();
    let [note] = &*notes else { panic!("{notes:?}") };
    assert!(note.is_unknown_card);
    for words in ["card 1", "0000:4d:00.0", "1da3:1070", "revision 2", "check-card --save"] {
        assert!(note.text.contains(words), "{words}: {}", note.text);
    }
    let refused = runtime().open(&DeviceChoice::Index(1)).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::DeviceNotFound);
    assert!(refused.to_string().contains("1da3:1070"), "{refused}");
}

#[test]
fn a_machine_with_nothing_but_unknown_cards_says_so() {
    soft_gaudi::alone!(2, ("SOFT_GAUDI_PCI_ID", "0x1070"));
    let error = runtime().discover().unwrap_err();
    assert_eq!((error.kind(), error.remedy()), (ErrorKind::DeviceNotFound, Remedy::ReportCard));
    assert!(error.to_string().contains("1da3:1070"), "{error}");
    let library = Library::load().unwrap();
    let opened = hl_thunk::Device::open(&library, "0000:33:00.0").unwrap_err();
    assert_eq!(opened.errno, libc::ENODEV);
}
