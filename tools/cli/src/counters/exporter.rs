//! `ucx-gaudi exporter`: the counters over HTTP, for Prometheus and other readers of its formats.
//!
//! The server is tiny_http: requests need parsing, limits and keep-alive, and that crate has them with four small
//! dependencies and no runtime.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

use clap::Args;
use stats_reader::Kind;
use tiny_http::{Header, Method, Request, Response, Server};

use super::cards::Cards;
use super::openmetrics::{Format, Shown, render};
use super::{Process, interval};
use crate::failure::{Exit, Failure};
use crate::output::note;
use crate::{Context, interrupt};

/// How long it may take until a signal is noticed.
const PATIENCE: Duration = Duration::from_millis(200);

/// Options of `exporter`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Where to listen. Anyone who reaches it can read it: it names cards and users
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9966", value_parser = address)]
    listen: SocketAddr,
    /// Seconds between two looks at the processes: what one counts after the last look before it ends is lost
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print the metrics once and end, for node_exporter's textfile collector
    #[arg(long)]
    once: bool,
}

/// Serves until a signal arrives.
pub(crate) fn run(context: &Context, options: &Options) -> Result<Exit, Failure> {
    let mut exporter = Exporter::new();
    if options.once {
        print!("{}", exporter.page(Format::Text));
        return Ok(Exit::Fine);
    }
    let server = listen(options.listen)?;
    interrupt::watch();
    let address = server.server_addr().to_ip().unwrap_or(options.listen);
    note(&format!("metrics are at http://{address}/metrics"));
    if let Some(folder) = context.prefix.monitoring() {
        note(&format!("Prometheus and Grafana: {}", folder.join("README.md").display()));
    }
    let mut next = Instant::now();
    while !interrupt::interrupted() {
        if Instant::now() >= next {
            exporter.totals.update(Process::all());
            next = Instant::now() + options.interval;
        }
        match server.recv_timeout(PATIENCE.min(options.interval)) {
            Ok(Some(request)) => exporter.answer(request),
            Ok(None) => {}
            // The server's thread has ended, so no request would be answered any more.
            Err(error) => {
                let what = format!("connections to {address} are not accepted any more: {error}");
                return Err(Failure::unable(what, "start it again"));
            }
        }
    }
    Ok(Exit::Fine)
}

/// An argument for `--listen`; for a name, its first IPv4 address.
fn address(text: &str) -> Result<SocketAddr, &'static str> {
    let found: Vec<SocketAddr> = text.to_socket_addrs().into_iter().flatten().collect();
    let first = found.iter().find(|one| one.is_ipv4()).or(found.first());
    first.copied().ok_or(
        "write an address of this machine and a port: 127.0.0.1:9966, 0.0.0.0:9966, [::]:9966",
    )
}

fn listen(address: SocketAddr) -> Result<Server, Failure> {
    let remedy = |error: &io::Error| match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 are for root: choose another with --listen"
        }
        io::ErrorKind::AddrNotAvailable => {
            "this machine has no such address: choose another with --listen"
        }
        _ => "another exporter may be there: choose another port with --listen",
    };
    let unable = |error: &dyn Display, remedy| {
        Failure::unable(format!("cannot listen on {address}: {error}"), remedy)
    };
    let listener = TcpListener::bind(address).map_err(|error| unable(&error, remedy(&error)))?;
    Server::from_listener(listener, None).map_err(|error| unable(&error, "start it again"))
}

struct Exporter {
    cards: Cards,
    totals: Totals,
    shown: Shown,
}

impl Exporter {
    fn new() -> Self {
        Self { cards: Cards::find(), totals: Totals::default(), shown: Shown::new() }
    }

    fn page(&mut self, format: Format) -> String {
        self.totals.update(Process::all());
        render(&self.totals, &self.cards.look(), format, &mut self.shown)
    }

    fn answer(&mut self, request: Request) {
        let accept = request.headers().iter().find(|header| header.field.equiv("Accept"));
        let format = Format::wanted(accept.map(|header| header.value.as_str()));
        let path = request.url().split('?').next().unwrap_or_default().to_owned();
        let plain = "text/plain; charset=utf-8";
        let (status, kind, text) = match (request.method(), path.as_str()) {
            (Method::Get | Method::Head, "/metrics") => {
                (200, format.content_type(), self.page(format))
            }
            (Method::Get | Method::Head, "/") => {
                (200, plain, String::from("ucx-gaudi exporter: the metrics are at /metrics\n"))
            }
            (Method::Get | Method::Head, _) => {
                (404, plain, String::from("the metrics are at /metrics\n"))
            }
            _ => (405, plain, String::from("only GET\n")),
        };
        let header = Header::from_bytes("Content-Type", kind).expect("a header of ours");
        // The client may have disconnected.
        let _ = request
            .respond(Response::from_string(text).with_status_code(status).with_header(header));
    }
}

/// The card and user that counters belong to. The card is empty for counters that belong to none.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Owner {
    pub(super) card: String,
    pub(super) user: String,
}

type Sums = BTreeMap<Owner, BTreeMap<String, u64>>;

/// Counters summed up by card and user. They never decrease: the counts of a process stay when it ends.
#[derive(Debug, Default)]
pub(super) struct Totals {
    running: Vec<Process>,
    /// Only counters that grow.
    ended: Sums,
}

impl Totals {
    /// Records which processes run now.
    pub(super) fn update(&mut self, now: Vec<Process>) {
        for mut before in std::mem::replace(&mut self.running, now) {
            let same = self.running.iter_mut().find(|process| process.is_same(&before));
            if let Some(process) = same {
                // A process that becomes unreadable for others then belongs to root: keep its user.
                process.user = std::mem::take(&mut before.user);
                continue;
            }
            let replaced = self.running.iter().any(|process| process.pid == before.pid);
            if !replaced && stats_reader::is_running(before.pid, before.snapshot.start_time) {
                // The process could not be read this time.
                self.running.push(before);
            } else {
                add(&mut self.ended, &before, |kind| kind == Kind::Sum);
            }
        }
    }

    /// All of them.
    pub(super) fn sums(&self) -> Sums {
        let mut sums = self.ended.clone();
        for process in &self.running {
            add(&mut sums, process, |kind| kind != Kind::Most);
        }
        sums
    }
}

fn add(sums: &mut Sums, process: &Process, wanted: impl Fn(Kind) -> bool) {
    let cards = process.snapshot.cards.iter().map(|card| (card.bus_id.as_str(), &card.counters));
    for (card, counters) in std::iter::once(("", &process.snapshot.other)).chain(cards) {
        let owner = Owner { card: card.to_owned(), user: process.user.clone() };
        let sums = sums.entry(owner).or_default();
        for (counter, value) in counters.iter().filter(|(counter, _)| wanted(counter.kind)) {
            let sum = sums.entry(counter.name.clone()).or_default();
            *sum = sum.wrapping_add(value);
        }
    }
}

#[cfg(test)]
impl Totals {
    pub(super) fn of(ended: Sums) -> Self {
        Self { running: Vec::new(), ended }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        options: Options,
    }

    #[test]
    fn nobody_on_another_host_reaches_it_unless_asked_for() {
        let listen = |line: &[&str]| Line::parse_from(line).options.listen.ip();
        assert!(listen(&["exporter"]).is_loopback());
        assert!(!listen(&["exporter", "--listen", "0.0.0.0:9966"]).is_loopback());
    }

    #[test]
    fn an_address_to_listen_on_has_a_port() {
        assert_eq!(address("0.0.0.0:80"), Ok(SocketAddr::from(([0, 0, 0, 0], 80))));
        assert_eq!(address("localhost:9966").map(|address| address.port()), Ok(9966));
        for wrong in ["9966", "127.0.0.1", "", "127.0.0.1:x"] {
            assert!(address(wrong).is_err_and(|text| text.contains("127.0.0.1:9966")), "{wrong}");
        }
    }
}
