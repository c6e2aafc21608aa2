//! The tool's frame, `run`, `info` and `topo`, on the software Gaudi.

mod tool;

use tool::{Installed, Ran, keys};

#[test]
fn run_sets_the_plugin_path_and_says_so() {
    let tool = Installed::new();
    let plugins = tool.prefix().join("lib/ucx-gaudi/plugins");
    let wanted = format!("UCX_PLUGIN_PATH={}", plugins.display());
    let ran = tool.run("run -- env");
    assert_eq!(ran.code, Some(0), "{ran:?}");
    assert!(ran.out.lines().any(|line| line == wanted), "{ran:?}");
    assert!(ran.err.contains(&wanted), "{ran:?}");
    let preload = tool.prefix().join("lib/ucx-gaudi/preload/libucx_gaudi_preload.so");
    let preload = format!("LD_PRELOAD={}", preload.display());
    assert!(ran.out.lines().any(|line| line == preload), "{ran:?}");
    assert!(!ran.out.contains("soft/gaudi") && !ran.out.contains("UCX_SYSV"), "{ran:?}");
    assert_eq!(tool.run("run -q -- env").err, "");
}

#[test]
fn run_keeps_what_the_user_set_and_puts_its_own_first() {
    let tool = Installed::new();
    let mut command = tool.command("run --soft=2,import --tuned env");
    command.env("UCX_PLUGIN_PATH", "/theirs").env("LD_LIBRARY_PATH", "/a::/b");
    command.env("SOFT_GAUDI_LENIENT", "ordered");
    command.env("UCX_POSIX_SEG_SIZE", "9000").env("HL_THUNK_LIBRARY", "/other.so");
    let ran = Ran::of(&command.output().expect("runs"));
    let lib = tool.prefix().join("lib/ucx-gaudi");
    let has = |line: &str| ran.out.lines().any(|out| out == line);
    assert!(has(&format!("UCX_PLUGIN_PATH={}/plugins:/theirs", lib.display())), "{ran:?}");
    assert!(has(&format!("LD_LIBRARY_PATH={}/soft/gaudi:/a:/b", lib.display())), "{ran:?}");
    assert!(has("UCX_POSIX_SEG_SIZE=9000") && has("UCX_SYSV_SEG_SIZE=32832"), "{ran:?}");
    assert!(has("SOFT_GAUDI_LENIENT=ordered,import"), "{ran:?}");
    assert!(has("SOFT_GAUDI_DEVICES=2") && !ran.out.contains("HL_THUNK_LIBRARY"), "{ran:?}");
    assert!(ran.err.contains("HL_THUNK_LIBRARY unset"), "{ran:?}");
}

#[test]
fn run_says_in_json_what_it_set() {
    let ran = Installed::new().run("run --json --soft -- true");
    let said: serde_json::Value = serde_json::from_str(&ran.err).expect("JSON");
    assert_eq!(keys(&said), ["LD_LIBRARY_PATH", "LD_PRELOAD", "UCX_MODULES", "UCX_PLUGIN_PATH"]);
}

#[test]
fn run_ends_as_its_program_does() {
    let tool = Installed::new();
    let mut command = tool.command("run -- sh -c");
    assert_eq!(command.arg("exit 7").status().expect("runs").code(), Some(7));
}

#[test]
fn run_refuses_what_is_no_program() {
    let tool = Installed::new();
    tool.run("run -- no-such-program").fails(127, &["no-such-program", "remedy:", "PATH"]);
    tool.run("run -- ./no-such-program").fails(127, &["No such file"]);
    let script = tool.prefix().join("script");
    std::fs::write(&script, "#!/no/such/shell\n").expect("a file");
    tool.run(&format!("run -- {}", script.display())).fails(126, &["remedy:", "chmod +x"]);
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(&script, mode).expect("a program");
    tool.run(&format!("run -- {}", script.display())).fails(126, &["interpreter"]);
    tool.run("run").fails(2, &["<CMD>"]);
}

#[test]
fn a_tool_away_from_its_files_says_what_is_missing() {
    let tool = Installed::new();
    std::fs::remove_dir_all(tool.prefix().join("lib")).expect("removed");
    tool.run("run -- true").fails(3, &["libuct_gaudi.so.0 is not there", "PREFIX/bin/ucx-gaudi"]);
    tool.run("info --soft").fails(3, &["libhl-thunk.so is not there"]);
}

#[test]
fn info_lists_the_cards() {
    let tool = Installed::new();
    let ran = tool.run("info --soft=2 --json");
    let report = ran.json();
    assert_eq!(keys(&report), ["cards", "library", "library_version", "notes"]);
    let cards = report["cards"].as_array().expect("a list");
    assert_eq!(cards.len(), 2);
    let expected = [
        "bus_id",
        "copies",
        "firmware",
        "generation",
        "held_by",
        "holders_complete",
        "index",
        "link",
        "memory_bytes",
        "memory_page_bytes",
        "module_id",
        "name",
        "node",
        "numa_node",
        "ports",
        "ports_external",
        "register_blocks",
        "software",
        "stepping",
    ];
    assert_eq!(keys(&cards[0]), expected);
    assert_eq!(cards[0]["memory_bytes"], 3_u64 << 30);
    let ran = tool.run("info --soft=2");
    assert!(ran.out.contains("software Gaudi2") && ran.out.contains("3 GiB"), "{ran:?}");
    // Also before the first process has opened one.
    assert!(ran.out.lines().nth(2).is_some_and(|line| line.ends_with("no process")), "{ran:?}");
}

#[test]
fn info_shows_one_card_and_refuses_others() {
    let tool = Installed::new();
    let report = tool.run("info --soft=4 --card module:0 --json").json();
    assert_eq!(report["cards"].as_array().expect("a list").len(), 1);
    assert_eq!(report["cards"][0]["index"], 1);
    tool.run("info --soft=4 --card first").fails(2, &["\"first\"", "module:2"]);
    tool.run("info --soft=4 --card 17").fails(3, &["no card is \"17\"", "choose one"]);
    tool.run("info --soft=many").fails(2, &["1 to 256"]);
    tool.run("info --words 3").fails(2, &["--blocks"]);
}

#[test]
fn info_maps_register_blocks() {
    let tool = Installed::new();
    let report = tool.run("info --soft=1 --blocks --words 2 --json").json();
    let blocks = report["blocks"].as_array().expect("a list");
    assert_eq!(blocks.len(), 3);
    for block in blocks {
        assert_eq!(keys(block), ["address", "bytes", "error", "name", "words"]);
        assert_eq!((&block["bytes"], block["error"].is_null()), (&4096.into(), true), "{block}");
        // "soft" and "ware", which the software card has there.
        assert_eq!(block["words"], serde_json::json!(["0x74666f73", "0x65726177"]));
    }
    let mut command = tool.command("info --soft=1 --blocks");
    command.env("SOFT_GAUDI_GENERATION", "gaudi1").env_remove("SOFT_GAUDI_HBM");
    Ran::of(&command.output().expect("runs")).fails(3, &["no register blocks", "maps none"]);
}

#[test]
fn no_driver_library_is_told_with_a_remedy() {
    let tool = Installed::new();
    let mut command = tool.command("info --json");
    command.env("HL_THUNK_LIBRARY", "/no/such/library.so");
    let ran = Ran::of(&command.output().expect("runs"));
    ran.fails(3, &["/no/such/library.so", "remedy: correct or unset HL_THUNK_LIBRARY"]);
    assert_eq!(keys(&ran.json()["error"]), ["exit", "remedy", "what"]);
}

#[test]
fn topo_is_a_matrix_of_all_devices() {
    let tool = Installed::new();
    let report = tool.run("topo --soft=3 --json").json();
    assert_eq!(keys(&report), ["devices", "matrix", "nearest", "nics"]);
    let count = report["devices"].as_array().expect("a list").len();
    assert!(count >= 3);
    let matrix = report["matrix"].as_array().expect("rows");
    assert_eq!(matrix.len(), count);
    for (at, row) in matrix.iter().enumerate() {
        let row = row.as_array().expect("cells");
        assert_eq!((row.len(), &row[at]), (count, &"X".into()));
    }
    assert!(tool.run("topo --soft=3").out.contains("Gaudi2"));
    let picture = tool.run("topo --soft=3 --mermaid").out;
    assert!(picture.starts_with("flowchart") && picture.contains("[\"Gaudi2\"]"), "{picture}");
}

#[test]
fn colours_are_left_out_where_nobody_sees_them() {
    let tool = Installed::new();
    assert!(!tool.run("run -- no-such-program").err.contains('\x1b'));
    let forced = |no_color: bool| {
        let mut command = tool.command("run -- no-such-program");
        command.env("CLICOLOR_FORCE", "1");
        if no_color {
            command.env("NO_COLOR", "1").env_remove("CLICOLOR_FORCE");
        }
        Ran::of(&command.output().expect("runs")).err
    };
    assert!(forced(false).contains('\x1b'));
    assert!(!forced(true).contains('\x1b'));
}

#[test]
fn completions_and_manual_pages_name_every_command() {
    let tool = Installed::new();
    for shell in ["bash", "zsh", "fish"] {
        let ran = tool.run(&format!("completions {shell}"));
        assert!(ran.out.contains("topo") && ran.out.contains("run"), "{shell}");
    }
    tool.run("completions tcsh").fails(2, &["possible values"]);
    let folder = tool.prefix().join("man");
    assert_eq!(tool.run(&format!("man {}", folder.display())).code, Some(0));
    for page in ["ucx-gaudi.1", "ucx-gaudi-run.1", "ucx-gaudi-topo.1"] {
        assert!(folder.join(page).exists(), "{page}");
    }
}

#[test]
fn explain_refuses_what_it_cannot_ask() {
    let tool = Installed::new();
    tool.run("explain tag gaudi cuda 8").fails(2, &["host, gaudi"]);
    tool.run("explain tag gaudi host 8X").fails(2, &["64K"]);
    tool.run("explain swap gaudi host 8").fails(2, &["tag, am, stream, put, get"]);
    tool.run("explain tag gaudi host 8").fails(3, &["ucp-check is not there", "one prefix"]);
}

#[test]
fn bench_that_fails_keeps_the_files_of_an_earlier_run() {
    let tool = Installed::new();
    let file = tool.prefix().join("results");
    std::fs::write(&file, "earlier").expect("a file");
    let options = ["save", "csv"].map(|name| format!("--{name} {}", file.display()));
    tool.run(&format!("bench {}", options.join(" "))).fails(3, &["ucp-check is not there"]);
    assert_eq!(std::fs::read_to_string(&file).expect("a file"), "earlier");
    tool.run("bench --save /no/such/folder/results")
        .fails(3, &["/no/such/folder", "no such folder"]);
}

#[test]
fn a_wrong_command_line_is_an_error_in_json_too() {
    let tool = Installed::new();
    for (words, what) in [
        ("frobnicate --json", "frobnicate"),
        ("bench compare --json", "<BEFORE>"),
        ("--json info --card", "--card"),
    ] {
        let ran = tool.run(words);
        ran.fails(2, &[what]);
        let error = &ran.json()["error"];
        assert_eq!((keys(error), &error["exit"]), (vec!["exit", "remedy", "what"], &2.into()));
        assert!(error["what"].as_str().is_some_and(|it| it.contains(what)), "{error}");
    }
    assert_eq!(tool.run("run --json -- true").code, Some(0));
    assert!(!tool.run("frobnicate").out.contains('{'));
}

#[test]
fn bash_completes_options_of_commands_and_lists_no_hidden_ones() {
    let tool = Installed::new();
    let script = tool.run("completions bash").out;
    for (words, expected, never) in [
        ("ucx-gaudi|", "check-card", "probe"),
        ("ucx-gaudi bench|--it", "--iterations", "--card"),
        ("ucx-gaudi bench compare|--t", "--tolerance", "--iterations"),
        ("ucx-gaudi check-card|--may", "--may-reset", "--tuned"),
    ] {
        let (before, last) = words.split_once('|').expect("a cursor");
        let count = before.split(' ').count();
        let asked = format!(
            "{script}\nCOMP_WORDS=({before} '{last}'); COMP_CWORD={count}\n\
             _ucx__gaudi ucx-gaudi '{last}' {}; echo ${{COMPREPLY[@]}}",
            before.rsplit(' ').next().expect("a word")
        );
        let bash = std::process::Command::new("bash").args(["--norc", "-c", &asked]).output();
        let Ok(output) = bash else {
            println!("skipped: there is no bash here");
            return;
        };
        let ran = Ran::of(&output);
        let offered: Vec<&str> = ran.out.split_whitespace().collect();
        assert!(offered.contains(&expected) && !offered.contains(&never), "{words}: {ran:?}");
    }
}
