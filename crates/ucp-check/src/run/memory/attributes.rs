//! `attributes` and `transport`: components, memory domains, and what they say of themselves.

use super::{Scene, Tally};
use crate::uct::{Copier, estimate};
use anyhow::Result;

pub(super) fn run(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let components = scene.domain.uct().components()?;
    for name in ["gaudi_copy", "gaudi_gdr"] {
        let found: Vec<_> = components.iter().filter(|(other, _)| other == name).collect();
        tally.equal(&found.len(), &1, format_args!("components called {name}"));
        for (_, domains) in found {
            tally.equal(domains, &vec![name.to_owned()], format_args!("domains of {name}"));
        }
    }
    for component in ["gaudi_copy", "gaudi_gdr"] {
        let domain = scene.domain.uct().open(component, &scene.options.settings)?;
        let is = domain.attributes()?;
        for (right, what) in [
            (is.allocates && is.allocate.gaudi(), "allocates Gaudi memory"),
            (!is.allocate.host(), "leaves host memory to others"),
            (is.detect.gaudi() && !is.detect.host(), "recognises Gaudi memory only"),
            (is.registers && is.register.gaudi() && is.register.host(), "registers both"),
            (is.cache == is.register, "lets UCP cache whatever it registers"),
            (!is.dmabuf.host(), "exports no host memory"),
            (!is.needs_key, "copies without a remote key"),
        ] {
            tally.expect(right, || format!("{component} {what}: {is:?}"));
        }
        let offers = if is.dmabuf.gaudi() { "offers" } else { "does not offer" };
        println!("{component} {offers} dma-bufs of Gaudi memory");
        println!("{component} registers in {:.0} ns", is.register_cost * 1e9);
    }
    Ok(())
}

/// What the copy transport says of itself, beyond its memory domain.
pub(super) fn transport(scene: &Scene<'_>, tally: &mut Tally) -> Result<()> {
    let copier = Copier::open(scene.domain, scene.transport())?;
    let (endpoints, method) = (copier.max_endpoints()?, copier.allocation_method()?);
    println!("{} takes {endpoints} endpoints", scene.transport());
    println!("{} gets host memory by {method}", scene.transport());
    tally.expect(endpoints > 0, || "no endpoint at all".into());
    // Between processes the other side is Gaudi memory, always.
    let between_processes = scene.transport() == "gaudi_ipc";
    for copy in estimate::Copy::all().filter(|copy| copy.to_gaudi || !between_processes) {
        let estimate::Estimate { bandwidth, overhead, latency } = copier.estimate(copy)?;
        println!(
            "{} {copy} at {:.2} GB/s, overhead {:.0} ns, latency {:.0} ns",
            scene.transport(),
            bandwidth / 1e9,
            overhead * 1e9,
            latency * 1e9
        );
        // UCX divides by the bandwidth, and adds the rest up.
        let sensible =
            bandwidth > 1.0 && bandwidth.is_finite() && overhead >= 0.0 && latency >= 0.0;
        tally.expect(sensible, || format!("{copy}: an estimate that UCX cannot use"));
    }
    Ok(())
}
