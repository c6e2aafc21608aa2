//! The variables that describe the machine in software, read once per process.
//!
//! Nothing here is shared between processes: the generation is part of the folder's name, the
//! number of cards is how many this process sees, and the process that opens a card decides the size of its
//! memory. So two processes with different values do not conflict.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use crate::asic::{Generation, PciId, Profile};
pub use crate::timing::Model;

/// Most cards a machine may have (minors that the driver library scans).
pub const MAX_DEVICES: u32 = 256;

/// Longest [`Config::latency`], in microseconds.
const MAX_LATENCY_US: u64 = 1_000_000;

/// Longest random delay of a reported end, unless `SOFT_GAUDI_JITTER` is set.
const JITTER: Duration = Duration::from_micros(10);
/// How long the last close takes without a model.
const CLOSE_TIME: Duration = Duration::from_millis(10);

/// The machine as this process sees it.
#[derive(Clone, Debug)]
pub struct Config {
    /// Name of the machine: `SOFT_GAUDI_NODE`.
    pub node: String,
    /// Generation of all its cards: `SOFT_GAUDI_GENERATION`.
    pub generation: Generation,
    /// The numbers of these cards: `SOFT_GAUDI_HBM_STACKS`, for a Gaudi2 its stacks of HBM.
    pub profile: &'static Profile,
    /// Ids of the first cards; the last is that of all others: `SOFT_GAUDI_PCI_ID`.
    pub pci_ids: Vec<PciId>,
    /// Number of cards: `SOFT_GAUDI_DEVICES`.
    pub devices: u32,
    /// Bytes of DRAM per card, a multiple of the page size: `SOFT_GAUDI_HBM`.
    pub dram_size: u64,
    /// Bytes of DRAM that the card's PCI BAR covers, from its start: `SOFT_GAUDI_BAR`.
    pub bar: u64,
    /// Until a stuck submission resets the device: `SOFT_GAUDI_CS_TIMEOUT` (milliseconds).
    pub cs_timeout: Duration,
    /// Where it is more lenient than a card: `SOFT_GAUDI_LENIENT`.
    pub lenient: Lenient,
    /// How long an idle queue takes before it begins: `SOFT_GAUDI_LATENCY` (microseconds). Zero is as quick as
    /// possible: small work then runs in the submitting thread.
    pub latency: Duration,
    /// Longest random delay before the end of a submission is reported, and the seed: `SOFT_GAUDI_JITTER`
    /// (microseconds, then the seed).
    pub jitter: (Duration, u64),
    /// Times of a real card: `SOFT_GAUDI_MODEL`.
    pub model: Option<Model>,
    /// Lengths and addresses that the DMA engines take are multiples of these: `SOFT_GAUDI_DMA_ALIGNMENT`.
    pub dma_rule: (u64, u64),
    /// Whether the machine's fault rules apply to this process: `SOFT_GAUDI_FAULTS`.
    pub faults: bool,
    /// Whether writes of other devices are acknowledged before the engines see them:
    /// `SOFT_GAUDI_EARLY_WRITES`.
    pub early_writes: bool,
    /// How long a close takes; opens return `EAGAIN` meanwhile: `SOFT_GAUDI_CLOSE_TIME` (milliseconds).
    pub close_time: Duration,
    /// The same for a card that was reset; differs from `close_time` only with a model.
    pub reset_time: Duration,
    /// Time after which a process that still holds a card that was reset is killed, as by the driver:
    /// `SOFT_GAUDI_RESET_KILL` (milliseconds, or `no`). With faults on demand, off by default.
    pub reset_kill: Option<Duration>,
}

impl Config {
    /// How a card shows itself.
    pub fn pci_id(&self, index: u32) -> PciId {
        self.pci_ids[(index as usize).min(self.pci_ids.len() - 1)]
    }
}

/// What a card or its driver would not do; off unless named.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lenient {
    /// `edma-fetch`: the EDMA engines of a Gaudi2 can fetch command buffers from host memory.
    pub edma_fetch: bool,
    /// `import`: dma-bufs can be imported, as with Habana's own driver but no upstream kernel.
    pub import: bool,
    /// `pdma-streams`: Gaudi2's PDMA streams 0 to 5 are all the user's, as before Linux 6.1, rather than 0, 1 and 4.
    pub pdma_streams: bool,
    /// `unpinned`: copies find host pages by their address when they run.
    pub unpinned: bool,
    /// `instant-close`: the card can be opened again as soon as it was closed.
    pub instant_close: bool,
    /// `ordered`: ends of submissions are reported at once.
    pub ordered: bool,
    /// `zeroed`: device memory that was never written reads as zeros.
    pub zeroed: bool,
}

impl Lenient {
    fn parse(list: &str) -> Result<Self, String> {
        let mut lenient = Self::default();
        for name in list.split(',').map(str::trim).filter(|name| !name.is_empty()) {
            let field = match name {
                "edma-fetch" => &mut lenient.edma_fetch,
                "import" => &mut lenient.import,
                "pdma-streams" => &mut lenient.pdma_streams,
                "unpinned" => &mut lenient.unpinned,
                "instant-close" => &mut lenient.instant_close,
                "ordered" => &mut lenient.ordered,
                "zeroed" => &mut lenient.zeroed,
                other => {
                    return Err(format!(
                        "SOFT_GAUDI_LENIENT={list}: '{other}' is none of edma-fetch, import, instant-close, \
                         ordered, pdma-streams, unpinned, zeroed"
                    ));
                }
            };
            *field = true;
        }
        Ok(lenient)
    }
}

/// Variables of earlier versions: a program that sets one would get another card than it expects.
const REPLACED: [(&str, &str); 3] = [
    ("SOFT_GAUDI_EDMA_FETCH", "edma-fetch"),
    ("SOFT_GAUDI_IMPORT", "import"),
    ("SOFT_GAUDI_PDMA", "pdma-streams"),
];

/// Earlier names of variables, which are read where the present one is not set.
const RENAMED: [(&str, &str); 3] = [
    ("SOFT_GAUDI_KIND", "SOFT_GAUDI_LENIENT"),
    ("SOFT_GAUDI_SHAPE", "SOFT_GAUDI_HBM_STACKS"),
    ("SOFT_GAUDI_DMA_RULE", "SOFT_GAUDI_DMA_ALIGNMENT"),
];

/// Looks up variables with `set`, by their present or earlier names; calls `notice` for an earlier name.
fn renamed(
    set: impl Fn(&str) -> Option<String>,
    notice: impl Fn(&str),
) -> impl Fn(&str) -> Option<String> {
    move |name| {
        let earlier = || {
            let (earlier, _) = RENAMED.iter().find(|(_, present)| *present == name)?;
            let value = set(earlier)?;
            notice(&format!("{earlier} is now called {name}; please rename it"));
            Some(value)
        };
        set(name).or_else(earlier)
    }
}

/// The configuration of this process; `None`, after a message, if a variable is malformed.
pub fn config() -> Option<&'static Config> {
    static CONFIG: OnceLock<Option<Config>> = OnceLock::new();
    CONFIG
        .get_or_init(|| {
            match parse(renamed(
                |name| std::env::var(name).ok(),
                |text| eprintln!("soft-gaudi: {text}"),
            )) {
                Ok(config) => Some(config),
                Err(reason) => {
                    eprintln!("soft-gaudi: {reason}; this process sees no devices");
                    None
                }
            }
        })
        .as_ref()
}

/// For tests: the configuration that these variables give, under their present or earlier names.
pub(crate) fn with(var: impl Fn(&str) -> Option<String>) -> Result<Config, String> {
    parse(renamed(var, |_| {}))
}

/// Reads the variables through `var`.
fn parse(var: impl Fn(&str) -> Option<String>) -> Result<Config, String> {
    if let Some((name, word)) = REPLACED.iter().find(|(name, _)| var(name).is_some()) {
        return Err(format!(
            "{name} is no longer a variable; SOFT_GAUDI_LENIENT={word} turns it on"
        ));
    }
    /// The value of a variable as `parse` understands it, `default` if it is not set.
    fn read<T>(
        var: &impl Fn(&str) -> Option<String>,
        name: &str,
        default: T,
        want: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, String> {
        let Some(text) = var(name) else { return Ok(default) };
        parse(&text).ok_or_else(|| format!("{name}={text}: want {want}"))
    }
    let milliseconds = |text: &str| text.parse().ok().map(Duration::from_millis);
    let microseconds = |text: &str| {
        let us = text.trim().parse().ok().filter(|us| *us <= MAX_LATENCY_US);
        us.map(Duration::from_micros)
    };

    let want = "1 to 64 letters, digits, '.', '_' or '-', not starting with '.'";
    let node = read(&var, "SOFT_GAUDI_NODE", "default".to_owned(), want, |text| {
        let proper = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let fits = (1..=64).contains(&text.len()) && !text.starts_with('.');
        (fits && text.chars().all(proper)).then(|| text.to_owned())
    })?;
    let want = "gaudi1, gaudi2 or gaudi3";
    let generation =
        read(&var, "SOFT_GAUDI_GENERATION", Generation::Gaudi2, want, |text| match text {
            "gaudi1" => Some(Generation::Gaudi1),
            "gaudi2" => Some(Generation::Gaudi2),
            "gaudi3" => Some(Generation::Gaudi3),
            _ => None,
        })?;
    let want = format!(
        "PCI device ids such as 0x1021 or 0x1021:4 (with a revision), separated by commas, none of another \
         generation than {}",
        generation.name()
    );
    let default = vec![PciId { device: generation.profile().pci_id, revision: 1 }];
    let pci_ids = read(&var, "SOFT_GAUDI_PCI_ID", default, &want, |text| {
        let id = |text| {
            let fits = |id: &PciId| id.generation().is_none_or(|known| known == generation);
            PciId::parse(text).filter(fits)
        };
        text.split(',').map(str::trim).map(id).collect()
    })?;
    let want = format!("a number from 0 to {MAX_DEVICES}");
    let devices = read(&var, "SOFT_GAUDI_DEVICES", 8, &want, |text| {
        text.parse().ok().filter(|n| *n <= MAX_DEVICES)
    })?;
    // Other generations than Gaudi2 have one shape.
    let profile =
        read(&var, "SOFT_GAUDI_HBM_STACKS", generation.profile(), "6 or 5", |text| match text {
            "5" if generation == Generation::Gaudi2 => Some(Generation::five_hbm()),
            "5" | "6" => Some(generation.profile()),
            _ => None,
        })?;
    let (page, most) = (profile.dram_page, profile.dram_size);
    let want = format!(
        "a size such as 3g or 768m, at least one page of {} MiB and at most {} MiB",
        page >> 20,
        most >> 20
    );
    let dram_size = read(&var, "SOFT_GAUDI_HBM", most, &want, |text| {
        parse_size(text).map(|size| size / page * page).filter(|size| (page..=most).contains(size))
    })?;
    let bar = read(&var, "SOFT_GAUDI_BAR", u64::MAX, "a size such as 512m", parse_size)?;
    let want = "gaudi2 or gaudi2,slow=N, N from 1 to 10000";
    let model = read(&var, "SOFT_GAUDI_MODEL", None, want, |text| Model::parse(text).map(Some))?;
    let slow = model.map_or(1, |model| model.slow);
    let default = Duration::from_secs(profile.cs_timeout_s * slow);
    let want = "milliseconds above 0";
    let cs_timeout = read(&var, "SOFT_GAUDI_CS_TIMEOUT", default, want, |text| {
        milliseconds(text).filter(|time| !time.is_zero())
    })?;
    let lenient = Lenient::parse(&var("SOFT_GAUDI_LENIENT").unwrap_or_default())?;
    let want = format!("microseconds up to {MAX_LATENCY_US}");
    let latency = read(&var, "SOFT_GAUDI_LATENCY", Duration::ZERO, &want, microseconds)?;
    let default = (if lenient.ordered { Duration::ZERO } else { JITTER }, 1);
    let want = format!("{want}, and a seed after a comma");
    let jitter = read(&var, "SOFT_GAUDI_JITTER", default, &want, |text| {
        let (time, seed) = text.split_once(',').unwrap_or((text, "1"));
        Some((microseconds(time)?, seed.trim().parse().ok()?))
    })?;
    let want = "two powers of two up to 4096, for lengths and addresses";
    let dma_rule = read(&var, "SOFT_GAUDI_DMA_ALIGNMENT", (1, 1), want, |text| {
        let power = |text: &str| {
            text.trim().parse().ok().filter(|n: &u64| n.is_power_of_two() && *n <= 4096)
        };
        let (len, addr) = text.split_once(',')?;
        Some((power(len)?, power(addr)?))
    })?;
    let yes_or_no = |text: &str| match text {
        "yes" => Some(true),
        "no" => Some(false),
        _ => None,
    };
    let faults = read(&var, "SOFT_GAUDI_FAULTS", false, "yes or no", yes_or_no)?;
    // The driver turns it on, where the firmware has it, as soon as a dma-buf is attached.
    let early = generation == Generation::Gaudi3;
    let early_writes = read(&var, "SOFT_GAUDI_EARLY_WRITES", early, "yes or no", yes_or_no)?;
    let [close, reset] = match model {
        _ if lenient.instant_close => [Duration::ZERO; 2],
        Some(model) => model.close_times(),
        None => [CLOSE_TIME; 2],
    };
    let want = "a number of milliseconds";
    let close_time = |default| read(&var, "SOFT_GAUDI_CLOSE_TIME", default, want, milliseconds);
    let (close_time, reset_time) = (close_time(close)?, close_time(reset)?);
    let default = (!faults).then_some(Duration::from_secs(1));
    let want = "a number of milliseconds, or no";
    let reset_kill = read(&var, "SOFT_GAUDI_RESET_KILL", default, want, |text| match text {
        "no" => Some(None),
        _ => milliseconds(text).map(Some),
    })?;
    Ok(Config {
        node,
        generation,
        profile,
        pci_ids,
        devices,
        dram_size,
        bar,
        cs_timeout,
        lenient,
        latency,
        jitter,
        model,
        dma_rule,
        faults,
        early_writes,
        close_time,
        reset_time,
        reset_kill,
    })
}

/// A number of bytes with an optional k, m, g or t (binary).
fn parse_size(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let lower = lower.strip_suffix("ib").or(lower.strip_suffix('b')).unwrap_or(&lower);
    let (digits, shift) = match lower.as_bytes().last()? {
        b'k' => (&lower[..lower.len() - 1], 10),
        b'm' => (&lower[..lower.len() - 1], 20),
        b'g' => (&lower[..lower.len() - 1], 30),
        b't' => (&lower[..lower.len() - 1], 40),
        _ => (lower, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// The folder of all machines of this user below `base`.
pub(crate) fn user_folder(base: &std::path::Path) -> PathBuf {
    base.join(format!("soft-gaudi-{}", rustix::process::geteuid().as_raw()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(pairs: &[(&str, &str)]) -> Result<Config, String> {
        parse(|name| pairs.iter().find(|(key, _)| *key == name).map(|(_, v)| (*v).to_owned()))
    }

    #[test]
    fn no_variables_give_eight_gaudi2_of_hardware_size() {
        let config = with(&[]).unwrap();
        assert_eq!(config.generation, Generation::Gaudi2);
        assert_eq!((config.devices, config.dram_size), (8, 0x17_d000_0000));
        assert_eq!(config.cs_timeout, Duration::from_secs(30));
        assert_eq!(config.latency, Duration::ZERO);
        assert_eq!(config.reset_kill, Some(Duration::from_secs(1)));
        assert_eq!(with(&[("SOFT_GAUDI_FAULTS", "yes")]).unwrap().reset_kill, None);
    }

    #[test]
    fn memory_size_is_rounded_down_to_whole_pages() {
        assert_eq!(with(&[("SOFT_GAUDI_HBM", "2g")]).unwrap().dram_size, 2 * (768 << 20));
        assert_eq!(with(&[("SOFT_GAUDI_HBM", "3GiB")]).unwrap().dram_size, 4 * (768 << 20));
        assert!(with(&[("SOFT_GAUDI_HBM", "767m")]).is_err());
        let five = with(&[("SOFT_GAUDI_HBM", "767m"), ("SOFT_GAUDI_HBM_STACKS", "5")]).unwrap();
        assert_eq!(five.dram_size, 640 << 20);
        assert!(with(&[("SOFT_GAUDI_HBM", "1000t")]).is_err());
    }

    #[test]
    fn leniency_is_a_list_and_empty_unless_named() {
        assert_eq!(with(&[]).unwrap().lenient, Lenient::default());
        let config = with(&[("SOFT_GAUDI_LENIENT", "import, instant-close,")]).unwrap();
        let lenient = Lenient { import: true, instant_close: true, ..Lenient::default() };
        assert_eq!((config.lenient, config.close_time), (lenient, Duration::ZERO));
    }

    #[test]
    fn an_earlier_name_counts_where_the_present_one_is_not_set_and_is_reported_once() {
        let notices = std::cell::RefCell::new(Vec::new());
        let read = |pairs: &[(&str, &str)]| {
            let set = |name: &str| {
                pairs.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
            };
            parse(renamed(set, |text| notices.borrow_mut().push(text.to_owned()))).unwrap()
        };
        let config = read(&[
            ("SOFT_GAUDI_KIND", "import"),
            ("SOFT_GAUDI_SHAPE", "5"),
            ("SOFT_GAUDI_DMA_RULE", "4,128"),
        ]);
        assert!(config.lenient.import && config.dma_rule == (4, 128));
        assert_eq!(config.profile.dram_page, 640 << 20);
        let said = notices.take();
        assert_eq!(said.len(), 3, "{said:?}");
        for (earlier, present) in RENAMED {
            assert!(said.iter().any(|text| text.contains(earlier) && text.contains(present)));
        }
        let config = read(&[("SOFT_GAUDI_KIND", "import"), ("SOFT_GAUDI_LENIENT", "")]);
        assert!(!config.lenient.import && notices.take().is_empty());
    }

    #[test]
    fn a_reset_takes_longer_than_a_close_in_a_model_only_and_one_variable_sets_both() {
        let times = |pairs: &[(&str, &str)]| {
            let config = with(pairs).unwrap();
            [config.close_time, config.reset_time].map(|time| time.as_millis())
        };
        let model = ("SOFT_GAUDI_MODEL", "gaudi2,slow=9");
        assert_eq!(times(&[]), [10, 10]);
        assert_eq!(times(&[model]), [5_000, 10_000]);
        assert_eq!(times(&[model, ("SOFT_GAUDI_CLOSE_TIME", "7")]), [7, 7]);
        assert_eq!(times(&[model, ("SOFT_GAUDI_LENIENT", "instant-close")]), [0, 0]);
    }

    #[test]
    fn malformed_variables_are_named_in_the_reason() {
        for (name, value) in [
            ("SOFT_GAUDI_NODE", "../up"),
            ("SOFT_GAUDI_NODE", ""),
            ("SOFT_GAUDI_GENERATION", "goya"),
            ("SOFT_GAUDI_PCI_ID", "1021"),
            ("SOFT_GAUDI_PCI_ID", "0x1060"),
            ("SOFT_GAUDI_PCI_ID", ""),
            ("SOFT_GAUDI_DEVICES", "257"),
            ("SOFT_GAUDI_DEVICES", "-1"),
            ("SOFT_GAUDI_HBM", "lots"),
            ("SOFT_GAUDI_BAR", "half"),
            ("SOFT_GAUDI_CS_TIMEOUT", "0"),
            ("SOFT_GAUDI_LENIENT", "import,all"),
            ("SOFT_GAUDI_IMPORT", "no"),
            ("SOFT_GAUDI_LATENCY", "-1"),
            ("SOFT_GAUDI_LATENCY", "1000001"),
            ("SOFT_GAUDI_JITTER", "5,x"),
            ("SOFT_GAUDI_MODEL", "gaudi9"),
            ("SOFT_GAUDI_DMA_ALIGNMENT", "3,128"),
            ("SOFT_GAUDI_FAULTS", "many"),
            ("SOFT_GAUDI_RESET_KILL", "yes"),
            ("SOFT_GAUDI_HBM_STACKS", "4"),
            ("SOFT_GAUDI_CLOSE_TIME", "long"),
        ] {
            let reason = with(&[(name, value)]).unwrap_err();
            assert!(reason.contains(name), "{reason}");
        }
    }

    proptest::proptest! {
        #[test]
        fn sizes_never_panic(text in ".{0,12}") {
            let _ = parse_size(&text);
        }
    }
}
