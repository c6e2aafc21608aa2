//! `churn`: thousands of cycles, after which descriptors and mappings are as they were.

use super::{Scene, Tally, process};
use crate::pattern::mix;
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
    cycles(scene, tally, "host registrations", |n| {
        let (at, length) = place(n);
        drop(scene.domain.register(start + at, length, None)?);
        Ok(())
    })?;
    cycles(scene, tally, "device registrations", |n| {
        let (at, length) = place(n);
        drop(scene.domain.register(memory.address() + at, length, None)?);
        Ok(())
    })?;
    if offers {
        cycles(scene, tally, "exports", |n| {
            let (at, length) = place(n);
            let exported = scene.domain.export(memory.address() + at, length)?;
            exported.context("no dma-buf").map(drop)
        })?;
    }
    cycles(scene, tally, "allocations", |n| {
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
    what: &str,
    mut cycle: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    scene.dog.step(format_args!("churn: {what}"));
    (0..WARM_UP).try_for_each(&mut cycle)?;
    let (descriptors, mappings) = (process::descriptors()?, process::mappings()?.len());
    (0..scene.options.cycles).try_for_each(&mut cycle)?;
    tally.equal(&process::descriptors()?, &descriptors, format_args!("descriptors after {what}"));
    // The C library's heap may take or return a piece; a leak would be thousands.
    let now = process::mappings()?.len();
    tally.expect(now.abs_diff(mappings) <= 2, || {
        format!("{mappings} mappings before, {now} after {} {what}", scene.options.cycles)
    });
    println!("{} {what}: {now} mappings, {descriptors} descriptors", scene.options.cycles);
    Ok(())
}
