//! rdma-core's own programs and perftest on the library, unchanged.
//!
//! Needs the library (`cargo xtask build`) and the programs: in `VERBS_TOOLS`, a folder into which
//! Debian's packages `ibverbs-utils`, `perftest` and what they depend on were unpacked, or on `PATH`.

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

struct Tools {
    library: PathBuf,
    unpacked: Option<PathBuf>,
    folder: PathBuf,
}

impl Drop for Tools {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Kills the server if the test ends before it does.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Tools {
    /// `None`, with the reason printed, where library or program are missing.
    fn find(program: &str) -> Option<Self> {
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below target");
        let library = target.join("dist/lib/ucx-gaudi/soft/rdma");
        if !library.join("libibverbs.so.1").exists() {
            eprintln!("skipped: no library (cargo xtask build)");
            return None;
        }
        let unpacked = std::env::var_os("VERBS_TOOLS").map(PathBuf::from);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut places: Vec<_> = std::env::split_paths(&path).collect();
        places.extend(unpacked.as_ref().map(|root| root.join("usr/bin")));
        if !places.iter().any(|place| place.join(program).exists()) {
            eprintln!(
                "skipped: no {program} (install ibverbs-utils and perftest, or set VERBS_TOOLS)"
            );
            return None;
        }
        let folder =
            PathBuf::from(format!("/tmp/soft-rdma-tools-{}-{program}", std::process::id()));
        Some(Self { library, unpacked, folder })
    }

    fn command(&self, program: &str, arguments: &[&str]) -> Command {
        let mut path = vec![self.library.clone(), self.library.with_file_name("gaudi")];
        let unpacked =
            self.unpacked.as_ref().filter(|root| root.join("usr/bin").join(program).exists());
        let mut command = match unpacked {
            Some(root) => {
                path.extend(
                    ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"]
                        .map(|below| root.join(below)),
                );
                Command::new(root.join("usr/bin").join(program))
            }
            None => Command::new(program),
        };
        command
            .args(arguments)
            .env("LD_LIBRARY_PATH", std::env::join_paths(path).expect("no colons"))
            .env("SOFT_RDMA_DIR", &self.folder)
            .env("SOFT_RDMA_LOG", "off")
            .env("SOFT_RDMA_MEMLOCK", "off")
            .env("SOFT_GAUDI_NODE", format!("tools-{}", std::process::id()));
        command
    }

    /// Runs server and client of a program; both must succeed.
    #[track_caller]
    fn pair(program: &str, arguments: &[&str]) {
        if let Some(tools) = Self::find(program) {
            tools.run(program, arguments, [&[], &[]]);
        }
    }

    /// The same, with arguments that only the server or only the client has.
    #[track_caller]
    fn run(&self, program: &str, arguments: &[&str], sides: [&[&str]; 2]) {
        let port = free_port().to_string();
        let arguments = [&["-p", &port], arguments].concat();
        let mut server = self.command(program, &[&arguments[..], sides[0]].concat());
        let mut server = Server(server.stdout(Stdio::null()).spawn().expect("the server starts"));
        // The client gives up at once if the server does not listen yet.
        let client = loop {
            let all = [&arguments[..], sides[1], &["127.0.0.1"]].concat();
            let client = output(self.command(program, &all));
            let text = String::from_utf8_lossy(&client.stderr).into_owned();
            let has_ended = server.0.try_wait().expect("our child").is_some();
            if !text.contains("Couldn't connect") || has_ended {
                break client;
            }
            std::thread::sleep(Duration::from_millis(50));
        };
        let text = [client.stdout, client.stderr].concat();
        assert!(client.status.success(), "{program}: {}", String::from_utf8_lossy(&text));
        assert!(
            server.0.wait().expect("the server ends").success(),
            "{program}: the server failed"
        );
    }
}

/// A port that no other test gets, below those that the kernel gives to others.
fn free_port() -> u16 {
    let first = 20_000 + (std::process::id() % 10_000) as u16;
    let is_free = |port: &u16| TcpListener::bind(("127.0.0.1", *port)).is_ok();
    (first..30_000).chain(20_000..first).find(is_free).expect("a port")
}

fn output(mut command: impl std::borrow::BorrowMut<Command>) -> Output {
    command.borrow_mut().output().expect("the program runs")
}

#[test]
fn ibv_devinfo_describes_the_device() {
    let Some(tools) = Tools::find("ibv_devinfo") else { return };
    let output = output(tools.command("ibv_devinfo", &["-v"]));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    for expected in ["softrdma0", "soft-rdma", "PORT_ACTIVE", "InfiniBand"] {
        assert!(text.contains(expected), "{expected} is missing in {text}");
    }
}

macro_rules! pairs {
    ($($name:ident: $program:literal $arguments:literal;)*) => {$(
        #[test]
        fn $name() {
            Tools::pair($program, &$arguments.split(' ').collect::<Vec<_>>());
        }
    )*};
}

pairs! {
    ibv_rc_pingpong_checks_its_buffers: "ibv_rc_pingpong" "-c";
    ibv_rc_pingpong_sleeps_on_events: "ibv_rc_pingpong" "-c -e -n 200";
    ibv_srq_pingpong_runs: "ibv_srq_pingpong" "-n 200";
    ibv_ud_pingpong_runs: "ibv_ud_pingpong" "-n 200";
    ib_write_bw_runs: "ib_write_bw" "-n 500";
    ib_read_bw_runs: "ib_read_bw" "-n 500";
    ib_send_bw_runs: "ib_send_bw" "-n 500";
    ib_atomic_bw_runs: "ib_atomic_bw" "-n 500";
}

/// perftest built with `--enable-hl` registers Gaudi memory by dma-buf; Debian's is built without.
fn on_gaudi_memory(program: &str) {
    let Some(tools) = Tools::find(program) else { return };
    let help = output(tools.command(program, &["--help"])).stdout;
    if !String::from_utf8_lossy(&help).contains("--use_hl") {
        eprintln!("skipped: this {program} is built without Gaudi (configure --enable-hl)");
        return;
    }
    let card = |index| format!("--use_hl={}", soft_gaudi::asic::bus_id(index));
    tools.run(program, &["-n", "500"], [&[&card(0)], &[&card(1)]]);
    let counter = |name: &str| {
        let path = format!("/sys/class/infiniband/softrdma0/ports/1/hw_counters/{name}");
        let mut cat = Command::new("cat");
        cat.arg(path).env("LD_PRELOAD", tools.library.join("libibverbs.so.1"));
        let text = output(cat.env("SOFT_RDMA_DIR", &tools.folder)).stdout;
        String::from_utf8_lossy(&text).trim().parse::<u64>().expect("a number")
    };
    // From card to card, each byte copied once.
    assert_eq!((counter("direct_bytes"), counter("stream_bytes")), (500 * 65536, 0));
}

#[test]
fn ib_write_bw_writes_gaudi_memory() {
    on_gaudi_memory("ib_write_bw");
}

#[test]
fn ib_read_bw_reads_gaudi_memory() {
    on_gaudi_memory("ib_read_bw");
}

#[test]
fn the_python_lines_of_the_readme_name_the_devices() {
    let Some(tools) = Tools::find("python3") else { return };
    let readme = include_str!("../README.md");
    let (_, from) = readme.split_once("```python\n").expect("lines of Python");
    let (script, _) = from.split_once("```").expect("their end");
    let mut python = tools.command("python3", &["-c", script]);
    let output = python.env("SOFT_RDMA_DEVICES", "2").output().expect("python3 starts");
    let text = String::from_utf8_lossy(&output.stdout);
    assert_eq!(text.trim(), "softrdma0 softrdma1", "{output:?}");
}
