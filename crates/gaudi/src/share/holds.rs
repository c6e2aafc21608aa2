//! What an importer holds of one exporter, on a sheet that the exporter can look at.
//!
//! Written before memory is fetched, without a word to the exporter, which looks only when it takes
//! memory back. A message for each opening would wake it each time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::{Errno, pread};

use super::message::Offered;
use super::sheet::{self, Sheet};

/// Most allocations of one peer that are held at a time.
pub(super) const LINES: usize = 4096;
const WORDS: usize = 2;
const LINE_LEN: usize = WORDS * 8;
/// Read at a time.
const PAGE: usize = 4096;

/// What this process holds.
#[derive(Debug)]
pub(super) struct Holds {
    sheet: Sheet,
    free: Vec<u32>,
}

/// A line of the sheet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct HoldLine(u32);

impl Holds {
    pub(super) fn new() -> Result<Self, Errno> {
        let sheet = Sheet::new("ucx-gaudi-holds", LINES * WORDS)?;
        Ok(Self { sheet, free: (0..LINES as u32).rev().collect() })
    }

    /// Writes down that this is held; `None` if the sheet is full.
    pub(super) fn add(&mut self, offered: Offered) -> Option<HoldLine> {
        let line = self.free.pop()?;
        let words = [u64::from_le_bytes(offered.token.0), offered.base];
        self.sheet.put(line as usize * WORDS, &words);
        Some(HoldLine(line))
    }

    /// Strikes a line out.
    pub(super) fn strike(&mut self, HoldLine(line): HoldLine) {
        self.sheet.put(line as usize * WORDS, &[0; WORDS]);
        self.free.push(line);
    }
}

impl AsFd for Holds {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.sheet.as_fd()
    }
}

/// What a peer says it holds. Nothing on it is trusted: at worst, memory is kept for it in vain.
#[derive(Debug)]
pub(super) struct HeldByPeer(OwnedFd);

impl HeldByPeer {
    /// `None` if this is not such a sheet.
    pub(super) fn new(file: OwnedFd) -> Option<Self> {
        sheet::is_sheet(&file).then_some(Self(file))
    }

    /// Whether it lists this. Looks at what was ever written only, most often a page: memory cannot
    /// be freed without asking this of every peer.
    pub(super) fn lists(&self, offered: &Offered) -> bool {
        let token = u64::from_le_bytes(offered.token.0);
        if token == 0 {
            return false; // an empty line
        }
        let end = sheet::written(&self.0).min((LINES * LINE_LEN) as u64);
        let mut bytes = [0; PAGE];
        for at in (0..end).step_by(PAGE) {
            let Ok(len) = pread(&self.0, &mut bytes[..], at) else { return false };
            let is_it = |line: &[u8]| {
                line[..8] == token.to_le_bytes() && line[8..] == offered.base.to_le_bytes()
            };
            if bytes[..len].chunks_exact(LINE_LEN).any(is_it) {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::Token;
    use super::*;

    fn offered(number: u64) -> Offered {
        Offered { base: number << 12, token: Token(number.to_le_bytes()) }
    }

    #[test]
    fn the_peer_sees_what_is_held_until_it_is_struck_out() {
        let mut holds = Holds::new().unwrap();
        let seen = HeldByPeer::new(holds.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(!seen.lists(&offered(1)));
        let line = holds.add(offered(1)).unwrap();
        assert!(seen.lists(&offered(1)) && !seen.lists(&offered(2)));
        let wrong = Offered { token: offered(2).token, ..offered(1) };
        assert!(!seen.lists(&wrong));
        holds.strike(line);
        assert!(!seen.lists(&offered(1)));
        for number in 1..=LINES as u64 {
            holds.add(offered(number)).unwrap();
        }
        assert_eq!(holds.add(offered(1)), None, "full");
        assert!(seen.lists(&offered(LINES as u64)));
    }

    #[test]
    fn only_what_was_written_to_is_looked_at() {
        let mut holds = Holds::new().unwrap();
        assert_eq!(sheet::written(&holds), 0);
        holds.add(offered(1)).unwrap();
        let page = sheet::written(&holds);
        let in_page = page / LINE_LEN as u64;
        if in_page >= LINES as u64 {
            println!("skipped: the sheet is no longer than a page of this system");
            return;
        }
        for number in 2..=in_page {
            holds.add(offered(number)).unwrap();
        }
        assert_eq!(sheet::written(&holds), page);
        let line = holds.add(offered(in_page + 1)).unwrap();
        assert_eq!(sheet::written(&holds), 2 * page);
        let seen = HeldByPeer::new(holds.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(seen.lists(&offered(in_page)) && seen.lists(&offered(in_page + 1)));
        holds.strike(line);
        assert!(!seen.lists(&offered(in_page + 1)));
    }

    #[test]
    fn what_is_no_sheet_is_not_looked_at() {
        let null = std::fs::File::open("/dev/null").unwrap();
        assert!(HeldByPeer::new(null.into()).is_none());
        let short = Sheet::new("short", 8).unwrap();
        let short = HeldByPeer::new(short.as_fd().try_clone_to_owned().unwrap()).unwrap();
        assert!(!short.lists(&offered(0)));
    }
}
