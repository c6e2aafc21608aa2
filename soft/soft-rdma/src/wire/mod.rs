//! Messages between HCAs: a fixed header, a body, and for some a payload that follows.
//!
//! A stream carries frames: 8 bytes of header (length of the body, kind, length of the payload), then the body, then
//! the payload, and after the payload of a request or response a [`Verdict`]. Everything is little endian.
//! [`Frame::decode`] is total: any bytes of another process give a frame or an error, never a panic, and no length in
//! them is used before it was compared with a limit.

mod cursor;

use cursor::Field;

/// Bytes in front of every body.
pub(crate) const HEADER: usize = 8;
/// Longest message (`max_msg_sz` of a port).
pub(crate) const MAX_MESSAGE: u32 = 1 << 30;
/// Longest payload that may be asked to travel inside a request on one node.
pub(crate) const MAX_INLINE: u32 = 64 << 10;
/// Longest datagram: the path MTU.
pub(crate) const MAX_DATAGRAM: u32 = 4096;
/// Most segments that a request may name; `process_vm_readv` takes no more.
pub(crate) const MAX_SEGMENTS: usize = 1024;
/// Most tokens of a reference: of the work, and of the region of each scatter/gather element.
pub(crate) const MAX_TOKENS: usize = 32;
const MAX_BODY: usize = 128 + (MAX_SEGMENTS + MAX_TOKENS) * 16;

/// A piece of memory in the address space of the process that sent the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// Address of its first byte.
    pub(crate) addr: u64,
    /// Its length.
    pub(crate) len: u64,
}

/// A word of the process that sent the frame. A peer reads it after it has copied bytes. If the word still has this
/// value, the bytes are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    /// Address of the word.
    pub(crate) addr: u64,
    /// Its value.
    pub(crate) value: u64,
}

/// Memory of the process that sent the frame, to be copied by the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Where the bytes are.
    pub(crate) segments: Vec<Segment>,
    /// To be compared after the copy. The first is of the work, the others are of the regions.
    pub(crate) tokens: Vec<Token>,
}

impl Reference {
    /// Bytes in all; `None` if that is beyond any message.
    pub(crate) fn length(&self) -> Option<u32> {
        let sum = self.segments.iter().try_fold(0u64, |sum, segment| sum.checked_add(segment.len));
        sum.and_then(|sum| u32::try_from(sum).ok()).filter(|sum| *sum <= MAX_MESSAGE)
    }
}

/// How a payload ended: the byte that follows the payload of a request or response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Verdict {
    /// All bytes are right.
    Complete = 0,
    /// The sender's memory was deregistered meanwhile: not all of them are.
    RegionGone = 1,
    /// The sender's queue pair was flushed meanwhile: not all of them are.
    WorkGone = 2,
}

impl TryFrom<u8> for Verdict {
    type Error = Malformed;

    fn try_from(byte: u8) -> Result<Self, Malformed> {
        match byte {
            0 => Ok(Self::Complete),
            1 => Ok(Self::RegionGone),
            2 => Ok(Self::WorkGone),
            _ => Err(Malformed),
        }
    }
}

/// Operations of a reliable connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Opcode {
    /// Fills a receive buffer.
    Send = 0,
    /// Writes to memory of the peer.
    Write = 1,
    /// Reads memory of the peer.
    Read = 2,
    /// Compares and swaps 8 bytes.
    CompareSwap = 3,
    /// Adds to 8 bytes.
    FetchAdd = 4,
}

/// A request of a reliable connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Queue pair that is to execute it.
    pub(crate) dst_qpn: u32,
    /// Queue pair that sent it.
    pub(crate) src_qpn: u32,
    /// LID of the sender's port.
    pub(crate) src_lid: u16,
    /// LID of the receiver's port.
    pub(crate) dst_lid: u16,
    /// Sequence number, 24 bits.
    pub(crate) psn: u32,
    /// What to do.
    pub(crate) opcode: Opcode,
    /// Immediate data, as the program gave it.
    pub(crate) imm: Option<u32>,
    /// Whether the receiver asked to be notified of it.
    pub(crate) solicited: bool,
    /// Bytes of the message.
    pub(crate) length: u32,
    /// Remote address and key of one-sided operations.
    pub(crate) remote: (u64, u32),
    /// Operands of atomics: compare or add, swap.
    pub(crate) operands: (u64, u64),
    /// Where the data is in the sender's memory. `None`: it follows as payload. For a read it is
    /// empty and means that the sender can copy what is offered; `None`: it comes back as payload.
    pub(crate) by_reference: Option<Reference>,
}

impl Request {
    /// Whether its length is one of a message, and that of the memory it names.
    fn is_sound(&self) -> bool {
        let named = if self.opcode == Opcode::Read { 0 } else { self.length };
        let reference = self.by_reference.as_ref();
        self.length <= MAX_MESSAGE && reference.is_none_or(|it| it.length() == Some(named))
    }
}

/// How a request ended, for the requester.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Done. Carries the old value of an atomic.
    Ack(u64),
    /// No receive buffer; try again after the time with this code.
    ReceiverNotReady(u8),
    /// Not accepted: the queue pair does not exist, is not ready or expects something else.
    Dropped,
    /// The request is malformed for this queue pair.
    InvalidRequest,
    /// Key, range or access right is wrong.
    AccessError,
    /// The responder could not finish it.
    OperationError,
    /// The responder could not reach the requester's memory.
    RequesterFault,
}

/// Answer to a request. For a read that is not offered the data follows as payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Response {
    /// Queue pair that asked.
    pub(crate) dst_qpn: u32,
    /// Queue pair that answers.
    pub(crate) src_qpn: u32,
    /// The request's sequence number.
    pub(crate) psn: u32,
    /// How it ended.
    pub(crate) outcome: Outcome,
}

/// An unreliable datagram; its bytes follow as payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    /// Queue pair it is for.
    pub(crate) dst_qpn: u32,
    /// Queue pair that sent it.
    pub(crate) src_qpn: u32,
    /// LID of the sender's port.
    pub(crate) src_lid: u16,
    /// LID of the receiver's port.
    pub(crate) dst_lid: u16,
    /// Must equal the receiving queue pair's.
    pub(crate) qkey: u32,
    /// Service level.
    pub(crate) sl: u8,
    /// Immediate data.
    pub(crate) imm: Option<u32>,
    /// Whether the receiver asked to be notified of it.
    pub(crate) solicited: bool,
    /// Traffic class, flow label and hop limit, if sent with a global route header.
    pub(crate) grh: Option<(u8, u32, u8)>,
}

/// First message of a connection, by the side that connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// Address of eight random bytes in the sender's memory, and these bytes. A process that can read them there can
    /// copy from region to region.
    pub(crate) probe: (u64, u64),
}

/// Answer of the side that accepted; requests may follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    /// Whether the accepting side can read the other's memory.
    pub(crate) direct: bool,
    /// As that of [`Hello`], for the other direction.
    pub(crate) probe: (u64, u64),
}

/// Any message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    /// See [`Request`].
    Request(Request),
    /// See [`Response`].
    Response(Response),
    /// Answer to a read: where the requester finds the bytes.
    Offer(Response, Reference),
    /// See [`Datagram`].
    Datagram(Datagram),
    /// See [`Hello`].
    Hello(Hello),
    /// See [`Welcome`].
    Welcome(Welcome),
}

/// Why bytes are not a frame. The connection cannot be used any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Malformed;

/// Appends a body; returns the kind of its frame.
fn put(kind: u8, body: &impl Field, out: &mut Vec<u8>) -> u8 {
    body.put(out);
    kind
}

impl Frame {
    /// Appends header and body; `payload` bytes are to follow.
    pub(crate) fn encode(&self, payload: u32, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEADER]);
        let kind = match self {
            Self::Request(request) => put(1, request, out),
            Self::Response(response) => put(2, response, out),
            Self::Datagram(datagram) => put(3, datagram, out),
            Self::Hello(hello) => put(4, hello, out),
            Self::Welcome(welcome) => put(5, welcome, out),
            Self::Offer(response, reference) => {
                response.put(out);
                put(6, reference, out)
            }
        };
        let body = (out.len() - start - HEADER) as u16;
        out[start..start + 2].copy_from_slice(&body.to_le_bytes());
        out[start + 2] = kind;
        out[start + 4..start + 8].copy_from_slice(&payload.to_le_bytes());
    }

    /// The frame at the start of `bytes`, its length without payload, and the payload's length.
    /// `Ok(None)` when more bytes are needed.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize, u32)>, Malformed> {
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let body = usize::from(u16::from_le_bytes([header[0], header[1]]));
        let payload = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
        if body > MAX_BODY || payload > MAX_MESSAGE || header[3] != 0 {
            return Err(Malformed);
        }
        let Some(body) = rest.get(..body) else { return Ok(None) };
        let mut rest = body;
        let frame = match header[2] {
            1 => Self::Request(Field::take(&mut rest)?),
            2 => Self::Response(Field::take(&mut rest)?),
            3 => Self::Datagram(Field::take(&mut rest)?),
            4 => Self::Hello(Field::take(&mut rest)?),
            5 => Self::Welcome(Field::take(&mut rest)?),
            6 => Self::Offer(Field::take(&mut rest)?, Field::take(&mut rest)?),
            _ => return Err(Malformed),
        };
        if !rest.is_empty() || matches!(&frame, Self::Request(request) if !request.is_sound()) {
            return Err(Malformed);
        }
        if payload > frame.payload_limit() {
            return Err(Malformed);
        }
        Ok(Some((frame, HEADER + body.len(), payload)))
    }

    /// Whether a verdict follows the payload.
    pub(crate) fn has_verdict(&self) -> bool {
        matches!(self, Self::Request(_) | Self::Response(_))
    }

    /// The longest payload that may follow.
    fn payload_limit(&self) -> u32 {
        match self {
            Self::Request(request) => match (request.opcode, &request.by_reference) {
                (Opcode::Send | Opcode::Write, None) => request.length,
                _ => 0,
            },
            Self::Response(_) => MAX_MESSAGE,
            Self::Datagram(_) => MAX_DATAGRAM,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests;
