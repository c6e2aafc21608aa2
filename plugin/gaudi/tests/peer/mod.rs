//! Another process on the same software machine, which executes commands: a line in, a line out.

#![allow(dead_code, reason = "each test program uses its own part of this")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Lines, Write, stdin};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;

use gaudi::share::{HostShare, Identity, Opened, RemoteKey, Share};
use gaudi::{Allocation, Device, Error, Side};

use crate::machine::{self, pattern};

mod hostile;

/// Marks answers among what the test harness prints.
const MARK: &str = "@ ";

/// A hash of bytes, to compare memory across processes.
pub(crate) fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| {
        (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).expect("hex digits");
    (0..text.len() / 2).map(|at| digits(2 * at)).collect()
}

/// How the process is different from the one that starts it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Set {
    /// Another user.
    pub(crate) uid: Option<u32>,
    /// A seccomp filter that answers these system calls with `EPERM`.
    pub(crate) refuse: &'static [libc::c_long],
    /// Namespaces of its own (`CLONE_NEW…`).
    pub(crate) namespaces: i32,
    /// It then makes a user namespace in which its user has this number.
    pub(crate) claims: Option<u32>,
}

/// A process that executes commands.
pub(crate) struct Peer {
    child: Child,
    input: Option<ChildStdin>,
    output: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    /// Starts the test `serve` of this program; the same machine, another process.
    pub(crate) fn start(set: Set) -> Self {
        Self::try_start(set).expect("the process starts")
    }

    /// One that has opened this card.
    pub(crate) fn on_card(index: u32) -> Self {
        let mut peer = Self::start(Set::default());
        peer.request_ok(&format!("card {index}"));
        peer
    }

    /// As [`Peer::start`]; the system's refusal of what was to be different.
    pub(crate) fn try_start(set: Set) -> std::io::Result<Self> {
        let mut command = machine::child("serve");
        for variable in ["SOFT_GAUDI_NODE", "SOFT_GAUDI_DEVICES"] {
            command.env(variable, std::env::var_os(variable).expect("the machine is set up"));
        }
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // SAFETY: system calls only, in a process that has one thread.
        unsafe { command.pre_exec(move || become_it(set)) };
        Self::of(command)
    }

    fn of(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.spawn()?;
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped")).lines();
        let mut peer = Self { child, input, output };
        assert_eq!(peer.receive(), "ready");
        Ok(peer)
    }

    /// Waits for an answer.
    pub(crate) fn receive(&mut self) -> String {
        self.output
            .by_ref()
            .map_while(Result::ok)
            .find_map(|line| Some(line.split_once(MARK)?.1.to_owned()))
            .unwrap_or_else(|| "ended".to_owned())
    }

    /// Sends a line and waits for the answer.
    pub(crate) fn request(&mut self, line: &str) -> String {
        self.send(line);
        self.receive()
    }

    /// Sends a line, and does not wait.
    pub(crate) fn send(&mut self, line: &str) {
        if let Some(input) = &mut self.input {
            let _ = writeln!(input, "{line}");
        }
    }

    /// Sends a line that must be answered with `ok`; returns the rest of the answer.
    #[track_caller]
    pub(crate) fn request_ok(&mut self, line: &str) -> String {
        let answer = self.request(line);
        let rest = answer.strip_prefix("ok");
        rest.unwrap_or_else(|| panic!("{line}: {answer}")).trim().to_owned()
    }

    /// Makes it allocate, fill and share memory; returns the key.
    pub(crate) fn share(&mut self, slot: u32, len: usize, seed: u64) -> Vec<u8> {
        unhex(&self.request_ok(&format!("share {slot} {len} {seed}")))
    }

    /// Has it fill and share host memory; the key.
    pub(crate) fn share_host(&mut self, slot: u32, len: usize, seed: u64) -> Vec<u8> {
        unhex(&self.request_ok(&format!("hostshare {slot} {len} {seed}")))
    }

    /// The hash of what it has in its host memory.
    pub(crate) fn sum_host(&mut self, slot: u32) -> u64 {
        self.request_ok(&format!("hostsum {slot}")).parse().expect("a number")
    }

    /// The hash of what it has in its memory.
    pub(crate) fn sum(&mut self, slot: u32) -> u64 {
        self.request_ok(&format!("sum {slot}")).parse().expect("a number")
    }

    pub(crate) fn stat(&mut self, counter: &str) -> u64 {
        self.request_ok(&format!("stat {counter}")).parse().expect("a number")
    }

    /// Asks until the answer is this one.
    #[track_caller]
    pub(crate) fn until(&mut self, line: &str, answer: &str) {
        until(line, || self.request_ok(line) == answer);
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }
}

impl Peer {
    /// Stops the process; returns when it has stopped.
    pub(crate) fn stop(&self) {
        let mut status = 0;
        // SAFETY: our own child, which is not waited for to the end.
        unsafe {
            libc::kill(self.id() as i32, libc::SIGSTOP);
            libc::waitpid(self.id() as i32, &raw mut status, libc::WUNTRACED);
        }
        assert!(libc::WIFSTOPPED(status), "it ended: {status}");
    }

    /// Lets a stopped process go on.
    pub(crate) fn go_on(&self) {
        // SAFETY: our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.id() as i32, libc::SIGCONT) }, 0);
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.input.take());
        // A test that failed may have left it stopped; one that was killed has been waited for.
        if let Ok(None) = self.child.try_wait() {
            // SAFETY: our own child, which has not been waited for.
            unsafe { libc::kill(self.child.id() as i32, libc::SIGCONT) };
        }
        let _ = self.child.wait();
    }
}

/// Makes the process different, between fork and exec.
fn become_it(set: Set) -> std::io::Result<()> {
    let check = |done: libc::c_long| match done {
        0.. => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    };
    // SAFETY: system calls on plain numbers and on structures that live across them.
    unsafe {
        check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL).into())?;
        if set.namespaces != 0 {
            let (uid, gid) = (libc::geteuid(), libc::getegid());
            check(libc::unshare(set.namespaces).into())?;
            if set.namespaces & libc::CLONE_NEWUSER != 0 {
                write_file(c"/proc/self/setgroups", "deny")?;
                write_file(c"/proc/self/uid_map", &format!("{uid} {uid} 1"))?;
                write_file(c"/proc/self/gid_map", &format!("{gid} {gid} 1"))?;
            }
        }
        if set.namespaces & libc::CLONE_NEWPID != 0 {
            // Only children are in the new namespace.
            let inner = libc::fork();
            check(inner.into())?;
            if inner != 0 {
                // The parent waits until this is closed.
                libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
                let mut status = 0;
                libc::waitpid(inner, &raw mut status, 0);
                libc::_exit(if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 1 });
            }
            check(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL).into())?;
        }
        if set.namespaces & libc::CLONE_NEWNS != 0 {
            // As a container has it: a /proc of its own.
            let private = libc::MS_REC | libc::MS_PRIVATE;
            let (root, none) = (c"/".as_ptr(), std::ptr::null());
            check(libc::mount(none, root, none, private, none.cast()).into())?;
            let proc = c"proc".as_ptr();
            check(libc::mount(proc, c"/proc".as_ptr(), proc, 0, none.cast()).into())?;
        }
        if let Some(uid) = set.uid {
            check(libc::setgroups(0, std::ptr::null()).into())?;
            check(libc::setresgid(uid, uid, uid).into())?;
            check(libc::setresuid(uid, uid, uid).into())?;
        }
        if let Some(claimed) = set.claims {
            let (uid, gid) = (libc::geteuid(), libc::getegid());
            // Else its files in /proc belong to root.
            check(libc::prctl(libc::PR_SET_DUMPABLE, 1).into())?;
            check(libc::unshare(libc::CLONE_NEWUSER).into())?;
            write_file(c"/proc/self/setgroups", "deny")?;
            write_file(c"/proc/self/uid_map", &format!("{claimed} {uid} 1"))?;
            write_file(c"/proc/self/gid_map", &format!("{claimed} {gid} 1"))?;
        }
    }
    if !set.refuse.is_empty() {
        machine::refuse(set.refuse)?;
    }
    Ok(())
}

fn write_file(path: &std::ffi::CStr, text: &str) -> std::io::Result<()> {
    std::fs::write(path.to_str().expect("ASCII"), text)
}

/// The other side: executes the commands on standard input, until it ends.
pub(crate) fn serve() {
    if std::env::var_os("SOFT_GAUDI_NODE").is_none() {
        // Run by hand with all other ignored tests: there is no client to serve.
        return;
    }
    machine::set_up("gaudi2");
    println!("\n{MARK}ready");
    let mut state = State::default();
    for line in stdin().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let answer = state.execute(&words);
        println!("\n{MARK}{}", answer.unwrap_or_else(|error| failure(&error)));
    }
}

fn failure(error: &Error) -> String {
    format!("failed {} {error}", error.kind().name())
}

#[derive(Default)]
struct State {
    opened: BTreeMap<u32, Arc<Opened>>,
    keys: BTreeMap<u32, RemoteKey>,
    shares: BTreeMap<u32, Share>,
    memory: BTreeMap<u32, Allocation>,
    host: BTreeMap<u32, (Option<HostShare>, Vec<u8>)>,
    device: Option<Arc<Device>>,
    taken: Vec<std::fs::File>,
    crowd: Vec<OwnedFd>,
}

impl State {
    fn device(&self) -> &Arc<Device> {
        self.device.as_ref().expect("open first")
    }

    fn execute(&mut self, words: &[&str]) -> Result<String, Error> {
        let number = |at: usize| words[at].parse::<u64>().expect("a number");
        let slot = || number(1) as u32;
        match words[0] {
            "card" => self.device = Some(gaudi::runtime().open(&words[1].parse()?)?),
            "closecard" => *self = Self::default(),
            "alloc" => {
                let memory = self.device().alloc(number(2), 1)?;
                self.memory.insert(slot(), memory);
            }
            "share" => {
                let (len, seed) = (number(2) as usize, number(3));
                let memory = self.device().alloc(len as u64, 1)?;
                machine::write(self.device(), memory.addr(), &pattern(len, seed));
                let share = self.device().share(memory.addr(), 1)?;
                let key = hex(&share.key());
                self.shares.insert(slot(), share);
                self.memory.insert(slot(), memory);
                return Ok(format!("ok {key}"));
            }
            "reshare" => {
                let share = self.device().share(self.memory[&slot()].addr(), 1)?;
                self.shares.insert(slot(), share);
            }
            "unshare" => drop(self.shares.remove(&slot())),
            "hostshare" => {
                let (len, seed) = (number(2) as usize, number(3));
                let mut bytes = pattern(len, seed);
                // SAFETY: the memory is kept in the table below, behind what is shared of it.
                let share = unsafe { HostShare::new(bytes.as_mut_ptr(), len) }?;
                let key = hex(&share.key());
                self.host.insert(slot(), (Some(share), bytes));
                return Ok(format!("ok {key}"));
            }
            "hostunshare" => drop(self.host.get_mut(&slot()).and_then(|(share, _)| share.take())),
            // Shares memory, and takes it away behind the back of the library. What takes its place cannot be accessed.
            "hostgone" => {
                let len = number(2) as usize;
                let (access, kind) =
                    (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
                // SAFETY: new memory, which nothing else uses.
                let start = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind, -1, 0) };
                assert_ne!(start, libc::MAP_FAILED);
                // SAFETY: it is not kept, and that is the test: the kernel copies, and sees that it is gone.
                let share = unsafe { HostShare::new(start.cast(), len) }?;
                // SAFETY: the mapping made above.
                let gone = unsafe {
                    libc::mmap(start, len, libc::PROT_NONE, kind | libc::MAP_FIXED, -1, 0)
                };
                assert_eq!(gone, start);
                let key = hex(&share.key());
                self.host.insert(slot(), (Some(share), Vec::new()));
                return Ok(format!("ok {key}"));
            }
            "hostsum" => {
                let bytes = std::hint::black_box(&self.host[&slot()].1);
                return Ok(format!("ok {}", hash(bytes)));
            }
            "free" => drop(self.memory.remove(&slot())),
            "addr" => return Ok(format!("ok {}", self.memory[&slot()].addr().0)),
            "sum" => {
                let memory = &self.memory[&slot()];
                let bytes = machine::try_read(self.device(), memory.addr(), memory.len() as usize)?;
                return Ok(format!("ok {}", hash(&bytes)));
            }
            "open" => {
                let key = match RemoteKey::parse(&unhex(words[2])) {
                    Ok(key) => key,
                    Err(error) => return Ok(format!("failed {error}")),
                };
                self.opened.insert(slot(), key.open(self.device())?);
                self.keys.insert(slot(), key);
            }
            // From the peer's memory into our own, by one copy.
            "pull" => {
                let (dst, src, len) = self.sides(slot());
                copy(self.device(), dst, src, len)?;
                return Ok(format!("ok {}", hash(&machine::read_side(self.device(), dst, len))));
            }
            // From our own into the peer's.
            "push" => {
                let (src, dst, len) = self.sides(slot());
                if let Side::Device(addr) = src {
                    machine::write(self.device(), addr, &pattern(len, number(2)));
                }
                copy(self.device(), dst, src, len)?;
            }
            "close" => drop(self.opened.remove(&slot())),
            "gone" => return Ok(format!("ok {}", self.opened[&slot()].has_peer_ended())),
            "stat" => {
                return Ok(format!("ok {}", stat(words[1])));
            }
            "identity" => return Ok(format!("ok {}", hex(&identity().pack()))),
            "listen" => gaudi::share::listen()?,
            // The same by a thread that cannot start others.
            "threadless-listen" => {
                let start = || {
                    machine::refuse(&[libc::SYS_clone, libc::SYS_clone3]).expect("a filter");
                    gaudi::share::listen()
                };
                std::thread::spawn(start).join().expect("no panic")?;
            }
            "limits" => {
                let limits = gaudi::share::Limits { handles: number(1) as usize, bytes: number(2) };
                self.device().set_handle_limits(limits);
            }
            "used" => return Ok(format!("ok {}", self.device().memory().used)),
            // A child that has inherited everything and does nothing until it is killed.
            "fork" => {
                // SAFETY: the child only makes system calls.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe {
                        libc::prctl(libc::PR_SET_PDEATHSIG, 0);
                        libc::close(1);
                        libc::sleep(3600);
                        libc::_exit(0);
                    }
                }
                return Ok(format!("ok {child}"));
            }
            // Connects to a socket (abstract if it starts with @), sends a message, and reports what
            // comes back: nothing, or bytes, or bytes and a descriptor.
            "knock" => return Ok(format!("ok {}", knock(words[1], &unhex(words[2])))),
            // Sends a socket whose end takes for ever, where nobody reads it.
            "linger" => send_lingering(words[1]),
            // Uses up all descriptors but so many; how many there were.
            "exhaust" => {
                let mut taken: Vec<_> = Vec::new();
                while let Ok(file) = std::fs::File::open("/dev/null") {
                    taken.push(file);
                }
                let found = taken.len();
                taken.truncate(found.saturating_sub(number(1) as usize));
                self.taken = taken;
                return Ok(format!("ok {found}"));
            }
            // Limits the number of open files.
            "nofile" => {
                let limit = libc::rlimit { rlim_cur: number(1), rlim_max: number(1) };
                // SAFETY: a structure that lives across the call.
                assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
            }
            "restore" => self.taken.clear(),
            // Connects so many times to an owner's socket, sends this, and stays connected.
            "crowd" => {
                let sent = unhex(words[3]);
                self.crowd.extend((0..number(2)).map(|_| stranger(words[1], &sent)));
            }
            // A child drops all that it has inherited.
            "forkdrop" => {
                // SAFETY: this thread is the only one of the test that has locks.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    self.opened.clear();
                    self.shares.clear();
                    // SAFETY: ends the process.
                    unsafe { libc::_exit(0) };
                }
                let mut status = -1;
                // SAFETY: our own child.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                assert_eq!(status, 0, "the child");
            }
            "alive" => {
                let identity = Identity::parse(&unhex(words[1])).expect("an identity");
                let alive = identity.is_alive();
                return Ok(alive.map_or("ok unknown".to_owned(), |alive| format!("ok {alive}")));
            }
            // Without those of the software card.
            "fds" => {
                let fds = std::fs::read_dir("/proc/self/fd").expect("a Linux").flatten();
                let targets = fds.flat_map(|fd| std::fs::read_link(fd.path()));
                let ours =
                    targets.filter(|target| !target.to_string_lossy().contains("soft-gaudi"));
                return Ok(format!("ok {}", ours.count()));
            }
            // Listens in its own name, and answers relays as it should not.
            "hostile-owner" => return Ok(format!("ok {}", hex(&hostile::own(words[1])))),
            other => panic!("no such word: {other}"),
        }
        Ok("ok".to_owned())
    }

    /// Our memory and the peer's under the same number, and how long both are.
    fn sides(&mut self, slot: u32) -> (Side, Side, usize) {
        let (key, opened) = (self.keys[&slot], Arc::clone(&self.opened[&slot]));
        let len = key.len() as usize;
        let device = Arc::clone(self.device());
        let ours = self.memory.entry(slot);
        let ours = ours.or_insert_with(|| device.alloc(len as u64, 1).expect("memory"));
        let theirs = opened.translate(key.base(), len).expect("all of it");
        (Side::Device(ours.addr()), Side::Device(theirs), len)
    }
}

/// Waits for something that must happen soon.
#[track_caller]
pub(crate) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let start = std::time::Instant::now();
    while !happened() {
        assert!(start.elapsed().as_secs() < 30, "never: {what}");
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

/// A counter of this process.
pub(crate) fn stat(counter: &str) -> u64 {
    // By the number that this /proc has for us: it may be another pid namespace's.
    let own = std::fs::read_link("/proc/self").expect("a Linux");
    let own = own.to_str().and_then(|pid| pid.parse().ok()).expect("a number");
    let counters = stats_reader::read(own).expect("a page");
    counters.get(counter).expect("a counter")
}

pub(crate) fn identity() -> &'static Identity {
    Identity::own().expect("a Linux")
}

pub(crate) fn copy(device: &Arc<Device>, dst: Side, src: Side, len: usize) -> Result<(), Error> {
    // SAFETY: device memory on both sides.
    unsafe { device.copy_blocking(dst, src, len) }
}

/// Sends a message to a socket, from outside the engine; what came back.
pub(crate) fn knock(name: &str, message: &[u8]) -> String {
    use rustix::net::*;
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    if let Err(error) = connect(&socket, &address(name)) {
        return format!("not connected: {error}");
    }
    // It may be refused before it is read.
    let _ = send(&socket, message, SendFlags::NOSIGNAL);
    let mut answer = [0; 64];
    let mut space = [std::mem::MaybeUninit::uninit(); 128];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [std::io::IoSliceMut::new(&mut answer)];
    let received = recvmsg(&socket, &mut parts, &mut control, RecvFlags::empty());
    let fds = control.drain().count();
    match received.map(|received| received.bytes) {
        Err(_) | Ok(0) => "hung up".to_owned(),
        Ok(len) => format!("{len} bytes, {fds} descriptors"),
    }
}

/// Connects to a socket and sends it a TCP socket which, closed last, waits for a peer of its own that never reads. Its end
/// is left to who has it then; the peer stays.
fn send_lingering(name: &str) {
    use rustix::net::*;
    let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    let stream = std::net::TcpStream::connect(listener.local_addr().expect("bound"));
    let stream = stream.expect("somebody listens");
    let (peer, _) = listener.accept().expect("it has connected");
    stream.set_nonblocking(true).expect("a socket");
    while (&stream).write(&[0; 65536]).is_ok() {}
    let for_ever = Some(std::time::Duration::from_secs(100_000));
    sockopt::set_socket_linger(&stream, for_ever).expect("a socket");
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&socket, &address(name)).expect("somebody listens");
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [std::os::fd::AsFd::as_fd(&stream)];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let parts = [std::io::IoSlice::new(&[1])];
    // It may have been hung up on already.
    let _ = sendmsg(&socket, &parts, &mut control, SendFlags::NOSIGNAL);
    std::mem::forget(peer);
    // And then this is who waits.
    std::thread::spawn(move || drop(stream));
}

fn address(name: &str) -> rustix::net::SocketAddrUnix {
    use rustix::net::SocketAddrUnix;
    let address = match name.strip_prefix('@') {
        Some(name) => SocketAddrUnix::new_abstract_name(name.as_bytes()),
        None => SocketAddrUnix::new(name),
    };
    address.expect("a name")
}

/// A connection to an owner on which a message was sent, and answered if the owner does so.
pub(crate) fn stranger(name: &str, sent: &[u8]) -> OwnedFd {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::net::*;
    let flags = if sent.is_empty() { SocketFlags::NONBLOCK } else { SocketFlags::empty() };
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let socket = socket.expect("a socket");
    // A client that finds the queue full counts too.
    let _ = connect(&socket, &address(name));
    if !sent.is_empty() {
        let _ = send(&socket, sent, SendFlags::NOSIGNAL);
        let moment = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        let _ = poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&moment));
    }
    socket
}

/// A socket that listens in an owner's place.
pub(crate) fn listener(name: &str) -> OwnedFd {
    use rustix::net::*;
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    bind(&socket, &address(name)).expect("a free name");
    listen(&socket, 8).expect("a socket that listens");
    socket
}

/// An owner that grants a file that is no dma-buf, and sends on until the peer is gone.
pub(crate) fn grant_once_and_send_for_ever(listener: &OwnedFd) {
    use rustix::net::*;
    let socket = accept(listener).expect("a peer");
    let _ = recv(&socket, &mut [0; 128], RecvFlags::empty());
    let file = std::fs::File::open("/dev/null").expect("a file");
    let grant = message(0x80, &[]);
    send_with(&socket, &grant, &file.into());
    while send(&socket, &grant, SendFlags::NOSIGNAL).is_ok() {}
}

/// Sends a message that encloses a file.
pub(crate) fn send_with(socket: &OwnedFd, message: &[u8], file: &OwnedFd) {
    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let files = [std::os::fd::AsFd::as_fd(file)];
    assert!(control.push(SendAncillaryMessage::ScmRights(&files)));
    let parts = [std::io::IoSlice::new(message)];
    sendmsg(socket, &parts, &mut control, SendFlags::NOSIGNAL).expect("it is sent");
}

/// Waits for a message.
pub(crate) fn received(socket: &OwnedFd) -> Vec<u8> {
    use rustix::net::{RecvFlags, recv};
    let mut message = vec![0; 64];
    rustix::io::ioctl_fionbio(socket, false).expect("a socket");
    let (_, len) = recv(socket, &mut message, RecvFlags::empty()).expect("a message");
    message.truncate(len);
    message
}

/// A file as an initiator sends it for a relay.
pub(crate) fn ring(len: u64) -> OwnedFd {
    use rustix::fs::*;
    let file = memfd_create("ring", MemfdFlags::ALLOW_SEALING).expect("memory");
    ftruncate(&file, len).expect("memory");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("a file that can be sealed");
    file
}

/// Where the owner of a key listens: its instance number is in the key.
pub(crate) fn sockets(key: &[u8]) -> [String; 2] {
    let name = format!("ucx-gaudi-{}", hex(&key[7..13]));
    [format!("@{name}"), format!("/dev/shm/{name}.sock")]
}

/// The first message to an owner, as `docs/design/ipc-protocol.md` describes it.
pub(crate) fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let head = [b'u', b'g', b's', b'h', 5, kind, 0, 0];
    [&head[..], body].concat()
}

/// A request for the dma-buf of a key.
pub(crate) fn open_request(key: &[u8]) -> Vec<u8> {
    message(1, key)
}
