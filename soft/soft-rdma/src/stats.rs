//! Counters of this process. With `SOFT_RDMA_STATS=FILE` they are appended to the file when the
//! process ends, as one line of JSON.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::AtomicU64;

macro_rules! counters {
    ($($(#[doc = $doc:literal])* $name:ident),* $(,)?) => {
        /// What this process's HCAs did.
        #[derive(Default)]
        pub(crate) struct Stats {
            $($(#[doc = $doc])* pub(crate) $name: AtomicU64,)*
        }

        impl Stats {
            /// All counters zero.
            pub(crate) const fn new() -> Self {
                Self { $($name: AtomicU64::new(0)),* }
            }

            /// Name and value of every counter.
            pub(crate) fn read(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.load(std::sync::atomic::Ordering::Relaxed))),*]
            }
        }
    };
}

counters! {
    /// Requests sent by reliable connections, repeated ones included.
    requests,
    /// Bytes that went from region to region in one copy.
    direct_bytes,
    /// Copies by which they went.
    direct_copies,
    /// Bytes that travelled inside a stream: inline and short messages, and all between hosts.
    stream_bytes,
    /// Atomics executed for peers.
    atomics,
    /// Datagrams sent.
    datagrams,
    /// Datagrams that were dropped.
    datagrams_lost,
    /// Requests refused because the receiver had no buffer.
    rnr_naks,
    /// Requests sent again because they were not accepted.
    retries,
    /// Requests of peers that were not accepted.
    dropped,
    /// Requests of peers refused for key, range or access right.
    access_errors,
    /// Regions registered by address.
    host_regions,
    /// Regions registered by dma-buf.
    dmabuf_regions,
}

/// The counters of this process.
pub(crate) static STATS: Stats = Stats::new();

/// Appends a line with all counters to the configured file.
pub(crate) fn write() {
    let Some(path) = &crate::config::get().stats else { return };
    let counters: Vec<_> =
        STATS.read().iter().map(|(name, value)| format!("\"{name}\":{value}")).collect();
    let line = format!("{{\"pid\":{},{}}}\n", std::process::id(), counters.join(","));
    if let Err(error) = append(path, &line) {
        eprintln!("soft-rdma: {}: {error}", path.display());
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    // Another user may have planted a link in a folder where they can write.
    options.append(true).create(true).custom_flags(libc::O_NOFOLLOW);
    options.open(path)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_appended_to_and_a_link_is_not_followed() {
        let folder = std::env::temp_dir().join(format!("soft-rdma-stats-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let (file, link) = (folder.join("file"), folder.join("link"));
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let appended = ["one\n", "two\n"].map(|line| append(&file, line).is_ok());
        let followed = append(&link, "three\n").is_ok();
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((appended, followed, text.as_str()), ([true; 2], false, "one\ntwo\n"));
    }
}
