//! `GAUDI_MAPPING_TABLE`: which cards a process may use, and under which numbers.
//!
//! A JSON array of `{"index":0,"module_id":2,"bus_id":"0000:33:00.0"}`. Reading it is total: every
//! text is a table or an error that quotes what is wrong with it. A table that is wrong is never
//! replaced by discovery, because then a process would run on a card that was not asked for.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::{Map, Value};

use crate::environment::MAPPING_TABLE;
use crate::{BusId, DeviceInfo, Error, ErrorKind};

const READING: &str = "reading GAUDI_MAPPING_TABLE";
const SHAPE: &str = "write it as [{\"index\":0,\"module_id\":2,\"bus_id\":\"0000:33:00.0\"}, ...]";
/// Longest quotation of the user's text in a message.
const QUOTED: usize = 160;

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappedCard {
    /// The number that chooses this card.
    pub index: u32,
    /// The card's place in the server.
    pub module_id: u32,
    /// Its PCI address.
    pub bus_id: BusId,
}

/// A mapping table: at least one card, no index and no card twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappingTable {
    cards: Vec<MappedCard>,
    notes: Vec<String>,
}

impl MappingTable {
    /// The cards, in the order of their indices.
    pub fn cards(&self) -> &[MappedCard] {
        &self.cards
    }

    /// What was ignored, one line each, for a log.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The cards of `found` that the table lists, with the indices it gives them, in their order.
    pub(crate) fn apply(&self, found: &[DeviceInfo]) -> Result<Vec<DeviceInfo>, Error> {
        let offer = |listed: &MappedCard| {
            let Some(card) = found.iter().find(|card| card.bus_id == listed.bus_id) else {
                return Err(Error::new(
                    ErrorKind::DeviceNotFound,
                    READING,
                    format!("{listed}: there is no card at {}{}", listed.bus_id, others(found)),
                    "correct the table, or unset it to have the cards discovered",
                )
                .caused_by_setting());
            };
            if card.module_id != listed.module_id {
                return Err(wrong(format!(
                    "{listed}: the card at {} has module id {}, not {}",
                    card.bus_id, card.module_id, listed.module_id
                )));
            }
            Ok(DeviceInfo { index: listed.index, ..card.clone() })
        };
        self.cards.iter().map(offer).collect()
    }
}

fn others(found: &[DeviceInfo]) -> String {
    if found.is_empty() {
        return String::from("; there are no cards at all");
    }
    let cards: Vec<&str> = found.iter().map(|card| card.bus_id.as_str()).collect();
    format!("; found {}", cards.join(", "))
}

impl std::fmt::Display for MappedCard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MappedCard { index, module_id, bus_id } = self;
        write!(f, r#"{{"index":{index},"module_id":{module_id},"bus_id":"{bus_id}"}}"#)
    }
}

fn wrong(detail: String) -> Error {
    Error::new(ErrorKind::InvalidParams, READING, detail, SHAPE).caused_by_setting()
}

impl FromStr for MappingTable {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let table: Value = serde_json::from_str(text).map_err(|error| {
            let text = shortened(&text.escape_debug().to_string());
            wrong(format!("\"{text}\" is not JSON: {error}"))
        })?;
        let Value::Array(entries) = &table else {
            return Err(wrong(format!("{} is not an array", quote(&table))));
        };
        if entries.is_empty() {
            return Err(wrong(String::from("[] lists no card")));
        }
        let mut cards: Vec<MappedCard> = Vec::with_capacity(entries.len());
        let mut unknown: BTreeMap<&str, usize> = BTreeMap::new();
        for (at, entry) in entries.iter().enumerate() {
            let complain =
                |what: &str| wrong(format!("entry {} of {}: {what}", at + 1, entries.len()));
            let Value::Object(fields) = entry else { return Err(complain("not an object")) };
            let card = read_card(fields).map_err(|what| complain(&what))?;
            if let Some(first) =
                cards.iter().find(|other| other.index == card.index || other.bus_id == card.bus_id)
            {
                return Err(complain(&format!("{card} has the index or the bus id of {first}")));
            }
            for key in fields.keys().filter(|key| !KEYS.contains(&key.as_str())) {
                *unknown.entry(key).or_default() += 1;
            }
            cards.push(card);
        }
        cards.sort_by_key(|card| card.index);
        let note = |(key, count): (&str, usize)| {
            let key = shortened(&key.escape_debug().to_string());
            format!("{MAPPING_TABLE}: key \"{key}\" is unknown and ignored (in {count} entries)")
        };
        Ok(Self { cards, notes: unknown.into_iter().map(note).collect() })
    }
}

const KEYS: [&str; 3] = ["index", "module_id", "bus_id"];

fn read_card(fields: &Map<String, Value>) -> Result<MappedCard, String> {
    let field = |key: &str| fields.get(key).ok_or_else(|| format!("\"{key}\" is missing"));
    let number = |key: &str| {
        let value = field(key)?;
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| format!("\"{key}\" is {}, which is no number >= 0", quote(value)))
    };
    let bus_id = field("bus_id")?;
    let bus_id = bus_id.as_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        format!("\"bus_id\" is {}, which is not of the form dddd:bb:dd.f", quote(bus_id))
    })?;
    Ok(MappedCard { index: number("index")?, module_id: number("module_id")?, bus_id })
}

fn quote(value: &Value) -> String {
    shortened(&value.to_string())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The table of a server in the field.
    const FIELD: &str = r#"[{"index":0,"module_id":2,"bus_id":"0000:33:00.0"},
        {"index":1,"module_id":0,"bus_id":"0000:4d:00.0"},
        {"index":2,"module_id":1,"bus_id":"0000:4e:00.0"},
        {"index":3,"module_id":3,"bus_id":"0000:34:00.0"}]"#;

    fn table(text: &str) -> Result<MappingTable, Error> {
        text.parse()
    }

    fn found(cards: &[(u32, u32, &str)]) -> Vec<DeviceInfo> {
        let card = |&(node, module_id, bus_id): &(u32, u32, &str)| DeviceInfo {
            module_id,
            bus_id: bus_id.parse().unwrap(),
            ..DeviceInfo::example(node)
        };
        cards.iter().map(card).collect()
    }

    #[test]
    fn the_table_from_the_field_is_read() {
        let table = table(FIELD).unwrap();
        let rows: Vec<_> = table
            .cards()
            .iter()
            .map(|card| (card.index, card.module_id, card.bus_id.as_str()))
            .collect();
        let expected = [
            (0, 2, "0000:33:00.0"),
            (1, 0, "0000:4d:00.0"),
            (2, 1, "0000:4e:00.0"),
            (3, 3, "0000:34:00.0"),
        ];
        assert_eq!(rows, expected);
        assert!(table.notes().is_empty());
    }

    #[test]
    fn order_space_and_letter_case_do_not_matter_and_unknown_keys_are_noted_once() {
        let table = table(
            r#" [ {"bus_id":"4D:00.0", "uuid":"x", "index":7, "module_id":0},
                  {"index":3, "module_id":1, "bus_id":"0000:33:00.0", "uuid":null, "a\nb":[]} ] "#,
        )
        .unwrap();
        assert_eq!(table.cards()[0].index, 3);
        assert_eq!(table.cards()[1].bus_id.as_str(), "0000:4d:00.0");
        let [first, second] = table.notes() else { panic!("{:?}", table.notes()) };
        assert!(first.contains(r#""a\nb""#) && first.contains("1 entries"), "{first}");
        assert!(second.contains(r#""uuid""#) && second.contains("2 entries"), "{second}");
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = r#"{"index":0,"module_id":2,"bus_id":"0000:33:00.0"}"#;
        for (entry, quoted) in [
            (r#"{"index":0,"module_id":1,"bus_id":"0000:4d:00.0"}"#, "has the index or"),
            (r#"{"index":1,"module_id":2,"bus_id":"33:00.0"}"#, "or the bus id of {\"index\":0,"),
            (r#"{"index":1,"module_id":1,"bus_id":"0000:4d:00"}"#, r#""0000:4d:00", which"#),
            (r#"{"index":1,"module_id":1,"bus_id":7}"#, r#""bus_id" is 7"#),
            (r#"{"index":1,"module_id":1}"#, r#""bus_id" is missing"#),
            (r#"{"index":1,"bus_id":"0000:4d:00.0"}"#, r#""module_id" is missing"#),
            (r#"{"module_id":1,"bus_id":"0000:4d:00.0"}"#, r#""index" is missing"#),
            (r#"{"index":"1","module_id":1,"bus_id":"0000:4d:00.0"}"#, r#""index" is "1""#),
            (r#"{"index":-1,"module_id":1,"bus_id":"0000:4d:00.0"}"#, r#""index" is -1"#),
            (r#"{"index":1,"module_id":1.5,"bus_id":"0000:4d:00.0"}"#, r#""module_id" is 1.5"#),
            (r#"{"index":4294967296,"module_id":1,"bus_id":"0000:4d:00.0"}"#, "4294967296"),
            ("17", "not an object"),
            ("null", "not an object"),
        ] {
            let error = table(&format!("[{good},{entry}]")).unwrap_err();
            let text = error.to_string();
            assert_eq!(error.kind(), ErrorKind::InvalidParams, "{text}");
            assert!(text.contains("entry 2 of 2: "), "{text}");
            assert!(text.contains(quoted), "{text}");
            assert!(text.contains("GAUDI_MAPPING_TABLE") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn what_is_no_table_is_quoted() {
        for (text, quoted) in [
            ("0,1,2", "not JSON"),
            ("[{\"index\":0,\n\"module_id\":2 \"bus_id\"}]", "line 2 column 15"),
            ("{\"index\":0}", "{\"index\":0} is not an array"),
            ("\"none\"", "\"none\" is not an array"),
            ("[]", "[] lists no card"),
            ("[{\"index\":0,", "not JSON"),
            (&"[".repeat(100_000), "not JSON"),
            (&format!("\"{}\"", "ä".repeat(10_000)), "... is not an array"),
        ] {
            let error = table(text).unwrap_err().to_string();
            assert!(error.contains(quoted) && error.len() < 600, "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn cards_get_the_tables_indices_and_keep_their_node_numbers() {
        let cards = found(&[
            (0, 0, "0000:4d:00.0"),
            (1, 1, "0000:4e:00.0"),
            (2, 2, "0000:33:00.0"),
            (3, 3, "0000:34:00.0"),
            (4, 4, "0000:9a:00.0"),
        ]);
        let offered = table(FIELD).unwrap().apply(&cards).unwrap();
        let numbers: Vec<_> =
            offered.iter().map(|card| (card.index, card.node, card.module_id)).collect();
        assert_eq!(
            numbers,
            [(0, 2, 2), (1, 0, 0), (2, 1, 1), (3, 3, 3)],
            "the fifth is not listed"
        );
    }

    #[test]
    fn an_absent_card_and_a_contradicting_module_id_are_errors() {
        let three =
            found(&[(0, 0, "0000:4d:00.0"), (1, 1, "0000:4e:00.0"), (2, 2, "0000:33:00.0")]);
        let error = table(FIELD).unwrap().apply(&three).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeviceNotFound);
        assert!(error.is_setting_wrong());
        let text = error.to_string();
        let entry = r#"{"index":3,"module_id":3,"bus_id":"0000:34:00.0"}"#;
        assert!(text.contains(entry) && text.contains("found 0000:4d:00.0"), "{text}");

        let other = found(&[(0, 5, "0000:33:00.0")]);
        let error = table(FIELD).unwrap().apply(&other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidParams);
        assert!(error.to_string().contains("has module id 5, not 2"), "{error}");
        assert!(
            table(FIELD).unwrap().apply(&[]).unwrap_err().to_string().contains("no cards at all")
        );
    }

    /// What must hold for any text at all.
    fn check(text: &str) -> Result<(), TestCaseError> {
        match table(text) {
            Ok(table) => {
                prop_assert!(!table.cards().is_empty());
                prop_assert!(table.cards().is_sorted_by(|one, next| one.index < next.index));
                let mut buses: Vec<_> = table.cards().iter().map(|card| &card.bus_id).collect();
                buses.sort();
                buses.dedup();
                prop_assert_eq!(buses.len(), table.cards().len());
                // What was read can be written and read again.
                let rows: Vec<String> = table.cards().iter().map(ToString::to_string).collect();
                let again: MappingTable = format!("[{}]", rows.join(",")).parse().unwrap();
                prop_assert_eq!(again.cards(), table.cards());
            }
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::InvalidParams);
                prop_assert!(error.is_setting_wrong());
                prop_assert!(!error.detail().is_empty() && error.detail().len() < 600);
                prop_assert!(!error.to_string().contains('\n'));
            }
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_table_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            check(&String::from_utf8_lossy(&bytes))?;
        }

        #[test]
        fn anything_that_looks_like_json_is_a_table_or_an_error(
            text in r#"[\[\]{}",:0-9a-e\\ .-]{0,120}"#
        ) {
            check(&text)?;
        }

        #[test]
        fn a_damaged_table_is_a_table_or_an_error(
            damage in prop::collection::vec((0..FIELD.len(), 0..3_u8, any::<u8>()), 1..6)
        ) {
            let mut bytes = FIELD.as_bytes().to_vec();
            for (at, how, byte) in damage {
                let at = at % bytes.len();
                match how {
                    0 => bytes[at] = byte,
                    1 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, byte),
                }
            }
            check(&String::from_utf8_lossy(&bytes))?;
        }

        #[test]
        fn every_table_without_repetition_is_read(
            rows in prop::collection::btree_map(any::<u32>(), any::<u32>(), 1..20)
        ) {
            let row = |(at, (index, module)): (usize, (&u32, &u32))| {
                format!(r#"{{"index":{index},"module_id":{module},"bus_id":"{at:04x}:00:00.0"}}"#)
            };
            let text: Vec<String> = rows.iter().enumerate().map(row).collect();
            let table = table(&format!("[{}]", text.join(","))).unwrap();
            prop_assert_eq!(table.cards().len(), rows.len());
        }
    }
}
