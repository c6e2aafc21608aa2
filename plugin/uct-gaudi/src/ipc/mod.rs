//! Component, memory domain and transport `gaudi_ipc`: memory of another process on this machine, where a Gaudi's is on
//! either side.
//!
//! The engine (`gaudi::share`) makes keys, imports the memory behind them or reaches it through a relay; here its words
//! are translated to UCX's:
//!
//! * A key is made when UCX first packs one for a piece of memory. That of Gaudi memory belongs to the whole allocation.
//! * A key is opened when UCX unpacks it: imported, if a card of this process can, else its owner is looked for, who
//!   relays. What cannot be opened is *unreachable*, with the reason in the log: UCX then finds another way. An error
//!   later, in the middle of a message, could not be mended any more.
//! * Copies of imported memory are done by the card of the local buffer; for host buffers, by the card that imported.
//! * Failures are real here, unlike those of `gaudi_cpy`: the operation ends with an error and UCX is
//!   told that the endpoint failed. Nothing aborts.
//!
//! Host memory of a peer is reached too, by a relay, so the domain registers it. That makes the transport a candidate for
//! the lanes of host-to-host traffic, where it has no business: it estimates none.

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
