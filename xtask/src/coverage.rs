//! `cargo xtask coverage`: how many lines of the plugin's crates the tests run, and that the number does not decrease.
//!
//! Unit and integration tests of these crates are compiled with counters (`-Cinstrument-coverage`), and so is the
//! plugin that the end-to-end tests load into stock UCX. A process that is killed loses its counts. Tests themselves
//! are not counted, even inside a source file. `coverage.json` has the figures that a run must reach; `--update`
//! creates it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use e2e::Layout;

use crate::debian::{Apt, through_loader, unpack};
use crate::package::copy_tree;
use crate::progress::Work;
use crate::repo::Repo;
use crate::toolchain::Toolchain;
use crate::{check, dist, json, setup};

/// The crates that are measured, all below `plugin/`.
const CRATES: [&str; 4] = ["hl-thunk", "gaudi", "uct", "uct-gaudi"];
/// Percentage of lines per crate that a run must reach.
const RECORD: &str = "coverage.json";
/// Tolerance: from run to run, other processes are killed before they write their counts.
const TOLERANCE: f64 = 0.5;
/// The default end-to-end tests. Those under memcheck run no additional lines, and are slow with counters; the smoke
/// test of performance would measure the counters.
const END_TO_END: &str = "not binary(=valgrind) and not binary(=performance_smoke)";
/// The examples of plugins, which tests load.
const EXAMPLES: [&str; 2] = ["debug/examples/libloopback.so", "debug/examples/libpanics.so"];
/// The plugin in `dist`.
const PLUGIN: &str = "lib/ucx-gaudi/libucx_gaudi.so";

/// What the command line asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Only these end-to-end tests, as a filterset of nextest: no comparison with coverage.json
    #[arg(long, conflicts_with = "update")]
    filter: Option<String>,
    /// Raise the figures in coverage.json, or make it
    #[arg(long)]
    update: bool,
    /// Run no tests: report what the last ones left
    #[arg(long)]
    report: bool,
}

/// Runs the tests and prints lines per crate and file.
pub(crate) fn run(repo: &Repo, options: &Options) -> Result<()> {
    check::require_nextest(repo, "cargo xtask coverage")?;
    let filter = options.filter.as_deref();
    let tools = Tools::find(repo)?;
    let folder = repo.layout().target().join("coverage");
    let profiles = folder.join(if filter.is_some() { "some-profiles" } else { "profiles" });
    let mut objects = build(repo, &folder)?;
    if !options.report {
        let _ = fs::remove_dir_all(&profiles);
        test(repo, &folder, &profiles, filter)?;
    }
    objects.extend(EXAMPLES.map(|path| folder.join(path)).into_iter().filter(|path| path.exists()));
    let lcov = tools.lcov(&profiles, &folder.join("merged.profdata"), &objects)?;
    let files = lines(&lcov, &repo.path(""), |path| fs::read_to_string(path).unwrap_or_default());
    let crates = sums(&files)?;
    for (name, counted) in crates.iter().chain(&files) {
        println!(
            "{:>6.1} %  {:>5} of {:>5}  {name}",
            counted.percent(),
            counted.run,
            counted.lines
        );
    }
    if filter.is_some() {
        eprintln!("not compared with {RECORD}, which is about all tests");
        return Ok(());
    }
    compare(&repo.path(RECORD), &crates, options.update)
}

/// Compiles tests and plugin with counters, and returns the files that have them.
fn build(repo: &Repo, folder: &Path) -> Result<Vec<PathBuf>> {
    setup::run(repo)?;
    // With the profile of the last build, whichever it was: the tests load the plugin that is compiled below.
    dist::build_again(repo)?;
    fs::create_dir_all(folder)?;
    let mut cargo = instrumented(repo, folder);
    cargo.args(["test", "--no-run", "--message-format=json-render-diagnostics"]);
    cargo.args(CRATES.map(|name| format!("--package={name}"))).args(["--lib", "--tests"]);
    let mut objects = dist::executables(&dist::messages(&mut cargo)?);
    let mut cargo = instrumented(repo, folder);
    cargo.args(["build", "--message-format=json-render-diagnostics", "--package=uct-gaudi"]);
    let plugin = dist::artifact(&dist::messages(&mut cargo)?, "uct_gaudi", ".so")?;

    let dist = folder.join("dist");
    let _ = fs::remove_dir_all(&dist);
    copy_tree(&repo.layout().dist(), &dist)?;
    fs::copy(&plugin, dist.join(PLUGIN)).context("no plugin")?;
    let stock = folder.join("stock");
    // Not `exists`, which follows a link that may be dangling.
    if !stock.is_symlink() {
        symlink(repo.layout().stock(), &stock).context("no link to stock UCX")?;
    }
    objects.push(plugin);
    Ok(objects)
}

/// Runs unit and integration tests, then those through stock UCX. Failed tests count with the lines that they ran.
fn test(repo: &Repo, folder: &Path, profiles: &Path, filter: Option<&str>) -> Result<()> {
    // Each process adds its counts to one of four files of its program: four, so that few processes wait.
    let counts = profiles.join("%4m.profraw");
    let nextest = ["nextest", "run", "--no-fail-fast", "--retries=1"];
    let mut crates = instrumented(repo, folder);
    crates.args(nextest).args(CRATES.map(|name| format!("--package={name}")));
    // Also with counters: one of its tests compiles the example of a plugin.
    let mut whole = instrumented(repo, folder);
    whole.args(nextest).args(["--package=e2e", "--filterset", filter.unwrap_or(END_TO_END)]);
    whole.env(Layout::VARIABLE, folder);
    for mut command in [crates, whole] {
        let status =
            command.env("LLVM_PROFILE_FILE", &counts).status().context("cannot run cargo")?;
        if !status.success() {
            eprintln!("some tests failed: with counters they are slower; what they ran counts");
        }
    }
    Ok(())
}

fn instrumented(repo: &Repo, folder: &Path) -> Command {
    let mut cargo = repo.cargo_for_tests();
    cargo.env("RUSTFLAGS", "-Cinstrument-coverage").env("CARGO_TARGET_DIR", folder);
    // Build scripts and procedural macros also have counters, and would leave files among the sources.
    cargo.env("LLVM_PROFILE_FILE", folder.join("build-profiles/%m.profraw"));
    cargo
}

/// LLVM's tools in the version that rustc uses: the format of the counts depends on it.
#[derive(Debug)]
enum Tools {
    /// A folder with programs.
    Folder(PathBuf),
    /// Unpacked packages of Debian, with LLVM's major version.
    Debian(PathBuf, String),
}

impl Tools {
    fn find(repo: &Repo) -> Result<Self> {
        let toolchain = Toolchain::find()?;
        let component = toolchain.for_host("bin");
        if component.join("llvm-cov").exists() {
            return Ok(Tools::Folder(component));
        }
        let major = toolchain.llvm;
        let root = repo.layout().target().join("llvm").join(&major);
        if !root.exists() {
            eprintln!(
                "the toolchain has no LLVM tools (`rustup component add llvm-tools`): taking Debian's"
            );
            fetch(&root, &major)?;
        }
        Ok(Tools::Debian(root, major))
    }

    fn run(
        &self,
        program: &str,
        arguments: impl IntoIterator<Item = impl AsRef<OsStr>>,
    ) -> Result<String> {
        let mut command = match self {
            Tools::Folder(folder) => Command::new(folder.join(program)),
            Tools::Debian(root, major) => {
                through_loader(root, &format!("usr/lib/llvm-{major}/bin/{program}"))
            }
        };
        let output = command.args(arguments).stderr(Stdio::inherit()).output();
        let output = output.with_context(|| format!("cannot run {program}"))?;
        ensure!(output.status.success(), "{program}: {}", output.status);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// The counts in lcov's format.
    fn lcov(&self, profiles: &Path, merged: &Path, objects: &[PathBuf]) -> Result<String> {
        let raw = fs::read_dir(profiles).context("no test has left counts")?;
        let raw = raw.map(|entry| Ok(entry?.path().into_os_string()));
        let raw = raw.collect::<std::io::Result<Vec<_>>>()?;
        // A process that is killed while it writes leaves a truncated file.
        let merge = ["merge", "--failure-mode=all", "--sparse", "-o"].map(OsStr::new);
        let merge = merge.into_iter().chain([merged.as_os_str()]);
        self.run("llvm-profdata", merge.chain(raw.iter().map(|path| path.as_os_str())))?;
        let mut export = vec!["export".into(), "-format=lcov".into(), "-instr-profile".into()];
        export.push(merged.as_os_str().to_owned());
        for object in objects {
            export.extend([OsStr::new("-object").to_owned(), object.as_os_str().to_owned()]);
        }
        self.run("llvm-cov", export)
    }
}

/// Fetches LLVM's tools: Debian's unstable release has the newest.
fn fetch(root: &Path, major: &str) -> Result<()> {
    let work = Work::start(format!("downloading LLVM {major} (72 MB)"));
    let apt_folder = root.with_file_name("apt");
    let apt = Apt::new(&apt_folder, &["sid"])?;
    apt.run("apt-get", &["update", "--error-on=any"])?;
    let install = ["install", "--download-only", "--no-install-recommends", "--yes"];
    apt.run("apt-get", &[&install[..], &[&format!("llvm-{major}")]].concat())?;
    let staging = root.with_extension("new");
    let _ = fs::remove_dir_all(&staging);
    fs::create_dir_all(&staging)?;
    for package in apt.downloaded()? {
        unpack(&package, &staging, &[])?;
    }
    fs::rename(&staging, root)?;
    fs::remove_dir_all(apt_folder)?;
    work.done("");
    Ok(())
}

/// Lines with code, and how many of them were run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counted {
    lines: u32,
    run: u32,
}

impl Counted {
    /// Rounded down to a tenth.
    fn percent(self) -> f64 {
        (1000.0 * f64::from(self.run) / f64::from(self.lines.max(1))).floor() / 10.0
    }
}

/// Lines per file of the measured crates, from lcov's format. `source` reads a file.
fn lines(lcov: &str, root: &Path, source: impl Fn(&Path) -> String) -> BTreeMap<String, Counted> {
    let mut files = BTreeMap::<String, Counted>::new();
    let (mut file, mut end) = (None, 0);
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            let below = Path::new(path).strip_prefix(root).ok().and_then(Path::to_str);
            file = below.filter(|path| is_measured(path)).map(str::to_owned);
            end = file.as_ref().map_or(0, |_| tests_begin(&source(Path::new(path))));
        } else if let (Some(counts), Some(file)) = (line.strip_prefix("DA:"), &file) {
            let Some((at, count)) = counts.split_once(',') else { continue };
            if at.parse().is_ok_and(|at: usize| at >= end) {
                continue;
            }
            let counted = files.entry(file.clone()).or_default();
            counted.lines += 1;
            counted.run += u32::from(count != "0");
        }
    }
    files
}

/// Sources of the crates, without files that are only compiled for tests.
fn is_measured(path: &str) -> bool {
    let ours = CRATES.iter().any(|name| path.starts_with(&format!("plugin/{name}/src/")));
    ours && !path.ends_with("tests.rs") && !path.ends_with("/fake.rs")
}

/// The line at which a file's own tests begin; they go on to its end.
fn tests_begin(source: &str) -> usize {
    let lines: Vec<&str> = source.lines().collect();
    let begins = |pair: &[&str]| pair[0] == "#[cfg(test)]" && pair[1].ends_with('{');
    lines.windows(2).position(begins).map_or(usize::MAX, |at| at + 1)
}

/// Lines per crate; an error if a crate has none, because then its counts were lost.
fn sums(files: &BTreeMap<String, Counted>) -> Result<BTreeMap<String, Counted>> {
    let mut crates = BTreeMap::<String, Counted>::new();
    for (path, counted) in files {
        let sum = crates.entry(path.split('/').nth(1).unwrap_or_default().to_owned()).or_default();
        sum.lines += counted.lines;
        sum.run += counted.run;
    }
    for name in CRATES {
        ensure!(crates.contains_key(name), "no line of {name} was counted");
    }
    Ok(crates)
}

/// Compares with the recorded figures, if there are any; `update` raises them.
fn compare(record: &Path, crates: &BTreeMap<String, Counted>, update: bool) -> Result<()> {
    let mut recorded: BTreeMap<String, f64> = match fs::read_to_string(record) {
        Ok(text) => serde_json::from_str(&text).with_context(|| format!("{}", record.display()))?,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            if !update {
                eprintln!("there is no {RECORD} to compare with; --update makes it");
            }
            BTreeMap::new()
        }
        Err(error) => return Err(error).with_context(|| format!("{}", record.display())),
    };
    let mut fell = Vec::new();
    for (name, counted) in crates {
        let percent = recorded.entry(name.clone()).or_default();
        if counted.percent() < *percent - TOLERANCE {
            fell.push(format!("{name}: {} %, was {percent} %", counted.percent()));
        }
        *percent = percent.max(counted.percent());
    }
    if !fell.is_empty() {
        bail!("fewer lines are tested than {RECORD} says: {}", fell.join(", "));
    }
    if update {
        json::write(record, &recorded)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_lines_of_measured_sources_count_and_no_tests() {
        let lcov = "SF:/r/plugin/gaudi/src/a.rs\nDA:1,2\nDA:2,0\nDA:5,1\nend_of_record\n\
                    SF:/r/plugin/gaudi/src/a/tests.rs\nDA:1,2\nend_of_record\n\
                    SF:/r/tools/cli/src/a.rs\nDA:1,2\nend_of_record\n";
        let source = |_: &Path| "fn a() {}\nfn b() {}\n#[cfg(test)]\nmod tests {\n}\n".to_owned();
        let files = lines(lcov, Path::new("/r"), source);
        let expected = Counted { lines: 2, run: 1 };
        assert_eq!(files, BTreeMap::from([("plugin/gaudi/src/a.rs".to_owned(), expected)]));
        assert_eq!(expected.percent(), 50.0);
    }

    #[test]
    fn a_crate_that_is_missing_is_an_error() {
        let counted = Counted { lines: 2, run: 1 };
        let mut files: BTreeMap<_, _> =
            CRATES.iter().map(|name| (format!("plugin/{name}/src/a.rs"), counted)).collect();
        files.insert("plugin/gaudi/src/b.rs".to_owned(), counted);
        let crates = sums(&files).expect("all are there");
        assert_eq!((crates.len(), crates["gaudi"]), (4, Counted { lines: 4, run: 2 }));
        files.remove("plugin/uct/src/a.rs");
        sums(&files).expect_err("uct has none");
    }

    #[test]
    fn record_only_rises_and_a_small_fall_is_none() {
        let folder = tempfile::tempdir().expect("a folder");
        let record = folder.path().join("coverage.json");
        let crates = |run| BTreeMap::from([("uct".to_owned(), Counted { lines: 1000, run })]);
        compare(&record, &crates(900), false).expect("nothing to compare with");
        assert!(!record.exists());
        compare(&record, &crates(900), true).expect("the first");
        compare(&record, &crates(896), true).expect("a small fall");
        compare(&record, &crates(894), true).expect_err("a fall");
        compare(&record, &crates(950), false).expect("a rise");
        compare(&record, &crates(900), false).expect("it was not recorded");
        compare(&record, &crates(950), true).expect("a rise");
        compare(&record, &crates(900), false).expect_err("a fall");
    }
}
