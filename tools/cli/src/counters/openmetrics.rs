//! The counters for monitoring systems: in the OpenMetrics format, or in the older text format of Prometheus.
//!
//! Series are labelled by card and user, not by process: processes come and go, and a series for each would make their
//! number grow without end. A series appears only once its value is not 0.

use std::collections::BTreeSet;

use super::cards::Card;
use super::exporter::{Owner, Totals};

/// The prefix of every name.
const PREFIX: &str = "ucx_gaudi_";

/// The types of the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Counter,
    Gauge,
    Info,
}

impl Type {
    /// The suffix of the names of samples.
    fn suffix(self) -> &'static str {
        match self {
            Self::Counter => "_total",
            Self::Gauge => "",
            Self::Info => "_info",
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Info => "info",
        }
    }
}

/// A metric of processes, made from counters of the plugin.
struct Family {
    name: &'static str,
    kind: Type,
    help: &'static str,
    /// The label that distinguishes its parts; empty if there is only one.
    label: &'static str,
    /// The value of the label, and the counter.
    parts: &'static [(&'static str, &'static str)],
}

const fn family(
    name: &'static str,
    kind: Type,
    help: &'static str,
    label: &'static str,
    parts: &'static [(&'static str, &'static str)],
) -> Family {
    Family { name, kind, help, label, parts }
}

/// All metrics of processes. A counter of the plugin is in one of them or in `NOT_SHOWN` (a test compares).
#[rustfmt::skip]
const FAMILIES: &[Family] = &[
    family("processes", Type::Gauge, "Processes that have the card open through UCX", "", &[("", "open")]),
    family("allocated_bytes", Type::Gauge, "Device memory that is allocated through UCX", "",
        &[("", "allocated_bytes")]),
    family("reserved_bytes", Type::Gauge, "Device memory taken from the driver, in its large pages", "",
        &[("", "reserved_bytes")]),
    family("pinned_bytes", Type::Gauge, "Host memory that is pinned for the card", "", &[("", "pinned_bytes")]),
    family("reg_cache_bytes", Type::Gauge, "Host memory that the registration cache keeps pinned", "",
        &[("", "reg_cache_bytes")]),
    family("in_flight", Type::Gauge, "Submissions to the card that have not ended", "", &[("", "in_flight")]),
    family("dmabuf_bytes", Type::Gauge, "Memory behind dma-bufs: exported to NICs and peers, or imported", "kind",
        &[("exported", "dmabuf_bytes"), ("imported", "dmabuf_imports_bytes")]),
    family("dmabufs", Type::Gauge, "dma-bufs that exist: exported to NICs and peers, or imported", "kind",
        &[("exported", "dmabuf_live"), ("imported", "dmabuf_imports_live")]),
    family("ipc_bytes", Type::Gauge,
        "gaudi_ipc: memory offered to peers, memory of peers that is mapped, and freed memory that a peer still uses",
        "kind",
        &[("shared", "ipc_shares_bytes"), ("mapped", "ipc_handles_bytes"), ("quarantined", "ipc_quarantined_bytes")]),

    family("copied_bytes", Type::Counter, "Bytes copied by the card's DMA engines, by where they went", "direction",
        &[("to_card", "h2d_bytes"), ("from_card", "d2h_bytes"), ("within_card", "d2d_bytes"),
          ("between_cards", "cross_card_bytes"), ("fill", "fill_bytes")]),
    family("copies", Type::Counter, "DMA operations that were done, by where they went", "direction",
        &[("to_card", "h2d_operations"), ("from_card", "d2h_operations"), ("within_card", "d2d_operations"),
          ("between_cards", "cross_card_operations"), ("fill", "fill_operations")]),
    family("way_bytes", Type::Counter,
        "Bytes by way: pinned and bounced between host and card, imported and staged between cards, relayed for peers",
        "way",
        &[("pinned", "pinned_copy_bytes"), ("bounced", "bounced_copy_bytes"), ("imported", "imported_copy_bytes"),
          ("staged", "staged_copy_bytes"), ("relayed", "ipc_relay_bytes")]),
    family("way_copies", Type::Counter, "Operations by way, as ucx_gaudi_way_bytes", "way",
        &[("pinned", "pinned_operations"), ("bounced", "bounced_operations"), ("imported", "imported_operations"),
          ("staged", "staged_operations"), ("relayed", "ipc_relay_requests")]),
    family("submissions", Type::Counter, "Command submissions that the driver accepted", "", &[("", "submissions")]),
    family("queue_full", Type::Counter, "Copies that found the queue of the card full and had to wait", "",
        &[("", "copies_busy")]),
    family("dma_errors", Type::Counter, "Submissions that were refused, failed or timed out", "",
        &[("", "dma_errors")]),
    family("failures", Type::Counter, "Failures that were returned to the program", "kind",
        &[("device_not_found", "failures_device_not_found"), ("out_of_memory", "failures_out_of_memory"),
          ("invalid_params", "failures_invalid_params"), ("device_busy", "failures_device_busy"),
          ("dma_failed", "failures_dma_failed"), ("timeout", "failures_timeout"),
          ("permission_denied", "failures_permission_denied"), ("channel_failed", "failures_channel_failed")]),
    family("allocations", Type::Counter, "Allocations of device memory", "", &[("", "allocations")]),
    family("pins", Type::Counter, "Times that host memory was pinned for the card", "", &[("", "pins")]),
    family("pins_refused", Type::Counter, "Times that pinning was refused, so that copies were bounced", "",
        &[("", "pins_refused")]),
    family("reg_cache_lookups", Type::Counter, "Host buffers of copies: found pinned in the registration cache, or not",
        "result", &[("hit", "reg_cache_hits"), ("miss", "reg_cache_misses")]),
    family("reg_cache_removals", Type::Counter, "Ranges that left the registration cache: it was full, or memory was unmapped",
        "cause", &[("full", "reg_cache_evictions"), ("unmapped", "reg_cache_invalidations")]),
    family("dmabuf_operations", Type::Counter,
        "dma-bufs that were exported or imported, and descriptors handed out (for example to register RDMA)",
        "operation",
        &[("export", "dmabuf_exports"), ("descriptor", "dmabuf_descriptors"), ("import", "dmabuf_imports")]),
    family("dmabuf_failures", Type::Counter, "Exports and imports of dma-bufs that failed", "cause",
        &[("range", "dmabuf_failures_range"), ("unsupported", "dmabuf_failures_unsupported"),
          ("resources", "dmabuf_failures_resources"), ("permission", "dmabuf_failures_permission"),
          ("device_lost", "dmabuf_failures_device_lost"), ("refused", "dmabuf_failures_refused")]),
    family("peer_write_flushes", Type::Counter, "Flushes of what other devices had written to exported memory", "",
        &[("", "peer_write_flushes")]),
    family("ipc_imports", Type::Counter, "gaudi_ipc: allocations of peers that were mapped", "",
        &[("", "ipc_handles_opened")]),
    family("ipc_leases", Type::Counter, "gaudi_ipc: leases on own memory that peers got", "",
        &[("", "ipc_leases_granted")]),
    family("ipc_cache_lookups", Type::Counter, "gaudi_ipc: keys of peers whose memory was mapped already, or not", "result",
        &[("hit", "ipc_cache_hits"), ("miss", "ipc_cache_misses")]),
    family("ipc_cache_evictions", Type::Counter, "gaudi_ipc: mappings removed to stay within the limits", "",
        &[("", "ipc_cache_evictions")]),
    family("ipc_keys_refused", Type::Counter, "gaudi_ipc: keys of peers that could not be used", "cause",
        &[("foreign", "ipc_keys_refused"), ("ended", "ipc_refused_ended"), ("withdrawn", "ipc_refused_withdrawn"),
          ("unreachable", "ipc_refused_unreachable"), ("mismatch", "ipc_refused_mismatch")]),
    family("ipc_peers_refused", Type::Counter, "gaudi_ipc: requests of peers that were refused", "cause",
        &[("user", "ipc_peers_refused_user"), ("key", "ipc_peers_refused_key"),
          ("malformed", "ipc_peers_refused_malformed"), ("resources", "ipc_peers_refused_resources"),
          ("relay", "ipc_relay_refused")]),
];

/// A value that the driver reports about a card.
type Told = fn(&Card) -> Option<f64>;
const CARD_FAMILIES: [(&str, &str, Told); 5] = [
    ("card_memory_bytes", "Memory of the card", |card| card.memory_total.map(|bytes| bytes as f64)),
    ("card_memory_used_bytes", "Memory of the card that is in use, by any process", |card| {
        card.memory_used.map(|bytes| bytes as f64)
    }),
    (
        "card_utilization_ratio",
        "How busy the card is, as the driver tells: 1 is all of the time",
        |card| card.utilization.map(|percent| f64::from(percent) / 100.0),
    ),
    ("card_temperature_celsius", "The highest temperature that the card's sensors tell", |card| {
        card.temperature
    }),
    ("card_power_watts", "Power that the card draws", |card| card.power),
];

/// The two formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// The text format of Prometheus, which node_exporter reads from files.
    Text,
}

impl Format {
    /// Chosen by the header `Accept` of a request.
    pub(super) fn wanted(accept: Option<&str>) -> Self {
        let open = accept.is_some_and(|types| types.contains("application/openmetrics-text"));
        if open { Self::OpenMetrics } else { Self::Text }
    }

    pub(super) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Series that were shown before: they stay, even if they are 0 again.
pub(super) type Shown = BTreeSet<String>;

/// All metrics as text.
pub(super) fn render(totals: &Totals, cards: &[Card], format: Format, shown: &mut Shown) -> String {
    let mut page = Page { text: String::new(), format };
    page.family("exporter", Type::Info, "The exporter");
    page.sample(&format!("{}{{version=\"{}\"}}", "exporter_info", env!("CARGO_PKG_VERSION")), 1.0);
    if !cards.is_empty() {
        page.family("card", Type::Info, "A card of this machine");
        for card in cards {
            let labels = [("index", card.index.to_string()), ("name", card.name.clone())];
            page.sample(&series("card_info", &card.bus_id, &labels), 1.0);
        }
    }
    for (name, help, told) in CARD_FAMILIES {
        let mut values = cards.iter().filter_map(|card| Some((card, told(card)?))).peekable();
        if values.peek().is_some() {
            page.family(name, Type::Gauge, help);
        }
        for (card, value) in values {
            page.sample(&series(name, &card.bus_id, &[]), value);
        }
    }
    let sums = totals.sums();
    for family in FAMILIES {
        let name = format!("{}{}", family.name, family.kind.suffix());
        let mut samples = Vec::new();
        for (Owner { card, user }, counters) in &sums {
            for (value, counter) in family.parts {
                let mut labels = vec![("user", user.clone())];
                if !family.label.is_empty() {
                    labels.push((family.label, (*value).to_owned()));
                }
                let series = series(&name, card, &labels);
                let number = counters.get(*counter).copied().unwrap_or(0);
                if number > 0 || shown.contains(&series) {
                    samples.push((series, number));
                }
            }
        }
        if !samples.is_empty() {
            page.family(family.name, family.kind, family.help);
        }
        for (series, number) in samples {
            page.sample(&series, number as f64);
            shown.insert(series);
        }
    }
    if format == Format::OpenMetrics {
        page.text += "# EOF\n";
    }
    page.text
}

/// A name with its labels. What belongs to no card has no label for a card.
fn series(name: &str, card: &str, more: &[(&str, String)]) -> String {
    let card = (!card.is_empty()).then(|| ("card", card.to_owned()));
    let labels = card.iter().chain(more).map(|(label, value)| {
        let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
        format!("{label}=\"{value}\"")
    });
    format!("{name}{{{}}}", labels.collect::<Vec<_>>().join(","))
}

struct Page {
    text: String,
    format: Format,
}

impl Page {
    fn family(&mut self, name: &str, kind: Type, help: &str) {
        let (name, kind) = match self.format {
            Format::OpenMetrics => (name.to_owned(), kind.name()),
            // This format names samples, and has no type "info".
            Format::Text => {
                let known = if kind == Type::Info { Type::Gauge } else { kind };
                (format!("{name}{}", kind.suffix()), known.name())
            }
        };
        self.text += &format!("# HELP {PREFIX}{name} {help}.\n# TYPE {PREFIX}{name} {kind}\n");
        let unit = ["bytes", "celsius", "ratio", "watts"]
            .into_iter()
            .find(|unit| name.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')));
        if let (Format::OpenMetrics, Some(unit)) = (self.format, unit) {
            self.text += &format!("# UNIT {PREFIX}{name} {unit}\n");
        }
    }

    fn sample(&mut self, series: &str, value: f64) {
        self.text += &format!("{PREFIX}{series} {value}\n");
    }
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(super) fn fuzz(before: Option<super::Process>, now: super::Process) -> String {
    let mut totals = Totals::default();
    totals.update(before.into_iter().collect());
    totals.update(vec![now]);
    render(&totals, &[], Format::OpenMetrics, &mut Shown::new())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Counters that no metric shows, because others have the same information.
    const NOT_SHOWN: [&str; 11] = [
        "opens",
        "frees",
        "allocations_live",
        "ipc_shares",
        "ipc_shares_live",
        "ipc_handles_closed",
        "ipc_handles_live",
        "ipc_descriptors_received",
        "unpins",
        "reg_cache_regions",
        "in_flight_max",
    ];

    #[test]
    fn each_counter_is_in_one_metric() {
        let parts = FAMILIES.iter().flat_map(|family| family.parts);
        let mut used: Vec<&str> = parts.map(|(_, counter)| *counter).chain(NOT_SHOWN).collect();
        let mut all = gaudi::stats::NAMES.to_vec();
        used.sort_unstable();
        all.sort_unstable();
        assert_eq!(used, all);
    }

    fn totals() -> Totals {
        let owner = |card: &str, user: &str| Owner { card: card.into(), user: user.into() };
        let counters = |list: &[(&str, u64)]| {
            list.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect()
        };
        Totals::of(BTreeMap::from([
            (owner("0000:33:00.0", "ada"), counters(&[("h2d_bytes", 7), ("in_flight", 2)])),
            (owner("", "a\"b"), counters(&[("ipc_relay_bytes", 9), ("h2d_bytes", 0)])),
        ]))
    }

    #[test]
    fn both_formats_say_the_same() {
        let card = Card {
            bus_id: String::from("0000:33:00.0"),
            memory_total: Some(1 << 30),
            power: Some(97.5),
            ..Card::default()
        };
        let mut shown = Shown::new();
        let open = render(&totals(), std::slice::from_ref(&card), Format::OpenMetrics, &mut shown);
        for line in [
            "# TYPE ucx_gaudi_copied_bytes counter",
            "# UNIT ucx_gaudi_copied_bytes bytes",
            "ucx_gaudi_copied_bytes_total{card=\"0000:33:00.0\",user=\"ada\",direction=\"to_card\"} 7",
            "ucx_gaudi_way_bytes_total{user=\"a\\\"b\",way=\"relayed\"} 9",
            "ucx_gaudi_in_flight{card=\"0000:33:00.0\",user=\"ada\"} 2",
            "ucx_gaudi_card_memory_bytes{card=\"0000:33:00.0\"} 1073741824",
            "ucx_gaudi_card_power_watts{card=\"0000:33:00.0\"} 97.5",
            "# TYPE ucx_gaudi_card info",
            "ucx_gaudi_card_info{card=\"0000:33:00.0\",index=\"0\",name=\"\"} 1",
        ] {
            assert!(open.lines().any(|one| one == line), "no {line} in\n{open}");
        }
        assert!(
            open.ends_with("# EOF\n") && !open.contains("celsius") && !open.contains("from_card")
        );
        let samples = |text: &str| {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let text = render(&totals(), &[card], Format::Text, &mut shown);
        assert_eq!(samples(&text), samples(&open));
        assert!(text.contains("# TYPE ucx_gaudi_copied_bytes_total counter"), "{text}");
        assert!(!text.contains("# UNIT") && !text.contains("# EOF"), "{text}");
        // A series that was shown stays.
        let idle = Totals::of(BTreeMap::from([(
            Owner { card: "0000:33:00.0".into(), user: "ada".into() },
            BTreeMap::new(),
        )]));
        let text = render(&idle, &[], Format::Text, &mut shown);
        assert!(
            text.contains("ucx_gaudi_in_flight{card=\"0000:33:00.0\",user=\"ada\"} 0"),
            "{text}"
        );
    }

    /// Names of samples, with the values of their label.
    fn names() -> BTreeMap<String, (&'static str, Vec<&'static str>)> {
        let families = FAMILIES.iter().map(|family| {
            let values = family.parts.iter().map(|(value, _)| *value).collect();
            (format!("{PREFIX}{}{}", family.name, family.kind.suffix()), (family.label, values))
        });
        let of_cards = CARD_FAMILIES.iter().map(|(name, ..)| *name);
        let others = of_cards.chain(["card_info", "exporter_info"]);
        families.chain(others.map(|name| (format!("{PREFIX}{name}"), ("", Vec::new())))).collect()
    }

    /// Checks every name in an expression, and the value that its label is compared with.
    fn check_expression(
        expression: &str,
        known: &BTreeMap<String, (&'static str, Vec<&str>)>,
    ) -> usize {
        let mut found = 0;
        for (at, _) in expression.match_indices(PREFIX) {
            let rest = &expression[at..];
            let end = rest.find(|one: char| !one.is_ascii_alphanumeric() && one != '_');
            let (name, rest) = rest.split_at(end.unwrap_or(rest.len()));
            let (label, values) =
                known.get(name).unwrap_or_else(|| panic!("no metric {name}: {expression}"));
            found += 1;
            let Some(selector) = rest.strip_prefix('{').and_then(|rest| rest.split('}').next())
            else {
                continue;
            };
            for matcher in selector.split(',').filter(|text| !text.is_empty()) {
                let (name, value) = matcher.split_once(['=', '!']).expect("a matcher");
                let general = ["instance", "card", "user"].contains(&name.trim());
                assert!(general || name.trim() == *label, "no label {name}: {expression}");
                let value = value.trim_matches(['=', '~', '"']);
                let listed = value.split('|').all(|one| values.contains(&one));
                assert!(general || listed, "no {label} {value}: {expression}");
            }
        }
        found
    }

    #[test]
    fn dashboard_and_rules_name_metrics_that_exist() {
        let known = names();
        let dashboard = include_str!("../../../../examples/monitoring/grafana-dashboard.json");
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).expect("JSON");
        let panels = dashboard["panels"].as_array().expect("panels");
        let mut drawn = 0;
        for panel in panels.iter().filter(|panel| panel["type"] != "row") {
            for target in panel["targets"].as_array().expect("targets") {
                let expression = target["expr"].as_str().expect("an expression");
                assert!(check_expression(expression, &known) > 0, "{expression}");
                drawn += 1;
            }
        }
        assert!(drawn > 8, "{drawn} expressions");
        for variable in dashboard["templating"]["list"].as_array().expect("variables") {
            check_expression(&variable["query"].to_string().replace("\\\"", "\""), &known);
        }
        let rules = include_str!("../../../../examples/monitoring/rules.yml");
        assert!(rules.matches("alert:").count() > 4 && check_expression(rules, &known) > 4);
    }
}
