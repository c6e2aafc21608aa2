//! The page of this process: a sealed memory file that lives as long as the process and a few
//! machine instructions per update.
//!
//! It is made when the first card is opened. It needs no name, no folder and no clean-up:
//! readers find it through `/proc/PID/fd`, and the kernel removes it with the process. A process
//! that never opens a card makes none.
//!
//! A forked child must not count into its parent's page: in the child, private memory takes the
//! place of the shared one at the same address (a `fork` handler does it), so that what is inherited
//! counts on, unseen. The descriptor is inherited too; readers check the process id in the header.

use std::convert::Infallible;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

use super::count::Counts;
use super::layout::{
    self, KINDS, NAMES, SIZE, SLOT_LEN, SLOTS, SLOTS_AT, description, header, slot,
};
use crate::DeviceInfo;
use crate::process::{ForkHandlers, MemoryFile, PerProcess};

/// Where the shared page lies, for the handler in a forked child.
static SHARED_AT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
struct Page {
    at: NonNull<u8>,
    /// Held open: this is how others find the page.
    file: Option<MemoryFile>,
    unreadable: Option<String>,
    /// Bus ids of the cards that have a slot, from the second slot on.
    cards: Mutex<Vec<String>>,
}

// SAFETY: the memory is mapped for ever and, once published, changed through atomics only.
unsafe impl Send for Page {}
// SAFETY: as above.
unsafe impl Sync for Page {}

static PAGE: PerProcess<Page> = PerProcess::new();

static FORKS: ForkHandlers = ForkHandlers::new(None, in_child);

/// The page of this process, made when it is first needed. A forked child makes its own.
fn page() -> &'static Page {
    if let Some(page) = PAGE.get() {
        return page;
    }
    let Ok(page) = PAGE.get_or_make(|| Ok::<_, Infallible>(Page::new()));
    if page.file.is_some() {
        SHARED_AT.store(page.at.as_ptr() as usize, Ordering::Relaxed);
        FORKS.register();
    }
    page
}

/// The counters of a card; the same for every opening of it.
pub(super) fn of_card(info: &DeviceInfo) -> Counts {
    page().of_card(info)
}

/// The counters of what belongs to no card, if there is a page.
pub(super) fn of_process() -> Option<Counts> {
    PAGE.get().map(|page| page.slot(0))
}

/// Why other processes cannot read this process's counters, if a card was opened and they cannot.
pub fn why_unreadable() -> Option<String> {
    PAGE.get()?.unreadable.clone()
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

impl Page {
    fn new() -> Self {
        match MemoryFile::new(layout::FILE_NAME, SIZE) {
            Ok(file) => {
                let at = file.as_ptr();
                let page = Self { at, file: Some(file), unreadable: None, cards: Mutex::default() };
                page.describe();
                page
            }
            Err((call, errno)) => Self {
                at: private(),
                file: None,
                unreadable: Some(format!(
                    "statistics cannot be read from outside: {call}: {errno}"
                )),
                cards: Mutex::default(),
            },
        }
    }

    /// Writes everything but the counters; the magic at the very end.
    fn describe(&self) {
        let started = super::snapshot::start_time("self").unwrap_or(0);
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.put32(header::VERSION, layout::VERSION);
        self.put32(header::HEADER_LEN, header::LEN as u32);
        self.put64(header::SIZE, SIZE as u64);
        self.put32(header::PID, std::process::id());
        self.put32(header::COUNTERS, NAMES.len() as u32);
        self.put64(header::START_TIME, started);
        self.put64(header::CREATED, since_epoch.as_nanos() as u64);
        self.put32(header::DESCRIPTIONS_AT, layout::DESCRIPTIONS_AT as u32);
        self.put32(header::DESCRIPTION_LEN, description::LEN as u32);
        self.put32(header::SLOTS_AT, SLOTS_AT as u32);
        self.put32(header::SLOT_LEN, SLOT_LEN as u32);
        self.put32(header::SLOTS, SLOTS as u32);
        self.put32(header::SLOT_HEADER_LEN, slot::HEADER_LEN as u32);
        for (at, (name, (kind, unit))) in NAMES.iter().zip(KINDS).enumerate() {
            let place = layout::DESCRIPTIONS_AT + at * description::LEN;
            self.put_text(place + description::NAME, name, description::NAME_LEN);
            self.put32(place + description::KIND, kind as u32);
            self.put32(place + description::UNIT, unit as u32);
        }
        self.put32(SLOTS_AT + slot::STATE, slot::PROCESS);
        let magic = u64::from_ne_bytes(layout::MAGIC);
        self.word64(header::MAGIC).store(magic, Ordering::Release);
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
        let place = SLOTS_AT + number * SLOT_LEN;
        if known.is_none() && number > 0 {
            self.put32(place + slot::INDEX, info.index);
            self.put_text(place + slot::BUS_ID, bus_id, slot::BUS_ID_LEN);
            self.word32(place + slot::STATE).store(slot::CARD, Ordering::Release);
        }
        self.slot(number)
    }

    fn slot(&self, number: usize) -> Counts {
        let first = self.word64(SLOTS_AT + number * SLOT_LEN + slot::HEADER_LEN);
        // SAFETY: as many words follow each other in every slot, mapped for ever.
        Counts::new(unsafe { &*ptr::from_ref(first).cast() })
    }

    fn word32(&self, at: usize) -> &'static AtomicU32 {
        assert!(at.is_multiple_of(4) && at + 4 <= SIZE);
        // SAFETY: inside the mapping, aligned, mapped for ever, changed through atomics only.
        unsafe { AtomicU32::from_ptr(self.at.as_ptr().add(at).cast()) }
    }

    fn word64(&self, at: usize) -> &'static AtomicU64 {
        assert!(at.is_multiple_of(8) && at + 8 <= SIZE);
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(self.at.as_ptr().add(at).cast()) }
    }

    fn put32(&self, at: usize, value: u32) {
        self.word32(at).store(value, Ordering::Relaxed);
    }

    fn put64(&self, at: usize, value: u64) {
        self.word64(at).store(value, Ordering::Relaxed);
    }

    /// Text with zeroes behind it; what does not fit is cut off.
    fn put_text(&self, at: usize, text: &str, len: usize) {
        for (word, bytes) in text.as_bytes()[..text.len().min(len - 1)].chunks(4).enumerate() {
            let mut padded = [0; 4];
            padded[..bytes.len()].copy_from_slice(bytes);
            self.put32(at + word * 4, u32::from_ne_bytes(padded));
        }
    }
}

/// Memory to count in where there is no page; never read.
fn private() -> NonNull<u8> {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping wherever there is room.
    let mapped = unsafe { mmap_anonymous(ptr::null_mut(), SIZE, access, MapFlags::PRIVATE) };
    match mapped {
        Ok(at) => NonNull::new(at.cast()).expect("mmap gives no null"),
        Err(_) => {
            let words = Box::leak(vec![0_u64; SIZE / 8].into_boxed_slice());
            NonNull::from(&mut words[0]).cast()
        }
    }
}
