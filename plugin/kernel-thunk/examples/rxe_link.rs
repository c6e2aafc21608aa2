//! `rxe_link NETDEV`: a software RDMA device over a network device, as `rdma link add rxe0 type rxe netdev NETDEV`
//! makes it, for machines without that program.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const NLDEV: u16 = 5;
const NEW_LINK: u16 = 3;
const NAME: u16 = 2;
const NETWORK_DEVICE: u16 = 51;
const LINK_TYPE: u16 = 65;

/// An attribute: length, kind, a terminated string, up to a multiple of four bytes.
fn attribute(kind: u16, text: &str) -> Vec<u8> {
    let mut bytes = ((4 + text.len() + 1) as u16).to_ne_bytes().to_vec();
    bytes.extend(kind.to_ne_bytes());
    bytes.extend(text.bytes());
    bytes.resize((bytes.len() + 1).next_multiple_of(4), 0);
    bytes
}

fn main() -> io::Result<()> {
    let device = std::env::args().nth(1).expect("which network device?");
    let attributes =
        [attribute(NAME, "rxe0"), attribute(LINK_TYPE, "rxe"), attribute(NETWORK_DEVICE, &device)];
    let attributes = attributes.concat();
    let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
    // Header: length, type, flags, sequence number, port.
    let mut message = (16 + attributes.len() as u32).to_ne_bytes().to_vec();
    message.extend((NLDEV << 10 | NEW_LINK).to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    message.extend([0; 8]);
    message.extend(attributes);

    // SAFETY: plain calls; the descriptor is ours from here on.
    let socket = unsafe {
        let fd =
            libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, libc::NETLINK_RDMA);
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        OwnedFd::from_raw_fd(fd)
    };
    let mut answer = [0; 256];
    // SAFETY: both buffers have the lengths given.
    let received = unsafe {
        if libc::send(socket.as_raw_fd(), message.as_ptr().cast(), message.len(), 0) < 0 {
            return Err(io::Error::last_os_error());
        }
        libc::recv(socket.as_raw_fd(), answer.as_mut_ptr().cast(), answer.len(), 0)
    };
    // The answer is an error message, of 0 for none.
    match (received >= 20)
        .then(|| i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]))
    {
        Some(0) => Ok(()),
        Some(error) => Err(io::Error::from_raw_os_error(-error)),
        None => Err(io::Error::last_os_error()),
    }
}
