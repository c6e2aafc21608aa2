//! A complete transport: host memory, within one process, copied by the CPU.
//!
//! ```text
//! cargo build --package uct --example loopback
//! mkdir -p plugins && cp target/debug/examples/libloopback.so plugins/libuct_loopback.so.0
//! UCX_PLUGIN_PATH=plugins ucx_info -d -t rustloop
//! UCX_PLUGIN_PATH=plugins ucx_perftest -t put_bw -x rustloop -d loop -l -D short -s 4096 -n 1000
//! ```

use uct::abi::{iface_flag, md_flag};
use uct::config::Values;
use uct::{
    Bandwidth, Buffer, Completion, Component, Device, DeviceType, DomainAttributes, Interface,
    InterfaceAttributes, LinearFunc, Link, MemoryDomain, MemoryType, MemoryTypes, OpenRequest,
    Peer, Perf, PerfQuery, Posted, Region, Registration, RmaLimits, RmaOp, Status, SysDevice, Ucx,
};

uct::plugin!("rust_loop", register);

fn register(ucx: &'static Ucx) -> Result<(), Status> {
    Registration::new(ucx, Loop).transport::<LoopInterface>().register();
    Ok(())
}

struct Loop;

impl Component for Loop {
    type Md = LoopDomain;
    type RemoteKey = ();
    const NAME: &'static str = "rust_loop";
    const CONFIG_PREFIX: &'static str = "RUST_LOOP_";

    fn domains(&self, _: &'static Ucx) -> Vec<String> {
        vec![Self::NAME.to_owned()]
    }

    fn open(&self, _: &'static Ucx, _: &str, _: &Values<'_>) -> Result<LoopDomain, Status> {
        Ok(LoopDomain)
    }

    fn unpack_key(&self, _: &'static Ucx, _: &[u8], _: SysDevice) -> Result<(), Status> {
        Ok(())
    }
}

struct LoopDomain;

impl MemoryDomain for LoopDomain {
    type Memory = ();

    fn attributes(&self) -> DomainAttributes {
        let host = MemoryTypes::only(MemoryType::HOST);
        DomainAttributes { flags: md_flag::REG, register: host, access: host, ..Default::default() }
    }

    fn register(&self, _: &Region<'_>) -> Result<(), Status> {
        Ok(())
    }
}

struct LoopInterface {
    process: u32,
}

impl Interface for LoopInterface {
    type Component = Loop;
    type Endpoint = ();
    const TRANSPORT: &'static str = "rustloop";
    const CONFIG_PREFIX: &'static str = "RUST_LOOP_";

    fn devices(_: &'static Ucx, _: &LoopDomain) -> Vec<Device> {
        let (kind, sys_device) = (DeviceType::SELF, SysDevice::UNKNOWN);
        vec![Device { name: "loop".to_owned(), kind, sys_device }]
    }

    fn open(_: &LoopDomain, _: &OpenRequest<'_>) -> Result<Self, Status> {
        Ok(LoopInterface { process: std::process::id() })
    }

    fn attributes(&self) -> InterfaceAttributes {
        use iface_flag::{CONNECT_TO_IFACE, GET_SHORT, PUT_SHORT};
        let limits = RmaLimits { max_short: u32::MAX as usize, ..Default::default() };
        let flags = CONNECT_TO_IFACE | PUT_SHORT | GET_SHORT;
        let bandwidth = Bandwidth { dedicated: 10e9, shared: 0.0 };
        InterfaceAttributes { flags, put: limits, get: limits, bandwidth, ..Default::default() }
    }

    fn estimate(&self, _: &PerfQuery) -> Result<Perf, Status> {
        Ok(Perf {
            send_pre_overhead: 1e-8,
            send_post_overhead: 0.0,
            recv_overhead: 0.0,
            bandwidth: self.attributes().bandwidth,
            latency: LinearFunc::default(),
        })
    }

    fn address(&self) -> Vec<u8> {
        self.process.to_ne_bytes().to_vec()
    }

    fn reachable(&self, peer: &Peer<'_>) -> Result<(), String> {
        let same = peer.interface == self.address();
        if same { Ok(()) } else { Err(String::from("another process")) }
    }

    fn connect(&self, _: &Peer<'_>, _: Link) -> Result<(), Status> {
        Ok(())
    }

    fn short(
        &self,
        op: RmaOp,
        (): &(),
        local: Buffer,
        remote: u64,
        _: Option<&()>,
    ) -> Result<(), Status> {
        let (to, from) = op.sides(local.address(), remote);
        // SAFETY: both are host memory of this process (the only kind this domain accesses and the
        // only process it reaches), which the caller of the operation keeps valid.
        unsafe { core::ptr::copy(from as *const u8, to as *mut u8, local.length()) };
        Ok(())
    }

    fn flush(&self, _: Option<&()>, completion: Completion) -> Result<Posted, Status> {
        Ok(Posted::Done(completion)) // nothing is ever in flight
    }

    fn fence(&self) -> Result<(), Status> {
        Ok(())
    }
}
