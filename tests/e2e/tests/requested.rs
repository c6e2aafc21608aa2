//! Every setting that asks for a Gaudi turns its absence into a warning, and each process logs one summary
//! of what was decided.

mod memory;

use e2e::{Device, Finished, Perftest, Ucx, stock};
use memory::Machine;

/// The lines of ours.
fn ours(end: &Finished) -> Vec<String> {
    let text = end.text();
    text.lines().filter(|line| line.contains("ucx-gaudi")).map(str::to_owned).collect()
}

#[test]
fn every_setting_that_asks_for_a_gaudi_turns_its_absence_into_a_warning_with_the_reason() {
    for (variable, value) in [
        ("UCX_GAUDI_COPY_DEVICE", "0"),
        ("UCT_GAUDI_COPY_KEEP_OPEN", "1s"),
        ("UCX_GAUDI_IPC_BW", "auto"),
        ("UCX_GAUDI_TRACE", "/dev/null"),
        ("HLS_MODULE_ID", "3"),
        ("UCX_TLS", "gaudi,sm"),
        ("UCX_TLS", "gaudi_cpy,self"),
    ] {
        let device = Device::cards(0);
        let end = stock("ucx_info", &device, "-u t -w").env(variable, value).run();
        let setting = format!("{variable}={value}");
        let said = end.says(&["WARN", &setting, "no Gaudi here", "the driver reports no card"]);
        assert!(said, "{}", end.report());
    }
    for (variable, value) in [("UCX_TLS", "all"), ("UCX_TLS", "^gaudi_ipc"), ("UCX_TLS", "sm")] {
        let end = stock("ucx_info", &Device::cards(0), "-u t -w").env(variable, value).run();
        assert!(ours(&end).is_empty(), "{variable}={value} does not ask: {}", end.report());
    }
}

#[test]
fn transports_that_ucx_tls_leaves_out_are_named_when_gaudi_memory_is_wanted() {
    for tls in ["sm", "^gaudi_cpy,gaudi_gdr", "gaudi_ipc,sm"] {
        let test = Perftest::on(&Device::software(), "tag_bw", 65536).words("-m gaudi");
        let pair = test.both(|tool| tool.env("UCX_TLS", tls)).run().expect("it starts");
        let named = pair
            .client
            .says(&["WARN", &format!("UCX_TLS={tls} leaves out gaudi_cpy and gaudi_gdr")]);
        assert!(named, "{}", pair.client.report());
    }
    // Who did not ask for one hears of it at info level only, and who set something of ours does.
    let machine = Machine::one_card();
    let run = |variables: &[(&str, &str)]| {
        stock("ucx_info", &machine.device, "-u t -w")
            .env("UCX_TLS", "sm,self")
            .envs(variables)
            .run()
    };
    let quiet = run(&[]);
    assert!(ours(&quiet).is_empty(), "{}", quiet.report());
    let info = run(&[("UCX_LOG_LEVEL", "info")]);
    assert!(info.says(&["INFO", "UCX_TLS=sm,self leaves out gaudi_cpy"]), "{}", info.report());
    let asked = run(&[("UCX_GAUDI_COPY_DEVICE", "0")]);
    let said = asked.says(&["WARN", "UCX_TLS=sm,self leaves out", "UCX_GAUDI_COPY_DEVICE=0 asks"]);
    assert!(said, "{}", asked.report());
}

#[test]
fn a_summary_at_info_level_says_once_what_was_found_and_decided() {
    for (lenient, ipc) in
        [("import", "gaudi_ipc, one copy"), ("", "gaudi_ipc, relayed through host memory: ")]
    {
        let machine = Machine::with("two cards", "gaudi2", 2, |node| {
            node.with("SOFT_GAUDI_LENIENT", lenient)
        });
        let check = machine.check(Ucx::V1_22, "where").env("UCX_LOG_LEVEL", "info");
        let end = check.env("HLS_MODULE_ID", "0").run().ok();
        let start = format!("ucx-gaudi {} with UCX 1.22.0: 2 cards (", env!("CARGO_PKG_VERSION"));
        let lines: Vec<String> = ours(&end);
        let starts: Vec<&String> = lines.iter().filter(|line| line.contains(&start)).collect();
        let [first] = starts[..] else { panic!("{}", end.report()) };
        for part in ["0000:33:00.0", "0000:4d:00.0", "from HLS_MODULE_ID"] {
            assert!(first.contains(part), "{first}");
        }
        let uses: Vec<&String> =
            lines.iter().filter(|line| line.contains("to other processes: ")).collect();
        let [first_use] = uses[..] else { panic!("{}", end.report()) };
        for part in [ipc, "dma-buf exported when", "nearest NIC: "] {
            assert!(first_use.contains(part), "{first_use}");
        }
    }
}

/// Descriptors that ran out are not a card that is not there.
#[test]
fn control_nodes_that_cannot_be_opened_are_told_apart() {
    for (errno, kind, remedy) in [
        ("EMFILE", "OUT_OF_MEMORY", "ulimit -n"),
        ("EACCES", "PERMISSION_DENIED", "group and mode"),
    ] {
        let rule = format!("hlthunk_open_control fail:{errno} times=0");
        let machine = Machine::with("one card", "gaudi2", 1, |node| node.with_faults(&rule));
        let end = machine.check(Ucx::V1_22, "where").env("UCX_LOG_LEVEL", "info").run().refused();
        assert!(end.says(&["no Gaudi here", kind, remedy]), "{}", end.report());
        assert!(!end.text().contains("SOFT_GAUDI_NODE,"), "{}", end.report());
    }
}

/// The pauses between ten attempts add up to more than the half second after which it is said.
#[test]
fn a_card_that_is_waited_for_has_one_line_at_info_level() {
    for (level, lines) in [("info", 1), ("warn", 0)] {
        let rule = "hlthunk_open fail:EAGAIN times=10";
        let machine = Machine::with("one card", "gaudi2", 1, |node| node.with_faults(rule));
        let end = machine.check(Ucx::V1_22, "where").env("UCX_LOG_LEVEL", level).run().ok();
        let is_said = |line: &&str| line.contains("waiting for up to 30 s");
        let said: Vec<String> = end.text().lines().filter(is_said).map(str::to_owned).collect();
        assert_eq!(said.len(), lines, "{}", end.report());
        assert!(said.iter().all(|line| line.contains("INFO")), "{said:?}");
    }
}

#[test]
fn a_card_that_is_left_out_has_a_line_and_is_named_where_it_is_missed() {
    let rule = "hlthunk_open_control fail:EACCES times=1";
    let run = |variables: &[(&str, &str)]| {
        let machine = Machine::with("two cards", "gaudi2", 2, |node| node.with_faults(rule));
        machine.check(Ucx::V1_22, "where").envs(variables).run()
    };
    let end = run(&[("UCX_LOG_LEVEL", "info")]).ok();
    assert!(end.says(&["INFO", "card 0 is left out", "Permission denied"]), "{}", end.report());
}

/// As with a cgroup's limit of devices: the control node answers, the card itself is forbidden.
#[test]
fn a_card_that_may_not_be_opened_is_passed_over_with_a_line() {
    let rule = "hlthunk_open fail:EPERM times=1";
    let machine = Machine::with("two cards", "gaudi2", 2, |node| node.with_faults(rule));
    let end = machine.check(Ucx::V1_22, "where").env("UCX_LOG_LEVEL", "info").run().ok();
    let line = ["INFO", "Gaudi2 0 ", "Operation not permitted", "the next card is tried"];
    assert!(end.says(&line), "{}", end.report());
}

#[test]
fn hidden_cards_are_mentioned_where_one_is_missed() {
    let machine = Machine::eight_cards();
    let run = |variables: &[(&str, &str)]| {
        let check = machine.check(Ucx::V1_22, "where").env("HABANA_VISIBLE_MODULES", "2,3");
        check.envs(variables).run()
    };
    let hides = "HABANA_VISIBLE_MODULES hides 6 of 8 cards";
    let end = run(&[("UCX_GAUDI_COPY_DEVICE", "module:0")]).refused();
    assert!(end.says(&["WARN", "module:0", hides]), "{}", end.report());
    let end = run(&[("UCX_LOG_LEVEL", "info")]).ok();
    assert!(end.says(&["INFO", hides]), "{}", end.report());
    let hold = |device| {
        let check = machine.check(Ucx::V1_22, "hold").env("UCX_GAUDI_COPY_DEVICE", device);
        check.start()
    };
    let holders = [hold("module:2"), hold("module:3")];
    assert!(holders[0].wait_until(|_| machine.cards_opened() == 2), "both are taken");
    let end = run(&[]).refused();
    assert!(end.says(&["none of 2 cards is free", hides]), "{}", end.report());
}

/// A bandwidth for one direction only: the others keep their defaults.
#[test]
fn a_keyed_variable_needs_no_value_without_a_key() {
    for ucx in Ucx::ALL {
        for value in ["d2h:5GBs", "d2h:5GBs,h2d:4GBs", "auto,d2h:5GBs"] {
            let machine = Machine::one_card();
            let check = machine.check(ucx, "transport").env("UCX_GAUDI_COPY_BW", value);
            let end = check.run().ok();
            let shown = end.stdout.contains("gaudi_cpy get_zcopy host:gaudi at 5.37 GB/s");
            assert!(shown, "{value}: {}", end.report());
        }
    }
}

/// `gaudi_ipc` alone can do nothing.
#[test]
fn no_gaudi_is_listed_where_the_copy_domains_are_refused() {
    for value in ["9", "banana"] {
        let machine = Machine::one_card();
        let tool = stock("ucx_info", &machine.device, "-d");
        let end = tool.env("UCX_GAUDI_COPY_DEVICE", value).run();
        assert!(!end.stdout.contains("Transport: gaudi"), "{}", end.report());
        let listed = stock("ucx_info", &machine.device, "-d").run().ok();
        assert!(listed.stdout.contains("Transport: gaudi_ipc"), "{}", listed.report());
    }
}

#[test]
fn ranks_get_the_card_in_their_place_on_the_host() {
    let run = |variables: &[(&str, &str)]| {
        let machine = Machine::eight_cards();
        let check = machine.check(Ucx::V1_22, "where").env("UCX_GAUDI_COPY_DEVICE", "local-rank");
        check.envs(variables).run()
    };
    let card_1 = "memory lies on card 0000:4d:00.0";
    for variable in ["OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "PMI_LOCAL_RANK"] {
        let end = run(&[(variable, "1")]).ok();
        assert!(end.stdout.contains(card_1), "{variable}: {}", end.report());
    }
    let end = run(&[("SLURM_LOCALID", "8")]).refused();
    assert!(end.says(&["WARN", "no card for local rank 8 (SLURM_LOCALID)"]), "{}", end.report());
}
