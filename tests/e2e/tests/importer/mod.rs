//! An importer of dma-bufs: a thread that is handed descriptors over a socket and reads or writes the
//! memory behind them, as a network device would. It knows the software Gaudi and nothing of UCX, so
//! what it sees is what any other device would see.
//!
//! The protocol is the client's (`ucp-check memory dmabuf --importer`).

use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use anyhow::{Context, Result, bail, ensure};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use soft_gaudi::dmabuf::{Exported, Range};
use tempfile::TempDir;

/// Listens at a socket; serves one client after the other until it is dropped.
pub(crate) struct Importer {
    folder: TempDir,
}

impl Importer {
    pub(crate) fn start() -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let importer = Self { folder };
        let listener = UnixListener::bind(importer.socket()).expect("a socket");
        // Ends with the process: the listener waits for a client that may never come.
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if let Err(error) = serve(stream) {
                    eprintln!("importer: {error:#}");
                }
            }
        });
        importer
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.folder.path().join("importer")
    }
}

fn serve(mut stream: UnixStream) -> Result<()> {
    while let Some((request, fd)) = receive(&stream)? {
        let number = |at: usize| u64::from_le_bytes(request[at..at + 8].try_into().expect("eight"));
        let (offset, length) = (number(1), number(9));
        let exported = match Exported::from_fd(fd.as_fd()) {
            Ok(exported) => exported,
            Err(errno) => {
                stream.write_all(&[errno.raw_os_error() as u8])?;
                bail!("not a dma-buf of the software Gaudi: {errno}");
            }
        };
        ensure!(offset + length <= exported.size(), "beyond the end of the dma-buf");
        let mut bytes = vec![0; length as usize];
        match request[0] {
            b'r' => {
                transfer(exported.ranges(), offset, &mut bytes, Way::Read);
                stream.write_all(&[0])?;
                stream.write_all(&bytes)?;
            }
            b'w' => {
                stream.read_exact(&mut bytes)?;
                transfer(exported.ranges(), offset, &mut bytes, Way::Write);
                stream.write_all(&[0])?;
            }
            other => bail!("no such request: {other}"),
        }
    }
    Ok(())
}

/// A request and the descriptor that came with it; `None` when the client is gone.
fn receive(stream: &UnixStream) -> Result<Option<([u8; 17], OwnedFd)>> {
    let mut request = [0; 17];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut data = [IoSliceMut::new(&mut request)];
    let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
    let got = recvmsg(stream, &mut data, &mut control, flags)?;
    if got.bytes == 0 {
        return Ok(None);
    }
    ensure!(got.bytes == 17, "half a request");
    let fd = control
        .drain()
        .find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
            _ => None,
        })
        .context("a request without a descriptor")?;
    Ok(Some((request, fd)))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Read,
    Write,
}

/// Moves bytes between a buffer and the pieces of memory, from `offset` on.
fn transfer(ranges: &[Range], offset: u64, bytes: &mut [u8], way: Way) {
    let (mut skip, mut done) = (offset, 0);
    for range in ranges {
        if skip >= range.len {
            skip -= range.len;
            continue;
        }
        let count = ((range.len - skip) as usize).min(bytes.len() - done);
        let part = &mut bytes[done..done + count];
        // SAFETY: inside a range that stays mapped while the export lives; nobody else uses this
        // memory while the client waits for the answer.
        unsafe {
            let memory = range.ptr.add(skip as usize);
            match way {
                Way::Read => memory.copy_to(part.as_mut_ptr(), count),
                Way::Write => memory.copy_from(part.as_ptr(), count),
            }
        }
        (skip, done) = (0, done + count);
    }
    assert_eq!(done, bytes.len(), "the ranges are as long as the export");
}
