//! Recordings of driver calls, as `UCX_GAUDI_TRACE` writes them (`docs/trace.md`): a parser that accepts any text.
//!
//! A file has one JSON object per line. Other lines are counted and skipped: a process that was killed leaves half a
//! line, and a file may contain several recordings.
//!
//! A recording is untrusted, and its texts go to a terminal: control characters are replaced here by their numbers.

use serde_json::{Map, Value};

use crate::output::printable_object;

/// The version of the format that this parser reads.
const FORMAT: u64 = 1;

/// One recording: a first line, and the later lines of the same process. Lines of several processes may be mixed in one
/// file.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Recording {
    pub(crate) pid: u64,
    pub(crate) program: String,
    pub(crate) kernel: String,
    /// Seconds since 1970.
    pub(crate) began: f64,
    /// The driver library's name and version, once it was loaded.
    pub(crate) library: Option<String>,
    pub(crate) calls: Vec<Call>,
    /// Numbers of lines that could not be parsed, and how many there were.
    pub(crate) unreadable: Vec<usize>,
}

/// One line: a call, or additional data of one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// Its line in the file.
    pub(crate) line: usize,
    /// Seconds since the recording began.
    pub(crate) at: f64,
    pub(crate) thread: u64,
    pub(crate) name: String,
    pub(crate) args: Map<String, Value>,
    pub(crate) ret: Value,
    pub(crate) errno: Option<i32>,
    pub(crate) micros: f64,
}

impl Call {
    /// Whether it is a driver call and not a remark of the recorder.
    pub(crate) fn is_call(&self) -> bool {
        !matches!(&*self.name, "packets" | "load")
    }

    /// A wait that ended by its timeout: their number depends only on timing.
    pub(crate) fn is_idle_wait(&self) -> bool {
        self.name == "hlthunk_wait_for_cs"
            && self.errno.is_none()
            && self.args.get("status") == Some(&Value::from(1))
    }
}

/// All recordings in a file's text. Empty if there is none.
pub(crate) fn parse(text: &str) -> Vec<Recording> {
    let mut recordings: Vec<Recording> = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let object = match serde_json::from_str(line) {
            Ok(Value::Object(object)) => Some(printable_object(object)),
            _ => None,
        };
        match (object, recordings.last()) {
            (Some(first), _) if first.get("trace").and_then(Value::as_u64) == Some(FORMAT) => {
                recordings.push(header(&first));
            }
            // Lines before the first recording do not belong to one.
            (_, None) => {}
            (object, Some(last)) => {
                // Older versions did not name the process.
                let pid = object.as_ref().and_then(|object| object.get("pid")?.as_u64());
                let pid = pid.unwrap_or(last.pid);
                let of_process = recordings.iter_mut().rfind(|recording| recording.pid == pid);
                match (object.and_then(|object| call(at + 1, object)), of_process) {
                    (Some(call), Some(recording)) => recording.add(call),
                    (_, Some(recording)) => recording.unreadable.push(at + 1),
                    // The first line of this process is not in the file.
                    (_, None) => {}
                }
            }
        }
    }
    recordings
}

impl Recording {
    fn add(&mut self, call: Call) {
        if call.name == "load" {
            let text = |key: &str| call.args.get(key).and_then(Value::as_str).unwrap_or("unknown");
            self.library = Some(format!("{} ({})", text("library"), text("version")));
        }
        self.calls.push(call);
    }

    /// The threads, in the order of their first calls.
    pub(crate) fn threads(&self) -> Vec<u64> {
        let mut threads = Vec::new();
        for call in &self.calls {
            if !threads.contains(&call.thread) {
                threads.push(call.thread);
            }
        }
        threads
    }
}

fn header(first: &Map<String, Value>) -> Recording {
    let text = |key: &str| first.get(key).and_then(Value::as_str).unwrap_or("unknown").to_owned();
    Recording {
        pid: first.get("pid").and_then(Value::as_u64).unwrap_or(0),
        program: text("program"),
        kernel: text("kernel"),
        began: first.get("unix").and_then(Value::as_f64).unwrap_or(0.0),
        ..Recording::default()
    }
}

fn call(line: usize, mut object: Map<String, Value>) -> Option<Call> {
    let number = |object: &Map<String, Value>, key: &str| object.get(key).and_then(Value::as_f64);
    let errno = match object.get("errno") {
        None => None,
        Some(errno) => Some(i32::try_from(errno.as_i64()?).ok()?),
    };
    Some(Call {
        line,
        at: number(&object, "t")?,
        thread: object.get("tid")?.as_u64()?,
        name: object.get("call")?.as_str()?.to_owned(),
        errno,
        micros: number(&object, "us").unwrap_or(0.0),
        ret: object.remove("ret").unwrap_or(Value::Null),
        args: match object.remove("args") {
            Some(Value::Object(args)) => args,
            None => Map::new(),
            Some(_) => return None,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FIRST: &str = r#"{"trace":1,"pid":7,"unix":1.5,"program":"p","kernel":"6.8"}"#;
    const OPEN: &str = r#"{"t":0.1,"tid":7,"call":"hlthunk_open","args":{"bus_id":"0000:33:00.0"},"ret":-16,"errno":16,"us":8.1}"#;

    #[test]
    fn half_a_line_and_foreign_lines_are_counted_and_left_out() {
        let text = format!("{OPEN}\n{FIRST}\n{OPEN}\n[1]\n\n{{\"t\":1}}\n{}", &OPEN[..50]);
        let all = parse(&text);
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].calls.len(), &*all[0].unreadable), (1, &[4, 6, 7][..]));
        let call = &all[0].calls[0];
        assert_eq!((call.line, call.errno, call.thread), (3, Some(16), 7));
        assert_eq!(parse("").len() + parse("hello\n").len(), 0);
        assert_eq!(parse(&FIRST.replace("\"trace\":1", "\"trace\":2")).len(), 0, "another format");
    }

    #[test]
    fn a_file_may_hold_several_recordings() {
        let all = parse(&format!("{FIRST}\n{OPEN}\n{FIRST}\n{OPEN}\n{OPEN}\n"));
        let lengths: Vec<usize> = all.iter().map(|one| one.calls.len()).collect();
        assert_eq!(lengths, [1, 2]);
    }

    #[test]
    fn lines_of_two_processes_in_one_file_are_told_apart() {
        let of = |line: &str, pid: u64| match line.contains("trace") {
            true => line.replace("\"pid\":7", &format!("\"pid\":{pid}")),
            false => line.replace("\"tid\":7", &format!("\"pid\":{pid},\"tid\":{pid}")),
        };
        let lines = [(FIRST, 7), (OPEN, 7), (FIRST, 8), (OPEN, 7), (OPEN, 8), (OPEN, 9), (OPEN, 7)];
        let all = parse(&lines.map(|(line, pid)| of(line, pid)).join("\n"));
        let lines: Vec<(u64, Vec<usize>)> = all
            .iter()
            .map(|one| (one.pid, one.calls.iter().map(|call| call.line).collect()))
            .collect();
        assert_eq!(lines, [(7, vec![2, 4, 7]), (8, vec![5])]);
    }

    proptest! {
        #[test]
        fn any_text_is_parsed_without_a_panic(text in ".{0,200}") {
            let _ = parse(&text);
            let _ = parse(&format!("{FIRST}\n{text}"));
        }

        /// Valid lines with one part replaced by something else.
        #[test]
        fn damaged_lines_are_parsed_without_a_panic(
            at in 0..OPEN.len(), len in 0usize..20, junk in "[\\[\\]{}\",:0-9a-z-]{0,20}"
        ) {
            let end = (at + len).min(OPEN.len());
            let line = format!("{}{junk}{}", &OPEN[..at], &OPEN[end..]);
            let all = parse(&format!("{FIRST}\n{line}\n{OPEN}"));
            prop_assert!(all[0].calls.len() + all[0].unreadable.len() <= 2 || all.len() > 1);
            for recording in &all {
                let _ = super::super::diff::compare(recording, &all[0]);
            }
        }
    }
}
