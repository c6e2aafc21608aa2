//! A card's compute context: what a successful open creates and its last close ends.
//!
//! The state lives in the process that opened the card; the lock on the compute node's open file
//! description ties the card to it ([`crate::ownership`]).
//!
//! The kernel releases a card inside the last close, including a plain `close(2)` and the exit of a process: it resets
//! the card, opens return `EAGAIN` meanwhile, and only then the call returns or the parent learns of the exit. Here
//! only `hlthunk_close` can do that. If a context ended in another way, the next open does the release: it takes as
//! long as the close would have taken, and other opens return `EAGAIN` meanwhile.

use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use rustix::io::Errno;

use crate::address_space::AddressSpace;
use crate::asic::{Generation, Profile, SCAL_QUEUES};
use crate::card_memory::{self, CardMemory};
use crate::command_buffers::CommandBuffers;
use crate::dma_core::DmaCore;
use crate::events::Events;
use crate::interrupts::Interrupts;
use crate::node::{Identity, Node, Role, node};
use crate::ownership::OwnershipLock;
use crate::queue::Queue;
use crate::registers::Registers;
use crate::signals::Signals;
use crate::state::{self, StateFile, Word};
use crate::submission::{Submission, Window};
use crate::timing::{Links, Timing};
use crate::{blocks, dmabuf, guarded, ownership, posted, ring, workers};

/// One open card.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) device: u32,
    /// Number of this context on its card.
    pub(crate) id: u64,
    forks: u64,
    pub(crate) node: &'static Node,
    pub(crate) profile: &'static Profile,
    pub(crate) memory: &'static CardMemory,
    pub(crate) state: &'static StateFile,
    pub(crate) dram_size: u64,
    space: RwLock<AddressSpace>,
    buffers: Mutex<CommandBuffers>,
    pub(crate) window: Window,
    pub(crate) timing: Timing,
    /// Submissions whose work is done, by the time at which the end is reported, and their numbers.
    pub(crate) ends: Mutex<BTreeMap<(u64, u64), Arc<Submission>>>,
    /// Held while a thread maps or unmaps, like the driver's lock of the MMU.
    pub(crate) mmu: Mutex<()>,
    pub(crate) queues: Vec<Queue>,
    /// Locked while the jobs of one submission enter their queues.
    pub(crate) entering: Mutex<()>,
    /// Descriptor through which SCAL drives the engines (`api::scal`), or -1. SCAL's queues come after the driver's.
    pub(crate) scal: AtomicI32,
    /// Queues whose fence was passed and that no thread runs yet.
    pub(crate) ready: Mutex<VecDeque<u32>>,
    pub(crate) registers: Mutex<Registers>,
    pub(crate) interrupts: Interrupts,
    /// Strided DMA of Gaudi1, by engine.
    pub(crate) dma_cores: Mutex<[DmaCore; 8]>,
    /// Queues that wait for their engine's arbiter, with their priorities.
    pub(crate) arbitrating: Mutex<Vec<(u32, u32)>>,
    signals: Mutex<Signals>,
    pub(crate) events: Events,
    /// Whether this is on the list of contexts whose timeouts a worker checks.
    pub(crate) watched: AtomicBool,
    /// Debug mode was entered.
    debugging: AtomicBool,
    /// Number of threads that wait for any of several submissions; `any_ended` wakes them.
    pub(crate) any_waiters: AtomicU64,
    pub(crate) any_ended: (Mutex<()>, Condvar),
    /// The card was taken out of the machine.
    removed: AtomicBool,
    /// The card was reset: nothing works until it is closed and opened again.
    pub(crate) down: AtomicBool,
    /// Submissions not ended.
    pub(crate) in_flight: AtomicU64,
    /// Keeps the card owned while work is in flight, even if the program closes its descriptor with `close(2)`.
    pub(crate) busy_fd: Mutex<Option<OwnedFd>>,
    /// Whether `busy_fd` may be set; saves small submissions the lock.
    pub(crate) has_busy_fd: AtomicBool,
    pub(crate) epoch: Instant,
    /// Submissions whose end a fault rule delays, and how many other submissions must end first.
    pub(crate) delayed: Mutex<Vec<(Arc<Submission>, u64)>>,
    /// Nanoseconds since `epoch` when a submission last ended.
    pub(crate) last_end: AtomicU64,
}

static CONTEXTS: [RwLock<Option<Arc<Context>>>; 256] = [const { RwLock::new(None) }; 256];

fn slot(device: u32) -> Result<&'static RwLock<Option<Arc<Context>>>, Errno> {
    CONTEXTS.get(device as usize).ok_or(Errno::NODEV)
}

/// Opens a card for computing.
pub(crate) fn open(device: u32) -> Result<OwnedFd, Errno> {
    let node = node()?;
    let fd = node.open(device, Role::Compute)?;
    let state = state::of(node, device)?;
    let was_released = {
        let _deciding = deciding(node, device)?;
        let now = state.read()?;
        if now.get(Word::Removed) != 0 {
            return Err(Errno::NODEV);
        }
        match ownership::lock(fd.as_fd()) {
            Ok(()) => {}
            Err(Errno::AGAIN | Errno::ACCESS) => {
                let releasing = now.get(Word::InRelease) != 0;
                return Err(if releasing { Errno::AGAIN } else { Errno::BUSY });
            }
            Err(other) => return Err(other),
        }
        if dmabuf::any_alive(node, device) {
            return Err(Errno::BUSY);
        }
        let was_released = now.get(Word::InUse) == 0;
        if !was_released {
            state.set_unowned(Word::InRelease, 1);
        }
        was_released
    };
    let slot = slot(device)?;
    // A context left over from a descriptor that was closed with plain `close(2)`. Stop it before the release: the
    // process of a context that was reset is killed after a while.
    let stale = slot.write().unwrap_or_else(|poisoned| poisoned.into_inner()).take();
    if let Some(stale) = stale {
        stale.stop();
    }
    if !was_released {
        release(node, state);
        state.set_unowned(Word::InRelease, 0);
    }
    guarded::install();
    if !node.config.lenient.unpinned {
        ring::prepare();
    }
    node.announce_model();
    let memory = card_memory::of(node, device)?;
    memory.reset(node.config.dram_size)?;
    if node.config.early_writes {
        posted::of(&node.memory_path(device), memory.identity()?)?.forget()?;
    }
    // For the library's own mapping, see `command_buffers`.
    let second = node.open(device, Role::Compute)?;
    let buffers = CommandBuffers::new(second)?;
    blocks::prepare(buffers.file(), node.profile).map_err(|errno| node.out_of_space(errno))?;
    let id = state.begin(node.config.dram_size).map_err(|errno| node.out_of_space(errno))?;
    let profile = node.profile;
    let space = AddressSpace::new(profile, memory, node.config.dram_size, node.config.bar);
    let links = match node.config.model {
        Some(_) => Links::of(&node.memory_path(device), device)?,
        None => Links::default(),
    };
    let context = Context {
        device,
        id,
        forks: workers::fork_generation(),
        node,
        profile,
        memory,
        state,
        dram_size: node.config.dram_size,
        space: RwLock::new(space),
        buffers: Mutex::new(buffers),
        window: Window::new(profile.max_pending),
        timing: Timing::new(node.config, profile.queues + SCAL_QUEUES, links),
        ends: Mutex::default(),
        mmu: Mutex::default(),
        queues: (0..profile.queues)
            .map(|_| Queue::new(profile.generation))
            .chain((0..SCAL_QUEUES).map(|_| Queue::new(Generation::Gaudi2)))
            .collect(),
        scal: AtomicI32::new(-1),
        entering: Mutex::new(()),
        ready: Mutex::default(),
        registers: Mutex::new(Registers::new(profile)),
        interrupts: Interrupts::default(),
        dma_cores: Mutex::default(),
        arbitrating: Mutex::default(),
        signals: Mutex::new(Signals::new(profile)),
        events: Events::default(),
        watched: AtomicBool::new(false),
        debugging: AtomicBool::new(false),
        any_waiters: AtomicU64::new(0),
        any_ended: (Mutex::new(()), Condvar::new()),
        removed: AtomicBool::new(false),
        down: AtomicBool::new(false),
        in_flight: AtomicU64::new(0),
        busy_fd: Mutex::new(None),
        has_busy_fd: AtomicBool::new(false),
        epoch: Instant::now(),
        delayed: Mutex::default(),
        last_end: AtomicU64::new(0),
    };
    *slot.write().unwrap_or_else(|poisoned| poisoned.into_inner()) = Some(Arc::new(context));
    Ok(fd)
}

/// Every context of this process.
fn all() -> impl Iterator<Item = Arc<Context>> {
    CONTEXTS
        .iter()
        .filter_map(|slot| slot.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone())
}

/// Resets every card this process has open (fault on demand).
pub(crate) fn reset_all() {
    all().for_each(|context| context.reset(None));
}

/// Takes every card this process has open out of the machine.
pub(crate) fn remove_all() {
    for context in all() {
        context.state.set_unowned(Word::Removed, 1);
        context.removed.store(true, Ordering::Release);
        context.take_down(None);
    }
}

/// Closes a descriptor and, if it was the last of its card, ends the context.
pub(crate) fn close(fd: OwnedFd) {
    match node().and_then(|node| Ok((node, node.identify(fd.as_fd())?))) {
        Ok((node, Identity { device, role: Role::Compute, .. })) => {
            // If this fails, the next open cleans up the card.
            let _ = end_if_last(node, device, fd);
        }
        _ => drop(fd),
    }
}

/// Takes the lock under which processes and threads decide whether an open gets the card.
fn deciding(node: &Node, device: u32) -> Result<OwnershipLock, Errno> {
    OwnershipLock::wait(node.open(device, Role::Compute)?)
}

/// Drops `fd`. If that was the last reference to the owner's open file, starts the release before another open can get the card.
fn end_if_last(node: &Node, device: u32, fd: OwnedFd) -> Result<(), Errno> {
    let state = state::of(node, device)?;
    let own = node.open(device, Role::Compute)?;
    let lock = deciding(node, device)?;
    drop(fd);
    // Drop our own copy, kept for work in flight: the driver does not wait for that work.
    let context = slot(device)?.read().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
    let context = context.filter(|context| context.is_current());
    if let Some(context) = &context {
        drop(context.busy_fd.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).take());
    }
    if dmabuf::any_alive(node, device) {
        return Ok(());
    }
    ownership::lock(own.as_fd())?;
    state.set_unowned(Word::InRelease, 1);
    drop(lock);
    if let Some(context) = &context
        && context.in_flight.load(Ordering::Acquire) > 0
        && !context.down.load(Ordering::Acquire)
    {
        // "User process closed FD but device still in use".
        node.log_kernel_error(device, "in-use", 0);
        state.reset();
    }
    if let Ok(slot) = slot(device) {
        let mut slot = slot.write().unwrap_or_else(|poisoned| poisoned.into_inner());
        if slot.as_ref().is_some_and(|context| context.is_current())
            && let Some(context) = slot.take()
        {
            context.stop();
        }
    }
    release(node, state);
    if let Ok(memory) = card_memory::of(node, device) {
        let _ = memory.reset(0);
    }
    let _lock = deciding(node, device);
    state.set_unowned(Word::InRelease, 0);
    ownership::release(own.as_fd());
    Ok(())
}

/// Sleeps as long as the card takes to reset itself, on close or after a fault. The caller holds the card's lock.
fn release(node: &Node, state: &StateFile) {
    let was_reset = state.read().is_ok_and(|now| now.get(Word::Status) == state::IN_RESET);
    let config = node.config;
    std::thread::sleep(if was_reset { config.reset_time } else { config.close_time });
    state.end();
}

/// The context behind a compute descriptor.
///
/// `EOPNOTSUPP` for a control node and for a compute node that another process opened (passed
/// descriptors and forked children): contexts do not move between processes here.
pub(crate) fn of(fd: BorrowedFd<'_>) -> Result<Arc<Context>, Errno> {
    let node = node().map_err(|_| Errno::NOTTY)?;
    let identity = node.identify(fd)?;
    if identity.role == Role::Control {
        return Err(Errno::NOTTY);
    }
    let slot = slot(identity.device)?.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    match &*slot {
        Some(context)
            if context.forks == workers::fork_generation()
                && (identity.opened_here || context.is_current()) =>
        {
            if context.removed.load(Ordering::Acquire) {
                return Err(Errno::NODEV);
            }
            Ok(context.clone())
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

/// The context behind a compute descriptor of a card that works.
pub(crate) fn operational(fd: BorrowedFd<'_>) -> Result<Arc<Context>, Errno> {
    let context = of(fd)?;
    if context.down.load(Ordering::Acquire) { Err(Errno::BUSY) } else { Ok(context) }
}

impl Context {
    /// Whether this is still the card's current context; true if the state file cannot be read.
    fn is_current(&self) -> bool {
        self.state.read().map_or(true, |state| state.get(Word::Context) == self.id)
    }

    /// Kills this process if it still has the card open some time after a reset, as the driver does.
    pub(crate) fn kill_holder_later(&self) {
        let Some(time) = self.node.config.reset_kill else { return };
        // A process that registered for events gets thirty times as long to close the card.
        let time = if self.events.is_registered() { time * 30 } else { time };
        let (node, device, id) = (self.node, self.device, self.id);
        let kill = move || {
            std::thread::sleep(time);
            let current = slot(device).is_ok_and(|slot| {
                let slot = slot.read().unwrap_or_else(|poisoned| poisoned.into_inner());
                slot.as_ref().is_some_and(|context| context.id == id && context.is_current())
            });
            // If the query fails, do not kill.
            if current && node.is_owned(device).unwrap_or(false) {
                eprintln!(
                    "soft-gaudi: device {device} ({}) was reset {} ms ago and this process still holds it: \
                     killed, as by the driver (SOFT_GAUDI_RESET_KILL)",
                    crate::asic::bus_id(device),
                    time.as_millis()
                );
                // SAFETY: no preconditions.
                unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            }
        };
        workers::spawn("soft-gaudi-reset".to_owned(), kill);
    }

    /// Logs the line that the kernel logs when it refuses a call. A refusal during a reset (`EBUSY`) is not logged.
    pub(crate) fn log_refusal<T>(&self, what: &str, result: Result<T, Errno>) -> Result<T, Errno> {
        result.inspect_err(|errno| {
            if *errno != Errno::BUSY {
                self.node.log_kernel_error(self.device, what, errno.raw_os_error());
            }
        })
    }

    /// If times are modelled, sleeps as long as the driver takes to map or unmap memory with `host_len` host bytes.
    pub(crate) fn model_mapping(&self, host_len: u64) {
        if let Some(model) = self.node.config.model {
            let _one_at_a_time = self.mmu.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            std::thread::sleep(model.map_time(host_len));
        }
    }

    /// Makes writes of other devices visible to the engines.
    pub(crate) fn flush_peer_writes(&self) -> Result<(), Errno> {
        if self.node.config.early_writes {
            let path = self.node.memory_path(self.device);
            posted::of(&path, self.memory.identity()?)?.flush();
        }
        Ok(())
    }

    pub(crate) fn space(&self) -> RwLockReadGuard<'_, AddressSpace> {
        self.space.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn space_mut(&self) -> RwLockWriteGuard<'_, AddressSpace> {
        self.space.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn buffers(&self) -> MutexGuard<'_, CommandBuffers> {
        self.buffers.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(crate) fn signals(&self) -> MutexGuard<'_, Signals> {
        self.signals.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Publishes how much DRAM is allocated.
    pub(crate) fn account(&self, space: &AddressSpace) {
        self.state.set(Word::DramUsed, space.dram_used());
    }

    /// The debug ioctl. It enters and leaves debug mode; other operations fail, with `EFAULT` outside the mode.
    pub(crate) fn debug(&self, set_mode: bool, enable: bool) -> Result<(), Errno> {
        if set_mode {
            self.debugging.store(enable, Ordering::Relaxed);
            return Ok(());
        }
        Err(if self.debugging.load(Ordering::Relaxed) { Errno::INVAL } else { Errno::FAULT })
    }

    /// Ends everything; waits until no thread works for this context.
    fn stop(self: &Arc<Self>) {
        self.take_down(None);
        while self.queues.iter().any(Queue::is_running) {
            std::thread::yield_now();
        }
        workers::forget_context(self);
    }
}
