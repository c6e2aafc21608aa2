//! Closing connections of other users, who may send what they like before their connection is closed.
//!
//! With a connection the kernel drops what was sent over it and not read, descriptors included. The end of some files takes
//! its time: a TCP socket with `SO_LINGER` waits for its peer to read, for years if that was asked for. So any user who
//! can connect could stop the thread that closes the connection. Linux does not wait where a thread is exiting: where
//! something was sent, the last reference is that of a thread which has a table of descriptors of its own, and ends.
//!
//! Such a table is a copy, as in a forked child: the program's files are open in it for a moment, and each is flushed when it
//! goes, which a network file system may notice. So there is none for those who only connect, as a process of root does that
//! looks for leftover sockets.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, sync_channel};

use rustix::net::sockopt::set_socket_passcred;
use rustix::net::{Shutdown, shutdown};

use super::socket::{credentials, is_same_user, peek_plain};
use crate::process::thread;

/// Whether another user is at the other end. Who could stop this process anyway does not need a descriptor for it.
pub(super) fn is_one(socket: &OwnedFd) -> bool {
    !credentials(socket.as_fd()).is_ok_and(is_same_user)
}

/// Closes a connection from or to whoever is at its other end.
pub(super) fn close_if_one(socket: OwnedFd) {
    if is_one(&socket) {
        close(vec![socket]);
    }
}

/// Closes connections of other users. Does not wait for their descriptors, where Linux is 5.9 or newer.
pub(super) fn close(mut sockets: Vec<OwnedFd>) {
    sockets.retain(has_messages);
    if sockets.is_empty() {
        return;
    }
    let (closed, is_closed) = sync_channel::<()>(0);
    // Without that thread, or a table for it, they are closed all the same.
    let _apart = keep_apart(is_closed);
    drop(sockets);
    drop(closed);
}

/// Whether something was sent over it. Nothing can be sent any more then.
fn has_messages(socket: &OwnedFd) -> bool {
    // The kernel has credentials to give with each message then, for which there is no space: so an empty one is told from the end.
    let is_told = set_socket_passcred(socket, true);
    let _ = shutdown(socket, Shutdown::Both);
    is_told.is_err() || peek_plain(socket.as_fd(), &mut [0]) != Ok(0)
}

/// Starts a thread that has the descriptors of this process in a table of its own until the channel is closed. `None` if it
/// could not.
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

/// Gives the calling thread a copy of the table of descriptors. Not `unshare`, which Docker's filter of system calls refuses.
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

    /// Closing it takes for ever: it waits for a peer that never reads. And that peer.
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
        // Else the test does not end.
        close(vec![ours]);
        let end = recv(&theirs, &mut [0; 8], RecvFlags::empty()).map(|(_, len)| len);
        assert!(matches!(end, Ok(0) | Err(Errno::CONNRESET)), "{end:?}");
    }
}
