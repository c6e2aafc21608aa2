//! Which copies of UCX there are, how each gets the plugin, and whether it works.

use std::collections::BTreeSet;
use std::ffi::{CStr, OsString, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_NOW};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::probe::{NoAnswer, Probe, in_child};
use crate::report::{Finding, Verdict};

/// How a UCX gets the plugin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Way {
    /// UCX looks for plugins itself.
    PluginPath,
    /// UCX does not, and needs our preloaded library.
    Preload,
    /// Not at all: this UCX does not know Gaudi memory.
    #[default]
    Refused,
}

/// The variables that make programs load the plugin: `run` sets them.
type Variables = [(&'static str, OsString)];

/// What a UCX reports about itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Loaded {
    /// Why it could not be loaded.
    error: Option<String>,
    version: (u32, u32, u32),
    way: Way,
    /// Its file, with links resolved.
    libucp: Option<PathBuf>,
    /// Where its libucs was loaded from.
    libucs: Option<PathBuf>,
    /// Its components, and how many memory domains each has.
    components: Vec<(String, u32)>,
    /// Number of copies of libnl in a process with it: two of them crash at exit.
    libnl: usize,
}

/// In the child: loads a UCX, and the plugin with it.
pub(super) fn load(libucp: &Path) -> Loaded {
    match try_load(libucp) {
        Ok(loaded) => loaded,
        Err(error) => Loaded { error: Some(error), ..Loaded::default() },
    }
}

fn try_load(libucp: &Path) -> Result<Loaded, String> {
    let reason = |error: libloading::Error| {
        use std::error::Error as _;
        error.source().map_or_else(|| error.to_string(), ToString::to_string)
    };
    // SAFETY: runs initialisers of a UCX that the user installed; this process exists for that.
    let library = unsafe { Library::open(Some(libucp), RTLD_NOW | RTLD_GLOBAL) }.map_err(reason)?;
    // It stays loaded: the process ends without destructors.
    let library = std::mem::ManuallyDrop::new(library);
    type GetVersion = unsafe extern "C" fn(*mut c_uint, *mut c_uint, *mut c_uint);
    // SAFETY: the signature in ucp.h, the same in all versions.
    let get_version = unsafe { library.get::<GetVersion>("ucp_get_version") }.map_err(reason)?;
    let mut version = (0, 0, 0);
    // SAFETY: three valid pointers for results.
    unsafe { get_version(&mut version.0, &mut version.1, &mut version.2) };
    let mut loaded = Loaded {
        version,
        way: way(&library),
        libucp: path_of(&library, "ucp_get_version").and_then(|path| path.canonicalize().ok()),
        libucs: path_of(&library, "ucs_status_string"),
        ..Loaded::default()
    };
    if loaded.way != Way::Refused {
        loaded.components = components(&library).map_err(reason)?;
    }
    loaded.libnl =
        copies_of("/libnl-3", &std::fs::read_to_string("/proc/self/maps").unwrap_or_default());
    Ok(loaded)
}

/// How many libraries with this word in their path a process has mapped.
fn copies_of(word: &str, maps: &str) -> usize {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    paths.filter(|path| path.contains(word)).collect::<BTreeSet<_>>().len()
}

/// It does not use the version: snapshots of 1.21 and 1.22 report the same one.
fn way(library: &Library) -> Way {
    type HasField = unsafe extern "C" fn(*const c_char) -> c_int;
    // SAFETY: the signature in ucs/config/parser.h.
    let has_field = unsafe { library.get::<HasField>("ucs_config_global_list_has_field") };
    // SAFETY: a C string.
    if has_field.is_ok_and(|has_field| unsafe { has_field(c"PLUGIN_PATH".as_ptr()) } != 0) {
        return Way::PluginPath;
    }
    // SAFETY: an array of C strings; the last one is for memory of unknown type.
    let names = unsafe { library.get::<*const *const c_char>("ucs_memory_type_names") };
    let Ok(names) = names else { return Way::Refused };
    let mut name = names.into_raw().cast_const().cast::<*const c_char>();
    loop {
        // SAFETY: the loop does not pass the last one.
        let text = unsafe { (*name).as_ref().map(|text| CStr::from_ptr(text)) };
        match text.map(CStr::to_bytes) {
            Some(b"gaudi") => return Way::Preload,
            None | Some(b"unknown") => return Way::Refused,
            // SAFETY: this was not the last one, so there is a next one.
            Some(_) => name = unsafe { name.add(1) },
        }
    }
}

/// The file that contains a function, according to the loader: UCX looks for plugins with the suffix of its libucs.
fn path_of(library: &Library, function: &str) -> Option<PathBuf> {
    // SAFETY: only the address is taken.
    let symbol = unsafe { library.get::<*const c_void>(function) }.ok()?;
    // SAFETY: only pointers, so all zeroes is a valid value.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: an address inside a loaded library, and a valid pointer for the result.
    let found = unsafe { libc::dladdr(symbol.into_raw().cast_const(), &mut info) } != 0;
    if !found || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's own string, terminated.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(PathBuf::from(name.to_string_lossy().into_owned()))
}

/// `uct_component_attr_t` as far as we ask for it, and space for fields of later versions.
#[repr(C)]
struct ComponentAttr {
    field_mask: u64,
    name: [c_char; 16],
    md_resource_count: c_uint,
    room: [u64; 32],
}

fn components(library: &Library) -> Result<Vec<(String, u32)>, libloading::Error> {
    type Query = unsafe extern "C" fn(*mut *mut *mut c_void, *mut c_uint) -> i8;
    type Describe = unsafe extern "C" fn(*mut c_void, *mut ComponentAttr) -> i8;
    // SAFETY: the signatures in uct.h. A status is an 8-bit number.
    let (query, describe) = unsafe {
        (
            library.get::<Query>("uct_query_components")?,
            library.get::<Describe>("uct_component_query")?,
        )
    };
    let (mut list, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: two valid pointers for results.
    if unsafe { query(&mut list, &mut count) } != 0 || list.is_null() {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for at in 0..count as usize {
        const NAME_AND_COUNT: u64 = 3;
        let mut attr = ComponentAttr {
            field_mask: NAME_AND_COUNT,
            name: [0; 16],
            md_resource_count: 0,
            room: [0; 32],
        };
        // SAFETY: inside the list, whose length UCX returned.
        let component = unsafe { *list.add(at) };
        // SAFETY: a component of the list, and a structure larger than UCX's.
        if unsafe { describe(component, &mut attr) } != 0 {
            continue;
        }
        // A name may fill its field without a terminator.
        let name: Vec<u8> =
            attr.name.iter().map(|&byte| byte as u8).take_while(|&byte| byte != 0).collect();
        found.push((String::from_utf8_lossy(&name).into_owned(), attr.md_resource_count));
    }
    Ok(found)
}

/// One finding for each UCX, and one about which of them programs get.
pub(super) fn check(extra: &[PathBuf], variables: &Variables) -> Vec<Finding> {
    let copies = find(&folders(extra));
    if copies.is_empty() {
        return vec![Finding::bad(
            "ucx",
            "no libucp.so found on the loader path and in the usual places",
            format!("{INSTALL}, or name its folder with --ucx DIR"),
        )];
    }
    let mut findings: Vec<Finding> = copies.iter().map(|copy| check_one(copy, variables)).collect();
    let good = |finding: &Finding| finding.verdict == Verdict::Good;
    if findings.iter().any(good) {
        // The loader finds a library by its name; Python packages have copies under other names.
        let folders = copies.iter().zip(&findings).filter(|(_, finding)| good(finding));
        let mut folders = folders.filter_map(|(copy, _)| copy.parent());
        let named = folders.find(|folder| folder.join("libucp.so.0").exists());
        let loader = judge_loader(on_loader_path().as_ref(), named);
        for finding in &mut findings {
            // An old UCX next to a good one is harmless.
            if finding.verdict == Verdict::Bad {
                finding.verdict = Verdict::Warning;
            }
        }
        findings.push(loader);
    }
    findings
}

/// How to get a UCX.
const INSTALL: &str = "install UCX 1.21 or later (pip install libucx-cu12)";

/// The UCX that programs without their own get.
fn on_loader_path() -> Option<Loaded> {
    let probe = Probe::Ucx { libucp: PathBuf::from("libucp.so.0") };
    let variables = [("UCX_LOG_LEVEL", "fatal".as_ref())];
    in_child::<Loaded>(&probe, &variables).ok().filter(|loaded| loaded.error.is_none())
}

/// Whether programs get a UCX that can load the plugin; `good` is a folder with one.
fn judge_loader(loaded: Option<&Loaded>, good: Option<&Path>) -> Finding {
    let found = match loaded {
        None => String::from("programs that bring no UCX of their own find none"),
        Some(loaded) => {
            format!("programs that bring no UCX of their own get {}", loaded.words())
        }
    };
    if loaded.is_some_and(Loaded::is_usable) {
        return Finding::good("loader", found);
    }
    let export = |good: &Path| {
        format!("export LD_LIBRARY_PATH={}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}", good.display())
    };
    let remedy = good.map_or(format!("for such programs {INSTALL}"), export);
    Finding::warning("loader", found, remedy)
}

impl Loaded {
    fn words(&self) -> String {
        let (major, minor, patch) = self.version;
        let place = self.libucp.as_deref().unwrap_or(Path::new("a place unknown"));
        format!("UCX {major}.{minor}.{patch} ({})", place.display())
    }

    /// Whether the plugin works with it.
    fn is_usable(&self) -> bool {
        self.error.is_none() && self.way != Way::Refused
    }
}

/// The folder of a UCX that can load the plugin, if the one on the loader path cannot (distributions have old ones),
/// and a sentence that says so.
pub(crate) fn instead_of_loader_path(variables: &Variables) -> Option<(PathBuf, String)> {
    let first = on_loader_path();
    if first.as_ref().is_some_and(Loaded::is_usable) {
        return None;
    }
    let copies = find(&folders(&[]));
    let (libucp, loaded) = copies
        .iter()
        .filter_map(|libucp| Some((libucp, load_alone(libucp, variables).ok()?)))
        .find(|(_, loaded)| loaded.is_usable())?;
    let why = first.map_or(String::from("there is no UCX on the loader path"), |first| {
        format!("{} on the loader path is too old", first.words())
    });
    Some((libucp.parent()?.to_owned(), format!("{why}: taking {}", loaded.words())))
}

/// What is wrong with the UCX of `--ucx`, or on the loader path, and what to do.
pub(crate) fn advice(ucx: Option<&Path>, variables: &Variables) -> (String, String) {
    let probed = |libucp: &PathBuf| in_child::<Loaded>(&Probe::Ucx { libucp: libucp.clone() }, &[]);
    let loaded = match ucx {
        None => on_loader_path(),
        Some(ucx) => find(&below(ucx)).iter().find_map(|libucp| probed(libucp).ok()),
    };
    let place =
        ucx.map_or(String::from("on the loader path"), |ucx| format!("in {}", ucx.display()));
    let found = match &loaded {
        None => format!("there is no UCX {place}"),
        Some(Loaded { error: Some(error), .. }) => {
            format!("the UCX {place} cannot be loaded: {error}")
        }
        Some(loaded) => {
            format!("it needs UCX 1.21 or later, and {place} is {}", loaded.words())
        }
    };
    let usable =
        |libucp: &&PathBuf| load_alone(libucp, variables).is_ok_and(|loaded| loaded.is_usable());
    let copies = find(&folders(&[]));
    let remedy = match copies.iter().find(usable).and_then(|libucp| libucp.parent()) {
        Some(folder) => format!("add --ucx {}", folder.display()),
        None => format!("{INSTALL}, and name its folder with --ucx DIR"),
    };
    (found, remedy)
}

fn check_one(libucp: &Path, variables: &Variables) -> Finding {
    judge(libucp, load_alone(libucp, variables))
}

fn load_alone(libucp: &Path, variables: &Variables) -> Result<Loaded, NoAnswer> {
    // Its own libucs and libuct must be found first, not those of another UCX on the loader path.
    let beside = libucp.parent().map(Path::to_owned);
    let others = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let others = std::env::split_paths(&others).filter(|path| !path.as_os_str().is_empty());
    let libraries = std::env::join_paths(beside.into_iter().chain(others)).unwrap_or_default();
    let mut all = vec![
        ("LD_LIBRARY_PATH", libraries.as_os_str()),
        ("UCX_LOG_LEVEL", "warn".as_ref()),
        ("UCX_WARN_UNUSED_ENV_VARS", "n".as_ref()),
    ];
    // Without the variable by which `run` excludes a module: other programs would load it.
    let of_others = variables.iter().filter(|(name, _)| *name != crate::run::MODULES);
    all.extend(of_others.map(|(name, value)| (*name, value.as_os_str())));
    in_child(&Probe::Ucx { libucp: libucp.to_owned() }, &all)
}

fn judge(libucp: &Path, loaded: Result<Loaded, NoAnswer>) -> Finding {
    let shown = libucp.display();
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(NoAnswer { how }) => {
            let remedy =
                "try `ucx-gaudi run -- ucx_info -d` with this UCX, and report what it prints";
            return Finding::bad("ucx", format!("{shown}: {how}"), remedy);
        }
    };
    if let Some(error) = &loaded.error {
        let remedy = "install what is missing, or put its folder on LD_LIBRARY_PATH";
        return Finding::warning("ucx", format!("{shown} cannot be loaded: {error}"), remedy);
    }
    let (major, minor, patch) = loaded.version;
    let folder = loaded.libucs.as_deref().and_then(Path::parent).map(|folder| folder.join("ucx"));
    let verbs = folder.as_deref().is_some_and(|folder| {
        names(folder)
            .iter()
            .any(|name| name.starts_with("libuct_ib.") || name.starts_with("libuct_ib-"))
    });
    let suffix = loaded.libucs.as_deref().and_then(suffix);
    let gaudi: Vec<&(String, u32)> =
        loaded.components.iter().filter(|(name, _)| name.starts_with("gaudi")).collect();
    let data = json!({
        "version": format!("{major}.{minor}.{patch}"), "suffix": suffix, "verbs": verbs,
        "own_modules": folder, "way": loaded.way, "copies_of_libnl": loaded.libnl,
        "gaudi_components": gaudi,
    });
    let what = format!(
        "{major}.{minor}.{patch}{} at {shown}, {}",
        owner(libucp),
        if verbs { "with InfiniBand" } else { "without InfiniBand" }
    );
    let by = if loaded.way == Way::Preload { "LD_PRELOAD" } else { "UCX_PLUGIN_PATH" };
    let domains: u32 = gaudi.iter().map(|(_, domains)| domains).sum();
    let finding = if loaded.way == Way::Refused {
        Finding::bad(
            "ucx",
            format!("{what}: does not know Gaudi memory"),
            "use UCX 1.21 or later, first on LD_LIBRARY_PATH (programs built for older ones run on it, except \
             UCX's own ucx_info and ucx_perftest)",
        )
    } else if gaudi.is_empty() && loaded.way == Way::Preload {
        Finding::bad(
            "ucx",
            format!("{what}: has no UCX_PLUGIN_PATH, and does not load the plugin by {by} either"),
            "is ucx-gaudi installed under a path without blanks? UCX_LOG_LEVEL=info may say more",
        )
    } else if gaudi.is_empty() {
        Finding::bad(
            "ucx",
            format!("{what}: does not load the plugin"),
            format!(
                "is there a file libuct_gaudi{} in the plugin's folder? UCX_MODULE_LOG_LEVEL=warn shows what it does",
                suffix.as_deref().unwrap_or(".so.0")
            ),
        )
    } else if domains == 0 {
        Finding::warning(
            "ucx",
            format!("{what}: loads the plugin by {by}, which offers no Gaudi"),
            "see the findings on library and cards; UCX_LOG_LEVEL=info makes the plugin say why",
        )
    } else if loaded.libnl > 1 {
        Finding::warning(
            "ucx",
            format!(
                "{what}: loads the plugin by {by} and lists Gaudis; its module for EFA brings the machine's \
                 rdma-core next to its own, and every process with it dies of signal 11 at exit"
            ),
            format!(
                "`ucx-gaudi run` keeps that module out; without it export {}={}",
                crate::run::MODULES,
                crate::run::NO_EFA
            ),
        )
    } else {
        Finding::good("ucx", format!("{what}: loads the plugin by {by} and lists Gaudis"))
    };
    finding.with(data)
}

/// The Python package that a UCX belongs to, in words.
fn owner(libucp: &Path) -> &'static str {
    let folder = libucp.parent().unwrap_or(libucp);
    let name = folder.file_name().unwrap_or_default().to_string_lossy();
    if name.trim_start_matches('.').starts_with("nixl") {
        return " inside NIXL";
    }
    let site = folder.ends_with("libucx/lib").then(|| folder.ancestors().nth(2)).flatten();
    if site.is_some_and(|site| site.join("ucxx").is_dir()) { " of UCXX" } else { "" }
}

/// The part after a library's name: `.so.0` in `libucs.so.0`.
fn suffix(libucs: &Path) -> Option<String> {
    let name = libucs.file_name()?.to_str()?;
    name.find(".so").map(|at| name[at..].to_owned())
}

/// Where libraries may be in a folder that the user named.
fn below(folder: &Path) -> [PathBuf; 4] {
    ["", "lib", "lib64", "libucx/lib"].map(|below| folder.join(below))
}

/// Where a UCX may be.
fn folders(extra: &[PathBuf]) -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = extra.iter().flat_map(|folder| below(folder)).collect();
    folders.extend(paths("LD_LIBRARY_PATH"));
    // A ucx_info on PATH has its libraries in the next folder.
    let with_info = paths("PATH").into_iter().filter(|path| path.join("ucx_info").exists());
    folders.extend(with_info.map(|path| path.join("../lib")));
    folders.extend(loader_folders());
    let fixed = ["/lib", "/usr/lib", "/usr/lib64", "/usr/lib/x86_64-linux-gnu", "/usr/local/lib"];
    folders.extend(fixed.map(PathBuf::from));
    for product in children(Path::new("/opt")) {
        folders.extend(["lib", "lib64", "ucx/lib"].map(|below| product.join(below)));
    }
    for site in python_packages() {
        folders.push(site.join("libucx/lib"));
        let bundled = |path: &PathBuf| path.extension().is_some_and(|kind| kind == "libs");
        folders.extend(children(&site).into_iter().filter(bundled));
    }
    folders
}

/// Where Python packages may be installed: NIXL's contains a UCX, UCXX's depends on one.
fn python_packages() -> Vec<PathBuf> {
    let mut roots = vec![PathBuf::from("/usr"), PathBuf::from("/usr/local")];
    roots.extend(
        ["VIRTUAL_ENV", "CONDA_PREFIX"].iter().filter_map(std::env::var_os).map(PathBuf::from),
    );
    roots.extend(std::env::home_dir().map(|home| home.join(".local")));
    // A Python on PATH has packages in its own prefix.
    let with_python = paths("PATH").into_iter().filter(|path| path.join("python3").exists());
    roots.extend(with_python.filter_map(|path| Some(path.parent()?.to_owned())));
    let pythons = roots.iter().flat_map(|root| children(&root.join("lib"))).filter(|path| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
    });
    let mut sites = paths("PYTHONPATH");
    sites.extend(
        pythons.flat_map(|python| ["site-packages", "dist-packages"].map(|kind| python.join(kind))),
    );
    sites
}

/// The folders in a variable.
fn paths(name: &str) -> Vec<PathBuf> {
    let value = std::env::var_os(name).unwrap_or_default();
    std::env::split_paths(&value).filter(|path| path.is_absolute()).collect()
}

/// Folders in the loader's configuration.
fn loader_folders() -> Vec<PathBuf> {
    let mut files = vec![PathBuf::from("/etc/ld.so.conf")];
    files.extend(children(Path::new("/etc/ld.so.conf.d")));
    let texts = files.iter().filter_map(|file| std::fs::read_to_string(file).ok());
    let lines = texts.flat_map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>());
    lines.map(|line| PathBuf::from(line.trim())).filter(|path| path.is_absolute()).collect()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

fn names(folder: &Path) -> Vec<String> {
    let name = |path: &PathBuf| Some(path.file_name()?.to_string_lossy().into_owned());
    children(folder).iter().filter_map(name).collect()
}

/// The libucp files in these folders, each once: wheels have no links, but copies of the file under three names.
fn find(folders: &[PathBuf]) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for folder in folders {
        let mut contents = BTreeSet::new();
        let mut paths = children(folder);
        // Prefer the name that programs look for.
        paths.sort_by_key(|path| !path.ends_with("libucp.so.0"));
        for path in paths {
            let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
            let is_it = name.as_deref().is_some_and(|name| {
                (name.starts_with("libucp.so") || name.starts_with("libucp-"))
                    && name.contains(".so")
            });
            if !is_it {
                continue;
            }
            let Ok(real) = path.canonicalize() else { continue };
            if !seen.insert(real.clone()) {
                continue;
            }
            // Unreadable files are kept: loading them then reports the reason.
            if std::fs::read(&real).map_or(true, |content| contents.insert(content)) {
                found.push(real);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loaded(version: (u32, u32, u32), way: Way, components: &[(&str, u32)]) -> Loaded {
        Loaded {
            version,
            way,
            libucs: Some(PathBuf::from("/x/lib/libucs-14c2.so.0.0.0")),
            components: components
                .iter()
                .map(|(name, count)| ((*name).to_owned(), *count))
                .collect(),
            ..Loaded::default()
        }
    }

    #[test]
    fn each_kind_of_ucx_gets_its_own_remedy() {
        let judge = |loaded| judge(Path::new("/x/lib/libucp.so.0"), loaded);
        let cases = [
            (loaded((1, 13, 1), Way::Refused, &[]), Verdict::Bad, "does not know Gaudi", "1.21"),
            (
                loaded((1, 21, 0), Way::Preload, &[("self", 1)]),
                Verdict::Bad,
                "has no UCX_PLUGIN_PATH",
                "blanks",
            ),
            (
                loaded((1, 21, 0), Way::Preload, &[("gaudi_copy", 1)]),
                Verdict::Good,
                "by LD_PRELOAD",
                "",
            ),
            (
                loaded((1, 22, 0), Way::PluginPath, &[("self", 1)]),
                Verdict::Bad,
                "does not load",
                "libuct_gaudi.so.0.0.0",
            ),
            (
                loaded((1, 22, 0), Way::PluginPath, &[("gaudi_copy", 0)]),
                Verdict::Warning,
                "no Gaudi",
                "UCX_LOG_LEVEL",
            ),
            (
                Loaded { libnl: 2, ..loaded((1, 23, 0), Way::PluginPath, &[("gaudi_copy", 1)]) },
                Verdict::Warning,
                "dies of signal 11",
                "UCX_MODULES=^efa",
            ),
            (
                loaded((1, 23, 0), Way::PluginPath, &[("gaudi_copy", 1)]),
                Verdict::Good,
                "lists Gaudis",
                "",
            ),
        ];
        for (one, verdict, found, remedy) in cases {
            let finding = judge(Ok(one));
            assert_eq!(finding.verdict, verdict, "{finding:?}");
            assert!(finding.found.contains(found), "{finding:?}");
            assert!(finding.remedy.contains(remedy), "{finding:?}");
        }
        let broken =
            Loaded { error: Some(String::from("libnuma.so.1: not found")), ..Loaded::default() };
        assert!(judge(Ok(broken)).found.contains("libnuma"));
        let crashed = judge(Err(NoAnswer { how: String::from("died of signal 11") }));
        assert_eq!((crashed.verdict, crashed.found.contains("signal 11")), (Verdict::Bad, true));
    }

    #[test]
    fn a_library_is_counted_once_whatever_is_mapped_of_it() {
        let maps = "7f00-7f01 r--p 0 00:1 5   /a/libnl-3-47c.so.200\n7f01-7f02 r-xp 0 00:1 5   /a/libnl-3-47c.so.200\n\
                    7f03-7f04 r-xp 0 00:1 6   /lib/libnl-3.so.200\n7f05-7f06 rw-p 0 00:0 0\n7f07-7f08 r-xp 0 00:1 7 /lib/libnl-route-3.so\n";
        assert_eq!((copies_of("/libnl-3", maps), copies_of("/libefa", maps)), (2, 0));
    }

    #[test]
    fn old_ucx_on_the_loader_path_is_told_with_the_folder_of_a_good_one() {
        let old = Loaded {
            libucp: Some(PathBuf::from("/usr/lib/libucp.so.0.0.0")),
            ..loaded((1, 13, 1), Way::Refused, &[])
        };
        let finding = judge_loader(Some(&old), Some(Path::new("/good/lib")));
        assert_eq!(finding.verdict, Verdict::Warning);
        assert!(finding.found.contains("get UCX 1.13.1 (/usr/lib/libucp.so.0.0.0)"), "{finding:?}");
        assert!(finding.remedy.contains("LD_LIBRARY_PATH=/good/lib"), "{finding:?}");
        let none = judge_loader(None, None);
        assert_eq!((none.verdict, none.found.contains("find none")), (Verdict::Warning, true));
        assert!(none.remedy.contains("pip install libucx-cu12"), "{none:?}");
        let new = judge_loader(Some(&loaded((1, 21, 0), Way::Preload, &[])), None);
        assert_eq!(new.verdict, Verdict::Good);
    }

    #[test]
    fn copies_are_found_once_whatever_they_are_called() {
        let root = std::env::temp_dir().join(format!("cli-ucx-{}", std::process::id()));
        std::fs::create_dir_all(&root).expect("a folder");
        for name in
            ["libucp.so.0.0.0", "libucp-14c218c5.so.0.0.0", "libucpx.so", "libucp.a", "libuct.so"]
        {
            std::fs::write(root.join(name), name).expect("a file");
        }
        std::os::unix::fs::symlink("libucp.so.0.0.0", root.join("libucp.so")).expect("a link");
        // A copy, as in a wheel.
        std::fs::copy(root.join("libucp.so.0.0.0"), root.join("libucp.so.0")).expect("a copy");
        let found = find(&[root.clone(), root.join("."), root.join("none")]);
        let names = ["libucp.so.0", "libucp-14c218c5.so.0.0.0"];
        assert!(found.iter().map(|path| path.file_name()).eq(names.map(|n| Some(n.as_ref()))));
        std::fs::remove_dir_all(root).expect("removed");
    }
}
