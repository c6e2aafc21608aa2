//! One measured figure and the floor it is compared with: the format of every bench.

use serde::{Deserialize, Serialize};
use std::borrow::Cow;

/// A figure, the floor it is compared with, and whether the target was met.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// What was measured.
    pub name: String,
    pub value: f64,
    /// For rates (`GB/s`) higher is better, for all other units lower.
    pub unit: Cow<'static, str>,
    /// The cost of the same work without us, measured in the same run.
    pub floor: f64,
    /// `value / floor`.
    pub ratio: f64,
    /// The limit of the ratio, if there is one.
    pub target: Option<f64>,
    /// Whether the ratio meets the target; `None` without a target.
    pub met: Option<bool>,
    /// The timing model of the software card, such as `gaudi2,slow=20`; `None` if the times are the card's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

impl Record {
    pub fn new(
        name: impl Into<String>,
        value: f64,
        unit: impl Into<Cow<'static, str>>,
        floor: f64,
        target: impl Into<Option<f64>>,
    ) -> Record {
        let (ratio, unit, target) = (value / floor, unit.into(), target.into());
        let met =
            target.map(|target| if unit == "GB/s" { ratio >= target } else { ratio <= target });
        Record { name: name.into(), value, unit, floor, ratio, target, met, model: None }
    }

    /// A figure that must not exceed `limit`, whatever the floor; the target is the ratio at the limit.
    pub fn within(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        floor: f64,
        limit: f64,
    ) -> Record {
        let name = format!("{} (at most {limit} {unit})", name.into());
        Record { met: Some(value <= limit), ..Record::new(name, value, unit, floor, limit / floor) }
    }

    /// The same value compared with another floor.
    #[must_use]
    pub fn against(&self, name: impl Into<String>, floor: f64, target: Option<f64>) -> Record {
        Record::new(name, self.value, self.unit.clone(), floor, target)
    }

    /// Prints it to standard output as a line of JSON.
    pub fn print(&self) -> serde_json::Result<()> {
        println!("{}", serde_json::to_string(self)?);
        Ok(())
    }
}

/// A number of bytes: `8 B`, `4 KiB`, `1 MiB`.
pub fn size_name(bytes: usize) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        let names = [8, 4096, 1 << 20, (1 << 20) + 1].map(size_name);
        assert_eq!(names, ["8 B", "4 KiB", "1 MiB", "1048577 B"]);
    }

    #[test]
    fn json_has_the_agreed_fields() {
        let json = serde_json::to_value(Record::new("x", 1.5, "µs", 1.0, 1.01)).expect("JSON");
        let fields: Vec<&str> =
            json.as_object().expect("object").keys().map(String::as_str).collect();
        assert_eq!(fields, ["floor", "met", "name", "ratio", "target", "unit", "value"]);
        assert_eq!(json["met"], false);
    }

    #[test]
    fn a_target_bounds_times_from_above_and_rates_from_below() {
        let met = |unit: &'static str, target| Record::new("x", 9.0, unit, 10.0, target).met;
        assert_eq!([met("GB/s", Some(0.8)), met("GB/s", Some(0.95))], [Some(true), Some(false)]);
        assert_eq!([met("µs", Some(0.8)), met("µs", Some(0.95))], [Some(false), Some(true)]);
        assert_eq!(met("µs", None), None);
    }

    #[test]
    fn a_limit_holds_whatever_the_floor() {
        let record = Record::within("x", 49.0, "ns", 2.0, 50.0);
        assert_eq!((record.met, record.target, record.ratio), (Some(true), Some(25.0), 24.5));
        assert_eq!(record.name, "x (at most 50 ns)");
        assert_eq!(Record::within("x", 51.0, "ns", 2.0, 50.0).met, Some(false));
        assert_eq!(Record::within("x", 0.0, "copies", 2.0, 0.0).met, Some(true));
    }
}
