//! `UCX_TLS`, `UCX_ACC_DEVICES` and `UCX_NET_DEVICES` select us as they do any accelerator; what
//! leaves no copy path gives UCX's own message, never a crash.

use e2e::{Device, Pair, Perftest, Ucx, Workbench};

fn gaudi_with(variables: &[(&str, &str)]) -> Pair {
    run("gaudi", variables)
}

fn host_with(variables: &[(&str, &str)]) -> Pair {
    run("host", variables)
}

fn run(memory: &str, variables: &[(&str, &str)]) -> Pair {
    let device = Device::software();
    Perftest::new(&Workbench::from_env(), "tag_bw", 65536)
        .iterations(100, 10)
        .plugin()
        .device(&device)
        .both(|tool| {
            let tool = tool.words(&format!("-m {memory}"));
            variables.iter().fold(tool, |tool, (name, value)| tool.env(name, value))
        })
        .run()
        .unwrap_or_else(|error| panic!("{error:#}"))
}

#[track_caller]
fn assert_works(pair: &Pair) {
    pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
    for end in [&pair.server, &pair.client] {
        let text = format!("{}{}", end.stdout, end.stderr);
        assert!(!text.contains("is not available"), "UCX found a name unknown\n{}", end.report());
    }
}

#[track_caller]
fn assert_refused_in_words(pair: &Pair) {
    assert!(!pair.crashed(), "{}\n{}", pair.client.report(), pair.server.report());
    assert!(!pair.client.success(), "{}", pair.client.report());
    let said = [&pair.server, &pair.client]
        .iter()
        .any(|end| format!("{}{}", end.stdout, end.stderr).contains("ERROR"));
    assert!(said, "refused without a word\n{}", pair.client.report());
}

#[test]
fn tls_gaudi_is_the_alias_ucx_knows() {
    assert_works(&gaudi_with(&[("UCX_TLS", "gaudi,sm")]));
}

#[test]
fn tls_gaudi_gdr_alone_copies() {
    assert_works(&gaudi_with(&[("UCX_TLS", "gaudi_gdr,sm")]));
}

#[test]
fn tls_gaudi_cpy_alone_copies() {
    assert_works(&gaudi_with(&[("UCX_TLS", "gaudi_cpy,sm")]));
}

#[test]
fn tls_all_is_the_default() {
    assert_works(&gaudi_with(&[("UCX_TLS", "all")]));
}

#[test]
fn tls_over_tcp() {
    assert_works(&gaudi_with(&[("UCX_TLS", "gaudi_cpy,tcp")]));
}

#[test]
fn excluded_gaudi_cpy_leaves_gaudi_gdr() {
    assert_works(&gaudi_with(&[("UCX_TLS", "^gaudi_cpy")]));
}

#[test]
fn no_gaudi_transport_refuses_gaudi_memory() {
    for tls in ["sm", "^gaudi_cpy,gaudi_gdr", "tcp"] {
        assert_refused_in_words(&gaudi_with(&[("UCX_TLS", tls)]));
    }
}

#[test]
fn no_gaudi_transport_leaves_host_traffic_alone() {
    for tls in ["sm", "^gaudi_cpy,gaudi_gdr", "tcp"] {
        assert_works(&host_with(&[("UCX_TLS", tls)]));
    }
}

#[test]
fn gaudi_transports_alone_cannot_reach_a_peer() {
    assert_refused_in_words(&gaudi_with(&[("UCX_TLS", "gaudi_cpy")]));
}

#[test]
fn acc_devices_by_name() {
    assert_works(&gaudi_with(&[("UCX_ACC_DEVICES", "gaudi_copy")]));
}

#[test]
fn acc_devices_of_another_name_exclude_us() {
    let variables = [("UCX_ACC_DEVICES", "some_other_device")];
    assert_refused_in_words(&gaudi_with(&variables));
    host_with(&variables).figures().unwrap_or_else(|error| panic!("{error:#}"));
}

#[test]
fn net_devices_keep_selecting_networks_beside_us() {
    assert_works(&gaudi_with(&[("UCX_NET_DEVICES", "lo"), ("UCX_TLS", "tcp,gaudi_cpy")]));
}

#[test]
fn memtype_cache_may_be_on_or_off() {
    for cache in ["y", "n"] {
        assert_works(&gaudi_with(&[("UCX_MEMTYPE_CACHE", cache)]));
    }
}

/// Fragments in Gaudi memory, for which UCX has no default size: it crashed.
#[test]
fn fragments_in_gaudi_memory_without_a_size_are_refused_in_words() {
    for (protocols, memory, types) in
        [("n", "gaudi", "gaudi"), ("n", "gaudi", "gaudi,host"), ("y", "gaudi,host", "host,gaudi")]
    {
        for scheme in ["get_ppln", "put_ppln"] {
            let end = Workbench::from_env()
                .tool(Ucx::V1_22, "ucx_perftest")
                .plugin()
                .device(&Device::software())
                .words(&format!("-l -f -t tag_bw -m {memory} -s 4194304 -n 20 -w 2"))
                .env("UCX_PROTO_ENABLE", protocols)
                .env("UCX_RNDV_FRAG_MEM_TYPES", types)
                .env("UCX_RNDV_SCHEME", scheme)
                .run();
            assert!(!end.crashed() && !end.success(), "{}", end.report());
            let said = format!("{}{}", end.stdout, end.stderr);
            assert!(said.contains("set UCX_RNDV_FRAG_SIZE="), "{}", end.report());
        }
    }
    // Programs that do not use a Gaudi go on.
    assert_works(&host_with(&[("UCX_RNDV_FRAG_MEM_TYPES", "host,gaudi")]));
}

#[test]
fn fragments_in_gaudi_memory_of_a_size_carry_every_byte() {
    let bench = Workbench::from_env();
    for ucx in Ucx::ALL {
        for scheme in ["get_ppln", "put_ppln"] {
            for run in ["loopback", "pair"] {
                bench
                    .ucp_check(ucx)
                    .plugin()
                    .device(&Device::software())
                    .words(&format!("{run} --ops tag --sizes 70001,1M,9194319"))
                    .arg("--ucx")
                    .arg(ucx.root(bench.layout()))
                    .env("UCX_RNDV_FRAG_MEM_TYPES", "gaudi")
                    .env("UCX_RNDV_FRAG_SIZE", "host:512K,gaudi:4M")
                    .env("UCX_RNDV_FRAG_ALLOC_COUNT", "host:128,gaudi:16")
                    .env("UCX_RNDV_SCHEME", scheme)
                    .run()
                    .ok();
            }
        }
    }
}
