//! The buffers of one thread: a few of each kind, allocated, replaced, and sometimes allocated again at exactly the
//! address of their predecessor.

use super::Totals;
use crate::buffer::Buffer;
use crate::client::Client;
use crate::pattern::{GUARD, Layout};
use crate::ucp::{Memory, Region};
use anyhow::{Context, Result};
use fastrand::Rng;
use std::sync::Arc;

/// Where a buffer comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Registered host pages: of all host memory, only these can be the target of a put or get.
    Registered,
    /// Unregistered host pages: UCX must detect them by itself, and only its hooks tell it when they are unmapped.
    Pages,
    /// Device memory.
    Gaudi,
}

impl Kind {
    pub(super) const ALL: [Kind; 3] = [Kind::Registered, Kind::Pages, Kind::Gaudi];
    pub(super) const NAMES: [&str; 3] =
        ["registered host memory", "plain host pages", "gaudi memory"];

    pub(super) fn memory(self) -> Memory {
        if self == Kind::Gaudi { Memory::Gaudi } else { Memory::Host }
    }
}

/// Free buffers of each kind that a thread keeps.
const PER_KIND: usize = 8;
/// A used buffer is replaced after one in this many messages.
const REPLACE: u8 = 8;

/// Free buffers, and the host memory through which device buffers are filled and read.
pub(super) struct Pool<'a> {
    client: &'a Client,
    totals: &'a Totals,
    staging: Arc<Region>,
    free: [Vec<Buffer>; Kind::ALL.len()],
}

/// A buffer taken for one message, and the place of the message in it.
pub(super) struct Taken {
    kind: Kind,
    pub(super) buffer: Buffer,
    pub(super) layout: Layout,
}

/// Guards on both sides, and the next power of two for the body.
fn length_for(body: usize) -> usize {
    body.next_power_of_two() + 2 * (GUARD + 1)
}

impl<'a> Pool<'a> {
    pub(super) fn new(client: &'a Client, totals: &'a Totals, max: usize) -> Result<Pool<'a>> {
        let staging = client.region(Memory::Host, length_for(max))?;
        Ok(Pool { client, totals, staging, free: Default::default() })
    }

    /// A buffer large enough for `body` bytes, with the message at an odd offset.
    pub(super) fn take(&mut self, random: &mut Rng, kind: Kind, body: usize) -> Result<Taken> {
        // Not a much larger one: every message writes and compares all bytes of its buffer.
        let lengths = length_for(body)..=8 * length_for(body);
        let free = &mut self.free[kind as usize];
        let fits = |n: &usize| lengths.contains(&free[*n].length());
        let found: Vec<usize> = (0..free.len()).filter(fits).collect();
        let buffer = if found.is_empty() {
            self.make(kind, length_for(body), None)?
        } else {
            free.swap_remove(found[random.usize(..found.len())])
        };
        let spare = buffer.length() - body - 2 * GUARD;
        let before = GUARD + (random.usize(..spare.max(1)) | 1);
        let after = buffer.length() - before - body;
        Ok(Taken { kind, buffer, layout: Layout { before, body, after } })
    }

    /// Keeps the buffer for a later message, or replaces it.
    pub(super) fn put_back(&mut self, random: &mut Rng, taken: Taken) -> Result<()> {
        let Taken { kind, mut buffer, .. } = taken;
        if random.u8(..REPLACE) == 0 {
            let (address, length) = (buffer.address(), buffer.length());
            drop(buffer);
            if random.bool() {
                return Ok(());
            }
            buffer = self.make(kind, length, (kind == Kind::Pages).then_some(address))?;
        }
        let free = &mut self.free[kind as usize];
        if free.len() >= PER_KIND {
            free.remove(0);
        }
        free.push(buffer);
        Ok(())
    }

    fn make(&self, kind: Kind, length: usize, at: Option<u64>) -> Result<Buffer> {
        self.client.step(format_args!("making {length} bytes of {}", Kind::NAMES[kind as usize]));
        let pages = |at| Region::pages(self.client.worker().context(), length, at);
        // Another thread may map something at that address first.
        let reused = at.and_then(|at| pages(Some(at)).ok());
        self.totals.made(kind, length, reused.is_some());
        let region = match (kind, reused) {
            (Kind::Pages, Some(region)) => region,
            (Kind::Pages, None) => pages(None).context("no host memory")?,
            _ => self.client.region(kind.memory(), length)?,
        };
        Buffer::of(self.client, region, &self.staging)
    }
}
