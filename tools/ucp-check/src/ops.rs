//! How each operation is started on the sending and on the receiving side.
//!
//! Both return an [`Activity`], which the caller polls between progress calls. So the same code serves two processes,
//! and one process that talks to itself.

use crate::matrix::{Case, Op};
use crate::pattern::cuts;
use crate::ucp::{AmMode, Endpoint, RemoteKey, Request, Span, Worker};
use crate::ucx::sys::ERR_TRUNCATED;
use anyhow::{Context, Result, bail, ensure};

pub trait Activity {
    /// `true` when it is complete. An error comes from UCX, or is a wrong length.
    fn poll(&mut self) -> Result<bool>;
    /// Gives up: cancels the requests that UCX still has. `poll` reports the end afterwards.
    fn cancel(&mut self);
    /// The UCX call that it waits for, if it knows.
    fn waits_for(&mut self) -> Option<&'static str> {
        None
    }
}

/// Polls all, and removes those that ended. Returns the error of the first that failed.
pub fn poll_all(activities: &mut Vec<Box<dyn Activity>>) -> Result<bool> {
    let mut outcome = Ok(());
    activities.retain_mut(|activity| match activity.poll() {
        Ok(done) => !done,
        Err(error) => {
            outcome = std::mem::replace(&mut outcome, Ok(())).and(Err(error));
            false
        }
    });
    outcome.map(|()| activities.is_empty())
}

/// What one side of a case needs.
pub struct Side<'a> {
    pub case: Case,
    pub seed: u64,
    pub worker: &'a Worker,
    pub endpoint: &'a Endpoint,
    /// The other side's buffer and the offset of the message in it, for put and get.
    pub remote: Option<(&'a RemoteKey, usize)>,
    /// Send a stream in one piece: for timing.
    pub whole: bool,
}

/// Parts of a `tag-many` message, and pieces of a stream on the sending side.
const PARTS: usize = 8;
/// Pieces of a stream on the receiving side: cut differently from the sender's.
const PIECES: usize = 11;

impl Side<'_> {
    /// Tag of part `n`; also the header of active messages.
    fn tag(&self, n: usize) -> u64 {
        (self.case.id << 8) | n as u64
    }

    /// The parts of the message: their tags and ranges.
    fn parts(&self, of: &Span) -> Vec<(u64, Span)> {
        let lengths = cuts(of.len(), PARTS, self.case.key(self.seed, 100));
        let mut at = 0;
        let part = |(n, length)| {
            at += length;
            (self.tag(n), of.part(at - length, length))
        };
        lengths.into_iter().enumerate().map(part).collect()
    }

    fn remote(&self) -> Result<(&RemoteKey, usize)> {
        self.remote.context("no remote key was exchanged")
    }

    pub fn send(&self, from: &Span) -> Result<Box<dyn Activity>> {
        let ep = self.endpoint;
        let am = |mode| ep.am_send(&self.tag(0).to_le_bytes(), from, mode);
        let requests = match self.case.op {
            Op::Tag | Op::TagUnexpected | Op::TagTruncated => vec![ep.tag_send(from, self.tag(0))?],
            Op::TagMany => {
                let parts = self.parts(from).into_iter();
                parts.map(|(tag, part)| ep.tag_send(&part, tag)).collect::<Result<_, _>>()?
            }
            Op::Stream if self.whole => vec![ep.stream_send(from)?],
            Op::Stream => {
                let parts = self.parts(from).into_iter();
                parts.map(|(_, part)| ep.stream_send(&part)).collect::<Result<_, _>>()?
            }
            Op::Am => vec![am(AmMode::Auto)?],
            Op::AmEager => vec![am(AmMode::Eager)?],
            Op::AmRndv => vec![am(AmMode::Rendezvous)?],
            Op::Put => {
                let (key, offset) = self.remote()?;
                vec![ep.put(from, key, offset)?, ep.flush()?]
            }
            Op::Get => vec![],
        };
        Ok(Requests::all(requests, Expected::Success))
    }

    pub fn receive(&self, into: &Span) -> Result<Box<dyn Activity>> {
        let receive = |part: &Span, tag| self.worker.tag_receive(part, tag);
        Ok(match self.case.op {
            Op::Tag | Op::TagUnexpected => {
                Requests::all(vec![receive(into, self.tag(0))?], Expected::Length(into.len()))
            }
            Op::TagMany => {
                let parts = self.parts(into).into_iter().rev();
                let start = |(tag, part): (u64, Span)| -> Result<_> {
                    Ok((receive(&part, tag)?, Expected::Length(part.len())))
                };
                Box::new(Requests(parts.map(start).collect::<Result<_>>()?))
            }
            Op::TagTruncated => {
                let half = into.part(0, truncated(into.len()));
                Requests::all(vec![receive(&half, self.tag(0))?], Expected::Truncated)
            }
            Op::Stream => {
                let cut = || cuts(into.len(), PIECES, self.case.key(self.seed, 101));
                Box::new(StreamReceive {
                    endpoint: self.endpoint.clone(),
                    pieces: if self.whole { vec![into.len()] } else { cut() },
                    into: into.clone(),
                    at: 0,
                    piece: 0,
                    request: None,
                })
            }
            Op::Am | Op::AmEager | Op::AmRndv => Box::new(AmReceive {
                worker: self.worker.clone(),
                header: self.tag(0).to_le_bytes(),
                into: into.clone(),
                rendezvous: self.case.op == Op::AmRndv && !into.is_empty(),
                cancelled: false,
                request: None,
            }),
            Op::Put => Requests::all(vec![], Expected::Success),
            Op::Get => {
                let (key, offset) = self.remote()?;
                Requests::all(vec![self.endpoint.get(into, key, offset)?], Expected::Success)
            }
        })
    }
}

/// How many bytes a `tag-truncated` receive accepts.
pub fn truncated(size: usize) -> usize {
    size / 2
}

/// How a request must end.
#[derive(Clone, Copy)]
enum Expected {
    Success,
    /// With this many bytes received.
    Length(usize),
    /// With an error, because the receive is too small.
    Truncated,
}

/// Requests that must all end as expected.
struct Requests(Vec<(Request, Expected)>);

impl Requests {
    fn all(requests: Vec<Request>, expected: Expected) -> Box<dyn Activity> {
        Box::new(Requests(requests.into_iter().map(|request| (request, expected)).collect()))
    }
}

impl Activity for Requests {
    fn poll(&mut self) -> Result<bool> {
        for (request, expected) in &mut self.0 {
            let Some(done) = request.poll() else { return Ok(false) };
            match (*expected, done) {
                (Expected::Truncated, Err(error)) if error.status == ERR_TRUNCATED => {}
                (Expected::Truncated, Ok(got)) => bail!(
                    "a receive that is too small succeeded with {got} bytes instead of failing as truncated"
                ),
                (Expected::Length(wanted), Ok(got)) => {
                    ensure!(
                        got == wanted,
                        "ucp_tag_recv_nbx reports {got} bytes instead of {wanted}"
                    );
                }
                (Expected::Success, Ok(_)) => {}
                (_, Err(error)) => return Err(error.into()),
            }
        }
        Ok(true)
    }
    fn cancel(&mut self) {
        self.0.iter_mut().for_each(|(request, _)| request.cancel());
    }
    fn waits_for(&mut self) -> Option<&'static str> {
        let mut requests = self.0.iter_mut().map(|(request, _)| request);
        requests.find_map(|request| request.poll().is_none().then(|| request.call()))
    }
}

/// Reads the stream piece by piece. Every second piece takes what has arrived instead of waiting for all of it.
struct StreamReceive {
    endpoint: Endpoint,
    into: Span,
    /// Lengths still to receive, from `piece` on.
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
                let (got, asked) = (done?, *asked);
                let complete = if *all { got == asked } else { got > 0 && got <= asked };
                ensure!(complete, "ucp_stream_recv_nbx gave {got} bytes when asked for {asked}");
                self.at += got;
                self.request = None;
                // Ask again for the rest if such a receive got less than it asked for.
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
        self.request.iter_mut().for_each(|(request, ..)| request.cancel());
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
                return Ok(true); // no message came, so UCX has nothing of ours
            }
            let Some(message) = self.worker.take_message() else { return Ok(false) };
            let (length, expected) = (message.length(), self.into.len());
            ensure!(message.header() == self.header, "active message with a wrong header");
            ensure!(length == expected, "active message of {length} bytes instead of {expected}");
            ensure!(
                message.is_rendezvous() || !self.rendezvous,
                "an active message sent as rendezvous arrived eagerly"
            );
            self.request = message.receive(&self.into)?;
            if self.request.is_none() {
                ensure!(length == 0, "UCX did not keep the data of an active message for us");
                return Ok(true);
            }
        }
        let done = self.request.as_mut().and_then(Request::poll).transpose()?;
        Ok(done.is_some())
    }
    fn cancel(&mut self) {
        self.cancelled = true;
        self.request.iter_mut().for_each(Request::cancel);
    }
}
