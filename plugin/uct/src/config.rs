//! Configuration variables that UCX itself parses, prints and documents.
//!
//! A component or transport declares its variables as a slice of [`Variable`]s; UCX then reads
//! them from `UCX_<PREFIX><NAME>`, and `ucx_info -c -f` lists them with their help. When UCX opens
//! the object it hands over the parsed values, which a [`Values`] reads.
//!
//! A component may accept its variables under a second prefix. UCX knows nothing of that: the
//! values are taken from the environment here, but it is still UCX's parsers that read them.
//!
//! A value that is not understood, in either spelling, is a warning, and the default is used.

mod parser;

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;

use self::parser::Parser;
use crate::abi::{ConfigEntry, ConfigParser, ListLink, RawConfigField};
use crate::ucx::{Ucx, c_string};

/// Declares one configuration variable.
#[derive(Clone, Copy, Debug)]
pub struct Variable {
    /// Name behind the prefix, upper case.
    pub name: &'static str,
    /// Default, as a user would write it.
    pub default: &'static str,
    /// Help text.
    pub help: &'static str,
    /// How UCX parses it.
    pub kind: Kind,
}

/// The types of variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `y`/`n`.
    Bool,
    /// `yes`/`no`/`try`.
    Ternary,
    /// An unsigned number.
    Uint,
    /// A duration such as `7000ns`.
    Time,
    /// A bandwidth such as `11GBs`.
    Bandwidth,
    /// A size such as `64k`.
    MemUnits,
    /// Any text.
    Text,
    /// One of a fixed list of words.
    Choice(&'static [&'static str]),
    /// A value for each of a few keys, such as `10GBs,d2h:8GBs`: the one without a key is for the
    /// keys that are not named.
    Keyed(&'static Keyed),
}

impl Kind {
    /// How many values UCX stores for it.
    fn slots(self) -> usize {
        match self {
            Kind::Keyed(keyed) => keyed.keys.len(),
            _ => 1,
        }
    }
}

/// What a [`Kind::Keyed`] variable consists of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keyed {
    /// The keys, each with its help.
    pub keys: &'static [(&'static str, &'static str)],
    /// [`Kind::Time`] or [`Kind::Bandwidth`].
    pub value: Kind,
    /// The value of keys that are not named, where no value stands without a key. UCX has none and would
    /// refuse the whole text.
    pub fallback: &'static str,
}

/// A `yes`/`no`/`try` answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ternary {
    /// Never.
    No,
    /// Or fail loudly.
    Yes,
    /// Where possible.
    Try,
}

/// A table in UCX's format and what it takes to read a block that UCX filled from it.
pub(crate) struct Table {
    fields: Box<[RawConfigField]>,
    variables: &'static [Variable],
    /// Of each variable.
    parsers: Vec<&'static Parser>,
    name: CString,
    prefix: CString,
    /// Second spelling of the variables, prefix included.
    alias: Option<&'static str>,
    size: usize,
    /// What the fields point to.
    _strings: Vec<CString>,
}

/// Each value gets this much room in the block.
const VALUE_SIZE: usize = 8;

impl Table {
    /// `base_table` is UCX's own table that each configuration of this sort begins with, of
    /// `base_size` bytes.
    pub(crate) fn new(
        ucx: &'static Ucx,
        name: &str,
        (prefix, alias): (&str, Option<&'static str>),
        variables: &'static [Variable],
        (base_table, base_size): (*const c_void, usize),
    ) -> Table {
        let symbols = &ucx.symbols;
        let mut strings = Vec::new();
        let mut keep = |text: &str| {
            let text = c_string(text);
            let pointer = text.as_ptr();
            strings.push(text);
            pointer
        };
        let inherited = RawConfigField {
            name: c"".as_ptr(),
            dfl_value: c"".as_ptr(),
            doc: core::ptr::null(),
            offset: 0,
            parser: ConfigParser {
                read: symbols.ucs_config_sscanf_table,
                write: core::ptr::null(),
                clone: symbols.ucs_config_clone_table,
                release: symbols.ucs_config_release_table,
                help: symbols.ucs_config_help_table,
                doc: symbols.ucs_config_doc_nop,
                arg: base_table,
            },
        };
        let mut fields = vec![inherited];
        let mut end = base_size.next_multiple_of(VALUE_SIZE);
        let parsers = variables.iter().map(|variable| Parser::new(ucx, prefix, *variable));
        let parsers: Vec<&Parser> = parsers.collect();
        for (variable, parser) in variables.iter().zip(&parsers) {
            fields.push(RawConfigField {
                name: keep(variable.name),
                dfl_value: keep(variable.default),
                doc: keep(variable.help),
                offset: end,
                parser: parser.raw(),
            });
            end += variable.kind.slots() * VALUE_SIZE;
        }
        fields.push(RawConfigField {
            name: core::ptr::null(),
            dfl_value: core::ptr::null(),
            doc: core::ptr::null(),
            offset: 0,
            parser: ConfigParser {
                read: core::ptr::null(),
                write: core::ptr::null(),
                clone: core::ptr::null(),
                release: core::ptr::null(),
                help: core::ptr::null(),
                doc: core::ptr::null(),
                arg: core::ptr::null(),
            },
        });
        Table {
            fields: fields.into(),
            variables,
            parsers,
            name: c_string(name),
            prefix: c_string(prefix),
            alias,
            size: end,
            _strings: strings,
        }
    }

    /// The entry for UCX's global list; points into `self`, which must live for ever.
    pub(crate) fn entry(&'static self) -> ConfigEntry {
        ConfigEntry {
            name: self.name.as_ptr(),
            prefix: self.prefix.as_ptr(),
            table: self.fields.as_ptr().cast_mut(),
            size: self.size,
            list: ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() },
            flags: 0,
        }
    }

    /// An entry for a sort of configuration that does not exist.
    pub(crate) fn empty_entry() -> ConfigEntry {
        ConfigEntry {
            name: c"".as_ptr(),
            prefix: c"".as_ptr(),
            table: core::ptr::null_mut(),
            size: 0,
            list: ListLink { prev: core::ptr::null_mut(), next: core::ptr::null_mut() },
            flags: 0,
        }
    }

    /// Reads a block that UCX filled.
    ///
    /// # Safety
    /// `block` was filled by UCX from this table and lives as long as the result.
    pub(crate) unsafe fn values<'a>(&'a self, block: *const c_void) -> Values<'a> {
        let mut values = Values { table: self, block: block.cast(), aliased: Vec::new() };
        let aliased = (0..self.variables.len()).map(|index| self.aliased(&values, index));
        values.aliased = aliased.collect();
        values
    }

    /// The value of a variable that is set under its second name only: not in the environment, nor
    /// to anything but its default in a configuration file or by the program.
    fn aliased(&self, values: &Values<'_>, index: usize) -> Option<Slots> {
        let Variable { name, default, .. } = self.variables[index];
        let alias = format!("{}{name}", self.alias?);
        let value = std::env::var(&alias).ok()?;
        let parser = self.parsers[index];
        if std::env::var_os(parser.name()).is_some()
            || values.shown(index) != self.shown(index, default)?
        {
            return None;
        }
        let slots = self.parse(index, &value);
        if slots.is_none() {
            parser.warn(&alias, &value);
        }
        slots
    }

    fn parse(&self, index: usize, text: &str) -> Option<Slots> {
        let mut slots: Slots = vec![0; self.variables[index].kind.slots()].into();
        // SAFETY: each value takes at most eight bytes.
        let understood =
            unsafe { self.parsers[index].read(&c_string(text), slots.as_mut_ptr().cast()) };
        understood.then_some(slots)
    }

    /// How UCX writes what it understands of `text`.
    fn shown(&self, index: usize, text: &str) -> Option<String> {
        let aliased = (0..self.variables.len()).map(|_| None).collect();
        let mut values = Values { table: self, block: core::ptr::null(), aliased };
        values.aliased[index] = Some(self.parse(index, text)?);
        Some(values.shown(index))
    }
}

/// Room for the values of one variable.
type Slots = Box<[u64]>;

/// Parsed values, valid while UCX opens the object they belong to.
pub struct Values<'a> {
    table: &'a Table,
    block: *const u8,
    /// Values that were set under their second name, by index of the variable.
    aliased: Vec<Option<Slots>>,
}

impl Drop for Values<'_> {
    fn drop(&mut self) {
        for (slots, parser) in self.aliased.iter_mut().zip(&self.table.parsers) {
            if let Some(slots) = slots {
                // SAFETY: filled by this parser, released once.
                unsafe { parser.release(slots.as_mut_ptr().cast()) };
            }
        }
    }
}

impl Values<'_> {
    /// Where the value of the variable of this index is.
    fn place(&self, index: usize) -> *const u8 {
        if let Some(Some(slots)) = self.aliased.get(index) {
            return slots.as_ptr().cast();
        }
        // SAFETY: the block has `table.size` bytes, and declared values lie inside.
        unsafe { self.block.add(self.table.fields[index + 1].offset) }
    }

    /// How UCX writes a value.
    fn shown(&self, index: usize) -> String {
        // SAFETY: UCX filled the place, or its parser did.
        unsafe { self.table.parsers[index].write(self.place(index).cast()) }
    }

    /// Where the value of a variable is. Asking for what was not declared, or as another type, is
    /// a mistake in the plugin and panics (which is caught at the boundary to C).
    fn slot(&self, name: &str, mut wanted: impl FnMut(Kind) -> bool) -> *const u8 {
        let index = self
            .table
            .variables
            .iter()
            .position(|variable| variable.name == name && wanted(variable.kind))
            .unwrap_or_else(|| panic!("no configuration variable {name} of that type is declared"));
        self.place(index)
    }

    /// A [`Kind::Bool`].
    pub fn bool(&self, name: &str) -> bool {
        let slot = self.slot(name, |kind| kind == Kind::Bool);
        // SAFETY: UCX's bool parser stores an int.
        unsafe { slot.cast::<c_int>().read() != 0 }
    }

    /// A [`Kind::Ternary`].
    pub fn ternary(&self, name: &str) -> Ternary {
        let slot = self.slot(name, |kind| kind == Kind::Ternary);
        // SAFETY: UCX's ternary parser stores an int.
        match unsafe { slot.cast::<c_int>().read() } {
            0 => Ternary::No,
            1 => Ternary::Yes,
            _ => Ternary::Try,
        }
    }

    /// A [`Kind::Uint`].
    pub fn uint(&self, name: &str) -> u32 {
        let slot = self.slot(name, |kind| kind == Kind::Uint);
        // SAFETY: UCX's parser stores an unsigned int.
        unsafe { slot.cast::<u32>().read() }
    }

    /// A [`Kind::Time`] in seconds or a [`Kind::Bandwidth`] in bytes per second.
    pub fn real(&self, name: &str) -> f64 {
        let slot = self.slot(name, |kind| matches!(kind, Kind::Time | Kind::Bandwidth));
        // SAFETY: UCX's parsers store a double.
        unsafe { slot.cast::<f64>().read() }
    }

    /// What a [`Kind::Keyed`] has for a key: seconds, or bytes per second; less than zero for a
    /// bandwidth of `auto`.
    pub fn keyed(&self, name: &str, key: &str) -> f64 {
        let mut position = 0;
        let slot = self.slot(name, |kind| {
            let Kind::Keyed(keyed) = kind else { return false };
            let found = keyed.keys.iter().position(|(known, _)| *known == key);
            position = found.unwrap_or_default();
            found.is_some()
        });
        // SAFETY: UCX's parsers store a double for each key, in the order of the keys.
        unsafe { slot.cast::<f64>().add(position).read() }
    }

    /// A [`Kind::MemUnits`] in bytes; `usize::MAX` is "inf", one less "auto".
    pub fn bytes(&self, name: &str) -> usize {
        let slot = self.slot(name, |kind| kind == Kind::MemUnits);
        // SAFETY: UCX's parser stores a size_t.
        unsafe { slot.cast::<usize>().read() }
    }

    /// A [`Kind::Text`].
    pub fn text(&self, name: &str) -> String {
        let slot = self.slot(name, |kind| kind == Kind::Text);
        // SAFETY: UCX's parser stores a pointer to a C string that lives as long as the block.
        unsafe {
            let text = slot.cast::<*const c_char>().read();
            if text.is_null() {
                return String::new();
            }
            CStr::from_ptr(text).to_string_lossy().into_owned()
        }
    }

    /// The index of the chosen word of a [`Kind::Choice`].
    pub fn choice(&self, name: &str) -> usize {
        let slot = self.slot(name, |kind| matches!(kind, Kind::Choice(_)));
        // SAFETY: UCX's parser stores an unsigned int.
        unsafe { slot.cast::<u32>().read() as usize }
    }
}
