//! A process that shares memory, and a hostile peer that has a key of it: what it sends is answered or refused, and no memory
//! changes but what the key names.
//!
//! An input is a list of steps, the first byte of each says what it is. So that a mutation gets far, steps put the real key
//! and token into messages; they can be damaged by the step after.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use gaudi::share::HostShare;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, shutdown, socket_with,
};

const MARGIN: usize = 4096;
const SHARED: usize = 4096;
/// What lies around the shared memory.
const POISON: u8 = 0x5c;
/// Steps of one input.
const MAX_STEPS: usize = 64;

/// What this process shares: the middle of its memory.
struct Owner {
    memory: &'static [std::sync::atomic::AtomicU8],
    share: HostShare,
}

fn owner() -> &'static Owner {
    static OWNER: OnceLock<Owner> = OnceLock::new();
    OWNER.get_or_init(|| {
        let cells = (0..SHARED + 2 * MARGIN).map(|_| std::sync::atomic::AtomicU8::new(POISON));
        let memory = cells.collect::<Vec<_>>().leak();
        let start = memory[MARGIN..].as_ptr().cast_mut().cast();
        // SAFETY: never freed, and accessed as atomics only; what peers write means nothing.
        let share = unsafe { HostShare::new(start, SHARED) }.expect("memory is shared");
        Owner { memory, share }
    })
}

/// The steps of an input, and the bytes that they take from it.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> Option<u8> {
        let (byte, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*byte)
    }

    fn take(&mut self, len: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        bytes
    }
}

/// A peer: connected or not, with a ring or without.
struct Peer {
    key: Vec<u8>,
    socket: Option<OwnedFd>,
}

impl Peer {
    fn connect(&mut self) {
        let digits = self.key[7..13].iter().map(|byte| format!("{byte:02x}"));
        let name = format!("ucx-gaudi-{}", digits.collect::<String>());
        let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).expect("a short name");
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = socket_with(family, kind, SocketFlags::CLOEXEC, None).expect("a socket");
        self.socket = connect(&socket, &name).is_ok().then_some(socket);
    }

    fn send(&self, message: &[u8], file: Option<BorrowedFd<'_>>) {
        let Some(socket) = &self.socket else { return };
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let files: Vec<_> = file.into_iter().collect();
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        let _ = sendmsg(socket, &[IoSlice::new(message)], &mut control, flags);
    }

    /// Waits for an answer, or for the end of the connection.
    fn receive(&self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(socket) = &self.socket else { return };
        let moment = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&moment));
        let _ = recv(socket, &mut [0; 64][..], RecvFlags::DONTWAIT);
    }

    /// One step; `None` at the end of the input.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let how = input.byte()?;
        match how % 8 {
            // Says hello, to import (1) or to relay with a ring (2).
            0 | 1 => {
                self.connect();
                let kind = 1 + how % 2;
                let mut hello = vec![b'u', b'g', b's', b'h', 4, kind, 0, 0];
                hello.extend(&self.key);
                damage(&mut hello, how >> 3, input);
                let ring = (kind == 2).then(|| ring(input)).flatten();
                self.send(&hello, ring.as_ref().map(AsFd::as_fd));
            }
            // Asks for copies, with the real token.
            2 | 3 => {
                let mut request = vec![how % 8, 0, 0, 0, input.byte()?, 0, 0, 0];
                let base = u64::from_le_bytes(self.key[45..53].try_into().expect("eight"));
                for _ in 0..=input.byte()? % 4 {
                    let place = input.take(10);
                    let number = |at: usize| u64::from(*place.get(at).unwrap_or(&0));
                    let addr = base.wrapping_add(number(0) << 8 | number(1));
                    request.extend(&self.key[33..41]);
                    request.extend(addr.to_le_bytes());
                    request.extend(((number(2) << 8 | number(3)) as u32).to_le_bytes());
                    request.extend(((number(4) << 8 | number(5)) as u32).to_le_bytes());
                }
                damage(&mut request, how >> 3, input);
                self.send(&request, None);
            }
            // Another ring.
            4 => {
                let ring = ring(input);
                self.send(&[1, 0, 0, 0, 0, 0, 0, 0], ring.as_ref().map(AsFd::as_fd));
            }
            // Anything.
            5 => {
                let len = usize::from(input.byte()?) * 8;
                self.send(input.take(len), None);
            }
            6 => self.receive(),
            _ => match how >> 3 & 3 {
                0 => drop(self.socket.take()),
                1 => self.connect(),
                _ => {
                    let socket = self.socket.as_ref()?;
                    let _ = shutdown(socket, rustix::net::Shutdown::Write);
                }
            },
        }
        Some(())
    }
}

/// Changes so many bytes of a message.
fn damage(message: &mut Vec<u8>, count: u8, input: &mut Input<'_>) {
    for _ in 0..count % 4 {
        if let [at, value] = *input.take(2) {
            let at = usize::from(at) % (message.len() + 1);
            match message.get_mut(at) {
                Some(byte) => *byte ^= value,
                None => message.push(value),
            }
        }
    }
}

/// A file in place of a ring: of any length, sealed or not, or no memory at all.
fn ring(input: &mut Input<'_>) -> Option<OwnedFd> {
    let [how, size] = *input.take(2) else { return None };
    if how & 0x70 == 0x70 {
        return std::fs::File::open("/dev/null").ok().map(OwnedFd::from);
    }
    let ring = memfd_create("fuzz-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).ok()?;
    let len = u64::from(size) << (how & 0x0f);
    ftruncate(&ring, len).ok()?;
    if how & 0x80 == 0 {
        fcntl_add_seals(&ring, SealFlags::SHRINK | SealFlags::GROW).ok()?;
    }
    Some(ring)
}

/// What a peer does, step by step.
pub(crate) fn peer(bytes: &[u8]) {
    let owner = owner();
    let mut peer = Peer { key: owner.share.key().to_vec(), socket: None };
    let mut input = Input(bytes);
    for _ in 0..MAX_STEPS {
        if peer.step(&mut input).is_none() {
            break;
        }
    }
    peer.receive();
    let around = owner.memory[..MARGIN].iter().chain(&owner.memory[MARGIN + SHARED..]);
    let is_poison = |byte: &std::sync::atomic::AtomicU8| {
        byte.load(std::sync::atomic::Ordering::Relaxed) == POISON
    };
    assert!(around.into_iter().all(is_poison), "memory was written that is not shared");
}
