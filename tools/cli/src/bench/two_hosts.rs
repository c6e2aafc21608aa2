//! `bench serve` and `bench --peer`: the two sides of a bench on two hosts. The tool makes one connection per operation
//! and pair of memories, and passes it to `ucp-check`; the messages themselves use the transports that UCX chooses.

use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::process::Stdio;

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::Context;
use crate::failure::{Exit, Failure};
use crate::interrupt;
use crate::output::note;
use crate::ucp_check::UcpCheck;

const SECOND: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// Options of `bench serve`.
#[derive(Debug, Args)]
pub(super) struct Options {
    /// An address of this host and a port. Whoever reaches it can have messages sent, one peer at a time
    #[arg(value_name = "HOST:PORT")]
    address: String,
    /// Folder with libucp, or the prefix of a UCX; default: what the loader path finds
    #[arg(long, value_name = "DIR")]
    ucx: Option<PathBuf>,
}

/// Serves one peer after the other.
pub(super) fn serve(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let checker = UcpCheck::new(context, "serve")?;
    let unable = |error: std::io::Error| {
        let what = format!("cannot listen on {}: {error}", options.address);
        Failure::unable(what, "give an address of this host and a free port, as 10.0.0.2:7471")
    };
    let listener = TcpListener::bind(&options.address).map_err(unable)?;
    let address = listener.local_addr().map_err(unable)?;
    note(&format!("on another host: ucx-gaudi bench --peer {address}"));
    interrupt::watch();
    while !interrupt::interrupted() {
        // A signal ends this wait. If it comes just before the wait, the timeout ends the wait.
        let ready =
            rustix::event::poll(&mut [PollFd::new(&listener, PollFlags::IN)], Some(&SECOND));
        if !ready.is_ok_and(|ready| ready > 0) {
            continue;
        }
        // The peer may have given up meanwhile.
        let Ok((stream, peer)) = listener.accept() else { continue };
        let mut command = checker.pair("tag", "host:host", options.ucx.as_deref());
        command.args(["--remote", "1"]).stdin(Stdio::from(OwnedFd::from(stream)));
        let Some(ended) = checker.run(command)? else { break };
        if ended.status.success() {
            note(&format!("{peer}: done"));
        } else {
            let failure = checker.explain_failure("our part", &ended, options.ucx.as_deref());
            note(&format!("{peer}: {failure}"));
        }
    }
    Ok(Exit::Interrupted)
}

/// A connection to a host that runs `bench serve`.
pub(super) fn connect(peer: &str) -> Result<Stdio, Failure> {
    let stream = TcpStream::connect(peer).map_err(|error| {
        let what = format!("cannot connect to {peer}: {error}");
        Failure::unable(what, format!("run `ucx-gaudi bench serve {peer}` on that host"))
    })?;
    Ok(Stdio::from(OwnedFd::from(stream)))
}
