//! CUDA memory beside Gaudi memory in one job: every operation and pair, byte by byte.
//!
//! Where there is no GPU these say so and check what is left: that the pairs without CUDA run all the same.

use std::path::Path;
use std::process::Command;

use e2e::{Device, Ucx, Workbench, client};

/// Sizes on both sides of where UCX changes protocol: short, eager, one fragment, a pipeline of them.
const WORDS: &str = "pair --plain --cuda --sizes 1,4097,65537,1M+1";

/// Runs our client, which has to succeed; says if it had no GPU.
fn run(words: &str, variables: &[(&str, &str)]) {
    for ucx in Ucx::ALL {
        let device = Device::cards(2);
        let end = client(ucx, &device, words).cuda().envs(variables).run();
        let stdout = &end.ok().stdout;
        match stdout.lines().find(|line| line.starts_with("skipped: ")) {
            Some(line) => println!("{line}"),
            None => assert!(stdout.contains("gaudi:cuda"), "{stdout}"),
        }
        assert!(stdout.contains("gaudi:gaudi") && stdout.contains(" 0 failed"), "{stdout}");
    }
}

#[test]
fn all_pairs_of_host_gaudi_and_cuda_are_byte_exact_between_two_processes() {
    run(WORDS, &[]);
}

#[test]
fn all_pairs_of_host_gaudi_and_cuda_are_byte_exact_inside_one_process() {
    run(&WORDS.replace("pair", "loopback"), &[]);
}

#[test]
fn transports_and_accelerators_of_both_can_be_named() {
    let named = [
        ("UCX_TLS", "sysv,cma,cuda_copy,cuda_ipc,gaudi_cpy"),
        ("UCX_ACC_DEVICES", "cuda,gaudi_copy"),
    ];
    run(WORDS, &named);
}

/// A folder with a CUDA driver without devices, so that UCX loads its CUDA module and `ucx_info` shows its variables.
fn driver_without_devices() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let compiled = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .arg(folder.path().join(name))
            .arg(format!("-Wl,-soname,{name}"))
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cuda/driver.c"))
            .output()
            .expect("a C compiler");
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }
    folder
}

/// The value that `ucx_info -c` shows of a variable, with these variables set.
fn shown(name: &str, device: &Device, driver: &Path, variables: &[(&str, &str)]) -> String {
    let bench = Workbench::from_env();
    let tool = bench.tool(Ucx::V1_22, "ucx_info").plugin().device(device).libraries(driver);
    let end = tool.envs(variables).arg("-c").run().ok();
    let value = end.stdout.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    value.unwrap_or_else(|| panic!("{}", end.report())).to_owned()
}

/// With its own figure UCX stages messages from Gaudi memory in CUDA memory, which is slow or hangs: see docs/cuda.md.
#[test]
fn copies_that_cuda_cannot_do_are_reckoned_slow_beside_a_gaudi_unless_the_user_says_otherwise() {
    const NAME: &str = "UCX_CUDA_COPY_BW";
    let (gaudi, driver) = (Device::software(), driver_without_devices());
    let driver = driver.path();
    let with = |variables: &[(&str, &str)]| shown(NAME, &gaudi, driver, variables);
    let own = shown(NAME, &gaudi, driver, &[("UCX_MODULES", "^gaudi")]);
    assert!(own.contains("default:10000.00MBps"), "UCX's own default: {own}");
    // Only the default figure differs.
    let ours = own.replace("default:10000.00", "default:4000.00");
    assert_eq!(with(&[]), ours);
    let theirs = "h2d:3.00GBps,d2h:3.00GBps,d2d:3.00GBps,default:3.00GBps";
    assert_eq!(with(&[(NAME, "3GBs")]).replace("3072.00MBps", "3.00GBps"), theirs);
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("ucx.conf"), format!("{NAME}=3GBs\n")).expect("written");
    let file = folder.path().display().to_string();
    let from_file = with(&[("UCX_CONFIG_DIR", &file)]).replace("3072.00MBps", "3.00GBps");
    assert_eq!(from_file, theirs, "the user's file");
    let fragments = shown("UCX_RNDV_FRAG_MEM_TYPES", &gaudi, driver, &[]);
    assert_eq!(fragments, "host,cuda", "as UCX has it");
    if Path::new("/sys/bus/pci/drivers/habanalabs").exists() {
        println!("skipped: the half without a Gaudi, because the driver is loaded here");
        return;
    }
    assert_eq!(shown(NAME, &Device::None, driver, &[]), own);
}

/// UCX warns of variables in the environment that nobody reads. A process without CUDA has such a one by our default.
#[test]
fn the_default_for_cuda_causes_no_warning_where_there_is_no_cuda() {
    for ucx in Ucx::ALL {
        let end = client(
            ucx,
            &Device::software(),
            "loopback --plain --mem host:gaudi --ops tag --sizes 1",
        )
        .run();
        let end = end.ok();
        assert!(!end.report().contains("unused"), "{}", end.report());
    }
}
