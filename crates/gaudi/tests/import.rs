//! Importing another card's memory on the software Gaudi2: one process here, two cards.

mod machine;

use std::os::fd::AsFd;
use std::sync::Arc;

use gaudi::{Device, DeviceAddr, Segment, Side, runtime};
use machine::{Footprint, assert_same, fresh, pattern, read, write};

fn setup() -> (Arc<Device>, Arc<Device>) {
    machine::set_up("gaudi2");
    (fresh(), fresh())
}

fn copy(device: &Arc<Device>, dst: Side, src: Side, len: usize) {
    // SAFETY: every caller's host memory lives across the call.
    unsafe { device.copy_blocking(dst, src, len) }.unwrap();
}

fn at(addr: DeviceAddr, offset: usize) -> Side {
    Side::Device(DeviceAddr(addr.0 + offset as u64))
}

#[test]
fn an_imported_range_can_be_read_and_written_by_the_other_card() {
    let (exporter, importer) = setup();
    importer.can_import().unwrap();
    let len = 300_001;
    let theirs = exporter.alloc(len as u64 + 100, 1).unwrap();
    let ours = importer.alloc(len as u64, 1).unwrap();
    exporter.fill(theirs.addr(), theirs.len(), 0xee).unwrap();
    let bytes = pattern(len, 1);
    write(&exporter, DeviceAddr(theirs.addr().0 + 7), &bytes);

    let (fd, offset) = exporter.export_alone(theirs.addr(), theirs.len()).unwrap();
    let size = (offset + theirs.len()).next_multiple_of(4096);
    let import = importer.import(fd.as_fd(), size).unwrap();
    drop(fd);
    let base = DeviceAddr(import.addr().0 + offset);
    assert!(runtime().locate(base.0, 1).is_none(), "an import is nobody's allocation");

    copy(&importer, Side::Device(ours.addr()), at(base, 7), len);
    assert_same(&read(&importer, ours.addr(), len), &bytes, "read through the import");

    let other = pattern(len, 2);
    write(&importer, ours.addr(), &other);
    copy(&importer, at(base, 9), Side::Device(ours.addr()), len);
    let mut expected = vec![0xee; len + 100];
    expected[7] = bytes[0];
    expected[8] = bytes[1];
    expected[9..9 + len].copy_from_slice(&other);
    assert_same(&read(&exporter, theirs.addr(), len + 100), &expected, "written through it");

    // Host memory straight to the other card, small and pinned.
    for len in [5, 200_000] {
        let mut host = pattern(len, 3);
        copy(&importer, at(base, 1), Side::Host(host.as_mut_ptr()), len);
        assert_same(&read(&exporter, DeviceAddr(theirs.addr().0 + 1), len), &host, "from host");
        let mut back = vec![0; len];
        copy(&importer, Side::Host(back.as_mut_ptr()), at(base, 1), len);
        assert_same(&back, &host, "to host");
    }

    let gone = import.addr();
    drop(import);
    let segment =
        Segment { dst: Side::Device(ours.addr()), src: at(gone, 0), len: 8, host_region: None };
    // SAFETY: refused before memory is touched.
    assert!(unsafe { importer.copy(&[segment]) }.is_err(), "unmapped");
}

#[test]
fn cycles_of_import_leave_nothing_behind() {
    if !machine::is_child() {
        let output = machine::child("cycles_of_import_leave_nothing_behind").output().unwrap();
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let (exporter, importer) = setup();
    let theirs = exporter.alloc(8192, 1).unwrap();
    let cycle = |_| {
        let (fd, _) = exporter.export_alone(theirs.addr(), 8192).unwrap();
        drop(importer.import(fd.as_fd(), 8192).unwrap());
    };
    (0..10).for_each(cycle);
    let before = Footprint::now();
    (0..500).for_each(cycle);
    before.assert_flat("import");
}

#[test]
fn what_is_no_dmabuf_or_too_short_is_refused() {
    let (exporter, importer) = setup();
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = importer.import(file.as_fd(), 4096).unwrap_err();
    assert!(error.errno().is_some() && error.device().is_some(), "{error}");
    let theirs = exporter.alloc(4096, 1).unwrap();
    let (fd, _) = exporter.export_alone(theirs.addr(), 4096).unwrap();
    let error = importer.import(fd.as_fd(), 8192).unwrap_err();
    assert_eq!(error.errno(), Some(libc::EINVAL), "{error}");
}

#[test]
fn a_driver_without_import_says_so() {
    if machine::is_child() {
        let (_, importer) = setup();
        let error = importer.can_import().unwrap_err();
        assert!(error.is_unsupported(), "{error}");
        assert!(error.to_string().contains("no dma-buf import"), "{error}");
        return;
    }
    let mut command = machine::child("a_driver_without_import_says_so");
    let output = command.env("SOFT_GAUDI_IMPORT", "no").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
