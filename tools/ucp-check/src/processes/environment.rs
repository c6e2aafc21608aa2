//! The environment of the processes of a run: variables, what the kernel refuses them, and the program that starts
//! them, for example in another network namespace.

use anyhow::{Context, Result};
use clap::ValueEnum;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;

pub(crate) fn setting(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("'{text}' is not K=V"))?;
    Ok((name.to_owned(), value.to_owned()))
}

/// A variable for all processes, or for the one with this rank.
#[derive(Clone, Debug)]
pub(crate) struct Variable(Option<u8>, (String, String));

impl FromStr for Variable {
    type Err = String;

    /// `K=V`, or `RANK:K=V`.
    fn from_str(text: &str) -> Result<Self, String> {
        let (name, value) = setting(text)?;
        let Some((rank, name)) = name.split_once(':') else {
            return Ok(Variable(None, (name, value)));
        };
        let rank = rank.parse().map_err(|_| format!("'{text}' is not RANK:K=V"))?;
        Ok(Variable(Some(rank), (name.to_owned(), value)))
    }
}

/// The words before the command of the process with this rank.
#[derive(Clone, Debug)]
pub(crate) struct Via(u8, Vec<String>);

impl FromStr for Via {
    type Err = String;

    /// `RANK:WORDS`, separated by blanks.
    fn from_str(text: &str) -> Result<Self, String> {
        let (rank, words) = text.split_once(':').ok_or("not RANK:COMMAND")?;
        let rank = rank.parse().map_err(|_| format!("'{text}' is not RANK:COMMAND"))?;
        let words: Vec<String> = words.split_whitespace().map(str::to_owned).collect();
        if words.is_empty() { Err("no command".to_owned()) } else { Ok(Via(rank, words)) }
    }
}

/// What the kernel is to refuse a process.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Refusal {
    /// To trace each other (`ptrace`), each being in a Landlock domain of its own: what
    /// kernel.yama.ptrace_scope=1 refuses to siblings, and more
    Ptrace,
}

/// What the processes of a run find around them.
#[derive(Clone, Default, Debug, clap::Args)]
pub struct Environment {
    /// Variable for the processes, e.g. UCX_TLS=tcp,gaudi_cpy, or for one of them: 1:SOFT_GAUDI_LENIENT=import
    #[arg(long = "env", value_name = "[RANK:]K=V")]
    variables: Vec<Variable>,
    /// What the kernel is to refuse the processes
    #[arg(long, value_enum)]
    refuse: Option<Refusal>,
    /// Program that starts the process with this rank, e.g. in another namespace: 1:nsenter -t PID -n
    #[arg(long, value_name = "RANK:COMMAND")]
    via: Vec<Via>,
    /// Be one process of two: the other is a second run with the same arguments, in another container or task,
    /// which meets this one at the socket FILE
    #[arg(long, value_name = "FILE")]
    meet: Option<PathBuf>,
}

impl Environment {
    /// Where to meet the other process, if we do not start it.
    pub(crate) fn meeting(&self) -> Option<&Path> {
        self.meet.as_deref()
    }

    /// The same with one more variable, which existing ones override.
    pub(crate) fn with(&self, name: &str, value: &str) -> Environment {
        let mut more = self.clone();
        more.variables.insert(0, Variable(None, (name.to_owned(), value.to_owned())));
        more
    }

    /// The command of the process with this rank. A program in front of `program` must `exec` it, because we kill the
    /// process by its id.
    pub(crate) fn command(&self, rank: u8, program: &Path) -> Command {
        let Some(Via(_, words)) = self.via.iter().find(|Via(of, _)| *of == rank) else {
            return Command::new(program);
        };
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(program);
        command
    }

    /// Variables of the process with this rank.
    pub(crate) fn variables(&self, rank: u8) -> impl Iterator<Item = (&str, &str)> {
        let its = self.variables.iter().filter(move |it| it.0.is_none_or(|of| of == rank));
        its.map(|Variable(_, (name, value))| (name.as_str(), value.as_str()))
    }

    /// Arguments that pass the rest to a process.
    pub(crate) fn arguments(&self) -> impl Iterator<Item = &'static str> {
        self.refuse.into_iter().flat_map(|Refusal::Ptrace| ["--refuse", "ptrace"])
    }
}

impl Refusal {
    /// Applies to this process and all that it starts. Call it while the process has one thread.
    pub(crate) fn impose(self) -> Result<()> {
        rustix::thread::set_no_new_privs(true).context("giving up new privileges")?;
        match self {
            Refusal::Ptrace => enter_domain().context("a Landlock domain"),
        }
    }
}

/// Creates a Landlock domain that forbids something we never do, and enters it: from then on this process may not trace
/// processes outside the domain.
fn enter_domain() -> io::Result<()> {
    /// LANDLOCK_ACCESS_FS_MAKE_BLOCK: to make block devices.
    const HANDLED: u64 = 1 << 11;
    let (attributes, length) = (HANDLED, size_of::<u64>());
    let check = |done| if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done) };
    // SAFETY: the kernel reads that many bytes of the attributes.
    let rules = check(unsafe {
        libc::syscall(libc::SYS_landlock_create_ruleset, &raw const attributes, length, 0)
    })?;
    // SAFETY: a new descriptor, which is ours.
    let _owned = unsafe { OwnedFd::from_raw_fd(rules as i32) };
    // SAFETY: a plain request about this process.
    check(unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules, 0) }).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_everybodys_or_one_process_s() {
        let variables = ["A=1", "1:A=2", "0:B=x:y=z"].map(|it| it.parse().unwrap()).to_vec();
        let environment = Environment { variables, ..Environment::default() }.with("Z", "0");
        let of = |rank| environment.variables(rank).collect::<Vec<_>>();
        assert_eq!(of(0), [("Z", "0"), ("A", "1"), ("B", "x:y=z")]);
        assert_eq!(of(1), [("Z", "0"), ("A", "1"), ("A", "2")]);
        assert_eq!(of(2), [("Z", "0"), ("A", "1")]);
        for wrong in ["A", "", "x:A=1", "300:A=1"] {
            assert!(wrong.parse::<Variable>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_rank_may_be_started_by_another_program() {
        let via = vec!["1:nsenter -t 7 -n".parse().unwrap()];
        let environment = Environment { via, ..Environment::default() };
        let line = |rank| format!("{:?}", environment.command(rank, Path::new("/bin/it")));
        assert_eq!(line(0), r#""/bin/it""#);
        assert_eq!(line(1), r#""nsenter" "-t" "7" "-n" "/bin/it""#);
        for wrong in ["nsenter", "x:nsenter", "1: "] {
            assert!(wrong.parse::<Via>().is_err(), "{wrong}");
        }
    }
}
