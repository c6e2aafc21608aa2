//! Settings of UCX that suit Gaudi memory: what `ucx-gaudi run --tuned`, `cargo xtask env` and benches set.

/// For Gaudi memory that is staged through host memory between processes: streams, and puts and gets that UCX emulates,
/// use larger segments (`docs/performance.md`). The segment of TCP is one that a peer with UCX's own settings accepts.
pub const STAGING: &[(&str, &str)] = &[
    ("UCX_SYSV_SEG_SIZE", "32832"),
    ("UCX_POSIX_SEG_SIZE", "32832"),
    ("UCX_TCP_TX_SEG_SIZE", "65536"),
];
