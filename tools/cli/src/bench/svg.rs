//! Results as a picture: a panel for each operation, GB/s over size, a line for each pair of memories.

use std::fmt::Write;

use super::results::{Cell, Results};
use crate::output::size;

const PANEL: (f64, f64) = (360.0, 260.0);
const MARGIN: (f64, f64) = (60.0, 40.0);
const COLOURS: [(&str, &str); 4] = [
    ("host:host", "#888888"),
    ("host:gaudi", "#1b7fb8"),
    ("gaudi:host", "#d9822b"),
    ("gaudi:gaudi", "#2f9e44"),
];

/// The picture.
pub(super) fn draw(results: &Results) -> String {
    let mut ops: Vec<&str> = Vec::new();
    for cell in &results.cells {
        if !ops.contains(&cell.op.as_str()) {
            ops.push(&cell.op);
        }
    }
    let (width, height) = (PANEL.0 * ops.len().max(1) as f64, PANEL.1 + 40.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    let mut sizes: Vec<usize> = results.cells.iter().map(|cell| cell.size).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let most = results.cells.iter().map(|cell| cell.gbps).fold(f64::MIN_POSITIVE, f64::max);
    for (number, op) in ops.iter().enumerate() {
        let cells: Vec<&Cell> = results.cells.iter().filter(|cell| cell.op == *op).collect();
        panel(&mut text, PANEL.0 * number as f64, op, &cells, &sizes, most);
    }
    legend(&mut text, results);
    text + "</svg>\n"
}

fn panel(text: &mut String, left: f64, op: &str, cells: &[&Cell], sizes: &[usize], most: f64) {
    let (x0, y0) = (left + MARGIN.0, MARGIN.1);
    let (w, h) = (PANEL.0 - MARGIN.0 - 15.0, PANEL.1 - 2.0 * MARGIN.1);
    let x = |size: usize| {
        let at = sizes.iter().position(|known| *known == size).unwrap_or_default();
        x0 + w * (at as f64 + 0.5) / sizes.len().max(1) as f64
    };
    let y = |gbps: f64| y0 + h * (1.0 - gbps / most);
    // Writing to a string does not fail.
    let _ = writeln!(text, "<text x=\"{x0}\" y=\"{}\" font-size=\"14\">{op}</text>", y0 - 12.0);
    for part in 0..=4 {
        let value = most * f64::from(part) / 4.0;
        let at = y(value);
        let _ = writeln!(
            text,
            "<line x1=\"{x0}\" y1=\"{at:.1}\" x2=\"{:.1}\" y2=\"{at:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{value:.1}</text>",
            x0 + w,
            x0 - 5.0,
            at + 4.0
        );
    }
    for &bytes in sizes {
        let (at, below) = (x(bytes), y0 + h + 16.0);
        let words = size(bytes as u64);
        let _ = writeln!(
            text,
            "<text x=\"{at:.1}\" y=\"{below:.1}\" text-anchor=\"middle\">{words}</text>"
        );
    }
    for (pair, colour) in COLOURS {
        let mut line: Vec<&&Cell> = cells.iter().filter(|cell| cell.pair == pair).collect();
        line.sort_by_key(|cell| cell.size);
        let points: Vec<String> =
            line.iter().map(|cell| format!("{:.1},{:.1}", x(cell.size), y(cell.gbps))).collect();
        if points.is_empty() {
            continue;
        }
        let _ = writeln!(
            text,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
            points.join(" ")
        );
        for point in &points {
            let (x, y) = point.split_once(',').unwrap_or_default();
            let _ = writeln!(text, "<circle cx=\"{x}\" cy=\"{y}\" r=\"3\" fill=\"{colour}\"/>");
        }
    }
}

fn legend(text: &mut String, results: &Results) {
    let mut x = MARGIN.0;
    let y = PANEL.1 + 20.0;
    for (pair, colour) in COLOURS {
        if !results.cells.iter().any(|cell| cell.pair == pair) {
            continue;
        }
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{colour}\"/>\
             <text x=\"{}\" y=\"{y}\">{pair}</text>",
            y - 9.0,
            x + 14.0
        );
        x += 95.0;
    }
    let (card, ucx) = (results.card(), &results.ucx);
    let _ =
        writeln!(text, "<text x=\"{x}\" y=\"{y}\" fill=\"#666666\">GB/s, UCX {ucx}, {card}</text>");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::results::tests::results;

    #[test]
    fn every_operation_has_a_panel_and_every_pair_a_line() {
        let picture = draw(&results(
            "tag host:host 8 1 2\ntag host:host 64 1 4\ntag gaudi:gaudi 8 1 1\nput host:host 8 1 2",
        ));
        assert_eq!(picture.matches("<polyline").count(), 3, "{picture}");
        assert!(picture.contains(">tag<") && picture.contains(">put<"), "{picture}");
        assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
        assert!(!picture.contains("NaN") && !picture.contains("inf"), "{picture}");
        assert!(draw(&results("")).contains("</svg>"), "nothing measured");
    }
}
