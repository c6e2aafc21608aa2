//! Where two recordings differ. Pure functions.
//!
//! Calls are compared thread by thread, threads in the order of their first calls. Addresses, handles,
//! descriptors and sequence numbers differ from run to run: two of them count as the same if they stand for each
//! other throughout. Times are no differences; the caller shows them beside each other.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use serde_json::{Map, Value};

use super::recording::{Call, Recording};

/// How far ahead the same calls are searched for where two threads part.
const AHEAD: usize = 100;
/// Differences that are kept.
const KEPT: usize = 1000;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Difference {
    /// The thread's number, from 1.
    pub(crate) thread: usize,
    pub(crate) call: String,
    /// Lines in the files; `None`: only the other one has this call.
    pub(crate) line_a: Option<usize>,
    pub(crate) line_b: Option<usize>,
    pub(crate) what: String,
}

/// What a comparison brought.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Comparison {
    /// Pairs of calls that were compared.
    pub(crate) compared: usize,
    pub(crate) differences: Vec<Difference>,
    /// Differences beyond those that were kept.
    pub(crate) more: usize,
}

/// Compares two recordings.
pub(crate) fn compare(a: &Recording, b: &Recording) -> Comparison {
    let mut comparison = Comparison::default();
    let (threads_a, threads_b) = (a.threads(), b.threads());
    let none = u64::MAX;
    for at in 0..threads_a.len().max(threads_b.len()) {
        let of = |recording, threads: &[u64]| calls(recording, *threads.get(at).unwrap_or(&none));
        let (a, b) = (of(a, &threads_a), of(b, &threads_b));
        compare_threads(at + 1, &a, &b, &mut comparison);
    }
    comparison
}

fn calls(recording: &Recording, thread: u64) -> Vec<&Call> {
    let of_thread = recording.calls.iter().filter(|call| call.thread == thread);
    of_thread.filter(|call| call.name != "load" && !call.is_idle_wait()).collect()
}

fn compare_threads(thread: usize, a: &[&Call], b: &[&Call], comparison: &mut Comparison) {
    let mut same = Correspondence::default();
    let (mut at_a, mut at_b) = (0, 0);
    let mut add = |call: &Call, line_a, line_b, what: String| {
        if comparison.differences.len() < KEPT {
            let call = call.name.clone();
            comparison.differences.push(Difference { thread, call, line_a, line_b, what });
        } else {
            comparison.more += 1;
        }
    };
    while at_a < a.len() || at_b < b.len() {
        let (skip_a, skip_b) = next_common(&a[at_a..], &b[at_b..]);
        for call in &a[at_a..at_a + skip_a] {
            add(call, Some(call.line), None, format!("only in A{}", outcome(call)));
        }
        for call in &b[at_b..at_b + skip_b] {
            add(call, None, Some(call.line), format!("only in B{}", outcome(call)));
        }
        (at_a, at_b) = (at_a + skip_a, at_b + skip_b);
        if let (Some(one), Some(other)) = (a.get(at_a), b.get(at_b)) {
            comparison.compared += 1;
            for what in same.compare(one, other) {
                add(one, Some(one.line), Some(other.line), what);
            }
            (at_a, at_b) = (at_a + 1, at_b + 1);
        }
    }
}

fn outcome(call: &Call) -> String {
    call.errno.map_or_else(String::new, |errno| format!(", failed with {}", errno_name(errno)))
}

/// How many calls to skip on either side until both go on with the same function, so that as many calls as
/// possible find their like (the longest common subsequence of what lies ahead).
fn next_common(a: &[&Call], b: &[&Call]) -> (usize, usize) {
    let (a, b) = (&a[..a.len().min(AHEAD)], &b[..b.len().min(AHEAD)]);
    if a.first().zip(b.first()).is_some_and(|(a, b)| a.name == b.name) {
        return (0, 0);
    }
    // common[i][j]: how many are common to a[i..] and b[j..].
    let mut common = vec![vec![0_u16; b.len() + 1]; a.len() + 1];
    for (i, one) in a.iter().enumerate().rev() {
        for (j, other) in b.iter().enumerate().rev() {
            common[i][j] = if one.name == other.name {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() && a[i].name != b[j].name {
        if common[i + 1][j] > common[i][j + 1] { i += 1 } else { j += 1 }
    }
    // At the end of one, the rest of the other has no like.
    if i < a.len() && j < b.len() { (i, j) } else { (a.len(), b.len()) }
}

/// Kinds of values that differ from run to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Kind {
    Address,
    Handle,
    Descriptor,
    Sequence,
    Card,
}

/// What an argument of this name is, if its value is no matter of comparison.
fn kind(key: &str) -> Option<Kind> {
    match key {
        "addr" | "ptr" | "hint" | "cb" | "device_va" => Some(Kind::Address),
        "handle" => Some(Kind::Handle),
        "fd" | "dmabuf" => Some(Kind::Descriptor),
        "sequence" => Some(Kind::Sequence),
        "bus_id" | "index" | "module_id" => Some(Kind::Card),
        _ => None,
    }
}

/// What a function returns.
fn kind_of_return(call: &str) -> Option<Kind> {
    match call {
        "hlthunk_open" | "hlthunk_open_control" => Some(Kind::Descriptor),
        "hlthunk_device_memory_export_dmabuf_fd" => Some(Kind::Descriptor),
        "hlthunk_device_mapped_memory_export_dmabuf_fd" => Some(Kind::Descriptor),
        "hlthunk_device_memory_alloc" => Some(Kind::Handle),
        "hlthunk_device_memory_map" | "hlthunk_host_memory_map" => Some(Kind::Address),
        _ => None,
    }
}

/// Which values of A stand for which of B.
#[derive(Debug, Default)]
struct Correspondence {
    pairs: HashMap<(Kind, String), String>,
    taken: HashMap<(Kind, String), String>,
}

impl Correspondence {
    /// What differs between two calls of one function.
    fn compare(&mut self, a: &Call, b: &Call) -> Vec<String> {
        let mut differences = Vec::new();
        match (a.errno, b.errno) {
            (None, Some(errno)) => {
                differences.push(format!("succeeds in A, fails with {} in B", errno_name(errno)));
            }
            (Some(errno), None) => {
                differences.push(format!("fails with {} in A, succeeds in B", errno_name(errno)));
            }
            (Some(one), Some(other)) if one != other => differences.push(format!(
                "fails with {} in A, with {} in B",
                errno_name(one),
                errno_name(other)
            )),
            _ => {}
        }
        let both_succeed = a.errno.is_none() && b.errno.is_none();
        if a.name == "packets" {
            compare_packets(a, b, &mut differences);
        } else {
            self.compare_objects("", &a.args, &b.args, &mut differences);
            if both_succeed {
                self.compare_values(
                    "result",
                    kind_of_return(&a.name),
                    &a.ret,
                    &b.ret,
                    &mut differences,
                );
            }
        }
        if both_succeed && a.name == "hlthunk_close" {
            // The number may be used again for something else.
            self.forget(Kind::Descriptor, a.args.get("fd"), b.args.get("fd"));
        }
        differences
    }

    fn compare_objects(
        &mut self,
        path: &str,
        a: &Map<String, Value>,
        b: &Map<String, Value>,
        differences: &mut Vec<String>,
    ) {
        let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        // How long to wait, and how often it was polled in vain, are matters of time.
        let of_time = |key: &&String| matches!(&***key, "idle_polls" | "timeout_us");
        for key in keys.into_iter().filter(|key| !of_time(key)) {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match (a.get(key), b.get(key)) {
                (Some(a), Some(b)) => self.compare_values(&path, kind(key), a, b, differences),
                (one, _) => {
                    let side = if one.is_some() { "A" } else { "B" };
                    differences.push(format!("{path} is only in {side}"));
                }
            }
        }
    }

    fn compare_values(
        &mut self,
        path: &str,
        kind: Option<Kind>,
        a: &Value,
        b: &Value,
        differences: &mut Vec<String>,
    ) {
        match (a, b, kind) {
            (Value::Object(a), Value::Object(b), _) => {
                self.compare_objects(path, a, b, differences)
            }
            (Value::Array(a), Value::Array(b), _) if a.len() == b.len() => {
                for (at, (a, b)) in a.iter().zip(b).enumerate() {
                    self.compare_values(&format!("{path}[{at}]"), kind, a, b, differences);
                }
            }
            (a, b, Some(kind)) if is_value(a) && is_value(b) => {
                let same = self.stand_for_each_other(kind, a, b);
                if !same {
                    differences.push(format!(
                        "{path}: {a} in A and {b} in B do not stand for each other (as {} and {} do)",
                        self.taken.get(&(kind, b.to_string())).map_or("something else", |a| a),
                        self.pairs.get(&(kind, a.to_string())).map_or("something else", |b| b)
                    ));
                }
            }
            (a, b, _) if a != b => differences.push(format!("{path} is {a} in A, {b} in B")),
            _ => {}
        }
    }

    /// Whether both values are new, or known to stand for each other.
    fn stand_for_each_other(&mut self, kind: Kind, a: &Value, b: &Value) -> bool {
        let (a, b) = (a.to_string(), b.to_string());
        // "No address" and its like are themselves.
        if matches!(&*a, "0" | "null" | "-1") || matches!(&*b, "0" | "null" | "-1") {
            return a == b;
        }
        match (self.pairs.get(&(kind, a.clone())), self.taken.get(&(kind, b.clone()))) {
            (Some(known), _) => *known == b,
            (None, Some(_)) => false,
            (None, None) => {
                self.pairs.insert((kind, a.clone()), b.clone());
                self.taken.insert((kind, b), a);
                true
            }
        }
    }

    fn forget(&mut self, kind: Kind, a: Option<&Value>, b: Option<&Value>) {
        let (Some(a), Some(b)) = (a, b) else { return };
        self.pairs.remove(&(kind, a.to_string()));
        self.taken.remove(&(kind, b.to_string()));
    }
}

/// A number or a text, or nothing.
fn is_value(value: &Value) -> bool {
    !value.is_object() && !value.is_array()
}

/// Packets contain addresses: of each only its length and control word are compared.
fn compare_packets(a: &Call, b: &Call, differences: &mut Vec<String>) {
    for key in ["queue", "size"] {
        let (a, b) = (a.args.get(key), b.args.get(key));
        if a != b {
            let shown =
                |value: Option<&Value>| value.map_or("nothing".to_owned(), Value::to_string);
            differences.push(format!("{key} is {} in A, {} in B", shown(a), shown(b)));
        }
    }
    let heads = |call: &Call| -> Vec<String> {
        let text = call.args.get("bytes").and_then(Value::as_str).unwrap_or("");
        let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let head =
            |packet: &[u8]| String::from_utf8_lossy(&packet[..packet.len().min(16)]).into_owned();
        digits.chunks(48).map(head).collect()
    };
    let (a, b) = (heads(a), heads(b));
    if a != b {
        differences.push(format!("packets begin with {a:?} in A, {b:?} in B"));
    }
}

/// The name of an errno.
pub(crate) fn errno_name(errno: i32) -> String {
    let known = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::EINTR => "EINTR",
        libc::EIO => "EIO",
        libc::ENXIO => "ENXIO",
        libc::EBADF => "EBADF",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::ENFILE => "ENFILE",
        libc::EMFILE => "EMFILE",
        libc::ENOTTY => "ENOTTY",
        libc::ENOSPC => "ENOSPC",
        libc::ENOSYS => "ENOSYS",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::ETIMEDOUT => "ETIMEDOUT",
        _ => return format!("errno {errno}"),
    };
    known.to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::recording::parse;
    use super::*;

    const FIRST: &str = r#"{"trace":1,"pid":7,"unix":1.5,"program":"p","kernel":"6.8"}"#;

    /// A recording of these calls: name, arguments, result, errno.
    fn recording(calls: &[(&str, &str, &str, Option<i32>)]) -> Recording {
        let mut text = format!("{FIRST}\n");
        for (name, args, ret, errno) in calls {
            let errno = errno.map_or(String::new(), |errno| format!(",\"errno\":{errno}"));
            text += &format!(
                "{{\"t\":0,\"tid\":7,\"call\":\"{name}\",\"args\":{{{args}}},\"ret\":{ret}{errno},\"us\":1}}\n"
            );
        }
        parse(&text).remove(0)
    }

    fn differences(
        a: &[(&str, &str, &str, Option<i32>)],
        b: &[(&str, &str, &str, Option<i32>)],
    ) -> Vec<String> {
        let found = compare(&recording(a), &recording(b)).differences;
        found.into_iter().map(|one| format!("{}: {}", one.call, one.what)).collect()
    }

    #[test]
    fn addresses_handles_and_descriptors_may_differ_as_long_as_they_correspond() {
        let run = |fd: &'static str, addr: &'static str| {
            let addr = format!("\"{addr}\"");
            vec![
                ("hlthunk_open", String::from("\"bus_id\":\"0000:33:00.0\""), fd.to_owned()),
                ("hlthunk_device_memory_map", format!("\"fd\":{fd},\"handle\":1"), addr.clone()),
                ("hlthunk_memory_unmap", format!("\"fd\":{fd},\"addr\":{addr}"), "0".to_owned()),
                ("hlthunk_close", format!("\"fd\":{fd}"), "0".to_owned()),
                ("hlthunk_open", String::from("\"bus_id\":\"0000:33:00.0\""), "11".to_owned()),
            ]
        };
        let borrowed = |run: &'static [(&'static str, String, String)]| {
            run.iter().map(|(n, a, r)| (*n, &**a, &**r, None)).collect::<Vec<_>>()
        };
        let (a, b) = (run("9", "0x100200000000"), run("12", "0x300400000000"));
        let (a, b): (&'static _, &'static _) = (Box::leak(Box::new(a)), Box::leak(Box::new(b)));
        assert_eq!(differences(&borrowed(a), &borrowed(b)), Vec::<String>::new());
        // One unmaps another address than it mapped.
        let mut wrong = b.clone();
        wrong[2].1 = String::from("\"fd\":12,\"addr\":\"0x500600000000\"");
        let wrong: &'static _ = Box::leak(Box::new(wrong));
        let found = differences(&borrowed(a), &borrowed(wrong));
        assert!(found.len() == 1 && found[0].contains("do not stand for each other"), "{found:?}");
    }

    #[test]
    fn an_ignored_hint_is_a_difference() {
        let map = |ret: &'static str| {
            [("hlthunk_device_memory_map", "\"hint\":\"0x100000000\"", ret, None)]
        };
        let found = differences(&map("\"0x100000000\""), &map("\"0x900000000\""));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(differences(&map("\"0x100000000\""), &map("\"0x100000000\"")).len(), 0);
    }

    #[test]
    fn sizes_errnos_and_results_are_compared() {
        let alloc = ("hlthunk_device_memory_alloc", "\"size\":\"0x30000000\"", "1", None);
        let small = ("hlthunk_device_memory_alloc", "\"size\":\"0x28000000\"", "1", None);
        let failed = ("hlthunk_device_memory_alloc", "\"size\":\"0x30000000\"", "0", Some(12));
        assert_eq!(differences(&[alloc], &[alloc]).len(), 0);
        assert!(differences(&[alloc], &[small])[0].contains("size is"));
        let found = differences(&[alloc], &[failed]);
        assert_eq!(found, ["hlthunk_device_memory_alloc: succeeds in A, fails with ENOMEM in B"]);
        let count = |ret| [("hlthunk_get_device_count", "", ret, None)];
        assert!(differences(&count("8"), &count("1"))[0].contains("result is 8 in A, 1 in B"));
    }

    #[test]
    fn missing_calls_do_not_disturb_the_rest() {
        let call = |name: &'static str| (name, "", "0", None);
        let a = ["a", "b", "c", "d", "e", "f"].map(call);
        let b = ["a", "b", "x", "c", "d", "f"].map(call);
        assert_eq!(differences(&a, &b), ["x: only in B", "e: only in A"]);
        assert_eq!(differences(&a, &[]).len(), 6);
        let comparison = compare(&recording(&a), &recording(&a));
        assert_eq!((comparison.compared, comparison.differences.len()), (6, 0));
    }

    #[test]
    fn waits_whose_time_was_over_are_no_difference() {
        let wait = |status: &'static str| ("hlthunk_wait_for_cs", status, "0", None);
        let (busy, done) = (wait("\"status\":1"), wait("\"status\":0,\"idle_polls\":7"));
        assert_eq!(differences(&[busy, busy, done], &[wait("\"status\":0")]).len(), 0);
    }
}
