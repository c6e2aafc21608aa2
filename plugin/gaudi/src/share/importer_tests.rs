//! When an importer closes its connection to an exporter, which is the end of all leases on it, and how
//! long it waits for an answer.

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::*;
use crate::share::key::{Bus, Token};

/// A connection, and the exporter's end of it.
fn connection() -> (Arc<Connection>, OwnedFd, Fields) {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    let (here, there) = socketpair(AddressFamily::UNIX, kind, flags, None).unwrap();
    let exporter = *Identity::own().unwrap();
    let connection = Connection {
        importer: Importer::current(crate::runtime().registry()).unwrap(),
        number: 1,
        exporter,
        socket: CloseOnFork::new(here).unwrap(),
        receiving: Mutex::default(),
        state: Mutex::default(),
        is_closed: AtomicBool::new(false),
        closed_for_capacity: AtomicBool::new(false),
    };
    let source = Bus::new(&"0000:01:00.0".parse().unwrap()).unwrap();
    let key = Fields { peer: exporter, token: Token([1; 8]), source, base: 4096, len: 4096 };
    (Arc::new(connection), there, key)
}

/// What the exporter receives; `None`: the connection has ended.
fn received(exporter: &OwnedFd) -> Result<Option<Request>, Errno> {
    let mut message = [0; MAX_LEN];
    let len = socket::receive_plain(exporter.as_fd(), &mut message)?;
    Ok(Request::parse(&message[..len]))
}

#[test]
fn a_connection_with_leases_ends_with_the_last_of_them() {
    let (connection, exporter, key) = connection();
    connection.watch().unwrap();
    let id = connection.state().leases.request(key);
    assert!(!connection.close_if_idle(), "an answer is awaited");
    let dmabuf = Some(exporter.try_clone().unwrap());
    connection.state().leases.receive(Reply::Grant { lease: id }, dmabuf).unwrap();
    connection.state().leases.answer(id).unwrap().unwrap();
    let lease = Lease { connection: Arc::clone(&connection), id };
    assert!(!connection.close_if_idle(), "there is a lease");
    connection.importer.drop_connection(&connection);
    assert_eq!(connection.request(&key).unwrap_err(), NoLease::HungUp);
    drop(connection);
    assert_eq!(received(&exporter), Err(Errno::AGAIN), "it stays open");
    drop(lease);
    assert_eq!(received(&exporter), Ok(Some(Request::Release { lease: id })));
    assert_eq!(received(&exporter), Ok(None));
}

#[test]
fn an_idle_connection_that_is_closed_takes_no_request_and_is_not_watched() {
    let (connection, exporter, key) = connection();
    assert!(connection.close_if_idle());
    assert_eq!(received(&exporter), Ok(None));
    assert_eq!(connection.watch(), Err(NoLease::HungUp));
    assert_eq!(connection.request(&key).unwrap_err(), NoLease::HungUp);
    assert!(connection.state().leases.is_idle());
}

#[test]
fn an_answer_behind_other_messages_is_not_awaited_past_the_deadline() {
    let (connection, exporter, key) = connection();
    let ended = connection.state().leases.request(key);
    let refused = Reply::Refused { lease: ended, why: Refusal::Unknown };
    connection.state().leases.receive(refused, None).unwrap();
    connection.state().leases.answer(ended).unwrap().unwrap_err();
    let id = connection.state().leases.request(key);
    let revoke = Reply::Revoke { lease: ended }.pack();
    socket::send(exporter.as_fd(), revoke.as_ref(), None).unwrap();
    let grant = Reply::Grant { lease: id }.pack();
    socket::send(exporter.as_fd(), grant.as_ref(), Some(exporter.as_fd())).unwrap();
    assert_eq!(connection.ask(id, &key, Instant::now()).unwrap_err(), NoLease::Silent);
    let deadline = connection.importer.deadline(&key.peer).unwrap();
    connection.ask(id, &key, deadline).expect("it is still there");
}

#[test]
fn an_exporter_that_does_not_answer_is_asked_once_and_others_are_waited_for_half_as_long() {
    let (connection, exporter, key) = connection();
    let silent = Identity { instance: [9; 6], ..connection.exporter };
    let connection = Connection { exporter: silent, ..Arc::into_inner(connection).unwrap() };
    let connection = Arc::new(connection);
    for _ in 0..2 {
        assert_eq!(connection.request(&key).unwrap_err(), NoLease::Silent);
    }
    assert!(matches!(received(&exporter), Ok(Some(Request::Open { .. }))));
    assert_eq!(received(&exporter), Err(Errno::AGAIN));
    let other = Identity { instance: [8; 6], ..silent };
    let deadline = connection.importer.deadline(&other).unwrap();
    assert!(deadline <= Instant::now() + Duration::from_millis(500));
}

#[test]
fn a_peer_that_refuses_is_crowded_or_does_not_answer_has_a_remedy_of_its_own() {
    use crate::ErrorKind::*;
    for (why, kind, words) in [
        (NoLease::NobodyListens(Errno::CONNREFUSED), PermissionDenied, "as the same user"),
        (NoLease::NotTheExporter, PermissionDenied, "as the same user"),
        (NoLease::HungUp, PermissionDenied, "as the same user"),
        (NoLease::NobodyListens(Errno::AGAIN), ChannelFailed, "fewer processes"),
        (NoLease::Crowded, ChannelFailed, "fewer processes"),
        (NoLease::Silent, Timeout, "stopped or very busy"),
        (NoLease::NotUnderstood, ChannelFailed, "one version"),
        (NoLease::Ourselves("epoll".into()), OutOfMemory, "this process's limits"),
    ] {
        let (found, remedy) = why.remedy();
        assert!(found == kind && remedy.contains(words), "{why:?}: {found:?}, {remedy}");
    }
}
