//! What this process has of the node: made when the first device is opened, kept until it ends.

use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use crate::config::{self, log};
use crate::hca::Hca;
use crate::hca::events::lock;
use crate::hca::model::LinkModel;
use crate::link::descriptor::Generation;
use crate::link::engine::{Engine, Listeners};
use crate::node::{Node, random};
use crate::ports;
use crate::stats::{self, STATS};

/// HCA and engine of this process.
#[derive(Clone)]
pub(super) struct Process {
    pub(super) hca: Arc<Hca>,
    pub(super) engine: Arc<Engine>,
    made_by: Generation,
}

impl Process {
    /// Whether it was made by this process, and not by the one that forked it.
    pub(super) fn is_ours(&self) -> bool {
        self.made_by == Generation::current()
    }
}

static PROCESS: Mutex<Option<&'static Process>> = Mutex::new(None);

/// The process's HCA, made at first use. A forked child makes its own: the parent's thread and sockets do not exist in the child.
pub(super) fn get() -> Result<&'static Process, Errno> {
    let mut process = lock(&PROCESS);
    if let Some(process) = process.filter(|process| process.is_ours()) {
        return Ok(process);
    }
    let config = config::get();
    let join = Node::join(config, |node| Listeners::open(node, config));
    let (node, listeners) = join.inspect_err(|error| {
        eprintln!("soft-rdma: cannot use {}: {error}", config.folder.display());
    })?;
    let first_qp = u32::from_ne_bytes(random());
    let slot = node.slot;
    let mut hca = Hca::new(slot, first_qp, config.inline_limit, &STATS);
    hca.model = config.model.map(LinkModel::new);
    hca.failing = config.failing;
    hca.ports = ports::map(&config.folder, config.node)?;
    let hca = Arc::new(hca);
    let engine = Engine::start(hca.clone(), node, listeners, config)?;
    // SAFETY: the library is never unloaded, so the function stays.
    unsafe { libc::atexit(at_exit) };
    log!(
        Info,
        "this is a software HCA, not hardware ({} device(s), node {}, slot {slot}, {})",
        config.devices,
        config.node,
        config.folder.display()
    );
    // Leaked: sockets and thread serve until the process ends.
    let made: &'static Process =
        Box::leak(Box::new(Process { hca, engine, made_by: Generation::current() }));
    *process = Some(made);
    Ok(made)
}

/// Runs when the process ends by `exit`: the HCA answers what it has executed, then writes its counters.
extern "C" fn at_exit() {
    let ours = PROCESS.try_lock().ok().and_then(|process| *process);
    // Not in a forked child: the engine's thread does not exist there, and its locks may be held.
    if let Some(process) = ours.filter(|process| process.is_ours()) {
        process.engine.finish();
        stats::write();
    }
}
