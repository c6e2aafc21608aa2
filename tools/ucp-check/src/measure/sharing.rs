//! `measure sharing`: the cost of opening another process's memory, cold and warm. The floor is the minimum of a cold
//! open: a round trip that brings a descriptor (`SCM_RIGHTS`), and the driver's import. Needs three cards.

use super::record::Record;
use super::timing::{median, time};
use crate::processes::{Environment, Group, Job, Member, Message, descriptors};
use anyhow::{Context, Result};
use gaudi::share::{Limits, RemoteKey};
use gaudi::{DeviceChoice, runtime};
use hl_thunk::{ImportedMapping, Library};
use rustix::thread::{CpuSet, sched_getcpu, sched_setaffinity};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

const LEN: u64 = 1 << 20;
/// Allocations that are opened for the first time.
const FRESH: usize = 1000;
const TIMEOUT: f64 = 60.0;
/// A cold open may take this many times as long as its floor.
const TARGET: f64 = 2.0;

pub(super) fn run() -> Result<()> {
    // Run both processes on one core. A round trip takes more than twice as long if the scheduler wakes a thread on
    // another core, and that must not happen to one figure and not to another.
    let mut core = CpuSet::new();
    core.set(sched_getcpu());
    sched_setaffinity(None, &core).context("staying on one core")?;
    Group::start(&Job::Sharing, 2, TIMEOUT, &Environment::default())?.print_lines()
}

/// One of the two processes: the first opens the memory that the second shares.
pub(crate) fn side(mut member: Member) -> Result<()> {
    let other = member.only_channel()?.into_socket()?;
    if member.rank == 1 {
        return export(other);
    }
    measure(other)?
        .into_iter()
        .try_for_each(|it| member.report(&Message::Line(serde_json::to_string(&it)?)))
}

/// Shares memory, sends the keys of all allocations, and then sends a descriptor for each byte that it receives: the
/// minimum that an owner must do.
fn export(mut other: UnixStream) -> Result<()> {
    let device = runtime().open(&DeviceChoice::Index(1))?;
    let (mut keys, mut kept) = (Vec::new(), Vec::new());
    for _ in 0..=FRESH {
        let memory = device.alloc(LEN, 1)?;
        let share = device.share(memory.addr(), LEN)?;
        keys.push(share.key().to_vec());
        kept.push((share, memory));
    }
    other.write_all((serde_json::to_string(&keys)? + "\n").as_bytes())?;
    let (alone, _) = device.export_alone(kept[0].1.addr(), LEN)?;
    while other.read_exact(&mut [0]).is_ok() {
        descriptors::send(&other, b".", &[alone.as_fd()])?;
    }
    Ok(())
}

fn measure(other: UnixStream) -> Result<[Record; 3]> {
    let mut line = String::new();
    BufReader::new(&other).read_line(&mut line)?;
    let keys: Vec<Vec<u8>> = serde_json::from_str(&line).context("keys of the other process")?;
    let keys = keys.iter().map(|key| Ok(RemoteKey::parse(key)?)).collect::<Result<Vec<_>>>()?;
    let (key, fresh) = keys.split_first().context("no key")?;
    let device = runtime().open(&DeviceChoice::Index(0))?;
    // A separate card measures what the driver alone needs.
    let bus_id = runtime().candidates(&DeviceChoice::Index(2))?.remove(0).bus_id;
    let bare_device = hl_thunk::Device::open(&Library::load()?, bus_id.as_str())?;
    let ask = || -> Result<OwnedFd> {
        (&other).write_all(b"?")?;
        descriptors::receive(&other)?.pop().context("no descriptor came")
    };
    let bare = || {
        let dmabuf = ask().expect("a descriptor");
        drop(ImportedMapping::new(&bare_device, dmabuf.as_fd(), LEN).expect("an import"));
    };
    let opened = |key: &RemoteKey| drop(key.open(&device).expect("it opens"));
    let floor = time(bare) / 1e3;
    device.set_handle_limits(Limits { handles: 0, bytes: 0 });
    opened(key);
    // Each allocation can be opened for the first time only once, so take medians over many.
    let once = |f: &dyn Fn()| {
        let start = Instant::now();
        f();
        start.elapsed().as_secs_f64() * 1e6
    };
    let times = fresh.iter().map(|key| (once(&bare), once(&|| opened(key))));
    let (floors, firsts): (Vec<f64>, Vec<f64>) = times.unzip();
    let cold = time(|| opened(key)) / 1e3;
    device.set_handle_limits(Limits { handles: 1, bytes: LEN });
    let warm = time(|| opened(key)) / 1e3;
    let record = |name, value, floor, target: Option<f64>| {
        Record::new(format!("{name}, floor: SCM_RIGHTS and import"), value, "µs", floor, target)
    };
    Ok([
        record("cold open", cold, floor, Some(TARGET)),
        record("first open ever (medians)", median(firsts), median(floors), Some(TARGET)),
        record("warm open", warm, floor, None),
    ])
}
