//! Finds the page of a process and copies it.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{FileType, SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::Snapshot;
use crate::page::Malformed;

/// Name of the memory file, as `/proc/PID/fd` shows it after `/memfd:`.
const FILE_NAME: &str = "ucx-gaudi-stats";
/// Nothing larger than this is a page.
const LARGEST: usize = 1 << 20;

/// Why the counters of a process could not be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// There is no such process, or it ended just now.
    #[error("process {0} does not exist (any more)")]
    NoProcess(u32),
    /// The process belongs to another user.
    #[error("process {0} may not be looked into: be its user, or root")]
    NotAllowed(u32),
    /// The process has no page.
    #[error("process {0} has opened no Gaudi with ucx-gaudi")]
    NoPage(u32),
    /// The process has only inherited its parent's page.
    #[error("process {pid} was forked from process {owner}, which opened the Gaudi: ask for that")]
    Inherited {
        /// The process that was asked for.
        pid: u32,
        /// The process that made the page.
        owner: u32,
    },
    /// A file has the page's name, but is no page that we understand.
    #[error("the statistics of process {pid} cannot be understood: {source}")]
    Malformed {
        /// The process that was asked for.
        pid: u32,
        /// What is wrong.
        source: Malformed,
    },
    /// A system call failed.
    #[error("the statistics of process {pid} cannot be read: {source}")]
    System {
        /// The process that was asked for.
        pid: u32,
        /// The system's error.
        source: io::Error,
    },
}

/// The counters of a running process.
///
/// Each counter is exact; together they are no snapshot of one moment, because the process keeps running. The caller
/// must be the same user, or root.
pub fn read(pid: u32) -> Result<Snapshot, ReadError> {
    let system = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => ReadError::NoProcess(pid),
        Some(libc::EACCES | libc::EPERM) => ReadError::NotAllowed(pid),
        _ => ReadError::System { pid, source },
    };
    let mut problem = ReadError::NoPage(pid);
    let process = pid.to_string();
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).map_err(system)? {
        let path = entry.map_err(system)?.path();
        // The process may close the descriptor before we read the link.
        let Ok(target) = fs::read_link(&path) else { continue };
        let name = target.to_string_lossy();
        let name = name.strip_prefix("/memfd:").and_then(|name| name.split(" (deleted)").next());
        if name != Some(FILE_NAME) {
            continue;
        }
        let file = match File::options().read(true).custom_flags(libc::O_NONBLOCK).open(&path) {
            Ok(file) => file,
            Err(error) => {
                problem = system(error);
                continue;
            }
        };
        match copy(&file).map_err(system)?.and_then(|bytes| Snapshot::parse(&bytes)) {
            Ok(snapshot) if is_of(&snapshot, &process) => return Ok(snapshot),
            Ok(snapshot) => problem = ReadError::Inherited { pid, owner: snapshot.pid },
            Err(source) => problem = ReadError::Malformed { pid, source },
        }
    }
    Err(problem)
}

/// Whether the process made this page itself. Compares the pid that the process has in its own namespace. Pids can be
/// equal in different namespaces, so it compares the start time, too.
fn is_of(snapshot: &Snapshot, process: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let own_pid = line.and_then(|pids| pids.split_whitespace().next_back()?.parse().ok());
    let same_pid = own_pid.is_none_or(|own: u32| own == snapshot.pid);
    let same_start = start_time(process).is_none_or(|start| start == snapshot.start_time);
    same_pid && same_start
}

/// Whether the process that started at this time still runs. A zombie does not.
pub fn is_running(pid: u32, start: u64) -> bool {
    let line = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = line.rsplit_once(") ").and_then(|(_, fields)| fields.chars().next());
    !matches!(state, None | Some('Z' | 'X')) && start_time_of(&line) == Some(start)
}

/// When a process started, from its line in `/proc`.
fn start_time(process: &str) -> Option<u64> {
    let line = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    start_time_of(&line)
}

fn start_time_of(line: &str) -> Option<u64> {
    // The second field is the program's name in brackets; the name may contain brackets, too.
    let (_, fields) = line.rsplit_once(')')?;
    fields.split_whitespace().nth(19)?.parse().ok()
}

/// Copies a page number by number, while its owner changes it.
fn copy(file: &File) -> io::Result<Result<Vec<u8>, Malformed>> {
    let about = fstat(file)?;
    let len = usize::try_from(about.st_size).unwrap_or(usize::MAX);
    let is_file = FileType::from_raw_mode(about.st_mode) == FileType::RegularFile;
    // Without the seal the owner could shrink the file, and our next read would be a SIGBUS.
    let sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
    if !is_file || !sealed || len == 0 || len > LARGEST || !len.is_multiple_of(8) {
        return Ok(Err(Malformed::NotSealed));
    }
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe { mmap(ptr::null_mut(), len, ProtFlags::READ, MapFlags::SHARED, file, 0)? };
    let words = (0..len / 8).map(|word| {
        // SAFETY: inside the mapping, which is aligned and, sealed, as long as the file; changed by
        // its owner only through atomics, and only read here.
        unsafe { AtomicU64::from_ptr(at.cast::<u64>().add(word)) }.load(Ordering::Acquire)
    });
    let bytes = words.flat_map(u64::to_ne_bytes).collect();
    // SAFETY: our own mapping, and nothing refers into it any more.
    unsafe { munmap(at, len)? };
    Ok(Ok(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_start_time_is_found_behind_any_program_name() {
        let fields = (3..30).map(|field| field.to_string()).collect::<Vec<_>>().join(" ");
        for name in ["cat", "a b", "a) b", ")))"] {
            assert_eq!(start_time_of(&format!("12 ({name}) {fields}")), Some(22), "{name}");
        }
        assert_eq!(start_time_of("12 (cat) S 1"), None);
        let (pid, start) = (std::process::id(), start_time("self").unwrap());
        assert!(is_running(pid, start) && !is_running(pid, start + 1) && !is_running(u32::MAX, 0));
    }
}
