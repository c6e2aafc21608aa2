//! One connection to another process: handshake, then requests one way and responses the other.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, Weak};

use rustix::event::epoll;
use rustix::io::Errno;
use rustix::process::Pid;

use super::auth::{self, Secret, Side};
use super::input::{Incoming, Input, Received};
use super::output::{HOPELESS, Output};
use crate::fabric::Owner;
use crate::hca::copy::{self, Direction};
use crate::hca::events::lock;
use crate::hca::qp::QueuePair;
use crate::hca::responder::{self, Moved, Placement, Step};
use crate::hca::{Hca, Link, Payload, datagram, memory};
use crate::node::random;
use crate::wire::{Challenge, Frame, Hello, Request, Response, Segment, Welcome};

const HANDSHAKE: u8 = 0;
const UP: u8 = 1;
const BROKEN: u8 = 2;

/// What both ends need for the handshake.
pub(super) struct Identity {
    pub(super) secret: Secret,
    pub(super) owner: Owner,
}

/// Eight random bytes of this process. A peer that can read them can copy from region to region.
struct Probe(Box<u64>);

/// A connection.
pub(crate) struct Connection {
    pub(super) id: u64,
    socket: OwnedFd,
    epoll: Arc<OwnedFd>,
    /// The process we connected to, if it was us who connected.
    pub(super) to: Option<Owner>,
    /// The peer's process, if it is on this machine.
    peer: Option<Pid>,
    state: AtomicU8,
    direct: AtomicBool,
    nonce: [u8; 32],
    probe: Probe,
    /// The accepting side's nonce, once it came.
    challenge: Mutex<[u8; 32]>,
    output: Mutex<Output>,
    input: Mutex<Input>,
    attached: Mutex<Vec<Weak<QueuePair>>>,
    /// Datagrams sent before the handshake was over.
    early: Mutex<Vec<(Frame, Vec<u8>)>>,
}

impl Connection {
    /// A connection that is to be greeted (`to` given) or that was accepted.
    pub(super) fn new(
        id: u64,
        socket: OwnedFd,
        epoll: Arc<OwnedFd>,
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
            nonce: random(),
            probe: Probe(Box::new(u64::from_ne_bytes(random()))),
            challenge: Mutex::default(),
            output: Mutex::default(),
            input: Mutex::default(),
            attached: Mutex::default(),
            early: Mutex::default(),
        }
    }

    /// Starts to watch the socket. The accepting side speaks first.
    pub(super) fn start(&self) -> Result<(), Errno> {
        // A connecting TCP socket becomes writable first; it is then written to or found broken.
        let events = if self.to.is_some() {
            epoll::EventFlags::IN | epoll::EventFlags::OUT
        } else {
            epoll::EventFlags::IN
        };
        lock(&self.output).waiting = self.to.is_some();
        epoll::add(&*self.epoll, &self.socket, epoll::EventData::new_u64(self.id), events)?;
        if self.to.is_none() {
            self.push(&Frame::Challenge(Challenge { nonce: self.nonce }), Payload::Empty);
            self.flush();
        }
        Ok(())
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

    /// The socket takes more bytes. `Err`: the connection is of no use any more.
    pub(super) fn writable(&self) -> Result<(), Errno> {
        let mut output = lock(&self.output);
        let done = output.write(self.socket.as_fd())?;
        self.watch(&mut output, !done);
        if output.bytes() > HOPELESS { Err(Errno::NOBUFS) } else { Ok(()) }
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
            placement.finish(Moved::PeerFault);
        }
        self.users().iter().for_each(|qp| qp.link_lost());
    }

    /// Handles everything that has arrived. `Err`: the connection is of no use any more.
    pub(super) fn readable(self: &Arc<Self>, hca: &Hca, identity: &Identity) -> Result<(), Errno> {
        let mut input = lock(&self.input);
        let result = loop {
            match input.next(self.socket.as_fd()) {
                Ok(Some(Received::Frame(frame, length))) => {
                    if let Err(error) = self.frame(hca, identity, &mut input, frame, length) {
                        break Err(error);
                    }
                }
                Ok(Some(Received::Payload(what, placed))) => self.payload(hca, what, placed),
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        drop(input);
        self.writable()?;
        result
    }

    fn respond(&self, response: Response, payload: Payload) {
        self.push(&Frame::Response(response), payload);
    }

    fn payload(self: &Arc<Self>, hca: &Hca, what: Incoming, placed: bool) {
        match what {
            Incoming::Place(placement) => {
                let moved = if placed { Moved::Streamed } else { Moved::LocalFault };
                self.respond(placement.finish(moved), Payload::Empty);
            }
            Incoming::Return(qp, response) => qp.respond(hca, &response, placed),
            Incoming::Datagram(head, bytes) => datagram::deliver(hca, &head, &bytes),
            Incoming::Discard(Some(response)) => self.respond(response, Payload::Empty),
            Incoming::Discard(None) => {}
        }
    }

    fn frame(
        self: &Arc<Self>,
        hca: &Hca,
        identity: &Identity,
        input: &mut Input,
        frame: Frame,
        length: u32,
    ) -> Result<(), Errno> {
        let connecting = self.to.is_some();
        match (frame, self.is_up(), connecting) {
            (Frame::Request(request), true, false) => self.request(hca, input, &request, length),
            (Frame::Datagram(head), true, false) => {
                let what = Incoming::Datagram(head, Vec::with_capacity(length as usize));
                input.expect(what, Vec::new(), length);
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
                    Some((place, qp)) => {
                        input.expect(Incoming::Return(qp, response), place.targets, length)
                    }
                    None => input.expect(Incoming::Discard(None), Vec::new(), length),
                }
                Ok(())
            }
            (Frame::Challenge(challenge), false, true) => self.answer(identity, &challenge),
            (Frame::Hello(hello), false, false) => self.welcome(identity, &hello),
            (Frame::Welcome(welcome), false, true) => self.welcomed(hca, identity, &welcome),
            _ => Err(Errno::PROTO),
        }
    }

    fn answer(&self, identity: &Identity, challenge: &Challenge) -> Result<(), Errno> {
        *lock(&self.challenge) = challenge.nonce;
        let hello = Hello {
            nonce: self.nonce,
            proof: auth::prove(&identity.secret, Side::Connecting, &challenge.nonce, &self.nonce),
            owner: (identity.owner.node, identity.owner.slot),
            probe: (&raw const *self.probe.0 as u64, *self.probe.0),
        };
        self.push(&Frame::Hello(hello), Payload::Empty);
        Ok(())
    }

    fn welcome(&self, identity: &Identity, hello: &Hello) -> Result<(), Errno> {
        let expected = auth::prove(&identity.secret, Side::Connecting, &self.nonce, &hello.nonce);
        if !auth::equal(&expected, &hello.proof) {
            return Err(Errno::ACCESS);
        }
        let direct = self.peer.is_some_and(|peer| {
            let mut seen = 0u64;
            let own = Segment { addr: &raw mut seen as u64, len: 8 };
            let theirs = Segment { addr: hello.probe.0, len: 8 };
            // SAFETY: `seen` is ours and is 8 bytes long.
            let read = unsafe { copy::transfer(Direction::Pull, peer, &[own], &[theirs]) };
            read.is_ok() && seen == hello.probe.1
        });
        self.direct.store(direct, Ordering::Release);
        self.state.store(UP, Ordering::Release);
        let proof = auth::prove(&identity.secret, Side::Accepting, &self.nonce, &hello.nonce);
        self.push(&Frame::Welcome(Welcome { proof, direct }), Payload::Empty);
        Ok(())
    }

    fn welcomed(&self, hca: &Hca, identity: &Identity, welcome: &Welcome) -> Result<(), Errno> {
        let accepting = *lock(&self.challenge);
        let expected = auth::prove(&identity.secret, Side::Accepting, &accepting, &self.nonce);
        if !auth::equal(&expected, &welcome.proof) {
            return Err(Errno::ACCESS);
        }
        self.direct.store(welcome.direct, Ordering::Release);
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
                input.expect(Incoming::Discard(response), Vec::new(), length)
            }
            Step::Done(response) => {
                if let Some(response) = response {
                    self.respond(response, Payload::Empty);
                }
            }
            Step::Place(placement) => match &request.segments {
                Some(segments) => {
                    let moved = self.copy(hca, Direction::Pull, &placement, segments);
                    self.respond(placement.finish(moved), Payload::Empty);
                }
                None if length != request.length => {
                    placement.finish(Moved::PeerFault);
                    return Err(Errno::PROTO);
                }
                None if length == 0 => {
                    self.respond(placement.finish(Moved::Direct), Payload::Empty)
                }
                None => {
                    let targets = placement.targets.clone();
                    // An RDMA write without a key to check has no targets, but no bytes either.
                    input.expect(Incoming::Place(placement), targets, length);
                }
            },
            Step::Provide(placement) => match &request.segments {
                Some(segments) => {
                    let moved = self.copy(hca, Direction::Push, &placement, segments);
                    self.respond(placement.finish(moved), Payload::Empty);
                }
                None => {
                    let data = placement.targets.clone();
                    let payload =
                        if request.length > 0 { Payload::Memory(data) } else { Payload::Empty };
                    self.respond(placement.finish(Moved::Streamed), payload);
                }
            },
        }
        Ok(())
    }

    /// The one copy between the peer's memory and ours.
    fn copy(
        &self,
        hca: &Hca,
        direction: Direction,
        placement: &Placement,
        theirs: &[Segment],
    ) -> Moved {
        let Some(peer) = self.peer.filter(|_| self.direct.load(Ordering::Acquire)) else {
            return Moved::PeerFault;
        };
        let Some((ours, _guards)) = memory::lock_all(&placement.targets) else {
            return Moved::LocalFault;
        };
        // SAFETY: the targets were looked up by key as memory that may be written.
        match unsafe { copy::transfer(direction, peer, &ours, theirs) } {
            Ok(()) => {
                if !ours.is_empty() {
                    let bytes = ours.iter().map(|segment| segment.len).sum();
                    hca.stats.direct_copies.fetch_add(1, Ordering::Relaxed);
                    hca.stats.direct_bytes.fetch_add(bytes, Ordering::Relaxed);
                }
                Moved::Direct
            }
            // The kernel does not say whose memory is missing.
            Err(Errno::FAULT) if !copy::is_mapped(&ours) => Moved::LocalFault,
            Err(_) => Moved::PeerFault,
        }
    }
}

impl Link for Connection {
    fn ready(&self) -> bool {
        self.is_up() && lock(&self.output).has_capacity()
    }

    fn direct(&self) -> bool {
        self.direct.load(Ordering::Acquire)
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
        // While the engine waits for the socket it is the one to write. Errors show when it reads.
        if !output.waiting && !output.is_empty() {
            let done = output.write(self.socket.as_fd()).unwrap_or(true);
            self.watch(&mut output, !done);
        }
    }
}
