//! Notifications, and the records of what went wrong.

use core::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use super::info::card;
use super::{borrow, get, put};
use crate::abi::{CsTimeoutRecord, PageFaultInfo, RazwiRecord, UndefinedOpcodeRecord};
use crate::context::{self, Context};
use crate::node::{Role, node};
use crate::state::Word;
use std::sync::Arc;

/// The context for an event operation: control nodes are refused in their own way.
fn owner(fd: c_int) -> Result<Arc<Context>, Errno> {
    let fd = borrow(fd)?;
    match node().map_err(|_| Errno::NOTTY)?.identify(fd)?.role {
        Role::Control => Err(Errno::OPNOTSUPP),
        Role::Compute => context::of(fd),
    }
}

const OPEN_DEV: c_int = 0;
const CS_TIMEOUT: c_int = 1;
const RAZWI: c_int = 2;
const UNDEFINED_OPCODE: c_int = 3;
const HW_ERR: c_int = 4;
const FW_ERR: c_int = 5;

c_functions! {
    /// An eventfd that is signalled when something happens.
    fn hlthunk_notifier_create(fd: c_int) -> status {
        let context = owner(fd)?;
        let eventfd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        context.events.register(rustix::io::fcntl_dupfd_cloexec(&eventfd, 0)?)?;
        Ok(eventfd.into_raw_fd())
    }

    fn hlthunk_notifier_release(fd: c_int, handle: c_int) -> done {
        owner(fd)?.events.unregister()?;
        rustix::io::fcntl_getfd(borrow(handle)?)?;
        // SAFETY: open, and the caller gives it up.
        drop(unsafe { OwnedFd::from_raw_fd(handle) });
        Ok(())
    }

    /// The events within a timeout; none is not an error.
    fn hlthunk_notifier_recv(
        fd: c_int, handle: c_int, events: *mut u64, count: *mut u64, _flags: u32, timeout_ms: u32,
    ) -> done {
        let context = owner(fd)?;
        let eventfd = borrow(handle)?;
        if events.is_null() || count.is_null() {
            return Err(Errno::INVAL);
        }
        context.check_timeout();
        let limit = Timespec {
            tv_sec: (timeout_ms / 1000).into(),
            tv_nsec: i64::from(timeout_ms % 1000) * 1_000_000,
        };
        let mut ready = [PollFd::new(&eventfd, PollFlags::IN)];
        put(count, 0)?;
        if rustix::io::retry_on_intr(|| rustix::event::poll(&mut ready, Some(&limit)))? == 0 {
            return Ok(());
        }
        let mut bytes = [0; 8];
        rustix::io::read(eventfd, &mut bytes)?;
        put(count, u64::from_ne_bytes(bytes))?;
        put(events, context.events.take())
    }

    fn hlthunk_get_event_record(fd: c_int, id: c_int, buf: *mut c_void) -> done {
        if buf.is_null() {
            return Err(Errno::INVAL);
        }
        let (_, state) = card(fd)?;
        match id {
            OPEN_DEV => put(buf.cast::<i64>(), 0)?,
            CS_TIMEOUT => {
                let [when, seq, _] = state.error(Word::CsTimeout);
                let record = CsTimeoutRecord::zeroed()
                    .with(CsTimeoutRecord::TIMESTAMP, when as i64)
                    .with(CsTimeoutRecord::SEQ, seq);
                put(buf.cast(), record)?;
            }
            RAZWI => {
                let [when, addr, queue] = state.error(Word::Razwi);
                let mut engine_id = [0; 128];
                engine_id[0] = queue as u16;
                let record = RazwiRecord::zeroed()
                    .with(RazwiRecord::TIMESTAMP, when as i64)
                    .with(RazwiRecord::ADDR, addr)
                    .with(RazwiRecord::ENGINE_ID, engine_id)
                    .with(RazwiRecord::NUM_OF_POSSIBLE_ENGINES, (when != 0).into());
                put(buf.cast(), record)?;
            }
            UNDEFINED_OPCODE => {
                let [when, cb, queue] = state.error(Word::UndefinedOpcode);
                let record = UndefinedOpcodeRecord::zeroed()
                    .with(UndefinedOpcodeRecord::TIMESTAMP, when as i64)
                    .with(UndefinedOpcodeRecord::CQ_ADDR, cb)
                    .with(UndefinedOpcodeRecord::ENGINE_ID, queue as u32 / 4)
                    .with(UndefinedOpcodeRecord::STREAM_ID, queue as u32 % 4);
                put(buf.cast(), record)?;
            }
            HW_ERR | FW_ERR => put(buf.cast(), [0u64; 2])?,
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }

    /// Without the list of mappings.
    fn hlthunk_get_page_fault_info(fd: c_int, out: *mut PageFaultInfo, _mappings: u32) -> done {
        let before = get(out)?;
        let [when, addr, queue] = card(fd)?.1.error(Word::PageFault);
        let info = before
            .with(PageFaultInfo::TIMESTAMP, when as i64)
            .with(PageFaultInfo::ADDR, addr)
            .with(PageFaultInfo::ENGINE_ID, queue as u16)
            .with(PageFaultInfo::NUM_OF_MAPPINGS, 0);
        put(out, info)
    }
}
