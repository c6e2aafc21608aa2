//! Discovery of cards, cached for a moment. UCX asks several times in a row when it starts, and each
//! discovery opens every card's control node.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use gaudi::{DeviceInfo, Error};

/// How long a result is reused: longer than a program's start, shorter than it takes to plug in a card.
const FRESH: Duration = Duration::from_secs(1);

type Answer = Result<Vec<DeviceInfo>, Error>;

static LAST: Mutex<Option<(Instant, Answer)>> = Mutex::new(None);

/// Discovers the cards, or returns a result of a moment ago.
pub(crate) fn discover() -> Answer {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((when, answer)) = &*last
        && when.elapsed() < FRESH
    {
        return answer.clone();
    }
    let answer = gaudi::runtime().discover();
    *last = Some((Instant::now(), answer.clone()));
    answer
}
