//! How the view is drawn: cards, traffic with its history, processes, keys.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::Line;
use ratatui::widgets::{Block, Cell, Clear, Paragraph, RenderDirection, Row, Sparkline, Table};

use super::app::{App, KEYS};
use super::{memory, rate, told};
use crate::counters::rates::{Activity, flows};
use crate::counters::{DIRECTIONS, WAYS};
use crate::output::size;

const HEADER: Style = Style::new().bold();

pub(super) fn draw(frame: &mut Frame<'_>, app: &App) {
    let cards = app.look().map_or(0, |look| look.cards.len()) as u16;
    let flows = DIRECTIONS.len().max(WAYS.len()) as u16;
    let [top, cards, traffic, processes, bottom] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Max(cards + 3),
        Constraint::Length(flows + 2),
        Constraint::Min(4),
        Constraint::Length(1),
    ])
    .areas(frame.area());
    draw_title(frame, app, top);
    draw_cards(frame, app, cards);
    draw_traffic(frame, app, traffic);
    draw_processes(frame, app, processes);
    draw_keys(frame, app, bottom);
    if app.help {
        draw_help(frame);
    }
}

fn draw_title(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let mut words = vec!["ucx-gaudi top".bold()];
    match app.look() {
        None => words.push("  looking …".into()),
        Some(look) => {
            let (cards, processes) = (look.cards.len(), look.processes.len());
            words.push(format!("  cards: {cards}  processes: {processes}").into());
        }
    }
    words.push(format!("  every {} s", app.delay.as_secs_f64()).into());
    if app.is_paused() {
        words.push("  paused".yellow().bold());
    }
    let filters = [("card", app.card.as_deref()), ("user", app.user.as_deref())];
    for (what, value) in filters.into_iter().filter_map(|(what, value)| Some((what, value?))) {
        words.push(format!("  {what}: {value}").cyan());
    }
    if !app.text.is_empty() && !app.typing {
        words.push(format!("  text: {}", app.text).cyan());
    }
    frame.render_widget(Line::from(words), area);
}

/// What cards and processes do, in the same columns.
fn activity_cells(activity: &Activity) -> Vec<Cell<'static>> {
    let right = |text: String| Cell::new(Line::from(text).alignment(Alignment::Right));
    let mut cells: Vec<Cell<'_>> =
        activity.rates[..4].iter().map(|&one| right(rate(one))).collect();
    cells.push(right(activity.in_flight.to_string()));
    let errors = activity.dma_errors + activity.failures;
    let style = if errors > 0 { Style::new().fg(Color::Red).bold() } else { Style::new() };
    cells.push(right(errors.to_string()).style(style));
    cells
}

/// A column, and the smallest width of the table that shows it.
type Column<'a> = (&'a str, Constraint, u16);

const ACTIVITY: [Column<'_>; 6] = [
    ("to card", Constraint::Length(9), 0),
    ("from card", Constraint::Length(9), 0),
    ("within", Constraint::Length(9), 126),
    ("between", Constraint::Length(9), 126),
    ("in flight", Constraint::Length(9), 0),
    ("errors", Constraint::Length(6), 0),
];

/// A table whose last columns are those of [`activity_cells`].
fn table<'a>(
    title: &'a str,
    first: &[Column<'a>],
    rows: Vec<Vec<Cell<'a>>>,
    width: u16,
) -> Table<'a> {
    let columns: Vec<Column<'a>> = first.iter().chain(&ACTIVITY).copied().collect();
    let name = |(at, (name, ..)): (usize, &Column<'a>)| {
        let right = at >= first.len();
        Cell::new(Line::from(*name).alignment(if right {
            Alignment::Right
        } else {
            Alignment::Left
        }))
    };
    let names = columns.iter().enumerate().map(name).collect();
    let shown = |cells: Vec<Cell<'a>>| {
        let cells = cells.into_iter().zip(&columns).filter(|(_, (.., from))| width >= *from);
        Row::new(cells.map(|(cell, _)| cell).collect::<Vec<_>>())
    };
    let header = shown(names).style(HEADER);
    let widths = columns.iter().filter(|(.., from)| width >= *from).map(|(_, width, _)| *width);
    Table::new(rows.into_iter().map(shown), widths.collect::<Vec<_>>())
        .header(header)
        .block(Block::bordered().title(title.bold()))
}

fn draw_cards(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let Some(look) = app.look() else { return };
    let shown = |bus_id: &String| app.card.as_ref().is_none_or(|card| card == bus_id);
    let row = |card: &crate::counters::cards::Card| {
        let users: Vec<&str> = card.users.iter().map(String::as_str).collect();
        let full = card.memory_used.zip(card.memory_total).filter(|(_, total)| *total > 0);
        let full = full.map_or(0.0, |(used, total)| used as f64 / total as f64);
        let colour = match full {
            0.9.. => Style::new().fg(Color::Red),
            0.7.. => Style::new().fg(Color::Yellow),
            _ => Style::new(),
        };
        let mut cells = vec![
            Cell::new(card.index.to_string()),
            Cell::new(card.bus_id.clone()),
            Cell::new(users.join(" ")),
            Cell::new(memory(card.memory_used, card.memory_total)).style(colour),
            Cell::new(told(card.utilization.map(f64::from), "%")),
            Cell::new(told(card.temperature, "°C")),
            Cell::new(told(card.power, "W")),
        ];
        cells.extend(activity_cells(&look.on_card(&card.bus_id)));
        cells
    };
    let rows = look.cards.iter().filter(|card| shown(&card.bus_id)).map(row).collect();
    let first = [
        ("#", Constraint::Length(3), 0),
        ("PCI", Constraint::Length(12), 0),
        ("user", Constraint::Min(5), 0),
        ("memory", Constraint::Length(18), 0),
        ("busy", Constraint::Length(5), 104),
        ("temp", Constraint::Length(6), 104),
        ("power", Constraint::Length(6), 104),
    ];
    frame.render_widget(table(" Cards ", &first, rows, area.width), area);
}

fn draw_traffic(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let history = app.history();
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let colours = [Color::Green, Color::Blue];
    let halves = [
        (left, " Directions ", 0, DIRECTIONS.len()),
        (right, " Ways ", DIRECTIONS.len(), WAYS.len()),
    ];
    for ((area, title, from, count), colour) in halves.into_iter().zip(colours) {
        let block = Block::bordered().title(title.bold());
        let lines = Layout::vertical(vec![Constraint::Length(1); count]).split(block.inner(area));
        frame.render_widget(block, area);
        for ((flow, history), line) in flows().zip(&history).skip(from).zip(lines.iter()) {
            let [name, now, peak, past] = Layout::horizontal([
                Constraint::Length(14),
                Constraint::Length(10),
                // Next to the history, if there is space.
                Constraint::Length(if area.width < 60 { 1 } else { 17 }),
                Constraint::Fill(1),
            ])
            .areas(*line);
            let bytes = history.first().copied().unwrap_or(0) as f64;
            let most = history.iter().copied().max().unwrap_or(0);
            frame.render_widget(flow.title, name);
            frame.render_widget(Line::from(rate(bytes)).alignment(Alignment::Right), now);
            if most > 0 && peak.width > 1 {
                let most = format!("peak {} ", rate(most as f64));
                frame.render_widget(Line::from(most).alignment(Alignment::Right).dim(), peak);
            }
            let style =
                Style::new().fg(if flow.name == "bounced" { Color::Yellow } else { colour });
            // The newest on the right.
            let past_rates = Sparkline::default().data(history.iter().copied());
            frame.render_widget(
                past_rates.style(style).direction(RenderDirection::RightToLeft),
                past,
            );
        }
    }
}

fn draw_processes(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let processes = app.processes();
    if processes.is_empty() {
        let why = match app.look() {
            None => "",
            Some(look) if look.processes.is_empty() => {
                "no process that this user may look into has opened a Gaudi through ucx-gaudi"
            }
            Some(_) => "no process matches: Esc shows all",
        };
        let block = Block::bordered().title(" Processes ".bold());
        return frame.render_widget(Paragraph::new(why).block(block), area);
    }
    let row = |(process, activity): &(&crate::counters::rates::ProcessRates, Activity)| {
        let cards: Vec<String> = process.cards().map(|card| index_of(app, card)).collect();
        let mut cells = vec![
            Cell::new(process.pid.to_string()),
            Cell::new(process.user.clone()),
            Cell::new(process.command.clone()),
            Cell::new(cards.join(",")),
            Cell::new(size(activity.allocated)),
        ];
        cells.extend(activity_cells(activity));
        cells
    };
    let rows = processes.iter().map(row).collect();
    let title = format!(" Processes by {} ", app.order.name());
    let first = [
        ("pid", Constraint::Length(8), 0),
        ("user", Constraint::Length(10), 0),
        ("command", Constraint::Min(8), 0),
        ("cards", Constraint::Length(8), 104),
        ("memory", Constraint::Length(9), 0),
    ];
    frame.render_widget(table(&title, &first, rows, area.width), area);
}

fn index_of(app: &App, bus_id: &str) -> String {
    let mut cards = app.look().into_iter().flat_map(|look| &look.cards);
    let known = cards.find(|card| card.bus_id == bus_id);
    known.map_or_else(|| String::from("?"), |card| card.index.to_string())
}

fn draw_keys(frame: &mut Frame<'_>, app: &App, area: Rect) {
    let line = if app.typing {
        Line::from(format!("/{}▏  Enter: keep   Esc: drop", app.text)).cyan()
    } else {
        Line::from("q quit  s sort  r reverse  c card  u user  / text  p pause  ? help").dim()
    };
    frame.render_widget(line, area);
}

fn draw_help(frame: &mut Frame<'_>) {
    let lines: Vec<Line<'_>> =
        KEYS.iter().map(|(key, what)| Line::from(format!(" {key:<9} {what} "))).collect();
    let width = lines.iter().map(Line::width).max().unwrap_or(0) as u16 + 2;
    let height = lines.len() as u16 + 2;
    let area = frame.area().centered(Constraint::Max(width), Constraint::Max(height));
    frame.render_widget(Clear, area);
    let block = Block::bordered().title(" Keys ".bold());
    frame.render_widget(Paragraph::new(lines).block(block), area);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::super::app::tests::look;
    use super::*;

    fn drawn(app: &App, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
        terminal.draw(|frame| draw(frame, app)).expect("drawn");
        terminal.backend().to_string()
    }

    #[test]
    fn everything_has_its_place() {
        let mut app = App::new(Duration::from_secs(1));
        assert!(drawn(&app, 120, 30).contains("looking"));
        app.show(crate::counters::rates::Look::default());
        assert!(drawn(&app, 120, 30).contains("has opened a Gaudi"));
        app.show(look());
        let screen = drawn(&app, 130, 30);
        let line = |word: &str| {
            let line = screen.lines().find(|line| line.contains(word));
            line.unwrap_or_else(|| panic!("no {word} in\n{screen}")).to_owned()
        };
        for word in
            ["0 ", "ada", "24 GiB of 96 GiB", "63 %", "47 °C", "310 W", "1.0 GB/s", "2.0 GB/s"]
        {
            assert!(line("0000:33:00.0").contains(word), "{word}\n{screen}");
        }
        // The driver reports nothing about the other card.
        assert!(line("0000:34:00.0").contains("-  "), "{screen}");
        assert!(line("bounced").contains("12.0 GB/s") && line("bounced").contains('█'), "{screen}");
        assert!(line("bounced").contains("peak"), "{screen}");
        assert!(line("vllm").contains("0,1") && line("vllm").contains("17"), "{screen}");
        let narrow = drawn(&app, 80, 30);
        for word in
            ["0000:33:00.0", "24 GiB of 96 GiB", "from card", "errors", "osu_bw", "5.0 GB/s"]
        {
            assert!(narrow.contains(word) && !narrow.contains("between in"), "{word}\n{narrow}");
        }
        let order = screen.find("osu_bw") < screen.find("vllm");
        assert!(order && screen.contains("Processes by bytes/s"), "{screen}");
        app.text = String::from("nothing");
        assert!(drawn(&app, 120, 30).contains("no process matches"));
        app.help = true;
        let screen = drawn(&app, 120, 30);
        assert!(KEYS.iter().all(|(_, what)| screen.contains(what)), "{screen}");
    }

    #[test]
    fn any_size_of_terminal_will_do() {
        let mut app = App::new(Duration::from_secs(1));
        app.show(look());
        app.help = true;
        for (width, height) in [(1, 1), (20, 5), (80, 12), (300, 100)] {
            drawn(&app, width, height);
        }
    }
}
