//! Configuration variables that UCX itself parses, prints and documents.
//!
//! A component or transport declares its variables as a slice of [`Variable`]s; UCX then reads
//! them from `UCX_<PREFIX><NAME>`, and `ucx_info -c -f` lists them with their help. When UCX opens
//! the object it hands over the parsed values, which a [`Values`] reads.
//!
//! A component may accept its variables under a second prefix. UCX knows nothing of that: the
//! values are taken from the environment here, but it is still UCX's parsers that read them.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::ffi::CString;

use crate::abi::{
    ConfigEntry, ConfigKeyField, ConfigKeyValue, ConfigParser, ListLink, RawConfigField,
};
use crate::log;
use crate::ucx::{Symbols, Ucx, c_string};

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

/// What UCX's functions for a keyed variable get as their argument, and behind it what is ours.
#[repr(C)]
struct KeyedArgument {
    raw: ConfigKeyValue,
    /// UCX's parser.
    read: Read,
    fallback: &'static str,
}

type Read = unsafe extern "C" fn(*const c_char, *mut c_void, *const c_void) -> c_int;

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
    name: CString,
    prefix: CString,
    /// Second spelling of the variables, prefix included.
    alias: Option<&'static str>,
    size: usize,
    /// What the fields point to.
    _strings: Vec<CString>,
    _choices: Vec<Box<[*const c_char]>>,
    _keyed: Vec<(Box<[ConfigKeyField]>, Box<KeyedArgument>)>,
}

/// Each value gets this much room in the block.
const VALUE_SIZE: usize = 8;

impl Table {
    /// `base_table` is UCX's own table that each configuration of this sort begins with, of
    /// `base_size` bytes.
    pub(crate) fn new(
        symbols: &Symbols,
        name: &str,
        (prefix, alias): (&str, Option<&'static str>),
        variables: &'static [Variable],
        (base_table, base_size): (*const c_void, usize),
    ) -> Table {
        let base = base_size.next_multiple_of(VALUE_SIZE);
        let mut strings = Vec::new();
        let mut choices = Vec::new();
        let mut all_keyed = Vec::new();
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
        let mut end = base;
        for variable in variables {
            let words = match variable.kind {
                Kind::Choice(words) => words
                    .iter()
                    .map(|word| keep(word))
                    .chain([core::ptr::null()])
                    .collect::<Box<[_]>>(),
                _ => Box::default(),
            };
            let parser = match variable.kind {
                Kind::Keyed(keyed) => {
                    let keys = key_fields(keyed, &mut keep);
                    // SAFETY: this is the type of every parser of UCX.
                    let read = unsafe {
                        core::mem::transmute::<*const c_void, Read>(
                            symbols.ucs_config_sscanf_key_value,
                        )
                    };
                    let value = Box::new(KeyedArgument {
                        raw: ConfigKeyValue {
                            parser: parser(symbols, keyed.value, core::ptr::null()),
                            keys: keys.as_ptr(),
                        },
                        read,
                        fallback: keyed.fallback,
                    });
                    let parser = key_value_parser(symbols, &value);
                    all_keyed.push((keys, value));
                    parser
                }
                kind => parser(symbols, kind, words.as_ptr().cast()),
            };
            fields.push(RawConfigField {
                name: keep(variable.name),
                dfl_value: keep(variable.default),
                doc: keep(variable.help),
                offset: end,
                parser,
            });
            end += variable.kind.slots() * VALUE_SIZE;
            choices.push(words);
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
            name: c_string(name),
            prefix: c_string(prefix),
            alias,
            size: end,
            _strings: strings,
            _choices: choices,
            _keyed: all_keyed,
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
    pub(crate) unsafe fn values<'a>(&'a self, ucx: &Ucx, block: *const c_void) -> Values<'a> {
        let mut values = Values { table: self, block: block.cast(), aliased: Vec::new() };
        let aliased = (0..self.variables.len()).map(|index| self.aliased(ucx, &values, index));
        values.aliased = aliased.collect();
        values
    }

    /// The value of a variable that is set under its second name only: not in the environment, nor
    /// to anything but its default in a configuration file or by the program.
    fn aliased(&self, ucx: &Ucx, values: &Values<'_>, index: usize) -> Option<Slots> {
        let Variable { name, default, .. } = self.variables[index];
        let alias = format!("{}{name}", self.alias?);
        let value = std::env::var(&alias).ok()?;
        let usual = format!("UCX_{}{name}", self.prefix.to_string_lossy());
        if std::env::var_os(&usual).is_some()
            || values.shown(index) != self.shown(index, default)?
        {
            return None;
        }
        let slot = self.parse(index, &value);
        if slot.is_none() {
            log!(ucx, Warn, "{alias}={value} makes no sense and is ignored");
        }
        slot
    }

    fn parse(&self, index: usize, text: &str) -> Option<Slots> {
        let parser = &self.fields[index + 1].parser;
        let mut slots: Slots = vec![0; self.variables[index].kind.slots()].into();
        let text = c_string(text);
        // SAFETY: a parser of UCX with its own argument; each value takes at most eight bytes.
        let understood = unsafe {
            let read = core::mem::transmute::<*const c_void, Read>(parser.read);
            read(text.as_ptr(), slots.as_mut_ptr().cast(), parser.arg) == 1
        };
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

/// The keys of a variable in UCX's format: each has its value behind that of the key before.
fn key_fields(
    keyed: &Keyed,
    keep: &mut impl FnMut(&str) -> *const c_char,
) -> Box<[ConfigKeyField]> {
    let keys = keyed.keys.iter().enumerate().map(|(index, (name, help))| ConfigKeyField {
        name: keep(name),
        doc: keep(help),
        offset: index * VALUE_SIZE,
    });
    let end = ConfigKeyField { name: core::ptr::null(), doc: core::ptr::null(), offset: 0 };
    keys.chain([end]).collect()
}

/// UCX's parser of keyed values, which is given the fallback where the text has no value without a key.
unsafe extern "C" fn read_keyed(
    text: *const c_char,
    slots: *mut c_void,
    argument: *const c_void,
) -> c_int {
    // SAFETY: UCX passes the argument of `key_value_parser`, which lives for ever.
    let ours = unsafe { &*argument.cast::<KeyedArgument>() };
    // SAFETY: UCX passes a C string.
    let given = unsafe { CStr::from_ptr(text) };
    let keyed_only = |text: &str| text.split(',').all(|item| item.contains(':'));
    let completed = given
        .to_str()
        .ok()
        .filter(|text| !text.is_empty() && keyed_only(text))
        .and_then(|text| CString::new(format!("{},{text}", ours.fallback)).ok());
    let text = completed.as_deref().unwrap_or(given);
    // SAFETY: UCX's own function, with its own kind of argument, which is the first part of ours.
    unsafe { (ours.read)(text.as_ptr(), slots, argument) }
}

fn key_value_parser(symbols: &Symbols, value: &KeyedArgument) -> ConfigParser {
    ConfigParser {
        read: read_keyed as *const c_void,
        write: symbols.ucs_config_sprintf_key_value,
        clone: symbols.ucs_config_clone_key_value,
        release: symbols.ucs_config_release_key_value,
        help: symbols.ucs_config_help_key_value,
        doc: symbols.ucs_config_doc_key_value,
        arg: core::ptr::from_ref(value).cast(),
    }
}

/// The parser of a single value.
fn parser(symbols: &Symbols, kind: Kind, words: *const c_void) -> ConfigParser {
    let s = symbols;
    let (read, write) = match kind {
        Kind::Bool => (s.ucs_config_sscanf_bool, s.ucs_config_sprintf_bool),
        Kind::Ternary => (s.ucs_config_sscanf_ternary, s.ucs_config_sprintf_ternary_auto),
        Kind::Uint => (s.ucs_config_sscanf_uint, s.ucs_config_sprintf_uint),
        Kind::Time => (s.ucs_config_sscanf_time, s.ucs_config_sprintf_time),
        Kind::Bandwidth => (s.ucs_config_sscanf_bw, s.ucs_config_sprintf_bw),
        Kind::MemUnits => (s.ucs_config_sscanf_memunits, s.ucs_config_sprintf_memunits),
        Kind::Text => (s.ucs_config_sscanf_string, s.ucs_config_sprintf_string),
        Kind::Choice(_) => (s.ucs_config_sscanf_enum, s.ucs_config_sprintf_enum),
        Kind::Keyed(_) => panic!("the values of a keyed variable are times or bandwidths"),
    };
    let clone = match kind {
        Kind::Bool | Kind::Ternary => s.ucs_config_clone_int,
        Kind::Time | Kind::Bandwidth => s.ucs_config_clone_double,
        Kind::MemUnits => s.ucs_config_clone_ulong,
        Kind::Text => s.ucs_config_clone_string,
        Kind::Uint | Kind::Choice(_) | Kind::Keyed(_) => s.ucs_config_clone_uint,
    };
    let (release, help) = match kind {
        Kind::Text => (s.ucs_config_release_string, s.ucs_config_help_generic),
        Kind::Choice(_) => (s.ucs_config_release_nop, s.ucs_config_help_enum),
        _ => (s.ucs_config_release_nop, s.ucs_config_help_generic),
    };
    // What the help function prints.
    let syntax = match kind {
        Kind::Bool => c"<y|n>",
        Kind::Ternary => c"<yes|no|try>",
        Kind::Uint => c"unsigned integer",
        Kind::Time => c"time value: <number>[s|us|ms|ns]",
        Kind::Bandwidth => c"bandwidth value: <number>[T|G|M|K]B|b[[p|/]s]",
        Kind::MemUnits => c"memory units: <number>[b|kb|mb|gb], \"inf\", or \"auto\"",
        Kind::Text => c"string",
        Kind::Choice(_) | Kind::Keyed(_) => c"",
    };
    let arg = if matches!(kind, Kind::Choice(_)) { words } else { syntax.as_ptr().cast() };
    ConfigParser { read, write, clone, release, help, doc: s.ucs_config_doc_nop, arg }
}

/// Parsed values, valid while UCX opens the object they belong to.
pub struct Values<'a> {
    table: &'a Table,
    block: *const u8,
    /// Values that were set under their second name, by index of the variable.
    aliased: Vec<Option<Slots>>,
}

impl Drop for Values<'_> {
    fn drop(&mut self) {
        type Release = unsafe extern "C" fn(*mut c_void, *const c_void);
        for (index, slots) in self.aliased.iter_mut().enumerate() {
            let Some(slots) = slots else { continue };
            let parser = &self.table.fields[index + 1].parser;
            // SAFETY: UCX's own release function for what its parser stored, called once.
            unsafe {
                let release = core::mem::transmute::<*const c_void, Release>(parser.release);
                release(slots.as_mut_ptr().cast(), parser.arg);
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
        type Write =
            unsafe extern "C" fn(*mut c_char, usize, *const c_void, *const c_void) -> c_int;
        let parser = &self.table.fields[index + 1].parser;
        let mut text = [0 as c_char; 256];
        // SAFETY: UCX's own function for a value its parser stored; it is given the room there is,
        // less a byte that stays zero.
        unsafe {
            let write = core::mem::transmute::<*const c_void, Write>(parser.write);
            write(text.as_mut_ptr(), text.len() - 1, self.place(index).cast(), parser.arg);
            CStr::from_ptr(text.as_ptr()).to_string_lossy().into_owned()
        }
    }

    /// Where the value of a variable is. Asking for what was not declared, or as another type, is
    /// a mistake in the plugin and panics (the panic stops at the border to C).
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
