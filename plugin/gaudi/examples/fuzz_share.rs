//! A fuzz target for what other processes send: keys, identities, and messages to the broker, on the
//! stable toolchain. Needs no card.
//!
//! * `fuzz_share [ROUNDS [SEED]]` damages keys, identities and messages in ever new ways. Keys and
//!   identities are parsed; messages go to a real broker, through its socket. A failure prints the
//!   seed and round that make it again.
//! * `fuzz_share --file F...` does the same with files: what a fuzzer that runs programs (AFL,
//!   honggfuzz) calls, and how a finding is looked at again.

mod fuzzing;

use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use fuzzing::Dice;
use gaudi::share::{Identity, KEY_LEN, RemoteKey, start_broker};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, SendFlags, SocketAddrUnix, SocketType, connect,
    recvmsg, send, socket,
};

/// Bytes of a message without a key, and the one answer a stranger may get
/// (`docs/design/ipc-protocol.md`).
const HEADER_LEN: usize = 16;
const MAGIC: [u8; 5] = [b'u', b'g', b's', b'h', 3];
const OPEN: u8 = 1;
const REFUSED: u8 = 0x82;

/// A key of this process for memory that is not shared, and everything else right.
fn key() -> [u8; KEY_LEN] {
    let mut key = [0; KEY_LEN];
    key[..Identity::LEN].copy_from_slice(&own().pack());
    key[33..41].copy_from_slice(&[7; 8]);
    key[45..53].copy_from_slice(&0x1001_0000_0000_0000_u64.to_le_bytes());
    key[53] = 1;
    key
}

fn own() -> &'static Identity {
    Identity::own().expect("a Linux with /proc")
}

fn message(kind: u8) -> Vec<u8> {
    let mut message = vec![0; HEADER_LEN];
    message[..5].copy_from_slice(&MAGIC);
    message[5] = kind;
    message[8] = 1; // the lease
    if kind == OPEN {
        message.extend(key());
    }
    message
}

/// What must hold for any bytes at all, as a key and as an identity. Whether they are one.
fn check_parsers(bytes: &[u8]) -> bool {
    let identity = Identity::parse(bytes);
    match &identity {
        Ok(identity) => {
            assert_eq!(identity.pack(), bytes);
            let _ = identity.check_reachable();
        }
        Err(error) => assert!(!error.to_string().contains('\n')),
    }
    match RemoteKey::parse(bytes) {
        Ok(key) => {
            assert_eq!(bytes.len(), KEY_LEN);
            key.peer().check_reachable().expect("checked before");
            assert!(key.len() > 0 && key.base().checked_add(key.len()).is_some());
            true
        }
        Err(error) => {
            let text = error.to_string();
            assert!(!text.is_empty() && text.len() < 200 && !text.contains('\n'), "{text}");
            identity.is_ok()
        }
    }
}

/// What must hold for any bytes at all, as a message: a refusal or a hang-up, and never a descriptor.
/// Whether there was an answer.
fn check_broker(bytes: &[u8]) -> bool {
    let name: String = own().pack()[7..13].iter().map(|byte| format!("{byte:02x}")).collect();
    let address = SocketAddrUnix::new_abstract_name(format!("ucx-gaudi-{name}").as_bytes());
    let connection = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).expect("a socket");
    connect(&connection, &address.expect("a name")).expect("the broker listens");
    send(&connection, bytes, SendFlags::NOSIGNAL).expect("the broker takes messages");
    let mut answer = [0; 2 * HEADER_LEN];
    let mut space = [MaybeUninit::uninit(); 256];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [std::io::IoSliceMut::new(&mut answer)];
    let received = recvmsg(&connection, &mut parts, &mut control, RecvFlags::empty());
    assert_eq!(control.drain().count(), 0, "a descriptor for nothing");
    let len = received.map_or(0, |received| received.bytes);
    if len == 0 {
        return false;
    }
    assert_eq!(len, HEADER_LEN);
    assert_eq!((&answer[..5], answer[5]), (&MAGIC[..], REFUSED));
    true
}

fn damage(dice: &mut Dice, bytes: &mut Vec<u8>) {
    for _ in 0..=dice.below(4) {
        let at = dice.below(bytes.len());
        match dice.below(8) {
            0 => bytes.truncate(at.max(1)),
            1 => bytes.push(dice.below(256) as u8),
            2 => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][dice.below(5)],
            _ => bytes[at] ^= 1 << dice.below(8),
        }
    }
}

fn main() -> ExitCode {
    start_broker().expect("a broker");
    assert!(check_parsers(&key()) && check_parsers(&own().pack()), "the seeds are good");
    assert!(check_broker(&message(OPEN)), "the broker answers");
    let (mut parsed, mut answered, mut messages) = (0_u64, 0_u64, 0_u64);
    let ended = fuzzing::run(
        "fuzz_share",
        100_000,
        |dice| {
            let mut bytes = match dice.below(8) {
                0 => own().pack().to_vec(),
                1 => message(dice.below(6) as u8),
                _ => key().to_vec(),
            };
            damage(dice, &mut bytes);
            let is_message = bytes[0] == MAGIC[0];
            let checked = catch_unwind(AssertUnwindSafe(|| {
                (check_parsers(&bytes), is_message && check_broker(&bytes))
            }));
            let (is_known, is_answered) = checked.map_err(|_| format!("{bytes:02x?}"))?;
            parsed += u64::from(is_known);
            messages += u64::from(is_message);
            answered += u64::from(is_answered);
            Ok(())
        },
        |bytes| {
            let answer = if bytes.is_empty() { false } else { check_broker(bytes) };
            format!("parsed {}, answered {answer}", check_parsers(bytes))
        },
    );
    println!("{parsed} parsed; {messages} messages to the broker, {answered} answered");
    ended
}
