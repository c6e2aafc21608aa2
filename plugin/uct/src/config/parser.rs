//! The functions by which UCX reads, prints and documents a variable. They are UCX's own, except that
//! ours wraps the one that reads.
//!
//! If a read function refuses a value, UCX logs an error that names only half of the variable, and
//! drops the whole component: a typo would cost the user the device. Ours never refuses. It warns once,
//! with the variable, the value and the expected syntax, and uses the default.
//!
//! UCX calls the same function for `ucp_config_modify`, where a refusal would fail that call and keep
//! the earlier value. We cannot tell the two cases apart, so this call, too, sets the default.

use core::ffi::{CStr, c_char, c_int, c_void};
use std::collections::BTreeSet;
use std::ffi::CString;
use std::sync::{Mutex, PoisonError};

use super::{Keyed, Kind, VALUE_SIZE, Variable, kept};
use crate::abi::{ConfigKeyField, ConfigKeyValue, ConfigParser};
use crate::component::name_array;
use crate::log;
use crate::panic_guard::guarded;
use crate::ucx::{Symbols, Ucx, c_string};

type Read = unsafe extern "C" fn(*const c_char, *mut c_void, *const c_void) -> c_int;
type Help = unsafe extern "C" fn(*mut c_char, usize, *const c_void);

/// How UCX handles one variable: the argument of all its functions, followed by our fields. Never
/// freed: UCX keeps the address.
#[repr(C)]
pub(super) struct Parser {
    argument: UcxArgument,
    /// UCX's own functions.
    own: ConfigParser,
    ucx: &'static Ucx,
    variable: Variable,
    /// The whole name.
    name: String,
    /// A second name.
    alias: Option<String>,
}

/// The argument that UCX's functions expect, which depends on the kind.
#[repr(C)]
union UcxArgument {
    /// What the help function prints.
    syntax: [c_char; 64],
    /// The words of a choice, and a null.
    words: [*const c_char; 16],
    keyed: ConfigKeyValue,
}

impl Parser {
    pub(super) fn new(
        ucx: &'static Ucx,
        (prefix, alias): (&str, Option<&str>),
        variable: Variable,
    ) -> &'static Parser {
        let symbols = &ucx.symbols;
        let argument = match variable.kind {
            Kind::Choice(all) => {
                let mut words = [core::ptr::null(); 16];
                assert!(all.len() < words.len(), "the last one stays null");
                words.iter_mut().zip(all).for_each(|(to, word)| *to = kept(word));
                UcxArgument { words }
            }
            Kind::Keyed(keyed) => {
                let syntax = kept(syntax(keyed.value)).cast();
                let parser = ConfigParser { arg: syntax, ..functions(symbols, keyed.value) };
                UcxArgument { keyed: ConfigKeyValue { parser, keys: key_fields(keyed) } }
            }
            kind => UcxArgument { syntax: name_array(syntax(kind)) },
        };
        Box::leak(Box::new(Parser {
            argument,
            own: functions(symbols, variable.kind),
            ucx,
            variable,
            name: format!("UCX_{prefix}{}", variable.name),
            alias: alias.map(|alias| format!("{alias}{}", variable.name)),
        }))
    }

    /// The argument for UCX's functions.
    fn argument(&self) -> *const c_void {
        core::ptr::from_ref(self).cast()
    }

    /// The entry for UCX's table.
    pub(super) fn raw(&self) -> ConfigParser {
        ConfigParser { read: read as *const c_void, arg: self.argument(), ..self.own }
    }

    /// The second name and its value, if that is set, `text` is the default, and the first name is not set.
    fn aliased(&self, text: &CStr) -> Option<(&str, CString)> {
        let alias = self.alias.as_deref()?;
        let set = text.to_bytes() != self.variable.default.as_bytes()
            || std::env::var_os(&self.name).is_some();
        let value = if set { None } else { std::env::var(alias).ok() };
        value.map(|value| (alias, c_string(&value)))
    }

    /// Reads a value as UCX does.
    ///
    /// # Safety
    /// `slots` has room for the values of this variable; nothing in it needs to be released.
    unsafe fn read(&self, text: &CStr, slots: *mut c_void) -> bool {
        let mut completed = None;
        if let (Kind::Keyed(keyed), Ok(text)) = (self.variable.kind, text.to_str()) {
            // Checked here, because UCX would log an error of its own.
            let known = |key: &str| keyed.keys.iter().any(|(known, _)| *known == key);
            let mut named = text.split(',').map(|item| item.split_once(':').map(|(key, _)| key));
            if named.clone().flatten().any(|key| !known(key)) {
                return false;
            }
            if !text.is_empty() && named.all(|key| key.is_some()) {
                completed = Some(c_string(&format!("{},{text}", keyed.fallback)));
            }
        }
        let text = completed.as_deref().unwrap_or(text);
        // SAFETY: UCX's own function for this kind, with its own argument and, as promised, enough room.
        unsafe {
            let read = core::mem::transmute::<*const c_void, Read>(self.own.read);
            read(text.as_ptr(), slots, self.argument()) == 1
        }
    }

    /// Warns of an invalid value, once for each. `name`: as the user spelled it.
    fn warn(&self, name: &str, value: &str) {
        static WARNED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let setting = format!("{name}={value}");
        let is_new = WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(setting.clone());
        if !is_new {
            return;
        }
        let mut expected = [0 as c_char; 256];
        // SAFETY: UCX's own function, with its own argument; the last byte stays zero.
        let expected = unsafe {
            let help = core::mem::transmute::<*const c_void, Help>(self.own.help);
            help(expected.as_mut_ptr(), expected.len() - 1, self.argument());
            CStr::from_ptr(expected.as_ptr()).to_string_lossy()
        };
        let default = self.variable.default;
        log!(
            self.ucx,
            Warn,
            "{setting} is not understood and the default, {default}, is used; expected: {expected}"
        );
    }
}

/// What UCX calls to read a variable.
unsafe extern "C" fn read(
    text: *const c_char,
    slots: *mut c_void,
    argument: *const c_void,
) -> c_int {
    // SAFETY: UCX passes the argument of the table, a `Parser` that lives for ever.
    let parser = unsafe { &*argument.cast::<Parser>() };
    guarded(parser.ucx, "a configuration variable", 0, || {
        // SAFETY: UCX passes a C string.
        let text = unsafe { CStr::from_ptr(text) };
        let aliased = parser.aliased(text);
        let (name, text) = match &aliased {
            Some((alias, value)) => (*alias, value.as_c_str()),
            None => (parser.name.as_str(), text),
        };
        // SAFETY: UCX passes the place of this variable in its block.
        let understood = unsafe { parser.read(text, slots) } || {
            parser.warn(name, &text.to_string_lossy());
            // SAFETY: as above; what is not understood leaves nothing to release.
            unsafe { parser.read(&c_string(parser.variable.default), slots) }
        };
        c_int::from(understood)
    })
}

/// The keys of a variable in UCX's format; their values follow one another in this order.
fn key_fields(keyed: &Keyed) -> *const ConfigKeyField {
    let keys = keyed.keys.iter().enumerate().map(|(index, (name, help))| ConfigKeyField {
        name: kept(name),
        doc: kept(help),
        offset: index * VALUE_SIZE,
    });
    let end = ConfigKeyField { name: core::ptr::null(), doc: core::ptr::null(), offset: 0 };
    keys.chain([end]).collect::<Vec<_>>().leak().as_ptr()
}

/// UCX's functions for a kind, without an argument.
pub(super) fn functions(symbols: &Symbols, kind: Kind) -> ConfigParser {
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
        Kind::Keyed(_) => (s.ucs_config_sscanf_key_value, s.ucs_config_sprintf_key_value),
    };
    let clone = match kind {
        Kind::Bool | Kind::Ternary => s.ucs_config_clone_int,
        Kind::Time | Kind::Bandwidth => s.ucs_config_clone_double,
        Kind::MemUnits => s.ucs_config_clone_ulong,
        Kind::Text => s.ucs_config_clone_string,
        Kind::Uint | Kind::Choice(_) => s.ucs_config_clone_uint,
        Kind::Keyed(_) => s.ucs_config_clone_key_value,
    };
    let (mut release, mut help, mut doc) =
        (s.ucs_config_release_nop, s.ucs_config_help_generic, s.ucs_config_doc_nop);
    match kind {
        Kind::Text => release = s.ucs_config_release_string,
        Kind::Choice(_) => help = s.ucs_config_help_enum,
        Kind::Keyed(_) => {
            release = s.ucs_config_release_key_value;
            (help, doc) = (s.ucs_config_help_key_value, s.ucs_config_doc_key_value);
        }
        _ => {}
    }
    ConfigParser { read, write, clone, release, help, doc, arg: core::ptr::null() }
}

/// What UCX prints as the syntax of a kind; empty where UCX composes it.
fn syntax(kind: Kind) -> &'static str {
    match kind {
        Kind::Bool => "<y|n>",
        Kind::Ternary => "<yes|no|try>",
        Kind::Uint => "unsigned integer",
        Kind::Time => "time value: <number>[s|us|ms|ns]",
        Kind::Bandwidth => "bandwidth value: <number>[T|G|M|K]B|b[[p|/]s]",
        Kind::MemUnits => "memory units: <number>[b|kb|mb|gb], \"inf\", or \"auto\"",
        Kind::Text => "string",
        Kind::Choice(_) | Kind::Keyed(_) => "",
    }
}
