//! The plugin's configuration: `UCX_GAUDI_COPY_*` and `UCX_GAUDI_TRACE`, with `UCT_` instead of `UCX_` accepted.
//!
//! There is one set of variables for both names: UCX reads the same table for `gaudi_gdr`.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use gaudi::rcache::CacheLimits;
use gaudi::{DeviceChoice, Error, FlushPeerWrites, KeptOpen, OptionName, Options};
use uct::config::{Ternary, Values, Variable};
use uct::{Level, Status, Ucx, log};

use crate::estimates;
use crate::{environment, status};

/// Prefix of the variables, behind `UCX_`.
pub(crate) const PREFIX: &str = "GAUDI_";

/// The second, complete prefix (no `UCX_` is added).
pub(crate) const ALIAS: &str = "UCT_GAUDI_";

/// Words of LOG_LEVEL: follow UCX, or the levels in the order of [`Level::ALL`].
const LOG_LEVELS: &[&str] = &["inherit", "error", "warn", "diag", "info", "debug", "trace", "data"];

/// What `ucx_info -c -f` lists.
pub(crate) const VARIABLES: &[Variable] = uct::variables! {
    COPY_DEVICE: Text = "",
        "Which Gaudi to use: an index (0), a module id (module:2) or a PCI bus id\n\
         (0000:33:00.0); local-rank: the one with the number of the rank that mpirun, srun or\n\
         torchrun gave this process on its host; numa: the first that opens, those near the\n\
         processors of this process first. Empty: HLS_MODULE_ID if set, else the first.";
    COPY_DMABUF: Ternary = "try",
        "Offer Gaudi memory as dma-buf, so that network devices access it directly.\n\
         yes: export at allocation, which fails where it is impossible;\n\
         try: export when first needed;\n\
         no: never.";
    COPY_ENABLE_MAPPED_DMABUF: Ternary = "try",
        "Export with the driver call that takes an offset into mapped memory.\n\
         yes: always, which fails where the driver library lacks it;\n\
         try: where the library has it;\n\
         no: with the older call, on the whole mapping.";
    COPY_REG_DMABUF: Bool = "n",
        "Tell UCX that dma-bufs can be registered, for programs that ask before they give one. It\n\
         works without, where the driver imports dma-bufs. With it, UCP exports all Gaudi memory\n\
         that it registers, and CUDA memory that the Gaudi cannot reach is not registered.";
    COPY_FLUSH_PEER_WRITES: Ternary = "try",
        "Let the driver flush what network devices and Gaudis of other processes wrote to\n\
         Gaudi memory, before a copy of the plugin uses that memory.\n\
         yes: always; memory is not offered as dma-buf where the driver cannot flush;\n\
         try: where the driver can;\n\
         no: never.";
    COPY_REG_COST: Time = "0us",
        "The registration cost that UCX is told with ENABLE_RCACHE=no. UCX adds it\n\
         to its estimate of every copy; with the cache it is told the cost of a lookup.\n\
         0: the value for this kind of card.";
    COPY_BW: Keyed(&estimates::BANDWIDTHS) = "auto",
        "Bandwidth of copies that UCX is told, by which it chooses protocols.\n\
         auto: from the card's PCI Express link, or from the link of its generation\n\
         if the system does not say.";
    COPY_LATENCY: Keyed(&estimates::LATENCIES) = "short:0us,zcopy:0us",
        "Latency of copies that UCX is told: from submission to completion, without the bytes.\n\
         0: the value for this kind of card.";
    COPY_OVERHEAD: Time = "0us",
        "Processor time of a submission that UCX is told.\n\
         0: the value for this kind of card.";
    COPY_ENABLE_RCACHE: Ternary = "try",
        "Keep host memory that was pinned for a copy, so that the next copy finds it pinned.\n\
         Needs UCX's memory events, to learn of memory that is unmapped.\n\
         yes: fail where there are none;\n\
         try: do without the cache where there are none;\n\
         no: pin for each copy, or for as long as the memory is registered.";
    COPY_RCACHE_MAX_REGIONS: Uint = "65536",
        "Most ranges of host memory that are kept pinned for one Gaudi.";
    COPY_RCACHE_MAX_SIZE: MemUnits = "auto",
        "Most host memory that is kept pinned for one Gaudi.\n\
         auto: a quarter of the machine's memory.";
    COPY_ENABLE_NIC_SCALE_OUT: Ternary = "try",
        "Log at info level which network devices are near the Gaudi that is used.\n\
         yes: warn if there is none that is active;\n\
         try: only log them;\n\
         no: do not look.";
    COPY_ENABLE_HW_BLOCK_ACCESS: Ternary = "no",
        "Permit the mapping of a Gaudi's register blocks, for debugging and profiling tools in\n\
         this process. The driver decides which blocks.\n\
         yes: fail where the Gaudi has none;\n\
         try: where it has some;\n\
         no: never.";
    COPY_MEM_HOOKS: Ternary = "try",
        "Detect memory that the application maps on a Gaudi by itself, by redirecting\n\
         hlthunk_device_memory_map and similar calls in all objects of this process (and, so that\n\
         libucm finds objects that are loaded later, dlopen and dlclose).\n\
         yes: always, with a warning where it is impossible;\n\
         try: once the application lends a card or reports memory; also, if it had\n\
         loaded the driver library before UCX, once it or UCX has a card open;\n\
         no: never.";
    COPY_FRAMEWORK: Ternary = "try",
        "Use the Gaudi that Synapse (PyTorch, vLLM) has acquired in this process, through Synapse.\n\
         yes: also if Synapse is loaded after UCX is initialised, in every program: UCX then asks\n\
         about every address where Synapse may have memory, which costs small messages of host\n\
         memory some nanoseconds;\n\
         try: the same if Synapse is loaded before, or the program is Python;\n\
         no: never.";
    COPY_ADOPT: Bool = "n",
        "Use a Gaudi that this process has opened by itself as if it had lent it with\n\
         ucx_gaudi_lend(). Not where Synapse is loaded, which has the queues of the card to\n\
         itself.";
    COPY_ABORT_ON_ERROR: Bool = "y",
        "Abort the process when a copy in the background has failed twice. UCX ignores the\n\
         status of these copies in its protocols: without this, a message may arrive\n\
         with wrong bytes, or the program may hang. Short copies return their error to UCX\n\
         in either case.";
    COPY_EXPLAIN_FAULTS: Bool = "y",
        "When code accesses Gaudi memory with the CPU and is killed by SIGSEGV for it, write a line\n\
         to standard error that says so. Then the fault is handled as without this.";
    COPY_CLEAR_MEMORY: Bool = "n",
        "Clear Gaudi memory before it is handed out, so that a program cannot read what an earlier\n\
         allocation left there. Takes the card's time, for every allocation.";
    COPY_OPEN_TIMEOUT: Time = "30s",
        "How long to wait for a Gaudi that is in reset, or that its last user is just closing.\n\
         A Gaudi2 is reset when it is closed, which takes seconds.";
    COPY_KEEP_OPEN: Time = "0s",
        "How long a Gaudi stays open after its last use, when no memory domain is left. While it\n\
         is open, no other process can open it, and a child that is forked cannot use Gaudis.";
    COPY_LOG_LEVEL: Choice(LOG_LEVELS) = "inherit",
        "Log level of the plugin, independent of UCX_LOG_LEVEL;\n\
         inherit: as UCX_LOG_LEVEL says.";
    TRACE: Text = "",
        "File to which every call into the driver library is appended, with its arguments, result,\n\
         errno and time, as lines of JSON. %p is the process id, %h the host name. Empty: none.";
};

/// The values of [`VARIABLES`].
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) device: DeviceChoice,
    pub(crate) dmabuf: Ternary,
    pub(crate) mapped_dmabuf: Ternary,
    pub(crate) reg_dmabuf: bool,
    pub(crate) rcache: Ternary,
    pub(crate) rcache_limits: CacheLimits,
    pub(crate) nic_scale_out: Ternary,
    pub(crate) hw_block_access: Ternary,
    pub(crate) mem_hooks: Ternary,
    pub(crate) framework: Ternary,
    pub(crate) adopt: bool,
    pub(crate) abort_on_error: bool,
    pub(crate) explain_faults: bool,
    /// While a memory domain exists, cards that are opened stay open.
    _kept_open: Arc<KeptOpen>,
}

/// The card that was last chosen in this process, for callers without a memory domain.
pub(crate) fn chosen_device() -> DeviceChoice {
    gaudi::runtime().options().device.clone().unwrap_or_default()
}

impl Settings {
    /// Applies what UCX parsed. `log_errors`: log what is wrong with it.
    pub(crate) fn read(
        ucx: &'static Ucx,
        values: &Values<'_>,
        log_errors: bool,
    ) -> Result<Settings, Status> {
        ucx.set_log_level(level(values.choice("COPY_LOG_LEVEL")));
        start_trace(ucx, &values.text("TRACE"));
        let text = values.text("COPY_DEVICE");
        let device: DeviceChoice = text.parse().map_err(|error: Error| {
            if log_errors {
                log!(ucx, Warn, "UCX_GAUDI_COPY_DEVICE={text}: {}", status::explain(&error));
            }
            Status::INVALID_PARAM
        })?;
        let settings = Settings {
            device,
            dmabuf: values.ternary("COPY_DMABUF"),
            mapped_dmabuf: values.ternary("COPY_ENABLE_MAPPED_DMABUF"),
            reg_dmabuf: values.bool("COPY_REG_DMABUF"),
            rcache: values.ternary("COPY_ENABLE_RCACHE"),
            rcache_limits: CacheLimits {
                regions: values.uint("COPY_RCACHE_MAX_REGIONS") as usize,
                bytes: cache_size(values.bytes("COPY_RCACHE_MAX_SIZE")),
            },
            nic_scale_out: values.ternary("COPY_ENABLE_NIC_SCALE_OUT"),
            hw_block_access: values.ternary("COPY_ENABLE_HW_BLOCK_ACCESS"),
            mem_hooks: values.ternary("COPY_MEM_HOOKS"),
            framework: values.ternary("COPY_FRAMEWORK"),
            adopt: values.bool("COPY_ADOPT"),
            abort_on_error: values.bool("COPY_ABORT_ON_ERROR"),
            explain_faults: values.bool("COPY_EXPLAIN_FAULTS"),
            _kept_open: Arc::new(gaudi::runtime().keep_open()),
        };
        gaudi::runtime().on_wait(move |line| log!(ucx, Info, "{line}"));
        gaudi::runtime().configure(Options {
            device: Some(settings.device.clone()),
            register_access: Some(settings.hw_block_access != Ternary::No),
            adopt_own_cards: Some(settings.adopt),
            use_framework: Some(settings.framework != Ternary::No),
            clear_allocations: Some(values.bool("COPY_CLEAR_MEMORY")),
            keep_open: Some(seconds(values.real("COPY_KEEP_OPEN"))),
            open_timeout: Some(seconds(values.real("COPY_OPEN_TIMEOUT"))),
            flush_peer_writes: Some(flush(values.ternary("COPY_FLUSH_PEER_WRITES"))),
            ..Options::default()
        });
        Ok(settings)
    }
}

/// When writes of peers are flushed.
pub(crate) fn flush(wanted: Ternary) -> FlushPeerWrites {
    match wanted {
        Ternary::No => FlushPeerWrites::Never,
        Ternary::Try => FlushPeerWrites::IfPossible,
        Ternary::Yes => FlushPeerWrites::Always,
    }
}

/// What UCX parsed as a time: any number, also "infinite".
pub(crate) fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.clamp(0.0, 1e9)).unwrap_or_default()
}

/// Warns, once each, of variables to which two memory domains of this process give different values:
/// there is one engine, which can apply only one of them.
pub(crate) fn warn_of_conflicts(ucx: &Ucx) {
    for conflict in gaudi::runtime().take_conflicts() {
        log!(ucx, Warn, "{}: {conflict}", variables_of(conflict.option));
    }
}

/// The variables that set an option of the engine.
fn variables_of(option: OptionName) -> &'static str {
    match option {
        OptionName::Device => "UCX_GAUDI_COPY_DEVICE",
        OptionName::RegisterAccess => "UCX_GAUDI_COPY_ENABLE_HW_BLOCK_ACCESS",
        OptionName::AdoptOwnCards => "UCX_GAUDI_COPY_ADOPT",
        OptionName::UseFramework => "UCX_GAUDI_COPY_FRAMEWORK",
        OptionName::RegistrationCache => {
            "UCX_GAUDI_COPY_ENABLE_RCACHE, RCACHE_MAX_REGIONS, RCACHE_MAX_SIZE"
        }
        OptionName::ClearAllocations => "UCX_GAUDI_COPY_CLEAR_MEMORY",
        OptionName::HandleLimits => "UCX_GAUDI_IPC_CACHE_MAX_REGIONS, CACHE_MAX_SIZE",
        OptionName::KeepOpen => "UCX_GAUDI_COPY_KEEP_OPEN",
        OptionName::OpenTimeout => "UCX_GAUDI_COPY_OPEN_TIMEOUT",
        OptionName::FlushPeerWrites => "UCX_GAUDI_COPY_FLUSH_PEER_WRITES",
    }
}

/// Whether a framework (Synapse) is loaded in the process or may be loaded later. Only programs of
/// interpreters load it late: others are linked with it.
pub(crate) fn expects_framework(wanted: Ternary) -> bool {
    let is_python = || {
        let program = std::env::current_exe().unwrap_or_default();
        program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python"))
    };
    match wanted {
        Ternary::Yes => true,
        Ternary::Try => gaudi::runtime().has_framework() || is_python(),
        Ternary::No => false,
    }
}

/// How UCX writes "auto" as a size.
const AUTO: usize = usize::MAX - 1;

/// Bytes that the registration cache may keep.
fn cache_size(value: usize) -> u64 {
    if value != AUTO {
        return value as u64;
    }
    // SAFETY: asks for two numbers.
    let (pages, page) =
        unsafe { (libc::sysconf(libc::_SC_PHYS_PAGES), libc::sysconf(libc::_SC_PAGESIZE)) };
    let memory = u64::try_from(pages).ok().zip(u64::try_from(page).ok());
    memory.map_or(1 << 30, |(pages, page)| pages * page / 4)
}

fn level(choice: usize) -> Option<Level> {
    choice.checked_sub(1).and_then(|index| Level::ALL.get(index)).map(|(level, _)| *level)
}

/// Begins to record driver calls, unless that was begun before.
fn start_trace(ucx: &Ucx, file: &str) {
    match trace_to(file) {
        Some(Ok(path)) => log!(ucx, Info, "driver calls are recorded in {}", path.display()),
        Some(Err(error)) => {
            log!(ucx, Warn, "UCX_GAUDI_TRACE={file}: nothing is recorded: {error}");
        }
        None => {}
    }
}

/// The same for a caller without a UCX to log with. After a failure UCX tries again, and logs, when it is loaded.
pub(crate) fn trace_without_ucx(file: &str) {
    if let Some(Err(_)) = trace_to(file) {
        TRACE_STARTED.store(false, Ordering::Relaxed);
    }
}

static TRACE_STARTED: AtomicBool = AtomicBool::new(false);

/// `None` if there is nothing to begin.
fn trace_to(file: &str) -> Option<std::io::Result<PathBuf>> {
    let is_new = !file.is_empty() && !TRACE_STARTED.swap(true, Ordering::Relaxed);
    is_new.then(|| gaudi::trace::start(file))
}

/// Starts the trace early: discovery runs before UCX passes the configuration, and must be recorded, too.
pub(crate) fn early_trace(ucx: &Ucx) {
    if let Some(file) = environment::variable("TRACE") {
        start_trace(ucx, &file);
    }
}

/// Sets the log level early, from the environment: lines may be logged before UCX passes the
/// configuration.
pub(crate) fn early_log_level(ucx: &Ucx) {
    let word = environment::variable("COPY_LOG_LEVEL");
    let known =
        |word: &String| LOG_LEVELS.iter().position(|known| word.eq_ignore_ascii_case(known));
    if let Some(choice) = word.as_ref().and_then(known) {
        ucx.set_log_level(level(choice));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_that_fails_without_ucx_is_tried_again_and_reported_once_with_it() {
        let file = "/dev/null/trace";
        trace_without_ucx(file);
        assert!(matches!(trace_to(file), Some(Err(_))), "UCX logs why");
        assert!(trace_to(file).is_none(), "once");
    }

    #[test]
    fn a_quarter_of_the_memory_unless_it_is_said() {
        assert_eq!((cache_size(4096), cache_size(usize::MAX)), (4096, u64::MAX));
        let automatic = cache_size(AUTO);
        assert!(automatic > 1 << 20 && automatic < 1 << 50, "{automatic}");
    }

    #[test]
    fn log_level_words_name_the_levels_of_ucx() {
        assert_eq!(level(0), None);
        for (index, word) in LOG_LEVELS.iter().enumerate().skip(1) {
            let (expected, name) = Level::ALL[index - 1];
            assert_eq!((*word, level(index)), (name, Some(expected)));
        }
        assert_eq!(LOG_LEVELS.len(), Level::ALL.len() + 1);
    }
}
