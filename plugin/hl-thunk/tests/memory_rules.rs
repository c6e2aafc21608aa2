//! What the kernel's own driver was seen to do with memory, in a virtual machine, the software card does too.

mod machine;

#[path = "../examples/memory_rules.rs"]
mod memory_rules;

#[test]
fn the_drivers_rules_for_memory_hold_on_the_software_card() {
    // One card, which is then busy until its dma-buf is closed.
    soft_gaudi::testing::set_up("gaudi2", &[("SOFT_GAUDI_DEVICES", "1")]);
    memory_rules::check(machine::library("gaudi2"), None);
}
