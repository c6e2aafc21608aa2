//! The expected content of a case's two buffers before and after the message is moved, and the comparison.

use crate::buffer::Buffer;
use crate::client::Client;
use crate::matrix::{Case, Op, Sabotage};
use crate::ops::truncated;
use crate::pattern::{Image, Layout};
use anyhow::Result;

/// The purposes of the keys from which the patterns and layouts of a case are made.
mod key {
    pub(super) const MESSAGE: u64 = 0;
    pub(super) const LAYOUTS: [u64; 2] = [1, 2];
    pub(super) const SRC_POISON: u64 = 3;
    pub(super) const DST_POISON: u64 = 4;
}

/// The round of a case that moves its message once and compares it.
pub const ONCE: u64 = 0;
/// The round that moves it many times and times it.
pub const TIMED: u64 = 1;

/// A message: its place in the source and in the destination, and every byte of both.
pub struct Message {
    pub case: Case,
    /// Source and destination.
    pub layouts: [Layout; 2],
    sent: Image,
    blank: Image,
    received: Image,
}

impl Message {
    /// The message of a case. The bytes of the destination before the receive differ from round to round.
    pub fn new(case: Case, seed: u64, round: u64) -> Message {
        Message::placed(case, seed, round, Message::layouts(case, seed, round))
    }

    /// Where the message of a case lies in source and destination; both sides know both. A message that is compared
    /// lies at odd offsets. A message that is timed lies at the start of a page: a copy between two odd offsets can
    /// take eight times as long as between two others, so its time would depend on the seed.
    pub fn layouts(case: Case, seed: u64, round: u64) -> [Layout; 2] {
        if round == TIMED {
            return [Layout::aligned(case.size); 2];
        }
        key::LAYOUTS.map(|what| Layout::new(case.size, case.key(seed, what)))
    }

    /// The same at other places in its buffers.
    pub fn placed(case: Case, seed: u64, round: u64, layouts: [Layout; 2]) -> Message {
        let key = |what| case.key(seed, what);
        let (message, poison) = (key(key::MESSAGE), key(key::DST_POISON + round));
        let [source, destination] = layouts;
        Message {
            case,
            layouts,
            sent: Image::message(source, key(key::SRC_POISON), message),
            blank: Image::poisoned(destination, poison),
            received: if case.op == Op::TagTruncated {
                Image::truncated(destination, poison, truncated(case.size))
            } else {
                Image::message(destination, poison, message)
            },
        }
    }

    /// Fills the sender's buffer; it must stay unchanged until the end.
    pub fn fill_source(&self, client: &Client, source: &Buffer) -> Result<()> {
        source.fill(client, &self.sent)
    }

    /// Fills the receiver's buffer with bytes that no message has.
    pub fn poison_destination(&self, client: &Client, destination: &Buffer) -> Result<()> {
        destination.fill(client, &self.blank)
    }

    /// Compares those buffers that are ours with their expected content after the move; returns what is wrong. If the
    /// plan asks for damage, does that first.
    pub fn verify(
        &self,
        client: &Client,
        source: Option<&Buffer>,
        destination: Option<&Buffer>,
        sabotage: Option<Sabotage>,
    ) -> Result<Vec<String>> {
        let end = self.layouts[1].before + self.case.size;
        match (sabotage, source, destination) {
            (Some(Sabotage::Message), _, Some(destination)) if self.case.size > 0 => {
                destination.damage(client, end - 1)?;
            }
            (Some(Sabotage::Guard), _, Some(destination)) => destination.damage(client, end)?,
            (Some(Sabotage::Source), Some(source), _) => source.damage(client, 0)?,
            _ => {}
        }
        let mut wrong = Vec::new();
        for (what, buffer, image) in [
            ("destination", destination, &self.received),
            ("source (must not change)", source, &self.sent),
        ] {
            let Some(buffer) = buffer else { continue };
            if let Err(mismatch) = buffer.verify(client, image)? {
                wrong.push(format!("{what} at {:#x}: {mismatch}", buffer.address()));
            }
        }
        Ok(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::matrix::tests::plan;

    /// The offset must not depend on the seed or the case number: otherwise times of one program could not be compared.
    #[test]
    fn timed_messages_begin_at_pages_and_others_at_odd_offsets() {
        for (case, seed) in plan("--sizes 1,64K,1M").cases().zip(1..) {
            let before = |round| Message::new(case, seed, round).layouts.map(|it| it.before);
            assert_eq!(before(TIMED).map(|it| it % 4096), [0, 0], "{case}");
            assert_eq!(before(ONCE).map(|it| it % 2), [1, 1], "{case}");
        }
    }
}
