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

use crate::abi::{ConfigEntry, ConfigParser, ListLink, RawConfigField};
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
    name: CString,
    prefix: CString,
    /// Second spelling of the variables, prefix included.
    alias: Option<&'static str>,
    size: usize,
    base: usize,
    /// What the fields point to.
    _strings: Vec<CString>,
    _choices: Vec<Box<[*const c_char]>>,
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
        for (index, variable) in variables.iter().enumerate() {
            let words = match variable.kind {
                Kind::Choice(words) => words
                    .iter()
                    .map(|word| keep(word))
                    .chain([core::ptr::null()])
                    .collect::<Box<[_]>>(),
                _ => Box::default(),
            };
            fields.push(RawConfigField {
                name: keep(variable.name),
                dfl_value: keep(variable.default),
                doc: keep(variable.help),
                offset: base + index * VALUE_SIZE,
                parser: parser(symbols, variable.kind, words.as_ptr()),
            });
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
            size: base + variables.len() * VALUE_SIZE,
            base,
            _strings: strings,
            _choices: choices,
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
        let aliased = (0..self.variables.len()).map(|index| self.aliased(ucx, index)).collect();
        Values { table: self, block: block.cast(), aliased }
    }

    /// The value of a variable that is set under its second name only.
    fn aliased(&self, ucx: &Ucx, index: usize) -> Option<Box<Slot>> {
        type Read = unsafe extern "C" fn(*const c_char, *mut c_void, *const c_void) -> c_int;
        let name = self.variables[index].name;
        let alias = format!("{}{name}", self.alias?);
        let value = std::env::var(&alias).ok()?;
        let usual = format!("UCX_{}{name}", self.prefix.to_string_lossy());
        if std::env::var_os(&usual).is_some() {
            return None;
        }
        let parser = &self.fields[index + 1].parser;
        let mut slot = Box::new(Slot([0; VALUE_SIZE]));
        let text = c_string(&value);
        // SAFETY: a parser of UCX with its own argument; each stores at most eight bytes.
        let understood = unsafe {
            let read = core::mem::transmute::<*const c_void, Read>(parser.read);
            read(text.as_ptr(), (&raw mut *slot).cast(), parser.arg) == 1
        };
        if !understood {
            log!(ucx, Warn, "{alias}={value} makes no sense and is ignored");
        }
        understood.then_some(slot)
    }
}

/// Room for one value.
#[repr(C, align(8))]
struct Slot([u8; VALUE_SIZE]);

fn parser(symbols: &Symbols, kind: Kind, words: *const *const c_char) -> ConfigParser {
    let (read, write, clone, release, help, arg): (_, _, _, _, _, *const c_void) = match kind {
        Kind::Bool => (
            symbols.ucs_config_sscanf_bool,
            symbols.ucs_config_sprintf_bool,
            symbols.ucs_config_clone_int,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"<y|n>".as_ptr().cast(),
        ),
        Kind::Ternary => (
            symbols.ucs_config_sscanf_ternary,
            symbols.ucs_config_sprintf_ternary_auto,
            symbols.ucs_config_clone_int,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"<yes|no|try>".as_ptr().cast(),
        ),
        Kind::Uint => (
            symbols.ucs_config_sscanf_uint,
            symbols.ucs_config_sprintf_uint,
            symbols.ucs_config_clone_uint,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"unsigned integer".as_ptr().cast(),
        ),
        Kind::Time => (
            symbols.ucs_config_sscanf_time,
            symbols.ucs_config_sprintf_time,
            symbols.ucs_config_clone_double,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"time value: <number>[s|us|ms|ns]".as_ptr().cast(),
        ),
        Kind::Bandwidth => (
            symbols.ucs_config_sscanf_bw,
            symbols.ucs_config_sprintf_bw,
            symbols.ucs_config_clone_double,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"bandwidth value: <number>[T|G|M|K]B|b[[p|/]s]".as_ptr().cast(),
        ),
        Kind::MemUnits => (
            symbols.ucs_config_sscanf_memunits,
            symbols.ucs_config_sprintf_memunits,
            symbols.ucs_config_clone_ulong,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_generic,
            c"memory units: <number>[b|kb|mb|gb], \"inf\", or \"auto\"".as_ptr().cast(),
        ),
        Kind::Text => (
            symbols.ucs_config_sscanf_string,
            symbols.ucs_config_sprintf_string,
            symbols.ucs_config_clone_string,
            symbols.ucs_config_release_string,
            symbols.ucs_config_help_generic,
            c"string".as_ptr().cast(),
        ),
        Kind::Choice(_) => (
            symbols.ucs_config_sscanf_enum,
            symbols.ucs_config_sprintf_enum,
            symbols.ucs_config_clone_uint,
            symbols.ucs_config_release_nop,
            symbols.ucs_config_help_enum,
            words.cast(),
        ),
    };
    ConfigParser { read, write, clone, release, help, doc: symbols.ucs_config_doc_nop, arg }
}

/// Parsed values, valid while UCX opens the object they belong to.
pub struct Values<'a> {
    table: &'a Table,
    block: *const u8,
    /// Values that were set under their second name, by index of the variable.
    aliased: Vec<Option<Box<Slot>>>,
}

impl Drop for Values<'_> {
    fn drop(&mut self) {
        type Release = unsafe extern "C" fn(*mut c_void, *const c_void);
        for (index, slot) in self.aliased.iter_mut().enumerate() {
            let Some(slot) = slot else { continue };
            let parser = &self.table.fields[index + 1].parser;
            // SAFETY: UCX's own release function for what its parser stored, called once.
            unsafe {
                let release = core::mem::transmute::<*const c_void, Release>(parser.release);
                release((&raw mut **slot).cast(), parser.arg);
            }
        }
    }
}

impl Values<'_> {
    /// Where the value of a variable is. Asking for what was not declared, or as another type, is
    /// a mistake in the plugin and panics (the panic stops at the border to C).
    fn slot(&self, name: &str, wanted: impl Fn(Kind) -> bool) -> *const u8 {
        let index = self
            .table
            .variables
            .iter()
            .position(|variable| variable.name == name && wanted(variable.kind))
            .unwrap_or_else(|| panic!("no configuration variable {name} of that type is declared"));
        if let Some(slot) = &self.aliased[index] {
            return slot.0.as_ptr();
        }
        // SAFETY: the block has `table.size` bytes, and declared values lie inside.
        unsafe { self.block.add(self.table.base + index * VALUE_SIZE) }
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
