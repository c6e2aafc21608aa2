//! Transports `gaudi_cpy` and `gaudi_gdr`: copies between host and Gaudi memory of one process.
//!
//! Stock UCX crashes on a copy transport that has no event flags and event fd, does not reach its own
//! process, has a domain that does not access host memory, or needs a remote key.
//!
//! The worker calls an interface's progress only from its first copy on, so that programs that move
//! host memory only do not pay for it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use gaudi::share::Identity;
use gaudi::{Device, Error, Segment, Side, runtime};
use uct::abi::iface_flag;
use uct::{
    Bandwidth, Buffer, Buffers, Completion, DeviceType, Interface, InterfaceAttributes, Link,
    OpenRequest, Peer, Perf, PerfQuery, Posted, RmaLimits, RmaOp, Status, Ucx, log,
};

use crate::addresses::is_host_memory;
use crate::carrier::{Carried, Segments};
use crate::copies::{Copies, Failure, NotStarted, try_again};
use crate::domain::{GaudiComponent, GaudiDomain, Memory};
use crate::estimates::Estimates;
use crate::flavour::Flavour;
use crate::memtype_cache;
use crate::sleeper::Sleeper;
use crate::status::{self, explain};

/// An open interface.
pub(crate) struct CopyInterface<F> {
    ucx: &'static Ucx,
    /// The identity of this process, whose interfaces all reach each other. Random if the system does
    /// not provide one: then an interface reaches only itself.
    address: [u8; Identity::LEN],
    copies_possible: bool,
    estimates: Estimates,
    abort_on_error: bool,
    copies: Copies<()>,
    sleeper: Sleeper,
    /// The loss of a device was logged.
    lost: Cell<bool>,
    flavour: PhantomData<F>,
}

impl<F: Flavour> CopyInterface<F> {
    /// Copies between two ranges of host memory, with the CPU. Refuses device addresses.
    ///
    /// Our estimates do not lead UCP here. But with the old protocols (`UCX_PROTO_ENABLE=n`) UCP takes
    /// any transport that reaches its own process and registers host memory as a lane for host
    /// messages. Other accelerators' copy transports support that, so this one does.
    fn copy_on_host(&self, op: RmaOp, local: Buffer, remote: u64) -> Result<(), Status> {
        let (address, length) = (local.address(), local.length());
        if !is_host_memory(address, length) || !is_host_memory(remote, length) {
            log!(
                self.ucx,
                Error,
                "{} cannot copy {address:#x} to or from {remote:#x} ({length} bytes): one is a device \
                 address, but not inside one Gaudi allocation of this process",
                F::TRANSPORT,
            );
            return Err(Status::UNSUPPORTED);
        }
        let pointer = |address: u64| core::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let (dst, src) = op.sides(pointer(address), pointer(remote));
        // SAFETY: an endpoint leads to its own process, where UCX keeps the buffers of an operation
        // valid until it returns, and lets nothing else touch what it writes. Both are host memory, as
        // found above.
        unsafe { core::ptr::copy(src, dst, length) };
        Ok(())
    }

    /// A copy in the background has failed for good. UCP ignores the status of these copies
    /// in its protocols, so going on could deliver a message with wrong bytes.
    fn copy_failed(&self, error: &Error) -> Status {
        if self.abort_on_error {
            log!(
                self.ucx,
                Error,
                "fatal: copy failed: {} (UCX would go on with wrong bytes; \
                 UCX_GAUDI_COPY_ABORT_ON_ERROR=n lets it)",
                explain(error)
            );
            std::process::abort();
        }
        // A lost device fails every copy: one line at error level is enough.
        if error.is_device_lost() && self.lost.replace(true) {
            log!(self.ucx, Debug, "copy failed: {}", explain(error));
        } else {
            log!(self.ucx, Error, "copy failed: {}", explain(error));
        }
        status::of(error)
    }
}

impl<F: Flavour> Interface for CopyInterface<F> {
    type Component = GaudiComponent<F>;
    type Endpoint = ();

    const TRANSPORT: &'static str = F::TRANSPORT;
    const CONFIG_PREFIX: &'static str = F::TRANSPORT_PREFIX;

    fn devices(_: &'static Ucx, md: &GaudiDomain<F>) -> Vec<uct::Device> {
        // Without copies gaudi_gdr still offers its device, with no operation. Otherwise no transport
        // would use the memory domain, and UCP would close it: no detection and no dma-bufs.
        if F::PRIMARY && !md.copies {
            return Vec::new();
        }
        vec![uct::Device {
            name: F::COMPONENT.to_owned(),
            kind: DeviceType::ACC,
            sys_device: md.sys_device,
        }]
    }

    fn open(md: &GaudiDomain<F>, request: &OpenRequest<'_>) -> Result<Self, Status> {
        let address = Identity::own().map_or_else(|_| random(), |own| own.pack());
        memtype_cache::warn_of_hcas(request.ucx);
        Ok(CopyInterface {
            ucx: request.ucx,
            address,
            copies_possible: md.copies,
            estimates: md.estimates,
            abort_on_error: md.settings.abort_on_error,
            copies: Copies::new(Some(request.ucx)),
            sleeper: Sleeper::new(request.ucx, F::TRANSPORT),
            lost: Cell::new(false),
            flavour: PhantomData,
        })
    }

    fn attributes(&self) -> InterfaceAttributes {
        let limits = RmaLimits {
            max_short: u32::MAX as usize,
            max_bcopy: 0,
            min_zcopy: 0,
            max_zcopy: usize::MAX,
            opt_zcopy_align: 1,
            align_mtu: 1,
            max_iov: 16,
        };
        if !self.copies_possible {
            return InterfaceAttributes {
                flags: iface_flag::CONNECT_TO_IFACE,
                // UCX packs the bandwidth into addresses, and does not allow 0 there.
                bandwidth: Bandwidth { dedicated: 0.0, shared: 1e6 },
                max_endpoints: Some(0),
                ..InterfaceAttributes::default()
            };
        }
        InterfaceAttributes {
            flags: iface_flag::CONNECT_TO_IFACE
                | iface_flag::PUT_SHORT
                | iface_flag::GET_SHORT
                | iface_flag::PUT_ZCOPY
                | iface_flag::GET_ZCOPY
                | iface_flag::PENDING
                // The peer is this process, which cannot fail alone. Without these flags UCP emulates put and get
                // inside a process, in segments of 8 KiB by TCP, for endpoints that handle peer failures (NIXL).
                | iface_flag::ERRHANDLE_PEER_FAILURE
                | iface_flag::EP_CHECK,
            event_flags: self.sleeper.event_flags(),
            put: limits,
            get: limits,
            bandwidth: self.estimates.lane_bandwidth(),
            latency: self.estimates.latency(),
            overhead: self.estimates.overhead(),
            max_endpoints: None,
        }
    }

    fn estimate(&self, query: &PerfQuery) -> Result<Perf, Status> {
        let known = if self.copies_possible { self.estimates.of(query) } else { None };
        known.ok_or(Status::UNSUPPORTED)
    }

    fn address(&self) -> Vec<u8> {
        self.address.to_vec()
    }

    fn reachable(&self, peer: &Peer<'_>) -> Result<(), String> {
        if !self.copies_possible {
            return Err(format!("{} cannot copy on this generation of Gaudi", F::TRANSPORT));
        }
        if peer.interface != self.address {
            return Err(format!("{} copies inside one process only", F::TRANSPORT));
        }
        Ok(())
    }

    fn connect(&self, _: &Peer<'_>, _: Link) -> Result<(), Status> {
        Ok(())
    }

    /// Copies and returns when the bytes have arrived. Tried once more after a failure, as copies in the
    /// background are, but not subject to `ABORT_ON_ERROR`: the caller gets the error.
    fn short(
        &self,
        op: RmaOp,
        (): &(),
        local: Buffer,
        remote: u64,
        _: Option<&()>,
    ) -> Result<(), Status> {
        let length = local.length();
        if length == 0 {
            return Ok(());
        }
        self.copies.wait_for_fences();
        let (dst, src) = op.sides(local.address(), remote);
        // SAFETY: UCX keeps the buffers of an operation valid until it returns, and nothing else
        // touches what it writes.
        let copy = || unsafe { runtime().copy(dst, src, length) };
        let first = match copy() {
            Some(Ok(())) => return Ok(()),
            Some(Err(first)) => first,
            None => return self.copy_on_host(op, local, remote),
        };
        // UCP's staging asserts that a short copy succeeds: the reason must be in the log first.
        let is_lost = || {
            let device = |addr| runtime().locate(addr, length)?.device();
            [dst, src].into_iter().filter_map(device).any(|device| device.is_surely_lost())
        };
        try_again(Some(self.ucx), first, is_lost, copy).map_err(|error| {
            log!(self.ucx, Error, "copy of {length} bytes failed: {}", explain(&error));
            status::of(&error)
        })
    }

    /// Starts a copy between local pieces and consecutive remote addresses.
    fn zcopy(
        &self,
        op: RmaOp,
        (): &(),
        local: Buffers<'_, Memory>,
        remote: u64,
        _: Option<&()>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        let mut device: Option<Arc<Device>> = None;
        let mut segments = Segments::new();
        let mut at = remote;
        for (buffer, memory) in local.iter().filter(|(buffer, _)| buffer.length() != 0) {
            let length = buffer.length();
            let there = runtime().find(at, length);
            let (here, copies) = if let Some(region) = memory.and_then(Memory::imported) {
                // A dma-buf is imported only on the card that copies.
                let card = there.device_id().and_then(|id| runtime().device(id)).or(device.take());
                let found = region.find(card.as_ref(), buffer.address(), length);
                let (addr, card) = found.map_err(|error| {
                    log!(self.ucx, Error, "cannot copy by a dma-buf: {}", explain(&error));
                    status::of(&error)
                })?;
                (Side::Device(addr), Some(card))
            } else {
                let here = runtime().find(buffer.address(), length);
                let card = here.device_id().or(there.device_id());
                (here, card.and_then(|id| device.take().or_else(|| runtime().device(id))))
            };
            if let Some(card) = copies {
                device = Some(card);
                let (dst, src) = op.sides(here, there);
                let host_region = memory.and_then(Memory::host_region).cloned();
                segments.push(Segment { dst, src, len: length, host_region });
            } else {
                self.copies.wait_for_fences();
                self.copy_on_host(op, buffer, at)?;
            }
            at += length as u64;
        }
        let Some(device) = device else {
            return Ok(Posted::Done(completion)); // nothing for a device to do
        };
        // SAFETY: UCX keeps the buffers of an operation valid and to itself until the completion.
        let posted = unsafe { self.copies.post(Carried::Card(device, segments), (), completion) };
        if matches!(posted, Ok(Posted::Later)) {
            self.sleeper.wake();
        }
        posted.map_err(|NotStarted { error, .. }| self.copy_failed(&error))
    }

    fn flush(&self, _: Option<&()>, completion: Completion) -> Result<Posted, Status> {
        // Endpoints of an interface all lead to this process, so one list of copies serves them all.
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
        self.copies.reap(|copy| {
            copy.completion.finish(copy.result.map_err(|failure| match failure {
                Failure::Copy(error) => self.copy_failed(&error),
                Failure::Refused(status) => status,
            }));
        })
    }

    fn is_busy(&self) -> bool {
        !self.copies.is_idle()
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        self.sleeper.fd()
    }

    fn arm(&self) -> Result<(), Status> {
        self.sleeper.arm([&self.copies])
    }
}

/// Random bytes; the clock and an address serve where the kernel refuses.
fn random() -> [u8; Identity::LEN] {
    let mut bytes = [0; Identity::LEN];
    // SAFETY: the buffer is valid for its length.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != bytes.len() as isize {
        let nanos = std::time::UNIX_EPOCH.elapsed().map_or(0, |since| since.as_nanos() as u64);
        let word = nanos ^ core::ptr::from_ref(&bytes).addr() as u64;
        bytes[..8].copy_from_slice(&word.to_ne_bytes());
    }
    bytes
}
