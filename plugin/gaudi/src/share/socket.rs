//! An owner's sockets: their addresses, the credentials of the other end, and passing descriptors.
//!
//! An owner has two sockets. The abstract one needs no file; every process in the same network namespace can connect to it.
//! Every process with the same `/dev/shm` (or `/tmp`) can connect to the one in the file system, also from another network
//! namespace. Both are named after the owner's random instance number: process ids mean nothing in another pid namespace.

use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::{Identity, strangers};

/// Folders for the socket in the file system, in this order.
const FOLDERS: [&str; 2] = ["/dev/shm", "/tmp"];
const PREFIX: &str = "ucx-gaudi-";
const SUFFIX: &str = ".sock";
const BACKLOG: i32 = 128;
/// How many leftover sockets are checked in each folder.
const MAX_LEFTOVERS: usize = 64;

fn name(of: &Identity) -> String {
    let digits: String = of.instance.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{PREFIX}{digits}")
}

fn abstract_address(of: &Identity) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(name(of).as_bytes())
}

fn paths(of: &Identity) -> [PathBuf; 2] {
    FOLDERS.map(|folder| Path::new(folder).join(name(of) + SUFFIX))
}

fn socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

fn listen_at(address: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, address)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// A listening socket with an abstract address.
pub(super) fn listen_abstract(own: &Identity) -> Result<OwnedFd, Errno> {
    listen_at(&abstract_address(own)?)
}

/// A listening socket in the first folder where that works, for this user alone.
pub(super) fn listen_in_folder(own: &Identity) -> Result<(OwnedFd, PathBuf), Errno> {
    let mut last = Errno::NOENT;
    for path in paths(own) {
        match listen_at_path(&path) {
            Ok(socket) => return Ok((socket, path)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// The socket gets its final name when it listens: one that does not listen yet looks like a leftover.
fn listen_at_path(path: &Path) -> Result<OwnedFd, Errno> {
    let unready = path.with_extension("new");
    let address = SocketAddrUnix::new(&unready)?;
    let ready = listen_at(&address).and_then(|socket| {
        fs::set_permissions(&unready, fs::Permissions::from_mode(0o600))
            .and_then(|()| fs::rename(&unready, path))
            .map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
        Ok(socket)
    });
    if ready.is_err() {
        // Also if `bind` succeeded and `listen` failed.
        let _ = fs::remove_file(&unready);
    }
    ready
}

/// Removes sockets of this user's processes that ended without doing so themselves.
pub fn remove_leftovers() {
    for folder in FOLDERS {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let ours = entries.filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.starts_with(PREFIX) && name.ends_with(SUFFIX)
        });
        for entry in ours.take(MAX_LEFTOVERS) {
            let Ok(address) = SocketAddrUnix::new(entry.path()) else { continue };
            let Ok(socket) = socket() else { return };
            // Refused: no process listens any more. Another user's file stays: this process can neither connect to it nor
            // remove it.
            match rustix::net::connect(&socket, &address) {
                Err(Errno::CONNREFUSED) => drop(fs::remove_file(entry.path())),
                Ok(()) => strangers::close_if_one(socket),
                Err(_) => {}
            }
        }
    }
}

/// Why there is no connection to a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unconnected {
    /// This process cannot create a socket.
    NoSocket(Errno),
    /// It does not listen; `EAGAIN` if a process listens there, but its queue is full.
    Nobody(Errno),
    /// Another process listens at its address.
    Another,
}

/// Tries each of a process's sockets once, and takes the first whose listener passes `is_it`: any process can bind an
/// abstract name that is free in its network namespace.
pub(super) fn connect(
    to: &Identity,
    is_it: impl Fn(Credentials) -> bool,
) -> Result<OwnedFd, Unconnected> {
    let abstract_one = abstract_address(to);
    let in_folders = paths(to).map(SocketAddrUnix::new);
    let mut why = Unconnected::Nobody(Errno::CONNREFUSED);
    for address in [abstract_one].into_iter().chain(in_folders).flatten() {
        let socket = socket().map_err(Unconnected::NoSocket)?;
        let connected = rustix::net::connect(&socket, &address);
        if connected.is_ok() {
            if credentials(socket.as_fd()).is_ok_and(&is_it) {
                return Ok(socket);
            }
            strangers::close_if_one(socket);
        }
        match connected {
            // The full queue may be the owner's: the caller can try again.
            _ if why == Unconnected::Nobody(Errno::AGAIN) => {}
            Ok(()) => why = Unconnected::Another,
            // No such socket, or no process listens on it.
            Err(Errno::CONNREFUSED | Errno::NOENT) => {}
            Err(Errno::AGAIN) => why = Unconnected::Nobody(Errno::AGAIN),
            Err(_) if why == Unconnected::Another => {}
            Err(error) => why = Unconnected::Nobody(error),
        }
    }
    Err(why)
}

/// The process at the other end, as the kernel recorded it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Credentials {
    /// 0 if it has no process id in our pid namespace.
    pub(super) pid: u32,
    pub(super) uid: u32,
}

/// The credentials of the other end.
pub(super) fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    // Not rustix's type, in which the process id cannot be 0: here it can.
    let mut found = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the structure is the one this option fills, and `len` says how long it is.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len,
        )
    };
    if done != 0 || len as usize != size_of::<libc::ucred>() {
        return Err(Errno::IO);
    }
    Ok(Credentials { pid: found.pid.max(0) as u32, uid: found.uid })
}

/// Whether these are the credentials of a process of our own user.
pub(super) fn is_same_user(credentials: Credentials) -> bool {
    let own = rustix::process::geteuid().as_raw();
    // All users that are not mapped into our user namespace appear as the overflow user, so being equal to it proves nothing.
    // Where every user is mapped to itself, it is a user like any other.
    // Read once: both ends of each connection check this, and the number does not change.
    static OVERFLOW: OnceLock<u32> = OnceLock::new();
    let overflow = || {
        *OVERFLOW.get_or_init(|| {
            let number = fs::read_to_string("/proc/sys/kernel/overflowuid");
            number.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(65534)
        })
    };
    let is_plain = || {
        let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
        map.split_whitespace().eq(["0", "0", "4294967295"])
    };
    credentials.uid == own && (own != overflow() || is_plain())
}

/// Sends a message, with a descriptor if there is one. Never blocks.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &[u8],
    fd: Option<BorrowedFd<'_>>,
) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        let pushed = control.push(SendAncillaryMessage::ScmRights(fds));
        debug_assert!(pushed, "there is room for one");
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let parts = [std::io::IoSlice::new(message)];
    match rustix::net::sendmsg(socket, &parts, &mut control, flags)? {
        sent if sent == message.len() => Ok(()),
        _ => Err(Errno::MSGSIZE),
    }
}

/// Receives a message and at most one descriptor. Never blocks. 0 bytes: the other end has closed the connection.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    message: &mut [u8],
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut parts = [std::io::IoSliceMut::new(message)];
    let received = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    let mut fd = None;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            fd = fds.into_iter().last().or(fd);
        }
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(Errno::MSGSIZE);
    }
    // If this process is out of descriptors, the message comes without its own.
    Ok((received.bytes, fd.filter(|_| !received.flags.contains(ReturnFlags::CTRUNC))))
}

/// Peeks at the next message. An error if there is none, or if it carries a descriptor.
pub(super) fn peek_plain(socket: BorrowedFd<'_>, message: &mut [u8]) -> Result<usize, Errno> {
    // There is no space for descriptors: if the message carries one, the kernel sets `MSG_CTRUNC`.
    let mut control = RecvAncillaryBuffer::default();
    let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK;
    let mut parts = [std::io::IoSliceMut::new(message)];
    let seen = rustix::net::recvmsg(socket, &mut parts, &mut control, flags)?;
    if seen.flags.contains(ReturnFlags::CTRUNC) {
        return Err(Errno::MSGSIZE);
    }
    Ok(seen.bytes)
}

/// Receives a message that should carry no descriptors: the kernel closes those that it carries nevertheless.
pub(super) fn receive_plain(socket: BorrowedFd<'_>, message: &mut [u8]) -> Result<usize, Errno> {
    rustix::net::recv(socket, message, RecvFlags::DONTWAIT).map(|(_, len)| len)
}
