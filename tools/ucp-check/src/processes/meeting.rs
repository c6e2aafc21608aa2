//! Two runs of this program that meet at a file, for example one in each container or in each task of a batch job.

use anyhow::{Context, Result, bail};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

/// Time between two attempts to meet.
const PAUSE: Duration = Duration::from_millis(20);

/// Waits for the other run; returns our rank and the socket to it. The first to come has rank 0: it creates the file,
/// and removes it when the other has connected.
pub(crate) fn meet(file: &Path, limit: Duration) -> Result<(u8, UnixStream)> {
    let deadline = Instant::now() + limit;
    match UnixListener::bind(file) {
        Ok(listener) => {
            let socket = accept(&listener, deadline);
            _ = std::fs::remove_file(file);
            socket.map(|socket| (0, socket))
        }
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok((1, connect(file, deadline)?)),
        Err(error) => Err(error).with_context(|| format!("making {}", file.display())),
    }
}

fn accept(listener: &UnixListener, deadline: Instant) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    loop {
        match listener.accept() {
            Ok((mut socket, _)) => {
                socket.set_nonblocking(false)?;
                socket.write_all(&[0])?;
                return Ok(socket);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock && Instant::now() < deadline => {
                std::thread::sleep(PAUSE);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => bail!("nobody came to meet us"),
            Err(error) => return Err(error).context("waiting for the other run"),
        }
    }
}

/// Retries: the file may exist before the first run listens. A third run gets no answer.
fn connect(file: &Path, deadline: Instant) -> Result<UnixStream> {
    loop {
        match UnixStream::connect(file) {
            Ok(mut socket) => {
                socket.set_read_timeout(Some(PAUSE.max(deadline - Instant::now())))?;
                socket.read_exact(&mut [0]).context("the other run met someone else")?;
                socket.set_read_timeout(None)?;
                return Ok(socket);
            }
            Err(error) if Instant::now() >= deadline => {
                let what = format!("{}: nobody listens there; remove the file", file.display());
                return Err(error).context(what);
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_meet_and_the_file_is_gone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("meet");
        let limit = Duration::from_secs(20);
        let (one, other) = std::thread::scope(|scope| {
            let one = scope.spawn(|| meet(&file, limit).unwrap());
            let other = scope.spawn(|| meet(&file, limit).unwrap());
            (one.join().unwrap(), other.join().unwrap())
        });
        assert_eq!(one.0 + other.0, 1, "ranks 0 and 1");
        (&one.1).write_all(b"x").unwrap();
        let mut byte = [0];
        (&other.1).read_exact(&mut byte).unwrap();
        assert_eq!(byte, *b"x");
        assert!(!file.exists());
    }

    #[test]
    fn who_meets_nobody_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("meet");
        let short = Duration::from_millis(1);
        let alone = meet(&file, short).unwrap_err();
        assert!(format!("{alone:#}").contains("nobody came"), "{alone:#}");
        drop(UnixListener::bind(&file).unwrap());
        let stale = meet(&file, short).unwrap_err();
        assert!(format!("{stale:#}").contains("remove the file"), "{stale:#}");
    }
}
