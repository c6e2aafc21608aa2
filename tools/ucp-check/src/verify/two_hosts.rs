//! `pair --remote`: one side of a pair whose other side is on another host. Standard input is a TCP connection to that
//! host, made by `ucx-gaudi bench`. It carries the plan, and then the messages of the control channel.
//!
//! The side with rank 0 has the plan and reports. The other follows that plan with its own UCX, and takes no path from
//! its peer.

use crate::control::Control;
use crate::matrix::{Case, Plan};
use crate::processes::client;
use crate::report::{Report, Verdict};
use crate::session::Session;
use crate::ucp::Ucx;
use crate::watchdog::Watchdog;
use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// The first line, from rank 0.
#[derive(Serialize, Deserialize)]
struct Order {
    /// The version of this program: a plan of another version may have another meaning.
    version: String,
    plan: Plan,
}

/// Longest order in bytes; a typical one has some hundred.
const LONGEST: usize = 64 << 10;
/// How long to wait for the order, which the peer sends at once.
const PATIENCE: Duration = Duration::from_secs(10);

/// Rank 0: sends the plan, runs it, and prints the results of both sides; an error if anything is wrong.
pub fn lead(plan: Plan) -> Result<()> {
    let mut peer = connection()?;
    let version = String::from(env!("CARGO_PKG_VERSION"));
    let order = Order { version, plan: Plan { ucx: None, json: None, ..plan.clone() } };
    peer.write_all(&[&serde_json::to_vec(&order)?[..], b"\n"].concat())
        .context("the other host does not answer")?;
    let (ucx, found) = side(&plan, 0, peer)?;
    let mut report = Report::new(ucx);
    found.into_iter().for_each(|(case, verdict)| report.add(case, verdict));
    report.conclude(plan.json.as_deref())
}

/// Rank 1: runs what the other host asks for, with this UCX.
pub fn follow(ucx: Option<&Path>) -> Result<()> {
    let peer = connection()?;
    peer.set_read_timeout(Some(PATIENCE)).context("standard input")?;
    // Read byte by byte: the bytes after the order belong to the session.
    let (mut line, mut byte) = (Vec::new(), [0]);
    while (&peer).read(&mut byte).context("the other host is gone")? == 1 && byte != *b"\n" {
        ensure!(line.len() < LONGEST, "what the other host sends is no plan");
        line.push(byte[0]);
    }
    peer.set_read_timeout(None).context("standard input")?;
    let order: Order =
        serde_json::from_slice(&line).context("no plan came, or one of another version")?;
    let ours = env!("CARGO_PKG_VERSION");
    ensure!(order.version == ours, "the other host has version {}, this one {ours}", order.version);
    let plan = Plan { ucx: ucx.map(Path::to_owned), json: None, ..order.plan };
    side(&plan, 1, peer).map(drop)
}

fn connection() -> Result<TcpStream> {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("standard input")?;
    let peer = TcpStream::from(stdin);
    peer.set_nodelay(true)
        .context("standard input is no TCP connection: `ucx-gaudi bench` makes one")?;
    Ok(peer)
}

/// Runs one side. Returns the version of UCX and the verdicts of this side; on rank 0, the verdicts of both.
fn side(plan: &Plan, rank: u8, peer: TcpStream) -> Result<(String, Vec<(Case, Verdict)>)> {
    let ucx = Ucx::load(plan.ucx.as_deref())?;
    let watchdog = Watchdog::start(&format!("process {rank}"), plan.timeout);
    let client = client(plan, rank, ucx, false, &watchdog)?;
    // The two kinds of stream are read and written in the same way.
    let control = Control::new(UnixStream::from(OwnedFd::from(peer)))?;
    let mut session = Session::pair(&client, plan, rank, control)?;
    let mut found = Vec::new();
    session.run(|case, verdict| {
        found.push((case, verdict));
        Ok(())
    })?;
    let mut control = session.close()?.context("a session of two has a channel")?;
    let ours: Vec<Verdict> = found.iter().map(|(_, verdict)| verdict.clone()).collect();
    let theirs = control.exchange(client.worker(), &ours)?;
    ensure!(
        theirs.len() == found.len(),
        "the two sides ran different cases: use one version of UCX"
    );
    let joined =
        found.into_iter().zip(theirs).map(|((case, ours), theirs)| (case, ours.join(theirs)));
    Ok((ucx.version().to_owned(), joined.collect()))
}
