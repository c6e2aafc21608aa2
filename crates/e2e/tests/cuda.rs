//! CUDA memory beside Gaudi memory in one job: every operation and pair, byte by byte.
//!
//! Where there is no GPU these say so and check what is left: that the pairs without CUDA run all the same.

use e2e::{Device, Ucx, Workbench, client};

/// Sizes on both sides of where UCX changes protocol: short, eager, one fragment, a pipeline of them.
const WORDS: &str = "pair --plain --cuda --sizes 1,4097,65537,1M+1";

/// Runs our client, which has to succeed; says if it had no GPU.
fn run(words: &str, variables: &[(&str, &str)]) {
    for ucx in Ucx::ALL {
        let device = Device::cards(2);
        let end = client(ucx, &device, words).cuda().envs(variables).run();
        let stdout = &end.ok().stdout;
        match stdout.lines().find(|line| line.starts_with("skipped: ")) {
            Some(line) => println!("{line}"),
            None => assert!(stdout.contains("gaudi:cuda"), "{stdout}"),
        }
        assert!(stdout.contains("gaudi:gaudi") && stdout.contains(" 0 failed"), "{stdout}");
    }
}

#[test]
fn all_pairs_of_host_gaudi_and_cuda_are_byte_exact_between_two_processes() {
    run(WORDS, &[]);
}

#[test]
fn all_pairs_of_host_gaudi_and_cuda_are_byte_exact_inside_one_process() {
    run(&WORDS.replace("pair", "loopback"), &[]);
}

#[test]
fn transports_and_accelerators_of_both_can_be_named() {
    let named = [
        ("UCX_TLS", "sysv,cma,cuda_copy,cuda_ipc,gaudi_cpy"),
        ("UCX_ACC_DEVICES", "cuda,gaudi_copy"),
    ];
    run(WORDS, &named);
}

/// What `ucx_info -c` says of the memory that rendezvous fragments lie in, with these variables.
fn fragments_with(device: &Device, variables: &[(&str, &str)]) -> String {
    let bench = Workbench::from_env();
    let tool = bench.tool(Ucx::V1_22, "ucx_info").plugin().device(device).envs(variables);
    let end = tool.arg("-c").run().ok();
    let name = "UCX_RNDV_FRAG_MEM_TYPES=";
    let value = end.stdout.lines().find_map(|line| line.strip_prefix(name));
    value.unwrap_or_else(|| panic!("{}", end.report())).to_owned()
}

/// Fragments in CUDA memory make messages from Gaudi memory slow, or hang: see docs/cuda.md.
#[test]
fn fragments_lie_in_host_memory_beside_a_gaudi_unless_the_user_says_otherwise() {
    let gaudi = Device::software();
    let own = "host,cuda"; // UCX's own default
    assert_eq!(fragments_with(&gaudi, &[]), "host");
    assert_eq!(fragments_with(&gaudi, &[("UCX_RNDV_FRAG_MEM_TYPES", own)]), own);
    assert_eq!(fragments_with(&gaudi, &[("UCX_RNDV_FRAG_MEM_TYPE", "cuda")]), "cuda", "older name");
    assert_eq!(fragments_with(&gaudi, &[("UCX_MODULES", "^gaudi")]), own);
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("ucx.conf"), "UCX_RNDV_FRAG_MEM_TYPES=cuda\n")
        .expect("written");
    let theirs = folder.path().display().to_string();
    assert_eq!(fragments_with(&gaudi, &[("UCX_CONFIG_DIR", &theirs)]), "cuda", "the user's file");
    if std::path::Path::new("/sys/bus/pci/drivers/habanalabs").exists() {
        println!("skipped: the half without a Gaudi, because the driver is loaded here");
        return;
    }
    assert_eq!(fragments_with(&Device::None, &[]), own);
}
