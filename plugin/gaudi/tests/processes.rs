//! Several processes and several ways to choose a card, each in a process of its own.

mod machine;

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use gaudi::{DeviceChoice, ErrorKind, HostRegion, runtime};
use machine::alone;
use soft_gaudi::testing::Machine;

const CHOICE: &str = "GAUDI_TEST_CHOICE";

/// Not a test of its own: opens a card as `GAUDI_TEST_CHOICE` says, prints what came of it and holds
/// on to it until standard input ends.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn open_and_hold() {
    let choice = std::env::var(CHOICE).unwrap_or_default();
    match choice.parse().and_then(|choice: DeviceChoice| runtime().open(&choice)) {
        Ok(device) => {
            let _allocation = device.alloc(4096, 1).unwrap();
            let info = device.info();
            let notes: Vec<_> = runtime().take_notes().into_iter().map(|it| it.text).collect();
            let notes = notes.join("; ");
            println!(
                "\nOPENED {} node {} module {} {notes}",
                info.index, info.node, info.module_id
            );
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        Err(error) => println!("\nFAILED {} {error}", error.kind().name()),
    }
}

fn holder(choice: &str) -> Command {
    machine::set_up("gaudi2");
    let mut command = machine::child("open_and_hold");
    command.env(CHOICE, choice).env("SOFT_GAUDI_DEVICES", "3");
    for variable in ["HLS_MODULE_ID", "HABANA_VISIBLE_MODULES", "GAUDI_MAPPING_TABLE"] {
        command.env_remove(variable);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    command
}

/// A process on a machine that tests do not share.
fn on(machine: &Machine, mut command: Command) -> Command {
    command.env("SOFT_GAUDI_NODE", machine.name());
    command
}

/// What it says, and the process, which goes on until it is dropped.
fn start(mut command: Command) -> (String, Holder) {
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let said = lines
        .by_ref()
        .map_while(Result::ok)
        .find(|line| line.starts_with("OPENED") || line.starts_with("FAILED"))
        .expect("the process says something");
    // It must be able to finish writing.
    std::thread::spawn(move || lines.for_each(drop));
    (said, Holder(child))
}

struct Holder(Child);

impl Drop for Holder {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

#[test]
fn each_process_gets_the_next_card_until_all_are_taken() {
    let machine = Machine::temporary("next");
    let open = || start(on(&machine, holder("")));
    let (first, one) = open();
    let (second, two) = open();
    let (third, three) = open();
    assert!(first.starts_with("OPENED 0"), "{first}");
    assert!(second.starts_with("OPENED 1"), "{second}");
    assert!(third.starts_with("OPENED 2"), "{third}");
    let (refused, _) = open();
    assert!(refused.starts_with("FAILED DEVICE_BUSY"), "{refused}");
    assert!(refused.contains("none of 3 cards is free"), "{refused}");
    for owner in [&one, &two, &three] {
        assert!(refused.contains(&format!("(pid {})", owner.0.id())), "{refused}");
    }
    let (by_choice, _) = start(on(&machine, holder("1")));
    assert!(by_choice.starts_with("FAILED DEVICE_BUSY"), "{by_choice}");
    assert!(by_choice.contains("it is held by "), "{by_choice}");
    assert!(by_choice.contains(&format!("(pid {})", two.0.id())), "{by_choice}");
    assert!(!by_choice.contains(&format!("(pid {})", three.0.id())), "{by_choice}");
    assert!(by_choice.contains("choose another card"), "{by_choice}");
    drop(one);
    let (again, _holder) = open();
    assert!(again.starts_with("OPENED 0"), "the card of a process that ended is free: {again}");
}

#[test]
fn a_card_is_free_at_once_when_its_owner_is_killed() {
    let machine = Machine::temporary("killed");
    let (first, mut one) = start(on(&machine, holder("2")));
    assert!(first.starts_with("OPENED 2"), "{first}");
    one.0.kill().unwrap();
    one.0.wait().unwrap();
    let (second, _two) = start(on(&machine, holder("2")));
    assert!(second.starts_with("OPENED 2"), "{second}");
}

#[test]
fn cards_are_chosen_by_index_module_and_bus_id() {
    let machine = Machine::temporary("chosen");
    let run = |choice: &str, variables: &[(&str, &str)]| {
        let mut command = on(&machine, holder(choice));
        // Eight cards have the module ids 0 to 7, in another order than their indices.
        command.env("SOFT_GAUDI_DEVICES", "8").envs(variables.iter().copied());
        start(command).0
    };
    assert!(run("2", &[]).starts_with("OPENED 2 "));
    for (choice, variables, said) in [
        ("module:1", &[][..], "module 1 "),
        ("", &[("HLS_MODULE_ID", "2")], "module 2 "),
        ("module:0", &[("HLS_MODULE_ID", "2")], "module 0 "),
        ("", &[("HABANA_VISIBLE_MODULES", "5")], "module 5 "),
        (
            "",
            &[("HABANA_VISIBLE_MODULES", "5,6"), ("HLS_MODULE_ID", "2")],
            "\"module:2\" (from HLS_MODULE_ID)",
        ),
        ("", &[("HABANA_VISIBLE_MODULES", "0;1")], "FAILED INVALID_PARAMS"),
        ("", &[("HLS_MODULE_ID", "first")], "FAILED INVALID_PARAMS"),
        ("8", &[], "FAILED DEVICE_NOT_FOUND"),
        ("module:0", &[("HABANA_VISIBLE_MODULES", "1,2")], "FAILED DEVICE_NOT_FOUND"),
        ("", &[("HABANA_VISIBLE_MODULES", "77")], "HABANA_VISIBLE_MODULES hides all 8 cards"),
        ("", &[("SOFT_GAUDI_DEVICES", "0")], "no card"),
    ] {
        let found = run(choice, variables);
        assert!(found.contains(said), "{choice} {variables:?}: {found}");
    }
}

#[test]
fn a_mapping_table_names_the_cards_and_nothing_stands_in_for_it() {
    machine::set_up("gaudi2");
    let machine = Machine::temporary("table");
    let run = |choice: &str, table: &str, visible: &str| {
        let mut command = on(&machine, holder(choice));
        command.env("SOFT_GAUDI_DEVICES", "8").env("GAUDI_MAPPING_TABLE", table);
        command.env("HABANA_VISIBLE_MODULES", visible);
        start(command).0
    };
    let cards = runtime().discover().unwrap();
    let row = |index: u32, node: usize| {
        let card = &cards[node];
        format!(
            r#"{{"index":{index},"module_id":{},"bus_id":"{}","model":"HL225"}}"#,
            card.module_id, card.bus_id
        )
    };
    let table = format!("[{},{},{}]", row(9, 0), row(4, 5), row(0, 2));

    let by_module = format!("module:{}", cards[0].module_id);
    let visible = cards[5].module_id.to_string();
    let unknown = r#"key "model" is unknown and ignored (in 3 entries)"#;
    for (choice, visible, said) in [
        ("", "", "OPENED 0 node 2 "),
        ("", "", unknown),
        ("4", "", "OPENED 4 node 5 "),
        (&by_module, "", "OPENED 9 node 0 "),
        (cards[5].bus_id.as_str(), "", "OPENED 4 node 5 "),
        ("", &visible, "OPENED 4 node 5 "),
        ("2", "", "FAILED DEVICE_NOT_FOUND"),
    ] {
        let found = run(choice, &table, visible);
        assert!(found.contains(said), "{choice} {visible}: {found}");
    }
    let absent = run("", &format!("[{},{}]", row(0, 0), row(1, 8)), "");
    assert!(absent.contains(&format!("no card at {}", cards[8].bus_id)), "{absent}");
    let refused = run("", "0=0000:33:00.0", "");
    assert!(refused.starts_with("FAILED INVALID_PARAMS"), "{refused}");
    assert!(refused.contains("GAUDI_MAPPING_TABLE"), "{refused}");
    assert!(run("", "  ", "").starts_with("OPENED 0 node 0 "), "empty is unset");
}

#[test]
fn a_missing_library_is_named_once_and_for_all() {
    alone!(1, ("HL_THUNK_LIBRARY", "libno-such-thunk.so"));
    let first = runtime().discover().unwrap_err();
    assert_eq!(first.kind(), ErrorKind::DeviceNotFound);
    let text = first.to_string();
    assert!(text.contains("libno-such-thunk.so") && !text.contains('\n'), "{text}");
    // SAFETY: this process has no other thread that reads the environment.
    unsafe { std::env::set_var("HL_THUNK_LIBRARY", machine::library()) };
    assert_eq!(runtime().discover().unwrap_err(), first, "not tried again");
    assert_eq!(runtime().open(&DeviceChoice::Any).unwrap_err(), first);
}

#[test]
fn nothing_is_loaded_until_a_device_is_asked_for() {
    alone!(1);
    let loaded = || std::fs::read_to_string("/proc/self/maps").unwrap().contains("soft_gaudi");
    let mut host = vec![0_u8; 1 << 20];
    runtime().subscribe(Box::new(|_| {}));
    assert!(runtime().locate(host.as_ptr() as u64, host.len()).is_none());
    drop(HostRegion::record(host.as_mut_ptr(), host.len()));
    assert!(runtime().devices().is_empty());
    assert!(!loaded());
    runtime().discover().unwrap();
    assert!(loaded());
}

#[test]
fn discovery_opens_no_card_and_sees_the_software() {
    machine::set_up("gaudi2");
    let cards = runtime().discover().unwrap();
    assert_eq!(cards.len(), 64);
    for (at, card) in cards.iter().enumerate() {
        assert_eq!(card.index as usize, at);
        assert!(card.is_software, "{card:?}");
        assert!(card.to_string().starts_with("software Gaudi2 "), "{card}");
        assert!(!card.card_name.is_empty());
    }
    assert!(runtime().devices().is_empty());
}
