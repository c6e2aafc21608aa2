//! A line of text that is made without allocating, for a signal handler.

use core::ffi::c_int;

/// Longest line; the rest is cut.
const LENGTH: usize = 1024;

pub(super) struct Line {
    bytes: [u8; LENGTH],
    length: usize,
}

impl Line {
    pub(super) const fn new() -> Self {
        Line { bytes: [0; LENGTH], length: 0 }
    }

    pub(super) fn text(&mut self, text: &[u8]) {
        for &byte in text {
            if self.length < LENGTH {
                self.bytes[self.length] = byte;
                self.length += 1;
            }
        }
    }

    pub(super) fn hex(&mut self, number: u64) {
        self.text(b"0x");
        let digits = (64 - number.leading_zeros()).div_ceil(4).max(1);
        for digit in (0..digits).rev() {
            let value = (number >> (digit * 4) & 0xf) as usize;
            self.text(&b"0123456789abcdef"[value..=value]);
        }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// As much as can be written at once.
    pub(super) fn write_to(&self, fd: c_int) {
        let bytes = self.as_bytes();
        // SAFETY: the bytes are ours; what cannot be written is nobody's loss.
        unsafe { libc::write(fd, bytes.as_ptr().cast(), bytes.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_text_make_a_line_that_never_overflows() {
        let mut line = Line::new();
        line.text(b"at ");
        for number in [0, 0xf, 0x10, u64::MAX] {
            line.hex(number);
            line.text(b" ");
        }
        assert_eq!(line.as_bytes(), b"at 0x0 0xf 0x10 0xffffffffffffffff ");
        line.text(&[b'x'; 2 * LENGTH]);
        assert_eq!(line.as_bytes().len(), LENGTH);
    }
}
