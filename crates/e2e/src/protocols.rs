//! Reading what `UCX_PROTO_INFO=y` prints: a table for each kind of message, with the protocol and the
//! transports that UCX chose for each range of sizes.

/// The tables in a program's output.
#[derive(Debug, Clone, Default)]
pub struct Protocols {
    tables: Vec<Table>,
}

/// The choices for one kind of message between one pair of processes.
#[derive(Debug, Clone, Default)]
pub struct Table {
    /// For example `remote memory write by ucp_put* from host memory to gaudi/GAUDI_1`.
    pub title: String,
    /// Range of sizes, what is done, and with which transports.
    pub rows: Vec<[String; 3]>,
}

impl Protocols {
    /// Of everything a program wrote. Two programs must not share one file: UCX's lines would be mixed.
    pub fn of(text: &str) -> Self {
        let mut tables: Vec<Table> = Vec::new();
        for line in text.lines() {
            let Some(at) = line.find("  | ") else { continue };
            let cells: Vec<&str> =
                line[at..].trim().trim_matches('|').split('|').map(str::trim).collect();
            match cells[..] {
                [title] if title.contains(" from ") => {
                    tables.push(Table { title: title.to_owned(), rows: Vec::new() });
                }
                [range, ..] if range.starts_with(|c: char| c.is_ascii_digit()) => {
                    let cell = |at: usize| cells.get(at).unwrap_or(&"").to_string();
                    if let Some(table) = tables.last_mut() {
                        table.rows.push([cell(0), cell(1), cell(2)]);
                    }
                }
                _ => {}
            }
        }
        Self { tables }
    }

    /// The tables with all these words in their title.
    pub fn about(&self, words: &[&str]) -> Vec<&Table> {
        let fits = |table: &&Table| words.iter().all(|word| table.title.contains(word));
        self.tables.iter().filter(fits).collect()
    }

    /// Whether any choice names this transport.
    pub fn mention(&self, transport: &str) -> bool {
        self.tables.iter().flat_map(|table| &table.rows).any(|row| row[2].contains(transport))
    }

    /// Adds those of another program.
    pub fn extend(&mut self, other: Protocols) {
        self.tables.extend(other.tables);
    }

    /// All titles, for messages.
    pub fn titles(&self) -> String {
        self.tables.iter().map(|table| table.title.as_str()).collect::<Vec<_>>().join("\n")
    }
}

impl Table {
    /// The transports for the largest messages.
    pub fn for_large_messages(&self) -> &str {
        let unbounded = self.rows.iter().rev().find(|row| row[0].ends_with("inf"));
        unbounded.map_or("", |row| row[2].as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
[1.0] [vm:1 :0]   +--------+-------------+---------------------+
[1.0] [vm:1 :0]   | ucp_context_0 intra-node cfg#2             |
[1.0] [vm:1 :0]   | tagged message by ucp_tag_send* from gaudi/GAUDI_1 |
[1.0] [vm:1 :0]   +--------+-------------+---------------------+
[1.0] [vm:1 :0]   | Range  | Description | Config              |
[1.0] [vm:1 :0]   |      0 | short       | sysv/memory         |
[1.0] [vm:1 :0]   | 1..inf | (?) rendezvous zero-copy read from remote | gaudi_ipc/gaudi_ipc |
[1.0] [vm:1 :0]   | stream message by ucp_stream_send* from host memory |
[1.0] [vm:1 :0]   | 0..inf | multi-frag | sysv/memory |
something else | 1..2 | of no table |
";

    #[test]
    fn tables_are_read_with_their_rows() {
        let protocols = Protocols::of(TEXT);
        let tag = protocols.about(&["ucp_tag_send*", "from gaudi"]);
        assert_eq!(tag.len(), 1, "{}", protocols.titles());
        assert_eq!(tag[0].rows.len(), 2, "{:?}", tag[0]);
        assert_eq!(tag[0].rows[0], ["0", "short", "sysv/memory"]);
        assert_eq!(tag[0].for_large_messages(), "gaudi_ipc/gaudi_ipc");
        assert_eq!(protocols.about(&["ucp_stream"])[0].for_large_messages(), "sysv/memory");
        assert!(protocols.mention("gaudi_ipc") && !protocols.mention("tcp"));
        assert!(protocols.about(&["ucp_put"]).is_empty());
    }
}
