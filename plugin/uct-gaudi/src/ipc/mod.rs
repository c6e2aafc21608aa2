//! Component, memory domain and transport `gaudi_ipc`: Gaudi memory of another process on this
//! machine, reached by DMA.
//!
//! The engine (`gaudi::share`) makes keys, hands descriptors over and imports them; here its words
//! are translated to UCX's:
//!
//! * A key is made when UCX first packs one for a piece of memory, and belongs to the whole
//!   allocation.
//! * A key is opened when UCX unpacks it. What cannot be opened is *unreachable*, with the reason in
//!   the log: UCX then stages through host memory. An error later, in the middle of a message, could
//!   not be mended any more.
//! * Copies are done by the card of the local buffer; for host buffers, by the process's own card.
//! * Failures are real here, unlike those of `gaudi_cpy`: the operation ends with an error and UCX is
//!   told that the endpoint failed. Nothing aborts.
//!
//! Host memory is reached on the local side only, and needs no registration for that: a domain that
//! registered it would be a candidate for the lanes of host-to-host traffic, where it has no business.

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
