//! One connection to another process: handshake, then requests one way and responses the other.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::Pid;

use super::descriptor::Descriptor;
use super::input::{Arrival, Incoming, Input, Received};
use super::output::{HOPELESS, Output};
use crate::fabric::Owner;
use crate::hca::copy::{self, Direction, Pulled};
use crate::hca::events::lock;
use crate::hca::permit::Access;
use crate::hca::qp::QueuePair;
use crate::hca::responder::{self, Placement, Step, TransferOutcome};
use crate::hca::{Hca, Link, Payload, datagram};
use crate::node::random;
use crate::wire::{
    Frame, Hello, MAX_SEGMENTS, Outcome, Reference, Request, Response, Segment, Verdict, Welcome,
};

const HANDSHAKE: u8 = 0;
const UP: u8 = 1;
const BROKEN: u8 = 2;

/// Most reads from a socket before other sockets get their turn.
const MAX_READS: u32 = 16;

/// Eight random bytes of this process. A peer that can read them can copy from region to region.
struct Probe(Box<u64>);

impl Probe {
    fn message(&self) -> (u64, u64) {
        (&raw const *self.0 as u64, *self.0)
    }
}

/// Whether we can read a process's memory; its probe tells.
fn can_read(peer: Option<Pid>, (addr, expected): (u64, u64)) -> bool {
    peer.is_some_and(|peer| {
        let mut seen = 0u64;
        let own = Segment { addr: &raw mut seen as u64, len: 8 };
        let theirs = Segment { addr, len: 8 };
        // SAFETY: `seen` is ours and is 8 bytes long.
        let read = unsafe { copy::transfer(Direction::Pull, peer, &[own], &[theirs]) };
        read.is_ok() && seen == expected
    })
}

/// A connection.
pub(crate) struct Connection {
    pub(super) id: u64,
    socket: Descriptor,
    epoll: Arc<Descriptor>,
    /// The process we connected to; `None` if it connected to us.
    pub(super) to: Option<Owner>,
    /// The peer's process, if it is on this machine.
    peer: Option<Pid>,
    state: AtomicU8,
    /// Whether requests may name memory of the side that connected.
    direct: AtomicBool,
    /// Whether answers may name memory of the side that accepted.
    can_pull: AtomicBool,
    probe: Probe,
    output: Mutex<Output>,
    input: Mutex<Input>,
    attached: Mutex<Vec<Weak<QueuePair>>>,
    /// Datagrams sent before the handshake was over.
    early: Mutex<Vec<(Frame, Vec<u8>)>>,
}

impl Connection {
    /// A connection that we opened (`to` is set) or accepted.
    pub(super) fn new(
        id: u64,
        socket: Descriptor,
        epoll: Arc<Descriptor>,
        to: Option<Owner>,
        peer: Option<Pid>,
    ) -> Self {
        Self {
            id,
            socket,
            epoll,
            to,
            peer,
            state: AtomicU8::new(HANDSHAKE),
            direct: AtomicBool::new(false),
            can_pull: AtomicBool::new(false),
            probe: Probe(Box::new(u64::from_ne_bytes(random()))),
            output: Mutex::default(),
            input: Mutex::default(),
            attached: Mutex::default(),
            early: Mutex::default(),
        }
    }

    /// Starts to watch the socket. The connecting side speaks first.
    pub(super) fn start(&self) -> Result<(), Errno> {
        let mut events = epoll::EventFlags::IN;
        if self.to.is_some() {
            // A connecting TCP socket becomes writable first; the write succeeds or shows that the connection failed.
            events |= epoll::EventFlags::OUT;
            let mut output = lock(&self.output);
            output.waiting = true;
            let hello = Hello { probe: self.probe.message() };
            output.push(&Frame::Hello(hello), Payload::Empty);
        }
        epoll::add(&*self.epoll, &self.socket, epoll::EventData::new_u64(self.id), events)
    }

    fn push(&self, frame: &Frame, payload: Payload) {
        lock(&self.output).push(frame, payload);
    }

    fn is_up(&self) -> bool {
        self.state.load(Ordering::Acquire) == UP
    }

    fn watch(&self, output: &mut Output, waiting: bool) {
        if output.waiting != waiting {
            output.waiting = waiting;
            let out = if waiting { epoll::EventFlags::OUT } else { epoll::EventFlags::empty() };
            let data = epoll::EventData::new_u64(self.id);
            let _ = epoll::modify(&*self.epoll, &self.socket, data, epoll::EventFlags::IN | out);
        }
    }

    /// The socket takes more bytes. `Err`: give the connection up.
    pub(super) fn writable(&self, hca: &Hca) -> Result<(), Errno> {
        let mut output = lock(&self.output);
        let done = output.write(self.socket.as_fd())?;
        self.watch(&mut output, !done);
        if output.bytes() > HOPELESS {
            return Err(Errno::NOBUFS);
        }
        let wake = output.has_capacity() && core::mem::take(&mut output.starved);
        drop(output);
        if wake {
            self.users().iter().for_each(|qp| qp.transmit_again(hca));
        }
        Ok(())
    }

    /// Queue pairs that send through this connection.
    pub(super) fn users(&self) -> Vec<Arc<QueuePair>> {
        let mut attached = lock(&self.attached);
        attached.retain(|qp| qp.strong_count() > 0);
        attached.iter().filter_map(Weak::upgrade).collect()
    }

    /// Gives the connection up.
    pub(super) fn close(&self) {
        self.state.store(BROKEN, Ordering::Release);
        let _ = epoll::delete(&*self.epoll, &self.socket);
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both);
        if let Some(Incoming::Place(placement)) = lock(&self.input).take_unfinished() {
            placement.finish(TransferOutcome::PeerFault);
        }
        self.users().iter().for_each(|qp| qp.link_lost());
    }

    /// Handles everything that has arrived. `Err`: give the connection up.
    pub(super) fn readable(self: &Arc<Self>, hca: &Hca) -> Result<(), Errno> {
        let mut input = lock(&self.input);
        // Limit the reads: a peer may send without end. The socket stays readable.
        let mut reads = MAX_READS;
        let result = loop {
            match input.next(self.socket.as_fd(), &mut reads) {
                Ok(Some(Received::Frame(frame, length))) => {
                    if let Err(error) = self.frame(hca, &mut input, frame, length) {
                        break Err(error);
                    }
                }
                Ok(Some(Received::Payload(what, arrival))) => self.payload(hca, what, arrival),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        drop(input);
        self.writable(hca)?;
        result
    }

    fn respond(&self, response: Response, payload: Payload) {
        self.push(&Frame::Response(response), payload);
    }

    fn payload(self: &Arc<Self>, hca: &Hca, what: Incoming, arrival: Arrival) {
        match what {
            Incoming::Place(placement) => {
                let moved = match arrival {
                    Arrival::Placed => TransferOutcome::Streamed,
                    Arrival::Unplaced => TransferOutcome::LocalFault,
                    Arrival::Aborted(_) => TransferOutcome::PeerFault,
                };
                self.respond(placement.finish(moved), Payload::Empty);
            }
            Incoming::Return(qp, mut response) => {
                match arrival {
                    Arrival::Aborted(Verdict::WorkGone) => response.outcome = Outcome::Dropped,
                    Arrival::Aborted(_) => response.outcome = Outcome::OperationError,
                    Arrival::Placed | Arrival::Unplaced => {}
                }
                qp.respond(hca, &response, arrival == Arrival::Placed);
            }
            Incoming::Datagram(head, bytes) => datagram::deliver(hca, &head, &bytes),
            Incoming::Discard(Some(response)) => self.respond(response, Payload::Empty),
            Incoming::Discard(None) => {}
        }
    }

    fn frame(
        self: &Arc<Self>,
        hca: &Hca,
        input: &mut Input,
        frame: Frame,
        length: u32,
    ) -> Result<(), Errno> {
        let connecting = self.to.is_some();
        match (frame, self.is_up(), connecting) {
            (Frame::Request(request), true, false) => self.request(hca, input, &request, length),
            (Frame::Datagram(head), true, false) => {
                let what = Incoming::Datagram(head, Vec::with_capacity(length as usize));
                input.expect(what, None, length);
                Ok(())
            }
            (Frame::Response(response), true, true) => {
                let qp = hca.qp(response.dst_qpn);
                if length == 0 {
                    if let Some(qp) = qp {
                        qp.respond(hca, &response, true);
                    }
                    return Ok(());
                }
                match qp.and_then(|qp| Some((qp.returned(hca, &response, length)?, qp))) {
                    Some((access, qp)) => {
                        input.expect(Incoming::Return(qp, response), access.ok(), length)
                    }
                    None => input.expect(Incoming::Discard(None), None, length),
                }
                Ok(())
            }
            (Frame::Offer(response, reference), true, true) => {
                if let Some(qp) = hca.qp(response.dst_qpn) {
                    self.pull(hca, &qp, response, &reference);
                }
                Ok(())
            }
            (Frame::Hello(hello), false, false) => self.welcome(&hello),
            (Frame::Welcome(welcome), false, true) => self.welcomed(hca, &welcome),
            _ => Err(Errno::PROTO),
        }
    }

    fn welcome(&self, hello: &Hello) -> Result<(), Errno> {
        let direct = can_read(self.peer, hello.probe);
        self.direct.store(direct, Ordering::Release);
        self.state.store(UP, Ordering::Release);
        let welcome = Welcome { direct, probe: self.probe.message() };
        self.push(&Frame::Welcome(welcome), Payload::Empty);
        Ok(())
    }

    fn welcomed(&self, hca: &Hca, welcome: &Welcome) -> Result<(), Errno> {
        self.direct.store(welcome.direct, Ordering::Release);
        self.can_pull.store(can_read(self.peer, welcome.probe), Ordering::Release);
        {
            let mut early = lock(&self.early);
            self.state.store(UP, Ordering::Release);
            for (frame, bytes) in early.drain(..) {
                self.push(&frame, Payload::Bytes(bytes));
            }
        }
        self.users().iter().for_each(|qp| qp.transmit_again(hca));
        Ok(())
    }

    fn request(
        &self,
        hca: &Hca,
        input: &mut Input,
        request: &Request,
        length: u32,
    ) -> Result<(), Errno> {
        match responder::begin(hca, request) {
            Step::Done(response) if length > 0 => {
                input.expect(Incoming::Discard(response), None, length)
            }
            Step::Done(response) => {
                if let Some(response) = response {
                    self.respond(response, Payload::Empty);
                }
            }
            Step::Place(placement) => match &request.by_reference {
                Some(reference) => {
                    let moved = self.copy(hca, &placement, reference);
                    self.respond(placement.finish(moved), Payload::Empty);
                }
                None if length != request.length => {
                    placement.finish(TransferOutcome::PeerFault);
                    return Err(Errno::PROTO);
                }
                None if length == 0 => {
                    self.respond(placement.finish(TransferOutcome::Direct), Payload::Empty)
                }
                None => {
                    let target = placement.access.clone();
                    input.expect(Incoming::Place(placement), Some(target), length);
                }
            },
            Step::Provide(placement) => self.provide(placement, request.by_reference.is_some()),
        }
        Ok(())
    }

    /// Answers a read: says where the bytes are, or sends them.
    fn provide(&self, placement: Placement, can_pull: bool) {
        let access = placement.access.clone();
        if access.length() == 0 {
            return self.respond(placement.finish(TransferOutcome::Direct), Payload::Empty);
        }
        let segments = match access.lock() {
            Ok((segments, _uses)) => segments,
            Err(_) => {
                return self.respond(placement.finish(TransferOutcome::LocalFault), Payload::Empty);
            }
        };
        let offer = can_pull && segments.len() <= MAX_SEGMENTS;
        let response = placement.finish(if offer {
            TransferOutcome::Direct
        } else {
            TransferOutcome::Streamed
        });
        match response.outcome {
            Outcome::Ack(_) if offer => {
                let reference = access.reference(segments);
                self.push(&Frame::Offer(response, reference), Payload::Empty);
            }
            Outcome::Ack(_) => self.respond(response, Payload::Memory(access)),
            _ => self.respond(response, Payload::Empty),
        }
    }

    /// Copies bytes that the peer offers to the target of a read.
    fn pull(&self, hca: &Hca, qp: &Arc<QueuePair>, mut response: Response, theirs: &Reference) {
        let access = theirs.length().and_then(|length| qp.returned(hca, &response, length));
        let (Some(access), Some(peer)) = (access, self.peer) else { return };
        let mut placed = true;
        match access.as_ref().map_err(|revoked| *revoked).and_then(Access::lock) {
            // If the target was deregistered, the work fails. A flushed queue pair ignores the answer.
            Err(_) => placed = false,
            // SAFETY: the targets were looked up by key as memory that may be written.
            Ok((ours, _uses)) => match unsafe { copy::pull(peer, &ours, theirs) } {
                Ok(Pulled::Valid) => count_direct(hca, &ours),
                // A flushed queue pair, or a process that ended, will not answer again either.
                Ok(Pulled::WorkGone) | Err(Errno::SRCH) => response.outcome = Outcome::Dropped,
                // The kernel does not say whose memory is missing: check ours.
                Err(Errno::FAULT) if !copy::is_mapped(&ours) => placed = false,
                // The peer has executed the read and would not accept it a second time.
                Ok(Pulled::RegionGone) | Err(_) => response.outcome = Outcome::OperationError,
            },
        }
        qp.respond(hca, &response, placed);
    }

    /// Copies straight from the peer's memory to ours.
    fn copy(&self, hca: &Hca, placement: &Placement, theirs: &Reference) -> TransferOutcome {
        let Some(peer) = self.peer.filter(|_| self.direct.load(Ordering::Acquire)) else {
            return TransferOutcome::PeerFault;
        };
        let Ok((ours, _uses)) = placement.access.lock() else { return TransferOutcome::LocalFault };
        // SAFETY: the targets were looked up by key as memory that may be written.
        match unsafe { copy::pull(peer, &ours, theirs) } {
            Ok(Pulled::Valid) => {
                count_direct(hca, &ours);
                TransferOutcome::Direct
            }
            Ok(Pulled::WorkGone | Pulled::RegionGone) => TransferOutcome::PeerFault,
            // The kernel does not say whose memory is missing: check ours.
            Err(Errno::FAULT) if !copy::is_mapped(&ours) => TransferOutcome::LocalFault,
            Err(_) => TransferOutcome::PeerFault,
        }
    }
}

fn count_direct(hca: &Hca, segments: &[Segment]) {
    if !segments.is_empty() {
        let bytes = segments.iter().map(|segment| segment.len).sum();
        hca.stats.direct_copies.fetch_add(1, Ordering::Relaxed);
        hca.stats.direct_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Link for Connection {
    fn ready(&self) -> bool {
        if !self.is_up() {
            return false;
        }
        let mut output = lock(&self.output);
        let ready = output.has_capacity();
        output.starved |= !ready;
        ready
    }

    fn direct(&self) -> bool {
        self.direct.load(Ordering::Acquire)
    }

    fn can_pull(&self) -> bool {
        self.can_pull.load(Ordering::Acquire)
    }

    fn broken(&self) -> bool {
        self.state.load(Ordering::Acquire) == BROKEN
    }

    fn attach(&self, qp: &Arc<QueuePair>) {
        let mut attached = lock(&self.attached);
        if attached.len() == attached.capacity() {
            attached.retain(|qp| qp.strong_count() > 0);
        }
        attached.push(Arc::downgrade(qp));
    }

    fn send(&self, frame: &Frame, payload: Payload) {
        self.push(frame, payload);
    }

    fn send_datagram(&self, frame: &Frame, payload: &[u8]) -> bool {
        {
            let mut early = lock(&self.early);
            match self.state.load(Ordering::Acquire) {
                BROKEN => return false,
                HANDSHAKE => {
                    let taken = early.len() < 256;
                    if taken {
                        early.push((frame.clone(), payload.to_vec()));
                    }
                    return taken;
                }
                _ => {}
            }
        }
        let mut output = lock(&self.output);
        let taken = output.has_datagram_capacity(payload.len());
        if taken {
            output.push(frame, Payload::Bytes(payload.to_vec()));
        }
        taken
    }

    fn flush(&self) {
        let mut output = lock(&self.output);
        // While the engine waits for the socket, only the engine writes.
        if !output.waiting && !output.is_empty() {
            match output.write(self.socket.as_fd()) {
                // The engine wakes the queue pairs that found it full; watching for writability tells the engine at once.
                Ok(done) => {
                    let starved = output.starved;
                    self.watch(&mut output, !done || starved);
                }
                // The engine sees the end of the stream and gives the connection up.
                Err(_) => drop(rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Both)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::super::output::FULL_ITEMS;
    use super::*;

    #[test]
    fn the_engine_is_told_when_a_program_drains_what_another_found_full() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let ours = std::os::fd::OwnedFd::from(ours);
        let connection = Connection::new(1, ours.into(), Arc::new(epoll.into()), None, None);
        connection.start().unwrap();
        connection.state.store(UP, Ordering::Release);
        assert!(connection.ready());
        // Few bytes, so that the socket takes them at once.
        for _ in 0..FULL_ITEMS {
            let access = Access { permit: Arc::default(), list: Vec::new() };
            let frame = Frame::Hello(Hello { probe: (0, 0) });
            connection.send(&frame, Payload::Memory(access));
        }
        assert!(!connection.ready());
        connection.flush();
        let output = lock(&connection.output);
        assert!(output.is_empty() && output.starved);
        assert!(output.waiting, "otherwise the thread that found it full is not woken");
    }
}
