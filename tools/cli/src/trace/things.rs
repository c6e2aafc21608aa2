//! What the numbers in a recording stand for. Pure functions.
//!
//! Addresses, handles, descriptors and sequence numbers differ from run to run, and a number that was given back is
//! given out again for something else. So each is followed from the call that returned it, through all threads, until a
//! later call returns the same number. Numbers of two recordings can then be compared by the things they stand for.

use std::collections::{BTreeMap, HashMap};

use serde_json::{Map, Value};

use super::recording::{Call, Recording};

/// Kinds of values that differ from run to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Mapping,
    Memory,
    CommandBuffer,
    HwBlock,
    Descriptor,
    Sequence,
    BusId,
    Index,
    Module,
}

impl Kind {
    /// Whether a value that no recorded call returned is a thing from its first use on: a descriptor that the
    /// application lent, a card. Others were returned before the recording began, or are physical addresses.
    fn is_known_by_use(self) -> bool {
        matches!(self, Kind::Descriptor | Kind::BusId | Kind::Index | Kind::Module)
    }

    /// Whether each opening of a card has numbers of its own.
    fn is_of_a_card(self) -> bool {
        !self.is_known_by_use()
    }

    /// Whether zero means "none".
    fn has_none(self) -> bool {
        !matches!(self, Kind::Index | Kind::Module)
    }
}

/// What the value under this key of a call's arguments, or of an object in them, is.
pub(super) fn kind(call: &str, key: &str, object: &Map<String, Value>) -> Option<Kind> {
    match (key, call) {
        // The place of a block is the same on all cards of a generation.
        ("addr", "hlthunk_get_hw_block") => None,
        ("addr" | "device_va", _) => Some(Kind::Mapping),
        ("cb", _) => {
            let flags = object.get("flags").and_then(Value::as_u64).unwrap_or_default();
            let is_address = flags & u64::from(hl_thunk::sys::CS_CHUNK_USER_ALLOC_CB) != 0;
            Some(if is_address { Kind::Mapping } else { Kind::CommandBuffer })
        }
        ("handle", "hlthunk_get_hw_block") => Some(Kind::HwBlock),
        ("handle", "hlthunk_request_command_buffer" | "hlthunk_destroy_command_buffer") => {
            Some(Kind::CommandBuffer)
        }
        ("handle", _) => Some(Kind::Memory),
        ("fd", _) => Some(Kind::Descriptor),
        ("sequence", _) => Some(Kind::Sequence),
        ("bus_id", _) => Some(Kind::BusId),
        ("index", _) => Some(Kind::Index),
        ("module_id", _) => Some(Kind::Module),
        _ => None,
    }
}

/// What a function returns.
pub(super) fn kind_of_return(call: &str) -> Option<Kind> {
    match call {
        "hlthunk_open"
        | "hlthunk_open_control"
        | "hlthunk_device_memory_export_dmabuf_fd"
        | "hlthunk_device_mapped_memory_export_dmabuf_fd" => Some(Kind::Descriptor),
        "hlthunk_device_memory_alloc" => Some(Kind::Memory),
        "hlthunk_device_memory_map" | "hlthunk_host_memory_map" => Some(Kind::Mapping),
        _ => None,
    }
}

/// The new thing that a call made, and its value.
fn made(call: &Call) -> Option<(Kind, &Value)> {
    if call.errno.is_some() {
        return None;
    }
    let argument = |key: &str| call.args.get(key);
    match (&*call.name, kind_of_return(&call.name)) {
        (_, Some(kind)) => Some((kind, &call.ret)),
        ("hlthunk_request_command_buffer", _) => Some((Kind::CommandBuffer, argument("handle")?)),
        ("hlthunk_get_hw_block", _) => Some((Kind::HwBlock, argument("handle")?)),
        ("ioctl_memory", _) => Some((Kind::Mapping, argument("device_va")?)),
        (name, _) if name.starts_with("hlthunk_command_submission") => {
            Some((Kind::Sequence, argument("out")?.get("sequence")?))
        }
        _ => None,
    }
}

/// A number, or the text of a value that is none.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Raw {
    Number(u64),
    Text(String),
}

impl Raw {
    /// `None`: nothing that can stand for anything.
    pub(super) fn new(kind: Kind, value: &Value) -> Option<Self> {
        let number = match value {
            Value::Number(number) => number.as_u64()?,
            Value::String(text) => {
                let digits = text.strip_prefix("0x").map(|digits| u64::from_str_radix(digits, 16));
                let Some(Ok(number)) = digits else { return Some(Raw::Text(text.clone())) };
                number
            }
            _ => return None,
        };
        (number != 0 || !kind.has_none()).then_some(Raw::Number(number))
    }
}

/// One thing: a mapping, say. It is known by a number of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Thing {
    number: usize,
    /// The line in which it first appeared.
    pub(super) line: usize,
}

/// What a value stands for; of an address also how far behind the start of its mapping it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) thing: Thing,
    pub(super) offset: u64,
}

/// A call, and what its values stand for.
#[derive(Debug)]
pub(super) struct Followed<'a> {
    pub(super) call: &'a Call,
    places: Vec<(Kind, Raw, Place)>,
}

impl Followed<'_> {
    pub(super) fn place(&self, kind: Kind, raw: &Raw) -> Option<Place> {
        // What the call made comes last, and may have the number of something older.
        let found = self.places.iter().rfind(|(of, known, _)| (*of, known) == (kind, raw))?;
        Some(found.2)
    }
}

/// Follows all values of a recording.
pub(super) fn follow(recording: &Recording) -> Vec<Followed<'_>> {
    let mut known = Known::default();
    recording.calls.iter().map(|call| known.follow(call)).collect()
}

/// Whose numbers: a card's, by the descriptor, or everybody's.
type Scope = Option<Thing>;

#[derive(Default)]
struct Known {
    count: usize,
    things: HashMap<(Scope, Kind, Raw), Thing>,
    /// Mappings by their start, with their lengths.
    mappings: HashMap<Scope, BTreeMap<u64, (Thing, u64)>>,
    /// Bytes of device memory.
    sizes: HashMap<Thing, u64>,
}

impl Known {
    fn follow<'a>(&mut self, call: &'a Call) -> Followed<'a> {
        let mut places = Vec::new();
        let descriptor = call.args.get("fd").and_then(|fd| Raw::new(Kind::Descriptor, fd));
        let scope = descriptor.and_then(|fd| self.used(call, None, Kind::Descriptor, &fd));
        let scope = scope.map(|place| place.thing);
        self.follow_object(call, scope, &call.args, &mut places);
        let raw_of_made = made(call).and_then(|(kind, value)| Some((kind, Raw::new(kind, value)?)));
        if let Some((kind, raw)) = raw_of_made {
            let len = self.len(call, scope);
            let thing = self.add(call, scope, kind, &raw, len);
            places.push((kind, raw, Place { thing, offset: 0 }));
        }
        Followed { call, places }
    }

    fn follow_object(
        &mut self,
        call: &Call,
        scope: Scope,
        object: &Map<String, Value>,
        places: &mut Vec<(Kind, Raw, Place)>,
    ) {
        for (key, value) in object {
            match value {
                Value::Object(inner) => self.follow_object(call, scope, inner, places),
                Value::Array(list) => {
                    for inner in list.iter().filter_map(Value::as_object) {
                        self.follow_object(call, scope, inner, places);
                    }
                }
                value => {
                    let Some(kind) = kind(&call.name, key, object) else { continue };
                    let Some(raw) = Raw::new(kind, value) else { continue };
                    let place = self.used(call, scope, kind, &raw);
                    places.extend(place.map(|place| (kind, raw, place)));
                }
            }
        }
    }

    /// What a value stands for where it is used.
    fn used(&mut self, call: &Call, scope: Scope, kind: Kind, raw: &Raw) -> Option<Place> {
        let scope = scope.filter(|_| kind.is_of_a_card());
        if let (Kind::Mapping, Raw::Number(at)) = (kind, raw) {
            let (start, (thing, len)) = self.mappings.get(&scope)?.range(..=*at).next_back()?;
            let place = Place { thing: *thing, offset: at - start };
            return (place.offset < *len).then_some(place);
        }
        let thing = self.things.get(&(scope, kind, raw.clone())).copied();
        let thing = match thing {
            None if kind.is_known_by_use() => Some(self.add(call, scope, kind, raw, 0)),
            thing => thing,
        };
        thing.map(|thing| Place { thing, offset: 0 })
    }

    /// A new thing, which has this number from now on.
    fn add(&mut self, call: &Call, scope: Scope, kind: Kind, raw: &Raw, len: u64) -> Thing {
        let scope = scope.filter(|_| kind.is_of_a_card());
        let thing = Thing { number: self.count, line: call.line };
        self.count += 1;
        match (kind, raw) {
            (Kind::Mapping, Raw::Number(start)) => {
                let mappings = self.mappings.entry(scope).or_default();
                // What was there before was unmapped.
                let len = len.max(1);
                let before = mappings.range(..start.saturating_add(len)).rev();
                let overlap =
                    before.take_while(|(old, (_, len))| old.saturating_add(*len) > *start);
                let overlap: Vec<u64> = overlap.map(|(old, _)| *old).collect();
                overlap.iter().for_each(|old| _ = mappings.remove(old));
                mappings.insert(*start, (thing, len));
            }
            _ => _ = self.things.insert((scope, kind, raw.clone()), thing),
        }
        if kind == Kind::Memory {
            self.sizes.insert(thing, len);
        }
        thing
    }

    /// The length of what a call made.
    fn len(&self, call: &Call, scope: Scope) -> u64 {
        let number = |key: &str| match Raw::new(Kind::Memory, call.args.get(key)?)? {
            Raw::Number(number) => Some(number),
            Raw::Text(_) => None,
        };
        let of_memory = || {
            let handle = Raw::new(Kind::Memory, call.args.get("handle")?)?;
            let memory = self.things.get(&(scope, Kind::Memory, handle))?;
            self.sizes.get(memory).copied()
        };
        number("size").or_else(|| number("length")).or_else(of_memory).unwrap_or_default()
    }
}
