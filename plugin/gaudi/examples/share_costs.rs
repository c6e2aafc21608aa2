//! What opening another process's memory costs: cold and warm, compared with what a cold open cannot do
//! without: a round trip that brings a descriptor (`SCM_RIGHTS`), and the driver's import. `cargo xtask
//! bench ipc` runs it.
//!
//! Prints one figure a line: its name, a tab, nanoseconds. Needs a driver library with three cards,
//! which `HL_THUNK_LIBRARY` may name.

mod timing;

use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use gaudi::share::{Limits, RemoteKey, Share};
use gaudi::{DeviceChoice, runtime};
use hl_thunk::{ImportedMapping, Library};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use timing::time;

const LEN: u64 = 1 << 20;
/// Allocations that are opened for the first time.
const FRESH: usize = 1000;

fn hex(share: &Share) -> String {
    share.key().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn key_of(line: &str) -> Result<RemoteKey, Box<dyn std::error::Error>> {
    let bytes = (0..line.len() / 2)
        .map(|at| u8::from_str_radix(&line[2 * at..2 * at + 2], 16))
        .collect::<Result<Vec<u8>, _>>()?;
    Ok(RemoteKey::parse(&bytes)?)
}

/// The socket of a process that hands a descriptor to every client, once for each byte it is sent:
/// the least that a broker must do.
fn counter(process: u32) -> std::io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("share-costs-{process}"))
}

fn hand_out(counter: &UnixListener, descriptor: &OwnedFd) -> std::io::Result<()> {
    loop {
        let (mut peer, _) = counter.accept()?;
        while peer.read_exact(&mut [0]).is_ok() {
            let fds = [descriptor.as_fd()];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut enclosed = SendAncillaryBuffer::new(&mut space);
            enclosed.push(SendAncillaryMessage::ScmRights(&fds));
            sendmsg(&peer, &[IoSlice::new(b".")], &mut enclosed, SendFlags::empty())?;
        }
    }
}

fn ask_for(connection: &mut UnixStream) -> std::io::Result<OwnedFd> {
    connection.write_all(b"?")?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut enclosed = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [IoSliceMut::new(&mut byte)];
    recvmsg(&*connection, &mut parts, &mut enclosed, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = enclosed.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    fds.next().ok_or_else(|| std::io::Error::other("no descriptor came"))
}

/// The other process: shares memory, says how to open it, and waits until it is told to end.
fn export() -> Result<(), Box<dyn std::error::Error>> {
    let device = runtime().open(&DeviceChoice::Index(1))?;
    let memory = device.alloc(LEN, 1)?;
    let share = device.share(memory.addr(), LEN)?;
    let (alone, _) = device.export_alone(memory.addr(), LEN)?;
    let listener = UnixListener::bind_addr(&counter(std::process::id())?)?;
    std::thread::spawn(move || hand_out(&listener, &alone));
    println!("{}", hex(&share));
    let mut fresh = Vec::new();
    for _ in 0..FRESH {
        let memory = device.alloc(LEN, 1)?;
        let share = device.share(memory.addr(), LEN)?;
        println!("{}", hex(&share));
        fresh.push((share, memory));
    }
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    Ok(())
}

/// Binds this process and those that it starts to one core. Where the scheduler wakes a thread on another
/// core, a round trip takes more than twice as long: it must not do so for one figure and not for another.
fn use_one_core() {
    // SAFETY: plain data, of which zeroes are a value, and calls that fill or read it.
    unsafe {
        let mut cores: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(libc::sched_getcpu().max(0) as usize, &mut cores);
        // Where it is refused, the figures are those of whatever cores there are.
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const cores);
    }
}

fn measure() -> Result<(), Box<dyn std::error::Error>> {
    use_one_core();
    let mut exporter = Command::new(std::env::current_exe()?)
        .arg("export")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(exporter.stdout.take().ok_or("piped")?).lines();
    let mut line = || match lines.next() {
        Some(line) => line,
        None => Err(std::io::Error::other("the other process failed")),
    };
    let key = key_of(&line()?)?;
    let fresh = (0..FRESH).map(|_| key_of(&line()?)).collect::<Result<Vec<_>, _>>()?;
    let device = runtime().open(&DeviceChoice::Index(0))?;

    // A card of its own for what the driver alone needs.
    let choice = DeviceChoice::Index(2);
    let bus_id = runtime().candidates(&choice)?.remove(0).bus_id;
    let bare_device = hl_thunk::Device::open(&Library::load()?, bus_id.as_str())?;
    let import = |dmabuf: &OwnedFd| {
        drop(ImportedMapping::new(&bare_device, dmabuf.as_fd(), LEN).expect("an import"));
    };
    let mut connection = UnixStream::connect_addr(&counter(exporter.id())?)?;
    let dmabuf = ask_for(&mut connection)?;
    let mut bare = || {
        import(&ask_for(&mut connection).expect("a descriptor"));
    };
    println!("SCM_RIGHTS and import\t{:.0}", time(&mut bare));
    println!("import alone\t{:.0}", time(|| import(&dmabuf)));
    let open = || drop(key.open(&device).expect("it opens"));
    device.set_handle_limits(Limits { handles: 0, bytes: 0 });
    open();
    // Each can be opened for the first time only once: a median, next to one of the bare calls.
    let once = |f: &mut dyn FnMut()| {
        let start = Instant::now();
        f();
        start.elapsed().as_nanos() as u64
    };
    let median = |mut times: Vec<u64>| {
        times.sort_unstable();
        times[times.len() / 2]
    };
    let mut times = (Vec::new(), Vec::new());
    for key in &fresh {
        times.0.push(once(&mut bare));
        times.1.push(once(&mut || drop(key.open(&device).expect("it opens"))));
    }
    println!("SCM_RIGHTS and import, median\t{}", median(times.0));
    println!("first open, median\t{}", median(times.1));
    println!("cold open\t{:.0}", time(open));
    device.set_handle_limits(Limits { handles: 1, bytes: LEN });
    println!("warm open\t{:.0}", time(open));
    drop(exporter.stdin.take());
    exporter.wait()?;
    Ok(())
}

fn main() -> ExitCode {
    let done = match std::env::args().nth(1).as_deref() {
        Some("export") => export(),
        _ => measure(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
