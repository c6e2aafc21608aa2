//! The control channel between two processes: small JSON messages over a Unix socket that both inherited. It also works
//! from one network namespace to another.
//!
//! It is separate from the data path on purpose: addresses, keys and barriers must not depend on what is tested. A
//! process that waits here progresses its worker, because the peer's operation may need it.

use crate::ucp::{Idle, Worker};
use anyhow::{Context, Result, bail, ensure};
use serde::{Serialize, de::DeserializeOwned};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;

/// The error of a process whose peer ended; the peer's own error has the reason.
pub(crate) const GONE: &str = "the other process is gone";

/// The longest message: a plan, or the result of a case.
const LONGEST: usize = 16 << 20;

pub struct Control {
    socket: UnixStream,
    received: Vec<u8>,
}

impl Control {
    pub fn new(socket: UnixStream) -> Result<Control> {
        socket.set_nonblocking(true).context("control socket")?;
        Ok(Control { socket, received: Vec::new() })
    }

    /// The bare socket, which blocks.
    pub(crate) fn into_socket(self) -> Result<UnixStream> {
        self.socket.set_nonblocking(false).context("control socket")?;
        Ok(self.socket)
    }

    /// Sends one message. Messages are small and get a reply, so the socket does not stay full.
    pub fn send(&mut self, message: &impl Serialize) -> Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut rest = &line[..];
        while !rest.is_empty() {
            match self.socket.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context(GONE),
            }
        }
        Ok(())
    }

    /// Waits for one message while `worker` progresses.
    pub fn receive<T: DeserializeOwned>(&mut self, worker: &Worker) -> Result<T> {
        let mut idle = Idle::default();
        loop {
            if let Some(line) = self.line()? {
                return serde_json::from_slice(&line).context("unexpected control message");
            }
            worker.wait(&mut idle, Some(self.socket.as_fd()))?;
        }
    }

    pub fn exchange<T: Serialize + DeserializeOwned>(
        &mut self,
        worker: &Worker,
        mine: &T,
    ) -> Result<T> {
        self.send(mine)?;
        self.receive(worker)
    }

    pub fn barrier(&mut self, worker: &Worker, step: u64) -> Result<()> {
        let theirs = self.exchange(worker, &step)?;
        if theirs != step {
            bail!("out of step: we are at {step}, the other process at {theirs}");
        }
        Ok(())
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>> {
        let mut chunk = [0; 4096];
        loop {
            if let Some(end) = self.received.iter().position(|&byte| byte == b'\n') {
                return Ok(Some(self.received.drain(..=end).collect()));
            }
            ensure!(self.received.len() < LONGEST, "the other process does not end its message");
            match self.socket.read(&mut chunk) {
                Ok(0) => bail!(GONE),
                Ok(n) => self.received.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e).context(GONE),
            }
        }
    }
}
