//! Open MPI: what `ucx-gaudi run` sets for its jobs, and what `doctor` reports about it (docs/mpi.md).

use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::process::Command;

use crate::failure::Failure;
use crate::prefix::Prefix;
use crate::report::Finding;

/// Programs that may start jobs of Open MPI; their version decides, as other MPIs use the same names.
const LAUNCHERS: [&str; 4] = ["mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi"];

/// By default Open MPI only asks UCX for transports that it knows. Of the collectives that are excluded, UCC and hcoll
/// do not know Gaudi memory; the others were not tried.
const OPTIONS: [(&str, &str); 7] = [
    ("OMPI_MCA_pml", "ucx"),
    ("OMPI_MCA_pml_ucx_tls", "any"),
    ("OMPI_MCA_pml_ucx_devices", "any"),
    ("OMPI_MCA_osc", "ucx"),
    ("OMPI_MCA_coll", "^ucc,hcoll,sm,xhc,acoll"),
    ("UCX_GAUDI_COPY_DEVICE", "local-rank"),
    // Otherwise Open MPI 5 passes our folder to PMIx, which complains about its files.
    ("PMIX_MCA_mca_base_component_path", ""),
];

/// Where Open MPI looks for components.
const COMPONENTS: &str = "OMPI_MCA_mca_base_component_path";

/// Variables that this program needs and that the user has not set.
pub(crate) fn variables(
    program: &OsStr,
    prefix: &Prefix,
) -> Result<Vec<(&'static str, OsString)>, Failure> {
    let name = Path::new(program).file_name().and_then(OsStr::to_str).unwrap_or_default();
    if !LAUNCHERS.contains(&name) || !version(program).contains(OPEN_MPI) {
        return Ok(Vec::new());
    }
    let set = OPTIONS.iter().map(|(name, value)| (*name, OsString::from(value)));
    let mut set: Vec<_> = set.filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    set.push((COMPONENTS, components(&prefix.open_mpi()?, std::env::var_os(COMPONENTS))));
    Ok(set)
}

/// Folders for components: ours after the existing ones. The user's default folder comes last, because Open MPI ignores
/// what follows a folder that does not exist.
fn components(ours: &Path, theirs: Option<OsString>) -> OsString {
    let theirs = theirs.filter(|theirs| !theirs.is_empty());
    let mut folders = theirs.clone().unwrap_or_else(|| OsString::from("SYS_DEFAULT"));
    folders.push(":");
    folders.push(ours);
    if theirs.is_none() {
        folders.push(":USER_DEFAULT");
    }
    folders
}

/// Part of the version of Open MPI's launchers.
const OPEN_MPI: &str = "(Open MPI) ";

/// The version that a launcher prints; empty if it cannot be started.
fn version(program: &OsStr) -> String {
    let output = Command::new(program).arg("--version").output();
    output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
}

/// Whether the Open MPI on `PATH` can use Gaudi memory; `None` if there is no Open MPI.
pub(crate) fn finding() -> Option<Finding> {
    judge(&version(OsStr::new("mpirun")))
}

/// Of "mpirun (Open MPI) 5.0.7".
fn judge(said: &str) -> Option<Finding> {
    let version = said.split_once(OPEN_MPI)?.1.split_whitespace().next()?;
    let major: u32 = version.split('.').next()?.parse().ok()?;
    let found = |what: &str| format!("{version}: {what}");
    Some(match major {
        5 | 6 => Finding::good(
            "open-mpi",
            found("messages, windows, collectives and reductions, by `ucx-gaudi run -- mpirun`"),
        ),
        ..5 => Finding::good(
            "open-mpi",
            found(
                "messages and windows; its collectives crash on Gaudi memory, those of Open MPI 5 do not",
            ),
        ),
        7.. => Finding::warning(
            "open-mpi",
            found("not known to ucx-gaudi: its collectives will crash on Gaudi memory"),
            "use Open MPI 5 or 6, or a later ucx-gaudi",
        ),
    })
}

/// For the crate `fuzz`.
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzz(said: &str) {
    let _ = judge(said).map(|finding| finding.found);
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_open_mpi_can_do_depends_on_its_version() {
        let text = |said| judge(said).map(|finding| serde_json::json!(finding).to_string());
        assert!(
            text("mpirun (Open MPI) 5.0.7\n\nReport bugs")
                .is_some_and(|text| text.contains("reductions"))
        );
        assert!(text("mpirun (Open MPI) 6.0.0rc2").is_some_and(|text| text.contains("reductions")));
        assert!(text("mpirun (Open MPI) 4.1.4").is_some_and(|text| text.contains("crash")));
        assert!(text("mpirun (Open MPI) 7.0.0").is_some_and(|text| text.contains("warning")));
        assert_eq!(text("HYDRA build details: Version: 4.2"), None);
    }

    #[test]
    fn only_jobs_of_open_mpi_find_the_components() {
        let root = tempfile::tempdir().expect("a folder");
        let add = |path: &str, text: &str| {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
            std::fs::write(&path, text).expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("set");
            path
        };
        add("lib/ucx-gaudi/openmpi/mca_accelerator_gaudi.so", "");
        let prefix = Prefix::at(root.path());
        let launcher = |folder: &str, says: &str| {
            let path = add(&format!("{folder}/mpirun"), &format!("#!/bin/sh\necho '{says}'\n"));
            variables(path.as_os_str(), &prefix).expect("variables")
        };
        let set = launcher("open", "mpirun (Open MPI) 5.0.7");
        assert!(set.contains(&("OMPI_MCA_pml", "ucx".into())), "{set:?}");
        assert!(set.iter().any(|(name, _)| *name == COMPONENTS), "{set:?}");
        assert_eq!(launcher("other", "HYDRA build details"), []);
        assert_eq!(variables(OsStr::new("python3"), &prefix).expect("none"), []);
    }

    #[test]
    fn folders_for_components_stay_and_ours_joins_them() {
        let list =
            |theirs: Option<&str>| components(Path::new("/ours"), theirs.map(OsString::from));
        assert_eq!(list(None), "SYS_DEFAULT:/ours:USER_DEFAULT");
        assert_eq!(list(Some("")), "SYS_DEFAULT:/ours:USER_DEFAULT");
        assert_eq!(list(Some("/theirs")), "/theirs:/ours");
    }
}
