//! Configuration variables that UCX itself parses, prints and documents.
//!
//! A component or transport declares its variables as a slice of [`Variable`]s; UCX then reads
//! them from `UCX_<PREFIX><NAME>`, and `ucx_info -c -f` lists them with their help. When UCX opens
//! the object it hands over the parsed values, which a [`Values`] reads.
//!
//! A component may accept its variables under a second prefix, which UCX does not know. When UCX is
//! about to use the default, our parser looks for the second name in the environment (`parser`).
//!
//! An invalid value, in either spelling, logs a warning, and the default is used.

mod parser;

use core::ffi::{CStr, c_char, c_int, c_void};

use self::parser::Parser;
use crate::abi::{ConfigEntry, ConfigParser, ListLink, RawConfigField, Status};
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

/// A list of [`Variable`]s: name, type, default and help of each.
#[macro_export]
macro_rules! variables {
    ($($name:ident: $kind:ident $(($of:expr))? = $default:literal, $help:literal;)*) => {
        &[$($crate::config::Variable {
            name: stringify!($name),
            default: $default,
            help: $help,
            kind: $crate::config::Kind::$kind $(($of))?,
        }),*]
    };
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
    /// A value for each of a few keys, such as `10GBs,d2h:8GBs`: the value without a key applies to the
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
    /// The value of keys that are not named, if the text has no value without a key. UCX has no such
    /// default and would refuse the whole text.
    pub fallback: &'static str,
}

/// A `yes`/`no`/`try` answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ternary {
    /// Never.
    No,
    /// Required: fail if it is impossible.
    Yes,
    /// Where possible.
    Try,
}

/// A table in UCX's format, and what is needed to read a block that UCX filled from it. What it points
/// to is never freed: UCX keeps the addresses.
pub(crate) struct Table {
    fields: &'static [RawConfigField],
    variables: &'static [Variable],
    name: *const c_char,
    prefix: *const c_char,
    size: usize,
}

/// Bytes that each value takes in the block.
const VALUE_SIZE: usize = 8;

const NO_PARSER: ConfigParser = {
    let null = core::ptr::null();
    ConfigParser {
        read: null,
        write: null,
        clone: null,
        release: null,
        help: null,
        doc: null,
        arg: null,
    }
};

/// The end of a table.
const END: RawConfigField = {
    let null = core::ptr::null();
    RawConfigField { name: null, dfl_value: null, doc: null, offset: 0, parser: NO_PARSER }
};

impl Table {
    /// `base_table` is UCX's own table, which every configuration of this kind begins with; its values
    /// take `base_size` bytes. `alias`: the second, complete prefix.
    pub(crate) fn new(
        ucx: &'static Ucx,
        name: &str,
        (prefix, alias): (&str, Option<&'static str>),
        variables: &'static [Variable],
        (base_table, base_size): (*const c_void, usize),
    ) -> Table {
        let symbols = &ucx.symbols;
        let field = |name, [dfl_value, doc]: [*const c_char; 2], offset, parser| RawConfigField {
            name,
            dfl_value,
            doc,
            offset,
            parser,
        };
        let inherited = ConfigParser {
            read: symbols.ucs_config_sscanf_table,
            clone: symbols.ucs_config_clone_table,
            release: symbols.ucs_config_release_table,
            help: symbols.ucs_config_help_table,
            doc: symbols.ucs_config_doc_nop,
            arg: base_table,
            ..NO_PARSER
        };
        let null = core::ptr::null();
        let mut fields = vec![field(c"".as_ptr(), [c"".as_ptr(), null], 0, inherited)];
        let mut end = base_size.next_multiple_of(VALUE_SIZE);
        for variable in variables {
            let parser = Parser::new(ucx, (prefix, alias), *variable).raw();
            let texts = [variable.default, variable.help].map(kept);
            fields.push(field(kept(variable.name), texts, end, parser));
            end += variable.kind.slots() * VALUE_SIZE;
        }
        fields.push(END);
        let (name, prefix) = (kept(name), kept(prefix));
        Table { fields: fields.leak(), variables, name, prefix, size: end }
    }

    /// The entry for UCX's global list.
    pub(crate) fn entry(&self) -> ConfigEntry {
        ConfigEntry {
            name: self.name,
            prefix: self.prefix,
            table: self.fields.as_ptr().cast_mut(),
            size: self.size,
            ..Self::empty_entry()
        }
    }

    /// An empty entry, for a kind of configuration that we do not have.
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
        Values { table: self, block: block.cast() }
    }
}

impl Ucx {
    /// Makes UCX read the variable `UCX_<name>`, which only other versions of UCX know. Otherwise, if
    /// it is set, UCX warns that nothing uses it.
    pub fn read_variable(&self, name: &CStr) {
        type FillOpts =
            unsafe extern "C" fn(*mut c_void, *mut ConfigEntry, *const c_char, c_int) -> Status;
        type Release = unsafe extern "C" fn(*mut c_void, *const c_void);
        let Some(fill) = self.symbol(c"ucs_config_parser_fill_opts") else { return };
        let empty = c"".as_ptr();
        let parser = parser::functions(&self.symbols, Kind::Text);
        let field =
            RawConfigField { name: name.as_ptr(), dfl_value: empty, doc: empty, offset: 0, parser };
        let mut table = [field, END];
        let mut text: *mut c_char = core::ptr::null_mut();
        let size = size_of_val(&text);
        let mut entry = ConfigEntry { table: table.as_mut_ptr(), size, ..Table::empty_entry() };
        // SAFETY: libucs declares them so since 1.11. The table has one text and ends with an empty field; UCX keeps
        // none of the addresses. If it fails, it has released the text.
        unsafe {
            let fill = core::mem::transmute::<*mut c_void, FillOpts>(fill);
            let release = core::mem::transmute::<*const c_void, Release>(parser.release);
            let place: *mut c_void = (&raw mut text).cast();
            if fill(place, &mut entry, c"UCX_".as_ptr(), 1) == Status::OK {
                release(place, core::ptr::null());
            }
        }
    }
}

/// A leaked C string.
fn kept(text: &str) -> *const c_char {
    c_string(text).into_raw()
}

/// Parsed values, valid while UCX opens the object they belong to.
pub struct Values<'a> {
    table: &'a Table,
    block: *const u8,
}

impl Values<'_> {
    /// Where the value of a variable is. Asking for an undeclared variable, or for another type, is a
    /// bug in the plugin and panics (the panic is caught at the boundary to C).
    fn slot(&self, name: &str, mut wanted: impl FnMut(Kind) -> bool) -> *const u8 {
        let is_it = |variable: &Variable| variable.name == name && wanted(variable.kind);
        let index = self.table.variables.iter().position(is_it);
        let index = index
            .unwrap_or_else(|| panic!("no configuration variable {name} of that type is declared"));
        // SAFETY: the block has `table.size` bytes, and declared values lie inside.
        unsafe { self.block.add(self.table.fields[index + 1].offset) }
    }

    /// A [`Kind::Bool`].
    pub fn bool(&self, name: &str) -> bool {
        // SAFETY: UCX's bool parser stores an int.
        unsafe { self.slot(name, |kind| kind == Kind::Bool).cast::<c_int>().read() != 0 }
    }

    /// A [`Kind::Ternary`].
    pub fn ternary(&self, name: &str) -> Ternary {
        // SAFETY: UCX's ternary parser stores an int.
        match unsafe { self.slot(name, |kind| kind == Kind::Ternary).cast::<c_int>().read() } {
            0 => Ternary::No,
            1 => Ternary::Yes,
            _ => Ternary::Try,
        }
    }

    /// A [`Kind::Uint`].
    pub fn uint(&self, name: &str) -> u32 {
        // SAFETY: UCX's parser stores an unsigned int.
        unsafe { self.slot(name, |kind| kind == Kind::Uint).cast::<u32>().read() }
    }

    /// A [`Kind::Time`] in seconds or a [`Kind::Bandwidth`] in bytes per second.
    pub fn real(&self, name: &str) -> f64 {
        let slot = self.slot(name, |kind| matches!(kind, Kind::Time | Kind::Bandwidth));
        // SAFETY: UCX's parsers store a double.
        unsafe { slot.cast::<f64>().read() }
    }

    /// The value of a [`Kind::Keyed`] for a key: seconds, or bytes per second; negative for a bandwidth
    /// of `auto`.
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
        // SAFETY: UCX's parser stores a size_t.
        unsafe { self.slot(name, |kind| kind == Kind::MemUnits).cast::<usize>().read() }
    }

    /// A [`Kind::Text`].
    pub fn text(&self, name: &str) -> String {
        // SAFETY: UCX's parser stores a pointer to a C string that lives as long as the block.
        unsafe {
            let text = self.slot(name, |kind| kind == Kind::Text).cast::<*const c_char>().read();
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
