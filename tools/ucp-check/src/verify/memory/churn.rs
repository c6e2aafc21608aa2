//! `churn`: after thousands of cycles, descriptors and mappings must be as before.

use super::{Checker, range, usage};
use crate::pattern::mix;
use anyhow::{Context, Result};

/// Cycles after which everything exists that is kept on purpose.
const WARM_UP: u32 = 64;

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let (domain, count) = (check.domain, check.options.cycles);
    let (host, memory) = (vec![0u8; 1 << 20], domain.allocate(1 << 20)?);
    let offers = domain.exports()?;
    let part = |n: u32| {
        let draw = mix(check.options.seed ^ u64::from(n)) as usize;
        ((draw % (1 << 19)) as u64, 1 + (draw >> 20) % (1 << 19))
    };
    for (what, start) in
        [("host registrations", range(&host).0), ("device registrations", memory.address())]
    {
        cycles(check, count, what, |n| {
            let (at, length) = part(n);
            drop(domain.register(start + at, length, None)?);
            Ok(())
        })?;
    }
    // A copy pins registered memory: the pin must end with the registration.
    let copier = check.copier()?;
    cycles(check, count / 8, "registrations with a copy", |n| {
        let part = &host[part(n).0 as usize..][..1 << 17];
        let by = domain.register_slice(part)?;
        Ok(copier.put_zcopy(part, Some(&by), memory.address())?)
    })?;
    if offers {
        cycles(check, count, "exports", |n| {
            let (at, length) = part(n);
            domain.export(memory.address() + at, length)?.context("no dma-buf").map(drop)
        })?;
    }
    cycles(check, count, "allocations", |n| {
        let (_, length) = part(n);
        let memory = domain.allocate(length)?;
        if offers && n % 16 == 0 {
            drop(domain.export(memory.address(), length)?);
        }
        Ok(())
    })
}

fn cycles(
    check: &Checker<'_>,
    count: u32,
    what: &str,
    mut cycle: impl FnMut(u32) -> Result<()>,
) -> Result<()> {
    check.watchdog.step(format_args!("churn: {what}"));
    (0..WARM_UP).try_for_each(&mut cycle)?;
    let before = usage::Usage::now()?;
    (0..count).try_for_each(&mut cycle)?;
    let now = usage::Usage::now()?;
    equal!(check, &now.descriptors, &before.descriptors, "descriptors after {what}");
    // The driver library may start a thread meanwhile (a stack and an arena of the C library's heap are five mappings);
    // a leak would be thousands.
    let (mappings, descriptors) = (now.mappings, now.descriptors);
    expect!(
        check,
        mappings.abs_diff(before.mappings) <= 32,
        "{} mappings before, {mappings} after {count} {what}",
        before.mappings
    );
    let grown = now.resident.saturating_sub(before.resident);
    // Ten thousand leaked objects of the smallest size would exceed this.
    expect!(check, grown <= 256 << 10, "{grown} bytes more are resident after {what}");
    println!("{count} {what}: {mappings} mappings, {descriptors} descriptors, {grown} bytes more");
    Ok(())
}
