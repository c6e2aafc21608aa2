//! A card that the software Synapse acquired: what a scene asks of it.

use std::ffi::c_int;

use crate::bindings::{Api, Handle, NULL};

/// A card, acquired by module id.
pub(crate) struct Acquired<'a> {
    pub(crate) api: &'a Api,
    pub(crate) stream: Handle,
}

/// Slot of the second card.
pub(crate) const MODULE: u32 = 0;

impl<'a> Acquired<'a> {
    pub(crate) fn new(api: &'a Api) -> Self {
        let mut device = 7;
        let mut stream = NULL;
        // SAFETY: out pointers to our own.
        unsafe {
            assert_eq!((api.synInitialize)(), 0);
            assert_eq!((api.synDeviceAcquireByModuleId)(&mut device, MODULE), 0);
            assert_eq!((api.synStreamCreateGeneric)(&mut stream, 0, 0), 0);
        }
        assert_eq!(device, 0, "whatever the card");
        Self { api, stream }
    }

    pub(crate) fn info(&self) -> [u8; 80] {
        let mut info = [0xee; 80];
        // SAFETY: room for more than 72 bytes; the id is ignored.
        assert_eq!(unsafe { (self.api.synDeviceGetInfoV2)(u32::MAX, info.as_mut_ptr()) }, 0);
        assert_eq!(info[72..], [0xee; 8], "nothing behind its 72 bytes");
        info
    }

    pub(crate) fn fd(&self) -> c_int {
        word(&self.info(), 48) as c_int
    }

    pub(crate) fn pool(&self) -> [u64; 9] {
        let (mut scal, mut pool, mut info) = (NULL, NULL, [0; 9]);
        // SAFETY: out pointers to our own.
        unsafe {
            assert_eq!((self.api.scal_get_handle_from_fd)(self.fd(), &mut scal), 0);
            let name = c"global_hbm".as_ptr();
            assert_eq!((self.api.scal_get_pool_handle_by_name)(scal, name, &mut pool), 0);
            assert_eq!((self.api.scal_pool_get_infoV2)(pool, &mut info), 0);
        }
        info
    }

    #[track_caller]
    pub(crate) fn malloc(&self, len: u64) -> u64 {
        let mut addr = 0;
        // SAFETY: an out pointer to our own.
        assert_eq!(unsafe { (self.api.synDeviceMalloc)(0, len, 0, 0, &mut addr) }, 0);
        addr
    }

    pub(crate) fn host(&self, len: usize) -> &'static mut [u8] {
        let mut at = NULL;
        // SAFETY: an out pointer to our own; the memory is never freed here.
        unsafe {
            assert_eq!((self.api.synHostMalloc)(0, len as u64, 0, &mut at), 0);
            std::slice::from_raw_parts_mut(at.cast(), len)
        }
    }

    pub(crate) fn event(&self, flags: u32) -> Handle {
        let mut event = NULL;
        // SAFETY: an out pointer to our own.
        assert_eq!(unsafe { (self.api.synEventCreate)(&mut event, 0, flags) }, 0);
        event
    }

    pub(crate) fn copy(&self, src: u64, len: u64, dst: u64, direction: c_int) -> c_int {
        // SAFETY: plain numbers.
        unsafe { (self.api.synMemCopyAsync)(self.stream, src, len, dst, direction) }
    }

    #[track_caller]
    pub(crate) fn finish(&self) {
        // SAFETY: a live stream.
        assert_eq!(unsafe { (self.api.synStreamSynchronize)(self.stream) }, 0);
    }
}

pub(crate) const TO_DEVICE: c_int = 0;
pub(crate) const TO_HOST: c_int = 1;
pub(crate) const INSIDE: c_int = 2;

pub(crate) fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}
