//! Quantities as people read them.

use std::time::Duration;

/// A number of bytes: `8 B`, `4 KiB`, `1 MiB`.
pub(crate) fn size(bytes: u64) -> String {
    match bytes {
        _ if bytes >= 1 << 20 && bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        _ if bytes >= 1 << 10 && bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}

/// A duration: `1.2 s`, `2 min 05 s`.
pub(crate) fn seconds(duration: Duration) -> String {
    let secs = duration.as_secs_f64();
    if secs < 60.0 {
        format!("{secs:.1} s")
    } else {
        format!("{} min {:02} s", duration.as_secs() / 60, duration.as_secs() % 60)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_read_well() {
        assert_eq!(seconds(Duration::from_millis(1_240)), "1.2 s");
        assert_eq!(seconds(Duration::from_secs(125)), "2 min 05 s");
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [8, 4096, 1 << 20, (1 << 20) + 1].map(size),
            ["8 B", "4 KiB", "1 MiB", "1048577 B"]
        );
    }
}
