//! `churn`: thousands of cycles, after which descriptors and mappings are as they were.

use super::{Scene, Tally, process};
use crate::pattern::mix;
use crate::uct::Copier;
use anyhow::{Context, Result};

/// Cycles until everything that is kept on purpose has been made.
const WARM_UP: u32 = 64;

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let host = vec![0u8; 1 << 20];
    let memory = scene.domain.allocate(1 << 20, false)?;
    let offers = scene.domain.attributes()?.dmabuf.gaudi();
    let place = |n: u32| {
        let draw = mix(scene.options.seed ^ u64::from(n)) as usize;
        let at = draw % (1 << 19);
        (at as u64, 1 + (draw >> 20) % (1 << 19))
    };
    let start = host.as_ptr().addr() as u64;
    cycles(scene, tally, scene.options.cycles, "host registrations", |n| {
        let (at, length) = place(n);
        drop(scene.domain.register(start + at, length, None)?);
        Ok(())
    })?;
    cycles(scene, tally, scene.options.cycles, "device registrations", |n| {
        let (at, length) = place(n);
        drop(scene.domain.register(memory.address() + at, length, None)?);
        Ok(())
    })?;
    // A copy pins what was registered: that has to end with the registration as well.
    let copier = Copier::open(scene.domain, scene.transport())?;
    cycles(scene, tally, scene.options.cycles / 8, "registrations with a copy", |n| {
        let part = &host[place(n).0 as usize..][..1 << 17];
        let by = scene.domain.register(part.as_ptr().addr() as u64, part.len(), None)?;
        Ok(copier.put_registered(part, &by, memory.address())?)
    })?;
    if offers {
        cycles(scene, tally, scene.options.cycles, "exports", |n| {
            let (at, length) = place(n);
            let exported = scene.domain.export(memory.address() + at, length)?;
            exported.context("no dma-buf").map(drop)
        })?;
    }
    cycles(scene, tally, scene.options.cycles, "allocations", |n| {
        let (_, length) = place(n);
        let memory = scene.domain.allocate(length, false)?;
        if offers && n % 16 == 0 {
            drop(scene.domain.export(memory.address(), length)?);
        }
        Ok(())
    })
}

fn cycles(
    scene: &Scene<'_>,
    tally: &mut Tally,
    count: u32,
    what: &str,
    mut cycle: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    scene.dog.step(format_args!("churn: {what}"));
    (0..WARM_UP).try_for_each(&mut cycle)?;
    let (descriptors, mappings) = (process::descriptors()?, process::mappings()?.len());
    let resident = process::resident()?;
    (0..count).try_for_each(&mut cycle)?;
    tally.equal(&process::descriptors()?, &descriptors, format_args!("descriptors after {what}"));
    // A thread of the driver library may start meanwhile (a stack and an arena of the C library's heap
    // are five mappings); a leak would be thousands.
    let now = process::mappings()?.len();
    tally.expect(now.abs_diff(mappings) <= 32, || {
        format!("{mappings} mappings before, {now} after {count} {what}")
    });
    let grown = process::resident()?.saturating_sub(resident);
    // Ten thousand of the smallest things there are would be more.
    tally.expect(grown <= 256 << 10, || format!("{grown} bytes more are resident after {what}"));
    println!("{count} {what}: {now} mappings, {descriptors} descriptors, {grown} bytes more");
    Ok(())
}
