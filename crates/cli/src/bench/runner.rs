//! One operation between two memories: `ucp-check pair` moves, compares and times messages of all sizes.

use std::hint::black_box;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Measure;
use super::results::Row;
use crate::Context;
use crate::explain::Folder;
use crate::failure::Failure;
use crate::tuning::STAGING;

/// How often the end of the run, and Ctrl-C, are looked for.
const POLL: Duration = Duration::from_millis(20);

/// How `ucp-check` is started.
pub(super) struct Runner<'a> {
    program: PathBuf,
    plugins: PathBuf,
    options: &'a Measure,
    folder: Folder,
}

impl<'a> Runner<'a> {
    pub(super) fn new(context: &Context, options: &'a Measure) -> Result<Self, Failure> {
        Ok(Self {
            program: context.prefix.program("ucp-check")?,
            plugins: context.prefix.plugins()?,
            options,
            folder: Folder::new("bench")?,
        })
    }

    /// All sizes; `None` if `interrupted` says so before the end.
    pub(super) fn run(
        &self,
        op: &str,
        pair: &str,
        interrupted: fn() -> bool,
    ) -> Result<Option<Vec<Row>>, Failure> {
        let json = self.folder.path().join("rows");
        let said = self.folder.path().join("said");
        let unable = |error: std::io::Error| {
            Failure::unable(format!("cannot run ucp-check: {error}"), "install all of ucx-gaudi")
        };
        let output = std::fs::File::create(&said).map_err(unable)?;
        let sizes: Vec<String> = self.options.sizes.iter().map(usize::to_string).collect();
        let mut command = Command::new(&self.program);
        command.args(["pair", "--plain", "--one-way", "--ops", op, "--mem", pair]);
        command.args([
            "--sizes",
            &sizes.join(","),
            "--iters",
            &self.options.iterations.to_string(),
        ]);
        command.arg("--json").arg(&json).env("UCX_PLUGIN_PATH", &self.plugins);
        if let Some(ucx) = &self.options.ucx {
            command.arg("--ucx").arg(ucx);
        }
        if self.options.tuned {
            let unset = STAGING.iter().filter(|(name, _)| std::env::var_os(name).is_none());
            command.envs(unset.copied());
        }
        // A group of its own: Ctrl-C comes to us, who end all its processes.
        command.process_group(0).stdin(Stdio::null());
        command.stderr(output.try_clone().map_err(unable)?).stdout(output);
        let mut child = Group(command.spawn().map_err(unable)?);
        let ended = loop {
            if let Some(ended) = child.0.try_wait().map_err(unable)? {
                break ended;
            }
            if interrupted() {
                return Ok(None);
            }
            std::thread::sleep(POLL);
        };
        let text = std::fs::read(&said).unwrap_or_default();
        let rows = std::fs::read_to_string(&json).unwrap_or_default();
        let _ = std::fs::remove_file(&json);
        // Wrong bytes are a result; a run that broke off has written none.
        match serde_json::from_str(&rows) {
            Ok(rows) => Ok(Some(rows)),
            Err(_) if interrupted() => Ok(None),
            Err(_) => Err(broke_off(op, pair, ended, &String::from_utf8_lossy(&text))),
        }
    }
}

/// What `ucp-check` said is the reason: an error of the plugin, of UCX, or its own.
fn broke_off(op: &str, pair: &str, ended: std::process::ExitStatus, said: &str) -> Failure {
    let words = ["ucx-gaudi ERROR", "ucx-gaudi WARN", "UCX  ERROR", "FAIL", "ucp-check: "];
    let reason = words.iter().find_map(|word| said.lines().find(|line| line.contains(word)));
    let reason = reason.or(said.lines().last()).unwrap_or("without a word").trim();
    Failure::unable(
        format!("{op} {pair} did not run ({ended}): {reason}"),
        "gaudi:gaudi needs two free cards (--soft=2 has them); `ucx-gaudi doctor` says what is missing, \
         and --ucx DIR names a UCX",
    )
}

/// A child and its process group, which end with this.
struct Group(Child);

impl Drop for Group {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            // SAFETY: a number; the child is not waited for yet, so its id is that of its group still.
            unsafe { libc::kill(-self.0.id().cast_signed(), libc::SIGKILL) };
            let _ = self.0.wait();
        }
    }
}

/// GB/s of copies of this size by the CPU, over more memory than caches hold.
pub(super) fn memcpy(size: usize) -> f64 {
    const SET: usize = 64 << 20;
    let size = size.max(1);
    let (from, mut to) = (vec![1u8; SET.max(size)], vec![0u8; SET.max(size)]);
    let mut best = 0f64;
    for _ in 0..3 {
        let start = Instant::now();
        for (to, from) in to.chunks_exact_mut(size).zip(from.chunks_exact(size)) {
            black_box(to).copy_from_slice(black_box(from));
        }
        let bytes = from.len() / size * size;
        best = best.max(bytes as f64 / start.elapsed().as_secs_f64() / 1e9);
    }
    best
}
