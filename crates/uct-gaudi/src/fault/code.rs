//! Whose code an address is: the file it is mapped from, and the exported function it is in. For a signal
//! handler: reads `/proc/self/maps` and the ELF image in memory, takes no lock and allocates nothing.
//!
//! Not `dladdr`, which takes the dynamic linker's lock: the thread that faults may have interrupted it.

use core::ffi::{CStr, c_char};
use core::mem::size_of;

use super::line::Line;

/// Longest path that is kept of a mapping; longer ones are cut in front.
const PATH: usize = 256;
/// Words of the stack that are searched for a return address.
const STACK_WORDS: u64 = 128;

/// Room to work in. Not on the stack: a signal stack may have 8 KiB, of which the kernel takes half.
pub(super) struct Room {
    read: [u8; 1024],
    line: [u8; 512],
    found: Mapping,
}

impl Room {
    pub(super) const fn new() -> Self {
        let found = Mapping { base: 0, path: [0; PATH], length: 0 };
        Room { read: [0; 1024], line: [0; 512], found }
    }
}

/// A mapping of a file with code.
struct Mapping {
    /// Where the file's first byte is mapped.
    base: u64,
    path: [u8; PATH],
    length: usize,
}

impl Mapping {
    fn path(&self) -> &[u8] {
        &self.path[..self.length]
    }

    fn name(&self) -> &[u8] {
        self.path().rsplit(|byte| *byte == b'/').next().unwrap_or_default()
    }

    /// libc and the dynamic linker do what others tell them.
    fn is_library_of_c(&self) -> bool {
        self.name().starts_with(b"libc.so")
            || self.name().starts_with(b"libc-")
            || self.name().starts_with(b"ld-")
    }
}

/// What [`describe`] found.
pub(super) struct Described {
    pub(super) is_library_of_c: bool,
}

/// Writes `FUNCTION+OFFSET in FILE`, or as much of it as is known.
pub(super) fn describe(room: &mut Room, line: &mut Line, address: u64) -> Described {
    if !find(room, address) {
        line.text(b"unknown code at ");
        line.hex(address);
        return Described { is_library_of_c: false };
    }
    write(line, &room.found, address);
    Described { is_library_of_c: room.found.is_library_of_c() }
}

/// The same of the first return address on the stack that is not libc's.
pub(super) fn describe_caller(room: &mut Room, line: &mut Line, stack: u64) {
    for word in 0..STACK_WORDS {
        let Some(value) = read_word(stack + 8 * word) else { break };
        // Most words are no addresses at all: do not read the list of mappings for each.
        if !(0x1000..1 << 47).contains(&value) {
            continue;
        }
        if find(room, value) && !room.found.is_library_of_c() {
            write(line, &room.found, value);
            return;
        }
    }
    line.text(b"unknown code");
}

fn write(line: &mut Line, mapping: &Mapping, address: u64) {
    let offset = address - mapping.base;
    if let Some((name, inside)) = symbol(mapping.base, offset) {
        line.text(name.to_bytes());
        line.text(b"+");
        line.hex(inside);
        line.text(b" of ");
    }
    line.text(mapping.path());
    line.text(b"+");
    line.hex(offset);
}

/// A word of this process's memory, or nothing where there is none: a return from the kernel, not a fault.
fn read_word(address: u64) -> Option<u64> {
    let mut word = 0u64;
    read(address, &raw mut word).then_some(word)
}

/// Copies a value from anywhere in this process.
fn read<T>(address: u64, to: *mut T) -> bool {
    let local = libc::iovec { iov_base: to.cast(), iov_len: size_of::<T>() };
    let remote = libc::iovec { iov_base: address as *mut _, iov_len: size_of::<T>() };
    // SAFETY: the kernel checks the remote address and writes the local value, whose size it is told. A plain
    // system call, allowed in a signal handler.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    read == size_of::<T>().cast_signed()
}

/// Finds the executable mapping of a file that an address is in; whether there is one.
fn find(room: &mut Room, address: u64) -> bool {
    let Room { read, line, found } = room;
    found.length = 0;
    // SAFETY: a fixed path; the descriptor is closed below.
    let fd = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if fd < 0 {
        return false;
    }
    let mut length = 0;
    let mut search = Search { address, base: None, found };
    'file: loop {
        // SAFETY: the buffer is ours, of this size.
        let got = unsafe { libc::read(fd, read.as_mut_ptr().cast(), read.len()) };
        let Ok(got @ 1..) = usize::try_from(got) else { break };
        for &byte in &read[..got] {
            if byte == b'\n' {
                if search.line(&line[..length]) {
                    break 'file;
                }
                length = 0;
            } else if length < line.len() {
                line[length] = byte;
                length += 1;
            }
        }
    }
    // SAFETY: opened above, closed once.
    unsafe { libc::close(fd) };
    search.found.length > 0
}

/// A search through the lines of `/proc/self/maps`.
struct Search<'a> {
    address: u64,
    /// Where the file of the lines before begins: mappings of a file follow each other.
    base: Option<u64>,
    found: &'a mut Mapping,
}

impl Search<'_> {
    /// Takes a line; whether the search is over.
    fn line(&mut self, line: &[u8]) -> bool {
        let mut fields = line.splitn(6, |byte| *byte == b' ');
        let (Some(range), Some(mode), Some(offset)) = (fields.next(), fields.next(), fields.next())
        else {
            return false;
        };
        let path = fields.nth(2).unwrap_or_default().trim_ascii();
        let mut ends = range.split(|byte| *byte == b'-').map(hex);
        let (Some(Some(start)), Some(Some(end))) = (ends.next(), ends.next()) else { return false };
        if hex(offset) == Some(0) {
            self.base = Some(start);
        }
        if !(start..end).contains(&self.address) {
            return start > self.address;
        }
        if let (Some(base), Some(b'x'), true) = (self.base, mode.get(2), path.starts_with(b"/")) {
            let kept = &path[path.len().saturating_sub(PATH)..];
            self.found.path[..kept.len()].copy_from_slice(kept);
            (self.found.base, self.found.length) = (base, kept.len());
        }
        true
    }
}

fn hex(digits: &[u8]) -> Option<u64> {
    let digit = |value: Option<u64>, byte: &u8| {
        Some(value?.checked_mul(16)? | u64::from(char::from(*byte).to_digit(16)?))
    };
    if digits.is_empty() { None } else { digits.iter().fold(Some(0), digit) }
}

/// The exported function that contains an offset into an ELF file mapped at `base`, and how far into it.
fn symbol(base: u64, offset: u64) -> Option<(&'static CStr, u64)> {
    let header = load::<libc::Elf64_Ehdr>(base)?;
    if header.e_ident[..4] != *b"\x7fELF" {
        return None;
    }
    let programs = 0..u64::from(header.e_phnum);
    let size = u64::from(header.e_phentsize);
    let mut headers =
        programs.filter_map(|at| load::<libc::Elf64_Phdr>(base + header.e_phoff + at * size));
    let dynamic = headers.find(|program| program.p_type == libc::PT_DYNAMIC)?;
    let (mut symbols, mut strings) = (None, None);
    for at in 0..dynamic.p_memsz / 16 {
        let [tag, value] = load::<[u64; 2]>(base + dynamic.p_vaddr + at * 16)?;
        // The dynamic linker of glibc has made addresses of these, others leave offsets.
        let place = if value < base { base + value } else { value };
        match tag {
            0 => break,
            5 => strings = Some(place),
            6 => symbols = Some(place),
            _ => {}
        }
    }
    let (symbols, strings) = (symbols?, strings?);
    // The table has no length; linkers put the strings behind it.
    let count = strings.checked_sub(symbols)? / size_of::<libc::Elf64_Sym>() as u64;
    for at in 0..count.min(1 << 20) {
        let entry = load::<libc::Elf64_Sym>(symbols + at * size_of::<libc::Elf64_Sym>() as u64)?;
        let is_function = entry.st_info & 0xf == 2 && entry.st_shndx != 0;
        if is_function && (entry.st_value..entry.st_value + entry.st_size).contains(&offset) {
            let name = (strings + u64::from(entry.st_name)) as *const c_char;
            // SAFETY: a string of the table of strings, which is mapped as long as the library, and that
            // contains the instruction that just ran.
            return Some((unsafe { CStr::from_ptr(name) }, offset - entry.st_value));
        }
    }
    None
}

/// A value at an address that may be none.
fn load<T: Copy>(address: u64) -> Option<T> {
    let mut value = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: filled whole where `read` says so; all these types are plain numbers.
    read(address, value.as_mut_ptr()).then(|| unsafe { value.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described(address: u64) -> String {
        let mut line = Line::new();
        describe(&mut Room::new(), &mut line, address);
        String::from_utf8_lossy(line.as_bytes()).into_owned()
    }

    #[test]
    fn code_is_named_by_function_and_file() {
        let text = described(libc::getenv as *const () as u64 + 1);
        assert!(text.starts_with("getenv+0x1 of /") && text.contains("libc.so"), "{text}");
        let text = described(described as *const () as u64);
        assert!(text.contains("uct_gaudi"), "the file of this program: {text}");
        let stack = 0u64;
        for nowhere in [0, 1, &raw const stack as u64, u64::MAX] {
            assert!(described(nowhere).starts_with("unknown code"), "{}", described(nowhere));
        }
    }

    #[test]
    fn memory_that_is_not_there_is_not_read() {
        assert_eq!(read_word(8), None);
        let word = 42u64;
        assert_eq!(read_word(&raw const word as u64), Some(42));
    }

    #[test]
    fn lines_of_the_list_of_mappings_are_read() {
        let lines = "\
            1000-2000 r--p 00000000 fe:00 11 /a/libx.so\n\
            2000-3000 r-xp 00001000 fe:00 11       /a/libx.so\n\
            3000-4000 rw-p 00002000 fe:00 11 /a/libx.so\n\
            5000-6000 r-xp 00000000 00:00 0 [vdso]\n";
        let find = |address| {
            let mut room = Room::new();
            let mut search = Search { address, base: None, found: &mut room.found };
            lines.lines().any(|line| search.line(line.as_bytes()));
            let path = String::from_utf8_lossy(room.found.path()).into_owned();
            (room.found.length > 0).then_some((room.found.base, path))
        };
        assert_eq!(find(0x2345), Some((0x1000, String::from("/a/libx.so"))));
        for address in [0x1000, 0x3000, 0x4500, 0x5000, 0x9000] {
            assert_eq!(find(address), None, "{address:#x}");
        }
    }
}
