//! What the environment says about this node's HCAs: the variables of `docs/software-rdma.md`.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::fabric::{MAX_DEVICES, MAX_NODE};
use crate::hca::model::Figures;
use crate::hca::pinned::Limit;
use crate::placement::{self, Place};

/// How much to say on standard error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub(crate) enum LogLevel {
    Off,
    Info,
    Debug,
}

/// Which dma-bufs of cards can be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DmabufSupport {
    On,
    Off,
    HostBridge,
    Refused,
    /// All, but slowly: the card's driver does not check how far away an HCA is.
    Slow,
    /// All, but written data arrives wrong: the worst that was seen of peer-to-peer hardware.
    Garbage,
}

impl DmabufSupport {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "on" => Self::On,
            "off" => Self::Off,
            "bridge" => Self::HostBridge,
            "refused" => Self::Refused,
            "slow" => Self::Slow,
            "garbage" => Self::Garbage,
            _ => return None,
        })
    }
}

/// The configuration of this process.
#[derive(Debug)]
pub(crate) struct Config {
    pub(crate) devices: u8,
    /// One for each device.
    pub(crate) places: Vec<Place>,
    pub(crate) folder: PathBuf,
    pub(crate) node: u16,
    pub(crate) nodes: HashMap<u16, SocketAddr>,
    pub(crate) inline_limit: u32,
    pub(crate) model: Option<Figures>,
    /// As `active_speed` has it, of four lanes: EDR, HDR or NDR.
    pub(crate) active_speed: u8,
    pub(crate) memlock: Limit,
    /// Which port goes down by itself, and after how many bytes.
    pub(crate) failing: Option<(u8, u64)>,
    pub(crate) dmabuf: DmabufSupport,
    /// Whether there are nodes of the software cards in `/dev/accel`.
    pub(crate) accel_nodes: bool,
    /// Whether a program that polls an empty completion queue does the work of the HCA's thread meanwhile.
    pub(crate) pollers_work: bool,
    pub(crate) stats: Option<PathBuf>,
    pub(crate) log: LogLevel,
}

impl Config {
    pub(crate) fn parse(get: impl Fn(&str) -> Option<String>) -> Self {
        let number = |name: &str, default: u32, low: u32, high: u32| match get(name) {
            None => default,
            Some(text) => match text.parse::<u32>() {
                Ok(value) if (low..=high).contains(&value) => value,
                _ => {
                    eprintln!("soft-rdma: {name}={text} is not in {low}..={high}, using {default}");
                    default
                }
            },
        };
        let log = match get("SOFT_RDMA_LOG").as_deref() {
            Some("off") => LogLevel::Off,
            Some("debug") => LogLevel::Debug,
            _ => LogLevel::Info,
        };
        let folder = get("SOFT_RDMA_DIR").map_or_else(
            || format!("/tmp/soft-rdma-{}", rustix::process::getuid().as_raw()).into(),
            PathBuf::from,
        );
        let devices = number("SOFT_RDMA_DEVICES", 1, 0, u32::from(MAX_DEVICES)) as u8;
        let places = get("SOFT_RDMA_PLACES").unwrap_or_default();
        let places = placement::hcas(devices, &places).unwrap_or_else(|entry| {
            eprintln!("soft-rdma: SOFT_RDMA_PLACES: cannot use {entry}, using the default");
            placement::hcas(devices, "").unwrap_or_default()
        });
        Self {
            devices,
            places,
            folder,
            node: number("SOFT_RDMA_NODE", 1, 1, u32::from(MAX_NODE)) as u16,
            nodes: get("SOFT_RDMA_NODES").map_or_else(HashMap::new, |text| parse_nodes(&text)),
            inline_limit: number("SOFT_RDMA_INLINE", 1024, 0, crate::wire::MAX_INLINE),
            active_speed: word("SOFT_RDMA_RATE", &get, parse_rate).unwrap_or(32),
            model: word("SOFT_RDMA_MODEL", &get, Figures::parse),
            failing: word("SOFT_RDMA_FAIL", &get, |text| {
                let (device, bytes) = text.split_once('@')?;
                Some((device.parse().ok()?, bytes.parse().ok()?))
            }),
            memlock: word("SOFT_RDMA_MEMLOCK", &get, Limit::parse).unwrap_or(Limit::Kernel),
            dmabuf: word("SOFT_RDMA_DMABUF", &get, DmabufSupport::parse)
                .unwrap_or(DmabufSupport::On),
            accel_nodes: word("SOFT_RDMA_ACCEL_NODES", &get, parse_switch).unwrap_or(false),
            pollers_work: word("SOFT_RDMA_POLLERS_WORK", &get, parse_switch).unwrap_or(true),
            stats: get("SOFT_RDMA_STATS").map(PathBuf::from),
            log,
        }
    }
}

fn parse_switch(text: &str) -> Option<bool> {
    match text {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    }
}

/// Four lanes of EDR, HDR or NDR.
fn parse_rate(text: &str) -> Option<u8> {
    [("100", 32), ("200", 64), ("400", 128)]
        .into_iter()
        .find(|rate| rate.0 == text)
        .map(|rate| rate.1)
}

/// A variable that is parsed. One that cannot be parsed counts as not set, with a message.
fn word<T>(
    name: &str,
    get: &impl Fn(&str) -> Option<String>,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let text = get(name).filter(|text| !text.is_empty())?;
    let value = parse(&text);
    if value.is_none() {
        eprintln!("soft-rdma: {name}={text} is ignored: it cannot be read");
    }
    value
}

/// `1=10.0.0.1:7000,2=10.0.0.2:7000`; an entry that cannot be parsed is left out, with a message.
fn parse_nodes(text: &str) -> HashMap<u16, SocketAddr> {
    let mut nodes = HashMap::new();
    for entry in text.split(',').filter(|entry| !entry.is_empty()) {
        let parsed = entry.split_once('=').and_then(|(node, address)| {
            let node = node.trim().parse().ok().filter(|node| (1..=MAX_NODE).contains(node))?;
            Some((node, address.trim().parse().ok()?))
        });
        match parsed {
            Some((node, address)) => drop(nodes.insert(node, address)),
            None => eprintln!("soft-rdma: SOFT_RDMA_NODES: cannot read {entry:?}"),
        }
    }
    nodes
}

/// The configuration, read at first use.
pub(crate) fn get() -> &'static Config {
    static CONFIG: OnceLock<Config> = OnceLock::new();
    CONFIG.get_or_init(|| Config::parse(|name| std::env::var(name).ok()))
}

/// Says something on standard error if the level allows it.
macro_rules! log {
    ($level:ident, $($text:tt)*) => {
        if $crate::config::get().log >= $crate::config::LogLevel::$level {
            eprintln!("soft-rdma: {}", format_args!($($text)*));
        }
    };
}
pub(crate) use log;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_cannot_be_read_are_left_out() {
        let nodes = parse_nodes("1=10.0.0.1:7000, 2=[::1]:7100,3,=,4=x,900=10.0.0.1:1");
        assert_eq!(nodes.len(), 2);
        assert_eq!(nodes[&1], "10.0.0.1:7000".parse().unwrap());
        assert_eq!(nodes[&2], "[::1]:7100".parse().unwrap());
    }

    #[test]
    fn what_is_missing_or_cannot_be_read_is_the_default() {
        let with = |name: &'static str, value: &'static str| {
            Config::parse(move |asked| (asked == name).then(|| value.to_owned()))
        };
        let config = with("", "");
        assert_eq!((config.devices, config.node, config.log), (1, 1, LogLevel::Info));
        assert_eq!(["4", "65"].map(|count| with("SOFT_RDMA_DEVICES", count).devices), [4, 1]);
        let speed = |rate| with("SOFT_RDMA_RATE", rate).active_speed;
        assert_eq!(["", "100", "200", "400", "300"].map(speed), [32, 32, 64, 128, 32]);
    }
}
