//! What `cargo xtask package` makes can be installed, run, upgraded and removed: the wheel with pip in a
//! virtual environment, the deb with dpkg and the rpm with rpm in a folder, the tar anywhere. Packages are made of `target/dist`
//! as it is; nothing is compiled, and nothing outside of temporary folders is changed.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use e2e::{Layout, Ucx};
use tempfile::TempDir;

/// Makes packages of one format with this version, and returns those of the plugin and the software devices.
fn packages(format: &str, version: &str, out: &Path) -> [PathBuf; 2] {
    let made = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["package", format, "--prebuilt", "--version", version, "--out"])
        .arg(out)
        .output()
        .expect("xtask runs");
    text(made, true);
    let all = std::fs::read_dir(out).expect("a folder").map(|entry| entry.expect("entry").path());
    let of_version = |path: &PathBuf| path.display().to_string().contains(version);
    let mut found: Vec<PathBuf> = all.filter(of_version).collect();
    // `ucx-gaudi_` and `ucx_gaudi-0` before `…soft`.
    found.sort_by_key(|path| path.display().to_string().contains("soft"));
    found.try_into().expect("two packages")
}

/// What a program said on both channels.
fn text(output: Output, good: bool) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.success(), good, "{}\n{text}", output.status);
    text
}

fn run<S: AsRef<OsStr>>(
    program: impl AsRef<OsStr>,
    arguments: impl IntoIterator<Item = S>,
) -> String {
    let name = program.as_ref().display().to_string();
    let output = Command::new(program).args(arguments).output();
    text(output.unwrap_or_else(|error| panic!("{name}: {error}")), true)
}

fn exists(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// A folder, unless something is missing for this test; then says what.
fn place(programs: &[&str]) -> Option<TempDir> {
    let layout = Layout::from_env();
    let needed = [layout.plugins(), Ucx::V1_21.libucp(&layout), Ucx::V1_22.libucp(&layout)];
    let missing = needed.iter().find(|path| !path.exists()).map(|path| path.display().to_string());
    let program = programs.iter().find(|program| !exists(program)).map(|name| name.to_string());
    if let Some(missing) = missing.or(program) {
        println!("skipped: no {missing}");
        return None;
    }
    Some(tempfile::tempdir().expect("a temporary folder"))
}

fn perftest(ucx: Ucx) -> PathBuf {
    ucx.bin_dir(&Layout::from_env()).expect("it has programs").join("ucx_perftest")
}

/// An installed tool with stock UCX on the loader path, and nothing of the caller's that decides.
fn with_ucx(tool: &Path, ucx: Ucx, arguments: &[&str]) -> Command {
    let mut command = Command::new(tool);
    for (name, _) in std::env::vars_os().filter(|(name, _)| e2e::is_setting(name)) {
        command.env_remove(name);
    }
    let libraries = std::env::join_paths(ucx.lib_dirs(&Layout::from_env()));
    command.args(arguments).env("LD_LIBRARY_PATH", libraries.expect("plain paths"));
    command
}

/// Uses an installed tool as its users do: stock UCX moves Gaudi memory on a software card.
fn works(tool: &Path, version: &str) {
    let path = run(tool, ["run", "-q", "--", "printenv", "UCX_PLUGIN_PATH"]);
    assert!(Path::new(path.trim_end()).join("libuct_gaudi.so.0").exists(), "{path}");
    let said = run(tool, ["--version"]);
    assert!(said.contains("ucx-gaudi"), "{version}: {said}");
    // A page, an example, and what a C program is compiled with.
    let prefix =
        Path::new(path.trim_end()).ancestors().nth(3).expect("PREFIX/lib/ucx-gaudi/plugins");
    for file in ["docs/errors.md", "examples/kv_cache.py"] {
        assert!(prefix.join(Layout::DOCUMENTS).join(file).is_file(), "{file}");
    }
    compiles(prefix);
    // By the plugin's folder, and by the preloaded library, which the loader finds under a path without blanks.
    let blanks = tool.display().to_string().contains(' ');
    for ucx in if blanks { vec![Ucx::V1_22] } else { vec![Ucx::V1_22, Ucx::V1_21] } {
        let mut command = with_ucx(tool, ucx, &["run", "--soft=1", "--tuned", "--"]);
        command.arg(perftest(ucx));
        command.args(["-l", "-t", "tag_lat", "-m", "gaudi", "-s", "4096", "-n", "20"]);
        let said = text(command.output().expect("the tool runs"), true);
        assert!(said.contains("Final:") && !said.contains("WARN"), "{said}");
    }
}

/// The example in C, with the flags that pkg-config gives for this prefix.
fn compiles(prefix: &Path) {
    // The list of flags separates them by blanks.
    if prefix.display().to_string().contains(' ') || !exists("pkg-config") || !exists("cc") {
        return println!("skipped: no pkg-config or no cc, or a path with a blank");
    }
    let mut asked = Command::new("pkg-config");
    asked.args(["--cflags", "--libs", "ucx-gaudi"]);
    asked.env("PKG_CONFIG_PATH", prefix.join("share/pkgconfig"));
    // The folders of the machine's compiler are left out otherwise, and a package in a folder has them, too.
    asked.env("PKG_CONFIG_ALLOW_SYSTEM_CFLAGS", "1").env("PKG_CONFIG_ALLOW_SYSTEM_LIBS", "1");
    let flags = text(asked.output().expect("it runs"), true);
    let folder = tempfile::tempdir().expect("a folder");
    let program = folder.path().join("gaudi_memory");
    let mut cc = Command::new("cc");
    cc.arg(prefix.join(Layout::DOCUMENTS).join("examples/gaudi_memory.c")).arg("-o").arg(&program);
    text(cc.args(flags.split_whitespace()).output().expect("it runs"), true);
    let mut tool = Command::new(prefix.join("bin/ucx-gaudi"));
    let said = tool.args(["run", "--soft=1", "-q", "--"]).arg(&program).output();
    assert!(text(said.expect("it runs"), true).contains("there and back"));
}

/// Files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.flat_map(|entry| below(entry.path())).collect()
}

#[test]
fn wheel_is_installed_run_upgraded_and_removed() {
    let Some(place) = place(&["python3"]) else { return };
    let venv = place.path().join("venv");
    run("python3", [OsStr::new("-m"), "venv".as_ref(), "--without-pip".as_ref(), venv.as_ref()]);
    let python = venv.join("bin/python");
    let before = files(&venv);
    let pip = |arguments: &[&OsStr]| {
        let mut command = Command::new("python3");
        command.args(["-m", "pip", "--disable-pip-version-check", "--python"]).arg(&python);
        command.args(arguments).output().expect("python3 runs")
    };
    if !pip(&["--version".as_ref()]).status.success() {
        return println!("skipped: no pip that has --python (22.3 or later)");
    }
    for version in ["0.1.0", "0.1.1"] {
        let [main, soft] = packages("wheel", version, place.path());
        let tag = main.display().to_string();
        assert!(tag.contains("-py3-none-manylinux_2_") && tag.ends_with("_x86_64.whl"), "{tag}");
        let install = ["install", "--no-index", "--upgrade", "--no-deps"].map(OsStr::new);
        text(pip(&[&install[..], &[main.as_ref(), soft.as_ref()]].concat()), true);
        works(&venv.join("bin/ucx-gaudi"), version);
        assert!(run(venv.join("bin/ucp-check"), ["--version"]).contains("ucp-check"));
        let script = "import ucx_gaudi\nwith ucx_gaudi.alloc(9) as memory:\n  memory.write(b'wheel')\n  \
                      assert memory.read(5) == b'wheel'\nprint(ucx_gaudi.__version__, len(ucx_gaudi.cards()))";
        let mut module = Command::new(venv.join("bin/ucx-gaudi"));
        // Without the variable it finds the library beside itself.
        module.args(["run", "--soft=1", "-q", "--", "env", "-u", "UCX_PLUGIN_PATH"]);
        module.arg(&python).args(["-c", script]);
        let said = text(module.output().expect("the tool runs"), true);
        assert_eq!(said.trim(), format!("{version} 1"));
        text(pip(&["check".as_ref()]), true);
        for package in ["ucx-gaudi", "ucx-gaudi-soft"] {
            let shown = text(pip(&["show".as_ref(), package.as_ref()]), true);
            let line = format!("Version: {version}");
            assert!(shown.lines().any(|other| other == line), "{version}: {shown}");
        }
    }
    let uninstall = ["uninstall", "--yes", "ucx-gaudi-soft", "ucx-gaudi"];
    text(pip(&uninstall.map(OsStr::new)), true);
    assert_eq!(files(&venv).len(), before.len(), "something stays: {:?}", files(&venv));
    let import = Command::new(&python).args(["-c", "import ucx_gaudi"]).output();
    text(import.expect("python runs"), false);
}

#[test]
fn folder_without_the_engine_is_not_packed() {
    let target = tempfile::tempdir().expect("a temporary folder");
    std::fs::create_dir_all(target.path().join("dist/lib/ucx-gaudi/plugins")).expect("folders");
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"));
    xtask.args(["package", "tar", "--prebuilt"]).env("UCX_GAUDI_TARGET_DIR", target.path());
    let said = text(xtask.output().expect("xtask runs"), false);
    assert!(said.contains("libucx_gaudi.so") && said.contains("cargo xtask build"), "{said}");
    assert!(!target.path().join("package").exists(), "nothing was made");
}

#[test]
fn deb_is_installed_run_upgraded_and_removed() {
    let Some(place) = place(&["dpkg"]) else { return };
    let root = place.path().join("root");
    for folder in ["updates", "info"] {
        std::fs::create_dir_all(root.join("var/lib/dpkg").join(folder)).expect("folders");
    }
    std::fs::write(root.join("var/lib/dpkg/status"), "").expect("a file");
    // Of the dependencies only ours are there.
    let dpkg = |arguments: &[&OsStr]| {
        let mut command = Command::new("dpkg");
        command.arg("--root").arg(&root).args([
            "--force-not-root",
            "--force-depends",
            "--log=/dev/null",
        ]);
        // An ordinary user's PATH may lack what dpkg wants to find there.
        let path = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
        text(command.args(arguments).env("PATH", path).output().expect("dpkg runs"), true)
    };
    for version in ["0.1.0", "0.1.1"] {
        let [main, soft] = packages("deb", version, place.path());
        dpkg(&["--install".as_ref(), main.as_ref(), soft.as_ref()]);
        works(&root.join("usr/bin/ucx-gaudi"), version);
        let listed = dpkg(&["--list".as_ref(), "ucx-gaudi*".as_ref()]);
        assert_eq!(listed.matches(version).count(), 2, "{listed}");
        let size = run("dpkg", ["--field".as_ref(), main.as_os_str(), "Installed-Size".as_ref()]);
        let most = std::fs::metadata(&main).expect("a file").len() / 1024;
        assert!(size.trim().parse::<u64>().expect("a number") > most, "{size} KiB unpacked");
    }
    let conf =
        std::fs::read_to_string(root.join("usr/share/ucx-gaudi/ucx.conf")).expect("settings");
    assert!(conf.contains("\nUCX_PLUGIN_PATH=/usr/lib/ucx-gaudi/plugins\n"), "{conf}");
    dpkg(&["--purge", "ucx-gaudi", "ucx-gaudi-soft"].map(OsStr::new));
    assert!(!root.join("usr").exists(), "something stays: {:?}", files(&root.join("usr")));
}

#[test]
fn rpm_is_installed_run_upgraded_and_removed() {
    let Some(place) = place(&["rpmbuild", "rpm"]) else { return };
    let root = place.path().join("root");
    let rpm = |arguments: &[&OsStr]| {
        let mut command = Command::new("rpm");
        command.arg("--root").arg(&root).args(arguments).output().expect("rpm runs")
    };
    std::fs::create_dir(&root).expect("a folder");
    let made = rpm(&["--initdb".as_ref()]);
    if !made.status.success() {
        let why = String::from_utf8_lossy(&made.stderr).into_owned();
        return println!("skipped: rpm makes no database in a folder: {why}");
    }
    for version in ["0.1.0", "0.1.1"] {
        let [main, soft] = packages("rpm", version, place.path());
        // The root has no glibc; what is needed of it was read from the files.
        let upgrade = ["--upgrade", "--nodeps"].map(OsStr::new);
        text(rpm(&[&upgrade[..], &[main.as_ref(), soft.as_ref()]].concat()), true);
        works(&root.join("usr/bin/ucx-gaudi"), version);
        let listed = text(rpm(&["--query", "--all"].map(OsStr::new)), true);
        assert_eq!(listed.matches(&format!("-{version}-1.")).count(), 2, "{listed}");
        text(rpm(&["--verify", "--nodeps", "ucx-gaudi", "ucx-gaudi-soft"].map(OsStr::new)), true);
        let needs = run("rpm", ["-qpR".as_ref(), main.as_os_str()]);
        assert!(needs.contains("libc.so.6(GLIBC_"), "{needs}");
    }
    let removed = rpm(&["--erase", "--nodeps", "ucx-gaudi-soft", "ucx-gaudi"].map(OsStr::new));
    text(removed, true);
    let usr = root.join("usr");
    assert!(files(&usr).is_empty(), "something stays: {:?}", files(&usr));
    assert!(!usr.join("lib/ucx-gaudi").exists() && !usr.join("share/ucx-gaudi").exists());
}

/// A tar unpacked: the prefix.
fn unpacked(place: &Path, into: &Path) -> PathBuf {
    for package in packages("tar", "0.1.0", place) {
        run("tar", ["-xzf".as_ref(), package.as_os_str(), "-C".as_ref(), into.as_os_str()]);
    }
    into.join("ucx-gaudi-0.1.0")
}

#[test]
fn probes_of_a_stripped_plugin_are_found_by_gdb_at_run_time() {
    let Some(place) = place(&["tar", "gdb"]) else { return };
    let prefix = unpacked(place.path(), place.path());
    let script = place.path().join("gdb");
    let commands = "set pagination off\nset confirm off\ncatch load libucx_gaudi\\.so\nrun\n\
                    break -probe-stap ucx_gaudi:copy_start\nbreak -probe-stap ucx_gaudi:copy_end\ncontinue\n\
                    printf \"start: %d arguments, direction %d, %d bytes\\n\", $_probe_argc, $_probe_arg2, $_probe_arg3\n\
                    continue\nprintf \"end: %d arguments, well %d\\n\", $_probe_argc, $_probe_arg2\nkill\n";
    std::fs::write(&script, commands).expect("a script");
    let gdb = ["gdb", "-nx", "-batch", "-x"].map(OsStr::new);
    let mut command =
        with_ucx(&prefix.join("bin/ucx-gaudi"), Ucx::V1_22, &["run", "--soft=1", "-q", "--"]);
    command.args(gdb).arg(&script).arg("--args").arg(perftest(Ucx::V1_22));
    command.args(["-l", "-t", "tag_lat", "-m", "gaudi", "-s", "4096", "-n", "20"]);
    let said = Command::output(&mut command).expect("gdb runs");
    let said =
        String::from_utf8_lossy(&said.stdout).into_owned() + &String::from_utf8_lossy(&said.stderr);
    if ["ptrace", "not trace"].iter().any(|words| said.contains(words)) {
        return println!("skipped: gdb may not trace here: {said}");
    }
    let line = |start: &str| said.lines().find(|line| line.starts_with(start)).map(str::to_owned);
    let start = line("start: 4 arguments, direction ").unwrap_or_else(|| panic!("{said}"));
    assert!(!start.ends_with(" 0 bytes"), "{start}");
    assert_eq!(line("end:").as_deref(), Some("end: 3 arguments, well 1"), "{said}");
}

#[test]
fn tar_works_wherever_it_is_unpacked_and_its_modulefile_finds_it() {
    let Some(place) = place(&["tar"]) else { return };
    let home = place.path().join("a folder");
    std::fs::create_dir(&home).expect("a folder");
    let prefix = unpacked(place.path(), &home);
    works(&prefix.join("bin/ucx-gaudi"), "0.1.0");

    // Tcl with the commands of Environment Modules that the file uses.
    let script = "proc unknown {name args} {puts \"$name $args\"}\n\
                  set ModulesCurrentModulefile [lindex $argv 0]\nsource [lindex $argv 0]\n";
    let file = place.path().join("module.tcl");
    std::fs::write(&file, script).expect("a script");
    let module = prefix.join("share/modulefiles/ucx-gaudi/0.1.0");
    let Ok(output) = Command::new("tclsh").arg(&file).arg(&module).output() else {
        return println!("skipped: no tclsh to read the modulefile with");
    };
    let said = text(output, true);
    let plugins = prefix.join("lib/ucx-gaudi/plugins").canonicalize().expect("a folder");
    assert!(said.contains(&format!("UCX_PLUGIN_PATH {{{}}}", plugins.display())), "{said}");
    assert!(said.contains("setenv UCX_SYSV_SEG_SIZE 32832"), "{said}");
}
