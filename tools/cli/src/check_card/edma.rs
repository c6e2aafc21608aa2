//! The only step that hangs an engine if the vendor's sources are right: does an EDMA engine fetch a command buffer
//! from host memory?
//!
//! According to those sources a Gaudi2's engine does not. The submission asks the driver not to reset the card on a
//! timeout. It then stays in flight, and the driver resets the card when the process ends. So another process opens the
//! card afterwards.

use std::time::Duration;

use hl_thunk::Generation;
use serde_json::json;

use super::bench::{self, Bench, Image, SubmitFailure};
use super::copies::{fetch, place};
use super::pattern::{SLOT, noise};
use super::queries::{self, ms};
use crate::report::Finding;

/// Queue of the first EDMA engine.
const QUEUE: u32 = 8;
/// How long opening may fail after the driver reset the whole card.
const PATIENCE: Duration = Duration::from_secs(120);
const SEND_BACK: &str = "send this report and the kernel log";

/// Submits a copy within the card to an EDMA queue, its command buffer in host memory.
pub(super) fn host_command_buffer(bench: &mut Bench) -> Finding {
    if bench.device().generation() != Generation::Gaudi2 {
        return Finding::skipped("", "only a Gaudi2 has EDMA queues for users");
    }
    let (from, to) = (Image::Device(0), Image::Device(1));
    let (bytes, before) = (noise(1, 1), noise(2, 1));
    let placed = place(bench, from, &bytes).and_then(|()| place(bench, to, &before));
    if let Err(why) = placed {
        return not_submitted(&why);
    }
    let copy = bench.copy(from, to, SLOT);
    let outcome = bench.dma_without_reset(QUEUE, &[copy]);
    if let Err(why @ SubmitFailure::Refused(_)) = &outcome {
        return not_submitted(why);
    }
    let data = |fetches: Option<bool>, survived: bool| json!({"submitted": true, "fetches_host": fetches, "survived": survived});
    if let Err(lost) = bench::works(bench.device()) {
        let outcome = outcome.map_or_else(|why| why.to_string(), |_| String::from("done"));
        let found = format!("the card is lost after an EDMA submission ({outcome}): {lost}");
        return Finding::bad("", found, SEND_BACK).with(data(None, false));
    }
    match outcome {
        Ok(_) => match fetch(bench, to, SLOT).map(|got| got == bytes) {
            Ok(true) => Finding::good("", "EDMA fetched its command buffer from host memory")
                .with(data(Some(true), true)),
            Ok(false) => {
                let found = "EDMA reports a copy as done that did not arrive";
                Finding::warning("", found, SEND_BACK).with(data(None, true))
            }
            Err(why) => Finding::bad("", why.to_string(), SEND_BACK).with(data(None, true)),
        },
        Err(SubmitFailure::Failed(error)) if error.errno != libc::ETIMEDOUT => {
            Finding::bad("", error.to_string(), SEND_BACK).with(data(None, true))
        }
        Err(why) => {
            let found = format!("EDMA did not fetch from host memory ({why}); other queues work");
            Finding::good("", found).with(data(Some(false), true))
        }
    }
}

fn not_submitted(why: &SubmitFailure) -> Finding {
    let data = json!({"submitted": false, "fetches_host": null, "survived": null});
    Finding::warning("", format!("not submitted: {why}"), SEND_BACK).with(data)
}

/// Opens the card after the submitting process has ended, and checks that it works.
pub(super) fn reopen(bus_id: &str) -> Finding {
    let (failed, library) = queries::library();
    let Some(library) = library else { return failed };
    match queries::open(&library, bus_id, PATIENCE) {
        Ok((device, took, refused)) => {
            let data = json!({"open_ms": took.as_secs_f64() * 1e3, "eagain_ms": refused.as_secs_f64() * 1e3});
            let times = format!("{}, after {} of EAGAIN", ms(took), ms(refused));
            match bench::works(&device) {
                Ok(()) => Finding::good("", format!("the card opens again ({times}) and works")),
                Err(why) => {
                    let found = format!("the card opens again ({times}), but: {why}");
                    Finding::bad("", found, SEND_BACK)
                }
            }
            .with(data)
        }
        Err((failure, waited)) => {
            let found = format!("{} (tried for {})", failure.what, ms(waited));
            Finding::bad("", found, failure.remedy)
        }
    }
}
