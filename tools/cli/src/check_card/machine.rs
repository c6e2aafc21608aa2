//! The machine around the card: what one asks for first when a report shows a failure on a remote card.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use serde_json::{Value, json};

use crate::output::size;
use crate::report::Finding;

/// Words of the kernel's command line that can affect a card. Others may be private.
const BEARS_ON_CARDS: [&str; 8] = [
    "iommu",
    "intel_iommu",
    "amd_iommu",
    "pci",
    "habanalabs",
    "vfio",
    "hugepage",
    "default_hugepagesz",
];
/// How many lines of the kernel's log a report keeps: the last ones.
const MOST_LINES: usize = 100;

/// Records kernel options, module parameters, BARs, reset counters, and the end of the kernel's log.
pub(super) fn record(root: &Path, node: u32, bus_id: &str) -> Finding {
    let bars = bars(root, bus_id);
    let parameters = folder(&root.join("sys/module/habanalabs/parameters"), |_| true);
    let resets = resets(root, node);
    let log = kernel_log(root, 0);
    let shown = |(bar, bytes): &(usize, u64)| format!("BAR {bar} {}", size(*bytes));
    let mut words: Vec<String> = bars.iter().map(shown).collect();
    words.extend(resets.iter().map(|(name, count)| format!("{name} {count}")));
    if words.is_empty() {
        words.push(String::from("not in sysfs"));
    }
    let data = json!({
        "command_line": command_line(root), "module_parameters": parameters,
        "bars": bars.iter().map(|(bar, bytes)| json!({"bar": bar, "bytes": bytes})).collect::<Vec<_>>(),
        "resets": resets, "log_end": log.as_ref().ok().map(|(end, _)| end),
    });
    Finding::good("", words.join(", ")).with(data)
}

/// Compares with the earlier record, after the card is closed.
pub(super) fn compare(root: &Path, node: u32, before: &Value) -> Finding {
    let after = resets(root, node);
    let count = |name: &String| before["resets"][name].as_str().map(str::to_owned);
    let grown = |(name, now): (&String, &String)| {
        count(name).filter(|was| was != now).map(|was| format!("{name} {was} → {now}"))
    };
    let grown: Vec<String> = after.iter().filter_map(grown).collect();
    let (log, unread) = match before["log_end"].as_u64().map(|end| kernel_log(root, end)) {
        Some(Ok((_, lines))) => (lines, None),
        Some(Err(error)) => (Vec::new(), Some(error.to_string())),
        None => (Vec::new(), Some(String::from("it could not be read before"))),
    };
    let found = match (&unread, log.len()) {
        (Some(why), _) => format!("the kernel's log is not in the report ({why}: run as root)"),
        (None, 0) => String::from("the kernel logged nothing of the card"),
        (None, lines) => {
            format!("the kernel logged {lines} lines of the card: they are in the report")
        }
    };
    let data = json!({"resets": after, "kernel_log": log});
    if grown.is_empty() {
        Finding::good("after", found).with(data)
    } else {
        // Closing a Gaudi2 resets its engines, and that counts, too.
        Finding::good("after", format!("{}; {found}", grown.join(", "))).with(data)
    }
}

fn command_line(root: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(root.join("proc/cmdline")).unwrap_or_default();
    let bears = |word: &&str| BEARS_ON_CARDS.iter().any(|name| word.starts_with(name));
    text.split_whitespace().filter(bears).map(str::to_owned).collect()
}

/// The files of a folder of sysfs, and their text.
fn folder(path: &Path, wanted: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let file = |entry: std::fs::DirEntry| {
        let name = entry.file_name().into_string().ok().filter(|name| wanted(name))?;
        Some((name, std::fs::read_to_string(entry.path()).ok()?.trim().to_owned()))
    };
    entries.filter_map(file).collect()
}

fn resets(root: &Path, node: u32) -> BTreeMap<String, String> {
    let path = root.join(format!("sys/class/accel/accel{node}/device"));
    folder(&path, |name| name.ends_with("reset_cnt"))
}

/// Number and bytes of each memory BAR.
fn bars(root: &Path, bus_id: &str) -> Vec<(usize, u64)> {
    let path = root.join(format!("sys/bus/pci/devices/{bus_id}/resource"));
    let text = std::fs::read_to_string(path).unwrap_or_default();
    // The first six lines: start, end, flags.
    let bytes = |line: &str| {
        let mut numbers = line
            .split_whitespace()
            .map(|text| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap_or(0));
        let (start, end) = (numbers.next()?, numbers.next()?);
        end.checked_sub(start).filter(|length| *length > 0)?.checked_add(1)
    };
    let lines = text.lines().take(6).enumerate();
    lines.filter_map(|(bar, line)| Some((bar, bytes(line)?))).collect()
}

/// The number of the last record, and the lines about Gaudis after the one with this number.
fn kernel_log(root: &Path, after: u64) -> std::io::Result<(u64, Vec<String>)> {
    let mut options = File::options();
    let mut file = options.read(true).custom_flags(libc::O_NONBLOCK).open(root.join("dev/kmsg"))?;
    let (mut last, mut lines) = (after, Vec::new());
    let mut record = [0; 8192];
    loop {
        // Each read returns one record; EAGAIN is the end. EPIPE: the kernel overwrote records meanwhile.
        let len = match file.read(&mut record) {
            Ok(0) => break,
            Ok(len) => len,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => break,
            Err(error) if error.raw_os_error() == Some(libc::EPIPE) => continue,
            Err(error) => return Err(error),
        };
        let text = String::from_utf8_lossy(&record[..len]);
        let Some((number, line)) = parse_record(&text) else { continue };
        last = last.max(number);
        if number > after && line.contains("habanalabs") {
            lines.push(line.to_owned());
        }
    }
    let kept = lines.split_off(lines.len().saturating_sub(MOST_LINES));
    Ok((last, kept))
}

/// `PRIORITY,NUMBER,TIME,FLAGS;LINE`, followed by lines that are ignored.
fn parse_record(text: &str) -> Option<(u64, &str)> {
    let (header, rest) = text.split_once(';')?;
    let number = header.split(',').nth(1)?.parse().ok()?;
    Some((number, rest.lines().next().unwrap_or_default()))
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(root: &Path, bus_id: &str) {
    let _ = (bars(root, bus_id), resets(root, 0));
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz_record(text: &str) {
    let _ = parse_record(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_surrounds_the_card_is_recorded_and_nothing_private() {
        let root = tempfile::tempdir().expect("a folder");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        };
        write("proc/cmdline", "root=UUID=1 intel_iommu=on iommu=pt pcie_aspm=off hostname=me\n");
        write("sys/module/habanalabs/parameters/timeout_locked", "30\n");
        let zero = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let bar = "0x0000002000000000 0x0000003fffffffff 0x000000000014220c\n";
        write("sys/bus/pci/devices/0000:33:00.0/resource", &[bar, zero, zero, zero, bar].concat());
        write("sys/class/accel/accel3/device/hard_reset_cnt", "1\n");
        write("dev/kmsg", "6,41,7,-;other\n SUBSYSTEM=pci\n");

        let before = record(root.path(), 3, "0000:33:00.0");
        assert_eq!(before.found, "BAR 0 128 GiB, BAR 4 128 GiB, hard_reset_cnt 1");
        let data = &before.data;
        assert_eq!(data["command_line"], json!(["intel_iommu=on", "iommu=pt", "pcie_aspm=off"]));
        assert_eq!(data["module_parameters"]["timeout_locked"], "30");
        assert_eq!(data["log_end"], 41);

        write("sys/class/accel/accel3/device/hard_reset_cnt", "2\n");
        write("dev/kmsg", "3,42,9,-;habanalabs 0000:33:00.0: engine stuck\n");
        let after = compare(root.path(), 3, data);
        assert!(after.found.contains("hard_reset_cnt 1 → 2"), "{}", after.found);
        assert!(after.data["kernel_log"][0].as_str().expect("a line").ends_with("engine stuck"));
    }

    #[test]
    fn any_record_of_the_log_is_parsed_or_passed_over() {
        assert_eq!(parse_record("6,1,2,-;a line\n KEY=1"), Some((1, "a line")));
        for text in ["", ";", "6", "6,x,1,-;text", "6;text"] {
            assert_eq!(parse_record(text), None, "{text}");
        }
    }
}
