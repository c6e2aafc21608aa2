//! Sets of tests (`cargo xtask test SET`), and the machines on which `--long` runs tests again.
//!
//! A test belongs to a set by its crate, by the file of the end-to-end tests it is in, or by a word in
//! its module path or name: a new `mod rcache` or `fn dmabuf_…` needs no change here. A new set is a
//! new row of [`SETS`].

use std::collections::BTreeMap;

/// A group of tests that one may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Set {
    /// What one types.
    pub(crate) name: &'static str,
    /// What its tests show.
    pub(crate) about: &'static str,
    /// All tests of these crates.
    packages: &'static [&'static str],
    /// All tests of these files in `crates/e2e/tests`; `gaudi::guest` is `crates/gaudi/tests/guest.rs`.
    end_to_end: &'static [&'static str],
    /// All tests with one of these words in `module::name`.
    words: &'static [&'static str],
}

/// Every set, in the order in which `--list` shows them.
pub(crate) const SETS: &[Set] = &[
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
            "loading",
            "names",
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
            "cuda",
        ],
        words: &[],
    },
    Set {
        name: "dmabuf",
        about: "export and import of dma-bufs",
        packages: &[],
        end_to_end: &["dmabuf"],
        words: &["dmabuf", "dma_buf"],
    },
    Set {
        name: "detection",
        about: "which pointer is Gaudi memory, by address and length",
        packages: &[],
        end_to_end: &["detection"],
        words: &["detect", "memtype", "mem_query"],
    },
    Set {
        name: "ucm",
        about: "memory hooks",
        packages: &[],
        end_to_end: &["ucm", "hooks"],
        words: &["hooks"],
    },
    Set {
        name: "ipc",
        about: "device memory between processes",
        packages: &[],
        end_to_end: &["ipc", "staging"],
        words: &["ipc", "share::"],
    },
    Set {
        name: "rcache",
        about: "the registration cache",
        packages: &[],
        end_to_end: &["rcache"],
        words: &["rcache", "registration_cache"],
    },
    Set {
        name: "errors",
        about: "refusals, failures, their texts and codes",
        packages: &[],
        end_to_end: &["absent", "foreign", "faults", "atomics"],
        words: &["error", "errno", "refus"],
    },
    Set {
        name: "config",
        about: "variables, transport selection",
        packages: &[],
        end_to_end: &["selection", "config", "estimates", "asked"],
        words: &["config"],
    },
    Set {
        name: "ib",
        about: "RDMA on Gaudi memory: InfiniBand, NIXL",
        packages: &["soft-rdma"],
        end_to_end: &["ib", "ib_failures", "nixl"],
        words: &["ib::", "verbs", "rdma"],
    },
    Set {
        name: "frameworks",
        about: "guest on the card of a framework: Synapse in software, UCX and NIXL on its memory",
        packages: &["synapse", "soft-scal", "soft-synapse"],
        end_to_end: &["frameworks", "gaudi::guest"],
        words: &["framework", "guest::"],
    },
    Set {
        name: "tool",
        about: "the program ucx-gaudi, the verifier ucp-check, counters",
        packages: &["cli", "ucp-check"],
        end_to_end: &["tool", "statistics", "marks", "recipes"],
        words: &[],
    },
    Set {
        name: "performance-smoke",
        about: "benches run briefly, to see that they run",
        packages: &[],
        end_to_end: &["performance_smoke"],
        words: &[],
    },
];

/// What `cargo test` runs: `--all-targets` would run benches as well.
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
        packages.chain(files).chain(words).collect::<Vec<_>>().join(" | ")
    }

    /// As arguments of as many `cargo test` calls as it takes.
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
        calls
    }
}

/// A software machine other than the default one. `--long` runs on it the tests that do not describe
/// the machine themselves.
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
        variables: &[("SOFT_GAUDI_SHAPE", "5")],
        tests: "package(=gaudi) | package(=uct-gaudi) | package(=e2e)",
    },
    Machine {
        about: "queues that begin 50 µs after the submission has returned, also with small copies",
        variables: &[("SOFT_GAUDI_LATENCY", "50")],
        tests: "package(=gaudi) | package(=uct-gaudi)",
    },
    Machine {
        about: "dma-buf import, as with Habana's own driver",
        variables: &[("SOFT_GAUDI_KIND", "import")],
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
    use std::path::Path;

    #[test]
    fn sets_of_the_mission_are_there() {
        let mission = "gaudi dmabuf detection ucm ipc rcache errors config ib performance-smoke";
        for name in mission.split(' ') {
            assert_eq!(SETS.iter().filter(|set| set.name == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn files_and_crates_named_here_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for set in SETS {
            for (package, name) in set.end_to_end.iter().map(|name| file(name)) {
                let path = root.join(format!("crates/{package}/tests/{name}.rs"));
                assert!(path.exists(), "{} names {}", set.name, path.display());
            }
            for package in set.packages {
                assert!(root.join("crates").join(package).exists(), "{package}");
            }
        }
    }

    #[test]
    fn every_end_to_end_file_is_in_a_set() {
        let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/e2e/tests");
        for entry in std::fs::read_dir(tests).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "rs") {
                let file = path.file_stem().unwrap().to_str().unwrap();
                assert!(SETS.iter().any(|set| set.end_to_end.contains(&file)), "{file}");
            }
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
        };
        let filter = set.nextest_filter();
        assert_eq!(
            filter,
            "package(=a) | binary_id(=e2e::b) | binary_id(=f::g) | test(c) | test(d)"
        );
        assert_eq!(
            set.cargo_test_calls(),
            [
                vec!["--package=a", "--lib", "--bins", "--tests"],
                vec!["--package=e2e", "--test=b"],
                vec!["--package=f", "--test=g"],
                vec!["--workspace", "--lib", "--bins", "--tests", "--", "c", "d"],
            ]
        );
    }
}
