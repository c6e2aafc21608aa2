//! Recordings as a timeline in the JSON format of Chrome's trace viewer, which Perfetto opens. Pure functions.
//!
//! Each process has one track per thread for its calls, one per queue of a card for the submissions, and one each for
//! registrations, exports and imports. A queue works in order. So a submission begins at its call or at the end of the
//! previous one, and ends when a wait saw it, or a later one, complete.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

use super::recording::{Call, Recording};

/// Numbers of tracks that are no threads: larger than the kernel's thread ids, and within the 32 bits that Perfetto reads.
const FIRST_TRACK: u64 = 1 << 30;
/// Bytes of a copy packet, and the offsets of its length, control word, source and destination.
const PACKET: usize = hl_thunk::packet::LIN_DMA_LEN;
/// The bit of the control word that marks a fill.
const FILL: u32 = 1 << 4;

/// All events of these recordings. Times count from the beginning of the first.
pub(super) fn timeline(recordings: &[Recording]) -> Value {
    let first = recordings.iter().map(|recording| recording.began).fold(f64::INFINITY, f64::min);
    let events: Vec<Value> = recordings
        .iter()
        .flat_map(|recording| Process::new(recording, (recording.began - first) * 1e6).events())
        .collect();
    json!({"traceEvents": events, "displayTimeUnit": "ns"})
}

/// The state of one process.
struct Process<'a> {
    recording: &'a Recording,
    /// Microseconds from the beginning of the first recording to that of this one.
    offset: f64,
    events: Vec<Value>,
    /// Names of tracks that are no threads, in the order of their numbers.
    tracks: Vec<String>,
    /// Open cards by descriptor.
    cards: BTreeMap<u64, String>,
    /// Mapped memory that is not the card's own: first address, end, owner.
    mappings: BTreeMap<u64, (u64, &'static str)>,
    /// The packets that each thread will submit next.
    packets: BTreeMap<u64, &'a Call>,
    /// Submissions by card and queue, in order.
    submissions: BTreeMap<(u64, u64), Vec<Submission>>,
}

struct Submission {
    sequence: u64,
    submitted: f64,
    completed: Option<f64>,
    name: String,
    args: Value,
}

impl<'a> Process<'a> {
    fn new(recording: &'a Recording, offset: f64) -> Self {
        Self {
            recording,
            offset,
            events: Vec::new(),
            tracks: Vec::new(),
            cards: BTreeMap::new(),
            mappings: BTreeMap::new(),
            packets: BTreeMap::new(),
            submissions: BTreeMap::new(),
        }
    }

    fn events(mut self) -> Vec<Value> {
        for call in &self.recording.calls {
            match call.name.as_str() {
                "packets" => drop(self.packets.insert(call.thread, call)),
                _ => self.call(call),
            }
        }
        for ((card, queue), submissions) in std::mem::take(&mut self.submissions) {
            self.queue(card, queue, submissions);
        }
        self.names();
        self.events
    }

    fn event(
        &mut self,
        kind: &str,
        track: u64,
        name: &str,
        category: &str,
        at: f64,
    ) -> &mut Map<String, Value> {
        self.events.push(json!({
            "ph": kind, "pid": self.recording.pid, "tid": track, "name": name, "cat": category, "ts": at,
        }));
        let last = self.events.last_mut().and_then(Value::as_object_mut);
        last.expect("an object was pushed")
    }

    /// The number of a track that is no thread.
    fn track(&mut self, name: String) -> u64 {
        let known = self.tracks.iter().position(|track| *track == name);
        let at = known.unwrap_or_else(|| {
            self.tracks.push(name);
            self.tracks.len() - 1
        });
        FIRST_TRACK + at as u64
    }

    fn at(&self, call: &Call) -> f64 {
        micros(self.offset + call.at * 1e6)
    }

    fn call(&mut self, call: &'a Call) {
        let at = self.at(call);
        let category = category(&call.name);
        let mut args = call.args.clone();
        args.insert("ret".into(), call.ret.clone());
        args.extend(call.errno.map(|errno| ("errno".into(), super::errno_name(errno).into())));
        let event = self.event("X", call.thread, short(&call.name), category, at);
        event.insert("dur".into(), micros(call.micros).into());
        event.insert("args".into(), args.into());
        if call.errno.is_some() {
            return;
        }
        let argument = |key: &str| call.args.get(key).and_then(number);
        let (fd, ret) = (argument("fd").unwrap_or_default(), number(&call.ret).unwrap_or_default());
        match call.name.as_str() {
            "hlthunk_open" => {
                let card = call.args.get("bus_id").and_then(Value::as_str).unwrap_or("a card");
                self.cards.insert(ret, card.to_owned());
            }
            "hlthunk_host_memory_map" => self.map(ret, argument("size"), "host"),
            "ioctl_memory" => {
                self.map(argument("device_va").unwrap_or_default(), argument("length"), "peer");
            }
            "hlthunk_memory_unmap" => {
                self.mappings.remove(&argument("addr").unwrap_or_default());
            }
            "hlthunk_wait_for_cs" if argument("status") == Some(0) => {
                self.complete(fd, argument("sequence"), at + micros(call.micros));
            }
            name if name.starts_with("hlthunk_command_submission") => self.submit(call, fd),
            _ => {}
        }
        if let "registrations" | "exports" | "imports" = category {
            let track = self.track(category.to_owned());
            let bytes = argument("size").or_else(|| argument("length"));
            let event = self.event("i", track, short(&call.name), category, at);
            event.insert("s".into(), "t".into());
            event.insert("args".into(), json!({ "bytes": bytes }));
        }
    }

    fn map(&mut self, start: u64, length: Option<u64>, whose: &'static str) {
        self.mappings.insert(start, (start.saturating_add(length.unwrap_or_default()), whose));
    }

    fn submit(&mut self, call: &'a Call, card: u64) {
        let chunks = call.args.get("chunks").and_then(Value::as_array);
        let queue =
            chunks.and_then(|chunks| number(chunks.first()?.get("queue")?)).unwrap_or_default();
        let sequence = call.args.get("out").and_then(|out| number(out.get("sequence")?));
        let packets = self.packets.remove(&call.thread);
        let (name, args) = self.describe(packets, sequence);
        let submitted = self.at(call);
        let sequence = sequence.unwrap_or_default();
        let submission = Submission { sequence, submitted, completed: None, name, args };
        self.submissions.entry((card, queue)).or_default().push(submission);
    }

    /// What packets do, in words, and how many bytes.
    fn describe(&self, packets: Option<&Call>, sequence: Option<u64>) -> (String, Value) {
        let argument = |key: &str| packets.and_then(|packets| packets.args.get(key));
        let all = argument("size").and_then(number).unwrap_or_default() / PACKET as u64;
        let recorded = hex(argument("bytes").and_then(Value::as_str).unwrap_or_default());
        let copies: Vec<(u64, String)> =
            recorded.chunks_exact(PACKET).filter_map(|packet| self.packet(packet)).collect();
        let bytes = copies.iter().fold(0u64, |sum, (bytes, _)| sum.saturating_add(*bytes));
        let way = copies.first().map_or("submission", |(_, way)| way);
        // A recording has only the first packets of a submission.
        let more = if all > copies.len() as u64 { " and more" } else { "" };
        let name = match copies.is_empty() {
            true => way.to_owned(),
            false => format!("{way}, {}{more}", crate::output::size(bytes)),
        };
        (name, json!({"bytes": bytes, "packets": all, "way": way, "sequence": sequence}))
    }

    fn packet(&self, packet: &[u8]) -> Option<(u64, String)> {
        let word = |at: usize| Some(u32::from_le_bytes(packet.get(at..at + 4)?.try_into().ok()?));
        let address =
            |at: usize| Some(u64::from_le_bytes(packet.get(at..at + 8)?.try_into().ok()?));
        let (bytes, control) = (u64::from(word(0)?), word(4)?);
        let (from, to) = (self.whose(address(8)?), self.whose(address(16)?));
        Some(match control & FILL {
            0 => (bytes, format!("{from} to {to}")),
            _ => (bytes, format!("fill {to}")),
        })
    }

    fn whose(&self, address: u64) -> &'static str {
        match self.mappings.range(..=address).next_back() {
            Some((_, (end, whose))) if address < *end => whose,
            _ => "card",
        }
    }

    fn complete(&mut self, card: u64, sequence: Option<u64>, at: f64) {
        let of_card = self.submissions.range_mut((card, 0)..=(card, u64::MAX));
        let mut all = of_card.flat_map(|(_, submissions)| submissions.iter_mut().rev());
        // Descriptors and their sequence numbers are reused: take the latest.
        if let Some(found) = all.find(|one| Some(one.sequence) == sequence) {
            found.completed.get_or_insert(at);
        }
    }

    fn queue(&mut self, card: u64, queue: u64, mut submissions: Vec<Submission>) {
        let card = self.cards.get(&card).cloned().unwrap_or_else(|| format!("descriptor {card}"));
        let track = self.track(format!("{card} queue {queue}"));
        let mut later = f64::INFINITY;
        for submission in submissions.iter_mut().rev() {
            later = later.min(submission.completed.unwrap_or(f64::INFINITY));
            submission.completed = later.is_finite().then_some(later);
        }
        let mut before = 0.0f64;
        for Submission { submitted, completed, name, args, .. } in submissions {
            let start = submitted.max(before);
            let kind = if completed.is_some() { "X" } else { "i" };
            let event = self.event(kind, track, &name, "copies", start);
            event.insert("args".into(), args);
            match completed {
                Some(end) => drop(event.insert("dur".into(), micros(end - start).into())),
                // No wait saw it end.
                None => drop(event.insert("s".into(), "t".into())),
            }
            before = completed.unwrap_or(before).max(start);
        }
    }

    /// Names of the process and of its tracks.
    fn names(&mut self) {
        let pid = self.recording.pid;
        let name = |kind: &str, track: u64, name: &str| json!({"ph": "M", "pid": pid, "tid": track, "name": kind, "args": {"name": name}});
        let program = self.recording.program.rsplit('/').next().unwrap_or_default();
        self.events.push(name("process_name", pid, program));
        for (at, thread) in self.recording.threads().into_iter().enumerate() {
            self.events.push(name("thread_name", thread, &format!("thread {}", at + 1)));
        }
        let tracks = self.tracks.iter().zip(FIRST_TRACK..);
        self.events.extend(tracks.map(|(track, at)| name("thread_name", at, track)));
    }
}

/// A time that JSON can express: recordings are untrusted.
fn micros(time: f64) -> f64 {
    if time.is_nan() { 0.0 } else { time.clamp(0.0, 1e15) }
}

fn short(name: &str) -> &str {
    name.strip_prefix("hlthunk_").unwrap_or(name)
}

fn category(call: &str) -> &'static str {
    match call {
        "hlthunk_host_memory_map" | "hlthunk_memory_unmap" => "registrations",
        "ioctl_memory" => "imports",
        call if call.contains("export_dmabuf") => "exports",
        call if call.contains("command_submission") || call.contains("wait_for_cs") => "copies",
        _ => "calls",
    }
}

/// A number, which may be written in hexadecimal if it is large.
fn number(value: &Value) -> Option<u64> {
    let text = || u64::from_str_radix(value.as_str()?.strip_prefix("0x")?, 16).ok();
    value.as_u64().or_else(text)
}

/// Bytes written in hexadecimal, up to the first invalid one.
fn hex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks_exact(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    pairs.map_while(byte).collect()
}

#[cfg(test)]
mod tests {
    use super::super::recording::parse;
    use super::*;
    use proptest::prelude::*;

    const RECORDED: &str = r#"{"trace":1,"pid":7,"unix":100.5,"program":"/bin/job","kernel":"6.8"}
{"t":0.001,"pid":7,"tid":7,"call":"hlthunk_open","args":{"bus_id":"0000:33:00.0"},"ret":27,"us":10}
{"t":0.002,"pid":7,"tid":7,"call":"hlthunk_host_memory_map","args":{"fd":27,"ptr":"0x7f0000000000","size":65536},"ret":"0xfff0000100400000","us":20}
{"t":0.003,"pid":7,"tid":7,"call":"packets","args":{"queue":0,"size":24,"bytes":"48200000000000a9000040000100f0ff0000002000610110"},"ret":0}
{"t":0.003,"pid":7,"tid":7,"call":"hlthunk_command_submission","args":{"fd":27,"chunks":[{"queue":0}],"out":{"sequence":1}},"ret":0,"us":5}
{"t":0.003010,"pid":7,"tid":8,"call":"packets","args":{"queue":0,"size":24,"bytes":"b80f0000100000a900000000000000004820002000610110"},"ret":0}
{"t":0.003010,"pid":7,"tid":8,"call":"hlthunk_command_submission","args":{"fd":27,"chunks":[{"queue":0}],"out":{"sequence":2}},"ret":0,"us":5}
{"t":0.0031,"pid":7,"tid":7,"call":"hlthunk_wait_for_cs","args":{"fd":27,"sequence":2,"status":0},"ret":0,"us":100}
{"t":0.0032,"pid":7,"tid":7,"call":"hlthunk_wait_for_cs","args":{"fd":27,"sequence":1,"status":0},"ret":0,"us":100}
{"t":0.004,"pid":7,"tid":7,"call":"hlthunk_device_mapped_memory_export_dmabuf_fd","args":{"fd":27,"size":4096},"ret":30,"us":3}
{"t":0.005,"pid":7,"tid":7,"call":"ioctl_memory","args":{"op":99,"length":4096,"device_va":"0xffffffffffffffff"},"ret":-1,"errno":9,"us":3}
"#;

    fn events(timeline: &Value) -> &[Value] {
        timeline["traceEvents"].as_array().expect("an array")
    }

    /// The format's rules: <https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU>.
    fn assert_valid(timeline: &Value) {
        let mut ends: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
        for event in events(timeline) {
            let (pid, tid) = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            assert!(event["name"].is_string(), "{event}");
            match event["ph"].as_str().unwrap() {
                "M" => assert!(event["args"]["name"].is_string(), "{event}"),
                "i" => assert_eq!(
                    (event["ts"].as_f64().unwrap() < 0.0, &event["s"]),
                    (false, &json!("t"))
                ),
                "X" => {
                    let (at, length) =
                        (event["ts"].as_f64().unwrap(), event["dur"].as_f64().unwrap());
                    assert!(at >= 0.0 && length >= 0.0, "{event}");
                    if tid >= FIRST_TRACK {
                        ends.entry((pid, tid)).or_default().push((at, at + length));
                    }
                }
                other => panic!("{other} is not used"),
            }
        }
        for (_, slices) in ends {
            let apart = |pair: &[(f64, f64)]| pair[0].1 <= pair[1].0 * (1.0 + 1e-9) + 1e-3;
            assert!(slices.windows(2).all(apart), "they overlap: {slices:?}");
        }
    }

    #[test]
    fn queues_have_their_copies_one_after_another_and_calls_their_threads() {
        let timeline = timeline(&parse(RECORDED));
        assert_valid(&timeline);
        let of = |kind: &str, track: u64| -> Vec<String> {
            let wanted = |event: &&Value| event["ph"] == kind && event["tid"] == track;
            let name = |event: &Value| event["name"].as_str().unwrap().to_owned();
            events(&timeline).iter().filter(wanted).map(name).collect()
        };
        let named = |name: &str| {
            let found = events(&timeline).iter().find(|event| event["args"]["name"] == name);
            found.unwrap_or_else(|| panic!("no track {name}"))["tid"].as_u64().unwrap()
        };
        assert_eq!(
            of("X", named("0000:33:00.0 queue 0")),
            ["host to card, 8 KiB", "fill card, 3.9 KiB"]
        );
        assert_eq!(of("i", named("registrations")), ["host_memory_map"]);
        assert_eq!(of("i", named("exports")), ["device_mapped_memory_export_dmabuf_fd"]);
        assert_eq!((of("X", 7).len(), of("X", 8).len(), named("job")), (7, 1, 7));
        assert!(!timeline.to_string().contains("\"imports\",\"ph\":\"i\""), "it failed");
        // The first submission ends when a wait saw the later one complete, because queues work in order.
        let first =
            events(&timeline).iter().find(|event| event["name"] == "host to card, 8 KiB").unwrap();
        assert!((first["ts"].as_f64().unwrap() - 3000.0).abs() < 1e-6, "{first}");
        assert!((first["dur"].as_f64().unwrap() - 200.0).abs() < 1e-6, "{first}");
    }

    #[test]
    fn several_recordings_share_one_clock() {
        let later = RECORDED.replace("100.5", "101.5").replace("\"pid\":7", "\"pid\":9");
        let timeline = timeline(&parse(&format!("{later}{RECORDED}")));
        assert_valid(&timeline);
        let open = |pid: u64| {
            let wanted = |event: &&Value| event["name"] == "open" && event["pid"] == pid;
            events(&timeline).iter().find(wanted).unwrap()["ts"].as_f64().unwrap()
        };
        assert!((open(9) - open(7) - 1e6).abs() < 1.0);
    }

    proptest! {
        /// Recordings are untrusted.
        #[test]
        fn damaged_recordings_give_valid_timelines(at in 0..RECORDED.len(), len in 0usize..30, junk in "[0-9a-fx\",:{}-]{0,20}") {
            let end = (at + len).min(RECORDED.len());
            let text = format!("{}{junk}{}", &RECORDED[..at], &RECORDED[end..]);
            assert_valid(&timeline(&parse(&text)));
        }
    }
}
