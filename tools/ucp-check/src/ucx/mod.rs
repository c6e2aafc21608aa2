//! One stock UCX, found and loaded at run time: libucp, and the libuct and libucs that it links.
//!
//! Names differ: `libucp.so.0` in distributions and in the libucx wheel, `libucp-<hash>.so.0.0.0` in wheels
//! that bundle UCX. Libraries are opened RTLD_LOCAL, so that several copies of UCX can live in one process,
//! and are never closed: plugins stay registered in them.

#[doc(hidden)]
pub mod sys;

use anyhow::{Context as _, bail};
use libloading::os::unix;
use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};
use sys::Functions;
pub use uct::abi::Status;

/// One loaded UCX. Lives as long as the process.
pub struct Ucx {
    pub(crate) f: Functions,
    /// `uct_md_mem_query_v2`, which UCX 1.21 does not have.
    pub(crate) mem_query_v2: Option<sys::MemQuery>,
    version: String,
    path: PathBuf,
}

/// A failed call of UCX: its name, and the status.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Error {
    /// The C function, or the operation that was waited for.
    pub call: &'static str,
    pub status: Status,
    pub(crate) text: String,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.text, self.status.0)
    }
}

impl std::error::Error for Error {}

pub type Result<T> = std::result::Result<T, Error>;

/// Calls a function of UCX that returns a status, in an `unsafe` block of the caller; an error names the function.
macro_rules! call {
    ($ucx:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $ucx.check(stringify!($name), ($ucx.f.$name)($($arg),*))
    };
}
pub(crate) use call;

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX {} ({})", self.version, self.path.display())
    }
}

/// Where wheels and installations keep libucp, relative to the folder the user names.
const SUBFOLDERS: [&str; 5] = ["", "lib", "libucx/lib", "nixl_cu12.libs", "lib64"];

impl Ucx {
    /// Loads the UCX in `folder` (the library folder itself or the root of an unpacked wheel), or, without
    /// a folder, the `libucp.so.0` that the loader path finds.
    pub fn load(folder: Option<&Path>) -> anyhow::Result<&'static Ucx> {
        let path = folder.map_or_else(|| Ok("libucp.so.0".into()), find)?;
        crate::framework::before_ucx()?;
        // SAFETY: loading libucp runs its constructors, which is what every user of UCX does.
        let library =
            unsafe { unix::Library::open(Some(&path), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        let library = library.with_context(|| {
            let path = path.display();
            format!("cannot load UCX from {path}; name its folder with --ucx or put it on LD_LIBRARY_PATH")
        })?;
        // Never unloaded: UCX keeps callbacks of its modules, and plugins cannot be unregistered.
        let library: &'static libloading::Library = Box::leak(Box::new(library.into()));
        // SAFETY: this is a libucp, which links libuct and libucs; their public API is that of `sys`.
        let f = unsafe { Functions::load(library) }.with_context(|| {
            format!("{} is no UCX that this client can use (1.21 or later)", path.display())
        })?;
        // SAFETY: as above.
        let mem_query_v2 = unsafe { library.get::<sys::MemQuery>(b"uct_md_mem_query_v2\0") };
        let mem_query_v2 = mem_query_v2.ok().map(|function| *function);
        // SAFETY: returns a static string.
        let version = unsafe { CStr::from_ptr((f.ucp_get_version_string)()) };
        let version = version.to_string_lossy().into_owned();
        Ok(Box::leak(Box::new(Ucx { f, mem_query_v2, version, path })))
    }

    pub fn version(&self) -> &str {
        &self.version
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn error(&self, call: &'static str, status: Status) -> Error {
        // SAFETY: returns a static string for any status.
        let text = unsafe { CStr::from_ptr((self.f.ucs_status_string)(status)) };
        Error { call, status, text: text.to_string_lossy().into_owned() }
    }

    pub(crate) fn check(&self, call: &'static str, status: Status) -> Result<()> {
        if status == Status::OK { Ok(()) } else { Err(self.error(call, status)) }
    }
}

/// The libucp in `folder` or in one of the usual places below it.
fn find(folder: &Path) -> anyhow::Result<PathBuf> {
    for sub in SUBFOLDERS {
        let Ok(entries) = folder.join(sub).read_dir() else { continue };
        let ranked = entries
            .flatten()
            .filter_map(|entry| Some((rank(entry.file_name().to_str()?)?, entry.path())));
        if let Some((_, path)) = ranked.min() {
            return Ok(path);
        }
    }
    bail!("no libucp.so.0 and no libucp-*.so.* in {} or {SUBFOLDERS:?} below it", folder.display())
}

/// How well a file name fits, 0 best; `None` if it is no libucp.
///
/// `.so.0` comes first because that is the name the dynamic linker uses for ordinary programs, and UCX
/// derives the suffix of its modules and plugins from the name it was opened under.
fn rank(name: &str) -> Option<u8> {
    match name.strip_prefix("libucp")? {
        ".so.0" => Some(0),
        ".so.0.0.0" => Some(2),
        ".so" => Some(3),
        rest if rest.starts_with('-') && rest.contains(".so.") => Some(1),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::rank;

    #[test]
    fn the_linker_name_is_preferred_and_mangled_names_are_known() {
        assert!(rank("libucp.so.0") < rank("libucp-b39b3ed9.so.0.0.0"));
        assert!(rank("libucp-b39b3ed9.so.0.0.0").is_some());
        for other in ["libucp.la", "libucp_extra.so.0", "libuct.so.0"] {
            assert_eq!(rank(other), None);
        }
    }

    #[test]
    fn a_folder_without_ucx_is_named_in_the_error() {
        let error = super::find(std::path::Path::new("/nonexistent/ucx")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/ucx"), "{error}");
    }
}
