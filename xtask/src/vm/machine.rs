//! The virtual machine: QEMU, and a `pci-gaudi` for each card.

use std::fs;
use std::io::{BufRead, BufReader, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use comfy_table::Table;

use super::Folders;
use super::packages::Debian;
use super::sets::{END, Outcome, Set, Verdict, begun};
use crate::repo::Repo;
use crate::units::seconds;

/// Memory of the guest: the driver takes a third of a gigabyte per card.
const MEMORY: &str = "2G";

/// QEMU interprets the guest, and each CPU feature costs time; NIXL's UCX needs SSE 4.1.
const TCG: &[&str] = &["-accel", "tcg,thread=multi", "-cpu", "Nehalem"];
const KVM: &[&str] = &["-accel", "kvm", "-cpu", "host"];

/// Whether the kernel can run guests on the CPU. Some kernels offer KVM without hardware support; QEMU then stops at
/// instructions that are not emulated.
fn kvm_works() -> bool {
    let processor = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = processor.lines().find_map(|line| line.strip_prefix("flags"));
    let helps = |flags: &str| flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm");
    flags.is_some_and(helps) && fs::File::options().read(true).write(true).open("/dev/kvm").is_ok()
}

/// The parts of a machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts<'a> {
    pub(super) repo: &'a Repo,
    pub(super) folders: &'a Folders,
    pub(super) debian: &'a Debian,
    /// The program `pci-gaudi`.
    pub(super) card: &'a Path,
    /// Interpret the guest even if KVM works.
    pub(super) tcg: bool,
}

/// A process that is killed when this value is dropped.
struct Guard(Child);

impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The results of checks, for the table at the end.
#[derive(Debug, Default)]
pub(super) struct Results {
    rows: Vec<[String; 4]>,
    times: Vec<(String, Duration)>,
    failed: usize,
}

impl Results {
    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    fn add(&mut self, set: &str, check: &str, verdict: Verdict, guest: String) {
        let word = match verdict {
            Verdict::Ok => "ok",
            Verdict::Failed => "FAILED",
        };
        self.failed += usize::from(verdict == Verdict::Failed);
        eprintln!("  {word} {check} ({guest})");
        self.rows.push([set.to_owned(), check.to_owned(), word.to_owned(), guest]);
    }

    pub(super) fn print(&self) {
        let mut table = Table::new();
        table.load_preset(comfy_table::presets::ASCII_MARKDOWN);
        table.set_header(["set", "check", "result", "in the guest"]);
        table.add_rows(&self.rows);
        println!("{table}\n");
        for (what, time) in &self.times {
            println!("{what}: {}", seconds(*time));
        }
        let sum = self.times.iter().map(|(_, time)| *time).sum();
        println!("{} checks, {} failed, {}", self.rows.len(), self.failed, seconds(sum));
    }
}

/// Boots one machine for all sets that share it, and runs them.
pub(super) fn test(
    parts: &Parts<'_>,
    sets: &[&Set],
    trap_all: bool,
    results: &mut Results,
) -> Result<()> {
    let Parts { repo, folders, debian, .. } = parts;
    let Some(kind) = sets.first().map(|set| set.machine) else { return Ok(()) };
    let logs = folders.logs().join(kind.name);
    let _ = fs::remove_dir_all(&logs);
    let options: &[&str] = if trap_all { &["--trap-all"] } else { &[] };
    let machine = Machine::new(parts, &logs, kind.cards, options)?;
    let names: Vec<_> = sets.iter().map(|set| set.name).collect();
    eprintln!("machine {} on Linux {} (logs in {})", kind.name, debian.kernel, repo.shown(&logs));
    let limit: Duration = sets.iter().map(|set| set.limit).sum();
    let began = Instant::now();
    let mut qemu = machine.qemu(&format!("VM_SETS={}", names.join(",")));
    let mut qemu =
        Guard(qemu.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().context("cannot run QEMU")?);
    let lines = lines_of(qemu.0.stdout.take().context("QEMU has no output")?);

    let mut said = fs::File::create(logs.join("output.log"))?;
    let (mut set, mut since, mut ended) = (format!("boot of {}", kind.name), began, false);
    loop {
        let line = match lines.recv_timeout(limit.saturating_sub(began.elapsed())) {
            Ok(line) => line,
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                eprintln!("stopped after {}", seconds(limit));
                break;
            }
        };
        writeln!(said, "{line}")?;
        ended |= line == END;
        if let Some(next) = begun(&line) {
            let now = Instant::now();
            results.times.push((std::mem::replace(&mut set, next.to_owned()), now - since));
            since = now;
            eprintln!("set {set} …");
        } else if let Some(Outcome { verdict, name, milliseconds }) = Outcome::parse(&line) {
            results.add(&set, name, verdict, format!("{milliseconds} ms"));
        } else if line != END {
            eprintln!("    {line}");
        }
    }
    drop(qemu);
    results.times.push((set.clone(), since.elapsed()));
    if !ended {
        let words = "the guest did not come to its end; its kernel's last words are in kernel.log";
        results.add(&set, "end", Verdict::Failed, words.to_owned());
    }
    for unexpected in machine.end()? {
        // A card that traps everything lists every register that the model does not know.
        if trap_all {
            eprintln!("  {unexpected}");
        } else {
            results.add(kind.name, "unexpected access", Verdict::Failed, unexpected);
        }
    }
    Ok(())
}

/// A shell inside, on this terminal. Input from elsewhere goes to that shell, and then the machine ends.
pub(super) fn shell(parts: &Parts<'_>, cards: u32) -> Result<()> {
    let Parts { repo, folders, debian, .. } = parts;
    let logs = folders.logs().join("shell");
    let _ = fs::remove_dir_all(&logs);
    let machine = Machine::new(parts, &logs, cards, &[])?;
    eprintln!("booting Linux {} (logs in {}) …", debian.kernel, repo.shown(&logs));
    let mut qemu = machine.qemu("");
    if !std::io::stdin().is_terminal() {
        qemu.stdin(Stdio::piped()).stdout(Stdio::piped());
    }
    let mut qemu = Guard(qemu.spawn().context("cannot run QEMU")?);
    if let (Some(input), Some(output)) = (qemu.0.stdin.take(), qemu.0.stdout.take()) {
        relay(input, lines_of(output))?;
    }
    let status = qemu.0.wait()?;
    if !status.success() {
        bail!("QEMU ended with {status}");
    }
    Ok(())
}

/// The guest loses input that arrives before its shell runs.
fn relay(mut input: ChildStdin, lines: mpsc::Receiver<String>) -> Result<()> {
    let mut out = std::io::stdout();
    for line in &lines {
        writeln!(out, "{line}")?;
        if line.starts_with("A shell inside") {
            break;
        }
    }
    thread::spawn(move || {
        let copied = std::io::copy(&mut std::io::stdin(), &mut input);
        let _ = copied.and_then(|_| input.write_all(b"\npoweroff -f\n"));
    });
    for line in lines {
        writeln!(out, "{line}")?;
    }
    Ok(())
}

fn lines_of(output: std::process::ChildStdout) -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}

/// The unexpected accesses that a card lists at the end of its log.
fn unexpected(log: &str) -> Vec<&str> {
    let mut lines = log.lines().skip_while(|line| !line.contains(" kinds of unexpected"));
    match lines.next() {
        Some(_) => lines.collect(),
        None => vec!["no summary: it did not end with QEMU"],
    }
}

/// Cards that wait for a QEMU to connect.
struct Machine<'a> {
    debian: &'a Debian,
    accelerator: &'static [&'static str],
    initramfs: PathBuf,
    logs: PathBuf,
    sockets: Vec<PathBuf>,
    _folder: tempfile::TempDir,
    cards: Vec<Guard>,
}

impl<'a> Machine<'a> {
    fn new(parts: &Parts<'a>, logs: &Path, cards: u32, options: &[&str]) -> Result<Self> {
        let Parts { folders, debian, card, tcg, .. } = *parts;
        fs::create_dir_all(logs)?;
        // A short path, however long the checkout's is.
        let folder = tempfile::tempdir()?;
        let mut running = Vec::new();
        let mut sockets = Vec::new();
        for n in 0..cards {
            let socket = folder.path().join(format!("card{n}"));
            let log = fs::File::create(logs.join(format!("card{n}.log")))?;
            let mut command = Command::new(card);
            command.arg("--socket").arg(&socket).args(["--module-id", &n.to_string()]);
            let child = command.args(options).stdin(Stdio::null()).stderr(log).spawn();
            running.push(Guard(child.with_context(|| format!("cannot run {}", card.display()))?));
            sockets.push(socket);
        }
        let began = Instant::now();
        while let Some(missing) = sockets.iter().find(|socket| !socket.exists()) {
            if began.elapsed() > Duration::from_secs(20) {
                bail!("no card listens on {}; see its log", missing.display());
            }
            thread::sleep(Duration::from_millis(10));
        }
        let initramfs = folders.initramfs();
        let logs = logs.to_owned();
        let accelerator = if tcg || !kvm_works() { TCG } else { KVM };
        Ok(Self { debian, accelerator, initramfs, logs, sockets, _folder: folder, cards: running })
    }

    /// Waits for the cards, which end together with their QEMU. Returns the unexpected accesses, one line for each
    /// kind.
    fn end(mut self) -> Result<Vec<String>> {
        let mut lines = Vec::new();
        for (n, card) in self.cards.iter_mut().enumerate() {
            let began = Instant::now();
            while card.0.try_wait()?.is_none() && began.elapsed() < Duration::from_secs(5) {
                thread::sleep(Duration::from_millis(20));
            }
            let log = fs::read_to_string(self.logs.join(format!("card{n}.log")))?;
            lines.extend(unexpected(&log).into_iter().map(|line| format!("card {n}: {line}")));
        }
        Ok(lines)
    }

    fn qemu(&self, settings: &str) -> Command {
        let mut qemu = self.debian.qemu();
        qemu.args(["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]);
        qemu.args(["-M", "q35,memory-backend=memory"]).args(self.accelerator);
        qemu.args(["-smp", "2", "-m", MEMORY, "-object"]);
        // The cards access the guest's memory, so that memory must be shared.
        qemu.arg(format!("memory-backend-memfd,id=memory,size={MEMORY},share=on"));
        for (n, socket) in self.sockets.iter().enumerate() {
            let device = serde_json::json!({
                "driver": "vfio-user-pci",
                "bus": format!("port{n}"),
                "socket": { "type": "unix", "path": socket },
            });
            let port = format!("pcie-root-port,id=port{n},chassis={},slot={}", n + 1, n + 1);
            qemu.args(["-device", &port, "-device", &device.to_string()]);
        }
        // Ctrl-C and the like go to the programs inside.
        qemu.args(["-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"]);
        // The kernel's messages, recordings of the driver's calls, and what checks printed.
        for log in ["kernel.log", "trace.jsonl", "checks.log"] {
            qemu.arg("-serial").arg(format!("file:{}", self.logs.join(log).display()));
        }
        qemu.arg("-kernel").arg(self.debian.vmlinuz()).arg("-initrd").arg(&self.initramfs);
        qemu.arg("-append").arg(format!("console=ttyS1 panic=-1 loglevel=7 {settings}"));
        qemu
    }
}

#[cfg(test)]
mod tests {
    use super::unexpected;

    #[test]
    fn only_a_log_with_an_empty_summary_has_nothing_unexpected() {
        let clean = "[ 0.1] reset by QEMU\n[ 9.0] 0 kinds of unexpected accesses\n";
        assert!(unexpected(clean).is_empty());
        let access = "[ 9.0]   3 x write to CFG 0x10";
        let log = format!("[ 0.1] begin\n[ 9.0] 1 kinds of unexpected accesses\n{access}\n");
        assert_eq!(unexpected(&log), [access]);
        assert_eq!(unexpected("[ 0.1] reset by QEMU\n").len(), 1, "killed");
    }
}
