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
    /// which must have the same length.
    pub fn new(rig: &Rig, memory: Memory, body: usize, staging: &Arc<Region>) -> Result<Buffer> {
        rig.step(format_args!("allocating {memory} memory for {body} bytes"));
        let region = rig.region(memory, Layout::allocation(body))?;
        assert_eq!(region.length(), staging.length());
        let ferry = match memory {
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

    /// Address of the allocation.
    pub fn address(&self) -> u64 {
        self.region.address()
    }

    /// Makes the whole allocation look like `image`.
    pub fn fill(&self, rig: &Rig, image: &Image) -> Result<()> {
        let mut bytes = vec![0; self.region.length()];
        image.write(&mut bytes);
        match &self.ferry {
            None => self.region.write(&bytes),
            Some((key, staging)) => {
                rig.step("filling device memory by ucp_put to ourselves");
                staging.write(&bytes);
                rig.ferry_in(staging, key)?;
            }
        }
        Ok(())
    }

    /// Compares the whole allocation with `image`. The outer error is UCX's, the inner one a wrong
    /// byte.
    pub fn verify(&self, rig: &Rig, image: &Image) -> Result<Result<(), Mismatch>> {
        let mut bytes = vec![0; self.region.length()];
        match &self.ferry {
            None => self.region.read(&mut bytes),
            Some((key, staging)) => {
                rig.step("reading device memory by ucp_get from ourselves");
                // Nothing of an earlier read may pass for what the device holds.
                staging.write(&vec![0x5a; staging.length()]);
                rig.ferry_out(staging, key)?;
                staging.read(&mut bytes);
            }
        }
        Ok(image.verify(&bytes))
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
