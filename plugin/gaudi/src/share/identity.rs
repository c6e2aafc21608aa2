//! The identity of a process: enough to find it again, to check that it still is the same process, and to say why it cannot
//! be reached.
//!
//! Identities are sent to other processes, inside keys and as a transport's address. Nothing in an identity is verified until
//! that process has granted a lease.

use std::collections::VecDeque;
use std::fmt;
use std::fs;
use std::os::fd::OwnedFd;
use std::process;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::rand::{GetRandomFlags, getrandom};

use super::socket::Unconnected;
use super::wire::{Reader, VERSION, Writer};
use super::{KeyError, initiator, socket};
use crate::process::PerProcess;
use crate::{Error, ErrorKind};

/// How many processes that have ended are remembered at most.
const MAX_ENDED: usize = 64;

/// A process, as other processes of the machine can name it.
///
/// Two are equal only if they are the same process: a process that reuses the process id, or a forked child, has another
/// start time and another random instance number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Identity {
    /// From the boot id, which differs for each boot of each machine.
    pub(super) host: [u8; 6],
    /// Chosen at random by the process; its sockets are named after it.
    pub(super) instance: [u8; 6],
    pub(super) pid: u32,
    /// In clock ticks since the machine started, modulo 2³².
    pub(super) start: u32,
    pub(super) pid_ns: u32,
    pub(super) user_ns: u32,
    pub(super) uid: u32,
}

impl Identity {
    /// Bytes of the fields, without the version.
    pub(super) const FIELDS_LEN: usize = 32;
    /// Bytes of the packed form.
    pub const LEN: usize = 1 + Self::FIELDS_LEN;

    /// The identity of this process. A forked child has its own. The error says what could not be read (mostly because
    /// `/proc` is not mounted).
    pub fn own() -> Result<&'static Identity, KeyError> {
        static OWN: PerProcess<Identity> = PerProcess::new();
        OWN.get_or_make(Self::look)
    }

    fn look() -> Result<Self, KeyError> {
        let withheld =
            |what: &str, why: &dyn fmt::Display| KeyError::OwnIdentity(format!("{what}: {why}"));
        let read = |path: &str| fs::read_to_string(path).map_err(|error| withheld(path, &error));
        let boot = read("/proc/sys/kernel/random/boot_id")?;
        let host = host_of(&boot).ok_or_else(|| withheld("boot_id", &"not a boot id"))?;
        let namespace = |kind: &str| {
            let path = format!("/proc/self/ns/{kind}");
            let link = fs::read_link(&path).map_err(|error| withheld(&path, &error))?;
            let number = link.to_str().and_then(namespace_of);
            number.ok_or_else(|| withheld(&path, &"not a namespace"))
        };
        let start = start_time("self").ok_or_else(|| withheld("/proc/self/stat", &"unreadable"))?;
        let mut instance = [0; 6];
        getrandom(&mut instance[..], GetRandomFlags::empty())
            .map_err(|error| withheld("getrandom", &error))?;
        Ok(Self {
            host,
            instance,
            pid: process::id(),
            start: start as u32,
            pid_ns: namespace("pid")?,
            user_ns: namespace("user")?,
            uid: rustix::process::geteuid().as_raw(),
        })
    }

    /// The packed form: what a transport sends as its address.
    pub fn pack(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut writer = Writer::new(&mut bytes);
        writer.number(VERSION.into(), 1);
        self.write(&mut writer);
        bytes
    }

    /// Parses a packed identity. Checks its form only: see [`Identity::check_reachable`].
    pub fn parse(bytes: &[u8]) -> Result<Self, KeyError> {
        if bytes.len() != Self::LEN {
            return Err(KeyError::Length { found: bytes.len(), expected: Self::LEN });
        }
        let mut reader = Reader::new(bytes);
        let version = reader.number(1) as u8;
        if version != VERSION {
            return Err(KeyError::Version { found: version, expected: VERSION });
        }
        Ok(Self::read(&mut reader))
    }

    pub(super) fn write(&self, to: &mut Writer<'_>) {
        to.bytes(&self.host);
        to.bytes(&self.instance);
        for number in [self.pid, self.start, self.pid_ns, self.user_ns, self.uid] {
            to.number(number.into(), 4);
        }
    }

    pub(super) fn read(from: &mut Reader<'_>) -> Self {
        let host = from.bytes();
        let instance = from.bytes();
        let mut number = || from.number(4) as u32;
        let (pid, start, pid_ns, user_ns, uid) = (number(), number(), number(), number(), number());
        Self { host, instance, pid, start, pid_ns, user_ns, uid }
    }

    /// Checks that memory can be shared with that process at all: that it is on this machine, in this boot, and belongs to
    /// this user. The error is the reason.
    pub fn check_reachable(&self) -> Result<(), KeyError> {
        let own = Self::own()?;
        if self.host != own.host {
            return Err(KeyError::OtherHost);
        }
        // User ids of another user namespace cannot be compared: there the kernel decides, when a process connects.
        if self.user_ns == own.user_ns && self.uid != own.uid {
            return Err(KeyError::OtherUser { theirs: self.uid, ours: own.uid });
        }
        // Two processes of one pid namespace never have the same process id at the same time.
        if self.pid == own.pid && self.pid_ns == own.pid_ns && self != own {
            return Err(KeyError::Ended);
        }
        Ok(())
    }

    /// Whether it is this process.
    pub fn is_own(&self) -> bool {
        Self::own().is_ok_and(|own| own == self)
    }

    /// Its process id, in its own pid namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Whether the process is alive; an error if that cannot be found out. Never waits.
    ///
    /// In another pid namespace its process id means nothing: there, its sockets and its earlier connections decide.
    pub fn is_alive(&self) -> Result<bool, Error> {
        if self.is_own() {
            return Ok(true);
        }
        let why = match self.pidfd() {
            Ok(process) => return Ok(process.is_some_and(|process| !has_ended(&process))),
            Err(why) => why,
        };
        if ended(|ended| ended.contains(self)) {
            return Ok(false);
        }
        match socket::connect(self, initiator::is_owner(self)) {
            Ok(_) | Err(Unconnected::Nobody(Errno::AGAIN)) => Ok(true),
            Err(_) => {
                let detail = format!("{self}: {why}, and it cannot be connected to");
                Err(Error::new(ErrorKind::ChannelFailed, "looking for a peer", detail, ""))
            }
        }
    }

    /// Remembers that the process has ended, because a connection to it has.
    pub(super) fn note_end(&self) {
        ended(|ended| {
            ended.retain(|other| other != self);
            ended.push_front(*self);
            ended.truncate(MAX_ENDED);
        });
    }

    /// Whether the kernel says that the process has ended. `false` where it cannot be asked.
    pub(super) fn has_surely_ended(&self) -> bool {
        self.pidfd().is_ok_and(|process| process.is_none_or(|process| has_ended(&process)))
    }

    /// Whether the process has ended or is exiting: its sockets are closed before the kernel says that it has ended.
    pub(super) fn is_ending(&self) -> bool {
        self.is_running() == Ok(false)
    }

    /// Whether the process has not ended and is not exiting. The error says why the kernel cannot be asked.
    pub(super) fn is_running(&self) -> Result<bool, String> {
        let is_exiting = || crate::stats::is_exiting(&self.pid.to_string()).unwrap_or(true);
        Ok(self.pidfd()?.is_some_and(|process| !has_ended(&process) && !is_exiting()))
    }

    /// Whether it has stopped listening, after a connection to it has ended. An exiting process may still listen briefly.
    pub(super) fn has_stopped_listening(&self) -> bool {
        let connected = socket::connect(self, initiator::is_owner(self));
        !matches!(
            connected,
            Ok(_) | Err(Unconnected::Nobody(Errno::AGAIN) | Unconnected::NoSocket(_))
        )
    }

    /// A pidfd of exactly this process, not of one that reuses its process id; `None` if it has ended. The error says why
    /// there can be no pidfd.
    fn pidfd(&self) -> Result<Option<OwnedFd>, String> {
        if !self.is_in_our_pid_namespace() {
            return Err("it is in another pid namespace".to_owned());
        }
        let Some(pid) = i32::try_from(self.pid).ok().and_then(Pid::from_raw) else {
            return Ok(None);
        };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(process) => process,
            // No process has this id, or only a thread has (newer kernels return `ENOENT` for that, older ones `EINVAL`).
            Err(Errno::SRCH | Errno::NOENT | Errno::INVAL) => return Ok(None),
            Err(errno) => return Err(format!("pidfd_open: {errno}")),
        };
        // If the process id was reused before the pidfd was opened, the start time differs. If it is reused later, the pidfd
        // shows that the process has ended.
        if !proc_is_ours() {
            return Err("/proc is another pid namespace's".to_owned());
        }
        match start_time(&self.pid.to_string()) {
            Some(start) if start as u32 == self.start => Ok(Some(process)),
            Some(_) => Ok(None),
            None => Err("/proc does not show it".to_owned()),
        }
    }

    /// Whether its process id means the same process to us.
    pub(super) fn is_in_our_pid_namespace(&self) -> bool {
        Self::own().is_ok_and(|own| own.host == self.host && own.pid_ns == self.pid_ns)
    }
}

/// The processes that are known to have ended, the latest first.
fn ended<T>(with: impl FnOnce(&mut VecDeque<Identity>) -> T) -> T {
    static ENDED: PerProcess<Mutex<VecDeque<Identity>>> = PerProcess::new();
    with(&mut ENDED.get_or_default().lock().unwrap_or_else(PoisonError::into_inner))
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {}", self.pid)?;
        if !self.is_in_our_pid_namespace() {
            f.write_str(" of another pid namespace")?;
        }
        Ok(())
    }
}

/// Whether the process of a pidfd has ended.
fn has_ended(process: &OwnedFd) -> bool {
    let now = Timespec::default();
    poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
}

/// Whether `/proc` shows the process ids of our own pid namespace.
fn proc_is_ours() -> bool {
    let own = fs::read_link("/proc/self");
    own.is_ok_and(|link| link.to_str().and_then(|pid| pid.parse().ok()) == Some(process::id()))
}

/// The first six bytes of a boot id, which is a random UUID.
fn host_of(boot_id: &str) -> Option<[u8; 6]> {
    let digits: String = boot_id.trim().chars().filter(|c| *c != '-').collect();
    let mut host = [0; 6];
    for (byte, at) in host.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
    }
    Some(host)
}

/// The number in `pid:[4026531836]`.
fn namespace_of(link: &str) -> Option<u32> {
    let (_, number) = link.split_once(":[")?;
    number.strip_suffix(']')?.parse().ok()
}

/// When a process started, from its `stat` file in `/proc`.
fn start_time(process: &str) -> Option<u64> {
    crate::stats::start_time(process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_itself_and_can_be_reached() {
        let own = Identity::own().unwrap();
        assert_eq!(Identity::own().unwrap(), own);
        assert!(own.is_own() && own.is_in_our_pid_namespace());
        own.check_reachable().unwrap();
        assert_eq!(Identity::parse(&own.pack()).as_ref(), Ok(own));
        assert_eq!(own.to_string(), format!("process {}", process::id()));
    }

    #[test]
    fn who_cannot_be_reached_is_told_why() {
        let own = *Identity::own().unwrap();
        let elsewhere = Identity { host: [0; 6], ..own };
        assert_eq!(elsewhere.check_reachable(), Err(KeyError::OtherHost));
        let stranger = Identity { uid: own.uid + 1, ..own };
        let refused = KeyError::OtherUser { theirs: own.uid + 1, ours: own.uid };
        assert_eq!(stranger.check_reachable(), Err(refused));
        let reused = Identity { instance: [0; 6], ..own };
        assert_eq!(reused.check_reachable(), Err(KeyError::Ended), "our number is ours alone");
        let elsewhere = Identity { pid_ns: 1, ..reused };
        assert_eq!(elsewhere.check_reachable(), Ok(()), "numbers of another namespace say nothing");
        let mapped = Identity { user_ns: 1, pid: own.pid + 1, ..stranger };
        assert_eq!(mapped.check_reachable(), Ok(()), "numbers of another namespace say nothing");
        let mut packed = own.pack();
        packed[0] = 9;
        assert_eq!(
            Identity::parse(&packed),
            Err(KeyError::Version { found: 9, expected: VERSION })
        );
        let short = KeyError::Length { found: 3, expected: Identity::LEN };
        assert_eq!(Identity::parse(&packed[..3]), Err(short));
    }

    /// A zombie stands in for a process whose sockets were closed a moment ago.
    #[test]
    fn a_process_is_known_to_be_ending_before_it_is_gone() {
        let mut child = process::Command::new("true").spawn().unwrap();
        let pid = child.id().to_string();
        assert!(crate::stats::is_exiting("self") == Some(false));
        while crate::stats::is_exiting(&pid) == Some(false) {
            std::thread::yield_now();
        }
        assert_eq!(crate::stats::is_exiting(&pid), Some(true));
        let start = start_time(&pid).unwrap() as u32;
        let theirs = Identity { pid: child.id(), start, ..*Identity::own().unwrap() };
        assert!(theirs.is_ending() && !Identity::own().unwrap().is_ending());
        child.wait().unwrap();
        assert_eq!(crate::stats::is_exiting(&pid), None);
    }

    #[test]
    fn what_the_kernel_writes_is_understood() {
        let host = host_of("0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0\n");
        assert_eq!(host, Some([0x0f, 0x1e, 0x2d, 0x3c, 0x4b, 0x5a]));
        assert_eq!(host_of("0f1e"), None);
        assert_eq!(host_of("zz1e2d3c-4b5a"), None);
        assert_eq!(namespace_of("pid:[4026531836]"), Some(4_026_531_836));
        assert_eq!(namespace_of("pid:4026531836"), None);
    }
}
