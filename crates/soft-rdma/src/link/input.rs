//! What a connection has read: frames, and payloads on their way to where they belong.
//!
//! Short payloads come out of the buffer; the rest of a long one is read from the socket straight
//! into the memory it is for.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::hca::copy;
use crate::hca::memory::{self, Located};
use crate::hca::qp::QueuePair;
use crate::hca::responder::Placement;
use crate::wire::{Datagram, Frame, Malformed, Response};

const CAPACITY: usize = 64 << 10;

/// A payload that is being received.
pub(super) enum Incoming {
    /// Of a send or write.
    Place(Placement),
    /// Of a read that we asked for.
    Return(Arc<QueuePair>, Response),
    /// Of a datagram.
    Datagram(Datagram, Vec<u8>),
    /// Nobody wants it; the answer is sent when it is over.
    Discard(Option<Response>),
}

struct Payload {
    what: Incoming,
    targets: Vec<Located>,
    length: u64,
    done: u64,
    /// Whether a byte could not be placed.
    failed: bool,
}

/// Next thing that was received.
pub(super) enum Received {
    /// A frame, and the length of the payload that follows.
    Frame(Frame, u32),
    /// A payload is complete; `true` if every byte was placed.
    Payload(Incoming, bool),
}

/// The receiving half of a connection.
pub(super) struct Input {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    payload: Option<Payload>,
}

impl Default for Input {
    fn default() -> Self {
        Self { buffer: vec![0; CAPACITY].into(), start: 0, end: 0, payload: None }
    }
}

impl Input {
    /// Says where the payload of the frame just received goes.
    pub(super) fn expect(&mut self, what: Incoming, targets: Vec<Located>, length: u32) {
        self.payload =
            Some(Payload { what, targets, length: length.into(), done: 0, failed: false });
    }

    /// The payload that will never be complete, when the connection is given up.
    pub(super) fn take_unfinished(&mut self) -> Option<Incoming> {
        self.payload.take().map(|payload| payload.what)
    }

    /// The next frame or finished payload; `Ok(None)` when the socket has no more for now.
    /// `Err(PIPE)` at its end, `Err(PROTO)` if the peer does not speak our language.
    pub(super) fn next(&mut self, socket: BorrowedFd<'_>) -> Result<Option<Received>, Errno> {
        loop {
            if let Some(payload) = &mut self.payload {
                let available = &self.buffer[self.start..self.end];
                let take = (available.len() as u64).min(payload.length - payload.done) as usize;
                payload.accept(&available[..take]);
                self.start += take;
                if payload.done == payload.length {
                    let Some(payload) = self.payload.take() else { continue };
                    return Ok(Some(Received::Payload(payload.what, !payload.failed)));
                }
                // The buffer is empty here.
                if payload.length - payload.done >= CAPACITY as u64 && payload.read(socket)? {
                    continue;
                }
            } else {
                match Frame::decode(&self.buffer[self.start..self.end]) {
                    Ok(Some((frame, length, payload))) => {
                        self.start += length;
                        return Ok(Some(Received::Frame(frame, payload)));
                    }
                    Ok(None) => {}
                    Err(Malformed) => return Err(Errno::PROTO),
                }
            }
            if !self.fill(socket)? {
                return Ok(None);
            }
        }
    }

    /// Reads more into the buffer.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        self.buffer.copy_within(self.start..self.end, 0);
        (self.start, self.end) = (0, self.end - self.start);
        match rustix::io::read(socket, &mut self.buffer[self.end..]) {
            Ok(0) => Err(Errno::PIPE),
            Ok(count) => {
                self.end += count;
                Ok(true)
            }
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(Errno::INTR) => Ok(true),
            Err(error) => Err(error),
        }
    }
}

impl Payload {
    /// Takes bytes that were read already.
    fn accept(&mut self, bytes: &[u8]) {
        if let Incoming::Datagram(_, data) = &mut self.what {
            data.extend_from_slice(bytes);
        } else if !self.failed && !self.targets.is_empty() && !bytes.is_empty() {
            let placed = memory::lock_all(&self.targets).is_some_and(|(segments, _guards)| {
                let mut rest = copy::skip(&segments, self.done);
                let mut left = bytes.len() as u64;
                for segment in &mut rest {
                    segment.len = segment.len.min(left);
                    left -= segment.len;
                }
                copy::scatter(bytes, &rest).is_ok()
            });
            self.failed |= !placed;
        }
        self.done += bytes.len() as u64;
    }

    /// Reads straight into the targets. `Ok(false)` if that is not possible: go through the buffer.
    fn read(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        if self.targets.is_empty() || self.failed {
            return Ok(false);
        }
        let Some((segments, _guards)) = memory::lock_all(&self.targets) else {
            self.failed = true;
            return Ok(false);
        };
        // SAFETY: the targets were looked up by key as memory that may be written.
        match unsafe { copy::read_from(socket, &copy::skip(&segments, self.done)) } {
            Ok(0) => Err(Errno::PIPE),
            Ok(count) => {
                self.done += count;
                Ok(true)
            }
            Err(Errno::INTR) => Ok(true),
            Err(Errno::FAULT) => {
                self.failed = true;
                Ok(false)
            }
            // Nothing there: the buffer's read says so again.
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
