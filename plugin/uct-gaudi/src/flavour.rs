//! The names under which one implementation appears to UCX.
//!
//! `gaudi_copy`/`gaudi_cpy` is the product. `gaudi_gdr` exists as well because UCX expands
//! `UCX_TLS=gaudi` to that name, scripts in the field use it, and our module takes the place of
//! UCX's own module of that name. Both do the same on the same engine; `gaudi_gdr` claims to be a
//! little worse, so that UCX prefers the other where both are allowed.

/// One pair of component and transport.
pub(crate) trait Flavour: Send + Sync + 'static {
    /// Component, memory domain and device name.
    const COMPONENT: &'static str;
    /// Transport name (nine characters at most, hence not the component's).
    const TRANSPORT: &'static str;
    /// Prefix of the transport's variables.
    const TRANSPORT_PREFIX: &'static str;
    /// Factor on every estimated cost.
    const COST: f64;
    /// Whether this one logs what concerns the whole plugin, and chooses the card.
    const PRIMARY: bool;
}

/// `gaudi_copy` / `gaudi_cpy`.
pub(crate) enum GaudiCopy {}

impl Flavour for GaudiCopy {
    const COMPONENT: &'static str = "gaudi_copy";
    const TRANSPORT: &'static str = "gaudi_cpy";
    const TRANSPORT_PREFIX: &'static str = "GAUDI_CPY_";
    const COST: f64 = 1.0;
    const PRIMARY: bool = true;
}

/// `gaudi_gdr` / `gaudi_gdr`.
pub(crate) enum GaudiGdr {}

impl Flavour for GaudiGdr {
    const COMPONENT: &'static str = "gaudi_gdr";
    const TRANSPORT: &'static str = "gaudi_gdr";
    const TRANSPORT_PREFIX: &'static str = "GAUDI_GDR_";
    const COST: f64 = 1.1;
    const PRIMARY: bool = false;
}
