//! Bodies of frames, field by field: writing them, and reading them with every bound checked.

use super::{
    Datagram, Hello, MAX_SEGMENTS, MAX_TOKENS, Malformed, Opcode, Outcome, Reference, Request,
    Response, Segment, Token, Welcome,
};

/// Something in a body.
pub(super) trait Field: Sized {
    /// Appends it.
    fn put(&self, out: &mut Vec<u8>);
    /// Takes it off the front of a body.
    fn take(body: &mut &[u8]) -> Result<Self, Malformed>;
}

macro_rules! numbers {
    ($($type:ty)*) => {$(
        impl Field for $type {
            fn put(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
                let (bytes, rest) = body.split_first_chunk().ok_or(Malformed)?;
                *body = rest;
                Ok(Self::from_le_bytes(*bytes))
            }
        }
    )*};
}

numbers! { u8 u16 u32 u64 }

/// The fields of a structure, in the order in which they are sent.
macro_rules! structures {
    ($($name:ident { $($field:ident),* })*) => {$(
        impl Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }
            fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
                Ok(Self { $($field: Field::take(body)?),* })
            }
        }
    )*};
}

structures! {
    Segment { addr, len }
    Token { addr, value }
    Request {
        dst_qpn, src_qpn, src_lid, dst_lid, psn, opcode, imm, solicited, length, remote, operands, by_reference
    }
    Response { dst_qpn, src_qpn, psn, outcome }
    Datagram { dst_qpn, src_qpn, src_lid, dst_lid, qkey, sl, imm, solicited, grh }
    Hello { probe }
    Welcome { direct, probe }
}

impl Field for bool {
    fn put(&self, out: &mut Vec<u8>) {
        u8::from(*self).put(out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        match u8::take(body)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Malformed),
        }
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        self.iter().for_each(|field| field.put(out));
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        bool::take(body)?.then(|| T::take(body)).transpose()
    }
}

impl<A: Field, B: Field> Field for (A, B) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        Ok((A::take(body)?, B::take(body)?))
    }
}

impl<A: Field, B: Field, C: Field> Field for (A, B, C) {
    fn put(&self, out: &mut Vec<u8>) {
        self.0.put(out);
        self.1.put(out);
        self.2.put(out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        Ok((A::take(body)?, B::take(body)?, C::take(body)?))
    }
}

impl Field for Opcode {
    fn put(&self, out: &mut Vec<u8>) {
        (*self as u8).put(out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        let code = usize::from(u8::take(body)?);
        let known = [Self::Send, Self::Write, Self::Read, Self::CompareSwap, Self::FetchAdd];
        known.get(code).copied().ok_or(Malformed)
    }
}

impl Field for Outcome {
    fn put(&self, out: &mut Vec<u8>) {
        let message: (u8, u64) = match *self {
            Self::Ack(value) => (0, value),
            Self::ReceiverNotReady(timer) => (1, (timer & 31).into()),
            Self::Dropped => (2, 0),
            Self::InvalidRequest => (3, 0),
            Self::AccessError => (4, 0),
            Self::OperationError => (5, 0),
            Self::RequesterFault => (6, 0),
        };
        message.put(out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(match <(u8, u64)>::take(body)? {
            (0, value) => Self::Ack(value),
            (1, timer @ 0..32) => Self::ReceiverNotReady(timer as u8),
            (2, 0) => Self::Dropped,
            (3, 0) => Self::InvalidRequest,
            (4, 0) => Self::AccessError,
            (5, 0) => Self::OperationError,
            (6, 0) => Self::RequesterFault,
            _ => return Err(Malformed),
        })
    }
}

/// A number of things, and the things.
fn put_list<T: Field>(list: &[T], most: usize, out: &mut Vec<u8>) {
    let list = &list[..list.len().min(most)];
    (list.len() as u16).put(out);
    list.iter().for_each(|item| item.put(out));
}

fn take_list<T: Field>(body: &mut &[u8], most: usize) -> Result<Vec<T>, Malformed> {
    let count = usize::from(u16::take(body)?);
    if count > most {
        return Err(Malformed);
    }
    (0..count).map(|_| T::take(body)).collect()
}

impl Field for Reference {
    fn put(&self, out: &mut Vec<u8>) {
        put_list(&self.tokens, MAX_TOKENS, out);
        put_list(&self.segments, MAX_SEGMENTS, out);
    }
    fn take(body: &mut &[u8]) -> Result<Self, Malformed> {
        let tokens = take_list(body, MAX_TOKENS)?;
        Ok(Self { tokens, segments: take_list(body, MAX_SEGMENTS)? })
    }
}
