//! A test buffer: an allocation in host or device memory that can be filled with an image and
//! compared with one, guards included.

use crate::pattern::{Image, Layout, Mismatch};
use crate::rig::Rig;
use crate::ucp::{Memory, PackedRegion, Region, RemoteKey, Span};
use anyhow::{Result, bail};
use std::sync::Arc;

/// A host or device allocation of the size that layouts of one message size have.
pub struct Buffer {
    /// For device memory: how we get at it. Declared first: the key goes before its region.
    ferry: Option<(RemoteKey, Arc<Region>)>,
    region: Arc<Region>,
}

impl Buffer {
    /// Allocates for messages of `body` bytes. Device buffers share the host region `staging`,
    /// which must be at least as long.
    pub fn new(rig: &Rig, memory: Memory, body: usize, staging: &Arc<Region>) -> Result<Buffer> {
        rig.step(format_args!("allocating {memory} memory for {body} bytes"));
        Buffer::of(rig, rig.region(memory, Layout::allocation(body))?, staging)
    }

    /// A buffer that is this region; `staging` as for [`Buffer::new`].
    pub fn of(rig: &Rig, region: Arc<Region>, staging: &Arc<Region>) -> Result<Buffer> {
        assert!(region.length() <= staging.length());
        let ferry = match region.memory() {
            Memory::Host => None,
            Memory::Gaudi => Some((rig.own_key(&region)?, staging.clone())),
        };
        Ok(Buffer { region, ferry })
    }

    /// The message part, as an operand.
    pub fn body(&self, layout: Layout) -> Span {
        self.region.span(layout.before, layout.body)
    }

    /// For a peer's put and get.
    pub fn pack(&self) -> Result<PackedRegion> {
        Ok(self.region.pack()?)
    }

    /// Length of the allocation.
    pub fn length(&self) -> usize {
        self.region.length()
    }

    /// Address of the allocation.
    pub fn address(&self) -> u64 {
        self.region.address()
    }

    /// Makes the whole allocation look like `image`.
    pub fn fill(&self, rig: &Rig, image: &Image) -> Result<()> {
        assert_eq!(image.total(), self.region.length());
        let host = self.ferry.as_ref().map_or(&self.region, |(_, staging)| staging);
        image.write(|at, bytes| host.write(at, bytes));
        self.unload(rig)
    }

    /// Compares the whole allocation with `image`. The outer error is UCX's, the inner one a wrong
    /// byte.
    pub fn verify(&self, rig: &Rig, image: &Image) -> Result<Result<(), Mismatch>> {
        assert_eq!(image.total(), self.region.length());
        let host = self.load(rig)?;
        Ok(image.verify(|at, bytes| host.read(at, bytes)))
    }

    /// Flips one bit at `offset`: a test of the test.
    pub fn damage(&self, rig: &Rig, offset: usize) -> Result<()> {
        let host = self.load(rig)?;
        let mut byte = [0];
        host.read(offset, &mut byte);
        host.write(offset, &[byte[0] ^ 0x10]);
        self.unload(rig)
    }

    /// Host memory with the bytes of the allocation: itself, or the staging region after a copy.
    fn load(&self, rig: &Rig) -> Result<&Arc<Region>> {
        let Some((key, staging)) = &self.ferry else { return Ok(&self.region) };
        rig.step("reading device memory by ucp_get from ourselves");
        // Nothing of an earlier copy may pass for what the device holds.
        let (blank, length) = ([0x5a; 8192], self.region.length());
        for at in (0..length).step_by(blank.len()) {
            staging.write(at, &blank[..blank.len().min(length - at)]);
        }
        rig.ferry_out(&staging.span(0, length), key)?;
        Ok(staging)
    }

    /// Brings the bytes of the staging region, if there is one, to the device.
    fn unload(&self, rig: &Rig) -> Result<()> {
        let Some((key, staging)) = &self.ferry else { return Ok(()) };
        rig.step("filling device memory by ucp_put to ourselves");
        rig.ferry_in(&staging.span(0, self.region.length()), key)
    }

    /// Fills with `image` and reads it back: does the way into this memory work at all?
    pub fn prove(&self, rig: &Rig, image: &Image) -> Result<()> {
        self.fill(rig, image)?;
        if let Err(wrong) = self.verify(rig, image)? {
            bail!("{} memory at {:#x}: {wrong}", self.region.memory(), self.address());
        }
        Ok(())
    }
}
