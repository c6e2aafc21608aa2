//! The buffers of one thread: a few of each kind, made, replaced and now and then made again at the
//! very address of their predecessor.

use super::Totals;
use super::dice::Dice;
use crate::buffer::Buffer;
use crate::pattern::{GUARD, Layout};
use crate::rig::Rig;
use crate::ucp::{Memory, Region};
use anyhow::{Context, Result};
use std::sync::Arc;

/// Where a buffer comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Host pages that UCX was told about: only these, of host memory, can be the target of a put or get.
    Registered,
    /// Host pages that UCX finds out about by itself, and of whose end it hears from its hooks alone.
    Pages,
    /// Device memory.
    Gaudi,
}

impl Kind {
    pub(super) const ALL: [Kind; 3] = [Kind::Registered, Kind::Pages, Kind::Gaudi];

    pub(super) fn memory(self) -> Memory {
        match self {
            Kind::Registered | Kind::Pages => Memory::Host,
            Kind::Gaudi => Memory::Gaudi,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Registered => "registered host memory",
            Kind::Pages => "plain host pages",
            Kind::Gaudi => "gaudi memory",
        }
    }
}

/// Buffers of each kind a thread holds.
const PER_KIND: usize = 8;
/// A used buffer is replaced after one in so many messages.
const REPLACE: usize = 8;

/// A buffer that is not in a message.
struct Plot {
    kind: Kind,
    buffer: Buffer,
}

/// All of them, and the host memory through which device buffers are filled and read.
pub(super) struct Plots<'a> {
    rig: &'a Rig,
    totals: &'a Totals,
    staging: Arc<Region>,
    free: Vec<Plot>,
}

/// A buffer taken for one message, and where in it the message lies.
pub(super) struct Taken {
    pub(super) kind: Kind,
    pub(super) buffer: Buffer,
    pub(super) layout: Layout,
}

/// Guards on both sides, and as much room for the body as its next power of two.
fn length_for(body: usize) -> usize {
    body.next_power_of_two() + 2 * (GUARD + 1)
}

impl<'a> Plots<'a> {
    pub(super) fn new(rig: &'a Rig, totals: &'a Totals, max: usize) -> Result<Plots<'a>> {
        let staging = rig.region(Memory::Host, length_for(max))?;
        Ok(Plots { rig, totals, staging, free: Vec::new() })
    }

    /// A buffer with room for `body` bytes, at an odd place in it.
    pub(super) fn take(&mut self, dice: &mut Dice, kind: Kind, body: usize) -> Result<Taken> {
        // Not in a much larger one: every byte of it is written and compared for each message.
        let lengths = length_for(body)..=8 * length_for(body);
        let fits = |plot: &Plot| plot.kind == kind && lengths.contains(&plot.buffer.length());
        let found: Vec<usize> =
            self.free.iter().enumerate().filter(|(_, plot)| fits(plot)).map(|(n, _)| n).collect();
        let buffer = if found.is_empty() {
            self.make(kind, length_for(body), None)?
        } else {
            self.free.swap_remove(dice.pick(&found)).buffer
        };
        let room = buffer.length() - body - 2 * GUARD;
        let before = GUARD + (dice.below(room) | 1);
        let after = buffer.length() - before - body;
        Ok(Taken { kind, buffer, layout: Layout { before, body, after } })
    }

    /// Keeps the buffer for the next message, or has another come in its place.
    pub(super) fn put_back(&mut self, dice: &mut Dice, taken: Taken) -> Result<()> {
        let Taken { kind, mut buffer, .. } = taken;
        if dice.one_in(REPLACE) {
            let (address, length) = (buffer.address(), buffer.length());
            drop(buffer);
            if !dice.one_in(2) {
                return Ok(());
            }
            let at = (kind == Kind::Pages).then_some(address);
            buffer = self.make(kind, length, at)?;
        }
        let same = |plot: &&Plot| plot.kind == kind;
        if self.free.iter().filter(same).count() >= PER_KIND {
            let oldest = self.free.iter().position(|plot| plot.kind == kind);
            self.free.remove(oldest.expect("there are some"));
        }
        self.free.push(Plot { kind, buffer });
        Ok(())
    }

    fn make(&self, kind: Kind, length: usize, at: Option<u64>) -> Result<Buffer> {
        self.rig.step(format_args!("making {length} bytes of {}", kind.name()));
        let region = match (kind, at) {
            (Kind::Pages, Some(_)) => match self.pages(length, at) {
                Ok(region) => {
                    self.totals.again();
                    region
                }
                // Another thread was quicker to map something there.
                Err(_) => self.pages(length, None)?,
            },
            (Kind::Pages, None) => self.pages(length, None)?,
            (Kind::Registered | Kind::Gaudi, _) => self.rig.region(kind.memory(), length)?,
        };
        self.totals.made(kind);
        Buffer::of(self.rig, region, &self.staging)
    }

    fn pages(&self, length: usize, at: Option<u64>) -> Result<Arc<Region>> {
        Region::pages(self.rig.worker().context(), length, at)
            .with_context(|| format!("no {length} bytes of host memory"))
    }
}
