//! The kernel's side of the driver, as far as files show: whether it is loaded, which device nodes there are, and
//! whether the library finds them. Library and kernel must match: a mismatched pair finds no card and prints nothing.

use std::path::Path;

use hl_thunk::Library;

use crate::report::Finding;

/// PCI vendor id of Habana Labs, as sysfs writes it.
const HABANA: &str = "0x1da3";

/// Whether this RDMA device is a Gaudi's own port (`hbl_N`), which registers no memory of cards for others.
pub(crate) fn is_port_of_gaudi(root: &Path, hca: &str) -> bool {
    let vendor = root.join("sys/class/infiniband").join(hca).join("device/vendor");
    std::fs::read_to_string(vendor).is_ok_and(|vendor| vendor.trim() == HABANA)
}

/// What can be seen of cards and driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Driver {
    /// `uname -r`.
    pub(crate) kernel: String,
    /// The kernel module's version; empty if it has none, `None` if the module is not loaded.
    pub(crate) module: Option<String>,
    /// Cards on the PCI bus.
    pub(crate) pci: usize,
    /// Nodes in `/dev/accel`, or else `/dev/hl*`.
    pub(crate) nodes: usize,
    /// Whether the nodes are of the DRM kind (`/dev/accel`).
    pub(crate) accel: bool,
}

impl Driver {
    /// Reads the state of the machine under this root.
    pub(crate) fn read(root: &Path) -> Self {
        let text = |path: &str| std::fs::read_to_string(root.join(path)).ok();
        let line = |path: &str| text(path).map(|text| text.trim().to_owned());
        let module = root.join("sys/module/habanalabs").is_dir();
        let vendor = |name: &str| line(&format!("sys/bus/pci/devices/{name}/vendor"));
        let pci = names(&root.join("sys/bus/pci/devices"));
        let accel = count(&root.join("dev/accel"), "accel");
        let legacy = count(&root.join("dev"), "hl");
        Self {
            kernel: kernel(),
            module: module.then(|| line("sys/module/habanalabs/version").unwrap_or_default()),
            pci: pci.iter().filter(|name| vendor(name).as_deref() == Some(HABANA)).count(),
            nodes: if accel > 0 { accel } else { legacy },
            accel: accel > 0,
        }
    }

    /// The finding without a library.
    pub(crate) fn alone(&self) -> Finding {
        let module = match self.module.as_deref() {
            None => "not loaded".to_owned(),
            Some(version) => format!("loaded {version}"),
        };
        let found = format!(
            "{} Gaudis on the PCI bus, kernel module {}, {} device nodes",
            self.pci,
            module.trim_end(),
            self.nodes
        );
        Finding::skipped("driver", found)
    }

    /// Whether driver and library match.
    pub(crate) fn judge(&self, library: &Library) -> Finding {
        let version = library.version().unwrap_or("of unknown version");
        let counted = library.device_count().map(|count| count.map_err(|error| error.to_string()));
        self.judge_counts(library.is_software(), version, counted)
    }

    fn judge_counts(
        &self,
        software: bool,
        version: &str,
        counted: Option<Result<u32, String>>,
    ) -> Finding {
        let check = "pair";
        let module = match self.module.as_deref() {
            None => "not loaded",
            Some("") => "without a version",
            Some(version) => version,
        };
        let data = serde_json::json!({
            "kernel": self.kernel, "module": self.module, "pci_cards": self.pci, "nodes": self.nodes,
            "accel_nodes": self.accel, "library": version, "software": software,
        });
        if software {
            let found = format!("software Gaudi ({version}), which needs no kernel driver");
            return Finding::good(check, found).with(data);
        }
        let finding = if self.pci == 0 && self.nodes == 0 {
            Finding::bad(
                check,
                "no Gaudi on the PCI bus and no device node",
                "is it the right machine? in a container pass /dev/accel in; without a card add --soft",
            )
        } else if self.module.is_none() && self.nodes == 0 {
            Finding::bad(
                check,
                format!(
                    "{} Gaudis on the PCI bus, but the kernel module habanalabs is not loaded",
                    self.pci
                ),
                "load it: modprobe habanalabs (package habanalabs-dkms, or the kernel's own)",
            )
        } else if self.nodes == 0 {
            Finding::bad(
                check,
                format!(
                    "the kernel module ({module}) is loaded, but there is no node in /dev/accel"
                ),
                "in a container pass /dev/accel in (--device); else look at the kernel log",
            )
        } else {
            match counted {
                Some(Ok(count)) if count as usize >= self.nodes => Finding::good(
                    check,
                    format!(
                        "kernel {}, module {module}, library {version}: {count} of {} cards found",
                        self.kernel, self.nodes
                    ),
                ),
                Some(Ok(count @ 1..)) => Finding::warning(
                    check,
                    format!("the library finds {count} of {} cards", self.nodes),
                    "look at the kernel log and hl-smi for the others",
                ),
                None => Finding::good(
                    check,
                    format!("kernel {}, module {module}, library {version}", self.kernel),
                ),
                answer => {
                    Finding::bad(check, self.mismatch(version, module, answer), self.remedy())
                }
            }
        };
        finding.with(data)
    }

    fn mismatch(&self, version: &str, module: &str, answer: Option<Result<u32, String>>) -> String {
        let answer = match answer {
            Some(Err(error)) => format!("answers {error}"),
            _ => String::from("finds none of them"),
        };
        format!(
            "there are {} nodes, but the library ({version}) {answer}: it and the kernel driver ({module}, \
             kernel {}) are not a pair",
            self.nodes, self.kernel
        )
    }

    fn remedy(&self) -> &'static str {
        if self.accel {
            "kernels from 6.8 on take other ioctls than older ones: install libhl-thunk.so and the kernel driver of \
             one release"
        } else {
            "the nodes are /dev/hl*, of an older driver: install libhl-thunk.so and the kernel driver of one release"
        }
    }
}

/// The running kernel's release.
pub(crate) fn kernel() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// Entries called `<prefix><number>`.
fn count(folder: &Path, prefix: &str) -> usize {
    let numbered = |name: &String| {
        name.strip_prefix(prefix)
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    names(folder).iter().filter(|name| numbered(name)).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Verdict;

    #[test]
    fn a_machine_is_read_from_its_files() {
        let root = std::env::temp_dir().join(format!("cli-driver-{}", std::process::id()));
        let file = |path: &str, text: &str| {
            let path = root.join(path);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("folders");
            std::fs::write(path, text).expect("a file");
        };
        assert_eq!(Driver::read(&root).nodes, 0, "nothing there");
        file("sys/bus/pci/devices/0000:33:00.0/vendor", "0x1da3\n");
        file("sys/bus/pci/devices/0000:34:00.0/vendor", "0x15b3\n");
        file("sys/module/habanalabs/version", "1.17.0\n");
        for node in ["accel/accel0", "accel/accel1", "accel/accel_controlD0", "hl0", "hl_controlD0"]
        {
            file(&format!("dev/{node}"), "");
        }
        let driver = Driver::read(&root);
        assert_eq!((driver.pci, driver.nodes, driver.accel), (1, 2, true));
        assert_eq!(driver.module.as_deref(), Some("1.17.0"));
        std::fs::remove_dir_all(root.join("dev/accel")).expect("removed");
        let driver = Driver::read(&root);
        assert_eq!((driver.nodes, driver.accel), (1, false), "an older driver's");
        std::fs::remove_dir_all(root).expect("removed");
    }

    #[test]
    fn a_gaudis_own_ports_are_no_hcas() {
        let root = tempfile::tempdir().unwrap();
        for (name, vendor) in [("hbl_0", "0x1da3\n"), ("mlx5_0", "0x15b3\n")] {
            let folder = root.path().join("sys/class/infiniband").join(name).join("device");
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("vendor"), vendor).unwrap();
        }
        let ours = ["hbl_0", "mlx5_0", "rxe0"].map(|hca| is_port_of_gaudi(root.path(), hca));
        assert_eq!(ours, [true, false, false]);
    }

    #[test]
    fn each_way_not_to_be_a_pair_is_told_apart() {
        let machine = |pci, module: Option<&str>, nodes| Driver {
            kernel: String::from("6.8.0"),
            module: module.map(str::to_owned),
            pci,
            nodes,
            accel: true,
        };
        let judge = |driver: Driver, counted: Option<Result<u32, &str>>| {
            let counted = counted.map(|count| count.map_err(str::to_owned));
            driver.judge_counts(false, "1.10.0", counted)
        };
        let cases = [
            (machine(0, None, 0), Some(Ok(0)), Verdict::Bad, "right machine"),
            (machine(8, None, 0), Some(Ok(0)), Verdict::Bad, "modprobe"),
            (machine(8, Some("1.17"), 0), Some(Ok(0)), Verdict::Bad, "--device"),
            (machine(8, Some("1.17"), 8), Some(Ok(0)), Verdict::Bad, "6.8"),
            (machine(8, Some("1.17"), 8), Some(Err("ENOTTY")), Verdict::Bad, "one release"),
            (machine(8, Some("1.17"), 8), Some(Ok(7)), Verdict::Warning, "kernel log"),
            (machine(8, Some("1.17"), 8), Some(Ok(8)), Verdict::Good, ""),
            (machine(8, Some(""), 8), None, Verdict::Good, ""),
        ];
        for (driver, counted, verdict, remedy) in cases {
            let finding = judge(driver.clone(), counted);
            assert_eq!(finding.verdict, verdict, "{driver:?} {counted:?}: {finding:?}");
            assert!(finding.remedy.contains(remedy), "{finding:?}");
        }
        let software = Driver::default().judge_counts(true, "soft-gaudi", Some(Ok(0)));
        assert_eq!(software.verdict, Verdict::Good);
    }
}
