//! Patches the driver's module so that it works.
//!
//! Since Linux 6.12 nobody can open a Gaudi: DRM refuses device files whose file operations do not have the flag for
//! unsigned offsets, and habanalabs' do not have it (`docs/upstream/habanalabs-open.md`). This sets the missing bit in
//! the file operations; everything else is Debian's build. The changed module only loads without its signature.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use object::read::elf::{ElfFile64, FileHeader};
use object::{Object, ObjectSection, ObjectSymbol};

/// The decompressed bytes of a module.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    let output = Command::new("xz").arg("--decompress").arg("--stdout").arg(path).output();
    let output = output.context("cannot run xz")?;
    if !output.status.success() {
        bail!("cannot decompress {}", path.display());
    }
    Ok(output.stdout)
}

/// The driver with FOP_UNSIGNED_OFFSET in its file operations, unsigned.
pub(super) fn make_openable(mut module: Vec<u8>) -> Result<Vec<u8>> {
    cut_signature(&mut module);
    let at = flags_offset(&module)?;
    const UNSIGNED_OFFSET: u8 = 0x20;
    module[at] |= UNSIGNED_OFFSET;
    Ok(module)
}

/// The offset of `hl_fops.fop_flags`: after the pointer to the owner.
fn flags_offset(module: &[u8]) -> Result<usize> {
    let file =
        ElfFile64::<object::Endianness>::parse(module).context("the module is no ELF file")?;
    ensure!(
        file.elf_header().e_type(file.endian()) == object::elf::ET_REL,
        "the module is no relocatable file"
    );
    let symbol = file.symbols().find(|symbol| symbol.name() == Ok("hl_fops"));
    let symbol = symbol.context("the module has no symbol hl_fops")?;
    let section = file.section_by_index(symbol.section_index().context("hl_fops is undefined")?)?;
    let (start, len) = section.file_range().context("hl_fops lies in no data")?;
    ensure!(symbol.address() + symbol.size() <= len && symbol.size() >= 16, "hl_fops is cut short");
    Ok((start + symbol.address() + 8) as usize)
}

/// Removes an appended signature: signature, 12 bytes of which the last four are its length, marker.
fn cut_signature(module: &mut Vec<u8>) {
    const MARKER: &[u8] = b"~Module signature appended~\n";
    const INFO: usize = 12;
    let Some(before) = module.strip_suffix(MARKER) else { return };
    let Some(length) = before.last_chunk::<4>() else { return };
    let appended = u32::from_be_bytes(*length) as usize + INFO;
    if let Some(len) = before.len().checked_sub(appended) {
        module.truncate(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_cut_and_a_module_without_one_stays() {
        let mut module = b"module".to_vec();
        cut_signature(&mut module);
        assert_eq!(module, b"module");
        module.extend(b"signature");
        module.extend([0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 9]);
        module.extend(b"~Module signature appended~\n");
        cut_signature(&mut module);
        assert_eq!(module, b"module");
    }

    #[test]
    fn something_else_than_a_module_is_refused() {
        assert!(make_openable(b"#!/bin/sh\n".to_vec()).is_err());
        let this = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(make_openable(this).is_err());
    }
}
