//! Steps that only query the card, and the opening of the card.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gaudi::{DeviceChoice, DeviceInfo, Owners, runtime};
use hl_thunk::sys::HwIpInfo;
use hl_thunk::{ControlDevice, Device, Generation, Library};
use serde_json::json;

use crate::failure::Failure;
use crate::info::{choice, load};
use crate::output::size;
use crate::report::Finding;

/// How long opening may fail after a close: a Gaudi2's firmware resets its engines.
const PATIENCE: Duration = Duration::from_secs(30);
/// Nodes are numbered below this.
const MOST_CARDS: u32 = 256;
/// Size of the plugin's buffer. The largest known structure has 336 bytes.
const BUFFER_SIZE: usize = ControlDevice::HW_INFO_BUFFER_SIZE;

/// Loads the driver library.
pub(super) fn library() -> (Finding, Option<Arc<Library>>) {
    match load() {
        Ok(library) => {
            let version = library.version().unwrap_or("which does not tell its version");
            let found = format!("{} ({version})", library.name());
            let data = json!({"version": library.version(), "software": library.is_software()});
            (Finding::good("", found).with(data), Some(library))
        }
        Err(failure) => {
            let remedy = "install habanalabs-thunk, or set HL_THUNK_LIBRARY to its file; without a card add --soft";
            (Finding::bad("", failure.what, remedy), None)
        }
    }
}

/// Chooses the card: the one that the user named. Without a name it takes any free software card, but no other: a
/// scheduler may have given that to another user. Reports cards of an unknown kind.
pub(super) fn card(library: &Arc<Library>, text: Option<&str>) -> (Finding, Option<DeviceInfo>) {
    let (finding, card) = known_card(text);
    let unknown = unknown_cards(library);
    let Some(first) = unknown.first() else { return (finding, card) };
    let mut data = finding.data.clone();
    let finding = match card {
        Some(_) => Finding::warning(
            "",
            format!("{}; another card: {}", finding.found, first.found),
            first.remedy.clone(),
        ),
        None => Finding::bad("", first.found.clone(), first.remedy.clone()),
    };
    let unknown: Vec<_> = unknown.into_iter().map(|card| card.data).collect();
    data["unknown"] = unknown.into();
    (finding.with(data), card)
}

/// What cards of an unknown kind report about themselves; only their control nodes are opened.
fn unknown_cards(library: &Arc<Library>) -> Vec<Finding> {
    let count = library.device_count().and_then(Result::ok).unwrap_or(MOST_CARDS);
    let nodes = (0..MOST_CARDS).filter_map(|node| ControlDevice::open(library, node).ok());
    let described = nodes.take(count as usize).filter_map(|control| hw_answer(&control).ok());
    let unknown = described.filter(|(_, hw)| Generation::from_pci_id(hw.device_id).is_none());
    unknown.map(|(raw, hw)| judge_hw_info(&raw, None, &hw)).collect()
}

fn known_card(text: Option<&str>) -> (Finding, Option<DeviceInfo>) {
    let found = choice(text).and_then(|choice| match choice {
        DeviceChoice::Any => Ok(runtime().discover()?),
        choice => Ok(runtime().candidates(&choice)?),
    });
    let cards = match found {
        Ok(cards) => cards,
        Err(failure) => return (Finding::failed("", &failure), None),
    };
    let nodes: Vec<u32> = cards.iter().map(|card| card.node).collect();
    let owners = runtime().owners(&nodes);
    if let (None, Some(refused)) = (text, must_be_named(&cards)) {
        return (refused, None);
    }
    let is_free = |owners: &Owners| owners.found.is_empty();
    let free = cards.iter().zip(&owners).find(|(_, owners)| is_free(owners));
    let Some((card, _)) = free else {
        let held: Vec<String> =
            cards.iter().zip(&owners).map(|(card, owners)| format!("{card}: {owners}")).collect();
        let remedy = "end the owner, or choose another card with --card";
        let held_by = |(card, owners): (&DeviceInfo, &Owners)| {
            let commands: Vec<&str> = owners.found.iter().map(|owner| &*owner.command).collect();
            json!({"card": card.to_string(), "held_by": commands})
        };
        let data: Vec<_> = cards.iter().zip(&owners).map(held_by).collect();
        return (Finding::bad("", held.join("; "), remedy).with(json!({"cards": data})), None);
    };
    let name = &card.card_name;
    let found = format!("{card}, {name}, module {}; no process has it open", card.module_id);
    let data = json!({
        "generation": card.generation.to_string(), "name": name, "module_id": card.module_id,
        "bus_id": card.bus_id.as_str(), "node": card.node, "software": card.is_software,
    });
    (Finding::good("", found).with(data), Some(card.clone()))
}

/// A bad finding if the user must name the card.
fn must_be_named(cards: &[DeviceInfo]) -> Option<Finding> {
    let shown = |card: &DeviceInfo| card.to_string();
    let names: Vec<String> = cards.iter().filter(|card| !card.is_software).map(shown).collect();
    let remedy = "name one that is yours to use: --card with its index, module:N or PCI address";
    let found =
        format!("no card was named, and a card that is closed is reset: {}", names.join(", "));
    (!names.is_empty()).then(|| Finding::bad("", found, remedy))
}

/// Queries the hardware's figures into a buffer that shows which bytes were written.
pub(super) fn hw_info(library: &Arc<Library>, card: &DeviceInfo) -> Finding {
    let control = match ControlDevice::open(library, card.node) {
        Ok(control) => control,
        Err(error) => {
            return Finding::bad("", error.to_string(), "look at hl-smi and the kernel log");
        }
    };
    match hw_answer(&control) {
        Ok((raw, hw)) => {
            judge_hw_info(&raw, runtime().link(card).map(|link| link.to_string()), &hw)
        }
        Err(error) => Finding::bad("", error.to_string(), "look at hl-smi and the kernel log"),
    }
}

/// The bytes that the library wrote, and the parsed structure.
fn hw_answer(control: &ControlDevice) -> Result<(Vec<u8>, HwIpInfo), hl_thunk::Error> {
    let ask = |canary: u8| -> Result<Vec<u8>, hl_thunk::Error> {
        let mut buffer = vec![u64::from_ne_bytes([canary; 8]); 2 * BUFFER_SIZE / 8];
        control.hw_info_into(&mut buffer)?;
        Ok(buffer.iter().flat_map(|word| word.to_ne_bytes()).collect())
    };
    let (mut one, other) = (ask(0xc7)?, ask(0x38)?);
    one.truncate(written([&one, &other]));
    Ok((one, control.hw_info()?))
}

/// How many bytes from the start were written, found by two answers over different canaries.
fn written(answers: [&[u8]; 2]) -> usize {
    let [one, other] = answers;
    let touched = |(one, other): (&u8, &u8)| (*one, *other) != (0xc7, 0x38);
    one.iter().zip(other).rposition(touched).map_or(0, |last| last + 1)
}

fn judge_hw_info(raw: &[u8], link: Option<String>, hw: &HwIpInfo) -> Finding {
    let written = raw.len();
    let raw = raw.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    });
    let firmware = hw.cpucp_version.split(|byte| *byte == 0).next().unwrap_or_default();
    let generation = Generation::from_pci_id(hw.device_id);
    let data = json!({
        "bytes_written": written, "device_id": format!("{:#06x}", hw.device_id),
        "dram_base": format!("{:#x}", hw.dram_base_address), "dram_size": hw.dram_size,
        "dram_page_size": hw.dram_page_size,
        "default_page_size": hw.device_mem_alloc_default_page_size,
        "edma_enabled_mask": format!("{:#x}", hw.edma_enabled_mask),
        "pdma_user_owned_ch_mask": format!("{:#x}", hw.pdma_user_owned_ch_mask),
        "nic_ports_mask": format!("{:#x}", hw.nic_ports_mask), "server_type": hw.server_type,
        "revision_id": hw.revision_id,
        "stepping": generation.and_then(|generation| generation.stepping(hw.revision_id)),
        "security_enabled": hw.security_enabled,
        "reserved_dram_size": hw.reserved_dram_size,
        "firmware": String::from_utf8_lossy(firmware), "pci_link": link, "raw": raw,
    });
    let known = size_of::<HwIpInfo>();
    let answer = format!(
        "{written} bytes; {} of memory in pages of {}",
        size(hw.dram_size),
        size(hw.dram_page_size)
    );
    let finding = match (written, generation) {
        (_, None) => {
            let found =
                format!("PCI device id {:#06x} is no Gaudi that the plugin knows", hw.device_id);
            let remedy =
                "send us this report (--save FILE), so that it can be added; it is not opened";
            Finding::bad("", found, remedy)
        }
        (written, _) if written > BUFFER_SIZE => Finding::bad(
            "",
            format!("the library wrote {written} bytes; the plugin has room for {BUFFER_SIZE}"),
            "do not use the plugin with this library; send this report",
        ),
        (written, _) if written > known => Finding::warning(
            "",
            format!(
                "{answer}; the library's structure is larger than the {known} bytes known here"
            ),
            "send this report: the library is newer than the plugin",
        ),
        _ if hw.dram_size == 0 => {
            Finding::bad("", format!("{answer}: no memory"), "look at hl-smi and the kernel log")
        }
        _ => Finding::good("", answer),
    };
    finding.with(data)
}

/// Opens and closes the card and measures the times; returns the last opening.
pub(super) fn open_and_close(
    library: &Arc<Library>,
    card: &DeviceInfo,
    rounds: u32,
) -> (Finding, Option<Device>) {
    let (mut opens, mut closes, mut refusals) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=rounds {
        let (device, took, refused) = match open(library, card.bus_id.as_str(), PATIENCE) {
            Ok(opened) => opened,
            Err((failure, waited)) => {
                let found = format!("round {round}: {} (tried for {})", failure.what, ms(waited));
                return (Finding::bad("", found, failure.remedy), None);
            }
        };
        opens.push(took);
        refusals.push(refused);
        if round == rounds {
            let longest = |times: &[Duration]| times.iter().max().copied().unwrap_or_default();
            let found = format!(
                "{rounds} rounds; open up to {}, close up to {}, refused with EAGAIN for up to {}",
                ms(longest(&opens)),
                ms(longest(&closes)),
                ms(longest(&refusals))
            );
            let all = |times: &[Duration]| -> Vec<f64> {
                times.iter().map(|time| time.as_secs_f64() * 1e3).collect()
            };
            let data = json!({
                "open_ms": all(&opens), "close_ms": all(&closes), "eagain_ms": all(&refusals),
            });
            return (Finding::good("", found).with(data), Some(device));
        }
        let began = Instant::now();
        drop(device);
        closes.push(began.elapsed());
        if let errors = library.take_drop_errors()
            && let Some(error) = errors.first()
        {
            let found = format!("round {round}: closing failed: {error}");
            return (Finding::bad("", found, "look at the kernel log"), None);
        }
    }
    unreachable!("the last round returns")
}

/// Opens a card; returns how long the successful call took, and for how long earlier calls failed.
pub(super) fn open(
    library: &Arc<Library>,
    bus_id: &str,
    patience: Duration,
) -> Result<(Device, Duration, Duration), (Failure, Duration)> {
    let began = Instant::now();
    loop {
        let call = Instant::now();
        match Device::open(library, bus_id) {
            Ok(device) => return Ok((device, call.elapsed(), call - began)),
            Err(error) if error.errno == libc::EAGAIN && began.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => {
                let remedy = match error.errno {
                    libc::EBUSY => "another process has it: `ucx-gaudi info` shows which",
                    libc::EAGAIN => "it is in reset or being released: look at the kernel log",
                    libc::EACCES => "check group and mode of its node in /dev/accel",
                    libc::EPERM => "the card is not operational: look at hl-smi",
                    libc::EINVAL => gaudi::OPEN_REFUSED,
                    _ => "look at hl-smi and the kernel log",
                };
                return Err((Failure::unable(error.to_string(), remedy), began.elapsed()));
            }
        }
    }
}

/// A time for people.
pub(super) fn ms(time: Duration) -> String {
    match time.as_secs_f64() * 1e3 {
        ms if ms < 0.1 => format!("{:.1} µs", ms * 1e3),
        ms if ms < 10.0 => format!("{ms:.2} ms"),
        ms => format!("{ms:.0} ms"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    fn hw() -> HwIpInfo {
        // SAFETY: the structure has only numbers, so all zeroes is a valid value.
        let mut hw: HwIpInfo = unsafe { std::mem::zeroed() };
        (hw.device_id, hw.dram_size, hw.dram_page_size) = (0x1020, 96 << 30, 768 << 20);
        hw
    }

    #[test]
    fn every_written_byte_is_seen_also_one_that_equals_a_canary() {
        let answer = |canary: u8, at: usize, value: u8| {
            let mut bytes = vec![canary; 64];
            bytes[at] = value;
            bytes
        };
        assert_eq!(written([&[0xc7; 64], &[0x38; 64]]), 0);
        for value in [0, 0xc7, 0x38, 0xff] {
            let (one, other) = (answer(0xc7, 40, value), answer(0x38, 40, value));
            assert_eq!(written([&one, &other]), 41, "{value:#x}");
        }
    }

    #[test]
    fn a_longer_answer_is_noticed_and_one_beyond_our_buffer_is_bad() {
        let verdict = |written, hw: &HwIpInfo| judge_hw_info(&vec![0; written], None, hw).verdict;
        assert_eq!(verdict(336, &hw()), Verdict::Good);
        assert_eq!(verdict(344, &hw()), Verdict::Warning);
        assert_eq!(verdict(BUFFER_SIZE, &hw()), Verdict::Warning);
        assert_eq!(verdict(BUFFER_SIZE + 1, &hw()), Verdict::Bad);
        assert_eq!(verdict(336, &HwIpInfo { device_id: 1, ..hw() }), Verdict::Bad);
        assert_eq!(verdict(336, &HwIpInfo { dram_size: 0, ..hw() }), Verdict::Bad);
    }
}
