//! Which pointer is Gaudi memory: by exact range and length, over all cards, and never a host
//! pointer. Asked of memory domains through stock libuct.

mod memory;

use e2e::Ucx;
use memory::{Machine, passes_everywhere};

/// Inside, at the ends, across the ends, freed; host memory of every kind and every mapping of the
/// process.
#[test]
fn ranges_to_the_byte_and_no_host_memory() {
    passes_everywhere("detect");
}

#[test]
fn gaudi_gdr_detects_the_same() {
    Machine::eight_cards().check(Ucx::V1_22, "detect --component gaudi_gdr").run().ok();
}

/// The client prints the seed; the same seed gives the same sequence.
#[test]
fn random_sequences_agree_with_a_model() {
    for seed in 1..4 {
        passes_everywhere(&format!("model --seed {seed}"));
    }
}

#[test]
fn threads_with_a_worker_each_agree_with_the_model() {
    passes_everywhere("threads");
}

/// Both drivers return the same addresses: the windows keep them apart.
#[test]
fn two_cards_in_one_process_share_no_address() {
    for ucx in Ucx::ALL {
        let end = Machine::eight_cards().check(ucx, "two-cards").run().ok();
        let cards = "cards 0000:33:00.0 and 0000:4d:00.0";
        assert!(end.stdout.contains(cards), "{}", end.report());
    }
}

/// A second first-generation card would have the first one's addresses.
#[test]
fn second_gaudi1_in_one_process_is_refused_with_the_reason() {
    let machine = Machine::new("Gaudi1 with two cards", "gaudi1", 2);
    let end = machine.check(Ucx::V1_22, "two-cards").run().refused();
    assert!(end.says(&["ERROR", "0000:4d:00.0", "address"]), "{}", end.report());
}

/// A check that finds nothing wrong proves nothing: this one has to fail.
#[test]
fn without_a_plugin_the_check_fails() {
    let bench = e2e::Workbench::from_env();
    let root = Ucx::V1_22.root(bench.layout());
    let end = bench.ucp_check(Ucx::V1_22).words("memory detect --ucx").arg(root).run();
    assert!(!end.success(), "{}", end.report());
    assert!(end.stderr.contains("gaudi_copy"), "{}", end.report());
}
