//! The example of the README, on the software card.

use soft_gaudi::testing::{Machine, child, is_child};

#[path = "../examples/copy.rs"]
mod copy;

#[test]
fn the_example_copies_bytes_to_a_card_and_back() {
    if is_child() {
        return copy::main().expect("the example runs");
    }
    // Another process, because the loader reads its path at the start of one.
    let mut example = child("the_example_copies_bytes_to_a_card_and_back");
    let output = Machine::temporary("example").run(&mut example).expect("this program starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("4096 bytes went"), "{output:?}");
}
