//! Whether the environment asks for a Gaudi, and whether it tells UCX to leave us out. Both decide between
//! a line at info level and a warning.

use std::ffi::OsString;
use std::sync::Once;

use uct::{Ucx, log};

use crate::flavour::{Flavour, GaudiCopy, GaudiGdr};

/// Prefixes of variables that are set only to use a Gaudi.
const PREFIXES: [&str; 6] = [
    "UCX_GAUDI_COPY_",
    "UCT_GAUDI_COPY_",
    "UCX_GAUDI_IPC_",
    "UCX_GAUDI_CPY_",
    "UCX_GAUDI_GDR_",
    "UCX_GAUDI_TRACE",
];
/// Other such variables.
const NAMES: [&str; 2] = ["HLS_MODULE_ID", "GAUDI_MAPPING_TABLE"];
/// Lists of transports and of devices.
const TLS: &str = "UCX_TLS";
const DEVICES: &str = "UCX_ACC_DEVICES";

/// The settings in the environment that ask for a Gaudi, as they are written there.
pub(crate) fn settings() -> Vec<String> {
    asking(std::env::vars_os())
}

fn asking(variables: impl Iterator<Item = (OsString, OsString)>) -> Vec<String> {
    let asks = |(name, value): (OsString, OsString)| {
        let (name, value) = (name.into_string().ok()?, value.to_string_lossy().trim().to_owned());
        let ours = PREFIXES.iter().any(|prefix| name.starts_with(prefix))
            || NAMES.contains(&name.as_str());
        let named = (name == TLS || name == DEVICES)
            && !value.starts_with('^')
            && value.split(',').any(|item| item.trim_start_matches('\\').starts_with("gaudi"));
        // A table is long, and its own messages quote it.
        let shown = if value.len() > 40 { String::from("…") } else { value.clone() };
        (!value.is_empty() && (ours || named)).then(|| format!("{name}={shown}"))
    };
    let mut found: Vec<String> = variables.filter_map(asks).collect();
    found.sort();
    found
}

/// Logs once per process that UCX will refuse Gaudi memory, if it was told to use none of our copy
/// transports: UCX then closes our domains, and its own error names no cause. `wanted`: Gaudi memory is
/// about to be allocated.
pub(crate) fn warn_if_excluded(ucx: &Ucx, wanted: bool) {
    static SAID: [Once; 2] = [Once::new(), Once::new()];
    let Some(list) = excluded(|name| std::env::var(name).ok()) else { return };
    let asks: Vec<String> =
        settings().into_iter().filter(|setting| !list.starts_with(setting.as_str())).collect();
    let warn = wanted || !asks.is_empty();
    SAID[usize::from(warn)].call_once(|| {
        let (cpy, gdr) = (GaudiCopy::TRANSPORT, GaudiGdr::TRANSPORT);
        let cure = "add gaudi_cpy and gaudi_ipc to it, or unset it";
        let why = if asks.is_empty() {
            String::new()
        } else {
            format!(", though {} asks for a Gaudi", asks.join(", "))
        };
        if warn {
            log!(
                ucx,
                Warn,
                "{list} leaves out {cpy} and {gdr}{why}: UCX refuses Gaudi memory; {cure}"
            );
        } else {
            log!(ucx, Info, "{list} leaves out {cpy} and {gdr}: UCX refuses Gaudi memory; {cure}");
        }
    });
}

/// The variable that leaves out all our copy transports, as it is written.
fn excluded(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let both = [
        (TLS, [GaudiCopy::TRANSPORT, GaudiGdr::TRANSPORT]),
        (DEVICES, [GaudiCopy::COMPONENT, GaudiGdr::COMPONENT]),
    ];
    both.into_iter().find_map(|(name, ours)| {
        let value = variable(name)?;
        (!ours.iter().any(|known| admits(&value, known))).then(|| format!("{name}={value}"))
    })
}

/// Whether a list of UCX's admits a name: `all`, names, or `^` and names that are left out. UCX expands
/// the alias `gaudi` to `gaudi_gdr`.
fn admits(list: &str, name: &str) -> bool {
    let (negated, list) = match list.trim().strip_prefix('^') {
        Some(rest) => (true, rest),
        None => (false, list.trim()),
    };
    let named = list.split(',').map(|item| item.trim().trim_start_matches('\\')).any(|item| {
        item == "all" || item == name || (item == "gaudi" && name == GaudiGdr::TRANSPORT)
    });
    named != negated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_only_users_of_a_gaudi_set_asks_for_one() {
        let asks = |name: &str, value: &str| {
            !asking([(OsString::from(name), OsString::from(value))].into_iter()).is_empty()
        };
        for (name, value) in [
            ("UCX_GAUDI_COPY_DEVICE", "0"),
            ("UCT_GAUDI_COPY_BW", "1GBs"),
            ("UCX_GAUDI_IPC_LAT", "1us"),
            ("UCX_GAUDI_TRACE", "f"),
            ("HLS_MODULE_ID", "3"),
            ("GAUDI_MAPPING_TABLE", "[]"),
            ("UCX_TLS", "gaudi,sm"),
            ("UCX_TLS", "sm,gaudi_cpy"),
            ("UCX_ACC_DEVICES", "gaudi_copy"),
        ] {
            assert!(asks(name, value), "{name}={value}");
        }
        for (name, value) in [
            ("UCX_TLS", "all"),
            ("UCX_TLS", "^gaudi_ipc"),
            ("UCX_TLS", "sm"),
            ("UCX_GAUDI_COPY_DEVICE", ""),
            ("UCX_GAUDI_TARGET_DIR", "/t"),
            ("UCX_LOG_LEVEL", "info"),
            ("SOFT_GAUDI_NODE", "n"),
        ] {
            assert!(!asks(name, value), "{name}={value}");
        }
    }

    #[test]
    fn lists_that_leave_us_out_are_told_from_those_that_do_not() {
        let left_out = |name: &str, value: &str| {
            excluded(|asked| (asked == name).then(|| value.to_owned())).is_some()
        };
        for value in ["sm", "rc,sm,self", "^gaudi_cpy,gaudi_gdr", "^gaudi_cpy,gaudi", "gaudi_ipc"] {
            assert!(left_out(TLS, value), "{value}");
        }
        for value in ["all", "gaudi,sm", "sm,gaudi_cpy", "^gaudi_cpy", "^tcp", "\\gaudi_gdr,sm"] {
            assert!(!left_out(TLS, value), "{value}");
        }
        assert!(left_out(DEVICES, "cuda0") && !left_out(DEVICES, "gaudi_copy"));
        assert_eq!(excluded(|_| None), None);
    }
}
