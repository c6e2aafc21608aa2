//! Draws bandwidths of a bench over message sizes as an SVG next to its page.
//!
//! A record is named `what, SIZE, which way, floor: compared with what`: each *what* gets a panel, each way a line,
//! each floor a dashed line.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use ucp_check::measure::Record;

/// How many points a line needs to be drawn.
const POINTS: usize = 4;
/// Panels side by side, and their measures in pixels.
const COLUMNS: usize = 3;
const PANEL: (f64, f64) = (270.0, 190.0);
const PLOT: (f64, f64) = (220.0, 125.0);
const LEGEND_ROW: f64 = 18.0;
/// Okabe and Ito's colours, which are safe for colour-blind readers.
const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

const UNITS: [(&str, u32); 4] = [("GiB", 30), ("MiB", 20), ("KiB", 10), ("B", 0)];

/// The lines of a panel by their names, each a list of sizes and GB/s.
type Lines = BTreeMap<String, BTreeMap<u64, f64>>;

/// A picture, if there is anything to draw.
pub(super) fn svg(title: &str, records: &[Record]) -> Option<String> {
    let panels = panels(records);
    if panels.is_empty() {
        return None;
    }
    let names: BTreeSet<&String> = panels.iter().flat_map(|(_, lines)| lines.keys()).collect();
    let names: Vec<&String> = names.into_iter().collect();
    let rows = panels.len().div_ceil(COLUMNS);
    let width = PANEL.0 * COLUMNS.min(panels.len()) as f64 + 20.0;
    let per_row = (width / 250.0).floor().max(1.0) as usize;
    let top = 30.0;
    let bottom = top + PANEL.1 * rows as f64;
    let height = bottom + LEGEND_ROW * names.len().div_ceil(per_row) as f64 + 10.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" font-family=\"sans-serif\" \
         font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    text(&mut svg, (10.0, 19.0), "start", 14, &format!("{title}: GB/s over message size"));
    for (at, (name, lines)) in panels.iter().enumerate() {
        let corner =
            (PANEL.0 * (at % COLUMNS) as f64 + 45.0, top + PANEL.1 * (at / COLUMNS) as f64 + 25.0);
        panel(&mut svg, corner, name, lines, &names);
    }
    for (at, name) in names.iter().enumerate() {
        let (x, y) = (
            15.0 + 250.0 * (at % per_row) as f64,
            bottom + LEGEND_ROW * (at / per_row) as f64 + 6.0,
        );
        line(&mut svg, &[(x, y), (x + 24.0, y)], style(name, &names));
        text(&mut svg, (x + 30.0, y + 4.0), "start", 11, name);
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

/// Panels with a line of enough points, in the order of the records.
fn panels(records: &[Record]) -> Vec<(String, Lines)> {
    let mut panels: Vec<(String, Lines)> = Vec::new();
    for record in records.iter().filter(|record| record.unit == "GB/s") {
        let parts: Vec<&str> = record.name.split(", ").collect();
        let size = parts.iter().position(|part| parse_size(part).is_some());
        let Some((at, size)) = size.and_then(|at| Some((at, parse_size(parts[at])?))) else {
            continue;
        };
        let floor = parts.iter().find_map(|part| part.strip_prefix("floor: "));
        let way = parts[at + 1..].iter().filter(|part| !part.starts_with("floor: "));
        let way = way.copied().collect::<Vec<_>>().join(", ");
        let (what, measured) =
            (parts[..at].join(", "), if way.is_empty() { "measured" } else { &way });
        let panel = match panels.iter().position(|(name, _)| *name == what) {
            Some(at) => at,
            None => {
                panels.push((what, Lines::new()));
                panels.len() - 1
            }
        };
        let lines = &mut panels[panel].1;
        lines.entry(measured.to_owned()).or_default().insert(size, record.value);
        let floor = floor.map_or_else(|| "floor".to_owned(), |floor| format!("floor: {floor}"));
        lines.entry(floor).or_default().insert(size, record.floor);
    }
    for (_, lines) in &mut panels {
        lines.retain(|_, points| points.len() >= POINTS);
    }
    panels.retain(|(_, lines)| lines.keys().any(|name| !name.starts_with("floor")));
    panels
}

fn panel(svg: &mut String, (left, top): (f64, f64), name: &str, lines: &Lines, names: &[&String]) {
    let points = || lines.values().flatten();
    let (low, high) =
        points().fold((u64::MAX, 1), |(low, high), (size, _)| (low.min(*size), high.max(*size)));
    let most = nice(points().map(|(_, value)| *value).fold(0.0, f64::max));
    let log = |size: u64| (size.max(1) as f64).log2();
    let x = |size: u64| left + PLOT.0 * (log(size) - log(low)) / (log(high) - log(low)).max(1.0);
    let y = |value: f64| top + PLOT.1 * (1.0 - value / most);
    text(svg, (left, top - 8.0), "start", 12, name);
    for step in 0..=4 {
        let value = most * f64::from(step) / 4.0;
        line(svg, &[(left, y(value)), (left + PLOT.0, y(value))], ("#ddd", ""));
        text(
            svg,
            (left - 5.0, y(value) + 4.0),
            "end",
            10,
            &format!("{}", (value * 1e4).round() / 1e4),
        );
    }
    let sizes: BTreeSet<u64> = points().map(|(size, _)| *size).collect();
    let every = sizes.len().div_ceil(5);
    for size in sizes.iter().step_by(every) {
        text(svg, (x(*size), top + PLOT.1 + 15.0), "middle", 10, &in_words(*size));
    }
    for (name, points) in lines {
        let points: Vec<(f64, f64)> =
            points.iter().map(|(size, value)| (x(*size), y(*value))).collect();
        line(svg, &points, style(name, names));
    }
}

/// Parses `64 KiB`, as in records; `None` for other words.
fn parse_size(text: &str) -> Option<u64> {
    let (number, unit) = text.split_once(' ')?;
    let (_, shift) = UNITS.into_iter().find(|(known, _)| *known == unit)?;
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The reverse, abbreviated.
fn in_words(size: u64) -> String {
    let fits = |(_, shift): &(&str, u32)| size.is_multiple_of(1 << shift);
    let (unit, shift) = UNITS.into_iter().find(fits).unwrap_or(("B", 0));
    format!("{}{}", size >> shift, unit.trim_end_matches("iB").trim_end_matches('B'))
}

/// Colour and dashes of a line.
fn style(name: &str, names: &[&String]) -> (&'static str, &'static str) {
    let of_kind =
        |floor: bool| names.iter().filter(move |other| other.starts_with("floor") == floor);
    let floor = name.starts_with("floor");
    let at = of_kind(floor).position(|other| *other == name).unwrap_or(0);
    match floor {
        true => (["#777", "#aaa", "#444"][at % 3], ["4 3", "1 3", "8 3"][at % 3]),
        false => (COLOURS[at % COLOURS.len()], ""),
    }
}

/// The next larger number that divides into round quarters.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.max(1e-6).log10().floor());
    let steps = [1.0, 1.2, 1.6, 2.0, 2.4, 3.0, 4.0, 6.0, 8.0, 10.0].map(|step| step * power);
    steps.into_iter().find(|step| *step >= value).unwrap_or(value)
}

fn line(svg: &mut String, points: &[(f64, f64)], (colour, dashes): (&str, &str)) {
    let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    let dashes =
        if dashes.is_empty() { String::new() } else { format!(" stroke-dasharray=\"{dashes}\"") };
    let _ = writeln!(
        svg,
        "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"{dashes}/>",
        points.join(" ")
    );
}

fn text(svg: &mut String, (x, y): (f64, f64), anchor: &str, size: u32, text: &str) {
    let text = text.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(
        svg,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" font-size=\"{size}\">{text}</text>"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn panels_have_lines_by_way_and_floor_and_need_four_sizes() {
        let record = |name: &str| Record::new(name, 2.0, "GB/s", 4.0, None);
        let sizes = ["64 KiB", "1 MiB", "4 MiB", "16 MiB"];
        let mut records: Vec<Record> = Vec::new();
        for size in sizes {
            records.push(record(&format!("put a:b, {size}, relay")));
            records.push(record(&format!("get, {size}, floor: mem<cpy")));
        }
        records.push(record("get, 8 B, one at a time, floor: mem<cpy"));
        records.push(record("first open ever"));
        let panels = panels(&records);
        let names: Vec<(&str, Vec<&str>)> = panels
            .iter()
            .map(|(name, lines)| (&**name, lines.keys().map(String::as_str).collect()))
            .collect();
        let put = ("put a:b", vec!["floor", "relay"]);
        assert_eq!(names, [put, ("get", vec!["floor: mem<cpy", "measured"])]);
        assert_eq!(
            panels[0].1["relay"].keys().copied().collect::<Vec<_>>(),
            [64 << 10, 1 << 20, 4 << 20, 16 << 20]
        );
        let svg = svg("x", &records).expect("a picture");
        assert!(svg.contains("mem&lt;cpy") && svg.ends_with("</svg>\n"), "{svg}");
        assert_eq!(super::svg("x", &records[..2]), None);
    }

    #[test]
    fn axes_end_at_round_numbers() {
        let tenths = |value| (10.0 * nice(value)).round() as u32;
        assert_eq!([0.52, 11.3, 2.0, 9.7].map(tenths), [6, 120, 20, 100]);
    }
}
