//! A queue of work in the order it was posted: work that runs, work that waits for the device or for a
//! fence, and flushes that wait for all of it.
//!
//! Running work is kept apart from waiting work, so that a poll costs as much as there is running,
//! however much waits. Knows neither copies nor UCX.
//!
//! Small works are batched while something runs: they wait for the next poll, for many others, or for a
//! large work, and are then started as one. The first starts at once, so that a single one is not delayed.

use std::collections::VecDeque;

/// Something that starts when the device takes it, and then runs by itself.
pub(crate) trait Work {
    type Outcome;

    /// Tries to start.
    fn start(&mut self) -> Start<Self::Outcome>;

    /// Called when it was not started on posting, and may wait for long.
    fn waits(&mut self) {}

    /// Whether it has ended, and how. Asked only while it runs, and no more after it has ended.
    fn poll(&mut self) -> Option<Self::Outcome>;

    /// Whether it should wait for others to be joined with, while something runs.
    fn is_small(&self) -> bool;

    /// Whether the next work should be started together with this one. Neither runs yet.
    fn takes(&self, next: &Self) -> bool;

    /// Makes the next work part of this one.
    fn join(&mut self, next: Self);
}

/// If work is posted without polling, the device is asked again whether it takes some after every so
/// many works.
const ASK_EVERY: usize = 64;

/// How far starting got.
pub(crate) enum Start<O> {
    Ended(O),
    Running,
    /// Try again later; nothing was done.
    Busy,
}

struct Numbered<W> {
    number: u64,
    work: Box<W>,
}

enum Waiting<W> {
    Work(Numbered<W>),
    /// Nothing behind it starts before everything in front of it has ended.
    Fence,
}

/// See the module. `F` is a flush, returned when all that was posted before it has ended.
pub(crate) struct Queue<W, F> {
    /// In the order they were posted, which is the order they were started in.
    running: VecDeque<Numbered<W>>,
    waiting: VecDeque<Waiting<W>>,
    fences: usize,
    /// Each with the number that the next work had when the flush was posted.
    flushes: VecDeque<(u64, F)>,
    next: u64,
}

impl<W, F> Default for Queue<W, F> {
    fn default() -> Self {
        Queue {
            running: VecDeque::new(),
            waiting: VecDeque::new(),
            fences: 0,
            flushes: VecDeque::new(),
            next: 0,
        }
    }
}

impl<W: Work, F> Queue<W, F> {
    /// Whether no work is running or waiting, and no flush is pending.
    pub(crate) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty() && self.flushes.is_empty()
    }

    /// Whether a fence is pending.
    pub(crate) fn has_fence(&self) -> bool {
        self.fences > 0
    }

    /// Later work starts only after all work so far has ended.
    pub(crate) fn fence(&mut self) {
        let needless = match self.waiting.back() {
            Some(last) => matches!(last, Waiting::Fence),
            None => self.running.is_empty(),
        };
        if !needless {
            self.waiting.push_back(Waiting::Fence);
            self.fences += 1;
        }
    }

    /// Starts work now, or queues it until it can be started. Returns work that has ended at once;
    /// calls `ended` with older work that has.
    pub(crate) fn post(
        &mut self,
        mut work: W,
        ended: impl FnMut(W, W::Outcome),
    ) -> Option<(W, W::Outcome)> {
        // FIFO: do not start before queued work.
        let may_start = self.waiting.is_empty() && (self.running.is_empty() || !work.is_small());
        let started = if may_start { work.start() } else { Start::Busy };
        if let Start::Ended(outcome) = started {
            return Some((work, outcome));
        }
        // Small works in front of it were held back for more of their kind. A large one ends that wait.
        let ends_wait = !work.is_small()
            && matches!(self.waiting.back(), Some(Waiting::Work(last)) if last.work.is_small());
        let mut work = Numbered { number: self.next, work: Box::new(work) };
        self.next += 1;
        match started {
            Start::Running => self.running.push_back(work),
            _ => {
                work.work.waits();
                self.waiting.push_back(Waiting::Work(work));
                if ends_wait || self.waiting.len().is_multiple_of(ASK_EVERY) {
                    self.start_waiting(ended);
                }
            }
        }
        None
    }

    /// [`Queue::flushed`] returns `who` when all that was posted so far has ended.
    pub(crate) fn flush(&mut self, who: F) {
        self.flushes.push_back((self.next, who));
    }

    /// Polls what runs, removes fences that are passed, starts what can start. `ended` is called with
    /// each work that has ended.
    pub(crate) fn advance(&mut self, mut ended: impl FnMut(W, W::Outcome)) {
        // One round: work that still runs is pushed back at the end, which keeps the order.
        for _ in 0..self.running.len() {
            let Some(mut running) = self.running.pop_front() else { break };
            match running.work.poll() {
                Some(outcome) => ended(*running.work, outcome),
                None => self.running.push_back(running),
            }
        }
        self.start_waiting(ended);
    }

    /// Removes fences that are passed, starts what can start.
    fn start_waiting(&mut self, mut ended: impl FnMut(W, W::Outcome)) {
        loop {
            self.join_waiting();
            let Some(first) = self.waiting.front_mut() else { return };
            let started = match first {
                Waiting::Work(first) => first.work.start(),
                Waiting::Fence if !self.running.is_empty() => return,
                Waiting::Fence => {
                    self.fences -= 1;
                    self.waiting.pop_front();
                    continue;
                }
            };
            if let Start::Busy = started {
                return;
            }
            let Some(Waiting::Work(first)) = self.waiting.pop_front() else { return };
            match started {
                Start::Ended(outcome) => ended(*first.work, outcome),
                _ => self.running.push_back(first),
            }
        }
    }

    /// Joins the first waiting work with those behind it, as far as it takes them.
    fn join_waiting(&mut self) {
        let Some(Waiting::Work(_)) = self.waiting.front() else { return };
        let Some(Waiting::Work(mut first)) = self.waiting.pop_front() else { return };
        while let Some(Waiting::Work(next)) = self.waiting.front()
            && first.work.takes(&next.work)
            && let Some(Waiting::Work(next)) = self.waiting.pop_front()
        {
            first.work.join(*next.work);
        }
        self.waiting.push_front(Waiting::Work(first));
    }

    /// The next flush whose earlier work has all ended.
    pub(crate) fn flushed(&mut self) -> Option<F> {
        let waiting = self.waiting.iter().find_map(|waiting| match waiting {
            Waiting::Work(work) => Some(work),
            Waiting::Fence => None,
        });
        let oldest = self.running.front().or(waiting).map_or(self.next, |work| work.number);
        let due = self.flushes.front().is_some_and(|(before, _)| *before <= oldest);
        if due { self.flushes.pop_front().map(|(_, who)| who) } else { None }
    }

    /// All running work.
    pub(crate) fn running(&self) -> impl Iterator<Item = &W> + Clone {
        self.running.iter().map(|running| &*running.work)
    }

    /// The next to be started, unless a fence is in front of it.
    pub(crate) fn next(&self) -> Option<&W> {
        match self.waiting.front()? {
            Waiting::Work(next) => Some(&next.work),
            Waiting::Fence => None,
        }
    }

    /// Takes out the work for which `is_over` holds, running or waiting.
    pub(crate) fn take_if(&mut self, is_over: impl Fn(&W) -> bool) -> Vec<W> {
        let Queue { running, waiting, .. } = self;
        let mut taken = Vec::new();
        for _ in 0..running.len() {
            let Some(next) = running.pop_front() else { break };
            match is_over(&next.work) {
                true => taken.push(*next.work),
                false => running.push_back(next),
            }
        }
        for _ in 0..waiting.len() {
            match waiting.pop_front() {
                Some(Waiting::Work(next)) if is_over(&next.work) => taken.push(*next.work),
                next => waiting.extend(next),
            }
        }
        taken
    }

    /// Takes out all running work.
    pub(crate) fn take_running(&mut self) -> impl Iterator<Item = W> {
        self.running.drain(..).map(|running| *running.work)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::{BTreeMap, BTreeSet};
    use std::rc::Rc;

    use proptest::prelude::*;

    use super::*;

    /// A device of this capacity, which ends what the test says.
    #[derive(Default)]
    struct World {
        capacity: usize,
        running: BTreeSet<usize>,
        /// Ended, but not yet seen.
        over: BTreeMap<usize, Result<(), ()>>,
        started: Vec<usize>,
        calls: usize,
    }

    struct Job {
        id: usize,
        /// Those that were joined to it.
        others: Vec<usize>,
        /// It may be joined to others of that kind.
        small: bool,
        /// It ends while it is started.
        at_once: bool,
        world: Rc<RefCell<World>>,
    }

    impl Work for Job {
        type Outcome = Result<(), ()>;

        fn start(&mut self) -> Start<Self::Outcome> {
            let world = &mut *self.world.borrow_mut();
            world.calls += 1;
            if world.running.len() >= world.capacity {
                return Start::Busy;
            }
            world.started.push(self.id);
            world.started.extend(&self.others);
            if self.at_once {
                return Start::Ended(Ok(()));
            }
            world.running.insert(self.id);
            Start::Running
        }

        fn poll(&mut self) -> Option<Self::Outcome> {
            let world = &mut *self.world.borrow_mut();
            world.calls += 1;
            let outcome = world.over.remove(&self.id);
            assert!(outcome.is_some() || world.running.contains(&self.id), "asked once too often");
            outcome
        }

        fn is_small(&self) -> bool {
            self.small
        }

        fn takes(&self, next: &Self) -> bool {
            self.small && next.small && self.at_once == next.at_once && self.others.len() < 3
        }

        fn join(&mut self, next: Self) {
            assert!(next.others.is_empty());
            self.others.push(next.id);
        }
    }

    impl Job {
        fn new(world: &Rc<RefCell<World>>, id: usize, small: bool, at_once: bool) -> Self {
            Job { id, others: Vec::new(), small, at_once, world: Rc::clone(world) }
        }

        fn ids(&self) -> impl Iterator<Item = usize> {
            std::iter::once(self.id).chain(self.others.iter().copied())
        }
    }

    impl World {
        fn end(&mut self, id: usize, outcome: Result<(), ()>) {
            assert!(self.running.remove(&id));
            self.over.insert(id, outcome);
        }
    }

    fn advance(queue: &mut Queue<Job, usize>) -> Vec<(usize, Result<(), ()>)> {
        let mut ended = Vec::new();
        queue.advance(|job, outcome| ended.extend(job.ids().map(|id| (id, outcome))));
        ended
    }

    #[test]
    fn what_is_taken_out_neither_runs_nor_holds_up_the_rest() {
        let world = Rc::new(RefCell::new(World { capacity: 2, ..World::default() }));
        let mut queue = Queue::default();
        for id in 0..5 {
            assert!(queue.post(Job::new(&world, id, false, false), |_, _| ()).is_none());
        }
        queue.flush(7);
        let ids = |jobs: Vec<Job>| jobs.iter().map(|job| job.id).collect::<Vec<_>>();
        assert_eq!(ids(queue.take_if(|job| job.id % 2 == 0)), [0, 2, 4]);
        world.borrow_mut().running.remove(&0);
        assert_eq!(queue.flushed(), None);
        assert_eq!(advance(&mut queue), []);
        for id in [1, 3] {
            world.borrow_mut().end(id, Ok(()));
            assert_eq!(advance(&mut queue), [(id, Ok(()))]);
        }
        assert_eq!(queue.flushed(), Some(7));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Post { small: bool, at_once: bool },
        Fence,
        Flush,
        End { pick: usize, fails: bool },
        Capacity(usize),
        Advance,
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            6 => (any::<bool>(), prop::bool::weighted(0.2))
                .prop_map(|(small, at_once)| Step::Post { small, at_once }),
            1 => Just(Step::Fence),
            1 => Just(Step::Flush),
            4 => (any::<usize>(), any::<bool>()).prop_map(|(pick, fails)| Step::End { pick, fails }),
            1 => (0..6_usize).prop_map(Step::Capacity),
            3 => Just(Step::Advance),
        ];
        prop::collection::vec(step, 1..200)
    }

    proptest! {
        #[test]
        fn fences_flushes_and_the_order_hold_over_any_sequence(steps in steps()) {
            let world = Rc::new(RefCell::new(World { capacity: 3, ..World::default() }));
            let mut queue = Queue::default();
            // What was posted, with the number of works in front of the last fence before it; how
            // each ended as far as was reported; the flushes, with the number of works before them.
            let (mut posted, mut fence) = (Vec::new(), 0);
            let mut seen = BTreeMap::new();
            let mut failures = BTreeSet::new();
            let mut flushes = BTreeMap::new();
            for step in steps.into_iter().chain((0..400).flat_map(|_| {
                [Step::Capacity(5), Step::Advance, Step::End { pick: 0, fails: false }]
            })) {
                match step {
                    Step::Post { small, at_once } => {
                        let id = posted.len();
                        posted.push(fence);
                        let job = Job::new(&world, id, small, at_once);
                        let over = queue.post(job, |job, outcome| {
                            seen.extend(job.ids().map(|id| (id, outcome)));
                        });
                        seen.extend(over.map(|(job, outcome)| (job.id, outcome)));
                    }
                    Step::Fence => {
                        queue.fence();
                        fence = posted.len();
                    }
                    Step::Flush => {
                        let who = flushes.len();
                        queue.flush(who);
                        flushes.insert(who, (posted.len(), false));
                    }
                    Step::End { pick, fails } => {
                        let world = &mut *world.borrow_mut();
                        let running = world.running.len();
                        let picked = world.running.iter().nth(pick % running.max(1)).copied();
                        if let Some(id) = picked {
                            world.end(id, if fails { Err(()) } else { Ok(()) });
                            failures.extend(fails.then_some(id));
                        }
                    }
                    Step::Capacity(capacity) => world.borrow_mut().capacity = capacity,
                    Step::Advance => {
                        for (id, outcome) in advance(&mut queue) {
                            prop_assert!(seen.insert(id, outcome).is_none(), "{} seen twice", id);
                        }
                    }
                }
                let world = world.borrow();
                let in_order: Vec<usize> = (0..world.started.len()).collect();
                prop_assert_eq!(&world.started, &in_order, "in the order they were posted");
                if let Some(&last) = world.started.last() {
                    let running = world.running.iter().chain(world.over.keys());
                    let before = running.filter(|&&id| id < posted[last]).count();
                    prop_assert_eq!(before, 0, "{} is behind a fence", last);
                }
                while let Some(who) = queue.flushed() {
                    let (before, done) = flushes.get_mut(&who).unwrap();
                    prop_assert!((0..*before).all(|id| seen.contains_key(&id)), "too early");
                    prop_assert!(!std::mem::replace(done, true), "seen twice");
                }
                let late = |(before, done): &(usize, bool)| {
                    !done && (0..*before).all(|id| seen.contains_key(&id))
                };
                prop_assert!(!flushes.values().any(late), "a flush waits for nothing");
            }
            prop_assert!(queue.is_empty() && !queue.has_fence());
            prop_assert_eq!(seen.len(), posted.len());
            for (id, outcome) in &seen {
                // The failure of one is that of all that were joined to it.
                prop_assert!(!failures.contains(id) || outcome.is_err(), "{}", id);
            }
            let failed = seen.values().filter(|outcome| outcome.is_err()).count();
            prop_assert!(failed <= 4 * failures.len());
        }
    }

    /// However much waits, a poll costs what is running, what it starts, and one try.
    #[test]
    fn waiting_work_is_not_polled() {
        let world = Rc::new(RefCell::new(World { capacity: 4, ..World::default() }));
        let mut queue = Queue::<_, usize>::default();
        for id in 0..10_000 {
            let job = Job::new(&world, id, false, false);
            assert!(queue.post(job, |_, _| panic!("none has ended")).is_none());
        }
        let asked = 9_996 / ASK_EVERY;
        assert_eq!(world.borrow().calls, 5 + asked, "the others know that someone waits");
        for done in 0..9_990 {
            {
                let world = &mut *world.borrow_mut();
                world.calls = 0;
                // Not always the oldest.
                let id = world.running.iter().nth(done % 4).copied().unwrap();
                world.end(id, Ok(()));
            }
            assert_eq!(advance(&mut queue).len(), 1);
            assert_eq!(world.borrow().calls, 4 + 1 + 1);
        }
    }

    #[test]
    fn small_works_that_wait_are_started_together() {
        let world = Rc::new(RefCell::new(World { capacity: 1, ..World::default() }));
        let mut queue = Queue::<_, usize>::default();
        for (id, small) in [true, true, true, false, true, true].into_iter().enumerate() {
            assert!(queue.post(Job::new(&world, id, small, false), |_, _| ()).is_none());
        }
        queue.fence();
        assert!(queue.post(Job::new(&world, 6, true, false), |_, _| ()).is_none());
        assert_eq!(world.borrow().started, [0], "nothing waited when it came");
        let groups: [(usize, &[usize]); 4] = [(0, &[1, 2]), (1, &[3]), (3, &[4, 5]), (4, &[6])];
        for (ends, starts) in groups {
            world.borrow_mut().started.clear();
            world.borrow_mut().end(ends, Ok(()));
            advance(&mut queue);
            assert_eq!(world.borrow().started, starts, "not over a fence");
        }
    }

    #[test]
    fn small_works_wait_for_a_poll_or_for_many_while_something_runs() {
        let world = Rc::new(RefCell::new(World { capacity: 1000, ..World::default() }));
        let mut queue = Queue::<_, usize>::default();
        let post = |queue: &mut Queue<_, usize>, id, small| {
            assert!(queue.post(Job::new(&world, id, small, false), |_, _| ()).is_none());
            world.borrow().started.len()
        };
        let started: Vec<usize> = (0..4).map(|id| post(&mut queue, id, id > 0)).collect();
        assert_eq!(started, [1, 1, 1, 1], "one at once");
        advance(&mut queue);
        assert_eq!((world.borrow().started.len(), world.borrow().running.len()), (4, 2));
        assert_eq!(post(&mut queue, 4, false), 5, "a large one does not wait");
        let last = (5..5 + ASK_EVERY).map(|id| post(&mut queue, id, true)).last();
        assert_eq!(last, Some(5 + ASK_EVERY), "many do not wait for a poll");
        let (next, all) = (5 + ASK_EVERY, 7 + ASK_EVERY);
        assert_eq!(post(&mut queue, next, true), next, "held back");
        assert_eq!(post(&mut queue, next + 1, false), all, "a large one does not wait behind it");
    }
}
