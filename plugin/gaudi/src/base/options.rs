//! What is set for the whole process, in one value.
//!
//! There is one engine, but several users of it (memory domains of several UCX contexts) may set the same option. The
//! last one decides; a disagreement is reported once.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arc_swap::ArcSwap;

use crate::DeviceChoice;

macro_rules! options {
    ($($(#[$about:meta])* $field:ident: $type:ty, $name:ident;)*) => {
        /// Settings of the engine; `None` leaves what was set before, or the default.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Options { $($(#[$about])* pub $field: Option<$type>,)* }

        /// The fields of [`Options`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum OptionName { $(#[doc = concat!("[`Options::", stringify!($field), "`]")] $name,)* }

        impl Options {
            /// These options, and the values of `others` for those that are `None`.
            pub fn or(self, others: Options) -> Options {
                Options { $($field: self.$field.or(others.$field)),* }
            }

            /// Sets the options that are wanted; yields a conflict for each that had another value.
            fn merge(&mut self, wanted: Options) -> impl Iterator<Item = Conflict> + use<> {
                [$(merge(OptionName::$name, &mut self.$field, wanted.$field)),*].into_iter().flatten()
            }
        }
    };
}

options! {
    /// The card for callers that name none. Default: any.
    device: DeviceChoice, Device;
    /// Whether [`Device::map_block`](crate::Device::map_block) may map registers. Default: no.
    register_access: bool, RegisterAccess;
    /// Whether a card that is busy in this process may be used without being lent. Default: no.
    adopt_own_cards: bool, AdoptOwnCards;
    /// Whether the card of a framework (Synapse) in this process is used, as its guest. Default: yes.
    use_framework: bool, UseFramework;
    /// How many pins cards keep. Set by [`Runtime::cache_registrations`], which starts the cache.
    ///
    /// [`Runtime::cache_registrations`]: crate::Runtime::cache_registrations
    registration_cache: RegistrationCache, RegistrationCache;
    /// Whether memory is cleared before it is handed out. An allocation then costs a fill of its length,
    /// and fails on a card that this process cannot submit to. Default: no.
    clear_allocations: bool, ClearAllocations;
    /// How much memory of peers cards keep open while it is unused.
    handle_limits: Limits, HandleLimits;
    /// How long a card stays open after its last use, beyond what [`KeptOpen`](crate::KeptOpen) keeps.
    /// Default: not at all.
    keep_open: Duration, KeepOpen;
    /// How long to wait for a card that is in reset or being closed. Default: 30 s.
    open_timeout: Duration, OpenTimeout;
    /// Whether copies wait for what other devices wrote. Default: where the driver has a call for it.
    flush_peer_writes: FlushPeerWrites, FlushPeerWrites;
}

/// Whether the driver is asked to flush other devices' writes (of NICs, peers' cards) to exported memory before a
/// copy uses that memory: such a write may be acknowledged before the engines of the card see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FlushPeerWrites {
    /// No.
    Never,
    /// Where the driver can.
    #[default]
    IfPossible,
    /// Yes: memory is not exported where the driver cannot.
    Always,
}

/// Whether pins of host memory are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationCache {
    /// No.
    Off,
    /// This many.
    Keep(CacheLimits),
}

/// How many pins of host memory a card may cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLimits {
    /// Most ranges.
    pub regions: usize,
    /// Most bytes, of all ranges together.
    pub bytes: u64,
}

/// How much of peers' memory a card keeps open. What is in use is never closed, and counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most handles.
    pub handles: usize,
    /// Most bytes.
    pub bytes: u64,
}

/// Two users of the engine set an option to different values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conflict {
    /// The option.
    pub option: OptionName,
    /// What it was set to before.
    pub before: String,
    /// What it is set to now.
    pub now: String,
}

/// The options of this process.
#[derive(Debug, Default)]
pub(crate) struct Configuration {
    /// Changed under the lock of `reports`. Every allocation reads it.
    options: ArcSwap<Options>,
    reports: Mutex<Reports>,
}

#[derive(Debug, Default)]
struct Reports {
    conflicts: Vec<Conflict>,
    reported: Vec<OptionName>,
}

impl Configuration {
    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the options that `wanted` has.
    pub(crate) fn set(&self, wanted: Options) {
        let mut reports = self.reports();
        let mut now = Options::clone(&self.options.load());
        let conflicts = now.merge(wanted);
        self.options.store(Arc::new(now));
        for conflict in conflicts {
            if !reports.reported.contains(&conflict.option) {
                reports.reported.push(conflict.option);
                reports.conflicts.push(conflict);
            }
        }
    }

    pub(crate) fn get(&self) -> Arc<Options> {
        self.options.load_full()
    }

    pub(crate) fn take_conflicts(&self) -> Vec<Conflict> {
        std::mem::take(&mut self.reports().conflicts)
    }
}

/// Sets an option to the wanted value, if any. Returns the conflict if it had another value before.
fn merge<T: PartialEq + Describe>(
    option: OptionName,
    now: &mut Option<T>,
    wanted: Option<T>,
) -> Option<Conflict> {
    let wanted = wanted?;
    let before = now.replace(wanted)?;
    let wanted = now.as_ref().expect("just set");
    if before == *wanted {
        return None;
    }
    Some(Conflict { option, before: before.describe(), now: wanted.describe() })
}

/// A value as people write it.
trait Describe {
    fn describe(&self) -> String;
}

impl Describe for bool {
    fn describe(&self) -> String {
        String::from(if *self { "yes" } else { "no" })
    }
}

impl Describe for FlushPeerWrites {
    fn describe(&self) -> String {
        String::from(match self {
            FlushPeerWrites::Never => "no",
            FlushPeerWrites::IfPossible => "try",
            FlushPeerWrites::Always => "yes",
        })
    }
}

impl Describe for Duration {
    fn describe(&self) -> String {
        format!("{} s", self.as_secs_f64())
    }
}

impl Describe for DeviceChoice {
    fn describe(&self) -> String {
        match self {
            DeviceChoice::Any => String::from("any"),
            choice => choice.to_string(),
        }
    }
}

impl Describe for Limits {
    fn describe(&self) -> String {
        format!("{} ranges, {} bytes", self.handles, self.bytes)
    }
}

impl Describe for RegistrationCache {
    fn describe(&self) -> String {
        match self {
            RegistrationCache::Off => String::from("off"),
            RegistrationCache::Keep(limits) => {
                format!("{} ranges, {} bytes", limits.regions, limits.bytes)
            }
        }
    }
}

impl fmt::Display for Conflict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "users of this process set different values, {} and then {}: the last one is used",
            self.before, self.now
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_value_is_used_and_a_conflict_reported_once() {
        let configuration = Configuration::default();
        let access = |allowed| Options { register_access: Some(allowed), ..Options::default() };
        configuration.set(access(true));
        configuration.set(access(true));
        configuration.set(Options { adopt_own_cards: Some(true), ..Options::default() });
        assert_eq!(configuration.take_conflicts(), [], "the same, and something else");
        configuration.set(access(false));
        let conflicts = configuration.take_conflicts();
        let [conflict] = &conflicts[..] else { panic!("{conflicts:?}") };
        assert_eq!(conflict.option, OptionName::RegisterAccess);
        let text = conflict.to_string();
        assert!(text.contains("yes and then no"), "{text}");
        assert_eq!(configuration.get().register_access, Some(false));
        configuration.set(access(true));
        assert_eq!(configuration.take_conflicts(), [], "once");
        assert_eq!(
            *configuration.get(),
            Options { adopt_own_cards: Some(true), ..access(true) },
            "others are left alone"
        );
    }

    #[test]
    fn values_are_described_as_people_write_them() {
        let keep = |bytes| RegistrationCache::Keep(CacheLimits { regions: 3, bytes });
        let configuration = Configuration::default();
        for (device, cache) in
            [(DeviceChoice::Any, RegistrationCache::Off), (DeviceChoice::Module(2), keep(100))]
        {
            let registration_cache = Some(cache);
            let device = Some(device);
            configuration.set(Options { device, registration_cache, ..Options::default() });
        }
        let said: Vec<(String, String)> = configuration
            .take_conflicts()
            .into_iter()
            .map(|conflict| (conflict.before, conflict.now))
            .collect();
        let expected = [("any", "module:2"), ("off", "3 ranges, 100 bytes")]
            .map(|(a, b)| (a.into(), b.into()));
        assert_eq!(said, expected);
    }
}
