//! The card's firmware, as far as the driver talks to it: the boot loader's COMMS protocol, and the
//! CPU-CP messages of the system that it loads.

use crate::card::Card;
use crate::registers::{BAR0_SRAM, HBM_LEN, SRAM, cpu, psoc};

/// Values of the boot status register.
mod boot {
    pub(super) const SRAM_AVAILABLE: u32 = 3;
    pub(super) const READY: u32 = 15;
    pub(super) const WAITING_FOR_BOOT_FIT: u32 = 16;
}

/// Values that the driver writes to its "interrupt" registers.
mod doorbell {
    pub(super) const MESSAGE: u32 = 552;
    pub(super) const HALT: u32 = 553;
    pub(super) const EVENTS: u32 = 554;
}

/// What the firmware can do: valid, hard reset, answers with the producer index, COMMS, iATU set,
/// PLL map, privileged GIC, separate doorbells.
const CAPABILITIES: u32 = 0x805b_8400;

const PREBOOT: &str = "Preboot version hl-gaudi2-1.20.0-fw-58.0.0-sec-9 (software)";
const BOOT_FIT: &str = "U-Boot hl-gaudi2-1.20.0-fw-58.0.0 (software)";
const SYSTEM: &str = "hl-gaudi2-1.20.0-fw-58.0.0 (software)";

/// Images and messages are put here, an offset in SRAM; the descriptor lies at its start.
const IMAGE: u64 = 0x10_0000;
/// Entries of the message queue; indices count to twice this.
const MESSAGES: u32 = 4096;
/// What the driver's test message holds, and the fence of old drivers.
const TEST: u64 = 0xfe8c_e7a5;

/// State of the firmware.
#[derive(Debug, Default)]
pub struct Firmware {
    /// Images executed.
    loaded: u32,
    /// Status word that the driver gets once it has seen the acknowledgement.
    owed: Option<u32>,
    consumed: u32,
    module_id: u32,
}

impl Firmware {
    /// Before anything was loaded.
    pub fn new(module_id: u32) -> Self {
        Self { module_id, ..Self::default() }
    }

    /// Puts the card into the state after power-on. Later register reads see that state.
    pub fn reset(&mut self, card: &Card) {
        card.clear();
        *self = Self::new(self.module_id);
        card.set(psoc::BOOT_STATUS, boot::WAITING_FOR_BOOT_FIT);
        card.set(psoc::STATUS0, CAPABILITIES);
    }

    /// A write to a register of the controller's page; the value is stored already.
    pub fn write(&mut self, card: &Card, register: u32, value: u32) {
        match (register, value) {
            (psoc::COMMS_COMMAND, _) => self.comms(card, value),
            (psoc::MESSAGE, doorbell::MESSAGE) => self.messages(card),
            (psoc::HALT, doorbell::HALT) => {
                card.log.say(format_args!("reset by the driver"));
                self.reset(card);
            }
            (psoc::EVENTS, doorbell::EVENTS) => card.events.lock().unwrap().enabled = true,
            (psoc::COMMS_STATUS | psoc::BOOT_STATUS, _) => {}
            // Protection of the block's registers, of which users reach none anyway.
            (psoc::PROTECTION.., _) => {}
            _ => card.log.unexpected(format!("write of {value:#x} to CFG {register:#x}")),
        }
    }

    fn comms(&mut self, card: &Card, word: u32) {
        const ACK: u32 = 1 << 28;
        const OK: u32 = 2 << 28;
        let (command, size) = (word >> 27, word & 0x1ff_ffff);
        match command {
            // NOOP: the driver has seen the acknowledgement and waits for the end.
            0 => {
                if let Some(status) = self.owed.take() {
                    card.set(psoc::COMMS_STATUS, status);
                }
                return;
            }
            // CLR_STS.
            1 => {
                card.set(psoc::COMMS_STATUS, 0);
                return;
            }
            // PREP_DESC: at offset 0 of SRAM, which is what the rest of the status word says.
            3 | 10 => self.descriptor(card),
            // EXEC of what lies in SRAM: an image, or a message from the driver.
            5 => self.execute(card),
            // RST_DEV.
            6 => {
                card.log.say(format_args!("COMMS: reset"));
                self.reset(card);
                card.set(psoc::COMMS_STATUS, ACK);
                return;
            }
            // RST_STATE, DATA_RDY, GOTO_WFE, SKIP_BMC.
            2 | 4 | 7 | 8 => {}
            _ => card.log.unexpected(format!("COMMS command {command}, size {size}")),
        }
        card.set(psoc::COMMS_STATUS, ACK);
        self.owed = Some(OK);
    }

    fn execute(&mut self, card: &Card) {
        const MESSAGE: u32 = 0x4843_4d00;
        if card.bar0.load(BAR0_SRAM + IMAGE) & !0xff == MESSAGE {
            return;
        }
        self.loaded = self.loaded.saturating_add(1);
        let status = if self.loaded == 1 { boot::READY } else { boot::SRAM_AVAILABLE };
        card.log.say(format_args!("COMMS: image {} started", self.loaded));
        card.set(psoc::BOOT_STATUS, status);
    }

    /// Tells the driver where registers are, what runs, and where to put the next image.
    fn descriptor(&self, card: &Card) {
        const LEN: usize = 1280;
        const HEADER: usize = 16;
        let mut bytes = vec![0; LEN];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        put(0, &0x4843_444d_u32.to_le_bytes());
        put(8, &((LEN - HEADER) as u16).to_le_bytes());
        put(10, &[3]);
        let registers = [
            (12, psoc::STATUS0),
            (13, psoc::STATUS1),
            (14, psoc::ERROR0),
            (15, psoc::ERROR1),
            (16, psoc::BOOT_STATUS),
            (24, psoc::COMMS_COMMAND),
            (25, psoc::COMMS_STATUS),
            (26, psoc::MESSAGE),
            // Where engines would report errors.
            (27, psoc::scratchpad(3)),
            (28, psoc::scratchpad(4)),
            (29, psoc::scratchpad(5)),
            (30, psoc::scratchpad(7)),
            (31, psoc::scratchpad(8)),
            (32, psoc::HALT),
            (33, psoc::EVENTS),
            (35, psoc::scratchpad(6)),
            (37, psoc::scratchpad(15)),
        ];
        for (index, register) in registers {
            put(HEADER + 4 * index, &register.to_le_bytes());
        }
        put(248, b"software fuses");
        let running = if self.loaded == 0 { PREBOOT } else { BOOT_FIT };
        put(376, running.as_bytes());
        put(632, &(SRAM + IMAGE).to_le_bytes());
        let sum = crc32(&bytes[HEADER..]).to_le_bytes();
        bytes[4..8].copy_from_slice(&sum);
        card.bar0.write(BAR0_SRAM, &bytes);
    }

    /// Sets the queues up, or takes the messages that are new.
    fn messages(&mut self, card: &Card) {
        if card.get(cpu::QUEUE_INIT) == 1 {
            self.consumed = 0;
            card.set(cpu::QUEUE_INIT, 2);
            return;
        }
        let base = card.get_long(cpu::PQ_BASE);
        while self.consumed != card.get(cpu::PQ_PI) % (2 * MESSAGES) {
            let at = base.saturating_add(16 * u64::from(self.consumed % MESSAGES));
            let mut descriptor = [0; 16];
            if card.guest.read(at, &mut descriptor).is_none() {
                card.log.unexpected(format!("CPU-CP descriptor at {at:#x}: no memory"));
                break;
            }
            self.consumed = (self.consumed + 1) % (2 * MESSAGES);
            let addr = u64::from_le_bytes(descriptor[..8].try_into().unwrap());
            let len = u32::from_le_bytes(descriptor[8..12].try_into().unwrap());
            if self.message(card, addr, len, &descriptor[12..]).is_none() {
                card.log.unexpected(format!("CPU-CP packet at {addr:#x}: no memory"));
            }
        }
    }

    fn message(&mut self, card: &Card, addr: u64, len: u32, fence: &[u8]) -> Option<()> {
        const UNKNOWN: u32 = 3;
        let mut packet = [0; 24];
        card.guest.read(addr, &mut packet)?;
        let value = u64::from_le_bytes(packet[..8].try_into().unwrap());
        let control = u32::from_le_bytes(packet[8..12].try_into().unwrap());
        let size = u32::from_le_bytes(packet[16..20].try_into().unwrap());
        let opcode = control >> 16 & 0x1fff;
        let result = match opcode {
            // The page behind which interrupts are; none any more.
            2 => {
                card.set_doorbell(value);
                Ok(0)
            }
            1 => Ok(0),
            // Temperature in thousandths of a degree, frequency in Hz, PCIe counters, energy.
            3 => Ok(42_000),
            10 | 19 => Ok(1_650_000_000),
            27..=29 => Ok(0),
            14 => {
                let info = self.info();
                let len = info.len().min(size as usize);
                card.guest.write(value, &info[..len])?;
                Ok(0)
            }
            18 => Ok(TEST),
            // Milliwatt: the limit, and what is used.
            20 => Ok(600_000),
            32 => Ok(100_000),
            // Four outputs of a PLL at 200 MHz.
            30 => Ok(0x00c8_00c8_00c8_00c8),
            // Interrupts unmasked, power limit, numbers of vectors, address space, in use or not.
            16 | 17 | 21 | 37 | 47 | 58 => Ok(0),
            // The driver goes on as soon as it has the answer.
            64 => {
                card.reset_engines();
                Ok(0)
            }
            _ => Err(UNKNOWN),
        };
        if result.is_err() {
            card.log.unexpected(format!("CPU-CP packet {opcode} of {len} bytes"));
        }
        let (value, code) = result.map_or_else(|code| (0, code), |value| (value, 0));
        card.guest.write(addr, &value.to_le_bytes())?;
        let control = control & !0xf000 | code << 12;
        card.guest.write(addr.saturating_add(8), &control.to_le_bytes())?;
        card.guest.write(addr.saturating_add(12), fence)?;
        Some(())
    }

    /// The structure in which the card describes itself.
    fn info(&self) -> Vec<u8> {
        let mut bytes = vec![0; 1768];
        let mut put = |at: usize, data: &[u8]| bytes[at..at + data.len()].copy_from_slice(data);
        // One sensor, of temperature: without any the driver gives up.
        put(0, &[1, 0, 0, 0, 2, 0, 0, 0]);
        put(1024, SYSTEM.as_bytes());
        put(1160, &self.module_id.to_le_bytes());
        put(1172, b"software fuses");
        put(1300, b"software");
        put(1428, SYSTEM.as_bytes());
        put(1560, &HBM_LEN.to_le_bytes());
        put(1568, b"HL225soft");
        put(1616, &[0xff; 16]);
        put(1640, b"software");
        bytes
    }
}

/// CRC-32 as of zlib.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            crc >> 1 ^ if crc & 1 != 0 { 0xedb8_8320 } else { 0 }
        })
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn crc_is_the_usual_one() {
        assert_eq!(super::crc32(b"123456789"), 0xcbf4_3926);
    }
}
