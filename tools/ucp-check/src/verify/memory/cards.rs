//! `where`, `hold`, `two-cards`, `named` and `lost`: which card has the memory, and what follows a reset of the card.

use super::alloc::add;
use super::ranges::LiveRanges;
use super::{Checker, card};
use crate::uct::Domain;
use crate::watchdog::Watchdog;
use anyhow::Result;
use std::time::Duration;

/// Allocates, and prints the card's bus id.
pub(super) fn whereabouts(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(4096)?;
    let card = card(check.domain, memory.address())?;
    println!("memory lies on card {card}");
    expect!(check, card.len() == 12, "{card} is not a bus id");
    Ok(())
}

/// Does what is forbidden: reads Gaudi memory with the CPU.
pub(super) fn touch(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(4096)?;
    let mut here = vec![0u8; 4096];
    let there = memory.address() as *const u8;
    // SAFETY: none. The CPU cannot access Gaudi memory, and this must end the process.
    unsafe { std::ptr::copy_nonoverlapping(std::hint::black_box(there), here.as_mut_ptr(), 4096) };
    std::hint::black_box(&here);
    expect!(check, false, "the CPU has read Gaudi memory");
    Ok(())
}

/// Keeps a card until the process is killed.
pub(super) fn hold(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(4096)?;
    println!("holding card {}", card(check.domain, memory.address())?);
    stay(&check.watchdog)
}

/// Does nothing until the process is killed.
pub(super) fn stay(watchdog: &Watchdog) -> ! {
    loop {
        watchdog.step("waiting to be killed");
        std::thread::sleep(Duration::from_secs(1));
    }
}

/// A domain of the component under test, on the card with this number.
pub(super) fn on(check: &Checker<'_>, index: usize) -> Result<Domain> {
    let component = &check.options.component;
    let name = format!("{}_DEVICE", component.to_uppercase());
    check.domain.ucx().open_domain(component, &[(name, index.to_string())])
}

/// Two domains on two cards: disjoint addresses and the right devices; each recognises the other's memory; a pattern
/// written through one card is not seen through the other.
pub(super) fn two(check: &Checker<'_>) -> Result<()> {
    let domains = [on(check, 0)?, on(check, 1)?];
    let (mut ranges, mut live) = (LiveRanges::default(), Vec::new());
    for size in [1, 4096, 100_000, 2 << 20] {
        for (owner, domain) in domains.iter().enumerate() {
            let memory = domain.allocate(size)?;
            add(check, &mut ranges, &memory);
            live.push((owner, memory));
        }
    }
    let cards = [card(&domains[0], live[0].1.address())?, card(&domains[1], live[1].1.address())?];
    expect!(check, cards[0] != cards[1], "both are {}", cards[0]);
    println!("cards {} and {}", cards[0], cards[1]);
    let copiers = domains.each_ref().map(|it| crate::uct::Copier::open(it, check.transport()));
    let [first, second] = copiers;
    let copiers = [first?, second?];
    for (n, (owner, memory)) in live.iter().enumerate() {
        for domain in &domains {
            let found = card(domain, memory.address())?;
            equal!(check, &found, &cards[*owner], "card of {:#x}", memory.address());
        }
        copiers[*owner].put(&check.bytes(n as u64, memory.len()), memory.address())?;
    }
    for (n, (owner, memory)) in live.iter().enumerate() {
        let (address, length) = memory.range();
        let same = copiers[*owner].read(address, length)? == check.bytes(n as u64, length);
        expect!(check, same, "{address:#x} of card {owner} does not hold what was written");
    }
    Ok(())
}

/// Memory on the card that UCX names, from a domain that may use any card.
pub(super) fn named(check: &Checker<'_>) -> Result<()> {
    let mut numbers = Vec::new();
    for index in 0..3 {
        let domain = on(check, index)?;
        let memory = domain.allocate(4096)?;
        numbers.push(domain.query(memory.address(), 1)?.sys_device);
    }
    // In another order than they were opened in.
    for wanted in [2, 0, 1, 2].map(|index| numbers[index]) {
        let memory = check.domain.allocate_on(4096, false, Some(wanted))?;
        let found = check.domain.query(memory.address(), 1)?.sys_device;
        check.equal(&found, &wanted, "the system device of memory that was wanted on one");
    }
    println!("memory came from system devices {numbers:?} as UCX named them");
    Ok(())
}

/// The first copy finds the card reset. The card can be used again after everything on it was freed.
pub(super) fn lost(check: &Checker<'_>) -> Result<()> {
    let memory = check.domain.allocate(4096)?;
    {
        let failed = check.copier()?.put(&[1; 64], memory.address()).is_err();
        check.expect(failed, "the copy succeeded: order a reset in the machine's faults");
        let refused = check.domain.allocate_on(4096, true, None).is_err();
        check.expect(refused, "memory was allocated on a card that was reset");
    }
    drop(memory);
    let memory = check.domain.allocate(4096)?;
    let copier = check.copier()?;
    copier.put(&[7; 64], memory.address())?;
    let right = copier.read(memory.address(), 64)? == [7; 64];
    check.expect(right, "wrong bytes on the card after its reset");
    println!("the card was opened again after its reset");
    Ok(())
}
