//! From a choice to cards: which of the discovered cards it admits, the order in which they are tried, and why.

use super::discovery::Discovered;
use super::opening::OPENING;
use crate::environment::{self, MODULE_ID, number};
use crate::{DeviceChoice, DeviceInfo, Error, ErrorKind, Sysfs};

/// Variables by which launchers pass a process its number on this host. The order matters: a process that one
/// launcher starts inside another's job inherits the outer one's, and Slurm's is 0 in every job script.
const LOCAL_RANKS: [&str; 7] = [
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PMI_LOCAL_RANK",
    "PALS_LOCAL_RANKID",
    "LOCAL_RANK",
    "SLURM_LOCALID",
];

/// The cards that a choice admits.
#[derive(Debug)]
pub(crate) struct Selection {
    /// In the order in which they are tried; at least one.
    pub(crate) cards: Vec<DeviceInfo>,
    /// Why these.
    pub(crate) why: String,
    /// Cards of this machine that were not available, and why.
    pub(crate) left_out: Vec<String>,
}

/// What a choice depends on apart from the options.
pub(crate) struct Environment<'a> {
    pub(crate) variable: &'a dyn Fn(&str) -> Result<Option<String>, Error>,
    pub(crate) sysfs: &'a Sysfs,
    /// Whether the process may run on this processor.
    pub(crate) may_run_on: &'a dyn Fn(usize) -> bool,
}

/// Selects among the cards that were found, with this process's environment and processors.
pub(crate) fn select(choice: &DeviceChoice, found: Discovered) -> Result<Selection, Error> {
    let cpus = rustix::thread::sched_getaffinity(None);
    select_in(
        choice,
        found,
        &Environment {
            variable: &environment::read,
            sysfs: &Sysfs::default(),
            may_run_on: &|cpu| match &cpus {
                Ok(cpus) => cpu < rustix::thread::CpuSet::MAX_CPU && cpus.is_set(cpu),
                Err(_) => true,
            },
        },
    )
}

fn select_in(
    choice: &DeviceChoice,
    found: Discovered,
    around: &Environment<'_>,
) -> Result<Selection, Error> {
    let Discovered { mut cards, left_out, .. } = found;
    let selected = match choice {
        DeviceChoice::LocalRank => {
            let (variable, rank) = local_rank(around)?;
            let why = format!("local rank {rank} ({variable})");
            // Not by index: if cards are hidden or renumbered, ranks still begin with the first.
            match cards.get(rank as usize).cloned() {
                Some(card) => Ok((vec![card], why)),
                None => Err(too_many_ranks(variable, rank, cards.len())),
            }
        }
        DeviceChoice::Numa => {
            let near = |card: &DeviceInfo| is_near(card, around);
            let why = match cards.iter().filter_map(near).filter(|near| *near).count() {
                0 => String::from("the first free one: sysfs names none near this process's CPUs"),
                _ => String::from("the first free one, those near this process's CPUs first"),
            };
            cards.sort_by_key(|card| near(card) != Some(true));
            Ok((cards, why))
        }
        DeviceChoice::Any => match (around.variable)(MODULE_ID)? {
            Some(id) => {
                let chosen = module_choice(&id)?;
                pick(&chosen, &cards, &format!("from {MODULE_ID}"))
            }
            None => Ok((cards, String::from("the first free one"))),
        },
        named => pick(named, &cards, ""),
    };
    let (cards, why) = selected.map_err(|mut error| {
        left_out.iter().for_each(|line| error.add_detail(line));
        error
    })?;
    Ok(Selection { cards, why, left_out })
}

/// The card of a choice that names one.
fn pick(
    choice: &DeviceChoice,
    all: &[DeviceInfo],
    from: &str,
) -> Result<(Vec<DeviceInfo>, String), Error> {
    let cards: Vec<DeviceInfo> = all.iter().filter(|card| choice.selects(card)).cloned().collect();
    let from = if from.is_empty() { String::new() } else { format!(" ({from})") };
    if !cards.is_empty() {
        return Ok((cards, format!("chosen as \"{choice}\"{from}")));
    }
    let there: Vec<String> = all
        .iter()
        .map(|card| format!("{} = module:{} = {}", card.index, card.module_id, card.bus_id))
        .collect();
    let detail = format!("no card is \"{choice}\"{from}; there are {}", there.join(", "));
    Err(Error::new(ErrorKind::DeviceNotFound, OPENING, detail, "choose one of these")
        .caused_by_setting())
}

fn module_choice(id: &str) -> Result<DeviceChoice, Error> {
    number(id).map(DeviceChoice::Module).ok_or_else(|| {
        Error::new(
            ErrorKind::InvalidParams,
            OPENING,
            format!("{MODULE_ID}=\"{}\" is not a module id", id.escape_debug()),
            "unset it, or set it to a number",
        )
        .caused_by_setting()
    })
}

/// The number of this process on its host, and the variable that has it.
fn local_rank(around: &Environment<'_>) -> Result<(&'static str, u32), Error> {
    let wrong = |detail: String| {
        let remedy =
            "start the program with a launcher that sets one of them (mpirun, srun, torchrun)";
        Error::new(ErrorKind::InvalidParams, OPENING, detail, remedy).caused_by_setting()
    };
    for variable in LOCAL_RANKS {
        let Some(text) = (around.variable)(variable)? else { continue };
        return number(&text).map(|rank| (variable, rank)).ok_or_else(|| {
            wrong(format!("{variable}=\"{}\" is not a local rank", text.escape_debug()))
        });
    }
    Err(wrong(format!("no launcher has set a local rank ({})", LOCAL_RANKS.join(", "))))
}

fn too_many_ranks(variable: &str, rank: u32, cards: usize) -> Error {
    let there = if cards == 1 { String::from("is 1 card") } else { format!("are {cards} cards") };
    let detail = format!("there is no card for local rank {rank} ({variable}): there {there}");
    let remedy = "start at most one process for each card of a host";
    Error::new(ErrorKind::DeviceNotFound, OPENING, detail, remedy).caused_by_setting()
}

/// Whether this process may run on processors near the card; `None` where sysfs does not say.
fn is_near(card: &DeviceInfo, around: &Environment<'_>) -> Option<bool> {
    let location = around.sysfs.location(&card.bus_id).filter(|place| place.is_gaudi())?;
    let cpus = location.local_cpus?;
    let mut ranges = cpus.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(number(first)? as usize..=number(last)? as usize)
    });
    // A range of more processors than any machine has makes no sense.
    Some(ranges.any(|range| range.take(1 << 16).any(|cpu| (around.may_run_on)(cpu))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(count: u32) -> Discovered {
        let cards = (0..count).map(DeviceInfo::example).collect();
        Discovered {
            cards,
            notes: Vec::new(),
            left_out: vec![String::from("HIDING hides 2 cards")],
        }
    }

    fn select_with(
        choice: &DeviceChoice,
        variables: &[(&str, &str)],
        sysfs: &Sysfs,
        cpus: &[usize],
    ) -> Result<(Vec<u32>, String), Error> {
        let variable = |name: &str| {
            let found = variables.iter().find(|(known, _)| *known == name);
            Ok(found.map(|(_, value)| (*value).to_owned()))
        };
        let around =
            Environment { variable: &variable, sysfs, may_run_on: &|cpu| cpus.contains(&cpu) };
        let selection = select_in(choice, found(4), &around)?;
        Ok((selection.cards.iter().map(|card| card.node).collect(), selection.why))
    }

    fn select_env(
        choice: &DeviceChoice,
        variables: &[(&str, &str)],
    ) -> Result<(Vec<u32>, String), Error> {
        select_with(choice, variables, &Sysfs::at("/nonexistent"), &[])
    }

    #[test]
    fn the_launchers_module_id_counts_only_without_a_choice() {
        let (any, index) = (DeviceChoice::Any, DeviceChoice::Index(1));
        let launched = [("HLS_MODULE_ID", "3")];
        let (cards, why) = select_env(&any, &launched).unwrap();
        assert_eq!((cards, why.contains("HLS_MODULE_ID")), (vec![3], true), "{why}");
        assert_eq!(select_env(&index, &launched).unwrap().0, [1]);
        assert_eq!(select_env(&any, &[]).unwrap().0, [0, 1, 2, 3]);
        for text in ["x", "-1", "+3", "3,4"] {
            let error = select_env(&any, &[("HLS_MODULE_ID", text)]).unwrap_err().to_string();
            assert!(error.contains("HLS_MODULE_ID") && error.contains(text), "{error}");
        }
    }

    #[test]
    fn every_launchers_local_rank_is_understood_and_the_inner_one_counts() {
        for variable in LOCAL_RANKS {
            let (cards, why) = select_env(&DeviceChoice::LocalRank, &[(variable, "2")]).unwrap();
            assert_eq!(cards, [2], "{variable}");
            assert!(why.contains(variable), "{why}");
        }
        let inside_slurm = [("SLURM_LOCALID", "0"), ("OMPI_COMM_WORLD_LOCAL_RANK", "3")];
        assert_eq!(select_env(&DeviceChoice::LocalRank, &inside_slurm).unwrap().0, [3]);
        for (variables, said) in [
            (&[][..], "no launcher has set a local rank"),
            (&[("SLURM_LOCALID", "first")], "SLURM_LOCALID=\"first\""),
            (
                &[("SLURM_LOCALID", "4")],
                "no card for local rank 4 (SLURM_LOCALID): there are 4 cards",
            ),
        ] {
            let error = select_env(&DeviceChoice::LocalRank, variables).unwrap_err();
            assert!(error.to_string().contains(said) && error.is_setting_wrong(), "{error}");
        }
    }

    #[test]
    fn one_card_is_counted_in_the_singular() {
        let said = too_many_ranks("SLURM_LOCALID", 1, 1).to_string();
        assert!(said.contains("(SLURM_LOCALID): there is 1 card"), "{said}");
    }

    #[test]
    fn a_card_that_is_not_there_is_refused_with_those_there_are_and_those_left_out() {
        let error = select_env(&DeviceChoice::Index(9), &[]).unwrap_err().to_string();
        for part in ["\"9\"", "there are 0 = module:0", "HIDING hides 2 cards"] {
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn cards_near_the_processors_of_this_process_come_first() {
        let folder = tempfile::tempdir().unwrap();
        let devices = folder.path().join("bus/pci/devices");
        std::fs::create_dir_all(&devices).unwrap();
        for (node, cpus) in [(0, "0-3"), (1, "0-3"), (2, "4-6,9"), (3, "4-6,9")] {
            let bus_id = DeviceInfo::example(node).bus_id;
            let place = folder.path().join("devices/pci0000:00").join(bus_id.as_str());
            std::fs::create_dir_all(&place).unwrap();
            std::fs::write(place.join("vendor"), "0x1da3\n").unwrap();
            std::fs::write(place.join("local_cpulist"), format!("{cpus}\n")).unwrap();
            std::os::unix::fs::symlink(&place, devices.join(bus_id.as_str())).unwrap();
        }
        let near = |cpus: &[usize]| {
            select_with(&DeviceChoice::Numa, &[], &Sysfs::at(folder.path()), cpus).unwrap()
        };
        assert_eq!(near(&[9]).0, [2, 3, 0, 1]);
        assert_eq!(near(&[0, 9]).0, [0, 1, 2, 3], "all are near");
        let (cards, why) = near(&[77]);
        assert_eq!(cards, [0, 1, 2, 3]);
        assert!(why.contains("names none near"), "{why}");
    }
}
