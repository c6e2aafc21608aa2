//! `where`, `hold` and `two-cards`: which card memory lies on.

use super::ledger::Ledger;
use super::{Scene, Tally};
use crate::pattern::{fill, mix};
use crate::uct::{Copier, Domain};
use anyhow::{Context, Result};
use std::time::Duration;

/// Allocates, and prints the card's bus id.
pub(super) fn whereabouts(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let memory = scene.domain.allocate(4096, false)?;
    let card = card(scene.domain, memory.address())?;
    println!("memory lies on card {card}");
    tally.expect(card.len() == 12, || format!("{card} is not a bus id"));
    Ok(())
}

/// Keeps a card until the process is killed.
pub(super) fn hold(scene: &Scene<'_>) -> Result<()> {
    let memory = scene.domain.allocate(4096, false)?;
    println!("holding card {}", card(scene.domain, memory.address())?);
    stay(scene)
}

/// Does nothing until the process is killed.
pub(super) fn stay(scene: &Scene<'_>) -> ! {
    loop {
        scene.dog.step("waiting to be killed");
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn card(domain: &Domain, address: u64) -> Result<String> {
    let answer = domain.query(address, 1)?;
    domain.uct().bus_id(answer.sys_device).context("UCX does not know the card's system device")
}

/// Two domains on two cards: disjoint addresses, right devices, each other's memory recognised.
pub(super) fn two(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let on = |index: &str| {
        let name = format!("{}_DEVICE", scene.options.component.to_uppercase());
        let settings = [(name, index.to_owned())];
        scene.domain.uct().open(&scene.options.component, &settings)
    };
    let domains = [on("0")?, on("1")?];
    let sizes = [1, 4096, 100_000, 2 << 20];
    let mut ledger = Ledger::default();
    let mut live = Vec::new();
    for size in sizes {
        for (owner, domain) in domains.iter().enumerate() {
            let memory = domain.allocate(size, false)?;
            let (address, length) = (memory.address(), memory.len());
            tally.expect(ledger.add(address, length), || {
                format!("{length} bytes at {address:#x} of card {owner} overlap another's")
            });
            live.push((owner, memory));
        }
    }
    let cards = [card(&domains[0], live[0].1.address())?, card(&domains[1], live[1].1.address())?];
    tally.expect(cards[0] != cards[1], || format!("both are {}", cards[0]));
    println!("cards {} and {}", cards[0], cards[1]);
    for (owner, memory) in &live {
        for domain in &domains {
            let found = card(domain, memory.address())?;
            tally.equal(&found, &cards[*owner], format_args!("card of {:#x}", memory.address()));
        }
    }
    contents(scene, tally, &domains, &live)
}

/// Memory on the card that UCX names, from a domain that may use any.
pub(super) fn named(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let mut numbers = Vec::new();
    for index in ["0", "1", "2"] {
        let name = format!("{}_DEVICE", scene.options.component.to_uppercase());
        let settings = [(name, index.to_owned())];
        let domain = scene.domain.uct().open(&scene.options.component, &settings)?;
        let memory = domain.allocate(4096, false)?;
        numbers.push(domain.query(memory.address(), 1)?.sys_device);
    }
    // Not in the order in which they were opened.
    for wanted in [2, 0, 1, 2] {
        let wanted = numbers[wanted];
        let memory = scene.domain.allocate_on(4096, false, Some(wanted))?;
        let found = scene.domain.query(memory.address(), 1)?.sys_device;
        tally.equal(&found, &wanted, "the system device of memory that was wanted on one");
    }
    println!("memory came from system devices {numbers:?} as UCX named them");
    Ok(())
}

/// Patterns written through one card are not seen through the other.
fn contents(
    scene: &Scene<'_>,
    tally: &mut Tally,
    domains: &[Domain; 2],
    live: &[(usize, crate::uct::Memory<'_>)],
) -> Result<()> {
    let copiers = [
        Copier::open(&domains[0], scene.transport())?,
        Copier::open(&domains[1], scene.transport())?,
    ];
    let image = |n: usize, length: usize| {
        let mut bytes = vec![0; length];
        fill(mix(scene.options.seed ^ n as u64), 0, &mut bytes);
        bytes
    };
    for (n, (owner, memory)) in live.iter().enumerate() {
        copiers[*owner].put(&image(n, memory.len()), memory.address())?;
    }
    for (n, (owner, memory)) in live.iter().enumerate() {
        let mut found = vec![0; memory.len()];
        copiers[*owner].get(memory.address(), &mut found)?;
        tally.expect(found == image(n, memory.len()), || {
            format!("{:#x} of card {owner} does not hold what was written", memory.address())
        });
    }
    Ok(())
}
