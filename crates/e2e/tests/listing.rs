//! What stock `ucx_info` shows of us: names, memory types, options, an allocation.

use e2e::{Device, Finished, Listing, Ucx, Workbench};

fn info(device: &Device, arguments: &str) -> Finished {
    Workbench::from_env()
        .tool(Ucx::V1_22, "ucx_info")
        .plugin()
        .device(device)
        .words(arguments)
        .run()
        .ok()
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
fn listing_has_one_gaudi_copy_with_its_documented_names() {
    let listing = info(&Device::software(), "-d");
    for wanted in [
        "Memory domain: gaudi_copy",
        "Component: gaudi_copy",
        "Transport: gaudi_cpy",
        "Device: gaudi_copy",
    ] {
        assert_once(&listing, wanted);
    }
    let domain = gaudi_copy(&listing);
    assert!(domain.contains(&"Type: accelerator".to_owned()), "{domain:?}");
}

#[test]
fn listing_has_one_gaudi_gdr_for_the_alias_gaudi() {
    let listing = info(&Device::software(), "-d");
    for wanted in ["Component: gaudi_gdr", "Transport: gaudi_gdr"] {
        assert_once(&listing, wanted);
    }
}

#[test]
fn listing_has_one_gaudi_ipc_with_its_documented_names() {
    let listing = info(&Device::software(), "-d");
    for wanted in [
        "Memory domain: gaudi_ipc",
        "Component: gaudi_ipc",
        "Transport: gaudi_ipc",
        "Device: gaudi_ipc",
    ] {
        assert_once(&listing, wanted);
    }
    let domain = Listing::of(&listing.stdout).domain("gaudi_ipc");
    for wanted in ["remote key: 57 bytes", "error handling: peer failure, ep_check"] {
        assert_eq!(Listing::of(&domain).count(wanted), 1, "`{wanted}`: {domain}");
    }
}

#[test]
fn memory_types_say_what_the_domain_can_do() {
    let listing = info(&Device::software(), "-d");
    let domain = gaudi_copy(&listing);
    let types = domain.iter().find(|line| line.starts_with("memory types:"));
    let types = types.unwrap_or_else(|| panic!("no memory types\n{}", listing.report()));
    assert!(types.contains("host (access,reg"), "{types}");
    assert!(types.contains("gaudi (access,alloc,reg"), "{types}");
    assert!(types.contains("detect"), "{types}");
}

#[test]
fn transport_offers_the_four_copies() {
    let listing = info(&Device::software(), "-d");
    let domain = gaudi_copy(&listing);
    for operation in ["put_short", "put_zcopy", "get_short", "get_zcopy"] {
        assert!(
            domain.iter().any(|line| line.starts_with(&format!("{operation}:"))),
            "{operation}\n{}",
            listing.report()
        );
    }
}

#[test]
fn listing_is_quiet_on_standard_error() {
    let listing = info(&Device::software(), "-d");
    assert_eq!(listing.stderr, "");
}

#[test]
fn denied_module_leaves_no_trace() {
    let bench = Workbench::from_env();
    let device = Device::software();
    let without = bench.tool(Ucx::V1_22, "ucx_info").arg("-d").run().ok();
    let denied = bench
        .tool(Ucx::V1_22, "ucx_info")
        .plugin()
        .device(&device)
        .env("UCX_MODULES", "^gaudi")
        .arg("-d")
        .run()
        .ok();
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
    assert!(
        after.any(|line| line.contains("gaudi_cpy/gaudi_copy") && line.contains("rma_bw")),
        "{}",
        end.report()
    );
}

#[test]
fn config_variables_are_listed_with_their_help() {
    let end = info(&Device::software(), "-c -f");
    assert!(
        end.stdout.lines().any(|line| line.starts_with("UCX_GAUDI_COPY_DEVICE=")),
        "UCX_GAUDI_COPY_DEVICE is not listed\n{}",
        end.stdout.lines().filter(|line| line.contains("GAUDI")).collect::<Vec<_>>().join("\n")
    );
}
