//! What a connection still has to write.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::hca::Payload;
use crate::hca::copy;
use crate::hca::permit::{Access, Revoked};
use crate::stats::STATS;
use crate::wire::{Frame, HEADER, Verdict};

/// With more than this many bytes queued, no more requests are taken.
const FULL: usize = 256 << 10;
/// With this many items (frames or payloads) queued, no more requests are taken.
pub(super) const FULL_ITEMS: usize = 64;
/// With more than this many bytes queued, datagrams are lost.
const FULL_FOR_DATAGRAMS: usize = 1 << 20;
/// A peer that leaves this many bytes of responses unread loses its connection.
pub(super) const HOPELESS: usize = 16 << 20;

/// Zeroes are written in pieces of this size.
static ZEROES: [u8; 16 << 10] = [0; _];

enum Item {
    Bytes {
        data: Vec<u8>,
        at: usize,
    },
    Memory {
        access: Access,
        total: u64,
        done: u64,
    },
    /// Zeroes in place of memory that was lost, so that the stream stays in frame; then the verdict.
    Filler {
        left: u64,
        why: Verdict,
    },
}

/// Frames and payloads in order.
#[derive(Default)]
pub(super) struct Output {
    queue: VecDeque<Item>,
    /// Bytes in `Item::Bytes`.
    bytes: usize,
    /// Whether the engine waits until the socket takes more.
    pub(super) waiting: bool,
    /// Whether a queue pair found it full and must be told when it no longer is.
    pub(super) starved: bool,
}

fn send(socket: BorrowedFd<'_>, bytes: &[u8]) -> Result<usize, Errno> {
    let flags = rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT;
    rustix::net::send(socket, bytes, flags)
}

/// Writes registered memory, starting at byte `done`. `Err`: the memory may no longer be used.
fn write_memory(
    socket: BorrowedFd<'_>,
    access: &Access,
    done: u64,
) -> Result<Result<u64, Errno>, Verdict> {
    let (segments, _uses) = access.lock().map_err(|revoked| match revoked {
        Revoked::Work => Verdict::WorkGone,
        Revoked::Region => Verdict::RegionGone,
    })?;
    match copy::write_to(socket, &copy::skip(&segments, done)) {
        // The program has unmapped it.
        Err(Errno::FAULT) => Err(Verdict::RegionGone),
        result => Ok(result),
    }
}

impl Output {
    /// The buffer at the end, to append to.
    fn tail(&mut self) -> &mut Vec<u8> {
        if !matches!(self.queue.back(), Some(Item::Bytes { data, .. }) if data.len() < 64 << 10) {
            self.queue.push_back(Item::Bytes { data: Vec::new(), at: 0 });
        }
        match self.queue.back_mut() {
            Some(Item::Bytes { data, .. }) => data,
            _ => unreachable!("one was pushed above"),
        }
    }

    /// Queues a frame and its payload.
    pub(super) fn push(&mut self, frame: &Frame, payload: Payload) {
        let length = match &payload {
            Payload::Empty => 0,
            Payload::Bytes(bytes) => bytes.len() as u64,
            Payload::Memory(access) => access.length(),
        };
        STATS.stream_bytes.fetch_add(length, Ordering::Relaxed);
        let tail = self.tail();
        let before = tail.len();
        frame.encode(length as u32, tail);
        if let Payload::Bytes(bytes) = &payload {
            tail.extend_from_slice(bytes);
            if frame.has_verdict() && length > 0 {
                tail.push(Verdict::Complete as u8);
            }
        }
        let added = tail.len() - before;
        self.bytes += added;
        if let Payload::Memory(access) = payload {
            self.queue.push_back(Item::Memory { access, total: length, done: 0 });
        }
    }

    /// Whether more requests can be taken.
    pub(super) fn has_capacity(&self) -> bool {
        self.bytes < FULL && self.queue.len() < FULL_ITEMS
    }

    /// Whether a datagram can be taken.
    pub(super) fn has_datagram_capacity(&self, length: usize) -> bool {
        self.bytes + length + HEADER < FULL_FOR_DATAGRAMS
    }

    /// Bytes that are queued.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing is queued.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Writes until everything is written (`Ok(true)`) or the socket takes no more (`Ok(false)`).
    pub(super) fn write(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        while let Some(item) = self.queue.front_mut() {
            let result = match item {
                Item::Bytes { data, at } => send(socket, &data[*at..]).map(|count| {
                    *at += count;
                    self.bytes -= count;
                    *at == data.len()
                }),
                Item::Memory { access, total, done } => {
                    match write_memory(socket, access, *done) {
                        Ok(Ok(count)) => *done += count,
                        Ok(Err(Errno::WOULDBLOCK)) => return Ok(false),
                        Ok(Err(Errno::INTR)) => {}
                        Ok(Err(error)) => return Err(error),
                        Err(why) => *item = Item::Filler { left: *total - *done, why },
                    }
                    if let Item::Memory { total, done, .. } = item
                        && done >= total
                    {
                        *item = Item::Filler { left: 0, why: Verdict::Complete };
                    }
                    continue;
                }
                Item::Filler { left, why } => {
                    if *left == 0 {
                        send(socket, &[*why as u8]).map(|_| true)
                    } else {
                        let zeroes = &ZEROES[..(*left).min(ZEROES.len() as u64) as usize];
                        send(socket, zeroes).map(|count| {
                            *left -= count as u64;
                            false
                        })
                    }
                }
            };
            match result {
                Ok(true) => drop(self.queue.pop_front()),
                Ok(false) | Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::Arc;

    use super::*;
    use crate::abi::ibv_sge;
    use crate::hca::memory::{Regions, Registration};
    use crate::wire::{Hello, Outcome, Response, Segment};

    #[test]
    fn a_peer_that_reads_nothing_makes_nobody_keep_more_than_a_megabyte() {
        let frame = Frame::Hello(Hello { probe: (7, 7) });
        let (mut requests, mut datagrams) = (Output::default(), Output::default());
        while requests.has_capacity() {
            requests.push(&frame, Payload::Bytes(vec![5; 1000]));
        }
        while datagrams.has_datagram_capacity(4096) {
            datagrams.push(&frame, Payload::Bytes(vec![5; 4096]));
        }
        assert!(requests.bytes() < FULL + 2000, "{}", requests.bytes());
        assert!(datagrams.bytes() < FULL_FOR_DATAGRAMS, "{}", datagrams.bytes());
    }

    #[test]
    fn frames_count_until_they_are_written_also_beyond_one_buffer() {
        let mut output = Output::default();
        let frame = Frame::Hello(Hello { probe: (7, 7) });
        let mut total = 0;
        for size in [40 << 10, 40 << 10, 100, 70 << 10, 1] {
            output.push(&frame, Payload::Bytes(vec![5; size]));
            let mut head = Vec::new();
            frame.encode(size as u32, &mut head);
            total += head.len() + size;
            assert_eq!(output.bytes(), total);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        let reader = std::thread::spawn(move || std::io::copy(&mut &theirs, &mut std::io::sink()));
        while output.write(ours.as_fd()) != Ok(true) {
            std::thread::yield_now();
        }
        drop(ours);
        assert_eq!(reader.join().unwrap().unwrap(), total as u64);
        assert_eq!(output.bytes(), 0);
    }
    /// Registered memory of a test.
    fn access(regions: &Regions, bytes: &[u8]) -> (Access, u32) {
        let piece = Segment { addr: bytes.as_ptr() as u64, len: bytes.len() as u64 };
        let (domain, access, iova) = (1, 0, 0);
        let what = Registration { domain, access, iova, pieces: vec![piece], backing: None };
        let key = regions.register(what, || 0x1234_5678).expect("capacity").key();
        let sge = ibv_sge { addr: 0, length: bytes.len() as u32, lkey: key };
        let list = regions.local(1, &[sge], false).expect("registered");
        (Access { permit: Arc::default(), list }, key)
    }

    #[test]
    fn a_stream_stays_in_frame_when_its_memory_is_lost() {
        for (lost, verdict) in
            [(0, 0), (1, Verdict::RegionGone as u8), (2, Verdict::WorkGone as u8)]
        {
            let (regions, bytes) = (Regions::default(), vec![7; 4 << 20]);
            let (access, key) = access(&regions, &bytes);
            let permit = access.permit.clone();
            let mut output = Output::default();
            let outcome = Outcome::Ack(0);
            let response = Frame::Response(Response { dst_qpn: 1, src_qpn: 2, psn: 3, outcome });
            output.push(&response, Payload::Memory(access));
            output.push(&response, Payload::Bytes(vec![9; 5]));
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            // The socket is full before all is written.
            assert_eq!(output.write(ours.as_fd()), Ok(false));
            match lost {
                1 => regions.deregister(key),
                2 => permit.revoke(),
                _ => {}
            }
            let mut head = Vec::new();
            response.encode(0, &mut head);
            let total = head.len() + bytes.len() + 1 + head.len() + 5 + 1;
            let reader = std::thread::spawn(move || {
                let mut all = vec![0; total];
                theirs.read_exact(&mut all).map(|()| all)
            });
            while output.write(ours.as_fd()) != Ok(true) {
                std::thread::yield_now();
            }
            let all = reader.join().unwrap().unwrap();
            assert_eq!(all[head.len()], 7);
            let rest = &all[head.len() + bytes.len()..];
            assert_eq!((rest[0], rest[1..].len()), (verdict, head.len() + 6));
            assert!(rest.ends_with(&[9, 9, 9, 9, 9, 0]));
        }
    }
}
