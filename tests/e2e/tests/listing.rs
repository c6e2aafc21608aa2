//! What stock `ucx_info` shows of us: names, memory types, options, an allocation.

use e2e::{Device, Finished, Listing, Ucx, Workbench, stock};

fn info(device: &Device, arguments: &str) -> Finished {
    stock("ucx_info", device, arguments).run().ok()
}

#[track_caller]
fn assert_once(listing: &Finished, wanted: &str) {
    let found = Listing::of(&listing.stdout).count(wanted);
    assert_eq!(found, 1, "`{wanted}` is there {found} times\n{}", listing.report());
}

/// The lines about our memory domain.
fn gaudi_copy(listing: &Finished) -> Vec<String> {
    let domain = Listing::of(&listing.stdout).domain("gaudi_copy");
    Listing::of(&domain).lines().map(str::to_owned).collect()
}

#[test]
fn every_component_is_listed_once_with_its_documented_names() {
    let listing = info(&Device::software(), "-d");
    for (component, transport) in
        [("gaudi_copy", "gaudi_cpy"), ("gaudi_gdr", "gaudi_gdr"), ("gaudi_ipc", "gaudi_ipc")]
    {
        assert_once(&listing, &format!("Memory domain: {component}"));
        assert_once(&listing, &format!("Component: {component}"));
        assert_once(&listing, &format!("Transport: {transport}"));
        assert_once(&listing, &format!("Device: {component}"));
    }
    let domain = gaudi_copy(&listing);
    assert!(domain.contains(&"Type: accelerator".to_owned()), "{domain:?}");
    let domain = Listing::of(&listing.stdout).domain("gaudi_ipc");
    for wanted in ["remote key: 58 bytes", "error handling: peer failure, ep_check"] {
        assert_eq!(Listing::of(&domain).count(wanted), 1, "`{wanted}`: {domain}");
    }
    assert_eq!(listing.stderr, "");
}

#[test]
fn the_domain_says_what_it_can_do() {
    let listing = info(&Device::software(), "-d");
    let domain = gaudi_copy(&listing);
    let types = domain.iter().find(|line| line.starts_with("memory types:"));
    let types = types.unwrap_or_else(|| panic!("no memory types\n{}", listing.report()));
    for words in ["host (access,reg", "gaudi (access,alloc,reg", "detect"] {
        assert!(types.contains(words), "{types}");
    }
    for operation in ["put_short:", "put_zcopy:", "get_short:", "get_zcopy:"] {
        let offered = domain.iter().any(|line| line.starts_with(operation));
        assert!(offered, "{operation}\n{}", listing.report());
    }
}

#[test]
fn denied_module_leaves_no_trace() {
    let without = Workbench::from_env().tool(Ucx::V1_22, "ucx_info").arg("-d").run().ok();
    let denied = stock("ucx_info", &Device::software(), "-d").env("UCX_MODULES", "^gaudi");
    let denied = denied.run().ok();
    assert_eq!(Listing::of(&denied.stdout).steady(), Listing::of(&without.stdout).steady());
    assert_eq!(denied.stderr, without.stderr);
}

#[test]
fn allocation_goes_through_our_domain() {
    let end = info(&Device::software(), "-u r -m 1m,gaudi");
    let line = end.stdout.lines().find(|line| line.contains("allocated 1M at address"));
    let line = line.unwrap_or_else(|| panic!("nothing was allocated\n{}", end.report()));
    assert!(line.contains("with gaudi_copy"), "{line}");
    let registered = end.stdout.lines().find(|line| line.contains("registered on:"));
    assert!(registered.is_some_and(|line| line.contains("gaudi_copy")), "{}", end.report());
}

#[test]
fn worker_has_a_memory_type_endpoint_for_gaudi() {
    let end = info(&Device::software(), "-u rt -w");
    let mut after = end.stdout.lines().skip_while(|line| !line.contains("Gaudi memory"));
    assert!(after.next().is_some(), "no endpoint for Gaudi memory\n{}", end.report());
    let lane = after.any(|line| line.contains("gaudi_cpy/gaudi_copy") && line.contains("rma_bw"));
    assert!(lane, "{}", end.report());
}
