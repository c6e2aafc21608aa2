//! Categories of tests (`cargo xtask test CATEGORY`) and which tests belong to each.
//!
//! A test belongs to a category by its crate, by the file of the end-to-end tests it is in, or by a
//! word in its module path or name: a new `mod rcache` or `fn dmabuf_…` needs no change here.

use clap::ValueEnum;

/// What one may ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Category {
    /// Devices, memory, copies; UCX's own tools on them
    Gaudi,
    /// Export and import of dma-bufs
    Dmabuf,
    /// Which pointer is Gaudi memory, by address and length
    Detection,
    /// Memory hooks
    Ucm,
    /// Device memory between processes
    Ipc,
    /// The registration cache
    Rcache,
    /// Refusals, failures, their texts and codes
    Errors,
    /// Variables, transport selection
    Config,
    /// InfiniBand
    Ib,
    /// Benches run briefly, to see that they run
    PerformanceSmoke,
}

/// The tests of a category.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Selection {
    /// All tests of these crates.
    pub(crate) packages: &'static [&'static str],
    /// All tests of these files in `crates/e2e/tests`.
    pub(crate) end_to_end: &'static [&'static str],
    /// All tests with one of these words in `module::name`.
    pub(crate) words: &'static [&'static str],
}

impl Category {
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    pub(crate) fn selection(self) -> Selection {
        match self {
            Category::Gaudi => Selection {
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
                ],
                words: &[],
            },
            Category::Dmabuf => {
                Selection { packages: &[], end_to_end: &["dmabuf"], words: &["dmabuf", "dma_buf"] }
            }
            Category::Detection => Selection {
                packages: &[],
                end_to_end: &["detection"],
                words: &["detect", "memtype", "mem_query"],
            },
            Category::Ucm => {
                Selection { packages: &[], end_to_end: &["ucm", "hooks"], words: &["hooks"] }
            }
            Category::Ipc => Selection {
                packages: &[],
                end_to_end: &["ipc", "staging"],
                words: &["ipc", "share::"],
            },
            Category::Rcache => Selection {
                packages: &[],
                end_to_end: &["rcache"],
                words: &["rcache", "registration_cache"],
            },
            Category::Errors => Selection {
                packages: &[],
                end_to_end: &["absent", "foreign", "faults", "atomics"],
                words: &["error", "errno", "refus"],
            },
            Category::Config => Selection {
                packages: &[],
                end_to_end: &["selection", "config", "estimates"],
                words: &["config"],
            },
            Category::Ib => Selection {
                packages: &["soft-rdma"],
                end_to_end: &[],
                words: &["ib::", "verbs", "rdma"],
            },
            Category::PerformanceSmoke => {
                Selection { packages: &[], end_to_end: &[], words: &["performance_smoke"] }
            }
        }
    }
}

/// What `cargo test` runs: `--all-targets` would run benches as well.
const TARGETS: [&str; 3] = ["--lib", "--bins", "--tests"];

impl Selection {
    /// As a filter of cargo-nextest.
    pub(crate) fn nextest_filter(&self) -> String {
        let packages = self.packages.iter().map(|name| format!("package(={name})"));
        let files = self.end_to_end.iter().map(|name| format!("binary_id(=e2e::{name})"));
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
        if !self.end_to_end.is_empty() {
            let files = self.end_to_end.iter().map(|name| format!("--test={name}"));
            calls.push(["--package=e2e".to_owned()].into_iter().chain(files).collect());
        }
        if !self.words.is_empty() {
            let words = self.words.iter().map(|&word| word.to_owned());
            let all = ["--workspace"].into_iter().chain(TARGETS).chain(["--"]).map(str::to_owned);
            calls.push(all.chain(words).collect());
        }
        calls
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn categories_are_those_of_the_mission() {
        let names: Vec<String> = Category::value_variants().iter().map(|c| c.name()).collect();
        assert_eq!(
            names,
            [
                "gaudi",
                "dmabuf",
                "detection",
                "ucm",
                "ipc",
                "rcache",
                "errors",
                "config",
                "ib",
                "performance-smoke"
            ]
        );
    }

    #[test]
    fn files_and_crates_named_here_exist() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        for category in Category::value_variants() {
            let selection = category.selection();
            for file in selection.end_to_end {
                let path = root.join(format!("crates/e2e/tests/{file}.rs"));
                assert!(path.exists(), "{} names {}", category.name(), path.display());
            }
            for package in selection.packages {
                assert!(root.join("crates").join(package).exists(), "{package}");
            }
        }
    }

    #[test]
    fn both_runners_get_the_same_selection() {
        let selection = Selection { packages: &["a"], end_to_end: &["b"], words: &["c", "d"] };
        assert_eq!(
            selection.nextest_filter(),
            "package(=a) | binary_id(=e2e::b) | test(c) | test(d)"
        );
        assert_eq!(
            selection.cargo_test_calls(),
            [
                vec!["--package=a", "--lib", "--bins", "--tests"],
                vec!["--package=e2e", "--test=b"],
                vec!["--workspace", "--lib", "--bins", "--tests", "--", "c", "d"],
            ]
        );
    }
}
