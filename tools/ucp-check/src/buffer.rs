//! A test buffer: an allocation in host or device memory, or a part of one, that can be filled with an
//! image and compared with one, guards included.

use crate::client::Client;
use crate::pattern::{Image, Layout, Mismatch};
use crate::ucp::{Memory, PackedRegion, Region, RemoteKey, Span};
use anyhow::{Result, bail};
use std::sync::Arc;

/// Host or device memory of the size that layouts of one message size have.
pub struct Buffer {
    /// Device memory only: the host memory through which we fill and read it, and the key of the device memory, if
    /// `ucp_put` and `ucp_get` do that. Declared first: the key must be dropped before its `region`.
    staging: Option<(Option<RemoteKey>, Arc<Region>)>,
    region: Arc<Region>,
    /// Where in the region it begins.
    offset: usize,
    length: usize,
}

impl Buffer {
    /// Allocates for messages of `body` bytes. Device buffers share the host region `staging`,
    /// which must be at least as long.
    pub fn new(
        client: &Client,
        memory: Memory,
        body: usize,
        staging: &Arc<Region>,
    ) -> Result<Buffer> {
        client.step(format_args!("allocating {memory} memory for {body} bytes"));
        Buffer::of(client, client.region(memory, Layout::allocation(body))?, staging)
    }

    /// A buffer that is this whole region; `staging` as for [`Buffer::new`].
    pub fn of(client: &Client, region: Arc<Region>, staging: &Arc<Region>) -> Result<Buffer> {
        let length = region.length();
        Buffer::part(client, region, 0, length, staging)
    }

    /// A buffer that is a part of this region; `staging` as for [`Buffer::new`].
    pub fn part(
        client: &Client,
        region: Arc<Region>,
        offset: usize,
        length: usize,
        staging: &Arc<Region>,
    ) -> Result<Buffer> {
        assert!(length <= staging.length());
        let mut buffer = Buffer { staging: None, region, offset, length };
        buffer.staging = match buffer.region.memory() {
            Memory::Host => None,
            Memory::Gaudi => Some((Some(client.own_key(&buffer.pack()?)?), staging.clone())),
            Memory::Cuda => Some((None, staging.clone())),
        };
        Ok(buffer)
    }

    pub fn body(&self, layout: Layout) -> Span {
        self.region.span(self.offset + layout.before, layout.body)
    }

    pub fn pack(&self) -> Result<PackedRegion> {
        Ok(PackedRegion { address: self.address(), length: self.length, ..self.region.pack()? })
    }

    /// Makes UCX forget the allocation that contains it.
    ///
    /// # Safety
    /// As [`Region::unmap`].
    pub unsafe fn unmap(&self) {
        // SAFETY: passed on.
        unsafe { self.region.unmap() }
    }

    pub fn length(&self) -> usize {
        self.length
    }

    pub fn address(&self) -> u64 {
        self.region.address() + self.offset as u64
    }

    pub fn fill(&self, client: &Client, image: &Image) -> Result<()> {
        assert_eq!(image.total(), self.length);
        let (host, start) = self.host_side();
        image.write(|at, bytes| host.write(start + at, bytes));
        self.write_back(client)
    }

    /// Compares the whole buffer with `image`. The outer error comes from UCX, the inner one is a wrong byte.
    pub fn verify(&self, client: &Client, image: &Image) -> Result<Result<(), Mismatch>> {
        assert_eq!(image.total(), self.length);
        self.load(client)?;
        let (host, start) = self.host_side();
        Ok(image.verify(|at, bytes| host.read(start + at, bytes)))
    }

    /// Flips one bit at `offset`: a test of the test.
    pub fn damage(&self, client: &Client, offset: usize) -> Result<()> {
        self.load(client)?;
        let (host, start) = self.host_side();
        let mut byte = [0];
        host.read(start + offset, &mut byte);
        host.write(start + offset, &[byte[0] ^ 0x10]);
        self.write_back(client)
    }

    /// The region through which the host reads the bytes (the buffer's own, or the staging region), and their offset in it.
    fn host_side(&self) -> (&Arc<Region>, usize) {
        match &self.staging {
            None => (&self.region, self.offset),
            Some((_, staging)) => (staging, 0),
        }
    }

    /// Copies the bytes of the device to the staging region, if there is one.
    fn load(&self, client: &Client) -> Result<()> {
        let Some((key, staging)) = &self.staging else { return Ok(()) };
        client.step("reading device memory");
        // Overwrite the staging region, so that bytes of an earlier copy cannot pass for the device's.
        let blank = [0x5a; 8192];
        for at in (0..self.length).step_by(blank.len()) {
            staging.write(at, &blank[..blank.len().min(self.length - at)]);
        }
        match key {
            Some(key) => client.read_device(&staging.span(0, self.length), key),
            None => self.region.download(self.offset, staging, self.length),
        }
    }

    /// Copies the bytes of the staging region, if there is one, to the device.
    fn write_back(&self, client: &Client) -> Result<()> {
        let Some((key, staging)) = &self.staging else { return Ok(()) };
        client.step("filling device memory");
        match key {
            Some(key) => client.write_device(&staging.span(0, self.length), key),
            None => self.region.upload(self.offset, staging, self.length),
        }
    }

    /// Fills with `image` and reads it back: checks that the access to this memory works at all.
    pub fn prove(&self, client: &Client, image: &Image) -> Result<()> {
        self.fill(client, image)?;
        if let Err(wrong) = self.verify(client, image)? {
            bail!("{} memory at {:#x}: {wrong}", self.region.memory(), self.address());
        }
        Ok(())
    }
}
