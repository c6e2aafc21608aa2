//! One operation between two memories: `ucp-check pair` moves, compares and times messages of all sizes.

use std::hint::black_box;
use std::time::Instant;

use super::Measure;
use super::results::Row;
use super::two_hosts;
use crate::Context;
use crate::failure::Failure;
use crate::tuning::STAGING;
use crate::ucp_check::UcpCheck;

/// The parameters of the measurement.
pub(super) struct Runner<'a> {
    checker: UcpCheck,
    options: &'a Measure,
}

impl<'a> Runner<'a> {
    pub(super) fn new(context: &Context, options: &'a Measure) -> Result<Self, Failure> {
        Ok(Self { checker: UcpCheck::new(context, "bench")?, options })
    }

    /// Measures all sizes; `None` if Ctrl-C came before the end.
    pub(super) fn run(&self, op: &str, pair: &str) -> Result<Option<Vec<Row>>, Failure> {
        let Measure { sizes, iterations, ucx, tuned, peer, .. } = self.options;
        let json = self.checker.folder().join("rows");
        let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
        let mut command = self.checker.pair(op, pair, ucx.as_deref());
        command.args(["--sizes", &sizes.join(","), "--iters", &iterations.to_string()]);
        command.arg("--json").arg(&json);
        if *tuned {
            let unset = STAGING.iter().filter(|(name, _)| std::env::var_os(name).is_none());
            command.envs(unset.copied());
        }
        if let Some(peer) = peer {
            command.args(["--remote", "0"]).stdin(two_hosts::connect(peer)?);
        }
        let Some(ended) = self.checker.run(command)? else { return Ok(None) };
        let rows = std::fs::read_to_string(&json).unwrap_or_default();
        let _ = std::fs::remove_file(&json);
        // Wrong bytes are a result, too; an aborted run has written no rows.
        serde_json::from_str(&rows).map(Some).map_err(|_| {
            let what = format!("{op} {pair}");
            let failure = self.checker.explain_failure(&what, &ended, ucx.as_deref());
            match peer {
                Some(peer) if failure.what.contains("is gone") => {
                    Failure { remedy: format!("`bench serve` on {peer} has said why"), ..failure }
                }
                _ => failure,
            }
        })
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
