//! `attributes`: components, memory domains, and what they say of themselves.

use super::{Scene, Tally};
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
            (!is.dmabuf.host(), "exports no host memory"),
            (!is.needs_key, "copies without a remote key"),
        ] {
            tally.expect(right, || format!("{component} {what}: {is:?}"));
        }
        let offers = if is.dmabuf.gaudi() { "offers" } else { "does not offer" };
        println!("{component} {offers} dma-bufs of Gaudi memory");
    }
    Ok(())
}
