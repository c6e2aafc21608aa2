//! An open card with memory to copy between: two images in host memory, two in device memory.

use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use hl_thunk::packet::LinDma;
use hl_thunk::{
    Chunk, CommandBuffer, Device, DeviceAddr, Error, HostMapping, HostPages, WaitStatus,
};

use super::pattern::{IMAGE, SLOTS};

/// How long a submission may take. The driver's watchdog waits for 30 seconds.
const LIMIT: Duration = Duration::from_secs(10);
const COMMANDS: usize = SLOTS * 24;

/// Host memory that the card sees.
struct HostImage {
    // Unmapped before the pages go: fields drop in this order.
    mapping: HostMapping,
    pages: HostPages,
}

impl HostImage {
    fn new(device: &Device) -> Result<Self, Error> {
        let pages = HostPages::new(IMAGE).map_err(|error| Error {
            call: "mmap",
            errno: error.raw_os_error().unwrap_or(libc::ENOMEM),
        })?;
        // SAFETY: the pages are kept beside the mapping, and go after it.
        let mapping = unsafe { HostMapping::new(device, pages.as_ptr(), IMAGE as u64)? };
        Ok(Self { mapping, pages })
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

/// The card and the images.
pub(super) struct Bench {
    device: Device,
    area: DeviceAddr,
    host: ManuallyDrop<[HostImage; 2]>,
    commands: ManuallyDrop<CommandBuffer>,
    /// A submission did not end: the card may still use the memory.
    lost: bool,
}

impl Bench {
    /// Takes two images of the device memory that starts at `area`.
    pub(super) fn new(device: &Device, area: DeviceAddr) -> Result<Self, Error> {
        Ok(Self {
            device: device.clone(),
            area,
            host: ManuallyDrop::new([HostImage::new(device)?, HostImage::new(device)?]),
            commands: ManuallyDrop::new(CommandBuffer::new(device, COMMANDS as u32)?),
            lost: false,
        })
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether a submission did not end. The bench is of no more use then.
    pub(super) fn lost(&self) -> bool {
        self.lost
    }

    /// The bytes of an image in host memory, unless the card may be writing them.
    pub(super) fn bytes(&mut self, image: usize) -> Result<&mut [u8], String> {
        self.usable()?;
        let pages = &self.host[image].pages;
        // SAFETY: our own pages, which nobody else uses: the exclusive borrow keeps this process
        // out, and every submission was waited for, or `lost` is set.
        Ok(unsafe { std::slice::from_raw_parts_mut(pages.as_ptr(), IMAGE) })
    }

    fn usable(&self) -> Result<(), String> {
        let lost = || String::from("not tried: an earlier submission did not end");
        (!self.lost).then_some(()).ok_or_else(lost)
    }

    /// Where the card sees a byte of an image.
    pub(super) fn address(&self, image: Image, at: usize) -> DeviceAddr {
        assert!(at < IMAGE);
        DeviceAddr(match image {
            Image::Host(which) => self.host[which].mapping.addr().0 + at as u64,
            Image::Device(which) => self.area.0 + (which * IMAGE + at) as u64,
        })
    }

    /// Copies a whole image.
    pub(super) fn copy(&mut self, from: Image, to: Image, queue: u32) -> Result<Duration, String> {
        let (src, dst) = (self.address(from, 0), self.address(to, 0));
        self.dma(queue, &[LinDma::Copy { src, dst, len: IMAGE as u32 }])
    }

    /// Has the card carry out these transfers, and waits.
    pub(super) fn dma(&mut self, queue: u32, transfers: &[LinDma]) -> Result<Duration, String> {
        let generation = self.device.generation();
        let mut packets = Vec::with_capacity(transfers.len() * 24);
        for transfer in transfers {
            let packet = transfer.encode(generation);
            packets.extend(packet.ok_or_else(|| format!("no packet for {transfer:?}"))?);
        }
        self.submit(queue, &packets)
    }

    /// Submits packets that touch nothing but the four images, and waits.
    pub(super) fn submit(&mut self, queue: u32, packets: &[u8]) -> Result<Duration, String> {
        self.usable()?;
        // SAFETY: every submission was waited for, so none contains these bytes.
        unsafe { self.commands.write(0, packets) };
        let began = Instant::now();
        let chunk = Chunk { buffer: &self.commands, offset: 0, len: packets.len(), queue };
        // SAFETY: the images and the command buffer stay mapped as long as `self`, and nobody
        // touches them before the wait below has ended.
        let submitted = unsafe { self.device.submit(&[chunk]) };
        let sequence = submitted.map_err(|error| format!("queue {queue}: {error}"))?;
        loop {
            match self.device.wait(sequence, 1_000_000) {
                Ok(WaitStatus::Completed) => return Ok(began.elapsed()),
                Ok(WaitStatus::Busy) if began.elapsed() < LIMIT => {}
                Ok(WaitStatus::Busy) => {
                    self.lost = true;
                    return Err(format!("queue {queue}: not done after {} s", LIMIT.as_secs()));
                }
                Err(error) => {
                    self.lost = true;
                    return Err(format!("queue {queue}: {error}"));
                }
            }
        }
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // An engine may still use the memory of a lost bench: that stays until the process ends.
        if !self.lost {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.commands) };
            // SAFETY: as above.
            unsafe { ManuallyDrop::drop(&mut self.host) };
        }
    }
}
