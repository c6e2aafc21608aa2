//! Closing connections of other users, who may send what they like before their connection is closed.
//!
//! With a connection the kernel drops what was sent over it and not read, descriptors included. The end of some files takes
//! its time: a TCP socket with `SO_LINGER` waits for its peer to read, for years if that was asked for. So any user who
//! can connect could stop the thread that closes the connection. Linux does not wait where a thread is exiting: here
//! the last reference is that of a thread which has a table of descriptors of its own, and ends. As in a forked child, the other
//! descriptors are open there, too, for that moment.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc::{Receiver, sync_channel};

use super::socket::{credentials, is_same_user};
use crate::process::thread;

/// Closes a connection from or to whoever is at its other end. Does not wait for another user's descriptors, where Linux is
/// 5.9 or newer.
pub(super) fn close(socket: OwnedFd) {
    // Who could stop this process anyway does not need a descriptor for it.
    if !credentials(socket.as_fd()).is_ok_and(is_same_user) {
        close_apart(socket);
    }
}

fn close_apart(socket: OwnedFd) {
    let (closed, is_closed) = sync_channel::<()>(0);
    // Without that thread, or a table for it, it is closed all the same.
    let _apart = keep_apart(&socket, is_closed);
    drop(socket);
    drop(closed);
}

/// Starts a thread that has the socket in a table of its own until the channel is closed. `None` if it could not.
fn keep_apart(socket: &OwnedFd, until: Receiver<()>) -> Option<()> {
    let (done, is_done) = sync_channel(1);
    let above = socket.as_raw_fd().unsigned_abs() + 1;
    let thread = thread::spawn("gaudi-close", move || {
        // SAFETY: the table becomes this thread's own, which uses none of the descriptors that are closed in it.
        let error = unsafe {
            libc::syscall(libc::SYS_close_range, above, u32::MAX, libc::CLOSE_RANGE_UNSHARE)
        };
        let _ = done.send(error == 0);
        if error == 0 {
            let _ = until.recv();
        }
    });
    drop(thread.ok()?);
    is_done.recv().ok()?.then_some(())
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
        close_apart(ours);
        let end = recv(&theirs, &mut [0; 8], RecvFlags::empty()).map(|(_, len)| len);
        assert!(matches!(end, Ok(0) | Err(Errno::CONNRESET)), "{end:?}");
    }
}
