//! A transport of host memory that panics in the function that `PANIC_IN` names: for the test that UCX gets an error
//! then (`tests/e2e/tests/foreign.rs`). It moves no bytes. The example to learn from is `loopback.rs`.

use std::cell::Cell;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

use uct::abi::{event_flag, iface_flag, md_flag};
use uct::config::Values;
use uct::{
    AllocRequest, Allocated, Bandwidth, Buffer, Buffers, Completion, Component, Device, DeviceType,
    DomainAttributes, Interface, InterfaceAttributes, LinearFunc, Link, MemoryAnswer, MemoryDomain,
    MemoryType, MemoryTypes, OpenRequest, Peer, Perf, PerfQuery, Posted, QueryFields, Region,
    Registration, RmaLimits, RmaOp, Status, SysDevice, Ucx,
};

uct::plugin!("rust_panic", register);

fn register(ucx: &'static Ucx) -> Result<(), Status> {
    here("plugin");
    Registration::new(ucx, Panics).transport::<PanicsInterface>().register();
    Ok(())
}

/// Panics if this is the function.
fn here(function: &str) {
    assert!(std::env::var("PANIC_IN").as_deref() != Ok(function), "wanted by the test");
}

/// Panics in its destructor if that is the function: of something that a call of UCX ends.
struct Ends(&'static str);

impl Drop for Ends {
    fn drop(&mut self) {
        here(self.0);
    }
}

struct Panics;

impl Component for Panics {
    type Md = PanicsDomain;
    type RemoteKey = Ends;
    const NAME: &'static str = "rust_panic";
    const CONFIG_PREFIX: &'static str = "RUST_PANIC_";
    const KEY_SIZE: usize = 1;

    fn domains(&self, _: &'static Ucx) -> Vec<String> {
        here("domains");
        vec![Self::NAME.to_owned()]
    }

    fn open(&self, _: &'static Ucx, _: &str, _: &Values<'_>) -> Result<PanicsDomain, Status> {
        here("open domain");
        Ok(PanicsDomain { _closed: Ends("close domain") })
    }

    fn unpack_key(&self, _: &'static Ucx, _: &[u8], _: SysDevice) -> Result<Ends, Status> {
        here("unpack key");
        Ok(Ends("release key"))
    }
}

struct PanicsDomain {
    _closed: Ends,
}

/// A memory handle, and the memory if it was allocated here.
struct Memory {
    _ended: Ends,
    _bytes: Vec<u64>,
}

impl MemoryDomain for PanicsDomain {
    type Memory = Memory;

    fn attributes(&self) -> DomainAttributes {
        here("attributes");
        let host = MemoryTypes::only(MemoryType::HOST);
        DomainAttributes {
            flags: md_flag::REG | md_flag::ALLOC | md_flag::NEED_RKEY,
            register: host,
            access: host,
            allocate: host,
            // Nothing is of this type. UCX asks those only that know more than host memory.
            detect: MemoryTypes::only(MemoryType::GAUDI),
            max_alloc: u64::MAX,
            ..Default::default()
        }
    }

    fn allocate(&self, request: &AllocRequest) -> Result<Allocated<Memory>, Status> {
        here("allocate");
        let bytes = vec![0; request.length.div_ceil(8)];
        let address = bytes.as_ptr().addr() as u64;
        let memory = Memory { _ended: Ends("free"), _bytes: bytes };
        Ok(Allocated { address, length: request.length, memory })
    }

    fn register(&self, _: &Region<'_>) -> Result<Memory, Status> {
        here("register");
        Ok(Memory { _ended: Ends("deregister"), _bytes: Vec::new() })
    }

    fn query(&self, _: u64, _: usize, _: QueryFields) -> Result<MemoryAnswer, Status> {
        here("query");
        Err(Status::OUT_OF_RANGE)
    }

    fn pack_key(&self, _: &Memory, _: u64, _: usize, _: &mut [u8]) -> Result<(), Status> {
        here("pack key");
        Ok(())
    }
}

struct PanicsInterface {
    has_address: Cell<bool>,
    /// Nothing ever wakes it.
    event: UnixStream,
    _other_end: UnixStream,
    _closed: Ends,
}

impl Interface for PanicsInterface {
    type Component = Panics;
    type Endpoint = Ends;
    const TRANSPORT: &'static str = "rustpanic";
    const CONFIG_PREFIX: &'static str = "RUST_PANIC_";

    fn devices(_: &'static Ucx, _: &PanicsDomain) -> Vec<Device> {
        here("devices");
        let (kind, sys_device) = (DeviceType::SELF, SysDevice::UNKNOWN);
        vec![Device { name: "panics".to_owned(), kind, sys_device }]
    }

    fn open(_: &PanicsDomain, _: &OpenRequest<'_>) -> Result<Self, Status> {
        here("open");
        let (event, other_end) = UnixStream::pair().map_err(|_| Status::NO_RESOURCE)?;
        let has_address = Cell::new(false);
        let _closed = Ends("close interface");
        Ok(PanicsInterface { has_address, event, _other_end: other_end, _closed })
    }

    fn attributes(&self) -> InterfaceAttributes {
        use iface_flag::*;
        here("interface");
        let (max_short, max_zcopy) = (u32::MAX as usize, usize::MAX);
        let (opt_zcopy_align, align_mtu) = (1, 1);
        let limits = RmaLimits {
            max_short,
            max_zcopy,
            max_iov: 1,
            opt_zcopy_align,
            align_mtu,
            ..Default::default()
        };
        InterfaceAttributes {
            flags: CONNECT_TO_IFACE | PENDING | PUT_SHORT | PUT_ZCOPY | GET_ZCOPY,
            event_flags: event_flag::FD | event_flag::SEND_COMP | event_flag::RECV,
            put: limits,
            get: limits,
            bandwidth: Bandwidth { dedicated: 1e12, shared: 0.0 },
            ..Default::default()
        }
    }

    fn estimate(&self, _: &PerfQuery) -> Result<Perf, Status> {
        here("estimate");
        Ok(Perf {
            send_pre_overhead: 0.0,
            send_post_overhead: 0.0,
            recv_overhead: 0.0,
            bandwidth: Bandwidth { dedicated: 1e12, shared: 0.0 },
            latency: LinearFunc::default(),
        })
    }

    fn address(&self) -> Vec<u8> {
        // The first call is for its length.
        here(if self.has_address.replace(true) { "address" } else { "address length" });
        vec![0]
    }

    fn reachable(&self, _: &Peer<'_>) -> Result<(), String> {
        here("reachable");
        Ok(())
    }

    fn connect(&self, _: &Peer<'_>, _: Link) -> Result<Ends, Status> {
        here("connect");
        Ok(Ends("close endpoint"))
    }

    fn short(&self, _: RmaOp, _: &Ends, _: Buffer, _: u64, _: Option<&Ends>) -> Result<(), Status> {
        here("short");
        Ok(())
    }

    fn zcopy(
        &self,
        _: RmaOp,
        _: &Ends,
        _: Buffers<'_, Memory>,
        _: u64,
        _: Option<&Ends>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        here("zcopy");
        Ok(Posted::Done(completion))
    }

    fn flush(&self, endpoint: Option<&Ends>, completion: Completion) -> Result<Posted, Status> {
        here(if endpoint.is_some() { "flush endpoint" } else { "flush" });
        Ok(Posted::Done(completion))
    }

    fn fence(&self) -> Result<(), Status> {
        here("fence");
        Ok(())
    }

    fn progress(&self) -> u32 {
        here("progress");
        0
    }

    fn is_busy(&self) -> bool {
        here("busy");
        true
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        here("event fd");
        Some(self.event.as_fd())
    }
}
