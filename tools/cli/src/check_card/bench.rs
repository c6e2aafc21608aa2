//! An open card with memory to copy between: two images in host memory, two in device memory.

use std::fmt;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use hl_thunk::packet::{LinDma, NOP};
use hl_thunk::{
    Chunk, CommandBuffer, Device, DeviceAddr, Direction, Error, HostMapping, HostPages, WaitStatus,
};

use super::pattern::{IMAGE, SLOTS};

/// How long a submission may take. The driver's watchdog waits for 30 seconds.
const LIMIT: Duration = Duration::from_secs(10);
/// Timeout that the driver gets for a submission that must not cause a reset, and how much longer we wait.
const NO_RESET_SECONDS: u32 = 5;
const NO_RESET_LIMIT: Duration = Duration::from_secs(NO_RESET_SECONDS as u64 + 1);
const COMMANDS: usize = SLOTS * 24;

/// Host memory mapped for the card.
pub(super) struct HostImage {
    // Declared first: fields drop in this order, and the mapping must end before the pages are freed.
    mapping: HostMapping,
    pages: HostPages,
}

impl HostImage {
    pub(super) fn new(device: &Device, len: usize) -> Result<Self, Error> {
        let pages = HostPages::new(len).map_err(|error| Error {
            call: "mmap",
            errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
        })?;
        // SAFETY: the pages are stored with the mapping, and freed after it.
        let mapping = unsafe { HostMapping::new(device, pages.as_ptr(), len as u64)? };
        Ok(Self { mapping, pages })
    }

    /// Its address for the card.
    pub(super) fn addr(&self) -> DeviceAddr {
        self.mapping.addr()
    }

    pub(super) fn start(&self) -> *mut u8 {
        self.pages.as_ptr()
    }

    /// Its first `len` bytes; it must have that many.
    ///
    /// # Safety
    /// The card must not be using them.
    pub(super) unsafe fn bytes(&mut self, len: usize) -> &mut [u8] {
        // SAFETY: our own pages; the exclusive borrow excludes this process, the caller's promise the card.
        unsafe { std::slice::from_raw_parts_mut(self.pages.as_ptr(), len) }
    }
}

/// One of the four images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    /// In host memory, 0 or 1.
    Host(usize),
    /// In device memory, 0 or 1.
    Device(usize),
}

/// How long a submission took.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timing {
    /// The call that submits.
    pub(super) submit: Duration,
    /// From the submission until the wait for it returned.
    pub(super) total: Duration,
}

/// Why a submission did not complete.
#[derive(Clone, Debug)]
pub(super) enum SubmitFailure {
    /// It was not submitted.
    Refused(String),
    /// It does not end.
    Stuck(Duration),
    /// The driver reported an error.
    Failed(Error),
}

impl fmt::Display for SubmitFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(why) => f.write_str(why),
            Self::Stuck(limit) => write!(f, "not done after {} s", limit.as_secs()),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// The card and the images.
pub(super) struct Bench {
    device: Device,
    area: DeviceAddr,
    host: ManuallyDrop<[HostImage; 2]>,
    commands: ManuallyDrop<CommandBuffer>,
    /// A submission did not end: the card may still use the memory.
    lost: bool,
    /// DMA packets submitted.
    transfers: usize,
}

impl Bench {
    /// Takes two images of the device memory that starts at `area`.
    pub(super) fn new(device: &Device, area: DeviceAddr) -> Result<Self, Error> {
        Ok(Self {
            device: device.clone(),
            area,
            host: ManuallyDrop::new([
                HostImage::new(device, IMAGE)?,
                HostImage::new(device, IMAGE)?,
            ]),
            commands: ManuallyDrop::new(CommandBuffer::new(device, COMMANDS as u32)?),
            lost: false,
            transfers: 0,
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a submission did not end. The bench cannot be used any more then.
    pub(super) fn lost(&self) -> bool {
        self.lost
    }

    /// DMA packets submitted until now.
    pub(super) fn transfers(&self) -> usize {
        self.transfers
    }

    /// The bytes of an image in host memory, unless the card may be writing them.
    pub(super) fn bytes(&mut self, image: usize) -> Result<&mut [u8], SubmitFailure> {
        self.usable()?;
        // SAFETY: every submission was waited for, or `lost` is set.
        Ok(unsafe { self.host[image].bytes(IMAGE) })
    }

    fn usable(&self) -> Result<(), SubmitFailure> {
        let lost =
            || SubmitFailure::Refused(String::from("not tried: an earlier submission did not end"));
        (!self.lost).then_some(()).ok_or_else(lost)
    }

    /// The card's address of a byte of an image.
    pub(super) fn address(&self, image: Image, at: usize) -> DeviceAddr {
        assert!(at < IMAGE);
        DeviceAddr(match image {
            Image::Host(which) => self.host[which].mapping.addr().0 + at as u64,
            Image::Device(which) => self.area.0 + (which * IMAGE + at) as u64,
        })
    }

    /// The packet that copies the first `len` bytes of an image.
    pub(super) fn copy(&self, from: Image, to: Image, len: usize) -> LinDma {
        let (src, dst) = (self.address(from, 0), self.address(to, 0));
        LinDma::Copy { src, dst, len: len as u32 }
    }

    /// Makes the card do these transfers, and waits.
    pub(super) fn dma(
        &mut self,
        queue: u32,
        transfers: &[LinDma],
    ) -> Result<Timing, SubmitFailure> {
        let packets = self.encode(transfers)?;
        self.submit(queue, &packets)
    }

    /// Like [`dma`](Bench::dma), but asks the driver not to reset the card if this does not end.
    pub(super) fn dma_without_reset(
        &mut self,
        queue: u32,
        transfers: &[LinDma],
    ) -> Result<Timing, SubmitFailure> {
        let packets = self.encode(transfers)?;
        self.submit_by(queue, &packets, NO_RESET_LIMIT, |device, chunk| {
            // SAFETY: as in `submit`.
            unsafe { device.submit_without_reset(chunk, NO_RESET_SECONDS) }
        })
    }

    /// Submits one packet after the other without waiting, each on its queue, then waits for all.
    pub(super) fn dma_at_once(&mut self, transfers: &[(u32, LinDma)]) -> Result<(), SubmitFailure> {
        self.usable()?;
        let packets = transfers.iter().map(|(_, transfer)| self.encode(&[*transfer]));
        let packets = packets.collect::<Result<Vec<_>, _>>()?;
        let (mut sequences, mut buffers, mut refused) = (Vec::new(), Vec::new(), None);
        for (at, ((queue, _), packet)) in transfers.iter().zip(&packets).enumerate() {
            let submitted =
                CommandBuffer::new(&self.device, packet.len() as u32).and_then(|buffer| {
                    // SAFETY: nothing was submitted from it yet.
                    unsafe { buffer.write(0, packet) };
                    let chunk =
                        Chunk { buffer: &buffer, offset: 0, len: packet.len(), queue: *queue };
                    // SAFETY: as in `submit`; the buffer is kept until all submissions have ended.
                    let sequence = unsafe { self.device.submit(chunk) };
                    buffers.push(ManuallyDrop::new(buffer));
                    sequence
                });
            match submitted {
                Ok(sequence) => sequences.push(sequence),
                Err(error) => {
                    refused =
                        Some(SubmitFailure::Refused(format!("submission {}: {error}", at + 1)));
                    break;
                }
            }
        }
        for sequence in sequences {
            let ended = wait(&self.device, sequence, LIMIT);
            self.lost |= ended.is_err();
            ended?;
        }
        for mut buffer in buffers {
            // SAFETY: dropped only here; no submission from it is in flight.
            unsafe { ManuallyDrop::drop(&mut buffer) };
        }
        refused.map_or(Ok(()), Err)
    }

    fn encode(&mut self, transfers: &[LinDma]) -> Result<Vec<u8>, SubmitFailure> {
        let generation = self.device.generation();
        let mut packets = Vec::with_capacity(transfers.len() * 24);
        for (at, transfer) in transfers.iter().enumerate() {
            let none = || SubmitFailure::Refused(format!("no packet for {transfer:?}"));
            packets.extend(transfer.encode(generation, &transfers[..at]).ok_or_else(none)?);
        }
        self.transfers += transfers.len();
        Ok(packets)
    }

    /// Submits packets that access only the four images, and waits.
    pub(super) fn submit(&mut self, queue: u32, packets: &[u8]) -> Result<Timing, SubmitFailure> {
        self.submit_by(queue, packets, LIMIT, |device, chunk| {
            // SAFETY: the images and the command buffer stay mapped as long as the bench, and nothing else accesses
            // them before the wait has ended.
            unsafe { device.submit(chunk) }
        })
    }

    fn submit_by(
        &mut self,
        queue: u32,
        packets: &[u8],
        limit: Duration,
        submit: impl FnOnce(&Device, Chunk<'_>) -> Result<u64, Error>,
    ) -> Result<Timing, SubmitFailure> {
        self.usable()?;
        // SAFETY: every earlier submission was waited for, so none uses these bytes.
        unsafe { self.commands.write(0, packets) };
        let chunk = Chunk { buffer: &self.commands, offset: 0, len: packets.len(), queue };
        let began = Instant::now();
        let submitted = submit(&self.device, chunk);
        let sequence = submitted.map_err(|error| SubmitFailure::Refused(error.to_string()))?;
        let submit = began.elapsed();
        let ended = wait(&self.device, sequence, limit);
        self.lost = ended.is_err();
        ended.map(|()| Timing { submit, total: began.elapsed() })
    }
}

/// Waits for a submission.
fn wait(device: &Device, sequence: u64, limit: Duration) -> Result<(), SubmitFailure> {
    let began = Instant::now();
    loop {
        match device.wait(sequence, 1_000_000) {
            Ok(WaitStatus::Completed) => return Ok(()),
            Ok(WaitStatus::Busy) if began.elapsed() < limit => {}
            Ok(WaitStatus::Busy) => return Err(SubmitFailure::Stuck(limit)),
            Err(error) => return Err(SubmitFailure::Failed(error)),
        }
    }
}

/// Whether a card executes a packet that does nothing.
pub(super) fn works(device: &Device) -> Result<(), SubmitFailure> {
    let refused = |error: Error| SubmitFailure::Refused(error.to_string());
    let queue = device.generation().queues(Direction::HostToDevice)[0];
    let commands = CommandBuffer::new(device, NOP.len() as u32).map_err(refused)?;
    // SAFETY: our own buffer, from which nothing was submitted.
    unsafe { commands.write(0, &NOP) };
    let chunk = Chunk { buffer: &commands, offset: 0, len: NOP.len(), queue };
    // SAFETY: a packet that touches no memory; the buffer stays until the wait has ended, or for ever.
    let sequence = unsafe { device.submit(chunk) }.map_err(refused)?;
    wait(device, sequence, LIMIT).inspect_err(|_| std::mem::forget(commands))
}

impl Drop for Bench {
    fn drop(&mut self) {
        // After a submission that did not end, an engine may still use the memory: it stays until the process ends.
        if !self.lost {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.commands) };
            // SAFETY: as above.
            unsafe { ManuallyDrop::drop(&mut self.host) };
        }
    }
}
