//! A record of every call into the driver library, as lines of JSON (`docs/trace.md`).
//!
//! [`start`] turns it on for the process; `Symbols` calls `record` after each call. When off, it costs one load
//! per call. When on, a line is formatted without a lock and appended to one buffer of the process. The buffer
//! is written at once, except for copies that succeeded: those are written by the first later call or poll that
//! finds the buffer full or a tenth of a second old. So after a hang or a kill, the file lacks at most those.

use std::cell::Cell;
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;

use crate::ProcessInstance;
use crate::error::Outcome;

/// Version of the format, in the first line of a record.
const FORMAT: u32 = 1;
/// The buffer is written out when it has this many bytes, or when its first line is this old.
const BUFFERED: usize = 64 << 10;
const OLDEST: Duration = Duration::from_millis(100);

/// Where lines go; null: tracing is off. Never freed: another thread may be using it.
static SINK: AtomicPtr<Sink> = AtomicPtr::new(ptr::null_mut());

struct Sink {
    pattern: String,
    began: Instant,
    pid: u32,
    process: ProcessInstance,
    state: Mutex<State>,
}

struct State {
    file: File,
    buffer: Vec<u8>,
    /// When the first line of the buffer was added.
    since: Instant,
}

/// Begins to record the driver calls of this process in a file, to which it appends. In `pattern`, `%p`
/// is the process id and `%h` the host name. Returns the file's name.
///
/// A second call has no effect: the first file stays. A forked child begins a record of its own,
/// with its first call. Refused in setuid programs, whose user must not choose a file to write; and for a file that is
/// a link, has several names or belongs to another user.
pub fn start(pattern: &str) -> io::Result<PathBuf> {
    if crate::library::is_setuid() {
        return Err(io::Error::from(io::ErrorKind::PermissionDenied));
    }
    if sink().is_some() {
        return Ok(file_name(pattern));
    }
    let path = begin_record(pattern, ptr::null_mut())?;
    // SAFETY: the handler takes no arguments and may run at any time.
    unsafe { libc::atexit(flush_at_exit) };
    Ok(path)
}

/// Writes out what is buffered. A forked child that has not called the driver has nothing to write.
pub fn flush() {
    if let Some(sink) = own_sink() {
        sink.state.lock().unwrap_or_else(PoisonError::into_inner).write_out();
    }
}

/// Writes the buffer if it is old, during a call that is not recorded. Such calls are frequent, so none
/// waits for the lock: a thread that holds it is recording, and writes the buffer itself.
pub(crate) fn flush_old(now: Instant) {
    let Some(sink) = own_sink() else { return };
    let Ok(mut state) = sink.state.try_lock() else { return };
    if !state.buffer.is_empty() && state.is_old(now) {
        state.write_out();
    }
}

/// The record that this process has begun, if it has. A forked child must not touch its parent's lock.
fn own_sink() -> Option<&'static Sink> {
    // SAFETY: null, or never freed.
    let sink = unsafe { SINK.load(Ordering::Acquire).as_ref() };
    sink.filter(|sink| sink.process == ProcessInstance::current())
}

extern "C" fn flush_at_exit() {
    flush();
}

fn begin_record(pattern: &str, instead_of: *mut Sink) -> io::Result<PathBuf> {
    let path = file_name(pattern);
    let mut file = open_to_append(&path)?;
    let began = Instant::now();
    let mut line = String::new();
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (pid, program) = (std::process::id(), std::env::args_os().next().unwrap_or_default());
    let _ = write!(line, "{{\"trace\":{FORMAT},\"pid\":{pid},\"unix\":{},", unix.as_secs_f64());
    line.push_str("\"program\":");
    write_text(&mut line, &program.to_string_lossy());
    line.push_str(",\"kernel\":");
    write_text(&mut line, &kernel_says("osrelease"));
    line.push_str("}\n");
    file.write_all(line.as_bytes())?;
    let process = ProcessInstance::current();
    let state = Mutex::new(State { file, buffer: Vec::new(), since: began });
    let sink = Sink { pattern: pattern.to_owned(), began, pid, process, state };
    let made = Box::into_raw(Box::new(sink));
    // Another thread may have begun one meanwhile; ours is then leaked.
    let _ = SINK.compare_exchange(instead_of, made, Ordering::AcqRel, Ordering::Acquire);
    Ok(path)
}

/// Opens or creates the file of a record. Another user who may write to its folder may have put something
/// else under its name: a link to a file of ours, a second name of one, a pipe without a reader.
fn open_to_append(path: &Path) -> io::Result<File> {
    // Links there, such as /dev/stderr, are the system's.
    if path.parent() == Some(Path::new("/dev")) {
        return OpenOptions::new().append(true).open(path);
    }
    // A new one is ours, also where the file system reports another owner.
    match OpenOptions::new().append(true).create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made,
    }
    let refused = |why| Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = match OpenOptions::new().append(true).custom_flags(flags).open(path) {
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {
            return refused("it is a link: name the file itself");
        }
        opened => opened?,
    };
    let data = file.metadata()?;
    if data.uid() != rustix::process::geteuid().as_raw() {
        return refused(
            "it belongs to another user: name a file of your own, in a folder of your own",
        );
    }
    if data.nlink() > 1 {
        return refused("it has a second name (hard link): name a new file");
    }
    // Only the open must not block.
    rustix::fs::fcntl_setfl(&file, OFlags::APPEND)?;
    Ok(file)
}

/// The record of this process. A forked child must not use its parent's: a thread that does not exist
/// in the child may hold the lock.
fn sink() -> Option<&'static Sink> {
    let pointer = SINK.load(Ordering::Acquire);
    // SAFETY: null, or never freed.
    let sink = unsafe { pointer.as_ref() }?;
    if sink.process == ProcessInstance::current() {
        return Some(sink);
    }
    if begin_record(&sink.pattern, pointer).is_err() {
        SINK.store(ptr::null_mut(), Ordering::Release);
    }
    // SAFETY: as above.
    unsafe { SINK.load(Ordering::Acquire).as_ref() }
}

impl State {
    fn is_old(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.since) >= OLDEST
    }

    fn write_out(&mut self) {
        if let Err(error) = self.file.write_all(&self.buffer) {
            // Such as a full disk. A failed recording must not disturb the calls, but the user who
            // asked for it must learn that it is incomplete.
            if !SINK.swap(ptr::null_mut(), Ordering::AcqRel).is_null() {
                let text = format!("ucx-gaudi: the recording of driver calls ended early: {error}");
                let _ = writeln!(io::stderr(), "{text}");
            }
        }
        self.buffer.clear();
    }
}

/// When a call begins; `None` if nothing is recorded.
#[inline]
pub(crate) fn begin() -> Option<Instant> {
    if SINK.load(Ordering::Relaxed).is_null() { None } else { Some(Instant::now()) }
}

/// Makes a call, and records it if tracing is on. `quiet`: there may be very many of them.
#[inline]
pub(crate) fn recorded<T: Written>(
    name: &str,
    quiet: bool,
    call: impl FnOnce() -> T,
    arguments: impl FnOnce(&mut Arguments),
) -> T {
    let began = begin();
    let ret = call();
    if let Some(began) = began {
        record(began, name, quiet, ret, arguments);
    }
    ret
}

/// Records a call that has just returned. `quiet`: there may be very many of them.
///
/// Leaves errno alone, which the caller has yet to read.
#[cold]
pub(crate) fn record(
    began: Instant,
    call: &str,
    quiet: bool,
    ret: impl Written,
    arguments: impl FnOnce(&mut Arguments),
) {
    let took = began.elapsed();
    // SAFETY: errno is this thread's own.
    let errno = unsafe { *libc::__errno_location() };
    let Some(sink) = sink() else {
        // A forked child could not begin its record.
        // SAFETY: as above.
        unsafe { *libc::__errno_location() = errno };
        return;
    };
    let at = began.saturating_duration_since(sink.began);
    let mut line = String::with_capacity(256);
    let (seconds, micros) = (at.as_secs(), at.subsec_micros());
    let (pid, tid) = (sink.pid, thread());
    let _ = write!(
        line,
        "{{\"t\":{seconds}.{micros:06},\"pid\":{pid},\"tid\":{tid},\"call\":\"{call}\",\"args\":{{"
    );
    let mut arguments_of_call = Arguments { line, is_first: true };
    arguments(&mut arguments_of_call);
    let mut line = arguments_of_call.line;
    line.push_str("},\"ret\":");
    ret.write(&mut line);
    let failure = ret.failure(errno);
    if let Some(errno) = failure {
        let _ = write!(line, ",\"errno\":{errno}");
    }
    let tenths = took.as_nanos() / 100;
    let _ = writeln!(line, ",\"us\":{}.{}}}", tenths / 10, tenths % 10);
    let mut state = sink.state.lock().unwrap_or_else(PoisonError::into_inner);
    let now = began + took;
    if state.buffer.is_empty() {
        state.since = now;
    }
    state.buffer.extend_from_slice(line.as_bytes());
    let is_due = state.buffer.len() >= BUFFERED || state.is_old(now);
    if !quiet || failure.is_some() || is_due {
        state.write_out();
    }
    drop(state);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// What a call returns, in a record.
pub(crate) trait Written: Outcome {
    fn write(self, line: &mut String);
}

impl Written for i32 {
    fn write(self, line: &mut String) {
        let _ = write!(line, "{self}");
    }
}

impl Written for u64 {
    fn write(self, line: &mut String) {
        write_number(line, self);
    }
}

/// The arguments of a call, written one after the other.
pub(crate) struct Arguments {
    line: String,
    is_first: bool,
}

impl Arguments {
    pub(crate) fn key(&mut self, name: &str) -> &mut String {
        if !std::mem::replace(&mut self.is_first, false) {
            self.line.push(',');
        }
        write_key(&mut self.line, name);
        &mut self.line
    }

    pub(crate) fn numbers<const N: usize>(&mut self, numbers: [(&str, u64); N]) {
        for (name, number) in numbers {
            write_number(self.key(name), number);
        }
    }
}

fn write_key(line: &mut String, name: &str) {
    line.push('"');
    line.push_str(name);
    line.push_str("\":");
}

/// Numbers by name.
pub(crate) fn write_object(line: &mut String, numbers: &[(&str, u64)]) {
    for (at, (name, number)) in numbers.iter().enumerate() {
        line.push(if at == 0 { '{' } else { ',' });
        write_key(line, name);
        write_number(line, *number);
    }
    line.push('}');
}

/// Addresses and handles are large and people read them in hexadecimal; JSON has only decimals.
pub(crate) fn write_number(line: &mut String, number: u64) {
    let _ = match u32::try_from(number) {
        Ok(number) => write!(line, "{number}"),
        Err(_) => write!(line, "\"{number:#x}\""),
    };
}

pub(crate) fn write_hex(line: &mut String, bytes: &[u8]) {
    let digit = |digit: u8| char::from(b"0123456789abcdef"[usize::from(digit & 0xf)]);
    line.push('"');
    line.extend(bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(*byte)]));
    line.push('"');
}

/// The thread's number, asked for once. A forked child's first thread has another one than its parent's.
fn thread() -> u32 {
    thread_local! {
        static THREAD: Cell<(Option<ProcessInstance>, u32)> = const { Cell::new((None, 0)) };
    }
    let process = Some(ProcessInstance::current());
    THREAD.with(|known| {
        if known.get().0 != process {
            // SAFETY: takes nothing, cannot fail.
            known.set((process, unsafe { libc::gettid() } as u32));
        }
        known.get().1
    })
}

pub(crate) fn write_text(line: &mut String, text: &str) {
    line.push('"');
    for c in text.chars() {
        match c {
            '"' | '\\' => {
                line.push('\\');
                line.push(c);
            }
            c if c.is_control() => {
                let _ = write!(line, "\\u{:04x}", c as u32);
            }
            c => line.push(c),
        }
    }
    line.push('"');
}

/// The file that [`start`] records in: `%p` and `%h` replaced.
pub fn file_name(pattern: &str) -> PathBuf {
    let pid = std::process::id().to_string();
    PathBuf::from(pattern.replace("%p", &pid).replace("%h", &kernel_says("hostname")))
}

fn kernel_says(what: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/sys/kernel/{what}")).unwrap_or_default();
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_numbers_are_json() {
        let mut line = String::new();
        write_text(&mut line, "a\"b\\c\n");
        assert_eq!(line, r#""a\"b\\c\u000a""#);
        line.clear();
        write_number(&mut line, 24);
        write_number(&mut line, 0x1001_6000_0000_0000);
        assert_eq!(line, "24\"0x1001600000000000\"");
        for number in [1 << 32, 0xabc_def0_1234, u64::MAX] {
            line.clear();
            write_number(&mut line, number);
            assert_eq!(line, format!("\"{number:#x}\""));
        }
        line.clear();
        write_hex(&mut line, &[0, 0x5a, 0xff]);
        assert_eq!(line, "\"005aff\"");
    }

    #[test]
    fn a_file_without_space_is_refused_at_the_start() {
        let error = start("/dev/full").expect_err("full");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(begin().is_none(), "nothing is recorded");
    }

    /// Another user of the folder could have put these there, to make a program of root write elsewhere.
    #[test]
    fn files_that_others_may_have_planted_are_refused_and_stay_as_they_are() {
        use std::os::unix::fs::{chown, symlink};
        let folder = std::env::temp_dir().join(format!("hl-thunk-planted-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let [victim, link, second_name, pipe, foreign] =
            ["victim", "link", "second", "pipe", "foreign"].map(|name| folder.join(name));
        std::fs::write(&victim, "secret").unwrap();
        symlink(&victim, &link).unwrap();
        symlink(folder.join("new"), folder.join("dangling")).unwrap();
        std::fs::hard_link(&victim, &second_name).unwrap();
        let mode = rustix::fs::Mode::RWXU;
        rustix::fs::mknodat(rustix::fs::CWD, &pipe, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        std::fs::write(&foreign, "").unwrap();
        let refusal = |path: &PathBuf| start(path.to_str().unwrap()).map_err(|e| e.to_string());
        let refused = [&link, &folder.join("dangling"), &second_name, &pipe].map(refusal);
        let of_another = chown(&foreign, Some(1), None).map(|()| refusal(&foreign));
        let left = std::fs::read_to_string(&victim).unwrap();
        let made = folder.join("new").exists();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!((left.as_str(), made), ("secret", false));
        let link = "it is a link: name the file itself";
        let names = "it has a second name (hard link): name a new file";
        let wanted = [link, link, names, "No such device or address (os error 6)"];
        assert_eq!(refused.map(Result::unwrap_err), wanted);
        match of_another {
            Ok(refused) => assert_eq!(
                refused.unwrap_err(),
                "it belongs to another user: name a file of your own, in a folder of your own"
            ),
            Err(_) => println!("skipped: a file of another user, which only root can make"),
        }
    }

    #[test]
    fn an_own_file_and_a_device_are_appended_to() {
        let file = std::env::temp_dir().join(format!("hl-thunk-own-{}", std::process::id()));
        for _ in 0..2 {
            open_to_append(&file).unwrap().write_all(b"line\n").unwrap();
        }
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(text, "line\nline\n");
        open_to_append(Path::new("/dev/null")).unwrap();
        // A link of the system, which is followed; where it leads may be closed to this user.
        let opened = open_to_append(Path::new("/dev/stderr")).map_err(|error| error.to_string());
        assert!(!opened.is_err_and(|error| error.contains("link")));
    }

    #[test]
    fn the_process_id_and_the_host_are_part_of_the_name() {
        let name = file_name("/tmp/%h.%p.trace").display().to_string();
        assert!(name.ends_with(&format!(".{}.trace", std::process::id())), "{name}");
        assert!(!name.contains('%'), "{name}");
    }
}
