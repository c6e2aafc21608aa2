//! Address handles.

use core::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

use super::{AddressHandle, Domain, from_c, minus_one, object, read, status, write};
use crate::abi::*;
use crate::hca::destination;

/// Creates an address handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    object(|| {
        // SAFETY: the caller's promise.
        let (domain, attr): (&Domain, _) = unsafe { (from_c(pd)?, read(attr)?) };
        if attr.port_num != 1 || attr.grh.sgid_index != 0 || destination(&attr).is_none() {
            return Err(Errno::INVAL);
        }
        domain.users.add();
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        Ok(Box::new(AddressHandle { c: ibv_ah { context: domain.c.context, pd, handle }, attr }))
    })
}

/// Destroys an address handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    status(|| {
        // SAFETY: the caller's promise; the domain outlives it.
        let domain: &Domain = unsafe { from_c(from_c::<AddressHandle, _>(ah)?.c.pd) }?;
        // SAFETY: it came from `ibv_create_ah`.
        drop(unsafe { Box::from_raw(ah.cast::<AddressHandle>()) });
        domain.users.remove();
        Ok(())
    })
}

/// The address that a received datagram came from.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    _context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    attr: *mut ibv_ah_attr,
) -> c_int {
    minus_one(|| {
        // SAFETY: the caller's promise.
        let wc = unsafe { read(wc) }?;
        let mut found = ibv_ah_attr {
            dlid: wc.slid,
            sl: wc.sl,
            src_path_bits: wc.dlid_path_bits,
            port_num: port,
            ..Default::default()
        };
        if wc.wc_flags & IBV_WC_GRH != 0 {
            // SAFETY: the caller's promise.
            let header = unsafe { read(grh) }?;
            let first = u32::from_be_bytes([header[0], header[1], header[2], header[3]]);
            let mut raw = [0; 16];
            raw.copy_from_slice(&header[8..24]);
            found.is_global = 1;
            found.grh = ibv_global_route {
                dgid: ibv_gid { raw },
                flow_label: first & 0xf_ffff,
                sgid_index: 0,
                hop_limit: 0xff,
                traffic_class: (first >> 20) as u8,
            };
        }
        // SAFETY: the caller's promise.
        unsafe { write(attr, found) }
    })
}

/// An address handle for answering a received datagram.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut [u8; 40],
    port: u8,
) -> *mut ibv_ah {
    let mut attr = ibv_ah_attr::default();
    // SAFETY: passed on.
    unsafe {
        if ibv_init_ah_from_wc(core::ptr::null_mut(), port, wc, grh, &raw mut attr) != 0 {
            return core::ptr::null_mut();
        }
        ibv_create_ah(pd, &raw mut attr)
    }
}
