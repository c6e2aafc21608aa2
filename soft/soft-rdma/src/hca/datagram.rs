//! Unreliable datagrams: sent once, delivered if the receiver has a buffer for them, else lost.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::events::lock;
use super::permit::Access;
use super::qp::QueuePair;
use super::requester::{Data, Work};
use super::transitions::Kind;
use super::{Hca, copy, destination, memory};
use crate::abi::*;
use crate::fabric::{Owner, Port, QpNumber};
use crate::wire::{Datagram, Frame, MAX_DATAGRAM};

/// Bytes in front of every received datagram: the global route header, or nothing of meaning.
pub(crate) const GRH: usize = 40;

impl QueuePair {
    /// Sends one datagram and completes it; false if that was an error.
    pub(super) fn send_datagram(self: &Arc<Self>, hca: &Hca, work: Work) -> bool {
        let status = match self.try_send_datagram(hca, &work) {
            Ok(()) => IBV_WC_SUCCESS,
            Err(status) => status,
        };
        if status != IBV_WC_SUCCESS || work.signaled || self.parts.signal_all {
            self.complete_send(work.completion(status));
        }
        status == IBV_WC_SUCCESS
    }

    fn try_send_datagram(self: &Arc<Self>, hca: &Hca, work: &Work) -> Result<(), i32> {
        let target = work.target.ok_or(IBV_WC_LOC_QP_OP_ERR)?;
        let length = work.data.length();
        if length > u64::from(MAX_DATAGRAM) {
            return Err(IBV_WC_LOC_LEN_ERR);
        }
        let mut bytes = vec![0; length as usize];
        match &work.data {
            Data::Inline(data) => bytes.copy_from_slice(data),
            Data::Gather(sges) => {
                let list =
                    hca.regions.local(self.parts.domain, sges, false).ok_or(IBV_WC_LOC_PROT_ERR)?;
                let access = Access { permit: self.permit(), list };
                let (segments, _uses) = access.lock().map_err(|_| IBV_WC_LOC_PROT_ERR)?;
                copy::gather(&segments, &mut bytes).map_err(|_| IBV_WC_LOC_PROT_ERR)?;
            }
        }
        let lost = || {
            hca.stats.datagrams_lost.fetch_add(1, Ordering::Relaxed);
        };
        let address = &target.address;
        let (Some(port), Some(number)) = (destination(address), QpNumber::from_raw(target.qpn))
        else {
            lost();
            return Ok(());
        };
        // The upper bit says "use the queue pair's own", as on hardware.
        let own_key = target.qkey & 0x8000_0000 != 0;
        let qkey = if own_key { self.attributes().qkey } else { target.qkey };
        let frame = Frame::Datagram(Datagram {
            dst_qpn: target.qpn,
            src_qpn: self.number.raw(),
            src_lid: self.parts.port.lid(),
            dst_lid: port.lid(),
            qkey,
            sl: address.sl,
            imm: work.imm,
            solicited: work.solicited,
            grh: (address.is_global != 0).then_some((
                address.grh.traffic_class,
                address.grh.flow_label,
                address.grh.hop_limit,
            )),
        });
        if hca.is_down(self.parts.port) {
            self.parts.counters.xmit_discards.fetch_add(1, Ordering::Relaxed);
            lost();
            return Ok(());
        }
        let to = Owner { node: port.node, slot: number.slot() };
        let link = hca.fabric().and_then(|fabric| fabric.link(to).ok());
        let Some(link) = link.filter(|link| link.send_datagram(&frame, &bytes)) else {
            lost();
            return Ok(());
        };
        hca.stats.datagrams.fetch_add(1, Ordering::Relaxed);
        self.parts.counters.sent(length);
        link.flush();
        Ok(())
    }
}

/// The 40 bytes that a receiver finds in front of a datagram with a global route.
fn route_header(datagram: &Datagram, length: usize) -> [u8; GRH] {
    let mut header = [0; GRH];
    let Some((class, label, hops)) = datagram.grh else { return header };
    let first = 6u32 << 28 | u32::from(class) << 20 | label & 0xf_ffff;
    header[..4].copy_from_slice(&first.to_be_bytes());
    header[4..6].copy_from_slice(&(length as u16).to_be_bytes());
    // 0x1b: an InfiniBand transport header follows.
    (header[6], header[7]) = (0x1b, hops);
    for (lid, at) in [(datagram.src_lid, 8), (datagram.dst_lid, 24)] {
        if let Some(port) = Port::from_lid(lid) {
            header[at..at + 16].copy_from_slice(&port.gid().raw);
        }
    }
    header
}

/// Delivers a datagram, or loses it.
pub(crate) fn deliver(hca: &Hca, datagram: &Datagram, payload: &[u8]) {
    if !try_deliver(hca, datagram, payload) {
        hca.stats.datagrams_lost.fetch_add(1, Ordering::Relaxed);
    }
}

fn try_deliver(hca: &Hca, datagram: &Datagram, payload: &[u8]) -> bool {
    let Some(qp) = hca.qp(datagram.dst_qpn).filter(|qp| qp.parts.kind == Kind::Ud) else {
        return false;
    };
    let mut receive = lock(&qp.receive);
    let wanted = qp.receives()
        && !hca.is_down(qp.parts.port)
        && datagram.dst_lid == qp.parts.port.lid()
        && datagram.qkey == qp.attributes().qkey;
    if !wanted {
        return false;
    }
    let buffer = match &qp.parts.shared {
        Some(shared) => shared.take(),
        None => receive.queue.take(),
    };
    let Some(buffer) = buffer else { return false };
    let mut wc = ibv_wc {
        wr_id: buffer.wr_id,
        opcode: IBV_WC_RECV,
        byte_len: (GRH + payload.len()) as u32,
        imm_data: datagram.imm.unwrap_or(0),
        wc_flags: if datagram.imm.is_some() { IBV_WC_WITH_IMM } else { 0 }
            | if datagram.grh.is_some() { IBV_WC_GRH } else { 0 },
        src_qp: datagram.src_qpn,
        slid: datagram.src_lid,
        sl: datagram.sl,
        ..Default::default()
    };
    wc.status = match place(hca, &qp, &buffer.sges, datagram, payload) {
        Some(()) => IBV_WC_SUCCESS,
        None if buffer.length() < u64::from(wc.byte_len) => IBV_WC_LOC_LEN_ERR,
        None => IBV_WC_LOC_PROT_ERR,
    };
    qp.parts.counters.received(payload.len() as u64);
    qp.complete_receive(wc, datagram.solicited);
    true
}

fn place(
    hca: &Hca,
    qp: &QueuePair,
    sges: &[ibv_sge],
    datagram: &Datagram,
    payload: &[u8],
) -> Option<()> {
    let domain = qp.parts.shared.as_ref().map_or(qp.parts.domain, |shared| shared.domain);
    let mut list = hca.regions.local(domain, sges, true)?;
    memory::trim(&mut list, (GRH + payload.len()) as u64);
    let access = Access { permit: qp.permit(), list };
    let (segments, _uses) = access.lock().ok()?;
    let header = route_header(datagram, payload.len());
    copy::scatter(&[&header, payload].concat(), &segments).ok()?;
    memory::written(&access.list);
    Some(())
}
