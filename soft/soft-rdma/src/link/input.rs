//! What a connection has read: frames, and payloads on the way to their target memory.
//!
//! Short payloads are copied out of the buffer; the rest of a long one is read from the socket straight into its target memory.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;

use crate::hca::copy;
use crate::hca::permit::Access;
use crate::hca::qp::QueuePair;
use crate::hca::responder::Placement;
use crate::wire::{Datagram, Frame, Malformed, Response, Verdict};

const CAPACITY: usize = 64 << 10;

/// A payload that is being received.
pub(super) enum Incoming {
    /// The payload of a send or write.
    Place(Placement),
    /// The payload of a read that we asked for; it has no target if its memory is no longer registered.
    Return(Arc<QueuePair>, Response),
    /// The payload of a datagram.
    Datagram(Datagram, Vec<u8>),
    /// A payload that is discarded; the answer is sent at its end.
    Discard(Option<Response>),
}

struct Payload {
    what: Incoming,
    /// The memory it goes to, if any.
    target: Option<Access>,
    length: u64,
    done: u64,
    /// Whether a byte could not be placed.
    failed: bool,
}

/// Next thing that was received.
pub(super) enum Received {
    /// A frame, and the length of the payload that follows.
    Frame(Frame, u32),
    /// A payload is complete.
    Payload(Incoming, Arrival),
}

/// How a payload arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// Every byte was placed.
    Placed,
    /// Some byte could not be placed.
    Unplaced,
    /// The sender could not complete it.
    Aborted(Verdict),
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
    /// Sets where the payload of the frame just received goes.
    pub(super) fn expect(&mut self, what: Incoming, target: Option<Access>, length: u32) {
        let failed = target.is_none() && matches!(what, Incoming::Return(..));
        self.payload = Some(Payload { what, target, length: length.into(), done: 0, failed });
    }

    /// Takes the unfinished payload, when the connection is given up.
    pub(super) fn take_unfinished(&mut self) -> Option<Incoming> {
        self.payload.take().map(|payload| payload.what)
    }

    /// The next frame or finished payload; `Ok(None)` when the socket has no more for now. `Err(PIPE)` at the end of
    /// the stream, `Err(PROTO)` if the peer breaks the protocol.
    ///
    /// Reads from the socket at most `reads` times and counts `reads` down; then returns `Ok(None)`.
    pub(super) fn next(
        &mut self,
        socket: BorrowedFd<'_>,
        reads: &mut u32,
    ) -> Result<Option<Received>, Errno> {
        loop {
            if let Some(payload) = &mut self.payload {
                let available = &self.buffer[self.start..self.end];
                let take = (available.len() as u64).min(payload.length - payload.done) as usize;
                payload.accept(&available[..take]);
                self.start += take;
                if payload.done == payload.length {
                    if let Some(received) = self.finished()? {
                        return Ok(Some(received));
                    }
                } else if *reads > 0
                    // The buffer is empty here.
                    && payload.length - payload.done >= CAPACITY as u64
                    && payload.read(socket)?
                {
                    *reads -= 1;
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
            if *reads == 0 || !self.fill(socket)? {
                return Ok(None);
            }
            *reads -= 1;
        }
    }

    /// The payload whose last byte has arrived; `Ok(None)` if its verdict has not.
    fn finished(&mut self) -> Result<Option<Received>, Errno> {
        let mut verdict = Verdict::Complete;
        if !self.payload.as_ref().is_some_and(|it| matches!(it.what, Incoming::Datagram(..))) {
            let Some(byte) = self.buffer[self.start..self.end].first() else { return Ok(None) };
            verdict = Verdict::try_from(*byte).map_err(|Malformed| Errno::PROTO)?;
            self.start += 1;
        }
        Ok(self.payload.take().map(|payload| {
            let arrival = match verdict {
                Verdict::Complete if payload.failed => Arrival::Unplaced,
                Verdict::Complete => Arrival::Placed,
                _ => Arrival::Aborted(verdict),
            };
            Received::Payload(payload.what, arrival)
        }))
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
        } else if let Some(target) = &self.target
            && !self.failed
            && !bytes.is_empty()
        {
            let placed = target.lock().is_ok_and(|(segments, _uses)| {
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

    /// Reads straight into the target memory. `Ok(false)` if that is not possible: use the buffer.
    fn read(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        let Some(target) = self.target.as_ref().filter(|_| !self.failed) else {
            return Ok(false);
        };
        let Ok((segments, _uses)) = target.lock() else {
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
            // Nothing to read: the read into the buffer will find the same.
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::abi::{IBV_ACCESS_LOCAL_WRITE, ibv_sge};
    use crate::hca::memory::{Regions, Registration};
    use crate::wire::Segment;

    #[test]
    fn a_payload_is_not_placed_any_more_once_its_work_is_flushed() {
        let mut memory = [0u8; 10];
        let (regions, piece) =
            (Regions::default(), Segment { addr: memory.as_mut_ptr() as u64, len: 10 });
        let (domain, access, iova) = (1, IBV_ACCESS_LOCAL_WRITE, 0);
        let what = Registration { domain, access, iova, pieces: vec![piece], backing: None };
        let lkey = regions.register(what, || 0x1234_5678).expect("capacity").key();
        let list = regions.local(1, &[ibv_sge { addr: 0, length: 10, lkey }], true);
        let access = Access { permit: Arc::default(), list: list.expect("registered") };
        let permit = access.permit.clone();
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut input = Input::default();
        input.expect(Incoming::Discard(None), Some(access), 10);
        theirs.write_all(&[1; 4]).unwrap();
        assert!(input.next(ours.as_fd(), &mut 9).unwrap().is_none());
        permit.revoke();
        theirs.write_all(&[2; 6]).unwrap();
        assert!(input.next(ours.as_fd(), &mut 9).unwrap().is_none(), "the verdict is missing");
        theirs.write_all(&[Verdict::Complete as u8]).unwrap();
        let received = input.next(ours.as_fd(), &mut 9).unwrap();
        assert!(matches!(received, Some(Received::Payload(_, Arrival::Unplaced))));
        assert_eq!(memory, [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn a_stream_without_end_is_left_after_so_many_reads() {
        let (mut theirs, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut input = Input::default();
        input.expect(Incoming::Discard(None), None, u32::MAX);
        for mut reads in [1, 0] {
            theirs.write_all(&[0; 9]).unwrap();
            assert!(input.next(ours.as_fd(), &mut reads).unwrap().is_none());
            assert_eq!(reads, 0);
        }
        assert_eq!(rustix::io::read(&ours, &mut [0; 99]), Ok(9), "the second time it was not read");
    }
}
