//! The transport: copies between local memory and memory of other processes; at least one is a Gaudi's.

use std::cell::RefCell;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use gaudi::share::{Access, Identity, Opened, RelayPiece};
use gaudi::{Device, Error, Segment, Side};
use smallvec::SmallVec;
use uct::abi::iface_flag;
use uct::config::Variable;
use uct::{
    Bandwidth, Buffer, Buffers, Completion, DeviceType, Interface, InterfaceAttributes, Level,
    LinearFunc, Link, MemoryType, OpenRequest, Peer, Perf, PerfQuery, Posted, RmaLimits, RmaOp,
    Status, SysDevice, Ucx, log,
};

use super::NAME;
use super::component::IpcComponent;
use super::domain::{IpcDomain, Memory};
use super::peer::{InFlight, PeerEndpoint, PeerProcess, Reached, Relays};
use super::remote_memory::{RemoteMemory, is_no_import};
use super::settings::{self, Estimates};
use crate::addresses::{classify, is_host_memory};
use crate::carrier::{Carried, Segments};
use crate::copies::{Copies, Ended, Failure, NotStarted};
use crate::sleeper::Sleeper;
use crate::status::{self, explain};

/// The estimates that go into addresses, where all processes must agree.
///
/// The domain registers host memory, so UCX compares this with lanes of host-to-host traffic, though this
/// transport carries none. UCX drops lanes that are four times slower than the fastest. With this figure
/// UCX drops neither `cma` (11 GB/s) nor a NIC of 40 Gb/s, and does not drop this lane where there is a NIC of 400 Gb/s.
const WIRE: Estimates = Estimates { bandwidth: 13e9, latency: 3e-6, overhead: 2e-6 };

/// What a relay costs beyond two copies: two messages, and a wake-up of the owner's service.
const RELAY_LATENCY: f64 = 20e-6;
const RELAY_OVERHEAD: f64 = 3e-6;
/// The fraction of a link's bandwidth that UCX is told for a relay. A relay can be faster. But UCX's
/// own pipelines, which only messages have, were faster on machines without idle processors, so their
/// estimate must be better. Emulated puts and gets still look worse.
const RELAY_EFFICIENCY: f64 = 0.4;
/// Bytes per second that one side copies with its CPU, where that is host memory.
const HOST_COPY: f64 = 8e9;

/// An open interface.
pub(crate) struct IpcInterface {
    ucx: &'static Ucx,
    /// The packed identity of this process; zeros if the system does not provide one.
    address: [u8; Identity::LEN],
    estimates: Estimates,
    /// The queues of endpoints that have copies in progress.
    busy: RefCell<Vec<Arc<Copies<InFlight>>>>,
    sleeper: Sleeper,
    failure_level: Level,
    // Dropped after the copies, which use them.
    relays: Relays,
}

/// What to copy, and the peers' memory that the copy uses.
type Prepared = (Carried, Reached);

/// Whether a card of this process imports peers' memory. Else, or while none is open, relays reach it.
fn can_import() -> bool {
    gaudi::runtime().devices().iter().any(|card| card.can_import().is_ok())
}

impl IpcInterface {
    /// Starts a copy between a local buffer and a peer's memory. All errors are reported by the
    /// completion, where UCX looks.
    fn start(
        &self,
        op: RmaOp,
        remote: &PeerEndpoint,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
        completion: Completion,
    ) -> Posted {
        let posted = match self.prepare(op, remote, local, address, key) {
            Ok(None) => return Posted::Done(completion), // no bytes at all
            Ok(Some((carried, reached))) => {
                let in_flight = InFlight::new(&remote.process, reached);
                // SAFETY: UCX keeps the buffers of an operation valid and to itself until the
                // completion; all memory of peers stays mapped as long as `in_flight` lives.
                unsafe { remote.copies.post(carried, in_flight, completion) }.unwrap_or_else(
                    |NotStarted { error, companion, completion }| {
                        remote.copies.fail(Failure::Copy(error), companion, completion)
                    },
                )
            }
            Err(status) => {
                let in_flight = InFlight::new(&remote.process, Reached::default());
                remote.copies.fail(Failure::Refused(status), in_flight, completion)
            }
        };
        if matches!(posted, Posted::Later) {
            let mut busy = self.busy.borrow_mut();
            if !busy.iter().any(|it| Arc::ptr_eq(it, &remote.copies)) {
                busy.push(Arc::clone(&remote.copies));
            }
            self.sleeper.wake();
        }
        posted
    }

    fn prepare(
        &self,
        op: RmaOp,
        remote: &PeerEndpoint,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
    ) -> Result<Option<Prepared>, Status> {
        let key = key.ok_or(Status::INVALID_PARAM)?;
        if local.iter().all(|(buffer, _)| buffer.length() == 0) {
            return Ok(None);
        }
        match key.card().map(|card| self.prepare_import(op, local, address, key, card)) {
            // The card of the local buffer does not import.
            None | Some(Err(Status::UNSUPPORTED)) => {
                self.prepare_relay(op, remote, local, address, key)
            }
            Some(prepared) => prepared,
        }
    }

    /// Prepares a copy through the owner's relay service.
    fn prepare_relay(
        &self,
        op: RmaOp,
        remote: &PeerEndpoint,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: &RemoteMemory,
    ) -> Result<Option<Prepared>, Status> {
        let relay =
            self.relays.open(&remote.process.relay, key.key()).map_err(|e| self.unreached(&e))?;
        let access = match op {
            RmaOp::Put => Access::Write,
            RmaOp::Get => Access::Read,
        };
        let (mut at, mut pieces) = (address, SmallVec::new());
        for (buffer, memory) in local.iter().filter(|(buffer, _)| buffer.length() != 0) {
            if memory.and_then(Memory::attached).is_some() {
                log!(
                    self.ucx,
                    Error,
                    "{NAME}: attached memory is copied only by a card that imports"
                );
                return Err(Status::UNSUPPORTED);
            }
            let (local, device) = classify(buffer.address(), buffer.length());
            if device.is_none() && !is_host_memory(buffer.address(), buffer.length()) {
                let (at, len) = (buffer.address(), buffer.length());
                log!(
                    self.ucx,
                    Error,
                    "{NAME}: {len} bytes at {at:#x} are no memory of this process (any more)"
                );
                return Err(Status::INVALID_ADDR);
            }
            let (key, len) = (*key.key(), buffer.length());
            if !key.contains(at, len as u64) {
                return Err(self.not_inside(at, len));
            }
            pieces.push(RelayPiece { access, key, remote: at, local, device, len });
            at += len as u64;
        }
        Ok(Some((Carried::Relay(relay, pieces), Reached::default())))
    }

    /// Prepares a copy by a card that imports the memory.
    fn prepare_import(
        &self,
        op: RmaOp,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: &RemoteMemory,
        card: &Arc<Device>,
    ) -> Result<Option<Prepared>, Status> {
        let mut at = address;
        let mut on: Option<Arc<Device>> = None;
        let (mut segments, mut reached) = (Segments::new(), Reached::default());
        for (buffer, memory) in local.iter().filter(|(buffer, _)| buffer.length() != 0) {
            // Held from here on: opening the next may unmap memory without a user.
            let (side, device, opened_here) = match memory.and_then(Memory::attached) {
                Some(attached) => {
                    let card = Arc::clone(attached.card().unwrap_or(card));
                    let found = self.locate(attached, &card, buffer.address(), buffer.length());
                    let (opened, here) =
                        found.map_err(|status| self.lost_attached(status, buffer))?;
                    (Side::Device(here), Some(card), Some(opened))
                }
                None => {
                    let (side, device) = classify(buffer.address(), buffer.length());
                    (side, device, None)
                }
            };
            let device = device.unwrap_or_else(|| Arc::clone(card));
            let (opened, there) = self.locate(key, &device, at, buffer.length())?;
            let (dst, src) = op.sides(side, Side::Device(there));
            let host_region = memory.and_then(Memory::host_region).cloned();
            segments.push(Segment { dst, src, len: buffer.length(), host_region });
            // The attributes allow only one buffer; a strided one lies on one card.
            on.get_or_insert(device);
            reached.there.push(opened);
            reached.attached.extend(opened_here);
            at += buffer.length() as u64;
        }
        Ok(on.map(|device| (Carried::Card(device, segments), reached)))
    }

    /// Opens a peer's memory on a card, and finds a range in it.
    fn locate(
        &self,
        key: &RemoteMemory,
        device: &Arc<Device>,
        address: u64,
        length: usize,
    ) -> Result<(Arc<Opened>, gaudi::DeviceAddr), Status> {
        // If the owner of memory that was imported before does not answer now, a relay is used, which waits for it.
        let by_relay =
            |error: &Error| is_no_import(error) || error.kind() == gaudi::ErrorKind::Timeout;
        let opened = key.open_on(device).map_err(|error| match by_relay(&error) {
            true => Status::UNSUPPORTED,
            false => self.unreached(&error),
        })?;
        match opened.translate(address, length) {
            Some(there) => Ok((opened, there)),
            None => Err(self.not_inside(address, length)),
        }
    }

    fn unreached(&self, error: &Error) -> Status {
        if error.errno() == Some(libc::ESRCH) {
            // Reported when the operation ends, as every loss of a peer.
            log!(self.ucx, Debug, "{NAME}: {}", explain(error));
            return Status::CONNECTION_RESET;
        }
        log!(self.ucx, Error, "{NAME}: {}", explain(error));
        status::of(error)
    }

    fn not_inside(&self, address: u64, length: usize) -> Status {
        log!(
            self.ucx,
            Error,
            "{NAME}: {length} bytes at {address:#x} are not in the memory that the remote key is for"
        );
        Status::INVALID_ADDR
    }

    /// The owner of attached memory may have ended: this does not mean that the endpoint's peer ended.
    fn lost_attached(&self, status: Status, buffer: Buffer) -> Status {
        if status != Status::CONNECTION_RESET {
            return status;
        }
        let at = buffer.address();
        log!(self.ucx, Error, "{NAME}: the process whose memory is attached at {at:#x} has ended");
        Status::INVALID_ADDR
    }

    /// Reports the end of an operation to UCX.
    fn conclude(&self, Ended { completion, result, companion }: Ended<InFlight>) {
        let Some(in_flight) = companion else {
            return completion.finish(Ok(())); // a flush
        };
        let remote = Arc::clone(&in_flight.remote);
        // The memory of a process that died stays as long as we have it mapped, and copies on it
        // succeed, although the peer does not exist any more.
        let is_lost = |error: &Error| error.errno() == Some(libc::ESRCH);
        let has_ended = in_flight.has_peer_ended()
            || matches!(&result, Err(Failure::Copy(error)) if is_lost(error))
            || matches!(&result, Err(Failure::Refused(Status::CONNECTION_RESET)))
            || result.is_err() && remote.has_ended();
        // Unmapped before UCX is notified, so that the peer's card is not kept busy.
        drop(in_flight);
        let failed = match result {
            _ if has_ended => Some((Status::CONNECTION_RESET, format!("{remote} has ended"))),
            Ok(()) => None,
            Err(Failure::Copy(error)) => Some((status::of(&error), explain(&error).to_string())),
            Err(Failure::Refused(status)) => Some((status, status.to_string())),
        };
        let Some((status, why)) = failed else { return completion.finish(Ok(())) };
        completion.finish(Err(remote.status_of(status)));
        if status == Status::CANCELED {
            return; // the endpoint is being closed
        }
        // If several copies fail with one endpoint, only the first is logged as an error. As in UCX's own
        // transports, the user can choose the level for lost peers, which a program may well expect.
        let level = match remote.link.is_up() {
            false => Level::Debug,
            true if remote.link.fail(status) && has_ended => self.failure_level,
            true => Level::Error,
        };
        let text = format_args!("{NAME}: copy to or from memory of {remote} failed: {why}");
        self.ucx.log(level, file!(), line!(), text);
    }
}

impl Interface for IpcInterface {
    type Component = IpcComponent;
    type Endpoint = PeerEndpoint;

    const TRANSPORT: &'static str = NAME;
    const CONFIG_PREFIX: &'static str = settings::PREFIX;
    const VARIABLES: &'static [Variable] = settings::TRANSPORT_VARIABLES;

    fn devices(_: &'static Ucx, _: &IpcDomain) -> Vec<uct::Device> {
        vec![uct::Device {
            name: NAME.to_owned(),
            kind: DeviceType::ACC,
            sys_device: SysDevice::UNKNOWN,
        }]
    }

    fn open(_: &IpcDomain, request: &OpenRequest<'_>) -> Result<Self, Status> {
        let address = match Identity::own() {
            Ok(own) => own.pack(),
            Err(reason) => {
                log!(request.ucx, Info, "{NAME} reaches nobody: {reason}");
                [0; Identity::LEN]
            }
        };
        let sleeper = Sleeper::new(request.ucx, NAME);
        let relays = Relays::new(sleeper.notifier());
        Ok(IpcInterface {
            ucx: request.ucx,
            address,
            estimates: Estimates::read(&request.config),
            busy: RefCell::default(),
            sleeper,
            failure_level: request.failure_level,
            relays,
        })
    }

    fn attributes(&self) -> InterfaceAttributes {
        let limits = RmaLimits {
            max_short: 0,
            max_bcopy: 0,
            min_zcopy: 0,
            max_zcopy: usize::MAX,
            opt_zcopy_align: 1,
            align_mtu: 1,
            max_iov: 1,
        };
        InterfaceAttributes {
            flags: iface_flag::CONNECT_TO_IFACE
                | iface_flag::PUT_ZCOPY
                | iface_flag::GET_ZCOPY
                | iface_flag::PENDING
                | iface_flag::ERRHANDLE_PEER_FAILURE
                | iface_flag::EP_CHECK,
            event_flags: self.relays.wakeups().map_or(0, |_| self.sleeper.event_flags()),
            put: limits,
            get: limits,
            bandwidth: Bandwidth { dedicated: 0.0, shared: WIRE.bandwidth },
            latency: LinearFunc { constant: WIRE.latency, slope: 0.0 },
            overhead: WIRE.overhead,
            max_endpoints: None,
        }
    }

    fn estimate(&self, query: &PerfQuery) -> Result<Perf, Status> {
        use MemoryType as M;
        let known = |memory| matches!(memory, M::HOST | M::GAUDI | M::UNKNOWN);
        // UCX has better transports between two ranges of host memory.
        let is_host = (query.local, query.remote) == (M::HOST, M::HOST);
        if !known(query.local) || !known(query.remote) || is_host {
            return Err(Status::UNSUPPORTED);
        }
        let Estimates { mut bandwidth, mut latency, mut overhead } = self.estimates;
        if query.remote == M::HOST || !can_import() {
            bandwidth *= RELAY_EFFICIENCY;
            if query.local == M::HOST || query.remote == M::HOST {
                bandwidth = bandwidth.min(HOST_COPY);
            }
            latency = 2.0 * latency + RELAY_LATENCY;
            overhead += RELAY_OVERHEAD;
        }
        Ok(Perf {
            send_pre_overhead: overhead,
            send_post_overhead: 0.0,
            recv_overhead: 0.0,
            bandwidth: Bandwidth { dedicated: 0.0, shared: bandwidth },
            latency: LinearFunc { constant: latency, slope: 0.0 },
        })
    }

    fn address(&self) -> Vec<u8> {
        self.address.to_vec()
    }

    fn reachable(&self, peer: &Peer<'_>) -> Result<(), String> {
        let why_not = || -> Result<(), String> {
            let identity = Identity::parse(peer.interface).map_err(|error| error.to_string())?;
            if identity.is_own() {
                return Err(String::from("same process"));
            }
            identity.check_reachable().map_err(|error| error.to_string())
        };
        why_not().map_err(|reason| {
            let reason = format!("not reachable: {reason}");
            log!(self.ucx, Debug, "{NAME}: {reason}");
            reason
        })
    }

    fn connect(&self, peer: &Peer<'_>, link: Link) -> Result<PeerEndpoint, Status> {
        let identity = Identity::parse(peer.interface).map_err(|_| Status::UNREACHABLE)?;
        Ok(PeerEndpoint {
            process: Arc::new(PeerProcess::new(identity, link, self.relays.of(&identity))),
            copies: Arc::new(Copies::new(Some(self.ucx))),
        })
    }

    fn leads_to(&self, remote: &PeerEndpoint, peer: &Peer<'_>) -> bool {
        Identity::parse(peer.interface).is_ok_and(|identity| remote.process.is(&identity))
    }

    fn check(&self, remote: &PeerEndpoint) -> Result<(), Status> {
        if remote.process.has_ended() { Err(Status::CONNECTION_RESET) } else { Ok(()) }
    }

    fn zcopy(
        &self,
        op: RmaOp,
        remote: &PeerEndpoint,
        local: Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        Ok(self.start(op, remote, &local, address, key, completion))
    }

    fn cancel(&self, remote: &PeerEndpoint) {
        remote.copies.cancel();
        self.sleeper.wake();
    }

    fn flush(
        &self,
        remote: Option<&PeerEndpoint>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        match remote {
            Some(remote) => Ok(remote.copies.flush(completion)),
            None if self.busy.borrow().iter().all(|copies| copies.is_idle()) => {
                Ok(Posted::Done(completion))
            }
            None => Ok(Posted::Later), // polled
        }
    }

    /// Each endpoint's copies are fenced separately: UCP orders operations to one peer only.
    fn fence(&self) -> Result<(), Status> {
        self.busy.borrow().iter().for_each(|copies| copies.fence());
        Ok(())
    }

    fn progress(&self) -> u32 {
        gaudi::rcache::reclaim();
        gaudi::share::assist();
        if self.busy.borrow().is_empty() {
            return 0;
        }
        self.relays.advance();
        let (mut count, mut next) = (0, 0);
        loop {
            // A statement of its own: callbacks post, which needs the list.
            let copies = self.busy.borrow().get(next).cloned();
            let Some(copies) = copies else { break };
            count += copies.reap(|operation| self.conclude(operation));
            next += 1;
        }
        self.busy.borrow_mut().retain(|copies| !copies.is_idle());
        count
    }

    fn is_busy(&self) -> bool {
        !self.busy.borrow().is_empty()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.relays.wakeups().map(|wakeups| wakeups.as_fd())
    }

    fn arm(&self) -> Result<(), Status> {
        self.relays.advance();
        self.sleeper.arm(self.busy.borrow().iter().map(|copies| &**copies))
    }
}
