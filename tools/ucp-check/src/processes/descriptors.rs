//! Sending descriptors to another process over a Unix socket.

use anyhow::{Result, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Most descriptors in one message.
pub(crate) const MOST: usize = 63;

/// Sends bytes and descriptors in one message.
pub(crate) fn send(to: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    ensure!(control.push(SendAncillaryMessage::ScmRights(fds)), "more than {MOST} descriptors");
    let sent = sendmsg(to, &[IoSlice::new(bytes)], &mut control, SendFlags::empty())?;
    ensure!(sent == bytes.len(), "only {sent} bytes of {} were taken", bytes.len());
    Ok(())
}

/// Receives one byte and the descriptors that came with it.
pub(crate) fn receive(from: impl AsFd) -> Result<Vec<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    recvmsg(from, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let message = control.drain().next();
    let Some(RecvAncillaryMessage::ScmRights(fds)) = message else { bail!("they did not come") };
    Ok(fds.collect())
}
