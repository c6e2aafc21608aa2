//! The DMA engine's own registers on Gaudi1: transfers with strides, which no packet describes.
//!
//! A program writes sizes and strides of up to five dimensions for source and destination, then
//! "commit". Pure: committing yields rows to copy and what to write when they are done.

/// Register offsets from the start of the engine's block.
mod register {
    pub(super) const SRC_BASE: usize = 0x14;
    pub(super) const DST_BASE: usize = 0x1c;
    /// TSIZE_1, STRIDE_1, … TSIZE_4, STRIDE_4, TSIZE_0.
    pub(super) const SRC_SHAPE: usize = 0x2c;
    pub(super) const DST_SHAPE: usize = 0x54;
    pub(super) const COMMIT: usize = 0x78;
    pub(super) const COMPLETION_DATA: usize = 0x7c;
    pub(super) const COMPLETION_ADDR: usize = 0x80;
    pub(super) const END: usize = 0x88;
}

/// More rows than this are a program's mistake.
const MAX_ROWS: u64 = 1 << 20;

/// One engine's registers.
#[derive(Clone, Debug)]
pub(crate) struct DmaCore {
    words: [u32; register::END / 4],
}

/// What a commit asks for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    /// (source, destination) of each row.
    pub(crate) rows: Vec<(u64, u64)>,
    /// Bytes of a row.
    pub(crate) row_len: u32,
    /// A word to write afterwards.
    pub(crate) completion: Option<(u64, u32)>,
}

impl Default for DmaCore {
    fn default() -> Self {
        Self { words: [0; register::END / 4] }
    }
}

impl DmaCore {
    fn word(&self, offset: usize) -> u32 {
        self.words[offset / 4]
    }

    fn address(&self, offset: usize) -> u64 {
        u64::from(self.word(offset + 4)) << 32 | u64::from(self.word(offset))
    }

    /// Writes a register; a commit returns the transfer, `Err` if it makes no sense.
    pub(crate) fn write(&mut self, offset: u16, value: u32) -> Result<Option<Transfer>, ()> {
        let offset = usize::from(offset);
        if let Some(word) = self.words.get_mut(offset / 4) {
            *word = value;
        }
        if offset == register::COMMIT { self.commit().map(Some).ok_or(()) } else { Ok(None) }
    }

    fn commit(&self) -> Option<Transfer> {
        let src = self.rows(register::SRC_BASE, register::SRC_SHAPE)?;
        let dst = self.rows(register::DST_BASE, register::DST_SHAPE)?;
        let row_len = self.word(register::SRC_SHAPE + 0x20);
        if src.len() != dst.len() || row_len != self.word(register::DST_SHAPE + 0x20) {
            return None;
        }
        let wanted = self.word(register::COMMIT) & 1 != 0;
        let completion = wanted.then(|| {
            (self.address(register::COMPLETION_ADDR), self.word(register::COMPLETION_DATA))
        });
        Some(Transfer { rows: src.into_iter().zip(dst).collect(), row_len, completion })
    }

    /// Addresses of the rows of one side, innermost dimension first.
    fn rows(&self, base: usize, shape: usize) -> Option<Vec<u64>> {
        let mut rows = vec![self.address(base)];
        for dimension in 0..4 {
            let count = u64::from(self.word(shape + 8 * dimension)).max(1);
            let stride = u64::from(self.word(shape + 8 * dimension + 4));
            if count.saturating_mul(rows.len() as u64) > MAX_ROWS {
                return None;
            }
            rows = (0..count)
                .flat_map(|n| rows.iter().map(move |row| row.wrapping_add(n * stride)))
                .collect();
        }
        Some(rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_source_is_spread_with_a_stride() {
        let mut core = DmaCore::default();
        let writes = [
            (0x14, 0x1000),
            (0x1c, 0x9000),
            (0x2c, 3),
            (0x30, 0),
            (0x4c, 16),
            (0x54, 3),
            (0x58, 64),
            (0x74, 16),
            (0x7c, 5),
            (0x80, 0x42),
        ];
        for (offset, value) in writes {
            assert_eq!(core.write(offset, value), Ok(None));
        }
        let transfer = core.write(0x78, 1).unwrap().unwrap();
        assert_eq!(transfer.rows, [(0x1000, 0x9000), (0x1000, 0x9040), (0x1000, 0x9080)]);
        assert_eq!((transfer.row_len, transfer.completion), (16, Some((0x42, 5))));
    }

    proptest::proptest! {
        #[test]
        fn any_writes_do_not_panic(writes: Vec<(u16, u32)>) {
            let mut core = DmaCore::default();
            for (offset, value) in writes {
                let _ = core.write(offset % 0x100, value);
            }
        }
    }
}
