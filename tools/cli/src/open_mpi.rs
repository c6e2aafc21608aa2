//! What `ucx-gaudi run` sets for Open MPI, if it starts a job of it (docs/mpi.md).

use std::ffi::{OsStr, OsString};
use std::path::Path;

use crate::failure::Failure;
use crate::prefix::Prefix;

/// Programs that start jobs of Open MPI. Others have such names as well, and do not read what is set here.
const LAUNCHERS: [&str; 5] = ["mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "prterun"];

/// Open MPI asks UCX for transports that it knows unless told otherwise. The collectives that are left out touch buffers
/// with the CPU, or hand them to libraries that do not know Gaudi memory.
const OPTIONS: [(&str, &str); 7] = [
    ("OMPI_MCA_pml", "ucx"),
    ("OMPI_MCA_pml_ucx_tls", "any"),
    ("OMPI_MCA_pml_ucx_devices", "any"),
    ("OMPI_MCA_osc", "ucx"),
    ("OMPI_MCA_coll", "^ucc,hcoll,sm,xhc,acoll"),
    ("UCX_GAUDI_COPY_DEVICE", "local-rank"),
    // Else Open MPI 5 hands our folder to PMIx, which complains about what is in it.
    ("PMIX_MCA_mca_base_component_path", ""),
];

/// Where Open MPI looks for components.
const COMPONENTS: &str = "OMPI_MCA_mca_base_component_path";

/// Variables for this program that the user has not set.
pub(crate) fn variables(
    program: &OsStr,
    prefix: &Prefix,
) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let name = Path::new(program).file_name().and_then(OsStr::to_str).unwrap_or_default();
    if !LAUNCHERS.contains(&name) {
        return Ok(Vec::new());
    }
    let mut components = OsString::from("SYS_DEFAULT:");
    components.push(prefix.open_mpi()?);
    let options = OPTIONS.iter().map(|(name, value)| (*name, OsString::from(value)));
    let all = options.chain([(COMPONENTS, components)]);
    Ok(all.filter(|(name, _)| std::env::var_os(name).is_none()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An installation, as far as Open MPI is concerned.
    fn prefix() -> (tempfile::TempDir, Prefix) {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("lib/ucx-gaudi/openmpi");
        std::fs::create_dir_all(&folder).expect("made");
        std::fs::write(folder.join("mca_accelerator_gaudi.so"), "").expect("written");
        let prefix = Prefix::at(root.path());
        (root, prefix)
    }

    #[test]
    fn jobs_of_open_mpi_find_the_components_and_other_programs_are_left_alone() {
        let (root, prefix) = prefix();
        for launcher in ["mpirun", "/usr/bin/mpiexec", "mpirun.openmpi"] {
            let set = variables(OsStr::new(launcher), &prefix).expect("variables");
            let folder = format!("SYS_DEFAULT:{}/lib/ucx-gaudi/openmpi", root.path().display());
            assert!(set.contains(&(COMPONENTS, folder.into())), "{launcher}: {set:?}");
            assert!(set.contains(&("OMPI_MCA_pml", "ucx".into())), "{launcher}: {set:?}");
        }
        for other in ["python3", "srun", "/opt/mpirun/program", ""] {
            assert_eq!(variables(OsStr::new(other), &prefix).expect("none"), [], "{other}");
        }
    }
}
