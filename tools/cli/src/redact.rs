//! Removes from reports the names of users, of the machine, and of other processes.

use std::ffi::CStr;
use std::path::Path;

use serde_json::Value;

use crate::failure::Failure;
use crate::saved_file;

/// Names to replace, and their replacements.
type Names = Vec<(String, &'static str)>;

/// Writes a report that can be given to others.
pub(crate) fn save(path: &Path, report: &Value) -> Result<(), Failure> {
    let mut report = report.clone();
    remove_from(&mut report);
    let text = serde_json::to_string_pretty(&report).expect("representable in JSON");
    saved_file::replace(path, &(text + "\n"))
}

/// Replaces private names in the findings of a report. Its keys and fixed words stay.
fn remove_from(report: &mut Value) {
    let mut names = Names::new();
    commands(report, &mut names);
    names.extend(own_names());
    for finding in report["checks"].as_array_mut().into_iter().flatten() {
        for key in ["found", "remedy", "data"] {
            remove(&mut finding[key], &names);
        }
    }
}

fn remove(value: &mut Value, names: &Names) {
    match value {
        Value::String(text) => *text = without_names(text, names),
        Value::Array(values) => values.iter_mut().for_each(|value| remove(value, names)),
        Value::Object(fields) => {
            for (key, value) in fields {
                match value {
                    Value::Array(commands) if key == "held_by" => commands.fill("<process>".into()),
                    _ => remove(value, names),
                }
            }
        }
        _ => {}
    }
}

/// The commands of processes that have cards open, as the text of a finding shows them.
fn commands(value: &Value, names: &mut Names) {
    match value {
        Value::Array(values) => values.iter().for_each(|value| commands(value, names)),
        Value::Object(fields) => {
            fields.values().for_each(|value| commands(value, names));
            let held_by = fields.get("held_by").and_then(Value::as_array).into_iter().flatten();
            let shown = held_by.filter_map(Value::as_str).map(|name| format!("{name} (pid"));
            names.extend(shown.map(|shown| (shown, "<process> (pid")));
        }
        _ => {}
    }
}

/// Home directory, machine and user.
fn own_names() -> Names {
    let var = |name: &str| std::env::var(name).ok();
    let home = var("HOME").map(|home| home.trim_end_matches('/').to_owned());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let short = host.split('.').next().map(str::to_owned);
    // SAFETY: these calls only return numbers.
    let users = unsafe { [libc::getuid(), libc::geteuid()] };
    let mut names = vec![(home, "<home>"), (Some(host), "<host>"), (short, "<host>")];
    names.extend(["USER", "LOGNAME", "SUDO_USER"].map(|name| (var(name), "<user>")));
    names.extend(users.map(|user| (user_name(user), "<user>")));
    let names = names.into_iter().filter_map(|(name, by)| Some((name?, by)));
    names.filter(|(name, _)| !name.is_empty() && name != "root").collect()
}

fn user_name(user: libc::uid_t) -> Option<String> {
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: a C structure of numbers and pointers, so all zeroes is a valid value.
    let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
    let mut found = std::ptr::null_mut();
    let (start, len) = (buffer.as_mut_ptr(), buffer.len());
    // SAFETY: entry, buffer and result are valid during the call, and the buffer has the given length.
    let rc = unsafe { libc::getpwuid_r(user, &mut entry, start, len, &mut found) };
    if rc != 0 || found.is_null() || entry.pw_name.is_null() {
        return None;
    }
    // SAFETY: after success it is a C string in the buffer.
    Some(unsafe { CStr::from_ptr(entry.pw_name) }.to_string_lossy().into_owned())
}

fn without_names(text: &str, names: &Names) -> String {
    let text = names.iter().fold(text.to_owned(), |text, (name, by)| replace(&text, name, by));
    without_homes(&without_homes(&text, "/home/"), "/Users/")
}

/// Replaces a name where it is a whole word. A name of one or two letters may be a word of the report, so it is only
/// replaced where it is a whole component of a path.
fn replace(text: &str, name: &str, by: &str) -> String {
    let inside = |c: char| if name.len() > 2 { c.is_alphanumeric() || c == '_' } else { c != '/' };
    let (mut replaced, mut done) = (String::new(), 0);
    for (at, _) in text.match_indices(name) {
        let end = at + name.len();
        let around = [text[..at].chars().next_back(), text[end..].chars().next()];
        if !around.into_iter().flatten().any(inside) {
            replaced += &text[done..at];
            replaced += by;
            done = end;
        }
    }
    replaced + &text[done..]
}

/// Replaces the names of home directories of any user.
fn without_homes(text: &str, homes: &str) -> String {
    let mut parts = text.split(homes);
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let ends = |c: char| c.is_whitespace() || "/:,;\"'()".contains(c);
        let end = part.find(ends).unwrap_or(part.len());
        replaced += homes;
        replaced += if end > 0 { "<user>" } else { "" };
        replaced += &part[end..];
    }
    replaced
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_names_are_replaced_and_parts_of_words_stay() {
        let names = [("/data/ada", "<home>"), ("ada", "<user>"), ("me", "<user>")];
        let names = names.map(|(name, by)| (name.to_owned(), by)).to_vec();
        for (text, expected) in [
            ("/data/ada/ucx, /scratch/ada/lib", "<home>/ucx, /scratch/<user>/lib"),
            ("/data/adam and adapter of ada", "/data/adam and adapter of <user>"),
            ("tell me: /scratch/me/x", "tell me: /scratch/<user>/x"),
            ("/home/bob/lib:/mnt/home/eve", "/home/<user>/lib:/mnt/home/<user>"),
            ("(/Users/bob), /home/, /home", "(/Users/<user>), /home/, /home"),
        ] {
            assert_eq!(without_names(text, &names), expected);
        }
    }

    #[test]
    fn commands_of_other_processes_are_replaced() {
        let mut report = json!({"report": "doctor", "checks": [
            {"check": "cards", "found": "it is held by secret (pid 12), x y (pid 3)", "remedy": "",
             "data": {"cards": [{"held_by": ["secret", "x y"]}]}},
            {"check": "copy", "found": "held by secret (pid 12)", "remedy": "secret", "data": null},
        ]});
        remove_from(&mut report);
        let checks = &report["checks"];
        assert_eq!(checks[0]["found"], "it is held by <process> (pid 12), <process> (pid 3)");
        assert_eq!(checks[0]["data"]["cards"][0]["held_by"], json!(["<process>", "<process>"]));
        assert_eq!(checks[1]["found"], "held by <process> (pid 12)");
    }
}
