//! A Gaudi2 on the PCI bus of a virtual machine, on which the kernel's own `habanalabs` driver runs.
//!
//! A program apart from QEMU, connected by the vfio-user protocol. `docs/design/pci-gaudi.md` says what is
//! modelled, `cargo xtask vm` starts it. From the outside in: [`vfio_user`] is the protocol, [`endpoint`] the
//! device that it serves, [`card`] what lies behind registers and addresses, `firmware` and `queues` what acts.

pub mod card;
pub mod endpoint;
pub mod events;
pub mod firmware;
pub mod interrupts;
pub mod log;
pub mod memory;
pub mod mmu;
pub mod pci_config;
pub mod queues;
pub mod registers;
pub mod vfio_user;
