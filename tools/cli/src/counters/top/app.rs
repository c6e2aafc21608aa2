//! The state of the view, and the effect of keys.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use crate::counters::rates::{Activity, FLOWS, Look, ProcessRates};

/// Number of readings in the history.
const HISTORY: usize = 300;

/// What processes are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Rate,
    Memory,
    InFlight,
    Errors,
    User,
    Command,
    Pid,
}

impl Order {
    const ALL: [Self; 7] = [
        Self::Rate,
        Self::Memory,
        Self::InFlight,
        Self::Errors,
        Self::User,
        Self::Command,
        Self::Pid,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Rate => "bytes/s",
            Self::Memory => "memory",
            Self::InFlight => "in flight",
            Self::Errors => "errors",
            Self::User => "user",
            Self::Command => "command",
            Self::Pid => "pid",
        }
    }
}

/// The keys, as the help shows them.
pub(super) const KEYS: [(&str, &str); 9] = [
    ("q", "quit"),
    ("s", "sort by the next column"),
    ("r", "reverse the order"),
    ("c", "only the next card, then all"),
    ("u", "only the next user, then all"),
    ("/", "only processes with this text in user, command, pid or card"),
    ("Esc", "show everything again"),
    ("p, Space", "pause"),
    ("?, h", "this help"),
];

/// What the view shows.
pub(super) struct App {
    looks: VecDeque<Look>,
    pub(super) delay: Duration,
    pub(super) order: Order,
    reversed: bool,
    pub(super) card: Option<String>,
    pub(super) user: Option<String>,
    pub(super) text: String,
    /// Keys are letters of the filter text.
    pub(super) typing: bool,
    paused: bool,
    pub(super) help: bool,
}

impl App {
    pub(super) fn new(delay: Duration) -> Self {
        Self {
            looks: VecDeque::new(),
            delay,
            order: Order::Rate,
            reversed: false,
            card: None,
            user: None,
            text: String::new(),
            typing: false,
            paused: false,
            help: false,
        }
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Adds a new reading.
    pub(super) fn show(&mut self, look: Look) {
        self.looks.truncate(HISTORY - 1);
        self.looks.push_front(look);
    }

    /// The newest reading.
    pub(super) fn look(&self) -> Option<&Look> {
        self.looks.front()
    }

    /// Handles a key; returns whether it ends the view.
    pub(super) fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code == KeyCode::Char('c');
        }
        if self.typing {
            match key.code {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => (self.typing, self.text) = (false, String::new()),
                KeyCode::Backspace => drop(self.text.pop()),
                KeyCode::Char(letter) => self.text.push(letter),
                _ => {}
            }
            return false;
        }
        match key.code {
            KeyCode::Char('q') => return true,
            KeyCode::Char('s') => {
                let at = Order::ALL.iter().position(|order| *order == self.order).unwrap_or(0);
                self.order = Order::ALL[(at + 1) % Order::ALL.len()];
            }
            KeyCode::Char('r') => self.reversed = !self.reversed,
            KeyCode::Char('c') => {
                let cards = self.look().into_iter().flat_map(|look| &look.cards);
                let cards = cards.map(|card| card.bus_id.clone()).collect();
                self.card = after(&cards, self.card.as_deref());
            }
            KeyCode::Char('u') => {
                let processes = self.look().into_iter().flat_map(|look| &look.processes);
                let users = processes.map(|process| process.user.clone()).collect();
                self.user = after(&users, self.user.as_deref());
            }
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Esc if self.help => self.help = false,
            KeyCode::Esc => {
                (self.card, self.user) = (None, None);
                self.text.clear();
            }
            KeyCode::Char('p' | ' ') => self.paused = !self.paused,
            KeyCode::Char('?' | 'h') => self.help = !self.help,
            _ => {}
        }
        false
    }

    fn is_shown(&self, process: &ProcessRates) -> bool {
        let on_card = self.card.as_deref().is_none_or(|card| process.cards().any(|on| on == card));
        let of_user = self.user.as_ref().is_none_or(|user| *user == process.user);
        let has_text = self.text.is_empty()
            || process.command.contains(&self.text)
            || process.user.contains(&self.text)
            || process.pid.to_string().contains(&self.text)
            || process.cards().any(|card| card.contains(&self.text));
        on_card && of_user && has_text
    }

    /// The processes to show, in order, with what they do on the cards that are shown.
    pub(super) fn processes(&self) -> Vec<(&ProcessRates, Activity)> {
        let shown = self.look().into_iter().flat_map(|look| &look.processes);
        let mut shown: Vec<_> = shown
            .filter(|process| self.is_shown(process))
            .map(|process| (process, process.activity(self.card.as_deref())))
            .collect();
        shown.sort_by(|(one, left), (other, right)| match self.order {
            // The largest first.
            Order::Rate => right.moved().total_cmp(&left.moved()),
            Order::Memory => right.allocated.cmp(&left.allocated),
            Order::InFlight => right.in_flight.cmp(&left.in_flight),
            Order::Errors => {
                let errors = |of: &Activity| of.dma_errors + of.failures;
                errors(right).cmp(&errors(left))
            }
            Order::User => one.user.cmp(&other.user),
            Order::Command => one.command.cmp(&other.command),
            Order::Pid => one.pid.cmp(&other.pid),
        });
        if self.reversed {
            shown.reverse();
        }
        shown
    }

    /// Bytes per second of what is shown, newest first, for each flow.
    pub(super) fn history(&self) -> [Vec<u64>; FLOWS] {
        let mut history = [const { Vec::new() }; FLOWS];
        for look in &self.looks {
            let mut sum = Activity::default();
            for process in look.processes.iter().filter(|process| self.is_shown(process)) {
                sum.add(&process.activity(self.card.as_deref()));
            }
            for (flow, rate) in history.iter_mut().zip(sum.rates) {
                flow.push(rate as u64);
            }
        }
        history
    }
}

/// The one after `now`; `None` after the last, and the first after `None`.
fn after(all: &BTreeSet<String>, now: Option<&str>) -> Option<String> {
    match now {
        None => all.first().cloned(),
        Some(now) => all.iter().find(|one| one.as_str() > now).cloned(),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::counters::cards::Card;

    /// Two cards, one of which the driver reports more about, and two processes of two users.
    pub(in super::super) fn look() -> Look {
        let activity = |bytes: f64, in_flight: u64| Activity {
            rates: [bytes, 2.0 * bytes, 0.0, 0.0, 0.0, bytes, 2.0 * bytes, 0.0, 0.0, 0.0],
            allocated: 3 << 30,
            in_flight,
            dma_errors: in_flight / 4,
            failures: 0,
        };
        let (first, second) = (String::from("0000:33:00.0"), String::from("0000:34:00.0"));
        let process = |pid, user: &str, command: &str, parts| ProcessRates {
            pid,
            user: user.into(),
            command: command.into(),
            parts,
        };
        let card = Card {
            index: 0,
            bus_id: first.clone(),
            name: String::from("HL-225"),
            memory_total: Some(96 << 30),
            memory_used: Some(24 << 30),
            utilization: Some(63),
            temperature: Some(47.0),
            power: Some(310.0),
            users: BTreeSet::from([String::from("ada")]),
        };
        let both = vec![(first, activity(1e9, 4)), (second.clone(), activity(2e6, 0))];
        Look {
            seconds: 1.0,
            cards: vec![card, Card { index: 1, bus_id: second.clone(), ..Card::default() }],
            processes: vec![
                process(17, "ada", "vllm", both),
                process(9, "bob", "osu_bw", vec![(second, activity(5e9, 0))]),
            ],
        }
    }

    fn press(app: &mut App, keys: &str) -> bool {
        keys.chars().fold(false, |_, key| {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                letter => KeyCode::Char(letter),
            };
            app.press(KeyEvent::new(code, KeyModifiers::NONE))
        })
    }

    #[test]
    fn keys_sort_filter_pause_and_end() {
        let mut app = App::new(Duration::from_secs(1));
        assert!(press(&mut app, "q"), "also before the first look");
        app.show(look());
        let shown = |app: &App| app.processes().iter().map(|(one, _)| one.pid).collect::<Vec<_>>();
        for (keys, expected) in [
            ("", vec![9, 17]), // by bytes a second
            ("r", vec![17, 9]),
            ("rs", vec![17, 9]),  // by memory
            ("ss", vec![17, 9]),  // by errors
            ("sss", vec![9, 17]), // by pid
            ("c", vec![17]),      // the first card
            ("c", vec![9, 17]),   // the second, which both use
            ("cu", vec![17]),     // all cards, the first user
            ("u", vec![9]),
            ("u", vec![9, 17]),
            ("/osu\n", vec![9]),
            ("\u{1b}", vec![9, 17]),
            ("/q:33\n", vec![]), // letters, while typing
            ("\u{1b}/:33\n", vec![17]),
            ("/x\u{1b}", vec![9, 17]),
        ] {
            assert!(!press(&mut app, keys), "{keys:?}");
            assert_eq!(shown(&app), expected, "{keys:?}");
        }
        press(&mut app, "p?");
        assert!(app.is_paused() && app.help);
        press(&mut app, "\u{1b} ");
        assert!(!app.is_paused() && !app.help);
        assert!(app.press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn history_is_of_what_is_shown_and_bounded() {
        let mut app = App::new(Duration::from_secs(1));
        for _ in 0..HISTORY + 5 {
            app.show(look());
        }
        app.show(Look::default());
        let history = app.history();
        assert_eq!(history[0].len(), HISTORY);
        assert_eq!(history[0][..2], [0, 6_002_000_000]);
        press(&mut app, "/vllm\n");
        assert_eq!(app.history()[0][1], 1_002_000_000);
    }
}
