//! What the plugin found and decided, once per process at info level: at the start the cards and which will be
//! used, and at the first use of a card how its memory reaches others.

use std::sync::Once;

use gaudi::{Device, DeviceChoice, DeviceInfo};
use uct::config::Ternary;
use uct::{Level, Ucx, log};

use crate::status::explain;

/// The cards that there are, and which will be used.
pub(crate) fn at_start(ucx: &Ucx, choice: &DeviceChoice, candidates: &[DeviceInfo]) {
    static SAID: Once = Once::new();
    if !ucx.logs(Level::Info) {
        return;
    }
    SAID.call_once(|| {
        let all = gaudi::runtime().discover().unwrap_or_default();
        let cards: Vec<String> = all.iter().map(ToString::to_string).collect();
        let why = gaudi::runtime().why_chosen(choice).unwrap_or_default();
        let chosen = match candidates {
            [only] => format!("{only}, {why}"),
            _ => why,
        };
        let (version, ucx_version) = (env!("CARGO_PKG_VERSION"), ucx.version());
        let (count, cards) = (cards.len(), cards.join(", "));
        let noun = if count == 1 { "card" } else { "cards" };
        log!(
            ucx,
            Info,
            "ucx-gaudi {version} with UCX {ucx_version}: {count} {noun} ({cards}); to be used: {chosen}"
        );
    });
}

/// How a card's memory reaches other processes and machines.
pub(crate) fn at_first_use(ucx: &Ucx, device: &Device, dmabuf: Ternary, nics: &str) {
    static SAID: Once = Once::new();
    // Checked first: `can_import` makes some drivers write to the kernel log.
    if !ucx.logs(Level::Info) {
        return;
    }
    SAID.call_once(|| {
        let ipc = match device.can_import() {
            Ok(()) => String::from("gaudi_ipc, one copy from card to card"),
            Err(error) => format!("gaudi_ipc, relayed through host memory: {}", explain(&error)),
        };
        let dmabuf = match dmabuf {
            Ternary::No => "off (UCX_GAUDI_COPY_DMABUF=no)",
            Ternary::Yes => "exported at each allocation",
            Ternary::Try => "exported when a NIC registers memory",
        };
        let card = device.info();
        log!(
            ucx,
            Info,
            "{card}: to other processes: {ipc}; to NICs: dma-buf {dmabuf}; nearest NIC: {nics}"
        );
    });
}
