//! What takes a card down: faults of its queues and the watchdog's timeout.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::realtime_ns;
use crate::asic::Generation;
use crate::context::Context;
use crate::events::bit;
use crate::processor::Fault;
use crate::state::Word;
use crate::submission::{Outcome, Submission};

impl Context {
    /// How long the oldest submission may still take.
    pub(crate) fn until_timeout(&self) -> Duration {
        const LOOK: Duration = Duration::from_secs(1);
        match self.window.oldest() {
            Some(oldest) if !oldest.is_overdue() => {
                self.time_left(&oldest).max(Duration::from_millis(1))
            }
            _ => LOOK,
        }
    }

    /// How much longer the oldest submission may take. Its time starts when it was submitted, or when any submission
    /// last ended, whichever is later.
    fn time_left(&self, oldest: &Submission) -> Duration {
        let since = oldest
            .submitted
            .max(self.epoch + Duration::from_nanos(self.last_end.load(Ordering::Relaxed)));
        oldest.timeout.saturating_sub(since.elapsed())
    }

    /// Resets the card if its oldest submission is stuck. A submission with the flag to skip the reset stays in flight
    /// instead, and hides those behind it from the watchdog, as in the driver's list.
    pub(crate) fn check_timeout(&self) {
        self.report_ends();
        let Some(oldest) = self.window.oldest() else { return };
        if !self.time_left(&oldest).is_zero() || self.down.load(Ordering::Acquire) {
            return;
        }
        // Several threads may get here at once.
        if !oldest.set_overdue() {
            return;
        }
        self.node.log_kernel_error(self.device, "timeout", libc::ETIMEDOUT);
        // Only the first timeout of a context is recorded and announced; each is logged.
        let is_first = self.state.record(Word::CsTimeout, realtime_ns(), oldest.seq, 0);
        let timeout = if is_first { bit::CS_TIMEOUT } else { 0 };
        if !oldest.spares_card {
            self.events.raise(timeout | bit::DEVICE_RESET);
            self.reset(Some(&oldest));
        } else if is_first {
            self.events.raise(timeout);
        }
    }

    /// A queue hit an error: the driver resets the card.
    pub(super) fn fault(&self, queue: u32, fault: Fault) {
        let now = realtime_ns();
        let (what, bits) = match fault {
            Fault::Page { addr } => {
                let known = self.fault_address(addr);
                self.state.record(Word::PageFault, now, known, queue.into());
                let mapped = self.space().translate(addr).is_some();
                let why = if !mapped {
                    ""
                } else if self.node.is_full() {
                    // The card's memory is a sparse file, whose pages take space when they are written.
                    self.node.advise_on_space();
                    ": no space left for the card's memory"
                } else {
                    // The program unmapped its memory.
                    ", which is mapped: no host memory behind it"
                };
                (format!("page fault at {addr:#x}{why}"), bit::PAGE_FAULT)
            }
            Fault::Razwi { addr, .. } => {
                self.state.record(Word::Razwi, now, addr, queue.into());
                (format!("nobody answers at {addr:#x} (RAZWI)"), bit::RAZWI)
            }
            Fault::Rule { addr } => {
                self.state.record(Word::Razwi, now, addr, queue.into());
                (
                    format!("length or address breaks SOFT_GAUDI_DMA_ALIGNMENT ({addr:#x})"),
                    bit::RAZWI,
                )
            }
            Fault::Opcode | Fault::Fetch { .. } => {
                self.state.record(Word::UndefinedOpcode, now, 0, queue.into());
                ("undefined packet".to_owned(), bit::UNDEFINED_OPCODE)
            }
        };
        self.events.raise(bits | bit::USER_ENGINE_ERROR | bit::DEVICE_RESET);
        eprintln!(
            "soft-gaudi: device {} ({}), queue {queue}: {what}; the device is reset",
            self.device,
            crate::asic::bus_id(self.device)
        );
        self.reset(None);
    }

    /// The part of a faulting address that the MMUs of a Gaudi2 report.
    fn fault_address(&self, addr: u64) -> u64 {
        let lost = match self.profile.generation {
            Generation::Gaudi1 => 0,
            _ if self.profile.dram_va.contains(addr, 1) => (1 << 26) - 1,
            _ => 0xff,
        };
        addr & !lost
    }

    /// Takes the card down: what is in flight ends, nothing new is accepted until it is reopened.
    pub(crate) fn reset(&self, stuck: Option<&Submission>) {
        if !self.down.load(Ordering::Acquire) {
            self.state.reset();
            self.kill_holder_later();
        }
        self.take_down(stuck);
    }

    /// Ends what is in flight, accepts nothing new.
    pub(crate) fn take_down(&self, stuck: Option<&Submission>) {
        if self.down.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(stuck) = stuck {
            self.end(stuck, Outcome::TimedOut);
        }
        for submission in self.window.pending() {
            self.end(&submission, Outcome::Aborted);
        }
        self.window.close();
        self.interrupts.close();
    }
}
