//! Stock `ucx_perftest` between two processes on one machine: start the server, wait until it
//! listens, run the client, read the figures.

use std::net::{Ipv4Addr, TcpListener};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use procfs::net::TcpState;

use crate::{Device, Finished, Running, Tool, Ucx, Workbench};

/// One `ucx_perftest` run: a server and a client.
#[derive(Debug, Clone)]
pub struct Perftest {
    server: Tool,
    client: Tool,
}

/// The output of both processes.
#[derive(Debug)]
pub struct Pair {
    /// The process that waited; it prints what is tested.
    pub server: Finished,
    /// The process that connected; it prints the figures.
    pub client: Finished,
}

/// The last line of figures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Figures {
    /// Iterations made.
    pub iterations: u64,
    /// Median latency in microseconds.
    pub latency_us: f64,
    /// Mean bandwidth over the whole run, MB/s as UCX counts them (2^20).
    pub bandwidth_mbs: f64,
    /// Messages per second over the whole run.
    pub rate: f64,
}

impl Perftest {
    /// `ucx_perftest -t test -s size`, host memory, no plugin.
    pub fn new(bench: &Workbench, test: &str, size: usize) -> Self {
        Self::of(bench, Ucx::V1_22, test, size)
    }

    fn of(bench: &Workbench, ucx: Ucx, test: &str, size: usize) -> Self {
        let tool =
            bench.tool(ucx, "ucx_perftest").words("-f -v").words(&format!("-t {test} -s {size}"));
        Self::of_tool(tool)
    }

    /// Any tool that becomes `ucx_perftest`, with all its arguments but the peer.
    pub fn of_tool(tool: Tool) -> Self {
        Self { server: tool.clone(), client: tool }
    }

    /// The same with the plugin and a device, and few iterations.
    #[track_caller]
    pub fn on(device: &Device, test: &str, size: usize) -> Self {
        Self::with(Ucx::V1_22, device, test, size)
    }

    /// The same with another UCX.
    #[track_caller]
    pub fn with(ucx: Ucx, device: &Device, test: &str, size: usize) -> Self {
        let bench = Workbench::from_env();
        Self::of(&bench, ucx, test, size).plugin().device(device).iterations(100, 10)
    }

    /// Adds arguments to both.
    #[must_use]
    pub fn words(self, words: &str) -> Self {
        self.both(|tool| tool.words(words))
    }

    /// Changes both processes alike.
    #[must_use]
    pub fn both(mut self, change: impl Fn(Tool) -> Tool) -> Self {
        self.server = change(self.server);
        self.client = change(self.client);
        self
    }

    /// Changes the two processes differently.
    #[must_use]
    pub fn sides(
        mut self,
        server: impl FnOnce(Tool) -> Tool,
        client: impl FnOnce(Tool) -> Tool,
    ) -> Self {
        self.server = server(self.server);
        self.client = client(self.client);
        self
    }

    /// Lets UCX find our plugin.
    #[must_use]
    pub fn plugin(self) -> Self {
        self.both(Tool::plugin)
    }

    /// Puts a driver on the loader path of both.
    #[must_use]
    pub fn device(self, device: &Device) -> Self {
        self.both(|tool| tool.device(device))
    }

    /// Sets the number of iterations and of warm-up iterations.
    #[must_use]
    pub fn iterations(self, measured: u64, warm_up: u64) -> Self {
        self.both(|tool| tool.words(&format!("-n {measured} -w {warm_up}")))
    }

    /// Runs the two processes.
    ///
    /// # Errors
    /// When the server never listens. The caller judges how the two processes ended.
    pub fn run(&self) -> Result<Pair> {
        // Another process may take the free port between its choice and its use: only in that case, try again.
        let mut pair = self.run_once()?;
        for _ in 0..3 {
            if !port_was_taken(&pair.server) {
                break;
            }
            pair = self.run_once()?;
        }
        Ok(pair)
    }

    /// Runs the two processes, which must both succeed.
    ///
    /// # Panics
    /// With the output of both, when they do not.
    #[track_caller]
    pub fn works(&self) -> (Pair, Figures) {
        let pair = self.run().unwrap_or_else(|error| panic!("{error:#}"));
        let figures = pair.figures().unwrap_or_else(|error| panic!("{error:#}"));
        (pair, figures)
    }

    fn run_once(&self) -> Result<Pair> {
        let port = free_port()?;
        let server = self.server.clone().words(&format!("-p {port}"));
        let client = server_address(&self.client, port);
        let running = server.start();
        if !wait_for_listener(&running, port, Duration::from_secs(30)) {
            let server = running.finish(Duration::ZERO);
            if port_was_taken(&server) {
                return Ok(Pair { client: server.clone(), server });
            }
            bail!("ucx_perftest never listened on port {port}:\n{}", server.report());
        }
        let client_end = client.run();
        // If the client failed, the server waits for ever: wait only a moment for it.
        let patience =
            if client_end.success() { self.server.time_limit() } else { Duration::from_secs(2) };
        Ok(Pair { server: running.finish(patience), client: client_end })
    }
}

impl Pair {
    /// The figures, if both processes succeeded.
    ///
    /// # Errors
    /// With the output of both.
    pub fn figures(&self) -> Result<Figures> {
        if !self.server.success() || !self.client.success() {
            bail!("{}\n{}", self.client.report(), self.server.report());
        }
        parse_figures(&self.client.stdout).with_context(|| self.client.report())
    }

    /// Whether one of the two died of a signal.
    pub fn crashed(&self) -> bool {
        self.server.crashed() || self.client.crashed()
    }
}

fn server_address(client: &Tool, port: u16) -> Tool {
    client.clone().arg("127.0.0.1").words(&format!("-p {port}"))
}

/// Reads the CSV that `-v` prints: a line of names, a line of numbers.
fn parse_figures(stdout: &str) -> Result<Figures> {
    let mut lines = stdout.lines().skip_while(|line| !line.starts_with("iterations,"));
    let header = lines.next().context("no CSV header in the output")?;
    let values = lines.last().context("no figures after the CSV header")?;
    let columns: Vec<(&str, &str)> =
        header.split(',').map(str::trim).zip(values.split(',').map(str::trim)).collect();
    let column = |wanted: &dyn Fn(&str) -> bool, what: &str| -> Result<f64> {
        let (_, text) = columns
            .iter()
            .find(|(name, _)| wanted(name))
            .with_context(|| format!("no column for {what} in `{header}`"))?;
        text.parse().with_context(|| format!("{what} is `{text}`, not a number"))
    };
    Ok(Figures {
        iterations: column(&|name| name == "iterations", "iterations")? as u64,
        latency_us: column(&|name| name.ends_with("percentile_lat"), "median latency")?,
        bandwidth_mbs: column(&|name| name == "overall_bw", "bandwidth")?,
        rate: column(&|name| name == "overall_mr", "message rate")?,
    })
}

/// UCX writes its log to standard output.
fn port_was_taken(server: &Finished) -> bool {
    [&server.stdout, &server.stderr].iter().any(|text| text.contains("Address already in use"))
}

fn free_port() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free TCP port")?;
    Ok(listener.local_addr().context("no free TCP port")?.port())
}

/// Waits until the server listens on `port`. We cannot try to connect: the server accepts only one connection.
fn wait_for_listener(server: &Running, port: u16, limit: Duration) -> bool {
    let deadline = Instant::now() + limit;
    while Instant::now() < deadline && !server.has_ended() {
        let mut sockets = [procfs::net::tcp(), procfs::net::tcp6()].into_iter().flatten().flatten();
        let listens = |socket: procfs::net::TcpNetEntry| {
            socket.state == TcpState::Listen && socket.local_address.port() == port
        };
        if sockets.any(listens) {
            return true;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_by_column_name() {
        let out = "iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr\n\
                   1000,0.166,0.181,0.182,42.13,42.14,5522454,5522455\n";
        let figures = parse_figures(out).expect("well formed");
        assert_eq!(
            figures,
            Figures {
                iterations: 1000,
                latency_us: 0.166,
                bandwidth_mbs: 42.14,
                rate: 5_522_455.0
            }
        );
    }

    #[test]
    fn output_without_figures_is_an_error() {
        assert!(parse_figures("").is_err());
        assert!(parse_figures("iterations,avg_lat\n").is_err());
        assert!(
            parse_figures("iterations,50.0_percentile_lat,overall_bw,overall_mr\n1,x,2,3\n")
                .is_err()
        );
    }
}
