//! The machine and the environment: kernel, nodes, HCAs, limits, variables.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use gaudi::{DeviceInfo, Generation, Sysfs};
use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};
use serde_json::json;

use crate::driver;
use crate::output::size;
use crate::report::Finding;
use crate::run::is_fence_chosen;
use crate::scale_out::{Hcas, Network, Nic};
use crate::verbs::Verbs;

/// Enough descriptors for a job: UCX opens tens, and each peer of `gaudi_ipc` needs some.
const DESCRIPTORS: u64 = 1024;
/// Registration of host memory by an HCA counts against the limit.
const LOCKED: u64 = 64 << 20;

/// The kernel, and which dma-buf features it may have.
pub(super) fn kernel() -> Finding {
    let release = driver::kernel();
    let data = json!({ "release": release });
    let number = |text: Option<&str>| text.and_then(|text| text.parse::<u32>().ok());
    let mut parts = release.split(['.', '-']);
    let version = (number(parts.next()).unwrap_or(0), number(parts.next()).unwrap_or(0));
    if version < (5, 12) {
        let found = format!("{release}: HCAs cannot register dma-bufs before 5.12");
        let remedy =
            "messages between hosts are staged through host memory; a later kernel avoids it";
        return Finding::warning("kernel", found, remedy).with(data);
    }
    Finding::good("kernel", release).with(data)
}

/// Variables that choose cards, driver or transports.
pub(super) fn settings(soft: bool) -> Finding {
    let names =
        ["HL_THUNK_LIBRARY", "GAUDI_MAPPING_TABLE", "HABANA_VISIBLE_MODULES", "HLS_MODULE_ID"];
    let ucx = ["UCX_TLS", "UCX_MODULES", "UCX_PLUGIN_PATH", "UCX_NET_DEVICES"];
    // --soft sets the first one itself.
    let names = &names[usize::from(soft)..];
    let set = |name: &&str| Some(((*name).to_owned(), std::env::var(name).ok()?));
    let set: Vec<(String, String)> = names.iter().chain(&ucx).filter_map(set).collect();
    let value = |name: &str| set.iter().find(|(set, _)| set == name).map(|(_, value)| &**value);
    let words: Vec<String> = set.iter().map(|(name, value)| format!("{name}={value}")).collect();
    let shown = if words.is_empty() {
        "no variable restricts cards or transports".to_owned()
    } else {
        words.join(" ")
    };
    let finding = match (value("UCX_TLS"), value("UCX_MODULES")) {
        (Some(tls), _) if excludes_gaudi(tls) => Finding::warning(
            "settings",
            format!("{shown}: UCX_TLS leaves out all Gaudi transports"),
            "add gaudi_cpy (copies) and gaudi_ipc (between processes) to UCX_TLS",
        ),
        (_, Some(modules)) if excludes_gaudi(modules) => Finding::warning(
            "settings",
            format!("{shown}: UCX_MODULES leaves out the plugin"),
            "add gaudi to UCX_MODULES, or unset it",
        ),
        _ => match value("UCX_PLUGIN_PATH").and_then(missing_plugin) {
            Some(missing) => Finding::warning(
                "settings",
                format!("{shown}: {missing}"),
                "`ucx-gaudi run -q -- printenv UCX_PLUGIN_PATH` prints the right one",
            ),
            None => Finding::good("settings", shown),
        },
    };
    finding.with(set.iter().map(|(name, value)| (name.clone(), json!(value))).collect())
}

/// What UCX will not find in its list of folders for plugins. UCX looks for the suffix of its own libucs, and prints
/// nothing if there is no such file.
fn missing_plugin(folders: &str) -> Option<String> {
    const SUFFIXES: [&str; 3] = [".so", ".so.0", ".so.0.0.0"];
    let names = SUFFIXES.map(|suffix| format!("libuct_gaudi{suffix}"));
    let readable = |name: &&String| {
        std::env::split_paths(folders).any(|folder| std::fs::File::open(folder.join(name)).is_ok())
    };
    let found = names.iter().filter(readable).count();
    let missing: Vec<&str> =
        names.iter().filter(|name| !readable(name)).map(String::as_str).collect();
    match (found, &*missing) {
        (0, _) => Some(String::from("there is no libuct_gaudi that this user may read")),
        (_, []) => None,
        (_, missing) => Some(format!("there is no {}", missing.join(", no "))),
    }
}

/// Whether a list of UCX, `a,b` or `^a,b`, excludes Gaudi.
fn excludes_gaudi(list: &str) -> bool {
    let (negated, names) = match list.trim().strip_prefix('^') {
        Some(names) => (true, names),
        None => (false, list),
    };
    let names: Vec<&str> =
        names.split(',').map(|name| name.trim().trim_start_matches('\\')).collect();
    let named = |wanted: &str| names.contains(&wanted);
    if negated {
        named("gaudi") && !named("gaudi_cpy") && names.len() == 1
            || named("gaudi_cpy") && (named("gaudi_gdr") || named("gaudi"))
    } else {
        !names.iter().any(|name| name.starts_with("gaudi") || *name == "all")
    }
}

/// Whether this user may open the cards' device nodes.
pub(super) fn permissions(cards: &[DeviceInfo]) -> Vec<Finding> {
    let real: Vec<&DeviceInfo> = cards.iter().filter(|card| !card.is_software).collect();
    if real.is_empty() {
        return Vec::new();
    }
    let node = |card: &DeviceInfo| {
        let paths = [format!("/dev/accel/accel{}", card.node), format!("/dev/hl{}", card.node)];
        paths.into_iter().find(|path| Path::new(path).exists())
    };
    let nodes: Vec<String> = real.iter().filter_map(|card| node(card)).collect();
    let refused =
        |path: &&String| access(path.as_str(), Access::READ_OK | Access::WRITE_OK).is_err();
    let refused: Vec<&String> = nodes.iter().filter(refused).collect();
    let Some(first) = refused.first() else {
        return vec![Finding::good("permissions", format!("{} nodes may be opened", nodes.len()))];
    };
    let group = std::fs::metadata(first).map(|meta| (meta.gid(), meta.mode() & 0o777));
    let (gid, mode) = group.unwrap_or_default();
    vec![Finding::bad(
        "permissions",
        format!(
            "{first} may not be opened (group id {gid}, mode {mode:o}), nor {} others",
            refused.len() - 1
        ),
        "add this user to that group and log in again, or ask for a udev rule",
    )]
}

/// Whether a Gaudi3 may acknowledge an HCA's writes before its engines see them, as far as can be detected.
pub(super) fn early_writes(sysfs: &Sysfs, cards: &[DeviceInfo]) -> Option<Finding> {
    let card = cards.iter().find(|card| card.generation == Generation::Gaudi3)?;
    let parameter =
        sysfs.module_parameter("habanalabs", "ewr_enable").filter(|_| !card.is_software);
    let whether = match parameter.as_deref() {
        Some("0" | "N") => "off (ewr_enable=0 of the kernel module)",
        Some(_) => "on where the firmware has it (ewr_enable of the kernel module)",
        None if card.is_software => "on, unless SOFT_GAUDI_EARLY_WRITES=no",
        None => "perhaps on: the kernel module shows no ewr_enable",
    };
    let found = format!(
        "early write response of the {} is {whether}; before a kernel of yours reads what an HCA wrote, call \
         ucx_gaudi_flush_peer_writes() (share/doc/ucx-gaudi/docs/rdma.md)",
        card.generation
    );
    Some(Finding::good("early-writes", found).with(json!({ "ewr_enable": parameter })))
}

/// The HCAs, and whether they can register dma-bufs.
pub(super) fn hcas() -> Vec<Finding> {
    let nics: Vec<Nic> = Network::read(&Sysfs::default()).nics;
    let own = |nic: &&Nic| nic.location.as_ref().is_some_and(|place| place.is_gaudi());
    let (own, nics): (Vec<&Nic>, Vec<&Nic>) = nics.iter().partition(own);
    if nics.is_empty() {
        let found = format!(
            "no HCA in this machine (the cards show {} RDMA devices of their own)",
            own.len()
        );
        return vec![Finding::good("hca", found)];
    }
    let active: Vec<&str> =
        nics.iter().filter(|nic| nic.is_active()).map(|nic| &*nic.name).collect();
    let data =
        json!({"hcas": nics.iter().map(|nic| &*nic.name).collect::<Vec<_>>(), "active": active});
    let nodes = std::fs::read_dir("/dev/infiniband").is_ok();
    let finding = if active.is_empty() {
        Finding::warning(
            "hca",
            format!("{} HCAs, no port is active", nics.len()),
            "check cables and subnet manager: ibv_devinfo",
        )
    } else if !nodes {
        let found = format!("{} are active, but /dev/infiniband is not there", active.join(", "));
        Finding::warning("hca", found, "in a container pass /dev/infiniband in")
    } else {
        Finding::good("hca", format!("active: {}", active.join(", ")))
    };
    let fences = fences(Hcas::read(&Sysfs::default()), is_fence_chosen());
    [finding.with(data), verbs_library()].into_iter().chain(fences).collect()
}

/// If UCX uses an HCA by `rc_verbs`, a fence after a put breaks the connection (docs/upstream/ucx-remote-flush.md).
fn fences(hcas: Hcas, chosen: bool) -> Option<Finding> {
    (hcas.others && !chosen).then(|| {
        Finding::warning(
            "fences",
            "an HCA is no mlx5 device: after a put or get, ucp_worker_fence (shmem_fence, ucx_perftest) ends its \
             connection with \"Work Request Flushed Error\"",
            "set UCX_FENCE_MODE=ep_based, as `ucx-gaudi run` does (share/doc/ucx-gaudi/docs/rdma.md)",
        )
    })
}

/// Whether libibverbs has the call that registers dma-bufs.
fn verbs_library() -> Finding {
    match Verbs::load() {
        None => Finding::warning(
            "verbs",
            "libibverbs.so.1 is not there: UCX cannot use the HCAs",
            "install rdma-core (libibverbs1, ibverbs-providers), or use a UCX that brings its own",
        ),
        Some(verbs) if verbs.knows_dmabufs() => {
            Finding::good("verbs", "libibverbs can register dma-bufs (check-card tries it)")
        }
        Some(_) => Finding::warning(
            "verbs",
            "libibverbs is older than dma-bufs",
            "install rdma-core 34 or later; until then messages are staged through host memory",
        ),
    }
}

/// Limits of this process, which its children inherit.
pub(super) fn limits(has_hca: bool) -> Finding {
    let limit = |resource| getrlimit(resource).current.unwrap_or(u64::MAX);
    let (files, locked) = (limit(Resource::Nofile), limit(Resource::Memlock));
    let shared = rustix::fs::statvfs("/dev/shm").ok().map(|stat| stat.f_bavail * stat.f_frsize);
    let data = json!({"descriptors": files, "locked_bytes": locked, "dev_shm_free": shared});
    let shown = |bytes: u64| if bytes == u64::MAX { "unlimited".to_owned() } else { size(bytes) };
    let words = format!(
        "{files} descriptors, {} of locked memory, {} free in /dev/shm",
        shown(locked),
        shared.map_or_else(|| "nothing".to_owned(), size)
    );
    let finding = if files < DESCRIPTORS {
        Finding::warning(
            "limits",
            words,
            format!("raise the limit of descriptors: ulimit -n {DESCRIPTORS}"),
        )
    } else if has_hca && locked < LOCKED {
        Finding::warning(
            "limits",
            words,
            "HCAs pin memory: raise the limit with `ulimit -l unlimited`, or in /etc/security/limits.conf",
        )
    } else if shared.is_some_and(|free| free < 64 << 20) {
        Finding::warning(
            "limits",
            words,
            "free space in /dev/shm: UCX exchanges messages through it",
        )
    } else {
        Finding::good("limits", words)
    };
    finding.with(data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gaudi::PortMasks;

    #[test]
    fn early_write_response_is_what_the_module_says_of_a_gaudi3_and_nothing_of_others() {
        let root = std::env::temp_dir().join(format!("doctor-ewr-{}", std::process::id()));
        let parameters = root.join("module/habanalabs/parameters");
        std::fs::create_dir_all(&parameters).unwrap();
        let sysfs = Sysfs::at(&root);
        let card = |generation, is_software| DeviceInfo {
            index: 0,
            node: 0,
            module_id: 0,
            bus_id: "0000:33:00.0".parse().unwrap(),
            generation,
            ports: PortMasks::default(),
            card_name: String::new(),
            driver_version: String::new(),
            is_software,
        };
        let said = |generation, is_software| {
            early_writes(&sysfs, &[card(generation, is_software)]).map(|finding| finding.found)
        };
        assert_eq!(said(Generation::Gaudi2, false), None);
        for (value, words) in [("", "perhaps on"), ("0\n", "off"), ("1\n", "on where")] {
            std::fs::write(parameters.join("ewr_enable"), value).unwrap();
            let found = said(Generation::Gaudi3, false).unwrap();
            assert!(found.contains(words) && found.contains("flush_peer_writes"), "{found}");
        }
        assert!(said(Generation::Gaudi3, true).unwrap().contains("SOFT_GAUDI_EARLY_WRITES"));
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn fences_are_warned_of_where_rc_verbs_drives_an_hca() {
        let hcas = |mlx5, others| Hcas { mlx5, others, efa: false };
        let warned = |hcas, chosen| fences(hcas, chosen).is_some();
        assert!(warned(hcas(false, true), false) && warned(hcas(true, true), false));
        assert!(!warned(hcas(true, false), false) && !warned(hcas(true, true), true));
    }

    #[test]
    fn lists_of_transports_are_read_as_ucx_reads_them() {
        for list in ["sm,self", "rc,ud", "^gaudi_cpy,gaudi_gdr", "tcp", "^gaudi"] {
            assert!(excludes_gaudi(list), "{list}");
        }
        for list in ["all", "sm,gaudi", "gaudi_cpy,tcp", "^tcp", "^gaudi_ipc", "tcp, gaudi_ipc"] {
            assert!(!excludes_gaudi(list), "{list}");
        }
    }
}
