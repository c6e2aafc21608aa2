//! A process that shares memory, and a hostile peer that has a key for it. The process must answer or refuse what the
//! peer sends, and only memory that the key names may change.
//!
//! An input is a list of steps; the first byte of each chooses the step. So that mutations get far, steps put the real
//! key and token into messages; bits of the first byte say how often to damage them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use gaudi::share::{HostShare, KEY_LEN, fuzzing};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg, shutdown,
};

const MARGIN: usize = 4096;
const SHARED: usize = 4096;
/// The content of the memory around the shared part.
const POISON: u8 = 0x5c;
/// Most steps of one input.
const MAX_STEPS: usize = 64;

/// The memory of this process, of which the middle is shared.
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
        // SAFETY: the memory is never freed, and is accessed as atomics only; whatever peers write to it has no meaning.
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
    key: [u8; KEY_LEN],
    socket: Option<OwnedFd>,
    /// How long it waits for an answer.
    patience: Duration,
    /// The answers that could be parsed.
    answers: Vec<String>,
}

impl Peer {
    fn connect(&mut self) {
        self.socket = Some(fuzzing::connect(&self.key));
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

    /// Waits for an answer, or until the connection ends.
    fn receive(&mut self) {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        let Some(socket) = &self.socket else { return };
        let moment = Timespec::try_from(self.patience).expect("seconds");
        let _ = poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&moment));
        let mut message = [0; 64];
        if let Ok((_, len @ 1..)) = recv(socket, &mut message[..], RecvFlags::DONTWAIT) {
            let answer = fuzzing::answer(&message[..len.min(message.len())]);
            self.answers.push(answer.expect("the owner sends nothing else"));
        }
    }

    /// One step; `None` at the end of the input.
    fn step(&mut self, input: &mut Input<'_>) -> Option<()> {
        let how = input.byte()?;
        match how % 8 {
            // Says hello: to import (1), or to relay with a ring (2).
            0 | 1 => {
                self.connect();
                let to_relay = how % 2 == 1;
                let mut hello = fuzzing::hello(to_relay, &self.key);
                damage(&mut hello, how >> 3, input);
                let ring = to_relay.then(|| ring(input)).flatten();
                self.send(&hello, ring.as_ref().map(AsFd::as_fd));
            }
            // Asks for copies, with the real token.
            2 | 3 => {
                let id = u32::from(input.byte()?);
                let mut pieces = Vec::new();
                for _ in 0..=input.byte()? % 4 {
                    let place = input.take(10);
                    let byte = |at: usize| u32::from(*place.get(at).unwrap_or(&0));
                    pieces.push([0, 2, 4].map(|at| byte(at) << 8 | byte(at + 1)));
                }
                let mut request = fuzzing::copy_request(how % 8 == 3, id, &self.key, &pieces);
                damage(&mut request, how >> 3, input);
                self.send(&request, None);
            }
            // Sends another ring.
            4 => {
                let ring = ring(input);
                self.send(&fuzzing::ring_request(), ring.as_ref().map(AsFd::as_fd));
            }
            // Sends arbitrary bytes.
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

/// Changes this many bytes of a message.
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

/// A file in place of a ring: of any length, sealed or not, or not in memory at all.
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

/// Plays a peer, step by step.
pub(crate) fn peer(bytes: &[u8]) {
    answers(bytes, Duration::from_millis(2));
}

/// The same; returns the answers that came within this time.
pub fn answers(bytes: &[u8], patience: Duration) -> Vec<String> {
    let owner = owner();
    let mut peer = Peer { key: owner.share.key(), socket: None, patience, answers: Vec::new() };
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
    peer.answers
}
