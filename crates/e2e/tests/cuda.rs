//! CUDA memory beside Gaudi memory in one job: every operation and pair, byte by byte.
//!
//! Where there is no GPU these say so and check what is left: that the pairs without CUDA run all the same.

use e2e::{Device, Ucx, client};

/// Sizes on both sides of where UCX changes protocol: short, eager, one fragment, a pipeline of them.
const WORDS: &str = "pair --plain --cuda --sizes 1,4097,65537,1M+1";

/// The settings for mixed pairs, by which alone a message inside one process arrives (docs/cuda.md).
const HOST_FRAGMENTS: [(&str, &str); 1] = [("UCX_RNDV_FRAG_MEM_TYPES", "host")];

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
    run(&WORDS.replace("pair", "loopback"), &HOST_FRAGMENTS);
}

#[test]
fn transports_and_accelerators_of_both_can_be_named() {
    let named = [
        ("UCX_TLS", "sysv,cma,cuda_copy,cuda_ipc,gaudi_cpy"),
        ("UCX_ACC_DEVICES", "cuda,gaudi_copy"),
    ];
    run(WORDS, &named);
}
