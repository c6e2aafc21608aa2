//! Results as bars in the terminal: GB/s by size, a block for each operation and pair of memories.

use super::results::{Results, gbps};
use crate::output::{DIM, GREEN, size};

/// Columns of the longest bar.
const WIDTH: usize = 50;
/// Eighths of a column.
const PARTS: [&str; 8] = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"];

/// Prints all blocks, with one scale.
pub(super) fn print(results: &Results) {
    let most = results.cells.iter().map(|cell| cell.gbps).fold(0.0, f64::max);
    let mut title = None;
    for cell in &results.cells {
        if title != Some((&cell.op, &cell.pair)) {
            title = Some((&cell.op, &cell.pair));
            println!("\n{} {}", cell.op, cell.pair);
        }
        let (length, figure) = (bar(cell.gbps, most), gbps(cell.gbps));
        let size = size(cell.size as u64);
        anstream::println!("  {size:>9} {GREEN}{length}{GREEN:#} {DIM}{figure} GB/s{DIM:#}");
    }
}

fn bar(value: f64, most: f64) -> String {
    if most <= 0.0 || !value.is_finite() {
        return String::new();
    }
    let eighths =
        (value / most * (WIDTH * 8) as f64).round().clamp(0.0, (WIDTH * 8) as f64) as usize;
    "█".repeat(eighths / 8) + PARTS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion() {
        assert_eq!(bar(1.0, 1.0), "█".repeat(WIDTH));
        assert_eq!(bar(0.5, 1.0), "█".repeat(WIDTH / 2));
        assert_eq!(bar(0.0, 1.0), "");
        assert_eq!(bar(1.0, 0.0), "");
        assert_eq!(bar(1.0 / 400.0, 1.0), "▏");
    }
}
