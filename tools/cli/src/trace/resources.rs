//! Finds the resources that numbers in a recording stand for. Pure functions.
//!
//! Addresses, handles, descriptors and sequence numbers differ from run to run, and a number is reused after its
//! resource was released. So each number is tracked, through all threads, from the call that returned it until a later
//! call returns the same number. Numbers of two recordings can then be compared by their resources.

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
    /// Whether a value that no recorded call returned counts as a resource from its first use on: a descriptor that the
    /// application lent, a card. Other such values come from before the recording, or are physical addresses.
    fn is_known_by_use(self) -> bool {
        matches!(self, Kind::Descriptor | Kind::BusId | Kind::Index | Kind::Module)
    }

    /// Whether each opening of a card has separate numbers.
    fn is_of_a_card(self) -> bool {
        !self.is_known_by_use()
    }

    /// Whether zero means "none".
    fn has_none(self) -> bool {
        !matches!(self, Kind::Index | Kind::Module)
    }
}

/// The kind of the value under this key of a call's arguments, or of an object in them.
pub(super) fn kind(call: &str, key: &str, object: &Map<String, Value>) -> Option<Kind> {
    match (key, call) {
        // A block has the same address on all cards of a generation.
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

/// The kind of a function's result.
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

/// The resource that a call made, and its value.
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

/// A number, or the text of any other value.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Raw {
    Number(u64),
    Text(String),
}

impl Raw {
    /// `None`: the value cannot stand for a resource.
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

/// One resource, for example a mapping, with a unique number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Resource {
    number: usize,
    /// The line of its first appearance.
    pub(super) line: usize,
}

/// The resource that a value stands for; for an address also its offset in the mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResourceRef {
    pub(super) resource: Resource,
    pub(super) offset: u64,
}

/// A call, and the resources that its values stand for.
#[derive(Debug)]
pub(super) struct ResolvedCall<'a> {
    pub(super) call: &'a Call,
    references: Vec<(Kind, Raw, ResourceRef)>,
}

impl ResolvedCall<'_> {
    pub(super) fn reference(&self, kind: Kind, raw: &Raw) -> Option<ResourceRef> {
        // What the call made comes last, and may have the number of an older resource.
        let found = self.references.iter().rfind(|(of, known, _)| (*of, known) == (kind, raw))?;
        Some(found.2)
    }
}

/// Resolves all values of a recording.
pub(super) fn resolve(recording: &Recording) -> Vec<ResolvedCall<'_>> {
    let mut known = Tracker::default();
    recording.calls.iter().map(|call| known.resolve(call)).collect()
}

/// The owner of numbers: a card, given by its descriptor, or the process.
type Scope = Option<Resource>;

#[derive(Default)]
struct Tracker {
    count: usize,
    resources: HashMap<(Scope, Kind, Raw), Resource>,
    /// Mappings by their start, with their lengths.
    mappings: HashMap<Scope, BTreeMap<u64, (Resource, u64)>>,
    /// Bytes of device memory.
    sizes: HashMap<Resource, u64>,
}

impl Tracker {
    fn resolve<'a>(&mut self, call: &'a Call) -> ResolvedCall<'a> {
        let mut references = Vec::new();
        let descriptor = call.args.get("fd").and_then(|fd| Raw::new(Kind::Descriptor, fd));
        let scope = descriptor.and_then(|fd| self.used(call, None, Kind::Descriptor, &fd));
        let scope = scope.map(|reference| reference.resource);
        self.resolve_object(call, scope, &call.args, &mut references);
        let raw_of_made = made(call).and_then(|(kind, value)| Some((kind, Raw::new(kind, value)?)));
        if let Some((kind, raw)) = raw_of_made {
            let len = self.len(call, scope);
            let resource = self.add(call, scope, kind, &raw, len);
            references.push((kind, raw, ResourceRef { resource, offset: 0 }));
        }
        ResolvedCall { call, references }
    }

    fn resolve_object(
        &mut self,
        call: &Call,
        scope: Scope,
        object: &Map<String, Value>,
        references: &mut Vec<(Kind, Raw, ResourceRef)>,
    ) {
        for (key, value) in object {
            match value {
                Value::Object(inner) => self.resolve_object(call, scope, inner, references),
                Value::Array(list) => {
                    for inner in list.iter().filter_map(Value::as_object) {
                        self.resolve_object(call, scope, inner, references);
                    }
                }
                value => {
                    let Some(kind) = kind(&call.name, key, object) else { continue };
                    let Some(raw) = Raw::new(kind, value) else { continue };
                    let reference = self.used(call, scope, kind, &raw);
                    references.extend(reference.map(|reference| (kind, raw, reference)));
                }
            }
        }
    }

    /// The resource that a value stands for at this use.
    fn used(&mut self, call: &Call, scope: Scope, kind: Kind, raw: &Raw) -> Option<ResourceRef> {
        let scope = scope.filter(|_| kind.is_of_a_card());
        if let (Kind::Mapping, Raw::Number(at)) = (kind, raw) {
            let (start, (resource, len)) = self.mappings.get(&scope)?.range(..=*at).next_back()?;
            let reference = ResourceRef { resource: *resource, offset: at - start };
            return (reference.offset < *len).then_some(reference);
        }
        let resource = self.resources.get(&(scope, kind, raw.clone())).copied();
        let resource = match resource {
            None if kind.is_known_by_use() => Some(self.add(call, scope, kind, raw, 0)),
            resource => resource,
        };
        resource.map(|resource| ResourceRef { resource, offset: 0 })
    }

    /// Adds a resource, which has this number from now on.
    fn add(&mut self, call: &Call, scope: Scope, kind: Kind, raw: &Raw, len: u64) -> Resource {
        let scope = scope.filter(|_| kind.is_of_a_card());
        let resource = Resource { number: self.count, line: call.line };
        self.count += 1;
        match (kind, raw) {
            (Kind::Mapping, Raw::Number(start)) => {
                let mappings = self.mappings.entry(scope).or_default();
                // Any mapping there before must have been unmapped.
                let len = len.max(1);
                let before = mappings.range(..start.saturating_add(len)).rev();
                let overlap =
                    before.take_while(|(old, (_, len))| old.saturating_add(*len) > *start);
                let overlap: Vec<u64> = overlap.map(|(old, _)| *old).collect();
                overlap.iter().for_each(|old| _ = mappings.remove(old));
                mappings.insert(*start, (resource, len));
            }
            _ => _ = self.resources.insert((scope, kind, raw.clone()), resource),
        }
        if kind == Kind::Memory {
            self.sizes.insert(resource, len);
        }
        resource
    }

    /// The length of the resource that a call made.
    fn len(&self, call: &Call, scope: Scope) -> u64 {
        let number = |key: &str| match Raw::new(Kind::Memory, call.args.get(key)?)? {
            Raw::Number(number) => Some(number),
            Raw::Text(_) => None,
        };
        let of_memory = || {
            let handle = Raw::new(Kind::Memory, call.args.get("handle")?)?;
            let memory = self.resources.get(&(scope, Kind::Memory, handle))?;
            self.sizes.get(memory).copied()
        };
        number("size").or_else(|| number("length")).or_else(of_memory).unwrap_or_default()
    }
}
