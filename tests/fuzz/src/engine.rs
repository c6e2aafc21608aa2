//! What the engine and the software devices read from the environment and from sysfs.

use std::os::unix::fs::symlink;
use std::path::{Component, Path};

use gaudi::{BusId, DeviceChoice, ErrorKind, MappingTable, Sysfs};
use soft_gaudi::config::MAX_DEVICES;
use soft_gaudi::testing::{configuration, fault_rule};

/// A table is either read as a whole or refused with one line. A table that was read can be written and read again.
pub(crate) fn mapping_table(bytes: &[u8]) {
    let Ok(text) = str::from_utf8(bytes) else { return };
    match text.parse::<MappingTable>() {
        Ok(table) => {
            assert!(table.cards().is_sorted_by(|one, next| one.index < next.index));
            let rows: Vec<String> = table.cards().iter().map(ToString::to_string).collect();
            let again: MappingTable = format!("[{}]", rows.join(",")).parse().expect("as written");
            assert_eq!(again.cards(), table.cards());
            assert!(table.notes().iter().all(|note| !note.contains('\n')));
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::InvalidParams);
            assert!(!error.to_string().contains('\n') && error.detail().len() < 600, "{error}");
        }
    }
}

/// The first byte chooses the setting.
pub(crate) fn settings(bytes: &[u8]) {
    let Some((what, bytes)) = bytes.split_first() else { return };
    let Ok(text) = str::from_utf8(bytes) else { return };
    match what % 5 {
        0 => match text.parse::<DeviceChoice>() {
            Ok(choice) => assert_eq!(choice.to_string().parse().ok(), Some(choice)),
            Err(error) => assert!(!error.to_string().contains(char::is_control), "{error:?}"),
        },
        1 => {
            if let Ok(bus) = text.parse::<BusId>() {
                assert_eq!(bus.as_str().parse().ok(), Some(bus));
            }
        }
        2 => match configuration(text) {
            Ok(config) => {
                assert!(
                    config.devices <= MAX_DEVICES && config.dram_size >= config.profile.dram_page
                );
                let _ = config.pci_id(u32::MAX);
            }
            Err(why) => assert!(!why.is_empty()),
        },
        3 => {
            for rule in text.lines().flat_map(fault_rule) {
                assert_eq!(fault_rule(&rule).as_ref(), Ok(&rule), "written back as it was meant");
            }
        }
        _ => soft_rdma::fuzzing::settings(text),
    }
}

/// Where the one PCI device of [`sysfs`] is.
const BUS_ID: &str = "0000:33:00.0";

/// Lines `PATH=CONTENT` (a file) and `PATH>TARGET` (a link) in a folder that takes the place of `/`.
pub(crate) fn sysfs(bytes: &[u8]) {
    let Ok(root) = tempfile::Builder::new().prefix("fuzz-sysfs").tempdir_in(shm()) else { return };
    for line in String::from_utf8_lossy(bytes).lines().take(40) {
        let Some(at) = line.find(['=', '>']) else { continue };
        let (path, content) = (Path::new(&line[..at]), &line[at + 1..]);
        let inside = |part| matches!(part, Component::Normal(_));
        if path.as_os_str().is_empty() || !path.components().all(inside) {
            continue;
        }
        let path = root.path().join(path);
        // Do not write through links that lead out of the folder.
        let parent = path.parent().expect("below the root");
        let _ = std::fs::create_dir_all(parent);
        if !parent.canonicalize().is_ok_and(|real| real.starts_with(root.path())) {
            continue;
        }
        let _ = match &line[at..=at] {
            "=" if !path.is_symlink() => std::fs::write(path, content),
            ">" => symlink(content, path),
            _ => Ok(()),
        };
    }
    let sysfs = Sysfs::at(root.path().join("sys"));
    let bus_id: BusId = BUS_ID.parse().expect("a bus id");
    if let Some(location) = sysfs.location(&bus_id) {
        assert!(!format!("{location} {:?}", location.path()).contains('\n'));
    }
    if let Some(link) = sysfs.link(&bus_id) {
        assert!(link.bandwidth().is_finite());
    }
    cli::fuzzing::sysfs(root.path(), BUS_ID);
}

/// A folder in memory, if there is one.
fn shm() -> &'static Path {
    let shm = Path::new("/dev/shm");
    if shm.is_dir() { shm } else { Path::new("/tmp") }
}
