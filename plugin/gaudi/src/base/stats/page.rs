//! The page of this process: a sealed memory file that lives as long as the process. An update takes a few machine
//! instructions.
//!
//! It is made when the first card is opened, or the first peer relays. It needs no name, no folder and no clean-up:
//! readers find it through `/proc/PID/fd`, and the kernel removes it with the process. A process
//! that does neither makes none.
//!
//! A forked child must not count into its parent's page: in the child, a `fork` handler replaces the shared memory by
//! private memory at the same address. Objects that the child inherited count there, where nobody reads it. The
//! descriptor is inherited too; readers check the process id in the header.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};
use std::convert::Infallible;
use std::ffi::c_void;
use std::mem::offset_of;
use std::ptr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::count::Counts;
use super::layout::{self, Description, Header, KINDS, NAMES, Page, SIZE, SLOTS, Slot};
use crate::DeviceInfo;
use crate::process::{ForkHandlers, MemoryFile, PerProcess};

/// Where the shared page lies, for the handler in a forked child.
static SHARED_AT: AtomicUsize = AtomicUsize::new(0);

pub(super) struct OwnPage {
    page: &'static Page,
    /// Held open, because others find the page by it. `Err`: why they cannot read it.
    file: Result<MemoryFile, String>,
    /// Bus ids of the cards that have a slot, from the second slot on.
    cards: Mutex<Vec<String>>,
}

static PAGE: PerProcess<OwnPage> = PerProcess::new();

static FORKS: ForkHandlers = ForkHandlers::new(None, in_child);

/// The counters of a card, the same for every opening of it, in the page of this process. The page is made when it is
/// first needed; a forked child makes its own.
pub(super) fn of_card(info: &DeviceInfo) -> Counts {
    begin().of_card(info)
}

/// The page of this process.
pub(super) fn begin() -> &'static OwnPage {
    if let Some(own) = PAGE.get() {
        return own;
    }
    let Ok(own) = PAGE.get_or_make(|| Ok::<_, Infallible>(OwnPage::new()));
    if own.file.is_ok() {
        SHARED_AT.store(ptr::from_ref(own.page).addr(), Ordering::Relaxed);
        FORKS.register();
    }
    own
}

/// The counters of what belongs to no card, if there is a page.
pub(super) fn of_process() -> Option<Counts> {
    PAGE.get().map(|own| Counts::new(&own.page.slots[0].counters))
}

/// Why other processes cannot read this process's counters, if a card was opened and they cannot.
pub fn why_unreadable() -> Option<String> {
    PAGE.get()?.file.as_ref().err().cloned()
}

/// In a forked child: private memory of the same kind in place of the parent's page.
extern "C" fn in_child() {
    let at = SHARED_AT.load(Ordering::Relaxed);
    if at == 0 {
        return;
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let kind = MapFlags::PRIVATE | MapFlags::FIXED;
    // Not libc's `mmap`: UCX hooks that, and takes locks that a thread of the parent may have held.
    // SAFETY: replaces our own mapping, which has no plain references into it; all zeroes are
    // counters.
    let _ = unsafe { mmap_anonymous(at as *mut c_void, SIZE, access, kind) };
}

impl OwnPage {
    fn new() -> Self {
        let made = MemoryFile::new(layout::FILE_NAME, SIZE);
        let at: *mut Page = match &made {
            Ok(file) => file.as_ptr().as_ptr().cast(),
            // To count in, though nobody reads it.
            // SAFETY: not of zero size.
            Err(_) => unsafe { alloc_zeroed(Layout::new::<Page>()) }.cast(),
        };
        if at.is_null() {
            handle_alloc_error(Layout::new::<Page>());
        }
        // SAFETY: zeroed memory of this size and alignment, which is never given back and is not shared yet; after
        // this it is changed through atomics only.
        let page = unsafe {
            (&raw mut (*at).header).write(header());
            for (index, (name, (kind, unit))) in NAMES.iter().zip(KINDS).enumerate() {
                let mut text = [0; 40];
                text[..name.len()].copy_from_slice(name.as_bytes());
                (&raw mut (*at).descriptions[index]).write(Description {
                    name: text,
                    kind: kind as u32,
                    unit: unit as u32,
                });
            }
            &*at
        };
        page.slots[0].state.store(Slot::PROCESS, Ordering::Relaxed);
        page.header.magic.store(u64::from_ne_bytes(layout::MAGIC), Ordering::Release);
        let file = made.map_err(|(call, errno)| {
            format!("statistics cannot be read from outside: {call}: {errno}")
        });
        Self { page, file, cards: Mutex::default() }
    }

    fn of_card(&self, info: &DeviceInfo) -> Counts {
        let bus_id = info.bus_id.as_str();
        let mut cards = self.cards.lock().unwrap_or_else(PoisonError::into_inner);
        let known = cards.iter().position(|card| card == bus_id);
        let at = known.unwrap_or_else(|| {
            cards.push(bus_id.to_owned());
            cards.len() - 1
        });
        // More cards than slots: the rest share the slot of no card.
        let number = if at + 1 < SLOTS { at + 1 } else { 0 };
        let slot = &self.page.slots[number];
        if known.is_none() && number > 0 {
            slot.index.store(info.index, Ordering::Relaxed);
            // A bus id is shorter: zeroes follow.
            for (to, byte) in slot.bus_id.iter().zip(bus_id.bytes()) {
                to.store(byte, Ordering::Relaxed);
            }
            slot.state.store(Slot::CARD, Ordering::Release);
        }
        Counts::new(&slot.counters)
    }
}

/// Without the magic, which is written at the very end.
fn header() -> Header {
    let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Header {
        magic: AtomicU64::new(0),
        version: layout::VERSION,
        header_len: size_of::<Header>() as u32,
        size: SIZE as u64,
        pid: std::process::id(),
        counters: NAMES.len() as u32,
        start_time: start_time("self").unwrap_or(0),
        created: since_epoch.as_nanos() as u64,
        descriptions_at: offset_of!(Page, descriptions) as u32,
        description_len: size_of::<Description>() as u32,
        slots_at: offset_of!(Page, slots) as u32,
        slot_len: size_of::<Slot>() as u32,
        slots: SLOTS as u32,
        slot_header_len: Slot::HEADER_LEN as u32,
        reserved: [0; 7],
    }
}

/// When a process started, in clock ticks since boot.
pub(crate) fn start_time(process: &str) -> Option<u64> {
    stat_field(process, 22)
}

/// Whether the kernel has begun to end the process, or its first thread. Its files are closed then, or will be.
pub(crate) fn is_exiting(process: &str) -> Option<bool> {
    const PF_EXITING: u64 = 4;
    stat_field(process, 9).map(|flags| flags & PF_EXITING != 0)
}

/// A field of a process's line in `/proc`, by its number in proc(5); from the fourth on.
fn stat_field(process: &str, number: usize) -> Option<u64> {
    let line = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The second field is the program's name in brackets, and may hold anything, brackets too.
    line.rsplit_once(')')?.1.split_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}
