//! UCX that is not ours to serve, and plugins that are not ours: an old UCX is refused in one line,
//! and the `uct` crate carries a transport that has nothing to do with Gaudi.

use std::path::Path;
use std::process::Command;

use e2e::{Layout, Ucx, Workbench};

fn link(from: &Path, to: &Path) {
    std::os::unix::fs::symlink(from, to).unwrap_or_else(|e| panic!("{}: {e}", to.display()));
}

/// UCX 1.20 knows no plugin path, so the plugin takes the place of a module it does know, or is preloaded. The
/// program is this test itself: it opens the old libuct and asks for its components.
#[test]
fn ucx_too_old_is_refused_in_one_line_that_names_versions() {
    [false, true].into_iter().for_each(ucx_too_old_is_refused);
}

fn ucx_too_old_is_refused(preloaded: bool) {
    let bench = Workbench::from_env();
    let old = bench.layout().old_ucx();
    let folder = tempfile::tempdir().expect("a temporary folder");
    for entry in std::fs::read_dir(&old).unwrap_or_else(|e| panic!("{}: {e}", old.display())) {
        let path = entry.expect("a directory entry").path();
        if path.is_file() {
            // Copied, not linked: UCX looks for its modules beside the file it was loaded from.
            let name = path.file_name().expect("a file name");
            std::fs::copy(&path, folder.path().join(name)).expect("copied");
        }
    }
    std::fs::create_dir(folder.path().join("ucx")).expect("a folder");
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    if preloaded {
        command.env("LD_PRELOAD", bench.layout().preload());
    } else {
        let plugin = bench.layout().plugins().join("libuct_gaudi.so.0");
        link(&plugin, &folder.path().join("ucx/libuct_cma.so.0"));
    }
    let output = command
        .args(["--exact", "asks_an_old_ucx_for_its_components", "--nocapture", "--ignored"])
        .env("LD_LIBRARY_PATH", folder.path())
        .env("UCX_GAUDI_TEST_OLD_UCX", folder.path())
        .output()
        .expect("run");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let ours: Vec<&str> = text.lines().filter(|line| line.contains("ucx-gaudi")).collect();
    assert_eq!(ours.len(), 1, "{text}");
    assert!(ours[0].contains("WARN"), "{text}");
    assert!(ours[0].contains("UCX 1.20.1"), "the version found\n{text}");
    assert!(ours[0].contains("supports UCX 1.21"), "the versions supported\n{text}");
    assert!(text.contains("component self") && !text.contains("component gaudi"), "{text}");
}

/// A module that says that it was loaded, in the place of the one that a UCX built with Gaudi support has.
fn compile_own_module(file: &Path) {
    let source = file.with_extension("c");
    let text = "#include <stdio.h>\n\
                __attribute__((constructor)) static void loaded(void) { puts(\"UCX's own gaudi_gdr\"); }\n";
    std::fs::write(&source, text).expect("a source file");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-o"]).arg(file).arg(&source);
    let compiled = compiler.output().expect("a C compiler");
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    std::fs::remove_file(source).expect("removed");
}

/// Its `gaudi_gdr` would open a card at once and start SCAL on it. Modules of one name are loaded once, those of the
/// plugin path first; for 1.21 the preloaded library takes it out of the list.
#[test]
fn a_ucx_with_a_gaudi_module_of_its_own_loads_ours_instead() {
    [Ucx::V1_21, Ucx::V1_22].into_iter().for_each(loads_ours_instead);
}

/// Changes the list of modules that a libuct 1.21 was built with to that of one with Gaudi support.
fn name_own_module(libuct: &Path) {
    let (with, without) = (b":gaudi\0\0\0", b":cuda:cma");
    let mut bytes = std::fs::read(libuct).expect("a library");
    let at = bytes.windows(without.len()).position(|part| part == without).expect("its modules");
    bytes[at..at + with.len()].copy_from_slice(with);
    std::fs::write(libuct, bytes).expect("written");
}

fn loads_ours_instead(ucx: Ucx) {
    let bench = Workbench::from_env();
    let device = e2e::Device::software();
    let lib = ucx.lib_dirs(bench.layout()).remove(0);
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::create_dir(folder.path().join("ucx")).expect("a folder");
    for from in [lib.clone(), lib.join("ucx")] {
        let to = if from == lib { folder.path().to_owned() } else { folder.path().join("ucx") };
        for entry in std::fs::read_dir(&from).unwrap_or_else(|e| panic!("{}: {e}", from.display()))
        {
            let path = entry.expect("a directory entry").path();
            if path.is_file() {
                // Copied, not linked: UCX looks for its modules beside the file it was loaded from.
                let name = path.file_name().expect("a file name");
                std::fs::copy(&path, to.join(name)).expect("copied");
            }
        }
    }
    compile_own_module(&folder.path().join("ucx/libuct_gaudi.so.0"));
    if ucx == Ucx::V1_21 {
        name_own_module(&folder.path().join("libuct.so.0"));
    }
    let list = |with_plugin: bool| {
        let tool = bench.tool(ucx, "ucx_info").arg("-d").device(&device);
        let tool = tool.libraries(folder.path());
        let tool = if with_plugin { tool.plugin() } else { tool };
        let end = tool.run().ok();
        (end.stdout.contains("UCX's own gaudi_gdr"), end.stdout.contains("gaudi_cpy"))
    };
    assert_eq!(list(false), (true, false), "without the plugin, UCX {} loads its own", ucx.name());
    assert_eq!(list(true), (false, true), "with it, UCX {} loads ours", ucx.name());
}

/// The second half of the test above, in a process of its own.
#[test]
#[ignore = "run by the other tests as a process of its own"]
fn asks_an_old_ucx_for_its_components() {
    let folder = std::env::var_os("UCX_GAUDI_TEST_OLD_UCX").expect("run by another test");
    let open = |name: &str| {
        let path = Path::new(&folder).join(name);
        let path = std::ffi::CString::new(path.to_str().expect("a plain path")).expect("no NUL");
        // SAFETY: a library of UCX, whose constructors may run at any time.
        let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null(), "{path:?} does not load");
        handle
    };
    // As in a real program, where the version can be asked for.
    open("libucp.so.0");
    let uct = open("libuct.so.0");
    type Query = unsafe extern "C" fn(*mut *mut *const libc::c_char, *mut u32) -> i8;
    // SAFETY: `uct_query_components` has had this type in every version; a component begins with
    // its name.
    unsafe {
        let query = libc::dlsym(uct, c"uct_query_components".as_ptr());
        let query = std::mem::transmute::<*mut libc::c_void, Query>(query);
        let (mut list, mut count) = (std::ptr::null_mut(), 0);
        assert_eq!(query(&mut list, &mut count), 0);
        for index in 0..count as usize {
            let name = std::ffi::CStr::from_ptr(*list.add(index));
            println!("component {}", name.to_string_lossy());
        }
    }
}

/// Compiles an example of the `uct` crate; the folder that UCX loads it from.
fn example(name: &str) -> tempfile::TempDir {
    let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../Cargo.toml");
    let built = Command::new(env!("CARGO"))
        .args(["build", "--quiet", "--locked", "--package", "uct", "--example", name])
        .arg("--manifest-path")
        .arg(&manifest)
        .arg("--target-dir")
        .arg(Layout::from_env().target())
        .status()
        .expect("cargo runs");
    assert!(built.success());
    let library = Layout::from_env().target().join(format!("debug/examples/lib{name}.so"));
    let library = library.canonicalize().unwrap_or_else(|e| panic!("{}: {e}", library.display()));
    let folder = tempfile::tempdir().expect("a temporary folder");
    link(&library, &folder.path().join(format!("libuct_{name}.so.0")));
    folder
}

/// `plugin/uct/examples/loopback.rs` is what someone else's plugin would look like.
#[test]
fn example_transport_is_loaded_and_copies() {
    let folder = example("loopback");
    let bench = |program| {
        Workbench::from_env().tool(Ucx::V1_22, program).env("UCX_PLUGIN_PATH", folder.path())
    };
    let listing = bench("ucx_info").words("-d -t rustloop").run().ok();
    assert!(listing.stdout.contains("Transport: rustloop"), "{}", listing.report());
    let words = "-t put_lat -x rustloop -d loop -l -D short -s 4096 -n 1000";
    let run = bench("ucx_perftest").words(words).run().ok();
    assert!(run.stdout.contains("Final:"), "{}", run.report());
}

/// `plugin/uct/examples/panics.rs` panics on request: no panic enters UCX, which gets an error and lives. No stock program
/// calls the rest of the functions: `plugin/uct/tests/panic_guards.rs` checks their source.
#[test]
fn panics_of_a_plugin_are_errors_with_a_line_in_the_log() {
    const SHORT: &str = "-x rustpanic -d panics -s 64 -t put_bw -D short";
    const ZCOPY: &str = "-x rustpanic -d panics -s 64 -t put_bw -D zcopy";
    const GET: &str = "-x rustpanic -d panics -s 64 -t get -D zcopy";
    const UCP: &str = "-s 100000 -t ucp_put_bw";
    const CASES: [(&str, &str, &str); 32] = [
        ("plugin", SHORT, "plugin initialisation"),
        ("domains", SHORT, "query_md_resources"),
        ("open domain", SHORT, "md_open"),
        ("close domain", SHORT, "md close"),
        ("attributes", SHORT, "md query"),
        ("allocate", SHORT, "mem_alloc"),
        ("free", SHORT, "mem_free"),
        ("register", SHORT, "mem_reg"),
        ("deregister", SHORT, "mem_dereg"),
        ("query", UCP, "mem_query"),
        ("pack key", SHORT, "mkey_pack"),
        ("unpack key", SHORT, "rkey_unpack"),
        ("release key", SHORT, "rkey_release"),
        ("devices", SHORT, "query_devices"),
        ("open", SHORT, "iface_open"),
        ("address length", SHORT, "iface_open"),
        ("close interface", SHORT, "iface_close"),
        ("interface", SHORT, "iface_query"),
        ("estimate", UCP, "estimate_perf"),
        ("address", SHORT, "get_address"),
        ("reachable", SHORT, "is_reachable"),
        ("connect", SHORT, "ep_create"),
        ("close endpoint", SHORT, "ep_destroy"),
        ("short", SHORT, "PUT_SHORT"),
        ("zcopy", ZCOPY, "PUT_ZCOPY"),
        ("zcopy", GET, "GET_ZCOPY"),
        ("fence", SHORT, "ep_fence"),
        ("flush", SHORT, "iface_flush"),
        ("flush endpoint", UCP, "ep_flush"),
        ("progress", ZCOPY, "progress"),
        ("busy", SHORT, "progress_enable"),
        ("event fd", UCP, "event_fd_get"),
    ];
    let folder = example("panics");
    let run = |function: &str, test| {
        let tool = Workbench::from_env().tool(Ucx::V1_22, "ucx_perftest");
        let tool = tool.env("UCX_PLUGIN_PATH", folder.path()).env("PANIC_IN", function);
        // What UCX allocates elsewhere, it registers. Without the cache it asks what memory is.
        let allocator = if function.ends_with("register") { "heap" } else { "md" };
        let tool = tool.env("UCX_RUST_PANIC_ALLOC", allocator).env("UCX_MEMTYPE_CACHE", "n");
        let tool = tool.env("RUST_BACKTRACE", "0").env("UCX_TLS", "rustpanic,self");
        tool.words(&format!("-l -n 10 {test}")).run()
    };
    for (function, test, logged) in CASES {
        let end = run(function, test);
        let text = format!("internal error in {logged}: wanted by the test (please report)");
        let is_logged = |line: &str| line.contains("ERROR") && line.contains(&text);
        assert!(end.text().lines().any(is_logged), "no `{text}` in\n{}", end.report());
        assert!(!end.crashed(), "{function}: {}", end.report());
    }
    for test in [SHORT, ZCOPY, GET, UCP] {
        let end = run("nothing", test).ok();
        assert!(!end.text().contains("internal error"), "{}", end.report());
    }
}

/// Copies parts of the installation to a prefix of its own; what UCX loads comes first.
fn installation(bench: &Workbench, loaders: &[&str], engine: bool) -> tempfile::TempDir {
    let (from, to) = (bench.layout().plugins(), tempfile::tempdir().expect("a temporary folder"));
    let copy = |from: &Path, to: &Path| {
        std::fs::copy(from, to).unwrap_or_else(|e| panic!("{}: {e}", from.display()));
    };
    std::fs::create_dir(to.path().join("plugins")).expect("a folder");
    for name in loaders {
        copy(&from.join(name), &to.path().join("plugins").join(name));
    }
    if engine {
        let name = "libucx_gaudi.so";
        copy(&from.with_file_name(name), &to.path().join(name));
    }
    to
}

const UCT: &str = "libuct_gaudi.so.0";
const PERFTEST: &str = "libucx_perftest_gaudi.so.0";

#[test]
fn plugin_without_its_engine_says_so_in_one_line_and_host_memory_works() {
    let bench = Workbench::from_env();
    let place = installation(&bench, &[UCT, PERFTEST], false);
    let tool = bench.stock("ucx_perftest", &e2e::Device::software(), "-l -t tag_lat -s 8 -n 10");
    let end = tool.env("UCX_PLUGIN_PATH", place.path().join("plugins")).run().ok();
    let report = end.report();
    assert_eq!(report.matches("ucx-gaudi: not loaded: ").count(), 1, "{report}");
    assert!(end.says(&["libucx_gaudi.so: cannot open", "under one prefix"]), "{report}");
}

#[test]
fn two_installations_in_one_process_are_noticed() {
    let bench = Workbench::from_env();
    let (one, two) = (installation(&bench, &[UCT], true), installation(&bench, &[PERFTEST], true));
    let tool =
        bench.stock("ucx_perftest", &e2e::Device::software(), "-l -t tag_lat -m gaudi -s 8 -n 10");
    let path = [&one, &two].map(|place| place.path().join("plugins").display().to_string());
    let end = tool.env("UCX_PLUGIN_PATH", path.join(":")).run();
    assert!(end.says(&["WARN", "loaded 2 times"]), "{}", end.report());
}
