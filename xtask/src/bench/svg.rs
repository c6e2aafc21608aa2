//! A line chart as SVG: sizes on a logarithmic axis, a curve per series, labelled, without scripts or
//! fonts of its own.

use std::fmt::Write;

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 460.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 60.0;

/// Colours that differ also for those who do not see red and green apart.
const COLOURS: [&str; 5] = ["#444444", "#0072b2", "#d55e00", "#009e73", "#cc79a7"];

/// One curve: its name and (size in bytes, value).
pub(super) struct Series {
    pub(super) name: String,
    pub(super) points: Vec<(u64, f64)>,
}

/// The chart as a document. The first series is the floor, drawn dashed.
pub(super) fn chart(title: &str, y_label: &str, series: &[Series]) -> String {
    let sizes: Vec<u64> = {
        let mut all: Vec<u64> = series.iter().flat_map(|s| s.points.iter().map(|p| p.0)).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let top = series.iter().flat_map(|s| s.points.iter().map(|p| p.1)).fold(0.0, f64::max);
    let step = tick_step(top);
    let top = (top / step).ceil().max(1.0) * step;
    let logs = |size: u64| (size.max(1) as f64).log2();
    let (low, high) = (
        sizes.first().map_or(0.0, |&size| logs(size)),
        sizes.last().map_or(1.0, |&size| logs(size)),
    );
    let x = |size: u64| LEFT + (logs(size) - low) / (high - low).max(1.0) * (WIDTH - LEFT - RIGHT);
    let y = |value: f64| HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM);

    let mut out = String::new();
    let mut line = |text: std::fmt::Arguments<'_>| {
        // Writing to a string does not fail.
        let _ = out.write_fmt(text);
        out.push('\n');
    };
    line(format_args!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">"#
    ));
    line(format_args!(r#"<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>"#));
    line(format_args!(r#"<text x="{LEFT}" y="26" font-size="16">{}</text>"#, escape(title)));
    let (right, bottom) = (WIDTH - RIGHT, HEIGHT - BOTTOM);
    let mut value = 0.0;
    while value <= top + step / 2.0 {
        let at = y(value);
        line(format_args!(
            r##"<line x1="{LEFT}" y1="{at:.1}" x2="{right}" y2="{at:.1}" stroke="#dddddd"/>"##
        ));
        line(format_args!(
            r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{value}</text>"#,
            LEFT - 8.0,
            at + 4.0
        ));
        value += step;
    }
    for &size in &sizes {
        let (at, name) = (x(size), size_name(size));
        line(format_args!(
            r##"<line x1="{at:.1}" y1="{TOP}" x2="{at:.1}" y2="{bottom}" stroke="#eeeeee"/>"##
        ));
        line(format_args!(
            r#"<text x="{at:.1}" y="{:.1}" text-anchor="middle">{name}</text>"#,
            bottom + 20.0
        ));
    }
    line(format_args!(
        r#"<text x="{:.1}" y="{:.1}" text-anchor="middle">size of a copy</text>"#,
        (LEFT + right) / 2.0,
        bottom + 44.0
    ));
    let middle = (TOP + bottom) / 2.0;
    line(format_args!(
        r#"<text x="20" y="{middle:.1}" text-anchor="middle" transform="rotate(-90 20 {middle:.1})">{}</text>"#,
        escape(y_label)
    ));
    for (index, one) in series.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let dashes = if index == 0 { r#" stroke-dasharray="6 4""# } else { "" };
        let points: Vec<String> = one
            .points
            .iter()
            .map(|&(size, value)| format!("{:.1},{:.1}", x(size), y(value)))
            .collect();
        line(format_args!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>"#,
            points.join(" ")
        ));
        for &(size, value) in &one.points {
            line(format_args!(
                r#"<circle cx="{:.1}" cy="{:.1}" r="3.5" fill="{colour}"><title>{}, {}: {value:.2}</title></circle>"#,
                x(size),
                y(value),
                escape(&one.name),
                size_name(size)
            ));
        }
        let at = TOP + 16.0 + 22.0 * index as f64;
        line(format_args!(
            r#"<line x1="{:.1}" y1="{at:.1}" x2="{:.1}" y2="{at:.1}" stroke="{colour}" stroke-width="2"{dashes}/>"#,
            right + 16.0,
            right + 44.0
        ));
        line(format_args!(
            r#"<text x="{:.1}" y="{:.1}">{}</text>"#,
            right + 50.0,
            at + 4.0,
            escape(&one.name)
        ));
    }
    line(format_args!("</svg>"));
    out
}

/// A round distance between the lines of an axis that goes up to `top`.
fn tick_step(top: f64) -> f64 {
    if !(top.is_finite() && top > 0.0) {
        return 1.0;
    }
    let rough = top / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}

/// A number of bytes as people say it.
pub(super) fn size_name(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(name: &str, points: &[(u64, f64)]) -> Series {
        Series { name: name.to_owned(), points: points.to_vec() }
    }

    #[test]
    fn every_curve_and_axis_is_there_and_named() {
        let all = [
            series("memcpy", &[(65536, 10.0), (1 << 20, 9.0)]),
            series("a < b", &[(65536, 5.0), (1 << 20, 8.5)]),
        ];
        let svg = chart("Copies & floor", "GB/s", &all);
        assert_eq!(svg.matches("<polyline").count(), 2);
        for text in ["64 KiB", "1 MiB", "size of a copy", "GB/s", "a &lt; b", "Copies &amp; floor"]
        {
            assert!(svg.contains(text), "{text}\n{svg}");
        }
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }

    #[test]
    fn larger_values_are_higher_and_larger_sizes_further_right() {
        let svg = chart("t", "y", &[series("s", &[(1, 1.0), (2, 3.0)])]);
        let points = svg.split("points=\"").nth(1).and_then(|rest| rest.split('"').next());
        let numbers: Vec<f64> = points
            .expect("points")
            .split([' ', ','])
            .map(|number| number.parse().expect("a number"))
            .collect();
        assert!(numbers[2] > numbers[0] && numbers[3] < numbers[1], "{numbers:?}");
    }

    #[test]
    fn nothing_at_all_is_still_a_chart() {
        assert!(!chart("t", "y", &[series("s", &[])]).contains("NaN"));
        assert!(!chart("t", "y", &[series("s", &[(8, 0.0)])]).contains("NaN"));
    }

    #[test]
    fn axes_have_round_numbers() {
        assert_eq!(tick_step(11.0), 2.0);
        assert_eq!(tick_step(6.0), 1.0);
        assert_eq!(tick_step(100.0), 20.0);
        assert_eq!(tick_step(f64::NAN), 1.0);
    }
}
