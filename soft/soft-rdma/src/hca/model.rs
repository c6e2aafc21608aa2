//! A modelled link: each port sends a fixed number of bytes per second, and each message takes a fixed time to arrive.
//!
//! A message leaves when the port has sent everything posted before it, and is handed on when its last byte would have
//! arrived. The model only delays: where copying takes longer than the model says, it has no effect.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::events::lock;
use crate::fabric::MAX_DEVICES;

/// Bandwidth and latency, the same for every port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Figures {
    /// Bytes a second.
    pub(crate) bandwidth: u64,
    /// Time from sending the last byte to its arrival.
    pub(crate) latency: Duration,
}

impl Figures {
    /// `bandwidth=MB/S,latency=US`, in either order; what is left out is not modelled.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        let mut figures = Self { bandwidth: u64::MAX, latency: Duration::ZERO };
        for part in text.split(',').filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=')?;
            let value: u64 =
                value.trim().parse().ok().filter(|value| (1..=1_000_000).contains(value))?;
            match name.trim() {
                "bandwidth" => figures.bandwidth = value * 1_000_000,
                "latency" => figures.latency = Duration::from_micros(value),
                _ => return None,
            }
        }
        Some(figures)
    }

    fn time(&self, length: u64) -> Duration {
        let nanos = u128::from(length) * 1_000_000_000 / u128::from(self.bandwidth);
        Duration::from_nanos(nanos.try_into().unwrap_or(u64::MAX))
    }
}

/// The links of this process's ports.
pub(crate) struct LinkModel {
    figures: Figures,
    /// When each port has sent all that was given to it.
    idle: [Mutex<Option<Instant>>; MAX_DEVICES as usize],
}

impl LinkModel {
    /// Links with nothing on them.
    pub(crate) fn new(figures: Figures) -> Self {
        Self { figures, idle: [const { Mutex::new(None) }; MAX_DEVICES as usize] }
    }

    /// When a message that is posted to a port now arrives.
    pub(crate) fn arrival(&self, device: u8, length: u64, now: Instant) -> Instant {
        let Some(idle) = self.idle.get(usize::from(device)) else { return now };
        let mut idle = lock(idle);
        let start = idle.map_or(now, |idle| idle.max(now));
        let end = start + self.figures.time(length);
        *idle = Some(end);
        end + self.figures.latency
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_in_either_order_and_nonsense_is_not() {
        let both = Figures { bandwidth: 1_000_000_000, latency: Duration::from_micros(5) };
        assert_eq!(Figures::parse("bandwidth=1000,latency=5"), Some(both));
        assert_eq!(Figures::parse("latency=5, bandwidth=1000"), Some(both));
        assert_eq!(Figures::parse("latency=5").map(|figures| figures.bandwidth), Some(u64::MAX));
        for nonsense in ["fast", "bandwidth=0", "bandwidth=x", "speed=1", "latency=-1"] {
            assert_eq!(Figures::parse(nonsense), None, "{nonsense}");
        }
    }

    #[test]
    fn messages_of_one_port_wait_for_each_other_and_ports_do_not() {
        let figures = Figures { bandwidth: 1_000_000, latency: Duration::from_micros(7) };
        let model = LinkModel::new(figures);
        let now = Instant::now();
        let us = |count| now + Duration::from_micros(count);
        assert_eq!(model.arrival(0, 100, now), us(107));
        assert_eq!(model.arrival(0, 50, now), us(157));
        assert_eq!(model.arrival(1, 50, now), us(57));
        // Idle since 150: the next begins when it is posted.
        assert_eq!(model.arrival(0, 10, us(1000)), us(1017));
    }
}
