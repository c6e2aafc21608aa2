//! One measured figure beside its floor: the format of every bench.

use std::borrow::Cow;

use comfy_table::{CellAlignment, Table, presets};
use serde::{Deserialize, Serialize};

/// A figure, the floor it is compared with, and whether the target was met.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// What was measured.
    pub(crate) name: String,
    /// The figure.
    pub(crate) value: f64,
    /// Its unit.
    pub(crate) unit: Cow<'static, str>,
    /// What the same work costs without us, measured in the same run.
    pub(crate) floor: f64,
    /// `value / floor`.
    pub(crate) ratio: f64,
    /// The bound on the ratio, where there is one.
    pub(crate) target: Option<f64>,
    /// Whether the ratio is on the right side of the target; nothing without a target.
    pub(crate) met: Option<bool>,
    /// The model of the card's times, such as `gaudi2,slow=20`; nothing if they are the card's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) model: Option<String>,
}

impl Record {
    /// A figure where less is better and `ratio` must not exceed `target`.
    pub(crate) fn at_most(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        floor: f64,
        target: Option<f64>,
    ) -> Self {
        let (ratio, unit) = (value / floor, Cow::Borrowed(unit));
        let met = target.map(|target| ratio <= target);
        Self { name: name.into(), value, unit, floor, ratio, target, met, model: None }
    }

    /// A figure where more is better and `ratio` must not fall below `target`.
    pub(crate) fn at_least(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        floor: f64,
        target: Option<f64>,
    ) -> Self {
        let record = Self::at_most(name, value, unit, floor, target);
        Self { met: target.map(|target| record.ratio >= target), ..record }
    }

    /// A figure where less is better and must not exceed `limit`, whatever the floor; the target is
    /// the ratio at which it would.
    pub(crate) fn within(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        floor: f64,
        limit: f64,
    ) -> Self {
        let name = format!("{} (at most {limit} {unit})", name.into());
        let met = Some(value <= limit);
        Self { met, ..Self::at_most(name, value, unit, floor, Some(limit / floor)) }
    }
}

/// The middle of an odd number of samples, the mean of the two middle ones of an even number.
pub(crate) fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

/// All records for the terminal.
pub(crate) fn table(records: &[Record]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header(["measured", "value", "unit", "floor", "ratio", "target", "met"]);
    for record in records {
        table.add_row([
            record.name.clone(),
            format!("{:.3}", record.value),
            record.unit.to_string(),
            format!("{:.3}", record.floor),
            format!("{:.3}", record.ratio),
            record.target.map(|target| format!("{target:.3}")).unwrap_or_default(),
            match record.met {
                None => String::new(),
                Some(true) => "yes".to_owned(),
                Some(false) => "NO".to_owned(),
            },
        ]);
    }
    for index in [1, 3, 4, 5] {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// All records for a spreadsheet or a plot program.
pub(crate) fn csv(records: &[Record]) -> String {
    let mut lines = vec!["name,value,unit,floor,ratio,target,met".to_owned()];
    lines.extend(records.iter().map(|record| {
        let Record { name, value, unit, floor, ratio, target, met, model: _ } = record;
        let name = name.replace('"', "\"\"");
        let target = target.map(|target| target.to_string()).unwrap_or_default();
        let met = met.map(|met| met.to_string()).unwrap_or_default();
        format!("\"{name}\",{value},{unit},{floor},{ratio},{target},{met}")
    }));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ignores_order_and_outliers() {
        assert_eq!(median(&[9.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 1000.0]), 3.0);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn json_has_the_agreed_fields() {
        let record = Record::at_most("x", 1.5, "µs", 1.0, Some(1.01));
        let json = serde_json::to_value(&record).expect("JSON");
        let fields: Vec<&String> = json.as_object().expect("object").keys().collect();
        assert_eq!(fields.len(), 7);
        for field in ["name", "value", "unit", "floor", "ratio", "target", "met"] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["met"], false);
    }

    #[test]
    fn names_with_commas_and_quotes_stay_one_cell() {
        let record = Record::at_most("get, \"8 B\"", 1.5, "µs", 1.0, None);
        let expected =
            "name,value,unit,floor,ratio,target,met\n\"get, \"\"8 B\"\"\",1.5,µs,1,1.5,,\n";
        assert_eq!(csv(&[record]), expected);
    }

    #[test]
    fn a_limit_holds_whatever_the_floor() {
        let record = Record::within("x", 49.0, "ns", 2.0, 50.0);
        assert_eq!((record.met, record.target, record.ratio), (Some(true), Some(25.0), 24.5));
        assert_eq!(record.name, "x (at most 50 ns)");
        assert_eq!(Record::within("x", 51.0, "ns", 2.0, 50.0).met, Some(false));
    }

    #[test]
    fn more_is_better_where_it_is_a_rate() {
        assert_eq!(Record::at_least("x", 9.0, "GB/s", 10.0, Some(0.8)).met, Some(true));
        assert_eq!(Record::at_least("x", 7.0, "GB/s", 10.0, Some(0.8)).met, Some(false));
    }

    #[test]
    fn without_target_nothing_is_claimed() {
        assert_eq!(Record::at_most("x", 1.0, "µs", 1.0, None).met, None);
    }
}
