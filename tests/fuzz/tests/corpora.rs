//! Every input of the corpora, and for a moment mutations of them, through every target. An input that once broke something
//! stays in the corpus.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::time::{Duration, Instant};

use fuzz::{TARGETS, corpus, mutated, relay_answers};

/// The largest allocation that an input may cause: pages and rings are bounded, texts are some kilobytes.
const LARGEST_ALLOCATION: usize = 64 << 20;

/// Inputs are kept small: all of them are read in every test run.
const LARGEST_CORPORA: u64 = 400 << 10;

struct Bounded;

// SAFETY: passes everything on to the system's allocator, or ends the process.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > LARGEST_ALLOCATION {
            eprintln!("an allocation of {} bytes", layout.size());
            std::process::abort();
        }
        // SAFETY: the caller's promises are the system allocator's demands.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static BOUNDED: Bounded = Bounded;

fn inputs(name: &str) -> Vec<(String, Vec<u8>)> {
    let folder = corpus().join(name);
    let mut all: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("readable").path())
        .map(|path| (path.display().to_string(), std::fs::read(&path).expect("readable")))
        .collect();
    all.sort();
    all
}

/// How long mutations run: a moment in CI. `FUZZ_SECONDS` asks for more.
fn moment() -> Duration {
    let asked = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok());
    asked.map_or(Duration::from_millis(200), Duration::from_secs)
}

/// What the mutations are drawn from; `FUZZ_SEED` repeats those of a run that failed.
fn seed() -> u64 {
    let asked = std::env::var("FUZZ_SEED").ok().and_then(|text| text.parse().ok());
    asked.unwrap_or_else(|| fastrand::u64(..))
}

fn run(name: &str) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target");
    let inputs = inputs(name);
    assert!(!inputs.is_empty(), "no inputs");
    for (path, bytes) in &inputs {
        println!("{path}");
        (target.run)(bytes);
    }
    let inputs: Vec<Vec<u8>> = inputs.into_iter().map(|(_, bytes)| bytes).collect();
    let seed = seed();
    // Before the first: what aborts the process or hangs says nothing more.
    println!("FUZZ_SEED={seed}");
    let mut rng = fastrand::Rng::with_seed(seed);
    let (end, mut count) = (Instant::now() + moment(), 0_u64);
    while Instant::now() < end {
        let bytes = mutated(&mut rng, &inputs);
        let result = std::panic::catch_unwind(|| (target.run)(&bytes));
        if let Err(panic) = result {
            println!("the input, for tests/fuzz/corpus/{name}: {}", bytes.escape_ascii());
            std::panic::resume_unwind(panic);
        }
        count += 1;
    }
    println!("{} inputs, {count} mutations", inputs.len());
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(#[test] fn $name() { run(stringify!($name)); })*

        #[test]
        fn every_target_is_tested_and_corpora_are_of_targets() {
            let tested = [$(stringify!($name)),*];
            let targets: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(targets, tested);
            for entry in std::fs::read_dir(corpus()).expect("the corpora").flatten() {
                let name = entry.file_name().display().to_string();
                assert!(targets.contains(&&*name), "corpus/{name}");
            }
        }
    };
}

targets! {
    mapping_table key lease relay_message relay_peer relay_owner settings sysfs packets command_stream verbs_frames verbs_peer
    recording report page listing
}

/// Else the target would only show how an owner refuses. What it shares is host memory: there are relays and no leases.
#[test]
fn peers_of_the_relay_corpus_are_answered_as_their_names_say() {
    for (name, expected) in [
        ("writes", &["Done", "Done"][..]),
        ("newring", &["Done", "Done", "Err(Malformed)"]),
        ("beyond", &["Unknown", "Unknown"]),
        ("damagedtoken", &["Unknown"]),
        ("damaged", &["Err(Unknown)"]),
        ("import", &["Err(Unknown)"]),
        ("unsealed", &["Err(Malformed)"]),
    ] {
        let input = std::fs::read(corpus().join("relay_peer").join(name)).expect("readable");
        // Longer only where the machine is busy.
        let patience = [2, 50, 1000, 5000].map(Duration::from_millis);
        let mut all = patience.into_iter().map(|patience| relay_answers(&input, patience));
        let found = all.find(|answers| answers == expected);
        assert!(found.is_some(), "{name}: {:?}", relay_answers(&input, patience[0]));
    }
}

#[test]
fn corpora_are_small() {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |data| data.len());
    let all: u64 = TARGETS
        .iter()
        .flat_map(|target| inputs(target.name))
        .map(|(path, _)| size(Path::new(&path)))
        .sum();
    assert!(all <= LARGEST_CORPORA, "{all} bytes: remove some that a hash names");
}
