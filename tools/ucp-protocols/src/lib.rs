//! Which protocols UCP chose: the tables that it prints with `UCX_PROTO_INFO=y`.
//!
//! A table is about one kind of operation between two workers, and says for each range of message sizes what UCP does:
//!
//! ```text
//! | ucp_context_0 intra-node cfg#2                     |
//! | tagged message by ucp_tag_send* from gaudi/GAUDI_0 |
//! +---------+------------------------+-----------------+
//! |  Range  |      Description       |     Config      |
//! +---------+------------------------+-----------------+
//! | 0..8248 | eager copy-in copy-out | sysv/memory     |
//! ```
//!
//! UCX 1.21 has the operation in the first line, in a second cell.
//!
//! Let every process write to a separate file (`UCX_LOG_FILE`): in one stream, lines of two processes get mixed up.
//! [`tuning`] has settings that make UCP choose well for Gaudi memory.

pub mod tuning;

use std::ops::RangeInclusive;

/// The tables of one process.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Protocols(Vec<Table>);

#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Table {
    /// `intra-node`, `inter-node` or `self`.
    scope: String,
    /// UCX's description without the devices: `tagged message by ucp_tag_send* from gaudi`.
    operation: String,
    rows: Vec<Choice>,
}

/// What UCP does for a range of message sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// Message sizes.
    pub sizes: RangeInclusive<usize>,
    /// The protocol, as UCX describes it.
    pub protocol: String,
    /// Transports and devices, if UCX names any.
    pub transports: String,
    /// The other side decides on the details.
    pub depends: bool,
}

impl Protocols {
    /// Parses everything that one process logged.
    pub fn parse(log: &str) -> Self {
        let mut tables: Vec<Table> = Vec::new();
        let mut title_follows = false;
        for line in log.lines() {
            let Some((_, cells)) = line.split_once("  | ") else { continue };
            let cells = cells.trim_end().trim_end_matches('|');
            if let Some((scope, rest)) = cells.split_once(" cfg#") {
                let scope = scope.split_whitespace().next_back().unwrap_or_default().to_owned();
                let title = rest.split_once('|').map(|(_, title)| without_devices(title.trim()));
                title_follows = title.is_none();
                let operation = title.unwrap_or_default();
                tables.push(Table { scope, operation, rows: Vec::new() });
            } else if title_follows {
                title_follows = false;
                tables.last_mut().expect("a table began").operation = without_devices(cells.trim());
            } else if let (Some(table), Some(row)) = (tables.last_mut(), row(cells)) {
                table.rows.push(row);
            }
        }
        Protocols(tables)
    }

    /// What UCP does for a message of this size. `operation` is UCX's description without the devices.
    pub fn choice(&self, scope: &str, operation: &str, size: usize) -> Option<&Choice> {
        // UCX may print the same operation again for another device; the last table counts.
        let tables = self.0.iter().rev();
        let mut fitting =
            tables.filter(|table| table.scope == scope && table.operation == operation);
        fitting.find_map(|table| table.rows.iter().find(|row| row.sizes.contains(&size)))
    }

    /// Whether any choice uses this transport.
    pub fn name_transport(&self, transport: &str) -> bool {
        let mut rows = self.0.iter().flat_map(|table| &table.rows);
        rows.any(|row| row.transports.contains(transport) || row.protocol.contains(transport))
    }

    /// The choices of several processes, combined.
    pub fn merged(all: impl IntoIterator<Item = Protocols>) -> Self {
        Protocols(all.into_iter().flat_map(|protocols| protocols.0).collect())
    }

    /// Whether UCX printed no table.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The operations that have tables, each with its scope.
    pub fn operations(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|table| (table.scope.as_str(), table.operation.as_str()))
    }
}

/// `gaudi/GAUDI_0` and `gaudi/dev[0]` are `gaudi`.
fn without_devices(operation: &str) -> String {
    let words = operation.split(' ').map(|word| match word.split_once('/') {
        Some((memory, _)) if !memory.contains('*') => memory,
        _ => word,
    });
    words.collect::<Vec<_>>().join(" ")
}

fn row(cells: &str) -> Option<Choice> {
    let mut cells = cells.split('|').map(str::trim);
    let (range, description) = (cells.next()?, cells.next()?);
    let (from, to) = range.split_once("..").unwrap_or((range, range));
    let sizes = size(from)?..=size(to)?;
    let protocol = description.trim_start_matches("(?) ");
    Some(Choice {
        sizes,
        protocol: protocol.to_owned(),
        transports: cells.next().unwrap_or_default().to_owned(),
        depends: protocol.len() < description.len(),
    })
}

/// `8240`, `512K`, `inf`.
fn size(text: &str) -> Option<usize> {
    if text == "inf" {
        return Some(usize::MAX);
    }
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        _ => return None,
    };
    digits.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From stock UCX 1.22, shortened.
    const LOG: &str = "\
[1794723443.302774] [vm:16846:0]   +-----------+-------------------+-------------+
[1794723443.302774] [vm:16846:0]   | ucp_context_0 self cfg#1                    |
[1794723443.302774] [vm:16846:0]   | tagged message by ucp_tag_send* from gaudi/GAUDI_1 |
[1794723443.302774] [vm:16846:0]   +-----------+-------------------+-------------+
[1794723443.302774] [vm:16846:0]   |   Range   |    Description    |   Config    |
[1794723443.302774] [vm:16846:0]   +-----------+-------------------+-------------+
[1794723443.302774] [vm:16846:0]   |   0..2284 | eager short       | self/memory |
[1794723443.302774] [vm:16846:0]   +-----------+-------------------+-------------+
[1794723443.302774] [vm:16846:0] some other line | with a bar
[1794723443.302774] [vm:16846 :0]   | ucp_context_0 intra-node cfg#2                    |
[1794723443.302774] [vm:16846 :0]   | tagged message by ucp_tag_send* from gaudi/GAUDI_1 |
[1794723443.302774] [vm:16846 :0]   |   Range   |    Description    |   Config    |
[1794723443.302774] [vm:16846 :0]   |           0 | eager short            | sysv/memory |
[1794723443.302774] [vm:16846 :0]   |      1..512K | (?) rendezvous gaudi_cpy, copy to attached, frag host |   |
[1794723443.302774] [vm:16846 :0]   | 524289..inf | (?) rendezvous pipeline | cma/memory |
";

    #[test]
    fn the_row_of_a_size_is_found_in_the_table_of_its_operation() {
        let protocols = Protocols::parse(LOG);
        let operation = "tagged message by ucp_tag_send* from gaudi";
        let choice = |size| protocols.choice("intra-node", operation, size).expect("a row");
        assert_eq!((choice(0).protocol.as_str(), choice(0).depends), ("eager short", false));
        assert_eq!(choice(0).transports, "sysv/memory");
        let middle = choice(512 << 10);
        assert_eq!(middle.protocol, "rendezvous gaudi_cpy, copy to attached, frag host");
        assert!(middle.depends && middle.transports.is_empty());
        assert_eq!(choice((512 << 10) + 1).protocol, "rendezvous pipeline");
        assert_eq!(choice(1 << 40).protocol, "rendezvous pipeline");
        let own = protocols.choice("self", operation, 8).expect("a row");
        assert_eq!(own.transports, "self/memory");
        assert_eq!(protocols.choice("self", operation, 5000), None);
        assert_eq!(protocols.choice("inter-node", operation, 8), None);
        assert_eq!(protocols.operations().count(), 2);
        assert!(protocols.name_transport("gaudi_cpy") && protocols.name_transport("cma"));
        assert!(!protocols.name_transport("gaudi_ipc"));
    }

    #[test]
    fn tables_of_1_21_have_their_title_in_the_first_line() {
        let log = "\
[1.5] [vm:14832:0]   | ucp_context_0 intra-node cfg#2 | remote memory write by ucp_put* from gaudi/GAUDI_0 to host |
[1.5] [vm:14832:0]   +--------------------------------+------------------------------------------+-----------+
[1.5] [vm:14832:0]   |                         0..inf | zero-copy                                | gaudi_ipc |
";
        let protocols = Protocols::parse(log);
        let operation = "remote memory write by ucp_put* from gaudi to host";
        let choice = protocols.choice("intra-node", operation, 8).expect("a row");
        assert_eq!((&*choice.protocol, &*choice.transports), ("zero-copy", "gaudi_ipc"));
    }

    #[test]
    fn sizes_are_as_ucx_writes_them() {
        let written = [("0", 0), ("8248", 8248), ("256K", 1 << 18), ("4M", 4 << 20)];
        for (text, bytes) in written {
            assert_eq!(size(text), Some(bytes));
        }
        assert_eq!(size("inf"), Some(usize::MAX));
        for text in ["", "Range", "4X", "99999999999999999999"] {
            assert_eq!(size(text), None, "{text}");
        }
    }
}
