//! Exporter against importers in any order of events: shares, frees, opens, timeouts, releases,
//! messages that arrive late, processes that die and connect again.
//!
//! The state machines are the real ones; sockets are queues, imports are counts.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use proptest::prelude::*;

use super::key::{KEY_LEN, Token};
use super::leases::{Action, ConnectionId, Denied, ExporterLeases, ImporterLeases};
use super::wire::{LeaseId, Refusal, Reply, Request};

const IMPORTERS: usize = 3;
const BASES: u64 = 3;

/// A generation of the memory at a base: what a share is of, and what a lease is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Memory {
    base: u64,
    token: u64,
}

impl Memory {
    fn key(self) -> [u8; KEY_LEN] {
        let mut key = [0; KEY_LEN];
        key[..8].copy_from_slice(&self.base.to_le_bytes());
        key[8..16].copy_from_slice(&self.token.to_le_bytes());
        key
    }
}

#[derive(Clone, Debug)]
enum Step {
    /// Memory is exported, to be shared.
    Prepare {
        base: u64,
    },
    /// It is shared, unless it was freed meanwhile.
    Share {
        base: u64,
    },
    Unshare {
        base: u64,
    },
    Free {
        base: u64,
    },
    /// Opens the memory that is, or (with a key that is too old) was shared.
    Open {
        importer: usize,
        base: u64,
        stale: bool,
    },
    /// The oldest request that is not answered is given up.
    Abandon {
        importer: usize,
    },
    /// Those who wait look for their answers, and import what was granted.
    Take {
        importer: usize,
    },
    /// The user of an import is done.
    Close {
        importer: usize,
        which: usize,
    },
    /// One message arrives.
    ToExporter {
        importer: usize,
    },
    ToImporter {
        importer: usize,
    },
    /// The process is killed; its end is seen after what it sent before. Another takes its place.
    Die {
        importer: usize,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let base = || 1..=BASES;
    let importer = || 0..IMPORTERS;
    let step = prop_oneof![
        3 => base().prop_map(|base| Step::Prepare { base }),
        4 => base().prop_map(|base| Step::Share { base }),
        1 => base().prop_map(|base| Step::Unshare { base }),
        2 => base().prop_map(|base| Step::Free { base }),
        6 => (importer(), base(), prop::bool::weighted(0.1))
            .prop_map(|(importer, base, stale)| Step::Open { importer, base, stale }),
        1 => importer().prop_map(|importer| Step::Abandon { importer }),
        6 => importer().prop_map(|importer| Step::Take { importer }),
        3 => (importer(), any::<usize>())
            .prop_map(|(importer, which)| Step::Close { importer, which }),
        8 => importer().prop_map(|importer| Step::ToExporter { importer }),
        8 => importer().prop_map(|importer| Step::ToImporter { importer }),
        1 => importer().prop_map(|importer| Step::Die { importer }),
    ];
    prop::collection::vec(step, 1..150)
}

/// One importing process, and its connection.
struct Process {
    connection: ConnectionId,
    leases: ImporterLeases<Memory, Memory>,
    /// What was sent to the exporter; `None`: hung up.
    sent: VecDeque<Option<Request>>,
    /// What the exporter sent.
    incoming: VecDeque<(Reply, Option<Memory>)>,
    /// Who waits for an answer.
    waiting: Vec<LeaseId>,
    /// What is mapped, and in use (not only kept).
    mapped: BTreeMap<LeaseId, (Memory, bool)>,
    /// What was revoked, and is not kept for later.
    revoked: BTreeSet<Memory>,
}

impl Process {
    fn new(connection: u64) -> Self {
        Self {
            connection: ConnectionId(connection),
            leases: ImporterLeases::default(),
            sent: VecDeque::new(),
            incoming: VecDeque::new(),
            waiting: Vec::new(),
            mapped: BTreeMap::new(),
            revoked: BTreeSet::new(),
        }
    }

    fn unmap(&mut self, lease: LeaseId) {
        self.mapped.remove(&lease);
        assert!(self.leases.release(lease));
        self.sent.push_back(Some(Request::Release { lease }));
    }
}

struct World {
    leases: ExporterLeases<Memory, u64>,
    /// What the exporter has at each base, if it is shared, and every key there ever was.
    shared: BTreeMap<u64, Memory>,
    keys: Vec<Memory>,
    preparing: BTreeSet<u64>,
    /// Bases whose memory was freed and waits.
    quarantined: BTreeSet<u64>,
    processes: Vec<Process>,
    /// Processes that have died, until the exporter has seen it.
    dead: Vec<Process>,
    connections: u64,
    tokens: u64,
}

impl World {
    fn new() -> Self {
        let processes = (1..=IMPORTERS as u64).map(Process::new).collect();
        Self {
            leases: ExporterLeases::default(),
            shared: BTreeMap::new(),
            keys: Vec::new(),
            preparing: BTreeSet::new(),
            quarantined: BTreeSet::new(),
            processes,
            dead: Vec::new(),
            connections: IMPORTERS as u64,
            tokens: 0,
        }
    }

    /// The memory is returned to the pool: nobody may reach it.
    fn reuse(&mut self, base: u64) {
        assert!(self.quarantined.remove(&base));
        assert!(!self.preparing.contains(&base), "{base} is being exported");
        assert!(self.leases.offered(base).is_none(), "{base} is shared");
        for process in &self.processes {
            let reaches = process.mapped.values().any(|(memory, _)| memory.base == base);
            assert!(!reaches, "{base} is reused under {:?}", process.connection);
            let mut coming = process.incoming.iter().filter_map(|(_, enclosed)| *enclosed);
            assert!(
                !coming.any(|memory| memory.base == base),
                "a descriptor of {base} is under way"
            );
        }
    }

    /// The offer at `base` has ended.
    fn revoke(&mut self, base: u64, revoked: Vec<(ConnectionId, LeaseId)>) {
        self.shared.remove(&base);
        for (connection, lease) in revoked {
            let everybody = self.processes.iter_mut().chain(&mut self.dead);
            let holder = everybody.into_iter().find(|process| process.connection == connection);
            let holder = holder.expect("leases are of connections that have not ended");
            holder.incoming.push_back((Reply::Revoke { lease }, None));
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Prepare { base } => {
                if !self.shared.contains_key(&base) && !self.quarantined.contains(&base) {
                    assert_eq!(self.leases.prepare(base), self.preparing.insert(base));
                }
            }
            Step::Share { base } => {
                if !self.preparing.remove(&base) {
                    return;
                }
                assert_eq!(self.leases.is_freed(base), self.quarantined.contains(&base));
                if !self.leases.is_freed(base) {
                    self.tokens += 1;
                    let memory = Memory { base, token: self.tokens };
                    let token = Token(self.tokens.to_le_bytes());
                    self.leases.offer(base, memory.key(), token, memory);
                    self.shared.insert(base, memory);
                    self.keys.push(memory);
                }
                if let Some(base) = self.leases.prepared(base) {
                    self.reuse(base);
                }
            }
            Step::Unshare { base } => {
                let revoked = self.leases.withdraw(base, None);
                self.revoke(base, revoked);
            }
            Step::Free { base } => {
                if !self.quarantined.contains(&base) {
                    let (revoked, now) = self.leases.free(base, base);
                    self.revoke(base, revoked);
                    self.quarantined.insert(base);
                    if let Some(base) = now {
                        self.reuse(base);
                    }
                }
            }
            Step::Open { importer, base, stale } => {
                let key = match stale {
                    true => self.keys.first(),
                    false => self.shared.get(&base).or(self.keys.last()),
                };
                if let Some(memory) = key.copied() {
                    let process = &mut self.processes[importer];
                    let lease = process.leases.request(memory);
                    process.waiting.push(lease);
                    let open = Request::Open { lease, key: memory.key() };
                    process.sent.push_back(Some(open));
                }
            }
            Step::Abandon { importer } => {
                let process = &mut self.processes[importer];
                if !process.waiting.is_empty() {
                    let lease = process.waiting.remove(0);
                    if process.leases.abandon(lease) {
                        process.sent.push_back(Some(Request::Release { lease }));
                    }
                }
            }
            Step::Close { importer, which } => {
                let process = &mut self.processes[importer];
                if !process.mapped.is_empty() {
                    let at = which % process.mapped.len();
                    let lease = *process.mapped.keys().nth(at).expect("in range");
                    process.unmap(lease);
                }
            }
            Step::ToExporter { importer } => {
                // Of the dead first: they sent theirs before.
                let connection = self.processes[importer].connection;
                let from = match self.dead.first() {
                    Some(dead) => dead.connection,
                    None => connection,
                };
                self.deliver_to_exporter(from);
            }
            Step::ToImporter { importer } => self.deliver_to_importer(importer),
            Step::Take { importer } => self.take_answers(importer),
            Step::Die { importer } => {
                self.connections += 1;
                let next = Process::new(self.connections);
                let mut dead = std::mem::replace(&mut self.processes[importer], next);
                dead.sent.push_back(None);
                // The kernel unmaps what it had, and closes what was under way.
                dead.mapped.clear();
                dead.incoming.clear();
                self.dead.push(dead);
            }
        }
    }

    fn deliver_to_exporter(&mut self, from: ConnectionId) {
        let mut everybody = self.processes.iter_mut().chain(&mut self.dead);
        let process = everybody.find(|process| process.connection == from).expect("it exists");
        let Some(message) = process.sent.pop_front() else { return };
        match message {
            Some(Request::Open { lease, key }) => {
                let base = u64::from_le_bytes(key[..8].try_into().expect("eight"));
                let answer = match self.leases.open(from, lease, base, &key) {
                    Ok(memory) => {
                        assert_eq!(self.shared.get(&base), Some(&*memory), "not shared any more");
                        assert_eq!(memory.key(), key);
                        (Reply::Grant { lease }, Some(*Arc::as_ref(&memory)))
                    }
                    Err(why) => {
                        assert_eq!(why, Refusal::Unknown);
                        let is_shared = self.shared.get(&base).is_some_and(|of| of.key() == key);
                        assert!(!is_shared, "refused though it is shared");
                        (Reply::Refused { lease, why }, None)
                    }
                };
                process.incoming.push_back(answer);
            }
            Some(Request::Relay { .. }) => unreachable!("no importer of this model sends one"),
            Some(Request::Release { lease }) => {
                if let Some(base) = self.leases.release(from, lease) {
                    self.reuse(base);
                }
            }
            None => {
                for base in self.leases.hang_up(from) {
                    self.reuse(base);
                }
                assert!(!self.leases.has_leases(from));
                self.dead.retain(|process| process.connection != from);
            }
        }
    }

    fn deliver_to_importer(&mut self, importer: usize) {
        let process = &mut self.processes[importer];
        let Some((reply, enclosed)) = process.incoming.pop_front() else { return };
        let action = process.leases.receive(reply, enclosed).expect("nobody breaks the protocol");
        match action {
            Action::Nothing => {}
            Action::Release(lease) => {
                process.sent.push_back(Some(Request::Release { lease }));
            }
            Action::Evict(memory) => {
                process.revoked.insert(memory);
                let kept = process.mapped.iter().filter(|(_, mapped)| **mapped == (memory, false));
                let kept: Vec<LeaseId> = kept.map(|(lease, _)| *lease).collect();
                kept.into_iter().for_each(|lease| process.unmap(lease));
            }
        }
    }

    fn take_answers(&mut self, importer: usize) {
        let process = &mut self.processes[importer];
        for lease in process.waiting.clone() {
            let Some(answer) = process.leases.answer(lease) else { continue };
            process.waiting.retain(|waiting| *waiting != lease);
            if let Ok(memory) = answer {
                let in_use = lease.0.is_multiple_of(2) || process.revoked.contains(&memory);
                process.mapped.insert(lease, (memory, in_use));
            }
        }
    }

    /// Everybody finishes: nothing may be left.
    fn finish(mut self) {
        for base in 1..=BASES {
            self.step(&Step::Free { base });
            self.step(&Step::Share { base });
        }
        for round in 0.. {
            assert!(round < 10_000, "something is never given back");
            let mut all: Vec<ConnectionId> = self.dead.iter().map(|dead| dead.connection).collect();
            all.extend(self.processes.iter().map(|process| process.connection));
            let is_quiet = |process: &Process| {
                let has_messages = !process.sent.is_empty() || !process.incoming.is_empty();
                !has_messages && process.mapped.is_empty() && process.waiting.is_empty()
            };
            if self.dead.is_empty() && self.processes.iter().all(is_quiet) {
                break;
            }
            all.into_iter().for_each(|connection| self.deliver_to_exporter(connection));
            for importer in 0..IMPORTERS {
                self.deliver_to_importer(importer);
                self.take_answers(importer);
                // Users are done; what is only kept must go because it was revoked.
                let process = &mut self.processes[importer];
                let in_use = process.mapped.iter().find(|(_, (_, in_use))| *in_use);
                if let Some(lease) = in_use.map(|(lease, _)| *lease) {
                    process.unmap(lease);
                }
            }
        }
        assert!(self.quarantined.is_empty(), "still waits: {:?}", self.quarantined);
        for process in &self.processes {
            assert!(process.leases.is_idle(), "{:?}", process.leases);
            assert!(!self.leases.has_leases(process.connection));
        }
    }
}

proptest! {
    #[test]
    fn memory_is_not_reused_while_a_peer_reaches_it_and_all_comes_back(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.step(step);
        }
        world.finish();
    }
}

#[test]
fn what_an_exporter_must_not_send_is_a_violation() {
    let memory = Memory { base: 1, token: 1 };
    let granted = || {
        let mut leases = ImporterLeases::default();
        let lease = leases.request(memory);
        leases.receive(Reply::Grant { lease }, Some(memory)).expect("asked for");
        (leases, lease)
    };
    let (mut twice, lease) = granted();
    twice.receive(Reply::Grant { lease }, Some(memory)).unwrap_err();
    let (mut refused, lease) = granted();
    let why = Refusal::Unknown;
    refused.receive(Reply::Refused { lease, why }, None).unwrap_err();
    let (mut unasked, _) = granted();
    unasked.receive(Reply::Revoke { lease: LeaseId(99) }, None).unwrap_err();
    let (mut none, _) = granted();
    none.receive(Reply::Revoke { lease: LeaseId::NONE }, None).unwrap_err();
    let mut empty = ImporterLeases::<Memory, Memory>::default();
    let lease = empty.request(memory);
    empty.receive(Reply::Revoke { lease }, None).unwrap_err();
}

#[test]
fn a_grant_without_a_descriptor_is_released_and_other_leases_stay() {
    let memory = Memory { base: 1, token: 1 };
    let mut leases = ImporterLeases::default();
    let held = leases.request(memory);
    leases.receive(Reply::Grant { lease: held }, Some(memory)).unwrap();
    assert_eq!(leases.answer(held), Some(Ok(memory)));
    let lease = leases.request(memory);
    assert_eq!(leases.receive(Reply::Grant { lease }, None), Ok(Action::Release(lease)));
    // The exporter has not read the release yet.
    assert_eq!(leases.receive(Reply::Revoke { lease }, None), Ok(Action::Nothing));
    assert_eq!(leases.answer(lease), Some(Err(Denied::NoDescriptor)));
    assert_eq!(leases.receive(Reply::Revoke { lease }, None), Ok(Action::Nothing));
    assert!(leases.release(held));
    assert!(leases.is_idle());
}

#[test]
fn a_connection_is_refused_ever_more_leases_on_the_same_memory() {
    let memory = Memory { base: 1, token: 1 };
    let mut leases: ExporterLeases<Memory, ()> = ExporterLeases::default();
    leases.offer(1, memory.key(), Token([1; 8]), memory);
    let (one, other) = (ConnectionId(1), ConnectionId(2));
    let mut open = |from, lease| leases.open(from, LeaseId(lease), 1, &memory.key());
    let refused = (1..).find(|lease| open(one, *lease) == Err(Refusal::Crowded)).unwrap();
    assert!(refused < 1000, "{refused}");
    open(other, 1).expect("others have leases of their own");
    leases.release(one, LeaseId(1));
    leases.open(one, LeaseId(refused), 1, &memory.key()).expect("one was released");
    let (revoked, now) = leases.free(1, ());
    assert_eq!((revoked.len() as u64, now), (refused, None));
    let all = [one, other].map(|from| leases.hang_up(from).len());
    assert_eq!(all, [0, 1], "free with the last");
}

#[test]
fn memory_that_is_offered_when_it_is_freed_is_not_offered_any_more() {
    let memory = Memory { base: 1, token: 1 };
    let (one, lease) = (ConnectionId(1), LeaseId(1));
    let mut leases = ExporterLeases::default();
    // One thread has taken the memory out of the table, another just ends its export.
    assert!(leases.prepare(1));
    leases.offer(1, memory.key(), Token([1; 8]), memory);
    leases.open(one, lease, 1, &memory.key()).unwrap();
    assert_eq!(leases.free(1, "reuse"), (vec![(one, lease)], None));
    assert!(leases.offered(1).is_none());
    assert_eq!(leases.open(one, LeaseId(2), 1, &memory.key()), Err(Refusal::Unknown));
    assert_eq!(leases.prepared(1), None, "leased");
    assert_eq!(leases.release(one, lease), Some("reuse"));
}

#[test]
fn a_revocation_behind_a_refused_grant_is_ignored() {
    let memory = Memory { base: 1, token: 1 };
    let mut leases = ImporterLeases::<Memory, Memory>::default();
    let lease = leases.request(memory);
    // The exporter recorded a lease, revoked it, and could not send the grant.
    leases.receive(Reply::Refused { lease, why: Refusal::Crowded }, None).unwrap();
    assert_eq!(leases.receive(Reply::Revoke { lease }, None), Ok(Action::Nothing));
    assert_eq!(leases.answer(lease), Some(Err(Denied::Refused(Refusal::Crowded))));
}

#[test]
fn what_an_importer_must_not_ask_for_is_refused() {
    let memory = Memory { base: 1, token: 1 };
    let mut leases: ExporterLeases<Memory, ()> = ExporterLeases::default();
    leases.offer(1, memory.key(), Token([1; 8]), memory);
    let (one, lease) = (ConnectionId(1), LeaseId(1));
    leases.open(one, lease, 1, &memory.key()).unwrap();
    assert_eq!(leases.open(one, lease, 1, &memory.key()), Err(Refusal::Malformed), "twice");
    let none = LeaseId::NONE;
    assert_eq!(leases.open(one, none, 1, &memory.key()), Err(Refusal::Malformed));
    for bit in 0..KEY_LEN * 8 {
        let mut forged = memory.key();
        forged[bit / 8] ^= 1 << (bit % 8);
        let answer = leases.open(one, LeaseId(2), 1, &forged);
        assert_eq!(answer, Err(Refusal::Unknown), "bit {bit}");
    }
    // Somebody else's lease.
    assert_eq!(leases.free(1, ()), (vec![(one, lease)], None));
    assert_eq!(leases.release(ConnectionId(2), lease), None);
    assert_eq!(leases.release(one, lease), Some(()));
}
