//! Closing connections of other users, who may send what they like before their connection is closed.
//!
//! With a connection the kernel drops what was sent over it and not read, descriptors included. The end of some files takes
//! its time: a TCP socket with `SO_LINGER` waits for its peer to read, for years if that was asked for. So any user who
//! can connect could stop the thread that closes the connection. Linux does not wait where a thread is exiting: here
//! the last reference is that of a thread which has a table of descriptors of its own, and ends. For a moment the
//! other descriptors are open there, too, as in a forked child; for longer if closing one waits for the server of its file system.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Receiver, sync_channel};

use super::socket::{credentials, is_same_user};
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
pub(super) fn close(sockets: Vec<OwnedFd>) {
    if sockets.is_empty() {
        return;
    }
    let (closed, is_closed) = sync_channel::<()>(0);
    // Without that thread, or a table for it, they are closed all the same.
    let _apart = keep_apart(is_closed);
    drop(sockets);
    drop(closed);
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

    #[test]
    fn a_connection_over_which_a_lingering_socket_was_sent_is_closed_at_once() {
        let flags = SocketFlags::CLOEXEC;
        let pair = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let (ours, theirs) = pair.unwrap();
        let (stream, _peer) = lingering();
        socket::send(theirs.as_fd(), &[1], Some(stream.as_fd())).unwrap();
        drop(stream);
        // Else the test does not end.
        close(vec![ours]);
        let end = recv(&theirs, &mut [0; 8], RecvFlags::empty()).map(|(_, len)| len);
        assert!(matches!(end, Ok(0) | Err(Errno::CONNRESET)), "{end:?}");
    }
}
