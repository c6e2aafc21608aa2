//! Transports: interfaces, their endpoints and the operations on them.
//!
//! [`Interface`] is what a transport implements. UCX calls an interface and its endpoints under
//! the worker's lock, one call at a time, but completion callbacks re-enter: implementations take
//! `&self` and must hold no borrow while they finish a [`Completion`].

mod data;
mod endpoint;
mod object;

use core::marker::PhantomData;
use std::os::fd::BorrowedFd;

pub use endpoint::Link;
pub(crate) use object::TransportObject;

use crate::abi::{
    Bandwidth, DeviceType, Iov, LinearFunc, MemoryType, Operation, RmaLimits, Status, SysDevice,
};
use crate::completion::{Completion, Posted};
use crate::component::Component;
use crate::config::{Values, Variable};
use crate::md::MemoryDomain;
use crate::ucx::{Level, Ucx};

/// The memory domain of a transport.
pub type MdOf<I> = <<I as Interface>::Component as Component>::Md;
/// Its memory handles.
pub type MemoryOf<I> = <MdOf<I> as MemoryDomain>::Memory;
/// Its remote keys.
pub type KeyOf<I> = <<I as Interface>::Component as Component>::RemoteKey;

/// A transport; a value of the type is one opened interface.
pub trait Interface: Send + Sized + 'static {
    /// The component it belongs to.
    type Component: Component;
    /// What an endpoint stores about its peer. Operations in progress must not use it after the endpoint is gone.
    type Endpoint: Send + 'static;

    /// Name, at most 9 characters.
    const TRANSPORT: &'static str;
    /// Prefix of the variables, behind `UCX_`.
    const CONFIG_PREFIX: &'static str;
    /// Configuration of the interface.
    const VARIABLES: &'static [Variable] = &[];

    /// The devices this transport offers on a domain. The list may be empty.
    fn devices(ucx: &'static Ucx, md: &MdOf<Self>) -> Vec<Device>;

    /// Opens an interface. An error here makes `ucp_worker_create` fail for the whole program, even if
    /// it never uses this transport: degrade instead.
    ///
    /// # Errors
    /// Only if the interface cannot work at all.
    fn open(md: &MdOf<Self>, request: &OpenRequest<'_>) -> Result<Self, Status>;

    /// What the interface can do.
    fn attributes(&self) -> InterfaceAttributes;

    /// What an operation costs, and whether it is possible at all.
    ///
    /// # Errors
    /// [`Status::UNSUPPORTED`] for a pair of memory types that cannot be done.
    fn estimate(&self, query: &PerfQuery) -> Result<Perf, Status>;

    /// Address of this interface, always of the same length.
    fn address(&self) -> Vec<u8>;

    /// Whether a peer can be reached.
    ///
    /// # Errors
    /// The reason, as text for the user.
    fn reachable(&self, peer: &Peer<'_>) -> Result<(), String>;

    /// Creates an endpoint. `link` reports to UCX that the endpoint failed later.
    ///
    /// # Errors
    /// [`Status::UNREACHABLE`] and the like.
    fn connect(&self, peer: &Peer<'_>, link: Link) -> Result<Self::Endpoint, Status>;

    /// Whether an endpoint leads to this peer, which is known to be reachable.
    fn leads_to(&self, endpoint: &Self::Endpoint, peer: &Peer<'_>) -> bool {
        let _ = (endpoint, peer);
        true
    }

    /// Checks whether the peer still exists. UCX calls this if the flags include EP_CHECK. An error
    /// goes to UCX's error handler.
    ///
    /// # Errors
    /// [`Status::CONNECTION_RESET`] and the like.
    fn check(&self, endpoint: &Self::Endpoint) -> Result<(), Status> {
        let _ = endpoint;
        Ok(())
    }

    /// Copies to or from the remote address before it returns. UCP aborts the process on an error.
    ///
    /// # Errors
    /// What went wrong; log the reason first.
    fn short(
        &self,
        op: RmaOp,
        endpoint: &Self::Endpoint,
        local: Buffer,
        remote: u64,
        key: Option<&KeyOf<Self>>,
    ) -> Result<(), Status> {
        let _ = (op, endpoint, local, remote, key);
        Err(Status::UNSUPPORTED)
    }

    /// Copies local buffers to or from consecutive remote addresses.
    ///
    /// # Errors
    /// What went wrong. Never [`Status::NO_RESOURCE`]: there is no queue for operations that wait.
    fn zcopy(
        &self,
        op: RmaOp,
        endpoint: &Self::Endpoint,
        local: Buffers<'_, MemoryOf<Self>>,
        remote: u64,
        key: Option<&KeyOf<Self>>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        let _ = (op, endpoint, local, remote, key, completion);
        Err(Status::UNSUPPORTED)
    }

    /// The endpoint is closed by force: cancels operations that may never end by themselves, such as
    /// those that wait for a stopped peer. Progress finishes their completions.
    fn cancel(&self, endpoint: &Self::Endpoint) {
        let _ = endpoint;
    }

    /// Completes when everything posted before on the endpoint (`None`: on the interface) has ended.
    ///
    /// # Errors
    /// What went wrong.
    fn flush(
        &self,
        endpoint: Option<&Self::Endpoint>,
        completion: Completion,
    ) -> Result<Posted, Status>;

    /// Orders all later operations after all earlier ones.
    ///
    /// # Errors
    /// What went wrong.
    fn fence(&self) -> Result<(), Status>;

    /// Makes progress; returns how many operations ended.
    fn progress(&self) -> u32 {
        0
    }

    /// Whether there is anything to progress. The worker does not call an interface before its first
    /// operation in progress, so that programs that do not use the interface do not pay for it.
    fn is_busy(&self) -> bool {
        true
    }

    /// A descriptor that becomes readable when there is something to progress.
    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Prepares the descriptor for sleeping.
    ///
    /// # Errors
    /// [`Status::BUSY`] when there is something to progress already: do not sleep.
    fn arm(&self) -> Result<(), Status> {
        Err(Status::UNSUPPORTED)
    }
}

/// Direction of a copy, seen from the local buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RmaOp {
    /// From local to remote memory.
    Put,
    /// From remote to local memory.
    Get,
}

impl RmaOp {
    /// Destination and source.
    pub fn sides<S>(self, local: S, remote: S) -> (S, S) {
        match self {
            RmaOp::Put => (remote, local),
            RmaOp::Get => (local, remote),
        }
    }

    fn choose<T>(self, put: T, get: T) -> T {
        self.sides(get, put).0
    }
}

/// A device a transport offers.
#[derive(Clone, Debug)]
pub struct Device {
    /// Name, at most 31 characters.
    pub name: String,
    /// Type in UCX's sense.
    pub kind: DeviceType,
    /// Number in UCX's topology.
    pub sys_device: SysDevice,
}

/// What UCX passes when it opens an interface.
pub struct OpenRequest<'a> {
    /// The copy of UCX.
    pub ucx: &'static Ucx,
    /// Configuration.
    pub config: Values<'a>,
    /// The level at which failures of peers are to be logged (`UCX_<PREFIX>FAILURE`).
    pub failure_level: Level,
}

/// What an interface can do.
#[derive(Clone, Copy, Debug, Default)]
pub struct InterfaceAttributes {
    /// Bits of [`iface_flag`](crate::abi::iface_flag).
    pub flags: u64,
    /// Bits of [`event_flag`](crate::abi::event_flag).
    pub event_flags: u64,
    /// Limits of put.
    pub put: RmaLimits,
    /// Limits of get.
    pub get: RmaLimits,
    /// Bandwidth that goes into wire addresses. Use constants only: peers must agree.
    pub bandwidth: Bandwidth,
    /// Latency, likewise.
    pub latency: LinearFunc,
    /// Overhead per message in seconds, likewise.
    pub overhead: f64,
    /// Maximum number of endpoints; `None`: UCX's own limit.
    pub max_endpoints: Option<usize>,
}

/// An operation whose cost UCX asks for.
#[derive(Clone, Copy, Debug)]
pub struct PerfQuery {
    /// The operation, if one is named.
    pub operation: Option<Operation>,
    /// Type of the local buffer.
    pub local: MemoryType,
    /// Type of the remote buffer.
    pub remote: MemoryType,
}

/// What an operation costs.
#[derive(Clone, Copy, Debug)]
pub struct Perf {
    /// Seconds before the transfer starts.
    pub send_pre_overhead: f64,
    /// Seconds of CPU after it was posted.
    pub send_post_overhead: f64,
    /// Seconds at the receiver.
    pub recv_overhead: f64,
    /// Bytes per second.
    pub bandwidth: Bandwidth,
    /// Seconds until the data is there.
    pub latency: LinearFunc,
}

/// A peer's address as it came over the wire: not to be trusted.
#[derive(Clone, Copy, Debug)]
pub struct Peer<'a> {
    /// Interface address.
    pub interface: &'a [u8],
}

/// A local buffer: a host pointer or a device address.
///
/// UCX promises that it is valid while its operation runs. Code that copies with it relies on that, so
/// safe code can only pass on what UCX passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    address: u64,
    length: usize,
}

impl Buffer {
    /// # Safety
    /// `length` bytes at `address` are valid, for reading or writing as the operation needs it, until the
    /// operation that gets the buffer has ended.
    pub unsafe fn new(address: u64, length: usize) -> Self {
        Buffer { address, length }
    }

    /// First byte.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn length(&self) -> usize {
        self.length
    }
}

/// The local buffers of a zero-copy operation.
pub struct Buffers<'a, M> {
    iov: &'a [Iov],
    memory: PhantomData<&'a M>,
}

impl<'a, M> Buffers<'a, M> {
    /// # Safety
    /// The handles in `iov` are null or live handles of memory type `M`.
    pub(crate) unsafe fn new(iov: &'a [Iov]) -> Self {
        Buffers { iov, memory: PhantomData }
    }

    /// The pieces in order, strided entries one by one, with their handles.
    pub fn iter(&self) -> impl Iterator<Item = (Buffer, Option<&'a M>)> + use<'a, M> {
        self.iov.iter().flat_map(|iov| {
            // SAFETY: as promised at construction.
            let memory = unsafe { iov.memh.cast::<M>().as_ref() };
            (0..iov.count as u64).map(move |index| {
                let address = (iov.buffer.addr() as u64).wrapping_add(index * iov.stride as u64);
                (Buffer { address, length: iov.length }, memory)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strided_buffers_are_listed_one_by_one_and_empty_ones_left_out() {
        let null = core::ptr::null_mut();
        let at = |address, length, stride, count| Iov {
            buffer: core::ptr::without_provenance_mut(address),
            length,
            memh: null,
            stride,
            count,
        };
        let iov = [at(0x1000, 8, 64, 3), at(0x9000, 5, 0, 1), at(0xa000, 7, 0, 0)];
        // SAFETY: all handles are null.
        let buffers = unsafe { Buffers::<u8>::new(&iov) };
        let pieces: Vec<_> = buffers.iter().map(|(b, _)| (b.address, b.length)).collect();
        assert_eq!(pieces, [(0x1000, 8), (0x1040, 8), (0x1080, 8), (0x9000, 5)]);
    }
}
