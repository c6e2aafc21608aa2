//! How each operation is started on the sending and on the receiving side.
//!
//! Both return an [`Activity`], something to be polled between progress calls; so the same code
//! serves two processes and one process that talks to itself.

use crate::matrix::{Case, Op};
use crate::pattern::cuts;
use crate::ucp::{AmMode, Endpoint, RemoteKey, Request, Span, Status, Worker};
use anyhow::{Context, Result, bail, ensure};

/// One side of an operation under way.
pub trait Activity {
    /// `true` when it is complete; errors are UCX's or a wrong length.
    fn poll(&mut self) -> Result<bool>;
    /// Gives up on it: what UCX still holds is cancelled, `poll` then reports the end.
    fn cancel(&mut self);
    /// The call whose end it waits for, where it knows.
    fn waits_for(&mut self) -> Option<&'static str> {
        None
    }
}

/// What one side of a case needs.
pub struct Side<'a> {
    /// The case.
    pub case: Case,
    /// Seed of the plan.
    pub seed: u64,
    /// The worker under test.
    pub worker: &'a Worker,
    /// To the other side.
    pub endpoint: &'a Endpoint,
    /// The other side's buffer and the offset of the message in it, for put and get.
    pub remote: Option<(&'a RemoteKey, usize)>,
    /// Send a stream in one piece: for measuring.
    pub whole: bool,
}

/// Parts of a `tag-many` message, and pieces of a stream on the sending side.
const PARTS: usize = 8;
/// Pieces of a stream on the receiving side: other cuts than the sender's.
const PIECES: usize = 11;

impl Side<'_> {
    /// Tag of part `n`; also the header of active messages.
    fn tag(&self, n: usize) -> u64 {
        (self.case.id << 8) | n as u64
    }

    fn parts(&self) -> Vec<usize> {
        cuts(self.case.size, PARTS, self.case.key(self.seed, 100))
    }

    /// Starts the sender's side.
    pub fn send(&self, from: &Span) -> Result<Box<dyn Activity>> {
        let ep = self.endpoint;
        let requests = match self.case.op {
            Op::Tag | Op::TagUnexpected | Op::TagTruncated => vec![ep.tag_send(from, self.tag(0))?],
            Op::TagMany => {
                let mut sends = Vec::new();
                each(&self.parts(), |n, at, length| {
                    sends.push(ep.tag_send(&from.part(at, length), self.tag(n))?);
                    Ok(())
                })?;
                sends
            }
            Op::Stream if self.whole => vec![ep.stream_send(from)?],
            Op::Stream => {
                let mut sends = Vec::new();
                each(&self.parts(), |_, at, length| {
                    sends.push(ep.stream_send(&from.part(at, length))?);
                    Ok(())
                })?;
                sends
            }
            Op::Am | Op::AmEager | Op::AmRndv => {
                let mode = match self.case.op {
                    Op::AmEager => AmMode::Eager,
                    Op::AmRndv => AmMode::Rendezvous,
                    _ => AmMode::Auto,
                };
                vec![ep.am_send(&self.tag(0).to_le_bytes(), from, mode)?]
            }
            Op::Put => {
                let (key, offset) = self.remote.context("no remote key was exchanged")?;
                vec![ep.put(from, key, offset)?, ep.flush()?]
            }
            Op::Get => vec![],
        };
        Ok(Box::new(All(requests)))
    }

    /// Starts the receiver's side.
    pub fn receive(&self, into: &Span) -> Result<Box<dyn Activity>> {
        Ok(match self.case.op {
            Op::Tag | Op::TagUnexpected => Box::new(TagReceives(vec![TagReceive {
                request: self.worker.tag_receive(into, self.tag(0))?,
                length: into.len(),
            }])),
            Op::TagMany => {
                let mut receives = Vec::new();
                let mut parts = Vec::new();
                each(&self.parts(), |n, at, length| {
                    parts.push((n, at, length));
                    Ok(())
                })?;
                for (n, at, length) in parts.into_iter().rev() {
                    let request = self.worker.tag_receive(&into.part(at, length), self.tag(n))?;
                    receives.push(TagReceive { request, length });
                }
                Box::new(TagReceives(receives))
            }
            Op::TagTruncated => {
                let half = into.part(0, truncated(into.len()));
                Box::new(Truncated(self.worker.tag_receive(&half, self.tag(0))?))
            }
            Op::Stream => Box::new(StreamReceive {
                endpoint: self.endpoint.clone(),
                pieces: if self.whole {
                    vec![into.len()]
                } else {
                    cuts(into.len(), PIECES, self.case.key(self.seed, 101))
                },
                into: into.clone(),
                at: 0,
                piece: 0,
                request: None,
            }),
            Op::Am | Op::AmEager | Op::AmRndv => Box::new(AmReceive {
                worker: self.worker.clone(),
                header: self.tag(0).to_le_bytes(),
                into: into.clone(),
                rendezvous: self.case.op == Op::AmRndv && !into.is_empty(),
                cancelled: false,
                request: None,
            }),
            Op::Put => Box::new(All(vec![])),
            Op::Get => {
                let (key, offset) = self.remote.context("no remote key was exchanged")?;
                Box::new(All(vec![self.endpoint.get(into, key, offset)?]))
            }
        })
    }
}

/// How many bytes a `tag-truncated` receive has room for.
pub fn truncated(size: usize) -> usize {
    size / 2
}

fn each(lengths: &[usize], mut run: impl FnMut(usize, usize, usize) -> Result<()>) -> Result<()> {
    let mut at = 0;
    for (n, &length) in lengths.iter().enumerate() {
        run(n, at, length)?;
        at += length;
    }
    Ok(())
}

/// Requests that must all succeed.
struct All(Vec<Request>);

impl Activity for All {
    fn poll(&mut self) -> Result<bool> {
        for request in &mut self.0 {
            match request.poll() {
                None => return Ok(false),
                Some(done) => done?,
            };
        }
        Ok(true)
    }
    fn cancel(&mut self) {
        self.0.iter_mut().for_each(Request::cancel);
    }
    fn waits_for(&mut self) -> Option<&'static str> {
        let mut left = self.0.iter_mut().filter_map(|request| match request.poll() {
            None => Some(request.call()),
            Some(_) => None,
        });
        left.next()
    }
}

struct TagReceive {
    request: Request,
    length: usize,
}

struct TagReceives(Vec<TagReceive>);

impl Activity for TagReceives {
    fn poll(&mut self) -> Result<bool> {
        for receive in &mut self.0 {
            let Some(done) = receive.request.poll() else { return Ok(false) };
            let (got, expected) = (done?.length, receive.length);
            ensure!(got == expected, "ucp_tag_recv_nbx reports {got} bytes instead of {expected}");
        }
        Ok(true)
    }
    fn cancel(&mut self) {
        self.0.iter_mut().for_each(|receive| receive.request.cancel());
    }
}

/// A receive that must fail because it is too small.
struct Truncated(Request);

impl Activity for Truncated {
    fn poll(&mut self) -> Result<bool> {
        match self.0.poll() {
            None => Ok(false),
            Some(Err(error)) if error.status == Status::TRUNCATED => Ok(true),
            Some(Err(error)) => Err(error.into()),
            Some(Ok(done)) => bail!(
                "a receive that is too small succeeded with {} bytes instead of failing as truncated",
                done.length
            ),
        }
    }
    fn cancel(&mut self) {
        self.0.cancel();
    }
}

/// Reads the stream piece by piece; every second piece takes what there is instead of waiting for
/// all of it.
struct StreamReceive {
    endpoint: Endpoint,
    into: Span,
    /// Lengths still to ask for, from `piece` on.
    pieces: Vec<usize>,
    piece: usize,
    at: usize,
    request: Option<(Request, usize, bool)>,
}

impl Activity for StreamReceive {
    fn poll(&mut self) -> Result<bool> {
        loop {
            if let Some((request, asked, all)) = &mut self.request {
                let Some(done) = request.poll() else { return Ok(false) };
                let (got, asked) = (done?.length, *asked);
                let complete = if *all { got == asked } else { got > 0 && got <= asked };
                ensure!(complete, "ucp_stream_recv_nbx gave {got} bytes when asked for {asked}");
                self.at += got;
                self.request = None;
                // What an "as much as there is" receive left over is asked for again.
                match asked - got {
                    0 => self.piece += 1,
                    left => self.pieces[self.piece] = left,
                }
            }
            while self.pieces.get(self.piece) == Some(&0) {
                self.piece += 1;
            }
            let Some(&length) = self.pieces.get(self.piece) else { return Ok(true) };
            let all = self.piece.is_multiple_of(2);
            let request = self.endpoint.stream_receive(&self.into.part(self.at, length), all)?;
            self.request = Some((request, length, all));
        }
    }
    fn cancel(&mut self) {
        if let Some((request, ..)) = &mut self.request {
            request.cancel();
        }
    }
}

struct AmReceive {
    worker: Worker,
    header: [u8; 8],
    into: Span,
    rendezvous: bool,
    cancelled: bool,
    request: Option<Request>,
}

impl Activity for AmReceive {
    fn poll(&mut self) -> Result<bool> {
        if self.request.is_none() {
            if self.cancelled {
                return Ok(true); // no message came, so UCX holds nothing of ours
            }
            let Some(message) = self.worker.take_message() else { return Ok(false) };
            let (length, expected) = (message.length(), self.into.len());
            ensure!(message.header() == self.header, "active message with a wrong header");
            ensure!(length == expected, "active message of {length} bytes instead of {expected}");
            ensure!(
                message.is_rendezvous() || !self.rendezvous,
                "an active message sent as rendezvous arrived eagerly"
            );
            match message.receive(&self.into)? {
                Some(request) => self.request = Some(request),
                None => {
                    ensure!(length == 0, "UCX did not keep the data of an active message for us");
                    return Ok(true);
                }
            }
        }
        match self.request.as_mut().and_then(Request::poll) {
            None => Ok(false),
            Some(done) => done.map(|_| true).map_err(Into::into),
        }
    }
    fn cancel(&mut self) {
        self.cancelled = true;
        if let Some(request) = &mut self.request {
            request.cancel();
        }
    }
}
