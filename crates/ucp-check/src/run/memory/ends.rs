//! `closing`, `lost` and `holes`: what is left when something ends: an interface with copies under
//! way, a card that was reset, an allocation among others.

use super::{Scene, Tally};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Ticket, Way};
use anyhow::{Result, ensure};

/// `UCS_MEMORY_TYPE_GAUDI`.
const GAUDI: u32 = 9;

/// Copies under way when an interface is closed.
const COPIES: usize = 8;
const LENGTH: usize = 256 << 10;

/// Closes an interface with copies under way; their sources are used for something else at once.
pub(super) fn closing(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let domain = scene.domain;
    let target = domain.allocate(COPIES * LENGTH, false)?;
    let mut expected = vec![0; COPIES * LENGTH];
    fill(mix(scene.options.seed), 0, &mut expected);
    let mut sources = expected.clone();
    let copier = Copier::open(domain, scene.transport())?;
    let tickets: Vec<Ticket> = (0..COPIES).map(|_| Ticket::default()).collect();
    let start = sources.as_mut_ptr().expose_provenance() as u64;
    for (n, ticket) in tickets.iter().enumerate() {
        let at = (n * LENGTH) as u64;
        let (local, remote) = ((start + at, LENGTH), target.address() + at);
        // SAFETY: the source lives on, and is written only when the interface is closed.
        unsafe { copier.start(Way::Put, local, std::ptr::null_mut(), remote, ticket)? };
    }
    let under_way = tickets.iter().filter(|ticket| !ticket.is_free()).count();
    ensure!(under_way > 0, "all copies were done at once: set SOFT_GAUDI_LATENCY");
    println!("{under_way} copies under way when the interface is closed");
    drop(copier);
    sources.fill(0xee);

    let copier = Copier::open(domain, scene.transport())?;
    let mut found = vec![0; COPIES * LENGTH];
    for (n, part) in found.chunks_mut(LENGTH).enumerate() {
        copier.get(target.address() + (n * LENGTH) as u64, part)?;
    }
    tally.expect(found == expected, || {
        "a copy went on after its interface was closed, or was lost".into()
    });
    Ok(())
}

/// The first copy finds the card reset. It is ours again when everything on it was freed.
pub(super) fn lost(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let domain = scene.domain;
    let memory = domain.allocate(4096, false)?;
    {
        let copier = Copier::open(domain, scene.transport())?;
        tally.expect(copier.put(&[1; 64], memory.address()).is_err(), || {
            "the copy succeeded: order a reset in the machine's faults".into()
        });
        tally.expect(domain.allocate(4096, true).is_err(), || {
            "memory was allocated on a card that was reset".into()
        });
    }
    drop(memory);
    let memory = domain.allocate(4096, false)?;
    let copier = Copier::open(domain, scene.transport())?;
    let mut found = [0; 64];
    copier.put(&[7; 64], memory.address())?;
    copier.get(memory.address(), &mut found)?;
    tally.expect(found == [7; 64], || "wrong bytes on the card after its reset".into());
    println!("the card was opened again after its reset");
    Ok(())
}

/// UCX's memory-type cache knows a range around freed memory as Gaudi memory still: pieces that
/// only touch are not joined there.
pub(super) fn holes(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let domain = scene.domain;
    let uct = domain.uct();
    let mut live = Vec::new();
    for _ in 0..9 {
        live.push(domain.allocate(1 << 20, false)?);
    }
    let start = live.iter().map(|memory| memory.address()).min().unwrap_or(0);
    let end = live.iter().map(|memory| memory.address() + (1 << 20)).max().unwrap_or(0);
    let length = (end - start) as usize;
    tally.equal(&uct.cached_type(start, length), &Some(GAUDI), "before anything was freed");
    for n in [4, 6, 1] {
        drop(live.swap_remove(n));
        tally.equal(&uct.cached_type(start, length), &Some(GAUDI), "around freed memory");
    }
    // A new tenant of the hole, across the ends of the old ones.
    let again = domain.allocate((1 << 20) + 4096, false)?;
    let cached = uct.cached_type(again.address(), again.len());
    tally.equal(&cached, &Some(GAUDI), "in the place of freed memory");
    Ok(())
}
