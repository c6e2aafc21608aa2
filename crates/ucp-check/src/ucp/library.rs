//! Finding and loading one stock UCX.
//!
//! Names differ: `libucp.so.0` in distributions and in the libucx wheel, `libucp-<hash>.so.0.0.0`
//! in wheels that bundle UCX. Libraries are opened RTLD_LOCAL, so that several copies of UCX can
//! live in one process, and are never closed: plugins stay registered in them.

use super::sys::{Functions, OK, RawStatus};
use super::{Error, Status};
use anyhow::{Context as _, Result, bail};
use libloading::os::unix;
use std::ffi::CStr;
use std::fmt;
use std::path::{Path, PathBuf};

/// One loaded libucp. Lives as long as the process.
pub struct Ucx {
    pub(super) f: Functions,
    library: &'static libloading::Library,
    version: String,
    path: PathBuf,
}

impl fmt::Debug for Ucx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX {} ({})", self.version, self.path.display())
    }
}

/// Where wheels and installations keep libucp, relative to the folder the user names.
const SUBFOLDERS: [&str; 5] = ["", "lib", "libucx/lib", "nixl_cu12.libs", "lib64"];

impl Ucx {
    /// Loads the UCX in `folder` (the library folder itself or the root of an unpacked wheel), or,
    /// without a folder, the `libucp.so.0` that the loader path finds.
    pub fn load(folder: Option<&Path>) -> Result<&'static Ucx> {
        let path = match folder {
            Some(folder) => find(folder)?,
            None => PathBuf::from("libucp.so.0"),
        };
        // SAFETY: loading libucp runs its constructors, which is what every user of UCX does.
        let library = unsafe {
            unix::Library::open(Some(&path), libc::RTLD_NOW | libc::RTLD_LOCAL)
        }
        .with_context(|| {
            format!(
                "cannot load UCX from {}; name its folder with --ucx or put it on LD_LIBRARY_PATH",
                path.display()
            )
        })?;
        // Never unloaded: UCX keeps callbacks of its modules, and plugins cannot be unregistered.
        let library: &'static libloading::Library = Box::leak(Box::new(library.into()));
        // SAFETY: this is a libucp, and its public API has the signatures of `sys`.
        let f = unsafe { Functions::load(library) }.with_context(|| {
            format!("{} is no UCX that this client can use (1.22 or later)", path.display())
        })?;
        // SAFETY: returns a static string.
        let version = unsafe { CStr::from_ptr((f.ucp_get_version_string)()) };
        let version = version.to_string_lossy().into_owned();
        Ok(Box::leak(Box::new(Ucx { f, library, version, path })))
    }

    /// What `ucp_get_version_string` says.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The library, through which those it is linked to are reached as well.
    pub(crate) fn library(&self) -> &'static libloading::Library {
        self.library
    }

    /// The file that was loaded.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn error(&self, call: &'static str, status: RawStatus) -> Error {
        // SAFETY: returns a static string for any status.
        let text = unsafe { CStr::from_ptr((self.f.ucs_status_string)(status)) };
        Error { call, status: Status(status), text: text.to_string_lossy().into_owned() }
    }

    pub(super) fn check(&self, call: &'static str, status: RawStatus) -> super::Result<()> {
        if status == OK { Ok(()) } else { Err(self.error(call, status)) }
    }
}

/// The libucp in `folder` or in one of the usual places below it.
fn find(folder: &Path) -> Result<PathBuf> {
    for sub in SUBFOLDERS {
        let Ok(entries) = folder.join(sub).read_dir() else { continue };
        let found = entries
            .flatten()
            .filter_map(|entry| {
                let rank = rank(entry.file_name().to_str()?)?;
                Some((rank, entry.path()))
            })
            .min();
        if let Some((_, path)) = found {
            return Ok(path);
        }
    }
    bail!("no libucp.so.0 and no libucp-*.so.* in {} or {SUBFOLDERS:?} below it", folder.display())
}

/// How much we like a file name, 0 best; `None` if it is no libucp.
///
/// `.so.0` comes first because that is the name the dynamic linker uses for ordinary programs, and
/// UCX derives the suffix of its modules and plugins from the name it was opened under.
fn rank(name: &str) -> Option<u8> {
    let rest = name.strip_prefix("libucp")?;
    match rest {
        ".so.0" => Some(0),
        ".so.0.0.0" => Some(2),
        ".so" => Some(3),
        _ if rest.starts_with('-') && rest.contains(".so.") => Some(1),
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
        assert_eq!(rank("libucp.la"), None);
        assert_eq!(rank("libucp_extra.so.0"), None);
        assert_eq!(rank("libuct.so.0"), None);
    }

    #[test]
    fn a_folder_without_ucx_is_named_in_the_error() {
        let error = super::find(std::path::Path::new("/nonexistent/ucx")).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/ucx"), "{error}");
    }
}
