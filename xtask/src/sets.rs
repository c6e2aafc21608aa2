//! Sets of tests (`cargo xtask test SET`), and the machines on which `--long` runs tests again.
//!
//! A test belongs to a set by its crate, by its file among the end-to-end tests, by a word in its module path or name,
//! or by its name: a new `mod rcache` or `fn dmabuf_…` needs no change here. A new set is a new row of [`SETS`].

use std::collections::BTreeMap;

/// A group of tests that can be run by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Set {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// What its tests show.
    pub(crate) about: &'static str,
    /// All tests of these crates.
    packages: &'static [&'static str],
    /// All tests of these files in `tests/e2e/tests`; `gaudi::guest` is `plugin/gaudi/tests/guest.rs`.
    end_to_end: &'static [&'static str],
    /// All tests with one of these words in `module::name`.
    words: &'static [&'static str],
    /// Single tests: the file, as above, and the full name.
    tests: &'static [(&'static str, &'static str)],
}

/// An empty set, as a base for others.
const EMPTY: Set =
    Set { name: "", about: "", packages: &[], end_to_end: &[], words: &[], tests: &[] };

/// Every set, in the order in which `--list` shows them.
pub(crate) const SETS: &[Set] = &[
    Set {
        name: "critical",
        about: "what must pass before anything else is worth a look; takes about two minutes",
        tests: &[
            // Load and list.
            ("abi", "the_probe_agrees_with_all_stock_libraries"),
            ("loading", "some_libraries_of_ucx_in_the_global_scope"),
            ("listing", "every_component_is_listed_once_with_its_documented_names"),
            ("absent", "without_gaudi_ucx_is_as_if_we_were_not_there"),
            // Allocate.
            ("listing", "allocation_goes_through_our_domain"),
            ("registration", "attributes_of_the_memory_domains"),
            ("registration", "allocations_are_disjoint_and_freed_in_any_order"),
            // Copy, every byte compared.
            ("verify", "hints_of_memory_types_change_nothing"),
            ("verify", "detection_of_memory_types_without_hints_in_loopback"),
            ("verify", "host_only_program_with_the_plugin_loaded"),
            // Detect.
            ("detection", "ranges_to_the_byte_and_no_host_memory"),
            ("detection", "without_a_plugin_the_check_fails"),
            // dma-buf.
            ("dmabuf", "descriptor_offset_and_content_of_any_range"),
            ("dmabuf", "both_driver_calls_give_the_right_bytes"),
            // Between processes.
            ("ipc", "ipc_is_chosen_for_every_message_it_can_carry"),
            ("ipc", "without_import_in_the_driver_ipc_relays"),
            ("ipc", "killed_peer_is_an_error_and_its_card_is_free_again"),
            // Errors.
            ("absent", "gaudi_memory_without_gaudi_is_refused_by_ucx_in_words"),
            ("guest", "second_process_on_the_only_card_is_refused_in_words"),
            ("faults", "memory_that_runs_out_is_reported_and_nothing_else_suffers"),
            ("faults", "copy_that_fails_for_good_ends_the_process_with_the_reason"),
            ("public_api", "every_code_has_a_text_and_the_reason_a_lifetime"),
        ],
        ..EMPTY
    },
    Set {
        name: "verification",
        about: "every test that compares bytes that went through stock UCX",
        end_to_end: &[
            "verify",
            "soak",
            "asynchronous",
            "one_sided",
            "staging",
            "rcache",
            "faults",
            "fault_matrix",
            "selection",
            "dmabuf",
            "import",
            "ends",
            "exit",
            "ipc",
            "ib",
            "ib_failures",
            "nixl",
            "cuda",
            "fork",
            "hooks",
            "frameworks",
            "recipes",
        ],
        tests: &[
            ("config", "values_that_are_not_understood_are_warned_of_once_and_the_default_is_used"),
            ("estimates", "ucp_chooses_by_them"),
            ("guest", "every_put_and_get_is_logged_at_level_data_and_no_other"),
            ("guest", "host_only_program_survives_the_device_taken_away"),
            ("guest", "old_protocols_send_host_memory_to_themselves_byte_by_byte_and_open_no_card"),
            ("tool", "bench_measures_with_verified_bytes_and_its_files_compare"),
        ],
        ..EMPTY
    },
    Set {
        name: "gaudi",
        about: "devices, memory, copies; UCX's own tools on them",
        packages: &["gaudi", "hl-thunk", "soft-gaudi", "uct", "uct-gaudi"],
        end_to_end: &[
            "listing",
            "perftest",
            "verify",
            "soak",
            "ends",
            "exit",
            "loading",
            "preload",
            "names",
            "mission",
            "guest",
            "generations",
            "abi",
            "asynchronous",
            "registration",
            "staging",
            "one_sided",
            "fork",
            "cpu_access",
            "public_api",
            "open_mpi",
            "cuda",
        ],
        ..EMPTY
    },
    Set {
        name: "dmabuf",
        about: "export and import of dma-bufs",
        end_to_end: &["dmabuf", "import"],
        words: &["dmabuf", "dma_buf"],
        ..EMPTY
    },
    Set {
        name: "detection",
        about: "which pointer is Gaudi memory, by address and length",
        end_to_end: &["detection"],
        words: &["detect", "memtype", "mem_query"],
        ..EMPTY
    },
    Set {
        name: "valgrind",
        about: "the plugin in stock UCX under memcheck: invalid accesses, undefined memory, leaks",
        end_to_end: &["valgrind"],
        ..EMPTY
    },
    Set {
        name: "ucm",
        about: "memory hooks",
        end_to_end: &["ucm", "hooks"],
        words: &["hooks"],
        ..EMPTY
    },
    Set {
        name: "ipc",
        about: "device memory between processes",
        end_to_end: &["ipc", "staging"],
        words: &["ipc", "share::"],
        ..EMPTY
    },
    Set {
        name: "rcache",
        about: "the registration cache",
        end_to_end: &["rcache"],
        words: &["rcache", "registration_cache"],
        ..EMPTY
    },
    Set {
        name: "errors",
        about: "refusals, failures, their texts and codes",
        end_to_end: &["absent", "foreign", "faults", "fault_matrix", "atomics"],
        words: &["error", "errno", "refus"],
        ..EMPTY
    },
    Set {
        name: "config",
        about: "variables, transport selection",
        end_to_end: &["selection", "config", "estimates", "requested"],
        words: &["config"],
        ..EMPTY
    },
    Set {
        name: "ib",
        about: "RDMA on Gaudi memory: InfiniBand, NIXL",
        packages: &["soft-rdma"],
        end_to_end: &["ib", "ib_failures", "nixl"],
        words: &["ib::", "verbs", "rdma"],
        ..EMPTY
    },
    Set {
        name: "frameworks",
        about: "guest on the card of a framework: Synapse in software, UCX and NIXL on its memory",
        packages: &["synapse", "soft-synapse"],
        end_to_end: &["frameworks", "gaudi::guest"],
        words: &["framework", "guest::"],
        ..EMPTY
    },
    Set {
        name: "tool",
        about: "the program ucx-gaudi, the verifier ucp-check, counters",
        packages: &["cli", "ucp-check"],
        end_to_end: &["tool", "explain", "statistics", "probes", "recipes"],
        ..EMPTY
    },
    Set {
        name: "performance-smoke",
        about: "benches run briefly, to see that they run",
        end_to_end: &["performance_smoke"],
        ..EMPTY
    },
];

/// The tests that `cargo test` runs: `--all-targets` would also run benches.
const TARGETS: [&str; 3] = ["--lib", "--bins", "--tests"];

/// The crate and the name of a file of tests.
fn file(name: &'static str) -> (&'static str, &'static str) {
    name.split_once("::").unwrap_or(("e2e", name))
}

impl Set {
    /// As a filter of cargo-nextest.
    pub(crate) fn nextest_filter(&self) -> String {
        let packages = self.packages.iter().map(|name| format!("package(={name})"));
        let files = self.end_to_end.iter().map(|name| file(name));
        let files = files.map(|(package, name)| format!("binary_id(={package}::{name})"));
        let words = self.words.iter().map(|word| format!("test({word})"));
        let tests = self.tests.iter().map(|&(name, test)| (file(name), test));
        let tests = tests.map(|((package, name), test)| {
            format!("(binary_id(={package}::{name}) & test(={test}))")
        });
        packages.chain(files).chain(words).chain(tests).collect::<Vec<_>>().join(" | ")
    }

    /// As the arguments of one or more calls of `cargo test`.
    pub(crate) fn cargo_test_calls(&self) -> Vec<Vec<String>> {
        let mut calls = Vec::new();
        if !self.packages.is_empty() {
            let packages = self.packages.iter().map(|name| format!("--package={name}"));
            calls.push(packages.chain(TARGETS.map(str::to_owned)).collect());
        }
        let mut files = BTreeMap::<_, Vec<_>>::new();
        for (package, name) in self.end_to_end.iter().map(|name| file(name)) {
            files.entry(package).or_default().push(format!("--test={name}"));
        }
        for (package, names) in files {
            calls.push([vec![format!("--package={package}")], names].concat());
        }
        if !self.words.is_empty() {
            let words = self.words.iter().map(|&word| word.to_owned());
            let all = ["--workspace"].into_iter().chain(TARGETS).chain(["--"]).map(str::to_owned);
            calls.push(all.chain(words).collect());
        }
        let mut tests = BTreeMap::<_, Vec<_>>::new();
        for &(name, test) in self.tests {
            tests.entry(file(name)).or_default().push(test.to_owned());
        }
        for ((package, name), names) in tests {
            let binary = [format!("--package={package}"), format!("--test={name}")];
            let exactly = ["--", "--exact"].map(str::to_owned);
            calls.push([&binary[..], &exactly, &names].concat());
        }
        calls
    }
}

/// A software machine other than the default one. `--long` runs those tests on it that do not choose a machine
/// themselves.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Machine {
    pub(crate) about: &'static str,
    /// Variables of `docs/software-gaudi.md`.
    pub(crate) variables: &'static [(&'static str, &'static str)],
    /// A filter of cargo-nextest.
    pub(crate) tests: &'static str,
}

/// Every machine of `--long`.
pub(crate) const MACHINES: &[Machine] = &[
    Machine {
        about: "five stacks of HBM (pages of 640 MiB, seven EDMA engines)",
        variables: &[("SOFT_GAUDI_HBM_STACKS", "5")],
        tests: "package(=gaudi) | package(=uct-gaudi) | package(=e2e)",
    },
    Machine {
        about: "queues that begin 50 µs after the submission has returned, also with small copies",
        variables: &[("SOFT_GAUDI_LATENCY", "50")],
        tests: "package(=gaudi) | package(=uct-gaudi)",
    },
    Machine {
        about: "dma-buf import, as with Habana's own driver",
        variables: &[("SOFT_GAUDI_LENIENT", "import")],
        tests: "package(=e2e) & not (binary_id(=e2e::ipc) | binary_id(=e2e::one_sided))",
    },
];

/// What `--list` prints.
pub(crate) fn list() -> String {
    let mut lines = vec!["sets of tests:".to_owned()];
    lines.extend(SETS.iter().map(|set| {
        format!("  {:<18} {}\n  {:18} {}", set.name, set.about, "", set.nextest_filter())
    }));
    lines.push("machines on which --long runs them again:".to_owned());
    lines.extend(MACHINES.iter().map(|machine| {
        let variables: Vec<_> = machine.variables.iter().map(|(n, v)| format!("{n}={v}")).collect();
        format!("  {}: {}\n      {}", variables.join(" "), machine.about, machine.tests)
    }));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    #[test]
    fn sets_of_the_mission_are_there() {
        let mission = "gaudi dmabuf detection ucm ipc rcache errors config ib performance-smoke \
                       critical verification";
        for name in mission.split(' ') {
            assert_eq!(SETS.iter().filter(|set| set.name == name).count(), 1, "{name}");
        }
    }

    fn package_folder(package: &str) -> PathBuf {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let parts = ["plugin", "tools", "soft", "tests"].map(|part| root.join(part).join(package));
        parts
            .into_iter()
            .find(|folder| folder.exists())
            .unwrap_or_else(|| panic!("no crate {package}"))
    }

    #[test]
    fn files_tests_and_crates_named_here_exist() {
        for set in SETS {
            for (package, name) in set.end_to_end.iter().map(|name| file(name)) {
                let path = package_folder(package).join(format!("tests/{name}.rs"));
                assert!(path.exists(), "{} names {}", set.name, path.display());
            }
            // A macro makes some tests: then the name is in the file, but not after `fn`.
            for &(name, test) in set.tests {
                let (package, name) = file(name);
                let path = package_folder(package).join(format!("tests/{name}.rs"));
                let text = std::fs::read_to_string(&path).expect("a file of tests");
                let mut words = text.split(|c: char| !c.is_alphanumeric() && c != '_');
                assert!(words.any(|word| word == test), "{}: no {test} in {name}", set.name);
            }
            for package in set.packages {
                assert!(package_folder(package).exists(), "{package}");
            }
        }
    }

    #[test]
    fn every_end_to_end_file_is_in_a_set() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/e2e/tests");
        for entry in std::fs::read_dir(tests).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let file = path.file_stem().unwrap().to_str().unwrap();
                assert!(SETS.iter().any(|set| set.end_to_end.contains(&file)), "{file}");
            }
        }
    }

    /// A file that runs a verifying client is listed in the set, except if its processes are to die, or if it has no
    /// client that compares bytes.
    #[test]
    fn every_file_with_verified_bytes_is_in_verification() {
        let set = SETS.iter().find(|set| set.name == "verification").expect("a set");
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/e2e/tests");
        for entry in std::fs::read_dir(tests).unwrap() {
            let path = entry.unwrap().path();
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            let name = path.file_stem().unwrap().to_str().unwrap();
            let named = set.end_to_end.contains(&name) || set.tests.iter().any(|it| it.0 == name);
            let verifies = ["client(", "verified("].iter().any(|call| text.contains(call));
            let exempt = ["atomics", "cpu_access", "explain", "preload", "probes"].contains(&name);
            assert!(named || exempt || !verifies, "{name} compares bytes");
        }
    }

    #[test]
    fn both_runners_get_the_same_selection() {
        let set = Set {
            name: "x",
            about: "",
            packages: &["a"],
            end_to_end: &["b", "f::g"],
            words: &["c", "d"],
            tests: &[("h", "i"), ("f::j", "k"), ("h", "l")],
        };
        let filter = set.nextest_filter();
        assert_eq!(
            filter,
            "package(=a) | binary_id(=e2e::b) | binary_id(=f::g) | test(c) | test(d) \
             | (binary_id(=e2e::h) & test(=i)) | (binary_id(=f::j) & test(=k)) \
             | (binary_id(=e2e::h) & test(=l))"
        );
        assert_eq!(
            set.cargo_test_calls(),
            [
                vec!["--package=a", "--lib", "--bins", "--tests"],
                vec!["--package=e2e", "--test=b"],
                vec!["--package=f", "--test=g"],
                vec!["--workspace", "--lib", "--bins", "--tests", "--", "c", "d"],
                vec!["--package=e2e", "--test=h", "--", "--exact", "i", "l"],
                vec!["--package=f", "--test=j", "--", "--exact", "k"],
            ]
        );
    }
}
