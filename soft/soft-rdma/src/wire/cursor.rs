//! Bodies of frames, field by field: writing them, and reading them with every bound checked.

use super::{
    Datagram, Hello, MAX_MESSAGE, MAX_SEGMENTS, MAX_TOKENS, Malformed, Opcode, Outcome, Reference,
    Request, Response, Segment, Token, Welcome,
};

const IMM: u8 = 1;
const SOLICITED: u8 = 2;
const BY_REFERENCE: u8 = 4;
const GRH: u8 = 8;

/// Writing; each function returns the kind of its frame.
pub(super) mod put {
    use super::*;

    fn flags(imm: Option<u32>, solicited: bool) -> u8 {
        (u8::from(imm.is_some()) * IMM) | (u8::from(solicited) * SOLICITED)
    }

    pub(in super::super) fn request(request: &Request, out: &mut Vec<u8>) -> u8 {
        let by_reference = u8::from(request.by_reference.is_some()) * BY_REFERENCE;
        out.push(request.opcode as u8);
        out.push(flags(request.imm, request.solicited) | by_reference);
        out.extend_from_slice(&request.src_lid.to_le_bytes());
        out.extend_from_slice(&request.dst_lid.to_le_bytes());
        for word in [request.dst_qpn, request.src_qpn, request.psn, request.imm.unwrap_or(0)] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&request.length.to_le_bytes());
        out.extend_from_slice(&request.remote.1.to_le_bytes());
        for word in [request.remote.0, request.operands.0, request.operands.1] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        if let Some(reference) = &request.by_reference {
            self::reference(reference, out);
        }
        1
    }

    fn reference(reference: &Reference, out: &mut Vec<u8>) {
        let tokens = &reference.tokens[..reference.tokens.len().min(MAX_TOKENS)];
        let segments = &reference.segments[..reference.segments.len().min(MAX_SEGMENTS)];
        out.push(tokens.len() as u8);
        let tokens = tokens.iter().map(|token| [token.addr, token.value]);
        let segments = segments.iter().map(|segment| [segment.addr, segment.len]);
        for word in tokens.chain(segments).flatten() {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    pub(in super::super) fn offer(
        response: &Response,
        reference: &Reference,
        out: &mut Vec<u8>,
    ) -> u8 {
        self::response(response, out);
        self::reference(reference, out);
        6
    }

    pub(in super::super) fn welcome(welcome: &Welcome, out: &mut Vec<u8>) -> u8 {
        out.push(u8::from(welcome.direct));
        out.extend_from_slice(&welcome.probe.0.to_le_bytes());
        out.extend_from_slice(&welcome.probe.1.to_le_bytes());
        5
    }

    pub(in super::super) fn response(response: &Response, out: &mut Vec<u8>) -> u8 {
        for word in [response.dst_qpn, response.src_qpn, response.psn] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        let (code, value) = match response.outcome {
            Outcome::Ack(value) => (0, value),
            Outcome::ReceiverNotReady(timer) => (1, u64::from(timer)),
            Outcome::Dropped => (2, 0),
            Outcome::InvalidRequest => (3, 0),
            Outcome::AccessError => (4, 0),
            Outcome::OperationError => (5, 0),
            Outcome::RequesterFault => (6, 0),
        };
        out.push(code);
        out.extend_from_slice(&value.to_le_bytes());
        2
    }

    pub(in super::super) fn datagram(datagram: &Datagram, out: &mut Vec<u8>) -> u8 {
        let grh = u8::from(datagram.grh.is_some()) * GRH;
        out.push(flags(datagram.imm, datagram.solicited) | grh);
        out.push(datagram.sl);
        out.extend_from_slice(&datagram.src_lid.to_le_bytes());
        out.extend_from_slice(&datagram.dst_lid.to_le_bytes());
        let (class, label, hops) = datagram.grh.unwrap_or_default();
        for word in
            [datagram.dst_qpn, datagram.src_qpn, datagram.qkey, datagram.imm.unwrap_or(0), label]
        {
            out.extend_from_slice(&word.to_le_bytes());
        }
        out.extend_from_slice(&[class, hops]);
        3
    }

    pub(in super::super) fn hello(hello: &Hello, out: &mut Vec<u8>) -> u8 {
        out.extend_from_slice(&hello.probe.0.to_le_bytes());
        out.extend_from_slice(&hello.probe.1.to_le_bytes());
        4
    }
}

/// Reads a body from front to back.
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(body: &'a [u8]) -> Self {
        Self { rest: body }
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (array, rest) = self.rest.split_first_chunk::<N>().ok_or(Malformed)?;
        self.rest = rest;
        Ok(*array)
    }

    fn u8(&mut self) -> Result<u8, Malformed> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }

    /// All bytes must have been used.
    pub(super) fn end(&self) -> Result<(), Malformed> {
        if self.rest.is_empty() { Ok(()) } else { Err(Malformed) }
    }

    pub(super) fn request(&mut self) -> Result<Request, Malformed> {
        let opcode = match self.u8()? {
            0 => Opcode::Send,
            1 => Opcode::Write,
            2 => Opcode::Read,
            3 => Opcode::CompareSwap,
            4 => Opcode::FetchAdd,
            _ => return Err(Malformed),
        };
        let flags = self.u8()?;
        if flags & !(IMM | SOLICITED | BY_REFERENCE) != 0 {
            return Err(Malformed);
        }
        let (src_lid, dst_lid) = (self.u16()?, self.u16()?);
        let (dst_qpn, src_qpn, psn) = (self.u32()?, self.u32()?, self.u32()?);
        let (imm, length, rkey) = (self.u32()?, self.u32()?, self.u32()?);
        let remote = (self.u64()?, rkey);
        let operands = (self.u64()?, self.u64()?);
        if length > MAX_MESSAGE {
            return Err(Malformed);
        }
        let mut by_reference = None;
        if flags & BY_REFERENCE != 0 {
            let reference = self.reference()?;
            let named = if opcode == Opcode::Read { 0 } else { length };
            if reference.length() != Some(named) {
                return Err(Malformed);
            }
            by_reference = Some(reference);
        }
        Ok(Request {
            dst_qpn,
            src_qpn,
            src_lid,
            dst_lid,
            psn,
            opcode,
            imm: (flags & IMM != 0).then_some(imm),
            solicited: flags & SOLICITED != 0,
            length,
            remote,
            operands,
            by_reference,
        })
    }

    /// Everything to the end of the body.
    pub(super) fn reference(&mut self) -> Result<Reference, Malformed> {
        let count = usize::from(self.u8()?);
        if count > MAX_TOKENS || self.rest.len() > (count + MAX_SEGMENTS) * 16 {
            return Err(Malformed);
        }
        let mut tokens = Vec::with_capacity(count);
        for _ in 0..count {
            tokens.push(Token { addr: self.u64()?, value: self.u64()? });
        }
        let mut segments = Vec::with_capacity(self.rest.len() / 16);
        while !self.rest.is_empty() {
            segments.push(Segment { addr: self.u64()?, len: self.u64()? });
        }
        Ok(Reference { segments, tokens })
    }

    pub(super) fn welcome(&mut self) -> Result<Welcome, Malformed> {
        Ok(Welcome { direct: self.flag()?, probe: (self.u64()?, self.u64()?) })
    }

    pub(super) fn response(&mut self) -> Result<Response, Malformed> {
        let (dst_qpn, src_qpn, psn) = (self.u32()?, self.u32()?, self.u32()?);
        let (code, value) = (self.u8()?, self.u64()?);
        let outcome = match code {
            0 => Outcome::Ack(value),
            1 => Outcome::ReceiverNotReady(value as u8 & 31),
            2 => Outcome::Dropped,
            3 => Outcome::InvalidRequest,
            4 => Outcome::AccessError,
            5 => Outcome::OperationError,
            6 => Outcome::RequesterFault,
            _ => return Err(Malformed),
        };
        Ok(Response { dst_qpn, src_qpn, psn, outcome })
    }

    pub(super) fn datagram(&mut self) -> Result<Datagram, Malformed> {
        let (flags, sl) = (self.u8()?, self.u8()?);
        if flags & !(IMM | SOLICITED | GRH) != 0 {
            return Err(Malformed);
        }
        let (src_lid, dst_lid) = (self.u16()?, self.u16()?);
        let (dst_qpn, src_qpn, qkey) = (self.u32()?, self.u32()?, self.u32()?);
        let (imm, label) = (self.u32()?, self.u32()?);
        let (class, hops) = (self.u8()?, self.u8()?);
        Ok(Datagram {
            dst_qpn,
            src_qpn,
            src_lid,
            dst_lid,
            qkey,
            sl,
            imm: (flags & IMM != 0).then_some(imm),
            solicited: flags & SOLICITED != 0,
            grh: (flags & GRH != 0).then_some((class, label, hops)),
        })
    }

    pub(super) fn hello(&mut self) -> Result<Hello, Malformed> {
        Ok(Hello { probe: (self.u64()?, self.u64()?) })
    }
}
