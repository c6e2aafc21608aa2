//! Reads settings from the environment, for programs that use the C functions before UCX has read its configuration.
//!
//! Ignores invalid values: UCX reports them when it reads its configuration.

use std::sync::Once;
use std::time::Duration;

use gaudi::{Options, runtime};
use uct::config::Ternary;

use crate::settings;

/// A variable behind `UCX_GAUDI_`, or behind its other prefix.
pub(crate) fn variable(name: &str) -> Option<String> {
    let prefixes = ["UCX_GAUDI_", settings::ALIAS];
    prefixes.iter().find_map(|prefix| std::env::var(format!("{prefix}{name}")).ok())
}

/// Applies, once, the settings of the engine that were not set yet.
pub(crate) fn take_over() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some(file) = variable("TRACE") {
            settings::trace_without_ucx(&file);
        }
        let chosen = |name| ternary(&variable(name)?);
        let boolean = |name| chosen(name).map(|value| value == Ternary::Yes);
        let time = |name| duration(&variable(name)?);
        let set = Options {
            adopt_own_cards: boolean("COPY_ADOPT"),
            use_framework: chosen("COPY_FRAMEWORK").map(|value| value != Ternary::No),
            clear_allocations: boolean("COPY_CLEAR_MEMORY"),
            keep_open: time("COPY_KEEP_OPEN"),
            open_timeout: time("COPY_OPEN_TIMEOUT"),
            flush_peer_writes: chosen("COPY_FLUSH_PEER_WRITES").map(settings::flush),
            ..Options::default()
        };
        runtime().configure(Options::clone(&runtime().options()).or(set));
    });
}

/// As UCX reads a choice of yes, no and try.
fn ternary(text: &str) -> Option<Ternary> {
    match text.to_ascii_lowercase().as_str() {
        "y" | "yes" | "on" | "1" | "true" => Some(Ternary::Yes),
        "n" | "no" | "off" | "0" | "false" => Some(Ternary::No),
        "try" | "maybe" => Some(Ternary::Try),
        _ => None,
    }
}

/// A time: a number with m, s, ms, us or ns, or seconds without a unit. `None`: another spelling, which is left to UCX.
fn duration(text: &str) -> Option<Duration> {
    if matches!(text, "inf" | "infinity") {
        return Some(settings::seconds(f64::INFINITY));
    }
    let unit = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let factor = match &text[unit..] {
        "" | "s" => 1.0,
        "m" => 60.0,
        "ms" => 1e-3,
        "us" => 1e-6,
        "ns" => 1e-9,
        _ => return None,
    };
    let number: f64 = text[..unit].parse().ok()?;
    Some(settings::seconds(number * factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_read_as_ucx_reads_them() {
        assert_eq!(
            ["Y", "off", "try"].map(ternary),
            [Some(Ternary::Yes), Some(Ternary::No), Some(Ternary::Try)]
        );
        assert_eq!(ternary("perhaps"), None);
        let times = ["2", "0.5s", "3m", "250ms", "7us", "1x", ""].map(duration);
        let expected = [2_000_000, 500_000, 180_000_000, 250_000, 7].map(Duration::from_micros);
        assert_eq!(times[..5], expected.map(Some));
        assert_eq!(times[5..], [None, None]);
        assert!(duration("inf") > Some(Duration::from_secs(1 << 20)));
    }
}
