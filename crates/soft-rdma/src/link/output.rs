//! What a connection still has to write.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use crate::hca::Payload;
use crate::hca::copy;
use crate::hca::memory::{self, Located};
use crate::stats::STATS;
use crate::wire::{Frame, HEADER};

/// Above this many bytes no more requests are taken.
const FULL: usize = 256 << 10;
/// Above this many bytes datagrams are lost.
const FULL_FOR_DATAGRAMS: usize = 1 << 20;
/// A peer that does not read that many bytes of responses has lost its connection.
pub(super) const HOPELESS: usize = 16 << 20;

enum Item {
    Bytes { data: Vec<u8>, at: usize },
    Memory { list: Vec<Located>, total: u64, done: u64 },
}

/// Frames and payloads in order.
#[derive(Default)]
pub(super) struct Output {
    queue: VecDeque<Item>,
    /// Bytes in `Item::Bytes`.
    bytes: usize,
    /// Whether the engine waits for the socket to take more.
    pub(super) waiting: bool,
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
            Payload::Memory(list) => {
                list.iter().flat_map(|located| &located.segments).map(|segment| segment.len).sum()
            }
        };
        STATS.stream_bytes.fetch_add(length, Ordering::Relaxed);
        let tail = self.tail();
        let before = tail.len();
        frame.encode(length as u32, tail);
        if let Payload::Bytes(bytes) = &payload {
            tail.extend_from_slice(bytes);
        }
        let added = tail.len() - before;
        self.bytes += added;
        if let Payload::Memory(list) = payload {
            self.queue.push_back(Item::Memory { list, total: length, done: 0 });
        }
    }

    /// Whether more requests can be taken.
    pub(super) fn has_capacity(&self) -> bool {
        self.bytes < FULL && self.queue.len() < 64
    }

    /// Whether a datagram can be taken.
    pub(super) fn has_datagram_capacity(&self, length: usize) -> bool {
        self.bytes + length + HEADER < FULL_FOR_DATAGRAMS
    }

    /// Bytes that wait.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether nothing waits.
    pub(super) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Writes until everything is written (`Ok(true)`) or the socket takes no more (`Ok(false)`).
    pub(super) fn write(&mut self, socket: BorrowedFd<'_>) -> Result<bool, Errno> {
        while let Some(item) = self.queue.front_mut() {
            let result = match item {
                Item::Bytes { data, at } => rustix::net::send(
                    socket,
                    &data[*at..],
                    rustix::net::SendFlags::NOSIGNAL | rustix::net::SendFlags::DONTWAIT,
                )
                .map(|count| {
                    *at += count;
                    self.bytes -= count;
                    *at == data.len()
                }),
                Item::Memory { list, total, done } => match memory::lock_all(list) {
                    // The peer was promised these bytes: without them the stream is of no use.
                    None => Err(Errno::FAULT),
                    Some((segments, _guards)) => {
                        copy::write_to(socket, &copy::skip(&segments, *done)).map(|count| {
                            *done += count;
                            *done >= *total
                        })
                    }
                },
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
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::wire::Challenge;

    #[test]
    fn a_peer_that_reads_nothing_makes_nobody_keep_more_than_a_megabyte() {
        let frame = Frame::Challenge(Challenge { nonce: [7; 32] });
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
        let frame = Frame::Challenge(Challenge { nonce: [7; 32] });
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
}
