//! Reading what `ucx_info -d` prints.

/// The output of `ucx_info -d`.
#[derive(Debug, Clone, Copy)]
pub struct Listing<'a> {
    text: &'a str,
}

impl<'a> Listing<'a> {
    /// Parses this standard output.
    pub fn of(text: &'a str) -> Self {
        Self { text }
    }

    /// Its lines, without the comment sign.
    pub fn lines(self) -> impl Iterator<Item = &'a str> {
        self.text.lines().map(|line| line.trim_start_matches('#').trim())
    }

    /// How often a line occurs.
    pub fn count(self, wanted: &str) -> usize {
        self.lines().filter(|line| *line == wanted).count()
    }

    /// The part about one memory domain, as printed; empty if it is not listed.
    pub fn domain(self, name: &str) -> String {
        let mut inside = false;
        let lines: Vec<&str> = self
            .text
            .lines()
            .filter(|line| {
                if let Some(title) = line.strip_prefix("# Memory domain:") {
                    inside = title.trim() == name;
                }
                inside
            })
            .collect();
        lines.join("\n").trim_end_matches(['#', '\n']).to_owned()
    }

    /// The whole output without the numbers that change from one moment to the next: UCX lists how much shared memory
    /// is free.
    pub fn steady(self) -> String {
        let mut lines = Vec::new();
        for line in self.text.lines() {
            match line.split_once("allocate: <=") {
                Some((before, _)) => lines.push(format!("{before}allocate: <= …")),
                None => lines.push(line.to_owned()),
            }
        }
        lines.join("\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "#\n# Memory domain: self\n#     Component: self\n#\n\
                        # Memory domain: gaudi_copy\n#     Component: gaudi_copy\n\
                        #      Transport: gaudi_cpy\n#\n# Memory domain: posix\n\
                        #             allocate: <= 24587480K\n";

    #[test]
    fn domain_ends_where_the_next_begins() {
        let domain = Listing::of(TEXT).domain("gaudi_copy");
        assert!(domain.starts_with("# Memory domain: gaudi_copy"), "{domain}");
        assert!(domain.ends_with("Transport: gaudi_cpy"), "{domain}");
        assert_eq!(Listing::of(TEXT).domain("absent"), "");
    }

    #[test]
    fn lines_are_counted_whole() {
        assert_eq!(Listing::of(TEXT).count("Component: gaudi_copy"), 1);
        assert_eq!(Listing::of(TEXT).count("Component: gaudi"), 0);
    }

    #[test]
    fn only_the_free_memory_is_masked() {
        let later = TEXT.replace("24587480K", "1K");
        assert_eq!(Listing::of(TEXT).steady(), Listing::of(&later).steady());
        let other = TEXT.replace("gaudi_cpy", "gaudi_xyz");
        assert_ne!(Listing::of(TEXT).steady(), Listing::of(&other).steady());
    }
}
