//! The server's side of the vfio-user protocol: what QEMU's `vfio-user-pci` asks of a device in
//! another process.
//!
//! A message is a 16-byte header and a body; descriptors travel with the header. Lengths, regions and
//! interrupts are checked here, addresses of guest memory by the device. Nothing here knows what the device is: see [`Device`].

use std::io::{self, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// A region of the device, as the client may use it.
#[derive(Debug, Default)]
pub struct Region<'a> {
    /// Bytes; 0 where there is none.
    pub size: u64,
    /// Memory behind the region, and the parts of it (offset, bytes) that the client may map.
    pub memory: Option<(BorrowedFd<'a>, Vec<(u64, u64)>)>,
}

/// Which interrupts a client sets, and to what.
#[derive(Debug)]
pub enum Irqs {
    /// From this one on, each to its eventfd.
    Eventfds(u32, Vec<OwnedFd>),
    /// These no longer have one.
    Clear(std::ops::Range<u32>),
}

/// What the protocol serves.
pub trait Device {
    /// Number of regions.
    const REGIONS: u32 = 9;
    /// Number of interrupt kinds.
    const IRQS: u32 = 5;
    /// The region of an index.
    fn region(&self, index: u32) -> Region<'_>;
    /// How many interrupts of a kind there are.
    fn irqs(&self, index: u32) -> u32;
    /// Reads from a part of a region that is not mapped.
    fn read(&self, region: u32, offset: u64, into: &mut [u8]);
    /// Writes to a part of a region that is not mapped.
    fn write(&self, region: u32, offset: u64, data: &[u8]);
    /// Guest memory appeared; without a descriptor the device cannot access it.
    fn map(&self, addr: u64, size: u64, memory: Option<(OwnedFd, u64)>) -> io::Result<()>;
    /// Guest memory goes.
    fn unmap(&self, addr: u64, size: u64) -> io::Result<()>;
    /// Interrupts of the MSI-X kind are connected.
    fn set_msix(&self, irqs: Irqs);
    /// The client resets the device.
    fn reset(&self);
}

const HEADER: usize = 16;
/// Largest transfer that a client may ask for, and thereby the largest message.
const MAX_TRANSFER: usize = 1 << 20;
const MAX_MESSAGE: usize = MAX_TRANSFER + 4096;
const MAX_FDS: usize = 16;
const REPLY: u32 = 1;
const NO_REPLY: u32 = 0x10;
const ERROR: u32 = 0x20;
const MSIX: u32 = 2;

mod command {
    pub(super) const VERSION: u16 = 1;
    pub(super) const DMA_MAP: u16 = 2;
    pub(super) const DMA_UNMAP: u16 = 3;
    pub(super) const GET_INFO: u16 = 4;
    pub(super) const GET_REGION_INFO: u16 = 5;
    pub(super) const GET_IRQ_INFO: u16 = 7;
    pub(super) const SET_IRQS: u16 = 8;
    pub(super) const REGION_READ: u16 = 9;
    pub(super) const REGION_WRITE: u16 = 10;
    pub(super) const RESET: u16 = 13;
}

struct Message {
    id: u16,
    command: u16,
    flags: u32,
    body: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// What is sent back: a body, and perhaps the descriptor of a region.
struct Reply<'a> {
    body: Vec<u8>,
    fd: Option<BorrowedFd<'a>>,
}

impl From<Vec<u8>> for Reply<'_> {
    fn from(body: Vec<u8>) -> Self {
        Self { body, fd: None }
    }
}

/// Serves one client until it closes the connection.
pub fn serve<D: Device>(device: &D, mut stream: UnixStream) -> io::Result<()> {
    while let Some(message) = receive(&mut stream)? {
        let (id, command, flags) = (message.id, message.command, message.flags);
        let answer = answer(device, message);
        if flags & NO_REPLY == 0 {
            send(&mut stream, id, command, answer)?;
        }
    }
    Ok(())
}

fn receive(stream: &mut UnixStream) -> io::Result<Option<Message>> {
    let mut header = [0; HEADER];
    let mut have = 0;
    let mut fds = Vec::new();
    while have < HEADER {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut into = [IoSliceMut::new(&mut header[have..])];
        let got = match recvmsg(&*stream, &mut into, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got.bytes,
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(received) = message {
                fds.extend(received);
            }
        }
        match got {
            0 if have == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            got => have += got,
        }
    }
    let (id, command) = (u16_at(&header, 0), u16_at(&header, 2));
    let (size, flags) = (u32_at(&header, 4) as usize, u32_at(&header, 8));
    if !(HEADER..=MAX_MESSAGE).contains(&size) {
        return Err(io::Error::other(format!("message {command} of {size} bytes")));
    }
    let mut body = vec![0; size - HEADER];
    stream.read_exact(&mut body)?;
    Ok(Some(Message { id, command, flags, body, fds }))
}

fn send(
    stream: &mut UnixStream,
    id: u16,
    command: u16,
    answer: Result<Reply<'_>, Errno>,
) -> io::Result<()> {
    let (reply, flags, errno) = match answer {
        Ok(reply) => (reply, REPLY, 0),
        Err(errno) => (Vec::new().into(), REPLY | ERROR, errno.raw_os_error() as u32),
    };
    let mut bytes = Vec::with_capacity(HEADER + reply.body.len());
    bytes.extend(id.to_le_bytes());
    bytes.extend(command.to_le_bytes());
    put32(&mut bytes, &[(HEADER + reply.body.len()) as u32, flags, errno]);
    bytes.extend(reply.body);
    let mut sent = 0;
    if let Some(fd) = reply.fd {
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&fds));
        let from = [io::IoSlice::new(&bytes)];
        sent = sendmsg(&*stream, &from, &mut control, SendFlags::NOSIGNAL)?;
    }
    stream.write_all(&bytes[sent..])
}

fn answer<D: Device>(device: &D, message: Message) -> Result<Reply<'_>, Errno> {
    let Message { command, body, fds, .. } = message;
    let word = |at: usize| body.get(at..at + 4).map(|_| u32_at(&body, at)).ok_or(Errno::INVAL);
    let long = |at: usize| body.get(at..at + 8).map(|_| u64_at(&body, at)).ok_or(Errno::INVAL);
    match command {
        command::VERSION => {
            // Major and minor 0, and what the client may expect.
            let mut reply = vec![0; 4];
            let text = format!(
                r#"{{"capabilities":{{"max_msg_fds":{MAX_FDS},"max_data_xfer_size":{MAX_TRANSFER}}}}}"#
            );
            reply.extend(text.as_bytes());
            reply.push(0);
            Ok(reply.into())
        }
        command::DMA_MAP => {
            let (offset, addr, size) = (long(8)?, long(16)?, long(24)?);
            let memory = fds.into_iter().next().map(|fd| (fd, offset));
            device.map(addr, size, memory).map_err(|_| Errno::INVAL)?;
            Ok(Vec::new().into())
        }
        command::DMA_UNMAP => {
            device.unmap(long(8)?, long(16)?).map_err(|_| Errno::INVAL)?;
            Ok(body[..24].to_vec().into())
        }
        command::GET_INFO => {
            const RESETTABLE: u32 = 1;
            const PCI: u32 = 2;
            Ok(words(&[16, RESETTABLE | PCI, D::REGIONS, D::IRQS]).into())
        }
        command::GET_REGION_INFO => {
            let (room, index) = (word(0)?, word(8)?);
            if index >= D::REGIONS {
                return Err(Errno::INVAL);
            }
            Ok(region_info(room, index, device.region(index)))
        }
        command::GET_IRQ_INFO => {
            let index = word(8)?;
            if index >= D::IRQS {
                return Err(Errno::INVAL);
            }
            const EVENTFD_NORESIZE: u32 = 1 | 8;
            let count = device.irqs(index);
            let flags = if count == 0 { 0 } else { EVENTFD_NORESIZE };
            Ok(words(&[16, flags, index, count]).into())
        }
        command::SET_IRQS => {
            let (flags, index, start, count) = (word(4)?, word(8)?, word(12)?, word(16)?);
            set_irqs(device, flags, index, start, count, fds)?;
            Ok(Vec::new().into())
        }
        command::REGION_READ => {
            let (offset, region, count) = (long(0)?, word(8)?, word(12)?);
            check(device, region, offset, count)?;
            let mut reply = body[..16].to_vec();
            reply.resize(16 + count as usize, 0);
            device.read(region, offset, &mut reply[16..]);
            Ok(reply.into())
        }
        command::REGION_WRITE => {
            let (offset, region, count) = (long(0)?, word(8)?, word(12)?);
            check(device, region, offset, count)?;
            let data = body.get(16..16 + count as usize).ok_or(Errno::INVAL)?;
            device.write(region, offset, data);
            Ok(body[..16].to_vec().into())
        }
        command::RESET => {
            device.reset();
            Ok(Vec::new().into())
        }
        _ => Err(Errno::OPNOTSUPP),
    }
}

fn check<D: Device>(device: &D, region: u32, offset: u64, count: u32) -> Result<(), Errno> {
    let inside = region < D::REGIONS
        && count as usize <= MAX_TRANSFER
        && offset.checked_add(count.into()).is_some_and(|end| end <= device.region(region).size);
    if inside { Ok(()) } else { Err(Errno::INVAL) }
}

fn region_info(room: u32, index: u32, region: Region<'_>) -> Reply<'_> {
    const READ_WRITE: u32 = 3;
    const MMAP: u32 = 4;
    const CAPABILITIES: u32 = 8;
    const FIXED: u32 = 32;
    let present = if region.size == 0 { 0 } else { READ_WRITE };
    let Some((fd, areas)) = region.memory else {
        let mut body = words(&[FIXED, present, index, 0]);
        put64(&mut body, &[region.size, 0]);
        return body.into();
    };
    let needed = FIXED + 16 + 16 * areas.len() as u32;
    // The list follows the fixed part; QEMU wants to read so even where there was no room for it.
    let mut body = words(&[needed, present | MMAP | CAPABILITIES, index, FIXED]);
    put64(&mut body, &[region.size, 0]);
    if room < needed {
        // The client asks again, with room for the list.
        return body.into();
    }
    // Capability 1 (sparse mapping), version 1, the last one.
    put32(&mut body, &[0x0001_0001, 0, areas.len() as u32, 0]);
    for (offset, size) in areas {
        put64(&mut body, &[offset, size]);
    }
    Reply { body, fd: Some(fd) }
}

fn set_irqs<D: Device>(
    device: &D,
    flags: u32,
    index: u32,
    start: u32,
    count: u32,
    fds: Vec<OwnedFd>,
) -> Result<(), Errno> {
    const EVENTFD: u32 = 4;
    const TRIGGER: u32 = 32;
    let total = if index < D::IRQS { device.irqs(index) } else { return Err(Errno::INVAL) };
    let end = start.checked_add(count).filter(|end| *end <= total).ok_or(Errno::INVAL)?;
    if index != MSIX || flags & TRIGGER == 0 {
        return Ok(());
    }
    device.set_msix(match (count, fds.is_empty()) {
        (0, _) => Irqs::Clear(0..total),
        (_, true) => Irqs::Clear(start..end),
        _ if flags & EVENTFD == 0 || fds.len() != count as usize => return Err(Errno::INVAL),
        _ => Irqs::Eventfds(start, fds),
    });
    Ok(())
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

fn words(values: &[u32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put32(&mut bytes, values);
    bytes
}

fn put32(bytes: &mut Vec<u8>, values: &[u32]) {
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

fn put64(bytes: &mut Vec<u8>, values: &[u64]) {
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::card::{Card, Options};
    use crate::endpoint::Endpoint;
    use crate::registers::{self, cpu, psoc};
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use std::cell::RefCell;
    use std::os::fd::AsFd;

    /// Region 0 has a page of memory that may be mapped, and one that may not; region 7 has 16 bytes.
    struct Fake {
        memory: OwnedFd,
        seen: RefCell<Vec<String>>,
    }

    impl Fake {
        fn new() -> Self {
            let flags = rustix::fs::MemfdFlags::CLOEXEC;
            let memory = rustix::fs::memfd_create("fake", flags).unwrap();
            Self { memory, seen: RefCell::default() }
        }

        fn see(&self, what: String) {
            self.seen.borrow_mut().push(what);
        }

        /// The answer to a message, as it goes over the wire.
        fn ask(&self, command: u16, body: &[u8]) -> Result<Vec<u8>, Errno> {
            let message =
                Message { id: 7, command, flags: 0, body: body.to_vec(), fds: Vec::new() };
            answer(self, message).map(|reply| reply.body)
        }
    }

    impl Device for Fake {
        fn region(&self, index: u32) -> Region<'_> {
            match index {
                0 => Region { size: 8192, memory: Some((self.memory.as_fd(), vec![(4096, 4096)])) },
                7 => Region { size: 16, memory: None },
                _ => Region::default(),
            }
        }
        fn irqs(&self, index: u32) -> u32 {
            if index == MSIX { 8 } else { 0 }
        }
        fn read(&self, region: u32, offset: u64, into: &mut [u8]) {
            self.see(format!("read {region} {offset} {}", into.len()));
            into.fill(0x5a);
        }
        fn write(&self, region: u32, offset: u64, data: &[u8]) {
            self.see(format!("write {region} {offset} {data:?}"));
        }
        fn map(&self, _: u64, _: u64, _: Option<(OwnedFd, u64)>) -> io::Result<()> {
            Ok(())
        }
        fn unmap(&self, _: u64, _: u64) -> io::Result<()> {
            Ok(())
        }
        fn set_msix(&self, irqs: Irqs) {
            self.see(format!("{irqs:?}"));
        }
        fn reset(&self) {}
    }

    fn access(offset: u64, region: u32, count: u32, data: &[u8]) -> Vec<u8> {
        let mut body = Vec::new();
        put64(&mut body, &[offset]);
        put32(&mut body, &[region, count]);
        body.extend(data);
        body
    }

    #[test]
    fn accesses_outside_of_a_region_are_refused_before_the_device_sees_them() {
        let fake = Fake::new();
        assert_eq!(
            fake.ask(command::REGION_READ, &access(12, 7, 4, &[])).unwrap()[16..],
            [0x5a; 4]
        );
        fake.ask(command::REGION_WRITE, &access(0, 7, 2, &[1, 2])).unwrap();
        assert_eq!(*fake.seen.borrow(), ["read 7 12 4", "write 7 0 [1, 2]"]);
        let wrong = [
            (command::REGION_READ, access(13, 7, 4, &[])),
            (command::REGION_READ, access(u64::MAX, 7, 4, &[])),
            (command::REGION_READ, access(0, 9, 4, &[])),
            (command::REGION_READ, access(0, 0, u32::MAX, &[])),
            (command::REGION_WRITE, access(0, 7, 4, &[1])),
            (command::REGION_WRITE, vec![0; 15]),
        ];
        for (command, body) in wrong {
            assert_eq!(fake.ask(command, &body).unwrap_err(), Errno::INVAL, "{body:?}");
        }
        assert_eq!(fake.seen.borrow().len(), 2);
    }

    #[test]
    fn a_region_states_the_room_that_its_list_needs_and_then_gives_the_list() {
        let fake = Fake::new();
        let short = fake.ask(command::GET_REGION_INFO, &words(&[32, 0, 0, 0])).unwrap();
        assert_eq!((short.len(), u32_at(&short, 0), u32_at(&short, 12)), (32, 64, 32));
        let whole = fake.ask(command::GET_REGION_INFO, &words(&[64, 0, 0, 0])).unwrap();
        assert_eq!((whole.len(), u32_at(&whole, 40)), (64, 1));
        assert_eq!((u64_at(&whole, 48), u64_at(&whole, 56)), (4096, 4096));
    }

    #[test]
    fn an_unknown_command_is_refused_and_the_next_message_is_understood() {
        let fake = Fake::new();
        let (mut client, server) = UnixStream::pair().unwrap();
        for (command, body) in [(99u16, vec![1; 100]), (command::GET_INFO, vec![0; 16])] {
            client.write_all(&5u16.to_le_bytes()).unwrap();
            client.write_all(&command.to_le_bytes()).unwrap();
            client.write_all(&words(&[(HEADER + body.len()) as u32, 0, 0])).unwrap();
            client.write_all(&body).unwrap();
        }
        client.shutdown(std::net::Shutdown::Write).unwrap();
        serve(&fake, server).unwrap();
        let mut replies = Vec::new();
        client.read_to_end(&mut replies).unwrap();
        let error = Errno::OPNOTSUPP.raw_os_error() as u32;
        assert_eq!((u32_at(&replies, 8), u32_at(&replies, 12)), (REPLY | ERROR, error));
        assert_eq!((u32_at(&replies, 16 + 8), replies.len()), (REPLY, 16 + 32));
    }

    #[test]
    fn interrupts_beyond_the_last_are_refused() {
        let fake = Fake::new();
        let set = |start, count| fake.ask(command::SET_IRQS, &words(&[20, 36, 2, start, count]));
        assert!(set(0, 8).is_ok() && set(0, 0).is_ok());
        assert!(set(1, 8).is_err() && set(u32::MAX, 2).is_err());
        assert_eq!(*fake.seen.borrow(), ["Clear(0..8)", "Clear(0..8)"]);
    }

    proptest! {
        #[test]
        fn any_bytes_get_an_answer(command: u16, body: Vec<u8>) {
            let _ = Fake::new().ask(command % 16, &body);
        }
    }

    /// Numbers at which ranges begin and end.
    fn edge() -> impl Strategy<Value = u64> {
        let edges = [0, 1, 0x1000, 0x8000, 0x1_0000, 1 << 32, 1 << 56, u64::MAX - 0xfff, u64::MAX];
        prop_oneof![prop::sample::select(edges.to_vec()), any::<u64>(), 0..0x2_0000u64]
    }

    /// A place in BAR 0: a register that does something, or any.
    fn register() -> impl Strategy<Value = u64> {
        let pages: Vec<_> = registers::blocks().into_iter().map(|(page, _)| page).collect();
        let known = (prop::sample::select(pages), 0..0x400u32)
            .prop_map(|(page, word)| registers::BAR0_CFG + u64::from(page + 4 * word));
        // Producer and consumer index, size and base of the first PDMA's stream 0, and what starts it.
        let stream = prop::sample::select(vec![0x80, 0x90, 0x70, 0x50, 0x60, 0x00, 0x04])
            .prop_map(|at| registers::BAR0_CFG + 0x4c8_a000 + at);
        let firmware = [psoc::COMMS_COMMAND, psoc::MESSAGE, psoc::HALT, psoc::EVENTS, cpu::PQ_PI];
        let firmware = prop::sample::select(firmware.to_vec())
            .prop_map(|register| registers::BAR0_CFG + u64::from(register));
        prop_oneof![known, stream, firmware, 0..registers::BAR0]
    }

    fn value() -> impl Strategy<Value = u32> {
        prop_oneof![prop::sample::select(vec![0, 1, 2, 552, 553, 554, u32::MAX]), any::<u32>()]
    }

    /// A well-formed message: command, body, and how many descriptors go with it.
    fn message() -> impl Strategy<Value = (u16, Vec<u8>, usize)> {
        let body = |words: &[u32], longs: &[u64]| {
            let mut body = super::words(words);
            put64(&mut body, longs);
            body
        };
        let map = (edge(), edge(), edge(), 0..2usize).prop_map(move |(offset, addr, size, fds)| {
            (command::DMA_MAP, body(&[32, 3], &[offset, addr, size]), fds)
        });
        let unmap = (edge(), edge())
            .prop_map(move |(addr, size)| (command::DMA_UNMAP, body(&[24, 0], &[addr, size]), 0));
        let read = (0..10u32, edge(), 0..9u32).prop_map(|(region, offset, count)| {
            (command::REGION_READ, access(offset, region, count, &[]), 0)
        });
        let write = (0..10u32, edge(), any::<Vec<u8>>()).prop_map(|(region, offset, data)| {
            (command::REGION_WRITE, access(offset, region, data.len() as u32, &data), 0)
        });
        let registers = (register(), value()).prop_map(|(offset, value)| {
            (command::REGION_WRITE, access(offset, 0, 4, &value.to_le_bytes()), 0)
        });
        let irqs = (0..130u32, 0..130u32, 0..3usize).prop_map(move |(start, count, fds)| {
            (command::SET_IRQS, body(&[20, 36, MSIX, start, count], &[]), fds)
        });
        let reset = Just((command::RESET, Vec::new(), 0));
        prop_oneof![4 => map, 2 => unmap, 2 => read, 2 => write, 16 => registers, 1 => irqs, 1 => reset]
    }

    /// Also finds a card that hangs: the answers and the reset at the end wait for its engines.
    #[test]
    fn the_card_answers_well_formed_messages_with_any_numbers() {
        let card = Card::new(Options::default()).unwrap();
        let endpoint = Endpoint { card: &card, trap_all: false };
        let descriptor = || {
            let fd = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, 0x1_0000).unwrap();
            fd
        };
        std::thread::scope(|scope| {
            let engine = scope.spawn(|| card.queues.work(&card));
            let mut runner = TestRunner::new(ProptestConfig::with_cases(256));
            let ran = runner.run(&prop::collection::vec(message(), 1..40), |messages| {
                for (command, body, fds) in messages {
                    let fds = (0..fds).map(|_| descriptor()).collect();
                    let _ = answer(&endpoint, Message { id: 1, command, flags: 0, body, fds });
                }
                Ok(())
            });
            card.queues.end();
            engine.join().expect("an engine has panicked");
            ran.unwrap();
        });
        card.reset();
    }
}
