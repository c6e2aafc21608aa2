//! Rounds of `cargo xtask soak`: stock UCX moves verified messages in one of several ways while something goes wrong,
//! and the result is judged by what is promised.
//!
//! [`Round::draw`] makes a round from a seed, [`Round::play`] runs its processes and injects the faults that cannot be
//! set up beforehand, [`Judged`] is the verdict, [`Remains`] finds what the round left behind.

mod draw;
mod judge;
mod play;
mod remains;

pub use draw::{Fault, Round, Way};
pub use judge::{Judged, Outcome, Violation};
pub use play::{Companion, Played};
pub use remains::{Remains, in_namespaces, is_inside};
