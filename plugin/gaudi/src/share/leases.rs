//! The two state machines of the protocol, without sockets: [`ExporterLeases`] in the exporter, [`ImporterLeases`] in
//! the importer, one per connection. The table is in [`super`]; `leases_model.rs` runs one against the
//! other in any order of events.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::key::{KEY_LEN, Token};
use super::wire::{LeaseId, Refusal, Reply};

/// Most leases of one connection: each costs the exporter some memory.
const MAX_LEASES: usize = 65_536;
/// Most leases of one connection on the same memory, all of which are revoked at once. An importer has
/// one per card, and more only while earlier ones are being released.
const MAX_LEASES_AT: usize = 256;

/// A connection of the exporter's. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct ConnectionId(pub(super) u64);

/// Memory that is shared.
#[derive(Debug)]
struct Offer<D> {
    key: [u8; KEY_LEN],
    token: Token,
    descriptor: Arc<D>,
}

#[derive(Clone, Copy, Debug)]
struct Leased {
    base: u64,
    token: Token,
}

/// The exporter: what is shared, who has a lease on it, and what waits for leases to end.
///
/// `D` is what a grant hands over, `R` what returns memory to the pool.
#[derive(Debug)]
pub(super) struct ExporterLeases<D, R> {
    /// By first address.
    offers: BTreeMap<u64, Offer<D>>,
    leases: HashMap<ConnectionId, HashMap<LeaseId, Leased>>,
    /// The same, by first address of the memory.
    leases_at: HashMap<u64, HashMap<ConnectionId, HashSet<LeaseId>>>,
    /// Memory that is about to be shared, by first address: it is not given to anybody else meanwhile.
    preparing: HashSet<u64>,
    /// Memory that copies of our own service are using, by first address, and how many.
    in_use: HashMap<u64, usize>,
    /// Freed, and leased to somebody, in use, or about to be shared.
    quarantine: HashMap<u64, R>,
}

impl<D, R> Default for ExporterLeases<D, R> {
    fn default() -> Self {
        Self {
            offers: BTreeMap::new(),
            leases: HashMap::new(),
            leases_at: HashMap::new(),
            preparing: HashSet::new(),
            in_use: HashMap::new(),
            quarantine: HashMap::new(),
        }
    }
}

impl<D, R> ExporterLeases<D, R> {
    /// Keeps the memory at `base`, should it be freed, until [`ExporterLeases::prepared`]. `false` if somebody
    /// prepares it already.
    pub(super) fn prepare(&mut self, base: u64) -> bool {
        self.preparing.insert(base)
    }

    /// Whether memory that is being prepared was freed meanwhile.
    pub(super) fn is_freed(&self, base: u64) -> bool {
        self.quarantine.contains_key(&base)
    }

    /// The memory is shared, or will not be. If it was freed meanwhile it is returned, to go back to the
    /// pool, or waits for leases to end.
    pub(super) fn prepared(&mut self, base: u64) -> Option<R> {
        self.preparing.remove(&base);
        self.reuse(base)
    }

    /// Memory that was freed, if nothing keeps it any more.
    fn reuse(&mut self, base: u64) -> Option<R> {
        let is_kept = self.leases_at.contains_key(&base)
            || self.preparing.contains(&base)
            || self.in_use.contains_key(&base);
        if is_kept { None } else { self.quarantine.remove(&base) }
    }

    /// Shares the memory at `base`, which is not shared.
    pub(super) fn offer(&mut self, base: u64, key: [u8; KEY_LEN], token: Token, descriptor: D) {
        let offer = Offer { key, token, descriptor: Arc::new(descriptor) };
        let before = self.offers.insert(base, offer);
        debug_assert!(before.is_none(), "shared twice");
    }

    /// What is shared at `base`, and under which token.
    pub(super) fn offered(&self, base: u64) -> Option<(&D, Token)> {
        self.offers.get(&base).map(|offer| (&*offer.descriptor, offer.token))
    }

    /// Whether memory is offered under exactly this key.
    pub(super) fn is_offered(&self, base: u64, key: &[u8; KEY_LEN]) -> bool {
        self.offers.get(&base).is_some_and(|offer| is_same(&offer.key, key))
    }

    /// Keeps the memory of the offer with this token in which `addr` lies until [`ExporterLeases::end_use`]: its first
    /// address, and what is offered.
    pub(super) fn begin_use(&mut self, addr: u64, token: Token) -> Option<(u64, &D)> {
        let (base, offer) = self.offers.range(..=addr).next_back()?;
        if offer.token != token {
            return None;
        }
        *self.in_use.entry(*base).or_default() += 1;
        Some((*base, &offer.descriptor))
    }

    /// A copy has ended. Memory that waited for it and for nothing else is returned, to go back to the pool.
    pub(super) fn end_use(&mut self, base: u64) -> Option<R> {
        let uses = self.in_use.get_mut(&base)?;
        *uses -= 1;
        if *uses == 0 {
            self.in_use.remove(&base);
        }
        self.reuse(base)
    }

    /// Whether copies use the memory at `base`.
    pub(super) fn is_in_use(&self, base: u64) -> bool {
        self.in_use.contains_key(&base)
    }

    /// Ends the offer at `base`, if there is one (with this token): nobody gets a lease on it any more.
    /// Returns the leases to be revoked.
    pub(super) fn withdraw(
        &mut self,
        base: u64,
        token: Option<Token>,
    ) -> Vec<(ConnectionId, LeaseId)> {
        let Some(offered) = self.offers.get(&base).map(|offer| offer.token) else {
            return Vec::new();
        };
        if token.is_some_and(|token| token != offered) {
            return Vec::new();
        }
        self.offers.remove(&base);
        let is_of_offer = |(connection, lease): &(ConnectionId, LeaseId)| {
            let leases = self.leases.get(connection);
            leases.is_some_and(|leases| leases.get(lease).is_some_and(|of| of.token == offered))
        };
        let at = self.leases_at.get(&base).into_iter().flatten();
        let at =
            at.flat_map(|(connection, leases)| leases.iter().map(|lease| (*connection, *lease)));
        at.filter(is_of_offer).collect()
    }

    /// Ends the offers of these descriptors. Returns the leases to be revoked.
    pub(super) fn withdraw_all(
        &mut self,
        which: impl Fn(&D) -> bool,
    ) -> Vec<(ConnectionId, LeaseId)> {
        let offers = self.offers.iter().filter(|(_, offer)| which(&offer.descriptor));
        let bases: Vec<u64> = offers.map(|(base, _)| *base).collect();
        bases.into_iter().flat_map(|base| self.withdraw(base, None)).collect()
    }

    /// A connection asks for a lease. Recorded before the descriptor is returned: what cannot be
    /// recorded is not handed over.
    pub(super) fn open(
        &mut self,
        from: ConnectionId,
        lease: LeaseId,
        base: u64,
        key: &[u8; KEY_LEN],
    ) -> Result<Arc<D>, Refusal> {
        let offer = self.offers.get(&base).filter(|offer| is_same(&offer.key, key));
        let offer = offer.ok_or(Refusal::Unknown)?;
        let leases = self.leases.entry(from).or_default();
        if lease == LeaseId::NONE || leases.contains_key(&lease) {
            return Err(Refusal::Malformed);
        }
        let at = self.leases_at.get(&base).and_then(|at| at.get(&from)).map_or(0, HashSet::len);
        if at >= MAX_LEASES_AT || leases.len() >= MAX_LEASES {
            return Err(Refusal::Crowded);
        }
        leases.insert(lease, Leased { base, token: offer.token });
        self.leases_at.entry(base).or_default().entry(from).or_default().insert(lease);
        Ok(Arc::clone(&offer.descriptor))
    }

    /// Who has a lease from the offer at `base` with this token.
    pub(super) fn holders(&self, base: u64, token: Token) -> Vec<ConnectionId> {
        let at = self.leases_at.get(&base).into_iter().flatten();
        let holds = at.filter(|(connection, leases)| {
            let all = self.leases.get(connection);
            let is_of_offer = |lease: &LeaseId| all?.get(lease).map(|of| of.token == token);
            leases.iter().any(|lease| is_of_offer(lease).unwrap_or(false))
        });
        holds.map(|(connection, _)| *connection).collect()
    }

    /// Whether a connection has any lease.
    pub(super) fn has_leases(&self, connection: ConnectionId) -> bool {
        self.leases.get(&connection).is_some_and(|leases| !leases.is_empty())
    }

    /// A lease has ended. Memory that waited for it and for no other is returned, to go back to the
    /// pool. What is no lease of this connection (any more) is ignored.
    pub(super) fn release(&mut self, from: ConnectionId, lease: LeaseId) -> Option<R> {
        let Leased { base, .. } = self.leases.get_mut(&from)?.remove(&lease)?;
        let at = self.leases_at.get_mut(&base)?;
        let of_connection = at.get_mut(&from)?;
        of_connection.remove(&lease);
        if of_connection.is_empty() {
            at.remove(&from);
        }
        if at.is_empty() {
            self.leases_at.remove(&base);
        }
        self.reuse(base)
    }

    /// A connection has ended, and all its leases with it.
    pub(super) fn hang_up(&mut self, connection: ConnectionId) -> Vec<R> {
        let leases = self.leases.get(&connection).into_iter().flat_map(HashMap::keys);
        let leases: Vec<LeaseId> = leases.copied().collect();
        let reuse =
            leases.into_iter().filter_map(|lease| self.release(connection, lease)).collect();
        self.leases.remove(&connection);
        reuse
    }

    /// The memory at `base` is freed. Ends the offer, if there is one, in the same step: nobody can offer
    /// it between the two. Returns the leases to be revoked. `reuse` comes back at once, or when the last
    /// lease on the memory ends, and whoever is about to share it has given up.
    pub(super) fn free(
        &mut self,
        base: u64,
        reuse: R,
    ) -> (Vec<(ConnectionId, LeaseId)>, Option<R>) {
        let revoked = self.withdraw(base, None);
        self.quarantine.insert(base, reuse);
        (revoked, self.reuse(base))
    }
}

/// Compares in a time that does not depend on where the first difference is.
fn is_same(one: &[u8; KEY_LEN], other: &[u8; KEY_LEN]) -> bool {
    let differs = one.iter().zip(other).fold(0, |differs, (a, b)| differs | (a ^ b));
    std::hint::black_box(differs) == 0
}

/// How far a lease has come in the importer. `D` is what a grant hands over.
#[derive(Debug)]
enum Stage<D> {
    /// `Open` was sent, and somebody waits for the answer.
    Requested,
    /// Nobody waits for the answer any more.
    Abandoned,
    Answered(Result<D, Denied>),
    Held,
}

/// Why a request brought no descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Denied {
    Refused(Refusal),
    /// Granted, but this process had no number free for the descriptor: the kernel closed it.
    NoDescriptor,
}

/// What a reply asks the importer to do.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Action<K> {
    Nothing,
    /// Send `Release`: nobody waits for this grant any more, or its descriptor did not arrive.
    Release(LeaseId),
    /// Unmap what is kept of this memory, and release the lease when its last user is done.
    Evict(K),
}

/// The exporter broke the protocol: hang up.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation;

/// The importer's end of one connection: what it asked for and what it holds. `K` names memory.
#[derive(Debug)]
pub(super) struct ImporterLeases<K, D> {
    last: u64,
    leases: HashMap<LeaseId, (K, Stage<D>)>,
}

impl<K, D> Default for ImporterLeases<K, D> {
    fn default() -> Self {
        Self { last: 0, leases: HashMap::new() }
    }
}

impl<K: Copy, D> ImporterLeases<K, D> {
    /// The number under which `Open` is to be sent.
    pub(super) fn request(&mut self, memory: K) -> LeaseId {
        self.last += 1;
        let lease = LeaseId(self.last);
        self.leases.insert(lease, (memory, Stage::Requested));
        lease
    }

    /// Takes a reply in.
    pub(super) fn receive(
        &mut self,
        reply: Reply,
        descriptor: Option<D>,
    ) -> Result<Action<K>, Violation> {
        match reply {
            Reply::Grant { lease } => match self.leases.get_mut(&lease) {
                Some((_, stage @ Stage::Requested)) => {
                    let is_complete = descriptor.is_some();
                    *stage = Stage::Answered(descriptor.ok_or(Denied::NoDescriptor));
                    Ok(if is_complete { Action::Nothing } else { Action::Release(lease) })
                }
                Some((_, Stage::Abandoned)) => {
                    self.leases.remove(&lease);
                    Ok(Action::Release(lease))
                }
                _ => Err(Violation),
            },
            Reply::Refused { lease, why } => match self.leases.get_mut(&lease) {
                Some((_, stage @ Stage::Requested)) => {
                    *stage = Stage::Answered(Err(Denied::Refused(why)));
                    Ok(Action::Nothing)
                }
                Some((_, Stage::Abandoned)) => {
                    self.leases.remove(&lease);
                    Ok(Action::Nothing)
                }
                _ => Err(Violation),
            },
            Reply::Revoke { lease } => match self.leases.get(&lease) {
                Some((memory, Stage::Answered(Ok(_)) | Stage::Held)) => Ok(Action::Evict(*memory)),
                // Our `Release` and this have crossed, or the grant could not be sent after all.
                Some((_, Stage::Answered(Err(_)))) => Ok(Action::Nothing),
                None if (1..=self.last).contains(&lease.0) => Ok(Action::Nothing),
                _ => Err(Violation),
            },
        }
    }

    /// Takes the answer to a request, once there is one. What was granted is held from now on.
    pub(super) fn answer(&mut self, lease: LeaseId) -> Option<Result<D, Denied>> {
        let (memory, stage) = self.leases.remove(&lease)?;
        match stage {
            Stage::Answered(answer) => {
                if answer.is_ok() {
                    self.leases.insert(lease, (memory, Stage::Held));
                }
                Some(answer)
            }
            stage => {
                self.leases.insert(lease, (memory, stage));
                None
            }
        }
    }

    /// Nobody waits for the answer any more. Whether the lease was granted meanwhile, so that
    /// `Release` is to be sent.
    pub(super) fn abandon(&mut self, lease: LeaseId) -> bool {
        match self.leases.get_mut(&lease) {
            Some((_, stage @ Stage::Requested)) => {
                *stage = Stage::Abandoned;
                false
            }
            Some((_, Stage::Answered(answer))) => {
                let granted = answer.is_ok();
                self.leases.remove(&lease);
                granted
            }
            _ => false,
        }
    }

    /// What was held is unmapped: `Release` is to be sent. `false` if there is no such lease.
    pub(super) fn release(&mut self, lease: LeaseId) -> bool {
        self.leases.remove(&lease).is_some()
    }

    /// Whether nothing is held or asked for.
    pub(super) fn is_idle(&self) -> bool {
        self.leases.is_empty()
    }
}
