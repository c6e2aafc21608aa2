//! Random schedules: transfers are started, polled, abandoned, and finished by the hardware in any
//! order. In every order, each byte of a finished transfer is correct and nothing leaks.

use std::sync::Arc;

use proptest::prelude::*;

use crate::backend::fake::Fake;
use crate::{Allocation, Device, HostRegion, Segment, Side, SubmitError, Transfer};

#[derive(Clone, Debug)]
enum Step {
    Start { to_device: bool, len: usize, registered: bool, pieces: usize },
    HardwareDoes(usize),
    Poll(usize),
    Abandon(usize),
    Progress,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let len = prop_oneof![3 => 1..5000_usize, 1 => 60_000..70_000_usize, 1 => 1..300_000_usize];
    let step = prop_oneof![
        4 => (any::<bool>(), len, any::<bool>(), 1..12_usize).prop_map(
            |(to_device, len, registered, pieces)| Step::Start { to_device, len, registered, pieces }
        ),
        5 => any::<usize>().prop_map(Step::HardwareDoes),
        4 => any::<usize>().prop_map(Step::Poll),
        1 => any::<usize>().prop_map(Step::Abandon),
        1 => Just(Step::Progress),
    ];
    prop::collection::vec(step, 1..120)
}

/// A transfer with memory of its own on both sides.
struct Job {
    // Dropped before the memory it uses.
    transfer: Option<Transfer>,
    finished: bool,
    to_device: bool,
    host: Vec<u8>,
    sent: Vec<u8>,
    memory: Allocation,
}

fn pattern(len: usize, seed: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 31 + seed * 17 + at / 251) as u8).collect()
}

/// `None` if the device is busy.
fn start(
    fake: &Fake,
    device: &Arc<Device>,
    seed: usize,
    (to_device, len, registered, pieces): (bool, usize, bool, usize),
) -> Option<Job> {
    let memory = device.alloc(len as u64, 1).unwrap();
    let sent = pattern(len, seed);
    let mut host = if to_device { sent.clone() } else { vec![0xaa; len] };
    fake.poke(memory.addr(), &if to_device { vec![0xbb; len] } else { sent.clone() });
    let region = HostRegion::record(host.as_mut_ptr(), len);
    let size = len.div_ceil(pieces);
    let segments: Vec<Segment> = (0..len)
        .step_by(size)
        .map(|at| {
            let on_device = Side::Device(crate::DeviceAddr(memory.addr().0 + at as u64));
            let on_host = Side::Host(host.as_mut_ptr().wrapping_add(at));
            let (dst, src) = if to_device { (on_device, on_host) } else { (on_host, on_device) };
            let host_region = registered.then(|| Arc::clone(&region));
            Segment { dst, src, len: size.min(len - at), host_region }
        })
        .collect();
    // SAFETY: host memory stays in the job, which is kept until the hardware is done.
    match unsafe { device.copy(&segments) } {
        Ok(transfer) => {
            let transfer = Some(transfer);
            Some(Job { transfer, finished: false, to_device, host, sent, memory })
        }
        Err(SubmitError::Busy) => None,
        Err(SubmitError::Failed(error)) => panic!("{error}"),
    }
}

fn check(fake: &Fake, job: &Job) {
    let len = job.sent.len();
    if job.to_device {
        assert!(fake.peek(job.memory.addr(), len) == job.sent, "bytes on the device");
    } else {
        assert!(job.host == job.sent, "bytes on the host");
    }
}

fn poll(fake: &Fake, job: &mut Job) {
    let Some(transfer) = &mut job.transfer else { return };
    if let Some(outcome) = transfer.poll() {
        outcome.unwrap();
        job.finished = true;
        check(fake, job);
    }
}

fn run(fake: &Fake, device: &Arc<Device>, steps: Vec<Step>) {
    let mut jobs: Vec<Job> = Vec::new();
    for (seed, step) in steps.into_iter().enumerate() {
        match step {
            Step::Start { to_device, len, registered, pieces } => {
                jobs.extend(start(fake, device, seed, (to_device, len, registered, pieces)));
            }
            Step::HardwareDoes(pick) => {
                let queued = fake.queued();
                if let Some(&sequence) = queued.get(pick % queued.len().max(1)) {
                    fake.finish(sequence);
                }
            }
            Step::Poll(pick) if !jobs.is_empty() => {
                let at = pick % jobs.len();
                poll(fake, &mut jobs[at]);
            }
            Step::Abandon(pick) if !jobs.is_empty() => {
                let at = pick % jobs.len();
                jobs[at].transfer = None;
            }
            Step::Progress => {
                assert!(device.progress() >= fake.queued().len());
            }
            Step::Poll(_) | Step::Abandon(_) => {}
        }
    }
    while jobs.iter().any(|job| job.transfer.is_some() && !job.finished) {
        fake.finish_all();
        jobs.iter_mut().filter(|job| !job.finished).for_each(|job| poll(fake, job));
    }
    // Abandoned submissions run to their end, too.
    fake.finish_all();
    assert_eq!(device.progress(), 0);
    jobs.iter().filter(|job| job.finished).for_each(|job| check(fake, job));
}

#[test]
fn any_schedule_ends_with_the_right_bytes_and_nothing_left() {
    let (fake, device) = Fake::device();
    proptest!(ProptestConfig::with_cases(60), |(steps in steps())| {
        run(&fake, &device, steps);
        prop_assert!(fake.live_pins() <= 1, "only the bounce ring stays pinned");
        prop_assert_eq!(device.memory().allocations, 0);
    });
    assert_eq!(fake.noticed(), fake.submitted(), "each submission was seen to end");
    assert_eq!(device.engine().free_slots(), crate::backend::SLOTS);
}
