//! An archive in the format of an initramfs (cpio, "newc").

use std::io::{self, Write};

/// Writes an archive, entry by entry.
#[derive(Debug)]
pub(super) struct Archive<W> {
    out: W,
    entries: u32,
}

impl<W: Write> Archive<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, entries: 0 }
    }

    /// A folder; its parents must have been written before.
    pub(super) fn folder(&mut self, path: &str) -> io::Result<()> {
        self.entry(path, 0o040_755, &[])
    }

    /// A file.
    pub(super) fn file(&mut self, path: &str, data: &[u8], executable: bool) -> io::Result<()> {
        self.entry(path, if executable { 0o100_755 } else { 0o100_644 }, data)
    }

    /// A symbolic link.
    pub(super) fn link(&mut self, path: &str, target: &str) -> io::Result<()> {
        self.entry(path, 0o120_777, target.as_bytes())
    }

    /// The end of the archive.
    pub(super) fn finish(mut self) -> io::Result<W> {
        self.entry("TRAILER!!!", 0, &[])?;
        Ok(self.out)
    }

    fn entry(&mut self, path: &str, mode: u32, data: &[u8]) -> io::Result<()> {
        self.entries += 1;
        let size = u32::try_from(data.len()).map_err(io::Error::other)?;
        let name = path.len() as u32 + 1;
        // Inode, mode, uid, gid, links, time, size, device (two), special device (two), name, checksum.
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name, 0];
        write!(self.out, "070701")?;
        for field in fields {
            write!(self.out, "{field:08x}")?;
        }
        const HEADER: usize = 110;
        self.out.write_all(path.as_bytes())?;
        self.out.write_all(&vec![0; 1 + padding(HEADER + path.len() + 1)])?;
        self.out.write_all(data)?;
        self.out.write_all(&vec![0; padding(data.len())])
    }
}

/// Bytes up to the next multiple of four.
fn padding(len: usize) -> usize {
    len.wrapping_neg() % 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_begin_at_multiples_of_four_and_state_their_sizes() {
        let mut archive = Archive::new(Vec::new());
        archive.folder("bin").unwrap();
        archive.file("bin/a", b"hello", true).unwrap();
        archive.link("bin/link", "a").unwrap();
        let bytes = archive.finish().unwrap();
        let mut at = 0;
        let mut seen = Vec::new();
        while at < bytes.len() {
            assert_eq!((at % 4, &bytes[at..at + 6]), (0, &b"070701"[..]));
            let field = |n: usize| {
                let text = std::str::from_utf8(&bytes[at + 6 + 8 * n..][..8]).unwrap();
                usize::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name) = (field(1), field(6), field(11));
            let text = std::str::from_utf8(&bytes[at + 110..][..name - 1]).unwrap();
            let data = at + (110 + name).next_multiple_of(4);
            seen.push((text, mode, &bytes[data..data + size]));
            at = data + size.next_multiple_of(4);
        }
        let expected: [(&str, usize, &[u8]); 4] = [
            ("bin", 0o040_755, b""),
            ("bin/a", 0o100_755, b"hello"),
            ("bin/link", 0o120_777, b"a"),
            ("TRAILER!!!", 0, b""),
        ];
        assert_eq!(seen, expected);
    }
}
