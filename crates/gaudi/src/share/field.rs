//! Numbers of odd widths in a row of bytes, little end first: keys are packed tightly, because UCX
//! carries one with every remote key.

/// Writes fields one behind the other.
pub(super) struct Writer<'a>(&'a mut [u8]);

impl<'a> Writer<'a> {
    /// Writes from the start of `bytes`, which must be as long as what will be written.
    pub(super) fn new(bytes: &'a mut [u8]) -> Self {
        Self(bytes)
    }

    /// The lowest `width` bytes of a number.
    pub(super) fn number(&mut self, value: u64, width: usize) {
        self.bytes(&value.to_le_bytes()[..width]);
    }

    pub(super) fn bytes(&mut self, field: &[u8]) {
        let rest = std::mem::take(&mut self.0);
        let (here, rest) = rest.split_at_mut(field.len());
        here.copy_from_slice(field);
        self.0 = rest;
    }

    /// Whether everything is written.
    pub(super) fn is_full(&self) -> bool {
        self.0.is_empty()
    }
}

/// Reads fields one behind the other. Whoever makes one has checked the length of the whole.
pub(super) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn number(&mut self, width: usize) -> u64 {
        let (here, rest) = self.0.split_at(width);
        self.0 = rest;
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(here);
        u64::from_le_bytes(bytes)
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let (here, rest) = self.0.split_at(N);
        self.0 = rest;
        here.try_into().expect("split at this length")
    }
}
