//! Closing connections of other users, which may carry any descriptors when they are closed.
//!
//! When a connection is closed, the kernel drops what was sent over it and not read, descriptors included. Closing some files
//! takes long: a TCP socket with `SO_LINGER` waits for its peer to read, for years if so configured. So any user who can
//! connect could block the thread that closes the connection. Linux does not wait in a thread that is exiting. So if
//! something was sent, the last reference is dropped by a thread that has a descriptor table of its own, and exits.
//!
//! Such a table is a copy, as in a forked child: the program's files are open in it for a moment, and each is flushed when it
//! is closed there, which a network file system may notice. So there is no such thread for peers that only connect, such as a
//! process of root that looks for leftover sockets.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{Shutdown, shutdown};

use super::socket::{credentials, is_same_user, peek_plain};
use crate::process::thread;

/// Whether another user is at the other end. A process of the same user can stop this one without sending a descriptor.
pub(super) fn is_one(socket: &OwnedFd) -> bool {
    !credentials(socket.as_fd()).is_ok_and(is_same_user)
}

/// Closes a connection, safely also if another user is at its other end.
pub(super) fn close_if_one(socket: OwnedFd) {
    if is_one(&socket) {
        close(vec![socket]);
    }
}

/// Closes connections of other users. Does not wait until their descriptors are closed, on Linux 5.9 or newer.
pub(super) fn close(mut sockets: Vec<OwnedFd>) {
    sockets.retain(has_messages);
    if sockets.is_empty() {
        return;
    }
    let (closed, is_closed) = sync_channel::<()>(0);
    // If the thread or its table could not be created, the sockets are closed all the same.
    let _apart = keep_apart(is_closed);
    drop(sockets);
    drop(closed);
}

/// Ends the connection in both directions, and returns whether something was sent over it.
fn has_messages(socket: &OwnedFd) -> bool {
    // With this option each message carries credentials. `peek_plain` has no space for them and fails, so an empty message is
    // not taken for the end of the connection (0 bytes).
    let is_told = set_socket_passcred(socket, true);
    let _ = shutdown(socket, Shutdown::Both);
    is_told.is_err() || peek_plain(socket.as_fd(), &mut [0]) != Ok(0)
}

/// Starts a thread that has a copy of this process's descriptor table until the channel is closed. `None` if it could not.
fn keep_apart(until: Receiver<()>) -> Option<()> {
    let (done, is_done) = sync_channel(1);
    let thread = thread::spawn("gaudi-close", move || {
        let is_apart = unshare_table();
        let _ = done.send(is_apart);
        if is_apart {
            let _ = until.recv();
        }
    });
    drop(thread.ok()?);
    is_done.recv().ok()?.then_some(())
}

/// Gives the calling thread a copy of the descriptor table. Not by `unshare`, which Docker's seccomp filter refuses.
fn unshare_table() -> bool {
    let (none, flags) = (u32::MAX, libc::CLOSE_RANGE_UNSHARE);
    // SAFETY: no descriptor has this number: nothing is closed.
    unsafe { libc::syscall(libc::SYS_close_range, none, none, flags) == 0 }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::io::Errno;
    use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, recv, socketpair};

    use super::super::socket;
    use super::*;

    /// A socket that takes for ever to close, because it waits for a peer that never reads; and that peer.
    fn lingering() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (peer, _) = listener.accept().unwrap();
        stream.set_nonblocking(true).unwrap();
        while (&stream).write(&[0; 65536]).is_ok() {}
        let linger = Some(Duration::from_secs(100_000));
        rustix::net::sockopt::set_socket_linger(&stream, linger).unwrap();
        (stream, peer)
    }

    fn connection() -> (OwnedFd, OwnedFd) {
        let flags = SocketFlags::CLOEXEC;
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    }

    #[test]
    fn a_connection_is_known_to_have_messages_also_if_they_are_empty() {
        let file = std::fs::File::open("/dev/null").unwrap();
        let messages: [(&[u8], _); 4] =
            [(&[1], None), (&[], None), (&[1], Some(&file)), (&[], Some(&file))];
        for (message, file) in messages {
            let (ours, theirs) = connection();
            socket::send(theirs.as_fd(), message, file.map(AsFd::as_fd)).unwrap();
            // Whether its sender is still there or not.
            let _stays = message.is_empty().then_some(theirs);
            assert!(has_messages(&ours), "{message:?} {file:?}");
        }
        let (ours, theirs) = connection();
        assert!(!has_messages(&ours));
        socket::send(theirs.as_fd(), &[1], None).unwrap_err();
        let (ours, theirs) = connection();
        drop(theirs);
        assert!(!has_messages(&ours));
    }

    #[test]
    fn a_connection_over_which_a_lingering_socket_was_sent_is_closed_at_once() {
        let (ours, theirs) = connection();
        let (stream, _peer) = lingering();
        socket::send(theirs.as_fd(), &[1], Some(stream.as_fd())).unwrap();
        drop(stream);
        // This would not return if it waited for the stream to close.
        close(vec![ours]);
        let end = recv(&theirs, &mut [0; 8], RecvFlags::empty()).map(|(_, len)| len);
        assert!(matches!(end, Ok(0) | Err(Errno::CONNRESET)), "{end:?}");
    }
}
