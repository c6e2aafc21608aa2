//! What a card costs beyond its bytes: one table, a row per kind of card.
//!
//! The table has two uses: the estimates by which UCX chooses protocols, and the decision when a copy pins host
//! memory instead of using bounce buffers. The software card's row is measured. The rows of silicon are assumed, from
//! the driver's source (docs/hardware.md). A software card with modelled times has the row of silicon, stretched by
//! the same factor; with it the rows of silicon can be checked (`cargo xtask bench choice --model`).

use crate::topology::PciLink;
use crate::{DeviceInfo, Generation};

/// Where the times of a card come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CardKind {
    /// The software Gaudi at full speed.
    Software,
    /// The software Gaudi with the times of silicon, stretched by this factor.
    Modelled(u32),
    /// Silicon.
    Hardware,
}

impl CardKind {
    /// The kind of a card whose library calls itself `version`: a modelled one says `…,slow=N` at its end.
    pub(crate) fn new(is_software: bool, version: &str) -> CardKind {
        let slow = version.rsplit_once(",slow=").and_then(|(_, slow)| slow.parse().ok());
        match (is_software, slow) {
            (false, _) => CardKind::Hardware,
            (true, Some(slow)) => CardKind::Modelled(slow),
            (true, None) => CardKind::Software,
        }
    }
}

/// A row of the table. Times in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// Processor time of a submission.
    pub overhead: f64,
    /// From a submission to its end, waited for in the driver.
    pub short_latency: f64,
    /// The same, if the end is polled for.
    pub zcopy_latency: f64,
    /// Pinning and unpinning a buffer.
    pub registration: f64,
    /// The link in the servers that the card is built into: bytes per second, before packet headers.
    pub link: f64,
    /// Bytes per second inside the card. Any figure far above the link's leads UCP to the same choices.
    pub inside: f64,
    /// When copies pin.
    pub pinning: Pinning,
}

/// When a copy pins host memory: `pin` has the rules. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinning {
    /// Copies up to this never make a region pinned: the CPU's part is small compared with the submission.
    pub small: usize,
    /// Copies of memory that is not pinned and has not earned a pin use bounce buffers up to this.
    pub bounce: usize,
    /// A region has earned its pin when this many bytes of it were copied,
    pub earned: usize,
    /// plus its length divided by this.
    pub share: usize,
}

/// Bytes per second of the CPU's part of a bounced copy, on any recent server.
const HOST_COPY: f64 = 10e9;

impl Costs {
    /// The row of a card.
    pub fn of(card: &DeviceInfo) -> Costs {
        Costs::of_kind(card.generation, CardKind::new(card.is_software, &card.driver_version))
    }

    /// The table.
    pub fn of_kind(generation: Generation, kind: CardKind) -> Costs {
        match kind {
            CardKind::Software => software(generation),
            CardKind::Modelled(slow) => silicon(generation).stretched(slow),
            CardKind::Hardware => silicon(generation),
        }
    }

    /// All of the card's times are `slow` times as long; those of the host are not. Copies pin as on silicon, though
    /// bouncing costs less here, so that measurements show what silicon does.
    fn stretched(self, slow: u32) -> Costs {
        let slow = f64::from(slow);
        Costs {
            overhead: self.overhead,
            short_latency: self.short_latency * slow,
            zcopy_latency: self.zcopy_latency * slow,
            registration: self.registration * slow,
            link: self.link / slow,
            inside: self.inside / slow,
            pinning: self.pinning,
        }
    }
}

/// With 16 lanes.
fn link(generation: Generation) -> f64 {
    let gigatransfers = match generation {
        // PCIe 3.0 is what the vendor's qualification tool expects of the host.
        Generation::Gaudi => 8.0,
        Generation::Gaudi2 => 16.0,
        Generation::Gaudi3 => 32.0,
    };
    PciLink { gigatransfers, width: 16 }.bandwidth()
}

/// Measured on the software card (`cargo xtask bench copy`, `bench rcache`).
fn software(generation: Generation) -> Costs {
    Costs {
        overhead: 1e-6,
        short_latency: 0.5e-6,
        zcopy_latency: 2e-6,
        registration: 7e-6,
        link: link(generation),
        inside: 200e9,
        // The CPU copies 64 KiB in about the time of a registration.
        pinning: Pinning { small: 8 << 10, bounce: 64 << 10, earned: 0, share: 16 },
    }
}

/// Assumed.
fn silicon(generation: Generation) -> Costs {
    // A submission is an ioctl; the first generation's driver parses the packets as well.
    let overhead = match generation {
        Generation::Gaudi => 4e-6,
        Generation::Gaudi2 | Generation::Gaudi3 => 2e-6,
    };
    // The doorbell and two fetches across the link; then an interrupt, and a work queue of the driver.
    let latency = 25e-6;
    // The driver invalidates the card's MMU at each map and each unmap, and polls for the end of that
    // in steps of 250 to 1000 us (memory.c, gaudi2.c): two of the shorter ones, assumed for all.
    let registration = 500e-6;
    Costs {
        overhead,
        short_latency: latency,
        zcopy_latency: latency,
        registration,
        link: link(generation),
        inside: 200e9,
        pinning: Pinning::of_silicon(registration),
    }
}

impl Pinning {
    /// Pinning pays when the CPU's copies have cost as much as a registration and its pages: it is assumed to take
    /// 0.5 us to pin and unpin 4 KiB, about as long as copying them. So the cost is at most twice the possible
    /// minimum, whether the memory is used once or for ever.
    fn of_silicon(registration: f64) -> Pinning {
        let break_even = (registration * HOST_COPY) as usize >> 16 << 16;
        Pinning { small: 8 << 10, bounce: break_even, earned: break_even, share: 1 }
    }

    /// Whether a region of `len` bytes, of which `copied` were copied, is worth a pin.
    pub(crate) fn is_earned(&self, copied: usize, len: usize) -> bool {
        copied >= self.earned.saturating_add(len / self.share)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modelled_card_says_so_in_its_version() {
        let kind = |version| CardKind::new(true, version);
        assert_eq!(kind("1.10.0-soft-gaudi-0.1.0"), CardKind::Software);
        assert_eq!(kind("1.10.0-soft-gaudi-0.1.0+gaudi2,slow=40"), CardKind::Modelled(40));
        assert_eq!(CardKind::new(false, "1.20.0,slow=40"), CardKind::Hardware);
    }

    #[test]
    fn a_modelled_card_is_as_much_slower_as_it_is_stretched() {
        let of = |kind| Costs::of_kind(Generation::Gaudi2, kind);
        assert_eq!(of(CardKind::Modelled(1)), of(CardKind::Hardware));
        let (hardware, modelled) = (of(CardKind::Hardware), of(CardKind::Modelled(40)));
        assert_eq!(modelled.zcopy_latency, 1e-3);
        assert_eq!(modelled.overhead, hardware.overhead, "the processor is not stretched");
        assert_eq!(modelled.link, hardware.link / 40.0);
        assert_eq!(modelled.pinning, hardware.pinning, "what is measured pins as silicon does");
    }

    #[test]
    fn silicon_is_not_mistaken_for_the_software_card() {
        for generation in Generation::ALL {
            let (silicon, soft) = (silicon(generation), software(generation));
            assert!(silicon.overhead > soft.overhead);
            assert!(silicon.short_latency > soft.short_latency);
            assert!(silicon.zcopy_latency > soft.zcopy_latency);
            assert!(silicon.registration > soft.registration);
            assert!(silicon.pinning.bounce > soft.pinning.bounce);
        }
    }

    #[test]
    fn pinning_a_large_region_has_to_be_earned_by_its_length() {
        let pinning = software(Generation::Gaudi2).pinning;
        assert!(pinning.is_earned(16 << 10, 256 << 10) && !pinning.is_earned(15 << 10, 256 << 10));
        let pinning = silicon(Generation::Gaudi2).pinning;
        assert!(!pinning.is_earned(4 << 20, 64 << 10), "a registration costs more than that");
        assert!(pinning.is_earned(6 << 20, 1 << 20) && !pinning.is_earned(6 << 20, 2 << 20));
    }
}
