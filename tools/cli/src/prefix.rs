//! Where the tool is installed: plugin and software devices have fixed places relative to it.
//!
//! `PREFIX/bin/ucx-gaudi`, `PREFIX/lib/ucx-gaudi/plugins`, `…/preload`, `…/soft/gaudi`. It does not use the
//! environment, so that a moved installation keeps working.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// The installation this program belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Prefix(PathBuf);

impl Prefix {
    /// Found by the path of the running program, with links resolved.
    pub(crate) fn find() -> Result<Self, Failure> {
        let program = std::env::current_exe().and_then(std::fs::canonicalize);
        let prefix = program.as_deref().ok().and_then(Path::parent).and_then(Path::parent);
        prefix.map(|prefix| Self(prefix.to_owned())).ok_or_else(|| {
            Failure::unable(
                "the path of this program is not known",
                "start it by its path, with /proc mounted",
            )
        })
    }

    #[cfg(test)]
    pub(crate) fn at(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The value for `UCX_PLUGIN_PATH`.
    pub(crate) fn plugins(&self) -> Result<PathBuf, Failure> {
        self.there("lib/ucx-gaudi/plugins", "libuct_gaudi.so.0")
    }

    /// The library to preload for a UCX that does not look for plugins (1.21).
    pub(crate) fn preload(&self) -> Result<PathBuf, Failure> {
        let name = "libucx_gaudi_preload.so";
        Ok(self.there("lib/ucx-gaudi/preload", name)?.join(name))
    }

    /// The folder with components for Open MPI.
    pub(crate) fn open_mpi(&self) -> Result<PathBuf, Failure> {
        self.there("lib/ucx-gaudi/openmpi", "mca_accelerator_gaudi.so")
    }

    /// The folder with the software Gaudi's `libhl-thunk.so`.
    pub(crate) fn soft_gaudi(&self) -> Result<PathBuf, Failure> {
        self.there("lib/ucx-gaudi/soft/gaudi", "libhl-thunk.so")
    }

    /// The software HCA's `libibverbs.so.1`.
    pub(crate) fn soft_rdma(&self) -> Result<PathBuf, Failure> {
        let name = "libibverbs.so.1";
        Ok(self.there("lib/ucx-gaudi/soft/rdma", name)?.join(name))
    }

    /// A program that is installed with this one.
    pub(crate) fn program(&self, name: &str) -> Result<PathBuf, Failure> {
        Ok(self.there("bin", name)?.join(name))
    }

    /// The example of a dashboard, if documentation is installed.
    pub(crate) fn monitoring(&self) -> Option<PathBuf> {
        self.there("share/doc/ucx-gaudi/examples/monitoring", "README.md").ok()
    }

    /// A folder of the installation that must contain this file.
    fn there(&self, folder: &str, file: &str) -> Result<PathBuf, Failure> {
        let path = self.0.join(folder);
        if path.join(file).exists() {
            return Ok(path);
        }
        Err(Failure::unable(
            format!("{} is not there", path.join(file).display()),
            "the tool looks for its files relative to its own folder: install all of ucx-gaudi under one \
             prefix, and start it as PREFIX/bin/ucx-gaudi",
        ))
    }

    /// The software machine of this installation: all programs started with it share the cards. Another installation,
    /// or an earlier version in the same place, has another machine, because the state of a machine belongs to one
    /// version.
    pub(crate) fn soft_node(&self) -> String {
        let mut hasher = DefaultHasher::new();
        let library = self.0.join("lib/ucx-gaudi/soft/gaudi/libhl-thunk.so");
        let built = std::fs::metadata(library).and_then(|meta| Ok((meta.len(), meta.modified()?)));
        (&self.0, built.ok()).hash(&mut hasher);
        format!("tool-{:08x}", hasher.finish() as u32)
    }
}
