//! `UCX_TLS`, `UCX_ACC_DEVICES` and `UCX_NET_DEVICES` select us as they do any accelerator; what
//! leaves no copy path gives UCX's own message, never a crash.

use e2e::{Device, Pair, Perftest, Ucx, client, stock};

/// Messages of memory of this kind with these variables, separated by blanks.
fn run(memory: &str, variables: &str) -> Pair {
    let test = Perftest::on(&Device::software(), "tag_bw", 65536).words(&format!("-m {memory}"));
    let variables: Vec<(&str, &str)> =
        variables.split(' ').map(|variable| variable.split_once('=').expect("K=V")).collect();
    let pair = test.both(|tool| tool.envs(&variables)).run();
    pair.unwrap_or_else(|error| panic!("{error:#}"))
}

#[track_caller]
fn works(memory: &str, variables: &str) {
    let pair = run(memory, variables);
    pair.figures().unwrap_or_else(|error| panic!("{variables}: {error:#}"));
    for end in [&pair.server, &pair.client] {
        let known = !end.text().contains("is not available");
        assert!(known, "{variables}: UCX found a name unknown\n{}", end.report());
    }
}

#[track_caller]
fn is_refused_in_words(variables: &str) {
    let pair = run("gaudi", variables);
    assert!(!pair.crashed(), "{}\n{}", pair.client.report(), pair.server.report());
    assert!(!pair.client.success(), "{variables}: {}", pair.client.report());
    let said = [&pair.server, &pair.client].iter().any(|end| end.says(&["ERROR"]));
    assert!(said, "{variables}: refused without a word\n{}", pair.client.report());
}

macro_rules! selections {
    ($($name:ident: $($variables:literal),+;)*) => {$(
        #[test]
        fn $name() {
            for variables in [$($variables),+] {
                works("gaudi", variables);
            }
        }
    )*};
}

selections! {
    tls_gaudi_is_the_alias_ucx_knows: "UCX_TLS=gaudi,sm";
    tls_gaudi_gdr_alone_copies: "UCX_TLS=gaudi_gdr,sm";
    tls_gaudi_cpy_alone_copies: "UCX_TLS=gaudi_cpy,sm";
    tls_all_is_the_default: "UCX_TLS=all";
    tls_over_tcp: "UCX_TLS=gaudi_cpy,tcp";
    excluded_gaudi_cpy_leaves_gaudi_gdr: "UCX_TLS=^gaudi_cpy";
    acc_devices_by_name: "UCX_ACC_DEVICES=gaudi_copy";
    net_devices_keep_selecting_networks_beside_us: "UCX_NET_DEVICES=lo UCX_TLS=tcp,gaudi_cpy";
    memtype_cache_may_be_on_or_off: "UCX_MEMTYPE_CACHE=y", "UCX_MEMTYPE_CACHE=n";
}

#[test]
fn no_gaudi_transport_refuses_gaudi_memory_and_leaves_host_traffic_alone() {
    for tls in ["UCX_TLS=sm", "UCX_TLS=^gaudi_cpy,gaudi_gdr", "UCX_TLS=tcp"] {
        is_refused_in_words(tls);
        works("host", tls);
    }
}

#[test]
fn gaudi_transports_alone_cannot_reach_a_peer() {
    is_refused_in_words("UCX_TLS=gaudi_cpy");
}

#[test]
fn acc_devices_of_another_name_exclude_us() {
    let variables = "UCX_ACC_DEVICES=some_other_device";
    is_refused_in_words(variables);
    run("host", variables).figures().unwrap_or_else(|error| panic!("{error:#}"));
}

/// Fragments in Gaudi memory, for which UCX has no default size: it crashed.
#[test]
fn fragments_in_gaudi_memory_without_a_size_are_refused_in_words() {
    for (protocols, memory, types) in
        [("n", "gaudi", "gaudi"), ("n", "gaudi", "gaudi,host"), ("y", "gaudi,host", "host,gaudi")]
    {
        for scheme in ["get_ppln", "put_ppln"] {
            let words = format!("-l -f -t tag_bw -m {memory} -s 4194304 -n 20 -w 2");
            let tool = stock("ucx_perftest", &Device::software(), &words).envs(&[
                ("UCX_PROTO_ENABLE", protocols),
                ("UCX_RNDV_FRAG_MEM_TYPES", types),
                ("UCX_RNDV_SCHEME", scheme),
            ]);
            let end = tool.run().refused();
            assert!(end.says(&["set UCX_RNDV_FRAG_SIZE="]), "{}", end.report());
        }
    }
    // Programs that do not use a Gaudi go on.
    works("host", "UCX_RNDV_FRAG_MEM_TYPES=host,gaudi");
}

#[test]
fn fragments_in_gaudi_memory_of_a_size_carry_every_byte() {
    for ucx in Ucx::ALL {
        for (run, scheme) in [("loopback", "get_ppln"), ("pair", "get_ppln"), ("pair", "put_ppln")]
        {
            let words = format!("{run} --ops tag --sizes 70001,1M,9194319");
            let tool = client(ucx, &Device::software(), &words).envs(&[
                ("UCX_RNDV_FRAG_MEM_TYPES", "gaudi"),
                ("UCX_RNDV_FRAG_SIZE", "host:512K,gaudi:4M"),
                ("UCX_RNDV_FRAG_ALLOC_COUNT", "host:128,gaudi:16"),
                ("UCX_RNDV_SCHEME", scheme),
            ]);
            tool.run().ok();
        }
    }
}
