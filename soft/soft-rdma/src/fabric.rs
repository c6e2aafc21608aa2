//! Addresses of the fabric: what LIDs, GIDs and queue pair numbers stand for.
//!
//! A LID and a GID both name one port of one HCA of one node. A queue pair number is unique in its
//! node: its upper bits name the process (the slot it claimed), the lower bits count inside it. So a
//! sender finds the process from what verbs gives it, with no name service.

use crate::abi::ibv_gid;

/// HCAs of a node.
pub(crate) const MAX_DEVICES: u8 = 64;
/// Highest node number: keeps LIDs below 0xc000, where multicast begins.
pub(crate) const MAX_NODE: u16 = 766;
/// Highest process slot. Slot 0 is not used: queue pairs 0 and 1 are special on InfiniBand.
pub(crate) const MAX_SLOT: u16 = 1022;
const QP_BITS: u32 = 14;
/// Queue pairs of one process.
pub(crate) const MAX_QPS: u32 = 1 << QP_BITS;

const SUBNET_PREFIX: [u8; 8] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0];
/// A locally administered EUI-64; "SR" for soft-rdma.
const GUID_PREFIX: [u8; 5] = [0x02, b'S', b'R', 0xff, 0xfe];

/// One port of one HCA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Port {
    /// Number of the node, from 1.
    pub(crate) node: u16,
    /// Index of the HCA in its node.
    pub(crate) device: u8,
}

impl Port {
    /// The LID of this port.
    pub(crate) fn lid(self) -> u16 {
        self.node * u16::from(MAX_DEVICES) + u16::from(self.device)
    }

    /// The port with a LID, if it is one of this fabric's.
    pub(crate) fn from_lid(lid: u16) -> Option<Self> {
        let (node, device) = (lid / u16::from(MAX_DEVICES), (lid % u16::from(MAX_DEVICES)) as u8);
        (1..=MAX_NODE).contains(&node).then_some(Self { node, device })
    }

    /// GUID of HCA and port, in network byte order.
    pub(crate) fn guid(self) -> [u8; 8] {
        let [high, low] = self.node.to_be_bytes();
        let [a, b, c, d, e] = GUID_PREFIX;
        [a, b, c, d, e, high, low, self.device]
    }

    /// The only entry of the GID table.
    pub(crate) fn gid(self) -> ibv_gid {
        let mut raw = [0; 16];
        raw[..8].copy_from_slice(&SUBNET_PREFIX);
        raw[8..].copy_from_slice(&self.guid());
        ibv_gid { raw }
    }

    /// The port with a GID, if it is one of this fabric's.
    pub(crate) fn from_gid(gid: &ibv_gid) -> Option<Self> {
        let [high, low, device] = [gid.raw[13], gid.raw[14], gid.raw[15]];
        let port = Self { node: u16::from_be_bytes([high, low]), device };
        let known = (1..=MAX_NODE).contains(&port.node) && device < MAX_DEVICES;
        (known && port.gid() == *gid).then_some(port)
    }
}

/// A process that owns queue pairs: its node and its slot there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    /// Number of the node.
    pub(crate) node: u16,
    /// Slot of the process in its node.
    pub(crate) slot: u16,
}

/// A queue pair number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct QpNumber(u32);

impl QpNumber {
    /// The number of a process's queue pair.
    pub(crate) fn new(slot: u16, index: u32) -> Self {
        Self(u32::from(slot) << QP_BITS | (index & (MAX_QPS - 1)))
    }

    /// A number as it comes from a program or the wire.
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        let number = Self(raw);
        (1..=MAX_SLOT).contains(&number.slot()).then_some(number)
    }

    /// The number itself.
    pub(crate) fn raw(self) -> u32 {
        self.0
    }

    /// Slot of the process that owns it.
    pub(crate) fn slot(self) -> u16 {
        (self.0 >> QP_BITS).try_into().unwrap_or(u16::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ports_survive_lid_and_gid(node in 1..=MAX_NODE, device in 0..MAX_DEVICES) {
            let port = Port { node, device };
            prop_assert_eq!(Port::from_lid(port.lid()), Some(port));
            prop_assert_eq!(Port::from_gid(&port.gid()), Some(port));
            prop_assert!(port.lid() < 0xc000);
        }

        #[test]
        fn any_lid_gid_and_number_is_parsed(lid: u16, raw: [u8; 16], qpn: u32) {
            let _ = Port::from_lid(lid);
            let _ = Port::from_gid(&ibv_gid { raw });
            if let Some(number) = QpNumber::from_raw(qpn) {
                prop_assert!(number.raw() > 1 && number.raw() < 0xff_ffff);
            }
        }

        #[test]
        fn a_number_names_its_slot(slot in 1..=MAX_SLOT, index in 0..MAX_QPS) {
            let number = QpNumber::new(slot, index);
            prop_assert_eq!(number.slot(), slot);
            prop_assert_eq!(QpNumber::from_raw(number.raw()), Some(number));
        }
    }
}
