//! `attributes` and `transport`: components, memory domains, and their attributes.

use super::Checker;
use crate::uct::{Estimate, MemoryType, Operation, has, md_flag};
use anyhow::Result;

pub(super) fn run(check: &Checker<'_>) -> Result<()> {
    let ucx = check.domain.ucx();
    let components = ucx.components()?;
    for name in ["gaudi_copy", "gaudi_gdr"] {
        let found: Vec<_> = components.iter().filter(|(_, other, _)| other == name).collect();
        equal!(check, &found.len(), &1, "components called {name}");
        for (_, _, domains) in found {
            equal!(check, domains, &vec![name.to_owned()], "domains of {name}");
        }
        let is = ucx.open_domain(name, &check.options.set)?.attributes()?;
        let gaudi = |types| has(types, MemoryType::GAUDI);
        let host = |types| has(types, MemoryType::HOST);
        let flag = |bit| is.flags & bit != 0;
        let registers = gaudi(is.reg_mem_types) && host(is.reg_mem_types);
        for (right, what) in [
            (flag(md_flag::ALLOC) && gaudi(is.alloc_mem_types), "allocates Gaudi memory"),
            (!host(is.alloc_mem_types), "leaves host memory to others"),
            (
                gaudi(is.detect_mem_types) && !host(is.detect_mem_types),
                "recognises Gaudi memory only",
            ),
            (flag(md_flag::REG) && registers, "registers both"),
            (is.cache_mem_types == is.reg_mem_types, "lets UCP cache whatever it registers"),
            (!host(is.dmabuf_mem_types), "exports no host memory"),
            (!flag(md_flag::NEED_RKEY), "copies without a remote key"),
        ] {
            expect!(check, right, "not so: {name} {what}");
        }
        let offers = if gaudi(is.dmabuf_mem_types) { "offers" } else { "does not offer" };
        println!("{name} {offers} dma-bufs of Gaudi memory");
        let asks = if flag(md_flag::REG_DMABUF) { "asks" } else { "does not ask" };
        println!("{name} {asks} UCX for dma-bufs of others");
        println!("{name} registers in {:.0} ns", is.reg_cost.constant * 1e9);
    }
    Ok(())
}

/// The attributes of the copy transport, beyond its memory domain.
pub(super) fn transport(check: &Checker<'_>) -> Result<()> {
    let (copier, name) = (check.copier()?, check.transport());
    let (endpoints, method) = (copier.max_endpoints()?, copier.allocation_method()?);
    println!("{name} takes {endpoints} endpoints");
    println!("{name} gets host memory by {method}");
    check.expect(endpoints > 0, "no endpoint at all");
    let mut addresses = copier.addresses()?;
    // gaudi_ipc does not connect a process with itself.
    let leads_here = name != "gaudi_ipc";
    check.equal(&copier.leads_to(&addresses), &leads_here, "an endpoint leads to its own process");
    addresses.interface.iter_mut().for_each(|byte| *byte = !*byte);
    check.expect(!copier.leads_to(&addresses), "an endpoint leads to another process");
    check.equal(&copier.check_peer(), &Ok(()), "the peer, which is this process");
    let (host, gaudi) = (("host", MemoryType::HOST), ("gaudi", MemoryType::GAUDI));
    for (operation, raw) in [
        ("put_short", Operation::PUT_SHORT),
        ("put_zcopy", Operation::PUT_ZCOPY),
        ("get_short", Operation::GET_SHORT),
        ("get_zcopy", Operation::GET_ZCOPY),
    ] {
        for (local, remote) in [(host, gaudi), (gaudi, host), (gaudi, gaudi)] {
            // For gaudi_ipc the remote side is always Gaudi memory.
            if name == "gaudi_ipc" && remote == host {
                continue;
            }
            let copy = format!("{operation} {}:{}", local.0, remote.0);
            let Estimate { bandwidth, overhead, latency } =
                copier.estimate(raw, local.1, remote.1)?;
            let (gbps, overhead_ns, latency_ns) = (bandwidth / 1e9, overhead * 1e9, latency * 1e9);
            println!(
                "{name} {copy} at {gbps:.2} GB/s, overhead {overhead_ns:.0} ns, latency {latency_ns:.0} ns"
            );
            // UCX divides by the bandwidth, and adds the other terms.
            let usable =
                bandwidth > 1.0 && bandwidth.is_finite() && overhead >= 0.0 && latency >= 0.0;
            expect!(check, usable, "{copy}: an estimate that UCX cannot use");
        }
    }
    Ok(())
}
