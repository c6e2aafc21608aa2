//! Component, memory domain and transport `gaudi_ipc`: copies to and from memory of another process on
//! this machine, with Gaudi memory on at least one side.
//!
//! The engine (`gaudi::share`) makes keys, and imports the memory behind them or reaches it through a
//! relay. This module translates between the engine and UCX:
//!
//! * A key is made when UCX first packs one for a piece of memory. A key of Gaudi memory is for the whole allocation.
//! * A key is opened when UCX unpacks it: a card of this process imports the memory, or else its owner
//!   has to relay. A key that cannot be opened is *unreachable*, with the reason in the log, and
//!   UCX finds another way. A later error, in the middle of a message, could not be repaired.
//! * Copies of imported memory are done by the card of the local buffer; for host buffers, by the card that imported.
//! * Failures are real here, unlike those of `gaudi_cpy`: the operation ends with an error and UCX is
//!   told that the endpoint failed. Nothing aborts.
//!
//! A relay also reaches host memory of a peer, so the domain registers it. That makes the transport a
//! candidate for lanes of host-to-host traffic, which it must not carry: it gives no estimate for them.

mod component;
mod domain;
mod interface;
mod peer;
mod remote_memory;
mod settings;

pub(crate) use component::IpcComponent;
pub(crate) use interface::IpcInterface;
#[cfg(test)]
pub(crate) use settings::{DOMAIN_VARIABLES, TRANSPORT_VARIABLES};

/// Name of component, memory domain, transport and device.
const NAME: &str = "gaudi_ipc";
