//! A transport of host memory that panics in the function that `PANIC_IN` names: for the test that UCX gets an error
//! then (`tests/e2e/tests/foreign.rs`). The example to learn from is `loopback.rs`.

use uct::abi::{iface_flag, md_flag};
use uct::config::Values;
use uct::{
    Buffer, Buffers, Completion, Component, Device, DeviceType, DomainAttributes, Interface,
    InterfaceAttributes, Link, MemoryDomain, MemoryType, MemoryTypes, OpenRequest, Peer, Perf,
    PerfQuery, Posted, Region, Registration, RmaLimits, RmaOp, Status, SysDevice, Ucx,
};

uct::plugin!("rust_panic", register);

fn register(ucx: &'static Ucx) -> Result<(), Status> {
    Registration::new(ucx, Panics).transport::<PanicsInterface>().register();
    Ok(())
}

/// Panics if this is the function.
fn here(function: &str) {
    assert!(std::env::var("PANIC_IN").as_deref() != Ok(function), "wanted by the test");
}

struct Panics;

impl Component for Panics {
    type Md = PanicsDomain;
    type RemoteKey = ();
    const NAME: &'static str = "rust_panic";
    const CONFIG_PREFIX: &'static str = "RUST_PANIC_";

    fn domains(&self, _: &'static Ucx) -> Vec<String> {
        here("domains");
        vec![Self::NAME.to_owned()]
    }

    fn open(&self, _: &'static Ucx, _: &str, _: &Values<'_>) -> Result<PanicsDomain, Status> {
        here("open domain");
        Ok(PanicsDomain)
    }

    fn unpack_key(&self, _: &'static Ucx, _: &[u8], _: SysDevice) -> Result<(), Status> {
        Ok(())
    }
}

struct PanicsDomain;

impl MemoryDomain for PanicsDomain {
    type Memory = ();

    fn attributes(&self) -> DomainAttributes {
        here("attributes");
        let host = MemoryTypes::only(MemoryType::HOST);
        DomainAttributes { flags: md_flag::REG, register: host, access: host, ..Default::default() }
    }

    fn register(&self, _: &Region<'_>) -> Result<(), Status> {
        here("register");
        Ok(())
    }
}

struct PanicsInterface;

impl Interface for PanicsInterface {
    type Component = Panics;
    type Endpoint = ();
    const TRANSPORT: &'static str = "rustpanic";
    const CONFIG_PREFIX: &'static str = "RUST_PANIC_";

    fn devices(_: &'static Ucx, _: &PanicsDomain) -> Vec<Device> {
        here("devices");
        let (kind, sys_device) = (DeviceType::SELF, SysDevice::UNKNOWN);
        vec![Device { name: "panics".to_owned(), kind, sys_device }]
    }

    fn open(_: &PanicsDomain, _: &OpenRequest<'_>) -> Result<Self, Status> {
        here("open");
        Ok(PanicsInterface)
    }

    fn attributes(&self) -> InterfaceAttributes {
        use iface_flag::{CONNECT_TO_IFACE, GET_ZCOPY, PUT_SHORT, PUT_ZCOPY};
        here("interface");
        let (max_short, max_zcopy) = (u32::MAX as usize, usize::MAX);
        let limits = RmaLimits { max_short, max_zcopy, max_iov: 1, ..Default::default() };
        let flags = CONNECT_TO_IFACE | PUT_SHORT | PUT_ZCOPY | GET_ZCOPY;
        InterfaceAttributes { flags, put: limits, get: limits, ..Default::default() }
    }

    fn estimate(&self, _: &PerfQuery) -> Result<Perf, Status> {
        Err(Status::UNSUPPORTED)
    }

    fn address(&self) -> Vec<u8> {
        vec![0]
    }

    fn reachable(&self, _: &Peer<'_>) -> Result<(), String> {
        here("reachable");
        Ok(())
    }

    fn connect(&self, _: &Peer<'_>, _: Link) -> Result<(), Status> {
        here("connect");
        Ok(())
    }

    fn short(&self, _: RmaOp, (): &(), _: Buffer, _: u64, _: Option<&()>) -> Result<(), Status> {
        here("short");
        Ok(())
    }

    fn zcopy(
        &self,
        _: RmaOp,
        (): &(),
        _: Buffers<'_, ()>,
        _: u64,
        _: Option<&()>,
        completion: Completion,
    ) -> Result<Posted, Status> {
        here("zcopy");
        Ok(Posted::Done(completion))
    }

    fn flush(&self, _: Option<&()>, completion: Completion) -> Result<Posted, Status> {
        here("flush");
        Ok(Posted::Done(completion))
    }

    fn fence(&self) -> Result<(), Status> {
        Ok(())
    }

    fn progress(&self) -> u32 {
        here("progress");
        0
    }
}
