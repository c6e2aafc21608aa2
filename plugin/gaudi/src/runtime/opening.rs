//! Opening one of several cards: the order of attempts, how long to wait for a card that is in reset, and the error
//! if none opens.

use std::time::Duration;

use super::owners::Owners;
use crate::{DeviceInfo, Error, ErrorKind, Remedy};

pub(crate) const OPENING: &str = "opening a device";
/// Pauses between attempts while a card is in reset or being released: each twice the one before, up to
/// the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(512);
/// How long to wait for a card that is in reset or being released, unless an option says otherwise. A Gaudi2 needs some
/// seconds, more after a hang.
pub(crate) const OPEN_TIMEOUT: Duration = Duration::from_secs(30);
/// A caller that waits this long is told why.
const PATIENCE: Duration = Duration::from_millis(500);

/// Cards that did not open, and why.
pub(crate) type Failures = Vec<(DeviceInfo, Error)>;

/// Whether the driver says that a card is in reset.
pub(crate) fn is_in_reset(status: Option<String>) -> bool {
    status.is_some_and(|status| status.to_ascii_lowercase().contains("in reset"))
}

/// Tries the cards in order until one opens. While at least one is in reset or being released, tries again after a
/// pause, up to `limit` in all. Calls `say` with a line if that takes a while, and with one for each card that this
/// process may not open.
pub(crate) fn first_to_open<T>(
    mut candidates: Vec<DeviceInfo>,
    limit: Duration,
    mut open: impl FnMut(&DeviceInfo) -> Result<T, Error>,
    mut pause: impl FnMut(Duration),
    mut say: impl FnMut(&str),
) -> Result<T, Failures> {
    let (mut next, mut waited) = (FIRST_PAUSE, Duration::ZERO);
    let mut said = false;
    loop {
        let mut failures = Vec::new();
        for card in candidates {
            match open(&card) {
                Ok(opened) => return Ok(opened),
                Err(error) => {
                    if waited.is_zero() && error.kind() == ErrorKind::PermissionDenied {
                        say(&format!("{error}; the next card is tried, if there is one"));
                    }
                    failures.push((card, error));
                }
            }
        }
        let recovering = failures.iter().find(|(_, error)| error.errno() == Some(libc::EAGAIN));
        let Some((card, _)) = recovering.filter(|_| waited < limit) else { return Err(failures) };
        if waited >= PATIENCE && !std::mem::replace(&mut said, true) {
            let limit = limit.as_secs();
            say(&format!(
                "{card} is in reset, or its last user is just closing it: waiting for up to {limit} s"
            ));
        }
        let length = next.min(limit - waited);
        pause(length);
        waited += length;
        next = (2 * next).min(LONGEST_PAUSE);
        candidates = failures.into_iter().map(|(card, _)| card).collect();
    }
}

/// One error for all cards that did not open: that of the card whose error says most, or a summary. Busy cards are
/// named with their owners, which `owners` finds by node number.
pub(crate) fn none_opened(
    mut failures: Failures,
    owners: impl FnOnce(&[u32]) -> Vec<Owners>,
) -> Error {
    // Prefers an error other than "busy", which only says how the other cards happen to be.
    let telling = failures.iter().position(|(_, error)| error.kind() != ErrorKind::DeviceBusy);
    if let Some(at) = telling {
        return failures.swap_remove(at).1;
    }
    let is_owned = |error: &Error| error.errno() == Some(libc::EBUSY);
    let owned = failures.iter().filter(|(_, error)| is_owned(error));
    let nodes: Vec<u32> = owned.map(|(card, _)| card.node).collect();
    let mut found = if nodes.is_empty() { Vec::new() } else { owners(&nodes) }.into_iter();
    let mut why = |error: &Error| if is_owned(error) { found.next() } else { None };
    if let [(_, error)] = &mut failures[..] {
        let ours = why(error).is_some_and(|owners| {
            error.add_detail(&owners);
            owners.is_this_process()
        });
        let error = failures.remove(0).1;
        return if ours { error.advise_instead(Remedy::LendCard) } else { error };
    }
    let mut ours = false;
    let reason = |(card, error): &(DeviceInfo, Error)| match why(error) {
        Some(owners) => {
            ours |= owners.is_this_process();
            format!("{}: {owners}", card.bus_id)
        }
        None => format!("{}: {}", card.bus_id, error.detail()),
    };
    let cards: Vec<String> = failures.iter().map(reason).collect();
    let owned = nodes.len();
    let remedy = match (ours, owned) {
        (true, _) => Remedy::LendCard,
        // For a card in reset, do not advise ending a process.
        (false, 0) => {
            "they are in reset or being released by their last owners: try again in a moment".into()
        }
        (false, _) if owned < cards.len() => {
            "try again in a moment: a card that is in reset or being released will be free".into()
        }
        (false, _) => "wait for one of the owners or end it".into(),
    };
    let detail = format!("none of {} cards is free ({})", cards.len(), cards.join("; "));
    let mut error = Error::new(ErrorKind::DeviceBusy, OPENING, detail, remedy);
    error.set_errno(if owned == 0 { libc::EAGAIN } else { libc::EBUSY });
    error
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Phase;

    fn cards(count: u32) -> Vec<DeviceInfo> {
        (0..count).map(DeviceInfo::example).collect()
    }

    fn refused(card: &DeviceInfo, errno: i32) -> Result<u32, Error> {
        Err(Error::os(Phase::Open, OPENING, "hlthunk_open", errno).on(card))
    }

    #[test]
    fn a_busy_card_is_passed_over_without_a_pause() {
        let opened = first_to_open(
            cards(3),
            OPEN_TIMEOUT,
            |card| if card.index < 2 { refused(card, libc::EBUSY) } else { Ok(card.index) },
            |_| panic!("no pause"),
            |_| panic!("nothing to wait for"),
        );
        assert_eq!(opened, Ok(2));
    }

    #[test]
    fn a_card_in_reset_is_tried_again_with_growing_pauses() {
        let mut tries = 0;
        let mut pauses = Vec::new();
        let opened = first_to_open(
            cards(1),
            OPEN_TIMEOUT,
            |card| {
                tries += 1;
                if tries < 5 { refused(card, libc::EAGAIN) } else { Ok(card.index) }
            },
            |pause| pauses.push(pause.as_millis()),
            |_| panic!("a moment needs no explanation"),
        );
        assert_eq!(opened, Ok(0));
        assert_eq!(pauses, [1, 2, 4, 8]);
    }

    #[test]
    fn a_card_that_stays_in_reset_is_given_up_after_thirty_seconds_and_one_line() {
        let (mut waited, mut lines) = (Duration::ZERO, Vec::new());
        let opened = first_to_open(
            cards(1),
            OPEN_TIMEOUT,
            |card| refused(card, libc::EAGAIN),
            |pause| waited += pause,
            |line| lines.push(line.to_owned()),
        );
        let error = none_opened(opened.unwrap_err(), |_| panic!("it has no owner"));
        assert_eq!((error.kind(), error.errno()), (ErrorKind::DeviceBusy, Some(libc::EAGAIN)));
        assert!(error.to_string().contains("try again"), "{error}");
        assert_eq!(waited, Duration::from_secs(30));
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.contains("0000:00:00.0") && line.contains("up to 30 s"), "{line}");
    }

    #[test]
    fn if_all_are_busy_the_error_says_so_and_a_stranger_cause_is_not_hidden() {
        let error = |errno_of: fn(&DeviceInfo) -> i32| {
            let open = |card: &DeviceInfo| refused(card, errno_of(card));
            let opened = first_to_open(cards(3), OPEN_TIMEOUT, open, |_| {}, |_| {}).unwrap_err();
            none_opened(opened, |nodes| vec![Owners::default(); nodes.len()])
        };
        let all_busy = error(|_| libc::EBUSY);
        assert_eq!((all_busy.kind(), all_busy.errno()), (ErrorKind::DeviceBusy, Some(libc::EBUSY)));
        let open = |card: &DeviceInfo| refused(card, libc::EBUSY);
        let ours = first_to_open(cards(3), OPEN_TIMEOUT, open, |_| {}, |_| {}).unwrap_err();
        let ours = none_opened(ours, |nodes| vec![Owners::ourselves(); nodes.len()]);
        assert_eq!(ours.remedy(), Remedy::LendCard);
        let text = all_busy.to_string();
        assert!(text.contains("none of 3 cards is free"), "{text}");
        assert_eq!(text.matches("no process here has it open").count(), 3, "{text}");

        let one_in_reset =
            error(|card| if card.node == 1 { libc::EAGAIN } else { libc::EBUSY }).to_string();
        let named = one_in_reset.matches("no process here has it open").count();
        assert_eq!(named, 2, "a card in reset has no owner: {one_in_reset}");
        let all_in_reset = error(|_| libc::EAGAIN);
        assert_eq!(all_in_reset.errno(), Some(libc::EAGAIN));
        for text in [one_in_reset, all_in_reset.to_string()] {
            assert!(text.contains("try again in a moment"), "{text}");
            assert!(!text.contains("end it"), "no process is at fault: {text}");
        }

        let mixed = error(|card| if card.node == 1 { libc::EACCES } else { libc::EBUSY });
        assert_eq!(mixed.kind(), ErrorKind::PermissionDenied);
        assert!(mixed.to_string().contains("0001:00:00.0"), "{mixed}");
    }

    #[test]
    fn a_card_is_in_reset_if_the_driver_says_so() {
        for (status, in_reset) in [
            (Some("Operational"), false),
            (Some("In reset"), true),
            (Some("in reset after device release"), true),
            (Some("Needs Reset"), false),
            (None, false),
        ] {
            assert_eq!(is_in_reset(status.map(str::to_owned)), in_reset, "{status:?}");
        }
    }
}
