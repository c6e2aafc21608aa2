//! NIXL's Python package, and the examples that use it: in `kv_cache.py` one process passes a KV cache in Gaudi memory
//! to another, `nixl_transfers.py` makes every kind of transfer.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use crate::{Device, Finished, Tool, Ucx, Workbench};

/// A Python that can load the package, which is built for one version of Python; or why there is none.
fn python(package: &Path) -> Result<PathBuf, String> {
    // The probe replaces numpy by an empty module: only NIXL's own part matters here.
    let probe = "import sys, types; sys.modules['numpy'] = types.ModuleType('numpy'); \
                 sys.modules['numpy'].ndarray = list; import nixl_cu12._bindings; \
                 print(sys.executable)";
    let mut reason = String::from("no Python is installed");
    for name in ["python3", "python3.11"] {
        let run = Command::new(name).args(["-c", probe]).env("PYTHONPATH", package).output();
        match run {
            Ok(output) if output.status.success() => {
                return Ok(String::from_utf8_lossy(&output.stdout).trim().into());
            }
            Ok(output) => {
                let text = String::from_utf8_lossy(&output.stderr);
                reason = text.lines().next_back().unwrap_or("it does not load").to_owned();
            }
            Err(_) => {}
        }
    }
    Err(reason)
}

/// `examples/kv_cache.py` with these arguments; `None`, with a line about it, where this machine's Python
/// cannot load NIXL.
pub fn kv_cache(device: &Device, words: &str) -> Option<Tool> {
    example("kv_cache.py", device, words)
}

/// `examples/nixl_transfers.py`, likewise.
pub fn transfers(device: &Device, words: &str) -> Option<Tool> {
    example("nixl_transfers.py", device, words)
}

/// `ucx-gaudi run` with these options and `kv_cache.py`, as users run it: with all libraries of the machine.
pub fn run_kv_cache(device: &Device, options: &str, words: &str) -> Option<Tool> {
    let bench = Workbench::from_env();
    let tool = bench.ucx_gaudi(Ucx::Nixl).device(device).env("LD_LIBRARY_PATH", "");
    started(&bench, tool.words(&format!("run -q {options} --")), "kv_cache.py", words)
}

fn example(name: &str, device: &Device, words: &str) -> Option<Tool> {
    let bench = Workbench::from_env();
    let tool = bench.program(Ucx::Nixl, "env").plugin().device(device);
    started(&bench, tool.libraries(bench.layout().soft_synapse()), name, words)
}

/// A program that runs another one, with the other's arguments.
fn started(bench: &Workbench, tool: Tool, name: &str, words: &str) -> Option<Tool> {
    let package = Ucx::Nixl.root(bench.layout());
    let python = match python(&package) {
        Ok(python) => python,
        Err(reason) => {
            println!("skipped: NIXL's package does not load: {reason}");
            return None;
        }
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples").join(name);
    let tool = tool.arg(python).arg(script).words(words).limit(Duration::from_secs(200));
    let packages =
        format!("{}:{}", package.display(), bench.layout().stock().join("numpy").display());
    let tool = tool.env("PYTHONPATH", packages).env("PYTHONDONTWRITEBYTECODE", "1");
    Some(tool.env("NIXL_LOG_LEVEL", "WARN"))
}

/// Microseconds that a block took, as the example prints them.
///
/// # Panics
/// When it prints none.
#[track_caller]
pub fn block_us(end: &Finished) -> f64 {
    let cost =
        end.stdout.split_once("bytes: ").and_then(|(_, rest)| rest.split_once(" us a block"));
    let cost = cost.and_then(|(number, _)| number.parse().ok());
    cost.unwrap_or_else(|| panic!("no cost of a block: {}", end.report()))
}
