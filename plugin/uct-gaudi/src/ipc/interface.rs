//! The transport: copies between local memory and Gaudi memory of other processes.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, OnceLock};

use gaudi::share::{Identity, Opened};
use gaudi::{Device, Error, ErrorKind, Segment, Side};
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
use super::peer::{InFlight, PeerProcess, Reached};
use super::remote_memory::RemoteMemory;
use super::settings::{self, Estimates};
use crate::addresses::classify;
use crate::copies::{Copies, Ended, Failure, NotStarted, OnFailure, Segments};
use crate::sleeper::Sleeper;
use crate::status::{self, explain};

/// What goes into addresses, where all processes must agree.
const WIRE: Estimates = Estimates { bandwidth: 22e9, latency: 3e-6, overhead: 2e-6 };

/// An open interface.
pub(crate) struct IpcInterface {
    ucx: &'static Ucx,
    /// Who we are, packed; zeros where the system does not say.
    address: [u8; Identity::LEN],
    estimates: Estimates,
    copies: Copies<InFlight>,
    sleeper: Sleeper,
    failure_level: Level,
    /// Why no peer is reachable, as first found out.
    ///
    /// An answer that changed when the first card is opened would change the lanes of an endpoint that
    /// is being connected, and UCX 1.23 crashes on the keys that it unpacked before (the new remote-key
    /// configuration has no distances of lanes: `ucp_rkey_update_config`).
    no_import: OnceLock<Option<String>>,
}

/// What to copy, with which card.
struct Prepared {
    device: Arc<Device>,
    segments: Segments,
    reached: Reached,
}

/// Why memory of peers cannot be imported, if that is known already: a card has to be open. One that
/// cannot (the application's own, not lent) does not speak for the others. One that does not answer,
/// because it is in reset, may be able to: if not, unpacking a key says so.
fn why_no_import() -> Option<String> {
    let cards = gaudi::runtime().devices();
    let lasting =
        |error: &Error| error.is_unsupported() || error.kind() == ErrorKind::PermissionDenied;
    let reason = unless_one_may(cards.iter().map(|card| card.can_import()), lasting);
    reason.map(|error| error.detail().to_owned())
}

/// The first reason, if everyone has a lasting one.
fn unless_one_may<E>(
    answers: impl IntoIterator<Item = Result<(), E>>,
    lasting: impl Fn(&E) -> bool,
) -> Option<E> {
    let reasons: Option<Vec<E>> =
        answers.into_iter().map(|answer| answer.err().filter(&lasting)).collect();
    reasons?.into_iter().next()
}

impl IpcInterface {
    /// Starts a copy between a local buffer and a peer's memory. Whatever is wrong shows in the
    /// completion, where UCX looks.
    fn start(
        &self,
        op: RmaOp,
        remote: &Arc<PeerProcess>,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
        completion: Completion,
    ) -> Posted {
        let posted = match self.prepare(op, local, address, key) {
            Ok(None) => return Posted::Done(completion), // no bytes at all
            Ok(Some(Prepared { device, segments, reached })) => {
                let in_flight = InFlight::new(remote, reached);
                // SAFETY: UCX keeps the buffers of an operation valid and to itself until the
                // completion; all memory of peers stays mapped as long as `in_flight` lives.
                unsafe { self.copies.post(device, segments, in_flight, completion) }.unwrap_or_else(
                    |NotStarted { error, companion, completion }| {
                        self.copies.fail(Failure::Copy(error), companion, completion)
                    },
                )
            }
            Err(status) => {
                let in_flight = InFlight::new(remote, Reached::default());
                self.copies.fail(Failure::Refused(status), in_flight, completion)
            }
        };
        if matches!(posted, Posted::Later) {
            self.sleeper.wake();
        }
        posted
    }

    fn prepare(
        &self,
        op: RmaOp,
        local: &Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
    ) -> Result<Option<Prepared>, Status> {
        let key = key.ok_or(Status::INVALID_PARAM)?;
        let mut at = address;
        let mut prepared: Option<Prepared> = None;
        for (buffer, memory) in local.iter().filter(|(buffer, _)| buffer.length() != 0) {
            // Kept from here on: opening the next may unmap what has no user.
            let (side, device, opened_here) = match memory.and_then(Memory::attached) {
                Some(attached) => {
                    let card = Arc::clone(attached.card());
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
            let device = device.unwrap_or_else(|| Arc::clone(key.card()));
            let (opened, there) = self.locate(key, &device, at, buffer.length())?;
            let (dst, src) = op.sides(side, Side::Device(there));
            let host_region = memory.and_then(Memory::host_region).cloned();
            let segment = Segment { dst, src, len: buffer.length(), host_region };
            // One buffer is all that the attributes allow; strided ones lie on one card.
            let prepared = prepared.get_or_insert_with(|| Prepared {
                device,
                segments: Segments::new(),
                reached: Reached::default(),
            });
            prepared.segments.push(segment);
            prepared.reached.there.push(opened);
            prepared.reached.attached.extend(opened_here);
            at += buffer.length() as u64;
        }
        Ok(prepared)
    }

    /// Opens a peer's memory on a card, and finds a range in it.
    fn locate(
        &self,
        key: &RemoteMemory,
        device: &Arc<Device>,
        address: u64,
        length: usize,
    ) -> Result<(Arc<Opened>, gaudi::DeviceAddr), Status> {
        let opened = key.open_on(device).map_err(|error| {
            if error.errno() == Some(libc::ESRCH) {
                // Reported when the operation ends, as every loss of a peer.
                log!(self.ucx, Debug, "{NAME}: {}", explain(&error));
                return Status::CONNECTION_RESET;
            }
            log!(self.ucx, Error, "{NAME}: {}", explain(&error));
            status::of(&error)
        })?;
        match opened.translate(address, length) {
            Some(there) => Ok((opened, there)),
            None => {
                log!(
                    self.ucx,
                    Error,
                    "{NAME}: {length} bytes at {address:#x} are not in the memory that the remote \
                     key is for"
                );
                Err(Status::INVALID_ADDR)
            }
        }
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

    /// Hands the end of an operation to UCX.
    fn conclude(&self, Ended { completion, result, companion }: Ended<InFlight>) {
        let Some(in_flight) = companion else {
            return completion.finish(Ok(())); // a flush
        };
        let remote = Arc::clone(&in_flight.remote);
        // The memory of a process that died stays as long as we have it mapped, and copies on it
        // succeed: but nobody is there any more.
        let has_ended = in_flight.has_peer_ended() || result.is_err() && remote.has_ended();
        // Unmapped before UCX is notified, so that the peer's card is not kept busy.
        drop(in_flight);
        let failed = match result {
            _ if has_ended => Some((Status::CONNECTION_RESET, format!("{remote} has ended"))),
            Ok(()) => None,
            Err(Failure::Copy(error)) => Some((status::of(&error), explain(&error).to_string())),
            Err(Failure::Refused(status)) => Some((status, status.to_string())),
        };
        let Some((status, why)) = failed else { return completion.finish(Ok(())) };
        completion.finish(Err(status));
        // Of several copies that fail with one endpoint, the first is what the user wants to know.
        let level = match remote.link.is_up() {
            false => Level::Debug,
            true if remote.link.fail(status) => self.failure_level,
            true => Level::Error,
        };
        let text = format_args!("{NAME}: copy to or from memory of {remote} failed: {why}");
        self.ucx.log(level, file!(), line!(), text);
    }
}

impl Interface for IpcInterface {
    type Component = IpcComponent;
    type Endpoint = Arc<PeerProcess>;

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
        Ok(IpcInterface {
            ucx: request.ucx,
            address,
            estimates: Estimates::read(&request.config),
            copies: Copies::new(OnFailure::Report),
            sleeper: Sleeper::new(request.ucx, NAME),
            failure_level: request.failure_level,
            no_import: OnceLock::new(),
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
            event_flags: self.sleeper.event_flags(),
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
        let local = matches!(query.local, M::HOST | M::GAUDI | M::UNKNOWN);
        let remote = matches!(query.remote, M::GAUDI | M::UNKNOWN);
        // Lanes may have been made before the first card was open. Where it cannot import, a sender
        // must not count on a receiver that could.
        if !local || !remote || why_no_import().is_some() {
            return Err(Status::UNSUPPORTED);
        }
        Ok(Perf {
            send_pre_overhead: self.estimates.overhead,
            send_post_overhead: 0.0,
            recv_overhead: 0.0,
            bandwidth: Bandwidth { dedicated: 0.0, shared: self.estimates.bandwidth },
            latency: LinearFunc { constant: self.estimates.latency, slope: 0.0 },
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
            identity.check_reachable().map_err(|error| error.to_string())?;
            match self.no_import.get_or_init(why_no_import) {
                Some(reason) => Err(reason.clone()),
                None => Ok(()),
            }
        };
        why_not().map_err(|reason| {
            let reason = format!("not reachable: {reason}");
            log!(self.ucx, Debug, "{NAME}: {reason}");
            reason
        })
    }

    fn connect(&self, peer: &Peer<'_>, link: Link) -> Result<Arc<PeerProcess>, Status> {
        let identity = Identity::parse(peer.interface).map_err(|_| Status::UNREACHABLE)?;
        Ok(Arc::new(PeerProcess::new(identity, link)))
    }

    fn leads_to(&self, remote: &Arc<PeerProcess>, peer: &Peer<'_>) -> bool {
        Identity::parse(peer.interface).is_ok_and(|identity| remote.is(&identity))
    }

    fn check(&self, remote: &Arc<PeerProcess>) -> Result<(), Status> {
        if remote.has_ended() { Err(Status::CONNECTION_RESET) } else { Ok(()) }
    }

    fn zcopy(
        &self,
        op: RmaOp,
        remote: &Arc<PeerProcess>,
        local: Buffers<'_, Memory>,
        address: u64,
        key: Option<&RemoteMemory>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        Ok(self.start(op, remote, &local, address, key, completion))
    }

    fn flush(
        &self,
        _: Option<&Arc<PeerProcess>>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        // Waits for the copies of other endpoints as well: they are not kept apart.
        Ok(self.copies.flush(completion))
    }

    fn fence(&self) -> Result<(), Status> {
        self.copies.fence();
        Ok(())
    }

    fn progress(&self) -> u32 {
        gaudi::rcache::reclaim();
        if self.copies.is_idle() {
            return 0;
        }
        self.copies.reap(|operation| self.conclude(operation))
    }

    fn is_busy(&self) -> bool {
        !self.copies.is_idle()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.sleeper.fd()
    }

    fn arm(&self) -> Result<(), Status> {
        self.sleeper.arm(&self.copies)
    }
}

#[cfg(test)]
mod tests {
    use super::unless_one_may;

    #[test]
    fn one_card_that_can_import_or_does_not_answer_is_enough() {
        let why = |answers: &[Result<(), &'static str>]| {
            unless_one_may(answers.iter().copied(), |reason| *reason != "in reset")
        };
        assert_eq!(why(&[]), None, "no card is open: nobody knows");
        assert_eq!(why(&[Err("not lent"), Ok(())]), None);
        assert_eq!(why(&[Ok(()), Err("not lent")]), None);
        assert_eq!(why(&[Err("in reset")]), None);
        assert_eq!(why(&[Err("not lent"), Err("in reset")]), None);
        assert_eq!(why(&[Err("no import"), Err("not lent")]), Some("no import"));
    }
}
