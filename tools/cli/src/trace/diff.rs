//! Finds where two recordings differ. Pure functions.
//!
//! Calls are compared thread by thread, with threads in the order of their first calls. Addresses, handles, descriptors
//! and sequence numbers differ from run to run: two of them are equal if the resources they stand for
//! ([`super::resources`]) correspond in all threads. Times are not compared; the caller shows them side by side.

use std::collections::{BTreeSet, HashMap};

use serde::Serialize;
use serde_json::{Map, Value};

use super::recording::{Call, Recording};
use super::resources::{self, Kind, Raw, ResolvedCall, Resource, ResourceRef};

/// How far to search for matching calls after two threads diverge.
const AHEAD: usize = 100;
/// How many differences to keep.
const KEPT: usize = 1000;

/// One difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Difference {
    /// The thread's number, from 1.
    pub(crate) thread: usize,
    pub(crate) call: String,
    /// Lines in the files; `None`: only the other file has this call.
    pub(crate) line_a: Option<usize>,
    pub(crate) line_b: Option<usize>,
    pub(crate) what: String,
}

/// The result of a comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Comparison {
    /// Pairs of calls that were compared.
    pub(crate) compared: usize,
    pub(crate) differences: Vec<Difference>,
    /// The number of differences that were not kept.
    pub(crate) more: usize,
}

/// Compares two recordings.
pub(crate) fn compare(a: &Recording, b: &Recording) -> Comparison {
    let mut comparison = Comparison::default();
    let mut same = Correspondence::default();
    let (threads_a, threads_b) = (a.threads(), b.threads());
    let (resolved_a, resolved_b) = (resources::resolve(a), resources::resolve(b));
    let none = u64::MAX;
    for at in 0..threads_a.len().max(threads_b.len()) {
        let of = |resolved, threads: &[u64]| calls(resolved, *threads.get(at).unwrap_or(&none));
        let (a, b) = (of(&resolved_a, &threads_a), of(&resolved_b, &threads_b));
        compare_threads(at + 1, &a, &b, &mut same, &mut comparison);
    }
    comparison
}

fn calls<'a>(resolved: &'a [ResolvedCall<'a>], thread: u64) -> Vec<&'a ResolvedCall<'a>> {
    let of_thread = resolved.iter().filter(|it| it.call.thread == thread);
    of_thread.filter(|it| it.call.name != "load" && !it.call.is_idle_wait()).collect()
}

fn compare_threads(
    thread: usize,
    a: &[&ResolvedCall<'_>],
    b: &[&ResolvedCall<'_>],
    same: &mut Correspondence,
    comparison: &mut Comparison,
) {
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
        for ResolvedCall { call, .. } in &a[at_a..at_a + skip_a] {
            add(call, Some(call.line), None, format!("only in A{}", outcome(call)));
        }
        for ResolvedCall { call, .. } in &b[at_b..at_b + skip_b] {
            add(call, None, Some(call.line), format!("only in B{}", outcome(call)));
        }
        (at_a, at_b) = (at_a + skip_a, at_b + skip_b);
        if let (Some(one), Some(other)) = (a.get(at_a), b.get(at_b)) {
            // Packets are compared together with their submission.
            comparison.compared += usize::from(one.call.is_call());
            for what in same.compare(one, other) {
                add(one.call, Some(one.call.line), Some(other.call.line), what);
            }
            (at_a, at_b) = (at_a + 1, at_b + 1);
        }
    }
}

fn outcome(call: &Call) -> String {
    call.errno.map_or_else(String::new, |errno| format!(", failed with {}", errno_name(errno)))
}

/// How many calls to skip on either side until both continue with the same function, so that as many calls as possible
/// find a match (the longest common subsequence of the calls ahead).
fn next_common<'a>(a: &[&ResolvedCall<'a>], b: &[&ResolvedCall<'a>]) -> (usize, usize) {
    let names = |calls: &[&ResolvedCall<'a>]| -> Vec<&'a str> {
        calls.iter().take(AHEAD).map(|it| &*it.call.name).collect()
    };
    if a.first().zip(b.first()).is_some_and(|(a, b)| a.call.name == b.call.name) {
        return (0, 0);
    }
    let (a, b) = (names(a), names(b));
    // common[i][j]: how many calls match in a[i..] and b[j..].
    let mut common = vec![vec![0_u16; b.len() + 1]; a.len() + 1];
    for (i, one) in a.iter().enumerate().rev() {
        for (j, other) in b.iter().enumerate().rev() {
            common[i][j] = if one == other {
                common[i + 1][j + 1] + 1
            } else {
                common[i + 1][j].max(common[i][j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    while i < a.len() && j < b.len() && a[i] != b[j] {
        if common[i + 1][j] > common[i][j + 1] { i += 1 } else { j += 1 }
    }
    // If one side is at its end, the rest of the other has no match.
    if i < a.len() && j < b.len() { (i, j) } else { (a.len(), b.len()) }
}

/// These depend on timing, or on the program's own numbers: how long to wait, how often a poll found nothing, where the
/// program has its buffers, which descriptor it imports. Hints are covered by comparing their results.
const OF_THE_PROGRAM: [&str; 5] = ["idle_polls", "timeout_us", "ptr", "dmabuf", "hint"];

/// Which resources of A correspond to which of B.
#[derive(Debug, Default)]
struct Correspondence {
    pairs: HashMap<Resource, Resource>,
    taken: HashMap<Resource, Resource>,
}

impl Correspondence {
    /// What differs between two calls of one function.
    fn compare(&mut self, a: &ResolvedCall<'_>, b: &ResolvedCall<'_>) -> Vec<String> {
        let mut differences = Vec::new();
        match (a.call.errno, b.call.errno) {
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
        if a.call.name == "packets" {
            compare_packets(a.call, b.call, &mut differences);
            return differences;
        }
        let mut pair = Pair { a, b, same: self, differences };
        pair.compare_objects("", &a.call.args, &b.call.args);
        if a.call.errno.is_none() && b.call.errno.is_none() {
            pair.compare_values(
                "result",
                resources::kind_of_return(&a.call.name),
                &a.call.ret,
                &b.call.ret,
            );
            pair.compare_hints();
        }
        pair.differences
    }

    /// Whether both are new, or known to correspond.
    fn correspond(&mut self, a: Resource, b: Resource) -> bool {
        match (self.pairs.get(&a), self.taken.get(&b)) {
            (Some(known), _) => *known == b,
            (None, Some(_)) => false,
            (None, None) => {
                self.pairs.insert(a, b);
                self.taken.insert(b, a);
                true
            }
        }
    }
}

/// Two calls of one function.
struct Pair<'a> {
    a: &'a ResolvedCall<'a>,
    b: &'a ResolvedCall<'a>,
    same: &'a mut Correspondence,
    differences: Vec<String>,
}

impl Pair<'_> {
    fn compare_objects(&mut self, path: &str, a: &Map<String, Value>, b: &Map<String, Value>) {
        let keys: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
        for key in keys.into_iter().filter(|key| !OF_THE_PROGRAM.contains(&&***key)) {
            let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            match (a.get(key), b.get(key)) {
                (Some(one), Some(other)) => {
                    let kind = resources::kind(&self.a.call.name, key, a);
                    self.compare_values(&path, kind, one, other);
                }
                (one, _) => {
                    let side = if one.is_some() { "A" } else { "B" };
                    self.differences.push(format!("{path} is only in {side}"));
                }
            }
        }
    }

    fn compare_values(&mut self, path: &str, kind: Option<Kind>, a: &Value, b: &Value) {
        match (a, b, kind) {
            (Value::Object(a), Value::Object(b), _) => self.compare_objects(path, a, b),
            (Value::Array(a), Value::Array(b), _) if a.len() == b.len() => {
                for (at, (a, b)) in a.iter().zip(b).enumerate() {
                    self.compare_values(&format!("{path}[{at}]"), kind, a, b);
                }
            }
            (a, b, Some(kind)) if is_value(a) && is_value(b) => {
                match (Raw::new(kind, a), Raw::new(kind, b)) {
                    (Some(one), Some(other)) => {
                        let references =
                            (self.a.reference(kind, &one), self.b.reference(kind, &other));
                        self.compare_references(path, (a, references.0), (b, references.1));
                    }
                    // Values such as "no address" only equal themselves.
                    _ if a != b => self.compare_values(path, None, a, b),
                    _ => {}
                }
            }
            (a, b, _) if a != b => self.differences.push(format!("{path} is {a} in A, {b} in B")),
            _ => {}
        }
    }

    /// Compares the resources that two values stand for. Values that are unknown in both are equal.
    fn compare_references(
        &mut self,
        path: &str,
        (a, of_a): (&Value, Option<ResourceRef>),
        (b, of_b): (&Value, Option<ResourceRef>),
    ) {
        let same = match (of_a, of_b) {
            (Some(a), Some(b)) => self.same.correspond(a.resource, b.resource),
            (one, other) => one.is_none() && other.is_none(),
        };
        let from = |reference: Option<ResourceRef>| match reference {
            Some(reference) => format!("from line {}", reference.resource.line),
            None => String::from("from nowhere"),
        };
        // Which part of a mapping has a free command buffer depends on timing.
        let offsets =
            (of_a.map(|reference| reference.offset), of_b.map(|reference| reference.offset));
        if !same {
            self.differences.push(format!(
                "{path}: {a} in A ({}) and {b} in B ({}) do not stand for each other",
                from(of_a),
                from(of_b)
            ));
        } else if offsets.0 != offsets.1 && !path.ends_with("cb") {
            self.differences
                .push(format!("{path}: {a} in A and {b} in B are different parts of a mapping"));
        }
    }

    fn compare_hints(&mut self) {
        let honoured = |call: &Call| {
            let hint = call.args.get("hint")?;
            Raw::new(Kind::Mapping, hint).map(|_| *hint == call.ret)
        };
        match (honoured(self.a.call), honoured(self.b.call)) {
            (Some(true), Some(false)) => {
                self.differences.push("the hint is honoured in A, not in B".into())
            }
            (Some(false), Some(true)) => {
                self.differences.push("the hint is honoured in B, not in A".into())
            }
            (Some(_), None) => self.differences.push("only A has a hint".into()),
            (None, Some(_)) => self.differences.push("only B has a hint".into()),
            _ => {}
        }
    }
}

/// Whether it is a number, a text or null.
fn is_value(value: &Value) -> bool {
    !value.is_object() && !value.is_array()
}

/// Packets contain addresses, so only length and control word of each are compared. For a fill, also the value, which
/// takes the place of the source address.
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
        let head = |packet: &[u8]| {
            // Bit 4 of the control word, which is little endian.
            let nibble = packet.get(8).and_then(|digit| char::from(*digit).to_digit(16));
            let is_fill = nibble.is_some_and(|nibble| nibble & 1 == 1);
            let len = if is_fill { 32 } else { 16 };
            String::from_utf8_lossy(&packet[..packet.len().min(len)]).into_owned()
        };
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

    /// A recording of these calls: name, arguments, result, errno. A name may end with `@` and the thread.
    fn recording(calls: &[(&str, &str, &str, Option<i32>)]) -> Recording {
        let mut text = format!("{FIRST}\n");
        for (name, args, ret, errno) in calls {
            let (name, tid) = name.split_once('@').unwrap_or((name, "7"));
            let errno = errno.map_or(String::new(), |errno| format!(",\"errno\":{errno}"));
            text += &format!(
                "{{\"t\":0,\"tid\":{tid},\"call\":\"{name}\",\"args\":{{{args}}},\"ret\":{ret}{errno},\"us\":1}}\n"
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

    /// Maps a host buffer and unmaps it again, first at one address and then at the other.
    fn map_and_unmap(ptrs: [u32; 2], addrs: [&str; 2]) -> Vec<String> {
        let mut calls = Vec::new();
        for (ptr, addr) in ptrs.iter().zip(addrs) {
            calls.push(format!("\"fd\":9,\"ptr\":{ptr},\"size\":4096|\"{addr}\""));
            calls.push(format!("\"fd\":9,\"addr\":\"{addr}\"|0"));
        }
        calls
    }

    #[test]
    fn an_address_that_is_used_again_is_no_difference() {
        let (again, other) = ("0x100000000", "0x200000000");
        let (a, b) =
            (map_and_unmap([64, 64], [again, again]), map_and_unmap([64, 96], [again, other]));
        let calls = |lines: &'static [String]| -> Vec<_> {
            let names = ["hlthunk_host_memory_map", "hlthunk_memory_unmap"];
            let split = lines.iter().map(|line| line.split_once('|').unwrap());
            split
                .zip(names.into_iter().cycle())
                .map(|((args, ret), name)| (name, args, ret, None))
                .collect()
        };
        let (a, b) = (calls(a.leak()), calls(b.leak()));
        assert_eq!(differences(&a, &b), Vec::<String>::new());
        assert_eq!(differences(&b, &a), Vec::<String>::new());
        // The second unmap has the address of the first mapping.
        let mut wrong = b.clone();
        wrong[3].1 = b[1].1;
        let found = differences(&a, &wrong);
        assert!(found.len() == 1 && found[0].contains("do not stand for each other"), "{found:?}");
    }

    #[test]
    fn a_thing_that_another_thread_made_is_followed() {
        let map = |ret| ("hlthunk_host_memory_map@1", "\"fd\":9,\"size\":4096", ret, None);
        let unmap = |args| ("hlthunk_memory_unmap@2", args, "0", None);
        let maps = [map("\"0x100000000\""), map("\"0x200000000\"")];
        let first = [maps[0], maps[1], unmap("\"fd\":9,\"addr\":\"0x100000000\"")];
        let second = [maps[0], maps[1], unmap("\"fd\":9,\"addr\":\"0x200000000\"")];
        assert_eq!(differences(&first, &first).len(), 0);
        let found = differences(&first, &second);
        assert!(found.len() == 1 && found[0].contains("do not stand for each other"), "{found:?}");
        // One thread unmaps and the other maps again; in one of the runs at the same address.
        let again = |ret| [map("\"0x100000000\""), first[2], map(ret), unmap("\"fd\":9")];
        assert_eq!(differences(&again("\"0x100000000\""), &again("\"0x300000000\"")).len(), 0);
    }

    #[test]
    fn two_cards_may_have_the_same_handles() {
        let run = |second: &'static str, map: &'static str| {
            let alloc = |args, ret| ("hlthunk_device_memory_alloc", args, ret, None);
            let map = ("hlthunk_device_memory_map", map, "\"0x900000000\"", None);
            [alloc("\"fd\":9", "1"), alloc("\"fd\":10", second), map]
        };
        let same = run("1", "\"fd\":10,\"handle\":1");
        assert_eq!(differences(&same, &run("2", "\"fd\":10,\"handle\":2")).len(), 0);
        assert_eq!(
            differences(&same, &run("2", "\"fd\":9,\"handle\":1")).len(),
            2,
            "card and memory"
        );
    }

    #[test]
    fn another_part_of_a_mapping_is_a_difference_but_for_command_buffers() {
        let map = ("hlthunk_host_memory_map", "\"fd\":9,\"size\":8192", "\"0x100000000\"", None);
        let export = |args| [map, ("hlthunk_device_memory_export_dmabuf_fd", args, "12", None)];
        let start = export("\"fd\":9,\"addr\":\"0x100000000\"");
        let inside = export("\"fd\":9,\"addr\":\"0x100001000\"");
        assert!(differences(&start, &inside)[0].contains("different parts of a mapping"));
        let submit = |args| [map, ("hlthunk_command_submission", args, "0", None)];
        let one = submit("\"fd\":9,\"chunks\":[{\"flags\":1,\"cb\":\"0x100000000\"}]");
        let other = submit("\"fd\":9,\"chunks\":[{\"flags\":1,\"cb\":\"0x100001000\"}]");
        let outside = submit("\"fd\":9,\"chunks\":[{\"flags\":1,\"cb\":\"0x100002000\"}]");
        assert_eq!(differences(&one, &other).len(), 0);
        assert!(differences(&one, &outside)[0].contains("(from nowhere)"));
    }

    #[test]
    fn the_value_of_a_fill_is_compared_and_addresses_are_not() {
        let packet = |ctl: &str, source: &str| {
            let bytes = format!("80000000{ctl}{source}0000003000500110");
            let args = format!("\"queue\":0,\"size\":24,\"bytes\":\"{bytes}\"");
            [("packets", &*args.leak(), "0", None)]
        };
        let (fill, copy) = ("100000a9", "000000a9");
        let (one, other) = ("5a5a5a5a5a5a5a5a", "5b5b5b5b5b5b5b5b");
        assert_eq!(differences(&packet(fill, one), &packet(fill, one)).len(), 0);
        assert!(differences(&packet(fill, one), &packet(fill, other))[0].contains(other));
        assert_eq!(differences(&packet(copy, one), &packet(copy, other)).len(), 0);
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
