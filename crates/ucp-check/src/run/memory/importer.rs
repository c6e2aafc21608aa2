//! Somebody else who maps dma-bufs: a program at the other end of a socket that is handed a
//! descriptor and reads or writes the memory behind it, as a network device would.
//!
//! A request is the letter `r` or `w`, offset and length (8 bytes each, little endian), sent together
//! with the descriptor; the bytes to write follow. The answer is one byte, 0 for success, and for
//! `r` the bytes.

use anyhow::{Context, Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

/// The connection to an importer.
pub(super) struct Importer(UnixStream);

impl Importer {
    pub(super) fn connect(socket: &Path) -> Result<Importer> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("no importer at {}", socket.display()))?;
        Ok(Importer(stream))
    }

    /// Reads `length` bytes at `offset` of a dma-buf.
    pub(super) fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> Result<Vec<u8>> {
        self.ask(b'r', fd, offset, length)?;
        self.answer()?;
        let mut bytes = vec![0; length];
        self.0.read_exact(&mut bytes).context("the importer's bytes")?;
        Ok(bytes)
    }

    /// Writes bytes at `offset` of a dma-buf.
    pub(super) fn write(&mut self, fd: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> Result<()> {
        self.ask(b'w', fd, offset, bytes.len())?;
        self.0.write_all(bytes).context("bytes for the importer")?;
        self.answer()
    }

    fn ask(&mut self, what: u8, fd: BorrowedFd<'_>, offset: u64, length: usize) -> Result<()> {
        let mut request = vec![what];
        request.extend_from_slice(&offset.to_le_bytes());
        request.extend_from_slice(&(length as u64).to_le_bytes());
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let data = [IoSlice::new(&request)];
        let sent = sendmsg(&self.0, &data, &mut control, SendFlags::empty())
            .context("handing the dma-buf to the importer")?;
        ensure!(sent == request.len(), "the importer took {sent} bytes of a request");
        Ok(())
    }

    fn answer(&mut self) -> Result<()> {
        let mut answer = [0];
        self.0.read_exact(&mut answer).context("the importer's answer")?;
        ensure!(answer[0] == 0, "the importer could not map the dma-buf (errno {})", answer[0]);
        Ok(())
    }
}
